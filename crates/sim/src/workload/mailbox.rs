//! The numbers that are under way from one worker of a ring to the next, beside the connection that carries their lengths.

use std::collections::VecDeque;

use super::values::Gradient;

/// One chunk of a tensor.
pub(crate) struct Message {
    pub(crate) tensor: u64,
    pub(crate) step: usize,
    pub(crate) chunk: Gradient,
}

/// What is under way to a worker, in order.
#[derive(Default)]
pub(crate) struct Mailbox(pub(crate) VecDeque<Message>);
