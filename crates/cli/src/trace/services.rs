//! The services in the timelines of the ranks that asked them.

use std::collections::BTreeMap;

use fanin_controller::SERVICES_IN_TRACES;
use serde::Serialize;
use serde_json::Value;

/// A job at a service, as the ranks saw it that asked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ServiceOnTime {
    /// As the service's row is called.
    pub name: String,
    /// The job's name there.
    pub job: String,
    /// Its sums, each counted once.
    pub megabytes: f64,
    /// The mean over the time in which it summed something.
    pub mbit_per_s: Option<f64>,
    /// The rank that it waited most for, and the share of its work that waited, in per cent. It is
    /// the mean over the time that is known of the job there. Waiting for all ranks does not count.
    pub waits_for: Option<(String, f64)>,
}

/// By track: the moments from which on it shows other numbers, and these by name.
type Tracks<'a> = BTreeMap<&'a str, Vec<(f64, BTreeMap<&'a str, f64>)>>;

/// Makes a service one process in the events of several timelines. Each has numbered its services by
/// itself.
pub(super) fn renumbered(timelines: Vec<Vec<Value>>) -> Vec<Value> {
    let mut known: BTreeMap<String, u64> = BTreeMap::new();
    let mut all = Vec::new();
    for mut events in timelines {
        let mut numbers: BTreeMap<u64, u64> = BTreeMap::new();
        for event in &mut events {
            let Some(pid) = service(event) else { continue };
            if let (true, Some(name)) = (event["name"] == "process_name", event["args"]["name"].as_str()) {
                let next = u64::from(SERVICES_IN_TRACES) + known.len() as u64;
                numbers.insert(pid, *known.entry(name.to_owned()).or_insert(next));
            }
            event["pid"] = numbers.get(&pid).copied().unwrap_or(pid).into();
        }
        all.append(&mut events);
    }
    all
}

/// The jobs at the services of a run's events.
pub(super) fn services(events: &[Value]) -> Vec<ServiceOnTime> {
    let mut names: BTreeMap<u64, &str> = BTreeMap::new();
    let mut of_jobs: BTreeMap<(u64, &str), Tracks<'_>> = BTreeMap::new();
    for event in events {
        let (Some(pid), Some(name)) = (service(event), event["name"].as_str()) else { continue };
        if let (true, Some(process)) = (name == "process_name", event["args"]["name"].as_str()) {
            names.insert(pid, process);
        }
        let (Some(from), Some((track, job))) = (event["ts"].as_f64(), name.split_once(" (")) else {
            continue;
        };
        let numbers = event["args"].as_object().into_iter().flatten();
        let numbers = numbers.map(|(called, number)| (called.as_str(), number.as_f64().unwrap_or(0.0)));
        let tracks = of_jobs.entry((pid, job.trim_end_matches(')'))).or_default();
        tracks.entry(track).or_default().push((from, numbers.collect()));
    }
    let of_job = |((pid, job), mut tracks): ((u64, &str), Tracks<'_>)| {
        tracks.values_mut().for_each(|shown| shown.sort_by(|a, b| a.0.total_cmp(&b.0)));
        // Switches on the way tell nothing of ranks.
        let name = names.get(&pid).filter(|name| name.starts_with("service "))?;
        Some(ServiceOnTime::of(name, job, &tracks))
    };
    of_jobs.into_iter().filter_map(of_job).collect()
}

/// The process number of an event, if it is a service's.
fn service(event: &Value) -> Option<u64> {
    event["pid"].as_u64().filter(|pid| *pid >= SERVICES_IN_TRACES.into())
}

impl ServiceOnTime {
    fn of(name: &str, job: &str, tracks: &Tracks<'_>) -> Self {
        let moments = || tracks.values().flatten().map(|(from, _)| *from);
        let (first, last) = (moments().fold(f64::INFINITY, f64::min), moments().fold(0.0, f64::max));
        let (mut bits, mut busy_us, mut waits) = (0.0, 0.0, BTreeMap::<&str, f64>::new());
        for (track, shown) in tracks {
            let until = shown.iter().skip(1).map(|(from, _)| *from).chain([last]);
            for ((from, numbers), until) in shown.iter().zip(until) {
                let us = until - from;
                for (number, value) in numbers.iter().filter(|(_, value)| **value > 0.0) {
                    if *track == "sums" {
                        // Mbit/s times microseconds are bits.
                        bits += value * us;
                        busy_us += us;
                    } else if track.starts_with("waits for") {
                        *waits.entry(number).or_default() += value * us;
                    }
                }
            }
        }
        let most = waits.into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
        let waits_for =
            most.map(|(rank, percent_us)| (rank.to_owned(), percent_us / (last - first).max(1.0)));
        let mbit_per_s = (busy_us > 0.0).then(|| bits / busy_us);
        Self { name: name.to_owned(), job: job.to_owned(), megabytes: bits / 8e6, mbit_per_s, waits_for }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FIRST: u32 = SERVICES_IN_TRACES;

    fn called(pid: u32, name: &str) -> Value {
        json!({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})
    }

    fn shows(pid: u32, track: &str, ts: f64, args: Value) -> Value {
        json!({"ph": "C", "pid": pid, "tid": 0, "name": track, "ts": ts, "args": args})
    }

    #[test]
    fn jobs_at_a_service_of_two_timelines_say_what_it_summed_and_for_whom_it_waited() {
        let waits = "waits for, % (j)";
        let of_rank_0 = vec![
            called(FIRST, "service a"),
            shows(FIRST, "sums (j)", 1e6, json!({"Mbit/s": 800.0})),
            shows(FIRST, waits, 1e6, json!({"rank 1": 50.0})),
            // In no order.
            shows(FIRST, "sums (j)", 3e6, json!({"Mbit/s": 0.0})),
            shows(FIRST, waits, 5e6, json!({"rank 0": 0.0, "rank 1": 0.0})),
            shows(FIRST, waits, 2e6, json!({"rank 0": 10.0, "rank 1": 0.0})),
            called(FIRST + 1, "switch x"),
            shows(FIRST + 1, "summed (j)", 1e6, json!({"packets/s": 7.0})),
        ];
        // The same moments, and a job of another group.
        let of_rank_1 = vec![
            called(FIRST, "service b"),
            called(FIRST + 1, "service a"),
            shows(FIRST + 1, "sums (k)", 1e6, json!({"Mbit/s": 80.0})),
            shows(FIRST + 1, "sums (k)", 2e6, json!({"Mbit/s": 0.0})),
        ];
        let all = renumbered(vec![of_rank_0, of_rank_1]);
        let found = services(&all);
        let on_time =
            |job: &str, megabytes: f64, mbit_per_s: f64, waits_for: Option<(&str, f64)>| ServiceOnTime {
                name: "service a".into(),
                job: job.into(),
                megabytes,
                mbit_per_s: Some(mbit_per_s),
                waits_for: waits_for.map(|(rank, percent)| (rank.into(), percent)),
            };
        // 50 % for a second of four is more than 10 % for three of them.
        assert_eq!(
            found,
            [on_time("j", 200.0, 800.0, Some(("rank 1", 12.5))), on_time("k", 10.0, 80.0, None)]
        );
    }
}
