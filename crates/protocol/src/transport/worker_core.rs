//! The core of every worker, whichever protocol it speaks: its tensors, whether it runs, what it
//! counts and tells its owner.
//!
//! The content of its packets, and which of them goes next, is the protocol's.

use alloc::collections::VecDeque;
use fanin_wire::{Abort, AbortReason, Key, Operation, Preamble};

use super::retransmission::{RetransmissionConfig, RoundTrip};
use super::stream::Stream;
use crate::machine::{Packet, Reason, Tensor, TensorTimes, Verdict, WorkerEvent, WorkerStatistics};

#[derive(Debug)]
pub(crate) struct WorkerCore<A, T> {
    state: State,
    /// The address that it sends to.
    peer: [A; 1],
    pub(crate) stream: Stream<T>,
    pub(crate) round_trip: RoundTrip,
    pub(crate) statistics: WorkerStatistics,
    events: VecDeque<WorkerEvent<T>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Between a peer that was lost and the one that takes over.
    Suspended,
    Aborted,
}

impl<A, T: Tensor> WorkerCore<A, T> {
    pub(crate) fn new(stream: Stream<T>, peer: A, retransmission: RetransmissionConfig) -> Self {
        Self {
            state: State::Running,
            peer: [peer],
            stream,
            round_trip: RoundTrip::new(retransmission),
            statistics: WorkerStatistics::default(),
            events: VecDeque::new(),
        }
    }

    #[inline]
    pub(crate) fn is_running(&self) -> bool {
        self.state == State::Running
    }

    #[inline]
    pub(crate) const fn peer(&self) -> &[A; 1] {
        &self.peer
    }

    /// Appends a tensor to the stream; one without elements is done at once.
    pub(crate) fn submit(&mut self, mut tensor: T, operation: Operation) {
        if tensor.elements().count() == 0 {
            self.stream.skip();
            self.complete(tensor, None);
        } else {
            self.stream.push(tensor, operation);
        }
    }

    /// Tells the owner of a tensor that the stream has finished, if it has.
    #[inline]
    pub(crate) fn finished(&mut self, finished: Option<(T, TensorTimes)>) {
        if let Some((tensor, times)) = finished {
            self.statistics.loss += times.loss;
            self.complete(tensor, Some(times));
        }
    }

    /// Tells the owner that a tensor is done in which this worker takes no part.
    pub(crate) fn passed_over(&mut self, finished: Option<(T, TensorTimes)>) {
        if let Some((tensor, _)) = finished {
            self.complete(tensor, None);
        }
    }

    fn complete(&mut self, tensor: T, times: Option<TensorTimes>) {
        self.statistics.completed += 1;
        self.events.push_back(WorkerEvent::Completed(tensor, times));
    }

    pub(crate) fn suspend(&mut self) {
        if self.state == State::Running {
            self.state = State::Suspended;
        }
    }

    /// Runs again, with another peer, of whose round trips nothing is known; false when it has
    /// ended.
    pub(crate) fn resume(&mut self, peer: A) -> bool {
        if self.state == State::Aborted {
            return false;
        }
        self.state = State::Running;
        self.peer = [peer];
        self.round_trip.forget();
        true
    }

    /// Ends, and gives back what is unfinished.
    pub(crate) fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.state = State::Aborted;
        self.stream.drain()
    }

    /// Whether a packet is for this worker, and now, and of its job, whose key is `key`; or why it
    /// is not. The worker's own packets have the preamble `own`.
    #[inline]
    pub(crate) fn check(&self, own: &Preamble, key: Key, packet: &Packet<'_>) -> Result<(), Reason> {
        let Preamble { job, generation, shard, .. } = packet.preamble;
        if job != own.job {
            return Err(Reason::UnknownJob);
        }
        if generation != own.generation {
            return Err(Reason::Generation);
        }
        if shard != own.shard {
            return Err(Reason::OutOfRange);
        }
        match self.state {
            State::Running => packet.authenticate(key),
            State::Suspended => Err(Reason::Unexpected),
            State::Aborted => Err(Reason::Aborted),
        }
    }

    /// Ends with an abort packet, and tells the owner.
    pub(crate) fn abort(&mut self, packet: &Packet<'_>) -> Result<(), Reason> {
        let abort = Abort::parse(packet.preamble, packet.bytes)?;
        self.end(abort.reason);
        Ok(())
    }

    /// Ends, and tells the owner why.
    pub(crate) fn end(&mut self, reason: AbortReason) {
        self.state = State::Aborted;
        self.events.push_back(WorkerEvent::Aborted(reason));
    }

    /// Counts a packet, and hands the verdict on it through.
    #[inline]
    pub(crate) const fn count(&mut self, verdict: Verdict) -> Verdict {
        self.statistics.received.count(verdict)
    }

    pub(crate) fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.events.pop_front()
    }

    pub(crate) fn statistics(&self) -> WorkerStatistics {
        WorkerStatistics { smoothed_rtt: self.round_trip.smoothed(), ..self.statistics }
    }
}
