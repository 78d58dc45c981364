//! A switch that loses its memory in the midst of an all-reduce, and one that takes over on its port.

mod common;

use common::{Cluster, finished, member, member_with};
use fanin_protocol::atp::{Atp, AtpJobConfig, Hashing, Overflow, RankTerms, Scaling};
use fanin_protocol::switchml::JobConfig;
use fanin_udp::{Membership, Offload, WorkerDriver};
use fanin_wire::{Directions, Dtype, Generation, JobId, Key, Op, SlotIndex, WireDtype};

/// For each worker and shard the slots whose last sum it has and another worker lacks. The first that has it gives it.
fn restore(completed: &[Vec<Vec<u32>>]) -> Vec<Vec<Vec<SlotIndex>>> {
    let mut restore: Vec<Vec<Vec<SlotIndex>>> =
        completed.iter().map(|shards| vec![Vec::new(); shards.len()]).collect();
    for shard in 0..completed[0].len() {
        for slot in 0..completed[0][shard].len() {
            let counts: Vec<u32> = completed.iter().map(|worker| worker[shard][slot]).collect();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1, "nobody is more than one exchange behind");
            if most > least {
                let giver = counts.iter().position(|count| count == most).unwrap();
                restore[giver][shard].push(SlotIndex(slot as u16));
            }
        }
    }
    restore
}

#[test]
fn sums_survive_a_switch_that_loses_its_memory() {
    for shards in 1..=2 {
        let mut cluster = Cluster::start(3, shards, Offload::Detect);
        cluster.all_reduce_integers(10_000);
        let length = 600_000;
        let mut tensors: Vec<Vec<i32>> =
            (0..3).map(|rank| (0..length).map(|i| i * 5 + rank).collect()).collect();
        let waits: Vec<_> = cluster
            .workers
            .iter()
            .zip(&mut tensors)
            .map(|(worker, tensor)| common::submit(worker, tensor, Dtype::Int32, Op::Sum))
            .collect();
        for generation in 2..5 {
            let marks: Vec<u64> = cluster.workers.iter().map(WorkerDriver::progress_marker).collect();
            while cluster.outstanding() > 0
                && cluster
                    .workers
                    .iter()
                    .zip(&marks)
                    .any(|(worker, mark)| worker.progress_marker() < mark + 100)
            {
                std::thread::yield_now();
            }
            let listen = cluster.switch.local_addr();
            // Gone before its successor binds the port.
            let Cluster { switch, workers, job } = cluster;
            switch.shutdown();
            let completed: Vec<_> = workers.iter().map(|worker| worker.suspend(0)).collect();
            let job = JobConfig { generation: Generation(generation), resumed: true, ..job };
            let switch = common::bind(listen, shards);
            switch.add_job(job.into()).unwrap();
            for (rank, (worker, restore)) in workers.iter().zip(restore(&completed)).enumerate() {
                let job = member_with(job, rank, &restore);
                worker.resume(0, job, shards, switch.local_addr()).unwrap();
            }
            cluster = Cluster { switch, workers, job };
        }
        waits.iter().for_each(|wait| finished(wait).unwrap());
        let expected: Vec<i32> = (0..length).map(|i| i * 15 + 3).collect();
        for (rank, tensor) in tensors.iter().enumerate() {
            assert!(tensor == &expected, "worker {rank}, {shards} shards");
        }
        cluster.all_reduce_integers(10_000);
    }
}

#[test]
fn a_job_that_changed_its_shape_cannot_go_on() {
    let cluster = Cluster::start(1, 1, Offload::Detect);
    let worker = &cluster.workers[0];
    let _ = worker.suspend(0);
    let switch = cluster.switch.local_addr();
    let good = JobConfig { generation: Generation(2), resumed: true, ..cluster.job };
    for bad in [
        member(JobConfig { elements: 1024, ..good }, 0),
        member(JobConfig { slots: 8, ..good }, 0),
        member(JobConfig { wire_dtype: fanin_wire::WireDtype::Bfloat16, ..good }, 0),
        member(JobConfig { workers: 2, ..good }, 0),
        member(JobConfig { slots: 0, ..good }, 0),
        atp_job(good.id, good.workers),
    ] {
        assert_eq!(worker.resume(0, bad, 1, switch).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
    assert!(worker.resume(0, member(good, 0), 2, switch).is_err(), "it has one shard");
    cluster.switch.add_job(good.into()).unwrap();
    worker.resume(0, member(good, 0), 1, switch).unwrap();
    cluster.all_reduce_integers(1000);
}

/// ATP's counterpart of a job.
fn atp_job(id: JobId, workers: u16) -> Membership {
    let config = AtpJobConfig {
        id,
        key: Key::new(3),
        generation: Generation(2),
        workers,
        elements: 256,
        window_max: 16,
        aggregators: 0,
        hashing: Hashing::Hash,
        scaling: Scaling::Dynamic,
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    };
    Membership::of(&Atp, RankTerms { config, directions: Directions::default(), windows: 1 })
}

#[test]
fn a_worker_that_has_failed_stays_failed() {
    let cluster = Cluster::start(1, 1, Offload::Detect);
    cluster.workers[0].fail(fanin_udp::Failure::Stopped);
    assert!(cluster.workers[0].resume(0, member(cluster.job, 0), 1, cluster.switch.local_addr()).is_err());
}
