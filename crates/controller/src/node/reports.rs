//! The reports of a job's ranks about the job and about themselves. They decide nothing: they are
//! kept for those who ask. (The least length of windows follows from the shares in a request to
//! join: `service.rs`, `portion`.)

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_limits::{Budget, Reservation};
use fanin_wire::Rank;
use prost::Message;

use super::work::{RankWork, WorkAsked};
use crate::proto;

/// Most services of a job that are kept.
const SHARES_MAX: usize = 256;
/// Most bytes of a name: a machine's has about 90.
const NAME_MAX: usize = 128;
/// Most ranks that one speaks for.
const RANKS_MAX: usize = 1024;
/// Most bytes, as they are told, of how a job is shared: 72 services with long names take 7 KB.
const SPLIT_BYTES_MAX: usize = 12 << 10;
/// And of that and where all of its ranks are: `Status` tells of all jobs in one message. 64 ranks
/// take 15 KB.
const BYTES_MAX: usize = 24 << 10;

/// What a rank reports as it joins, no longer than what can be kept of it.
#[derive(Debug, Default)]
pub(super) struct Report {
    split: Option<proto::Split>,
    place: Option<proto::Place>,
    /// While the rank waits.
    _memory: Option<Reservation>,
}

impl Report {
    /// Takes it off a request. Where there is no memory for it, nothing is kept: it decides
    /// nothing.
    pub fn take(request: &mut proto::JoinRequest, address: IpAddr, memory: &Budget) -> Self {
        let (split, place) = (request.split.take().and_then(kept), request.place.take().map(kept_place));
        let bytes = split.as_ref().map_or(0, bytes_of) + place.as_ref().map_or(0, bytes_of_place);
        let Some(reserved) = memory.take(address, bytes) else { return Self::default() };
        Self { split, place, _memory: Some(reserved) }
    }
}

/// Of memory.
fn bytes_of(split: &proto::Split) -> usize {
    let share = |share: &proto::split::Share| size_of_val(share) + share.service.len();
    size_of_val(split) + split.bound.len() + split.links.len() + split.shares.iter().map(share).sum::<usize>()
}

fn bytes_of_place(place: &proto::Place) -> usize {
    let texts = place.machine.len() + place.name.len() + place.address.len();
    size_of_val(place) + texts + size_of_val(&place.ranks[..])
}

/// What was reported of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct JobReport {
    /// By the first that did: the ranks agree about it.
    pub split: Option<proto::Split>,
    pub members: BTreeMap<Rank, RankReport>,
}

/// What a rank reported of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankReport {
    pub place: proto::Place,
    pub measured: Measurements,
    pub work: Arc<RankWork>,
}

/// What a rank measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Measurements {
    /// From a packet to its result.
    pub round_trip: Option<Duration>,
    /// What a byte of large tensors takes.
    pub seconds_per_byte: Option<f64>,
    pub imbalance: f64,
}

/// What a rank tells in a heartbeat.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub measured: Measurements,
    pub work: Option<proto::Work>,
}

impl JobReport {
    /// A rank has joined.
    pub fn joined(&mut self, rank: Rank, report: Report) {
        if self.split.is_none() {
            self.split = report.split;
        }
        let of_members = self.members.values().map(|member| member.place.encoded_len());
        let taken = self.split.as_ref().map_or(0, Message::encoded_len) + of_members.sum::<usize>();
        let place = report.place.filter(|place| taken + place.encoded_len() <= BYTES_MAX);
        self.member(rank).place = place.unwrap_or_default();
    }

    /// A rank has measured again; what it does not say stays.
    fn measured(&mut self, rank: Rank, measured: Measurements) {
        let known = &mut self.member(rank).measured;
        known.round_trip = measured.round_trip.or(known.round_trip);
        known.seconds_per_byte = measured.seconds_per_byte.filter(sound).or(known.seconds_per_byte);
        known.imbalance = Some(measured.imbalance).filter(sound).unwrap_or_default();
    }

    /// A rank has told how it fares.
    pub fn told(&mut self, rank: Rank, Told { measured, work }: Told, now: Instant) {
        self.measured(rank, measured);
        let ranks = self.members.len();
        if let Some(work) = work {
            Arc::make_mut(&mut self.member(rank).work).heard(work, now, ranks);
        }
    }

    fn member(&mut self, rank: Rank) -> &mut RankReport {
        self.members.entry(rank).or_default()
    }

    /// What a byte takes where nothing waits for a rank that is late: of the rank that waits least
    /// for others.
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let each = self.members.values().filter_map(|member| member.measured.seconds_per_byte);
        each.min_by(f64::total_cmp)
    }

    /// The largest of the ranks'.
    pub fn imbalance(&self) -> f64 {
        self.members.values().map(|member| member.measured.imbalance).fold(0.0, f64::max)
    }

    /// The ranks, for who asks, with what they did in the last while, if that is asked.
    pub fn described(&self, mut work: Option<&mut WorkAsked>) -> Vec<proto::job::Member> {
        let now = Instant::now();
        let mut member = |(rank, member): (&Rank, &RankReport)| proto::job::Member {
            rank: rank.0.into(),
            place: Some(member.place.clone()),
            seconds_per_byte: member.measured.seconds_per_byte,
            imbalance: member.measured.imbalance,
            smoothed_rtt_ns: member.measured.round_trip.and_then(|trip| u64::try_from(trip.as_nanos()).ok()),
            work: work.as_deref_mut().map(|asked| member.work.told(asked, now)),
        };
        self.members.iter().map(&mut member).collect()
    }
}

/// What somebody measured or computed.
fn sound(number: &f64) -> bool {
    number.is_finite() && *number >= 0.0
}

/// As much of it as there can be of an honest job.
fn kept(mut split: proto::Split) -> Option<proto::Split> {
    split.shares.truncate(SHARES_MAX);
    split.shares.shrink_to_fit();
    split.shares.iter_mut().for_each(|share| {
        shorten(&mut share.service);
        share.share = Some(share.share).filter(sound).unwrap_or_default();
    });
    split.seconds_per_byte = split.seconds_per_byte.filter(sound);
    split.ring_seconds_per_byte = split.ring_seconds_per_byte.filter(sound);
    shorten(&mut split.bound);
    shorten(&mut split.links);
    Some(split).filter(|split| split.encoded_len() <= SPLIT_BYTES_MAX)
}

fn kept_place(mut place: proto::Place) -> proto::Place {
    for text in [&mut place.machine, &mut place.name, &mut place.address] {
        shorten(text);
    }
    place.ranks.truncate(RANKS_MAX);
    place.ranks.shrink_to_fit();
    place
}

fn shorten(text: &mut String) {
    // What is told is printed by who asks: on one line, and no terminal takes it for a command.
    if text.chars().any(char::is_control) || text.len() > NAME_MAX {
        text.retain(|character| !character.is_control());
        while text.len() > NAME_MAX {
            text.pop();
        }
        text.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::limits::reports_budget;

    #[test]
    fn a_report_is_kept_up_to_what_an_honest_job_has() {
        let share = |service: String| proto::split::Share { service, share: 1.0, host: None };
        let long = share("\u{1b}[2J".repeat(100));
        let split = proto::Split { shares: vec![long.clone()], ..proto::Split::default() };
        let place = proto::Place {
            machine: "\u{e4}".repeat(1000),
            ranks: vec![0; 10_000],
            ..proto::Place::default()
        };
        let mut reported = JobReport::default();
        reported.joined(Rank(1), report(Some(split), Some(place)));
        let split = reported.split.clone().unwrap();
        let service = &split.shares[0].service;
        assert!(service.len() == NAME_MAX && !service.contains('\u{1b}'));
        let place = &reported.members[&Rank(1)].place;
        assert_eq!((place.machine.len(), place.ranks.len()), (NAME_MAX, RANKS_MAX));
        reported.joined(Rank(0), report(Some(proto::Split::default()), None));
        assert_eq!(reported.split, Some(split), "the first report stands");
        let many = proto::Split { shares: vec![share("a:1".into()); 1000], ..proto::Split::default() };
        assert_eq!(report(Some(many), None).split.unwrap().shares.len(), SHARES_MAX);
        let much = proto::Split { shares: vec![long; SHARES_MAX], ..proto::Split::default() };
        assert_eq!(report(Some(much), None).split, None);
    }

    fn report(split: Option<proto::Split>, place: Option<proto::Place>) -> Report {
        report_in(&reports_budget(), split, place)
    }

    fn report_in(memory: &Budget, split: Option<proto::Split>, place: Option<proto::Place>) -> Report {
        let mut request = proto::JoinRequest { split, place, ..proto::JoinRequest::default() };
        Report::take(&mut request, [10, 0, 0, 1].into(), memory)
    }

    #[test]
    fn what_ranks_tell_that_wait_takes_so_much_memory_of_one_address() {
        let share = proto::split::Share { service: "s".repeat(100), share: 0.5, host: None };
        let split = proto::Split { shares: vec![share; 100], ..proto::Split::default() };
        let memory = reports_budget();
        let waiting: Vec<Report> = (0..1000).map(|_| report_in(&memory, Some(split.clone()), None)).collect();
        let held = waiting.iter().filter_map(|report| report.split.as_ref());
        let (count, bytes) = (held.clone().count(), held.map(Message::encoded_len).sum::<usize>());
        assert!(count > 400 && bytes <= 8 << 20, "{count} reports of {bytes} bytes");
        drop(waiting);
        assert!(report_in(&memory, Some(split), None).split.is_some(), "there is room again");
    }

    #[test]
    fn all_of_a_large_job_is_kept_and_no_more() {
        let share = proto::split::Share { service: "s".repeat(70), share: 0.5, host: Some(1) };
        let bound = "the link of a machine".into();
        let links = "no link tells its rate: all are taken for equal".into();
        let split = proto::Split {
            shares: vec![share; 72],
            here: 71,
            seconds_per_byte: Some(1e-9),
            bound,
            links,
            ring_seconds_per_byte: Some(1e-9),
        };
        let place = proto::Place {
            machine: "m".repeat(90),
            name: "n".repeat(64),
            address: "1111:2222:3333:4444:5555:6666:7777:8888".into(),
            ranks: (1000..1008).collect(),
        };
        let mut reported = JobReport::default();
        for rank in 0..64 {
            reported.joined(Rank(rank), report(Some(split.clone()), Some(place.clone())));
        }
        assert_eq!(reported.split, Some(split));
        assert!(reported.members.values().all(|member| member.place == place));
        let place = proto::Place { ranks: vec![u32::MAX; RANKS_MAX], ..place };
        for rank in 0..64 {
            reported.joined(Rank(rank), report(None, Some(place.clone())));
        }
        let bytes: usize = reported.described(None).iter().map(Message::encoded_len).sum();
        assert!(bytes <= BYTES_MAX + 64 * 32, "{bytes}");
    }

    #[test]
    fn a_prediction_that_is_no_number_is_not_kept() {
        let share = proto::split::Share { service: "a".into(), share: f64::INFINITY, host: None };
        for (told, kept) in [(f64::NAN, None), (f64::INFINITY, None), (-1.0, None), (1e-9, Some(1e-9))] {
            let (shares, seconds_per_byte) = (vec![share.clone()], Some(told));
            let split = proto::Split { shares, seconds_per_byte, ..proto::Split::default() };
            let split = report(Some(split), None).split.unwrap();
            assert_eq!((split.seconds_per_byte, split.shares[0].share), (kept, 0.0));
        }
    }

    #[test]
    fn the_rank_that_waits_least_for_others_says_how_long_a_byte_takes() {
        let mut reported = JobReport::default();
        assert_eq!((reported.seconds_per_byte(), reported.imbalance()), (None, 0.0));
        for (rank, seconds_per_byte, imbalance) in [(0, 3e-9, 0.01), (1, 1e-9, 0.02), (2, 2e-9, f64::NAN)] {
            let seconds_per_byte = Some(seconds_per_byte);
            reported.measured(
                Rank(rank),
                Measurements { seconds_per_byte, imbalance, ..Measurements::default() },
            );
        }
        reported.measured(
            Rank(1),
            Measurements { seconds_per_byte: Some(-1.0), imbalance: 0.02, round_trip: None },
        );
        assert_eq!((reported.seconds_per_byte(), reported.imbalance()), (Some(1e-9), 0.02));
    }
}
