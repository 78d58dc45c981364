use core::time::Duration;

use super::*;
use crate::atp::{AtpSwitch, AtpSwitchConfig, SwitchRoute};
use crate::machine::{JobAborted, Reason, Summer};

const DUPLICATE: Verdict = Verdict::Drop(Reason::Duplicate);
const FOREIGN: Verdict = Verdict::Drop(Reason::Foreign);
const OUT_OF_RANGE: Verdict = Verdict::Drop(Reason::OutOfRange);
const NOTHING: [&str; 0] = [];

fn config(aggregators: u32) -> AtpSwitchConfig {
    AtpSwitchConfig {
        aggregators,
        elements: ELEMENTS as u16,
        ways: 1,
        stale: Duration::from_nanos(1000),
        ecn_threshold_packets: None,
    }
}

fn route(job: u32, level: u8) -> SwitchRoute<u16> {
    SwitchRoute { id: JobId(job), key: KEY, generation: Generation(0), workers: 2, upstream: UP, level }
}

/// Fragment 0 of a worker, which is summed with those of so many.
fn of(bit: u32, value: i32, fan_in_degree: u8) -> Packet {
    fragment(bit, 0, value).with(|header| header.directions.fan_in_degrees[0] = fan_in_degree)
}

fn switch_of_level(level: u8) -> AtpSwitch<u16> {
    let mut switch = AtpSwitch::new(config(16));
    switch.add_job(route(3, level)).unwrap();
    switch
}

fn switch() -> AtpSwitch<u16> {
    switch_of_level(0)
}

/// As `fanin switch` is, where the paper's has one way.
fn switch_with_two_ways() -> AtpSwitch<u16> {
    let mut switch = AtpSwitch::new(AtpSwitchConfig { ways: 2, ..config(16) });
    switch.add_job(route(3, 0)).unwrap();
    switch
}

/// Figure 4: A1 and A2 of job 3 meet in aggregator 7, B1 and B2 find aggregator 9 taken by job 1.
#[test]
fn figure_4_one_fragment_is_aggregated_here_and_one_at_the_server() {
    let mut switch = switch();
    switch.add_job(route(1, 0)).unwrap();
    let of_job_1 = Packet { job: 1, ..fragment(0, 2, 1000).at(9) };
    assert_eq!(of_job_1.to(&mut switch, 50), Verdict::Absorb);

    assert_eq!(fragment(0, 1, 10).at(7).to(&mut switch, 1), Verdict::Absorb, "A1");
    assert_eq!(fragment(1, 1, 20).at(7).to(&mut switch, 2), Verdict::Forward, "A2");
    assert_eq!(sent(&mut switch), ["[100] #1 L1 11/1: 30"], "A'2");
    assert_eq!(fragment(0, 2, 1).at(9).to(&mut switch, 1), Verdict::Forward, "B1");
    assert_eq!(fragment(1, 2, 2).at(9).to(&mut switch, 2), Verdict::Forward, "B2");
    assert_eq!(
        sent(&mut switch),
        ["[100] #2 L1 1/1 resend collision: 1", "[100] #2 L1 10/1 resend collision: 2"]
    );
    assert_eq!(switch.statistics().in_use, 2);
    // A' comes back to both workers and frees aggregator 7; B' leaves aggregator 9 to job 1.
    let parameters = Packet { value: 0.5f32.to_le_bytes(), ..fragment(0, 1, 0).at(7).answer() };
    assert_eq!(parameters.to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1, 2] #1 parameters: 0.5"]);
    assert_eq!(fragment(0, 2, 0).at(9).answer().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(switch.statistics().in_use, 1);
    assert_eq!(switch.progress(JobId(3)).unwrap().collisions, 2);
    let of_job_1 = Packet { job: 1, ..fragment(1, 2, 1).at(9) };
    assert_eq!(of_job_1.to(&mut switch, 51), Verdict::Forward, "job 1 completes as if nothing had been");
}

#[test]
fn figure_7_box_1_and_2_another_sequence_number_of_the_job_collides_too() {
    let mut switch = switch();
    assert_eq!(fragment(0, 0, 1).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(fragment(0, 16, 2).to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #16 L1 1/1 resend collision: 2"]);
    let later_life = Packet { generation: 1, ..fragment(1, 0, 5) };
    assert_eq!(later_life.to(&mut switch, 2), Verdict::Drop(Reason::Generation));
}

#[test]
fn figure_7_boxes_3_to_7_bitmap_counter_and_ecn() {
    let mut switch = switch();
    let of_three = |bit, value: i32, ecn| {
        of(bit, value, 3).with(|header| {
            header.flags.ecn = ecn;
            header.next_exponent = value as i16;
        })
    };
    assert_eq!(of_three(0, 1, false).to(&mut switch, 1), Verdict::Absorb, "allocated, counter 1 of 3");
    // Box 4: is in already. Box 7: its ECN is kept all the same.
    assert_eq!(of_three(0, 1, true).to(&mut switch, 1), DUPLICATE);
    // Boxes 5 and 6: added, counter 2 of 3.
    assert_eq!(of_three(2, -9, false).to(&mut switch, 3), Verdict::Absorb);
    assert_eq!(sent(&mut switch), NOTHING);
    // Box 6: complete; value, bitmap and ECN are the aggregator's.
    assert_eq!(of_three(1, 5, false).to(&mut switch, 2), Verdict::Forward);
    let out = packets(&mut switch);
    assert_eq!(line(&out[0].1), "#0 L1 111/1 ecn: -3");
    let header = GradientPacket::parse(Preamble::parse(&out[0].1).unwrap(), &out[0].1).unwrap().header;
    assert_eq!(header.next_exponent, 5, "the largest (B.3)");
    // It stays until the parameters come: what the network doubled begins nothing new.
    assert_eq!(of_three(1, 5, false).to(&mut switch, 2), DUPLICATE);
    // Box 8.
    assert_eq!(fragment(0, 0, 0).answer().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1, 3, 2] #0 parameters: 0"]);
    let statistics = switch.statistics();
    assert_eq!((statistics.in_use, statistics.freed_by_parameters, statistics.aggregations), (0, 1, 3));
}

#[test]
fn a_fan_in_of_one_passes_at_once() {
    let mut switch = switch();
    let alone = of(0, 4, 1);
    assert_eq!(alone.to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1: 4"]);
}

#[test]
fn sums_saturate_and_stay_so() {
    let mut switch = switch();
    let of_three = |bit, value| of(bit, value, 3);
    of_three(0, i32::MAX - 1).to(&mut switch, 1);
    of_three(1, 100).to(&mut switch, 2);
    of_three(2, -1_000_000).to(&mut switch, 3);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 111/1: 2147483647"]);
}

/// Figure 17 at the first level, boxes 1 and 5 to 7, for a sum that lacks one worker: w2.
#[test]
fn a_lost_fragment_completes_its_sum_and_what_else_is_sent_again_ends_here() {
    let mut switch = switch_with_two_ways();
    let of_three = |bit, value| of(bit, value, 3);
    assert_eq!(of_three(0, 1).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(of_three(1, 2).to(&mut switch, 2), Verdict::Absorb);
    assert_eq!(of_three(0, 1).resent().to(&mut switch, 1), DUPLICATE);
    // w2's, lost before, comes for the first time.
    assert_eq!(of_three(2, 4).resent().to(&mut switch, 3), Verdict::Forward);
    assert_eq!(of_three(1, 2).resent().to(&mut switch, 2), DUPLICATE);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 111/1 resend: 7"]);
    let statistics = switch.statistics();
    assert_eq!((statistics.completed, statistics.freed_by_resend, statistics.in_use), (1, 0, 1));
    // The second time all go alone: the server may have a part of the sum.
    assert_eq!(of_three(1, 2).resent().to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 10/1 resend: 2"]);
    assert_eq!((switch.statistics().freed_by_resend, switch.statistics().in_use), (1, 0));
    // The others' find no aggregator and begin none.
    for (bit, from) in [(0, 1), (2, 3)] {
        assert_eq!(of_three(bit, 1 + bit as i32).resent().to(&mut switch, from), Verdict::Forward);
    }
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1 resend: 1", "[100] #0 L1 100/1 resend: 3"]);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn a_whole_sum_is_sent_again_once_whoever_sends_again() {
    let mut switch = switch_with_two_ways();
    fragment(0, 0, 1).to(&mut switch, 1);
    fragment(1, 0, 2).to(&mut switch, 2);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 3"]);
    assert_eq!(fragment(1, 0, 2).resent().to(&mut switch, 2), Verdict::Forward);
    assert_eq!(fragment(0, 0, 1).resent().to(&mut switch, 1), DUPLICATE);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1 resend: 3"]);
    assert_eq!(switch.statistics().in_use, 1, "its parameters free it");
}

#[test]
fn once_all_that_are_in_sent_again_the_missing_one_is_not_waited_for() {
    let mut switch = switch_with_two_ways();
    let of_three = |bit, value| of(bit, value, 3);
    of_three(0, 1).to(&mut switch, 1);
    of_three(1, 2).to(&mut switch, 2);
    assert_eq!(of_three(0, 1).resent().to(&mut switch, 1), DUPLICATE);
    assert_eq!(of_three(1, 2).resent().to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1 resend stalled: 3"]);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn who_asked_before_a_sum_was_whole_asks_for_it_anew() {
    let mut switch = switch_with_two_ways();
    let of_three = |bit, value| of(bit, value, 3);
    of_three(0, 1).to(&mut switch, 1);
    of_three(1, 2).to(&mut switch, 2);
    assert_eq!(of_three(0, 1).resent().to(&mut switch, 1), DUPLICATE);
    // w2 is late, and nothing of it was lost.
    assert_eq!(of_three(2, 4).to(&mut switch, 3), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 111/1: 7"]);
    assert_eq!(of_three(0, 1).resent().to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 111/1 resend: 7"]);
}

#[test]
fn figure_17_the_first_resend_takes_a_sum_along_that_lacks_several() {
    let mut switch = switch_with_two_ways();
    let of_four = |bit, value| of(bit, value, 4);
    of_four(0, 1).to(&mut switch, 1);
    assert_eq!(of_four(1, 2).resent().to(&mut switch, 2), Verdict::Forward, "lost before, and merged");
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1 resend: 3"]);
    assert_eq!((switch.statistics().freed_by_resend, switch.statistics().in_use), (1, 0));
}

#[test]
fn figure_17_box_5_what_is_in_already_is_not_added_again() {
    let mut switch = switch_with_two_ways();
    let of_four = |bit, value| of(bit, value, 4);
    of_four(0, 1).to(&mut switch, 1);
    of_four(1, 2).with(|header| header.flags.ecn = true).to(&mut switch, 2);
    assert_eq!(of_four(0, 1).resent().to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1 resend ecn stalled: 3"], "a partial sum of two of four");
}

#[test]
fn figure_17_box_3_the_second_level_discards_and_forwards() {
    let mut switch = switch_of_level(1);
    let rack = |bit: u32, value| {
        fragment(0, 0, value).directed(Directions {
            level: 1,
            bitmaps: [0b11, 1 << bit, 0, 0],
            fan_in_degrees: [2, 2, 0, 0],
        })
    };
    assert_eq!(rack(0, 5).to(&mut switch, 10), Verdict::Absorb);
    assert_eq!(rack(1, 6).resent().to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L2 11/10 resend: 6"], "the first rack's sum is not in it");
    assert_eq!(switch.statistics().in_use, 0);
    assert_eq!(rack(0, 5).resent().to(&mut switch, 10), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L2 11/1 resend: 5"]);
    assert_eq!(switch.statistics().in_use, 0, "a resend reserves nothing");
}

/// Figure 9: w0 and w1 at SW0, w2 and w3 at SW1, w4 and w5 at SW2 with the server.
#[test]
fn figure_9_the_second_level_adds_racks_and_its_own_workers() {
    let mut sw2 = switch_of_level(1);
    let below = |bitmap0, bit: u32, value| {
        fragment(0, 0, value).directed(Directions {
            level: 1,
            bitmaps: [bitmap0, 1 << bit, 0, 0],
            fan_in_degrees: [2, 4, 0, 0],
        })
    };
    assert_eq!(below(0b11, 0, 1).to(&mut sw2, 10), Verdict::Absorb, "SW0");
    assert_eq!(below(0, 2, 10).to(&mut sw2, 24), Verdict::Absorb, "w4");
    assert_eq!(below(0, 3, 100).to(&mut sw2, 25), Verdict::Absorb, "w5");
    assert_eq!(below(0b11, 1, 1000).to(&mut sw2, 11), Verdict::Forward, "SW1");
    assert_eq!(sent(&mut sw2), ["[100] #0 L2 11/1111: 1111"]);
}

#[test]
fn original_values_and_parameters_handed_back_are_never_added() {
    for change in [(|flags| flags.overflow = true) as fn(&mut Flags), |flags| flags.restore = true] {
        let mut switch = switch();
        fragment(0, 0, 1).to(&mut switch, 1);
        let apart = fragment(1, 0, 2).resent().with(|header| change(&mut header.flags));
        assert_eq!(apart.to(&mut switch, 2), Verdict::Forward);
        assert_eq!(packets(&mut switch).len(), 1);
        assert_eq!(switch.statistics().in_use, 0);
    }
}

#[test]
fn a_job_that_died_leaves_its_aggregator_to_who_comes_after_the_timeout() {
    let mut switch = switch();
    switch.add_job(route(1, 0)).unwrap();
    let dead = Packet { job: 1, ..fragment(0, 2, 1000) };
    dead.to_at(&mut switch, 50, 0);
    fragment(0, 0, 1).to_at(&mut switch, 1, 500);
    let parameters = fragment(0, 0, 0).answer();
    parameters.to_at(&mut switch, UP, 1000);
    assert_eq!(switch.statistics().in_use, 1, "1000 ns old is not older than 1000 ns");
    parameters.to_at(&mut switch, UP, 1001);
    assert_eq!((switch.statistics().in_use, switch.statistics().freed_stale), (0, 1));
    assert_eq!(fragment(0, 16, 1).to_at(&mut switch, 1, 1002), Verdict::Absorb);
}

/// Fragments 0, 1 and 2 of the same index, and a set of two aggregators.
#[test]
fn with_two_ways_a_fragment_takes_the_neighbour_and_all_of_its_workers_meet_there() {
    let mut switch = switch_with_two_ways();
    let at = |bit, sequence, value| fragment(bit, sequence, value).at(7);
    assert_eq!(at(0, 0, 1).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(at(0, 1, 10).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(at(0, 2, 100).to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #2 L1 1/1 resend collision: 100"]);
    // Aggregator 7 becomes free: what is in 6 stays there, and is found.
    assert_eq!(at(1, 0, 2).to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 3"]);
    assert_eq!(at(0, 0, 0).answer().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1, 2] #0 parameters: 0"]);
    assert_eq!(at(1, 1, 20).to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #1 L1 11/1: 30"]);
    assert_eq!(at(1, 1, 20).to(&mut switch, 2), DUPLICATE);
    assert_eq!(at(0, 1, 0).answer().to(&mut switch, UP), Verdict::Multicast);
    let statistics = switch.statistics();
    assert_eq!((statistics.in_use, statistics.freed_by_parameters, statistics.collisions), (0, 2, 1));
}

/// Aggregators 6 and 7 have other fragments, until the first packet of fragment 2 has come.
#[test]
fn with_two_ways_a_fragment_that_collided_goes_to_the_server_from_every_worker() {
    let mut switch = switch_with_two_ways();
    let at = |bit, sequence, value| fragment(bit, sequence, value).at(7);
    at(0, 0, 1).to(&mut switch, 1);
    at(0, 1, 10).to(&mut switch, 1);
    at(0, 2, 100).to(&mut switch, 1);
    at(0, 0, 0).answer().to(&mut switch, UP);
    let _ = sent(&mut switch);
    // There is room by now, in which it would wait for the first.
    assert_eq!(at(1, 2, 200).to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #2 L1 10/1 resend collision: 200"]);
    assert_eq!((switch.statistics().in_use, switch.statistics().collisions), (1, 2));
    // A job of the same number has nothing to do with it.
    switch.remove_job(JobId(3));
    switch.add_job(route(3, 0)).unwrap();
    assert_eq!(at(1, 2, 200).to(&mut switch, 2), Verdict::Absorb);
}

/// With one way all is as in the paper: box 7, whatever the sum lacks.
#[test]
fn figure_17_with_one_way_each_resend_takes_along_what_there_is() {
    let mut switch = switch();
    let of_three = |bit, value| of(bit, value, 3);
    of_three(0, 1).to(&mut switch, 1);
    of_three(1, 2).to(&mut switch, 2);
    assert_eq!(of_three(2, 4).resent().to(&mut switch, 3), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 111/1 resend: 7"]);
    assert_eq!(switch.statistics().in_use, 0);
    assert_eq!(of_three(0, 1).resent().to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1 resend: 1"]);
    // So does one of a whole sum.
    fragment(0, 1, 1).to(&mut switch, 1);
    fragment(1, 1, 2).to(&mut switch, 2);
    assert_eq!(sent(&mut switch), ["[100] #1 L1 11/1: 3"]);
    assert_eq!(fragment(1, 1, 2).resent().to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #1 L1 11/1 resend: 3"]);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn resends_and_old_age_free_the_neighbour_too() {
    let mut switch = AtpSwitch::new(AtpSwitchConfig { ways: 2, ..config(16) });
    switch.add_job(route(3, 0)).unwrap();
    switch.add_job(route(1, 0)).unwrap();
    let dead = |sequence| Packet { job: 1, ..fragment(0, sequence, 1000) }.at(7);
    dead(0).to_at(&mut switch, 50, 0);
    fragment(0, 1, 1).at(7).to_at(&mut switch, 1, 1);
    for out in ["11/1 resend: 3", "10/1 resend: 2"] {
        assert_eq!(fragment(1, 1, 2).at(7).resent().to_at(&mut switch, 2, 2), Verdict::Forward);
        assert_eq!(sent(&mut switch), [format!("[100] #1 L1 {out}")]);
    }
    assert_eq!((switch.statistics().in_use, switch.statistics().freed_by_resend), (1, 1));
    // Aggregators left behind in 7 and 6 are freed by parameters of 7, where there is no other
    // room.
    dead(16).to_at(&mut switch, 50, 3);
    let counted = |switch: &AtpSwitch<u16>| (switch.statistics().in_use, switch.statistics().freed_stale);
    for ms in [1001, 1004] {
        fragment(0, 1, 0).at(7).answer().to_at(&mut switch, UP, ms);
        assert_eq!(counted(&switch), (1, 1));
    }
    fragment(0, 2, 1).at(7).to_at(&mut switch, 1, 1004);
    fragment(0, 1, 0).at(7).answer().to_at(&mut switch, UP, 1004);
    assert_eq!(counted(&switch), (1, 2));
}

/// The last set is not whole: 14 with 12 and 13.
#[test]
fn a_set_ends_with_the_table() {
    let mut switch = AtpSwitch::new(AtpSwitchConfig { ways: 4, ..config(15) });
    switch.add_job(route(3, 0)).unwrap();
    let verdicts = [0, 1, 2, 3].map(|sequence| fragment(0, sequence, 1).at(14).to(&mut switch, 1));
    assert_eq!(verdicts, [Verdict::Absorb, Verdict::Absorb, Verdict::Absorb, Verdict::Forward]);
}

#[test]
fn a_switch_that_was_started_again_learns_its_children_from_what_they_send() {
    let mut switch = switch();
    assert_eq!(fragment(0, 0, 0).answer().to(&mut switch, UP), Verdict::Drop(Reason::Unexpected));
    assert_eq!(fragment(0, 0, 3).resent().to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1 resend: 3"]);
    assert_eq!(fragment(0, 0, 0).answer().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1] #0 parameters: 0"]);
}

#[test]
fn without_aggregators_everything_is_forwarded() {
    let mut switch = AtpSwitch::new(config(0));
    switch.add_job(route(3, 0)).unwrap();
    assert_eq!(fragment(0, 0, 1).at(0).to(&mut switch, 1), Verdict::Forward);
    assert_eq!(fragment(1, 0, 2).at(0).resent().to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1 resend collision: 1", "[100] #0 L1 10/1 resend: 2"]);
    assert_eq!(fragment(0, 0, 0).at(0).answer().to(&mut switch, UP), Verdict::Multicast);
}

#[test]
fn a_fragment_longer_than_an_aggregator_is_forwarded() {
    let mut switch = switch();
    let long = Packet { elements: 256, ..fragment(0, 0, 1) };
    assert_eq!(long.to(&mut switch, 1), Verdict::Forward);
    assert_eq!(long.resent().to(&mut switch, 1), Verdict::Forward);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn unlike_fragments_under_one_number_are_not_added_but_left_to_the_server() {
    let changes: [fn(&mut GradientHeader); 4] = [
        |header| header.collective.elements += 1,
        |header| header.fragment += 1,
        |header| header.exponent = 3,
        |header| header.directions.fan_in_degrees[0] = 5,
    ];
    for change in changes {
        let mut switch = switch();
        fragment(0, 0, 1).to(&mut switch, 1);
        let unlike = fragment(1, 0, 2).with(change);
        assert_eq!(unlike.to(&mut switch, 2), Verdict::Forward);
        assert_eq!(sent(&mut switch), ["[100] #0 L1 10/1 resend: 2"]);
        assert_eq!(unlike.resent().to(&mut switch, 2), Verdict::Forward);
        assert_eq!(sent(&mut switch), ["[100] #0 L1 10/1 resend: 2"]);
        assert_eq!(switch.statistics().in_use, 1);
    }
}

#[test]
fn foreign_packets_with_a_live_jobs_id_change_nothing() {
    let mut switch = switch();
    fragment(0, 0, 1).to(&mut switch, 1);
    let rows = [
        (fragment(0, 0, 0).answer(), 66, FOREIGN),
        (fragment(0, 0, 0).answer(), 1, FOREIGN),
        (fragment(1, 0, 666), UP, FOREIGN),
        (Packet { job: 4, ..fragment(0, 0, 1) }, 1, Verdict::Drop(Reason::UnknownJob)),
        (fragment(1, 0, 5).with(|h| h.directions.level = 1), 2, OUT_OF_RANGE),
        (fragment(1, 0, 5).with(|h| h.directions.bitmaps[0] = 0b110), 2, OUT_OF_RANGE),
        (fragment(1, 0, 5).with(|h| h.directions.bitmaps[0] = 0), 2, OUT_OF_RANGE),
        (fragment(1, 0, 5).with(|h| h.directions.fan_in_degrees[0] = 0), 2, OUT_OF_RANGE),
        (Packet { elements: 0, ..fragment(1, 0, 5) }, 2, Verdict::Drop(Reason::ChunkLength)),
    ];
    for (packet, from, verdict) in rows {
        assert_eq!(packet.to(&mut switch, from), verdict, "{packet:?} from {from}");
    }
    assert_eq!(switch.handle_packet(Instant(0), 1, b"hello"), Verdict::Drop(Reason::Malformed));
    assert_eq!(fragment(1, 0, 2).to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 3"]);
    assert_eq!(switch.received().dropped.iter().sum::<u64>(), 10);
}

#[test]
fn a_child_whose_address_changes_is_heard_and_answered_with_its_next_packet() {
    let mut switch = switch();
    fragment(0, 0, 1).to(&mut switch, 1);
    fragment(1, 0, 2).to(&mut switch, 2);
    sent(&mut switch);
    // The parameters went to the old address; the child sends again from the new one.
    assert_eq!(fragment(0, 0, 1).resent().to(&mut switch, 9), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1 resend: 3"]);
    fragment(0, 0, 0).answer().to(&mut switch, UP);
    assert_eq!(sent(&mut switch), ["[2, 9] #0 parameters: 0"]);
    // The switch's requests go there too, and a packet that counts for nothing says as much of the
    // address.
    assert_eq!(fragment(0, 1, 1).at(8).to(&mut switch, 9), Verdict::Absorb);
    assert_eq!(fragment(0, 1, 1).at(8).to(&mut switch, 10), DUPLICATE);
    let request = Packet { elements: 0, ..fragment(0, 1, 0).at(8).answer() };
    request.with(|header| header.flags.overflow = true).to(&mut switch, UP);
    assert_eq!(sent(&mut switch), ["[2, 10] #1 parameters overflow: request"]);
    // A copy from the old address that comes late leads astray until the next packet.
    fragment(0, 1, 1).at(8).to(&mut switch, 9);
    assert_eq!(fragment(0, 2, 1).at(9).to(&mut switch, 10), Verdict::Absorb);
    fragment(0, 2, 0).at(9).answer().to(&mut switch, UP);
    assert_eq!(sent(&mut switch), ["[2, 10] #2 parameters: 0"]);
}

#[test]
fn a_long_queue_marks_congestion_both_ways() {
    let mut switch = AtpSwitch::new(AtpSwitchConfig { ecn_threshold_packets: Some(2), ..config(0) });
    switch.add_job(route(3, 0)).unwrap();
    for sequence in 0..3 {
        fragment(0, sequence, 1).to(&mut switch, 1);
    }
    let up = sent(&mut switch);
    assert_eq!(up.iter().map(|line| line.contains("ecn")).collect::<Vec<_>>(), [false, false, true]);
    for sequence in 0..3 {
        fragment(0, sequence, 1).answer().to(&mut switch, UP);
    }
    let down = sent(&mut switch);
    assert_eq!(down.iter().map(|line| line.contains("ecn")).collect::<Vec<_>>(), [false, false, true]);
}

#[test]
fn a_queue_that_nobody_drains_drops_and_recovers() {
    let mut switch = AtpSwitch::new(config(0));
    switch.add_job(route(3, 0)).unwrap();
    let full = Verdict::Drop(Reason::OutboxFull);
    let taken = (0..100_000).take_while(|i| fragment(0, *i, 1).to(&mut switch, 1) != full).count();
    assert_eq!(taken, (4 << 20) / fragment_packet_bytes::<Directions>(ELEMENTS));
    assert_eq!(packets(&mut switch).len(), taken);
    assert_eq!(fragment(0, 0, 1).to(&mut switch, 1), Verdict::Forward);
}

#[test]
fn what_passes_through_has_one_bounded_room_for_all_jobs_and_sums_need_none() {
    let mut switch = AtpSwitch::new(config(16));
    for job in 0..4 {
        switch.add_job(route(job, 0)).unwrap();
        // Both ways, of every job.
        Packet { job, ..fragment(0, 9, 1).resent() }.to(&mut switch, 1);
        Packet { job, ..fragment(0, 9, 1).answer() }.to(&mut switch, UP);
    }
    let full = Verdict::Drop(Reason::OutboxFull);
    let passes = |switch: &mut AtpSwitch<u16>, i: u64| {
        let packet = Packet { job: (i % 4) as u32, ..fragment(0, i, 1) };
        if i.is_multiple_of(2) { packet.resent().to(switch, 1) } else { packet.answer().to(switch, UP) }
    };
    let taken = 8 + (0..100_000).take_while(|i| passes(&mut switch, *i) != full).count();
    assert_eq!(taken, (4 << 20) / fragment_packet_bytes::<Directions>(ELEMENTS));
    assert_eq!(fragment(0, 0, 1).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(fragment(1, 0, 2).to(&mut switch, 2), Verdict::Forward);
    // A job that goes takes what it has with it; the room is there again when all is sent.
    switch.remove_job(JobId(0));
    let sent = sent(&mut switch);
    assert!(sent.contains(&"[100] #0 L1 11/1: 3".to_string()));
    assert!(sent.len() > taken / 2 && sent.len() < taken, "{} of {taken}", sent.len());
    assert_eq!(fragment(0, 1, 1).resent().to(&mut switch, 1), Verdict::Forward);
}

#[test]
fn a_sum_that_was_overtaken_before_it_was_sent_is_not_sent_from_another_fragments_aggregator() {
    // By a second resend; by parameters; by another fragment in its place.
    let mut switch = switch_with_two_ways();
    let complete = |switch: &mut AtpSwitch<u16>, sequence| {
        assert_eq!(fragment(0, sequence, 1).to(switch, 1), Verdict::Absorb);
        assert_eq!(fragment(1, sequence, 2).to(switch, 2), Verdict::Forward);
    };
    complete(&mut switch, 0);
    for _ in 0..2 {
        assert_eq!(fragment(0, 0, 1).resent().to(&mut switch, 1), Verdict::Forward);
    }
    assert_eq!(sent(&mut switch), ["[100] #0 L1 1/1 resend: 1"]);
    complete(&mut switch, 1);
    fragment(0, 1, 0).answer().to(&mut switch, UP);
    assert_eq!(fragment(0, 16, 50).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(sent(&mut switch), ["[1, 2] #1 parameters: 0"]);
    assert_eq!(sent(&mut switch), NOTHING);
    // Nothing is added to what waits to be sent: not by who has no place in it.
    fragment(1, 16, 5).to(&mut switch, 2);
    assert_eq!(fragment(2, 16, 666).to(&mut switch, 66), DUPLICATE);
    assert_eq!(sent(&mut switch), ["[100] #16 L1 11/1: 55"]);
}

#[test]
fn an_abort_of_the_server_reaches_the_children_and_whoever_goes_on_sending() {
    let mut switch = switch();
    fragment(0, 0, 1).to(&mut switch, 1);
    let preamble = Preamble {
        kind: Kind::Abort,
        job: JobId(3),
        generation: Generation(0),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let reason = AbortReason::Expelled(Rank(1));
    let abort = Abort { preamble, reason }.to_bytes(KEY);
    assert_eq!(switch.handle_packet(Instant(0), 66, &abort), FOREIGN);
    assert_eq!(switch.handle_packet(Instant(0), UP, &abort), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1] abort"]);
    assert_eq!(switch.poll_event(), Some(JobAborted { job: JobId(3), reason }));
    assert_eq!(switch.statistics().in_use, 0);
    for _ in 0..2 {
        assert_eq!(fragment(1, 0, 1).to(&mut switch, 2), Verdict::Drop(Reason::Aborted));
    }
    assert_eq!(sent(&mut switch), ["[1, 2] abort"], "one between two drains");
    switch.remove_job(JobId(3));
    assert_eq!(fragment(1, 0, 1).to(&mut switch, 2), Verdict::Drop(Reason::UnknownJob));
}

#[test]
fn a_switch_holds_4_gib_of_aggregators_at_most() {
    let with = |aggregators, elements| AtpSwitchConfig { aggregators, elements, ..config(0) }.check().is_ok();
    assert!(with(1 << 24, 64) && with(1 << 19, 2048) && with(0, 336));
    assert!(!with((1 << 24) + 1, 64) && !with((1 << 19) + 1, 2048) && !with(16, 65));
    let ways = |ways| AtpSwitchConfig { ways, ..config(16) }.check().is_ok();
    assert!(ways(1) && ways(64) && !ways(0) && !ways(65));
}

#[test]
fn removing_a_job_frees_its_aggregators_and_limits_hold() {
    let mut switch = switch();
    fragment(0, 0, 1).to(&mut switch, 1);
    switch.remove_job(JobId(3));
    assert_eq!(switch.statistics().in_use, 0);
    assert!(switch.add_job(route(3, 4)).is_err(), "levels are 0 to 3");
    for job in 0..crate::atp::ATP_JOBS_MAX as u32 {
        switch.add_job(route(job, 0)).unwrap();
    }
    assert!(switch.add_job(route(99_999, 0)).is_err());
    switch.add_job(route(5, 0)).unwrap();
}

#[test]
fn jobs_share_a_switch_in_turn() {
    let mut switch = switch();
    switch.add_job(route(1, 0)).unwrap();
    let of = |job, sequence| Packet { job, ..fragment(0, sequence, job as i32).resent() };
    let line = |switch: &mut AtpSwitch<u16>, jobs: &[u32]| {
        for (sequence, job) in (0..).zip(jobs) {
            of(*job, sequence).to(switch, *job as u16);
        }
        // A packet a train.
        let mut train = [0; fragment_packet_bytes::<Directions>(ELEMENTS)];
        let mut order = vec![];
        while let Some(transmit) = switch.poll_transmit(Instant(0), &mut train) {
            assert_eq!(transmit.bytes, train.len());
            order.push(Preamble::parse(&train).unwrap().job.0);
        }
        order
    };
    assert_eq!(line(&mut switch, &[3, 3, 3, 1, 1]), [3, 1, 3, 1, 3]);
    // A job that goes, or comes anew, with packets in the queue: the other is not held up, and none
    // has two turns.
    of(3, 9).to(&mut switch, 3);
    switch.add_job(route(3, 0)).unwrap();
    assert_eq!(line(&mut switch, &[3, 3, 1, 1]), [3, 1, 3, 1]);
    of(3, 9).to(&mut switch, 3);
    switch.remove_job(JobId(3));
    assert_eq!(line(&mut switch, &[1]), [1]);
}

#[test]
fn children_at_one_address_get_one_copy() {
    let mut switch = switch();
    for bit in [0, 1, 2] {
        fragment(bit, 0, 1).to(&mut switch, if bit < 2 { 1 } else { 2 });
    }
    sent(&mut switch);
    for (to, moved) in [("[1, 2]", 2), ("[1]", 1), ("[1, 3]", 3)] {
        fragment(2, 0, 1).resent().to(&mut switch, moved);
        sent(&mut switch);
        fragment(0, 0, 0).answer().to(&mut switch, UP);
        assert_eq!(sent(&mut switch), [format!("{to} #0 parameters: 0")]);
    }
}

/// A worker would have sent 0.5 as 50,000,000.
#[test]
fn values_of_two_bytes_are_scaled_where_they_are_added_and_go_on_as_they_are_where_they_are_not() {
    let mut switch = switch();
    assert_eq!(fragment(0, 0, 0).half(0.5).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(fragment(1, 0, 0).half(-0.25).to(&mut switch, 2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 25000000"]);
    // Its aggregator serves fragment 0.
    assert_eq!(fragment(0, 1, 0).half(0.5).to(&mut switch, 1), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #1 L1 1/1 resend collision half: 0.5"]);
    let parameters = fragment(0, 0, 0).half(0.25).answer();
    assert_eq!(parameters.to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[1, 2] #0 parameters half: 0.25"]);
    // Nobody waits for these: each goes on as it is. The last one completes a sum.
    for (bit, value) in [(0, 1.0), (1, 2.0)] {
        fragment(bit, 2, 0).half(value).resent().to(&mut switch, 1);
    }
    let alone = ["[100] #2 L1 1/1 resend half: 1", "[100] #2 L1 10/1 resend half: 2"];
    assert_eq!(sent(&mut switch), alone);
    fragment(0, 3, 0).half(1.0).to(&mut switch, 1);
    fragment(1, 3, 0).half(2.0).resent().to(&mut switch, 2);
    assert_eq!(sent(&mut switch), ["[100] #3 L1 11/1 resend: 300000000"]);
}

#[test]
fn values_of_two_bytes_that_no_factor_belongs_to_are_dropped() {
    let mut switch = switch();
    for exponent in [-150, 129, i16::MAX] {
        let packet = fragment(0, 0, 0).half(0.5).with(|header| header.exponent = exponent);
        assert_eq!(packet.to(&mut switch, 1), Verdict::Drop(Reason::Exponent), "{exponent}");
    }
    let packet = |bit| fragment(bit, 0, 0).half(0.5).with(|header| header.exponent = -1);
    assert_eq!(packet(0).to(&mut switch, 1), Verdict::Absorb);
    assert_eq!(packet(1).to(&mut switch, 2), Verdict::Forward);
    // Two workers: 0.5 is half of what does not saturate, less one unit.
    assert_eq!(sent(&mut switch), ["[100] #0 L1 11/1: 2147483644"]);
}
