//! What Prometheus reads. Nothing is counted here: the machines count, and are asked at each
//! scrape.

use std::fmt::Error;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::control::{JobState, Ranks};
use fanin_protocol::{JobProgress, Reason};
use fanin_udp::IoStatistics;
use fanin_wire::Rank;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::jobs::{JobSnapshot, Jobs};
use super::reports::JobReport;
use crate::page::Named;
use fanin_udp::Figures;

/// The content type of [`text`].
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics as text.
pub(super) async fn text(jobs: Arc<Jobs>, named: Named) -> Result<String, Error> {
    let figures = jobs.figures().await.ok_or(Error)?;
    collected(Scrape { jobs, figures }, named)
}

/// A collector's figures and the page's, as text.
pub(super) fn collected(collector: impl Collector, named: Named) -> Result<String, Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    registry.register_collector(Box::new(OfPage(named)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Events and words, by the names that they have on the page and in logs.
#[derive(Debug)]
struct OfPage(Named);

impl Collector for OfPage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let Named { events, words } = &self.0;
        counters(&mut encoder, "fanin_events", "Events, as the page names them", "event", events)?;
        gauges(&mut encoder, "fanin_words", "Words of the page that hold now", "word", words)
    }
}

#[derive(Debug)]
struct Scrape {
    jobs: Arc<Jobs>,
    figures: Arc<Figures>,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let Self { jobs, figures } = self;
        let snapshot = jobs.snapshot();
        let count = |is: fn(&JobState) -> bool| snapshot.iter().filter(|job| is(&job.state)).count() as u64;
        let states = [
            ("gathering", count(|state| matches!(state, JobState::Gathering { .. }))),
            ("running", count(|state| matches!(state, JobState::Running { .. }))),
            ("aborted", count(|state| matches!(state, JobState::Aborted { .. }))),
        ];
        gauges(&mut encoder, "fanin_jobs", "Jobs by state", "state", &states)?;

        let pool = jobs.pool();
        let pool = [("free", pool.free.into()), ("in_use", (pool.units - pool.free).into())];
        gauges(&mut encoder, "fanin_pool_units", "Units of 256 elements in each shard", "state", &pool)?;
        counters(&mut encoder, "fanin_refusals", "Refused joins", "reason", &jobs.refusals())?;
        let denied = "Calls in a rank's name without its secret";
        counter(&mut encoder, "fanin_denied", denied, jobs.denied())?;

        let packets = figures.received;
        let verdicts = [
            ("absorb", packets.absorb),
            ("multicast", packets.multicast),
            ("reply_unicast", packets.reply_unicast),
            ("drop", packets.dropped.iter().sum()),
        ];
        counters(&mut encoder, "fanin_packets", "Packets received, by verdict", "verdict", &verdicts)?;
        let dropped: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).zip(packets.dropped).collect();
        counters(&mut encoder, "fanin_packets_dropped", "Packets without effect", "reason", &dropped)?;
        counter(
            &mut encoder,
            "fanin_results",
            "Slots whose sum was completed and sent to all workers",
            packets.multicast,
        )?;
        // A contribution that came again either finds the result, or finds itself counted.
        let again = packets.reply_unicast + packets.dropped[Reason::Duplicate as usize];
        counter(&mut encoder, "fanin_retransmissions", "Contributions that came again", again)?;

        of_io(&mut encoder, &figures.io)?;
        let running: Vec<_> = snapshot.iter().filter_map(|job| RunningJob::of(jobs, figures, job)).collect();
        of_jobs(&mut encoder, &running)?;
        of_plans(&mut encoder, &running)?;
        of_ranks(&mut encoder, &running)
    }
}

/// A running job, as the data path and its ranks see it. There are no series of any other, nor of a
/// rank that left.
struct RunningJob<'a> {
    name: &'a str,
    /// Slots, or ATP's window, over all shards.
    in_flight: u64,
    ranks: Vec<Rank>,
    progress: JobProgress,
    reported: Arc<JobReport>,
}

impl<'a> RunningJob<'a> {
    fn of(jobs: &Jobs, figures: &Figures, job: &'a JobSnapshot) -> Option<Self> {
        let JobState::Running { job: id, in_flight, shards, ref left, .. } = job.state else { return None };
        Some(Self {
            name: &job.name,
            in_flight: u64::from(in_flight) * u64::from(shards),
            ranks: Ranks::all(job.world_size).without(left).iter().collect(),
            // It may have ended since.
            progress: figures.jobs.get(&id)?.clone(),
            reported: jobs.reported(id),
        })
    }
}

/// `job` and `instance` are what Prometheus itself calls the things that it asks.
pub(super) const JOB: &str = "job_name";

fn of_jobs(encoder: &mut DescriptorEncoder<'_>, jobs: &[RunningJob<'_>]) -> Result<(), Error> {
    let name = "fanin_job_in_flight";
    let help = "Packets that a rank of the job may have in flight, over all shards: slots, or a window";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for job in jobs {
        family.encode_family(&[(JOB, job.name)])?.encode_gauge(&job.in_flight)?;
    }
    let mut counter = |name, help, value: fn(&JobProgress) -> u64| {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for job in jobs {
            let labels = [(JOB, job.name)];
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, u64, f64>(&value(&job.progress), None)?;
        }
        Ok(())
    };
    counter("fanin_job_results", "Sums completed of the job", |progress| progress.completed)?;
    counter("fanin_job_retransmissions", "Contributions to the job that came again", |progress| {
        progress.retransmitted
    })?;
    let help = "Contributions that are not in the job's sums, which has a loss bound (DLCP)";
    counter("fanin_job_lost", help, |progress| progress.lost)?;
    counter(
        "fanin_job_aggregations",
        "Packets of the job that were added here (ATP and GOAT)",
        |progress| progress.aggregations,
    )?;
    counter(
        "fanin_job_collisions",
        "Fragments of the job that found no aggregator free (ATP and GOAT)",
        |progress| progress.collisions,
    )
}

/// What the ranks of jobs tell of their plans.
fn of_plans(encoder: &mut DescriptorEncoder<'_>, jobs: &[RunningJob<'_>]) -> Result<(), Error> {
    let (name, unit) = ("fanin_job_byte", Unit::Seconds);
    let help = "To sum a byte of a large tensor as it travels: what its plan says, and what its ranks measured of late";
    let mut family = encoder.encode_descriptor(name, help, Some(&unit), MetricType::Gauge)?;
    for RunningJob { name, reported, .. } in jobs {
        let predicted = reported.split.as_ref().and_then(|split| split.seconds_per_byte);
        for (of, seconds) in [("predicted", predicted), ("measured", reported.seconds_per_byte())] {
            let Some(seconds) = seconds else { continue };
            family.encode_family(&[(JOB, *name), ("of", of)])?.encode_gauge(&seconds)?;
        }
    }
    let name = "fanin_job_imbalance";
    let help = "By how much a service misses its share of the job, as a fraction of all packets, at most";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for RunningJob { name, reported, .. } in jobs {
        family.encode_family(&[(JOB, *name)])?.encode_gauge(&reported.imbalance())?;
    }
    Ok(())
}

fn of_ranks(encoder: &mut DescriptorEncoder<'_>, jobs: &[RunningJob<'_>]) -> Result<(), Error> {
    let mut of_ranks = |name, help, unit: Option<Unit>, kind, value: Value| {
        let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for job in jobs {
            for rank in &job.ranks {
                let Some(value) = value(job, *rank) else { continue };
                let label = rank.0.to_string();
                let labels = [(JOB, job.name), ("rank", label.as_str())];
                let mut metric = family.encode_family(&labels)?;
                match kind {
                    MetricType::Counter => metric.encode_counter::<NoLabelSet, f64, f64>(&value, None)?,
                    _ => metric.encode_gauge(&value)?,
                }
            }
        }
        Ok::<_, Error>(())
    };
    of_ranks(
        "fanin_waiting",
        "Slots, or ATP's fragments, that wait for the rank now",
        None,
        MetricType::Gauge,
        |job, rank| job.progress.waiting_for.get(usize::from(rank.0)).copied().map(f64::from),
    )?;
    of_ranks(
        "fanin_round_trip",
        "From a packet of the rank to its result, smoothed, as the rank last told",
        Some(Unit::Seconds),
        MetricType::Gauge,
        |job, rank| job.reported.members.get(&rank)?.measured.round_trip.map(|trip| trip.as_secs_f64()),
    )?;
    of_ranks(
        "fanin_lateness",
        "How much later than the first one the rank's contributions came, summed over all contributions",
        Some(Unit::Seconds),
        MetricType::Counter,
        |job, rank| job.progress.lateness.get(usize::from(rank.0)).map(Duration::as_secs_f64),
    )
}

type Value = fn(&RunningJob<'_>, Rank) -> Option<f64>;

/// Of a data path's sockets.
pub(super) fn of_io(encoder: &mut DescriptorEncoder<'_>, io: &IoStatistics) -> Result<(), Error> {
    let received = [("trains", io.trains_received), ("packets", io.packets_received)];
    counters(encoder, "fanin_received", "Units that the sockets received", "unit", &received)?;
    let sent = [("trains", io.trains_sent), ("packets", io.packets_sent)];
    counters(encoder, "fanin_sent", "Units that the sockets sent", "unit", &sent)
}

pub(super) fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: &[(&'static str, u64)],
) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (of, value) in values {
        family.encode_family(&[(label, *of)])?.encode_gauge(value)?;
    }
    Ok(())
}

pub(super) fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    label: &'static str,
    values: &[(&'static str, u64)],
) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (of, value) in values {
        family.encode_family(&[(label, *of)])?.encode_counter::<NoLabelSet, u64, f64>(value, None)?;
    }
    Ok(())
}

pub(super) fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), Error> {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
}
