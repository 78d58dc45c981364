//! The socket driver: runs the machines of [`fanin_protocol`] on UDP sockets, one thread and one socket a shard.
//!
//! A protocol comes in as a value: [`OnSockets`] starts the machines of any. From the top: [`WorkerDriver`] takes tensors by pointer and cuts each into one part a shard; a [`Host`] serves all jobs
//! of a machine that sums on one UDP port, the kernel steering each datagram to its shard's socket. All are threads that run `io_loop`:
//! receive what the socket has (`train_socket`), let the machine answer in trains, sleep until the next packet, timer or
//! command (`mailbox`). A train of packets is one system call (`UDP_SEGMENT`, `UDP_GRO`); a packet costs no allocation,
//! no lock and no clock reading of its own.
//!
//! Deliberately absent: what a packet means (`fanin-protocol`), who may join and who is alive (`fanin-controller`). An
//! unreachable peer is counted here, and judged there.

mod clock;
mod data_path;
mod failure;
mod fork;
mod gauge;
mod host;
mod io_loop;
mod io_thread;
mod mailbox;
mod membership;
mod part;
mod ports;
mod probe;
mod protocol;
mod raw_tensor;
mod registered;
mod seal;
mod socket;
mod statistics;
mod submission;
mod train_socket;
mod worker_driver;
mod worker_shard;

pub use clock::Clock;
pub use data_path::{DataPath, Figures, Seat};
pub use failure::{Failure, ThreadEnded};
pub use fanin_protocol::{Layer, Loss};
pub use fork::NotInherited;
pub use gauge::{Gauge, Unmeasured, fill};
pub use host::Host;
pub use io_thread::HostThreads;
pub use membership::Membership;
pub use part::{Part, PartTimes};
pub use probe::{SocketProbe, probe_socket};
pub use protocol::{Alone, OnSockets, Serving, Together};
pub use raw_tensor::{RawTensor, RawTensorError};
pub use socket::{SHARDS_MAX, handshake_round_trip, path_mtu};
pub use statistics::IoStatistics;
pub use submission::{CollectiveKind, Submission};
pub use train_socket::{Offload, Peer};
pub use worker_driver::{Done, Service, WorkerConfig, WorkerDriver};
