//! One hostile world for the machines of every protocol, in virtual time.
//!
//! A [`World`] joins machines by a network that loses, doubles, delays and reorders packets, as a seeded generator has it.
//! A protocol's [`Script`] says the rest: which machines there are, what their tensors hold, what fails and when, and what
//! a sum must be. Cases and scripts stay beside their protocol (`crates/protocol/tests`).
//!
//! Three checks always run:
//!
//! - Nothing hangs: a world in which nothing happens any more, or that takes ten minutes of its time, panics and prints
//!   what each machine counted.
//! - No tensor completes twice, and no machine gives its job up unless the script expects that.
//! - Every sum is what the script says ([`World::play`]).
//!
//! [`each_seed`] plays many worlds. If one fails, it prints the command that plays that one alone.
//!
//! A world normally decides by chance when a packet arrives. A world that [holds](World::holding) its packets leaves that to
//! the test, which can then try every order.
//!
//! Deliberately absent: links with rates and queues (`sim/net` has those). Control, such as joining, heartbeats and takeovers, is
//! what a script lets [happen](Script::happen). No code that is shipped may depend on this crate.
#![forbid(unsafe_code)]

mod machine;
mod network;
mod random;
mod script;
mod seeds;
mod values;
mod world;

pub use machine::{Machine, Summing, Working};
pub use network::{Network, Packet, Way};
pub use random::Random;
pub use script::Script;
pub use seeds::{each_seed, each_seed_in_parallel, fresh_seeds};
pub use values::{Numbered, Values, bfloat16_bits, float16_bits};
pub use world::{Sum, World};
