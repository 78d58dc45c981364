//! Rank 0 asks each service now and then for its counters, and writes them into its timeline. The
//! times are rank 0's, so nobody has to compare clocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_udp::Clock;
use fanin_wire::{Dtype, Rank};
use tokio::time::{sleep, timeout};

use super::SessionTrace;
use crate::convert::shown;
use crate::proto;
use crate::proto::job::{Running, State};
use crate::session::rank_names::RankNames;
use crate::session::shared::Shared;

/// How often one of a session's services is asked: of several, each in its turn.
const EVERY: Duration = Duration::from_millis(50);
/// How often a service is asked at least.
const EVERY_MAX: Duration = Duration::from_secs(1);
/// By how much less often it is asked if switches pass the question on: they do so for others, too.
const PASSED_ON: u32 = 4;
/// How long an answer may take. After longer it says too little about when.
const PATIENCE: Duration = Duration::from_secs(1);
/// The share of a service's work that waits for a rank, beyond what waits for all.
const WAITS: &str = "waits for, %";

/// The tracks of a service, or of a switch on the way to it, from some moment on.
#[derive(Debug, PartialEq)]
pub(super) struct Sample {
    /// Its name in the viewer.
    pub machine: String,
    pub from: Instant,
    /// None: it does nothing more for the job.
    pub tracks: Vec<Track>,
}

/// Numbers that a viewer draws together.
#[derive(Debug, PartialEq)]
pub(super) struct Track {
    /// With the job's name at the service: one that took over has several parts of a session's job.
    pub name: String,
    /// By name.
    pub values: BTreeMap<String, f64>,
}

/// The counters of a service, as it told them last.
struct Told {
    at: Instant,
    /// Its name in the viewer.
    service: String,
    /// The job's name there.
    job: String,
    running: Running,
    /// By switch on the way: its sums, and its collisions.
    relays: BTreeMap<String, (u64, u64)>,
}

/// Asks a service what it does for this session's job, until the session ends.
pub(in crate::session) async fn record(shared: Arc<Shared>, service: usize, trace: SessionTrace) {
    let mut before: Option<Told> = None;
    loop {
        // Another service that takes over changes both.
        let (mut connection, name) = {
            let lane = shared.lane(service);
            (lane.connection.clone(), lane.name.clone())
        };
        let question = proto::StatusRequest { job: Some(name), ..proto::StatusRequest::default() };
        let reply = timeout(PATIENCE, connection.client.status(question)).await;
        // Counters are read as the answer is written.
        let at = Instant(Clock.now().0.saturating_sub(connection.rtt.as_nanos() as u64 / 2));
        // The session itself looks after a service that does not answer.
        let reply = reply.ok().and_then(Result::ok);
        let told = reply.and_then(|reply| Told::read(reply.into_inner(), at, &connection.switch));
        if let Some(before) = &before
            && !told.as_ref().is_some_and(|told| told.follows(before))
        {
            before.ended().into_iter().for_each(|sample| trace.service(sample));
        }
        if let Some(told) = &told {
            let names = &shared.config.names;
            told.samples(before.as_ref(), names).into_iter().for_each(|sample| trace.service(sample));
        }
        let is_passed_on = told.as_ref().is_some_and(|told| !told.relays.is_empty());
        let turns = shared.members.len() as u32 * if is_passed_on { PASSED_ON } else { 1 };
        sleep(if told.is_some() { (EVERY * turns).min(EVERY_MAX) } else { EVERY_MAX }).await;
        before = told;
    }
}

impl Told {
    /// Nothing while the job does not run there.
    fn read(reply: proto::StatusReply, at: Instant, asked: &str) -> Option<Self> {
        let job = reply.jobs.into_iter().next()?;
        let State::Running(running) = job.state? else { return None };
        // The rank may have asked a switch on the way.
        let root = reply.relays.first().map_or(asked, |relay| &relay.upstream);
        let service = shown(format!("service {root}"));
        let of_job = |relay: &proto::Relay| {
            let its = relay.jobs.iter().find(|its| its.job_id == running.job_id)?;
            Some((shown(format!("switch {}", relay.address)), (its.aggregations, its.collisions)))
        };
        let relays = reply.relays.iter().filter_map(of_job).collect();
        Some(Self { at, service, job: shown(job.name), running, relays })
    }

    /// Whether counters have gone on since then.
    fn follows(&self, before: &Self) -> bool {
        (&self.service, self.running.job_id) == (&before.service, before.running.job_id)
            && self.at > before.at
    }

    /// Nothing is done from this moment on.
    fn ended(&self) -> Vec<Sample> {
        let machines = std::iter::once(&self.service).chain(self.relays.keys());
        machines
            .map(|machine| Sample { machine: machine.clone(), from: self.at, tracks: Vec::new() })
            .collect()
    }

    /// The waiting at this moment, and the work since it told before.
    fn samples(&self, before: Option<&Self>, names: &RankNames) -> Vec<Sample> {
        let Self { at, service, job, running: now, relays } = self;
        let sample = |machine: &String, from, tracks| Sample { machine: machine.clone(), from, tracks };
        let mut samples = vec![sample(service, *at, vec![self.waits(names)])];
        let Some(before) = before.filter(|before| self.follows(before)) else { return samples };
        let (then, from) = (&before.running, before.at);
        let seconds = at.since(from).as_secs_f64();
        // A machine that restarted counts from 0.
        let a_second = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let one = |name: &str, unit: &str, value| Track {
            name: format!("{name} ({job})"),
            values: BTreeMap::from([(unit.to_owned(), three_digits(value))]),
        };
        let chunk_bits = 8.0 * f64::from(now.elements) * Dtype::Float32.element_bytes() as f64;
        let mut tracks = vec![
            one("sums", "Mbit/s", 1e-6 * chunk_bits * a_second(now.completed, then.completed)),
            one("sent again", "packets/s", a_second(now.retransmitted, then.retransmitted)),
        ];
        if now.loss_bound_millionths > 0 {
            tracks.push(one("lost within the bound", "packets/s", a_second(now.lost, then.lost)));
        }
        samples.push(sample(service, from, tracks));
        for (relay, (sums, collisions)) in relays {
            let Some((sums_then, collisions_then)) = before.relays.get(relay) else { continue };
            let tracks = vec![
                one("summed", "packets/s", a_second(*sums, *sums_then)),
                one("found no memory", "packets/s", a_second(*collisions, *collisions_then)),
            ];
            samples.push(sample(relay, from, tracks));
        }
        samples
    }

    /// The ranks that something waits for which does not wait for all. What waits for all waits for
    /// the network.
    fn waits(&self, names: &RankNames) -> Track {
        let waiting = &self.running.waiting_for;
        let least = waiting.iter().min().copied().unwrap_or(0);
        // DLCP tells the blocks that wait, of which there are more than there are flows.
        let all = waiting.iter().chain([&self.running.in_use]).max().copied().unwrap_or(0);
        let percent = |count: &u32| (100.0 * f64::from(count - least) / f64::from(all.max(1))).round();
        let ranks = waiting.iter().enumerate().map(|(rank, count)| (Rank(rank as u16), percent(count)));
        let late = ranks.filter(|(_, percent)| *percent > 0.0);
        let values = late.map(|(rank, percent)| (format!("rank {}", names.of(rank).0), percent)).collect();
        Track { name: format!("{WAITS} ({})", self.job), values }
    }
}

/// Three digits: more are noise, and a number that changes is written anew.
fn three_digits(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(at: u64, completed: u64, waiting_for: &[u32]) -> Told {
        let running = Running {
            job_id: 7,
            in_flight: 100,
            shards: 2,
            elements: 250,
            in_use: 200,
            completed,
            waiting_for: waiting_for.into(),
            ..Running::default()
        };
        let relay = |address: &str, upstream: &str, aggregations| proto::Relay {
            address: address.into(),
            upstream: upstream.into(),
            jobs: vec![proto::RelayJob { job_id: 7, aggregations, ..proto::RelayJob::default() }],
            ..proto::Relay::default()
        };
        let state = Some(State::Running(running));
        let job = proto::Job { name: "j".into(), state, ..proto::Job::default() };
        let relays = vec![relay("pod", "root", 2 * completed), relay("rack", "pod", 4 * completed)];
        let reply = proto::StatusReply { jobs: vec![job], relays, ..proto::StatusReply::default() };
        Told::read(reply, Instant(at), "rack").expect("it runs")
    }

    fn values(samples: &[Sample]) -> Vec<(&str, u64, &str, &str, f64)> {
        let mut all = Vec::new();
        for Sample { machine, from, tracks } in samples {
            for Track { name, values } in tracks {
                all.extend(
                    values
                        .iter()
                        .map(|(key, value)| (machine.as_str(), from.0, name.as_str(), key.as_str(), *value)),
                );
            }
        }
        all
    }

    #[test]
    fn a_service_and_the_switches_before_it_do_what_their_counters_say() {
        let (then, now) = (told(1_000_000_000, 1000, &[]), told(1_500_000_000, 1500, &[]));
        assert_eq!(values(&then.samples(None, &RankNames::default())), []);
        // 500 chunks of 1,000 bytes in half a second.
        let expected = [
            ("service root", 1_000_000_000, "sums (j)", "Mbit/s", 8.0),
            ("service root", 1_000_000_000, "sent again (j)", "packets/s", 0.0),
            ("switch pod", 1_000_000_000, "summed (j)", "packets/s", 2000.0),
            ("switch pod", 1_000_000_000, "found no memory (j)", "packets/s", 0.0),
            ("switch rack", 1_000_000_000, "summed (j)", "packets/s", 4000.0),
            ("switch rack", 1_000_000_000, "found no memory (j)", "packets/s", 0.0),
        ];
        assert_eq!(values(&now.samples(Some(&then), &RankNames::default())), expected);
    }

    #[test]
    fn a_rank_is_waited_for_by_what_waits_for_it_and_not_for_all() {
        let waits = |waiting_for: &[u32], names: RankNames| {
            let samples = told(5, 0, waiting_for).samples(None, &names);
            samples[0].tracks[0].values.clone().into_iter().collect::<Vec<_>>()
        };
        let none = RankNames::default();
        assert_eq!(waits(&[0, 150, 0], none.clone()), [("rank 1".to_owned(), 75.0)]);
        assert_eq!(
            waits(&[90, 100, 95], none.clone()),
            [("rank 1".to_owned(), 5.0), ("rank 2".to_owned(), 3.0)]
        );
        assert_eq!(waits(&[40, 40, 40], none.clone()), []);
        // More blocks wait than there are flows.
        assert_eq!(waits(&[0, 5000], none), [("rank 1".to_owned(), 100.0)]);
        // A session of machines: its second rank is called 8.
        assert_eq!(waits(&[0, 200], vec![0, 8].into()), [("rank 8".to_owned(), 100.0)]);
    }

    #[test]
    fn a_machine_that_restarted_has_done_no_less_than_nothing_and_another_job_is_none_of_its() {
        let (then, now) = (told(0, 1000, &[0, 0]), told(50_000_000, 10, &[0, 0]));
        assert!(values(&now.samples(Some(&then), &RankNames::default())).iter().all(|value| value.4 >= 0.0));
        let mut other = told(50_000_000, 2000, &[0, 0]);
        other.running.job_id = 8;
        assert!(!other.follows(&then) && now.follows(&then) && !then.follows(&now));
        assert_eq!(values(&other.samples(Some(&then), &RankNames::default())), []);
        let ended = then.ended();
        let machines: Vec<_> =
            ended.iter().map(|sample| (sample.machine.as_str(), sample.tracks.len())).collect();
        assert_eq!(machines, [("service root", 0), ("switch pod", 0), ("switch rack", 0)]);
    }

    #[test]
    fn names_that_switches_tell_are_no_commands_of_a_terminal() {
        let relay = proto::Relay {
            address: "\u{1b}[2J".into(),
            upstream: "\u{7}root".into(),
            jobs: vec![proto::RelayJob { job_id: 7, ..proto::RelayJob::default() }],
            ..proto::Relay::default()
        };
        let state = Some(State::Running(Running { job_id: 7, ..Running::default() }));
        let job = proto::Job { name: "j\n".into(), state, ..proto::Job::default() };
        let reply =
            proto::StatusReply { jobs: vec![job], relays: vec![relay], ..proto::StatusReply::default() };
        let told = Told::read(reply, Instant(0), "rack").expect("it runs");
        let names = [&told.service, &told.job].into_iter().chain(told.relays.keys());
        assert!(names.flat_map(|name| name.chars()).all(|character| !character.is_control()));
    }

    #[test]
    fn numbers_have_three_digits() {
        let of = [0.0, 0.012_345, 1.0, 12.345, 612.4, 98_765.0].map(three_digits);
        let expected: [f64; 6] = [0.0, 0.0123, 1.0, 12.3, 612.0, 98_800.0];
        assert!(of.iter().zip(expected).all(|(of, expected)| of.to_bits() == expected.to_bits()), "{of:?}");
    }
}
