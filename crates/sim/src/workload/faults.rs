//! What goes wrong once: links and nodes that are away, machines that lose their memory, jobs that vanish.

use std::rc::Rc;
use std::time::Duration;

use super::build::Layout;
use super::scenario::{Fault, FaultPlan};
use crate::net::{Listener, Network, NodeId};

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
            });
        }
        Fault::SwitchForgets(node) => forget(network, &layout, node),
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
fn absent() -> Listener<impl FnMut(&mut crate::net::Context<'_>, u64) + 'static> {
    Listener(|_: &mut crate::net::Context<'_>, _| {})
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
    });
}

/// All machines of a job are gone, and what it had in the switches' aggregators stays there.
fn die(network: &mut Network, layout: &Layout, job: usize) {
    let place = &layout.jobs[job];
    place.job.borrow_mut().die();
    let actors: Vec<_> = place.job.borrow().workers.iter().flat_map(|worker| worker.actors.clone()).collect();
    for actor in actors {
        network.replace_actor(actor, absent());
    }
    for shard in &place.shards {
        let server = shard.server.and_then(|node| layout.servers.get(&node));
        if let Some(server) = server {
            network.with_actor(server.actor, |machine: &mut super::build::ServerMachine, context| {
                machine.machine.remove_job(shard.id);
                machine.drain(context);
            });
        }
    }
}

/// A worker is gone for a while, and another takes its rank (ATP §A.3).
fn respawn(_network: &mut Network, _layout: &Rc<Layout>, _job: usize, _rank: usize, _down: Duration) {}
