//! Machines of any protocol, as the world drives them.

use std::any::Any;
use std::fmt::Debug;

use fanin_protocol::{
    Endpoint, Instant, JobAborted, JobProgress, Received, Summer, Transmit, Verdict, WorkerEvent,
    WorkerMachine, WorkerStatistics,
};
use fanin_wire::{JobId, Operation};

use crate::Numbered;

/// What the world asks of a machine that sums: what [`Summer`] has, without its types.
pub trait Summing: Endpoint<Address = usize, Event = JobAborted> + Any + Debug {
    /// How far a job is.
    fn progress(&self, job: JobId) -> Option<JobProgress>;
    /// Packets since the start.
    fn counted(&self) -> Received;
}

impl<M: Summer<Address = usize> + Any + Debug> Summing for M {
    fn progress(&self, job: JobId) -> Option<JobProgress> {
        self.job_progress(job)
    }

    fn counted(&self) -> Received {
        self.received()
    }
}

/// What the world asks of a worker: what [`WorkerMachine`] has, without its types.
pub trait Working: Endpoint<Address = usize, Event = WorkerEvent<Numbered>> + Any + Debug {
    /// Appends a tensor to the stream.
    fn take_in(&mut self, tensor: Numbered, operation: Operation);
    /// Counters since the start.
    fn counted(&self) -> WorkerStatistics;
    /// Tensors that are not completed, and packets that helped.
    fn standing(&self) -> (usize, u64);
}

impl<M: WorkerMachine<Address = usize, Tensor = Numbered> + Any + Debug> Working for M {
    fn take_in(&mut self, tensor: Numbered, operation: Operation) {
        self.submit(tensor, operation);
    }

    fn counted(&self) -> WorkerStatistics {
        self.statistics()
    }

    fn standing(&self) -> (usize, u64) {
        (self.outstanding(), self.progress())
    }
}

/// A machine of the world.
#[derive(Debug)]
pub enum Machine {
    /// A server, or a switch.
    Summer(Box<dyn Summing>),
    /// A worker.
    Worker(Box<dyn Working>),
}

impl Machine {
    /// A server, or a switch.
    pub fn summer(machine: impl Summing) -> Self {
        Self::Summer(Box::new(machine))
    }

    /// A worker.
    pub fn worker(machine: impl Working) -> Self {
        Self::Worker(Box::new(machine))
    }

    /// The only place in which packets are handed to machines.
    pub(crate) fn handle_packet(&mut self, now: Instant, from: usize, packet: &[u8]) -> Verdict {
        match self {
            Self::Summer(machine) => machine.handle_packet(now, from, packet),
            Self::Worker(machine) => machine.handle_packet(now, from, packet),
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        match self {
            Self::Summer(machine) => machine.handle_timeout(now),
            Self::Worker(machine) => machine.handle_timeout(now),
        }
    }

    pub(crate) fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, usize>> {
        match self {
            Self::Summer(machine) => machine.poll_transmit(now, train),
            Self::Worker(machine) => machine.poll_transmit(now, train),
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        match self {
            Self::Summer(machine) => machine.poll_timeout(),
            Self::Worker(machine) => machine.poll_timeout(),
        }
    }

    /// The machine itself, if it is an `M`.
    pub(crate) fn downcast<M: Any>(&self) -> Option<&M> {
        let machine: &dyn Any = match self {
            Self::Summer(machine) => &**machine,
            Self::Worker(machine) => &**machine,
        };
        machine.downcast_ref()
    }

    pub(crate) fn downcast_mut<M: Any>(&mut self) -> Option<&mut M> {
        let machine: &mut dyn Any = match self {
            Self::Summer(machine) => &mut **machine,
            Self::Worker(machine) => &mut **machine,
        };
        machine.downcast_mut()
    }

    pub(crate) fn received(&self) -> Received {
        match self {
            Self::Summer(machine) => machine.counted(),
            Self::Worker(machine) => machine.counted().received,
        }
    }

    /// What it counted, for a failure.
    pub(crate) fn standing(&self, jobs: &[JobId]) -> String {
        match self {
            Self::Summer(machine) => {
                let jobs: Vec<_> = jobs.iter().map(|job| machine.progress(*job)).collect();
                format!("{:?} {jobs:?}", machine.counted())
            }
            Self::Worker(machine) => format!("{:?} {:?}", machine.standing(), machine.counted()),
        }
    }
}
