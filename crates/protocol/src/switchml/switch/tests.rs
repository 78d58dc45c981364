//! The switch on its own, then with real workers in the paper's example execution.

mod bfloat16;
mod native;
mod packed;
mod strangers;

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::*;

use super::*;
use crate::machine::{Elements, Tensor, WorkerEvent, WorkerMachine};
use crate::switchml::Worker;
use crate::transport::RetransmissionConfig;

const ELEMENTS: usize = 256;
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

fn config(workers: u8, slots: u16) -> JobConfig {
    JobConfig {
        id: JobId(7),
        key: KEY,
        generation: Generation(0),
        workers: workers.into(),
        slots,
        window: slots,
        elements: ELEMENTS as u16,
        wire_dtype: WireDtype::SharedExponent,
        shard: ShardId(0),
        resumed: false,
    }
}

fn switch(config: JobConfig) -> Switch<u8> {
    let mut switch = Switch::new(config.shard);
    switch.add_job(config.into()).unwrap();
    switch
}

const SUM: Collective = Collective {
    sequence: 0,
    dtype: Dtype::Int32,
    op: Op::Sum,
    pattern: Pattern::AllReduce,
    elements: 1000,
    wire_dtype: WireDtype::SharedExponent,
};

/// A contribution of `value` in every element.
struct Contribution {
    kind: Kind,
    generation: u16,
    worker: u8,
    slot: u16,
    exchange: u32,
    exponent: i16,
    collective: Collective,
    value: i32,
    elements: usize,
}

impl Default for Contribution {
    fn default() -> Self {
        Self {
            kind: Kind::Update,
            generation: 0,
            worker: 0,
            slot: 0,
            exchange: 0,
            exponent: 0,
            collective: SUM,
            value: 1,
            elements: ELEMENTS,
        }
    }
}

impl Contribution {
    fn packet(&self) -> Vec<u8> {
        let preamble = Preamble {
            kind: self.kind,
            job: JobId(7),
            generation: Generation(self.generation),
            worker: WorkerId(self.worker),
            shard: ShardId(0),
        };
        let header = SlotHeader {
            slot: SlotIndex(self.slot),
            next_exponent: self.exponent,
            exchange: self.exchange,
            chunk: self.exchange,
            collective: self.collective,
        };
        let mut packet = vec![0; packet_bytes(self.elements)];
        SlotPacket::write(&mut packet, KEY, &preamble, &header, self.elements, |payload| {
            for element in payload.chunks_exact_mut(4) {
                element.copy_from_slice(&self.value.to_le_bytes());
            }
        });
        packet
    }

    fn to(&self, switch: &mut Switch<u8>) -> Verdict {
        switch.handle_packet(Instant(0), self.worker, &self.packet())
    }
}

/// Everything that the switch has to send: recipients, and each packet's first value and exponent.
fn sent(switch: &mut Switch<u8>) -> Vec<(Vec<u8>, i32, i16)> {
    let mut out = Vec::new();
    let mut train = vec![0; 65536];
    while let Some(Transmit { to, bytes, segment_bytes }) = switch.poll_transmit(Instant(0), &mut train) {
        let to = to.to_vec();
        for packet in train[..bytes].chunks(segment_bytes) {
            let preamble = Preamble::parse(packet).unwrap();
            let packet = SlotPacket::parse(&preamble, packet).unwrap();
            let first = packet.payload.first_chunk().map_or(0, |bytes| i32::from_le_bytes(*bytes));
            out.push((to.clone(), first, packet.header.next_exponent));
        }
    }
    out
}

#[test]
fn the_last_contribution_turns_the_slot_into_the_sum_for_everybody() {
    let mut switch = switch(config(3, 4));
    for (worker, value, verdict) in
        [(0, 10, Verdict::Absorb), (2, -3, Verdict::Absorb), (1, 5, Verdict::Multicast)]
    {
        let contribution = Contribution { worker, value, exponent: value as i16, ..Default::default() };
        assert_eq!(contribution.to(&mut switch), verdict);
    }
    assert_eq!(sent(&mut switch), [(vec![0, 1, 2], 12, 10)], "the sum, and the largest exponent");
}

#[test]
fn a_contribution_that_comes_twice_counts_once() {
    let mut switch = switch(config(2, 1));
    let first = Contribution { value: 4, ..Default::default() };
    assert_eq!(first.to(&mut switch), Verdict::Absorb);
    assert_eq!(first.to(&mut switch), Verdict::Drop(Reason::Duplicate));
    assert_eq!(
        Contribution { worker: 1, value: 5, ..Default::default() }.to(&mut switch),
        Verdict::Multicast
    );
    assert_eq!(sent(&mut switch), [(vec![0, 1], 9, 0)]);
}

#[test]
fn lateness_is_what_a_worker_comes_after_the_first_and_a_duplicate_is_none() {
    let mut switch = switch(config(3, 2));
    // (time, worker, slot, exchange)
    let arrivals = [
        (10, 0, 0, 0),
        (15, 1, 0, 0),
        (20, 1, 1, 0),
        (20, 0, 1, 0),
        (500, 0, 0, 0),
        (1010, 2, 0, 0),
        (1020, 2, 1, 0),
        (6000, 2, 0, 1),
        (6100, 0, 0, 1),
    ];
    for (at, worker, slot, exchange) in arrivals {
        let packet = Contribution { worker, slot, exchange, ..Default::default() }.packet();
        switch.handle_packet(Instant(at), worker, &packet);
    }
    let lateness = switch.job_progress(JobId(7)).unwrap().lateness;
    assert_eq!(lateness.iter().map(Duration::as_nanos).collect::<Vec<_>>(), [100, 5, 2000]);
}

#[test]
fn retransmission_after_slot_reuse_is_answered_from_the_shadow_copy() {
    let mut switch = switch(config(2, 1));
    for worker in [0, 1] {
        Contribution { worker, value: 3, ..Default::default() }.to(&mut switch);
    }
    sent(&mut switch);
    // Worker 1 has the result and goes on; worker 0 lost it.
    let next = Contribution { worker: 1, exchange: 1, value: 50, ..Default::default() };
    assert_eq!(next.to(&mut switch), Verdict::Absorb);
    assert_eq!(Contribution { value: 3, ..Default::default() }.to(&mut switch), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut switch), [(vec![0], 6, 0)], "the previous sum, to worker 0 alone");
}

#[test]
fn a_duplicate_from_two_exchanges_ago_is_stale_although_its_version_bit_matches() {
    let mut switch = switch(config(2, 1));
    for exchange in [0, 1] {
        for worker in [0, 1] {
            Contribution { worker, exchange, ..Default::default() }.to(&mut switch);
        }
    }
    let begun = Contribution { worker: 1, exchange: 2, value: 7, ..Default::default() };
    assert_eq!(begun.to(&mut switch), Verdict::Absorb);
    assert_eq!(
        Contribution { value: 99, ..Default::default() }.to(&mut switch),
        Verdict::Drop(Reason::Stale)
    );
    sent(&mut switch);
    assert_eq!(
        Contribution { exchange: 2, value: 1, ..Default::default() }.to(&mut switch),
        Verdict::Multicast
    );
    assert_eq!(sent(&mut switch), [(vec![0, 1], 8, 0)]);
}

#[test]
fn a_slot_is_not_reused_before_everybody_has_contributed_to_the_exchange_between() {
    let mut switch = switch(config(2, 1));
    for worker in [0, 1] {
        Contribution { worker, ..Default::default() }.to(&mut switch);
    }
    Contribution { worker: 0, exchange: 1, ..Default::default() }.to(&mut switch);
    let too_early = Contribution { worker: 0, exchange: 2, ..Default::default() };
    assert_eq!(too_early.to(&mut switch), Verdict::Drop(Reason::Ahead));
    let far_off = Contribution { worker: 0, exchange: 1 << 30, ..Default::default() };
    assert_eq!(far_off.to(&mut switch), Verdict::Drop(Reason::Ahead));
}

#[test]
fn exchange_numbers_wrap() {
    let mut switch = switch(JobConfig { resumed: true, ..config(1, 1) });
    for exchange in [u32::MAX - 1, u32::MAX, 0, 1] {
        assert_eq!(Contribution { exchange, ..Default::default() }.to(&mut switch), Verdict::Multicast);
    }
    let old = Contribution { exchange: u32::MAX, ..Default::default() };
    assert_eq!(old.to(&mut switch), Verdict::Drop(Reason::Stale));
}

#[test]
fn foreign_packets_are_dropped_with_their_reason_and_counted() {
    let mut switch = switch(config(2, 4));
    let good = Contribution::default();
    let mut version = good.packet();
    version[2] = fanin_wire::VERSION + 1;
    let mut shard = good.packet();
    shard[SHARD_OFFSET] = 9;
    let mut job = good.packet();
    job[4] ^= 1;
    for (packet, reason) in [
        (b"GET / HTTP/1.1".to_vec(), Reason::Malformed),
        (Vec::new(), Reason::Malformed),
        (good.packet()[..20].to_vec(), Reason::Malformed),
        (version, Reason::Version),
        (shard, Reason::OutOfRange),
        (job, Reason::UnknownJob),
        (Contribution { generation: 1, ..Default::default() }.packet(), Reason::Generation),
        (Contribution { worker: 2, ..Default::default() }.packet(), Reason::OutOfRange),
        (Contribution { slot: 4, ..Default::default() }.packet(), Reason::OutOfRange),
        (Contribution { elements: 352, ..Default::default() }.packet(), Reason::ChunkLength),
        (Contribution { kind: Kind::Result, ..Default::default() }.packet(), Reason::Unexpected),
        (Contribution { kind: Kind::Restore, ..Default::default() }.packet(), Reason::Unexpected),
    ] {
        let before = switch.received().dropped[reason as usize];
        assert_eq!(switch.handle_packet(Instant(0), 0, &packet), Verdict::Drop(reason));
        assert_eq!(switch.received().dropped[reason as usize], before + 1);
    }
    assert_eq!(switch.poll_transmit(Instant(0), &mut [0; 2000]), None);
    assert_eq!(good.to(&mut switch), Verdict::Absorb, "none of it touched the slot");
}

#[test]
fn workers_that_reduce_unlike_tensors_are_both_named() {
    for other in [
        Collective { elements: 999, ..SUM },
        Collective { dtype: Dtype::Float32, ..SUM },
        Collective { op: Op::Average, ..SUM },
        Collective { sequence: 1, ..SUM },
    ] {
        let mut switch = switch(config(3, 1));
        Contribution { worker: 2, ..Default::default() }.to(&mut switch);
        let unlike = Contribution { worker: 1, collective: other, ..Default::default() };
        assert_eq!(unlike.to(&mut switch), Verdict::Drop(Reason::Aborted));
        let reason = AbortReason::Mismatch { first: (Rank(2), SUM), second: (Rank(1), other) };
        assert_eq!(switch.poll_event(), Some(JobAborted { job: JobId(7), reason }));
        assert_eq!(switch.poll_event(), None);
        let mut told: Vec<u8> = Vec::new();
        let mut train = [0; 2000];
        while let Some(Transmit { to, bytes, .. }) = switch.poll_transmit(Instant(0), &mut train) {
            let preamble = Preamble::parse(&train[..bytes]).unwrap();
            assert_eq!(Abort::parse(preamble, &train[..bytes]).unwrap().reason, reason);
            told.extend(to);
        }
        assert_eq!(told, [1, 2], "both, as far as their addresses are known");
        // A worker that comes later hears it too.
        assert_eq!(Contribution::default().to(&mut switch), Verdict::Drop(Reason::Aborted));
        assert_eq!(switch.poll_transmit(Instant(0), &mut train).map(|sent| sent.to.to_vec()), Some(vec![0]));
    }
}

#[test]
fn the_switch_knows_by_name_whom_a_slot_waits_for() {
    let mut switch = switch(config(3, 8));
    for slot in 0..5 {
        Contribution { worker: 0, slot, ..Default::default() }.to(&mut switch);
    }
    Contribution { worker: 2, slot: 4, ..Default::default() }.to(&mut switch);
    let progress = switch.job_progress(JobId(7)).unwrap();
    assert_eq!(progress.in_use, 5);
    assert_eq!(progress.waiting_for, [0, 5, 4]);
    assert_eq!(switch.job_progress(JobId(8)), None);
}

#[test]
fn a_sum_handed_back_answers_the_worker_that_lacked_it() {
    let mut switch = switch(JobConfig { resumed: true, ..config(3, 1) });
    // Exchange 41 was complete; worker 1 did not get it. Workers 0 and 2 are one ahead.
    assert_eq!(
        Contribution { worker: 1, exchange: 41, value: 5, ..Default::default() }.to(&mut switch),
        Verdict::Absorb
    );
    let back = Contribution { kind: Kind::Restore, worker: 2, exchange: 41, value: 77, ..Default::default() };
    assert_eq!(back.to(&mut switch), Verdict::Multicast);
    assert_eq!(sent(&mut switch), [(vec![1, 2], 77, 0)]);
    assert_eq!(back.to(&mut switch), Verdict::ReplyUnicast);
    for (worker, verdict) in [(0, Verdict::Absorb), (2, Verdict::Absorb), (1, Verdict::Multicast)] {
        assert_eq!(Contribution { worker, exchange: 42, ..Default::default() }.to(&mut switch), verdict);
    }
    assert_eq!(back.to(&mut switch), Verdict::ReplyUnicast, "still there as the shadow copy");
}

#[test]
fn a_sum_handed_back_after_the_slots_first_completed_exchange_has_no_effect() {
    let mut switch = switch(JobConfig { resumed: true, ..config(2, 2) });
    let restore = |slot, exchange| Contribution {
        kind: Kind::Restore,
        slot,
        exchange,
        value: 666,
        ..Default::default()
    };
    let contribute = |switch: &mut Switch<u8>, worker, exchange| {
        Contribution { worker, exchange, value: 5, ..Default::default() }.to(switch)
    };
    // The exchange that a forged one would take the place of: the next one, and one that gathers.
    assert_eq!(contribute(&mut switch, 0, 41), Verdict::Absorb);
    assert_eq!(contribute(&mut switch, 1, 41), Verdict::Multicast);
    sent(&mut switch);
    for exchange in [42, 43, 1000] {
        assert_eq!(restore(0, exchange).to(&mut switch), Verdict::Drop(Reason::Unexpected), "{exchange}");
    }
    assert_eq!(contribute(&mut switch, 0, 42), Verdict::Absorb);
    assert_eq!(restore(0, 42).to(&mut switch), Verdict::Drop(Reason::Unexpected));
    assert_eq!(sent(&mut switch), []);
    assert_eq!(contribute(&mut switch, 1, 42), Verdict::Multicast);
    assert_eq!(sent(&mut switch), [(vec![0, 1], 10, 0)]);
    // Another slot has not begun, and may still lack its sum.
    assert_eq!(restore(1, 41).to(&mut switch), Verdict::Multicast);
}

#[test]
fn what_gathers_in_a_resumed_job_is_not_overtaken() {
    let mut switch = switch(JobConfig { resumed: true, ..config(2, 1) });
    assert_eq!(Contribution { exchange: 4, value: 5, ..Default::default() }.to(&mut switch), Verdict::Absorb);
    let ahead = Contribution { exchange: 6, worker: 1, ..Default::default() };
    assert_eq!(ahead.to(&mut switch), Verdict::Drop(Reason::Ahead));
    let other = Contribution { exchange: 4, worker: 1, value: 6, ..Default::default() };
    assert_eq!(other.to(&mut switch), Verdict::Multicast);
    assert_eq!(sent(&mut switch), [(vec![0, 1], 11, 0)]);
}

#[test]
fn a_flood_of_retransmissions_before_one_drain_is_answered_twice_a_slot_at_most() {
    let mut switch = switch(config(1, 3));
    Contribution::default().to(&mut switch);
    sent(&mut switch);
    let verdicts: Vec<_> = (0..100).map(|_| Contribution::default().to(&mut switch)).collect();
    let answered = verdicts.iter().filter(|verdict| **verdict == Verdict::ReplyUnicast).count();
    assert_eq!(answered, 6);
    assert_eq!(verdicts[6..], vec![Verdict::Drop(Reason::Duplicate); 94]);
    assert_eq!(sent(&mut switch).len(), 6);
}

#[test]
fn jobs_share_a_switch_and_not_a_slot() {
    let mut switch = switch(config(1, 1));
    switch.add_job(JobConfig { id: JobId(8), ..config(1, 1) }.into()).unwrap();
    let mut other = Contribution { value: 2, ..Default::default() }.packet();
    other[4..8].copy_from_slice(&8u32.to_le_bytes());
    KEY.seal(&mut other);
    Contribution { value: 1, ..Default::default() }.to(&mut switch);
    switch.handle_packet(Instant(0), 100, &other);
    let mut results = sent(&mut switch);
    results.sort();
    assert_eq!(results, [(vec![0], 1, 0), (vec![100], 2, 0)]);
}

/// Three real workers and a real switch with one slot, packets carried by hand.
struct Example {
    switch: Switch<usize>,
    workers: Vec<Worker<(), Numbers>>,
    now: Instant,
}

#[derive(Debug)]
struct Numbers(Vec<i32>);

impl Tensor for Numbers {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Int32(&mut self.0)
    }
}

impl Example {
    /// `w` sends what it has to send.
    fn sends(&mut self, w: usize) -> Vec<u8> {
        let mut train = vec![0; 65536];
        let sent = self.workers[w].poll_transmit(self.now, &mut train).expect("something to send");
        assert_eq!(sent.bytes, sent.segment_bytes, "one packet");
        train.truncate(sent.bytes);
        train
    }

    /// `w`'s timeout kicks in, and it sends again.
    fn times_out(&mut self, w: usize) -> Vec<u8> {
        self.now = self.workers[w].poll_timeout().expect("a timer runs").max(self.now);
        self.workers[w].handle_timeout(self.now);
        self.sends(w)
    }

    fn reaches_switch(&mut self, w: usize, packet: &[u8]) -> Verdict {
        self.switch.handle_packet(self.now, w, packet)
    }

    /// The switch's answer, and its recipients.
    fn answer(&mut self) -> Option<(Vec<usize>, Vec<u8>)> {
        let mut train = vec![0; 65536];
        let Transmit { to, bytes, .. } = self.switch.poll_transmit(self.now, &mut train)?;
        Some((to.to_vec(), train[..bytes].to_vec()))
    }

    fn reaches_worker(&mut self, w: usize, packet: &[u8]) -> Verdict {
        self.workers[w].handle_packet(self.now, (), packet)
    }
}

/// SwitchML Appendix A, Figure 8. Slot x is slot 0; the tensor has two chunks, `off` and
/// `off + k s`.
#[test]
fn appendix_a_example_execution() {
    const W1: usize = 0;
    const W2: usize = 1;
    const W3: usize = 2;
    let mut x = Example {
        switch: {
            let mut switch = Switch::new(ShardId(0));
            switch.add_job(config(3, 1).into()).unwrap();
            switch
        },
        workers: (0..3)
            .map(|w| Worker::new(config(3, 1), WorkerId(w), (), RetransmissionConfig::default()))
            .collect(),
        now: Instant(0),
    };
    for (w, update) in [(W1, 1), (W2, 10), (W3, 100)] {
        let tensor = [vec![update; ELEMENTS], vec![2 * update; ELEMENTS]].concat();
        x.workers[w].submit(Numbers(tensor), Op::Sum);
    }

    // t0, t1: w1 and w2 send their update for slot x, offset off.
    let packet = x.sends(W1);
    assert_eq!(x.reaches_switch(W1, &packet), Verdict::Absorb);
    let packet = x.sends(W2);
    assert_eq!(x.reaches_switch(W2, &packet), Verdict::Absorb);
    // t2, t3: w3's update is lost on the way up.
    let _lost = x.sends(W3);
    assert_eq!(x.answer(), None);
    // t4, t5: w1 and w2 time out and send again; the switch has both and ignores them.
    let packet = x.times_out(W1);
    assert_eq!(x.reaches_switch(W1, &packet), Verdict::Drop(Reason::Duplicate));
    let packet = x.times_out(W2);
    assert_eq!(x.reaches_switch(W2, &packet), Verdict::Drop(Reason::Duplicate));
    // t6: w3 times out, sends again, and completes the slot; three responses leave.
    let packet = x.times_out(W3);
    assert_eq!(x.reaches_switch(W3, &packet), Verdict::Multicast);
    let (to, response) = x.answer().unwrap();
    assert_eq!(to, [W1, W2, W3]);
    assert_eq!(x.answer(), None);
    // t7: the response to w1 is lost. t8: w1 sends a second time again and gets a unicast response.
    let packet = x.times_out(W1);
    assert_eq!(x.reaches_switch(W1, &packet), Verdict::ReplyUnicast);
    let (to, unicast) = x.answer().unwrap();
    assert_eq!(to, [W1]);
    // t9, t10: w2 and w3 get the response. t12, t13: they reuse slot x for the next offset, in the
    // other pool.
    for w in [W2, W3] {
        assert_eq!(x.reaches_worker(w, &response), Verdict::Absorb);
        let packet = x.sends(w);
        assert_eq!(Contribution::version_of(&packet), 1);
        assert_eq!(x.reaches_switch(w, &packet), Verdict::Absorb);
    }
    // t11: the unicast response reaches w1. t14: it reuses the slot too.
    assert_eq!(x.reaches_worker(W1, &unicast), Verdict::Absorb);
    let packet = x.sends(W1);
    assert_eq!(Contribution::version_of(&packet), 1);
    // t15: the switch completes off + k s; the pools change roles.
    assert_eq!(x.reaches_switch(W1, &packet), Verdict::Multicast);
    let (to, response) = x.answer().unwrap();
    assert_eq!(to, [W1, W2, W3]);

    for w in [W1, W2, W3] {
        assert_eq!(x.reaches_worker(w, &response), Verdict::Absorb);
        let Some(WorkerEvent::Completed(Numbers(sum), _)) = x.workers[w].poll_event() else {
            panic!("w{} is not done", w + 1)
        };
        assert_eq!(sum, [vec![111; ELEMENTS], vec![222; ELEMENTS]].concat());
        assert_eq!(x.workers[w].poll_timeout(), None);
    }
}

impl Contribution {
    fn version_of(packet: &[u8]) -> usize {
        SlotPacket::parse(&Preamble::parse(packet).unwrap(), packet).unwrap().header.pool_version()
    }
}
