//! What a run was like, for people and programs. Numbers only; whoever prints it adds which program it was.

use serde::Serialize;

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What the scenario says that it shows.
    pub title: String,
    /// Everything random came from it.
    pub seed: u64,
    /// Virtual time at the end.
    pub ended_s: f64,
    /// Virtual time from which throughputs are measured.
    pub warm_up_s: f64,
    /// Length of an interval of every series.
    pub interval_s: f64,
    /// Length of every series' last one, which the run's end cut short.
    pub last_interval_s: f64,
    /// Packets sent into links.
    pub packet_hops: u64,
    /// Things that happened.
    pub events: u64,
    /// A number that stands for everything that happened, in hexadecimal.
    pub digest: String,
    /// Packets that did not get through, by reason.
    pub drops: Vec<Count>,
    /// The jobs, in the scenario's order.
    pub jobs: Vec<JobReport>,
    /// Hosts with parameter servers.
    pub servers: Vec<ServerReport>,
    /// Switches with aggregators.
    pub switches: Vec<SwitchReport>,
    /// Background flows, in the scenario's order.
    pub background: Vec<FlowReport>,
}

/// How often something happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Count {
    /// What.
    pub name: &'static str,
    /// How often.
    pub count: u64,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobReport {
    /// Its name.
    pub name: String,
    /// Who sums, as in the scenario.
    pub system: &'static str,
    /// Number of workers.
    pub workers: usize,
    /// Whether it did all that it had to do.
    pub finished: bool,
    /// When it had, or when the run ended.
    pub finished_s: f64,
    /// Of a job that had to be over and is not: who waits for which tensor, and for whom, and where its machines stand.
    pub unfinished: Option<String>,
    /// Parameters that a worker received a second, in Gbit/s, in the mean over workers: ATP §5.1's aggregation throughput. It
    /// says something only where the measurement is enough.
    pub aggregation_gbps: f64,
    /// What the throughputs rest on.
    pub measurement: Measurement,
    /// Tensors that a worker got, in the mean over workers, and the time of one from submission to sum.
    pub tensors: f64,
    /// In the mean.
    pub tensor_mean_s: f64,
    /// The longest.
    pub tensor_max_s: f64,
    /// Of training: the rest.
    pub training: Option<TrainingReport>,
    /// Fragments that switches added.
    pub switch_aggregations: u64,
    /// Fragments that found no aggregator at a switch.
    pub switch_collisions: u64,
    /// Packets that the server added: whole sums, partial ones and single fragments.
    pub server_aggregations: u64,
    /// Packets that workers sent.
    pub packets_sent: u64,
    /// Of these, sent again.
    pub retransmissions: u64,
    /// Fragments whose sum saturated.
    pub overflows: u64,
    /// By interval.
    pub series: JobSeries,
}

/// What a job's throughputs rest on: what was completed in a window, by its length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measurement {
    /// From the warm-up's end, or the job's start if that is later, to the job's end or the run's.
    pub window_s: f64,
    /// Tensors, or iterations of training, that were completed in it, at the worker with the fewest.
    pub completed: u64,
    /// As many there must be: three for each that is under way at once.
    pub needed: u64,
    /// Whether there are. If not, the throughputs are those of a beginning and an end.
    pub enough: bool,
}

/// What training adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainingReport {
    /// The model.
    pub model: &'static str,
    /// What parameters and times are divided by.
    pub scale: f64,
    /// Iterations completed by every worker.
    pub iterations: u64,
    /// A second, in the mean over workers, in the window of the measurement; of the scaled model.
    pub iterations_per_s: f64,
    /// Images or sequences a second and worker, as the model would without scale.
    pub samples_per_s: f64,
    /// Images, or sequences.
    pub sample: &'static str,
}

/// A job's time series.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct JobSeries {
    /// Parameters that a worker received, in Gbit/s, in the mean over workers.
    pub aggregation_gbps: Vec<f64>,
    /// Fragments that switches added.
    pub switch_aggregations: Vec<u64>,
    /// Packets that the server added.
    pub server_aggregations: Vec<u64>,
}

/// A host with a parameter server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerReport {
    /// The host.
    pub host: String,
    /// Packets that it received.
    pub received_packets: u64,
    /// Their bytes, with all framing.
    pub received_bytes: u64,
    /// Received, by interval, in Gbit/s.
    pub received_gbps: Vec<f64>,
}

/// A switch with aggregators.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SwitchReport {
    /// The switch.
    pub name: String,
    /// Its aggregators.
    pub aggregators: u32,
    /// Most that were in use when a sample was taken.
    pub in_use_max: u32,
    /// Fragments added.
    pub aggregations: u64,
    /// Fragments that found no aggregator.
    pub collisions: u64,
    /// Aggregators freed by parameters, by fragments sent again, and because they were left behind.
    pub freed_by_parameters: u64,
    /// See above.
    pub freed_by_resend: u64,
    /// See above.
    pub freed_stale: u64,
}

/// A background flow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlowReport {
    /// Sender.
    pub from: String,
    /// Receiver.
    pub to: String,
    /// Bytes that arrived.
    pub delivered_bytes: u64,
    /// Segments sent again.
    pub retransmissions: u64,
    /// Arrived, by interval, in Gbit/s.
    pub delivered_gbps: Vec<f64>,
}
