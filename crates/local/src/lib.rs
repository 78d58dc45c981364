//! Sums among the ranks of one machine: they add up their gradients in shared memory, and one sum
//! of the machine goes on.
//!
//! The way of a gradient (each rank's thread, [`LocalSum`], does its part):
//!
//! 1. A rank copies a block of its tensor into shared memory, except the column that it sums
//!    itself.
//! 2. When all have, each of the first ranks adds up its *column* of the block, in the order of the
//!    ranks.
//! 3. If there are other machines, a [`Network`] sums each column of a segment over them. So all
//!    cores and all connections of a machine work.
//! 4. When all columns are there, every rank copies the segment out.
//!
//! Blocks are short enough to stay in the processor's cache: the tensor is read from memory once
//! and written once. No rank spins. A rank that cannot go on sleeps on a bell in shared memory
//! (`gate`). Now and then it asks the kernel whether the ranks that it waits for are alive
//! (`memory`).
//!
//! Map:
//! - `memory`: the file, the locks, and all unsafe code except its uses.
//! - `gate`: waiting.
//! - `cut`: which part of a tensor goes where.
//! - `sums`: the arithmetic.
//! - `local_sum`: the thread.
//! - `machine`: who is on one machine.
//! - `cores`: how fast its cores sum.
//! - `error`.
//!
//! Deliberately absent: who is in which group and how its name gets around (the caller's), the
//! network.

mod cores;
mod cut;
mod error;
mod gate;
mod local_sum;
mod machine;
mod memory;
mod sums;

pub use cores::Cores;
pub use error::{LocalError, MemoryError, Submission};
pub use gate::RANKS_MAX;
pub use local_sum::{Completed, Done, DoneOf, LocalConfig, LocalSum, Network};
pub use machine::machine_id;
pub use memory::{Group, MemoryOfRanks, SharedMemory, memory_of_ranks, probe};
