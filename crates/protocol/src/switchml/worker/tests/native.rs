//! Workers whose tensors travel as they are.

use super::*;

fn submit_to_all(rack: &mut Rack, op: Op, tensor: impl Fn(usize) -> Numbers) {
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        worker.submit(tensor(w), op);
    }
}

/// Elements of very different size beside each other, and what two of them add up to exactly in
/// `f64`.
fn metrics(worker: usize) -> Vec<f32> {
    let w = worker as f32 + 1.0;
    vec![0.125 * w, 1e9 * w, 1e-30 * w, -1e30 * w, [f32::NAN, 1.0, 2.0][worker], f32::INFINITY, -0.0]
}

#[test]
fn a_short_tensor_takes_one_round_trip_and_each_element_keeps_its_own_magnitude() {
    let mut rack = Rack::new(3, 4);
    submit_to_all(&mut rack, Op::Sum, |w| Numbers::Short(metrics(w)));
    let mut packets = 0;
    rack.settle(|_| {
        packets += 1;
        false
    });
    assert_eq!((rack.probes, packets), (0, 6), "one packet up and one down for each");
    for done in &rack.done {
        let [Numbers::Short(x)] = &done[..] else { panic!() };
        assert_eq!(x[..2], [0.75, 6e9]);
        assert!((x[2] / 6e-30 - 1.0).abs() < 1e-6 && (x[3] / -6e30 - 1.0).abs() < 1e-6, "{x:?}");
        assert!(x[4].is_nan() && x[5] == f32::INFINITY && x[6] == 0.0, "{x:?}");
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let [Numbers::Short(first)] = &rack.done[0][..] else { panic!() };
        assert_eq!(bits(x), bits(first));
    }
}

#[test]
fn a_long_tensor_behind_a_short_one_finds_its_exponents_there() {
    let mut rack = Rack::new(2, 2);
    submit_to_all(&mut rack, Op::Sum, |_| Numbers::Short(vec![1.0; 2 * ELEMENTS]));
    submit_to_all(&mut rack, Op::Sum, |_| Numbers::Float(vec![3.0; 6 * ELEMENTS]));
    submit_to_all(&mut rack, Op::Sum, |_| Numbers::Long(vec![1 << 60; 2 * ELEMENTS]));
    submit_to_all(&mut rack, Op::Sum, |_| Numbers::Float(vec![5.0; 6 * ELEMENTS]));
    rack.settle(|_| false);
    assert_eq!(rack.probes, 0, "each packet says what the next one of its slot needs");
    for done in &rack.done {
        assert_eq!(done[0], Numbers::Short(vec![2.0; 2 * ELEMENTS]));
        assert_eq!(done[2], Numbers::Long(vec![1 << 61; 2 * ELEMENTS]));
        for (index, sum) in [(1, 6.0), (3, 10.0)] {
            let Numbers::Float(x) = &done[index] else { panic!() };
            assert!(x.len() == 6 * ELEMENTS && x.iter().all(|x| (x - sum).abs() < 1e-6), "{x:?}");
        }
    }
}

#[test]
fn integers_of_any_width_wrap_and_their_averages_are_truncated() {
    let mut rack = Rack::new(3, 2);
    let long = |w: usize| (0..700).map(|i| (1 << 53) + i + w as i64).collect::<Vec<_>>();
    submit_to_all(&mut rack, Op::Sum, |w| Numbers::Long(long(w)));
    submit_to_all(&mut rack, Op::Average, |w| Numbers::Long(vec![-3 - w as i64, i64::MAX - 2]));
    submit_to_all(&mut rack, Op::Sum, |w| Numbers::Byte(vec![-50 - w as i8; 5000]));
    submit_to_all(&mut rack, Op::Average, |w| Numbers::Byte(vec![-3 - w as i8, 1]));
    rack.settle(|_| false);
    assert_eq!(rack.probes, 0);
    for done in &rack.done {
        assert_eq!(done[0], Numbers::Long((0..700).map(|i| 3 * ((1 << 53) + i) + 3).collect()));
        let wrapped = (i64::MAX - 2).wrapping_mul(3) / 3;
        assert_eq!(done[1], Numbers::Long(vec![-12 / 3, wrapped]));
        assert_eq!(done[2], Numbers::Byte(vec![(-153i32) as i8; 5000]));
        assert_eq!(done[3], Numbers::Byte(vec![-4, 1]));
    }
}

#[test]
fn in_an_exact_job_long_tensors_travel_as_they_are_too() {
    let mut rack = Rack::with_wire_dtype(3, 4, WireDtype::Native);
    let row = |w| metrics(w).into_iter().cycle().take(20 * ELEMENTS).collect();
    submit_to_all(&mut rack, Op::Sum, |w| Numbers::Float(row(w)));
    rack.settle(|_| false);
    assert_eq!(rack.probes, 0);
    let [Numbers::Float(x)] = &rack.done[2][..] else { panic!() };
    assert!(x.chunks_exact(7).all(|x| x[..2] == [0.75, 6e9] && x[4].is_nan() && x[5] == f32::INFINITY));
}

#[test]
fn after_the_switch_lost_its_memory_all_workers_have_the_same_bits() {
    let tensor = |w: usize| Numbers::Short((0..4 * ELEMENTS).map(|i| (i + w) as f32 / 3.0).collect());
    let expected = {
        let mut rack = Rack::new(3, 2);
        submit_to_all(&mut rack, Op::Average, tensor);
        rack.settle(|_| false);
        rack.done[0].clone()
    };
    let mut rack = Rack::new(3, 2);
    submit_to_all(&mut rack, Op::Average, tensor);
    // Worker 2 hears no sum: it falls one exchange behind.
    rack.exchange(2, fanin_wire::packet_bytes(ELEMENTS));
    let mut train = vec![0; 65536];
    let completed: Vec<_> = rack.workers.iter_mut().map(Worker::suspend).collect();
    assert_eq!(completed, [[1, 1], [1, 1], [0, 0]]);
    let config = rack.forget();
    // A worker that lags begins again before the sums are handed back: what gathers of them gives
    // way.
    let restore = [vec![SlotIndex(0)], vec![SlotIndex(1)], vec![]];
    for (worker, restore) in rack.workers.iter_mut().zip(restore).rev() {
        let place = worker.worker;
        worker.resume(rack.now, WorkerPlan { config, switch: (), place, restore });
        let sent = worker.poll_transmit(rack.now, &mut train).unwrap();
        let (bytes, segment) = (sent.bytes, sent.segment_bytes);
        let from = usize::from(worker.worker.0);
        for packet in train[..bytes].chunks(segment) {
            rack.switch.handle_packet(rack.now, from, packet);
        }
    }
    rack.finish();
    assert!(rack.done.iter().all(|done| *done == expected));
}
