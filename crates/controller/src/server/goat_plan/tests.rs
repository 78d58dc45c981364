use std::net::SocketAddr;

use fanin_protocol::control::{Hop, Racks, TreeRank, TreeSwitch};
use fanin_wire::{Generation, Key, WireDtype};

use super::*;

/// A tree: of each switch its aggregators and its upstream, and of each rank its switch.
fn tree(switches: &[(u32, Option<usize>)], ranks: &[Option<usize>]) -> SwitchTree {
    let switch = |(at, (aggregators, upstream)): (usize, &(u32, Option<usize>))| TreeSwitch {
        hop: Hop {
            instance: at as u64,
            address: address(at),
            aggregators: *aggregators,
            elements: 2048,
            receive_buffer_bytes: 16 << 20,
            mtu: 1500,
            rate_bps: None,
        },
        upstream: *upstream,
    };
    SwitchTree {
        switches: switches.iter().enumerate().map(switch).collect(),
        ranks: ranks.iter().map(|switch| TreeRank { switch: *switch, rate_bps: None }).collect(),
    }
}

fn address(switch: usize) -> SocketAddr {
    ([10, 0, 0, switch as u8], 4800).into()
}

fn admission(job: u32, ranks: usize, window: u16, sub_models: &[u64]) -> Admission {
    Admission {
        job: JobId(job),
        key: Key::new(7),
        generation: Generation(0),
        world_size: ranks as u16,
        in_flight: window,
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        shards: 1,
        resumed: false,
        hierarchy: None,
        switches: None,
        sub_models: sub_models.to_vec(),
        flows: None,
        racks: Racks::default(),
        restore: vec![],
    }
}

fn plan(tree: &SwitchTree, window: u16) -> GoatPlan {
    let admission = admission(1, tree.ranks.len(), window, &[]);
    GoatPlan::new(&admission, tree, &Mutex::default()).expect("a plan")
}

fn shares(plan: &GoatPlan) -> Vec<f64> {
    plan.shares().into_iter().map(|share| share.share).collect()
}

/// Two racks of two ranks below a spine.
fn leaf_spine(aggregators: u32) -> SwitchTree {
    let upstream = [None, Some(0), Some(0)].map(|upstream| (aggregators, upstream));
    tree(&upstream, &[1, 1, 2, 2].map(Some))
}

#[test]
fn one_rack_that_has_room_sums_all() {
    let plan = plan(&tree(&[(64, None)], &[Some(0); 3]), 64);
    assert_eq!(shares(&plan), [1.0]);
    let [switch] = &plan.route(Rank(0)).switches[..] else { panic!("one switch on the way") };
    assert_eq!(switch.sums.len(), 32);
    let mut begins: Vec<u32> = switch.sums.iter().map(|sum| sum.first_aggregator).collect();
    begins.sort_unstable();
    assert_eq!(begins, (0..32).map(|part| 2 * part).collect::<Vec<_>>(), "none is another's");
    assert!(switch.sums.iter().all(|sum| sum.workers == 0b111u128.to_le_bytes()));
}

#[test]
fn all_that_a_tree_holds_is_summed_before_the_server() {
    let tree = leaf_spine(64);
    assert_eq!(tree.held(), 64);
    let plan = plan(&tree, 128);
    assert!((shares(&plan).iter().sum::<f64>() - 1.0).abs() < 1e-9, "{:?}", plan.shares());
    assert!(plan.shares().iter().all(|share| share.aggregators <= 64), "{:?}", plan.shares());
}

#[test]
fn what_no_switch_has_room_for_goes_to_the_server() {
    let one = plan(&tree(&[(16, None)], &[Some(0); 4]), 64);
    assert_eq!(shares(&one), [0.25]);
    for aggregators in [0, 1] {
        let none = plan(&tree(&[(aggregators, None)], &[Some(0); 4]), 64);
        assert_eq!(shares(&none), [0.0], "a part has two fragments");
        assert!(none.assignment(3).nodes.iter().all(|node| *node == 0));
    }
    let named = admission(1, 2, 8, &[256 * 100, 256 * 8]);
    let tree = tree(&[(10, None)], &[Some(0); 2]);
    let named = GoatPlan::new(&named, &tree, &Mutex::default()).expect("a plan");
    assert_eq!(named.assignment(0).sub_models, [100, 8]);
    assert_eq!(named.assignment(0).nodes, [0, 1], "the part that is larger than the switch");
}

#[test]
fn ranks_at_the_root_itself_send_there_and_teach_where_they_are() {
    let tree = tree(&[(64, None)], &[Some(0), None, Some(0), None]);
    let plan = plan(&tree, 64);
    assert!(plan.assignment(1).nodes.iter().all(|node| *node == 0));
    assert!(plan.route(Rank(1)).switches.is_empty());
    let server = plan.server_job(|address| Ok(Peer::from(address))).expect("addresses").plan;
    assert_eq!(server.children, [Peer::from(address(0))]);
    assert_eq!(server.ways, [0, 1, 0, 2], "behind the switch, and two of their own");
}

#[test]
fn a_fragment_for_a_switch_beside_the_way_goes_up_to_where_ways_part_and_down() {
    // One rack alone has memory: what the other's ranks send may be summed there.
    let tree = tree(&[(0, None), (64, Some(0)), (0, Some(0))], &[1, 1, 2, 2].map(Some));
    let plan = plan(&tree, 64);
    let told = |switch| plan.told(switch);
    assert_eq!(told(0).below, [address(1).to_string(), address(2).to_string()]);
    assert_eq!(told(0).next_hops, [proto::NextHop { node: 2, to: address(1).to_string() }]);
    assert_eq!(told(2).next_hops, [proto::NextHop { node: 2, to: String::new() }]);
    assert_eq!(told(1).next_hops, []);
    assert_eq!(told(1).own, 0b0011u128.to_le_bytes());
}

#[test]
fn jobs_share_a_switch_without_sharing_an_aggregator() {
    let tree = tree(&[(64, None)], &[Some(0); 2]);
    let aggregators = Mutex::<Aggregators>::default();
    let plan =
        |job, window| GoatPlan::new(&admission(job, 2, window, &[]), &tree, &aggregators).expect("a plan");
    let ranges = |plan: &GoatPlan| -> Vec<Range<u32>> {
        let sums = plan.sums[0].iter();
        let range = |(part, sum): (&SubModel, &PlannedSum)| {
            sum.first_aggregator..sum.first_aggregator + plan.fragments[usize::from(part.0)]
        };
        sums.map(range).collect()
    };
    let plans = [plan(1, 32), plan(2, 32), plan(3, 32)];
    assert_eq!(plans.each_ref().map(|plan| shares(plan)[0]), [1.0, 1.0, 0.0], "it is full");
    let all: Vec<_> = plans.iter().flat_map(ranges).collect();
    for (at, range) in all.iter().enumerate() {
        assert!(all[at + 1..].iter().all(|other| other.end <= range.start || range.end <= other.start));
    }
    lock(&aggregators).forget(JobId(1));
    let again = GoatPlan::new(&admission(4, 2, 32, &[]), &tree, &aggregators).expect("a plan");
    assert_eq!(shares(&again), [1.0], "what a job gave back");
}

#[test]
fn the_same_tree_has_the_same_plan() {
    let nodes = || plan(&leaf_spine(48), 128).nodes;
    assert_eq!(nodes(), nodes());
}

#[test]
fn the_largest_job_is_planned_for_in_many_racks() {
    let racks = 16;
    let switches: Vec<_> =
        std::iter::once(None).chain((0..racks).map(|_| Some(0))).map(|upstream| (4096, upstream)).collect();
    let ranks: Vec<_> = (0..128).map(|rank| Some(1 + rank % racks)).collect();
    let plan = plan(&tree(&switches, &ranks), 2048);
    assert!((shares(&plan).iter().sum::<f64>() - 1.0).abs() < 1e-9);
}

/// As a rank can make one up: each of its ways has switches of its own.
#[test]
fn a_tree_that_is_larger_than_any_clusters_is_not_planned_for() {
    let switches: Vec<_> = (0..1024).map(|at| (4096, (at % 8 > 0).then(|| at - 1))).collect();
    let ranks: Vec<_> = (0..128).map(|rank| Some(8 * rank + 7)).collect();
    let plan = plan(&tree(&switches, &ranks), 2048);
    assert_eq!(shares(&plan), [0.0; 1024]);
}
