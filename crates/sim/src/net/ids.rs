//! How things in the network are named: by flat numbers, in the order of their making.

/// A host or a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A link, with both its directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// A direction of a link: the port that sends into it, with its queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

/// A machine or application on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ActorId(pub u32);

/// A TCP-like connection or a constant-rate flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// How machines name each other: several may live on one node, each on a port (UDP's, not a
/// switch's) of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SimAddress {
    /// [`NodeId`] as a number.
    pub node: u32,
    /// UDP port. Ports from [`SimAddress::FLOW_PORTS`] on are the background flows'.
    pub port: u16,
}

impl SimAddress {
    /// First port that belongs to flows.
    pub const FLOW_PORTS: u16 = 0xc000;

    /// The machine at `port` of `node`.
    #[must_use]
    pub const fn new(node: NodeId, port: u16) -> Self {
        Self { node: node.0, port }
    }
}

impl NodeId {
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

impl LinkId {
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The port of the link's first end, and that of its second.
    #[must_use]
    #[inline]
    pub const fn ports(self) -> [PortId; 2] {
        [PortId(self.0 * 2), PortId(self.0 * 2 + 1)]
    }
}

impl PortId {
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The link that it sends into.
    #[must_use]
    #[inline]
    pub const fn link(self) -> LinkId {
        LinkId(self.0 / 2)
    }

    /// The port at the link's other end, which sends the other way.
    #[must_use]
    #[inline]
    pub const fn opposite(self) -> Self {
        Self(self.0 ^ 1)
    }
}
