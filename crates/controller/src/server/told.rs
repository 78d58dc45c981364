//! What the ranks of a job tell of it and of themselves. Nothing is decided by it: it is there for who asks.

use std::collections::BTreeMap;
use std::time::Duration;

use fanin_wire::WorkerId;

use crate::proto;

/// Most services of a job that are kept.
const SHARES_MAX: usize = 256;
/// Most characters of a name.
const NAME_MAX: usize = 128;
/// Most ranks that one speaks for.
const RANKS_MAX: usize = 1024;

/// What was told of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Told {
    /// By the first that did: the ranks agree about it.
    pub split: Option<proto::Split>,
    pub members: BTreeMap<WorkerId, Member>,
}

/// What a rank told of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Member {
    pub place: proto::Place,
    pub measured: Measured,
}

/// What a rank measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Measured {
    /// From a packet to its result.
    pub round_trip: Option<Duration>,
    /// What a byte of large tensors takes.
    pub seconds_per_byte: Option<f64>,
    pub imbalance: f64,
}

impl Told {
    /// A rank has joined.
    pub fn joined(&mut self, rank: WorkerId, split: Option<proto::Split>, place: Option<proto::Place>) {
        if self.split.is_none() {
            self.split = split.map(kept);
        }
        self.member(rank).place = place.map(kept_place).unwrap_or_default();
    }

    /// A rank has measured again; what it does not say stays.
    pub fn measured(&mut self, rank: WorkerId, measured: Measured) {
        let known = &mut self.member(rank).measured;
        let sound = |number: &f64| number.is_finite() && *number >= 0.0;
        known.round_trip = measured.round_trip.or(known.round_trip);
        known.seconds_per_byte = measured.seconds_per_byte.filter(sound).or(known.seconds_per_byte);
        known.imbalance = Some(measured.imbalance).filter(sound).unwrap_or_default();
    }

    fn member(&mut self, rank: WorkerId) -> &mut Member {
        self.members.entry(rank).or_default()
    }

    /// What a byte takes where nothing waits for a rank that is late: of the rank that waits least for others.
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let each = self.members.values().filter_map(|member| member.measured.seconds_per_byte);
        each.min_by(f64::total_cmp)
    }

    /// The largest of the ranks'.
    pub fn imbalance(&self) -> f64 {
        self.members.values().map(|member| member.measured.imbalance).fold(0.0, f64::max)
    }

    /// The ranks, for who asks.
    pub fn described(&self) -> Vec<proto::job::Member> {
        let member = |(rank, member): (&WorkerId, &Member)| proto::job::Member {
            rank: rank.0.into(),
            place: Some(member.place.clone()),
            seconds_per_byte: member.measured.seconds_per_byte,
            imbalance: member.measured.imbalance,
        };
        self.members.iter().map(member).collect()
    }
}

/// As much of it as there can be of an honest job.
fn kept(mut split: proto::Split) -> proto::Split {
    split.shares.truncate(SHARES_MAX);
    split.shares.iter_mut().for_each(|share| shorten(&mut share.service));
    shorten(&mut split.bound);
    split
}

fn kept_place(mut place: proto::Place) -> proto::Place {
    for text in [&mut place.machine, &mut place.name, &mut place.address] {
        shorten(text);
    }
    place.ranks.truncate(RANKS_MAX);
    place
}

fn shorten(text: &mut String) {
    // What is told is printed by who asks: on one line, and no terminal takes it for a command.
    if text.chars().any(char::is_control) || text.chars().count() > NAME_MAX {
        *text = text.chars().filter(|character| !character.is_control()).take(NAME_MAX).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_kept_up_to_what_an_honest_job_has() {
        let share = proto::split::Share { service: "\u{1b}[2J".repeat(100), share: 1.0, host: None };
        let split = proto::Split { shares: vec![share; 1000], ..proto::Split::default() };
        let place =
            proto::Place { machine: "m".repeat(1000), ranks: vec![0; 10_000], ..proto::Place::default() };
        let mut told = Told::default();
        told.joined(WorkerId(1), Some(split), Some(place));
        let split = told.split.clone().unwrap();
        assert_eq!(split.shares.len(), SHARES_MAX);
        assert!(
            split
                .shares
                .iter()
                .all(|share| share.service.len() == NAME_MAX && !share.service.contains('\u{1b}'))
        );
        let place = &told.members[&WorkerId(1)].place;
        assert_eq!((place.machine.len(), place.ranks.len()), (NAME_MAX, RANKS_MAX));
        told.joined(WorkerId(0), Some(proto::Split::default()), None);
        assert_eq!(told.split, Some(split), "the first word stands");
    }

    #[test]
    fn the_rank_that_waits_least_for_others_says_how_long_a_byte_takes() {
        let mut told = Told::default();
        assert_eq!((told.seconds_per_byte(), told.imbalance()), (None, 0.0));
        for (rank, seconds_per_byte, imbalance) in [(0, 3e-9, 0.01), (1, 1e-9, 0.02), (2, 2e-9, f64::NAN)] {
            let seconds_per_byte = Some(seconds_per_byte);
            told.measured(WorkerId(rank), Measured { seconds_per_byte, imbalance, ..Measured::default() });
        }
        told.measured(
            WorkerId(1),
            Measured { seconds_per_byte: Some(-1.0), imbalance: 0.02, round_trip: None },
        );
        assert_eq!((told.seconds_per_byte(), told.imbalance()), (Some(1e-9), 0.02));
    }
}
