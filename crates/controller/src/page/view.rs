//! The state as the page and `fanin top` read it. `page/src/contract.ts` says what each field means.
//! `the_page_reads_what_is_written` holds this to an answer that the page's tests read.

use std::collections::BTreeMap;

use serde::Serialize;

/// All that is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "page/src/contract.ts is the documentation")]
pub struct State {
    pub now: f64,
    pub version: &'static str,
    pub server: String,
    pub every: f64,
    pub kept: f64,
    pub services: Vec<Service>,
    pub jobs: Vec<Job>,
    pub hidden_jobs: usize,
    pub words: Vec<Word>,
    pub events: Vec<Event>,
    pub history: History,
}

/// Whatever sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Service {
    pub address: String,
    pub upstream: Option<String>,
    pub silent: Option<String>,
    pub protocol: String,
    pub version: String,
    pub shards: u32,
    pub pool: Option<Pool>,
    pub rate: Option<u64>,
    pub received: Option<f64>,
    pub sent: Option<f64>,
}

/// Memory of each shard, in units of 256 elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Pool {
    pub units: u32,
    pub free: u32,
}

/// What a job does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as above")]
pub enum JobState {
    #[default]
    Gathering,
    Running,
    Aborted,
}

/// A job, over all its services.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Job {
    pub name: String,
    pub world_size: u32,
    pub state: JobState,
    pub reason: Option<String>,
    pub missing: Vec<u16>,
    pub left: Vec<u16>,
    pub generation: u32,
    pub protocol: String,
    pub wire_dtype: &'static str,
    pub security: &'static str,
    pub window: u64,
    pub shares: Vec<Share>,
    pub plan: Option<Plan>,
    pub ranks: Vec<Rank>,
    pub totals: Vec<Total>,
    pub sums_per_step: Option<u32>,
    pub steps: Option<f64>,
    pub in_sums: Option<f64>,
    pub sums: Vec<Sum>,
    pub words: Vec<Word>,
}

/// What one service has of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Share {
    pub service: String,
    pub share: f64,
    pub host: Option<u32>,
    pub measured: Option<f64>,
}

/// What the plan says, and what came of it: seconds a byte.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Plan {
    pub predicted: Option<f64>,
    pub ring: Option<f64>,
    pub bound: Option<String>,
    pub links: Option<String>,
    pub measured: Option<f64>,
    pub imbalance: f64,
}

/// A rank, or those of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Rank {
    pub rank: u16,
    pub ranks: Vec<u32>,
    pub machine: String,
    pub name: String,
    pub address: String,
    pub via: Option<String>,
    pub left: bool,
    pub round_trip: Option<f64>,
    pub waited_for: f64,
    pub late: Option<Late>,
}

/// How much later than the earliest rank one began its last collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Late {
    pub low: f64,
    pub median: f64,
    pub high: f64,
    pub last: f64,
    pub of: usize,
}

/// All collectives of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Total {
    pub collective: String,
    pub dtype: String,
    pub count: u64,
    pub bytes: u64,
}

/// A collective.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Sum {
    pub number: u64,
    pub ended: f64,
    pub bytes: u64,
    pub collective: String,
    pub dtype: String,
    pub ranks: Vec<(u16, f32, f32)>,
}

/// How much something matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as above")]
pub enum Severity {
    #[default]
    Note,
    Warning,
}

/// What people should know of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Word {
    pub name: &'static str,
    /// The rank or service that it is about, if its job has several.
    #[serde(skip)]
    pub about: String,
    pub severity: Severity,
    pub text: String,
    pub cure: Option<String>,
}

/// What happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct Event {
    pub at: f64,
    pub name: &'static str,
    pub severity: Severity,
    pub job: Option<String>,
    pub service: Option<String>,
    pub text: String,
}

/// Samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct History {
    pub times: Vec<f64>,
    pub services: BTreeMap<String, ServiceSeries>,
    pub jobs: BTreeMap<String, JobSeries>,
}

/// Of a service.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct ServiceSeries {
    pub received: Vec<Option<f32>>,
    pub sent: Vec<Option<f32>>,
    pub resent: Vec<Option<f32>>,
    pub dropped: Vec<Option<f32>>,
}

/// Of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs, reason = "as above")]
pub struct JobSeries {
    pub summed: Vec<Option<f32>>,
    pub resent: Vec<Option<f32>>,
    pub lost: Vec<Option<f32>>,
    pub steps: Vec<Option<f32>>,
    pub in_sums: Vec<Option<f32>>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    /// The types of all fields in it, by their way there; those of lists' items and of maps' values
    /// together.
    fn shape(value: &Value, way: &str, shapes: &mut BTreeMap<String, Vec<&'static str>>) {
        let kind = match value {
            Value::Null => return,
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "list",
            Value::Object(_) => "object",
        };
        let kinds = shapes.entry(way.to_owned()).or_default();
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
        match value {
            Value::Array(items) => items.iter().for_each(|item| shape(item, &format!("{way}[]"), shapes)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    // Maps by name of a service or a job.
                    let is_map = way == "history.services" || way == "history.jobs";
                    let name = if is_map { "*" } else { name };
                    let way = if way.is_empty() { name.to_owned() } else { format!("{way}.{name}") };
                    shapes.entry(way.clone()).or_default();
                    shape(field, &way, shapes);
                }
            }
            _ => {}
        }
    }

    #[test]
    fn the_page_reads_what_is_written() {
        let late = Late { of: 1, ..Late::default() };
        let rank = Rank { ranks: vec![0], round_trip: Some(0.0), late: Some(late), ..Rank::default() };
        let share = Share { host: Some(0), measured: Some(0.0), ..Share::default() };
        let text = || Some(String::new());
        let plan = Plan {
            predicted: Some(0.0),
            ring: Some(0.0),
            bound: text(),
            links: text(),
            measured: Some(0.0),
            imbalance: 0.0,
        };
        let word = Word { cure: text(), ..Word::default() };
        let sum = Sum { ranks: vec![(0, 0.0, 0.0)], ..Sum::default() };
        let job = Job {
            reason: text(),
            missing: vec![0],
            left: vec![0],
            shares: vec![share],
            plan: Some(plan),
            ranks: vec![rank],
            totals: vec![Total::default()],
            sums_per_step: Some(0),
            steps: Some(0.0),
            in_sums: Some(0.0),
            sums: vec![sum],
            words: vec![word],
            ..Job::default()
        };
        let service = Service {
            upstream: text(),
            silent: text(),
            pool: Some(Pool::default()),
            rate: Some(0),
            received: Some(0.0),
            sent: Some(0.0),
            ..Service::default()
        };
        let series = || vec![Some(0.0)];
        let (received, sent, resent, dropped) = (series(), series(), series(), series());
        let of_service = ServiceSeries { received, sent, resent, dropped };
        let (summed, resent, lost, steps, in_sums) = (series(), series(), series(), series(), series());
        let of_job = JobSeries { summed, resent, lost, steps, in_sums };
        let history = History {
            times: vec![0.0],
            services: BTreeMap::from([("a".into(), of_service)]),
            jobs: BTreeMap::from([("b".into(), of_job)]),
        };
        let event = Event { job: text(), service: text(), ..Event::default() };
        let (services, jobs, events) = (vec![service], vec![job], vec![event]);
        // Words of services are like those of jobs.
        let state = State { services, jobs, events, history, ..State::default() };
        let (mut written, mut read) = (BTreeMap::new(), BTreeMap::new());
        shape(&serde_json::to_value(state).unwrap(), "", &mut written);
        let fixture: Value =
            serde_json::from_str(include_str!("../../../../page/fixtures/state.json")).unwrap();
        shape(&fixture, "", &mut read);
        assert!(written.keys().eq(read.keys()), "{written:?}\n{read:?}");
        for (way, kinds) in read.iter().filter(|(_, kinds)| !kinds.is_empty()) {
            assert_eq!(kinds, &written[way], "{way}");
        }
    }
}
