//! A job that several services sum.

mod common;

use common::{SwitchHost, bind, finished, job, member, member_with, submit};
use fanin_protocol::RetransmissionConfig;
use fanin_protocol::switchml::JobConfig;
use fanin_udp::{Failure, RawTensor, Service, Submission, WorkerConfig, WorkerDriver};
use fanin_wire::{Dtype, Generation, JobId, Op, SlotIndex, WorkerId};

const WORKERS: usize = 3;

struct Services {
    switches: Vec<SwitchHost>,
    jobs: Vec<JobConfig>,
    workers: Vec<WorkerDriver>,
}

impl Services {
    /// One for each share and number of shards.
    fn start(services: &[(f64, usize)]) -> Self {
        Self::start_on(services, |_| None, &[])
    }

    /// Each on the machine of the worker that `home` says, with workers on the threads of services: of each of them a worker and a service.
    fn start_on(
        services: &[(f64, usize)],
        home: impl Fn(usize) -> Option<WorkerId>,
        beside: &[(usize, usize)],
    ) -> Self {
        let switches: Vec<_> =
            services.iter().map(|(_, shards)| bind(([127, 0, 0, 1], 0).into(), *shards)).collect();
        let jobs: Vec<_> =
            (0..services.len()).map(|i| JobConfig { id: JobId(77 + i as u32), ..job(WORKERS) }).collect();
        for (switch, job) in switches.iter().zip(&jobs) {
            switch.add_job((*job).into()).unwrap();
        }
        let worker = |rank: usize| {
            let service = |index: usize| {
                let (share, shards) = services[index];
                let (job, switch) = (member(jobs[index], rank), switches[index].local_addr());
                Service { job, switch, shards, share, home: home(index) }
            };
            let services = (0..services.len()).map(service).collect();
            let retransmission = RetransmissionConfig::default();
            let host = beside.iter().find(|(guest, _)| *guest == rank);
            let host = host.map(|(_, service)| switches[*service].threads());
            WorkerDriver::start(WorkerConfig { services, retransmission, host }).unwrap()
        };
        Self { workers: (0..WORKERS).map(worker).collect(), switches, jobs }
    }

    /// Starts sums of integers of which no two are alike, and returns the tensors with what is to come.
    fn begin(&self, tensors: &mut [Vec<i32>]) -> Vec<common::Wait> {
        let submit =
            |(worker, tensor): (&WorkerDriver, &mut Vec<i32>)| submit(worker, tensor, Dtype::Int32, Op::Sum);
        self.workers.iter().zip(tensors).map(submit).collect()
    }

    /// Has each worker submit its tensor in slices of a length, and waits for all.
    fn submit_slices(
        &self,
        tensors: &mut [Vec<i32>],
        length: usize,
        make: impl Fn(Vec<RawTensor>) -> Submission,
    ) {
        let submit = |(worker, tensor): (&WorkerDriver, &mut Vec<i32>)| {
            let slices = tensor.chunks_mut(length).map(|slice| common::raw(slice, Dtype::Int32));
            common::begin(worker, make(slices.collect()))
        };
        let waits: Vec<_> = self.workers.iter().zip(tensors).map(submit).collect();
        waits.iter().for_each(|wait| finished(wait).unwrap());
    }

    fn packets(&self, service: usize) -> u64 {
        self.workers[0].statistics_of(service).packets_sent
    }
}

fn tensors(length: usize) -> Vec<Vec<i32>> {
    (0..WORKERS).map(|rank| (0..length as i32).map(|i| i * 7 + rank as i32 * 1_000_003).collect()).collect()
}

fn check(tensors: &[Vec<i32>]) {
    let expected: Vec<i32> = (0..tensors[0].len() as i32).map(|i| i * 21 + 3 * 1_000_003).collect();
    for (rank, tensor) in tensors.iter().enumerate() {
        assert!(tensor == &expected, "worker {rank}, {} elements", expected.len());
    }
}

#[test]
fn each_service_sums_its_share_of_every_tensor() {
    let services = Services::start(&[(0.5, 1), (0.3, 2), (0.2, 1), (0.0, 1)]);
    let lengths = [1, 0, 255, 1_000_000, 256 * 40, 3, 300_001];
    let mut all: Vec<_> = lengths.map(tensors).into_iter().collect();
    let waits: Vec<_> = all.iter_mut().flat_map(|tensors| services.begin(tensors)).collect();
    waits.iter().for_each(|wait| finished(wait).unwrap());
    all.iter().for_each(|tensors| check(tensors));
    let packets: Vec<u64> = (0..4).map(|service| services.packets(service)).collect();
    let sum: u64 = packets.iter().sum();
    for (packets, share) in packets.iter().zip([0.5, 0.3, 0.2, 0.0]) {
        let measured = *packets as f64 / sum as f64;
        assert!((measured - share).abs() < 0.05, "{packets:?} of {sum}: {share} was asked for");
    }
    for worker in &services.workers {
        assert_eq!(worker.statistics().completed, lengths.len() as u64);
        assert!(worker.imbalance() < 0.05);
    }
}

#[test]
fn slices_go_through_the_services_of_their_roots_and_the_others_get_no_packets() {
    // The second worker has no service of its own.
    let home = |service: usize| [Some(WorkerId(0)), None, Some(WorkerId(2))][service];
    let services = Services::start_on(&[(0.5, 2), (0.3, 1), (0.2, 1)], home, &[]);
    let slice = 100_000;
    let value = |rank: usize, i: usize| (rank * 31 + i) as i32;
    let mut all: Vec<Vec<i32>> =
        (0..WORKERS).map(|rank| (0..WORKERS * slice).map(|i| value(rank, i)).collect()).collect();
    services.submit_slices(&mut all, slice, |slices| Submission::reduce_scatter(slices, Op::Sum));
    let sum = |i: usize| (0..WORKERS).map(|rank| value(rank, i)).sum::<i32>();
    for (rank, tensor) in all.iter().enumerate() {
        for (i, got) in tensor.iter().enumerate() {
            let expected = if i / slice == rank { sum(i) } else { value(rank, i) };
            assert_eq!(*got, expected, "worker {rank}, element {i}");
        }
    }
    // A slice is 391 chunks; those of the second worker go by the shares.
    let sent: Vec<u64> = (0..3).map(|service| services.packets(service)).collect();
    assert!(sent[0] > 391 && sent[0] < 700 && sent[1] > 0 && sent[2] > 391, "{sent:?}");
    services.submit_slices(&mut all, slice, Submission::all_gather);
    for (rank, tensor) in all.iter().enumerate() {
        assert!((0..WORKERS * slice).all(|i| tensor[i] == sum(i)), "worker {rank}");
    }
}

#[test]
fn a_slice_is_shared_by_all_services_of_its_root() {
    // Each worker has two, the first of which takes two thirds.
    let home = |service: usize| Some(WorkerId((service / 2) as u8));
    let services = Services::start_on(&[(0.2, 1), (0.1, 2)].repeat(WORKERS), home, &[]);
    let slice = 100_000;
    let mut all: Vec<Vec<i32>> = (0..WORKERS as i32)
        .map(|rank| (0..(WORKERS * slice) as i32).map(|i| rank * 31 + i).collect())
        .collect();
    services.submit_slices(&mut all, slice, |slices| Submission::reduce_scatter(slices, Op::Sum));
    services.submit_slices(&mut all, slice, Submission::all_gather);
    for (rank, tensor) in all.iter().enumerate() {
        let is_sum = |(i, got): (usize, &i32)| *got == 3 * i as i32 + 93;
        assert!(tensor.iter().enumerate().all(is_sum), "worker {rank}");
    }
    for root in 0..WORKERS {
        let (first, second) = (services.packets(2 * root), services.packets(2 * root + 1));
        let measured = first as f64 / (first + second) as f64;
        assert!((measured - 2.0 / 3.0).abs() < 0.05, "root {root}: {first} and {second} packets");
    }
}

#[test]
fn one_has_what_all_sum_and_all_have_what_one_says() {
    let services = Services::start(&[(0.5, 2), (0.5, 1)]);
    let mut summed = tensors(200_003);
    let own = summed.clone();
    let each = |tensors: &mut [Vec<i32>], make: fn(RawTensor) -> Submission| {
        let waits: Vec<_> = services
            .workers
            .iter()
            .zip(tensors)
            .map(|(worker, tensor)| common::begin(worker, make(common::raw(tensor, Dtype::Int32))))
            .collect();
        waits.iter().for_each(|wait| finished(wait).unwrap());
    };
    each(&mut summed, |tensor| Submission::reduce(tensor, Op::Sum, WorkerId(1)));
    assert!(summed[0] == own[0] && summed[2] == own[2], "the others' stay as they are");
    each(&mut summed, |tensor| Submission::broadcast(tensor, WorkerId(1)));
    check(&summed);
}

#[test]
fn what_a_worker_and_the_service_beside_it_say_to_each_other_touches_no_socket() {
    // Some services have more shards than there are threads beside others.
    let services = Services::start_on(&[(1.0, 1), (2.0, 2), (1.0, 3)], |_| None, &[(0, 0), (1, 1)]);
    for length in [1, 0, 255, 300_001, 4] {
        let mut summed = tensors(length);
        let waits = services.begin(&mut summed);
        waits.iter().for_each(|wait| finished(wait).unwrap());
        check(&summed);
    }
    for (rank, beside) in [Some(0), Some(1), None].into_iter().enumerate() {
        let worker = &services.workers[rank];
        let by_socket = (0..3).filter(|service| Some(*service) != beside);
        let written: u64 = by_socket.map(|service| worker.statistics_of(service).packets_sent).sum();
        let io = worker.io_statistics();
        assert_eq!(io.packets_sent, written, "worker {rank}: {io:?}");
        let beside = beside.map_or(1, |service| worker.statistics_of(service).packets_sent);
        assert!(written > 0 && beside > 0, "worker {rank}");
    }
}

#[test]
fn a_service_goes_on_when_the_workers_beside_it_end() {
    let mut services = Services::start_on(&[(1.0, 2)], |_| None, &[(0, 0), (1, 0)]);
    let mut summed = tensors(100_000);
    let waits = services.begin(&mut summed);
    waits.iter().for_each(|wait| finished(wait).unwrap());
    check(&summed);
    // It cannot become complete.
    let mut tensor = vec![1_i32; 100_000];
    let wait = submit(&services.workers[0], &mut tensor, Dtype::Int32, Op::Sum);
    services.workers.clear();
    assert!(matches!(finished(&wait), Err(Failure::Stopped)));
    let (switch, job) = (&services.switches[0], services.jobs[0].id);
    assert_eq!(switch.health(), Ok(()));
    // It tells them, as it would tell workers elsewhere, and says that they did not hear it.
    switch.abort_job(job, fanin_wire::AbortReason::SwitchStopped);
    while switch.io_statistics().packets_given_up == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_worker_beside_a_service_that_has_ended_has_threads_of_its_own() {
    let ended = bind(([127, 0, 0, 1], 0).into(), 1);
    let (threads, listen) = (ended.threads(), ended.local_addr());
    ended.shutdown();
    let switch = bind(listen, 1);
    switch.add_job(job(1).into()).unwrap();
    let service = Service { job: member(job(1), 0), switch: listen, shards: 1, share: 1.0, home: None };
    let worker = WorkerDriver::start(WorkerConfig {
        services: vec![service],
        retransmission: RetransmissionConfig::default(),
        host: Some(threads),
    });
    let mut tensor = vec![7_i32; 100_000];
    let worker = worker.unwrap();
    finished(&submit(&worker, &mut tensor, Dtype::Int32, Op::Sum)).unwrap();
    assert_eq!(tensor, [7; 100_000]);
    assert!(worker.io_statistics().packets_sent > 0, "through a socket");
}

#[test]
fn a_service_that_loses_its_memory_keeps_the_others_at_work_and_the_sum_exact() {
    lose_the_memory_of_a_service(&[]);
}

#[test]
fn a_worker_goes_on_where_the_service_beside_it_was_and_elsewhere() {
    lose_the_memory_of_a_service(&[(0, 1), (1, 0)]);
}

fn lose_the_memory_of_a_service(beside: &[(usize, usize)]) {
    let mut services = Services::start_on(&[(1.0, 1), (1.0, 1)], |_| None, beside);
    let mut summed = tensors(800_000);
    let waits = services.begin(&mut summed);
    for generation in 2..5 {
        let marks: Vec<u64> = services.workers.iter().map(WorkerDriver::progress_marker).collect();
        let moves = |(worker, mark): (&WorkerDriver, &u64)| worker.progress_marker() > mark + 50;
        while services.workers.iter().any(|worker| worker.outstanding() > 0)
            && !services.workers.iter().zip(&marks).all(moves)
        {
            std::thread::yield_now();
        }
        let lost = services.switches.remove(1);
        let listen = lost.local_addr();
        lost.shutdown();
        let completed: Vec<_> = services.workers.iter().map(|worker| worker.suspend(1)).collect();
        let job = JobConfig { generation: Generation(generation), resumed: true, ..services.jobs[1] };
        // At another port than before: whoever takes over need not be where the old one was.
        let listen = std::net::SocketAddr::new(listen.ip(), 0);
        services.switches.push(bind(listen, 1));
        services.switches[1].add_job(job.into()).unwrap();
        for (rank, worker) in services.workers.iter().enumerate() {
            // Whoever is ahead of the slowest gives; the first of them.
            let gives = |slot: &usize| {
                let counts: Vec<u32> = completed.iter().map(|worker| worker[0][*slot]).collect();
                let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                most > least && counts.iter().position(|count| count == most) == Some(rank)
            };
            let restore =
                (0..completed[0][0].len()).filter(gives).map(|slot| SlotIndex(slot as u16)).collect();
            worker
                .resume(1, member_with(job, rank, &[restore]), 1, services.switches[1].local_addr())
                .unwrap();
        }
    }
    waits.iter().for_each(|wait| finished(wait).unwrap());
    check(&summed);
}

#[test]
fn what_ends_one_lane_ends_all() {
    let services = Services::start(&[(1.0, 1), (1.0, 1)]);
    // The first worker waits in both lanes for the others.
    let mut tensor = vec![1_i32; 100_000];
    let wait = submit(&services.workers[0], &mut tensor, Dtype::Int32, Op::Sum);
    services.switches[1].abort_job(services.jobs[1].id, fanin_wire::AbortReason::SwitchStopped);
    assert!(matches!(finished(&wait), Err(Failure::Aborted { .. })));
    assert!(services.workers[0].failure().is_some());
}
