//! Switch and server on their own, as timelines. Whole networks with real workers are in
//! `tests/goat`.

mod originals;
mod participants;
mod strangers;
mod worker;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::*;

use super::*;
use crate::aggregation::{Overflow, Scaling};
use crate::machine::{Endpoint, Instant, Reason, Summer, Verdict};

const ELEMENTS: usize = 64;
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
/// The neighbours of the switch S1: towards the server, and towards S2.
const UP: u16 = 100;
const TO_S2: u16 = 102;
const SERVER: AggregationNode = AggregationNode::SERVER;
const S1: AggregationNode = AggregationNode(1);
const S2: AggregationNode = AggregationNode(2);
const S3: AggregationNode = AggregationNode(3);

const SUM: Collective = Collective {
    sequence: 0,
    dtype: Dtype::Int32,
    op: Op::Sum,
    pattern: Pattern::AllReduce,
    elements: 10_000,
    wire_dtype: WireDtype::SharedExponent,
};

/// Two sub-models of two fragments.
fn sub_models() -> SubModels {
    SubModels::new(&[2, 2]).unwrap()
}

/// A fragment of these workers with one value in every element.
#[derive(Clone, Copy)]
struct Packet {
    generation: u16,
    header: PlannedHeader,
    value: i32,
}

fn preamble(generation: u16) -> Preamble {
    Preamble {
        kind: Kind::Planned,
        job: JobId(3),
        generation: Generation(generation),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    }
}

fn fragment(node: AggregationNode, workers: u128, sequence: u64, value: i32) -> Packet {
    let (sub_model, fragment) = sub_models().locate(sequence);
    let directions = PlannedDirections { aggregation_node: node, sub_model, workers, ..Default::default() };
    let header = PlannedHeader {
        flags: Flags::default(),
        directions,
        sequence,
        aggregator_index: fragment,
        fragment: sequence as u32,
        collective: SUM,
        exponent: GradientHeader::STATIC_FACTOR,
        next_exponent: GradientHeader::STATIC_FACTOR,
    };
    Packet { generation: 4, header, value }
}

impl Packet {
    fn with(mut self, change: impl FnOnce(&mut PlannedHeader)) -> Self {
        change(&mut self.header);
        self
    }

    fn resent(self) -> Self {
        self.with(|header| header.flags.resend = true)
    }

    fn passed(self) -> Self {
        self.with(|header| header.directions.passed = true)
    }

    fn parameters(self) -> Self {
        self.with(|header| {
            header.flags.is_ack = true;
            header.directions.workers = 0;
            header.directions.aggregation_node = SERVER;
        })
    }

    fn bytes(self, key: Key) -> Vec<u8> {
        let preamble = preamble(self.generation);
        let mut packet = vec![0; fragment_packet_bytes::<PlannedDirections>(ELEMENTS)];
        PlannedPacket::write(&mut packet, key, &preamble, &self.header, ELEMENTS, |payload| {
            payload.as_chunks_mut().0.fill(self.value.to_le_bytes());
        });
        packet
    }

    fn to<E: Endpoint<Address = u16>>(self, machine: &mut E, from: u16) -> Verdict {
        machine.handle_packet(Instant(0), from, &self.bytes(KEY))
    }
}

/// Hands each packet that a machine sends to `take`, with its recipients.
fn each_sent<E: Endpoint<Address = u16>>(machine: &mut E, mut take: impl FnMut(&[u16], &[u8])) {
    let mut train = vec![0; 65536];
    while let Some(transmit) = machine.poll_transmit(Instant(0), &mut train) {
        let (to, bytes, segment_bytes) = (transmit.to.to_vec(), transmit.bytes, transmit.segment_bytes);
        train[..bytes].chunks(segment_bytes).for_each(|packet| take(&to, packet));
    }
}

/// All that a machine sends, a line each.
fn sent<E: Endpoint<Address = u16>>(machine: &mut E) -> Vec<String> {
    let mut lines = Vec::new();
    each_sent(machine, |to, packet| lines.push(line(to, packet)));
    lines
}

/// A packet as a line: to whom, number, node, workers, flags, the first value.
fn line(to: &[u16], packet: &[u8]) -> String {
    let parsed = PlannedPacket::parse(Preamble::parse(packet).unwrap(), packet).unwrap();
    let PlannedHeader { flags, directions, sequence, .. } = parsed.header;
    let value = parsed.payload.first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
    let what = match flags.is_ack {
        true => format!("parameters{}: {value}", if flags.resend { " lost" } else { "" }),
        false => {
            let node = directions.aggregation_node.0;
            let passed = if directions.passed { " passed" } else { "" };
            let mut flag = String::new();
            for (set, name) in [
                (flags.resend, " resend"),
                (flags.collision, " collision"),
                (flags.stalled, " stalled"),
                (flags.overflow, " overflow"),
            ] {
                flag.push_str(if set { name } else { "" });
            }
            format!("S{node} {:b}{passed}{flag}: {value}", directions.workers)
        }
    };
    format!("{to:?} #{sequence} {what}")
}

/// S1, which sums the first sub-model of workers 0 to 2 in its aggregators 1 and 2, and knows the
/// way to S2.
fn route(generation: u16) -> GoatRoute<u16> {
    GoatRoute {
        id: JobId(3),
        key: KEY,
        generation: Generation(generation),
        workers: 4,
        node: S1,
        upstream: UP,
        next_hops: vec![(S2, TO_S2)],
        below: vec![10, 11],
        own: 0,
        sub_models: sub_models(),
        sums: BTreeMap::from([(
            SubModel(0),
            PlannedSum { workers: 0b111, first_aggregator: 1, ..PlannedSum::default() },
        )]),
        window_max: 4,
        aggregators: 3,
    }
}

fn switch() -> GoatSwitch<u16> {
    switch_of_ways(1)
}

fn switch_of_ways(ways: u8) -> GoatSwitch<u16> {
    let mut switch = GoatSwitch::new(GoatSwitchConfig {
        aggregators: 3,
        elements: ELEMENTS as u16,
        ways,
        stale: Duration::ZERO,
        ecn_threshold_packets: None,
    });
    switch.add_job(route(4)).unwrap();
    switch
}

#[test]
fn what_is_labelled_with_another_node_goes_on_by_the_table() {
    let mut switch = switch();
    fragment(S2, 1, 0, 5).to(&mut switch, 10);
    fragment(SERVER, 1, 1, 6).to(&mut switch, 10);
    fragment(S1, 1, 2, 7).passed().to(&mut switch, TO_S2);
    // Nobody here knows the way: the server sums it, and nobody further on sends it back.
    fragment(S3, 1, 3, 8).to(&mut switch, 10);
    assert_eq!(
        sent(&mut switch),
        ["[102] #0 S2 1: 5", "[100] #1 S0 1 passed: 6", "[100] #2 S1 1 passed: 7", "[100] #3 S3 1 passed: 8"]
    );
    assert_eq!(switch.statistics().aggregations, 0);
}

#[test]
fn exactly_the_planned_workers_are_waited_for() {
    let mut switch = switch();
    assert_eq!(fragment(S1, 1, 0, 5).to(&mut switch, 10), Verdict::Absorb);
    assert_eq!(fragment(S1, 0b100, 0, 7).to(&mut switch, TO_S2), Verdict::Absorb);
    assert_eq!(fragment(S1, 1, 0, 5).to(&mut switch, 10), Verdict::Drop(Reason::Duplicate));
    // Worker 3 has another plan: the server is to see that.
    assert_eq!(fragment(S1, 0b1000, 0, 9).to(&mut switch, 11), Verdict::Forward);
    // The other sub-model is not summed here.
    assert_eq!(fragment(S1, 1, 2, 9).to(&mut switch, 10), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 1000 passed: 9", "[100] #2 S1 1 passed: 9"]);
    assert_eq!(fragment(S1, 0b10, 0, 6).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 111 passed: 18"]);
}

#[test]
fn a_fragment_that_is_sent_again_shows_what_there_is_and_evicts_nothing() {
    let mut switch = switch();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    fragment(S1, 1, 0, 5).resent().to(&mut switch, 10);
    // This one was lost.
    fragment(S1, 0b10, 0, 6).resent().to(&mut switch, 11);
    assert_eq!(
        sent(&mut switch),
        ["[100] #0 S1 1 passed resend stalled: 5", "[100] #0 S1 11 passed resend: 11"]
    );
    // The last comes late, and completes it.
    assert_eq!(fragment(S1, 0b100, 0, 7).to(&mut switch, 11), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 111 passed: 18"]);
    // The sum was lost.
    fragment(S1, 1, 0, 5).resent().to(&mut switch, 10);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 111 passed resend: 18"]);
    assert_eq!(switch.statistics().freed_by_resend, 0);
}

/// S1 adds what worker 0 sends and the sums of workers 1 and 2 and of 3 and 4. Its own goes to S3.
fn route_of_sums() -> GoatRoute<u16> {
    let sum = PlannedSum { workers: 0b1, sums: vec![0b110, 0b1_1000], onward: S3, first_aggregator: 1 };
    GoatRoute { sums: BTreeMap::from([(SubModel(0), sum)]), ..route(4) }
}

fn switch_of_sums() -> GoatSwitch<u16> {
    let mut switch = switch();
    switch.add_job(route_of_sums()).unwrap();
    switch
}

#[test]
fn sums_are_added_as_wholes_and_the_sum_of_them_goes_to_the_next_node() {
    let mut switch = switch_of_sums();
    assert_eq!(fragment(S1, 0b110, 0, 6).to(&mut switch, 11), Verdict::Absorb);
    assert_eq!(fragment(S1, 0b110, 0, 6).to(&mut switch, 11), Verdict::Drop(Reason::Duplicate));
    assert_eq!(fragment(S1, 0b1, 0, 1).to(&mut switch, 10), Verdict::Absorb);
    // Some of a sum, workers that come otherwise, and one sum together with another's worker.
    for others in [0b1000, 0b10, 0b1_1001, 0b1110] {
        assert_eq!(fragment(S1, others, 0, 9).to(&mut switch, 11), Verdict::Forward);
        assert_eq!(sent(&mut switch), [format!("[100] #0 S1 {others:b} passed: 9")]);
    }
    assert_eq!(fragment(S1, 0b1_1000, 0, 24).to(&mut switch, TO_S2), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S3 11111: 31"]);
}

#[test]
fn a_whole_sum_that_is_shown_again_goes_its_way_and_less_goes_to_the_server() {
    let mut switch = switch_of_sums();
    fragment(S1, 0b110, 0, 6).resent().to(&mut switch, 11);
    fragment(S1, 0b1, 0, 1).to(&mut switch, 10);
    fragment(S1, 0b110, 0, 6).resent().to(&mut switch, 11);
    assert_eq!(
        sent(&mut switch),
        ["[100] #0 S1 110 passed resend: 6", "[100] #0 S1 111 passed resend stalled: 7"]
    );
    fragment(S1, 0b1_1000, 0, 24).to(&mut switch, TO_S2);
    fragment(S1, 0b1, 0, 1).resent().to(&mut switch, 10);
    assert_eq!(sent(&mut switch), ["[100] #0 S3 11111: 31", "[100] #0 S3 11111 resend: 31"]);
}

#[test]
fn parameters_free_an_aggregator_and_go_to_all_below() {
    let mut switch = switch();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    assert_eq!(switch.statistics().in_use, 1);
    assert_eq!(fragment(S1, 0, 0, 18).parameters().to(&mut switch, TO_S2), Verdict::Drop(Reason::Foreign));
    assert_eq!(fragment(S1, 0, 0, 18).parameters().to(&mut switch, UP), Verdict::Multicast);
    assert_eq!(sent(&mut switch), ["[10, 11] #0 parameters: 18"]);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn the_next_turn_of_the_model_takes_an_aggregator_over_and_the_one_before_does_not_come_back() {
    let mut switch = switch();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    // Its worker has the parameters of fragment 0: the window has four places.
    assert_eq!(fragment(S1, 0b10, 4, 6).to(&mut switch, 11), Verdict::Absorb);
    assert_eq!(fragment(S1, 0b10, 0, 5).to(&mut switch, 11), Verdict::Drop(Reason::Stale));
    assert_eq!(fragment(S1, 1, 0, 5).resent().to(&mut switch, 10), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 1 passed resend: 5"], "the server has its parameters");
    fragment(S1, 1, 4, 7).to(&mut switch, 10);
    fragment(S1, 0b100, 4, 8).to(&mut switch, 10);
    assert_eq!(sent(&mut switch), ["[100] #4 S1 111 passed: 21"]);
    assert_eq!(switch.statistics().collisions, 0);
}

#[test]
fn a_fragments_own_aggregator_is_taken_over_before_a_free_neighbour() {
    let mut switch = switch_of_ways(8);
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    fragment(S1, 1, 4, 6).to(&mut switch, 10);
    assert_eq!(switch.statistics().in_use, 1);
}

#[test]
fn where_two_fragments_share_an_aggregator_the_second_goes_to_the_server() {
    let mut switch = switch();
    let mut wrapped = route(4);
    wrapped.aggregators = 1;
    switch.add_job(wrapped).unwrap();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    assert_eq!(fragment(S1, 1, 1, 6).to(&mut switch, 10), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #1 S1 1 passed resend collision: 6"]);
}

#[test]
fn packets_of_an_older_plan_are_dropped_and_counted() {
    let mut switch = switch();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    switch.add_job(route(5)).unwrap();
    assert_eq!(switch.statistics().in_use, 0, "what the older plan had summed is forgotten");
    assert_eq!(fragment(S1, 0b10, 0, 6).to(&mut switch, 11), Verdict::Drop(Reason::Generation));
    let mut server = server();
    server.go_on_with(JobId(3), Generation(5), &plan()).unwrap();
    assert_eq!(fragment(SERVER, 1, 2, 6).to(&mut server, 10), Verdict::Drop(Reason::Generation));
    let dropped = [switch.received(), server.received()].map(|it| it.dropped[Reason::Generation as usize]);
    assert_eq!(dropped, [1, 1]);
}

#[test]
fn a_workers_own_fragments_say_where_it_is_and_those_that_neighbours_pass_on_do_not() {
    let mut switch = switch();
    // Workers 1 and 3 are next to it, and where 10 is is known.
    switch.add_job(GoatRoute { below: vec![10], own: 0b1010, ..route(4) }).unwrap();
    let parameters = |switch: &mut GoatSwitch<u16>, sequence| {
        fragment(S1, 0, sequence, 5).parameters().to(switch, UP);
        sent(switch)
    };
    assert_eq!(parameters(&mut switch, 0), ["[10] #0 parameters: 5"]);
    // For another node as well as for this one.
    fragment(S2, 0b1000, 2, 1).to(&mut switch, 33);
    fragment(S1, 0b10, 0, 1).to(&mut switch, 31);
    sent(&mut switch);
    assert_eq!(parameters(&mut switch, 1), ["[10, 33, 31] #1 parameters: 5"]);
    for elsewhere in [
        (fragment(S1, 0b1, 0, 1), 77),
        (fragment(S1, 0b11, 0, 1), 77),
        (fragment(S1, 0b10, 0, 1).passed(), 77),
        (fragment(S1, 0b10, 0, 1), UP),
    ] {
        elsewhere.0.to(&mut switch, elsewhere.1);
    }
    sent(&mut switch);
    assert_eq!(parameters(&mut switch, 2), ["[10, 33, 31] #2 parameters: 5"]);
    // It has another address now.
    fragment(S2, 0b1000, 3, 1).to(&mut switch, 34);
    sent(&mut switch);
    assert_eq!(parameters(&mut switch, 3), ["[10, 31, 34] #3 parameters: 5"]);
}

fn config() -> GoatJobConfig {
    GoatJobConfig {
        id: JobId(3),
        key: KEY,
        generation: Generation(4),
        workers: 5,
        elements: ELEMENTS as u16,
        window_max: 4,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    }
}

/// The first sub-model's workers 0 and 1 are summed at S1, 2 and 3 at S2, 4 at the server; all of
/// the other one are summed at the server.
fn plan() -> ServerPlan<u16> {
    let first = [S1, S1, S2, S2, SERVER];
    ServerPlan {
        sub_models: sub_models(),
        nodes: first.iter().map(|node| vec![*node, SERVER]).collect(),
        onward: Vec::new(),
        children: vec![10, 14],
        ways: vec![0, 0, 0, 0, 1],
    }
}

fn server() -> GoatServer<u16> {
    let mut server = GoatServer::new();
    server.add_job(GoatServerJob { config: config(), plan: plan(), restored: false }).unwrap();
    server
}

#[test]
fn the_server_adds_what_switches_and_workers_send_and_answers_all() {
    let mut server = server();
    fragment(S1, 0b11, 0, 3).passed().to(&mut server, 10);
    fragment(SERVER, 0b10000, 0, 16).to(&mut server, 14);
    assert_eq!(fragment(S2, 0b1100, 0, 12).passed().to(&mut server, 10), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters: 31"]);
    assert_eq!(server.progress(JobId(3)).unwrap().aggregations, 3);
}

#[test]
fn a_workers_own_way_to_the_server_is_learned_from_its_packets() {
    let mut server = GoatServer::new();
    // The address of worker 4 is not given.
    let job = GoatServerJob {
        config: config(),
        plan: ServerPlan { children: vec![10], ..plan() },
        restored: false,
    };
    server.add_job(job).unwrap();
    fragment(S1, 0b11, 0, 3).passed().to(&mut server, 10);
    fragment(S2, 0b1100, 0, 12).passed().to(&mut server, 10);
    fragment(SERVER, 0b10000, 0, 16).to(&mut server, 44);
    assert_eq!(sent(&mut server), ["[10, 44] #0 parameters: 31"]);
    // A part of others that a switch shows says nothing of its address.
    fragment(S1, 0b1, 1, 3).passed().to(&mut server, 77);
    fragment(SERVER, 0b10000, 0, 1).resent().to(&mut server, 45);
    assert_eq!(sent(&mut server), ["[45] #0 parameters lost: 31"], "it moved");
    let far = GoatServerJob {
        config: config(),
        plan: ServerPlan { ways: vec![0, 0, 0, 0, 5], ..plan() },
        restored: false,
    };
    let wrong = GoatConfigError::Assignment { rank: 4, said: 2, is: 2 };
    assert_eq!(GoatServer::new().add_job(far), Err(wrong), "a child behind the last that there can be");
}

#[test]
fn a_part_of_a_group_counts_until_the_whole_takes_its_place() {
    for whole_comes in [true, false] {
        let mut server = server();
        fragment(S1, 0b1, 0, 1).passed().resent().to(&mut server, 10);
        fragment(S2, 0b1000, 0, 8).passed().resent().to(&mut server, 10);
        fragment(SERVER, 0b10000, 0, 16).to(&mut server, 14);
        // The sum that a switch shows grows.
        fragment(S2, 0b1100, 0, 12).passed().to(&mut server, 10);
        assert_eq!(
            fragment(S2, 0b100, 0, 4).passed().resent().to(&mut server, 10),
            Verdict::Drop(Reason::Duplicate)
        );
        let last = if whole_comes { fragment(S1, 0b11, 0, 3) } else { fragment(S1, 0b10, 0, 2) };
        assert_eq!(last.passed().resent().to(&mut server, 10), Verdict::Multicast);
        assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 31"], "{whole_comes}");
    }
}

/// Worker 0 has no way to S1 any more and sends to the server, which has it together with what S1
/// shows first. The part that S1 shows later has some of that in it, and not all.
#[test]
fn a_part_that_overlaps_takes_the_place_of_what_is_there() {
    let mut server = server();
    let nodes = vec![vec![S1, SERVER]; 5];
    server.go_on_with(JobId(3), Generation(4), &ServerPlan { nodes, ..plan() }).unwrap();
    let mut part = |workers, value| fragment(S1, workers, 0, value).passed().resent().to(&mut server, 10);
    assert_eq!([part(0b1, 1), part(0b10, 2)], [Verdict::Absorb; 2]);
    assert_eq!(part(0b110, 6), Verdict::Absorb, "worker 0 is not in any more");
    assert_eq!([part(0b10, 2), part(0b110, 6)], [Verdict::Drop(Reason::Duplicate); 2]);
    assert_eq!([part(0b1, 1), part(0b11110, 30)], [Verdict::Absorb; 2]);
    assert_eq!(part(0b1, 1), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 31"]);
}

/// Worker 0 is in the first part, and waits for the others. The second part has it again, and a
/// worker of whom the first packet was lost.
#[test]
fn a_loss_shows_in_a_part_that_has_an_earlier_one_in_it_again() {
    for is_lost in [true, false] {
        let mut server = server();
        let nodes = vec![vec![S1, SERVER]; 5];
        server.go_on_with(JobId(3), Generation(4), &ServerPlan { nodes, ..plan() }).unwrap();
        let stalled = |packet: Packet| packet.with(|header| header.flags.stalled = true);
        stalled(fragment(S1, 0b1, 0, 1).passed().resent()).to(&mut server, 10);
        let second = fragment(S1, 0b11, 0, 3).passed().resent();
        if is_lost { second } else { stalled(second) }.to(&mut server, 10);
        assert_eq!(fragment(S1, 0b11111, 0, 31).passed().to(&mut server, 10), Verdict::Multicast);
        let lost = if is_lost { " lost" } else { "" };
        assert_eq!(sent(&mut server), [format!("[10, 14] #0 parameters{lost}: 31")]);
    }
}

/// Workers 0 and 1 are summed at S1, 2 and 3 at S2, and both sums and worker 4 at S3.
fn plan_of_sums() -> ServerPlan<u16> {
    let first = [S1, S1, S2, S2, S3];
    ServerPlan {
        nodes: first.iter().map(|node| vec![*node, SERVER]).collect(),
        onward: vec![Onward::from([(S1, S3), (S2, S3)])],
        ..plan()
    }
}

fn server_of_sums() -> GoatServer<u16> {
    let mut server = GoatServer::new();
    server.add_job(GoatServerJob { config: config(), plan: plan_of_sums(), restored: false }).unwrap();
    server
}

#[test]
fn the_last_nodes_sum_is_all_and_sums_before_it_are_parts() {
    let mut server = server_of_sums();
    assert_eq!(fragment(S3, 0b11111, 0, 31).passed().to(&mut server, 10), Verdict::Multicast);
    // A whole sum that was shown to the server counts until the last one takes its place.
    fragment(S1, 0b11, 1, 3).passed().resent().to(&mut server, 10);
    fragment(S2, 0b100, 1, 4).passed().resent().to(&mut server, 10);
    assert_eq!(fragment(S3, 0b11111, 1, 31).passed().to(&mut server, 10), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters: 31", "[10, 14] #1 parameters lost: 31"]);
    // It labels with S1 what S1 sums.
    for wrong in [fragment(S1, 0b100, 4, 1), fragment(S3, 0b10_0000, 4, 1)] {
        assert_eq!(wrong.passed().to(&mut server, 10), Verdict::Drop(Reason::Unplanned));
    }
}

#[test]
fn parts_of_nodes_on_one_way_count_each_worker_once() {
    let mut server = server_of_sums();
    let mut part = |node, workers| {
        // Each worker's value is its bit.
        fragment(node, workers, 0, workers as i32).passed().resent().to(&mut server, 10)
    };
    assert_eq!([part(S1, 0b1), part(S2, 0b100)], [Verdict::Absorb; 2]);
    // S3 has the whole sum of S1, and worker 4.
    assert_eq!(part(S3, 0b10011), Verdict::Absorb);
    assert_eq!([part(S1, 0b1), part(S1, 0b11)], [Verdict::Drop(Reason::Duplicate); 2]);
    assert_eq!(part(S2, 0b1000), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 31"]);
}

#[test]
fn parts_of_nodes_on_one_way_make_the_sum() {
    for last in [(S2, 0b1100), (S2, 0b1000), (S3, 0b11111), (S3, 0b1100)] {
        let mut server = server_of_sums();
        let mut part =
            |node, workers| fragment(node, workers, 0, workers as i32).passed().resent().to(&mut server, 10);
        assert_eq!([part(S1, 0b1), part(S2, 0b100), part(S3, 0b10011)], [Verdict::Absorb; 3]);
        assert_eq!(part(last.0, last.1), Verdict::Multicast, "{last:?}");
        assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 31"], "{last:?}");
    }
}

#[test]
fn a_plan_whose_sums_go_round_in_a_circle_is_refused() {
    let plan = ServerPlan { onward: vec![Onward::from([(S1, S2), (S2, S1)])], ..plan() };
    let job = GoatServerJob { config: config(), plan, restored: false };
    assert_eq!(GoatServer::new().add_job(job), Err(GoatConfigError::Onward));
}

/// The window has four fragments, and no fragment more than two groups of which parts can come.
#[test]
fn parts_have_room_for_a_window_and_the_earliest_fragment_always_for_its_own() {
    let mut server = server();
    let nodes = [S1, S1, S2, S2, SERVER].iter().map(|node| vec![*node; 2]).collect();
    server.go_on_with(JobId(3), Generation(4), &ServerPlan { nodes, ..plan() }).unwrap();
    let mut part =
        |node, workers, sequence| fragment(node, workers, sequence, 1).passed().resent().to(&mut server, 10);
    for sequence in [1, 2] {
        assert_eq!(part(S1, 0b1, sequence), Verdict::Absorb);
        assert_eq!(part(S2, 0b100, sequence), Verdict::Absorb);
    }
    assert_eq!(part(S1, 0b1, 3), Verdict::Drop(Reason::NoRoom));
    assert_eq!(part(S1, 0b10, 1), Verdict::Absorb, "it has its room");
    assert_eq!([part(S1, 0b1, 0), part(S2, 0b100, 0)], [Verdict::Absorb; 2]);
    assert_eq!(part(S2, 0b100, 3), Verdict::Drop(Reason::NoRoom));
    assert_eq!([part(S1, 0b10, 0), part(S2, 0b1000, 0)], [Verdict::Absorb; 2]);
    assert_eq!(fragment(SERVER, 0b10000, 0, 1).to(&mut server, 14), Verdict::Multicast);
    // The room of fragment 0 is for the next earliest, and what came of another whole is free
    // again.
    let mut part =
        |node, workers, sequence| fragment(node, workers, sequence, 1).passed().resent().to(&mut server, 10);
    assert_eq!(part(S1, 0b1, 3), Verdict::Drop(Reason::NoRoom));
    assert_eq!(part(S1, 0b11, 2), Verdict::Absorb);
    assert_eq!(part(S1, 0b1, 3), Verdict::Absorb);
}

/// The server lost its memory, and of what it begins with nobody needs the first fragment any more.
#[test]
fn after_a_restart_the_earliest_fragment_is_the_first_that_is_heard_of() {
    let mut server = GoatServer::new();
    let nodes = [S1, S1, S2, S2, SERVER].iter().map(|node| vec![*node; 2]).collect();
    let job = GoatServerJob { config: config(), plan: ServerPlan { nodes, ..plan() }, restored: true };
    server.add_job(job).unwrap();
    let mut part =
        |node, workers, sequence| fragment(node, workers, sequence, 1).passed().to(&mut server, 10);
    for sequence in [6, 7] {
        assert_eq!([part(S1, 0b1, sequence), part(S2, 0b100, sequence)], [Verdict::Absorb; 2]);
    }
    assert_eq!(part(S1, 0b1, 5), Verdict::Drop(Reason::NoRoom), "its place has not heard of it yet");
    assert_eq!([part(S1, 0b1, 5), part(S2, 0b100, 5)], [Verdict::Absorb; 2]);
}

#[test]
fn what_another_plan_says_is_refused() {
    let mut server = server();
    for wrong in [
        // Worker 2 at S1, and at the server; a node that the plan has not; another sub-model;
        // another fragment of it.
        fragment(S1, 0b100, 0, 1),
        fragment(SERVER, 0b100, 0, 1),
        fragment(S3, 0b1, 0, 1),
        fragment(S1, 0b1, 0, 1).with(|header| header.directions.sub_model = SubModel(1)),
        fragment(S1, 0b1, 0, 1).with(|header| header.aggregator_index = 1),
        // A sum of workers of two groups.
        fragment(S1, 0b111, 0, 1).passed(),
    ] {
        assert_eq!(wrong.to(&mut server, 10), Verdict::Drop(Reason::Unplanned));
    }
    assert_eq!(server.received().dropped[Reason::Unplanned as usize], 6);
    assert_eq!(fragment(S1, 0, 0, 1).to(&mut server, 10), Verdict::Drop(Reason::OutOfRange));
}

#[test]
fn who_lacks_parameters_gets_them_by_its_own_way() {
    let mut server = server();
    for (node, workers) in [(S1, 0b11), (S2, 0b1100), (SERVER, 0b10000)] {
        fragment(node, workers, 0, 1).to(&mut server, 10);
    }
    sent(&mut server);
    // From S1 it came, and worker 4 is elsewhere.
    fragment(SERVER, 0b10000, 0, 1).resent().to(&mut server, 10);
    assert_eq!(sent(&mut server), ["[14] #0 parameters lost: 3"]);
    fragment(S2, 0b100, 0, 1).resent().to(&mut server, 99);
    assert_eq!(sent(&mut server), ["[10] #0 parameters lost: 3"]);
}

/// The switch that sums for both shows the whole sum again, whoever of them lacks what came of it.
#[test]
fn who_lacks_parameters_gets_them_where_its_group_has_several_ways() {
    let mut server = GoatServer::new();
    let nodes = [S1, S2, S2, S2, S1].iter().map(|node| vec![*node, SERVER]).collect();
    let plan = ServerPlan { nodes, ..plan() };
    server.add_job(GoatServerJob { config: config(), plan, restored: false }).unwrap();
    fragment(S2, 0b1110, 0, 1).passed().to(&mut server, 10);
    fragment(S1, 0b10001, 0, 1).passed().to(&mut server, 10);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters: 2"]);
    fragment(S1, 0b10001, 0, 1).passed().resent().to(&mut server, 10);
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 2"]);
}

#[test]
fn plans_that_do_not_fit_their_job_are_refused() {
    let with = |change: fn(&mut GoatServerJob<u16>)| {
        let mut job = GoatServerJob { config: config(), plan: plan(), restored: false };
        change(&mut job);
        GoatServer::new().add_job(job)
    };
    assert_eq!(with(|_| {}), Ok(()));
    assert_eq!(with(|job| job.config.workers = 129), Err(GoatConfigError::PlannedWorkers(129)));
    assert_eq!(with(|job| job.plan.nodes.truncate(4)), Err(GoatConfigError::Assignments(4)));
    assert_eq!(
        with(|job| job.plan.nodes[1].truncate(1)),
        Err(GoatConfigError::Assignment { rank: 1, said: 1, is: 2 })
    );
    for (rank, nodes) in [(0, vec![S1]), (128, vec![S1, S2])] {
        let (said, wrong) = (nodes.len(), Assignment::new(rank, sub_models(), nodes, vec![(S1, 9u16)]));
        assert_eq!(wrong, Err(GoatConfigError::Assignment { rank: rank.into(), said, is: 2 }));
    }
    let mut server = server();
    let three = SubModels::new(&[2, 1, 1]).unwrap();
    let again = server.go_on_with(JobId(3), Generation(5), &ServerPlan { sub_models: three, ..plan() });
    assert_eq!(again, Err(GoatConfigError::Assignment { rank: 0, said: 2, is: 3 }));
    assert_eq!(fragment(SERVER, 1, 2, 6).to(&mut server, 10), Verdict::Absorb, "the job is as before");
}
