//! Sums among the ranks of one machine: they add up their gradients in shared memory, and one sum
//! of the machine goes on.
//!
//! The way of a gradient, of which each rank's thread ([`LocalSum`]) walks its part:
//!
//! 1. a rank copies a block of its tensor into shared memory, but for the column that it sums
//!    itself;
//! 2. when all have, each of the first ranks adds up its *column* of the block, in the order of the
//!    ranks;
//! 3. if there are other machines, each column of a segment is summed over them by a [`Network`],
//!    so that all cores and all connections of a machine work;
//! 4. when all columns are there, every rank copies the segment out.
//!
//! Blocks are short enough to stay in the processor's cache: the tensor is read from memory once
//! and written once. No rank spins. A rank that cannot go on sleeps on a bell in shared memory
//! (`gate`), and looks now and then whether those that it waits for are alive, which the kernel
//! knows (`memory`).
//!
//! Map: `memory` (the file, the locks; all of the unsafe code but for its use), `gate` (waiting),
//! `cut` (which part of a tensor goes where), `sums` (the arithmetic), `local_sum` (the thread),
//! `machine` (who is on one machine), `error`.
//!
//! Deliberately absent: who is in which group and how its name gets around (the caller's), the
//! network.

mod cut;
mod error;
mod gate;
mod local_sum;
mod machine;
mod memory;
mod sums;

pub use error::{LocalError, MemoryError, Submission};
pub use gate::RANKS_MAX;
pub use local_sum::{Done, DoneOf, LocalConfig, LocalSum, Network};
pub use machine::machine_id;
pub use memory::{Group, MemoryOfRanks, SharedMemory, memory_of_ranks, probe};
