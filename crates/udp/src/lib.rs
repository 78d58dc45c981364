//! The socket driver: runs the machines of [`fanin_protocol`] on UDP sockets, one thread and one socket a shard.
//!
//! From the top: [`WorkerDriver`] takes tensors by pointer and cuts each into one part a shard; [`SwitchDriver`] serves all
//! jobs on one UDP port, the kernel steering each datagram to its shard's socket; [`AtpSwitchDriver`] and
//! [`AtpServerDriver`] serve ATP's from one thread each. All are threads that run `io_loop`:
//! receive what the socket has (`train_socket`), let the machine answer in trains, sleep until the next packet, timer or
//! command (`mailbox`). A train of packets is one system call (`UDP_SEGMENT`, `UDP_GRO`); a packet costs no allocation,
//! no lock and no clock reading of its own.
//!
//! Deliberately absent: what a packet means (`fanin-protocol`), who may join and who is alive (`fanin-controller`). An
//! unreachable peer is counted here, and judged there.

mod atp_driver;
mod clock;
mod failure;
mod host;
mod io_loop;
mod mailbox;
mod part;
mod probe;
mod raw_tensor;
mod socket;
mod statistics;
mod switch_driver;
mod train_socket;
mod worker_driver;
mod worker_machine;

pub use atp_driver::{AtpServerDriver, AtpSwitchDriver};
pub use clock::Clock;
pub use failure::Failure;
pub use part::PartTimes;
pub use probe::{SocketProbe, probe_socket};
pub use raw_tensor::{RawTensor, RawTensorError};
pub use socket::{SHARDS_MAX, handshake_round_trip, path_mtu};
pub use statistics::IoStatistics;
pub use switch_driver::{SwitchConfig, SwitchDriver};
pub use train_socket::Offload;
pub use worker_driver::{Done, WorkerConfig, WorkerDriver};
pub use worker_machine::WorkerJob;
