//! Timelines of one worker; the test plays the network and the server.

mod losses;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt::Write;
use core::time::Duration;
use fanin_wire::{
    Abort, AbortReason, Directions, Dtype, GRADIENT_HEADER_BYTES, GradientPacket, JobId, Key, Op, WireDtype,
};

use super::*;
use crate::aggregation::halves::Halves;
use crate::aggregation::{EXPONENT_UNKNOWN, Overflow};
use crate::machine::{Elements, Instant};

const ELEMENTS: usize = 64;
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
const UPSTREAM: u8 = 7;
/// Before anything was measured: the ceiling.
const TIMEOUT_MS: u64 = 40;

#[derive(Debug, Clone, PartialEq)]
enum Numbers {
    Float(Vec<f32>),
    Half(Vec<u16>),
    Bfloat(Vec<u16>),
    Int(Vec<i32>),
}

impl Tensor for Numbers {
    fn elements(&mut self) -> Elements<'_> {
        match self {
            Self::Float(x) => Elements::Float32(x),
            Self::Half(x) => Elements::Float16(x),
            Self::Bfloat(x) => Elements::Bfloat16(x),
            Self::Int(x) => Elements::Int32(x),
        }
    }
}

fn config(window_max: u16) -> JobConfig {
    JobConfig {
        id: JobId(5),
        key: KEY,
        generation: Generation(2),
        workers: 2,
        elements: ELEMENTS as u16,
        window_max,
        aggregators: 1000,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    }
}

/// The worker and what it sent last of each fragment.
struct Line {
    worker: Worker<u8, Numbers, Directions>,
    config: JobConfig,
    now: Instant,
    headers: BTreeMap<u64, GradientHeader>,
    payloads: BTreeMap<u64, Vec<u8>>,
}

/// How the server's answer differs from plain parameters.
#[derive(Clone, Copy, Default)]
struct Answer {
    ecn: bool,
    /// A packet of the fragment was lost.
    lost: bool,
    next_index: u32,
    next_exponent: i16,
}

impl Line {
    fn new(config: JobConfig) -> Self {
        // So many senders that windows of 20 packets may be too much for a queue.
        let directions = Directions { level: 0, bitmaps: [2, 1, 0, 0], fan_in_degrees: [32, 1, 0, 0] };
        let retransmission = RetransmissionConfig {
            floor: Duration::from_millis(2),
            ceiling: Duration::from_millis(TIMEOUT_MS),
        };
        let worker = Worker::new(config, directions, UPSTREAM, retransmission);
        Self { worker, config, now: Instant(0), headers: BTreeMap::new(), payloads: BTreeMap::new() }
    }

    /// With a tensor of so many fragments of ones.
    fn with_fragments(config: JobConfig, fragments: usize) -> Self {
        let mut line = Self::new(config);
        line.worker.submit(Numbers::Float(vec![1.0; fragments * ELEMENTS]), Op::Sum);
        line
    }

    fn resume(&mut self, generation: Generation) {
        let (id, directions) = (self.config.id, self.worker.directions);
        self.worker.resume(self.now, WorkerPlan { id, key: KEY, generation, directions, upstream: UPSTREAM });
    }

    fn at_ms(&mut self, ms: u64) -> &mut Self {
        self.now = Instant(ms * 1_000_000);
        self.worker.handle_timeout(self.now);
        self
    }

    /// The packets that the worker sends: sequence numbers, runs shortened, `r` sent again, `o`
    /// original values, `p` handed back.
    fn sent(&mut self) -> String {
        let mut train = vec![0; 65536];
        let mut packets = Vec::new();
        while let Some(Transmit { to, bytes, segment_bytes }) =
            self.worker.poll_transmit(self.now, &mut train)
        {
            assert_eq!(to, [UPSTREAM]);
            for bytes in train[..bytes].chunks(segment_bytes) {
                let preamble = Preamble::parse(bytes).expect("ours");
                assert_eq!((preamble.job, preamble.generation), (self.config.id, self.worker.generation()));
                let packet = GradientPacket::parse(preamble, bytes).expect("ours");
                assert_eq!(packet.header.directions, self.worker.directions);
                let kind = match packet.header.flags {
                    Flags { restore: true, resend: true, overflow: false, is_ack: false, .. } => "p",
                    Flags { restore: false, resend: true, overflow: true, is_ack: false, .. } => "o",
                    Flags { restore: false, resend: true, overflow: false, is_ack: false, .. } => "r",
                    flags => {
                        assert_eq!(flags, Flags { half: flags.half, ..Flags::default() });
                        ""
                    }
                };
                packets.push((packet.header.sequence, kind));
                self.headers.insert(packet.header.sequence, packet.header);
                self.payloads.insert(packet.header.sequence, packet.payload.to_vec());
            }
        }
        let mut said = String::new();
        for run in packets.chunk_by(|a, b| a.1 == b.1 && a.0 + 1 == b.0) {
            let ((first, kind), (last, _)) = (run[0], run[run.len() - 1]);
            let space = if said.is_empty() { "" } else { " " };
            let end = if last > first { alloc::format!("-{last}") } else { String::new() };
            write!(said, "{space}{first}{end}{kind}").expect("a string");
        }
        said
    }

    /// A packet from the server about a fragment.
    fn said_by_server(&self, sequence: u64, flags: Flags, answer: Answer, values: Option<&[u8]>) -> Vec<u8> {
        let mut header = self.headers[&sequence];
        let half = header.flags.half && values.is_some();
        header.flags = Flags { is_ack: true, ecn: answer.ecn, resend: answer.lost, half, ..flags };
        header.directions.bitmaps[0] = answer.next_index;
        header.next_exponent = answer.next_exponent;
        let preamble = self.worker.preamble();
        let mut out = vec![0; 65536];
        let elements = values.map_or(0, |values| values.len() / header.element_bytes());
        let bytes = GradientPacket::write(&mut out, KEY, &preamble, &header, elements, |payload| {
            payload.copy_from_slice(values.unwrap_or_default());
        });
        out.truncate(bytes);
        out
    }

    fn hear(&mut self, packet: &[u8]) -> Verdict {
        self.worker.handle_packet(self.now, UPSTREAM, packet)
    }

    /// Parameters of zeros.
    fn parameters(&mut self, sequence: u64) -> Verdict {
        self.answer(sequence, Answer::default())
    }

    fn answer(&mut self, sequence: u64, answer: Answer) -> Verdict {
        let packet = self.said_by_server(sequence, Flags::default(), answer, Some(&[0; 4 * ELEMENTS]));
        self.hear(&packet)
    }

    fn request(&mut self, sequence: u64) -> Verdict {
        let flags = Flags { overflow: true, ..Flags::default() };
        let packet = self.said_by_server(sequence, flags, Answer::default(), None);
        self.hear(&packet)
    }

    fn completed(&mut self) -> Vec<Numbers> {
        let mut done = Vec::new();
        while let Some(event) = self.worker.poll_event() {
            let WorkerEvent::Completed(tensor, _) = event else { panic!("{event:?}") };
            done.push(tensor);
        }
        done
    }

    /// Every fragment comes back as `sum` makes it of the int32 values that were sent, until there
    /// are no more.
    fn settle(&mut self, sum: impl Fn(&GradientHeader, i32) -> [u8; 4]) -> Vec<Numbers> {
        while !self.sent().is_empty() {
            let headers = core::mem::take(&mut self.headers);
            for (sequence, header) in &headers {
                let mut halves = Halves::default();
                let preamble = self.worker.preamble();
                let packet = FragmentPacket { preamble, header: *header, payload: &self.payloads[sequence] };
                let scaled = halves.widen(packet, self.config.workers).expect("a finite exponent").payload;
                let summed = scaled.as_chunks().0.iter();
                let mut values: Vec<u8> =
                    summed.flat_map(|value| sum(header, i32::from_le_bytes(*value))).collect();
                if header.flags.half {
                    let half = header.collective.half().expect("a type of two bytes");
                    let parameters = core::mem::replace(&mut values, vec![0; 2 * ELEMENTS]);
                    halves.narrow(half, &parameters, &mut values);
                }
                self.headers.insert(*sequence, *header);
                let packet =
                    self.said_by_server(*sequence, Flags::default(), Answer::default(), Some(&values));
                assert_eq!(self.hear(&packet), Verdict::Absorb);
            }
            self.headers.clear();
        }
        self.completed()
    }
}

const ABSORB: Verdict = Verdict::Absorb;
const DUPLICATE: Verdict = Verdict::Drop(Reason::Duplicate);

#[test]
fn the_first_window_is_200_packets_and_parameters_slide_it_in_order() {
    let mut line = Line::with_fragments(config(1000), 300);
    assert_eq!(line.sent(), "0-199");
    // A fragment comes back, and the window of 200 grows by an MTU, four packets.
    let timeline = [(0, "200-204"), (1, "205-209"), (2, "210-214")];
    for (sequence, sends) in timeline {
        assert_eq!(line.parameters(sequence), ABSORB);
        assert_eq!(line.sent(), sends, "after parameters {sequence}");
    }
    assert_eq!(line.worker.progress().expected, 3);
    let header = line.headers[&204];
    assert_eq!((header.fragment, header.collective.elements), (204, 300 * ELEMENTS as u32));
}

#[test]
fn the_jobs_window_ends_where_a_place_is_still_taken() {
    let mut line = Line::with_fragments(config(8), 20);
    assert_eq!(line.sent(), "0-7");
    // 8 has the place of 0, so that 1 and 2 make no room.
    let timeline = [(1, ""), (2, ""), (0, "8-10"), (3, "11")];
    for (sequence, sends) in timeline {
        line.parameters(sequence);
        assert_eq!(line.sent(), sends, "after parameters {sequence}");
    }
}

#[test]
fn an_index_that_the_server_moves_holds_for_the_next_fragment_of_its_place() {
    let mut line = Line::with_fragments(config(4), 12);
    line.sent();
    let first = line.headers[&0].aggregator_index;
    let moved = (first + 1) % 1000;
    for sequence in 0..4 {
        let next_index = if sequence == 0 { moved } else { line.headers[&sequence].aggregator_index };
        line.answer(sequence, Answer { next_index, ..Answer::default() });
    }
    assert_eq!(line.sent(), "4-7");
    assert_eq!(line.headers[&4].aggregator_index, moved);
    assert_eq!(line.headers[&5].aggregator_index, line.headers[&1].aggregator_index);
    // Sent again, it still has the index that it was sent with.
    line.at_ms(TIMEOUT_MS);
    assert_eq!(line.sent(), "4-7r");
    assert_eq!(line.headers[&4].aggregator_index, moved);
}

#[test]
fn with_linear_hashing_the_index_is_the_sequence_number() {
    indices_are(Hashing::Linear, |sequence| sequence % 5);
}

#[test]
fn in_a_partition_the_index_is_the_place_in_the_window_from_its_first_aggregator_on() {
    indices_are(Hashing::Partition { first: 1 }, |sequence| 1 + sequence % 4);
}

/// With a window of 4 and 5 aggregators, whatever the server says.
fn indices_are(hashing: Hashing, expected: fn(u64) -> u64) {
    let config = JobConfig { hashing, aggregators: 5, ..config(4) };
    let mut line = Line::with_fragments(config, 12);
    while !line.sent().is_empty() {
        let window: Vec<u64> = core::mem::take(&mut line.headers)
            .into_iter()
            .map(|(sequence, header)| {
                assert_eq!(u64::from(header.aggregator_index), expected(sequence));
                line.headers.insert(sequence, header);
                sequence
            })
            .collect();
        for sequence in window {
            line.answer(sequence, Answer { next_index: 99, ..Answer::default() });
        }
        line.headers.clear();
    }
    assert_eq!(line.completed().len(), 1);
}

#[test]
fn a_request_is_answered_once_with_original_values_and_then_by_timeouts() {
    let mut line = Line::new(config(100));
    // 64 fragments of one window, the second saturates.
    let values: Vec<f32> =
        (0..3 * ELEMENTS).map(|i| if i == 70 { f32::INFINITY } else { i as f32 / 100.0 }).collect();
    line.worker.submit(Numbers::Float(values.clone()), Op::Sum);
    assert_eq!(line.sent(), "0-2");
    let quantised = line.payloads[&1].as_chunks().0[6];
    assert_eq!(i32::from_le_bytes(quantised), i32::MAX);
    assert_eq!(line.request(1), ABSORB);
    assert_eq!(line.request(1), ABSORB);
    assert_eq!(line.sent(), "1o", "once for both");
    assert_eq!(line.request(1), Verdict::Drop(Reason::Duplicate));
    assert_eq!(line.sent(), "", "all would answer at once, again");
    let floats: Vec<f32> =
        line.payloads[&1].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(floats, values[ELEMENTS..2 * ELEMENTS]);
    line.parameters(0);
    line.parameters(2);
    // Also when it is lost on the way.
    assert_eq!(line.at_ms(2 * TIMEOUT_MS).sent(), "1o");
    let sums: Vec<u8> = floats.iter().flat_map(|x| (2.0 * x).to_le_bytes()).collect();
    let packet = line.said_by_server(1, Flags::default(), Answer::default(), Some(&sums));
    line.hear(&packet);
    let Numbers::Float(done) = line.completed().remove(0) else { panic!() };
    assert_eq!(done[70], f32::INFINITY);
    assert_eq!(done[71], 2.0 * values[71]);
    assert_eq!(line.worker.progress().originals_sent, 2);
}

#[test]
fn a_server_that_lost_its_memory_gets_the_parameters_back() {
    let mut line = Line::with_fragments(config(4), 12);
    line.sent();
    let values: Vec<u8> = (0..ELEMENTS as u32).flat_map(u32::to_le_bytes).collect();
    let answer = Answer { next_index: 77, ..Answer::default() };
    let packet = line.said_by_server(1, Flags::default(), answer, Some(&values));
    line.hear(&packet);
    line.worker.suspend();
    assert_eq!(line.parameters(0), Verdict::Drop(Reason::Unexpected));
    assert_eq!(line.sent(), "");
    assert_eq!(line.worker.poll_timeout(), None);
    line.resume(Generation(3));
    assert_eq!(line.sent(), "0r 2-3r", "what it has it needs no more");
    assert_eq!(line.request(1), ABSORB);
    assert_eq!(line.sent(), "1p");
    assert_eq!(line.payloads[&1], values);
    assert_eq!(line.headers[&1].aggregator_index, 77, "on which the others must agree");
    assert_eq!(line.request(0), ABSORB);
    assert_eq!(line.sent(), "0o", "what it does not have is summed again");
    assert_eq!(line.worker.progress().restores_sent, 1);
}

#[test]
fn a_worker_goes_on_under_the_id_that_a_server_without_memory_gave_its_job() {
    let mut line = Line::with_fragments(config(4), 2);
    line.sent();
    let of_old_job = line.said_by_server(0, Flags::default(), Answer::default(), Some(&[0; 4 * ELEMENTS]));
    line.config.id = JobId(line.config.id.0 + 1);
    line.resume(line.config.generation);
    assert_eq!(line.sent(), "0-1r");
    assert_eq!(line.hear(&of_old_job), Verdict::Drop(Reason::UnknownJob));
    assert_eq!(line.parameters(0), ABSORB);
}

#[test]
fn a_worker_that_waits_for_nothing_makes_itself_known_until_it_is_heard() {
    let mut line = Line::with_fragments(config(4), 2);
    line.sent();
    line.parameters(0);
    line.parameters(1);
    line.resume(Generation(3));
    let timeline = [(0, "1p"), (1, ""), (TIMEOUT_MS, "1p"), (5 * TIMEOUT_MS / 2, "1p")];
    for (ms, sends) in timeline {
        assert_eq!(line.at_ms(ms).sent(), sends, "at {ms} ms");
    }
    assert_eq!(line.parameters(1), DUPLICATE);
    assert_eq!(line.worker.poll_timeout(), None);
}

#[test]
fn parameters_are_handed_back_until_their_place_has_newer_ones() {
    let mut line = Line::with_fragments(config(4), 12);
    line.sent();
    let before =
        line.said_by_server(0, Flags { overflow: true, ..Flags::default() }, Answer::default(), None);
    for sequence in 0..4 {
        line.parameters(sequence);
    }
    assert_eq!(line.sent(), "4-7");
    assert_eq!(line.hear(&before), ABSORB);
    assert_eq!(line.sent(), "0p", "4 is on the way, 0 is still here");
    line.parameters(4);
    assert_eq!(line.hear(&before), Verdict::Drop(Reason::Stale));
    assert_eq!(line.sent(), "8");
}

#[test]
fn tensors_of_any_length_and_type_form_one_stream() {
    let mut line = Line::new(config(4));
    let lengths = [1, 63, 64, 65, 0, 64 * 9 + 17, 5];
    let value = |i: usize| i as i32 % 97 - 40;
    for length in lengths {
        let values = (0..length).map(value);
        let half = |x: f32| fanin_half(x, 10, 15);
        let bfloat = |x: f32| (x.to_bits() >> 16) as u16;
        let tensors = [
            Numbers::Float(values.clone().map(|x| x as f32 / 64.0).collect()),
            Numbers::Half(values.clone().map(|x| half(x as f32 / 64.0)).collect()),
            Numbers::Bfloat(values.clone().map(|x| bfloat(x as f32 / 64.0)).collect()),
            Numbers::Int(values.collect()),
        ];
        for tensor in tensors {
            line.worker.submit(tensor, Op::Sum);
        }
    }
    assert_eq!(line.worker.outstanding(), 4 * (lengths.len() - 1), "the empty ones are done");
    // The sum of two workers with the same values.
    let done = line.settle(|header, sum| match header.collective.dtype {
        Dtype::Int32 => (2 * sum).to_le_bytes(),
        _ => ((f64::from(sum) * 2.0 / 1e8) as f32).to_le_bytes(),
    });
    assert_eq!(done.len(), 4 * lengths.len());
    for tensor in &done {
        let (length, scaled): (usize, Vec<f32>) = match tensor {
            Numbers::Float(x) => (x.len(), x.clone()),
            Numbers::Half(x) => (x.len(), x.iter().map(|bits| half_value(*bits)).collect()),
            Numbers::Bfloat(x) => {
                (x.len(), x.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect())
            }
            Numbers::Int(x) => (x.len(), x.iter().map(|x| *x as f32 / 64.0).collect()),
        };
        assert!(lengths.contains(&length));
        for (i, x) in scaled.into_iter().enumerate() {
            assert_eq!(x, 2.0 * value(i) as f32 / 64.0, "{i} of {tensor:?}");
        }
    }
    assert_eq!(line.worker.outstanding(), 0);
}

#[test]
fn floats_are_rounded_to_bfloat16_as_they_leave_and_so_are_their_sums() {
    let mut line = Line::new(JobConfig { wire_dtype: WireDtype::Bfloat16, ..config(100) });
    // Both lie between two numbers, and go to the even one: 1, and 1 + 2^-6.
    let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].repeat(35 * ELEMENTS);
    line.worker.submit(Numbers::Float(values), Op::Sum);
    assert_eq!(line.sent(), "0-69");
    assert!(line.headers[&69].flags.half);
    assert_eq!(line.payloads[&69][..4], [0x80, 0x3f, 0x82, 0x3f]);
    for sequence in 0..70 {
        let values = [0x81, 0x3f].repeat(ELEMENTS);
        let packet = line.said_by_server(sequence, Flags::default(), Answer::default(), Some(&values));
        assert_eq!(line.hear(&packet), ABSORB);
    }
    assert_eq!(line.completed(), [Numbers::Float(vec![1.0 + 1.0 / 128.0; 70 * ELEMENTS])]);
}

/// A small number as the bits of a binary16.
fn fanin_half(x: f32, mantissa: u32, bias: i32) -> u16 {
    if x == 0.0 {
        return 0;
    }
    let bits = x.to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + bias;
    (bits >> 16 & 0x8000) as u16 | (exponent as u16) << mantissa | (bits >> (23 - mantissa) & 0x3ff) as u16
}

fn half_value(bits: u16) -> f32 {
    if bits & 0x7fff == 0 {
        return 0.0;
    }
    let exponent = u32::from(bits >> 10 & 0x1f) + 127 - 15;
    f32::from_bits(u32::from(bits & 0x8000) << 16 | exponent << 23 | u32::from(bits & 0x3ff) << 13)
}

#[test]
fn the_payload_of_a_short_fragment_is_padded_with_zeros() {
    let mut line = Line::new(config(4));
    line.worker.submit(Numbers::Float(vec![1.0; 3]), Op::Average);
    assert_eq!(line.sent(), "0");
    let values = line.payloads[&0].as_chunks().0;
    assert_eq!(values.len(), ELEMENTS);
    let one = 100_000_000i32.to_le_bytes();
    assert!(
        values[..3].iter().all(|value| *value == one) && values[3..].iter().all(|value| *value == [0; 4])
    );
    assert_eq!(line.headers[&0].collective.op, Op::Average);
}

#[test]
fn a_dynamic_exponent_is_announced_a_window_ahead_and_used_when_the_server_says_so() {
    let config = JobConfig { scaling: Scaling::Dynamic, ..config(2) };
    let mut line = Line::new(config);
    // Three windows of a fragment each two: 8, 8, 1000, 1000, 3, 3.
    let values = [8.0, 8.0, 1000.0, 1000.0, 3.0, 3.0].iter().flat_map(|x| [*x; ELEMENTS]).collect();
    line.worker.submit(Numbers::Float(values), Op::Sum);
    assert_eq!(line.sent(), "0-1");
    let one = |line: &Line, sequence| i32::from_le_bytes(line.payloads[&sequence].as_chunks().0[0]);
    let exponents = |line: &Line, sequence| {
        let GradientHeader { exponent, next_exponent, .. } = line.headers[&sequence];
        (exponent, next_exponent)
    };
    let fixed = GradientHeader::STATIC_FACTOR;
    assert_eq!(exponents(&line, 0), (fixed, 10));
    assert_eq!(one(&line, 0), 800_000_000);
    // Another worker has up to 2^11 there; for the other fragment the server leaves the factor
    // fixed.
    line.answer(0, Answer { next_exponent: 11, ..Answer::default() });
    line.answer(1, Answer { next_exponent: fixed, ..Answer::default() });
    assert_eq!(line.sent(), "2-3");
    assert_eq!(exponents(&line, 2), (11, 2));
    assert_eq!(one(&line, 2), (1000.0 * config.factor(11)).round_ties_even() as i32);
    assert!(2 * i64::from(one(&line, 2)) < i64::from(i32::MAX));
    assert_eq!((exponents(&line, 3), one(&line, 3)), ((fixed, 2), i32::MAX));
    // An exponent that no float has is none.
    line.answer(2, Answer { next_exponent: -5000, ..Answer::default() });
    line.answer(3, Answer { next_exponent: i16::MAX - 3, ..Answer::default() });
    assert_eq!(line.sent(), "4-5");
    assert_eq!(exponents(&line, 4), (fixed, EXPONENT_UNKNOWN));
    assert_eq!(exponents(&line, 5), (fixed, EXPONENT_UNKNOWN));
}

#[test]
fn a_proactive_worker_sends_original_values_where_a_sum_could_overflow() {
    let config = JobConfig { overflow: Overflow::Proactive, ..config(8) };
    let mut line = Line::new(config);
    // B = (2^31 - n) / (n s) = 10.73741823 for two workers (ATP §B.2).
    let values = [10.73, 10.74, -10.73, -10.74].iter().flat_map(|x| [*x; ELEMENTS]).collect();
    line.worker.submit(Numbers::Float(values), Op::Sum);
    line.worker.submit(Numbers::Int(vec![i32::MAX; ELEMENTS]), Op::Sum);
    assert_eq!(line.sent(), "0 1o 2 3o 4");
}

#[test]
fn tiny_values_go_as_they_are_until_their_factor_is_agreed_on() {
    let denormal = f32::from_bits(3);
    let values: Vec<f32> =
        [2e-6, 1e-9, -denormal, 3e-6, 0.0, 1e-9].iter().flat_map(|x| [*x; ELEMENTS]).collect();
    let submit = |config, values: &[f32]| {
        let mut line = Line::new(config);
        line.worker.submit(Numbers::Float(values.to_vec()), Op::Sum);
        line
    };
    let mut paper = submit(config(8), &values);
    assert_eq!(paper.sent(), "0-5", "the paper's factor, whatever comes of it");
    let dynamic = JobConfig { scaling: Scaling::Dynamic, ..config(8) };
    // 256 units are 2^-18.6: what may be larger than 2^-19 is fine with the fixed factor, and so is
    // 0.
    assert_eq!(submit(dynamic, &values).sent(), "0 1-2o 3-4 5o");
    let dynamic = JobConfig { window_max: 2, ..dynamic };
    let mut line = submit(
        dynamic,
        &[[1e-9; ELEMENTS], [-denormal; ELEMENTS], [1e-9; ELEMENTS], [-denormal; ELEMENTS]].concat(),
    );
    assert_eq!(line.sent(), "0-1o");
    let (first, second) = (line.headers[&0].next_exponent, line.headers[&1].next_exponent);
    line.answer(0, Answer { next_exponent: first, ..Answer::default() });
    line.answer(1, Answer { next_exponent: second, ..Answer::default() });
    assert_eq!(line.sent(), "2-3");
    for (sequence, exponent, value) in [(2, first, 1e-9), (3, second, -denormal)] {
        let sent = i32::from_le_bytes(line.payloads[&sequence].as_chunks().0[0]);
        let off = f64::from(sent) / dynamic.factor(exponent) - f64::from(value);
        assert!(off.abs() <= 2.0_f64.powi(-29) * f64::from(value).abs(), "{sent} for {value}");
    }
}

#[test]
fn original_values_of_short_float_tensors_go_at_once() {
    let config = JobConfig { originals_elements_max: 2 * ELEMENTS as u32, ..config(8) };
    let mut line = Line::new(config);
    line.worker.submit(Numbers::Float(vec![f32::NAN; 2 * ELEMENTS]), Op::Sum);
    line.worker.submit(Numbers::Float(vec![1.0; 2 * ELEMENTS + 1]), Op::Sum);
    line.worker.submit(Numbers::Int(vec![1; ELEMENTS]), Op::Sum);
    assert_eq!(line.sent(), "0-1o 2-5");
}

#[test]
fn strangers_and_impossible_packets_change_nothing() {
    let mut line = Line::with_fragments(config(4), 3);
    line.sent();
    let good = line.said_by_server(0, Flags::default(), Answer::default(), Some(&[0; 4 * ELEMENTS]));
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut packet = good.clone();
        change(&mut packet);
        KEY.seal(&mut packet);
        packet
    };
    let drops = [
        (with(&|packet| packet[4] ^= 1), Reason::UnknownJob),
        (with(&|packet| packet[8] ^= 1), Reason::Generation),
        (with(&|packet| packet[11] = 1), Reason::OutOfRange),
        (with(&|packet| packet[13] = 0), Reason::Unexpected),
        (with(&|packet| packet[16] = 3), Reason::Ahead),
        (with(&|packet| packet[28] = 1), Reason::Unexpected),
        (with(&|packet| packet[32] ^= 1), Reason::Unexpected),
        (with(&|packet| packet.truncate(GRADIENT_HEADER_BYTES)), Reason::ChunkLength),
        (with(&|packet| packet.extend([0; 4 * (256 - ELEMENTS)])), Reason::ChunkLength),
        (with(&|packet| packet.truncate(20)), Reason::Malformed),
        (with(&|packet| packet[2] = 9), Reason::Version),
    ];
    for (packet, reason) in drops {
        assert_eq!(line.hear(&packet), Verdict::Drop(reason));
        assert!(line.worker.statistics().received.dropped[reason as usize] > 0);
    }
    assert_eq!(line.worker.handle_packet(line.now, UPSTREAM + 1, &good), Verdict::Drop(Reason::Foreign));
    assert_eq!(line.worker.progress().expected, 0);
    assert_eq!(line.hear(&good), ABSORB);
}

#[test]
fn a_stranger_with_the_servers_address_changes_nothing() {
    let mut line = Line::with_fragments(config(4), 3);
    line.sent();
    let zeros = [0; 4 * ELEMENTS];
    let parameters = line.said_by_server(0, Flags::default(), Answer::default(), Some(&zeros));
    let overflow = Flags { overflow: true, ..Flags::default() };
    let request = line.said_by_server(1, overflow, Answer::default(), None);
    let preamble = Preamble { kind: Kind::Abort, ..line.worker.preamble() };
    let abort = Abort { preamble, reason: AbortReason::SwitchStopped }.to_bytes(KEY).to_vec();
    for mut packet in [parameters.clone(), request, abort] {
        for key in [Key::new(0), Key::new(KEY.secret() ^ 1)] {
            key.seal(&mut packet);
            assert_eq!(line.hear(&packet), Verdict::Drop(Reason::Forged));
        }
        assert!(line.worker.poll_event().is_none());
        assert_eq!((line.sent(), line.worker.progress().expected), (String::new(), 0));
    }
    assert_eq!(line.hear(&parameters), ABSORB);
}

#[test]
fn a_worker_that_was_started_again_goes_on_in_the_middle_of_a_tensor() {
    let mut line = Line::new(config(4));
    line.worker.begin_at(102, 9, 2);
    line.worker.submit(Numbers::Float(vec![1.0; 12 * ELEMENTS]), Op::Sum);
    // It does not know which aggregators and exponents the others use by now.
    assert_eq!(line.sent(), "102-105o");
    assert_eq!(line.headers[&102].fragment, 2);
    assert_eq!(line.headers[&102].collective.sequence, 9);
    line.answer(102, Answer { next_index: 31, ..Answer::default() });
    assert_eq!(line.sent(), "106");
    assert_eq!(line.headers[&106].aggregator_index, 31);
    for sequence in 103..112 {
        line.parameters(sequence);
        line.sent();
    }
    let Numbers::Float(done) = line.completed().remove(0) else { panic!() };
    assert_eq!(done[2 * ELEMENTS - 1], 1.0, "with the other workers only");
    assert!(done[2 * ELEMENTS..].iter().all(|x| *x == 0.0));
}

#[test]
fn an_abort_ends_the_worker_and_the_tensors_can_be_had_back() {
    let mut line = Line::with_fragments(config(4), 3);
    line.sent();
    let abort = Abort {
        preamble: Preamble { kind: Kind::Abort, ..line.worker.preamble() },
        reason: AbortReason::SwitchStopped,
    };
    assert_eq!(line.hear(&abort.to_bytes(KEY)), ABSORB);
    let event = line.worker.poll_event();
    assert!(matches!(event, Some(WorkerEvent::Aborted(AbortReason::SwitchStopped))), "{event:?}");
    assert_eq!(line.parameters(0), Verdict::Drop(Reason::Aborted));
    line.resume(Generation(9));
    assert_eq!((line.sent(), line.worker.poll_timeout()), (String::new(), None));
    assert_eq!(line.worker.abandon().count(), 1);
}
