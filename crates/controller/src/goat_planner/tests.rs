use std::net::SocketAddr;
use std::ops::Range;

use fanin_protocol::control::{Hop, Memory, Terms, TreeRank, TreeSwitch};
use fanin_protocol::goat::{Goat, GoatRoute};
use fanin_protocol::{Machines, OwnChoices};
use fanin_udp::Part;
use fanin_wire::{Generation, Key, LossBound, Rank, WireDtype};

use super::*;

/// A tree: of each switch its aggregators and its upstream, and of each rank its switch.
fn tree(switches: &[(u32, Option<usize>)], ranks: &[Option<usize>]) -> SwitchTree {
    let switch = |(at, (aggregators, upstream)): (usize, &(u32, Option<usize>))| TreeSwitch {
        hop: Hop {
            instance: at as u64,
            address: address(at),
            shards: 1,
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

fn admission(
    job: u32,
    tree: &SwitchTree,
    window: u16,
    plan: impl for<'a> FnOnce(&Terms, &'a SwitchTree) -> Plan<'a>,
) -> Admission {
    let terms = Terms {
        in_flight: window,
        window,
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        loss_bound: LossBound::RELIABLE,
        pool_units: 0,
    };
    let seats = plan(&terms, tree).seats();
    Admission {
        job: JobId(job),
        key: Key::new(7),
        generation: Generation(0),
        world_size: tree.ranks.len() as u16,
        shards: 1,
        resumed: false,
        protocol: "goat",
        terms,
        tree: tree.clone(),
        seats,
    }
}

/// A job with a stream, of whose window so many fragments fill the ranks' path.
fn stream(job: u32, tree: &SwitchTree, window: u16, path: u16) -> Admission {
    admission(job, tree, window, |terms, tree| Plan::of_stream(terms, tree, path))
}

/// A job that needs all of its window.
fn equal(job: u32, tree: &SwitchTree, window: u16) -> Admission {
    stream(job, tree, window, window)
}

/// What each member of the only job is told.
fn plan(tree: &SwitchTree, window: u16) -> (Admission, Seats) {
    let admission = equal(1, tree, window);
    let seats = SlowestLink::default().plan(&admission).expect("a plan");
    (admission, seats)
}

fn shares(seats: &Seats) -> Vec<f64> {
    seats.shares.iter().map(|share| f64::from(share.millionths) / 1e6).collect()
}

type Sockets = dyn Fn(SocketAddr) -> Result<SocketAddr, String>;
const PEERS: &Sockets = &|address| Ok(address);

/// What a switch makes of its part.
fn told((admission, seats): &(Admission, Seats), switch: usize) -> GoatRoute<SocketAddr> {
    let memory = Memory { shards: 1, pool_units: 0, aggregators: 1 << 20 };
    let (job, part) = (admission.identity(), &seats.switches[switch]);
    let upstream = UPSTREAM.parse().expect("an address");
    <Goat as Machines<SocketAddr, Part>>::relay_job(job, part, upstream, &memory, PEERS)
        .expect("its own part")
}

const UPSTREAM: &str = "10.0.0.99:4800";

/// Who sums each part of a rank's stream.
fn nodes_of((admission, seats): &(Admission, Seats), rank: u16) -> Vec<u16> {
    let own = OwnChoices { congestion_control: true, windows: 1 };
    let part = &seats.ranks[usize::from(rank)];
    let terms = <Goat as Machines<SocketAddr, Part>>::rank_terms(admission.identity(), Rank(rank), part, own);
    terms.expect("its own part").assignment.nodes().iter().map(|node| node.0).collect()
}

/// Two racks of two ranks below a spine.
fn leaf_spine(aggregators: u32) -> SwitchTree {
    let upstream = [None, Some(0), Some(0)].map(|upstream| (aggregators, upstream));
    tree(&upstream, &[1, 1, 2, 2].map(Some))
}

#[test]
fn one_rack_that_has_room_sums_all() {
    let plan = plan(&tree(&[(64, None)], &[Some(0); 3]), 64);
    assert_eq!(shares(&plan.1), [1.0]);
    let switch = told(&plan, 0);
    assert_eq!(switch.sums.len(), 32);
    let mut begins: Vec<u32> = switch.sums.values().map(|sum| sum.first_aggregator).collect();
    begins.sort_unstable();
    assert_eq!(begins, (0..32).map(|part| 2 * part).collect::<Vec<_>>(), "none is another's");
    assert!(switch.sums.values().all(|sum| sum.workers == 0b111));
}

#[test]
fn all_that_a_tree_holds_is_summed_before_the_server() {
    let (_, seats) = plan(&leaf_spine(64), 128);
    assert!((shares(&seats).iter().sum::<f64>() - 1.0).abs() < 1e-5, "{:?}", seats.shares);
    assert!(seats.shares.iter().all(|share| share.aggregators <= 64), "{:?}", seats.shares);
}

#[test]
fn what_no_switch_has_room_for_goes_to_the_server() {
    let (_, one) = plan(&tree(&[(16, None)], &[Some(0); 4]), 64);
    assert_eq!(shares(&one), [0.25]);
    for aggregators in [0, 1] {
        let none = plan(&tree(&[(aggregators, None)], &[Some(0); 4]), 64);
        assert_eq!(shares(&none.1), [0.0], "a part has two fragments");
        assert!(nodes_of(&none, 3).iter().all(|node| *node == 0));
    }
    let tree = tree(&[(10, None)], &[Some(0); 2]);
    let named = admission(1, &tree, 8, |terms, tree| Plan::of_model(terms, tree, vec![100, 8]));
    let seats = SlowestLink::default().plan(&named).expect("a plan");
    assert_eq!(nodes_of(&(named, seats), 0), [0, 1], "the part that is larger than the switch");
}

#[test]
fn ranks_at_the_root_itself_send_there_and_teach_where_they_are() {
    let plan = plan(&tree(&[(64, None)], &[Some(0), None, Some(0), None]), 64);
    assert!(nodes_of(&plan, 1).iter().all(|node| *node == 0));
    assert!(plan.0.way(Rank(1)).is_empty());
    let (job, part) = (plan.0.identity(), &plan.1.root);
    let server = <Goat as Machines<SocketAddr, Part>>::root_job(job, part, PEERS).expect("addresses").plan;
    assert_eq!(server.children, [address(0)]);
    assert_eq!(server.ways, [0, 1, 0, 2], "behind the switch, and two of their own");
}

#[test]
fn a_fragment_for_a_switch_beside_the_way_goes_up_to_where_ways_part_and_down() {
    // One rack alone has memory: what the other's ranks send may be summed there.
    let tree = tree(&[(0, None), (64, Some(0)), (0, Some(0))], &[1, 1, 2, 2].map(Some));
    let plan = plan(&tree, 64);
    assert_eq!(told(&plan, 0).below, [address(1), address(2)]);
    assert_eq!(told(&plan, 0).next_hops, [(AggregationNode(2), address(1))]);
    assert_eq!(told(&plan, 2).next_hops, [(AggregationNode(2), UPSTREAM.parse().expect("an address"))]);
    assert_eq!(told(&plan, 1).next_hops, []);
    assert_eq!(told(&plan, 1).own, 0b0011);
}

/// Each link carries each part once.
#[test]
fn racks_sum_for_their_ranks_and_the_spine_adds_their_sums() {
    let plan = plan(&leaf_spine(64), 64);
    assert_eq!(shares(&plan.1), [0.0, 0.5, 0.5], "of what ranks send");
    assert!(plan.1.shares.iter().all(|share| share.aggregators == 64), "{:?}", plan.1.shares);
    let [spine, rack, other] = [0, 1, 2].map(|switch| told(&plan, switch).sums);
    assert_eq!((spine.len(), rack.len(), other.len()), (32, 32, 32));
    for sum in spine.values() {
        assert_eq!((sum.workers, &sum.sums[..], sum.onward.0), (0, &[0b0011, 0b1100][..], 0));
    }
    assert!(rack.values().all(|sum| (sum.workers, sum.sums.len(), sum.onward.0) == (0b0011, 0, 1)));
    assert!(other.values().all(|sum| (sum.workers, sum.sums.len(), sum.onward.0) == (0b1100, 0, 1)));
    let (job, part) = (plan.0.identity(), &plan.1.root);
    let server = <Goat as Machines<SocketAddr, Part>>::root_job(job, part, PEERS).expect("addresses").plan;
    assert_eq!(server.onward, vec![Onward::from([2, 3].map(|rack| (number(rack - 1), number(0)))); 32]);
}

/// A switch whose free memory is in pieces has fewer parts than it could hold.
#[test]
fn sums_that_find_no_aggregators_in_a_row_go_on_to_the_next_node() {
    let tree = leaf_spine(64);
    let (admission, mut aggregators) = (equal(2, &tree, 64), Aggregators::default());
    let mut plan = Plan::of(&admission.terms, &tree, &admission.seats).expect("its own part");
    for part in 0..32 {
        (0..4).for_each(|rank| plan.nodes[rank][part] = number(1 + rank / 2));
        plan.onward[part] = Onward::from([(number(1), number(0)), (number(2), number(0))]);
    }
    // The first rack has single aggregators, and parts have two.
    let first = tree.switches[1].hop;
    for job in [1, 3].repeat(32) {
        aggregators.take(first, JobId(job), 1);
    }
    aggregators.forget(JobId(3));
    give_room(&mut plan, &tree, JobId(2), &mut aggregators).expect("no circle");
    assert!(plan.sums[1].is_empty());
    for sum in plan.sums[0].values() {
        assert_eq!((sum.workers, &sum.sums[..]), (0b0011, &[0b1100][..]));
    }
    assert_eq!((plan.sums[0].len(), plan.sums[2].len()), (32, 32));
    // Nor has the spine any.
    aggregators.forget(JobId(2));
    let spine = tree.switches[0].hop;
    aggregators.take(spine, JobId(1), 64);
    give_room(&mut plan, &tree, JobId(2), &mut aggregators).expect("no circle");
    assert!(plan.onward.iter().all(Onward::is_empty));
    assert!(plan.nodes.iter().all(|own| own.iter().all(|node| [0, 3].contains(&node.0))));
}

/// The racks' links carry one sum of each part where the racks sum all. That makes two at the root,
/// which is slow if a link lies between it and the spine.
#[test]
fn nothing_is_kept_off_a_link_inside_a_machine() {
    let mut tree = leaf_spine(64);
    tree.switches[0].hop.rate_bps = Some(u64::MAX);
    let (_, seats) = plan(&tree, 64);
    assert_eq!(shares(&seats), [0.0, 0.5, 0.5]);
    assert_eq!(seats.shares[0].aggregators, 0, "the spine's memory is for others");
}

/// What each job has of a switch, by its place in the tree.
fn ranges(plan: &Plan<'_>, switch: usize) -> Vec<Range<u32>> {
    let sums = plan.sums[switch].iter();
    let range = |(part, sum): (&SubModel, &PlannedSum)| {
        sum.first_aggregator..sum.first_aggregator + plan.fragments[usize::from(part.0)]
    };
    sums.map(range).collect()
}

/// Plans a job in the place of another one, if that is not 0. Returns its share of the first switch's
/// memory, which it sums all of its stream in.
fn planned_anew(planner: &SlowestLink, before: u32, admission: &Admission) -> usize {
    planner.forget(JobId(before));
    let plan = planner.found(admission).expect("a plan");
    assert_eq!(shares(&plan.seats())[0], 1.0);
    ranges(&plan, 0).iter().map(ExactSizeIterator::len).sum()
}

#[test]
fn jobs_share_a_switch_without_sharing_an_aggregator() {
    let tree = tree(&[(64, None)], &[Some(0); 2]);
    let planner = SlowestLink::default();
    let jobs: Vec<_> = (0..8).map(|job| stream(job, &tree, 64, 16)).collect();
    let anew = |before, job: usize| planned_anew(&planner, before, &jobs[job]);
    let unsettled = || planner.unsettled().into_iter().map(|job| job.0).collect::<Vec<_>>();
    assert_eq!((anew(0, 1), unsettled()), (64, vec![]), "all, while it is alone");
    // The next one finds no room, and the first one gives half of it back.
    assert_eq!(shares(&planner.found(&jobs[2]).expect("a plan").seats()), [0.0]);
    assert_eq!(unsettled(), [1]);
    assert_eq!((anew(1, 3), unsettled()), (32, vec![2]));
    assert_eq!((anew(2, 4), unsettled()), (32, vec![]));
    // Another one waits until both have.
    assert_eq!(shares(&planner.found(&jobs[5]).expect("a plan").seats()), [0.0]);
    assert_eq!(unsettled(), [3, 4]);
    assert_eq!((anew(3, 1), unsettled()), (21, vec![4]));
    assert_eq!((anew(4, 2), unsettled()), (21, vec![5]));
    planner.forget(JobId(5));
    let third = planner.found(&jobs[6]).expect("a plan");
    assert_eq!((ranges(&third, 0).len(), unsettled()), (21, vec![]));
    // When one is over, the others share what it had.
    planner.forget(JobId(7));
    assert!(unsettled().is_empty(), "it had nothing");
    planner.forget(JobId(1));
    assert_eq!(unsettled(), [2, 6]);
    assert_eq!((anew(2, 3), unsettled()), (32, vec![6]));
    assert_eq!((anew(6, 4), unsettled()), (32, vec![]));
    planner.forget(JobId(4));
    assert_eq!(unsettled(), [3]);
    assert_eq!((anew(3, 1), unsettled()), (64, vec![]));
}

#[test]
fn no_two_jobs_have_an_aggregator_in_common() {
    let tree = leaf_spine(100);
    let planner = SlowestLink::default();
    let jobs: Vec<_> = (1..=3).map(|job| stream(job, &tree, 30, 16)).collect();
    let plans: Vec<_> = jobs.iter().map(|job| planner.found(job).expect("a plan")).collect();
    for switch in 0..3 {
        let mut all: Vec<_> = plans.iter().flat_map(|plan| ranges(plan, switch)).collect();
        all.sort_unstable_by_key(|range| range.start);
        assert_eq!(all.iter().map(ExactSizeIterator::len).sum::<usize>(), 90);
        assert!(all.is_sorted_by(|one, next| one.end <= next.start), "{all:?}");
    }
    assert_eq!(planner.unsettled(), []);
}

/// The memory that a job cannot use is the others'.
#[test]
fn a_job_of_few_fragments_leaves_the_rest_to_the_others() {
    let one = tree(&[(64, None)], &[Some(0); 2]);
    let planner = SlowestLink::default();
    assert_eq!(planned_anew(&planner, 0, &stream(1, &one, 16, 16)), 16);
    assert_eq!(planned_anew(&planner, 0, &stream(2, &one, 64, 16)), 48);
    assert_eq!(planner.unsettled(), []);
    // Nor does a rank alone need a sum.
    let planner = SlowestLink::default();
    planner.found(&stream(1, &tree(&[(64, None)], &[Some(0)]), 64, 16)).expect("a plan");
    assert_eq!(planned_anew(&planner, 0, &stream(2, &one, 64, 16)), 64);
    assert_eq!(planner.unsettled(), []);
}

/// A share need not be a multiple of a part's fragments.
#[test]
fn all_of_an_odd_share_is_used() {
    let tree = tree(&[(64, None)], &[Some(0); 2]);
    let planner = SlowestLink::default();
    assert_eq!(planned_anew(&planner, 0, &stream(1, &tree, 21, 16)), 21);
    assert_eq!(planned_anew(&planner, 0, &stream(2, &tree, 64, 16)), 43);
    assert!(planner.unsettled().is_empty());
}

/// The first job's sums are made at a switch beside the way of most of its ranks. The second job's
/// ranks are below that switch.
#[test]
fn a_job_leaves_memory_beside_its_ranks_ways_to_those_whose_way_it_is_on() {
    let both = tree(&[(0, None), (64, Some(0)), (0, Some(0))], &[1, 2, 2, 2].map(Some));
    let there = tree(&[(0, None), (64, Some(0))], &[Some(1); 2]);
    let planner = SlowestLink::default();
    let trees = [&both, &there];
    let had = |job, tree| {
        let (planned, mut taken) = (stream(job, tree, 64, 16), 0);
        let plan = planner.found(&planned).expect("a plan");
        ranges(&plan, 1).iter().for_each(|range| taken += range.len());
        taken
    };
    let (mut jobs, mut taken) = ([1, 2], [had(1, trees[0]), had(2, trees[1])]);
    assert!(taken[0] > 0, "beside the way");
    for next in 3..10 {
        let Some(job) = planner.unsettled().first().copied() else { break };
        let at = jobs.iter().position(|of| JobId(*of) == job).expect("one of them");
        planner.forget(job);
        (jobs[at], taken[at]) = (next, had(next, trees[at]));
    }
    assert!(planner.unsettled().is_empty() && taken[1] >= 32, "{taken:?}");
}

/// A job of a rack and another one of both racks and the spine.
#[test]
fn jobs_share_the_switches_that_both_need() {
    let both = leaf_spine(64);
    let rack = tree(&[(64, None), (64, Some(0))], &[Some(1); 2]);
    let planner = SlowestLink::default();
    let had = |plan: &Plan<'_>| (0..plan.sums.len()).map(|at| ranges(plan, at).len()).collect::<Vec<_>>();
    let plan = |before, admission: &Admission| {
        planner.forget(JobId(before));
        had(&planner.found(admission).expect("a plan"))
    };
    let [first, again] = [1, 3].map(|job| stream(job, &rack, 64, 16));
    let [second, after] = [2, 4].map(|job| stream(job, &both, 64, 16));
    assert_eq!(plan(0, &first), [0, 32], "parts of two fragments");
    assert_eq!(plan(0, &second), [32, 0, 32], "its other rack is full");
    assert_eq!(planner.unsettled(), [JobId(1)]);
    assert_eq!(plan(1, &again), [0, 32], "of one fragment each");
    assert_eq!(planner.unsettled(), [JobId(2)]);
    assert_eq!(plan(2, &after), [32, 32, 32]);
    assert_eq!(planner.unsettled(), []);
}

#[test]
fn the_same_tree_has_the_same_plan() {
    let seats = || plan(&leaf_spine(48), 128).1;
    assert_eq!(seats(), seats());
}

#[test]
fn the_largest_job_is_planned_for_in_many_racks() {
    let racks = 16;
    let switches: Vec<_> =
        std::iter::once(None).chain((0..racks).map(|_| Some(0))).map(|upstream| (4096, upstream)).collect();
    let ranks: Vec<_> = (0..128).map(|rank| Some(1 + rank % racks)).collect();
    let (_, seats) = plan(&tree(&switches, &ranks), 2048);
    assert!((shares(&seats).iter().sum::<f64>() - 1.0).abs() < 1e-4);
}

/// As a rank can make one up: each of its ways has switches of its own.
#[test]
fn a_tree_that_is_larger_than_any_clusters_is_not_planned_for() {
    let switches: Vec<_> = (0..1024).map(|at| (4096, (at % 8 > 0).then(|| at - 1))).collect();
    let ranks: Vec<_> = (0..128).map(|rank| Some(8 * rank + 7)).collect();
    let (_, seats) = plan(&tree(&switches, &ranks), 2048);
    assert_eq!(shares(&seats), [0.0; 1024]);
}
