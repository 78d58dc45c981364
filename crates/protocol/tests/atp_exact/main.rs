//! Workers, switches and server of ATP joined by a bad network: every worker gets the same bits, and they are the exact sum.
//!
//! A case is made from one number, which a failure prints.

mod case;
mod world;

use case::{Case, Fault, Topology, Values};
use fanin_protocol::atp::{Hashing, Overflow, Scaling};
use proptest::prelude::*;
use world::World;

fn check(case: Case) -> World {
    World::new(case).run().check()
}

proptest! {
    // A seed is its own shortest form. PROPTEST_CASES runs more than the usual 256.
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_worker_gets_the_exact_sum(seed in any::<u64>()) {
        check(Case::from_seed(seed));
    }
}

/// One rack, and nothing in the way.
fn plain() -> Case {
    Case {
        seed: 1,
        topology: Topology::OneRack,
        jobs: 1,
        workers: 4,
        aggregators: 1000,
        window_max: 300,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        values: Values::Small,
        tensors: vec![64 * 400, 64 * 100],
        loss_per_mille: 0,
        double_per_mille: 0,
        delay_us: 5,
        late_us: 0,
        fault: Fault::None,
        ways: 1,
    }
}

#[test]
fn without_contention_the_server_gets_one_packet_a_fragment() {
    for topology in [Topology::OneRack, Topology::ThreeRacks] {
        let world = check(Case { topology, workers: 6, aggregators: 100_000, ..plain() });
        let server = world.server(0);
        assert_eq!(server.completed, 500);
        assert_eq!(server.complete, 500, "{topology:?}: {server:?}");
        assert_eq!(world.retransmissions(), 0, "{topology:?}");
    }
}

#[test]
fn without_aggregators_everything_is_summed_at_the_server() {
    let world = check(Case { aggregators: 0, ..plain() });
    assert_eq!(world.server(0).aggregations, 4 * 500);
    assert_eq!(world.retransmissions(), 0);
}

#[test]
fn where_every_fragment_collides_two_jobs_are_exact() {
    let world = check(Case { aggregators: 1, jobs: 2, ..plain() });
    assert!(world.server(0).collisions > 100 && world.server(1).collisions > 100);
}

#[test]
fn a_rehash_ends_collisions() {
    let world = check(Case { aggregators: 3000, jobs: 3, tensors: vec![64 * 6000], ..plain() });
    let servers = [0, 1, 2].map(|job| world.server(job));
    // Who comes first to an aggregator meets nobody there: each time it may be the same job.
    assert!(servers.iter().map(|server| server.rehashes).sum::<u64>() > 30, "{servers:?}");
    for server in servers {
        assert!(server.collisions < server.completed / 20, "{server:?}");
    }
}

#[test]
fn a_lost_packet_costs_few_resends() {
    let world = check(Case { loss_per_mille: 2, ..plain() });
    let sent = 4 * 500;
    let again = world.retransmissions();
    assert!(again > 0 && again < sent / 8, "{again}");
}

#[test]
fn frequent_overflows_end_with_a_dynamic_factor() {
    let case = Case { values: Values::Overflowing, tensors: vec![64 * 3000], window_max: 100, ..plain() };
    let fixed = check(case.clone()).server(0).overflows;
    let server = check(Case { scaling: Scaling::Dynamic, ..case }).server(0);
    assert!(fixed > 100 && server.overflows < fixed / 4, "{fixed}, {server:?}");
    assert!(server.dynamic_factors > 0);
}

#[test]
fn after_a_fault_the_job_goes_on_exactly() {
    let (mut restored, mut replaced) = (0, 0);
    for seed in 0..10 {
        for topology in [Topology::Direct, Topology::OneRack, Topology::ThreeRacks] {
            let case = Case {
                seed,
                topology,
                window_max: 32,
                delay_us: 100,
                loss_per_mille: 20,
                late_us: 3000,
                ..plain()
            };
            let world = check(Case { fault: Fault::Server, ..case.clone() });
            restored += usize::from(world.server(0).completed < 500);
            check(Case { fault: Fault::Switches, ..case.clone() });
            replaced += usize::from(check(Case { fault: Fault::Worker, ..case }).was_replaced_midway());
        }
    }
    // Faults are at any time, also before the first fragment.
    assert!(restored > 5 && replaced > 5, "{restored}, {replaced}");
}
