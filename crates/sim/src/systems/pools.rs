//! All jobs' pools of slots on one machine, and what is counted there: on a switch for SwitchML, on
//! a host for BytePS.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use fanin_protocol::switchml::{Switch, SwitchJob, Worker};
use fanin_protocol::{JobAborted, Summer, Verdict, WorkerMachine};
use fanin_wire::{JobId, Kind, Preamble, SLOT_HEADER_BYTES, ShardId};

use super::worker::WorkerOwner;
use super::{Classify, Counters, Declare, Role, Site, Station, Table, Tenant};
use crate::net::{ActorId, Body, Context, Machine, Network, NodeId, Owner, Packet, SimAddress};
use crate::workload::Gradient;

type SwitchMachine = Machine<Switch<SimAddress>, PoolsOwner>;

/// Kinds of packets: a worker's or a rack's contribution, and a sum.
const UPDATE: &str = "update";
const RESULT: &str = "result";
pub(super) const PACKET_KINDS: &[&str] = &[UPDATE, RESULT];

/// Which of these a packet is.
pub(super) fn kind_of(packet: &[u8]) -> Option<&'static str> {
    match Preamble::parse(packet).ok()?.kind {
        Kind::Update => Some(UPDATE),
        Kind::Result => Some(RESULT),
        _ => None,
    }
}

/// A worker's machine.
pub(super) type WorkerActor = Machine<Worker<SimAddress, Gradient>, WorkerOwner>;

/// Counts of a job's workers and pools.
pub(super) fn counters<'a>(
    tenant: &Tenant,
    network: &Network,
    pools: impl Iterator<Item = (&'a Pools, JobId)>,
) -> (Counted, Counters) {
    let workers = tenant.machines().into_iter().filter_map(|actor| network.actor::<WorkerActor>(actor));
    let (packets_sent, retransmissions) = workers.fold((0, 0), |sum, worker| {
        let counted = worker.machine.statistics();
        (sum.0 + counted.packets_sent, sum.1 + counted.retransmissions)
    });
    let at_pools = pools.fold(Counted::default(), |sum, (pools, job)| {
        let counted = pools.counted(job);
        Counted {
            aggregations: sum.aggregations + counted.aggregations,
            answered_again: sum.answered_again + counted.answered_again,
        }
    });
    let counters = Counters {
        answered_again: Some(at_pools.answered_again),
        packets_sent: Some(packets_sent),
        retransmissions: Some(retransmissions),
        ..Counters::default()
    };
    (at_pools, counters)
}

/// The work of a machine for a job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    /// Contributions that it added. A packet that only asks for an exponent has nothing to add.
    pub(super) aggregations: u64,
    /// Contributions that came again to a sum that was there, and were answered with it (SwitchML
    /// Algorithm 3).
    pub(super) answered_again: u64,
}

type OfJobs = Rc<RefCell<BTreeMap<JobId, Counted>>>;

/// All jobs' pools on one machine.
pub(super) struct Pools {
    node: NodeId,
    port: u16,
    /// All of a switch's memory: a slot takes two. A host's is not counted.
    aggregators: Option<u32>,
    classify: Classify,
    declare: Declare,
    actor: Cell<ActorId>,
    jobs: RefCell<Vec<SwitchJob<SimAddress>>>,
    counted: OfJobs,
}

impl Pools {
    /// The pools of a switch or a host.
    pub(super) fn at(site: &mut Site<'_>, (node, port): (NodeId, u16), declare: &Declare) -> Rc<Self> {
        let is_switch = site.topology().layer(node).is_some();
        let aggregators = is_switch.then_some(site.switch().aggregators);
        let classify = site.classify();
        site.station(node, port, || Self {
            node,
            port,
            aggregators,
            classify,
            declare: declare.clone(),
            actor: Cell::new(ActorId(u32::MAX)),
            jobs: RefCell::default(),
            counted: Rc::default(),
        })
    }

    /// One more job sums here.
    pub(super) fn add(&self, job: SwitchJob<SimAddress>) {
        self.jobs.borrow_mut().push(job);
    }

    /// Whether nothing has taken its machine's place: a service may die for good.
    pub(super) fn is_alive(&self, network: &Network) -> bool {
        network.actor::<SwitchMachine>(self.actor.get()).is_some()
    }

    /// One more job sums here, while the run goes on; whether there is room.
    pub(super) fn admit(&self, network: &mut Network, job: SwitchJob<SimAddress>) -> bool {
        network
            .with_actor(self.actor.get(), |pools: &mut SwitchMachine, _| pools.machine.add_job(job).is_ok())
    }

    fn counted(&self, job: JobId) -> Counted {
        self.counted.borrow().get(&job).copied().unwrap_or_default()
    }
}

impl Station for Pools {
    fn role(&self) -> Role {
        if self.aggregators.is_some() { Role::Switch } else { Role::Service }
    }

    fn place(&self, network: &mut Network) {
        let mut switch = Switch::new(ShardId(0));
        for job in self.jobs.borrow().iter() {
            switch.add_job(job.clone()).expect("a scenario's jobs are checked when it is read");
        }
        let (classify, declare) = (self.classify.clone(), self.declare.clone());
        let machine = Machine::new(switch, PoolsOwner(self.counted.clone()))
            .classified(move |_, packet| classify(packet))
            .declaring(move |packet| declare(packet));
        self.actor.set(network.add_actor(self.node, self.port, machine));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    /// Pools do not change: the hostile world tries how jobs are admitted again.
    fn forget(&self, _network: &mut Network) {}

    /// A sum that gathers is in one of its slot's two aggregators. Nobody else can take a slot, so
    /// nothing collides or is freed.
    fn table(&self, network: &Network) -> Option<Table> {
        let aggregators = self.aggregators?;
        let machine = &network.actor::<SwitchMachine>(self.actor.get())?.machine;
        let jobs = self.jobs.borrow();
        let gathering = jobs.iter().filter_map(|job| machine.job_progress(job.config.id));
        Some(Table {
            aggregators,
            in_use: gathering.map(|progress| progress.in_use).sum(),
            aggregations: self.counted.borrow().values().map(|counted| counted.aggregations).sum(),
            ..Table::default()
        })
    }
}

/// Counts what the machine made of each packet.
struct PoolsOwner(OfJobs);

impl Owner<Switch<SimAddress>> for PoolsOwner {
    fn event(&mut self, _machine: &mut Switch<SimAddress>, _event: JobAborted, _context: &mut Context<'_>) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, _context: &mut Context<'_>) {
        let Body::Bytes(bytes) = packet.body else { return };
        let Ok(Preamble { kind: Kind::Update, job, .. }) = Preamble::parse(bytes) else { return };
        let mut counted = self.0.borrow_mut();
        let counted = counted.entry(job);
        match verdict {
            // Into a sum that still gathers, that is complete, or that a rack passes on.
            Verdict::Absorb | Verdict::Multicast | Verdict::Forward if bytes.len() > SLOT_HEADER_BYTES => {
                counted.or_default().aggregations += 1;
            }
            Verdict::ReplyUnicast => counted.or_default().answered_again += 1,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, run};

    const JOB: &str = "[[job]]\nsystem = \"switchml\"\nworkers = 4\ntensor = \"200kB\"\ntensors = 6\n";

    fn play(text: &str) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
        run(&scenario, Options { seed: 1, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
    }

    /// 4 workers, 6 tensors of 50,000 elements in packets of 352, without a probe: int32 has no
    /// exponents.
    #[test]
    fn switches_count_what_they_add_for_switchml_and_what_they_answer_again() {
        let job = format!("{JOB}dtype = \"int32\"\n[job.switchml]\nslots = 64\n");
        let counted = |more: &str| {
            let network = "until = \"1s\"\ninterval = \"5us\"\n[network]\ntopology = \"rack\"\nhosts = 5\n[[link]]\nlink = [\"h3\", \"s0\"]\ndelay = \"20us\"\n";
            let report = play(&format!("{network}{job}{more}"));
            let (counters, switch) = (report.jobs[0].counters, report.switches[0].clone());
            assert_eq!(counters.switch_aggregations, Some(4 * 6 * 143), "each contribution once: {more}");
            assert_eq!(Some(switch.aggregations), counters.switch_aggregations);
            assert_eq!((switch.aggregators, switch.collisions, switch.freed_by_resend), (8192, None, None));
            assert_eq!(switch.in_use_max, 64, "all slots wait for the worker that is far away");
            let series = report.jobs[0].series.switch_aggregations.as_ref().map(|of| of.iter().sum::<u64>());
            assert_eq!(series, counters.switch_aggregations);
            (counters.answered_again.expect("counted"), counters.retransmissions.expect("counted"))
        };
        assert_eq!(counted(""), (0, 0));
        // A worker that lacks a result asks for it. A contribution that is sent again to a sum that
        // still gathers is not answered.
        let lost = "[[loss]]\nlink = [\"h1\", \"s0\"]\nonly = \"result\"\nnth = [9]\n";
        let (answered, sent_again) = counted(lost);
        assert!((1..=sent_again).contains(&answered), "{answered} answers to {sent_again}");
    }

    #[test]
    fn a_rack_and_the_root_count_their_own_contributions() {
        let network = "[network]\ntopology = \"leaf-spine\"\nleaves = 2\nspines = 1\nhosts = 2\n";
        let report = play(&format!("{network}{JOB}dtype = \"int32\"\n"));
        let of_each: Vec<_> =
            report.switches.iter().map(|switch| (switch.name.as_str(), switch.aggregations)).collect();
        assert_eq!(of_each, [("leaf0", 2 * 6 * 143), ("leaf1", 2 * 6 * 143), ("spine0", 2 * 6 * 143)]);
    }
}
