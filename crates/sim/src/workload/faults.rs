//! Single faults: links and nodes that are away, machines that lose their memory, jobs that vanish.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::build::Layout;
use super::job::Job;
use super::scenario::{Fault, FaultPlan};
use crate::net::{Actor, Context, LinkId, Listener, Network, NodeId, Packet};
use crate::systems::Role;

/// How often a process that cannot reach its server, or the next service, asks for it.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// The things that are away, and how many outages of each go on: it is back when the last of them
/// is over.
#[derive(Default)]
pub(crate) struct Outages(RefCell<BTreeMap<Away, u32>>);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Away {
    Link(LinkId),
    Node(NodeId),
    /// A host's servers.
    Servers(NodeId),
}

impl Outages {
    /// Something is away from now on, unless it was already, for so long, unless it is for longer.
    fn outage(
        self: &Rc<Self>,
        network: &mut Network,
        what: Away,
        down: Duration,
        begins: impl FnOnce(&mut Network),
        ends: impl FnOnce(&mut Network) + 'static,
    ) {
        if self.count(what, 1) == 1 {
            begins(network);
        }
        let outages = self.clone();
        later(network, down, move |network| {
            if outages.count(what, -1) == 0 {
                ends(network);
            }
        });
    }

    /// How many go on after this change.
    fn count(&self, what: Away, change: i32) -> u32 {
        let mut outages = self.0.borrow_mut();
        let count = outages.entry(what).or_default();
        *count = count.saturating_add_signed(change);
        *count
    }
}

/// Puts a fault on the agenda.
pub(crate) fn schedule(network: &mut Network, layout: &Rc<Layout>, outages: &Rc<Outages>, plan: FaultPlan) {
    let (layout, outages) = (layout.clone(), outages.clone());
    network.at(plan.at, move |network| match plan.fault {
        Fault::LinkFails(link, down) => {
            let set = move |up| move |network: &mut Network| network.set_link(link, up);
            outages.outage(network, Away::Link(link), down, set(false), set(true));
        }
        Fault::NodeFails(node, down) => {
            let place = layout.clone();
            let begins = move |network: &mut Network| {
                let now = network.time().instant();
                place.jobs.iter().for_each(|of| of.job.borrow_mut().interrupted(Some(node), now));
                network.set_node(node, false);
            };
            outages.outage(network, Away::Node(node), down, begins, move |network| {
                forget(network, &layout, node);
                network.set_node(node, true);
                resume_through(network, &layout, node);
            });
        }
        Fault::SwitchForgets(node) => {
            forget(network, &layout, node);
            resume_through(network, &layout, node);
        }
        Fault::ServerRestarts(job, down) => restart_server(network, &layout, &outages, job, down),
        Fault::WorkerRespawns(job, rank, down) => respawn(network, &layout, job, rank.into(), down),
        Fault::ServiceDies(node) => lose_service(network, &layout, node),
        Fault::JobDies(job) => die(network, &layout, job),
    });
}

fn later(network: &mut Network, wait: Duration, act: impl FnOnce(&mut Network) + 'static) {
    let at = network.time() + wait;
    network.at(at, act);
}

/// Nobody is there: packets come to nothing.
fn absent() -> Listener<impl FnMut(&mut Context<'_>, u64) + 'static> {
    Listener(|_: &mut Context<'_>, _| {})
}

/// The machines on a switch have lost their memory; its jobs are those that they were.
fn forget(network: &mut Network, layout: &Layout, node: NodeId) {
    layout.taking(network, |network| {
        for station in layout.at(node).filter(|station| station.role() == Role::Switch) {
            station.forget(network);
        }
    });
}

/// All jobs of the server's host lose their sums; workers bring them back.
fn restart_server(
    network: &mut Network,
    layout: &Rc<Layout>,
    outages: &Rc<Outages>,
    job: usize,
    down: Duration,
) {
    let Some(node) = layout.scenario.jobs[job].system.server() else { return };
    let servers = move |layout: &Layout| -> Vec<_> {
        layout.at(node).filter(|station| station.role() == Role::Server).cloned().collect()
    };
    let begins = |network: &mut Network| {
        layout.taking(network, |network| {
            for server in servers(layout) {
                network.replace_actor(server.actor(), absent());
            }
        });
    };
    let layout = layout.clone();
    outages.outage(network, Away::Servers(node), down, begins, move |network| {
        for server in servers(&layout) {
            server.forget(network);
        }
        resume_through(network, &layout, node);
    });
}

fn resume_through(network: &mut Network, layout: &Layout, node: NodeId) {
    for place in &layout.jobs {
        place.machines.resume(network, node);
    }
}

/// A host's service is gone for good: others of its jobs take over, each after the job's time.
fn lose_service(network: &mut Network, layout: &Rc<Layout>, node: NodeId) {
    for service in layout.at(node).filter(|station| station.role() == Role::Service) {
        network.replace_actor(service.actor(), absent());
    }
    for (index, plan) in layout.scenario.jobs.iter().enumerate() {
        let (services, wait) = plan.system.services();
        if services.contains(&node) {
            let layout = layout.clone();
            later(network, wait, move |network| take_over(network, &layout, index, node));
        }
    }
}

/// Another service goes on with what the one on `node` summed, as soon as one can.
fn take_over(network: &mut Network, layout: &Rc<Layout>, index: usize, node: NodeId) {
    let place = &layout.jobs[index];
    // Nobody waits for a sum any more.
    let is_over = !place.job.borrow().is_open();
    if !is_over && !place.machines.take_over(network, node) {
        let layout = layout.clone();
        later(network, ASK_AGAIN, move |network| take_over(network, &layout, index, node));
    }
}

/// All machines of a job are gone, and what it had in the switches' aggregators stays there.
fn die(network: &mut Network, layout: &Layout, job: usize) {
    let place = &layout.jobs[job];
    layout.taking(network, |network| {
        for actor in place.tenant.machines() {
            network.replace_actor(actor, Dead(place.job.clone()));
        }
        place.machines.die(network);
    });
}

/// A worker is gone for a while, and another process takes its rank.
fn respawn(network: &mut Network, layout: &Rc<Layout>, index: usize, rank: usize, down: Duration) {
    let place = &layout.jobs[index];
    let actor = {
        let mut job = place.job.borrow_mut();
        if job.dead || job.workers[rank].finished || std::mem::replace(&mut job.workers[rank].away, true) {
            return;
        }
        let node = job.plan.workers[rank];
        job.interrupted(Some(node), network.time().instant());
        job.workers[rank].actors[0]
    };
    layout.taking(network, |network| {
        network.replace_actor(actor, absent());
    });
    let layout = layout.clone();
    later(network, down, move |network| take_rank(network, &layout, index, rank));
}

/// The new process has come up.
fn take_rank(network: &mut Network, layout: &Rc<Layout>, index: usize, rank: usize) {
    let place = &layout.jobs[index];
    // Without a server nobody can say where the job stands.
    if place.tenant.is_dead() || place.tenant.plan().system.server().is_none() {
        return;
    }
    // The machine starts only when the run goes on: nobody can miss the actor's new number.
    match place.machines.respawn(network, place.tenant.process(rank, 0)) {
        Some(actor) => place.job.borrow_mut().workers[rank].actors[0] = actor,
        None => {
            // The server is away as well; ask again.
            let layout = layout.clone();
            later(network, ASK_AGAIN, move |network| take_rank(network, &layout, index, rank));
        }
    }
}

/// The remainder of a worker whose job has died: it says so once.
struct Dead(Rc<RefCell<Job>>);

impl Actor for Dead {
    fn start(&mut self, context: &mut Context<'_>) {
        self.0.borrow_mut().die(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}
}
