//! A stranger who knows everything of a job but the key can do nothing to it with packets.

use super::*;
use crate::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, Hashing, Overflow, Scaling, ServerJob, SwitchRoute,
};
use crate::machine::{JobAborted, Reason, Summer};
use core::time::Duration;

/// The address of the stranger, or the one to which it wants packets to go.
const ELSEWHERE: u16 = 66;

fn forged(packet: &[u8]) -> [Vec<u8>; 3] {
    let at = GRADIENT_HEADER_BYTES - TAG_BYTES;
    let zeros = |mut packet: Vec<u8>| {
        packet[at..at + TAG_BYTES].fill(0);
        packet
    };
    let sealed = |key: Key, mut packet: Vec<u8>| {
        key.seal(&mut packet);
        packet
    };
    [
        zeros(packet.to_vec()),
        sealed(Key::new(0), packet.to_vec()),
        sealed(Key::new(KEY.secret() ^ 1 << 100), packet.to_vec()),
    ]
}

/// From the stranger's own address, and from one that it only says is its own.
fn have_no_effect<E: Endpoint<Address = u16, Event = JobAborted>>(machine: &mut E, packet: &[u8]) {
    for packet in forged(packet) {
        for from in [ELSEWHERE, UP] {
            let verdict = machine.handle_packet(Instant(0), from, &packet);
            assert_eq!(verdict, Verdict::Drop(Reason::Forged));
        }
    }
    assert_eq!(sent(machine), [""; 0], "and nothing is sent");
    assert_eq!(machine.poll_event(), None);
}

fn switch() -> AtpSwitch<u16> {
    let mut switch = AtpSwitch::new(AtpSwitchConfig {
        aggregators: 16,
        elements: ELEMENTS as u16,
        ways: 1,
        stale: Duration::from_nanos(1000),
        ecn_threshold_packets: None,
    });
    switch
        .add_job(SwitchRoute {
            id: JobId(3),
            key: KEY,
            generation: Generation(0),
            workers: 2,
            upstream: UP,
            level: 0,
        })
        .unwrap();
    switch
}

fn abort(key: Key) -> [u8; ABORT_BYTES] {
    let preamble = Preamble {
        kind: Kind::Abort,
        job: JobId(3),
        generation: Generation(0),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    Abort { preamble, reason: AbortReason::Expelled(Rank(1)) }.to_bytes(key)
}

#[test]
fn a_stranger_gets_no_parameters_and_takes_nobodys_place() {
    let mut switch = switch();
    // A bit that no child has, and one that has a child.
    for bit in [31, 1] {
        have_no_effect(&mut switch, &fragment(bit, 0, 1000).bytes());
    }
    assert_eq!(switch.progress(JobId(3)).unwrap().children, 0);
    fragment(0, 0, 1).to(&mut switch, 1);
    have_no_effect(&mut switch, &fragment(1, 0, 1000).bytes());
    fragment(1, 0, 2).to(&mut switch, 2);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 3"]);
    assert_eq!(fragment(0, 0, 0).answer().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1, 2] #0 parameters: 0"], "to the children alone");
}

#[test]
fn a_stranger_takes_no_aggregators_and_frees_none() {
    let mut switch = switch();
    for sequence in 0..64 {
        have_no_effect(&mut switch, &fragment(0, sequence, 1).at(sequence as u32).bytes());
    }
    assert_eq!(switch.statistics().in_use, 0);
    fragment(0, 0, 1).to(&mut switch, 1);
    for packet in [fragment(0, 0, 1).resent(), fragment(1, 0, 1).resent(), fragment(0, 0, 9).answer()] {
        have_no_effect(&mut switch, &packet.bytes());
    }
    assert_eq!(switch.statistics().in_use, 1);
}

#[test]
fn a_stranger_with_the_upstreams_address_ends_no_job() {
    let mut switch = switch();
    fragment(0, 0, 1).to(&mut switch, 1);
    for key in [Key::new(0), Key::new(KEY.secret() ^ 1)] {
        let verdict = switch.handle_packet(Instant(0), UP, &abort(key));
        assert_eq!(verdict, Verdict::Drop(Reason::Forged));
    }
    assert_eq!(switch.poll_event(), None);
    assert_eq!(switch.handle_packet(Instant(0), UP, &abort(KEY)), Verdict::Multicast);
}

#[test]
fn a_stranger_adds_nothing_at_the_server_and_asks_it_for_nothing() {
    let directions =
        |bit| Directions { level: 0, bitmaps: [1_u32 << bit, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] };
    let config = AtpJobConfig {
        id: JobId(3),
        key: KEY,
        generation: Generation(0),
        workers: 2,
        elements: ELEMENTS as u16,
        window_max: 16,
        aggregators: 0,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    };
    let mut server = AtpServer::new();
    let workers = vec![directions(0), directions(1)];
    server.add_job(ServerJob { config, workers, level: 0, restored: true }).unwrap();
    let of = |bit, sequence, value| fragment(bit, sequence, value).directed(directions(bit));
    let unlike = of(0, 0, 1).with(|header| header.collective.elements = 7);
    let handed_back = of(0, 4096, 1).resent().with(|header| header.flags.restore = true);
    let lost = of(0, 1, 1).resent();
    for packet in [of(0, 0, 1000), of(0, 4096, 1000), unlike, handed_back, lost] {
        have_no_effect(&mut server, &packet.bytes());
    }
    for (bit, from) in [(0, 1), (1, 2)] {
        of(bit, 0, 100_000_000).to(&mut server, from);
    }
    have_no_effect_but(&mut server, &of(0, 0, 1).resent().bytes(), "[1, 2] #0 parameters: 2");
    assert_eq!(of(0, 0, 1).resent().to(&mut server, 1), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[1] #0 parameters lost: 2"]);
}

/// A packet that was to be sent anyway is sent, and to its recipient.
fn have_no_effect_but(server: &mut AtpServer<u16>, packet: &[u8], line: &str) {
    for packet in forged(packet) {
        let verdict = server.handle_packet(Instant(0), ELSEWHERE, &packet);
        assert_eq!(verdict, Verdict::Drop(Reason::Forged));
    }
    assert_eq!(sent(server), [line]);
}
