//! A switch and its workers on the loopback, and how to wait for them.
#![allow(dead_code, reason = "each test file uses its part")]

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::switchml::{JobConfig, RankTerms, Switch, SwitchMl};
use fanin_udp::{
    Failure, Host, Membership, Offload, Peer, RawTensor, Service, Submission, WorkerConfig, WorkerDriver,
};
use fanin_wire::{Dtype, Generation, JobId, Key, Op, ShardId, SlotIndex, WireDtype, WorkerId};
use std::net::{SocketAddr, UdpSocket};
use std::sync::mpsc::{Receiver, channel};

pub type SwitchHost = Host<Switch<Peer>>;

/// The switch of each shard.
fn machines(shards: usize) -> impl Iterator<Item = Switch<Peer>> {
    (0..shards as u8).map(ShardId).map(Switch::new)
}

pub fn bind(listen: SocketAddr, shards: usize) -> SwitchHost {
    Host::bind(listen, machines(shards)).unwrap()
}

/// A job of a switch alone, as one of its workers was admitted to it.
pub fn member(job: JobConfig, rank: usize) -> Membership {
    member_with(job, rank, &[])
}

/// One that hands the sums of these slots back, a list a shard.
pub fn member_with(job: JobConfig, rank: usize, restore: &[Vec<SlotIndex>]) -> Membership {
    let terms = RankTerms::from((job, WorkerId(rank as u8)));
    Membership::of(&SwitchMl, RankTerms { restore: restore.to_vec(), ..terms })
}

pub struct Cluster {
    pub switch: SwitchHost,
    pub workers: Vec<WorkerDriver>,
    pub job: JobConfig,
}

pub fn job(workers: usize) -> JobConfig {
    JobConfig {
        id: JobId(0x0fa1_1000 + workers as u32),
        key: Key::new(workers as u128),
        generation: Generation(1),
        workers: workers as u16,
        slots: 16,
        window: 16,
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        shard: ShardId(0),
        resumed: false,
    }
}

impl Cluster {
    pub fn start(workers: usize, shards: usize, offload: Offload) -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let switch = Host::bind_with_offload(listen, machines(shards), offload).unwrap();
        Self::join(switch, job(workers), workers, shards, offload)
    }

    /// A job whose floats travel as bfloat16.
    pub fn start_bfloat16(workers: usize, shards: usize) -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let switch = bind(listen, shards);
        let job = JobConfig { wire_dtype: WireDtype::Bfloat16, ..job(workers) };
        Self::join(switch, job, workers, shards, Offload::Detect)
    }

    fn join(switch: SwitchHost, job: JobConfig, workers: usize, shards: usize, offload: Offload) -> Self {
        switch.add_job(job.into()).unwrap();
        let worker = |rank| worker(job, rank, switch.local_addr(), shards, offload);
        Self { workers: (0..workers).map(worker).collect(), switch, job }
    }

    pub fn outstanding(&self) -> usize {
        self.workers.iter().map(WorkerDriver::outstanding).sum()
    }

    /// Sums integers that differ by worker and place, and checks the sum of each place on each worker.
    pub fn all_reduce_integers(&self, length: usize) {
        let value = |rank: usize, i: usize| (rank as i32 + 1) * 1_000_003 + i as i32 * 7;
        let workers = self.workers.len();
        let mut tensors: Vec<Vec<i32>> =
            (0..workers).map(|rank| (0..length).map(|i| value(rank, i)).collect()).collect();
        self.all_reduce(&mut tensors, Dtype::Int32, Op::Sum);
        let expected: Vec<i32> = (0..length).map(|i| (0..workers).map(|rank| value(rank, i)).sum()).collect();
        for (rank, tensor) in tensors.iter().enumerate() {
            assert!(tensor == &expected, "worker {rank} of {workers}, {length} elements");
        }
    }

    pub fn all_reduce<E>(&self, tensors: &mut [Vec<E>], dtype: Dtype, op: Op) {
        let waits: Vec<_> = self
            .workers
            .iter()
            .zip(tensors)
            .map(|(worker, tensor)| submit(worker, tensor, dtype, op))
            .collect();
        waits.iter().for_each(|wait| finished(wait).unwrap());
    }
}

pub fn worker(
    job: JobConfig,
    rank: usize,
    switch: SocketAddr,
    shards: usize,
    offload: Offload,
) -> WorkerDriver {
    let config = WorkerConfig {
        services: vec![Service { job: member(job, rank), switch, shards, share: 1.0, home: None }],
        retransmission: RetransmissionConfig::default(),
        host: None,
    };
    WorkerDriver::start_with_offload(config, offload).unwrap()
}

/// A socket where the only worker of a job believes its switch to be.
pub fn worker_of_a_false_switch(shards: usize) -> (UdpSocket, WorkerDriver) {
    let switch = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = switch.local_addr().unwrap();
    (switch, worker(job(1), 0, address, shards, Offload::Detect))
}

pub type Wait = Receiver<Result<(), Failure>>;

/// The caller awaits the result before it touches or drops `tensor`.
pub fn submit<E>(worker: &WorkerDriver, tensor: &mut [E], dtype: Dtype, op: Op) -> Wait {
    begin(worker, Submission::all_reduce(raw(tensor, dtype), op))
}

/// As the driver is given it; whoever submits it awaits the result before anybody touches or drops `tensor`.
pub fn raw<E>(tensor: &mut [E], dtype: Dtype) -> RawTensor {
    assert_eq!(size_of::<E>(), dtype.element_bytes());
    // SAFETY: every test keeps the tensor, and its hands off it, until the result came.
    unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), dtype) }.unwrap()
}

pub fn begin(worker: &WorkerDriver, submission: Submission) -> Wait {
    let (sender, receiver) = channel();
    worker.submit(submission, Box::new(move |result| drop(sender.send(result.map(drop)))));
    receiver
}

pub fn finished(wait: &Wait) -> Result<(), Failure> {
    wait.recv().expect("done is called")
}
