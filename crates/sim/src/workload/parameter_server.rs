//! The flows of training with parameter servers, without their content (DLCP §5.2.1). Each worker
//! sends each tensor's gradient to a server as soon as its backward pass has it.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::Layer;
use oorandom::Rand64;
use serde::Deserialize;

use super::report::{Durations, ParameterServerReport};
use super::transport::TransportPlan;
use crate::net::{Class, FlowId, FlowStatistics, Network, NodeId, Time};
use crate::systems::dlcp::{PushPlan, Pushes};

/// The flows of one job in one iteration.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterServerPlan {
    /// For reports.
    pub name: String,
    /// Hosts by rank.
    pub workers: Vec<NodeId>,
    /// Hosts of the servers, which may be workers' too.
    pub servers: Vec<NodeId>,
    /// The tensors that each worker sends.
    pub tensors: Vec<TensorPlan>,
    /// A tensor that is larger is divided evenly among all servers; a smaller one is at one of
    /// them, which is drawn.
    pub divide_above_bytes: u64,
    /// The draw of a smaller tensor's server.
    pub draw: Draw,
    /// By how much a worker's times vary: all of them take up to this share longer or shorter.
    pub jitter: f64,
    /// When the backward passes begin.
    pub start: Duration,
    /// How queues treat its packets.
    pub class: Class,
    /// How they are sent.
    pub sends: Sends,
}

/// For whom a tensor's server is drawn.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Draw {
    /// For all workers, so that it can sum what they bring.
    #[default]
    Once,
    /// For each of them: traffic that is as much, and that nobody could sum.
    EachWorker,
}

/// What carries flows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sends {
    /// Connections.
    Connections(TransportPlan),
    /// DLCP's machines.
    Dlcp(PushPlan),
}

/// A tensor's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// As it travels.
    pub bytes: u64,
    /// How long after the backward pass began it is there.
    pub ready: Duration,
}

/// The data from a worker to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    /// When.
    pub at: Time,
    /// The worker's host.
    pub from: NodeId,
    /// The server's, which is another.
    pub to: NodeId,
    /// How much.
    pub bytes: u64,
    /// The layer; each tensor counts as one, as back-propagation has the last first.
    pub layer: Layer,
}

impl ParameterServerPlan {
    /// All of an iteration's, the first one last. Data that stays on a worker's own host is no
    /// flow.
    #[must_use]
    pub fn pushes(&self, seed: u64, index: usize) -> Vec<Push> {
        let mut dice = Rand64::new(u128::from(seed) << 64 | 0x5e72_7e72_0000_0000 | index as u128);
        let servers = self.servers.len() as u64;
        let drawn = |dice: &mut Rand64| self.servers[dice.rand_range(0..servers) as usize];
        let parts: Vec<Vec<(NodeId, u64)>> = self
            .tensors
            .iter()
            .map(|tensor| {
                if tensor.bytes <= self.divide_above_bytes {
                    return vec![(drawn(&mut dice), tensor.bytes)];
                }
                // As even as whole bytes are.
                let end = |server: u64| {
                    (u128::from(tensor.bytes) * u128::from(server) / u128::from(servers)) as u64
                };
                let part = |server: u64| (self.servers[server as usize], end(server + 1) - end(server));
                (0..servers).map(part).collect()
            })
            .collect();
        let mut pushes = Vec::new();
        for worker in &self.workers {
            let pace = 1.0 + self.jitter * (2.0 * dice.rand_float() - 1.0);
            let count = self.tensors.len();
            for (number, (tensor, parts)) in self.tensors.iter().zip(&parts).enumerate() {
                let within = |number: usize| u16::try_from(number).unwrap_or(u16::MAX);
                let layer = Layer { index: within(count - 1 - number), count: within(count) };
                let at = Time::from(self.start + tensor.ready.mul_f64(pace));
                let is_divided = tensor.bytes > self.divide_above_bytes;
                for (server, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
                    let to = match self.draw {
                        Draw::EachWorker if !is_divided => drawn(&mut dice),
                        _ => *server,
                    };
                    if to != *worker {
                        pushes.push(Push { at, from: *worker, to, bytes: *bytes, layer });
                    }
                }
            }
        }
        pushes.sort_by_key(|push| Reverse(push.at));
        pushes
    }
}

/// Each flow of an entry with the time at which it was opened.
type Opened = Rc<RefCell<Vec<(Time, FlowId)>>>;

/// An entry's flows.
enum Flows {
    Connections(Opened),
    Dlcp(Rc<RefCell<Pushes>>),
}

/// The parameter servers of a run, by entry of the scenario: how many flows it has, and those that
/// were opened.
pub(crate) struct ParameterServers(Vec<(usize, Flows)>);

impl ParameterServers {
    /// Sees to it that each flow is opened in time.
    pub(crate) fn schedule(network: &mut Network, plans: &[ParameterServerPlan], seed: u64) -> Self {
        let ports = Rc::default();
        let schedule = |(index, plan): (usize, &ParameterServerPlan)| {
            let pushes = plan.pushes(seed, index);
            let count = pushes.len();
            let flows = match plan.sends {
                Sends::Connections(transport) => {
                    let opened = Opened::default();
                    open_in_time(network, (opened.clone(), plan.class, transport), open_connection, pushes);
                    Flows::Connections(opened)
                }
                Sends::Dlcp(sends) => {
                    let flows = Rc::new(RefCell::new(Pushes::new(sends, plan.class, Rc::clone(&ports))));
                    let open = |flows: &Rc<RefCell<Pushes>>, network: &mut Network, push: &Push| {
                        flows.borrow_mut().open(network, push);
                    };
                    open_in_time(network, flows.clone(), open, pushes);
                    Flows::Dlcp(flows)
                }
            };
            (count, flows)
        };
        Self(plans.iter().enumerate().map(schedule).collect())
    }

    pub(crate) fn report(
        &self,
        network: &Network,
        plans: &[ParameterServerPlan],
    ) -> Vec<ParameterServerReport> {
        let entries = plans.iter().zip(&self.0);
        let report = |(plan, (count, flows)): (&ParameterServerPlan, &(usize, Flows))| match flows {
            Flows::Connections(opened) => report_connections(network, plan, *count, &opened.borrow()),
            Flows::Dlcp(flows) => report_pushes(network, plan, *count, &flows.borrow()),
        };
        entries.map(report).collect()
    }

    /// For each entry, how long its flows took that have ended, and how many others have begun.
    pub(crate) fn times(&self, network: &Network) -> impl Iterator<Item = (Vec<Time>, usize)> {
        self.0.iter().map(|(_, flows)| match flows {
            Flows::Connections(opened) => lasted(&connection_times(network, &opened.borrow())),
            Flows::Dlcp(flows) => lasted(&flows.borrow().books().times),
        })
    }
}

/// When each connection began, and when it ended if it has.
fn connection_times(network: &Network, opened: &[(Time, FlowId)]) -> Vec<(Time, Option<Time>)> {
    opened.iter().map(|(begin, flow)| (*begin, network.flow(*flow).completed)).collect()
}

/// How long those took that have ended, and how many have not.
fn lasted(all: &[(Time, Option<Time>)]) -> (Vec<Time>, usize) {
    let times: Vec<Time> = all.iter().filter_map(|(begin, end)| Some(end.as_ref()?.since(*begin))).collect();
    let unfinished = all.len() - times.len();
    (times, unfinished)
}

/// Opens one flow after the other, by `open`; only the next one is on the agenda.
fn open_in_time<T: 'static>(
    network: &mut Network,
    with: T,
    open: fn(&T, &mut Network, &Push),
    mut pushes: Vec<Push>,
) {
    if let Some(push) = pushes.pop() {
        network.at(push.at, move |network| {
            open(&with, network, &push);
            open_in_time(network, with, open, pushes);
        });
    }
}

fn open_connection(with: &(Opened, Class, TransportPlan), network: &mut Network, push: &Push) {
    let (opened, class, transport) = with;
    let flow = network.open_tcp(transport.connection(network.topology(), push.from, push.to, *class));
    network.write(flow, push.bytes, None);
    opened.borrow_mut().push((network.time(), flow));
}

fn report_connections(
    network: &Network,
    plan: &ParameterServerPlan,
    flows: usize,
    opened: &[(Time, FlowId)],
) -> ParameterServerReport {
    let times = connection_times(network, opened);
    let sum = |of: fn(FlowStatistics) -> u64| -> u64 {
        opened.iter().map(|(_, flow)| of(network.flow(*flow))).sum()
    };
    ParameterServerReport {
        delivered_bytes: sum(|flow| flow.delivered_bytes),
        sent_packets: sum(|flow| flow.sent_packets),
        retransmissions: sum(|flow| flow.retransmissions),
        timeouts: Some(sum(|flow| flow.timeouts)),
        ..report_times(plan, flows, &times)
    }
}

fn report_pushes(
    network: &Network,
    plan: &ParameterServerPlan,
    flows: usize,
    pushes: &Pushes,
) -> ParameterServerReport {
    let (books, (sent_packets, retransmissions)) = (pushes.books(), pushes.sent(network));
    let report = report_times(plan, flows, &books.times);
    let are_over = report.flow_times.unfinished == 0;
    ParameterServerReport {
        delivered_bytes: books.delivered_bytes,
        sent_packets,
        retransmissions,
        packets: Some(books.packets),
        packets_lost: are_over.then(|| books.packets - books.packets_arrived),
        retransmission_rounds: Some(books.retransmission_rounds),
        ..report
    }
}

/// The times that follow from when flows began and ended.
fn report_times(
    plan: &ParameterServerPlan,
    flows: usize,
    all: &[(Time, Option<Time>)],
) -> ParameterServerReport {
    let (times, unfinished) = lasted(all);
    let last = all.iter().filter_map(|(_, end)| *end).max().unwrap_or_default();
    ParameterServerReport {
        name: plan.name.clone(),
        workers: plan.workers.len(),
        servers: plan.servers.len(),
        flow_times: Durations::of(times, unfinished),
        unopened: flows - all.len(),
        last_arrived_s: last.since(plan.start.into()).as_secs_f64(),
        ..ParameterServerReport::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::net::{NodeId, Time};
    use crate::scenario_file::parse;
    use crate::workload::{Options, ParameterServerReport, Push, Scenario, run};

    const RACK: &str = "until = \"1s\"\n[network]\ntopology = \"rack\"\nhosts = 8\n";

    fn scenario(entry: &str) -> Scenario {
        let text = format!("{RACK}[[parameter_server]]\n{entry}");
        parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"))
    }

    fn played(scenario: &Scenario) -> ParameterServerReport {
        let report = run(scenario, Options::default()).unwrap_or_else(|error| panic!("{error}"));
        report.parameter_servers[0].clone()
    }

    fn pushes(scenario: &Scenario, seed: u64) -> Vec<Push> {
        scenario.parameter_servers[0].pushes(seed, 0)
    }

    #[test]
    fn large_tensors_are_divided_among_all_servers_and_small_ones_are_at_one() {
        let divided = scenario("workers = 8\ntensor = \"1MB\"\ndivide_above = \"0B\"\ncompression = 4.0\n");
        let all = pushes(&divided, 1);
        // Each to all but the one on its own host.
        assert_eq!(all.len(), 8 * 7);
        assert!(all.iter().all(|push| push.from != push.to && push.bytes == 31_250 && push.at == Time::ZERO));
        let report = played(&divided);
        assert_eq!((report.flow_times.count, report.delivered_bytes), (56, 56 * 31_250));
        // Seven of these on one link at 100 Gbit/s, and everybody's at the same time.
        let least = 7.0 * 31_250.0 * 80e-12;
        assert!(report.last_arrived_s > least && report.last_arrived_s < 2.0 * least, "{report:?}");

        let small = scenario("workers = 8\nservers = 2\ntensor = \"1MB\"\n");
        for seed in 0..20 {
            let at_one = pushes(&small, seed);
            assert_eq!(at_one.len(), 7, "seed {seed}: the server's own host has a worker too");
            assert!(at_one.iter().all(|push| push.to == at_one[0].to && push.bytes == 1_000_000));
        }
        let servers: Vec<NodeId> = (0..20).map(|seed| pushes(&small, seed)[0].to).collect();
        assert!(servers.iter().any(|server| *server != servers[0]), "seeds draw servers");

        // Each worker draws its own, of a small tensor alone.
        let apart = "workers = 8\ndraw = \"each-worker\"\ntensor = \"1MB\"\n";
        let all = pushes(&scenario(apart), 1);
        let servers: BTreeSet<NodeId> = all.iter().map(|push| push.to).collect();
        assert!(servers.len() > 1 && all.len() <= 8, "{all:?}");
        let divided = pushes(&scenario(&format!("{apart}divide_above = \"1kB\"\n")), 1);
        assert_eq!(divided, pushes(&scenario("workers = 8\ntensor = \"1MB\"\ndivide_above = \"1kB\"\n"), 1));
    }

    #[test]
    fn a_models_tensors_go_when_the_backward_pass_has_them_the_last_layers_first() {
        let model = scenario("workers = 4\nservers = 2\nmodel = \"resnet50\"\njitter = \"10%\"\n");
        let plan = &model.parameter_servers[0];
        // Four of eight hosts, and two of these, evenly.
        assert_eq!(plan.workers, [0, 2, 4, 6].map(|host| model.topology.hosts().nth(host).unwrap()));
        assert_eq!(plan.servers, [plan.workers[0], plan.workers[2]]);
        assert_eq!(plan.tensors.len(), 161);
        assert_eq!(plan.tensors.iter().map(|tensor| tensor.bytes).sum::<u64>(), 4 * 25_557_032);
        assert!(plan.tensors.is_sorted_by_key(|tensor| tensor.ready));
        let all = pushes(&model, 3);
        // A small one comes from three workers to the fourth's host. A large one is divided between
        // both servers; two workers have one beside them.
        let large = plan.tensors.iter().filter(|tensor| tensor.bytes > plan.divide_above_bytes).count();
        assert!(large > 3, "{large}");
        assert_eq!(all.len(), (161 - large) * 3 + large * (4 * 2 - 2));
        let of = |worker: usize| all.iter().filter(move |push| push.from == plan.workers[worker]);
        let last = |worker| of(worker).map(|push| push.at).max().unwrap().as_secs_f64();
        let ready = plan.tensors.last().unwrap().ready.as_secs_f64();
        for worker in 0..4 {
            assert!((last(worker) / ready - 1.0).abs() <= 0.1 + 1e-9, "{} {ready}", last(worker));
        }
        assert_ne!(last(1), last(3), "paces differ");
        assert_eq!(all, pushes(&model, 3));
    }

    #[test]
    fn a_job_that_ends_earlier_ends_no_flow_of_theirs() {
        let job = "[[job]]\nsystem = \"ring\"\nworkers = 2\ntensor = \"1kB\"\nin_flight = 1\ntensors = 1\n";
        let both = scenario(&format!("workers = 8\nservers = 2\ntensor = \"10MB\"\n{job}"));
        let report = run(&both, Options::default()).unwrap_or_else(|error| panic!("{error}"));
        let flows = &report.parameter_servers[0].flow_times;
        assert!(report.jobs[0].finished && flows.count > 0, "{flows:?}");
        assert_eq!((flows.unfinished, report.parameter_servers[0].unopened), (0, 0));
    }

    #[test]
    fn flows_that_the_end_cuts_off_are_told() {
        let mut model = scenario("workers = 4\nmodel = \"googlenet\"\n");
        let all = pushes(&model, Options::default().seed).len();
        model.until = std::time::Duration::from_millis(5);
        let report = played(&model);
        assert!(report.unopened > 0, "{report:?}");
        assert_eq!(report.flow_times.count + report.flow_times.unfinished + report.unopened, all);
    }

    #[test]
    fn flows_of_dlcp_take_the_place_of_connections_and_lose_what_their_bound_forgives() {
        let entry = "workers = 8\nservers = 1\ntensor = \"1MB\"\n";
        let queues = "selective_dropping = { threshold = \"30kB\", step = 0.5 }\n[[parameter_server]]\n";
        let with = |dlcp: &str| {
            let text = format!("{RACK}{queues}{entry}dlcp = {{ quiet = \"1ms\"{dlcp} }}\n");
            played(&parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}")))
        };
        let (forgiving, strict) = (with(", loss_bound = \"60%\""), with(", loss_bound = \"0%\""));
        for report in [&forgiving, &strict] {
            assert_eq!((report.flow_times.count, report.flow_times.unfinished), (7, 0));
            // The packets have 352 elements each.
            assert_eq!((report.packets, report.timeouts), (Some(7 * 711), None));
        }
        let lost = forgiving.packets_lost.expect("all have ended");
        assert!((100..=7 * 711 * 6 / 10).contains(&lost), "{lost}");
        // The last packet is declared as long as the others.
        assert_eq!((strict.packets_lost, strict.delivered_bytes), (Some(0), 7 * 711 * 4 * 352));
        assert!(strict.retransmissions > 0);
    }

    /// Else each pair of hosts would send at the link's rate, and what waits at the NIC would be
    /// asked for again.
    #[test]
    fn flows_of_dlcp_from_one_host_share_its_nic() {
        let entry = "workers = [\"h0\"]\nservers = [\"h1\", \"h2\", \"h3\", \"h4\"]\ntensor = \"8MB\"\ndivide_above = \"1MB\"\ndlcp = {}\n";
        let whole = run(&scenario(entry), Options::default()).unwrap_or_else(|error| panic!("{error}"));
        let report = &whole.parameter_servers[0];
        assert_eq!((report.flow_times.count, report.flow_times.unfinished), (4, 0));
        assert_eq!((report.retransmissions, report.packets_lost), (0, Some(0)));
        let queue = whole.links.iter().map(|link| link.queue_max_bytes).max();
        assert!(queue < Some(100_000), "{queue:?} bytes waited, of machines that should");
        let alone = 8e6 * 8.0 / 100e9;
        assert!(
            (alone..1.3 * alone).contains(&report.last_arrived_s),
            "{} and {alone}",
            report.last_arrived_s
        );
    }
}
