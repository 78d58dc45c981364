//! Tests of lost and late packets: resends, timeouts, and what they do to the window.

use super::*;

#[test]
fn a_fragment_that_three_parameters_overtook_is_sent_again_at_once_and_halves_the_window_if_it_was_lost() {
    let mut line = Line::with_fragments(config(1000), 1000);
    assert_eq!(line.sent(), "0-199");
    let timeline = [(1, "200-204"), (2, "205-209"), (3, "0r 210-214")];
    for (sequence, sends) in timeline {
        line.parameters(sequence);
        assert_eq!(line.sent(), sends, "after parameters {sequence}");
    }
    assert_eq!(line.worker.progress().congestion_window, 208 + 4, "it may have been overtaken only");
    // Fragments that were sent before it overtake it no more ...
    for sequence in 4..210 {
        line.parameters(sequence);
    }
    assert!(!line.sent().contains('r'), "a resend is not overtaken by what was on the way");
    // ... and what was sent after it does.
    let next = 210;
    for (sequence, sends) in [(next, false), (next + 1, false), (next + 2, true)] {
        line.parameters(sequence);
        assert_eq!(line.sent().contains("0r"), sends, "after parameters {sequence}");
    }
    assert_eq!(line.worker.statistics().retransmissions, 2);
    let before = line.worker.progress().congestion_window;
    line.answer(0, Answer { lost: true, ..Answer::default() });
    assert_eq!(line.worker.progress().congestion_window, (before + 4) / 2);
}

/// It stalled in a switch, or came to the server on a longer way: that says nothing of congestion.
#[test]
fn a_fragment_that_was_overtaken_and_not_lost_holds_slow_start_up_and_halves_nothing() {
    let mut line = Line::with_fragments(config(1000), 1000);
    line.sent();
    let timeline = [
        // (parameters, the window after them)
        (1, 204),
        (2, 208),
        (3, 212),
        // In doubt about 0, one MTU a window.
        (4, 212),
        (5, 212),
        (0, 216),
        (6, 220),
    ];
    for (sequence, window) in timeline {
        line.parameters(sequence);
        assert_eq!(line.worker.progress().congestion_window, window, "after parameters {sequence}");
    }
    assert_eq!(line.worker.progress().window_halved, 0);
}

/// Somebody lost a fragment of a tensor that came late to all others: it is his network that is
/// full, if any.
#[test]
fn what_another_worker_lost_halves_no_window_here() {
    let lost = Answer { lost: true, ..Answer::default() };
    let mut line = Line::with_fragments(config(1000), 50);
    line.at_ms(0).sent();
    line.answer(0, lost);
    line.at_ms(TIMEOUT_MS).sent();
    line.answer(1, lost);
    assert_eq!(line.worker.progress().window_halved, 0, "nor after a timeout");
}

#[test]
fn every_hole_that_was_overtaken_is_filled_without_waiting_for_the_first() {
    let mut line = Line::with_fragments(config(1000), 12);
    assert_eq!(line.sent(), "0-11");
    for sequence in [1, 3, 5, 6] {
        line.parameters(sequence);
    }
    // 4 was overtaken by two.
    assert_eq!(line.sent(), "0r 2r");
    line.parameters(7);
    assert_eq!(line.sent(), "4r");
}

/// The end of a stream, so that nothing new overtakes what is lost twice: a queue that was full
/// takes no more than leaves it.
#[test]
fn each_parameter_lets_one_lost_fragment_out_and_what_is_lost_again_is_noticed_by_what_was_sent_after_it() {
    let lost = Answer { lost: true, ..Answer::default() };
    let mut line = Line::with_fragments(config(1000), 12);
    assert_eq!(line.sent(), "0-11");
    // Eight were lost. 0 is lost again.
    let timeline = [
        (8, Answer::default(), ""),
        (9, Answer::default(), ""),
        (10, Answer::default(), "0r"),
        (11, Answer::default(), "1r"),
        (1, lost, "2-3r"),
        (2, lost, "4-5r"),
        (3, lost, "6-7r"),
        (4, lost, "0r"),
        (5, lost, ""),
    ];
    for (sequence, answer, sends) in timeline {
        line.answer(sequence, answer);
        assert_eq!(line.sent(), sends, "after parameters {sequence}");
    }
}

#[test]
fn a_timeout_sends_the_first_few_again_and_backs_off() {
    let mut line = Line::with_fragments(config(1000), 50);
    line.at_ms(0);
    assert_eq!(line.sent(), "0-49");
    let timeline = [(1, ""), (TIMEOUT_MS - 1, ""), (TIMEOUT_MS, "0-7r"), (TIMEOUT_MS + 1, "")];
    for (ms, sends) in timeline {
        assert_eq!(line.at_ms(ms).sent(), sends, "at {ms} ms");
    }
    // The ceiling bounds it, and half of it: somebody may be late for long, and is to be noticed.
    let due = line.worker.poll_timeout().unwrap().0 / 1_000_000;
    assert!((2 * TIMEOUT_MS..=2 * TIMEOUT_MS + TIMEOUT_MS / 2).contains(&due), "{due}");
    assert_eq!(line.at_ms(due + 1).sent(), "0-7r");
    assert_eq!(line.worker.progress().window_halved, 0, "somebody is late, the network may be idle");
}

/// The rack's switch was away for a moment, and nothing follows that could overtake what was lost.
#[test]
fn a_last_window_that_is_lost_whole_is_sent_again_twice_as_much_each_round_trip() {
    let mut line = Line::with_fragments(config(1000), 150);
    line.at_ms(0).sent();
    for sequence in 0..50 {
        line.at_ms(1).parameters(sequence);
    }
    let mut ms = line.worker.poll_timeout().unwrap().0.div_ceil(1_000_000);
    for (first, last) in [(50, 57), (58, 73), (74, 105), (106, 149)] {
        assert_eq!(line.at_ms(ms).sent(), alloc::format!("{first}-{last}r"));
        ms += 1;
        for sequence in first..=last {
            line.at_ms(ms).answer(sequence, Answer { lost: true, ..Answer::default() });
        }
    }
    assert_eq!(line.completed().len(), 1);
}

/// Somebody was late, and without a switch what he sends is the last that is missing: nothing was
/// lost.
#[test]
fn what_was_late_and_not_lost_is_not_sent_again_beyond_the_first_few() {
    let mut line = Line::with_fragments(config(1000), 50);
    line.at_ms(0).sent();
    assert_eq!(line.at_ms(TIMEOUT_MS).sent(), "0-7r");
    for sequence in 0..50 {
        line.at_ms(TIMEOUT_MS + 1).parameters(sequence);
        assert_eq!(line.sent(), "", "after parameters {sequence}");
    }
    assert_eq!(line.completed().len(), 1);
}

/// A second timeout begins with what is missing then.
#[test]
fn what_is_lost_again_while_a_worker_goes_back_waits_for_the_next_timeout() {
    let lost = Answer { lost: true, ..Answer::default() };
    let mut line = Line::with_fragments(config(1000), 50);
    line.at_ms(0).sent();
    assert_eq!(line.at_ms(TIMEOUT_MS).sent(), "0-7r");
    line.at_ms(TIMEOUT_MS + 1).answer(0, lost);
    assert_eq!(line.sent(), "8-9r");
    let due = line.worker.poll_timeout().unwrap().0.div_ceil(1_000_000);
    assert_eq!(line.at_ms(due).sent(), "1-8r");
    line.answer(1, lost);
    assert_eq!(line.sent(), "9-10r");
}

#[test]
fn workers_time_out_together_once_and_then_each_for_itself() {
    let due = |bitmaps, timeouts| {
        let mut line = Line::with_fragments(config(1000), 50);
        line.worker.directions.bitmaps = bitmaps;
        line.sent();
        for _ in 0..timeouts {
            let due = line.worker.poll_timeout().unwrap().0.div_ceil(1_000_000);
            line.at_ms(due).sent();
        }
        line.worker.poll_timeout().unwrap().0 - line.now.0
    };
    let workers: Vec<_> =
        (0..32).flat_map(|rack| (0..31).map(move |bit| [1 << bit, 1 << rack, 0, 0])).collect();
    let all = |timeouts| workers.iter().map(|bitmaps| due(*bitmaps, timeouts)).collect::<Vec<_>>();
    assert!(all(0).iter().all(|due| *due == TIMEOUT_MS * 1_000_000));
    let (second, third) = (all(1), all(2));
    assert_ne!(second, third);
    for mut waits in [second, third] {
        // Evenly: a quarter of them in each quarter of the additional half.
        waits.sort_unstable();
        let quarter = |nth: usize| (waits[nth * waits.len() / 4] - TIMEOUT_MS * 1_000_000) as f64 / 1e6;
        for nth in 1..4 {
            let expected = TIMEOUT_MS as f64 / 8.0 * nth as f64;
            assert!((quarter(nth) - expected).abs() < 1.0, "{} of {expected} ms", quarter(nth));
        }
    }
}

#[test]
fn while_parameters_come_nothing_times_out() {
    let mut line = Line::with_fragments(config(1000), 4);
    line.sent();
    line.at_ms(TIMEOUT_MS - 1).parameters(1);
    let due = line.worker.poll_timeout();
    assert!(due > Some(Instant(TIMEOUT_MS * 1_000_000)), "{due:?}");
    assert_eq!(line.at_ms(TIMEOUT_MS).sent(), "");
    for sequence in [0, 2, 3] {
        line.parameters(sequence);
    }
    assert_eq!(line.worker.poll_timeout(), None, "nothing is on the way");
}

#[test]
fn parameters_that_come_twice_are_ignored() {
    let mut line = Line::with_fragments(config(1000), 6);
    line.sent();
    let timeline = [(2, ABSORB), (2, DUPLICATE), (2, DUPLICATE), (2, DUPLICATE), (0, ABSORB), (0, DUPLICATE)];
    for (sequence, verdict) in timeline {
        assert_eq!(line.parameters(sequence), verdict);
    }
    assert_eq!(line.sent(), "", "the same parameters thrice overtake nobody");
}

#[test]
fn a_mark_halves_the_window_once_a_window() {
    let mut line = Line::with_fragments(config(1000), 1000);
    line.sent();
    let marked = Answer { ecn: true, ..Answer::default() };
    let timeline = [(0, 102), (1, 102), (2, 102)];
    for (sequence, window) in timeline {
        line.answer(sequence, marked);
        assert_eq!(line.sent(), "", "the window is full");
        assert_eq!(line.worker.progress().congestion_window, window, "after {sequence}");
    }
    for sequence in 3..200 {
        line.parameters(sequence);
    }
    line.sent();
    line.answer(200, marked);
    assert!(line.worker.progress().congestion_window < 60);
    assert_eq!(line.worker.progress().window_halved, 2);
}
