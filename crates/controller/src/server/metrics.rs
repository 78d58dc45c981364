//! What Prometheus reads. Nothing is counted here: the machines count, and are asked at each scrape.

use std::fmt::Error;
use std::sync::Arc;

use fanin_protocol::Reason;
use fanin_protocol::control::JobState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::jobs::Jobs;

/// The content type of [`text`].
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics as text.
pub(super) fn text(jobs: &Arc<Jobs>) -> Result<String, Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(Arc::clone(jobs))));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Scrape(Arc<Jobs>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let jobs = &self.0;
        let snapshot = jobs.snapshot();
        let count = |is: fn(&JobState) -> bool| snapshot.iter().filter(|job| is(&job.state)).count() as u64;
        let states = [
            ("gathering", count(|state| matches!(state, JobState::Gathering { .. }))),
            ("running", count(|state| matches!(state, JobState::Running { .. }))),
            ("aborted", count(|state| matches!(state, JobState::Aborted { .. }))),
        ];
        gauges(&mut encoder, "fanin_jobs", "Jobs by state", "state", &states)?;

        let pool = jobs.pool();
        let slots = [("free", pool.free.into()), ("in_use", (pool.slots - pool.free).into())];
        gauges(&mut encoder, "fanin_slots", "Slots of 256 elements in each shard", "state", &slots)?;
        counters(&mut encoder, "fanin_refusals", "Refused joins", "reason", &jobs.refusals())?;

        let packets = jobs.driver.statistics();
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

        let io = jobs.driver.io_statistics();
        let received = [("trains", io.trains_received), ("packets", io.packets_received)];
        counters(&mut encoder, "fanin_received", "Units that the sockets received", "unit", &received)?;
        let sent = [("trains", io.trains_sent), ("packets", io.packets_sent)];
        counters(&mut encoder, "fanin_sent", "Units that the sockets sent", "unit", &sent)
    }
}

fn gauges(
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

fn counters(
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

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> Result<(), Error> {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
}
