//! Packets as machines see them.

use super::ids::{FlowId, SimAddress};
use super::queue::Class;

/// A packet that arrived.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Who sent it.
    pub from: SimAddress,
    /// The recipient.
    pub to: SimAddress,
    /// How queues treated it.
    pub class: Class,
    /// Bytes of the IP packet, whose payload may have more of them than are there.
    pub datagram_bytes: u32,
    /// Links that it has passed.
    pub hops: u8,
    /// A queue on the way was longer than its threshold. In the header of a gradient packet, this
    /// stands as well.
    pub ecn_marked: bool,
    /// The content.
    pub body: Body<'a>,
}

/// The content of a packet.
#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// A protocol's packet: a UDP payload.
    Bytes(&'a [u8]),
    /// A UDP payload of so many bytes that nobody looks at, and a number for the receiving
    /// application.
    Blank {
        /// UDP payload.
        bytes: u32,
        /// The sender's tag.
        tag: u64,
    },
    /// Part of a TCP-like flow. Only the network's own flows get these; loss predicates and
    /// captures see them.
    Segment(Segment),
}

/// A TCP-like flow's packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The flow.
    pub flow: FlowId,
    /// The number of its first byte; for an acknowledgement, the next byte that is expected.
    pub sequence: u64,
    /// Bytes carried.
    pub bytes: u32,
    /// On its way from the flow's receiver to its sender.
    pub is_ack: bool,
    /// ECN echo: the segment acknowledged was marked.
    pub echo: bool,
}
