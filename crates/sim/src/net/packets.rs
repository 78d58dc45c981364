//! All packets that are anywhere, in one slab: in the steady state nothing is allocated. Copies of
//! a packet share its payload.

use super::ids::{FlowId, PortId, SimAddress};
use super::packet::{Body, Packet, Segment};
use super::queue::Class;
use super::time::Time;

/// IPv4 and UDP headers.
pub(crate) const UDP_HEADER_BYTES: u32 = 28;
/// IPv4 and TCP headers.
pub(crate) const TCP_HEADER_BYTES: u32 = 40;
/// Ethernet's own, which a host sees of a frame besides the IP packet.
pub(crate) const ETHERNET_HEADER_BYTES: u32 = 14;
/// Ethernet header, frame check sequence, preamble and gap.
const FRAMING_BYTES: u32 = 38;
/// The shortest Ethernet frame, with preamble and gap.
const WIRE_BYTES_MIN: u32 = 84;

/// Time on a link, in bytes, of an IP packet.
#[inline]
pub(crate) const fn wire_bytes(datagram_bytes: u32) -> u32 {
    let bytes = datagram_bytes.saturating_add(FRAMING_BYTES);
    if bytes < WIRE_BYTES_MIN { WIRE_BYTES_MIN } else { bytes }
}

/// A packet's number in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketId(pub(crate) u32);

impl PacketId {
    /// No packet: the end of a list.
    pub(crate) const NONE: Self = Self(u32::MAX);

    #[inline]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A payload's number among the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(u32);

/// The effect of a queue's mark on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ecn {
    /// Its sender does not understand marks.
    NotCapable,
    Capable,
    Marked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// In a buffer. A simulation that carries only a sample of a payload declares the rest: the
    /// datagram is longer than the buffer says.
    Bytes(BufferId),
    Blank {
        tag: u64,
    },
    Segment {
        flow: FlowId,
        sequence: u64,
        is_ack: bool,
        echo: bool,
    },
    /// A packet of a constant-rate flow.
    Datagram {
        flow: FlowId,
    },
}

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Record {
    pub(crate) from: SimAddress,
    pub(crate) to: SimAddress,
    pub(crate) content: Content,
    pub(crate) datagram_bytes: u32,
    /// The next one in the same queue, on the same link, or for the same cores.
    pub(crate) next: PacketId,
    /// When the next one's last bit is at the other end of the link that both are on, or their
    /// node's cores are through with it.
    pub(crate) next_at: Time,
    /// The port whose link it is on.
    pub(crate) port: PortId,
    /// The epoch of that port when the packet came there, or of the node for a packet that a node
    /// sent to itself. If the epoch is another one now, the packet is lost.
    pub(crate) epoch: u32,
    pub(crate) class: Class,
    pub(crate) ecn: Ecn,
    pub(crate) hops: u8,
    /// The rest of its flow when it was sent, in segments, for queues that send the least first; 0
    /// for other packets.
    pub(crate) remaining: u16,
}

const _: () = assert!(size_of::<Record>() == 64);

impl Record {
    pub(crate) const fn wire_bytes(&self) -> u32 {
        wire_bytes(self.datagram_bytes)
    }

    /// With a payload that is not in the record.
    pub(crate) fn view<'a>(&self, buffer: &'a [u8]) -> Packet<'a> {
        let body = match self.content {
            Content::Bytes(_) => Body::Bytes(buffer),
            Content::Blank { tag } => Body::Blank { bytes: self.datagram_bytes - UDP_HEADER_BYTES, tag },
            Content::Datagram { flow } => {
                Body::Blank { bytes: self.datagram_bytes - UDP_HEADER_BYTES, tag: flow.0.into() }
            }
            Content::Segment { flow, sequence, is_ack, echo } => {
                let bytes = self.datagram_bytes - TCP_HEADER_BYTES;
                Body::Segment(Segment { flow, sequence, bytes, is_ack, echo })
            }
        };
        let ecn_marked = self.ecn == Ecn::Marked;
        let Self { from, to, class, datagram_bytes, hops, .. } = *self;
        Packet { from, to, class, datagram_bytes, hops, ecn_marked, body }
    }
}

/// A payload, and how many packets it is of.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    users: u32,
}

/// At most so many unused buffers keep their memory. Otherwise a burst at the beginning would hold
/// memory to the end.
const SPARE_BUFFERS: usize = 1 << 12;

#[derive(Debug, Default)]
pub(crate) struct Packets {
    records: Vec<Record>,
    free: Vec<PacketId>,
    /// Beside the records, which are small and often looked at.
    buffers: Vec<Buffer>,
    spare: Vec<BufferId>,
}

impl Packets {
    #[inline]
    pub(crate) fn add(&mut self, record: Record) -> PacketId {
        if let Content::Bytes(buffer) = record.content {
            self.buffers[buffer.0 as usize].users += 1;
        }
        match self.free.pop() {
            Some(id) => {
                self.records[id.index()] = record;
                id
            }
            None => {
                assert!(self.records.len() < PacketId::NONE.index(), "4 billion packets at once");
                self.records.push(record);
                PacketId(self.records.len() as u32 - 1)
            }
        }
    }

    /// Copies a payload into a buffer, which stays until [`Self::let_go`] and longer while packets
    /// have it.
    pub(crate) fn keep(&mut self, payload: &[u8]) -> BufferId {
        let id = self.spare.pop().unwrap_or_else(|| {
            self.buffers.push(Buffer::default());
            BufferId(self.buffers.len() as u32 - 1)
        });
        let buffer = &mut self.buffers[id.0 as usize];
        buffer.users = 1;
        buffer.bytes.clear();
        buffer.bytes.extend_from_slice(payload);
        id
    }

    pub(crate) fn let_go(&mut self, id: BufferId) {
        let buffer = &mut self.buffers[id.0 as usize];
        buffer.users -= 1;
        if buffer.users == 0 {
            if self.spare.len() >= SPARE_BUFFERS {
                buffer.bytes = Vec::new();
            }
            self.spare.push(id);
        }
    }

    #[inline]
    pub(crate) fn release(&mut self, id: PacketId) {
        if let Content::Bytes(buffer) = self.records[id.index()].content {
            self.let_go(buffer);
        }
        self.free.push(id);
    }

    pub(crate) fn copy(&mut self, id: PacketId) -> PacketId {
        self.add(self.records[id.index()])
    }

    #[inline]
    pub(crate) fn get(&self, id: PacketId) -> &Record {
        &self.records[id.index()]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: PacketId) -> &mut Record {
        &mut self.records[id.index()]
    }

    pub(crate) fn view(&self, id: PacketId) -> Packet<'_> {
        let record = self.get(id);
        let payload = match record.content {
            Content::Bytes(buffer) => &self.buffers[buffer.0 as usize].bytes[..],
            _ => &[],
        };
        record.view(payload)
    }

    /// To change a packet's payload, which is its own then.
    pub(crate) fn payload_mut(&mut self, id: PacketId) -> Option<&mut [u8]> {
        let Content::Bytes(shared) = self.records[id.index()].content else { return None };
        let mut own = shared;
        if self.buffers[shared.0 as usize].users > 1 {
            let payload = self.take(shared);
            own = self.keep(&payload);
            self.put_back(shared, payload);
            self.let_go(shared);
            self.records[id.index()].content = Content::Bytes(own);
        }
        Some(&mut self.buffers[own.0 as usize].bytes)
    }

    /// While somebody looks at it; [`Self::put_back`] gives it back, for others that share it and
    /// to be used again.
    pub(crate) fn take(&mut self, id: BufferId) -> Vec<u8> {
        std::mem::take(&mut self.buffers[id.0 as usize].bytes)
    }

    pub(crate) fn put_back(&mut self, id: BufferId, bytes: Vec<u8>) {
        self.buffers[id.0 as usize].bytes = bytes;
    }

    pub(crate) fn alive(&self) -> usize {
        self.records.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{Actor, Context, LinkConfig, Network, NetworkConfig, NodeId, Parts, Topology};
    use std::time::Duration;

    struct Sink;

    impl Actor for Sink {
        fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}
    }

    #[test]
    fn a_multicast_has_one_payload_until_a_mark_makes_one_its_own() {
        let parts = Parts::uniform(LinkConfig::new(100_000_000_000, Duration::from_micros(1)));
        let topology = Topology::one_rack(9, &parts).expect("a rack");
        let hosts: Vec<NodeId> = topology.hosts().collect();
        let mut network = Network::new(topology, NetworkConfig::default()).expect("a network");
        let sender = network.add_actor(hosts[0], 1, Sink);
        let receivers: Vec<SimAddress> = hosts[1..].iter().map(|host| SimAddress::new(*host, 1)).collect();
        network.with_actor(sender, |_: &mut Sink, context| {
            context.send_to_all(&receivers, Class::default(), b"a sum", 0);
            let packets = &mut context.core.packets;
            assert_eq!((packets.alive(), packets.buffers.len(), packets.buffers[0].users), (8, 1, 8));
            packets.payload_mut(PacketId(3)).expect("bytes")[0] = b'A';
            assert_eq!(
                (packets.buffers.len(), packets.buffers[0].users, packets.buffers[1].users),
                (2, 7, 1)
            );
            let read = |id: u32| match packets.view(PacketId(id)).body {
                Body::Bytes(bytes) => bytes.to_vec(),
                _ => panic!("bytes"),
            };
            assert_eq!((read(2), read(3)), (b"a sum".to_vec(), b"A sum".to_vec()));
        });
    }
}
