//! Workers and a switch joined by hand, without loss unless a test makes it.

mod bfloat16;
mod ends;
mod lengths;
mod native;
mod packed;
mod queues;
mod restores;
mod roots;

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{Abort, AbortReason, Generation, JobId, Key, NATIVE_ELEMENTS_MAX, Op, Rank, ShardId};

use super::*;
use crate::machine::{Elements, Summer};
use crate::switchml::Switch;

const ELEMENTS: usize = 256;
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

#[derive(Debug, Clone, PartialEq)]
enum Numbers {
    Float(Vec<f32>),
    Bfloat(Vec<u16>),
    Half(Vec<u16>),
    Int(Vec<i32>),
    Long(Vec<i64>),
    Byte(Vec<i8>),
    /// The others of floats are parts of tensors that are long enough for exponents; this one is as
    /// short as it is.
    Short(Vec<f32>),
}

impl Tensor for Numbers {
    fn whole_elements(&mut self) -> usize {
        let here = self.elements().count();
        match self {
            Self::Float(_) | Self::Bfloat(_) | Self::Half(_) => here.max(NATIVE_ELEMENTS_MAX + 1),
            _ => here,
        }
    }

    fn elements(&mut self) -> Elements<'_> {
        match self {
            Self::Float(x) => Elements::Float32(x),
            Self::Bfloat(x) => Elements::Bfloat16(x),
            Self::Half(x) => Elements::Float16(x),
            Self::Int(x) => Elements::Int32(x),
            Self::Long(x) => Elements::Int64(x),
            Self::Byte(x) => Elements::Int8(x),
            Self::Short(x) => Elements::Float32(x),
        }
    }
}

struct Rack {
    switch: Switch<usize>,
    workers: Vec<Worker<(), Numbers>>,
    now: Instant,
    /// Exchanges that had no payload.
    probes: usize,
    done: Vec<Vec<Numbers>>,
}

impl Rack {
    fn new(workers: u8, slots: u16) -> Self {
        Self::with_wire_dtype(workers, slots, WireDtype::SharedExponent)
    }

    fn with_wire_dtype(workers: u8, slots: u16, wire_dtype: WireDtype) -> Self {
        Self::with_chunks(workers, slots, ELEMENTS, wire_dtype)
    }

    fn with_chunks(workers: u8, slots: u16, elements: usize, wire_dtype: WireDtype) -> Self {
        let config = JobConfig {
            id: JobId(1),
            key: KEY,
            generation: Generation(0),
            workers: workers.into(),
            slots,
            window: slots,
            elements: elements as u16,
            wire_dtype,
            shard: ShardId(0),
            resumed: false,
        };
        let mut switch = Switch::new(ShardId(0));
        switch.add_job(config.into()).unwrap();
        let worker = |w| Worker::new(config, WorkerId(w), (), RetransmissionConfig::default());
        Self {
            switch,
            workers: (0..workers).map(worker).collect(),
            now: Instant(0),
            probes: 0,
            done: vec![Vec::new(); usize::from(workers)],
        }
    }

    /// Carries packets until nobody has any. `lost` may take some.
    fn settle(&mut self, mut lost: impl FnMut(&[u8]) -> bool) {
        let mut train = vec![0; 65536];
        loop {
            let mut moved = false;
            for w in 0..self.workers.len() {
                while let Some(sent) = self.workers[w].poll_transmit(self.now, &mut train) {
                    moved = true;
                    let (bytes, segment) = (sent.bytes, sent.segment_bytes);
                    for packet in train[..bytes].chunks(segment).filter(|packet| !lost(packet)) {
                        self.probes += usize::from(packet.len() == fanin_wire::SLOT_HEADER_BYTES);
                        self.switch.handle_packet(self.now, w, packet);
                    }
                }
            }
            while let Some(sent) = self.switch.poll_transmit(self.now, &mut train) {
                moved = true;
                let (to, bytes, segment) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
                for w in to {
                    for packet in train[..bytes].chunks(segment).filter(|packet| !lost(packet)) {
                        self.workers[w].handle_packet(self.now, (), packet);
                    }
                }
            }
            for (worker, done) in self.workers.iter_mut().zip(&mut self.done) {
                while let Some(event) = worker.poll_event() {
                    let WorkerEvent::Completed(tensor, _) = event else { panic!("{event:?}") };
                    done.push(tensor);
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Carries packets until nobody has any, or waits for one.
    fn finish(&mut self) {
        self.settle(|_| false);
        while self.sleep() {
            self.settle(|_| false);
        }
    }

    /// Carries a train of every worker, and the switch's answer to the first `heard_by` of them.
    /// All packets have `packet_bytes`.
    fn exchange(&mut self, heard_by: usize, packet_bytes: usize) {
        let mut train = vec![0; 65536];
        for (w, worker) in self.workers.iter_mut().enumerate() {
            let sent = worker.poll_transmit(self.now, &mut train).unwrap();
            let (bytes, segment) = (sent.bytes, sent.segment_bytes);
            assert_eq!((segment, bytes % segment), (packet_bytes, 0), "worker {w}");
            for packet in train[..bytes].chunks(segment) {
                self.switch.handle_packet(self.now, w, packet);
            }
        }
        let sent = self.switch.poll_transmit(self.now, &mut train).unwrap();
        let (bytes, segment) = (sent.bytes, sent.segment_bytes);
        assert_eq!((segment, bytes % segment), (packet_bytes, 0), "the switch");
        for worker in &mut self.workers[..heard_by] {
            for packet in train[..bytes].chunks(segment) {
                worker.handle_packet(self.now, (), packet);
            }
        }
    }

    /// Puts a fresh switch under the same job in place of this one.
    fn forget(&mut self) -> JobConfig {
        let config = JobConfig { generation: Generation(1), resumed: true, ..self.workers[0].config };
        self.switch = Switch::new(ShardId(0));
        self.switch.add_job(config.into()).unwrap();
        config
    }

    /// Has all workers go on, each of which hands these slots' sums back.
    fn resume<const N: usize>(&mut self, config: JobConfig, restore: [Vec<SlotIndex>; N]) {
        for (worker, restore) in self.workers.iter_mut().zip(restore) {
            let place = worker.worker;
            worker.resume(self.now, WorkerPlan { config, switch: (), place, restore });
        }
    }

    /// Jumps to the next timer of any worker; false when none runs.
    fn sleep(&mut self) -> bool {
        let Some(due) = self.workers.iter().filter_map(Endpoint::poll_timeout).min() else { return false };
        self.now = due;
        self.workers.iter_mut().for_each(|worker| worker.handle_timeout(due));
        true
    }
}

#[test]
fn a_tensor_says_when_its_first_packet_left_and_its_first_and_last_results_came() {
    let Rack { mut switch, mut workers, .. } = Rack::new(1, 2);
    let worker = &mut workers[0];
    let mut train = vec![0; 65536];
    // Three chunks, and one behind them that waits for a slot; and one that nothing is sent of.
    for chunks in [3, 1, 0] {
        worker.submit(Numbers::Int(vec![1; chunks * ELEMENTS]), Op::Sum);
    }
    for (sent, came) in [(10, 20), (30, 40)] {
        while let Some(Transmit { bytes, segment_bytes, .. }) =
            worker.poll_transmit(Instant(sent), &mut train)
        {
            for packet in train[..bytes].chunks(segment_bytes) {
                switch.handle_packet(Instant(sent), 0, packet);
            }
        }
        while let Some(Transmit { bytes, segment_bytes, .. }) =
            switch.poll_transmit(Instant(came), &mut train)
        {
            for packet in train[..bytes].chunks(segment_bytes) {
                worker.handle_packet(Instant(came), (), packet);
            }
        }
    }
    let mut times = Vec::new();
    while let Some(WorkerEvent::Completed(Numbers::Int(tensor), at)) = worker.poll_event() {
        times.push((
            tensor.len() / ELEMENTS,
            at.map(|at| (at.first_sent.0, at.first_result.0, at.last_result.0)),
        ));
    }
    times.sort_unstable();
    assert_eq!(times, [(0, None), (1, Some((30, 40, 40))), (3, Some((10, 20, 40)))]);
}

#[test]
fn tensors_of_any_length_and_type_form_one_stream() {
    let mut rack = Rack::new(3, 4);
    let lengths = [1, 255, 256, 257, 0, 256 * 4 * 3 + 17, 5];
    for w in 0..3 {
        for (i, length) in lengths.into_iter().enumerate() {
            let value = |j: usize| (j % 97) as i32 + w as i32;
            let tensor = match i % 2 {
                0 => Numbers::Int((0..length).map(value).collect()),
                _ => Numbers::Float((0..length).map(|j| value(j) as f32).collect()),
            };
            rack.workers[w].submit(tensor, Op::Sum);
        }
    }
    rack.settle(|_| false);
    for done in &mut rack.done {
        assert_eq!(done.len(), lengths.len());
        done.sort_by_key(|tensor| match tensor {
            Numbers::Int(x) => (0, x.len()),
            Numbers::Float(x) => (1, x.len()),
            _ => unreachable!(),
        });
        for tensor in done {
            match tensor {
                Numbers::Int(x) => assert!(x.iter().enumerate().all(|(j, x)| *x == 3 * (j % 97) as i32 + 3)),
                Numbers::Float(x) => {
                    for (j, x) in x.iter().enumerate() {
                        assert!((x - (3 * (j % 97) + 3) as f32).abs() < 1e-5, "{j}: {x}");
                    }
                }
                _ => unreachable!(),
            }
        }
    }
    assert!(rack.workers.iter().all(|worker| worker.outstanding() == 0));
}

#[test]
fn only_the_first_block_of_a_busy_slot_needs_a_probe() {
    let mut rack = Rack::new(2, 4);
    for worker in &mut rack.workers {
        // Ten rounds of four slots, in two tensors that are both there from the start.
        for _ in 0..2 {
            worker.submit(Numbers::Float(vec![1.0; 20 * ELEMENTS]), Op::Sum);
        }
    }
    rack.settle(|_| false);
    assert_eq!(rack.probes, 2 * 4, "one a slot and worker");
    // After a pause the exponents are unknown again.
    for worker in &mut rack.workers {
        worker.submit(Numbers::Float(vec![1.0; ELEMENTS]), Op::Sum);
    }
    rack.settle(|_| false);
    assert_eq!(rack.probes, 2 * 5);
    assert_eq!(rack.done[0].len(), 3);
}

#[test]
fn integers_need_no_probe() {
    let mut rack = Rack::new(2, 2);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![i32::MAX; 3 * ELEMENTS]), Op::Sum);
    }
    rack.settle(|_| false);
    assert_eq!(rack.probes, 0);
    assert_eq!(rack.done[1], [Numbers::Int(vec![-2; 3 * ELEMENTS])], "int32 wraps, as in PyTorch");
}

#[test]
fn the_average_divides_on_the_workers() {
    let mut rack = Rack::new(4, 2);
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        worker.submit(Numbers::Float(vec![w as f32; 300]), Op::Average);
        worker.submit(Numbers::Int(vec![-(w as i32) - 1; 3]), Op::Average);
    }
    rack.settle(|_| false);
    for done in rack.done {
        assert_eq!(done[1], Numbers::Int(vec![-2; 3]), "-10 / 4, towards zero");
        let Numbers::Float(x) = &done[0] else { panic!() };
        assert!(x.iter().all(|x| (x - 1.5).abs() < 1e-6), "{x:?}");
    }
}

#[test]
fn half_precision_is_summed_and_rounded_once() {
    let mut rack = Rack::new(2, 2);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Half(vec![0x3c00; 10]), Op::Sum); // 1.0
        worker.submit(Numbers::Bfloat(vec![0x3f80; 10]), Op::Sum); // 1.0
    }
    rack.settle(|_| false);
    assert_eq!(rack.done[0], [Numbers::Half(vec![0x4000; 10]), Numbers::Bfloat(vec![0x4000; 10])]);
}

#[test]
fn nan_and_infinity_reach_every_worker_and_no_other_block() {
    for (wire_dtype, block) in [
        (WireDtype::SharedExponent, ELEMENTS),
        (WireDtype::Bfloat16, 2 * ELEMENTS),
        (WireDtype::Int8, 32),
        (WireDtype::Int4, 32),
    ] {
        let mut rack = Rack::with_wire_dtype(2, 2, wire_dtype);
        let mut x = vec![1.0; 8 * ELEMENTS];
        rack.workers[1].submit(Numbers::Float(x.clone()), Op::Sum);
        x[3] = f32::NAN;
        x[block + 5] = f32::NEG_INFINITY;
        rack.workers[0].submit(Numbers::Float(x), Op::Sum);
        rack.settle(|_| false);
        for done in rack.done {
            let [Numbers::Float(x)] = &done[..] else { panic!() };
            assert!(x[3].is_nan(), "{wire_dtype:?}");
            assert_eq!(x[block + 5], f32::NEG_INFINITY, "{wire_dtype:?}");
            let (poisoned, others) = x.split_at(2 * block);
            assert!(poisoned.iter().all(|x| !x.is_finite()), "{wire_dtype:?}: no silent garbage there");
            assert!(others.iter().all(|x| *x == 2.0), "{wire_dtype:?}");
        }
    }
}

#[test]
fn what_is_lost_is_sent_again_and_only_that() {
    let mut rack = Rack::new(2, 8);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int((0..8 * ELEMENTS as i32).collect()), Op::Sum);
    }
    let mut count = 0;
    rack.settle(|_| {
        count += 1;
        count == 3 // one packet on the way up
    });
    assert!(rack.done.iter().all(Vec::is_empty));
    while rack.sleep() {
        rack.settle(|_| false);
    }
    let expected = Numbers::Int((0..8 * ELEMENTS as i32).map(|x| 2 * x).collect());
    assert!(rack.done.iter().all(|done| *done == [expected.clone()]));
    assert_eq!(rack.workers[0].statistics().retransmissions, 1);
    assert_eq!(rack.workers[1].statistics().retransmissions, 1, "it waited for the same slot");
}

#[test]
fn an_overtaken_packet_is_sent_again_before_its_timeout() {
    let mut rack = Rack::new(3, 64);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![7; 64 * 10 * ELEMENTS]), Op::Sum);
    }
    let mut count = 0;
    // A packet on the way up, one on the way down.
    rack.settle(|_| {
        count += 1;
        count == 100 || count == 1000
    });
    assert_eq!(rack.now, Instant(0), "no timer was needed");
    assert!(rack.done.iter().all(|done| *done == [Numbers::Int(vec![21; 64 * 10 * ELEMENTS])]));
}

#[test]
fn with_timeouts_only_a_lost_packet_is_sent_again_after_its_timeout() {
    let mut rack = Rack::new(3, 64);
    rack.workers = rack.workers.into_iter().map(Worker::with_timeouts_only).collect();
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![7; 64 * 10 * ELEMENTS]), Op::Sum);
    }
    let mut count = 0;
    rack.settle(|_| {
        count += 1;
        count == 100
    });
    assert!(rack.done.iter().all(|done| done.is_empty()));
    assert!(rack.sleep(), "a timer is set");
    rack.settle(|_| false);
    assert!(rack.done.iter().all(|done| *done == [Numbers::Int(vec![21; 64 * 10 * ELEMENTS])]));
}

#[test]
fn with_timeouts_only_as_many_packets_are_on_the_way_as_there_are_slots_whatever_was_lost() {
    for (timeouts_only, sent_again) in [(true, 64), (false, u64::from(ANEW))] {
        let mut rack = Rack::new(1, 64);
        if timeouts_only {
            rack.workers = rack.workers.into_iter().map(Worker::with_timeouts_only).collect();
        }
        rack.workers[0].submit(Numbers::Int(vec![7; 64 * 10 * ELEMENTS]), Op::Sum);
        rack.settle(|_| true);
        assert!(rack.sleep(), "a timer is set");
        assert_eq!(rack.workers[0].statistics().retransmissions, sent_again);
        rack.settle(|_| false);
        assert_eq!(rack.done, [[Numbers::Int(vec![7; 64 * 10 * ELEMENTS])]]);
    }
}

#[test]
fn a_worker_that_waits_for_a_late_one_backs_off_and_sends_little() {
    let mut rack = Rack::new(2, 512);
    rack.workers[0].submit(Numbers::Int(vec![1; 512 * ELEMENTS]), Op::Sum);
    rack.settle(|_| false);
    while rack.now < Instant(3_000_000_000) && rack.sleep() {
        rack.settle(|_| false);
    }
    let sent_again = rack.workers[0].statistics().retransmissions;
    assert!(sent_again <= 16 * STALLED_RETRANSMISSIONS as u64, "{sent_again} packets in three seconds");
    rack.workers[1].submit(Numbers::Int(vec![1; 512 * ELEMENTS]), Op::Sum);
    rack.settle(|_| false);
    assert_eq!(rack.done[0], [Numbers::Int(vec![2; 512 * ELEMENTS])]);
}

#[test]
fn an_abort_stops_everything_and_gives_the_tensors_back() {
    let mut rack = Rack::new(2, 2);
    rack.workers[0].submit(Numbers::Int(vec![1; 5000]), Op::Sum);
    rack.workers[0].submit(Numbers::Int(vec![2; 7]), Op::Sum);
    rack.settle(|_| false);
    rack.switch.abort_job(JobId(1), AbortReason::Expelled(Rank(1)));
    let mut train = vec![0; 65536];
    let sent = rack.switch.poll_transmit(rack.now, &mut train).unwrap();
    assert_eq!(sent.to, [0]);
    let bytes = sent.bytes;
    assert_eq!(rack.workers[0].handle_packet(rack.now, (), &train[..bytes]), Verdict::Absorb);
    assert!(matches!(
        rack.workers[0].poll_event(),
        Some(WorkerEvent::Aborted(AbortReason::Expelled(Rank(1))))
    ));
    assert_eq!(rack.workers[0].abandon().count(), 2);
    assert_eq!(rack.workers[0].poll_transmit(rack.now, &mut train), None);
    assert_eq!(rack.workers[0].poll_timeout(), None);
}

#[test]
fn a_suspended_worker_hears_nothing_and_an_abandoned_one_does_not_rise() {
    let mut rack = Rack::new(2, 2);
    rack.workers[0].submit(Numbers::Int(vec![1; 5000]), Op::Sum);
    rack.settle(|_| false);
    rack.switch.abort_job(JobId(1), AbortReason::Expelled(Rank(1)));
    let mut train = vec![0; 65536];
    let bytes = rack.switch.poll_transmit(rack.now, &mut train).unwrap().bytes;
    let worker = &mut rack.workers[0];
    worker.suspend();
    // The old switch's last word is not about the job as it goes on.
    assert_eq!(worker.handle_packet(rack.now, (), &train[..bytes]), Verdict::Drop(Reason::Unexpected));
    assert!(worker.poll_event().is_none());
    let place = worker.worker;
    let config = JobConfig { generation: Generation(1), resumed: true, ..worker.config };
    worker.resume(rack.now, WorkerPlan { config, switch: (), place, restore: vec![] });
    assert!(worker.poll_transmit(rack.now, &mut train).is_some(), "it goes on");
    assert_eq!(worker.abandon().count(), 1);
    worker.resume(rack.now, WorkerPlan { config, switch: (), place, restore: vec![SlotIndex(0)] });
    assert_eq!(worker.poll_transmit(rack.now, &mut train), None);
    assert_eq!(worker.poll_timeout(), None);
}

#[test]
fn tensors_may_finish_out_of_order() {
    let mut rack = Rack::new(2, 4);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![1; 10]), Op::Sum);
        worker.submit(Numbers::Int(vec![2; 20]), Op::Sum);
    }
    let mut first = true;
    rack.settle(|_| core::mem::take(&mut first));
    assert_eq!(rack.done[1], [Numbers::Int(vec![4; 20])]);
    while rack.sleep() {
        rack.settle(|_| false);
    }
    assert_eq!(rack.done[1], [Numbers::Int(vec![4; 20]), Numbers::Int(vec![2; 10])]);
}

#[test]
fn packets_that_are_not_for_this_worker_have_no_effect() {
    let mut rack = Rack::new(2, 1);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![1; 10]), Op::Sum);
    }
    let mut train = vec![0; 65536];
    for w in 0..2 {
        let bytes = rack.workers[w].poll_transmit(rack.now, &mut train).unwrap().bytes;
        rack.switch.handle_packet(rack.now, w, &train[..bytes]);
    }
    let bytes = rack.switch.poll_transmit(rack.now, &mut train).unwrap().bytes;
    let good = train[..bytes].to_vec();
    let damaged = |at: usize, byte: u8| {
        let mut packet = good.clone();
        packet[at] = byte;
        KEY.seal(&mut packet);
        packet
    };
    let worker = &mut rack.workers[0];
    for (packet, reason) in [
        (good[..48].to_vec(), Reason::Malformed),
        (damaged(4, 99), Reason::UnknownJob),
        (damaged(8, 1), Reason::Generation),
        (damaged(10, 1), Reason::OutOfRange),
        (damaged(11, 1), Reason::OutOfRange),
        (damaged(12, 1), Reason::OutOfRange),
        (damaged(3, 1), Reason::Unexpected),
        (damaged(16, 1), Reason::Ahead),
        (damaged(19, 255), Reason::Stale),
        (damaged(20, 1), Reason::Unexpected),
        (damaged(28, 11), Reason::Unexpected),
        (good[..40].to_vec(), Reason::ChunkLength),
    ] {
        assert_eq!(worker.handle_packet(rack.now, (), &packet), Verdict::Drop(reason), "{reason:?}");
    }
    assert_eq!(worker.handle_packet(rack.now, (), &good), Verdict::Absorb);
    assert_eq!(worker.handle_packet(rack.now, (), &good), Verdict::Drop(Reason::Stale));
}

/// A stranger knows the job, its generation, the ranks and the collective: everything but the key.
#[test]
fn a_stranger_makes_up_no_result_and_ends_no_worker() {
    let mut rack = Rack::new(2, 1);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![1; 10]), Op::Sum);
    }
    let mut train = vec![0; 65536];
    let bytes = rack.workers[0].poll_transmit(rack.now, &mut train).unwrap().bytes;
    let update = &train[..bytes];
    let preamble = Preamble { worker: WorkerId::ALL, ..Preamble::parse(update).unwrap() };
    let header = SlotPacket::parse(&preamble, update).unwrap().header;
    let mut forgeries = Vec::new();
    for key in [Key::new(0), Key::new(KEY.secret() ^ 1)] {
        let mut result = vec![0; packet_bytes()];
        let of_result = Preamble { kind: Kind::Result, ..preamble };
        SlotPacket::write(&mut result, key, &of_result, &header, ELEMENTS, |payload| payload.fill(66));
        forgeries.push(result);
        let of_abort = Preamble { kind: Kind::Abort, ..preamble };
        let abort = Abort { preamble: of_abort, reason: AbortReason::Expelled(Rank(1)) };
        forgeries.push(abort.to_bytes(key).to_vec());
    }
    // A worker's own packet is no result either, and its tag says so.
    let mut turned_round = update.to_vec();
    turned_round[3] = Kind::Result as u8;
    forgeries.push(turned_round);
    for forgery in forgeries {
        let verdict = rack.workers[0].handle_packet(rack.now, (), &forgery);
        assert_eq!(verdict, Verdict::Drop(Reason::Forged));
        assert!(rack.workers[0].poll_event().is_none());
    }
    // The exchange goes on as if nothing had been.
    rack.switch.handle_packet(rack.now, 0, &train[..bytes]);
    rack.settle(|_| false);
    assert_eq!(rack.done, [[Numbers::Int(vec![2; 10])], [Numbers::Int(vec![2; 10])]]);
}

#[test]
fn after_the_switch_lost_its_memory_the_sum_is_still_exact() {
    let mut rack = Rack::new(3, 2);
    let tensor = |w: usize| Numbers::Int((0..6 * ELEMENTS as i32).map(|x| x * (w as i32 + 1)).collect());
    for w in 0..3 {
        rack.workers[w].submit(tensor(w), Op::Sum);
    }
    // Everything to worker 2 is lost from the fifth packet on: it falls one exchange behind.
    rack.exchange(2, packet_bytes());
    let completed: Vec<_> = rack.workers.iter_mut().map(Worker::suspend).collect();
    assert_eq!(completed, [[1, 1], [1, 1], [0, 0]]);
    // A fresh switch under the same job; workers 0 and 1 hand one slot back each.
    let config = rack.forget();
    rack.resume(config, [vec![SlotIndex(0)], vec![SlotIndex(1)], vec![]]);
    rack.finish();
    let expected = Numbers::Int((0..6 * ELEMENTS as i32).map(|x| x * 6).collect());
    assert!(rack.done.iter().all(|done| *done == [expected.clone()]));
}

fn packet_bytes() -> usize {
    fanin_wire::packet_bytes(ELEMENTS)
}

#[test]
fn a_path_that_becomes_slow_is_not_flooded() {
    let (slots, rounds) = (64u16, 50usize);
    let mut rack = Rack::new(1, slots);
    let chunks = usize::from(slots) * rounds;
    rack.workers[0].submit(Numbers::Int(vec![1; chunks * ELEMENTS]), Op::Sum);
    // Up and down again in 1 ms, and after the fifth round in 80 ms, as when a queue fills up.
    let way = |now: Instant| Duration::from_micros(if now < Instant(5_000_000) { 500 } else { 40_000 });
    let mut train = vec![0; 65536];
    let mut network: VecDeque<(Instant, bool, Vec<u8>)> = VecDeque::new();
    while rack.done[0].is_empty() {
        while let Some(sent) = rack.workers[0].poll_transmit(rack.now, &mut train) {
            let (bytes, segment) = (sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment) {
                network.push_back((rack.now + way(rack.now), true, packet.to_vec()));
            }
        }
        while let Some(sent) = rack.switch.poll_transmit(rack.now, &mut train) {
            let (bytes, segment) = (sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment) {
                network.push_back((rack.now + way(rack.now), false, packet.to_vec()));
            }
        }
        while let Some(WorkerEvent::Completed(tensor, _)) = rack.workers[0].poll_event() {
            rack.done[0].push(tensor);
        }
        network.make_contiguous().sort_by_key(|(at, ..)| *at);
        let arrival = network.front().map(|(at, ..)| *at);
        let timer = rack.workers[0].poll_timeout();
        rack.now = arrival.into_iter().chain(timer).min().unwrap_or(rack.now).max(rack.now);
        rack.workers[0].handle_timeout(rack.now);
        while network.front().is_some_and(|(at, ..)| *at <= rack.now) {
            let (_, up, packet) = network.pop_front().unwrap();
            if up {
                rack.switch.handle_packet(rack.now, 0, &packet);
            } else {
                rack.workers[0].handle_packet(rack.now, (), &packet);
            }
        }
    }
    let again = rack.workers[0].statistics().retransmissions;
    assert!(again <= 4 * u64::from(slots), "{again} of {chunks} packets were sent again");
}
