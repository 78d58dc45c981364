//! A flow: one tensor, or a part of a long one, on its way between two peers (DLCP §3.2.1).
//!
//! The sender announces it and sends its blocks in the same breath, once, whatever becomes of them;
//! then it says stop. The receiver counts what came. If that is less than the bound asks for, it
//! requests what is missing, and the sender goes through the same again: a *round*. If it is
//! enough, it says finish, and the sender confirms. Both are without packets: they say what is to
//! be said, and the machines write it.

mod receiver;
mod retry;
mod sender;
#[cfg(test)]
mod tests;

pub(super) use receiver::{Receiver, ReceiverConfig};
pub(super) use retry::Waiting;
pub(super) use sender::Sender;
