//! Workers, switches and server of GOAT joined by a bad network, under plans of any kind: every worker gets the same bits, and they are the
//! exact sum.
//!
//! A case is made from one number, which a failure prints.

mod case;
mod world;

use case::{Case, ELEMENTS, Fault};
use fanin_protocol::Reason;
use fanin_protocol::atp::Scaling;
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

#[test]
fn two_thousand_seeds_are_exact_under_faults() {
    let mut generations = 0;
    for seed in 0..2_000 {
        let case = Case::from_seed(seed);
        let world = check(case);
        generations += world.dropped(Reason::Generation);
    }
    assert!(generations > 100, "packets of older plans: {generations}");
}

/// The paper's Figure 2: S3 is at the server, S1 and S2 have two workers each, and all three are linked. Each switch has room for one
/// fragment. A is summed at S1, B at S2, C at S3.
fn figure_2() -> Case {
    Case {
        seed: 1,
        switches: 3,
        links: vec![(0, 1), (0, 2), (1, 2)],
        at_server: vec![0],
        attached: vec![Some(1), Some(1), Some(2), Some(2)],
        beside: vec![None; 4],
        sub_models: vec![1, 1, 1],
        plan: vec![vec![Some(1), Some(2), Some(0)]; 4],
        aggregators: 1,
        ways: 1,
        window_max: 3,
        scaling: Scaling::Static,
        large: false,
        tensors: vec![3 * ELEMENTS],
        loss_per_mille: 0,
        double_per_mille: 0,
        delay_us: 5,
        late_us: 0,
        retransmission_us: 50_000,
        fault: Fault::None,
    }
}

#[test]
fn without_faults_each_fragment_comes_to_the_server_once_however_late_workers_are() {
    for begins in [[0, 0, 0, 0], [0, 1_000, 0, 1_000], [0, 5_000, 10_000, 40_000]] {
        let world = World::new(figure_2()).beginning_at(&begins).run().check();
        let server = world.server();
        assert_eq!((server.aggregations, server.complete, server.duplicates), (3, 3, 0), "{begins:?}");
        assert_eq!(world.retransmissions(), 0);
        for switch in 0..3 {
            let statistics = world.statistics(switch);
            assert_eq!((statistics.aggregations, statistics.completed, statistics.collisions), (4, 1, 0));
        }
    }
}
