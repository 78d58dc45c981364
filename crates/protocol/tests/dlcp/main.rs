//! Workers and a server of DLCP in a hostile network: all ranks get the same bits, and no bound is broken.

mod case;
mod numbers;
mod packets;
mod reliable;
mod restarts;
mod script;

use std::time::Duration;

use case::{Case, ELEMENTS, Fault};
use fanin_protocol::dlcp::Finish;
use fanin_testworld::{World, each_seed};
use fanin_wire::{AbortReason, LossBound, Op, Pattern, Rank, WorkerId};
use script::{Dlcp, aborted, loss, told, waits_for_nobody_but, workers_were_told, world};

/// Seeds that each run plays.
const SEEDS: u64 = 4000;

fn play(case: Case) -> World<Dlcp> {
    world(case).play()
}

/// A case that ends in an abort, or with somebody who is dead.
fn run(case: Case) -> World<Dlcp> {
    let mut world = world(case);
    world.run();
    world
}

fn percent(percent: u32) -> LossBound {
    LossBound::from_millionths(percent * 10_000).expect("below one")
}

#[test]
fn every_seed_keeps_every_rule() {
    let (mut lost, mut requested, mut kept, mut unsummed) = (0, 0, 0, 0);
    let all = each_seed(0..SEEDS, |seed| {
        let loss = loss(&play(Case::from_seed(seed)));
        lost += usize::from(loss.lost > 0);
        requested += usize::from(loss.rounds > 0);
        kept += usize::from(loss.kept > 0);
        unsummed += usize::from(loss.unsummed > 0);
    });
    // Seeds that lose nothing would keep every rule.
    assert!(
        !all || lost > 500 && requested > 1000 && kept > 20 && unsummed > 5,
        "{lost} {requested} {kept} {unsummed}"
    );
}

/// Workers hand back the sums that they have. All the rest of what had begun is reliable.
#[test]
fn every_seed_keeps_every_rule_when_its_server_loses_its_memory() {
    let (mut restored, mut lost) = (0, 0);
    let all = each_seed(0..SEEDS, |seed| {
        let case = Case::from_seed(seed);
        let crash_us = [30, 300, 3000, 30_000][seed as usize % 4];
        let world = play(Case { crashes: 1 + seed as u32 / 4 % 3, crash_us, ..case });
        restored += usize::from(world.script.restored > 0);
        lost += usize::from(loss(&world).lost > 0);
    });
    assert!(!all || restored > 1000 && lost > 100, "{restored} {lost}");
}

#[test]
fn after_a_crash_the_bound_holds_again_for_what_nobody_can_have_begun() {
    let tensors = vec![(3000, Op::Average); 20];
    let case = Case { bound: percent(30), data_loss: 100, crashes: 1, crash_us: 1, tensors, ..Case::plain() };
    assert!(play(case).done(0, 19).expect("it is done").loss.lost > 0);
}

#[test]
fn without_loss_nothing_is_sent_twice_and_nothing_is_missing() {
    let world = play(Case { bound: percent(10), ..Case::plain() });
    let loss = loss(&world);
    assert_eq!((loss.lost, loss.unsummed, loss.kept, loss.rounds), (0, 0, 0, 0));
    assert_eq!(world.retransmissions(), 0);
    assert!(loss.contributions > 0);
}

#[test]
fn a_bound_spares_most_retransmissions() {
    let lossy =
        Case { data_loss: 20, tensors: vec![(20_000, Op::Average); 4], flow_blocks: 256, ..Case::plain() };
    let reliable = play(lossy.clone());
    let bounded = play(Case { bound: percent(10), ..lossy });
    assert_eq!(loss(&reliable).lost, 0);
    assert!(loss(&bounded).lost > 50, "{:?}", loss(&bounded));
    // What comes back is reliable in both.
    assert!(
        bounded.script.pushed_again * 4 < reliable.script.pushed_again,
        "{} {}",
        bounded.script.pushed_again,
        reliable.script.pushed_again
    );
}

#[test]
fn what_is_lost_early_is_let_go_before_its_flow_ends_and_within_the_bound() {
    // One gets the sums, so that they leave as fast as contributions come.
    let patterns = vec![Pattern::Reduce(WorkerId(0))];
    let case = Case { tensors: vec![(12_000, Op::Sum)], patterns, flow_blocks: 400, ..Case::plain() };
    let early = |bound, data_loss| play(Case { bound, data_loss, ..case.clone() }).script.early_sums;
    assert!(early(percent(10), 20) > 5);
    assert_eq!(early(percent(10), 0), 0);
    assert_eq!(early(LossBound::RELIABLE, 20), 0);
}

/// §3.2.1 as it is written: what the bound forgives is not waited for, also where nothing is lost.
#[test]
fn a_flow_that_ends_when_its_bound_is_met_lacks_its_last_part_also_without_loss() {
    let case = Case {
        bound: percent(10),
        tensors: vec![(20_000, Op::Average); 4],
        flow_blocks: 1000,
        ..Case::plain()
    };
    let took = |finish| {
        let world = play(Case { finish, ..case.clone() });
        (loss(&world), world.script.pushed_again)
    };
    let (loss, again) = took(Finish::BoundMet);
    // Packets that are on their way while the sender hears of it come all the same, where their block is not decided.
    let share = loss.lost as f64 / loss.contributions as f64;
    assert!((0.05..=0.1).contains(&share) && again == 0, "{loss:?}, {again}");
    assert_eq!(took(Finish::Stopped).0.lost, 0);
    // Nothing is forgiven where there is no bound.
    let world =
        play(Case { finish: Finish::BoundMet, bound: LossBound::RELIABLE, data_loss: 20, ..case.clone() });
    assert_eq!(crate::loss(&world).lost, 0);
}

#[test]
fn where_every_packet_that_may_be_dropped_is_the_bound_holds() {
    each_seed(0..50, |seed| {
        let case = Case { seed, bound: percent(10), drops_unimportant: true, ..Case::plain() };
        let loss = loss(&play(case));
        assert!(loss.lost > 0, "{loss:?}");
    });
}

#[test]
fn a_layer_of_which_every_packet_is_dropped_is_asked_for_and_the_bound_holds() {
    let lost = |loses_queue| {
        let world = play(Case { bound: percent(10), loses_queue, ..Case::plain() });
        (loss(&world), world.script.pushed_again)
    };
    let (plain, again) = lost(None);
    assert_eq!((plain.lost, plain.rounds, again), (0, 0, 0));
    // Of two layers, those in the first queue behind the signals, and in the middle one.
    for queue in [1, 4] {
        let (loss, again) = lost(Some(queue));
        assert!(loss.lost > 0 && again > 0, "queue {queue}: {loss:?}, {again}");
    }
}

/// All that it had to send may be there, and yet nobody knows that it has heard so.
#[test]
fn a_worker_that_dies_between_its_stop_and_the_end_of_its_flow_is_named() {
    let mut named = 0;
    let all = each_seed(0..60, |seed| {
        let case = Case { seed, data_loss: 50, fault: Fault::DeathAfterStop, ..Case::plain() };
        let world = run(case);
        let dead = world.dead().expect("one dies") as u16;
        if let Some(reason) = aborted(&world) {
            assert_eq!(reason, AbortReason::Expelled(Rank(dead)));
            let others = (0..).zip(told(&world)).filter(|(rank, _)| *rank != dead);
            others.for_each(|(rank, told)| assert_eq!(*told, Some(reason), "seed {seed}: rank {rank}"));
            named += 1;
        } else {
            assert!(waits_for_nobody_but(&world, dead), "seed {seed}");
        }
    });
    assert!(!all || named > 50, "{named}");
}

#[test]
fn a_worker_that_dies_midway_is_named_and_the_others_are_told() {
    let mut midway = 0;
    let all = each_seed(0..60, |seed| {
        let world = run(Case { seed, data_loss: 100, fault: Fault::Death, ..Case::plain() });
        let dead = world.dead().expect("one dies") as u16;
        match aborted(&world) {
            Some(reason) => {
                assert_eq!(reason, AbortReason::Expelled(Rank(dead)));
                let others = (0..).zip(told(&world)).filter(|(rank, _)| *rank != dead);
                others.for_each(|(rank, told)| assert_eq!(*told, Some(reason), "seed {seed}: rank {rank}"));
                midway += 1;
            }
            // It died between two flows, or had nothing more to say: then the server waits for it, and says for whom.
            None => assert!(waits_for_nobody_but(&world, dead), "seed {seed}"),
        }
    });
    assert!(!all || midway > 20, "{midway}");
}

/// As where a path carries signals, and no packet of full length.
#[test]
fn a_worker_of_which_only_signals_come_is_named() {
    let world = run(Case { workers: 1, tensors: vec![(100, Op::Sum)], data_loss: 1000, ..Case::plain() });
    assert_eq!(aborted(&world), Some(AbortReason::Expelled(Rank(0))));
    assert!(workers_were_told(&world));
}

/// It announces its flows together, and sends one after the other. What comes to no flow for 2.3 s is silent by that flow's count.
#[test]
fn a_worker_that_takes_long_to_come_to_a_flow_is_not_silent() {
    for data_loss in [0, 100] {
        // Four flows of 200 blocks, which are 1,600 bits each: a second a flow.
        let case = Case {
            workers: 2,
            tensors: vec![(4 * 200 * ELEMENTS, Op::Sum)],
            flow_blocks: 200,
            line_rate_bps: 320_000,
            data_loss,
            ..Case::plain()
        };
        let world = play(case);
        assert!(world.now() > Duration::from_secs(4), "{:?}", world.now());
    }
}

#[test]
fn ranks_with_different_bounds_are_refused_by_name() {
    let case = Case { fault: Fault::OtherBound, bound: percent(5), ..Case::plain() };
    let world = run(case);
    let AbortReason::LossBounds { first, second } = aborted(&world).expect("refused") else {
        panic!("{:?}", aborted(&world))
    };
    let last = Rank(Case::plain().workers as u16 - 1);
    assert!(first.0 == last || second.0 == last, "{first:?} {second:?}");
    assert_ne!(first.1, second.1);
    assert!(workers_were_told(&world));
}

#[test]
fn a_clock_that_jumps_stops_nobody() {
    for (seed, jump_ns) in [(1, 86_400_000_000_000), (2, -3_000_000), (3, -86_400_000_000_000)] {
        let case =
            Case { seed, data_loss: 100, signal_loss: 50, fault: Fault::Clock { jump_ns }, ..Case::plain() };
        let world = play(case);
        assert!(world.now() < Duration::from_secs(20), "{:?}", world.now());
    }
}

#[test]
fn blocks_take_all_paths() {
    let world = play(Case { paths: 4, tensors: vec![(20_000, Op::Sum); 3], ..Case::plain() });
    let by_path = &world.script.by_path;
    let most = by_path.iter().max().expect("paths");
    assert_eq!(by_path.len(), 4);
    assert!(by_path.iter().all(|count| count * 2 > *most), "{by_path:?}");
}

/// What is asked for again takes another path, and so does a signal that is not answered.
#[test]
fn a_path_that_is_dead_holds_nobody_up() {
    let mut requested = 0;
    let all = each_seed(0..40, |seed| {
        let case = Case {
            seed,
            bound: percent([0, 10][seed as usize % 2]),
            paths: [2, 3, 8][seed as usize % 3],
            data_loss: [0, 20][seed as usize / 20],
            signal_loss: [0, 20][seed as usize / 20],
            // A server knows of the paths by which something came. If one is dead from the beginning,
            // another one has to be alive both ways.
            fault: Fault::DeadPath {
                from_ns: [0, 100_000][seed as usize / 4 % 2],
                down: [0, 1, 1][seed as usize % 3],
            },
            ..Case::plain()
        };
        let world = play(case);
        assert!(world.now() < Duration::from_secs(2), "seed {seed}: {:?}", world.now());
        requested += world.script.pushed_again;
    });
    assert!(!all || requested > 0, "what a path lost is sent again");
}

/// Routers that do not notice that a link is dead go on giving it some of the ports, and others on the way
/// back. With two paths, no port may work both ways.
#[test]
fn a_path_that_dies_slows_nobody_down() {
    // The slow links take seconds, in which the dead path is tried again.
    for (line_rate_bps, paths, bound) in
        [(1_000_000_000, 2, 0), (1_000_000_000, 3, 0), (1_000_000_000, 3, 10), (8_000_000, 3, 0)]
    {
        let case = Case { workers: 2, paths, follows: true, flow_blocks: 400, ..Case::plain() };
        let tensors = vec![(60_000, Op::Sum); 6];
        let case = Case { line_rate_bps, bound: percent(bound), tensors, window_blocks: 800, ..case };
        let time = |fault| play(Case { fault, ..case.clone() }).now();
        let alive = time(Fault::None);
        for down in 0..usize::from(paths) {
            let dead = time(Fault::DeadPath { from_ns: 1_000_000, down });
            let what = format!("{line_rate_bps} bit/s, {paths} paths, {down} is dead on the way down");
            println!("{what}: {dead:?}, else {alive:?}");
            assert!(dead < 2 * alive, "{what}: {dead:?}, else {alive:?}");
        }
    }
}

#[test]
fn what_waits_on_a_slow_path_is_not_let_go_before_its_flow_ends() {
    let patterns = vec![Pattern::Reduce(WorkerId(0))];
    let tensors = vec![(12_000, Op::Sum)];
    let case = Case { tensors, patterns, flow_blocks: 400, paths: 3, bound: percent(10), ..Case::plain() };
    let case = Case { line_rate_bps: 200_000_000, ..case };
    let early = |fault, data_loss| play(Case { fault, data_loss, ..case.clone() }).script.early_sums;
    // A flow takes 3 ms: what is missing is waited for 100 us, with something later from each path.
    assert_eq!(early(Fault::SlowPath { us: 1000 }, 0), 0);
    assert!(early(Fault::None, 20) > 0, "what is lost is");
}

#[test]
fn every_seed_keeps_every_rule_in_a_ring() {
    let (mut lost, mut requested) = (0, 0);
    let all = each_seed(0..SEEDS, |seed| {
        let case = Case::from_seed(seed);
        let patterns = vec![Pattern::AllReduce; case.tensors.len()];
        let case = Case { ring: true, patterns, pull_bound: LossBound::RELIABLE, ..case };
        let loss = loss(&play(case));
        lost += usize::from(loss.lost > 0);
        requested += usize::from(loss.rounds > 0);
    });
    assert!(!all || lost > 300 && requested > 1000, "{lost} {requested}");
}

#[test]
fn a_block_that_is_lost_in_a_ring_begins_anew_and_a_mean_is_that_of_who_is_in() {
    let case = Case { ring: true, data_loss: 50, bound: percent(30), ..Case::plain() };
    let loss = loss(&play(case));
    assert!(loss.lost > 0 && loss.lost < loss.contributions / 2, "{loss:?}");
    assert_eq!((loss.unsummed, loss.kept), (0, 0));
}

#[test]
fn a_rank_that_dies_is_named_by_its_left_neighbour() {
    let mut midway = 0;
    let all = each_seed(0..30, |seed| {
        let world = run(Case { seed, ring: true, data_loss: 50, fault: Fault::Death, ..Case::plain() });
        let dead = world.dead().expect("one dies") as u16;
        let ranks = Case::plain().workers as u16;
        let left = usize::from((dead + ranks - 1) % ranks);
        for (rank, told) in told(&world).iter().enumerate() {
            let named = (rank, *told) == (left, Some(AbortReason::Expelled(Rank(dead))));
            assert!(told.is_none() || named, "seed {seed}: rank {rank} says {told:?}");
        }
        midway += usize::from(told(&world)[left].is_some());
    });
    assert!(!all || midway > 10, "{midway}");
}

#[test]
fn ranks_of_a_ring_with_different_bounds_are_refused_by_name() {
    let world = run(Case { ring: true, fault: Fault::OtherBound, bound: percent(5), ..Case::plain() });
    let last = Rank(Case::plain().workers as u16 - 1);
    let named = told(&world).iter().flatten().any(|reason| {
        matches!(reason, AbortReason::LossBounds { first, second } if first.0 == last || second.0 == last)
    });
    assert!(named, "{:?}", told(&world));
}
