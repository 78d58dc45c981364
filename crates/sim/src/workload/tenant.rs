//! A job as its system sees it, and a worker's process as the machine sees it that sums for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use fanin_wire::{AbortReason, JobId, Key};

use super::checker::{Referee, Violation};
use super::job::{Contents, Job, token};
use super::scenario::{JobPlan, Scenario};
use super::values::{Gradient, Inside, Latest, mix};
use crate::net::{ActorId, Context, NodeId};

const FIRST_WORKER_PORT: u16 = 5000;

/// A job, to its system.
#[derive(Clone)]
pub struct Tenant {
    pub(crate) job: Rc<RefCell<Job>>,
    pub(crate) scenario: Rc<Scenario>,
    pub(crate) index: usize,
    pub(crate) seed: u64,
    pub(crate) referee: Rc<Referee>,
    pub(crate) ports: Rc<Ports>,
}

/// The last port that a worker's machine took, by host.
#[derive(Default)]
pub(crate) struct Ports(RefCell<BTreeMap<NodeId, u16>>);

impl Tenant {
    /// The scenario's entry for it.
    #[must_use]
    pub fn plan(&self) -> &JobPlan {
        &self.scenario.jobs[self.index]
    }

    /// The id under which one part of its tensors is summed. Ids are drawn at random on admission;
    /// here they are numbers that hash differently.
    #[must_use]
    pub fn id(&self, part: usize) -> JobId {
        let mixed = mix(self.seed ^ (self.index as u64) << 32 ^ (part as u64) << 52);
        JobId((mixed & 0xffff_ffff) as u32)
    }

    /// The key of one part, which is not another's.
    #[must_use]
    pub fn key(&self, part: usize) -> Key {
        Key::new(u128::from(self.id(part).0) << 64 | 1)
    }

    /// Whether all of its workers have vanished.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.job.borrow().dead
    }

    /// The machine of a worker's part, while no fault has taken its place.
    ///
    /// # Panics
    /// When the worker's machines have not been added.
    #[must_use]
    pub fn machine(&self, rank: usize, part: usize) -> ActorId {
        self.job.borrow().workers[rank].actors[part]
    }

    /// All workers' machines.
    #[must_use]
    pub fn machines(&self) -> Vec<ActorId> {
        self.job.borrow().workers.iter().flat_map(|worker| worker.actors.clone()).collect()
    }

    /// The place of a packet in the stream of tensors: the packet's tensor, and its number within
    /// that.
    #[must_use]
    pub fn locate(&self, packet: u64, elements: usize) -> (u64, u32) {
        self.job.borrow().locate(packet, elements)
    }

    /// Elements of a tensor, whether they are there or not.
    #[must_use]
    pub fn elements(&self, tensor: u64) -> usize {
        self.job.borrow().elements(tensor)
    }

    /// Which of the model's variables a tensor is the gradient of, counted from the front; without
    /// a model each is another.
    #[must_use]
    pub fn variable(&self, tensor: u64) -> u64 {
        self.job.borrow().variable(tensor)
    }

    /// Which elements of a tensor are one part's.
    #[must_use]
    pub fn range(&self, tensor: u64, part: usize) -> Range<usize> {
        self.job.borrow().range(tensor, part)
    }

    /// Elements of each tensor of an iteration, or without a model of one.
    pub(crate) fn iteration(&self) -> Vec<usize> {
        self.job.borrow().iteration()
    }

    /// A rule that a service's parameters break at the end: [`Job::check_parameters`].
    pub(crate) fn check_parameters(
        &self,
        tensor: u64,
        numbers: &Gradient,
        piece: &Latest,
    ) -> Option<Violation> {
        self.job.borrow().check_parameters(tensor, numbers, piece)
    }

    pub(crate) fn parts(&self) -> usize {
        self.plan().system.parts(self.plan().workers.len())
    }

    pub(crate) fn process(&self, rank: usize, part: usize) -> Process {
        Process { tenant: self.clone(), rank, part, begins: Begins::First }
    }

    /// Ends the run: a rule was broken.
    pub fn violated(&self, context: &mut Context<'_>, violation: Violation) {
        self.referee.stop(context, violation);
    }
}

/// A worker's process, to the machine that sums one part of its tensors.
pub struct Process {
    tenant: Tenant,
    rank: usize,
    part: usize,
    begins: Begins,
}

/// The knowledge of a worker's process when it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begins {
    /// Nothing has happened yet.
    First,
    /// Everything but its timers.
    Again,
    /// The job has come to this tensor, and summed so many of its elements without the rank.
    InPlaceOfAnother(u64, usize),
}

impl Process {
    /// The notice by which its machine hears that [`Self::next`] has something. Notices are lost
    /// while a node is away; the next one brings everything.
    pub const SUBMIT: u64 = token::SUBMIT;

    /// Its job.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Its rank.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Which part of each tensor is the machine's.
    #[must_use]
    pub const fn part(&self) -> usize {
        self.part
    }

    /// Its host.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.tenant.plan().workers[self.rank]
    }

    /// A port of its host that no worker's machine has had: with each call another.
    #[must_use]
    pub fn port(&self) -> u16 {
        let mut ports = self.tenant.ports.0.borrow_mut();
        let port = ports.entry(self.node()).or_insert(FIRST_WORKER_PORT - 1);
        *port += 1;
        *port
    }

    /// The machine was started ([`Actor::start`](crate::net::Actor::start)), for the first time or
    /// again.
    pub fn started(&mut self, context: &mut Context<'_>) {
        // The first part's timers drive the program.
        if self.part != 0 {
            return;
        }
        match std::mem::replace(&mut self.begins, Begins::Again) {
            Begins::First => self.tenant.job.borrow().schedule_start(context),
            Begins::Again => self.tenant.job.borrow_mut().restarted(context, self.rank),
            Begins::InPlaceOfAnother(tensor, lost) => {
                self.tenant.job.borrow_mut().respawned(context, self.rank, tensor, lost);
            }
        }
    }

    /// A timer of the machine's actor is due that the machine did not set. Tokens below 100 are the
    /// process'.
    pub fn timer(&self, context: &mut Context<'_>, token: u64) {
        self.tenant.job.borrow_mut().told(context, self.rank, token);
    }

    /// The gradient to be summed next.
    #[must_use]
    pub fn next(&self) -> Option<Gradient> {
        self.tenant.job.borrow_mut().next_part(self.rank, self.part)
    }

    /// A sum is there, in place of what was to be summed. It is checked here.
    pub fn completed(&self, context: &mut Context<'_>, sum: Gradient) {
        self.tenant.job.borrow_mut().completed(context, (self.rank, self.part), sum, Contents::All);
    }

    /// The same of a sum that may lack contributions: it is checked to be that of who is said to be
    /// in.
    pub fn completed_inside(&self, context: &mut Context<'_>, sum: Gradient, inside: &Inside) {
        let contents = Contents::Inside(inside);
        self.tenant.job.borrow_mut().completed(context, (self.rank, self.part), sum, contents);
    }

    /// The latest parameters are there, in place of a delta. Each piece is checked: it must be the
    /// deltas that are said to be in it.
    pub(crate) fn completed_latest(&self, context: &mut Context<'_>, latest: Gradient, pieces: &[Latest]) {
        let contents = Contents::Latest(pieces);
        self.tenant.job.borrow_mut().completed(context, (self.rank, self.part), latest, contents);
    }

    /// Something came that the worker lacked: without that for long, the job has stalled.
    pub fn progressed(&self, context: &Context<'_>) {
        self.tenant.job.borrow_mut().progressed(context.now());
    }

    /// The machine was told that the job is over, for which nothing in a scenario is a reason.
    pub fn aborted(&self, context: &mut Context<'_>, reason: AbortReason) {
        let job = self.tenant.plan().name.clone();
        self.tenant.violated(context, Violation::Aborted { job, rank: self.rank, reason });
    }

    /// It takes the rank of one that died. The job has come to this tensor, and summed so many of
    /// its elements meanwhile.
    pub const fn in_place_of_another(&mut self, tensor: u64, lost: usize) {
        self.begins = Begins::InPlaceOfAnother(tensor, lost);
    }
}
