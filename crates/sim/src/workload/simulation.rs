//! A scenario from its beginning to its end: the network is built, lives, is watched, and told
//! about.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::Instant;

use super::background::Flows;
use super::build::{JobPlace, Layout};
use super::checker::Violation;
use super::faults;
use super::job::{Job, Measures, WorkerState};
use super::loads::Loads;
use super::parameter_server::ParameterServers;
use super::recording::{Distribution, Recorder};
use super::report::{
    Count, Durations, FlowReport, JobReport, JobSeries, Measurement, Report, ServerReport, SwitchReport,
    TrainingReport,
};
use super::scenario::{LossPlan, Scenario, TCP_KINDS, Target, Which, Workload};
use super::spans::Spans;
use super::values::{Given, Numbers};
use crate::net::{
    Body, DropReason, Impairment, Loss, Network, NetworkConfig, NodeId, Outcome, Packet, PortId, Ports, Time,
    TopologyError,
};
use crate::systems::{Role, System};

/// Events between two reports of progress.
const PROGRESS_EVENTS: u64 = 1 << 18;

/// The options of a run besides its scenario.
#[derive(Default)]
pub struct Options {
    /// Everything random comes from it.
    pub seed: u64,
    /// Gets every packet, as a pcap file.
    pub pcap: Option<Box<dyn Write>>,
    /// Gets transmissions and queues, as a Chrome trace.
    pub trace: Option<Box<dyn Write>>,
    /// Whether the report is to have a recording.
    pub record: bool,
    /// Looks at the run while it goes on.
    pub progress: Option<Look>,
}

/// A callback that looks at a run while it goes on, now and then.
pub type Look = Box<dyn FnMut(&Glimpse<'_>)>;

/// A run that goes on.
pub struct Glimpse<'a> {
    /// How far it is, and what its links do.
    pub network: &'a Network,
    layout: &'a Layout,
}

/// A job of a run that goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct JobGlimpse {
    /// Its name.
    pub name: String,
    /// Tensors that each worker has, or iterations of training: those of the slowest.
    pub done: u64,
    /// How many it is to have.
    pub of: Option<u64>,
    /// "tensors" or "iterations".
    pub what: &'static str,
    /// Whether it has done all that it had to do.
    pub finished: bool,
}

impl Glimpse<'_> {
    /// The jobs, in the scenario's order.
    pub fn jobs(&self) -> impl Iterator<Item = JobGlimpse> {
        self.layout.jobs.iter().map(|place| {
            let job = place.job.borrow();
            let slowest = |of: fn(&Measures) -> u64| {
                job.workers.iter().map(|worker| of(&worker.measures)).min().unwrap_or(0)
            };
            let (done, of, what) = match job.plan.workload {
                Workload::AllReduce { count, .. } => (slowest(|of| of.tensors), count, "tensors"),
                Workload::Training { iterations, .. } => {
                    (slowest(|of| of.iterations), iterations, "iterations")
                }
            };
            JobGlimpse { name: job.plan.name.clone(), done, of, what, finished: job.finished.is_some() }
        })
    }
}

/// Why there is no report.
#[derive(Debug)]
pub enum RunError {
    /// A rule was broken, at this virtual time.
    Violation(Violation, Time),
    /// The network cannot be.
    Topology(TopologyError),
    /// Numbers to be summed are not those of the scenario's job.
    Given(String),
    /// Capture or trace could not be written.
    Output(std::io::Error),
}

impl std::fmt::Display for RunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Violation(violation, at) => write!(f, "a rule was broken at {at}: {violation}"),
            Self::Topology(error) => error.fmt(f),
            Self::Given(why) => write!(f, "these numbers cannot be summed here: {why}"),
            Self::Output(error) => write!(f, "cannot write the capture or the trace: {error}"),
        }
    }
}

impl std::error::Error for RunError {}

/// The samples that are taken while the run goes on.
struct Samples {
    /// When the last was taken.
    taken: Time,
    /// How long the last interval was.
    last_interval: Duration,
    jobs: Vec<JobSamples>,
    /// In the order of the layout's.
    stations: Vec<StationSamples>,
    flows: Vec<Sampled>,
    loads: Loads,
}

impl Samples {
    fn new(network: &Network) -> Self {
        Self {
            taken: Time::ZERO,
            last_interval: Duration::ZERO,
            jobs: Vec::new(),
            stations: Vec::new(),
            flows: Vec::new(),
            loads: Loads::new(network),
        }
    }
}

#[derive(Default)]
struct JobSamples {
    bytes: Sampled,
    switch_aggregations: Sampled,
    server_aggregations: Sampled,
}

#[derive(Default)]
struct StationSamples {
    /// Bytes that came to the node.
    received: Sampled,
    in_use_max: u32,
}

/// A counter, and by how much it grew in each interval.
#[derive(Default)]
struct Sampled {
    last: u64,
    growth: Vec<u64>,
}

impl Sampled {
    /// Growth in `no_time` belongs to the interval before.
    fn sample(&mut self, now: u64, no_time: bool) {
        let growth = now.saturating_sub(self.last);
        match self.growth.last_mut() {
            Some(before) if no_time => *before += growth,
            _ => self.growth.push(growth),
        }
        self.last = now;
    }

    /// Bytes as Gbit/s, by interval; the last one may be shorter.
    fn gbps(&self, interval: Duration, last: Duration, among: usize) -> Vec<f64> {
        let rate = |(index, bytes): (usize, &u64)| {
            let length = if index + 1 == self.growth.len() { last } else { interval };
            let seconds = length.max(Duration::from_nanos(1)).as_secs_f64();
            *bytes as f64 * 8.0 / 1e9 / seconds / among.max(1) as f64
        };
        self.growth.iter().enumerate().map(rate).collect()
    }
}

/// Plays a scenario.
///
/// # Errors
/// The first rule that was broken, or what could not be built or written.
pub fn run(scenario: &Scenario, options: Options) -> Result<Report, RunError> {
    play(scenario, options, None).map(|(report, _)| report)
}

/// Plays a scenario of one job that sums one tensor, whose contributions are given, by rank.
/// Returns the sums that its workers got, all the same bits, and they are checked as drawn ones
/// are.
///
/// # Errors
/// As [`run`]; or why this job cannot sum these numbers.
pub fn sum(
    scenario: &Scenario,
    seed: u64,
    contributions: Vec<Numbers>,
) -> Result<(Numbers, Report), RunError> {
    let [plan] = scenario.jobs.as_slice() else {
        return Err(RunError::Given(format!("the scenario has {} jobs, and not one", scenario.jobs.len())));
    };
    let given = Given::new(plan, contributions).map_err(RunError::Given)?;
    let (report, sums) = play(scenario, Options { seed, ..Options::default() }, Some(given))?;
    match &report.jobs[0].unfinished {
        Some(waits) => Err(RunError::Given(format!("the run ended before they were: {waits}"))),
        None => Ok((sums.expect("numbers were given"), report)),
    }
}

fn play(
    scenario: &Scenario,
    options: Options,
    given: Option<Given>,
) -> Result<(Report, Option<Numbers>), RunError> {
    let scenario = Rc::new(scenario.clone());
    let config = NetworkConfig { seed: options.seed, multipath: scenario.multipath };
    let mut topology = scenario.topology.clone();
    for (index, job) in scenario.jobs.iter().enumerate() {
        job.rates.apply(&mut topology, &job.workers, options.seed ^ (index as u64) << 48);
    }
    let mut network = Network::new(topology, config).map_err(RunError::Topology)?;
    if let Some(out) = options.pcap {
        network.capture(&Ports::All, out);
    }
    if let Some(out) = options.trace {
        network.trace(&Ports::All, out);
    }
    let layout = Rc::new(Layout::build(&scenario, options.seed, &mut network));
    if let Some(mut tell) = options.progress {
        let layout = layout.clone();
        network.on_progress(PROGRESS_EVENTS, move |network| tell(&Glimpse { network, layout: &layout }));
    }
    let recorder = options.record.then(|| {
        for place in &layout.jobs {
            let mut job = place.job.borrow_mut();
            job.spans = Some(Spans::new(job.plan.workers.len(), layout.jobs.len()));
        }
        Recorder::start(&mut network)
    });
    if let Some(given) = given {
        layout.jobs[0].job.borrow_mut().give(given);
    }
    // Those of one name may have unlike packets.
    let kind = |system: &Arc<dyn System>| (system.name(), system.packet_kinds());
    let systems: BTreeMap<_, _> =
        scenario.jobs.iter().map(|job| (kind(&job.system), job.system.clone())).collect();
    let systems: Rc<[_]> = systems.into_values().collect();
    let mut impairments: BTreeMap<PortId, Impairment> = BTreeMap::new();
    for loss in &scenario.losses {
        impairments.insert(loss.port, impairment(loss, &systems));
    }
    for (port, impairment) in impairments {
        network.impair(port, impairment);
    }
    let flows = Flows::schedule(&mut network, &scenario.background, options.seed);
    let servers = ParameterServers::schedule(&mut network, &scenario.parameter_servers, options.seed);
    let outages = Rc::default();
    for plan in &scenario.faults {
        faults::schedule(&mut network, &layout, &outages, *plan);
    }
    let samples = Rc::new(RefCell::new(Samples::new(&network)));
    watch(&mut network, &layout, &flows, &samples);

    if network.run_until(Time::from(scenario.until)) == Outcome::Idle {
        // Nobody has a packet or a timer: whoever waits does so for ever.
        note_stalled(&network, &layout, Job::is_open);
    }
    if let Some(violation) = layout.jobs.iter().find_map(|place| place.machines.check(&network)) {
        layout.referee.note(violation);
    }
    if let Some(violation) = layout.referee.verdict() {
        return Err(RunError::Violation(violation, network.time()));
    }
    sample(&network, &layout, &flows, &mut samples.borrow_mut());
    samples.borrow_mut().loads.sample(&network, true);
    network.finish().map_err(RunError::Output)?;
    let mut report = report(&network, &layout, &flows, &servers, &samples.borrow(), options.seed);
    report.recording = recorder.map(|recorder| {
        let times = distributions(&network, &layout, &flows, &servers);
        recorder.borrow_mut().end(&network, &layout, times)
    });
    let sums = layout.jobs.first().and_then(|place| place.job.borrow().sums());
    Ok((report, sums))
}

/// A system of each kind that the jobs have.
type Systems = Rc<[Arc<dyn System>]>;

fn impairment(plan: &LossPlan, systems: &Systems) -> Impairment {
    let loss = match (&plan.target, plan.burst) {
        (Some(target), _) => targeted(target, systems),
        (None, Some((to_bad, to_good))) => {
            // In a burst everything is lost unless the scenario says how much.
            let loss_bad = if plan.loss > 0.0 { plan.loss } else { 1.0 };
            Loss::GilbertElliott { to_bad, to_good, loss_good: plan.loss_between, loss_bad }
        }
        (None, None) if plan.loss > 0.0 => Loss::Uniform(plan.loss),
        (None, None) => Loss::None,
    };
    Impairment { loss, duplication: plan.duplication, reordering: plan.reordering, held_back: plan.held_back }
}

/// Each direction of a link counts its own packets.
fn targeted(target: &Target, systems: &Systems) -> Loss {
    let (kind, systems) = (target.kind.clone(), systems.clone());
    let is_meant = move |packet: &Packet<'_>| kind.as_ref().is_none_or(|kind| is_of(kind, &systems, packet));
    match &target.which {
        Which::All => Loss::Matching(Box::new(is_meant)),
        Which::Nth(nth) => Loss::Targeted { which: Box::new(is_meant), nth: nth.clone() },
        Which::Every(every) => {
            let (every, mut counted) = (*every, 0u64);
            Loss::Matching(Box::new(move |packet| {
                counted += u64::from(is_meant(packet));
                is_meant(packet) && counted.is_multiple_of(every)
            }))
        }
    }
}

fn is_of(kind: &str, systems: &Systems, packet: &Packet<'_>) -> bool {
    match packet.body {
        Body::Blank { .. } => false,
        Body::Segment(segment) => kind == TCP_KINDS[usize::from(segment.is_ack)],
        Body::Bytes(bytes) => systems.iter().any(|system| system.kind_of(bytes) == Some(kind)),
    }
}

/// Samples every interval; looks for jobs that stalled, and for the end.
fn watch(network: &mut Network, layout: &Rc<Layout>, flows: &Flows, samples: &Rc<RefCell<Samples>>) {
    let scenario = layout.scenario.clone();
    {
        let (layout, flows, samples) = (layout.clone(), flows.clone(), samples.clone());
        network.every(scenario.interval, move |network| {
            sample(network, &layout, &flows, &mut samples.borrow_mut());
            samples.borrow_mut().loads.sample(network, false);
            if layout.referee.verdict().is_some() {
                network.stop();
            }
            true
        });
    }
    let layout = layout.clone();
    network.every((scenario.stall / 8).max(Duration::from_nanos(1)), move |network| {
        let now = network.time().instant();
        if note_stalled(network, &layout, |job| job.stalled(now, layout.scenario.stall)) {
            network.stop();
        }
        true
    });
}

/// Tells the referee of the first job that has stalled; whether there is one.
fn note_stalled(network: &Network, layout: &Layout, has: impl Fn(&Job) -> bool) -> bool {
    let Some(place) = layout.jobs.iter().find(|place| has(&place.job.borrow())) else { return false };
    let job = place.job.borrow();
    let waits = waits(network, place, &job);
    layout.referee.note(Violation::Stalled { job: job.plan.name.clone(), waits });
    true
}

/// The ranks that wait, for which tensor and for whom; where the machines stand.
fn waits(network: &Network, place: &JobPlace, job: &Job) -> String {
    format!("{}{}", job.waits(), place.machines.standing(network))
}

fn sample(network: &Network, layout: &Layout, flows: &Flows, samples: &mut Samples) {
    let length = network.time().instant().since(samples.taken.instant());
    // The run ends where an interval does.
    let no_time = length.is_zero();
    if !no_time {
        (samples.taken, samples.last_interval) = (network.time(), length);
    }
    samples.jobs.resize_with(layout.jobs.len(), JobSamples::default);
    for (place, samples) in layout.jobs.iter().zip(&mut samples.jobs) {
        samples
            .bytes
            .sample(place.job.borrow().workers.iter().map(|worker| worker.measures.bytes).sum(), no_time);
        let counters = place.counters(network);
        samples.switch_aggregations.sample(counters.switch_aggregations.unwrap_or(0), no_time);
        samples.server_aggregations.sample(counters.server_aggregations.unwrap_or(0), no_time);
    }
    samples.stations.resize_with(layout.stations.len(), StationSamples::default);
    for (place, samples) in layout.stations.iter().zip(&mut samples.stations) {
        samples.received.sample(network.node(place.node).received_bytes, no_time);
        if let Some(table) = place.table(network) {
            samples.in_use_max = samples.in_use_max.max(table.in_use);
        }
    }
    samples.flows.resize_with(layout.scenario.background.len(), Sampled::default);
    for (index, samples) in samples.flows.iter_mut().enumerate() {
        samples.sample(flows.sum(network, index, |flow| flow.delivered_bytes), no_time);
    }
}

fn report(
    network: &Network,
    layout: &Layout,
    flows: &Flows,
    servers: &ParameterServers,
    samples: &Samples,
    seed: u64,
) -> Report {
    let scenario = &layout.scenario;
    let name = |node: NodeId| network.topology().get(node).name.clone();
    let durations = |(times, unfinished)| Durations::of(times, unfinished);
    let progress = network.progress();
    let jobs = layout.jobs.iter().enumerate();
    let stations = layout.stations.iter().zip(&samples.stations);
    let background = scenario.background.iter().enumerate();
    let sized: Vec<usize> =
        background.filter(|(_, plan)| plan.size.is_some()).map(|(index, _)| index).collect();
    Report {
        title: scenario.title.clone(),
        seed,
        ended_s: network.time().as_secs_f64(),
        warm_up_s: scenario.warm_up.as_secs_f64(),
        interval_s: scenario.interval.as_secs_f64(),
        last_interval_s: samples.last_interval.as_secs_f64(),
        packet_hops: progress.packet_hops,
        events: progress.events,
        digest: format!("{:016x}", network.digest()),
        drops: drops(network),
        jobs: jobs
            .map(|(index, place)| {
                job_report(network, layout, place, &samples.jobs[index], samples.last_interval)
            })
            .collect(),
        parameter_servers: servers.report(network, &scenario.parameter_servers),
        servers: stations
            .clone()
            .filter(|(place, _)| place.station.role() != Role::Switch)
            .map(|(place, samples_of)| ServerReport {
                host: name(place.node),
                received_packets: network.node(place.node).received_packets,
                received_bytes: network.node(place.node).received_bytes,
                received_gbps: samples_of.received.gbps(scenario.interval, samples.last_interval, 1),
            })
            .collect(),
        switches: stations
            .filter_map(|(place, samples)| {
                let table = place.table(network)?;
                Some(SwitchReport {
                    name: name(place.node),
                    aggregators: table.aggregators,
                    in_use_max: samples.in_use_max,
                    aggregations: table.aggregations,
                    collisions: table.collisions,
                    freed_by_parameters: table.freed_by_parameters,
                    freed_by_resend: table.freed_by_resend,
                    freed_stale: table.freed_stale,
                })
            })
            .collect(),
        background: scenario
            .background
            .iter()
            .enumerate()
            .map(|(index, plan)| {
                let sized = plan.size.is_some();
                FlowReport {
                    from: name(plan.from),
                    to: name(plan.to),
                    flows: flows.count(index),
                    times: sized.then(|| durations(flows.times(network, index..index + 1))),
                    delivered_bytes: flows.sum(network, index, |flow| flow.delivered_bytes),
                    retransmissions: flows.sum(network, index, |flow| flow.retransmissions),
                    timeouts: flows.sum(network, index, |flow| flow.timeouts),
                    delivered_gbps: samples.flows[index].gbps(scenario.interval, samples.last_interval, 1),
                }
            })
            .collect(),
        flow_times: (!sized.is_empty()).then(|| durations(flows.times(network, sized.into_iter()))),
        link_ends_s: samples.loads.ends_s(),
        links: samples.loads.report(network),
        recording: None,
    }
}

/// How long tensors and flows took, of each kind that there is.
fn distributions(
    network: &Network,
    layout: &Layout,
    flows: &Flows,
    servers: &ParameterServers,
) -> Vec<Distribution> {
    let scenario = &layout.scenario;
    let name = |node: NodeId| &network.topology().get(node).name;
    let jobs = layout.jobs.iter().map(|place| {
        let job = place.job.borrow();
        let (times, unfinished) = tensor_times(&job);
        Distribution::of(format!("tensors of {}", job.plan.name), times, unfinished)
    });
    let pushes = scenario.parameter_servers.iter().zip(servers.times(network));
    let pushes = pushes.map(|(plan, (times, unfinished))| {
        Distribution::of(format!("flows of {}", plan.name), times, unfinished)
    });
    let sized = scenario.background.iter().enumerate().filter(|(_, plan)| plan.size.is_some());
    let background = sized.map(|(index, plan)| {
        let (times, unfinished) = flows.times(network, [index].into_iter());
        Distribution::of(format!("flows {} to {}", name(plan.from), name(plan.to)), times, unfinished)
    });
    jobs.chain(pushes).chain(background).collect()
}

/// The time of each tensor at each worker that has its sum, and how many of others are under way.
fn tensor_times(job: &Job) -> (Vec<Time>, usize) {
    let latencies = job.workers.iter().flat_map(|worker| worker.measures.latencies.iter().copied());
    (latencies.collect(), job.workers.iter().map(WorkerState::under_way).sum())
}

fn drops(network: &Network) -> Vec<Count> {
    let at_ports = network.topology().ports().map(|port| network.port(port).drops);
    let nodes = 0..network.topology().nodes().len() as u32;
    let at_nodes = nodes.map(|node| network.node(NodeId(node)).drops);
    let mut counts = vec![0; DropReason::ALL.len()];
    for drops in at_ports.chain(at_nodes) {
        for (count, reason) in counts.iter_mut().zip(DropReason::ALL) {
            *count += drops.of(reason);
        }
    }
    let counted = DropReason::ALL.into_iter().zip(counts).filter(|(_, count)| *count > 0);
    counted.map(|(reason, count)| Count { name: reason.name(), count }).collect()
}

fn job_report(
    network: &Network,
    layout: &Layout,
    place: &JobPlace,
    samples: &JobSamples,
    last_interval: Duration,
) -> JobReport {
    let job = place.job.borrow();
    let workers = job.workers.len();
    let mean = |value: &dyn Fn(&Measures) -> f64| {
        job.workers.iter().map(|worker| value(&worker.measures)).sum::<f64>() / workers as f64
    };
    let seconds = |at: Instant| at.0 as f64 / 1e9;
    let now = network.time().instant();
    let readings = job.readings(now);
    let per_second = readings.iter().map(|reading| reading.per_second).sum::<f64>() / workers as f64;
    let completed = readings.iter().map(|reading| reading.completed).min().unwrap_or(0);
    let (window, needed) = readings.first().map_or((Duration::ZERO, 0), |one| (one.window, one.needed));
    let counters = place.counters(network);
    let training = match &job.plan.workload {
        Workload::Training { trained, batch, scale, .. } => Some(TrainingReport {
            model: trained.name(),
            scale: *scale,
            iterations: job.workers.iter().map(|worker| worker.measures.iterations).min().unwrap_or(0),
            iterations_per_s: per_second,
            samples_per_s: per_second / scale * f64::from(*batch),
            sample: trained.sample(),
        }),
        Workload::AllReduce { .. } => None,
    };
    let (times, under_way) = tensor_times(&job);
    let interval = layout.scenario.interval;
    JobReport {
        name: job.plan.name.clone(),
        system: job.plan.system.name(),
        workers,
        finished: job.finished.is_some(),
        finished_s: job.finished.map(seconds),
        died_s: job.died().map(seconds),
        unfinished: job.is_late(now).then(|| waits(network, place, &job)),
        aggregation_gbps: per_second * job.measured_bytes() as f64 * 8.0 / 1e9,
        measurement: Measurement {
            window_s: window.as_secs_f64(),
            completed,
            needed,
            enough: completed >= needed,
        },
        tensors: mean(&|measures| measures.tensors as f64),
        tensor_times: Durations::of(times, under_way),
        training,
        counters,
        series: JobSeries {
            aggregation_gbps: samples.bytes.gbps(interval, last_interval, workers),
            switch_aggregations: counters
                .switch_aggregations
                .map(|_| samples.switch_aggregations.growth.clone()),
            server_aggregations: counters
                .server_aggregations
                .map(|_| samples.server_aggregations.growth.clone()),
        },
    }
}
