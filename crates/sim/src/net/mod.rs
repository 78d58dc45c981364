//! A network of packets: hosts, switches, links and queues in virtual time, on which the protocols'
//! own machines live.
//!
//! A [`Topology`] becomes a [`Network`]. [`Actor`]s are put on its hosts and programmable switches:
//! a [`Machine`] for any [`Endpoint`](fanin_protocol::Endpoint), or an application of the simulator
//! alone. Time is counted in picoseconds, so that serialisation is exact at every rate; a packet is
//! stored before it is forwarded. Same seed, same bytes: nothing here reads a clock, an address or
//! a hash map's order, and there are no threads.
//!
//! Deliberately absent: what a protocol does with a packet, workloads, files of scenarios.

mod actor;
mod ahead;
mod config;
mod context;
mod core;
mod cores;
mod failures;
mod flow;
mod forwarding;
mod ids;
mod impairment;
mod least_remaining;
mod machine;
mod network;
mod packet;
mod packets;
mod pcap;
mod port;
mod queue;
mod rate;
mod routing;
mod statistics;
mod time;
mod topologies;
mod topology;
mod trace;

pub use actor::{Actor, Listener};
pub use config::{Multipath, NetworkConfig};
pub use context::Context;
pub use flow::{ConstantRateConfig, FlowStatistics, Notice, TcpConfig, Transport};
pub use ids::{ActorId, FlowId, LinkId, NodeId, PortId, SimAddress};
pub use impairment::{Impairment, Loss, Predicate};
pub use machine::{Machine, Nic, Owner};
pub use network::{Network, Outcome, Ports, Progress};
pub use packet::{Body, Packet, Segment};
pub use queue::{Buffer, Class, DROP_CLASSES, Order, PRIORITIES, QueueConfig};
pub use statistics::{DropReason, Drops, NodeStatistics, Passed, PortStatistics, QueueStatistics};
pub use time::Time;
pub use topologies::Parts;
pub use topology::{
    Cost, Link, LinkConfig, Node, NodeConfig, NodeKind, Programmable, Topology, TopologyError,
};
