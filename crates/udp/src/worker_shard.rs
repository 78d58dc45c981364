//! A worker's I/O thread: the lanes it drives, what it is told, and what all of them share.

use crate::Membership;
use crate::clock::Clock;
use crate::failure::Failure;
use crate::io_loop::Shard;
use crate::mailbox::Post;
use crate::part::{Counts, Part};
use crate::ports::Ports;
use crate::statistics::IoStatistics;
use crate::train_socket::Peer;
use fanin_plan::Placement;
use fanin_protocol::{Lanes, Machines, WorkerEvent, WorkerMachine, WorkerStatistics};
use fanin_wire::{Operation, ShardId};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug)]
pub(crate) struct Shared {
    /// A mailbox a thread.
    pub(crate) posts: Vec<Post<Command>>,
    /// Held while an all-reduce is handed to the lanes, so that all lanes see the same order.
    pub(crate) intake: Mutex<Intake>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) progress: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) placement: Placement,
    /// Why nothing is taken any more.
    pub(crate) ended: Option<Failure>,
}

/// A lane: which thread drives it, and its place among the lanes of that thread. Both are functions of service and shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId {
    pub(crate) thread: usize,
    pub(crate) place: usize,
}

/// Counters of a thread: its lanes', and its sockets'.
pub(crate) type ThreadStatistics = (Vec<WorkerStatistics>, IoStatistics);

/// What a thread is told, whatever it runs.
pub(crate) enum Command {
    /// What its lanes do of one submission, in order.
    Submit(Vec<LanePart>),
    Fail(Failure),
    Statistics(SyncSender<ThreadStatistics>),
    Stop,
    /// A lane stops sending and taking. Says what its protocol counts.
    Suspend {
        place: usize,
        reply: SyncSender<Vec<u32>>,
    },
    Resume(Box<Resume>),
}

/// How a lane goes on.
pub(crate) struct Resume {
    pub(crate) place: usize,
    pub(crate) job: Membership,
    pub(crate) shard: ShardId,
    pub(crate) peer: Peer,
    /// Other sockets, if it gets some.
    pub(crate) ports: Option<Ports>,
    pub(crate) reply: SyncSender<()>,
}

/// What one lane does of a submission.
pub(crate) struct LanePart {
    pub(crate) place: usize,
    pub(crate) part: Part,
    pub(crate) operation: Operation,
}

impl Shared {
    pub(crate) fn intake(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fail(&self, failure: Failure) {
        let mut intake = self.intake();
        if intake.ended.is_some() {
            return;
        }
        intake.ended = Some(failure.clone());
        // Under the lock: what was submitted before is in the mailboxes before this.
        for post in &self.posts {
            let _ = post.send(Command::Fail(failure.clone()));
        }
    }
}

/// The lanes of one thread, which are all of one protocol.
pub(crate) struct WorkerShard<P: Machines<Peer, Part>> {
    pub(crate) lanes: Lanes<P::Worker>,
    /// The service of each of them.
    pub(crate) services: Vec<usize>,
    pub(crate) shared: Arc<Shared>,
    /// That of all lanes, when it was told last.
    pub(crate) progress: u64,
}

impl<P: Machines<Peer, Part>> Drop for WorkerShard<P> {
    fn drop(&mut self) {
        // The other lanes hold parts of the same tensors, and would wait for what nobody sends.
        if thread::panicking() {
            self.shared.fail(Failure::of_drop());
        }
    }
}

impl<P: Machines<Peer, Part>> Shard for WorkerShard<P> {
    type Machine = Lanes<P::Worker>;
    type Command = Command;

    fn machine(&mut self) -> &mut Self::Machine {
        &mut self.lanes
    }

    /// A reply fails when nobody waits for it any more; that is no concern of ours.
    fn command(&mut self, command: Command, ports: &mut Ports) -> ControlFlow<()> {
        match command {
            Command::Submit(parts) => {
                for LanePart { place, part, operation } in parts {
                    if let Some(lane) = self.lanes.lane(place) {
                        lane.machine.submit(part, operation);
                    }
                }
            }
            Command::Fail(failure) => {
                for lane in self.lanes.iter_mut() {
                    for part in lane.machine.abandon() {
                        part.fail(failure.clone());
                    }
                }
            }
            Command::Statistics(reply) => {
                let lanes = self.lanes.iter_mut().map(|lane| lane.machine.statistics()).collect();
                let _ = reply.send((lanes, ports.statistics()));
            }
            Command::Stop => return ControlFlow::Break(()),
            Command::Suspend { place, reply } => {
                if let Some(lane) = self.lanes.lane(place) {
                    let _ = reply.send(lane.machine.suspend());
                }
            }
            Command::Resume(resume) => {
                let Resume { place, job, shard, peer, ports: new, reply } = *resume;
                // Without an answer the driver says that the worker has ended: it asks for no other protocol.
                let Some(terms) = job.terms::<P::Terms>() else { return ControlFlow::Continue(()) };
                if let Some(new) = new {
                    ports.replace(new);
                }
                if let Some(lane) = self.lanes.lane(place) {
                    (lane.peer, lane.job) = (peer, job.id());
                    ports.seals.add(job.id(), job.key());
                    lane.machine.resume(Clock.now(), P::plan(terms, shard, peer));
                    let _ = reply.send(());
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn event(&mut self, (place, event): (usize, WorkerEvent<Part>)) {
        match event {
            WorkerEvent::Completed(part, times) => part.complete(times),
            // The other lanes' tensors are parts of the same ones.
            WorkerEvent::Aborted(reason) => {
                self.shared.fail(Failure::Aborted { service: self.services[place], reason });
            }
        }
    }

    fn progress(&mut self) {
        let now = self.lanes.iter_mut().map(|lane| lane.machine.progress()).sum();
        let before = std::mem::replace(&mut self.progress, now);
        self.shared.progress.fetch_add(now - before, Ordering::Relaxed);
    }
}
