//! The sums of a flow, kept for a server that loses its memory. The paper says nothing of that.
//!
//! Sums replace what they were made of, and a tensor is given back once it has them all. Another
//! worker may still lack one then, and nobody could make it again: the first one hands it back. So the
//! last flows of a tensor are copied as it is given back.

use alloc::vec;
use alloc::vec::Vec;
use fanin_wire::FlowId;

use super::{Flow, Worker, id_of, is_after, pull};
use crate::dlcp::config::JobConfig;
use crate::machine::{Tensor, TensorTimes};

/// Buffers for flows that are to be kept.
const SPARE_MAX: usize = 4;

/// What is kept of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// Nothing: its contribution is in the tensor.
    Nothing,
    /// The worker's own contribution, of a tensor that it may have given back.
    Own,
    /// The sum of so many contributions.
    Sum(u16),
}

/// The blocks of a flow, as they travelled. They lie in the tensor until it is given back, if its
/// elements travel as they are.
#[derive(Debug, Default)]
pub(super) struct Kept {
    held: Vec<Held>,
    /// Blocks of which something is kept.
    count: u32,
    block_bytes: usize,
    /// Empty as long as all is in the tensor.
    bytes: Vec<u8>,
}

impl Kept {
    /// Nothing yet of so many blocks.
    pub(super) fn new(blocks: u32, block_bytes: usize) -> Self {
        Self { held: vec![Held::Nothing; blocks as usize], count: 0, block_bytes, bytes: Vec::new() }
    }

    /// Lets what is kept lie beside the tensor, in memory that held something as long.
    pub(super) fn lie_beside(&mut self, spare: &mut Vec<Vec<u8>>) {
        let needed = self.held.len() * self.block_bytes;
        let fits = |spare: &Vec<u8>| (needed..=2 * needed).contains(&spare.capacity());
        let found = spare.iter().position(fits).map(|at| spare.swap_remove(at));
        self.bytes = found.unwrap_or_default();
        self.bytes.resize(needed, 0);
    }

    /// Whether it has no blocks: its flow has not begun.
    pub(super) const fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether something is kept of each block: the flow needs no more sums.
    pub(super) const fn is_whole(&self) -> bool {
        self.count as usize == self.held.len() && self.count > 0
    }

    /// Whether what is kept is in the tensor.
    pub(super) const fn is_in_tensor(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What is kept of a block.
    pub(super) fn of(&self, block: u32) -> Held {
        self.held.get(block as usize).copied().unwrap_or(Held::Nothing)
    }

    /// Keeps a block of which nothing is kept. `fill` writes its bytes, unless they stay in the tensor.
    pub(super) fn keep(&mut self, block: u32, what: Held, bytes: usize, fill: impl FnOnce(&mut [u8])) {
        debug_assert_eq!(self.of(block), Held::Nothing, "a block is kept once");
        self.held[block as usize] = what;
        self.count += 1;
        if !self.is_in_tensor() {
            fill(&mut self.bytes[block as usize * self.block_bytes..][..bytes]);
        }
    }

    /// Writes what is kept of a block beside the tensor.
    pub(super) fn write(&self, block: u32, payload: &mut [u8]) {
        payload.copy_from_slice(&self.bytes[block as usize * self.block_bytes..][..payload.len()]);
    }
}

impl<A: Copy, T: Tensor> Worker<A, T> {
    /// Gives a tensor back if it is finished, which begins with a chunk, and keeps what others may lack
    /// of it.
    pub(super) fn give_back(&mut self, first_chunk: u64, mut finished: Option<(T, TensorTimes)>) {
        if let Some((tensor, _)) = &mut finished {
            self.forget();
            let elements = tensor.elements();
            let begun = self.flows.iter_mut().take_while(|flow| !flow.kept.is_empty());
            for flow in self.kept.iter_mut().chain(begun) {
                if flow.tensor != first_chunk || !flow.kept.is_in_tensor() {
                    continue;
                }
                flow.kept.lie_beside(&mut self.spare);
                let range = flow.offset..flow.offset + flow.start.elements as usize;
                elements.copy_to(range, &mut flow.kept.bytes);
            }
        }
        self.core.finished(finished);
    }

    /// Forgets the flows that no other worker can lack sums of.
    pub(super) fn forget(&mut self) {
        while !self.kept.is_empty() && !self.may_be_lacked() {
            let bytes = self.kept.pop_front().map(|flow| flow.kept.bytes);
            self.spare.extend(bytes.filter(|bytes| bytes.capacity() > 0));
            // For the next tensors.
            self.spare.truncate(SPARE_MAX);
        }
    }

    /// Whether another worker may lack sums of the first flow that is kept. It could not have begun as
    /// many flows after that one as all have, and the server would not have had room for them.
    fn may_be_lacked(&self) -> bool {
        let JobConfig { flows, window_blocks, .. } = self.config;
        let blocks = |flow: &Flow| u64::from(flow.blocks);
        let at_server: u64 = self.kept.iter().map(blocks).sum();
        if self.kept.len() > self.config.flows_max() || at_server > self.config.blocks_max() {
            return false;
        }
        let first = FlowId(self.first.0.wrapping_sub(self.kept.len() as u32));
        if !is_after(self.begun, first) {
            return true;
        }
        let after = self.begun.0.wrapping_sub(first.0) as usize;
        let all = self.kept.iter().chain(&self.flows);
        let under_way: u64 = all.take(after + 1).map(blocks).sum();
        after < 2 || after < usize::from(flows) && under_way <= window_blocks.into()
    }

    /// Begins with the first flow of a job, as nobody said where the job is. False if something has begun.
    pub(super) fn begin_anew(&mut self) -> bool {
        self.first = FlowId(0);
        self.kept.clear();
        self.flows.iter().all(|flow| flow.push.is_none())
    }

    /// The first flow that lacks sums.
    pub(super) fn lacking(&self) -> FlowId {
        let whole = self.flows.iter().take_while(|flow| flow.kept.is_whole()).count();
        id_of(self.first, whole)
    }

    /// Goes back to a flow that some worker lacks sums of, and begins nothing yet. False if a flow
    /// from there on is not here any more, which no worker can say that knows the job.
    pub(super) fn go_back(&mut self, to: FlowId) -> bool {
        while is_after(self.first, to) {
            let Some(flow) = self.kept.pop_back() else { return false };
            self.flows.push_front(flow);
            self.first = FlowId(self.first.0.wrapping_sub(1));
        }
        while is_after(to, self.first) {
            // It was kept for somebody who has all of it now.
            if self.flows.pop_front().is_none_or(|flow| !flow.kept.is_whole()) {
                return false;
            }
            self.first = id_of(self.first, 1);
        }
        self.kept.clear();
        for flow in &mut self.flows {
            flow.push = None;
            flow.pull = pull(&self.config, self.worker, &flow.start.collective, flow.blocks);
            flow.is_complete = false;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use fanin_wire::{
        BlockHeader, BlockPacket, Generation, JobId, Key, Kind, LossBound, Op, Preamble, Tag, WorkerId,
        block_packet_bytes,
    };

    use super::*;
    use crate::dlcp::FlowPlan;
    use crate::machine::{Elements, Endpoint, Instant, Verdict, WorkerMachine};

    #[derive(Debug)]
    struct Floats(Vec<f32>);

    impl Tensor for Floats {
        fn elements(&mut self) -> Elements<'_> {
            Elements::Float32(&mut self.0)
        }
    }

    #[test]
    fn a_worker_keeps_no_more_than_others_can_lack_in_buffers_that_fit() {
        let key = Key::new(1);
        let flows = FlowPlan {
            flow_blocks: 8,
            flows: 4,
            window_blocks: 16,
            ..FlowPlan::new(LossBound::RELIABLE, 2, 32, 1_000_000_000)
        };
        let config = flows.job_config((JobId(1), key, Generation(0)), 2, 32);
        let mut worker: Worker<u8, Floats> = Worker::new(config, WorkerId(0), 9);
        let (mut train, mut flow) = (vec![0; 65536], 0);
        // Long tensors of several flows and short ones by turns, one after the other.
        for number in 0..60 {
            let blocks = if number % 5 == 0 { 20 } else { 1 };
            worker.submit(Floats(vec![1.0; 32 * blocks]), Op::Sum);
            for part in (0..blocks).step_by(8) {
                while worker.poll_transmit(Instant(number * 1_000_000_000), &mut train).is_some() {}
                for block in 0..(blocks - part).min(8) {
                    let preamble = Preamble { worker: WorkerId::ALL, ..worker.preamble(Kind::Block) };
                    let (tag, block) = (Tag { priority: 1, important: true, path: 0 }, block as u32);
                    let header = BlockHeader {
                        flow: FlowId(flow),
                        block,
                        round: 0,
                        tag,
                        contributions: 2,
                        last: false,
                        restored: false,
                    };
                    let mut packet = vec![0; block_packet_bytes(128)];
                    BlockPacket::write(&mut packet, key, &preamble, &header, |payload| payload.fill(0));
                    let verdict = worker.handle_packet(Instant(number * 1_000_000_000), 9, &packet);
                    assert_eq!(verdict, Verdict::Absorb);
                }
                flow += 1;
            }
            let blocks: u32 = worker.kept.iter().map(|flow| flow.blocks).sum();
            assert!(worker.kept.len() <= 4 && (worker.kept.len() <= 2 || blocks <= 16), "{blocks}");
            let kept = worker.kept.iter().map(|flow| flow.kept.bytes.capacity());
            assert!(kept.sum::<usize>() <= 2 * 128 * blocks as usize);
            assert!(worker.spare.len() <= SPARE_MAX);
        }
        assert!(worker.kept.len() >= 2, "others may lack the last ones");
    }
}
