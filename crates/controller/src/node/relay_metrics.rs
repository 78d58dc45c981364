//! What Prometheus reads of a switch with an upstream. Nothing is counted here: the machine counts,
//! and is asked at each scrape.

use std::fmt::Error;
use std::sync::Arc;

use fanin_protocol::{JobProgress, Reason, TableStatistics};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::metrics::{JOB, collected, counter, counters, gauges, of_io};
use super::relay::RelayFigures;
use crate::page::Named;

/// All metrics as text; there are no figures when the switch shuts down.
pub(super) fn text(figures: Option<Arc<RelayFigures>>, named: Named) -> Result<String, Error> {
    collected(Scrape(figures.ok_or(Error)?), named)
}

#[derive(Debug)]
struct Scrape(Arc<RelayFigures>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let RelayFigures { figures, .. } = &*self.0;
        let received = &figures.received;
        if let Some(table) = &figures.table {
            of_aggregators(&mut encoder, table)?;
        }
        let verdicts = vec![
            ("absorb", received.absorb),
            ("forward", received.forward),
            ("multicast", received.multicast),
            ("reply_unicast", received.reply_unicast),
            ("drop", received.dropped.iter().sum()),
        ];
        counters(&mut encoder, "fanin_packets", "Packets received, by verdict", "verdict", &verdicts)?;
        let dropped: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).zip(received.dropped).collect();
        counters(&mut encoder, "fanin_packets_dropped", "Packets without effect", "reason", &dropped)?;
        of_io(&mut encoder, &figures.io)?;
        let mut of_jobs = |name, help, value| of_jobs(&mut encoder, &self.0, (name, help), value);
        of_jobs("fanin_job_results", "Sums completed of the job", |progress| progress.completed)?;
        let help = "Contributions to the job that came again";
        of_jobs("fanin_job_retransmissions", help, |progress| progress.retransmitted)?;
        let help = "Packets of the job that were added here in aggregators";
        of_jobs("fanin_job_aggregations", help, |progress| progress.aggregations)?;
        let help = "Fragments of the job that found no aggregator free";
        of_jobs("fanin_job_collisions", help, |progress| progress.collisions)
    }
}

fn of_aggregators(encoder: &mut DescriptorEncoder<'_>, table: &TableStatistics) -> Result<(), Error> {
    let free = table.aggregators.saturating_sub(table.in_use);
    let aggregators = [("free", free.into()), ("in_use", table.in_use.into())];
    gauges(encoder, "fanin_aggregators", "Aggregators of the switch", "state", &aggregators)?;
    let freed = [
        ("parameters", table.freed_by_parameters),
        ("resend", table.freed_by_resend),
        ("stale", table.freed_stale),
    ];
    counters(encoder, "fanin_aggregators_freed", "Aggregators freed, by cause", "cause", &freed)?;
    let help = "Aggregators that became complete, and whose sum went on";
    counter(encoder, "fanin_aggregators_completed", help, table.completed)
}

fn of_jobs(
    encoder: &mut DescriptorEncoder<'_>,
    relay: &RelayFigures,
    (name, help): (&str, &str),
    value: fn(&JobProgress) -> u64,
) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (job, name) in &relay.names {
        let Some(progress) = relay.figures.jobs.get(job) else { continue };
        let labels = [(JOB, name.as_str())];
        let mut metric = family.encode_family(&labels)?;
        metric.encode_counter::<NoLabelSet, u64, f64>(&value(progress), None)?;
    }
    Ok(())
}
