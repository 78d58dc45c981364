//! Workers whose packets take several paths and say of which layer they are, and a server that is played here.

mod common;

use common::{begin, finished, raw};
use fanin_protocol::dlcp::{Dlcp, FlowPlan, RankTerms, Server, ServerJob};
use fanin_protocol::{Endpoint, Instant, RetransmissionConfig, Summer, Verdict};
use fanin_udp::{Layer, Membership, Service, Submission, WorkerConfig, WorkerDriver};
use fanin_wire::{Dtype, Generation, JobId, Key, Kind, LossBound, Op, Preamble, ShardId, Tag, WorkerId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

const WORKERS: u16 = 2;
const PATHS: u8 = 5;

/// Which ports a worker's packets came from, with the path that they name; and to which its sums were sent.
#[derive(Default)]
struct Seen {
    from: BTreeMap<u16, BTreeSet<u8>>,
    to: BTreeMap<u16, usize>,
    /// The queues that its blocks are for.
    priorities: BTreeSet<u8>,
}

/// What is seen while all workers sum a tensor of this layer.
fn summed(layer: Layer) -> Vec<Seen> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let switch = socket.local_addr().unwrap();
    // Slow enough for buffers of any kernel.
    let plan = FlowPlan::new(LossBound::RELIABLE, WORKERS, 256, 200_000_000).over(PATHS.into());
    let config = plan.job_config((JobId(7), Key::new(7), Generation(0)), WORKERS, 256);
    let worker = |rank: u16| {
        let job =
            Membership::of(&Dlcp, RankTerms { config, place: WorkerId(rank as u8), resumes_at: vec![] });
        let services = vec![Service { job, switch, shards: 1, share: 1.0, home: None }];
        let retransmission = RetransmissionConfig::default();
        WorkerDriver::start(WorkerConfig { services, retransmission, host: None }).unwrap()
    };
    let workers: Vec<_> = (0..WORKERS).map(worker).collect();
    let mut tensors = vec![(0..200_000).map(|i| i as f32).collect::<Vec<_>>(); WORKERS.into()];
    let waits: Vec<_> = workers
        .iter()
        .zip(&mut tensors)
        .map(|(worker, tensor)| {
            let all_reduce = Submission::all_reduce(raw(tensor, Dtype::Float32), Op::Sum);
            begin(worker, all_reduce.of_layer(layer))
        })
        .collect();
    let is_done = || workers.iter().all(|worker| worker.outstanding() == 0);
    let seen = serve(&socket, ServerJob::from(config), is_done);
    waits.iter().for_each(|wait| finished(wait).unwrap());
    for tensor in &tensors {
        assert!(tensor.iter().enumerate().all(|(i, sum)| *sum == f32::from(WORKERS) * i as f32));
    }
    seen
}

#[test]
fn packets_leave_from_a_port_a_path_and_sums_come_back_to_all() {
    for Seen { from, to, .. } in summed(Layer::default()) {
        assert_eq!(from.len(), usize::from(PATHS), "a port a path: {from:?}");
        let paths: BTreeSet<_> = from.values().flatten().collect();
        assert_eq!(paths.len(), usize::from(PATHS), "{from:?}");
        assert!(from.values().all(|paths| paths.len() == 1), "{from:?}");
        assert!(to.keys().eq(from.keys()), "{from:?} {to:?}");
        let most = to.values().max().unwrap();
        assert!(to.values().all(|blocks| 4 * blocks > *most), "{to:?}");
    }
}

#[test]
fn blocks_are_for_the_queue_of_their_layer() {
    for ((index, count), priority) in [((0, 1), 1), ((0, 3), 1), ((1, 3), 3), ((2, 3), 5), ((9, 10), 7)] {
        for Seen { priorities, .. } in summed(Layer { index, count }) {
            assert_eq!(priorities, BTreeSet::from([priority]), "layer {index} of {count}");
        }
    }
}

/// Serves the job until it is done; what was seen of each worker.
fn serve(socket: &UdpSocket, job: ServerJob, is_done: impl Fn() -> bool) -> Vec<Seen> {
    let mut server: Server<SocketAddr> = Server::new(ShardId(0));
    let mut seen: Vec<_> = (0..job.config.workers).map(|_| Seen::default()).collect();
    server.add_job(job).unwrap();
    let (mut packet, mut train) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let began = std::time::Instant::now();
    while !is_done() {
        if let Ok((length, from)) = socket.recv_from(&mut packet) {
            let packet = &packet[..length];
            let worker = usize::from(Preamble::parse(packet).unwrap().worker.0);
            let Tag { path, priority, .. } = Tag::of_any(packet).unwrap();
            seen[worker].from.entry(from.port()).or_default().insert(path);
            if Preamble::parse(packet).unwrap().kind == Kind::Block {
                seen[worker].priorities.insert(priority);
            }
            let now = Instant(began.elapsed().as_nanos() as u64);
            let verdict = server.handle_packet(now, from, packet);
            assert!(!matches!(verdict, Verdict::Drop(fanin_protocol::Reason::Malformed)));
        }
        let now = Instant(began.elapsed().as_nanos() as u64);
        if server.poll_timeout().is_some_and(|due| due <= now) {
            server.handle_timeout(now);
        }
        while let Some(sent) = server.poll_transmit(now, &mut train) {
            let (bytes, segment_bytes, to) = (sent.bytes, sent.segment_bytes, sent.to.to_vec());
            for to in to {
                for packet in train[..bytes].chunks(segment_bytes) {
                    socket.send_to(packet, to).unwrap();
                    let Preamble { kind, .. } = Preamble::parse(packet).unwrap();
                    if kind == Kind::Block {
                        // A sum is for all, and each has ports of its own.
                        let whose = seen.iter_mut().find(|seen| seen.from.contains_key(&to.port())).unwrap();
                        *whose.to.entry(to.port()).or_default() += 1;
                    }
                }
            }
        }
    }
    seen
}
