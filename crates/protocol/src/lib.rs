//! The protocols, as state machines that own no socket, no clock and no thread.
//!
//! On the way of a gradient this room stands twice. A worker cuts the tensor into chunks and
//! quantises each straight into a train of packets. A switch adds the chunks of all workers and
//! answers with the sum, which the worker turns back into floats in place. Simulator and socket
//! driver run the very same code through [`Endpoint`].
//!
//! A protocol is a room of its own, [`switchml`], [`atp`], [`goat`] or [`dlcp`], and knows no
//! other. What they share is below them: the contract of all machines (`machine`), what a sender
//! has (`transport`), how switches help a server (`aggregation`), and who admits jobs
//! ([`control`]). To all others a protocol is a value: a [`Protocol`](control::Protocol), and the
//! [`Machines`] that it has.
//!
//! # The fate of a packet that comes too late
//!
//! Networks delay and double packets, and workers send again what was not answered. So each
//! machine gets packets of work that is over. The door ([`Endpoint::handle_packet`], `JobTable`,
//! `WorkerCore`) drops what is of no job, of another generation, or without the job's tag. A
//! machine that sums answers a contribution to an aborted job with the abort. All else is decided
//! by a number in the packet, which names the work: nothing is added twice, and nobody waits for an
//! answer that was lost.
//!
//! | machine | the packet names | what happens |
//! |---|---|---|
//! | SwitchML's switch | a sum that the slot still has, and its sender is in it | the sender gets the sum again, alone |
//! | | a sum that still lacks others | dropped as `Duplicate`; a rack may send its part up again |
//! | | an exchange before the two that the slot holds | dropped as `Stale`: its sender has that sum, or it could not have contributed since (§4.5) |
//! | SwitchML's worker | an exchange that its slot has completed | dropped as `Stale`; while the slot hands its last sum back, that sum's result is absorbed, and ends the handing back |
//! | ATP's switch | a fragment that its aggregator has | dropped as `Duplicate`, also the first time that it is sent again if the sum lacks one worker at most |
//! | | the same, sent again otherwise | goes on, at the first level with the sum so far, and the aggregator is free (Figure 17) |
//! | | a fragment that no aggregator has any more | takes one, until that is stale (§3.7); if it was sent again, it takes none and goes on |
//! | GOAT's switch | the same | dropped as `Duplicate`; if it was sent again, the sum so far is shown to the server, and the aggregator stays |
//! | | a fragment whose place is a window further | dropped as `Stale`; if it was sent again, it goes on to the server, who has the parameters |
//! | server of both | a fragment that is finished | dropped as `Stale`; if it was sent again, the child that sent it gets the parameters again, and a server that lost them asks the workers |
//! | worker of both | parameters that it has, or had | dropped as `Duplicate`, or as `Stale` when the place has had later ones |
//! | DLCP's server | a block that it has, or one that was decided without it | dropped as `Duplicate` or `Stale`: the sum may be with others already |
//! | DLCP's machines | the end of a flow that is over | confirmed again: its sender waits for that alone |
//! | DLCP's ring | the start or stop of a flow that is over | answered by the end of the flow again: its sender has not heard it |
//! | DLCP's machines | anything else of such a flow | dropped as `Stale` |
//!
//! Deliberately absent: input and output, time, threads, unsafe code. The crate builds without an
//! operating system.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod aggregation;
pub mod atp;
pub mod control;
pub mod dlcp;
pub mod goat;
mod machine;
mod machines;
pub mod switchml;
mod transport;

pub use machine::{
    Address, Both, Either, Elements, Endpoint, Instant, JobAborted, JobIdentity, JobProgress, Lane, Lanes,
    Layer, Loss, Packet, Reason, Received, Summer, TableStatistics, Tensor, TensorTimes, Transmit, Verdict,
    WorkerEvent, WorkerMachine, WorkerStatistics,
};
pub use machines::{Machines, OwnChoices, Peers, WorkerTerms};
pub use transport::RetransmissionConfig;
