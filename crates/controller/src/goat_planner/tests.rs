use std::net::SocketAddr;

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

fn admission(job: u32, tree: &SwitchTree, window: u16, fragments: &[u32]) -> Admission {
    let terms = Terms {
        in_flight: window,
        window,
        elements: 256,
        wire_dtype: WireDtype::SharedExponent,
        loss_bound: LossBound::RELIABLE,
        pool_units: 0,
    };
    let seats = Plan::at_the_server(&terms, tree, fragments.to_vec()).seats();
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

/// A job whose stream is cut into 32 equal parts.
fn equal(job: u32, tree: &SwitchTree, window: u16) -> Admission {
    admission(job, tree, window, &[u32::from(window / 32); 32])
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
    let own = OwnChoices { congestion_control: true, columns: 1 };
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
    let named = admission(1, &tree, 8, &[100, 8]);
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
    for at in (0..64).step_by(2) {
        aggregators.taken.entry(first.address).or_default().push((JobId(1), at..at + 1));
    }
    give_room(&mut plan, &tree, JobId(2), &mut aggregators).expect("no circle");
    assert!(plan.sums[1].is_empty());
    for sum in plan.sums[0].values() {
        assert_eq!((sum.workers, &sum.sums[..]), (0b0011, &[0b1100][..]));
    }
    assert_eq!((plan.sums[0].len(), plan.sums[2].len()), (32, 32));
    // Nor has the spine any.
    aggregators.forget(JobId(2));
    let spine = tree.switches[0].hop;
    aggregators.taken.entry(spine.address).or_default().push((JobId(1), 0..64));
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

#[test]
fn jobs_share_a_switch_without_sharing_an_aggregator() {
    let tree = tree(&[(64, None)], &[Some(0); 2]);
    let planner = SlowestLink::default();
    let jobs: Vec<_> = (1..=4).map(|job| equal(job, &tree, 32)).collect();
    let plan = |job: usize| planner.found(&jobs[job - 1]).expect("a plan");
    let ranges = |plan: &Plan<'_>| -> Vec<Range<u32>> {
        let sums = plan.sums[0].iter();
        let range = |(part, sum): (&SubModel, &PlannedSum)| {
            sum.first_aggregator..sum.first_aggregator + plan.fragments[usize::from(part.0)]
        };
        sums.map(range).collect()
    };
    let plans = [plan(1), plan(2), plan(3)];
    assert_eq!(plans.each_ref().map(|plan| shares(&plan.seats())[0]), [1.0, 1.0, 0.0], "it is full");
    let all: Vec<_> = plans.iter().flat_map(ranges).collect();
    for (at, range) in all.iter().enumerate() {
        assert!(all[at + 1..].iter().all(|other| other.end <= range.start || range.end <= other.start));
    }
    assert_eq!(planner.forget(JobId(7)), [], "it had nothing");
    assert_eq!(planner.forget(JobId(1)), [JobId(3)], "the one that found it full");
    assert_eq!(shares(&plan(4).seats()), [1.0], "what a job gave back");
    planner.forget(JobId(3));
    assert_eq!(planner.forget(JobId(2)), [], "nobody lacks anything any more");
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
