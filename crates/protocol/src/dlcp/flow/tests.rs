//! Timelines of one flow: what its ends say, and what they send, as time passes.

use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use alloc::{collections::BTreeSet, format};
use core::time::Duration;
use fanin_wire::{Collective, Dtype, LossBound, Op, Pattern, Report, Signal, Start, WireDtype};

use super::{Receiver, ReceiverConfig, Sender, Waiting};
use crate::dlcp::config::Finish;
use crate::dlcp::rate::RateConfig;
use crate::machine::{Instant, Reason};
use crate::transport::RetransmissionConfig;

/// The rate of a way that is no slower than the flow.
const LINE: u64 = u64::MAX;
const RETRANSMISSION: RetransmissionConfig =
    RetransmissionConfig { floor: Duration::from_millis(1), ceiling: Duration::from_millis(250) };
const RECEIVER: ReceiverConfig = ReceiverConfig {
    period: Duration::from_micros(200),
    calm_periods: 1,
    ceiling: Duration::from_millis(250),
    finish: Finish::Stopped,
    quiet: Duration::from_micros(50),
    stretch: 64,
    paths: 1,
};

fn start(bound: LossBound, has_blocks: bool) -> Start {
    let collective = Collective {
        sequence: 0,
        dtype: Dtype::Float32,
        op: Op::Sum,
        pattern: Pattern::AllReduce,
        elements: 1000,
        wire_dtype: WireDtype::Native,
    };
    Start { collective, elements: 1000, bound, priority: 1, has_blocks }
}

fn us(us: u64) -> Instant {
    Instant(us * 1000)
}

/// A signal in a word or two.
fn word(round: u16, signal: &Signal<'_>) -> String {
    match signal {
        Signal::Start(_) => "start".to_string(),
        Signal::Stop => format!("stop {round}"),
        Signal::Confirm => "confirm".to_string(),
        Signal::Finish => "finish".to_string(),
        Signal::Report(report) if report.period_us == 0 => "started".to_string(),
        Signal::Report(report) => format!("report {} in {}", report.packets, report.period_us),
        Signal::Request { missing, .. } => {
            let bits = (0..8 * missing.len()).filter(|bit| missing[bit / 8] >> (bit % 8) & 1 != 0);
            format!("request {round} of {:?}", bits.collect::<Vec<_>>())
        }
    }
}

struct Ends {
    sender: Sender,
    receiver: Receiver,
    of_sender: Waiting,
    of_receiver: Waiting,
}

impl Ends {
    /// Both ends of a flow of ten blocks.
    fn new(percent: u32) -> Self {
        let bound = LossBound::from_millionths(percent * 10_000).expect("below one");
        Self {
            // A packet takes a microsecond.
            sender: Sender::announcing(start(bound, true), 10, RateConfig::of_link(1_000_000_000, 125)),
            receiver: Receiver::new(10, bound, RECEIVER),
            of_sender: Waiting::new(RETRANSMISSION),
            of_receiver: Waiting::new(RETRANSMISSION),
        }
    }

    /// The sender's packets at a time.
    fn sender_says(&mut self, now: Instant) -> Vec<String> {
        let mut said = vec![];
        while let Some((round, signal)) = self.sender.poll_signal(now, &self.of_sender) {
            said.push(word(round, &signal));
        }
        said
    }

    fn receiver_says(&mut self, now: Instant) -> Vec<String> {
        self.receiver.handle_timeout(now);
        let mut said = vec![];
        while let Some((round, signal)) = self.receiver.poll_signal(now, &self.of_receiver) {
            said.push(word(round, &signal));
        }
        said
    }

    /// The blocks that the sender sends at a time, as many as its rate lets leave then.
    fn sends(&mut self, now: Instant) -> Vec<u32> {
        let mut sent = vec![];
        while self.sender.is_open(now)
            && let Some((block, _)) = self.sender.peek(|_| Some(true))
        {
            self.sender.sent(now, LINE, Some(0));
            sent.push(block);
        }
        sent
    }

    /// Blocks come.
    fn come(&mut self, now: Instant, blocks: impl IntoIterator<Item = u32>, round: u16) {
        for block in blocks {
            self.receiver.take_block(now, block, round, &self.of_receiver).expect("the first copy");
        }
    }

    fn stop(&mut self, now: Instant, round: u16) -> Result<(), Reason> {
        self.receiver.take_stop(now, round, &mut self.of_receiver)
    }

    /// The sender hears that it may stop, and the receiver that it did.
    fn finish(&mut self, now: Instant) {
        self.sender.take_finish(now, &mut self.of_sender);
        self.receiver.take_confirm(now, &mut self.of_receiver).expect("it finished");
        assert!(self.sender.is_finished() && self.receiver.is_confirmed());
    }

    /// The sender hears the request for these blocks.
    fn request(&mut self, now: Instant, round: u16, blocks: &[u32]) -> Result<(), Reason> {
        let mut missing = [0; 2];
        blocks.iter().for_each(|block| missing[*block as usize / 8] |= 1 << (block % 8));
        self.sender.take_request(now, round, 0, &missing, &mut self.of_sender).map(drop)
    }
}

#[test]
fn without_loss_a_flow_takes_one_way_and_an_answer() {
    let mut ends = Ends::new(0);
    // Announced, sent and stopped in one breath.
    assert_eq!(ends.sender_says(us(0)), ["start"]);
    assert_eq!(ends.sends(us(0)), (0..10).collect::<Vec<_>>());
    assert_eq!(ends.sender_says(us(0)), ["stop 0"]);
    ends.receiver.take_start(us(40));
    assert_eq!(ends.receiver_says(us(40)), ["started"]);
    ends.come(us(41), 0..10, 0);
    assert_eq!(ends.receiver_says(us(41)), ["finish"], "all there: the stop is not waited for");
    ends.finish(us(80));
    assert_eq!(ends.receiver_says(us(100_000)), Vec::<String>::new());
    assert_eq!(ends.sender_says(us(100_000)), Vec::<String>::new());
}

#[test]
fn a_stop_that_rides_on_the_last_block_and_an_end_that_sums_tell_of_are_said_only_if_no_answer_comes() {
    let mut ends = Ends::new(0);
    ends.receiver = Receiver::new(10, LossBound::RELIABLE, RECEIVER).answered(true);
    ends.sender_says(us(0));
    while let Some((block, _)) = ends.sender.peek(|_| Some(true)) {
        let last = ends.sender.is_last();
        assert_eq!(last, block == 9);
        ends.sender.sent(us(0), LINE, Some(0));
        if last {
            ends.sender.stop_rides(us(0));
        }
    }
    ends.receiver.take_start(us(40));
    assert_eq!(ends.receiver_says(us(40)), ["started"]);
    let started = Report { number: 0, packets: 0, period_us: 0 };
    ends.sender.take_report(us(80), 0, started, &mut ends.of_sender).expect("the answer");
    ends.come(us(41), 0..10, 0);
    ends.receiver.take_last(us(41), 0, &mut ends.of_receiver);
    assert!(ends.receiver.is_finished());
    assert_eq!(ends.receiver_says(us(1040)), Vec::<String>::new());
    assert_eq!(ends.receiver_says(us(1041)), ["finish"]);
    assert_eq!(ends.sender_says(us(999)), Vec::<String>::new());
    assert_eq!(ends.sender_says(us(1000)), ["stop 0"]);
    ends.finish(us(1100));
    assert_eq!(ends.sender_says(us(100_000)), Vec::<String>::new());
}

#[test]
fn a_last_block_stops_its_round_alone_and_what_is_missing_is_asked_for_after_it() {
    let mut ends = Ends::new(0);
    ends.receiver = Receiver::new(10, LossBound::RELIABLE, RECEIVER).answered(true);
    ends.receiver.take_start(us(40));
    ends.receiver_says(us(40));
    ends.come(us(41), [0, 1, 2, 3, 4, 5, 6, 7, 9], 0);
    ends.receiver.take_last(us(41), 1, &mut ends.of_receiver);
    assert_eq!(ends.receiver_says(us(91)), Vec::<String>::new(), "another round's");
    ends.receiver.take_last(us(92), 0, &mut ends.of_receiver);
    assert_eq!(ends.receiver_says(us(142)), ["request 1 of [8]"]);
    ends.receiver.take_last(us(143), 0, &mut ends.of_receiver);
    assert_eq!(ends.receiver_says(us(200)), Vec::<String>::new(), "that round is over");
}

#[test]
fn reports_are_seldom_until_more_is_lost_than_comes_or_nothing_comes() {
    let config = ReceiverConfig { calm_periods: 8, stretch: 4, ..RECEIVER };
    let comes = |receiver: &mut Receiver, at, block| {
        receiver.take_block(us(at), block, 0, &Waiting::new(RETRANSMISSION)).expect("the first copy");
    };
    let says = |receiver: &mut Receiver, at| {
        receiver
            .poll_signal(us(at), &Waiting::new(RETRANSMISSION))
            .map(|(round, signal)| word(round, &signal))
    };
    // A block every 100 us, of which each tenth is lost: a report after eight periods.
    let mut calm = Receiver::new(1000, LossBound::RELIABLE, config);
    for block in (0..16).filter(|block| block % 10 != 9) {
        comes(&mut calm, 100 * u64::from(block), block);
        assert_eq!(says(&mut calm, 100 * u64::from(block)), None);
    }
    comes(&mut calm, 1600, 16);
    assert_eq!(says(&mut calm, 1600).as_deref(), Some("report 16 in 1600"));
    // Two of three are lost.
    let mut congested = Receiver::new(1000, LossBound::RELIABLE, config);
    for block in 0..8 {
        comes(&mut congested, 20 * u64::from(block), 3 * block);
    }
    assert_eq!(says(&mut congested, 199), None);
    assert_eq!(says(&mut congested, 200).as_deref(), Some("report 8 in 200"));
    comes(&mut congested, 300, 24);
    assert_eq!(says(&mut congested, 400).as_deref(), Some("report 1 in 200"), "from then on in each period");
    // Nothing more comes.
    let mut cut = Receiver::new(1000, LossBound::RELIABLE, config);
    comes(&mut cut, 0, 0);
    comes(&mut cut, 100, 1);
    assert_eq!(says(&mut cut, 299), None);
    assert_eq!(says(&mut cut, 300).as_deref(), Some("report 2 in 300"));
}

#[test]
fn blocks_that_come_to_be_one_by_one_gather_into_a_train() {
    let config = RateConfig { ahead: Duration::from_micros(200), ..RateConfig::of_link(1_000_000_000, 125) };
    let train = config.train();
    let mut sender = Sender::streaming(1000, config);
    sender.push(0);
    assert!(sender.gathers(us(0)) && sender.gathers(us(199)));
    assert!(!sender.gathers(us(200)), "as long as what leaves at once takes");
    let mut full = Sender::streaming(1000, config);
    (0..train - 1).for_each(|block| full.push(block));
    assert!(full.gathers(us(0)));
    full.push(train - 1);
    assert!(!full.gathers(us(0)), "a train is full");
    let mut sealed = Sender::streaming(1, config);
    sealed.push(0);
    sealed.seal();
    assert!(!sealed.gathers(us(0)), "no more come");
}

#[test]
fn what_the_bound_forgives_is_not_sent_again() {
    let mut ends = Ends::new(20);
    ends.sends(us(0));
    ends.receiver.take_start(us(40));
    ends.come(us(41), 0..8, 0);
    assert_eq!(
        ends.receiver_says(us(41)),
        ["started"],
        "not before the stop: the others may be on their way"
    );
    ends.stop(us(42), 0).expect("the first");
    assert_eq!(ends.receiver_says(us(91)), Vec::<String>::new());
    assert_eq!(ends.receiver_says(us(92)), ["finish"], "nothing for 50 us");
    // Until the confirmation, what is on its way is taken.
    ends.come(us(100), [8], 0);
    assert_eq!(ends.receiver.lacks(), 1);
    ends.finish(us(130));
    assert_eq!(ends.receiver.take_block(us(131), 9, 0, &ends.of_receiver), Err(Reason::Stale));
}

#[test]
fn what_the_bound_does_not_forgive_is_requested_until_it_is_met() {
    let mut ends = Ends::new(10);
    ends.sender_says(us(0));
    ends.sends(us(0));
    ends.sender_says(us(0));
    ends.receiver.take_start(us(40));
    ends.come(us(41), [0, 1, 2, 3, 5, 7], 0);
    ends.stop(us(42), 0).expect("the first");
    assert_eq!(ends.receiver_says(us(92)), ["started", "request 1 of [4, 6, 8, 9]"]);
    // Round 1: two of four come, and one more is needed.
    ends.request(us(130), 1, &[4, 6, 8, 9]).expect("the first");
    assert_eq!(ends.sends(us(130)), [4, 6, 8, 9]);
    assert_eq!(ends.sender_says(us(130)), ["stop 1"]);
    ends.come(us(170), [4, 6], 1);
    ends.stop(us(171), 1).expect("the first");
    assert_eq!(ends.receiver_says(us(221)), ["request 2 of [8, 9]"]);
    // Round 2: with the first of them the bound is met, and no moment is lost.
    ends.request(us(260), 2, &[8, 9]).expect("the first");
    assert_eq!(ends.sends(us(260)), [8, 9]);
    ends.come(us(300), [9], 2);
    assert_eq!(ends.receiver_says(us(300)), ["finish"]);
}

#[test]
fn a_start_or_a_stop_that_is_lost_is_sent_again() {
    let mut ends = Ends::new(0);
    assert_eq!(ends.sender_says(us(0)), ["start"]);
    ends.sends(us(0));
    assert_eq!(ends.sender_says(us(0)), ["stop 0"]);
    // Three times more, long before the timeout: 50 ms, as nothing is known of the way yet; and
    // then ever longer, up to 250.
    for at in [1_000, 3_000, 7_000, 57_000, 157_000] {
        assert_eq!(ends.sender_says(us(at - 1)), Vec::<String>::new(), "{at}");
        assert_eq!(ends.sender_says(us(at)), ["start", "stop 0"], "{at}");
    }
    // All data came before the start, and was dropped: all is requested.
    ends.receiver.take_start(us(157_040));
    ends.stop(us(157_040), 0).expect("the first");
    assert_eq!(ends.stop(us(157_041), 0), Err(Reason::Duplicate));
    let all = format!("request 1 of {:?}", (0..10).collect::<Vec<_>>());
    assert_eq!(ends.receiver_says(us(157_090)), ["started", all.as_str()]);
}

#[test]
fn a_finish_that_is_lost_is_said_again_to_who_stops_again() {
    let mut ends = Ends::new(0);
    ends.receiver.take_start(us(0));
    ends.come(us(1), 0..10, 0);
    assert_eq!(ends.receiver_says(us(1)), ["started", "finish"]);
    assert_eq!(ends.stop(us(900), 0), Err(Reason::Duplicate));
    assert_eq!(ends.receiver_says(us(900)), ["finish"]);
}

#[test]
fn requests_that_come_twice_or_late_change_nothing() {
    let mut ends = Ends::new(0);
    assert_eq!(ends.request(us(0), 1, &[3]), Err(Reason::Stale), "nothing was stopped yet");
    ends.sends(us(0));
    ends.request(us(10), 1, &[3]).expect("the first");
    assert_eq!(ends.request(us(11), 1, &[3]), Err(Reason::Duplicate));
    assert_eq!(ends.sends(us(100)), [3]);
    assert_eq!(ends.request(us(200), 1, &[3]), Err(Reason::Duplicate));
    assert_eq!(ends.request(us(200), 3, &[3]), Err(Reason::Stale));
    assert_eq!(ends.sends(us(300)), Vec::<u32>::new());
    assert_eq!(
        ends.sender.take_request(us(300), 2, 1, &[0; 2], &mut ends.of_sender),
        Err(Reason::OutOfRange)
    );
    assert_eq!(
        ends.sender.take_request(us(300), 2, 0, &[0; 3], &mut ends.of_sender),
        Err(Reason::OutOfRange)
    );
}

#[test]
fn a_round_is_told_once_with_what_of_it_was_missed() {
    let mut ends = Ends::new(0);
    assert_eq!(ends.sends(us(0)).len(), 10);
    let missing = [0b0000_1010, 0b1];
    let of_first = ends.sender.take_request(us(90), 1, 0, &missing, &mut ends.of_sender).expect("the first");
    assert_eq!((of_first.packets, of_first.missed), (10, 3));
    assert_eq!((of_first.since, of_first.until), (us(0), us(0)));
    assert_eq!(of_first.time, Duration::from_micros(10), "a microsecond each");
    assert_eq!(ends.sends(us(100)), [1, 3, 8]);
    let again = ends.sender.take_request(us(110), 1, 0, &missing, &mut ends.of_sender);
    assert_eq!(again, Err(Reason::Duplicate));
    let of_last = ends.sender.take_finish(us(200), &mut ends.of_sender);
    assert_eq!((of_last.packets, of_last.missed, of_last.since), (3, 0, us(100)));
    assert_eq!(ends.sender.take_finish(us(201), &mut ends.of_sender).packets, 0, "once");
    assert_eq!(ends.sender.end().packets, 0);
}

#[test]
fn a_request_of_several_parts_is_complete_when_all_have_come() {
    let bound = LossBound::RELIABLE;
    let blocks = 2 * fanin_wire::REQUEST_BLOCKS + 8;
    let mut sender = Sender::announcing(start(bound, true), blocks, RateConfig::of_link(u64::MAX / 100, 125));
    let mut receiver = Receiver::new(blocks, bound, RECEIVER);
    let mut waiting = Waiting::new(RETRANSMISSION);
    let mut sent = BTreeSet::new();
    let mut send = |sender: &mut Sender, at: u64| {
        while sender.is_open(us(at))
            && let Some((block, _)) = sender.peek(|_| Some(true))
        {
            sender.sent(us(at), LINE, Some(0));
            sent.insert(block);
        }
        sent.len()
    };
    assert_eq!(send(&mut sender, 0), blocks as usize);
    receiver.take_start(us(0));
    receiver.take_stop(us(0), 0, &mut waiting).expect("the first");
    receiver.handle_timeout(us(50));
    let mut parts = vec![];
    while let Some((round, signal)) = receiver.poll_signal(us(50), &waiting) {
        if let Signal::Request { part, missing } = signal {
            parts.push((round, part, missing.to_vec()));
        }
    }
    assert_eq!(
        parts.iter().map(|(_, part, bits)| (*part, bits.len())).collect::<Vec<_>>(),
        [(0, 512), (1, 512), (2, 1)]
    );
    for (number, (round, part, missing)) in parts.into_iter().rev().enumerate() {
        let over = sender.take_request(us(60), round, part, &missing, &mut waiting).expect("the first");
        let all = if number == 2 { blocks } else { 0 };
        assert_eq!((over.packets, over.missed), (all, all), "all of the round before, with the last part");
        send(&mut sender, 60);
        let said: Vec<_> = core::iter::from_fn(|| {
            sender.poll_signal(us(60), &waiting).map(|(round, signal)| word(round, &signal))
        })
        .filter(|word| word.starts_with("stop"))
        .collect();
        let expected: &[&str] = if number == 2 { &["stop 1"] } else { &[] };
        assert_eq!(said, expected, "after part {part}");
    }
}

#[test]
fn a_receiver_reports_what_came_every_period_and_seldom_on_nothing() {
    let mut ends = Ends::new(0);
    ends.receiver.take_start(us(0));
    assert_eq!(ends.receiver_says(us(0)), ["started"]);
    ends.come(us(100), 0..4, 0);
    assert_eq!(ends.receiver_says(us(199)), Vec::<String>::new());
    assert_eq!(ends.receiver_says(us(200)), ["report 4 in 200"]);
    ends.come(us(300), [4], 0);
    assert_eq!(ends.receiver_says(us(410)), ["report 1 in 210"]);
    assert_eq!(ends.receiver_says(us(610)), ["report 0 in 200"]);
    assert_eq!(ends.receiver_says(us(1009)), Vec::<String>::new());
    assert_eq!(ends.receiver_says(us(1010)), ["report 0 in 400"]);
    ends.come(us(1500), [5], 0);
    assert_eq!(ends.receiver_says(us(1700)), ["report 1 in 200"], "not over the pause");
}

#[test]
fn reports_halve_the_rate_and_a_retransmission_restores_it() {
    let mut ends = Ends::new(0);
    ends.sends(us(0));
    let report = |number, packets| fanin_wire::Report { number, packets, period_us: 200 };
    // 10 packets were sent in 200 us, and 4 of them came.
    ends.sender.take_report(us(200), 0, report(1, 4), &mut ends.of_sender).expect("a report");
    assert_eq!(ends.sender.take_report(us(201), 0, report(1, 0), &mut ends.of_sender), Err(Reason::Stale));
    ends.request(us(300), 1, &[0, 1, 2, 3, 4, 5]).expect("the first");
    assert_eq!(ends.sends(us(300)).len(), 6, "at line rate");
}

/// The first report covers a part of the period in which the first block could not yet have come.
#[test]
fn the_first_report_of_a_round_halves_nothing_before_a_round_trip_is_over() {
    // The answer to the start: a round trip takes 500 us.
    let report = |number, packets, period_us| fanin_wire::Report { number, packets, period_us };
    let mut ends = Ends::new(0);
    ends.sender_says(us(0));
    ends.sender.take_report(us(500), 0, report(0, 0, 0), &mut ends.of_sender).expect("an answer");
    let line = ends.sender.bps();
    ends.sends(us(500));
    ends.sender.take_report(us(700), 0, report(1, 0, 200), &mut ends.of_sender).expect("a report");
    assert_eq!(ends.sender.bps(), line, "the first block was not there yet");
    ends.sender.take_report(us(1200), 0, report(2, 2, 400), &mut ends.of_sender).expect("a report");
    let halved = ends.sender.bps();
    assert!(halved < line / 2, "{halved}: of 10 in 700 us came 2 in 400: congestion");
    // The rate was halved by the round before: that says nothing of this one.
    ends.request(us(1300), 1, &[0, 1, 2, 3, 4, 5]).expect("the first");
    assert_eq!(ends.sender.bps(), line);
    assert_eq!(ends.sends(us(1300)).len(), 6);
    let late = ends.sender.take_report(us(1400), 0, report(3, 0, 200), &mut ends.of_sender);
    assert_eq!((late, ends.sender.bps()), (Err(Reason::Stale), line));
    // Nor does a round's first, where it comes before a round trip and a period are over.
    ends.sender.take_report(us(1500), 1, report(4, 0, 200), &mut ends.of_sender).expect("a report");
    assert_eq!(ends.sender.bps(), line);
    // The answer to a start that came twice is numbered as what was reported last then, and takes
    // nothing back.
    ends.sender.take_report(us(1600), 1, report(1, 0, 0), &mut ends.of_sender).expect("an answer");
    let again = ends.sender.take_report(us(1700), 1, report(4, 0, 200), &mut ends.of_sender);
    assert_eq!(again, Err(Reason::Stale));
    ends.sender.take_report(us(2100), 1, report(5, 0, 200), &mut ends.of_sender).expect("a report");
    assert!(ends.sender.bps() < line);
}

#[test]
fn a_peer_that_says_nothing_is_silent_at_some_time_and_a_clock_that_jumps_does_not_make_it_so() {
    let mut ends = Ends::new(0);
    ends.receiver.take_start(us(0));
    // A day later: one report is due, not all.
    let day = 86_400_000_000;
    assert_eq!(ends.receiver_says(us(day)).len(), 2);
    assert!(!ends.receiver.is_silent());
    let mut now = us(day);
    while !ends.receiver.is_silent() {
        now = ends.receiver.poll_timeout().expect("it waits").max(now);
        ends.receiver_says(now);
    }
    let waited = now.since(us(day));
    assert!(waited > Duration::from_secs(8) && waited < Duration::from_secs(15), "{waited:?}");

    let mut ends = Ends::new(0);
    ends.sender_says(us(0));
    ends.sends(us(0));
    ends.sender_says(us(day));
    assert!(!ends.sender.is_silent());
    let mut now = us(day);
    while !ends.sender.is_silent() {
        now = ends.sender.poll_timeout().expect("it waits").max(now);
        ends.sender_says(now);
    }
    assert!(now.since(us(day)) < Duration::from_secs(15));
}

#[test]
fn blocks_go_in_their_order_where_nobody_sorts_them_and_each_has_its_own_importance() {
    let config = RateConfig { sorts: false, ..RateConfig::of_link(1_000_000_000, 125) };
    let mut sender = Sender::announcing(start(LossBound::RELIABLE, true), 10, config);
    for expected in (0..10).map(|block| (block, block % 3 == 0)) {
        assert_eq!(sender.peek(|block| Some(block % 3 == 0)), Some(expected));
        sender.sent(us(0), LINE, Some(0));
    }
    assert_eq!(sender.peek(|_| Some(true)), None);
}

#[test]
fn important_blocks_of_a_stretch_go_first_and_what_is_not_needed_not_at_all() {
    let mut ends = Ends::new(10);
    let mut sent = vec![];
    while let Some(next) = ends.sender.peek(|block| (block != 5).then_some(block % 3 == 0)) {
        ends.sender.sent(us(0), LINE, Some(0));
        sent.push(next);
    }
    let (important, other) = ([0, 3, 6, 9], [1, 2, 4, 7, 8]);
    let expected = important.map(|block| (block, true)).into_iter().chain(other.map(|block| (block, false)));
    assert_eq!(sent, expected.collect::<Vec<_>>());
    assert_eq!(ends.sender_says(us(0)), ["start", "stop 0"]);
    // A requested block is one that the bound does not forgive.
    ends.request(us(100), 1, &[1, 2]).expect("the first");
    assert_eq!(ends.sender.peek(|_| Some(false)), Some((1, true)));
}

#[test]
fn a_flow_without_blocks_of_its_own_is_announced_and_finished() {
    let mut sender = Sender::announcing(start(LossBound::RELIABLE, false), 10, RateConfig::of_link(1, 1));
    let mut receiver = Receiver::new(0, LossBound::RELIABLE, RECEIVER);
    let mut waiting = Waiting::new(RETRANSMISSION);
    assert!(matches!(sender.poll_signal(us(0), &waiting), Some((0, Signal::Start(_)))));
    assert_eq!(sender.poll_signal(us(0), &waiting), None, "and no stop");
    receiver.take_start(us(1));
    assert!(receiver.is_finished());
    assert!(matches!(receiver.poll_signal(us(1), &waiting), Some((0, Signal::Report(_)))));
    assert_eq!(receiver.poll_signal(us(1), &waiting), Some((0, Signal::Finish)));
    sender.take_finish(us(2), &mut waiting);
    assert_eq!(sender.poll_timeout(), None);
}

/// A receiver of 300 blocks to which all come but these, in their order.
fn receiver_without(missing: &[u32], bound: LossBound) -> Receiver {
    let mut receiver = Receiver::new(300, bound, RECEIVER);
    let waiting = Waiting::new(RETRANSMISSION);
    receiver.take_start(us(0));
    for block in (0..300).filter(|block| !missing.contains(block)) {
        let now = us(block.into());
        receiver.take_block(now, block, 0, &waiting).expect("it is the first of it");
        let looked = receiver.let_go_before(now, block, 0);
        // A stretch behind the one that began 50 us ago.
        let expected = match block {
            178 => 0..64,
            242 => 64..128,
            _ => 0..0,
        };
        assert_eq!(looked, expected, "{block}");
    }
    receiver
}

#[test]
fn what_waits_on_a_path_by_which_nothing_later_came_is_not_let_go() {
    let bound = LossBound::from_millionths(100_000).expect("below one");
    let mut receiver = Receiver::new(512, bound, ReceiverConfig { paths: 2, ..RECEIVER });
    let waiting = Waiting::new(RETRANSMISSION);
    receiver.take_start(us(0));
    // Trains of 16 take the paths in turn. The second path is slow; the first lost block 5.
    let path = |block: u32| (block / 16 % 2) as u8;
    let fast = (0..512).filter(|block| path(*block) == 0 && *block != 5);
    let slow = (0..512).filter(|block| path(*block) == 1);
    let mut now = us(0);
    let mut take = |block: u32, receiver: &mut Receiver| {
        now = now + Duration::from_micros(10);
        receiver.take_block(now, block, 0, &waiting).expect("it is the first of it");
        receiver.let_go_before(now, block, path(block))
    };
    for block in fast {
        assert_eq!(take(block, &mut receiver), 0..0, "{block}");
    }
    assert!(!receiver.has(5));
    let looked: Vec<_> =
        slow.map(|block| take(block, &mut receiver)).filter(|looked| !looked.is_empty()).collect();
    assert_eq!(looked[0], 0..64, "once both came to the third stretch");
    assert!(receiver.has(5));
    assert_eq!((receiver.lacks(), receiver.waits_for()), (1, 0), "all else came, however late");
}

#[test]
fn what_was_sent_long_before_others_and_is_missing_is_let_go_within_the_bound() {
    let percent = |percent: u32| LossBound::from_millionths(percent * 10_000).expect("below one");
    let mut waiting = Waiting::new(RETRANSMISSION);
    // All that may still come is there: it ends without a stop.
    let mut receiver = receiver_without(&[3, 70], percent(1));
    assert!(receiver.has(3) && receiver.has(70) && receiver.is_finished());
    assert_eq!(receiver.lacks(), 2);
    assert_eq!(receiver.take_block(us(400), 3, 0, &waiting), Err(Reason::Duplicate), "it is lost for good");
    assert_eq!(receiver.lacks(), 2);

    // Five are missing: one is in the last stretches, and three may be missing.
    let mut receiver = receiver_without(&[3, 4, 5, 6, 290], percent(1));
    assert_eq!((receiver.lacks(), receiver.waits_for()), (5, 2));
    assert_eq!([3, 5, 6, 290].map(|block| receiver.has(block)), [true, true, false, false]);
    assert!(!receiver.is_finished());
    receiver.take_stop(us(400), 0, &mut waiting).expect("it is the first");
    receiver.handle_timeout(us(500));
    let mut said = vec![];
    while let Some((round, signal)) = receiver.poll_signal(us(500), &waiting) {
        said.push(word(round, &signal));
    }
    assert!(said.contains(&"request 1 of [6, 290]".to_string()), "{said:?}");
    receiver.take_block(us(501), 6, 1, &waiting).expect("it was asked for");
    assert!(!receiver.is_finished(), "four of three");
    receiver.take_block(us(501), 290, 1, &waiting).expect("it was asked for");
    assert!(receiver.is_finished());
    assert_eq!(receiver.lacks(), 3);

    let receiver = receiver_without(&[3], LossBound::RELIABLE);
    assert!(!receiver.has(3) && !receiver.is_finished());
}

#[test]
fn a_round_says_by_which_path_its_blocks_came_unless_some_may_be_missing() {
    for (percent, known) in [(0, 10), (10, 0)] {
        let mut ends = Ends::new(percent);
        for _ in 0..10 {
            ends.sender.peek(|_| Some(true)).expect("ten blocks");
            ends.sender.sent(us(0), LINE, Some(3));
        }
        let over = ends.sender.take_finish(us(1), &mut ends.of_sender);
        assert_eq!((over.packets, over.by_path.sent[3]), (10, known), "{percent} % may be missing");
    }
}
