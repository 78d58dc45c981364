//! Trees of one to four levels, whose machines crash and whose workers move while packets are lost, doubled and reordered.

use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::atp::{AtpSwitchConfig, Hashing, Scaling};
use fanin_testworld::{Network, each_seed};

use crate::case::{Case, Contents, ELEMENTS, Fault};
use crate::check;
use crate::script::{server, switches};
use crate::tree::Tree;

/// 40 fragments a tensor, in a window of 16.
const LENGTH: usize = 40 * ELEMENTS - 17;

/// Two tensors, one of floats and one of integers. Each switch has a table of so many aggregators, and workers know of 64.
fn case(tree: Tree, table: u32, seed: u64) -> Case {
    let switch = AtpSwitchConfig {
        aggregators: table,
        elements: ELEMENTS as u16,
        ways: [1, 8][seed as usize / 2 % 2],
        stale: Duration::from_millis(50),
        ecn_threshold_packets: Some(64),
    };
    Case {
        seed,
        tree,
        window_max: 16,
        aggregators: 64,
        switch,
        contents: Contents::Quarters(1),
        tensors: vec![LENGTH; 2],
        retransmission: RetransmissionConfig {
            floor: Duration::from_millis(1),
            ceiling: Duration::from_millis(50),
        },
        ..Case::plain()
    }
}

#[test]
fn without_faults_the_server_hears_of_each_fragment_once() {
    for tree in [Tree::racks(2, 2), Tree::three_racks(6), Tree::deep(3), Tree::deep(4)] {
        let world = check(case(tree, 0, 1).with_aggregators(1 << 16));
        let progress = server(&world, 0);
        assert_eq!((progress.aggregations, progress.complete), (80, 80));
        for statistics in switches(&world) {
            assert_eq!(
                (statistics.completed, statistics.in_use, statistics.freed_by_parameters),
                (80, 0, 80)
            );
        }
    }
}

#[test]
fn a_thousand_and_24_workers_in_two_levels() {
    let case = case(Tree::racks(32, 32), 0, 5).with_aggregators(1 << 16);
    let case = Case { contents: Contents::Quarters(2), tensors: vec![2 * ELEMENTS; 2], ..case };
    // Sums of so many saturate: then every worker's original values come.
    let progress = server(&check(case), 0);
    assert_eq!(progress.completed, 4);
    assert!(progress.overflows > 0);
}

#[test]
fn zero_aggregators_few_aggregators_and_one_for_all_are_exact() {
    for (said, table) in [(0, 0), (64, 0), (1, 1), (5, 5), (64, 8)] {
        for hashing in [Hashing::Hash, Hashing::Linear] {
            let case = Case { aggregators: said, hashing, ..case(Tree::three_racks(6), table, 2) };
            let switches = switches(&check(case));
            let collisions: u64 = switches.iter().map(|switch| switch.collisions).sum();
            assert!(collisions > 0, "{said} of {table}");
            assert!(table == 0 || switches[2].completed > 0, "{said} of {table}");
        }
    }
}

#[test]
fn workers_at_the_server_without_any_switch() {
    let progress = server(&check(case(Tree::direct(5), 0, 3)), 0);
    assert_eq!(progress.aggregations, 5 * 80 + progress.duplicates);
}

/// RSS: each rack aggregates for itself, and the server adds the racks (§5.2.2).
#[test]
fn racks_straight_at_the_server() {
    let workers = [0, 0, 1, 1, 2, 2].map(Some).to_vec();
    let tree = Tree { switches: vec![(None, 0); 3], workers };
    let progress = server(&check(case(tree, 0, 3).with_aggregators(1 << 16)), 0);
    assert_eq!((progress.aggregations, progress.partial), (3 * 80, 3 * 80), "three times ATP's");
}

#[test]
fn overflows_are_corrected_at_any_rate() {
    for (largest, scaling) in [(10, Scaling::Static), (1000, Scaling::Static), (20, Scaling::Dynamic)] {
        let network = Network { loss_per_mille: 10, ..Network::default() };
        let contents = Contents::Quarters(largest);
        let case = Case { scaling, contents, network, ..case(Tree::three_racks(6), 64, 4) };
        let progress = server(&check(case), 0);
        // Of 40 fragments of floats and 40 of integers: most, but where the factor follows.
        let (overflows, dynamic) = (progress.overflows, progress.dynamic_factors);
        match scaling {
            Scaling::Static => assert!(overflows > 50 && dynamic == 0, "{progress:?}"),
            Scaling::Dynamic => assert!(overflows < 60 && dynamic > 10, "{progress:?}"),
        }
    }
}

#[test]
fn workers_that_move_go_on_from_where_they_are() {
    let mut moves = 0;
    let all = each_seed(0..20, |seed| {
        // At the server, or below two levels of switches.
        let tree = if seed % 2 == 0 { Tree::direct(4) } else { Tree::racks(2, 2) };
        let network = Network {
            loss_per_mille: [0, 20][seed as usize / 2 % 2],
            double_per_mille: 100,
            reordered_per_mille: 300,
            ..Network::default()
        };
        let world = check(Case { network, fault: Fault::Moves(20_000), ..case(tree, 64, seed) });
        moves += world.script.moves.iter().sum::<usize>();
    });
    assert!(!all || moves > 200, "{moves}");
}

#[test]
fn every_seed_is_exact_under_faults() {
    let mut server_crashes = 0;
    let all = each_seed(0..100, |seed| {
        let tree = match seed % 4 {
            0 => Tree::racks(3, 2),
            1 => Tree::three_racks(6),
            2 => Tree::deep(3),
            _ => Tree::one_rack(4),
        };
        let network = Network {
            loss_per_mille: [0, 5, 50, 200][seed as usize / 16 % 4],
            double_per_mille: [0, 100][seed as usize / 2 % 2],
            reordered_per_mille: [0, 100, 500][seed as usize % 3],
            ..Network::default()
        };
        let fault = [Fault::None, Fault::Crashes(2000)][seed as usize / 8 % 2];
        let contents = Contents::Quarters(if seed % 3 == 0 { 12 } else { 1 });
        let aggregators = [64, 7, 16, 3][seed as usize / 4 % 4];
        let case = case(tree, 0, seed).with_aggregators(aggregators);
        server_crashes += check(Case { contents, network, fault, ..case }).script.server_crashes;
    });
    assert!(!all || server_crashes > 20, "{server_crashes}");
}
