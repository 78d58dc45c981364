//! Sums of a part of the workers: the set is in the packets (GOAT §V).

use super::*;

fn among(set: u128) -> impl Fn(Packet) -> Packet {
    move |packet| packet.with(|header| header.directions.participants = Participants(set))
}

#[test]
fn a_switch_waits_for_participants_alone_and_says_who_they_are() {
    let mut switch = switch();
    let of_two = among(0b1_0101);
    assert_eq!(of_two(fragment(S1, 0b1, 0, 5)).to(&mut switch, 10), Verdict::Absorb);
    // Worker 1 is of the plan, and takes no part: the server is to see that.
    assert_eq!(of_two(fragment(S1, 0b10, 0, 9)).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 10 passed: 9"]);
    assert_eq!(of_two(fragment(S1, 0b100, 0, 7)).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 101 passed: 12"]);
    // The next fragment is of all.
    for (worker, value) in [(0b1, 1), (0b10, 2), (0b100, 3)] {
        fragment(S1, worker, 1, value).to(&mut switch, 10);
    }
    assert_eq!(sent(&mut switch), ["[100] #1 S1 111 passed: 6"]);
}

#[test]
fn a_sum_without_participants_is_not_waited_for_and_one_of_some_is_added() {
    let mut switch = switch_of_sums();
    // Worker 0 and the sum of 1 and 2 take no part; of the sum of 3 and 4, worker 4 does.
    let of_one = among(0b11_0000);
    assert_eq!(of_one(fragment(S1, 0b1_0000, 0, 16)).to(&mut switch, TO_S2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S3 10000: 16"]);
    let of_three = among(0b1_0101);
    assert_eq!(of_three(fragment(S1, 0b100, 1, 4)).to(&mut switch, TO_S2), Verdict::Absorb);
    assert_eq!(of_three(fragment(S1, 0b1, 1, 1)).to(&mut switch, 10), Verdict::Absorb);
    assert_eq!(of_three(fragment(S1, 0b1_0000, 1, 16)).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #1 S3 10101: 21"]);
}

#[test]
fn fragments_of_unlike_participants_are_not_added_and_the_server_ends_the_job_with_names() {
    let mut switch = switch();
    among(0b11)(fragment(S1, 0b1, 0, 5)).to(&mut switch, 10);
    assert_eq!(among(0b111)(fragment(S1, 0b10, 0, 6)).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 10 passed resend: 6"]);
    let mut server = server();
    among(0b11)(fragment(S1, 0b1, 0, 5)).passed().resent().to(&mut server, 10);
    let unlike = among(0b111)(fragment(S1, 0b10, 0, 6)).passed().resent().to(&mut server, 10);
    assert_eq!(unlike, Verdict::Drop(Reason::Aborted));
    let reason = AbortReason::Participants { first: Rank(0), second: Rank(1) };
    assert_eq!(server.poll_event().map(|event| event.reason), Some(reason));
}

#[test]
fn the_server_finishes_with_its_participants_and_answers_them_alone() {
    let mut server = server();
    // Workers 0 to 3 are below child 10, worker 4 is child 14.
    let of_rack = among(0b0101);
    of_rack(fragment(S1, 0b1, 0, 1)).passed().to(&mut server, 10);
    let stranger = of_rack(fragment(SERVER, 0b1_0000, 0, 16)).to(&mut server, 14);
    assert_eq!(stranger, Verdict::Drop(Reason::OutOfRange));
    let progress = server.job_progress(JobId(3)).unwrap();
    assert_eq!(progress.waiting_for, [0, 0, 1, 0, 0], "nobody waits for who takes no part");
    assert_eq!(of_rack(fragment(S2, 0b100, 0, 4)).passed().to(&mut server, 10), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[10] #0 parameters: 5"]);
    let average = |packet: Packet| packet.with(|header| header.collective.op = Op::Average);
    for (worker, node, value) in [(0b1, S1, 3), (0b1_0000, SERVER, 5)] {
        average(among(0b1_0001)(fragment(node, worker, 1, value))).passed().to(&mut server, 14);
    }
    assert_eq!(sent(&mut server), ["[10, 14] #1 parameters: 4"], "the mean of those who took part");
    // All bits of a job are everybody.
    for (node, workers, value) in [(S1, 0b11, 3), (S2, 0b1100, 12)] {
        among(0b1_1111)(fragment(node, workers, 4, value)).passed().to(&mut server, 10);
    }
    fragment(SERVER, 0b1_0000, 4, 16).to(&mut server, 14);
    assert_eq!(sent(&mut server), ["[10, 14] #4 parameters: 31"]);
}

#[test]
fn a_switch_sends_parameters_to_participants_and_to_switches_below() {
    let mut switch = switch();
    // Workers 1 and 3 are next to it, and 10 is a switch.
    switch.add_job(GoatRoute { below: vec![10], own: 0b1010, ..route(4) }).unwrap();
    fragment(S2, 0b1000, 2, 1).to(&mut switch, 33);
    fragment(S2, 0b10, 2, 1).to(&mut switch, 31);
    sent(&mut switch);
    for (participants, to) in
        [(0b1000, "[10, 33]"), (0b111, "[10, 31]"), (0b1, "[10]"), (u128::MAX, "[10, 33, 31]")]
    {
        among(participants)(fragment(S1, 0, 0, 5)).parameters().to(&mut switch, UP);
        assert_eq!(sent(&mut switch), [format!("{to} #0 parameters: 5")]);
    }
}
