//! Ring all-reduce over TCP-like connections, each worker's to the next: the baseline that ATP §5.1 calls Horovod.
//!
//! A tensor is cut into as many chunks as there are workers. In step `s` worker `r` sends chunk `r - s`: in the first `n - 1`
//! steps what it has summed of it, in the others the sum (Patarasuk and Yuan, 2009). Steps of different tensors overlap.
//! The connection carries lengths; the numbers themselves travel beside it and are taken when their bytes have arrived.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::job::{Job, token};
use super::mailbox::{Mailbox, Message};
use super::values::Gradient;
use crate::net::{Actor, Context, FlowId, Notice, Packet, TcpConfig};

/// A message's header: which tensor, which step.
const HEADER_BYTES: u64 = 16;
/// Token: a message from the worker before has arrived.
const ARRIVED: u64 = 100;

/// One worker of a ring.
pub(crate) struct RingWorker {
    pub(crate) job: Rc<RefCell<Job>>,
    pub(crate) rank: usize,
    /// To the next worker.
    pub(crate) connection: TcpConfig,
    pub(crate) from_previous: Rc<RefCell<Mailbox>>,
    pub(crate) to_next: Rc<RefCell<Mailbox>>,
    flow: Option<FlowId>,
    tensors: BTreeMap<u64, Gradient>,
    /// Came before the tensor was submitted here.
    early: Vec<Message>,
}

impl RingWorker {
    pub(crate) fn new(
        job: Rc<RefCell<Job>>,
        rank: usize,
        connection: TcpConfig,
        (from_previous, to_next): (Rc<RefCell<Mailbox>>, Rc<RefCell<Mailbox>>),
    ) -> Self {
        Self {
            job,
            rank,
            connection,
            from_previous,
            to_next,
            flow: None,
            tensors: BTreeMap::new(),
            early: Vec::new(),
        }
    }

    fn workers(&self) -> usize {
        self.job.borrow().workers.len()
    }

    fn send(&self, context: &mut Context<'_>, tensor: u64, step: usize) {
        let workers = self.workers();
        let Some(gradient) = self.tensors.get(&tensor) else { return };
        let index = (self.rank + 2 * workers - step) % workers;
        let range = chunk(gradient.count(), workers, index);
        let bytes = HEADER_BYTES + 4 * range.len() as u64;
        self.to_next.borrow_mut().0.push_back(Message { tensor, step, chunk: gradient.part(range) });
        let next = self.job.borrow().workers[(self.rank + 1) % workers].actors[0];
        if let Some(flow) = self.flow {
            context.write(flow, bytes, Some(Notice { actor: next, token: ARRIVED }));
        }
    }

    fn take(&mut self, context: &mut Context<'_>, message: Message) {
        let workers = self.workers();
        let Some(gradient) = self.tensors.get_mut(&message.tensor) else {
            return self.early.push(message);
        };
        let index = (self.rank + 2 * workers - 1 - message.step) % workers;
        let range = chunk(gradient.count(), workers, index);
        if message.step < workers - 1 {
            gradient.add(range.start, &message.chunk);
        } else {
            gradient.set(range.start, &message.chunk);
        }
        if message.step < 2 * workers - 3 {
            return self.send(context, message.tensor, message.step + 1);
        }
        if let Some(gradient) = self.tensors.remove(&message.tensor) {
            self.job.borrow_mut().completed(context, self.rank, 0, gradient);
        }
    }
}

/// Elements of one of `chunks` of a tensor.
fn chunk(elements: usize, chunks: usize, index: usize) -> std::ops::Range<usize> {
    elements * index / chunks..elements * (index + 1) / chunks
}

impl Actor for RingWorker {
    fn start(&mut self, context: &mut Context<'_>) {
        if self.flow.is_some() {
            // Its node was away; connections outlive that.
            return self.job.borrow_mut().restarted(context, self.rank);
        }
        self.flow = Some(context.open_tcp(self.connection));
        self.job.borrow().schedule_start(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, timer: u64) {
        self.job.borrow_mut().told(context, self.rank, timer);
    }

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        match notice {
            token::SUBMIT => {
                let Some(part) = self.job.borrow_mut().next_part(self.rank, 0) else { return };
                let tensor = part.tensor;
                self.tensors.insert(tensor, part);
                self.send(context, tensor, 0);
                let (ready, early) =
                    std::mem::take(&mut self.early).into_iter().partition(|message| message.tensor == tensor);
                self.early = early;
                let ready: Vec<Message> = ready;
                for message in ready {
                    self.take(context, message);
                }
            }
            ARRIVED => {
                let message = self.from_previous.borrow_mut().0.pop_front();
                if let Some(message) = message {
                    self.job.borrow_mut().progressed(context.now());
                    self.take(context, message);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_tensor_once() {
        for (elements, workers) in [(10, 3), (2, 5), (0, 4), (1000, 7)] {
            let mut next = 0;
            for index in 0..workers {
                let range = chunk(elements, workers, index);
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, elements);
        }
    }
}
