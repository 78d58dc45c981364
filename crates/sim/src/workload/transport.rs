//! How flows of a scenario are sent, whatever they carry.

use std::time::Duration;

use crate::net::{Class, NodeId, TcpConfig, Topology, Transport};

/// The scenario's settings of its connections: a [`TcpConfig`] without sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportPlan {
    /// The reaction to congestion.
    pub transport: Transport,
    /// Marks instead of drops.
    pub ecn: bool,
    /// Window at the start; ten segments unless given.
    pub window_initial_bytes: Option<u64>,
    /// No more is ever on the way.
    pub window_max_bytes: u64,
    /// Shortest retransmission timeout.
    pub rto_min: Duration,
    /// After so many duplicate acknowledgements a segment is sent again.
    pub duplicates: u32,
}

impl Default for TransportPlan {
    fn default() -> Self {
        let usual = TcpConfig::new(NodeId(0), NodeId(1));
        Self {
            transport: usual.transport,
            ecn: usual.ecn,
            window_initial_bytes: None,
            window_max_bytes: usual.window_max_bytes,
            rto_min: usual.rto_min,
            duplicates: usual.duplicates,
        }
    }
}

impl TransportPlan {
    /// Segments at the start (RFC 6928).
    const WINDOW_INITIAL: u64 = 10;
    /// IPv4 and TCP headers.
    const HEADER_BYTES: u32 = 40;

    /// A connection of it, whose segments are as long as the sender's link takes them.
    pub(crate) fn connection(
        &self,
        topology: &Topology,
        from: NodeId,
        to: NodeId,
        class: Class,
    ) -> TcpConfig {
        let segment_bytes = mtu(topology, from) - Self::HEADER_BYTES;
        TcpConfig {
            class,
            transport: self.transport,
            segment_bytes,
            ecn: self.ecn,
            duplicates: self.duplicates,
            window_initial_bytes: self
                .window_initial_bytes
                .unwrap_or(Self::WINDOW_INITIAL * u64::from(segment_bytes)),
            window_max_bytes: self.window_max_bytes,
            rto_min: self.rto_min,
            from,
            to,
        }
    }
}

/// Longest IP packet of a host's first link.
pub(crate) fn mtu(topology: &Topology, host: NodeId) -> u32 {
    let first = topology.neighbours(host).next();
    first.map_or(1500, |(_, link)| topology.links()[link.0 as usize].config.mtu)
}
