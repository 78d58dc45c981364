//! A stranger who knows a job's whole plan and not the key can do nothing to it with packets.

use super::*;
use crate::machine::JobAborted;

/// The address of the stranger, or the one to which it wants packets to go.
const ELSEWHERE: u16 = 66;

/// From the stranger's own address, and from those that it only says are its own.
fn have_no_effect<E: Endpoint<Address = u16, Event = JobAborted>>(machine: &mut E, packet: Packet) {
    for key in [Key::new(0), Key::new(KEY.secret() ^ 1 << 100)] {
        for from in [ELSEWHERE, UP, TO_S2, 10] {
            let verdict = machine.handle_packet(Instant(0), from, &packet.bytes(key));
            assert_eq!(verdict, Verdict::Drop(Reason::Forged));
        }
    }
    assert_eq!(sent(machine), [""; 0], "and nothing is sent");
    assert_eq!(machine.poll_event(), None);
}

#[test]
fn a_stranger_takes_no_aggregators_frees_none_and_is_sent_on_nowhere() {
    let mut switch = switch();
    have_no_effect(&mut switch, fragment(S1, 1, 0, 1000));
    assert_eq!(switch.statistics().in_use, 0);
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    for packet in [
        fragment(S1, 0b10, 0, 1000),
        fragment(S1, 0b10, 0, 1000).resent(),
        fragment(S1, 0b10, 4, 1000),
        fragment(S2, 1, 1, 1000),
        fragment(SERVER, 1, 1, 1000),
        fragment(S1, 0, 0, 18).parameters(),
        fragment(S1, 1, 0, 5).with(|header| header.flags.overflow = true),
    ] {
        have_no_effect(&mut switch, packet);
    }
    assert_eq!(switch.statistics().in_use, 1);
    fragment(S1, 0b10, 0, 6).to(&mut switch, 11);
    fragment(S1, 0b100, 0, 7).to(&mut switch, TO_S2);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 111 passed: 18"]);
}

#[test]
fn a_stranger_adds_nothing_at_the_server_sets_nothing_aside_and_asks_it_for_nothing() {
    let mut server = GoatServer::new();
    server.add_job(GoatServerJob { config: config(), plan: plan(), restored: true }).unwrap();
    for packet in [
        fragment(S1, 0b11, 0, 1000),
        fragment(S1, 0b1, 0, 1000).resent(),
        fragment(SERVER, 0b10000, 4096, 1000),
        fragment(SERVER, 0b10000, 0, 1).with(|header| header.collective.elements = 7),
        fragment(SERVER, 0b10000, 4096, 1).resent().with(|header| header.flags.restore = true),
    ] {
        have_no_effect(&mut server, packet);
    }
    for (node, workers) in [(S1, 0b11), (S2, 0b1100), (SERVER, 0b10000)] {
        fragment(node, workers, 0, 1).to(&mut server, 10);
    }
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters: 3"]);
    have_no_effect(&mut server, fragment(S1, 0b11, 0, 1).resent());
}

#[test]
fn a_stranger_with_the_upstreams_address_ends_no_job() {
    let mut switch = switch();
    let abort = |key| {
        let preamble = Preamble {
            kind: Kind::Abort,
            job: JobId(3),
            generation: Generation(4),
            worker: WorkerId::ALL,
            shard: ShardId(0),
        };
        Abort { preamble, reason: AbortReason::Expelled(Rank(1)) }.to_bytes(key)
    };
    let verdict = switch.handle_packet(Instant(0), UP, &abort(Key::new(KEY.secret() ^ 1)));
    assert_eq!((verdict, switch.poll_event()), (Verdict::Drop(Reason::Forged), None));
    assert_eq!(switch.handle_packet(Instant(0), UP, &abort(KEY)), Verdict::Multicast);
}
