//! A worker's I/O thread: the lanes it drives, what it is told, and what all of them share.

use crate::WorkerJob;
use crate::clock::Clock;
use crate::failure::{Failure, invalid};
use crate::io_loop::Shard;
use crate::mailbox::Post;
use crate::part::{Counts, Part};
use crate::ports::Ports;
use crate::statistics::IoStatistics;
use crate::train_socket::Peer;
use fanin_plan::Placement;
use fanin_protocol::atp::{AtpJobConfig, AtpWorker, AtpWorkerPlan};
use fanin_protocol::dlcp;
use fanin_protocol::goat::{GoatJobConfig, GoatWorker, GoatWorkerPlan};
use fanin_protocol::switchml::{JobConfig, Worker, WorkerPlan};
use fanin_protocol::{Lanes, WorkerEvent, WorkerMachine, WorkerStatistics};
use fanin_wire::{JobId, Key, Operation, ShardId, SlotIndex};
use std::any::Any;
use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) posts: Posts,
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

/// A mailbox a thread, which say what machines empty them.
#[derive(Debug)]
pub(crate) enum Posts {
    SwitchMl(Vec<Post<Command<Worker<Peer, Part>>>>),
    Atp(Vec<Post<Command<AtpWorker<Peer, Part>>>>),
    Goat(Vec<Post<Command<GoatWorker<Peer, Part>>>>),
    Dlcp(Vec<Post<Command<dlcp::Worker<Peer, Part>>>>),
}

/// A lane: which thread drives it, and its place among the lanes of that thread. Both are functions of service and shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId {
    pub(crate) thread: usize,
    pub(crate) place: usize,
}

/// Counters of a thread: its lanes', and its sockets'.
pub(crate) type ThreadStatistics = (Vec<WorkerStatistics>, IoStatistics);

/// What a thread is told that runs lanes of `M`.
pub(crate) enum Command<M: WorkerMachine> {
    Any(AnyCommand),
    Suspend {
        place: usize,
        reply: SyncSender<M::Memory>,
    },
    Resume {
        place: usize,
        plan: M::Plan,
        at: (Peer, (JobId, Key)),
        ports: Option<Box<Ports>>,
        reply: SyncSender<()>,
    },
}

/// What a thread is told whatever it runs.
pub(crate) enum AnyCommand {
    /// What its lanes do of one submission, in order.
    Submit(Vec<LanePart>),
    Fail(Failure),
    Statistics(SyncSender<ThreadStatistics>),
    Stop,
}

/// What one lane does of a submission.
pub(crate) struct LanePart {
    pub(crate) place: usize,
    pub(crate) part: Part,
    pub(crate) operation: Operation,
}

impl Posts {
    pub(crate) fn threads(&self) -> usize {
        match self {
            Self::SwitchMl(posts) => posts.len(),
            Self::Atp(posts) => posts.len(),
            Self::Goat(posts) => posts.len(),
            Self::Dlcp(posts) => posts.len(),
        }
    }

    /// Gives the command back, as something to drop, when the thread has ended.
    pub(crate) fn send(&self, thread: usize, command: AnyCommand) -> Result<(), Box<dyn Any>> {
        match self {
            Self::SwitchMl(posts) => {
                posts[thread].send(Command::Any(command)).map_err(|refused| Box::new(refused) as _)
            }
            Self::Atp(posts) => {
                posts[thread].send(Command::Any(command)).map_err(|refused| Box::new(refused) as _)
            }
            Self::Goat(posts) => {
                posts[thread].send(Command::Any(command)).map_err(|refused| Box::new(refused) as _)
            }
            Self::Dlcp(posts) => {
                posts[thread].send(Command::Any(command)).map_err(|refused| Box::new(refused) as _)
            }
        }
    }

    /// The lane stops sending and taking. Returns how many exchanges each slot has completed: the others have no slots.
    pub(crate) fn suspend(&self, LaneId { thread, place }: LaneId) -> Vec<u32> {
        match self {
            Self::SwitchMl(posts) => {
                posts[thread].ask(|reply| Command::Suspend { place, reply }).unwrap_or_default()
            }
            Self::Atp(posts) => posts[thread]
                .ask(|reply| Command::Suspend { place, reply })
                .map(|()| Vec::new())
                .unwrap_or_default(),
            Self::Goat(posts) => posts[thread]
                .ask(|reply| Command::Suspend { place, reply })
                .map(|()| Vec::new())
                .unwrap_or_default(),
            Self::Dlcp(posts) => posts[thread]
                .ask(|reply| Command::Suspend { place, reply })
                .map(|()| Vec::new())
                .unwrap_or_default(),
        }
    }

    /// The lane goes on, through other sockets if they are given.
    pub(crate) fn resume(
        &self,
        LaneId { thread, place }: LaneId,
        job: WorkerJob,
        shard: ShardId,
        switch: Peer,
        ports: Option<Box<Ports>>,
        restore: &[SlotIndex],
    ) -> io::Result<()> {
        let at = (switch, job.identity());
        let resumed = match (self, job) {
            (Self::SwitchMl(posts), WorkerJob::SwitchMl { config, place: worker, .. }) => {
                let config = JobConfig { shard, ..config };
                let plan = WorkerPlan { config, switch, place: worker, restore: restore.to_vec() };
                posts[thread].ask(|reply| Command::Resume { place, plan, at, ports, reply })
            }
            (Self::Atp(posts), WorkerJob::Atp { config, directions }) => {
                let AtpJobConfig { id, key, generation, .. } = config;
                let plan = AtpWorkerPlan { id, key, generation, directions, upstream: switch };
                posts[thread].ask(|reply| Command::Resume { place, plan, at, ports, reply })
            }
            (Self::Goat(posts), WorkerJob::Goat { config, assignment }) => {
                let GoatJobConfig { id, key, generation, .. } = config;
                let plan = GoatWorkerPlan { id, key, generation, directions: assignment, upstream: switch };
                posts[thread].ask(|reply| Command::Resume { place, plan, at, ports, reply })
            }
            (Self::Dlcp(posts), WorkerJob::Dlcp { config, place: worker }) => {
                let config = dlcp::JobConfig { shard, ..config };
                let plan = dlcp::WorkerPlan { config, place: worker, server: switch };
                posts[thread].ask(|reply| Command::Resume { place, plan, at, ports, reply })
            }
            _ => return Err(invalid("a worker goes on in no job of another protocol")),
        };
        resumed.ok_or_else(|| io::Error::other(Failure::Stopped))
    }
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
        for thread in 0..self.posts.threads() {
            let _ = self.posts.send(thread, AnyCommand::Fail(failure.clone()));
        }
    }
}

pub(crate) struct WorkerShard<M: WorkerMachine> {
    pub(crate) lanes: Lanes<M>,
    /// The service of each of them.
    pub(crate) services: Vec<usize>,
    pub(crate) shared: Arc<Shared>,
    /// That of all lanes, when it was told last.
    pub(crate) progress: u64,
}

impl<M: WorkerMachine> Drop for WorkerShard<M> {
    fn drop(&mut self) {
        // The other lanes hold parts of the same tensors, and would wait for what nobody sends.
        if thread::panicking() {
            self.shared.fail(Failure::of_drop());
        }
    }
}

impl<M: WorkerMachine<Address = Peer, Tensor = Part>> Shard for WorkerShard<M> {
    type Machine = Lanes<M>;
    type Command = Command<M>;

    fn machine(&mut self) -> &mut Lanes<M> {
        &mut self.lanes
    }

    /// A reply fails when nobody waits for it any more; that is no concern of ours.
    fn command(&mut self, command: Command<M>, ports: &mut Ports) -> ControlFlow<()> {
        match command {
            Command::Any(AnyCommand::Submit(parts)) => {
                for LanePart { place, part, operation } in parts {
                    if let Some(lane) = self.lanes.lane(place) {
                        lane.machine.submit(part, operation);
                    }
                }
            }
            Command::Any(AnyCommand::Fail(failure)) => {
                for lane in self.lanes.iter_mut() {
                    for part in lane.machine.abandon() {
                        part.fail(failure.clone());
                    }
                }
            }
            Command::Any(AnyCommand::Statistics(reply)) => {
                let lanes = self.lanes.iter_mut().map(|lane| lane.machine.statistics()).collect();
                let _ = reply.send((lanes, ports.statistics()));
            }
            Command::Any(AnyCommand::Stop) => return ControlFlow::Break(()),
            Command::Suspend { place, reply } => {
                if let Some(lane) = self.lanes.lane(place) {
                    let _ = reply.send(lane.machine.suspend());
                }
            }
            Command::Resume { place, plan, at, ports: new, reply } => {
                if let Some(new) = new {
                    ports.replace(*new);
                }
                if let Some(lane) = self.lanes.lane(place) {
                    let (peer, (job, key)) = at;
                    (lane.peer, lane.job) = (peer, job);
                    ports.seals.add(job, key);
                    lane.machine.resume(Clock.now(), plan);
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
