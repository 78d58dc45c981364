//! Captures: packets framed in Ethernet, IPv4 and UDP (of flows TCP), as Wireshark opens them.
//!
//! Node 0 is 10.0.0.1 and 02:00:00:00:00:01, and so on. Payloads that exist only as a length are
//! cut off, as by a capture's snap length. Checksums of UDP and TCP are zero: UDP's says "none",
//! TCP's cannot be without payload.

use std::io::{self, BufWriter, Write};

use super::packet::{Body, Packet};
use super::packets::{Ecn, Record, UDP_HEADER_BYTES};
use super::time::Time;

const ETHERNET_BYTES: usize = 14;
/// Ethernet, IPv4 and the longer of UDP and TCP.
const HEADERS_BYTES_MAX: usize = ETHERNET_BYTES + 40;

pub(crate) struct Pcap {
    out: BufWriter<Box<dyn Write>>,
    /// The first one; nothing is written after it.
    failed: Option<io::Error>,
}

impl Pcap {
    pub(crate) fn new(out: Box<dyn Write>) -> Self {
        let mut out = BufWriter::new(out);
        let mut header = [0; 24];
        // With nanoseconds; version 2.4; no limit; Ethernet.
        header[..4].copy_from_slice(&0xa1b2_3c4d_u32.to_le_bytes());
        header[4..6].copy_from_slice(&2_u16.to_le_bytes());
        header[6..8].copy_from_slice(&4_u16.to_le_bytes());
        header[16..20].copy_from_slice(&(1_u32 << 18).to_le_bytes());
        header[20..].copy_from_slice(&1_u32.to_le_bytes());
        let failed = out.write_all(&header).err();
        Self { out, failed }
    }

    pub(crate) fn packet(&mut self, now: Time, packet: &Packet<'_>, record: &Record) {
        if self.failed.is_some() {
            return;
        }
        let payload = if let Body::Bytes(bytes) = packet.body { bytes } else { &[] };
        let mut headers = [0; HEADERS_BYTES_MAX];
        let length = frame(&mut headers, packet, record);
        let nanos = now.instant().0;
        let original = ETHERNET_BYTES + record.datagram_bytes as usize;
        let fields =
            [nanos / 1_000_000_000, nanos % 1_000_000_000, (length + payload.len()) as u64, original as u64];
        let mut head = [0; 16];
        for (at, field) in fields.into_iter().enumerate() {
            head[4 * at..][..4].copy_from_slice(&(field as u32).to_le_bytes());
        }
        let written = [&head[..], &headers[..length], payload]
            .into_iter()
            .try_for_each(|part| self.out.write_all(part));
        self.failed = written.err();
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.failed.take().map_or_else(|| self.out.flush(), Err)
    }
}

/// Writes all headers and returns their length.
fn frame(out: &mut [u8; HEADERS_BYTES_MAX], packet: &Packet<'_>, record: &Record) -> usize {
    let [to, from] = [packet.to.node, packet.from.node].map(|node| (node + 1).to_be_bytes());
    out[0] = 2;
    out[2..6].copy_from_slice(&to);
    out[6] = 2;
    out[8..12].copy_from_slice(&from);
    out[12] = 8; // IPv4
    let (ip, transport) = out[ETHERNET_BYTES..].split_at_mut(20);
    ip[0] = 0x45;
    ip[1] = match record.ecn {
        Ecn::NotCapable => 0,
        Ecn::Capable => 2,
        Ecn::Marked => 3,
    };
    // A datagram longer than the field is dropped before it is sent.
    ip[2..4].copy_from_slice(&(record.datagram_bytes as u16).to_be_bytes());
    ip[6] = 0x40; // not to be fragmented
    ip[8] = 64 - record.hops;
    ip[12..16].copy_from_slice(&[10, from[1], from[2], from[3]]);
    ip[16..20].copy_from_slice(&[10, to[1], to[2], to[3]]);
    transport[..2].copy_from_slice(&packet.from.port.to_be_bytes());
    transport[2..4].copy_from_slice(&packet.to.port.to_be_bytes());
    let transport_bytes = if let Body::Segment(segment) = packet.body {
        ip[9] = 6;
        let number = (segment.sequence as u32).to_be_bytes();
        transport[if segment.is_ack { 8..12 } else { 4..8 }].copy_from_slice(&number);
        transport[12] = 5 << 4;
        transport[13] = 0x10 | u8::from(segment.echo) << 6;
        transport[14..16].fill(0xff);
        20
    } else {
        ip[9] = 17;
        let length = record.datagram_bytes - UDP_HEADER_BYTES + 8;
        transport[4..6].copy_from_slice(&(length as u16).to_be_bytes());
        8
    };
    let sum: u32 = ip.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!((folded & 0xffff) + (folded >> 16)) as u16).to_be_bytes());
    ETHERNET_BYTES + 20 + transport_bytes
}
