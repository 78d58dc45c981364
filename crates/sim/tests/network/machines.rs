//! The protocols' own machines on the network, and the header bits that queues set.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::switchml::{JobConfig, Switch, Worker};
use fanin_protocol::{
    Elements, JobAborted, RetransmissionConfig, Summer, Tensor, Verdict, WorkerEvent, WorkerMachine,
};
use fanin_sim::net::{
    Actor, Body, Class, Context, LinkId, Loss, Machine, Network, NetworkConfig, NodeId, Outcome, Owner,
    Packet, Parts, Programmable, QueueConfig, SimAddress, Time, Topology,
};
use fanin_wire::{
    Collective, Directions, Dtype, Flags, Generation, GradientHeader, GradientPacket, JobId, Key, Kind, Op,
    Pattern, Preamble, ShardId, SlotPacket, WireDtype, WorkerId,
};

use crate::support::*;

const WORKERS: u8 = 4;
const ELEMENTS: i32 = 20_000;

struct Numbers(Vec<i32>);

impl Tensor for Numbers {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Int32(&mut self.0)
    }
}

type SimWorker = Worker<SimAddress, Numbers>;
type Done = Rc<RefCell<Vec<(u8, Time, Vec<i32>)>>>;

/// Submits one tensor at the start, and notes its sum.
struct User {
    rank: u8,
    done: Done,
    handled: u64,
}

impl Owner<SimWorker> for User {
    fn start(&mut self, worker: &mut SimWorker, _: &mut Context<'_>) {
        let rank = i32::from(self.rank);
        worker.submit(Numbers((0..ELEMENTS).map(|at| at * (rank + 1)).collect()), Op::Sum);
    }

    fn event(&mut self, _: &mut SimWorker, event: WorkerEvent<Numbers>, context: &mut Context<'_>) {
        let WorkerEvent::Completed(tensor, _) = event else { panic!("the job was aborted") };
        let mut done = self.done.borrow_mut();
        done.push((self.rank, context.time(), tensor.0));
        if done.len() == usize::from(WORKERS) {
            context.stop();
        }
    }

    fn handled(&mut self, _: &Packet<'_>, verdict: Verdict, _: &mut Context<'_>) {
        self.handled += u64::from(verdict == Verdict::Absorb);
    }
}

fn all_alike(_: &SimWorker, _: &[u8]) -> Class {
    Class::default()
}

/// `SwitchML`: four workers around a programmable switch. Returns the network and the results.
fn all_reduce(seed: u64, loss: f64, classify: fn(&SimWorker, &[u8]) -> Class) -> (Network, Done, u64) {
    let mut topology = Topology::one_rack(WORKERS.into(), &Parts::uniform(byte_a_nano())).unwrap();
    topology.set_programmable(&Programmable::Layers(vec![0])).unwrap();
    let links = topology.links().len() as u32;
    let mut network = Network::new(topology, NetworkConfig { seed, ..NetworkConfig::default() }).unwrap();
    for port in (0..links).flat_map(|link| LinkId(link).ports()) {
        network.impair(port, Loss::Uniform(loss).into());
    }
    let config = JobConfig {
        id: JobId(7),
        key: Key::new(7),
        generation: Generation(0),
        workers: WORKERS.into(),
        slots: 16,
        window: 16,
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        shard: ShardId(0),
        resumed: false,
    };
    let switch = network.topology().programmable().next().unwrap();
    let address = SimAddress::new(switch, PORT);
    let mut machine = Switch::new(ShardId(0));
    machine.add_job(config.into()).expect("within its limits");
    let owner = |_: &mut Switch<SimAddress>, event: JobAborted, _: &mut Context<'_>| panic!("{event:?}");
    network.add_actor(switch, PORT, Machine::new(machine, owner));
    let done = Done::default();
    let mut workers = Vec::new();
    for rank in 0..WORKERS {
        let retransmission =
            RetransmissionConfig { floor: Duration::from_micros(200), ceiling: Duration::from_millis(2) };
        let worker = Worker::new(config, WorkerId(rank), address, retransmission);
        let host = node(&network, &format!("h{rank}"));
        let user = User { rank, done: Rc::clone(&done), handled: 0 };
        workers.push(network.add_actor(host, PORT, Machine::new(worker, user).classified(classify)));
    }
    assert_eq!(network.run_until(Time::from_millis(10_000)), Outcome::Stopped, "seed {seed}");
    let handled =
        workers.iter().map(|id| network.actor::<Machine<SimWorker, User>>(*id).unwrap().owner.handled);
    let handled = handled.sum();
    (network, done, handled)
}

#[test]
fn workers_and_switch_sum_over_the_network() {
    let (network, done, handled) = all_reduce(1, 0.0, all_alike);
    let expected: Vec<_> = (0..ELEMENTS).map(|at| at * 10).collect();
    assert!(done.borrow().iter().all(|(_, _, sum)| *sum == expected));
    // 79 chunks of 256 elements, once to and once from the switch, for each worker.
    assert_eq!(handled, 79 * 4);
    assert_eq!(network.progress().packet_hops, 79 * 4 * 2);
    // A tensor of 80 kB, at a byte a nanosecond, with 16 chunks on the way.
    let last = done.borrow().last().unwrap().1;
    assert!(last > Time::from_micros(81) && last < Time::from_micros(120), "{last}");
}

#[test]
fn a_machine_gives_each_of_its_packets_a_class() {
    /// Chunks of odd slots can wait.
    fn by_slot(worker: &SimWorker, packet: &[u8]) -> Class {
        assert!(worker.statistics().packets_sent > 0, "the machine has sent it");
        let preamble = Preamble::parse(packet).unwrap();
        let slot = SlotPacket::parse(&preamble, packet).unwrap().header.slot;
        Class { priority: if slot.0 % 2 == 1 { 3 } else { 1 }, ..Class::DEFAULT }
    }
    let (network, done, _) = all_reduce(1, 0.0, by_slot);
    assert_eq!(done.borrow().len(), usize::from(WORKERS));
    let nic = LinkId(0).ports()[0];
    assert_eq!(network.topology().port(node(&network, "h0"), LinkId(0)), Some(nic));
    // Sixteen chunks at once: the first goes out as it comes, the others wait, each half in its own
    // queue.
    let waited: Vec<u64> = (0..8).map(|priority| network.queue(nic, priority).bytes_max).collect();
    assert!((0..8).all(|priority| (waited[priority] > 0) == [1, 3].contains(&priority)), "{waited:?}");
}

#[test]
fn they_sum_exactly_over_links_that_lose() {
    for seed in 0..10 {
        let (_, done, _) = all_reduce(seed, 0.05, all_alike);
        let expected: Vec<_> = (0..ELEMENTS).map(|at| at * 10).collect();
        assert!(done.borrow().iter().all(|(_, _, sum)| *sum == expected), "seed {seed}");
    }
}

#[test]
fn the_same_seed_is_the_same_run_to_the_last_byte() {
    let run = |seed| {
        let (network, done, _) = all_reduce(seed, 0.05, all_alike);
        let times: Vec<_> = done.borrow().iter().map(|(rank, time, _)| (*rank, *time)).collect();
        (network.digest(), network.progress(), times)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).0, run(4).0);
}

/// Sends a burst of gradient packets, and of others that only look like them from afar.
struct Burst(SimAddress);

impl Actor for Burst {
    fn start(&mut self, context: &mut Context<'_>) {
        for sequence in 0..20 {
            let mut packet = gradient(sequence);
            context.send(self.0, Class::default(), &packet);
            // Another kind.
            packet[3] = 0xff;
            context.send(self.0, Class::default(), &packet);
        }
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}
}

fn gradient(sequence: u64) -> Vec<u8> {
    let preamble = Preamble {
        kind: Kind::Gradient,
        job: JobId(1),
        generation: Generation(0),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let header = GradientHeader {
        flags: Flags::default(),
        directions: Directions::default(),
        sequence,
        aggregator_index: 0,
        fragment: 0,
        collective: Collective {
            sequence: 0,
            dtype: Dtype::Float32,
            op: Op::Sum,
            pattern: Pattern::AllReduce,
            elements: 64,
            wire_dtype: WireDtype::SharedExponent,
        },
        exponent: GradientHeader::STATIC_FACTOR,
        next_exponent: 0,
    };
    let mut out = vec![0; 2000];
    let bytes =
        GradientPacket::write(&mut out, Key::new(1), &preamble, &header, 64, |payload| payload.fill(1));
    out.truncate(bytes);
    out
}

/// Which of the gradient packets came with a mark in their header, and whether the network says so
/// too.
#[derive(Default)]
struct Marks {
    gradients: Vec<(u64, bool, bool)>,
    others: Vec<Vec<u8>>,
}

impl Actor for Marks {
    fn packet(&mut self, _: &mut Context<'_>, packet: &Packet<'_>) {
        let Body::Bytes(bytes) = packet.body else { panic!("bytes were sent") };
        match Preamble::parse(bytes).and_then(|preamble| GradientPacket::parse(preamble, bytes)) {
            Ok(gradient) => {
                let GradientHeader { sequence, flags, .. } = gradient.header;
                self.gradients.push((sequence, flags.ecn, packet.ecn_marked));
            }
            Err(_) => self.others.push(bytes.to_vec()),
        }
    }
}

#[test]
fn a_queue_above_its_threshold_sets_the_flag_in_gradient_packets_and_leaves_others_as_they_are() {
    let mut parts = Parts::uniform(byte_a_nano());
    // The burst waits in the sender's own NIC: 394 bytes each on the link, the first of which goes
    // at once.
    parts.host.queues = [QueueConfig::tail_drop(1 << 20).with_ecn(10 * 394); 8];
    let mut network = network(Topology::one_rack(2, &parts).unwrap(), 1);
    let (from, to): (NodeId, NodeId) = (node(&network, "h0"), node(&network, "h1"));
    let marks = network.add_actor(to, PORT, Marks::default());
    network.add_actor(from, PORT, Burst(SimAddress::new(to, PORT)));
    network.run_until(Time::from_millis(1));
    let marks: &Marks = network.actor(marks).unwrap();
    // Gradients are every second packet: up to the fifth after the first, ten at most waited.
    let expected: Vec<_> = (0..20).map(|sequence| (sequence, sequence > 5, sequence > 5)).collect();
    assert_eq!(marks.gradients, expected);
    for (sequence, other) in (0..).zip(&marks.others) {
        let mut sent = gradient(sequence);
        sent[3] = 0xff;
        assert_eq!(*other, sent);
    }
    assert_eq!(marks.others.len(), 20);
    assert_eq!(network.queue(LinkId(0).ports()[0], 0).marked, 29);
}

#[test]
#[should_panic(expected = "s0 is not programmable")]
fn nothing_lives_on_a_switch_that_is_not_programmable() {
    let mut network = network(rack(2, QueueConfig::tail_drop(1 << 20)), 1);
    let switch = node(&network, "s0");
    sink(&mut network, switch);
}
