//! A switch and its workers on the loopback, and how to wait for them.
#![allow(dead_code, reason = "each test file uses its part")]

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::switchml::JobConfig;
use fanin_udp::{
    Failure, Offload, RawTensor, Service, Submission, SwitchConfig, SwitchDriver, WorkerConfig, WorkerDriver,
};
use fanin_wire::{Dtype, Generation, JobId, Key, Op, ShardId, WireDtype, WorkerId};
use std::net::{SocketAddr, UdpSocket};
use std::sync::mpsc::{Receiver, channel};

pub struct Cluster {
    pub switch: SwitchDriver,
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
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        shard: ShardId(0),
        resumed: false,
    }
}

impl Cluster {
    pub fn start(workers: usize, shards: usize, offload: Offload) -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let switch = SwitchDriver::bind_with_offload(SwitchConfig { listen, shards }, offload).unwrap();
        Self::join(switch, job(workers), workers, shards, offload)
    }

    /// A job whose floats travel as bfloat16.
    pub fn start_bfloat16(workers: usize, shards: usize) -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let switch = SwitchDriver::bind(SwitchConfig { listen, shards }).unwrap();
        let job = JobConfig { wire_dtype: WireDtype::Bfloat16, ..job(workers) };
        Self::join(switch, job, workers, shards, Offload::Detect)
    }

    fn join(switch: SwitchDriver, job: JobConfig, workers: usize, shards: usize, offload: Offload) -> Self {
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
        services: vec![Service {
            job: (job, WorkerId(rank as u8)).into(),
            switch,
            shards,
            share: 1.0,
            home: None,
        }],
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
