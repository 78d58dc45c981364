//! What Prometheus reads of a switch with an upstream. Nothing is counted here: the machine counts, and is asked at each scrape.

use std::fmt::Error;
use std::sync::Arc;

use fanin_protocol::atp::AtpSwitchStatistics;
use fanin_protocol::{JobProgress, Reason};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::metrics::{JOB, collected, counter, counters, gauges, of_io};
use super::on_the_way::Figures;
use super::relay::RackMemory;

/// All metrics as text; there are no figures when the switch shuts down.
pub(super) fn text(memory: RackMemory, figures: Option<Arc<Figures>>) -> Result<String, Error> {
    collected(Scrape { memory, figures: figures.ok_or(Error)? })
}

#[derive(Debug)]
struct Scrape {
    memory: RackMemory,
    figures: Arc<Figures>,
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let received = &self.figures.received;
        if let (Some(all), Some(switch)) = (self.memory.aggregators(), &self.figures.aggregators) {
            of_aggregators(&mut encoder, all, switch)?;
        }
        let mut verdicts = vec![
            ("absorb", received.absorb),
            ("forward", received.forward),
            ("multicast", received.multicast),
            ("drop", received.dropped.iter().sum()),
        ];
        if let RackMemory::Slots { .. } = self.memory {
            verdicts.push(("reply_unicast", received.reply_unicast));
        }
        counters(&mut encoder, "fanin_packets", "Packets received, by verdict", "verdict", &verdicts)?;
        let dropped: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).zip(received.dropped).collect();
        counters(&mut encoder, "fanin_packets_dropped", "Packets without effect", "reason", &dropped)?;
        of_io(&mut encoder, &self.figures.io)?;
        match self.memory {
            RackMemory::Aggregators(_) | RackMemory::Planned(_) => of_atp_jobs(&mut encoder, &self.figures),
            RackMemory::Slots { .. } => of_rack_jobs(&mut encoder, &self.figures),
        }
    }
}

fn of_aggregators(
    encoder: &mut DescriptorEncoder<'_>,
    all: u32,
    switch: &AtpSwitchStatistics,
) -> Result<(), Error> {
    let aggregators = [("free", all.saturating_sub(switch.in_use).into()), ("in_use", switch.in_use.into())];
    gauges(encoder, "fanin_aggregators", "Aggregators of the switch of ATP or GOAT", "state", &aggregators)?;
    let freed = [
        ("parameters", switch.freed_by_parameters),
        ("resend", switch.freed_by_resend),
        ("stale", switch.freed_stale),
    ];
    counters(encoder, "fanin_aggregators_freed", "Aggregators freed, by cause", "cause", &freed)?;
    let help = "Aggregators that became complete, and whose sum went on";
    counter(encoder, "fanin_aggregators_completed", help, switch.completed)
}

fn of_atp_jobs(encoder: &mut DescriptorEncoder<'_>, figures: &Figures) -> Result<(), Error> {
    let help = "Packets of the job that were added here (ATP and GOAT)";
    of_jobs(encoder, figures, ("fanin_job_aggregations", help), |progress| progress.aggregations)?;
    let help = "Fragments of the job that found no aggregator free (ATP and GOAT)";
    of_jobs(encoder, figures, ("fanin_job_collisions", help), |progress| progress.collisions)
}

fn of_rack_jobs(encoder: &mut DescriptorEncoder<'_>, figures: &Figures) -> Result<(), Error> {
    let help = "Sums completed of the job";
    of_jobs(encoder, figures, ("fanin_job_results", help), |progress| progress.completed)?;
    let help = "Contributions to the job that came again";
    of_jobs(encoder, figures, ("fanin_job_retransmissions", help), |progress| progress.retransmitted)
}

fn of_jobs(
    encoder: &mut DescriptorEncoder<'_>,
    figures: &Figures,
    (name, help): (&str, &str),
    value: fn(&JobProgress) -> u64,
) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (_, job, progress) in &figures.jobs {
        let labels = [(JOB, job.as_str())];
        let mut metric = family.encode_family(&labels)?;
        metric.encode_counter::<NoLabelSet, u64, f64>(&value(progress), None)?;
    }
    Ok(())
}
