//! Rates. Figure 7 gives each flow one; all flows on a way share one that follows what the way
//! carries. The pacer keeps to them.

use core::time::Duration;

use super::paths::ByPath;
use crate::machine::Instant;

/// The increase of the rate in a period without congestion, as a part of the link's rate (§3.2.1).
const INCREASE_PERCENT: u64 = 5;
/// How much of a period packets may leave before their time, where nobody says otherwise.
const TRAINS_IN_PERIOD: u64 = 10;

/// Blocks of a stretch, at least and at most.
const STRETCH: [u32; 2] = [16, 90];

/// How fast a flow may be sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateConfig {
    /// The link's rate: that of a flow when it begins.
    pub line_rate_bps: u64,
    /// The bytes of a full data packet on the link, with all headers and framing.
    pub packet_bytes: u32,
    /// How often a receiver reports (footnote 3: 200 us).
    pub period: Duration,
    /// How long before its time a packet may leave, so that packets gather into trains: what is
    /// sent in that leaves at once.
    pub ahead: Duration,
    /// How many times as much as arrives is sent when that is congestion (footnote 3: 2).
    pub delta: f64,
    /// Periods between reports while less is lost than comes, at least 1 (footnote 3: 1). Such a
    /// report would only say that nothing changes.
    pub calm_periods: u32,
    /// Whether all flows to a peer together are sent no faster than the way there carries. The paper
    /// has only Figure 7, for each flow.
    pub follows: bool,
    /// Whether the important blocks of a stretch go first. Trains are treated alike as a whole, so
    /// that they need it. In the paper, blocks go in their order.
    pub sorts: bool,
}

impl RateConfig {
    /// The paper's period and delta.
    #[must_use]
    pub const fn of_link(line_rate_bps: u64, packet_bytes: u32) -> Self {
        let period = Duration::from_micros(200);
        // A constant of whole microseconds.
        let ahead = Duration::from_micros(period.as_micros() as u64 / TRAINS_IN_PERIOD);
        Self {
            line_rate_bps,
            packet_bytes,
            period,
            ahead,
            delta: 2.0,
            calm_periods: 1,
            follows: false,
            sorts: true,
        }
    }

    pub(super) fn check(self) -> Result<Self, ()> {
        let is_sound = self.line_rate_bps > 0
            && self.packet_bytes > 0
            && self.period >= Duration::from_micros(1)
            && self.delta >= 1.0
            && self.calm_periods > 0
            && self.delta.is_finite();
        is_sound.then_some(self).ok_or(())
    }

    /// So many packets in so long, in bits a second.
    pub(super) fn bps(&self, packets: u32, time: Duration) -> u64 {
        let bits = u128::from(packets) * u128::from(self.packet_bytes) * 8;
        let ns = time.as_nanos().max(1);
        u64::try_from(bits * 1_000_000_000 / ns).unwrap_or(u64::MAX)
    }

    /// How long a packet takes at so many bits a second.
    pub(super) fn packet_time(&self, bps: u64) -> Duration {
        Duration::from_nanos(u64::from(self.packet_bytes).saturating_mul(8_000_000_000) / bps.max(1))
    }

    /// Blocks that a sender tells apart by their magnitude at a time. The important ones go first,
    /// so that trains, which are treated alike as a whole, are not of a packet or two. Two trains
    /// are enough: workers find other blocks important, and a sum waits for the worker that sends
    /// its block last.
    pub(super) fn stretch(&self) -> u32 {
        if !self.sorts {
            return 1;
        }
        let [least, most] = STRETCH;
        let trains_ns = 2 * self.ahead.as_nanos();
        let bits = trains_ns.saturating_mul(self.line_rate_bps.into()) / 1_000_000_000;
        let packets = bits / (8 * u128::from(self.packet_bytes).max(1));
        u32::try_from(packets).unwrap_or(most).clamp(least, most)
    }

    /// Packets that are worth a train of their own.
    pub(super) fn train(&self) -> u32 {
        self.stretch() / 2
    }

    /// A packet a period: below that there is nothing to measure.
    fn least_bps(&self) -> u64 {
        self.bps(1, self.period).clamp(1, self.line_rate_bps)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    LineRateStart,
    CongestionAvoidance,
}

/// The rate of one flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    config: RateConfig,
    state: State,
    bps: u64,
}

impl Rate {
    pub(super) const fn new(config: RateConfig) -> Self {
        Self { config, state: State::LineRateStart, bps: config.line_rate_bps }
    }

    pub(super) const fn bps(&self) -> u64 {
        self.bps
    }

    pub(super) const fn config(&self) -> &RateConfig {
        &self.config
    }

    /// A period is over, in which this was sent and that arrived. In both states the rate is halved
    /// where more than delta times as much was sent; docs/decisions/dlcp-congestion-avoidance.md
    /// says why in both.
    pub(super) fn reported(&mut self, sending_bps: u64, receiving_bps: u64) {
        let RateConfig { line_rate_bps, delta, .. } = self.config;
        if sending_bps as f64 > delta * receiving_bps as f64 {
            self.state = State::CongestionAvoidance;
            // The rate that was sent is halved: a sender that had less to send than it might is not
            // congested by what it might.
            self.bps = (self.bps.min(sending_bps) / 2).max(self.config.least_bps());
        } else if self.state == State::CongestionAvoidance {
            let increase = line_rate_bps.saturating_mul(INCREASE_PERCENT) / 100;
            self.bps = self.bps.saturating_add(increase).min(line_rate_bps);
        }
    }

    /// A retransmission begins (§3.2.1).
    pub(super) const fn restart(&mut self) {
        *self = Self::new(self.config);
    }
}

/// Packets that are judged together, at least: a hundredth of them is five.
const PACKETS_JUDGED: u32 = 512;
/// How much more than usual is lost when that is congestion. Links lose packets without being full.
const TOLERATED: f64 = 0.03;
/// Standard deviations of chance beside that: the usual loss is the least of several.
const DEVIATIONS: f64 = 4.0;
/// The most that links can be supposed to lose without being full.
const USUAL_MAX: f64 = 0.3;
/// Judgements among which the least loss is the usual one.
const REMEMBERED: usize = 8;
/// The rate after congestion, as a part of what arrived: less, so that queues empty.
const AFTER_CONGESTION: f64 = 0.95;
/// Rates that differ by more are not the same.
const SLIGHTLY: f64 = 1.02;
/// The growth of the rate without congestion, for [`PACKETS_JUDGED`].
const GROWTH: f64 = 0.01;
/// The growth doubles so often, with each judgement without congestion.
const DOUBLINGS: u32 = 3;
/// The most that a judgement adds. The sender of a long flow hears late of what it lost.
const GROWTH_MAX: f64 = 0.06;
/// Judgements without congestion after which the way carries more than before.
const CALM: u32 = 6;
/// The most that a judgement adds from then on.
const GROWTH_WHEN_CALM: f64 = 0.25;

/// The fate of a round of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dlcp) struct Round {
    pub packets: u32,
    /// Blocks that were missed, beyond what the bound forgives.
    pub missed: u32,
    /// How long the packets take at the rates at which they left.
    pub time: Duration,
    /// When the first one left, and the last.
    pub since: Instant,
    pub until: Instant,
    /// The largest rate that the receiver reported.
    pub fastest_bps: u64,
    /// Packets on paths that are left out. They count for how fast the round left, and not for what was
    /// lost.
    pub left_out: u32,
    /// The packets and what was missed by the path that they took, of one round alone.
    pub by_path: ByPath,
}

impl Round {
    pub const NONE: Self = Self {
        packets: 0,
        missed: 0,
        time: Duration::ZERO,
        since: Instant(u64::MAX),
        until: Instant(0),
        fastest_bps: 0,
        left_out: 0,
        by_path: ByPath::NONE,
    };

    /// A packet leaves by a path, which takes so long.
    pub fn leaves(&mut self, now: Instant, time: Duration, path: Option<u8>) {
        if let Some(sent) = path.and_then(|path| self.by_path.sent.get_mut(usize::from(path))) {
            *sent += 1;
        }
        self.packets = self.packets.saturating_add(1);
        self.time += time;
        self.since = self.since.min(now);
        self.until = now;
    }

    /// A packet that took a path is missed.
    pub fn misses(&mut self, path: u8) {
        self.missed += 1;
        if let Some(missed) = self.by_path.missed.get_mut(usize::from(path)) {
            *missed += 1;
        }
    }

    fn add(&mut self, other: &Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.missed = self.missed.saturating_add(other.missed.min(other.packets));
        self.time += other.time;
        self.since = self.since.min(other.since);
        self.until = self.until.max(other.until);
        self.fastest_bps = self.fastest_bps.max(other.fastest_bps);
        self.left_out = self.left_out.saturating_add(other.left_out);
    }

    /// Leaves out what took a path.
    pub fn forget(&mut self, path: usize) {
        self.left_out += self.by_path.sent[path];
        self.missed = self.missed.saturating_sub(self.by_path.missed[path]);
    }

    /// The share of the packets that was missed.
    fn loss(&self) -> f64 {
        f64::from(self.missed) / f64::from(self.packets.saturating_sub(self.left_out).max(1))
    }
}

/// The rate of all flows to one peer. It settles about where the way there carries all of them.
///
/// Figure 7 lets half of what is sent be lost, and knows nothing of the flows before. Here the
/// receiver's requests tell at each flow's end which share of it is missed. If it is more than
/// usual, the rate becomes less than what arrived, for all flows that follow.
#[derive(Clone, Copy, Debug)]
pub(super) struct WayRate {
    bps: u64,
    /// Rounds that are not judged yet.
    over: Round,
    /// Shares that were missed, of the last judgements in a ring.
    losses: [f64; REMEMBERED],
    judged: usize,
    /// How often the rate has grown since congestion, at most [`CALM`] times.
    calm: u32,
}

impl WayRate {
    pub(super) const fn new(config: &RateConfig) -> Self {
        let losses = [1.0; REMEMBERED];
        Self { bps: config.line_rate_bps, over: Round::NONE, losses, judged: 0, calm: 0 }
    }

    pub(super) const fn bps(&self) -> u64 {
        self.bps
    }

    /// A round of a flow is over.
    pub(super) fn is_over(&mut self, now: Instant, config: &RateConfig, round: Round) {
        if !config.follows {
            return;
        }
        self.over.add(&round);
        if self.over.packets >= PACKETS_JUDGED {
            let round = core::mem::replace(&mut self.over, Round::NONE);
            self.judge(now, config, &round);
        }
    }

    fn judge(&mut self, now: Instant, config: &RateConfig, round: &Round) {
        let (bps, packets) = (self.bps as f64, f64::from(round.packets));
        let loss = round.loss();
        let usual = self.losses.iter().copied().fold(1.0, f64::min);
        let usual = if usual > USUAL_MAX { 0.0 } else { usual };
        self.losses[self.judged % REMEMBERED] = loss;
        self.judged = self.judged.wrapping_add(1);
        let unusual = loss - usual;
        let excess = (unusual - TOLERATED).max(0.0);
        let bps = if excess * excess * packets > DEVIATIONS * DEVIATIONS * usual * (1.0 - usual) {
            self.calm = 0;
            // Flows that left side by side were faster together than each of them.
            let sent = config.bps(round.packets, round.time.min(round.until.since(round.since))) as f64;
            let arrived = sent * (1.0 - unusual);
            // A flow that Figure 7 halved sent less than could arrive.
            let was_halved = SLIGHTLY * sent < bps;
            let arrived = if was_halved { arrived.max(round.fastest_bps as f64) } else { arrived };
            // Packets that left faster than now say nothing of the rate since.
            let most = if sent > SLIGHTLY * bps { bps } else { AFTER_CONGESTION * bps };
            (AFTER_CONGESTION * arrived).min(most)
        } else if 4 * round.time > 3 * now.since(round.since) {
            let growth = GROWTH * packets / f64::from(PACKETS_JUDGED);
            let growth = growth * f64::from(1_u32 << self.calm.min(DOUBLINGS));
            let most = if self.calm < CALM { GROWTH_MAX } else { GROWTH_WHEN_CALM };
            self.calm = (self.calm + 1).min(CALM);
            bps * (1.0 + growth.min(most))
        } else {
            // A sender that had little to send does not learn that it may send more.
            bps
        };
        self.bps = (bps as u64).clamp(config.least_bps(), config.line_rate_bps);
    }
}

/// Says when the next packet may leave, where so many bits a second may.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacer {
    /// When all that has left would have left at exactly the rate.
    free_at: Instant,
    /// Whether the next packet waits for that, and a train with it.
    waits: bool,
}

impl Pacer {
    /// Whether a packet may leave.
    pub(super) fn is_open(&mut self, now: Instant, config: &RateConfig) -> bool {
        let ahead = if self.waits { Duration::ZERO } else { config.ahead };
        self.waits = self.free_at > now + ahead;
        !self.waits
    }

    /// A packet leaves.
    pub(super) fn sent(&mut self, now: Instant, config: &RateConfig, bps: u64) {
        let from = self.free_at.max(now);
        self.free_at = from + config.packet_time(bps);
    }

    /// So many packets leave, if all of them may; whether they do.
    pub(super) fn send_all(&mut self, now: Instant, config: &RateConfig, bps: u64, packets: usize) -> bool {
        let mut after = *self;
        let leave = (0..packets).all(|_| {
            let is_open = after.is_open(now, config);
            after.sent(now, config, bps);
            is_open
        });
        if leave {
            *self = after;
        }
        leave
    }

    /// When the next packet may leave, after [`Self::is_open`] said that none may now.
    pub(super) const fn opens_at(&self) -> Instant {
        self.free_at
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const GIGABIT: u64 = 1_000_000_000;

    fn rate() -> Rate {
        Rate::new(RateConfig::of_link(GIGABIT, 1500))
    }

    /// (sent, arrived, rate after), in percent of the link, period by period.
    fn plays(rate: &mut Rate, periods: &[(u64, u64, u64)]) {
        let percent = GIGABIT / 100;
        for (period, (sent, arrived, after)) in periods.iter().enumerate() {
            rate.reported(sent * percent, arrived * percent);
            assert_eq!(rate.bps() / percent, *after, "after period {period}");
        }
    }

    #[test]
    fn a_flow_starts_at_line_rate_and_stays_there_while_half_of_it_arrives() {
        plays(&mut rate(), &[(100, 100, 100), (100, 51, 100), (100, 50, 100)]);
    }

    #[test]
    fn congestion_halves_and_what_arrives_adds_a_twentieth_of_the_link() {
        let rows = [(100, 40, 50), (50, 40, 55), (55, 55, 60), (60, 20, 30), (30, 10, 15), (15, 15, 20)];
        plays(&mut rate(), &rows);
    }

    #[test]
    fn a_stretch_is_two_trains_within_its_limits() {
        let of = |line_rate_bps, ahead_us| {
            RateConfig { ahead: Duration::from_micros(ahead_us), ..RateConfig::of_link(line_rate_bps, 1250) }
                .stretch()
        };
        // A packet of 10,000 bits takes 10 us at a gigabit: 25 of them leave at once.
        assert_eq!([of(GIGABIT, 250), of(GIGABIT, 80), of(GIGABIT, 10), of(GIGABIT, 0)], [50, 16, 16, 16]);
        assert_eq!([of(100 * GIGABIT, 20), of(u64::MAX, u64::MAX / 1000), of(1, 500)], [90, 90, 16]);
    }

    #[test]
    fn the_rate_is_never_above_the_link_and_never_nothing() {
        let mut rate = rate();
        plays(&mut rate, &[(100, 0, 50), (50, 50, 55)]);
        (0..100).for_each(|_| rate.reported(rate.bps(), rate.bps()));
        assert_eq!(rate.bps(), GIGABIT);
        (0..100).for_each(|_| rate.reported(rate.bps(), 0));
        assert_eq!(rate.bps(), 60_000_000, "a packet of 1,500 bytes in 200 us");
    }

    #[test]
    fn a_link_of_any_rate_adds_to_it() {
        let mut rate = Rate::new(RateConfig::of_link(u64::MAX, 1500));
        rate.reported(u64::MAX, 0);
        let halved = rate.bps();
        rate.reported(halved, halved);
        assert!(rate.bps() > halved && halved == u64::MAX / 2);
    }

    /// A round of a flow over a way that carries so much. Its links lose a share of the packets, too.
    fn round(way: &WayRate, config: &RateConfig, packets: u32, carries: f64, links_lose: f64) -> Round {
        let passes = (carries / way.bps() as f64).min(1.0) * (1.0 - links_lose);
        let missed = (f64::from(packets) * (1.0 - passes)) as u32;
        Round { packets, missed, time: packets * config.packet_time(way.bps()), ..Round::NONE }
    }

    /// Rounds begin at 1 s, and each takes as long as its packets and `idle` together.
    fn over(way: &mut WayRate, config: &RateConfig, round: Round, idle: Duration) {
        let since = Instant(1_000_000_000);
        let until = since + round.time;
        way.is_over(until + idle, config, Round { since, until, ..round });
    }

    /// Plays so many rounds, one after the other, and returns the shares that were lost.
    fn play(way: &mut WayRate, config: &RateConfig, rounds: u32, carries: f64, links_lose: f64) -> Vec<f64> {
        let one = |_| {
            let round = round(way, config, 2_841, carries, links_lose);
            over(way, config, round, Duration::ZERO);
            f64::from(round.missed) / f64::from(round.packets)
        };
        (0..rounds).map(one).collect()
    }

    fn following(line_rate_bps: u64) -> (RateConfig, WayRate) {
        let config = RateConfig { follows: true, ..RateConfig::of_link(line_rate_bps, 1500) };
        (config, WayRate::new(&config))
    }

    #[test]
    fn the_rate_settles_at_what_the_way_carries() {
        let (config, mut way) = following(10 * GIGABIT);
        let lost = play(&mut way, &config, 100, 0.25e9, 0.0);
        assert!(lost[0] > 0.97, "it begins at line rate");
        let later = &lost[1..];
        assert!(later.iter().all(|lost| *lost < 0.12), "{later:?}");
        assert!(later.iter().sum::<f64>() < 0.03 * later.len() as f64, "{later:?}");
        assert!((0.23e9..0.28e9).contains(&(way.bps() as f64)), "{}", way.bps());
        // The way carries more again.
        play(&mut way, &config, 100, 10e9, 0.0);
        assert_eq!(way.bps(), 10 * GIGABIT);
    }

    #[test]
    fn links_that_lose_packets_slow_nobody_for_long() {
        let (config, mut way) = following(GIGABIT);
        play(&mut way, &config, 30, 1e9, 0.06);
        assert_eq!(way.bps(), GIGABIT);
        play(&mut way, &config, 60, 1e9, 0.25);
        assert_eq!(way.bps(), GIGABIT);
        // A way that is full is noticed all the same, and one that loses all is no link's doing.
        play(&mut way, &config, 50, 0.5e9, 0.06);
        assert!((0.44e9..0.56e9).contains(&(way.bps() as f64)), "{}", way.bps());
        play(&mut way, &config, 50, 1.0, 0.0);
        assert_eq!(way.bps(), config.least_bps());
    }

    #[test]
    fn links_that_lose_packets_at_random_slow_no_short_flows() {
        let (config, mut way) = following(GIGABIT);
        // Xorshift.
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut is_lost = |percent: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % 100 < percent
        };
        for percent in [6, 10, 15, 25] {
            let mut rates = 0.0;
            for _ in 0..200 {
                let missed = (0..512).filter(|_| is_lost(percent)).count() as u32;
                let round = Round { missed, ..round(&way, &config, 512, 1e9, 0.0) };
                over(&mut way, &config, round, Duration::ZERO);
                rates += way.bps() as f64;
            }
            let mean = rates / 200.0 / GIGABIT as f64;
            assert!(mean > 0.9, "{percent} %: {mean}");
        }
    }

    #[test]
    fn a_sender_with_little_to_send_does_not_learn_that_it_may_send_more() {
        let (config, mut way) = following(GIGABIT);
        play(&mut way, &config, 1, 0.25e9, 0.0);
        let before = way.bps();
        for _ in 0..10 {
            let round = round(&way, &config, 600, 1e9, 0.0);
            over(&mut way, &config, round, round.time);
        }
        assert_eq!(way.bps(), before);
    }

    #[test]
    fn flows_side_by_side_arrive_together() {
        let (config, mut way) = following(GIGABIT);
        // Figure 7 halved both, and a twentieth of each was lost.
        let of_one = Round { missed: 50, time: 1_000 * config.packet_time(GIGABIT / 2), ..Round::NONE };
        let since = Instant(5);
        let of_one = Round { packets: 1_000, since, until: since + of_one.time, ..of_one };
        let mut both = of_one;
        both.add(&of_one);
        way.judge(both.until, &config, &both);
        assert!((0.89e9..0.96e9).contains(&(way.bps() as f64)), "{}", way.bps());
    }

    #[test]
    fn a_flow_that_was_halved_tells_what_could_have_arrived() {
        let (config, mut way) = following(GIGABIT);
        let halved = Round { packets: 2_841, missed: 900, fastest_bps: 260_000_000, ..Round::NONE };
        let time = 2_841 * config.packet_time(190_000_000);
        over(&mut way, &config, Round { time, ..halved }, Duration::ZERO);
        assert_eq!(way.bps(), 247_000_000);
    }

    #[test]
    fn short_flows_are_judged_together_and_flows_from_before_change_nothing_more() {
        let (config, mut way) = following(GIGABIT);
        let of_before = round(&way, &config, 64, 0.25e9, 0.0);
        for flow in 1..=16 {
            let since = Instant(flow * of_before.time.as_nanos() as u64);
            let until = since + of_before.time;
            way.is_over(until, &config, Round { since, until, ..of_before });
            assert_eq!(way.bps() < GIGABIT, flow >= 8, "flow {flow}: 512 packets are judged");
        }
        let after = way.bps() as f64;
        assert!((0.23e9..0.25e9).contains(&after), "once less than what came, and not twice: {after}");
    }

    #[test]
    fn the_papers_flows_leave_the_way_alone() {
        let config = RateConfig::of_link(GIGABIT, 1500);
        let mut way = WayRate::new(&config);
        play(&mut way, &config, 10, 0.1e9, 0.0);
        assert_eq!(way.bps(), GIGABIT);
    }

    #[test]
    fn a_sender_with_little_to_send_is_halved_from_that() {
        plays(&mut rate(), &[(20, 5, 10)]);
    }

    #[test]
    fn a_retransmission_starts_at_line_rate_again() {
        let mut rate = rate();
        plays(&mut rate, &[(100, 10, 50)]);
        rate.restart();
        plays(&mut rate, &[(100, 60, 100)]);
    }

    #[test]
    fn a_pacer_lets_all_of_a_train_leave_or_none_of_it() {
        // A packet takes 12 us; a tenth of a period is 20: two leave at once.
        let config = RateConfig::of_link(GIGABIT, 1500);
        let mut pacer = Pacer::default();
        assert!(!pacer.send_all(Instant(0), &config, GIGABIT, 3));
        assert!(pacer.send_all(Instant(0), &config, GIGABIT, 2));
        let mut one_by_one = Pacer::default();
        (0..2).for_each(|_| one_by_one.sent(Instant(0), &config, GIGABIT));
        assert_eq!(pacer.opens_at(), one_by_one.opens_at());
        assert!(!pacer.is_open(Instant(3_000), &config));
    }

    #[test]
    fn a_pacer_keeps_the_rate_and_lets_trains_through() {
        // A packet takes 12 us; a tenth of a period is 20.
        let config = RateConfig::of_link(GIGABIT, 1500);
        let mut pacer = Pacer::default();
        let (mut now, mut left, mut trains) = (Instant(0), 0, 0);
        while now < Instant(12_000_000) {
            trains += 1;
            while pacer.is_open(now, &config) {
                pacer.sent(now, &config, GIGABIT);
                left += 1;
            }
            now = pacer.opens_at();
        }
        assert_eq!((left, trains), (1000, 500));
    }
}
