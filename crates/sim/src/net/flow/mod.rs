//! Traffic that is not a protocol's own: what fills links beside it, and what the baselines are
//! made of.

mod dctcp;
mod driver;
mod pfabric;
mod receiver;
mod sender;
mod sending;

use std::time::Duration;

use self::receiver::Receiver;
use self::sending::Sending;
use super::ids::{ActorId, NodeId, SimAddress};
use super::queue::{Class, PRIORITIES};
use super::rate::Rate;
use super::time::Time;

/// Tells an actor something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whom.
    pub actor: ActorId,
    /// What.
    pub token: u64,
}

/// The reaction of a connection to congestion, and the information in its packets for queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Transport {
    /// Reno with `NewReno`'s recovery (RFC 5681 and 6582); where it takes marks, a mark halves the
    /// window (RFC 3168).
    #[default]
    NewReno,
    /// DCTCP (RFC 8257): marks shorten the window by half of the share of bytes that are marked.
    /// Losses are `NewReno`'s.
    Dctcp,
    /// PIAS (Bai et al., NSDI 2015): DCTCP whose segments are in queue 0 at first. From each of
    /// these numbers of bytes on, which ascend, they are one queue further down: the bytes that lie
    /// before the segment count. Acknowledgements are in queue 0.
    Pias {
        /// The byte at which each of the queues 1 to 7 begins; `u64::MAX` for one that is not used.
        thresholds_bytes: [u64; PRIORITIES - 1],
    },
    /// pFabric's minimal transport (Alizadeh et al., SIGCOMM 2013, 4.2): `window_initial_bytes` is
    /// the path's bandwidth-delay product, `rto_min` all timeouts' length, duplicates say nothing,
    /// each segment is acknowledged for itself, and after five timeouts in a row probes go. Packets
    /// say how much their flow has left ([`Order::LeastRemaining`](super::Order::LeastRemaining)).
    Pfabric,
}

/// A TCP-like connection: unless its transport says otherwise slow start, additive increase and
/// multiplicative decrease, fast retransmit on duplicate acknowledgements, retransmission timeout
/// (RFC 6298). It is open from the start, in one direction, and acknowledges every segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// The sender.
    pub from: NodeId,
    /// The receiver.
    pub to: NodeId,
    /// How queues treat its segments and acknowledgements.
    pub class: Class,
    /// The reaction to congestion.
    pub transport: Transport,
    /// Bytes of a full segment, without its 40 bytes of headers.
    pub segment_bytes: u32,
    /// Marks instead of drops; DCTCP and PIAS take them in any case.
    pub ecn: bool,
    /// After so many duplicate acknowledgements a segment is sent again.
    pub duplicates: u32,
    /// Window at the start.
    pub window_initial_bytes: u64,
    /// The receiver's window: no more is ever on the way.
    pub window_max_bytes: u64,
    /// Shortest retransmission timeout.
    pub rto_min: Duration,
}

impl TcpConfig {
    /// Longest retransmission timeout: it doubles while nothing comes (RFC 6298).
    pub const RTO_MAX: Duration = Duration::from_secs(60);

    /// `NewReno` with Ethernet's 1460 bytes a segment, ten segments at the start (RFC 6928), 4 MiB
    /// of window, three duplicates, 10 ms, no ECN.
    #[must_use]
    pub const fn new(from: NodeId, to: NodeId) -> Self {
        Self {
            from,
            to,
            class: Class::DEFAULT,
            transport: Transport::NewReno,
            segment_bytes: 1460,
            ecn: false,
            duplicates: 3,
            window_initial_bytes: 14_600,
            window_max_bytes: 4 << 20,
            rto_min: Duration::from_millis(10),
        }
    }

    /// Whether its segments may be marked.
    #[must_use]
    pub const fn takes_marks(&self) -> bool {
        self.ecn || matches!(self.transport, Transport::Dctcp | Transport::Pias { .. })
    }
}

/// A flow that sends at its rate whatever happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstantRateConfig {
    /// The sender.
    pub from: NodeId,
    /// The receiver, which only counts.
    pub to: NodeId,
    /// How queues treat its packets.
    pub class: Class,
    /// Bits a second on the link, framing included.
    pub rate_bps: u64,
    /// IP packet.
    pub datagram_bytes: u32,
    /// Its packets may be marked, but the rate does not change.
    pub ecn: bool,
}

/// The record of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FlowStatistics {
    /// Payload bytes that arrived, each counted once (of a constant-rate flow: all that arrived).
    pub delivered_bytes: u64,
    /// Packets sent, acknowledgements and retransmissions included.
    pub sent_packets: u64,
    /// Segments sent again.
    pub retransmissions: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Reductions of the window because of marks.
    pub ecn_reductions: u64,
    /// When the last byte that was written had arrived; none while bytes are outstanding.
    pub completed: Option<Time>,
}

/// A flow at work.
pub(crate) struct Flow {
    ends: [SimAddress; 2],
    class: Class,
    ecn: bool,
    stopped: bool,
    statistics: FlowStatistics,
    kind: FlowKind,
}

impl Flow {
    /// Reads what its next packet needs, and returns something of it.
    pub(crate) fn glance(&self, is_ack: bool) -> u64 {
        let half = match &self.kind {
            FlowKind::Tcp(tcp) if is_ack => tcp.sender.glance(),
            FlowKind::Tcp(tcp) => tcp.receiver.expected() ^ tcp.sender.end(),
            FlowKind::ConstantRate { .. } => 0,
        };
        half ^ self.statistics.delivered_bytes ^ u64::from(self.ends[0].node)
    }
}

enum FlowKind {
    Tcp(Box<Tcp>),
    ConstantRate { rate: Rate, datagram_bytes: u32 },
}

struct Tcp {
    transport: Transport,
    segment_bytes: u32,
    sender: Sending,
    receiver: Receiver,
    /// The earliest timer that is on the agenda.
    timer: Option<Time>,
}
