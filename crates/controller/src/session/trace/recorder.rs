//! Rank 0 asks each service now and then for its counters, and writes them into its timeline. The
//! times are rank 0's, so nobody has to compare clocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_udp::Clock;
use fanin_wire::Dtype;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::SessionTrace;
use crate::proto;
use crate::proto::job::{Running, State};
use crate::session::shared::Shared;

/// How often a service is asked.
const EVERY: Duration = Duration::from_millis(50);
/// How long an answer may take: longer, and it says too little about when.
const PATIENCE: Duration = Duration::from_secs(1);
/// How many of a service's slots wait for each rank.
const WAITS: &str = "waits for, % of its slots";

/// The tracks of a service, or of a switch on the way to it, from some moment on.
#[derive(Debug)]
pub(super) struct Sample {
    /// Its name in the viewer.
    pub machine: String,
    pub from: Instant,
    pub tracks: Vec<Track>,
}

/// Numbers that a viewer draws together.
#[derive(Debug)]
pub(super) struct Track {
    pub name: &'static str,
    /// By name.
    pub values: BTreeMap<String, f64>,
}

/// The counters of a service, as it told them last.
struct Told {
    at: Instant,
    running: Running,
    /// By switch on the way: its sums, and its collisions.
    relays: BTreeMap<String, (u64, u64)>,
}

/// Asks a service for what it does for this session's job, until the session ends.
pub(in crate::session) async fn record(shared: Arc<Shared>, service: usize, trace: SessionTrace) {
    let mut asks = interval(EVERY);
    asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before: Option<Told> = None;
    loop {
        asks.tick().await;
        // Another service that takes over changes both.
        let (mut connection, name) = {
            let lane = shared.lane(service);
            (lane.connection.clone(), lane.name.clone())
        };
        let asked = Clock.now();
        let question = proto::StatusRequest { job: Some(name), ..proto::StatusRequest::default() };
        // A watch of its own looks after a service that does not answer.
        let Ok(Ok(reply)) = timeout(PATIENCE, connection.client.status(question)).await else {
            before = None;
            continue;
        };
        let now = Instant(u64::midpoint(asked.0, Clock.now().0));
        let told = told(reply.into_inner(), now);
        for sample in told.iter().flat_map(|told| told.samples(before.as_ref(), &connection.switch)) {
            trace.service(sample);
        }
        before = told;
    }
}

fn told(reply: proto::StatusReply, at: Instant) -> Option<Told> {
    let State::Running(running) = reply.jobs.into_iter().next()?.state? else { return None };
    let of_job = |relay: proto::Relay| {
        let its = relay.jobs.into_iter().find(|its| its.job_id == running.job_id)?;
        Some((relay.address, (its.aggregations, its.collisions)))
    };
    let relays = reply.relays.into_iter().filter_map(of_job).collect();
    Some(Told { at, running, relays })
}

impl Told {
    /// What waits now, and what was done since it told before.
    fn samples(&self, before: Option<&Self>, service: &str) -> Vec<Sample> {
        let machine = format!("service {service}");
        let slots = f64::from(self.running.in_flight) * f64::from(self.running.shards.max(1));
        let waiting = self.running.waiting_for.iter().enumerate();
        let waits = waiting.map(|(rank, count)| (format!("rank {rank}"), 100.0 * f64::from(*count) / slots));
        let waits = Track { name: WAITS, values: waits.collect() };
        let mut samples = vec![Sample { machine: machine.clone(), from: self.at, tracks: vec![waits] }];
        let Some(before) = before.filter(|before| before.running.job_id == self.running.job_id) else {
            return samples;
        };
        let (now, then, from) = (&self.running, &before.running, before.at);
        let seconds = self.at.since(from).as_secs_f64();
        // A machine that restarted counts from 0.
        let a_second = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let one =
            |name, unit: &str, value| Track { name, values: BTreeMap::from([(unit.to_owned(), value)]) };
        let chunk_bits = 8.0 * f64::from(now.elements) * Dtype::Float32.element_bytes() as f64;
        let mut tracks = vec![
            one("sums", "Mbit/s", 1e-6 * chunk_bits * a_second(now.completed, then.completed)),
            one("sent again", "packets/s", a_second(now.retransmitted, then.retransmitted)),
        ];
        if now.loss_bound_millionths > 0 {
            tracks.push(one("lost within the bound", "packets/s", a_second(now.lost, then.lost)));
        }
        samples.push(Sample { machine, from, tracks });
        for (relay, (sums, collisions)) in &self.relays {
            let Some((sums_then, collisions_then)) = before.relays.get(relay) else { continue };
            let tracks = vec![
                one("summed", "packets/s", a_second(*sums, *sums_then)),
                one("found no memory", "packets/s", a_second(*collisions, *collisions_then)),
            ];
            samples.push(Sample { machine: format!("switch {relay}"), from, tracks });
        }
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(completed: u64, waiting_for: [u32; 2]) -> proto::StatusReply {
        let running = Running {
            job_id: 7,
            in_flight: 100,
            shards: 2,
            elements: 250,
            completed,
            waiting_for: waiting_for.into(),
            ..Running::default()
        };
        let relay = proto::Relay {
            address: "10.0.0.1:4800".into(),
            jobs: vec![proto::RelayJob { job_id: 7, aggregations: 2 * completed, collisions: 0 }],
            ..proto::Relay::default()
        };
        let job = proto::Job { state: Some(State::Running(running)), ..proto::Job::default() };
        proto::StatusReply { jobs: vec![job], relays: vec![relay], ..proto::StatusReply::default() }
    }

    fn values(samples: &[Sample]) -> Vec<(&str, Instant, &str, &str, f64)> {
        let mut all = Vec::new();
        for Sample { machine, from, tracks } in samples {
            for Track { name, values } in tracks {
                all.extend(
                    values.iter().map(|(key, value)| (machine.as_str(), *from, *name, key.as_str(), *value)),
                );
            }
        }
        all
    }

    #[test]
    fn a_service_does_what_its_counters_say_and_waits_for_whom_it_says() {
        let at = [Instant(1_000_000_000), Instant(1_500_000_000)];
        let then = told(reply(1000, [0, 150]), at[0]).expect("it runs");
        let now = told(reply(1500, [0, 50]), at[1]).expect("it runs");
        let first = then.samples(None, "s:4800");
        let waits = |at, percent: f64| {
            [("rank 0", 0.0), ("rank 1", percent)]
                .map(|(rank, percent)| ("service s:4800", at, WAITS, rank, percent))
        };
        assert_eq!(values(&first), waits(at[0], 75.0));
        // 500 chunks of 1,000 bytes in half a second.
        let expected = [
            ("service s:4800", at[0], "sums", "Mbit/s", 8.0),
            ("service s:4800", at[0], "sent again", "packets/s", 0.0),
            ("switch 10.0.0.1:4800", at[0], "summed", "packets/s", 2000.0),
            ("switch 10.0.0.1:4800", at[0], "found no memory", "packets/s", 0.0),
        ];
        assert_eq!(
            values(&now.samples(Some(&then), "s:4800")),
            [&waits(at[1], 25.0)[..], &expected].concat()
        );
    }

    #[test]
    fn a_machine_that_restarted_has_done_no_less_than_nothing() {
        let then = told(reply(1000, [0, 0]), Instant(0)).expect("it runs");
        let now = told(reply(10, [0, 0]), Instant(50_000_000)).expect("it runs");
        assert!(values(&now.samples(Some(&then), "s:4800")).iter().all(|value| value.4 >= 0.0));
    }
}
