//! All packets that are anywhere, in one slab: in the steady state nothing is allocated.

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

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a queue's mark does to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ecn {
    /// Its sender does not understand marks.
    NotCapable,
    Capable,
    Marked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// In its buffer.
    Bytes,
    Blank {
        tag: u64,
    },
    Segment {
        flow: FlowId,
        sequence: u64,
        is_ack: bool,
        echo: bool,
    },
    /// Of a constant-rate flow.
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
    /// When its last bit is at the other end of the link that it is on, or its node's cores are through with it.
    pub(crate) arrives: Time,
    /// The port whose link it is on.
    pub(crate) port: PortId,
    /// Of that port, or of one that a node sent to itself of the node, when it came there: another one now means that it
    /// is lost.
    pub(crate) epoch: u32,
    pub(crate) class: Class,
    pub(crate) ecn: Ecn,
    pub(crate) hops: u8,
}

impl Record {
    pub(crate) const fn wire_bytes(&self) -> u32 {
        wire_bytes(self.datagram_bytes)
    }

    /// With a payload that is not in the record.
    pub(crate) fn view<'a>(&self, buffer: &'a [u8]) -> Packet<'a> {
        let body = match self.content {
            Content::Bytes => Body::Bytes(buffer),
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
        Packet { from: self.from, to: self.to, class: self.class, ecn_marked, body }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Packets {
    records: Vec<Record>,
    /// Beside the records, which are small and often looked at.
    buffers: Vec<Vec<u8>>,
    free: Vec<PacketId>,
}

impl Packets {
    pub(crate) fn add(&mut self, record: Record) -> PacketId {
        match self.free.pop() {
            Some(id) => {
                self.records[id.index()] = record;
                id
            }
            None => {
                assert!(self.records.len() < PacketId::NONE.index(), "4 billion packets at once");
                self.records.push(record);
                self.buffers.push(Vec::new());
                PacketId(self.records.len() as u32 - 1)
            }
        }
    }

    pub(crate) fn fill(&mut self, id: PacketId, payload: &[u8]) {
        let buffer = &mut self.buffers[id.index()];
        buffer.clear();
        buffer.extend_from_slice(payload);
    }

    pub(crate) fn release(&mut self, id: PacketId) {
        self.free.push(id);
    }

    pub(crate) fn copy(&mut self, id: PacketId) -> PacketId {
        let twin = self.add(self.records[id.index()]);
        if self.records[id.index()].content == Content::Bytes {
            let buffer = self.take_buffer(id);
            self.fill(twin, &buffer);
            self.put_buffer(id, buffer);
        }
        twin
    }

    pub(crate) fn get(&self, id: PacketId) -> &Record {
        &self.records[id.index()]
    }

    pub(crate) fn get_mut(&mut self, id: PacketId) -> &mut Record {
        &mut self.records[id.index()]
    }

    pub(crate) fn view(&self, id: PacketId) -> Packet<'_> {
        self.get(id).view(&self.buffers[id.index()])
    }

    pub(crate) fn buffer_mut(&mut self, id: PacketId) -> &mut [u8] {
        &mut self.buffers[id.index()]
    }

    /// While somebody looks at it; [`Self::put_buffer`] gives it back, so that it is used again.
    pub(crate) fn take_buffer(&mut self, id: PacketId) -> Vec<u8> {
        std::mem::take(&mut self.buffers[id.index()])
    }

    pub(crate) fn put_buffer(&mut self, id: PacketId, buffer: Vec<u8>) {
        self.buffers[id.index()] = buffer;
    }

    pub(crate) fn alive(&self) -> usize {
        self.records.len() - self.free.len()
    }
}
