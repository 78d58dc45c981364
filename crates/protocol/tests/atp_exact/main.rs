//! Workers, switches and server of ATP in a hostile network: every worker gets the same bits, and they are the exact sum.

mod case;
mod interleavings;
mod script;
mod tree;
mod trees;

use case::{Case, Contents, Fault};
use fanin_protocol::atp::Scaling;
use fanin_testworld::{Network, World, each_seed, fresh_seeds};
use fanin_wire::WireDtype;
use script::{Atp, server, was_replaced_midway, world};
use tree::Tree;

fn check(case: Case) -> World<Atp> {
    world(case).play()
}

#[test]
fn every_worker_gets_the_exact_sum() {
    each_seed(fresh_seeds(256), |seed| drop(check(Case::from_seed(seed))));
}

/// Their values are exact in bfloat16, so that the sums are rounded once.
#[test]
fn floats_that_travel_as_bfloat16_are_summed_exactly_and_rounded_once() {
    each_seed(fresh_seeds(64), |seed| {
        drop(check(Case {
            wire_dtype: WireDtype::Bfloat16,
            scaling: Scaling::Static,
            contents: Contents::Small,
            tensors: vec![64 * 70 + 5, 500, 64 * 70, 63],
            ..Case::from_seed(seed)
        }));
    });
}

#[test]
fn without_contention_the_server_gets_one_packet_a_fragment() {
    for tree in [Tree::one_rack(6), Tree::three_racks(6)] {
        let world = check(Case { tree, ..Case::plain() }.with_aggregators(100_000));
        let server = server(&world, 0);
        assert_eq!(server.completed, 500);
        assert_eq!(server.complete, 500, "{server:?}");
        assert_eq!(world.retransmissions(), 0);
    }
}

#[test]
fn without_aggregators_everything_is_summed_at_the_server() {
    let world = check(Case::plain().with_aggregators(0));
    assert_eq!(server(&world, 0).aggregations, 4 * 500);
    assert_eq!(world.retransmissions(), 0);
}

#[test]
fn where_every_fragment_collides_two_jobs_are_exact() {
    let world = check(Case { jobs: 2, ..Case::plain() }.with_aggregators(1));
    assert!(server(&world, 0).collisions > 100 && server(&world, 1).collisions > 100);
}

#[test]
fn a_rehash_ends_collisions() {
    let world = check(Case { jobs: 3, tensors: vec![64 * 6000], ..Case::plain() }.with_aggregators(3000));
    let servers = [0, 1, 2].map(|job| server(&world, job));
    // Who comes first to an aggregator meets nobody there: each time it may be the same job.
    assert!(servers.iter().map(|server| server.rehashes).sum::<u64>() > 30, "{servers:?}");
    for server in servers {
        assert!(server.collisions < server.completed / 20, "{server:?}");
    }
}

#[test]
fn a_lost_packet_costs_few_resends() {
    let network = Network { loss_per_mille: 2, ..Network::default() };
    let world = check(Case { network, ..Case::plain() });
    let sent = 4 * 500;
    let again = world.retransmissions();
    assert!(again > 0 && again < sent / 8, "{again}");
}

#[test]
fn frequent_overflows_end_with_a_dynamic_factor() {
    let contents = Contents::Overflowing;
    let case = Case { contents, tensors: vec![64 * 3000], window_max: 100, ..Case::plain() };
    let fixed = server(&check(case.clone()), 0).overflows;
    let server = server(&check(Case { scaling: Scaling::Dynamic, ..case }), 0);
    assert!(fixed > 100 && server.overflows < fixed / 4, "{fixed}, {server:?}");
    assert!(server.dynamic_factors > 0);
}

#[test]
fn after_a_fault_the_job_goes_on_exactly() {
    let (mut restored, mut replaced) = (0, 0);
    let all = each_seed(0..10, |seed| {
        for tree in [Tree::direct(4), Tree::one_rack(4), Tree::three_racks(4)] {
            let network = Network { loss_per_mille: 20, jitter_us: 95, ..Network::default() };
            let case = Case { seed, tree, window_max: 32, network, late_us: 3000, ..Case::plain() };
            let world = check(Case { fault: Fault::Server, ..case.clone() });
            restored += usize::from(server(&world, 0).completed < 500);
            check(Case { fault: Fault::Switches, ..case.clone() });
            replaced += usize::from(was_replaced_midway(&check(Case { fault: Fault::Worker, ..case })));
        }
    });
    // Faults are at any time, also before the first fragment.
    assert!(!all || restored > 5 && replaced > 5, "{restored}, {replaced}");
}
