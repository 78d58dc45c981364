//! What Prometheus reads of an ATP switch. Nothing is counted here: the machine counts, and is asked at each scrape.

use std::fmt::Error;
use std::sync::Arc;

use fanin_protocol::atp::AtpSwitchStatistics;
use fanin_protocol::{JobProgress, Reason};
use fanin_udp::{AtpSwitchDriver, IoStatistics};
use fanin_wire::JobId;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::metrics::{JOB, collected, counter, counters, gauges, of_io};

/// How the data path fares, at one time.
#[derive(Debug)]
pub(super) struct Figures {
    /// Nothing when its thread has ended.
    pub switch: AtpSwitchStatistics,
    pub io: IoStatistics,
    /// By id, each with its name.
    pub jobs: Vec<(JobId, String, JobProgress)>,
}

impl Figures {
    pub fn of(driver: &AtpSwitchDriver, names: Vec<(JobId, String)>) -> Self {
        let progress = |(job, name)| Some((job, name, driver.job_progress(job)?));
        let mut switches = driver.ask_all(|machine, _| machine.statistics());
        Self {
            switch: switches.pop().flatten().unwrap_or_default(),
            io: driver.io_statistics(),
            jobs: names.into_iter().filter_map(progress).collect(),
        }
    }
}

/// All metrics as text; there are no figures when the switch shuts down.
pub(super) fn text(aggregators: u32, figures: Option<Arc<Figures>>) -> Result<String, Error> {
    collected(Scrape { aggregators, figures: figures.ok_or(Error)? })
}

#[derive(Debug)]
struct Scrape {
    aggregators: u32,
    figures: Arc<Figures>,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let packets = &self.figures.switch;
        let free = self.aggregators.saturating_sub(packets.in_use);
        let aggregators = [("free", free.into()), ("in_use", packets.in_use.into())];
        gauges(&mut encoder, "fanin_aggregators", "Aggregators of the ATP switch", "state", &aggregators)?;
        let verdicts = [
            ("absorb", packets.received.absorb),
            ("forward", packets.received.forward),
            ("multicast", packets.received.multicast),
            ("drop", packets.received.dropped.iter().sum()),
        ];
        counters(&mut encoder, "fanin_packets", "Packets received, by verdict", "verdict", &verdicts)?;
        let dropped: Vec<_> =
            Reason::ALL.iter().map(|reason| reason.name()).zip(packets.received.dropped).collect();
        counters(&mut encoder, "fanin_packets_dropped", "Packets without effect", "reason", &dropped)?;
        let freed = [
            ("parameters", packets.freed_by_parameters),
            ("resend", packets.freed_by_resend),
            ("stale", packets.freed_stale),
        ];
        counters(&mut encoder, "fanin_aggregators_freed", "Aggregators freed, by cause", "cause", &freed)?;
        let help = "Aggregators that became complete, and whose sum went on";
        counter(&mut encoder, "fanin_aggregators_completed", help, packets.completed)?;
        of_io(&mut encoder, &self.figures.io)?;
        of_jobs(&mut encoder, &self.figures)
    }
}

fn of_jobs(encoder: &mut DescriptorEncoder<'_>, figures: &Figures) -> Result<(), Error> {
    let mut counter = |name, help, value: fn(&JobProgress) -> u64| {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (_, job, progress) in &figures.jobs {
            let labels = [(JOB, job.as_str())];
            let mut metric = family.encode_family(&labels)?;
            metric.encode_counter::<NoLabelSet, u64, f64>(&value(progress), None)?;
        }
        Ok::<_, Error>(())
    };
    counter("fanin_job_aggregations", "Packets of the job that were added here (ATP)", |progress| {
        progress.aggregations
    })?;
    counter("fanin_job_collisions", "Fragments of the job that found an aggregator taken (ATP)", |progress| {
        progress.collisions
    })
}
