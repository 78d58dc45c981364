//! Switches replay the golden timelines: packets in, the verdict on each, packets out, and what a switch then has in memory.
//!
//! `crates/wire/golden/timelines` is for every implementation of a switch, in whatever it is written. Its README has the form.

use core::fmt::Write;
use core::time::Duration;

use fanin_protocol::atp::{AtpSwitch, AtpSwitchConfig, SwitchRoute};
use fanin_protocol::switchml::{Contributions, JobConfig, Switch, SwitchJob, Upstream};
use fanin_protocol::{Endpoint, Instant, JobProgress, Summer, Verdict};
use fanin_wire::*;

const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
const STRANGER: Key = Key::new(1);
const JOB: JobId = JobId(3);
/// The next machine towards the root.
const UP: u16 = 100;
const CHUNK: usize = 32;
const FRAGMENT: usize = 64;

/// The words of a line, and its `name=value` pairs.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    fn has(self, word: &str) -> bool {
        self.0.split_whitespace().any(|each| each == word)
    }

    fn text(self, name: &str) -> Option<&'a str> {
        self.0.split_whitespace().find_map(|each| each.strip_prefix(name)?.strip_prefix('='))
    }

    fn number<T: core::str::FromStr>(self, name: &str) -> Option<T> {
        let text = self.text(name)?;
        Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} in {:?}", self.0)))
    }

    /// Panics for what is none of these: a word that nobody reads would make another packet than the line says.
    fn only(self, known: &[&str]) -> Self {
        for each in self.0.split_whitespace() {
            let name = each.split('=').next().unwrap_or(each);
            assert!(known.contains(&name), "{name} in {:?}", self.0);
        }
        self
    }

    /// Bits as the file has them: the highest first.
    fn bits(self, name: &str) -> Option<u32> {
        let text = self.text(name)?;
        Some(u32::from_str_radix(text, 2).unwrap_or_else(|_| panic!("{name}={text} in {:?}", self.0)))
    }

    fn key(self) -> Key {
        if self.has("forged") { STRANGER } else { KEY }
    }
}

/// A kind of switch, as its file speaks of it.
trait Kindred {
    type Machine: Endpoint<Address = u16>;

    fn start(said: Fields<'_>) -> Self::Machine;
    /// A packet that comes from there.
    fn packet(from: u16, said: Fields<'_>) -> Vec<u8>;
    fn shown(packet: &[u8]) -> String;
    fn state(machine: &Self::Machine) -> String;
}

/// The same text, with what the machine really does.
fn replayed<K: Kindred>(text: &str) -> String {
    let mut out = String::new();
    let mut machine = None;
    let mut state = String::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            writeln!(out, "{line}").unwrap();
        } else if let Some(said) = line.strip_prefix("switch") {
            let started = K::start(Fields(said));
            state = K::state(&started);
            machine = Some(started);
            writeln!(out, "{line}").unwrap();
        } else if let Some(said) = line.strip_prefix("<- ") {
            writeln!(out, "{line}").unwrap();
            let machine = machine.as_mut().expect("a switch before a packet");
            handle::<K>(machine, said, &mut out);
            let now = K::state(machine);
            if now != state {
                writeln!(out, "state {now}").unwrap();
                state = now;
            }
        }
    }
    out
}

fn handle<K: Kindred>(machine: &mut K::Machine, said: &str, out: &mut String) {
    let (from, said) = said.split_once(' ').expect("from whom, and what");
    let from = if from == "up" { UP } else { from[1..].parse().expect("a worker, such as w0") };
    let said = Fields(said);
    let now = Instant(said.number::<u64>("us").unwrap_or(0) * 1000);
    let verdict = machine.handle_packet(now, from, &K::packet(from, said));
    let verdict = match verdict {
        Verdict::Absorb => "absorb".to_owned(),
        Verdict::Forward => "forward".to_owned(),
        Verdict::Multicast => "multicast".to_owned(),
        Verdict::ReplyUnicast => "reply_unicast".to_owned(),
        Verdict::Drop(reason) => format!("drop {}", reason.name()),
    };
    writeln!(out, "= {verdict}").unwrap();
    let mut train = vec![0; 65536];
    while let Some(sent) = machine.poll_transmit(now, &mut train) {
        let name = |to: &u16| if *to == UP { "up".to_owned() } else { format!("w{to}") };
        let to = sent.to.iter().map(name).collect::<Vec<_>>().join(" ");
        let (bytes, segment_bytes) = (sent.bytes, sent.segment_bytes);
        for packet in train[..bytes].chunks(segment_bytes) {
            writeln!(out, "-> {to}: {}", K::shown(packet)).unwrap();
        }
    }
}

fn holds<K: Kindred>(text: &str) {
    let really = replayed::<K>(text);
    for (number, (line, real)) in text.lines().zip(really.lines()).enumerate() {
        assert_eq!(real, line, "line {}; all of it:\n{really}", number + 1);
    }
    assert_eq!(really, text, "all of it:\n{really}");
}

/// `name=value` of what is not as usual.
fn unusual<T: PartialEq + core::fmt::Display>(out: &mut String, name: &str, value: T, usual: T) {
    if value != usual {
        write!(out, " {name}={value}").unwrap();
    }
}

struct SwitchMl;

fn tensor(said: Fields<'_>) -> Collective {
    Collective {
        sequence: said.number("tensor").unwrap_or(0),
        dtype: Dtype::Int32,
        op: Op::Sum,
        pattern: Pattern::AllReduce,
        elements: said.number("of").unwrap_or(1000),
        wire_dtype: WireDtype::SharedExponent,
    }
}

impl Kindred for SwitchMl {
    type Machine = Switch<u16>;

    fn start(said: Fields<'_>) -> Switch<u16> {
        said.only(&["workers", "slots", "generation", "resumed", "own", "place"]);
        let mut switch = Switch::new(ShardId(0));
        let workers = said.number("workers").expect("workers=");
        let config = JobConfig {
            id: JOB,
            key: KEY,
            generation: Generation(said.number("generation").unwrap_or(0)),
            workers,
            slots: said.number("slots").expect("slots="),
            window: said.number("slots").expect("slots="),
            elements: CHUNK as u16,
            wire_dtype: WireDtype::SharedExponent,
            shard: ShardId(0),
            resumed: said.has("resumed"),
        };
        let place = said.number("place");
        let contributions = Contributions::of_workers(said.number("own").unwrap_or(workers));
        let upstream = place.map(|place| Upstream { address: UP, place: WorkerId(place) });
        switch.add_job(SwitchJob { config, contributions, upstream }).expect("a job as it may be");
        switch
    }

    fn packet(from: u16, said: Fields<'_>) -> Vec<u8> {
        let names = ["slot", "exchange", "chunk", "value", "exponent", "tensor", "of", "job", "generation"];
        said.only(&[&names[..], &["us", "forged", "update", "restore", "result", "query"]].concat());
        let kinds = [
            ("update", Kind::Update),
            ("restore", Kind::Restore),
            ("result", Kind::Result),
            ("query", Kind::Query),
        ];
        let (_, kind) = kinds.into_iter().find(|(name, _)| said.has(name)).expect("a kind of packet");
        let preamble = Preamble {
            kind,
            job: JobId(said.number("job").unwrap_or(JOB.0)),
            generation: Generation(said.number("generation").unwrap_or(0)),
            worker: if from == UP { WorkerId::ALL } else { WorkerId(from as u8) },
            shard: ShardId(0),
        };
        let exchange = said.number("exchange").unwrap_or(0);
        let header = SlotHeader {
            slot: SlotIndex(said.number("slot").unwrap_or(0)),
            next_exponent: said.number("exponent").unwrap_or(0),
            exchange,
            chunk: said.number("chunk").unwrap_or(exchange),
            collective: tensor(said),
        };
        let value: Option<i32> = said.number("value");
        let elements = if value.is_some() { CHUNK } else { 0 };
        let mut packet = vec![0; packet_bytes(elements)];
        SlotPacket::write(&mut packet, said.key(), &preamble, &header, elements, |payload| {
            payload.as_chunks_mut().0.fill(value.unwrap_or(0).to_le_bytes());
        });
        packet
    }

    fn shown(packet: &[u8]) -> String {
        let preamble = Preamble::parse(packet).expect("a packet of ours");
        assert!(KEY.authenticates(packet));
        if let Ok(abort) = Abort::parse(preamble, packet) {
            return match abort.reason {
                AbortReason::Mismatch { first, second } => {
                    format!("abort: {} of rank {}, {} of rank {}", first.1, first.0.0, second.1, second.0.0)
                }
                other => format!("abort: {other:?}"),
            };
        }
        let SlotPacket { header, payload, .. } =
            SlotPacket::parse(&preamble, packet).expect("a slot's packet");
        let mut out = format!("{:?}", preamble.kind).to_lowercase();
        unusual(&mut out, "as", preamble.worker.0, WorkerId::ALL.0);
        unusual(&mut out, "slot", header.slot.0, 0);
        write!(out, " exchange={}", header.exchange).unwrap();
        unusual(&mut out, "chunk", header.chunk, header.exchange);
        unusual(&mut out, "exponent", header.next_exponent, 0);
        let (elements, _) = payload.as_chunks();
        if let Some(first) = elements.first() {
            assert!(elements.iter().all(|element| element == first));
            write!(out, " value={}", i32::from_le_bytes(*first)).unwrap();
        }
        out
    }

    fn state(machine: &Switch<u16>) -> String {
        let JobProgress { in_use, completed, retransmitted, waiting_for, .. } =
            machine.job_progress(JOB).expect("its job");
        let lacking = waiting_for.iter().enumerate().filter(|(_, slots)| **slots > 0);
        let lacking: Vec<_> = lacking.map(|(rank, _)| rank.to_string()).collect();
        let mut out = format!("gathering={in_use}");
        unusual(&mut out, "lacking", lacking.join(","), String::new());
        write!(out, " sums={completed} again={retransmitted}").unwrap();
        out
    }
}

#[test]
fn switchml_s_switch_does_what_its_timelines_say() {
    holds::<SwitchMl>(include_str!("../../wire/golden/timelines/switchml.txt"));
}

struct Atp;

impl Atp {
    /// Flags by their names in the file.
    fn flags(said: Fields<'_>) -> Flags {
        Flags {
            resend: said.has("resend"),
            collision: said.has("collision"),
            ecn: said.has("ecn"),
            is_ack: said.has("parameters"),
            overflow: said.has("overflow"),
            restore: said.has("restore"),
            stalled: said.has("stalled"),
            half: false,
        }
    }
}

impl Kindred for Atp {
    type Machine = AtpSwitch<u16>;

    fn start(said: Fields<'_>) -> AtpSwitch<u16> {
        said.only(&["aggregators", "level", "ways"]);
        let mut switch = AtpSwitch::new(AtpSwitchConfig {
            aggregators: said.number("aggregators").expect("aggregators="),
            elements: FRAGMENT as u16,
            ways: said.number("ways").unwrap_or(1),
            stale: Duration::from_micros(1000),
            ecn_threshold_packets: None,
        });
        let level = said.number("level").unwrap_or(0);
        for id in [JOB, JobId(1)] {
            let route =
                SwitchRoute { id, key: KEY, generation: Generation(0), workers: 2, upstream: UP, level };
            switch.add_job(route).expect("a route as it may be");
        }
        switch
    }

    fn packet(from: u16, said: Fields<'_>) -> Vec<u8> {
        let names = ["fragment", "aggregator", "level", "bits", "below", "fan-in", "value", "exponent", "of"];
        let flags = ["resend", "collision", "ecn", "overflow", "restore", "stalled", "forged"];
        let others = ["us", "job", "generation", "tensor", "gradient", "parameters"];
        said.only(&[&names[..], &flags, &others].concat());
        assert_ne!(said.has("gradient"), said.has("parameters"), "a kind of packet");
        let flags = Self::flags(said);
        let level = said.number("level").unwrap_or(0);
        let sequence = said.number("fragment").expect("fragment=");
        let mut directions = Directions::default();
        if !flags.is_ack {
            directions.level = level;
            directions.bitmaps[0] = said.bits("below").unwrap_or(0);
            directions.bitmaps[usize::from(level)] = said.bits("bits").unwrap_or(1 << from);
            directions.fan_in_degrees[usize::from(level)] = said.number("fan-in").unwrap_or(2);
        }
        let preamble = Preamble {
            kind: Kind::Gradient,
            job: JobId(said.number("job").unwrap_or(JOB.0)),
            generation: Generation(said.number("generation").unwrap_or(0)),
            worker: WorkerId::ALL,
            shard: ShardId(0),
        };
        let header = GradientHeader {
            flags,
            directions,
            sequence,
            aggregator_index: said.number("aggregator").unwrap_or(7),
            fragment: sequence as u32,
            collective: Collective { dtype: Dtype::Float32, ..tensor(said) },
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: said.number("exponent").unwrap_or(GradientHeader::STATIC_FACTOR),
        };
        let value: i32 = said.number("value").unwrap_or(0);
        let mut packet = vec![0; fragment_packet_bytes::<Directions>(FRAGMENT)];
        GradientPacket::write(&mut packet, said.key(), &preamble, &header, FRAGMENT, |payload| {
            payload.as_chunks_mut().0.fill(value.to_le_bytes());
        });
        packet
    }

    fn shown(packet: &[u8]) -> String {
        let preamble = Preamble::parse(packet).expect("a packet of ours");
        assert!(KEY.authenticates(packet));
        let GradientPacket { header, payload, .. } =
            GradientPacket::parse(preamble, packet).expect("a fragment's packet");
        let GradientHeader { flags, directions, .. } = header;
        let mut out = if flags.is_ack { "parameters" } else { "sum" }.to_owned();
        unusual(&mut out, "job", preamble.job.0, JOB.0);
        write!(out, " fragment={}", header.sequence).unwrap();
        unusual(&mut out, "aggregator", header.aggregator_index, 7);
        if !flags.is_ack {
            write!(out, " level={}", directions.level).unwrap();
            let at = usize::from(directions.level) - 1;
            write!(out, " bits={:b}", directions.bitmaps[at]).unwrap();
            if at > 0 {
                write!(out, " below={:b}", directions.bitmaps[at - 1]).unwrap();
            }
        }
        for (is_set, name) in [
            (flags.resend, "resend"),
            (flags.collision, "collision"),
            (flags.ecn, "ecn"),
            (flags.overflow, "overflow"),
            (flags.restore, "restore"),
            (flags.stalled, "stalled"),
        ] {
            if is_set {
                write!(out, " {name}").unwrap();
            }
        }
        unusual(&mut out, "exponent", header.next_exponent, GradientHeader::STATIC_FACTOR);
        let (elements, _) = payload.as_chunks();
        assert!(elements.iter().all(|element| element == &elements[0]));
        write!(out, " value={}", i32::from_le_bytes(elements[0])).unwrap();
        out
    }

    fn state(machine: &AtpSwitch<u16>) -> String {
        let all = machine.statistics();
        let mut out = format!("in_use={} complete={}", all.in_use, all.completed);
        unusual(&mut out, "collisions", all.collisions, 0);
        unusual(&mut out, "freed_by_parameters", all.freed_by_parameters, 0);
        unusual(&mut out, "freed_by_resend", all.freed_by_resend, 0);
        unusual(&mut out, "freed_by_age", all.freed_stale, 0);
        out
    }
}

#[test]
fn atp_s_switch_does_what_its_timelines_say() {
    holds::<Atp>(include_str!("../../wire/golden/timelines/atp.txt"));
}
