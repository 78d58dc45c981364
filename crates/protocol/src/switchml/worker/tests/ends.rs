//! Packets that are lost where a stream ends, and pools of more slots than a window.

use super::*;

const ROUND_TRIP: Duration = Duration::from_micros(400);

/// Workers that know how long a round trip takes.
fn measured(workers: u8, slots: u16) -> Rack {
    let mut rack = Rack::new(workers, slots);
    for _ in 0..20 {
        reduce(&mut rack, 1, |_| false);
    }
    rack
}

/// All reduce so many chunks; packets of the first round trip may be lost. Returns how long it took.
fn reduce(rack: &mut Rack, chunks: usize, mut lost: impl FnMut(u64) -> bool) -> Duration {
    let began = rack.now;
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![1; chunks * ELEMENTS]), Op::Sum);
    }
    let mut train = vec![0; 65536];
    let mut number = 0;
    while rack.done.iter().any(Vec::is_empty) {
        let now = rack.now;
        let mut moved = false;
        for w in 0..rack.workers.len() {
            rack.workers[w].handle_timeout(now);
            while let Some(sent) = rack.workers[w].poll_transmit(now, &mut train) {
                let (bytes, segment) = (sent.bytes, sent.segment_bytes);
                for packet in train[..bytes].chunks(segment) {
                    number += 1;
                    if !lost(number - 1) {
                        rack.switch.handle_packet(now, w, packet);
                    }
                }
            }
        }
        while let Some(sent) = rack.switch.poll_transmit(now, &mut train) {
            moved = true;
            let (to, bytes, segment) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            for w in to {
                for packet in train[..bytes].chunks(segment) {
                    rack.workers[w].handle_packet(now + ROUND_TRIP, (), packet);
                }
            }
        }
        for (worker, done) in rack.workers.iter_mut().zip(&mut rack.done) {
            while let Some(WorkerEvent::Completed(tensor, _)) = worker.poll_event() {
                done.push(tensor);
            }
        }
        let due = rack.workers.iter().filter_map(Endpoint::poll_timeout).min();
        rack.now = if moved { now + ROUND_TRIP } else { due.unwrap_or(now).max(now) };
    }
    rack.done.iter_mut().for_each(Vec::clear);
    rack.now.since(began)
}

#[test]
fn a_loss_that_others_overtook_takes_a_stream_two_round_trips_at_its_end() {
    let mut rack = measured(2, 16);
    // The third of the first worker's packets, which five follow.
    let time = reduce(&mut rack, 8, |number| number == 2);
    assert!(time <= 3 * ROUND_TRIP, "{time:?}");
}

#[test]
fn a_late_worker_is_not_asked_for_before_the_timeout_at_a_streams_end_either() {
    let mut rack = measured(2, 16);
    let mut train = vec![0; 65536];
    rack.workers[0].submit(Numbers::Int(vec![1; 12 * ELEMENTS]), Op::Sum);
    while rack.workers[0].poll_transmit(rack.now, &mut train).is_some() {}
    let timeout = rack.workers[0].core.round_trip.timeout();
    assert_eq!(rack.workers[0].poll_timeout(), Some(rack.now + timeout));
}

#[test]
fn a_slot_that_lost_packets_catches_up_if_there_are_more_than_a_window() {
    let window = 8;
    let lag = |slots: u16| {
        let mut rack = Rack::new(1, slots);
        let config = JobConfig { window, ..rack.workers[0].config };
        rack.workers[0] = Worker::new(config, WorkerId(0), (), RetransmissionConfig::default());
        rack.workers[0].submit(Numbers::Int(vec![1; 2000 * ELEMENTS]), Op::Sum);
        let mut train = vec![0; 65536];
        let mut lags = Vec::new();
        for round in 0..60 {
            rack.workers[0].handle_timeout(rack.now);
            while let Some(sent) = rack.workers[0].poll_transmit(rack.now, &mut train) {
                let (bytes, segment) = (sent.bytes, sent.segment_bytes);
                for packet in train[..bytes].chunks(segment) {
                    let preamble = Preamble::parse(packet).unwrap();
                    let slot = SlotPacket::parse(&preamble, packet).unwrap().header.slot;
                    // The first slot loses all that it sends for long.
                    if round >= 20 || slot != SlotIndex(0) {
                        rack.switch.handle_packet(rack.now, 0, packet);
                    }
                }
            }
            assert!(rack.workers[0].in_flight.count() <= window.into());
            rack.now = rack.now + ROUND_TRIP;
            while let Some(sent) = rack.switch.poll_transmit(rack.now, &mut train) {
                let (bytes, segment) = (sent.bytes, sent.segment_bytes);
                for packet in train[..bytes].chunks(segment) {
                    rack.workers[0].handle_packet(rack.now, (), packet);
                }
            }
            let chunks = || rack.workers[0].slots.iter().map(|slot| slot.chunk);
            lags.push(chunks().max().unwrap() - chunks().min().unwrap());
        }
        (lags[19], lags[59], u64::from(slots))
    };
    let (while_it_lost, after, slots) = lag(window);
    assert!(while_it_lost > 10 * slots && after > 10 * slots, "{while_it_lost}, {after}: it stays behind");
    let (while_it_lost, after, slots) = lag(2 * window);
    assert!(while_it_lost > 5 * slots && after <= 2 * slots, "{while_it_lost}, {after}");
}
