//! The report of a run, for people and programs. It has numbers only; the program that prints it
//! adds its own name.

use serde::Serialize;

use super::recording::Recording;
use crate::net::Time;
use crate::systems::Counters;

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The point of the scenario, in its own words.
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
    /// Flows of training with parameter servers, in the scenario's order.
    pub parameter_servers: Vec<ParameterServerReport>,
    /// Hosts with parameter servers.
    pub servers: Vec<ServerReport>,
    /// Switches with aggregators.
    pub switches: Vec<SwitchReport>,
    /// Background flows, in the scenario's order.
    pub background: Vec<FlowReport>,
    /// How long those took that have a size, of all entries together.
    pub flow_times: Option<Durations>,
    /// Ends of the intervals of links' loads. If these would be more than a million numbers,
    /// intervals are longer than those of the other series.
    pub link_ends_s: Vec<f64>,
    /// Both directions of each link that carried or dropped anything.
    pub links: Vec<LinkReport>,
    /// The run over time, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recording: Option<Recording>,
}

/// How long things took, each from its beginning to its end; percentiles are the nearest that
/// occurred, not below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Durations {
    /// How many ended. Without any, all times are zero.
    pub count: usize,
    /// How many had begun and not ended, which are in none of the times: the longest may be among
    /// them.
    pub unfinished: usize,
    /// In the mean.
    pub mean_s: f64,
    /// 95 of 100 took no longer.
    pub p95_s: f64,
    /// 99 of 100.
    pub p99_s: f64,
    /// 999 of 1000.
    pub p999_s: f64,
    /// The longest.
    pub max_s: f64,
}

impl Durations {
    pub(crate) fn of(mut times: Vec<Time>, unfinished: usize) -> Self {
        times.sort_unstable();
        let Some(longest) = times.last() else { return Self { unfinished, ..Self::default() } };
        let not_above = |per_mille: usize| times[(times.len() * per_mille).div_ceil(1000) - 1].as_secs_f64();
        let total: u128 = times.iter().map(|time| u128::from(time.0)).sum();
        Self {
            count: times.len(),
            unfinished,
            mean_s: total as f64 / times.len() as f64 / 1e12,
            p95_s: not_above(950),
            p99_s: not_above(990),
            p999_s: not_above(999),
            max_s: longest.as_secs_f64(),
        }
    }
}

/// A direction of a link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkReport {
    /// Who sends.
    pub from: String,
    /// Who receives.
    pub to: String,
    /// Its rate.
    pub rate_gbps: f64,
    /// Sent into it, with all framing.
    pub sent_bytes: u64,
    /// Share of the run in which it was busy.
    pub load: f64,
    /// The largest load of its intervals.
    pub load_max: f64,
    /// Most bytes that waited in one of the queues in front of it.
    pub queue_max_bytes: u64,
    /// Packets that were marked there.
    pub marked: u64,
    /// Packets that did not get through.
    pub dropped: u64,
    /// By interval: the share in which it was busy.
    pub loads: Vec<f64>,
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
    /// The system that sums, as in the scenario.
    pub system: &'static str,
    /// Number of workers.
    pub workers: usize,
    /// Whether it did all that it had to do.
    pub finished: bool,
    /// When it had; none if it has not.
    pub finished_s: Option<f64>,
    /// When all its machines vanished, if that was before.
    pub died_s: Option<f64>,
    /// For a job that had to be over and is not: who waits for which tensor, and for whom, and
    /// where its machines stand.
    pub unfinished: Option<String>,
    /// Parameters that a worker received a second, in Gbit/s, in the mean over workers: ATP §5.1's
    /// aggregation throughput. It says something only where the measurement is enough.
    pub aggregation_gbps: f64,
    /// The basis of the throughputs.
    pub measurement: Measurement,
    /// Tensors that a worker got, in the mean over workers.
    pub tensors: f64,
    /// The time of each tensor at each worker, from its submission to its sum.
    pub tensor_times: Durations,
    /// The rest, for training.
    pub training: Option<TrainingReport>,
    /// Its machines' counts: none if the system does not count.
    #[serde(flatten)]
    pub counters: Counters,
    /// By interval.
    pub series: JobSeries,
}

/// The basis of a job's throughputs: what was completed in a window, by its length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measurement {
    /// From the warm-up's end, or the job's start if that is later, to the job's end or the run's.
    pub window_s: f64,
    /// Tensors, or iterations of training, that were completed in it, at the worker with the
    /// fewest.
    pub completed: u64,
    /// As many there must be: three for each that is under way at once.
    pub needed: u64,
    /// Whether there are. If not, the throughputs show a beginning and an end.
    pub enough: bool,
}

/// What training adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainingReport {
    /// The model.
    pub model: &'static str,
    /// The divisor of parameters and times.
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
    /// Packets that switches added, where they are counted.
    pub switch_aggregations: Option<Vec<u64>>,
    /// Packets that the server added, where they are counted.
    pub server_aggregations: Option<Vec<u64>>,
}

/// Flows of one job with parameter servers. A value that its transport cannot have is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ParameterServerReport {
    /// Its name.
    pub name: String,
    /// Number of workers.
    pub workers: usize,
    /// Number of servers.
    pub servers: usize,
    /// The time of each flow, from when its tensor was there to when its last byte was at the
    /// server. A DLCP flow ends when its sender heard that enough of it was there.
    pub flow_times: Durations,
    /// Flows whose time had not come when the run ended.
    pub unopened: usize,
    /// From the beginning of the backward passes to the end of the last flow that ended.
    pub last_arrived_s: f64,
    /// Bytes that arrived.
    pub delivered_bytes: u64,
    /// Packets sent, acknowledgements and retransmissions included; of DLCP those of senders alone.
    pub sent_packets: u64,
    /// Segments sent again.
    pub retransmissions: u64,
    /// Retransmission timeouts.
    pub timeouts: Option<u64>,
    /// For DLCP: packets that all flows consist of.
    pub packets: Option<u64>,
    /// The packets that never arrived, once all flows have ended.
    pub packets_lost: Option<u64>,
    /// How often packets of a flow were asked for again.
    pub retransmission_rounds: Option<u64>,
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

/// A switch that sums. A value that its jobs' system cannot have is none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SwitchReport {
    /// The switch.
    pub name: String,
    /// Its aggregators.
    pub aggregators: u32,
    /// Most that were in use when a sample was taken; of SwitchML's slots, those that gathered.
    pub in_use_max: u32,
    /// Packets added.
    pub aggregations: u64,
    /// Packets that found no aggregator.
    pub collisions: Option<u64>,
    /// Aggregators freed by parameters, by fragments sent again, and because they were left behind.
    pub freed_by_parameters: Option<u64>,
    /// See above.
    pub freed_by_resend: Option<u64>,
    /// See above.
    pub freed_stale: Option<u64>,
}

/// A background flow.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlowReport {
    /// Sender.
    pub from: String,
    /// Receiver.
    pub to: String,
    /// How many were opened.
    pub flows: usize,
    /// If they have a size, how long those took that ended.
    pub times: Option<Durations>,
    /// Bytes that arrived.
    pub delivered_bytes: u64,
    /// Segments sent again.
    pub retransmissions: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Arrived, by interval, in Gbit/s.
    pub delivered_gbps: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_occurred() {
        let of = |times: std::ops::RangeInclusive<u64>| {
            Durations::of(times.rev().map(Time::from_micros).collect(), 0)
        };
        let thousand = of(1..=1000);
        let micros = |seconds: f64| (seconds * 1e6).round() as u64;
        let all = |times: Durations| [times.p95_s, times.p99_s, times.p999_s, times.max_s].map(micros);
        assert_eq!(all(thousand), [950, 990, 999, 1000]);
        assert!((thousand.mean_s - 500.5e-6).abs() < 1e-12);
        assert_eq!(all(of(1..=10)), [10; 4]);
        assert_eq!(all(of(7..=7)), [7; 4]);
        assert_eq!(Durations::of(Vec::new(), 2), Durations { unfinished: 2, ..Durations::default() });
    }
}
