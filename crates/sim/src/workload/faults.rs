//! What goes wrong once: links and nodes that are away, machines that lose their memory, jobs that vanish.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::atp::AtpWorkerPlan;
use fanin_protocol::{Summer, WorkerMachine};

use super::actors::Begins;
use super::build::{AtpMachine, Layout, ServerMachine, ServerPlace, key_of};
use super::job::Job;
use super::scenario::{Fault, FaultPlan};
use crate::net::{Actor, Context, Listener, Network, NodeId, Packet};

/// How often a process that cannot reach its server asks for it.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// Puts a fault on the agenda.
pub(crate) fn schedule(network: &mut Network, layout: &Rc<Layout>, plan: FaultPlan) {
    let layout = layout.clone();
    network.at(plan.at, move |network| match plan.fault {
        Fault::LinkFails(link, down) => {
            network.set_link(link, false);
            later(network, down, move |network| network.set_link(link, true));
        }
        Fault::NodeFails(node, down) => {
            network.set_node(node, false);
            later(network, down, move |network| {
                forget(network, &layout, node);
                network.set_node(node, true);
                resume_through(network, &layout, node);
            });
        }
        Fault::SwitchForgets(node) => {
            forget(network, &layout, node);
            resume_through(network, &layout, node);
        }
        Fault::ServerRestarts(job, down) => restart_server(network, &layout, job, down),
        Fault::WorkerRespawns(job, rank, down) => respawn(network, &layout, job, rank.into(), down),
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

/// A switch's aggregators are empty; its jobs are those that they were. SwitchML's pools stay as they are: how its jobs are
/// admitted again is the fault world's to try.
fn forget(network: &mut Network, layout: &Layout, node: NodeId) {
    if let Some(place) = layout.switches.get(&node) {
        network.replace_actor(place.actor, layout.switch_machine(node));
    }
}

/// All jobs of the server's host lose their sums; workers bring them back.
fn restart_server(network: &mut Network, layout: &Rc<Layout>, job: usize, down: Duration) {
    let Some((node, actor)) = layout.jobs[job].shards[0]
        .server
        .and_then(|node| layout.servers.get(&node).map(|place| (node, place.actor)))
    else {
        return;
    };
    network.replace_actor(actor, absent());
    let layout = layout.clone();
    later(network, down, move |network| {
        network.replace_actor(actor, layout.server_machine(node, true));
        resume_through(network, &layout, node);
    });
}

/// The controller tells the workers of all jobs that use a switch or server that it is back. They would find out by themselves,
/// but for one who has nothing to send: a server that forgot as well may need what only he has.
fn resume_through(network: &mut Network, layout: &Layout, node: NodeId) {
    for (index, place) in layout.jobs.iter().enumerate() {
        for (number, shard) in place.shards.iter().enumerate() {
            let hops = shard.placement.iter().flat_map(|placement| &placement.switches);
            if shard.server == Some(node) || hops.into_iter().any(|hop| hop.switch == node) {
                resume(network, layout, index, number);
            }
        }
    }
}

fn resume(network: &mut Network, layout: &Layout, index: usize, shard: usize) {
    let place = &layout.jobs[index];
    let actors: Vec<_> = place.job.borrow().workers.iter().map(|worker| worker.actors[shard]).collect();
    for (rank, actor) in actors.into_iter().enumerate() {
        let lives = network.actor::<AtpMachine>(actor).is_some();
        if let Some((directions, upstream)) = layout.way_up(index, rank, shard).filter(|_| lives) {
            network.with_actor(actor, |machine: &mut AtpMachine, context| {
                let (id, generation) = (place.shards[shard].id, machine.machine.generation());
                let plan = AtpWorkerPlan { id, key: key_of(id), generation, directions, upstream };
                machine.machine.resume(context.now(), plan);
                machine.drain(context);
            });
        }
    }
}

/// All machines of a job are gone, and what it had in the switches' aggregators stays there.
fn die(network: &mut Network, layout: &Layout, job: usize) {
    let place = &layout.jobs[job];
    let actors: Vec<_> = place.job.borrow().workers.iter().flat_map(|worker| worker.actors.clone()).collect();
    for actor in actors {
        network.replace_actor(actor, Dead(place.job.clone()));
    }
    for shard in &place.shards {
        let server = shard.server.and_then(|node| layout.servers.get(&node));
        let lives = |place: &&ServerPlace| network.actor::<ServerMachine>(place.actor).is_some();
        if let Some(server) = server.filter(lives) {
            network.with_actor(server.actor, |machine: &mut ServerMachine, context| {
                machine.machine.remove_job(shard.id);
                machine.drain(context);
            });
        }
    }
}

/// A worker is gone for a while, and another process takes its rank, on the same host but at another port (ATP §A.3). It
/// begins where the server says that the job stands; the parameters of before it would copy from another worker.
fn respawn(network: &mut Network, layout: &Rc<Layout>, index: usize, rank: usize, down: Duration) {
    let place = &layout.jobs[index];
    let actor = {
        let mut job = place.job.borrow_mut();
        if job.dead || job.workers[rank].finished || std::mem::replace(&mut job.workers[rank].away, true) {
            return;
        }
        job.workers[rank].actors[0]
    };
    network.replace_actor(actor, absent());
    let layout = layout.clone();
    later(network, down, move |network| take_rank(network, &layout, index, rank));
}

/// The new process has come up.
fn take_rank(network: &mut Network, layout: &Rc<Layout>, index: usize, rank: usize) {
    let place = &layout.jobs[index];
    if place.job.borrow().dead {
        return;
    }
    let shard = &place.shards[0];
    let Some(server) = shard.server else { return };
    if layout.servers.get(&server).is_none_or(|place| network.actor::<ServerMachine>(place.actor).is_none()) {
        // The server is away as well; ask again.
        let layout = layout.clone();
        return later(network, ASK_AGAIN, move |network| take_rank(network, &layout, index, rank));
    }
    let earliest = layout.servers.get(&server).and_then(|place| {
        network.with_actor(place.actor, |machine: &mut ServerMachine, _| {
            machine.machine.progress(shard.id).map(|progress| progress.earliest)
        })
    });
    let (Some(earliest), Some(mut machine)) = (earliest, layout.atp_worker(index, rank, 0)) else { return };
    let (tensor, fragment) = place.job.borrow().locate(earliest);
    machine.machine.begin_at(earliest, tensor as u16, fragment);
    machine.owner.begins = Begins::InPlaceOfAnother(tensor, fragment);
    if let Some(window) = &shard.window {
        window.borrow_mut().begins_at(rank, earliest);
    }
    let node = layout.scenario.jobs[index].workers[rank];
    // The machine starts only when the run goes on: nobody can miss the actor's new number.
    let actor = network.add_actor(node, layout.port(node), machine);
    place.job.borrow_mut().workers[rank].actors[0] = actor;
}

/// What is left of a worker whose job has died: it says so once.
struct Dead(Rc<RefCell<Job>>);

impl Actor for Dead {
    fn start(&mut self, context: &mut Context<'_>) {
        self.0.borrow_mut().die(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}
}
