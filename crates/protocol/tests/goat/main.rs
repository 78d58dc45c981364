//! Workers, switches and server of GOAT in a hostile network, under plans of any kind: every worker gets the same bits, and they
//! are the exact sum.

mod case;
mod script;

use std::collections::BTreeMap;

use case::{Case, ELEMENTS, Fault};
use fanin_protocol::Reason;
use fanin_protocol::atp::Scaling;
use fanin_testworld::{Network, World, each_seed, fresh_seeds};
use script::{Goat, server, switch, world};

fn check(case: Case) -> World<Goat> {
    world(case).play()
}

#[test]
fn every_worker_gets_the_exact_sum() {
    // Some workers send original values again and again beside others that send scaled ones.
    each_seed([14_238_321_624_817_332_715], |seed| drop(check(Case::from_seed(seed))));
    each_seed(fresh_seeds(256), |seed| drop(check(Case::from_seed(seed))));
}

#[test]
fn two_thousand_seeds_are_exact_under_faults() {
    let mut generations = 0;
    let all = each_seed(0..2_000, |seed| {
        generations += check(Case::from_seed(seed)).dropped(Reason::Generation);
    });
    assert!(!all || generations > 100, "packets of older plans: {generations}");
}

#[test]
fn sums_of_changing_participants_are_exact_under_faults() {
    each_seed(0..2_000, |seed| drop(check(Case::with_changing_participants(seed))));
    // A rank that took no part in long hands older parameters back than others have.
    each_seed([17_825_734_999_847_200_912], |seed| drop(check(Case::with_changing_participants(seed))));
    each_seed(fresh_seeds(128), |seed| drop(check(Case::with_changing_participants(seed))));
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
        onward: Vec::new(),
        aggregators: 1,
        ways: 1,
        window_max: 3,
        scaling: Scaling::Static,
        large: false,
        tensors: vec![3 * ELEMENTS],
        participants: Vec::new(),
        network: Network::default(),
        late_us: 0,
        retransmission_us: 50_000,
        fault: Fault::None,
    }
}

/// However late workers are, the server hears of each fragment once, and each switch adds so much, and
/// completes so much.
fn nothing_comes_twice(case: impl Fn() -> Case, added: u64, completed: u64) {
    for begins in [[0, 0, 0, 0], [0, 1_000, 0, 1_000], [0, 5_000, 10_000, 40_000]] {
        let mut world = world(case());
        for (rank, us) in begins.into_iter().enumerate() {
            world.begin_at(case().worker(rank), us * 1000);
        }
        let world = world.play();
        let server = server(&world);
        assert_eq!((server.aggregations, server.complete, server.duplicates), (3, 3, 0), "{begins:?}");
        assert_eq!(world.retransmissions(), 0);
        for at in 0..3 {
            let statistics = switch(&world, at);
            let found = (statistics.aggregations, statistics.completed, statistics.collisions);
            assert_eq!(found, (added, completed, 0));
        }
    }
}

#[test]
fn without_faults_each_fragment_comes_to_the_server_once_however_late_workers_are() {
    nothing_comes_twice(figure_2, 4, 1);
}

/// The racks S1 and S2 sum all three parts for their own workers, and S3 adds both sums.
fn sums_of_sums() -> Case {
    let of_racks = [Some(1), Some(1), Some(2), Some(2)];
    Case {
        plan: of_racks.iter().map(|rack| vec![*rack; 3]).collect(),
        onward: vec![BTreeMap::from([(1, 0), (2, 0)]); 3],
        aggregators: 3,
        ..figure_2()
    }
}

#[test]
fn with_sums_of_sums_each_link_carries_each_fragment_once_however_late_workers_are() {
    nothing_comes_twice(sums_of_sums, 6, 3);
}

/// Workers are late for long, and packets are lost. A sum that was lost on its way to the next switch comes there again.
#[test]
fn with_sums_of_sums_all_is_exact_over_links_that_lose() {
    for seed in 0..50 {
        let case = Case {
            seed,
            tensors: vec![30 * ELEMENTS, 7 * ELEMENTS],
            network: Network {
                loss_per_mille: 100,
                double_per_mille: 50,
                jitter_us: 100,
                ..Network::default()
            },
            late_us: 20_000,
            retransmission_us: 500,
            ..sums_of_sums()
        };
        let world = check(case);
        assert_eq!((0..3).map(|at| switch(&world, at).collisions).sum::<u64>(), 0);
    }
}
