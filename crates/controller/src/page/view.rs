//! The state as the page and `fanin top` read it: `page/src/contract.ts` says what each field
//! means, and `the_page_reads_what_is_written` compares the two.

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
