//! A stranger who knows everything of a job but the key can do nothing to it with packets.

use super::*;

/// The address of the stranger, or the one to which it wants packets to go.
const ELSEWHERE: u8 = 66;

/// The packet, as who does not have the key writes it.
fn forged(contribution: Contribution) -> [Vec<u8>; 3] {
    let zeros = |mut packet: Vec<u8>| {
        packet[SLOT_HEADER_BYTES - TAG_BYTES..SLOT_HEADER_BYTES].fill(0);
        packet
    };
    let sealed = |key: Key, mut packet: Vec<u8>| {
        key.seal(&mut packet);
        packet
    };
    let packet = contribution.packet();
    [
        zeros(packet.clone()),
        sealed(Key::new(0), packet.clone()),
        sealed(Key::new(KEY.secret() ^ 1 << 100), packet),
    ]
}

fn have_no_effect(switch: &mut Switch<u8>, contribution: Contribution) {
    let progress = switch.job_progress(JobId(7));
    for packet in forged(contribution) {
        let verdict = switch.handle_packet(Instant(0), ELSEWHERE, &packet);
        assert_eq!(verdict, Verdict::Drop(Reason::Forged));
    }
    assert_eq!(sent(switch), [], "and nothing is sent");
    assert_eq!(switch.poll_event(), None);
    assert_eq!(switch.job_progress(JobId(7)), progress);
}

#[test]
fn a_stranger_diverts_no_results() {
    let mut switch = switch(config(2, 1));
    Contribution::default().to(&mut switch);
    have_no_effect(&mut switch, Contribution::default());
    have_no_effect(&mut switch, Contribution { exchange: 9, ..Default::default() });
    Contribution { worker: 1, ..Default::default() }.to(&mut switch);
    assert_eq!(sent(&mut switch), [(vec![0, 1], 2, 0)], "to where the workers are");
    have_no_effect(&mut switch, Contribution { worker: 1, exchange: 1, ..Default::default() });
    assert_eq!(Contribution::default().to(&mut switch), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut switch), [(vec![0], 2, 0)]);
}

#[test]
fn a_stranger_is_not_answered_with_more_than_it_sent() {
    let mut switch = switch(config(2, 1));
    for worker in [0, 1] {
        Contribution { worker, ..Default::default() }.to(&mut switch);
    }
    sent(&mut switch);
    // A probe, which is a header alone, for an exchange that is complete; in the name of a worker
    // whose address is the victim's.
    have_no_effect(&mut switch, Contribution { elements: 0, ..Default::default() });
    have_no_effect(&mut switch, Contribution::default());
}

#[test]
fn a_strangers_numbers_are_not_taken_for_a_ranks_and_the_ranks_own_are_no_duplicate() {
    let mut switch = switch(config(2, 1));
    have_no_effect(&mut switch, Contribution { value: 1000, ..Default::default() });
    assert_eq!(Contribution { value: 4, ..Default::default() }.to(&mut switch), Verdict::Absorb);
    have_no_effect(&mut switch, Contribution { worker: 1, value: 1000, ..Default::default() });
    let last = Contribution { worker: 1, value: 5, ..Default::default() };
    assert_eq!(last.to(&mut switch), Verdict::Multicast);
    assert_eq!(sent(&mut switch), [(vec![0, 1], 9, 0)]);
}

#[test]
fn a_stranger_ends_no_job_with_an_unlike_tensor() {
    let mut switch = switch(config(2, 1));
    Contribution::default().to(&mut switch);
    let unlike = Collective { elements: 7, ..SUM };
    have_no_effect(&mut switch, Contribution { worker: 1, collective: unlike, ..Default::default() });
    assert_eq!(Contribution { worker: 1, ..Default::default() }.to(&mut switch), Verdict::Multicast);
}

#[test]
fn a_stranger_takes_no_slots_turn_and_hands_no_sum_back() {
    let mut switch = switch(JobConfig { resumed: true, ..config(2, 1) });
    have_no_effect(&mut switch, Contribution { exchange: 1 << 30, ..Default::default() });
    have_no_effect(&mut switch, Contribution { kind: Kind::Restore, exchange: 4, ..Default::default() });
    for worker in [0, 1] {
        Contribution { worker, exchange: 5, ..Default::default() }.to(&mut switch);
    }
    assert_eq!(sent(&mut switch), [(vec![0, 1], 2, 0)]);
}

#[test]
fn a_packet_of_another_job_or_of_the_switch_is_not_a_workers() {
    let mut switch = switch(config(2, 1));
    switch.add_job(JobConfig { id: JobId(8), key: Key::new(8), ..config(2, 1) }.into()).unwrap();
    let mut of_another = Contribution::default().packet();
    of_another[4..8].copy_from_slice(&8u32.to_le_bytes());
    let verdict = switch.handle_packet(Instant(0), ELSEWHERE, &of_another);
    assert_eq!(verdict, Verdict::Drop(Reason::Forged));
    // A result that was seen on its way, sent back as what it is not.
    for worker in [0, 1] {
        Contribution { worker, ..Default::default() }.to(&mut switch);
    }
    let mut train = vec![0; 65536];
    let bytes = switch.poll_transmit(Instant(0), &mut train).expect("the result").bytes;
    for kind in [Kind::Update, Kind::Restore] {
        let mut turned_round = train[..bytes].to_vec();
        turned_round[3] = kind as u8;
        turned_round[10] = 0;
        let verdict = switch.handle_packet(Instant(0), ELSEWHERE, &turned_round);
        assert_eq!(verdict, Verdict::Drop(Reason::Forged));
    }
}
