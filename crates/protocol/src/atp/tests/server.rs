mod memory_lost;

use super::*;
use crate::atp::{
    AtpConfigError, AtpJobConfig, AtpServer, Hashing, Overflow, Scaling, ServerJob, next_aggregator_index,
};
use crate::machine::{JobAborted, Reason, Summer};

const STALE: Verdict = Verdict::Drop(Reason::Stale);
const DUPLICATE: Verdict = Verdict::Drop(Reason::Duplicate);
const WINDOW: u64 = 4;
const MS: u64 = 1_000_000;
/// 1.0 under the fixed factor.
const ONE: i32 = 100_000_000;

fn config(workers: u16) -> AtpJobConfig {
    AtpJobConfig {
        id: JobId(3),
        key: KEY,
        generation: Generation(0),
        workers,
        elements: ELEMENTS as u16,
        window_max: WINDOW as u16,
        aggregators: 16,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    }
}

/// Directions of worker `bit` of rack `rack`, of `racks` with `workers` each.
fn in_rack(rack: u32, bit: u32, workers: u8, racks: u8) -> Directions {
    Directions { level: 0, bitmaps: [1 << bit, 1 << rack, 0, 0], fan_in_degrees: [workers, racks, 0, 0] }
}

/// Two racks of two under a second level, and the server above: ranks 0 to 3 in order.
fn two_racks() -> Vec<Directions> {
    [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(rack, bit)| in_rack(rack, bit, 2, 2)).to_vec()
}

fn server_with(config: AtpJobConfig, workers: Vec<Directions>, level: u8, restored: bool) -> AtpServer<u16> {
    let mut server = AtpServer::new();
    server.add_job(ServerJob { config, workers, level, restored }).unwrap();
    server
}

fn server() -> AtpServer<u16> {
    server_with(config(4), two_racks(), 2, false)
}

/// A fragment as it comes to the server of [`two_racks`].
fn arrived(bitmap0: u32, bitmap1: u32, sequence: u64, value: i32) -> Packet {
    fragment(0, sequence, value).directed(Directions {
        level: 2,
        bitmaps: [bitmap0, bitmap1, 0, 0],
        fan_in_degrees: [2, 2, 0, 0],
    })
}

/// A server of two workers without any switch.
fn plain(restored: bool) -> AtpServer<u16> {
    let worker = |bit| Directions { level: 0, bitmaps: [1u32 << bit, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] };
    server_with(config(2), vec![worker(0), worker(1)], 0, restored)
}

/// A packet of one of its workers.
fn from_worker(bit: u32, sequence: u64, value: i32) -> Packet {
    fragment(bit, sequence, value).directed(Directions {
        level: 0,
        bitmaps: [1 << bit, 0, 0, 0],
        fan_in_degrees: [2, 0, 0, 0],
    })
}

fn original(bit: u32, sequence: u64, value: f32) -> Packet {
    let packet = from_worker(bit, sequence, 0).resent().with(|header| header.flags.overflow = true);
    Packet { value: value.to_le_bytes(), ..packet }
}

fn restored(bit: u32, sequence: u64, value: f32) -> Packet {
    let packet = from_worker(bit, sequence, 0).resent().at(11).with(|header| header.flags.restore = true);
    Packet { value: value.to_le_bytes(), ..packet }
}

fn parameters(server: &mut AtpServer<u16>) -> GradientHeader {
    let (_, packet) = packets(server).pop().unwrap();
    GradientPacket::parse(Preamble::parse(&packet).unwrap(), &packet).unwrap().header
}

#[test]
fn whole_sums_partial_sums_and_single_fragments_add_up() {
    let ways: [&[(u32, u32, i32)]; 5] = [
        &[(0b11, 0b11, 10)],
        &[(0b11, 0b01, 3), (0b11, 0b10, 7)],
        &[(0b01, 0b01, 1), (0b10, 0b01, 2), (0b11, 0b10, 7)],
        &[(0b10, 0b10, 4), (0b01, 0b01, 1), (0b01, 0b10, 3), (0b10, 0b01, 2)],
        // The second level's sum names the workers of the rack that came last; its first rack is in
        // as well.
        &[(0b01, 0b11, 10)],
    ];
    for way in ways {
        let mut server = server();
        for (i, (bitmap0, bitmap1, value)) in way.iter().enumerate() {
            let verdict = arrived(*bitmap0, *bitmap1, 0, value * ONE).to(&mut server, 9);
            let last = i + 1 == way.len();
            assert_eq!(verdict, if last { Verdict::Multicast } else { Verdict::Absorb }, "{way:?}");
        }
        assert_eq!(sent(&mut server), ["[9] #0 parameters: 10"], "{way:?}");
    }
}

#[test]
fn values_of_two_bytes_and_sums_of_four_add_up_and_parameters_have_two() {
    let mut server = server();
    arrived(0b01, 0b01, 0, 0).half(1.5).to(&mut server, 9);
    arrived(0b10, 0b01, 0, 0).half(0.25).to(&mut server, 9);
    let sum = arrived(0b11, 0b10, 0, 2 * ONE).with(|header| header.collective.dtype = Dtype::Bfloat16);
    assert_eq!(sum.to(&mut server, 9), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters half: 3.75"]);

    let mut server = plain(false);
    original(0, 0, 0.0).half(300.0).to(&mut server, 0);
    original(1, 0, 0.0).half(1.0).to(&mut server, 1);
    // 301 lies between 300 and 302 in bfloat16, and goes to the even one.
    assert_eq!(sent(&mut server), ["[0, 1] #0 parameters half: 300"]);

    let mut server = plain(true);
    assert_eq!(restored(0, 0, 0.0).half(0.75).to(&mut server, 0), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[0] #0 parameters half: 0.75"]);
}

#[test]
fn an_average_is_divided_once_and_rounded_once() {
    let mut server = server();
    let average = |packet: Packet| packet.with(|header| header.collective.op = Op::Average);
    average(arrived(0b11, 0b01, 0, 1)).to(&mut server, 9);
    average(arrived(0b11, 0b10, 0, ONE)).to(&mut server, 9);
    let (_, packet) = packets(&mut server).pop().unwrap();
    let value =
        f32::from_le_bytes(packet[GRADIENT_HEADER_BYTES..GRADIENT_HEADER_BYTES + 4].try_into().unwrap());
    assert_eq!(value.to_bits(), ((100_000_001.0 / 4e8_f64) as f32).to_bits());
}

#[test]
fn duplicates_are_dropped_and_what_overlaps_waits_for_single_fragments() {
    let mut server = server();
    assert_eq!(arrived(0b01, 0b01, 0, 1).to(&mut server, 9), Verdict::Absorb);
    assert_eq!(arrived(0b01, 0b01, 0, 1).resent().to(&mut server, 9), DUPLICATE);
    assert_eq!(arrived(0b01, 0b10, 0, 4 * ONE).to(&mut server, 9), Verdict::Absorb);
    // w0 and w1 together: w0 cannot be taken out of it, nor w2 out of what is here.
    assert_eq!(arrived(0b11, 0b01, 0, 3).resent().to(&mut server, 9), Verdict::Drop(Reason::Overlap));
    assert_eq!(arrived(0b10, 0b01, 0, ONE - 1).resent().to(&mut server, 9), Verdict::Absorb);
    assert_eq!(arrived(0b10, 0b10, 0, 8 * ONE).resent().to(&mut server, 9), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters lost: 13"]);
    let progress = server.progress(JobId(3)).unwrap();
    assert_eq!((progress.aggregations, progress.duplicates, progress.completed), (4, 1, 1));
}

#[test]
fn a_sum_that_has_all_that_is_here_takes_its_place() {
    let mut server = server();
    assert_eq!(arrived(0b01, 0b01, 0, ONE).to(&mut server, 9), Verdict::Absorb);
    assert_eq!(arrived(0b11, 0b01, 0, 3 * ONE).resent().to(&mut server, 9), Verdict::Absorb);
    assert_eq!(arrived(0b10, 0b01, 0, 2 * ONE).resent().to(&mut server, 9), DUPLICATE);
    assert_eq!(arrived(0b11, 0b10, 0, 7 * ONE).to(&mut server, 9), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters: 10"]);
}

#[test]
fn lost_parameters_go_to_the_child_that_lacks_them_until_the_next_of_the_place_is_done() {
    let mut server = plain(false);
    for sequence in [0, 1] {
        from_worker(0, sequence, ONE).to(&mut server, 1);
        from_worker(1, sequence, ONE).to(&mut server, 2);
    }
    assert_eq!(sent(&mut server), ["[1, 2] #0 parameters: 2", "[1, 2] #1 parameters: 2"]);
    // Worker 0 goes on to the place's next fragment, worker 1 lacks the parameters.
    assert_eq!(from_worker(0, WINDOW, 5 * ONE).to(&mut server, 1), Verdict::Absorb);
    let late = from_worker(1, 0, ONE);
    assert_eq!(late.to(&mut server, 2), STALE, "a copy that the network held back");
    let collided = late.resent().with(|header| header.flags.collision = true);
    assert_eq!(collided.to(&mut server, 2), STALE, "sent once, and marked on the way");
    assert_eq!(from_worker(1, 0, ONE).resent().to(&mut server, 2), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[2] #0 parameters lost: 2"]);
    // Both ask: once to both.
    from_worker(1, 1, ONE).resent().to(&mut server, 2);
    from_worker(0, 1, ONE).resent().to(&mut server, 1);
    from_worker(0, 1, ONE).resent().to(&mut server, 1);
    assert_eq!(sent(&mut server), ["[1, 2] #1 parameters lost: 2"]);
    assert_eq!(from_worker(1, WINDOW, ONE).to(&mut server, 2), Verdict::Multicast);
    assert_eq!(from_worker(1, 3 * WINDOW, 0).to(&mut server, 2), Verdict::Drop(Reason::Ahead));
}

/// A single answer reaches everybody below a switch: were each worker of a rack answered, a lost
/// packet would cost as many as there are.
#[test]
fn workers_of_one_rack_that_lack_the_same_parameters_get_them_once() {
    let mut server = server();
    let again = |bit| arrived(bit, 0b01, 0, ONE).resent();
    arrived(0b11, 0b01, 0, 3 * ONE).to(&mut server, 9);
    arrived(0b11, 0b10, 0, 7 * ONE).to(&mut server, 9);
    assert_eq!(sent(&mut server), ["[9] #0 parameters: 10"]);
    assert_eq!(again(0b01).to_at(&mut server, 9, MS), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters lost: 10"]);
    assert_eq!(again(0b10).to_at(&mut server, 9, 2 * MS - 1), DUPLICATE);
    assert_eq!(again(0b01).to_at(&mut server, 9, 2 * MS - 1), DUPLICATE);
    assert_eq!(sent(&mut server).len(), 0);
    // The answer was lost as well.
    assert_eq!(again(0b10).to_at(&mut server, 9, 2 * MS), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters lost: 10"]);
}

#[test]
fn what_crosses_parameters_that_a_resend_completed_is_not_answered() {
    let mut server = server();
    // A sum was lost: everybody sends again.
    arrived(0b11, 0b01, 0, 3 * ONE).resent().to(&mut server, 9);
    arrived(0b11, 0b10, 0, 7 * ONE).resent().to_at(&mut server, 9, MS);
    assert_eq!(sent(&mut server), ["[9] #0 parameters lost: 10"]);
    for (rack, bit) in [(0b01, 0b01), (0b01, 0b10), (0b10, 0b01), (0b10, 0b10)] {
        assert_eq!(arrived(bit, rack, 0, ONE).resent().to_at(&mut server, 9, 2 * MS - 1), DUPLICATE);
    }
    assert_eq!(arrived(0b01, 0b01, 0, ONE).resent().to_at(&mut server, 9, 2 * MS), Verdict::ReplyUnicast);
}

#[test]
fn ecn_reaches_the_parameters_even_by_a_duplicate() {
    let mut server = plain(false);
    from_worker(0, 0, 1).to(&mut server, 1);
    from_worker(0, 0, 1).with(|header| header.flags.ecn = true).to(&mut server, 1);
    from_worker(1, 0, 1).to(&mut server, 2);
    assert!(parameters(&mut server).flags.ecn);
}

#[test]
fn a_collision_moves_the_place_to_another_aggregator() {
    let mut server = plain(false);
    let collided = |packet: Packet| packet.with(|header| header.flags.collision = true);
    collided(from_worker(0, 0, 1)).to(&mut server, 1);
    from_worker(1, 0, 1).to(&mut server, 2);
    let header = parameters(&mut server);
    assert_eq!(header.aggregator_index, 7, "what the fragment used is freed");
    let next = next_aggregator_index(&header);
    assert_eq!(next, config(2).rehashed(0, 7));
    assert!(next != 7 && next < 16);
    // Without one it stays.
    from_worker(0, 1, 1).to(&mut server, 1);
    from_worker(1, 1, 1).to(&mut server, 2);
    assert_eq!(next_aggregator_index(&parameters(&mut server)), 7);
    assert_eq!(server.progress(JobId(3)).unwrap().rehashes, 1);
}

#[test]
fn linear_indices_follow_the_sequence_number_whatever_collides() {
    let config = AtpJobConfig { hashing: Hashing::Linear, workers: 1, aggregators: 3, ..config(1) };
    let worker = Directions { level: 0, bitmaps: [1, 0, 0, 0], fan_in_degrees: [1, 0, 0, 0] };
    let mut server = server_with(config, vec![worker], 0, false);
    let packet = fragment(0, 2, 1).at(2).directed(worker).with(|header| header.flags.collision = true);
    packet.to(&mut server, 1);
    assert_eq!(next_aggregator_index(&parameters(&mut server)), (2 + WINDOW as u32) % 3);
}

#[test]
fn rehashing_reaches_all_aggregators_and_parts_two_jobs_that_collide() {
    let one = AtpJobConfig { aggregators: 8, ..config(1) };
    let two = AtpJobConfig { id: JobId(4), ..one };
    let (mut a, mut b, mut met) = (5, 5, 0);
    let mut seen = [false; 8];
    for sequence in 0..64 {
        (a, b) = (one.rehashed(sequence, a), two.rehashed(sequence, b));
        seen[a as usize] = true;
        met += u32::from(a == b);
    }
    assert!(met < 32, "{met}");
    let places = AtpJobConfig { window_max: 1024, ..one };
    (0..1024).for_each(|sequence| seen[places.aggregator_index(sequence) as usize] = true);
    assert_eq!(seen, [true; 8]);
}

/// And jobs that share a table meet as often as if they drew: here in about 1000 * 1000 / 2000
/// places.
#[test]
fn places_of_one_job_have_an_aggregator_each_while_there_are_enough() {
    for aggregators in [1, 2, 3, 5, 63, 64, 65, 1000, 1024, 8191] {
        let places = aggregators.min(1024) as u16;
        let config = AtpJobConfig { aggregators, window_max: places, ..config(1) };
        let used = (0..u64::from(places)).map(|sequence| config.aggregator_index(sequence));
        let used: alloc::collections::BTreeSet<_> =
            used.inspect(|index| assert!(*index < aggregators)).collect();
        assert_eq!(used.len(), usize::from(places), "{aggregators}");
    }
    let of_job = |id| {
        let config = AtpJobConfig { id: JobId(id), aggregators: 2000, window_max: 1000, ..config(1) };
        (0..1000)
            .map(|sequence| config.aggregator_index(sequence))
            .collect::<alloc::collections::BTreeSet<_>>()
    };
    let one = of_job(3);
    for other in 4..12 {
        let shared = of_job(other).intersection(&one).count();
        assert!((430..570).contains(&shared), "{shared} with job {other}");
    }
}

#[test]
fn places_of_one_job_that_collide_spread_over_the_whole_table() {
    let config = AtpJobConfig { aggregators: 2000, window_max: 1000, ..config(1) };
    let mut indices = [7; 1000];
    for round in 0..100 {
        for (place, index) in indices.iter_mut().enumerate() {
            *index = config.rehashed(1000 * round + place as u64, *index);
        }
    }
    let used: alloc::collections::BTreeSet<_> = indices.into_iter().collect();
    // As many as of balls thrown at random: 2000 (1 - e^-1/2) = 787. A hash of the index alone
    // leads all to one.
    assert!((740..830).contains(&used.len()), "{}", used.len());
}

#[test]
fn a_saturated_sum_is_replaced_by_the_original_values() {
    let mut server = plain(false);
    from_worker(0, 0, i32::MAX).to(&mut server, 1);
    assert_eq!(from_worker(1, 0, 5).to(&mut server, 2), Verdict::Absorb);
    assert_eq!(sent(&mut server), ["[1, 2] #0 parameters overflow: request"]);
    // Worker 1 did not get the request, and sends scaled values again: too soon for another
    // request, then not.
    let again = from_worker(1, 0, 5).resent();
    assert_eq!(again.to_at(&mut server, 2, MS - 1), Verdict::Drop(Reason::Unexpected));
    assert_eq!(again.to_at(&mut server, 2, MS), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[1, 2] #0 parameters overflow: request"]);
    assert_eq!(original(0, 0, 1e30).to(&mut server, 1), Verdict::Absorb);
    assert_eq!(original(0, 0, 1e30).to(&mut server, 1), DUPLICATE);
    assert_eq!(original(1, 0, 2e30).to(&mut server, 2), Verdict::Multicast);
    assert_eq!(sent(&mut server), [format!("[1, 2] #0 parameters: {}", 1e30f32 + 2e30f32)]);
    assert_eq!(server.progress(JobId(3)).unwrap().overflows, 1);
}

#[test]
fn original_integers_wrap_as_native_ones_do() {
    let mut server = plain(false);
    let native = |packet: Packet| packet.with(|header| header.collective.dtype = Dtype::Int32);
    native(from_worker(0, 0, i32::MAX)).to(&mut server, 1);
    native(from_worker(1, 0, 2)).to(&mut server, 2);
    assert_eq!(sent(&mut server).len(), 1);
    for (bit, value) in [(0, i32::MAX), (1, 2)] {
        let packet = native(original(bit, 0, 0.0));
        Packet { value: value.to_le_bytes(), ..packet }.to(&mut server, 1 + bit as u16);
    }
    let (_, packet) = packets(&mut server).pop().unwrap();
    assert_eq!(packet[GRADIENT_HEADER_BYTES..GRADIENT_HEADER_BYTES + 4], (i32::MIN + 1).to_le_bytes());
}

#[test]
fn original_values_that_nobody_asked_for_count_beside_scaled_ones() {
    let mut server = plain(false);
    assert_eq!(original(0, 0, 40.0).to(&mut server, 1), Verdict::Absorb);
    assert_eq!(from_worker(1, 0, ONE / 2).to(&mut server, 2), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[1, 2] #0 parameters: 40.5"], "the proactive mechanism (B.2)");
}

#[test]
fn frequent_overflows_bring_a_factor_for_each_fragment_and_rare_ones_do_not() {
    let job = AtpJobConfig { scaling: Scaling::Dynamic, ..config(2) };
    let worker = |bit| Directions { level: 0, bitmaps: [1u32 << bit, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] };
    let mut server = server_with(job, vec![worker(0), worker(1)], 0, false);
    // Both workers' next fragments have values up to 2^6 and 2^5: with two workers at 10^8 that may
    // overflow.
    let next = |packet: Packet, exponent| packet.with(|header| header.next_exponent = exponent);
    let overflow = |server: &mut AtpServer<u16>, sequence| {
        next(from_worker(0, sequence, i32::MAX), 6).to(server, 1);
        next(from_worker(1, sequence, 0), 5).to(server, 2);
        packets(server);
        next(original(0, sequence, 40.0), 6).to(server, 1);
        next(original(1, sequence, 40.0), 5).to(server, 2);
        parameters(server).next_exponent
    };
    assert_eq!(overflow(&mut server, 0), GradientHeader::STATIC_FACTOR, "one may be chance");
    assert_eq!(overflow(&mut server, 1), 6);
    // The largest value that the exponent allows, from both: no saturation, and the right sum.
    let value = (64.0 * job.factor(6)).round_ties_even_to_i32();
    let scaled = |bit| next(from_worker(bit, 5, value), 7).with(|header| header.exponent = 6);
    scaled(0).to(&mut server, 1);
    assert_eq!(from_worker(1, 5, 1).to(&mut server, 2), Verdict::Drop(Reason::Exponent));
    assert_eq!(scaled(1).to(&mut server, 2), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[1, 2] #5 parameters: 128"]);
    // Small values go on with the fixed factor, and so does what a worker does not know yet.
    for (sequence, exponent) in [(2, -3), (3, i16::MAX)] {
        next(from_worker(0, sequence, 1), exponent).to(&mut server, 1);
        next(from_worker(1, sequence, 1), -3).to(&mut server, 2);
        assert_eq!(parameters(&mut server).next_exponent, GradientHeader::STATIC_FACTOR);
    }
}

#[test]
fn tiny_values_have_a_factor_of_their_own() {
    for (scaling, larger, agreed) in [
        (Scaling::Dynamic, -30, -30),
        (Scaling::Dynamic, -19, -19),
        (Scaling::Dynamic, -18, GradientHeader::STATIC_FACTOR),
        (Scaling::Static, -30, GradientHeader::STATIC_FACTOR),
    ] {
        let worker =
            |bit| Directions { level: 0, bitmaps: [1u32 << bit, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] };
        let job = AtpJobConfig { scaling, ..config(2) };
        let mut server = server_with(job, vec![worker(0), worker(1)], 0, false);
        let next = |packet: Packet, exponent| packet.with(|header| header.next_exponent = exponent);
        next(from_worker(0, 0, 1), larger).to(&mut server, 1);
        next(from_worker(1, 0, 1), -149).to(&mut server, 2);
        assert_eq!(parameters(&mut server).next_exponent, agreed, "{scaling:?} {larger}");
    }
}

trait RoundTiesEven {
    fn round_ties_even_to_i32(self) -> i32;
}

impl RoundTiesEven for f64 {
    fn round_ties_even_to_i32(self) -> i32 {
        // Adding 1.5 * 2^52 leaves no bits for a fraction.
        ((self + 6_755_399_441_055_744.0) - 6_755_399_441_055_744.0) as i32
    }
}

#[test]
fn workers_that_disagree_end_the_job_and_are_named() {
    let mut server = plain(false);
    from_worker(1, 0, 1).to(&mut server, 2);
    let other = Collective { elements: 9, ..SUM };
    let unlike = from_worker(0, 0, 1).with(|header| header.collective = other);
    assert_eq!(unlike.to(&mut server, 1), Verdict::Drop(Reason::Aborted));
    let reason = AbortReason::Mismatch { first: (Rank(1), SUM), second: (Rank(0), other) };
    assert_eq!(server.poll_event(), Some(JobAborted { job: JobId(3), reason }));
    assert_eq!(sent(&mut server), ["[2, 1] abort"]);
    assert_eq!(from_worker(1, 0, 1).resent().to(&mut server, 2), Verdict::Drop(Reason::Aborted));
    assert_eq!(sent(&mut server), ["[2, 1] abort"], "whoever goes on sending hears it again");
    assert_eq!(server.poll_event(), None);
}

#[test]
fn foreign_packets_and_impossible_directions_change_nothing() {
    let mut server = server();
    assert_eq!(arrived(0b11, 0b01, 0, 3 * ONE).to(&mut server, 9), Verdict::Absorb);
    let out_of_range = Verdict::Drop(Reason::OutOfRange);
    let rows = [
        (arrived(0b11, 0b100, 0, 1), 9, out_of_range),
        (arrived(0b100, 0b10, 0, 1), 9, out_of_range),
        (arrived(0, 0b10, 0, 1), 9, out_of_range),
        (arrived(0b11, 0, 0, 1), 9, out_of_range),
        (arrived(0b11, 0b10, 0, 1).with(|h| h.directions.level = 1), 9, out_of_range),
        // A switch that waits for another number of children than there are.
        (arrived(0b11, 0b10, 0, 1).with(|h| h.directions.fan_in_degrees[0] = 3), 9, out_of_range),
        (arrived(0b11, 0b11, 0, 1).with(|h| h.directions.fan_in_degrees[1] = 3), 9, out_of_range),
        (arrived(0b11, 0b10, 0, 1).answer(), 9, Verdict::Drop(Reason::Unexpected)),
        (Packet { generation: 1, ..arrived(0b11, 0b10, 0, 1) }, 9, Verdict::Drop(Reason::Generation)),
        (Packet { elements: 0, ..arrived(0b11, 0b10, 0, 1) }, 9, Verdict::Drop(Reason::ChunkLength)),
        (arrived(0b11, 0b10, 1 << 40, 1), 9, Verdict::Drop(Reason::Ahead)),
    ];
    for (packet, from, verdict) in rows {
        assert_eq!(packet.to(&mut server, from), verdict, "{packet:?}");
    }
    assert_eq!(arrived(0b11, 0b10, 0, 7 * ONE).to(&mut server, 9), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters: 10"]);
}

#[test]
fn directions_that_do_not_fit_together_are_refused() {
    let add = |workers: Vec<Directions>| {
        let config = config(workers.len() as u16);
        AtpServer::<u16>::new().add_job(ServerJob { config, workers, level: 2, restored: false })
    };
    let place = |change: fn(&mut Directions)| {
        let mut workers = two_racks();
        change(&mut workers[3]);
        workers
    };
    assert_eq!(add(two_racks()), Ok(()));
    assert_eq!(add(place(|worker| worker.bitmaps = [1, 2, 0, 0])), Err(AtpConfigError::Place(3)));
    assert_eq!(add(place(|worker| worker.bitmaps = [3, 2, 0, 0])), Err(AtpConfigError::Place(3)));
    assert_eq!(add(place(|worker| worker.bitmaps = [2, 0, 0, 0])), Err(AtpConfigError::Place(3)));
    assert_eq!(add(place(|worker| worker.level = 3)), Err(AtpConfigError::Place(3)));
    // A worker in the place of its own rack's switch.
    let usurper = place(|worker| (worker.level, worker.bitmaps) = (1, [0, 2, 0, 0]));
    assert!(matches!(add(usurper), Err(AtpConfigError::Place(_))));
    assert_eq!(
        add(place(|worker| worker.fan_in_degrees[0] = 3)),
        Err(AtpConfigError::FanIn { rank: 3, level: 0, said: 3, is: 2 })
    );
    let mut three_of_four = two_racks();
    three_of_four.pop();
    let refused = AtpServer::<u16>::new().add_job(ServerJob {
        config: config(4),
        workers: three_of_four.clone(),
        level: 2,
        restored: false,
    });
    assert_eq!(refused, Err(AtpConfigError::Directions(3)));
    assert_eq!(add(three_of_four), Err(AtpConfigError::FanIn { rank: 2, level: 0, said: 2, is: 1 }));
}

#[test]
fn numbers_outside_their_limits_are_refused() {
    type Change = fn(&mut AtpJobConfig);
    let rows: [(Change, AtpConfigError); 7] = [
        (|c| c.workers = 0, AtpConfigError::Workers(0)),
        (|c| c.workers = 1025, AtpConfigError::Workers(1025)),
        (|c| c.elements = 65, AtpConfigError::Elements(65)),
        (|c| c.window_max = 0, AtpConfigError::Window { fragments: 0, elements: 64 }),
        (|c| c.window_max = 16385, AtpConfigError::Window { fragments: 16385, elements: 64 }),
        (|c| c.aggregators = u32::MAX, AtpConfigError::Aggregators(u32::MAX)),
        (
            |c| (c.hashing, c.window_max, c.aggregators) = (Hashing::Partition { first: 3 }, 4, 6),
            AtpConfigError::Partition { first: 3, fragments: 4 },
        ),
    ];
    for (change, error) in rows {
        let mut config = config(4);
        change(&mut config);
        assert_eq!(config.check(), Err(error));
    }
    assert!(AtpJobConfig { window_max: 16384, ..config(1024) }.check().is_ok());
}

#[test]
fn a_sequence_number_at_the_end_of_all_is_refused() {
    let mut server = plain(true);
    for sequence in [u64::MAX, u64::MAX - WINDOW, 1 << 63] {
        let out_of_range = Verdict::Drop(Reason::OutOfRange);
        assert_eq!(restored(0, sequence, 0.5).to(&mut server, 1), out_of_range);
        assert_eq!(from_worker(0, sequence, ONE).to(&mut server, 1), out_of_range);
    }
    assert_eq!(restored(0, 8, 0.5).to(&mut server, 1), Verdict::Multicast);
}

#[test]
fn two_workers_at_one_address_get_one_copy() {
    let mut server = plain(false);
    from_worker(0, 0, ONE).to(&mut server, 1);
    from_worker(1, 0, ONE).to(&mut server, 1);
    assert_eq!(sent(&mut server), ["[1] #0 parameters: 2"]);
    from_worker(0, 1, ONE).to(&mut server, 7);
    from_worker(1, 1, ONE).to(&mut server, 7);
    assert_eq!(sent(&mut server), ["[7] #1 parameters: 2"]);
}

#[test]
fn a_child_whose_address_changes_is_heard_and_answered_with_its_next_packet() {
    let mut server = plain(false);
    from_worker(0, 0, ONE).to(&mut server, 1);
    assert_eq!(from_worker(1, 0, ONE).to(&mut server, 2), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[1, 2] #0 parameters: 2"]);
    // These went to the old address of worker 1.
    assert_eq!(from_worker(1, 0, ONE).resent().to(&mut server, 7), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[7] #0 parameters lost: 2"]);
    assert_eq!(from_worker(1, WINDOW, i32::MAX).to(&mut server, 7), Verdict::Absorb);
    // Copies of what is over, from the old address, do not count; one of what gathers does, until
    // the next packet.
    assert_eq!(from_worker(1, 0, ONE).to(&mut server, 2), STALE);
    assert_eq!(from_worker(0, WINDOW, 1).to(&mut server, 1), Verdict::Absorb);
    assert_eq!(sent(&mut server), ["[1, 7] #4 parameters overflow: request"]);
    assert_eq!(original(1, WINDOW, 1.0).to(&mut server, 8), Verdict::Absorb);
    assert_eq!(original(0, WINDOW, 1.0).to(&mut server, 1), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[1, 8] #4 parameters: 2"]);
    // An abort finds it too.
    server.abort_job(JobId(3), AbortReason::SwitchStopped);
    assert_eq!(from_worker(1, WINDOW, 1).to(&mut server, 9), Verdict::Drop(Reason::Aborted));
    assert_eq!(sent(&mut server), ["[1, 9] abort"]);
}

/// A switch between them changes nothing: it is the server's child.
#[test]
fn a_switch_whose_address_changes_is_answered_with_its_next_packet() {
    let mut server = server();
    assert_eq!(arrived(0b11, 0b01, 0, ONE).to(&mut server, 9), Verdict::Absorb);
    assert_eq!(arrived(0b11, 0b10, 0, ONE).to(&mut server, 66), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[66] #0 parameters: 2"]);
}

#[test]
fn a_worker_that_starts_again_is_told_where_the_job_is() {
    let mut server = plain(false);
    for sequence in 0..10 {
        from_worker(0, sequence, ONE).to(&mut server, 1);
        from_worker(1, sequence, ONE).to(&mut server, 2);
    }
    from_worker(0, 10, ONE).to(&mut server, 1);
    packets(&mut server);
    assert_eq!(from_worker(1, 0, 0).resent().to(&mut server, 7), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[7] #9 parameters: 2"]);
    assert_eq!(server.progress(JobId(3)).unwrap().earliest, 10);
}

/// Worker 3 of two racks of two starts again in the first rack: three and one.
#[test]
fn a_worker_in_another_rack_sets_the_job_up_again_and_nothing_is_lost() {
    let mut server = server();
    assert_eq!(arrived(0b11, 0b01, 0, 3 * ONE).to(&mut server, 9), Verdict::Absorb, "w0 and w1");
    let moved = vec![in_rack(0, 0, 3, 2), in_rack(0, 1, 3, 2), in_rack(1, 0, 1, 2), in_rack(0, 2, 3, 2)];
    let again = server.set_up_again(JobId(3), Generation(1), &moved[..3], 2);
    assert_eq!(again, Err(AtpConfigError::Directions(3)));
    assert_eq!(server.set_up_again(JobId(3), Generation(1), &moved, 2), Ok(Some(0)));
    assert_eq!(arrived(0b10, 0b10, 0, ONE).to(&mut server, 9), Verdict::Drop(Reason::Generation));
    let arrives = |server: &mut AtpServer<u16>, rank: usize, value| {
        let directions = Directions { level: 2, ..moved[rank] };
        Packet { generation: 1, ..fragment(0, 0, value).directed(directions) }.to(server, 9)
    };
    assert_eq!(arrives(&mut server, 0, ONE), DUPLICATE, "w0 counts already");
    assert_eq!(arrives(&mut server, 2, 4 * ONE), Verdict::Absorb);
    assert_eq!(arrives(&mut server, 3, 8 * ONE), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[9] #0 parameters: 15"]);
}

#[test]
fn jobs_share_a_server_in_turn() {
    let mut server = plain(false);
    let worker = Directions { level: 0, bitmaps: [1, 0, 0, 0], fan_in_degrees: [1, 0, 0, 0] };
    for id in [1, 8] {
        let config = AtpJobConfig { id: JobId(id), ..config(1) };
        server.add_job(ServerJob { config, workers: vec![worker], level: 0, restored: false }).unwrap();
    }
    for round in 0..2 {
        for job in [8, 1] {
            Packet { job, ..fragment(0, round, ONE).directed(worker) }.to(&mut server, job as u16);
        }
        assert_eq!(
            sent(&mut server),
            [format!("[8] #{round} parameters: 1"), format!("[1] #{round} parameters: 1")]
        );
    }
    // A job that is set up anew has one turn, as before.
    Packet { job: 8, ..fragment(0, 2, ONE).directed(worker) }.to(&mut server, 8);
    let config = AtpJobConfig { id: JobId(8), ..config(1) };
    server.add_job(ServerJob { config, workers: vec![worker], level: 0, restored: false }).unwrap();
    for job in [8, 1] {
        let sequence = if job == 1 { 2 } else { 0 };
        Packet { job, ..fragment(0, sequence, ONE).directed(worker) }.to(&mut server, job as u16);
    }
    assert_eq!(sent(&mut server), ["[8] #0 parameters: 1", "[1] #2 parameters: 1"]);
    server.remove_job(JobId(8));
    let gone = Packet { job: 8, ..fragment(0, 2, ONE).directed(worker) };
    assert_eq!(gone.to(&mut server, 8), Verdict::Drop(Reason::UnknownJob));
}

/// Workers tell by it what a network lost from what waited for its likes, or was overtaken by
/// others.
#[test]
fn parameters_say_whether_something_of_their_fragment_was_lost() {
    let one_rack = |bitmap: u32, value| {
        fragment(0, 0, value).directed(Directions {
            level: 1,
            bitmaps: [bitmap, 0, 0, 0],
            fan_in_degrees: [4, 0, 0, 0],
        })
    };
    let collided = |bitmap| {
        one_rack(bitmap, ONE).with(|header| (header.flags.resend, header.flags.collision) = (true, true))
    };
    let again = |bitmap: u32| one_rack(bitmap, bitmap.count_ones() as i32 * ONE).resent();
    let stalled = |bitmap| again(bitmap).with(|header| header.flags.stalled = true);
    let timelines = [
        // The fourth was lost on its way to the switch; who came in first asks for the partial sum,
        // or the fourth itself does.
        (vec![stalled(0b0111), again(0b1000)], true),
        (vec![again(0b1111)], true),
        // The sum was lost on its way to the server: the aggregator was complete.
        (vec![again(0b1111)], true),
        // Two collided, the other two came in and waited: somebody's resend brings them.
        (vec![collided(0b0001), collided(0b0010), stalled(0b1100)], false),
        // The resend is of one of the first two: it is in the sum once more, and all come one by
        // one.
        (vec![collided(0b0001), collided(0b0010), again(0b1101), again(0b0100), again(0b1000)], false),
        // A packet that collided was lost.
        (vec![collided(0b0001), stalled(0b1100), again(0b0010)], true),
        // All collided, and came late.
        (vec![collided(0b0001), collided(0b0010), collided(0b0100), collided(0b1000), again(0b0001)], false),
        // All collided, and one was lost.
        (vec![collided(0b0001), collided(0b0010), collided(0b0100), again(0b1000)], true),
    ];
    for (at, (packets, lost)) in timelines.into_iter().enumerate() {
        let directions =
            |bit| Directions { level: 0, bitmaps: [1_u32 << bit, 0, 0, 0], fan_in_degrees: [4, 0, 0, 0] };
        let mut server = server_with(config(4), (0..4).map(directions).collect(), 1, false);
        for packet in packets {
            packet.to(&mut server, 9);
        }
        let expected = if lost { "[9] #0 parameters lost: 4" } else { "[9] #0 parameters: 4" };
        assert_eq!(sent(&mut server)[0], expected, "timeline {at}");
    }
}
