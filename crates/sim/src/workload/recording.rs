//! A run over time, for `fanin sim --report`: each link's load, queue, marks and drops, and each
//! job's tensors.
//!
//! The observer that takes it is no part of the run: a run is the same with it and without. A
//! recording's memory is bounded, so long runs have longer intervals, and of many tensors the first
//! are kept.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;

use super::build::Layout;
use super::growth::Growth;
use super::spans::JobSpans;
use crate::net::{Network, NodeId, NodeKind, Passed, PortId, Time};

/// The first intervals; later ones are longer.
const INTERVAL: Duration = Duration::from_micros(1);
/// Intervals at most, and intervals times directions of links.
const INTERVALS_MAX: usize = 400;
const NUMBERS_MAX: usize = 1 << 20;
/// Quantiles of a distribution.
const QUANTILES: usize = 257;

/// See the module.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recording {
    /// Ends of the intervals, in seconds. Each series has a value for each interval.
    pub ends: Vec<f64>,
    /// In the topology's order, whose indices name them.
    pub nodes: Vec<RecordedNode>,
    /// Both directions of each link, one after the other.
    pub directions: Vec<Direction>,
    /// In the scenario's order.
    pub jobs: Vec<RecordedJob>,
    /// In the scenario's order.
    pub parameter_servers: Vec<Places>,
    /// How long tensors and flows took.
    pub times: Vec<Distribution>,
}

/// A host or a switch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordedNode {
    /// Its name.
    pub name: String,
    /// None for hosts; 0 for switches next to hosts.
    pub layer: Option<u8>,
    /// Whether machines that sum may live on it.
    pub programmable: bool,
    /// Whether one does.
    pub sums: bool,
}

/// A direction of a link. A series is none where all its values are 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Direction {
    /// The node that sends, and the one that receives.
    pub from: u32,
    /// See above.
    pub to: u32,
    /// Bits a second.
    pub rate: u64,
    /// Seconds.
    pub delay: f64,
    /// By interval: the part in which it was busy, in thousandths.
    pub busy: Option<Vec<u64>>,
    /// Bytes that waited to be sent into it, in the mean over the interval.
    pub queued: Option<Vec<u64>>,
    /// Packets that were marked.
    pub marked: Option<Vec<u64>>,
    /// Packets that did not get through.
    pub dropped: Option<Vec<u64>>,
}

/// The nodes of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Places {
    /// The node of each rank.
    pub workers: Vec<u32>,
    /// The nodes of its servers, or summation services.
    pub servers: Vec<u32>,
}

/// A job over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordedJob {
    /// Its nodes.
    #[serde(flatten)]
    pub places: Places,
    /// Tensors of an iteration; 1 where each is a step of its own.
    pub tensors_per_step: u64,
    /// Whether its workers wait for nobody.
    pub asynchronous: bool,
    /// Its tensors.
    #[serde(flatten)]
    pub spans: JobSpans,
}

/// How long things of one kind took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// Which.
    pub of: String,
    /// How many ended.
    pub count: usize,
    /// How many had begun and not ended.
    pub unfinished: usize,
    /// Evenly spaced quantiles in seconds, from the shortest to the longest; all times, if there
    /// are no more than 257.
    pub quantiles: Vec<f64>,
}

impl Distribution {
    pub(crate) fn of(of: String, mut times: Vec<Time>, unfinished: usize) -> Self {
        times.sort_unstable();
        let points = times.len().min(QUANTILES);
        // The nearest that occurred: the first and the last are the shortest and the longest.
        let at = |point: usize| times[point * (times.len() - 1) / (points - 1).max(1)].as_secs_f64();
        Self { of, count: times.len(), unfinished, quantiles: (0..points).map(at).collect() }
    }
}

/// The ports of a network while it lives: busy picoseconds, queued byte nanoseconds, marks, drops.
pub(crate) struct Recorder(Growth<4>);

impl Recorder {
    /// Looks on from now on.
    pub(crate) fn start(network: &mut Network) -> Rc<RefCell<Self>> {
        let kept_max = NUMBERS_MAX.min(INTERVALS_MAX * network.topology().ports().count().max(1));
        let recorder = Rc::new(RefCell::new(Self(Growth::new(network, kept_max, read))));
        let observer = recorder.clone();
        network.observe(INTERVAL, move |network| {
            let growth = &mut observer.borrow_mut().0;
            growth.end_interval(network);
            network.time() + Time::from(INTERVAL.saturating_mul(growth.each()))
        });
        recorder
    }

    /// The run is over.
    pub(crate) fn end(&mut self, network: &Network, layout: &Layout, times: Vec<Distribution>) -> Recording {
        self.0.end_interval(network);
        let scenario = &layout.scenario;
        let ended = network.time().instant();
        let ids = |nodes: &[NodeId]| nodes.iter().map(|node| node.0).collect();
        Recording {
            ends: self.0.ends().iter().map(|end| end.as_secs_f64()).collect(),
            nodes: nodes(network, layout),
            directions: self.directions(network),
            jobs: layout
                .jobs
                .iter()
                .map(|place| {
                    let job = place.job.borrow();
                    let system = &job.plan.system;
                    let (services, _) = system.services();
                    let server = system.server().filter(|server| !services.contains(server));
                    let servers = [services, server.as_slice()].concat();
                    RecordedJob {
                        places: Places { workers: ids(&job.plan.workers), servers: ids(&servers) },
                        tensors_per_step: job.tensors_per_step(),
                        asynchronous: system.is_asynchronous(),
                        spans: job.spans.as_ref().map(|spans| spans.report(ended)).unwrap_or_default(),
                    }
                })
                .collect(),
            parameter_servers: scenario
                .parameter_servers
                .iter()
                .map(|plan| Places { workers: ids(&plan.workers), servers: ids(&plan.servers) })
                .collect(),
            times,
        }
    }

    fn directions(&self, network: &Network) -> Vec<Direction> {
        let topology = network.topology();
        let lengths = self.0.lengths();
        let series = |grown: &[[u64; 4]], of: &dyn Fn(&[u64; 4], Time) -> u64| {
            let values: Vec<u64> =
                grown.iter().zip(&lengths).map(|(grown, length)| of(grown, *length)).collect();
            values.iter().any(|value| *value != 0).then_some(values)
        };
        // Rounded; a little is not nothing.
        let share = |part: u64, times: u128, of: Time| {
            let of = u128::from(of.0.max(1));
            let rounded = (u128::from(part) * times + of / 2) / of;
            rounded.max(u128::from(part > 0)) as u64
        };
        let directions = topology.ports().zip(self.0.of_ports()).map(|(port, grown)| {
            let [from, to] = topology.ends(port);
            let config = topology.links()[port.link().0 as usize].config;
            Direction {
                from: from.0,
                to: to.0,
                rate: config.rate_bps,
                delay: config.delay.as_secs_f64(),
                busy: series(grown, &|[busy, ..], length| share(*busy, 1000, length).min(1000)),
                queued: series(grown, &|[_, queued, ..], length| share(*queued, 1000, length)),
                marked: series(grown, &|[_, _, marked, _], _| *marked),
                dropped: series(grown, &|[.., dropped], _| *dropped),
            }
        });
        directions.collect()
    }
}

fn read(network: &Network, port: PortId) -> [u64; 4] {
    let Passed { busy, queued_byte_ns, marked, dropped } = network.passed(port);
    [busy.0, queued_byte_ns as u64, marked, dropped]
}

fn nodes(network: &Network, layout: &Layout) -> Vec<RecordedNode> {
    let mut sums = vec![false; network.topology().nodes().len()];
    for place in &layout.stations {
        sums[place.node.0 as usize] = true;
    }
    let nodes = network.topology().nodes().iter().zip(sums);
    nodes
        .map(|(node, sums)| {
            let (layer, programmable) = match node.kind {
                NodeKind::Host => (None, false),
                NodeKind::Switch { layer, programmable } => (Some(layer), programmable),
            };
            RecordedNode { name: node.name.clone(), layer, programmable, sums }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, run};

    const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 4\nqueue = \"20kB\"\n\
        [[job]]\nsystem = \"switchml\"\nworkers = [\"h0\", \"h1\"]\ntensor = \"400kB\"\ntensors = 3\n\
        [[background]]\nfrom = \"h2\"\nto = \"h1\"\nkind = \"tcp\"\nsize = \"1MB\"\ncount = 2\nevery = \"10us\"\n";

    fn played(text: &str, record: bool) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
        run(&scenario, Options { seed: 1, record, ..Options::default() })
            .unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn a_run_is_the_same_with_a_recording_and_without() {
        let (mut with, without) = (played(RACK, true), played(RACK, false));
        assert!(with.recording.take().is_some());
        assert_eq!(with, without);
    }

    #[test]
    fn what_is_recorded_of_links_is_what_the_report_has() {
        let report = played(RACK, true);
        let recording = report.recording.as_ref().expect("it was asked for");
        assert!((100..=INTERVALS_MAX).contains(&recording.ends.len()), "{}", recording.ends.len());
        assert_eq!(recording.ends.last(), Some(&report.ended_s));
        let name = |node: u32| recording.nodes[node as usize].name.as_str();
        assert_eq!(recording.directions.len(), 8);
        let sum = |series: &Option<Vec<u64>>| series.iter().flatten().sum::<u64>();
        let mut dropped = 0;
        for link in &report.links {
            let found = recording.directions.iter().find(|direction| {
                (name(direction.from), name(direction.to)) == (link.from.as_str(), link.to.as_str())
            });
            let direction = found.expect("a link of the report");
            assert_eq!((sum(&direction.dropped), sum(&direction.marked)), (link.dropped, link.marked));
            dropped += link.dropped;
            let begins = [0.0].into_iter().chain(recording.ends.iter().copied());
            let lengths = recording.ends.iter().zip(begins).map(|(end, begin)| end - begin);
            let busy = direction.busy.as_ref().expect("it carried packets");
            let mean = busy.iter().zip(lengths).map(|(share, length)| *share as f64 * length).sum::<f64>();
            let mean = mean / 1000.0 / report.ended_s;
            assert!((mean - link.load).abs() < 2e-3, "{mean} and {}", link.load);
            let longest = direction.queued.iter().flatten().max().copied().unwrap_or(0);
            assert!(
                longest <= link.queue_max_bytes,
                "{longest} in the mean, {} at most",
                link.queue_max_bytes
            );
        }
        assert!(dropped > 0, "the scene has no drops");
        let queue = recording.directions.iter().find(|one| (name(one.from), name(one.to)) == ("s0", "h1"));
        let longest = queue.and_then(|one| one.queued.as_ref()?.iter().max().copied());
        assert!(longest > Some(5_000), "{longest:?}");
    }

    #[test]
    fn tensors_and_times_are_those_of_the_report() {
        let report = played(&RACK.replace("20kB", "1MB").replace("\"1MB\"\ncount", "\"20kB\"\ncount"), true);
        let recording = report.recording.as_ref().expect("it was asked for");
        let job = &recording.jobs[0];
        assert_eq!((job.places.workers.len(), job.places.servers.len(), job.tensors_per_step), (2, 0, 1));
        assert_eq!((job.spans.tensors.len(), job.spans.spans.len()), (3, 6));
        let longest = job.spans.spans.iter().map(|(.., from, to)| to - from).fold(0.0, f64::max);
        assert!((longest - report.jobs[0].tensor_times.max_s).abs() < 2e-9);
        let [tensors, flows] = recording.times.as_slice() else { panic!("{:?}", recording.times) };
        assert_eq!((tensors.count, flows.count), (6, 2));
        assert!((tensors.quantiles[5] - longest).abs() < 2e-9, "{tensors:?}");
        let sums: Vec<&str> =
            recording.nodes.iter().filter(|node| node.sums).map(|node| node.name.as_str()).collect();
        assert_eq!(sums, ["s0"]);
    }

    #[test]
    fn a_training_computes_and_each_of_its_steps_has_all_tensors() {
        let text = "[network]\ntopology = \"rack\"\nhosts = 2\n[[job]]\nsystem = \"switchml\"\nworkers = 2\n\
            model = \"resnet50\"\nscale = 200\niterations = 2\n";
        let report = played(text, true);
        let job = &report.recording.as_ref().expect("it was asked for").jobs[0];
        assert!(job.tensors_per_step > 1);
        assert_eq!(job.spans.tensors.len() as u64, 2 * job.tensors_per_step);
        let first = job.spans.tensors[0].1;
        let computed = job.spans.computing.iter().find(|(rank, ..)| *rank == 0).expect("it computes");
        assert!(computed.1 == 0.0 && computed.2 >= first, "{computed:?} {first}");
    }

    #[test]
    fn quantiles_begin_with_the_shortest_and_end_with_the_longest() {
        let of =
            |count| Distribution::of(String::new(), (1..=count).rev().map(Time::from_micros).collect(), 0);
        for count in [1, 2, 256, 257, 258, 10_000] {
            let found = of(count).quantiles;
            assert_eq!(found.len() as u64, count.min(257));
            assert!((found[0] - 1e-6).abs() < 1e-12);
            assert!((found[found.len() - 1] - count as f64 * 1e-6).abs() < 1e-12);
            assert!(found.is_sorted());
        }
        assert_eq!(of(0).quantiles, [0.0; 0]);
    }
}
