//! With bound 0, the bits are those of the reliable mode: SwitchML's native sums of the same tensors.

use fanin_protocol::switchml;
use fanin_protocol::{Endpoint, Instant, RetransmissionConfig, Summer, WorkerEvent, WorkerMachine};
use fanin_testworld::{Numbered, Random, Values, each_seed, fresh_seeds};
use fanin_wire::{Dtype, Generation, JobId, Op, ShardId, WireDtype, WorkerId};

use crate::case::{Case, ELEMENTS, KEY};
use crate::script::world_of_values;

/// Numbers of many magnitudes, whose sum depends on its order.
fn values(random: &mut Random, dtype: Dtype, elements: usize) -> Values {
    let mut value = || {
        let mantissa = random.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0;
        mantissa * f64::from(random.below(60) as u32 as f32 - 30.0).exp2()
    };
    let all = std::iter::repeat_with(&mut value).take(elements);
    match dtype {
        Dtype::Float64 => Values::Float64(all.collect()),
        Dtype::Bfloat16 => Values::Bfloat16(all.map(|x| ((x as f32).to_bits() >> 16) as u16).collect()),
        Dtype::Int64 => Values::Int64(all.map(|x| (x * 1e6) as i64).collect()),
        Dtype::Int32 => Values::Int32(all.map(|x| (x * 1e6) as i32).collect()),
        _ => Values::Float32(all.map(|x| x as f32).collect()),
    }
}

/// What SwitchML's workers get on a network that loses nothing, in float sums as they are.
fn switchml(tensors: &[Values], op: Op) -> Vec<u64> {
    let workers = tensors.len();
    let config = switchml::JobConfig {
        id: JobId(1),
        key: KEY,
        generation: Generation(0),
        workers: workers as u16,
        slots: 8,
        window: 8,
        elements: ELEMENTS as u16,
        wire_dtype: WireDtype::Native,
        shard: ShardId(0),
        resumed: false,
    };
    let mut switch = switchml::Switch::new(ShardId(0));
    switch.add_job(config.into()).expect("within its limits");
    let mut machines: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(place, values)| {
            let place = WorkerId(place as u8);
            let mut worker = switchml::Worker::new(config, place, workers, RetransmissionConfig::default());
            worker.submit(Numbered::new(0, values.clone()), op);
            worker
        })
        .collect();
    let mut train = vec![0; 65536];
    let now = Instant(0);
    loop {
        let mut packets = vec![];
        for (from, worker) in machines.iter_mut().enumerate() {
            while let Some(sent) = worker.poll_transmit(now, &mut train) {
                let (bytes, segment_bytes) = (sent.bytes, sent.segment_bytes);
                packets.extend(train[..bytes].chunks(segment_bytes).map(|packet| (from, packet.to_vec())));
            }
        }
        packets.iter().for_each(|(from, packet)| {
            switch.handle_packet(now, *from, packet);
        });
        while let Some(sent) = switch.poll_transmit(now, &mut train) {
            let (to, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            for worker in to {
                train[..bytes].chunks(segment_bytes).for_each(|packet| {
                    machines[worker].handle_packet(now, workers, packet);
                });
            }
        }
        if let Some(WorkerEvent::Completed(tensor, _)) = machines[0].poll_event() {
            return tensor.values.bits();
        }
        assert!(!packets.is_empty(), "SwitchML sleeps");
    }
}

#[test]
fn with_bound_zero_the_bits_are_those_of_native_sums() {
    each_seed(fresh_seeds(128), |seed| {
        let mut random = Random(seed);
        let op = random.pick(&[Op::Sum, Op::Average]);
        let dtype =
            random.pick(&[Dtype::Float32, Dtype::Float64, Dtype::Bfloat16, Dtype::Int64, Dtype::Int32]);
        let (workers, elements) = (1 + random.below(6) as usize, 1 + random.below(2000) as usize);
        let tensors: Vec<Values> = (0..workers).map(|_| values(&mut random, dtype, elements)).collect();
        let case = Case {
            seed,
            workers,
            dtype,
            tensors: vec![(elements, op)],
            data_loss: 100,
            signal_loss: 50,
            doubled: 50,
            jitter_us: 50,
            ..Case::plain()
        };
        let mut world = world_of_values(case, &tensors);
        world.run();
        let expected = switchml(&tensors, op);
        for worker in 0..workers {
            assert_eq!(world.done(worker, 0).expect("it is done").values.bits(), expected);
        }
    });
}
