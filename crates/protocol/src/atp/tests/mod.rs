//! Switch and server on their own, as timelines of the paper's figures. Whole networks with real workers are in `tests/atp_exact`.

mod server;
mod strangers;
mod switch;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use fanin_wire::*;

use crate::machine::{Endpoint, Instant, Verdict};

const ELEMENTS: usize = 64;
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
/// The next machine on the way to the server, wherever a test needs one.
const UP: u16 = 100;

const SUM: Collective = Collective {
    sequence: 0,
    dtype: Dtype::Float32,
    op: Op::Sum,
    pattern: Pattern::AllReduce,
    elements: 10_000,
    wire_dtype: WireDtype::SharedExponent,
};

/// A packet of job 3 with the same value in every element.
#[derive(Clone, Copy, Debug)]
struct Packet {
    job: u32,
    generation: u16,
    header: GradientHeader,
    value: [u8; 4],
    elements: usize,
}

/// Fragment `sequence` of the worker at `bit` of a rack of two, the only one.
fn fragment(bit: u32, sequence: u64, value: i32) -> Packet {
    Packet {
        job: 3,
        generation: 0,
        header: GradientHeader {
            flags: Flags::default(),
            directions: Directions { level: 0, bitmaps: [1 << bit, 1, 0, 0], fan_in_degrees: [2, 1, 0, 0] },
            sequence,
            aggregator_index: 7,
            fragment: sequence as u32,
            collective: SUM,
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: GradientHeader::STATIC_FACTOR,
        },
        value: value.to_le_bytes(),
        elements: ELEMENTS,
    }
}

impl Packet {
    fn with(mut self, change: impl FnOnce(&mut GradientHeader)) -> Self {
        change(&mut self.header);
        self
    }

    fn resent(self) -> Self {
        self.with(|header| header.flags.resend = true)
    }

    fn at(self, index: u32) -> Self {
        self.with(|header| header.aggregator_index = index)
    }

    /// The same fragment of a bfloat16 tensor, with this value.
    fn half(self, value: f32) -> Self {
        let [_, _, low, high] = value.to_le_bytes();
        let packet = self.with(|header| {
            header.collective.dtype = Dtype::Bfloat16;
            header.flags.half = true;
        });
        Self { value: [low, high, low, high], ..packet }
    }

    fn directed(self, directions: Directions) -> Self {
        self.with(|header| header.directions = directions)
    }

    /// The parameters, or the request, that a server answers with.
    fn answer(self) -> Self {
        self.with(|header| {
            header.flags = Flags { is_ack: true, ..header.flags };
            header.directions = Directions::default();
        })
    }

    fn bytes(&self) -> Vec<u8> {
        let preamble = Preamble {
            kind: Kind::Gradient,
            job: JobId(self.job),
            generation: Generation(self.generation),
            worker: WorkerId::ALL,
            shard: ShardId(0),
        };
        let mut packet = vec![0; self.header.packet_bytes(self.elements)];
        GradientPacket::write(&mut packet, KEY, &preamble, &self.header, self.elements, |payload| {
            payload.as_chunks_mut().0.fill(self.value);
        });
        packet
    }

    fn to<E: Endpoint<Address = u16>>(self, machine: &mut E, from: u16) -> Verdict {
        self.to_at(machine, from, 0)
    }

    fn to_at<E: Endpoint<Address = u16>>(self, machine: &mut E, from: u16, ns: u64) -> Verdict {
        machine.handle_packet(Instant(ns), from, &self.bytes())
    }
}

/// All that a machine sends: recipients, and each packet.
fn packets<E: Endpoint<Address = u16>>(machine: &mut E) -> Vec<(Vec<u16>, Vec<u8>)> {
    let mut out = Vec::new();
    let mut train = vec![0; 65536];
    while let Some(transmit) = machine.poll_transmit(Instant(0), &mut train) {
        let (to, bytes, segment_bytes) = (transmit.to.to_vec(), transmit.bytes, transmit.segment_bytes);
        for packet in train[..bytes].chunks(segment_bytes) {
            out.push((to.clone(), packet.to_vec()));
        }
    }
    out
}

/// A packet in one line: number, level and bitmaps where it is a fragment, flags, and the first value: an integer in fragments,
/// a float in parameters.
fn line(packet: &[u8]) -> String {
    let preamble = Preamble::parse(packet).unwrap();
    if preamble.kind == Kind::Abort {
        return "abort".to_string();
    }
    let GradientPacket { header, payload, .. } = GradientPacket::parse(preamble, packet).unwrap();
    let Flags { resend, collision, ecn, is_ack, overflow, restore, stalled, half } = header.flags;
    let mut flags = String::new();
    for (set, name) in [
        (resend, " resend"),
        (collision, " collision"),
        (ecn, " ecn"),
        (overflow, " overflow"),
        (restore, " restore"),
        (stalled, " stalled"),
        (half, " half"),
    ] {
        flags.push_str(if set { name } else { "" });
    }
    let value = payload.first_chunk().map_or([0; 4], |bytes| *bytes);
    // A bfloat16 is the upper half of a float32.
    let value = if half { [0, 0, value[0], value[1]] } else { value };
    if is_ack {
        let what =
            if payload.is_empty() { "request".to_string() } else { format!("{}", f32::from_le_bytes(value)) };
        let flags = flags.replace("resend", "lost");
        return format!("#{} parameters{flags}: {what}", header.sequence);
    }
    let [a, b, c, d] = header.directions.bitmaps;
    let bitmaps = match (c, d) {
        (0, 0) => format!("{a:b}/{b:b}"),
        _ => format!("{a:b}/{b:b}/{c:b}/{d:b}"),
    };
    let value =
        if half { f32::from_le_bytes(value).to_string() } else { i32::from_le_bytes(value).to_string() };
    format!("#{} L{} {bitmaps}{flags}: {value}", header.sequence, header.directions.level)
}

fn sent<E: Endpoint<Address = u16>>(machine: &mut E) -> Vec<String> {
    packets(machine).iter().map(|(to, packet)| format!("{to:?} {}", line(packet))).collect()
}
