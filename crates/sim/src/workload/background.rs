//! Flows that are no job's: opened when their time comes, and what became of them.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::rc::Rc;

use oorandom::Rand64;

use super::scenario::BackgroundPlan;
use super::transport::mtu;
use crate::net::{ConstantRateConfig, FlowId, FlowStatistics, Network, Time};

/// By entry of the scenario, each flow with the time at which it was opened.
type Opened = Rc<RefCell<Vec<Vec<(Time, FlowId)>>>>;

/// The background flows of a run.
#[derive(Clone)]
pub(crate) struct Flows(Opened);

impl Flows {
    /// Sees to it that each is opened in time.
    pub(crate) fn schedule(network: &mut Network, plans: &[BackgroundPlan], seed: u64) -> Self {
        let opened: Opened = Rc::new(RefCell::new(vec![Vec::new(); plans.len()]));
        for (index, plan) in plans.iter().copied().enumerate() {
            let dice = Rand64::new(u128::from(seed) << 64 | 0xf10e_0000_0000 | index as u128);
            open_in_time(network, opened.clone(), index, plan, starts(&plan, dice));
            if let Some(stop) = plan.stop {
                let opened = opened.clone();
                network.at(stop, move |network| {
                    for (_, flow) in &opened.borrow()[index] {
                        network.stop_flow(*flow);
                    }
                });
            }
        }
        Self(opened)
    }

    /// How many of an entry have been opened.
    pub(crate) fn count(&self, index: usize) -> usize {
        self.0.borrow()[index].len()
    }

    /// A sum over all flows of an entry.
    pub(crate) fn sum(&self, network: &Network, index: usize, of: fn(FlowStatistics) -> u64) -> u64 {
        self.0.borrow()[index].iter().map(|(_, flow)| of(network.flow(*flow))).sum()
    }

    /// How long those of all these entries took that have ended, and how many others have begun.
    pub(crate) fn times(
        &self,
        network: &Network,
        entries: impl Iterator<Item = usize>,
    ) -> (Vec<Time>, usize) {
        let (mut times, mut opened) = (Vec::new(), 0);
        for index in entries {
            let flows = &self.0.borrow()[index];
            let ended = |(begin, flow): &(Time, FlowId)| Some(network.flow(*flow).completed?.since(*begin));
            times.extend(flows.iter().filter_map(ended));
            opened += flows.len();
        }
        let unfinished = opened - times.len();
        (times, unfinished)
    }
}

/// When the flows of an entry begin, the first one last.
fn starts(plan: &BackgroundPlan, mut dice: Rand64) -> Vec<Time> {
    let spread = Time::from(plan.spread).0;
    let draw = |nth| {
        let drawn = if spread == 0 { 0 } else { dice.rand_range(0..spread) };
        Time::from(plan.start + plan.every * nth) + Time(drawn)
    };
    let mut starts: Vec<Time> = (0..plan.count).map(draw).collect();
    starts.retain(|start| plan.stop.is_none_or(|stop| *start < stop.into()));
    starts.sort_unstable_by_key(|start| Reverse(*start));
    starts
}

/// Opens one flow after the other; only the next one is on the agenda.
fn open_in_time(
    network: &mut Network,
    opened: Opened,
    index: usize,
    plan: BackgroundPlan,
    mut starts: Vec<Time>,
) {
    if let Some(start) = starts.pop() {
        network.at(start, move |network| {
            let flow = open(network, &plan);
            opened.borrow_mut()[index].push((network.time(), flow));
            open_in_time(network, opened, index, plan, starts);
        });
    }
}

fn open(network: &mut Network, plan: &BackgroundPlan) -> FlowId {
    match plan.rate_bps {
        Some(rate_bps) => network.start_constant_rate(ConstantRateConfig {
            from: plan.from,
            to: plan.to,
            class: plan.class,
            rate_bps,
            datagram_bytes: mtu(network.topology(), plan.from),
            ecn: plan.transport.ecn,
        }),
        None => {
            let config = plan.transport.connection(network.topology(), plan.from, plan.to, plan.class);
            let flow = network.open_tcp(config);
            match plan.size {
                Some(bytes) => network.write(flow, bytes, None),
                None => network.fill(flow),
            }
            flow
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, run};

    fn play(text: &str) -> Report {
        play_with(text, Options::default().seed)
    }

    fn play_with(text: &str, seed: u64) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
        run(&scenario, Options { seed, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
    }

    const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 5\n";

    /// Flows of 14,600 bytes, which are ten segments and an initial window, every 100 us.
    fn flows(from: &str, more: &str) -> String {
        format!(
            "[[background]]\nfrom = \"{from}\"\nto = \"h4\"\nkind = \"tcp\"\nsize = \"14600B\"\nevery = \"100us\"\n{more}"
        )
    }

    #[test]
    fn a_flow_alone_takes_the_time_of_its_segments_and_the_way() {
        let report = play(&format!("{RACK}{}", flows("h0", "count = 20\nstart = \"7us\"\n")));
        let flow = &report.background[0];
        assert_eq!((flow.flows, flow.delivered_bytes), (20, 20 * 14_600));
        let times = flow.times.expect("flows with a size");
        assert_eq!((times.count, times.unfinished), (20, 0));
        // Ten segments of 1538 bytes on the first link, one more on the second; 80 ps a byte and 1
        // us a link.
        let exact = 11.0 * 1538.0 * 80e-12 + 2e-6;
        for time in [times.mean_s, times.p95_s, times.p99_s, times.p999_s, times.max_s] {
            assert!((time - exact).abs() < 1e-12, "{times:?}");
        }
        assert_eq!(report.flow_times, Some(times));
        assert!(report.jobs.is_empty() && report.ended_s < 0.1, "it ends with its flows' last timers");
    }

    #[test]
    fn flows_that_meet_take_longer_and_those_that_are_stopped_are_not_among_the_times() {
        let meet = format!("{}{}", flows("h0", "count = 50\n"), flows("h1", "count = 50\nstop = \"1ms\"\n"));
        let report = play(&format!("{RACK}{meet}"));
        assert_eq!(report.background[0].flows, 50);
        assert_eq!(report.background[1].flows, 10);
        let all = report.flow_times.expect("flows with a size");
        assert_eq!(all.count, 60);
        let alone = 11.0 * 1538.0 * 80e-12 + 2e-6;
        // Ten of each meet another at the receiver's link; the last of the two ends a burst later.
        assert!(all.mean_s > alone && all.mean_s < all.p95_s, "{all:?}");
        assert!((all.max_s - alone - 10.0 * 1538.0 * 80e-12).abs() < 1e-9, "{all:?}");
        let link = report.links.iter().find(|link| link.to == "h4").expect("it carried them");
        assert!(link.queue_max_bytes > 5 * 1538 && link.dropped == 0, "{link:?}");
        // A job's end is the run's: flows that are under way then are told of.
        let job = "[[job]]\nsystem = \"atp\"\nworkers = [\"h2\", \"h3\"]\ntensor = \"40kB\"\ntensors = 3\n";
        let report = play(&format!("{RACK}{job}{}", flows("h0", "count = 1\n").replace("14600B", "40MB")));
        let times = report.flow_times.expect("flows with a size");
        assert_eq!((times.count, times.unfinished), (0, 1));
        // A flow without a size has no time.
        let endless = "until = \"1ms\"\n";
        let text = format!("{endless}{RACK}[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"tcp\"\n");
        let report = play(&text);
        assert_eq!((report.background[0].times, report.flow_times), (None, None));
    }

    #[test]
    fn starts_that_are_drawn_lie_in_their_span_and_differ_between_seeds() {
        // In intervals of 100 us: the times at which something arrived.
        let arrivals = |seed| {
            let text = format!(
                "until = \"4ms\"\ninterval = \"100us\"\n{RACK}[[background]]\nfrom = \"h0\"\nto = \"h4\"\nkind = \"tcp\"\nsize = \"1kB\"\ncount = 8\nevery = \"0us\"\nstart = \"1ms\"\nspread = \"2ms\"\n"
            );
            let report = play_with(&text, seed);
            assert_eq!((report.background[0].flows, report.background[0].delivered_bytes), (8, 8_000));
            let series = report.background[0].delivered_gbps.clone();
            series.iter().enumerate().filter(|(_, rate)| **rate > 0.0).map(|(at, _)| at).collect::<Vec<_>>()
        };
        let (first, second) = (arrivals(1), arrivals(2));
        assert!(
            first.len() > 3 && first.iter().chain(&second).all(|at| (10..=30).contains(at)),
            "{first:?} {second:?}"
        );
        assert_ne!(first, second);
        assert_eq!(first, arrivals(1));
    }

    #[test]
    fn tensors_have_times_too() {
        let job = "[[job]]\nsystem = \"switchml\"\nworkers = 4\ntensor = \"200kB\"\ntensors = 6\n";
        let times = play(&format!("{RACK}{job}")).jobs[0].tensor_times;
        assert_eq!(times.count, 4 * 6);
        assert!(0.0 < times.mean_s && times.mean_s <= times.p95_s && times.p95_s <= times.p99_s);
        assert!(times.p99_s <= times.p999_s && times.p999_s <= times.max_s);
        // 200 kB at 100 Gbit/s, at least.
        assert!(times.mean_s > 16e-6, "{times:?}");
    }
}
