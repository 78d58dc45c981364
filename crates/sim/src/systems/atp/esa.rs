//! ESA's switch: ATP's, with one difference: a fragment of a higher priority takes an aggregator
//! from one of a lower that waits there. The sum so far of that one goes on to the server (GOAT
//! §VII-A; Wang et al., 2022). The layers that are computed last in an iteration are important: the
//! front layers, which the next forward pass begins with.
//!
//! Deliberately absent: ESA's priorities among jobs by what is left of them, and that a priority
//! which nobody uses sinks.

use fanin_protocol::Reason;
use fanin_protocol::aggregation::{Children, ConfigError, Route, Treatment};
use fanin_protocol::atp::SwitchRoute;
use fanin_wire::{Directions, Generation, GradientHeader, JobId, Key};

/// A job at one switch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Esa<A> {
    pub(super) route: SwitchRoute<A>,
    /// Packets of an iteration's gradients.
    pub(super) packets: u64,
}

impl<A: Copy + PartialEq + std::fmt::Debug> Route<A> for Esa<A> {
    type Label = Directions;
    type Bits = <SwitchRoute<A> as Route<A>>::Bits;
    const FREES_STALE: bool = SwitchRoute::<A>::FREES_STALE;

    fn check(&self) -> Result<(), ConfigError> {
        self.route.check()
    }

    fn job(&self) -> (JobId, Key, Generation) {
        self.route.job()
    }

    fn workers(&self) -> u16 {
        self.route.workers
    }

    fn upstream(&self) -> &A {
        &self.route.upstream
    }

    fn children(&self) -> Children<A> {
        self.route.children()
    }

    fn sender(&self, from: A, directions: &Directions) -> Result<Option<usize>, Reason> {
        self.route.sender(from, directions)
    }

    fn treatment(&self, header: &GradientHeader) -> Treatment<Self::Bits> {
        self.route.treatment(header)
    }

    fn priority(&self, header: &GradientHeader) -> Option<u64> {
        Some(header.sequence % self.packets)
    }

    fn freed_by(&self, parameters: &GradientHeader) -> Option<u32> {
        self.route.freed_by(parameters)
    }

    fn onward(&self, directions: Directions) -> Directions {
        self.route.onward(directions)
    }

    fn of_sum(&self, directions: Directions, bits: Self::Bits) -> Directions {
        self.route.of_sum(directions, bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_protocol::aggregation::{Switch, SwitchConfig};
    use fanin_protocol::{Endpoint, Instant, Summer, Verdict};
    use fanin_wire::{
        Collective, Dtype, Flags, GradientPacket, Kind, Op, Pattern, Preamble, ShardId, WireDtype, WorkerId,
        fragment_packet_bytes,
    };
    use std::time::Duration;

    const KEY: Key = Key::new(7);
    const ELEMENTS: usize = 64;

    /// A fragment of one of two workers, that uses the only aggregator.
    fn fragment(worker: u32, sequence: u64, value: i32) -> Vec<u8> {
        let preamble = Preamble {
            kind: Kind::Gradient,
            job: JobId(1),
            generation: Generation(0),
            worker: WorkerId::ALL,
            shard: ShardId(0),
        };
        let header = GradientHeader {
            flags: Flags::default(),
            directions: Directions {
                level: 0,
                bitmaps: [1 << worker, 1, 0, 0],
                fan_in_degrees: [2, 1, 0, 0],
            },
            sequence,
            aggregator_index: 0,
            fragment: sequence as u32,
            collective: Collective {
                sequence: 0,
                dtype: Dtype::Int32,
                op: Op::Sum,
                pattern: Pattern::AllReduce,
                elements: 10_000,
                wire_dtype: WireDtype::SharedExponent,
            },
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: 0,
        };
        let mut packet = vec![0; fragment_packet_bytes::<Directions>(ELEMENTS)];
        GradientPacket::write(&mut packet, KEY, &preamble, &header, ELEMENTS, |payload| {
            payload.as_chunks_mut().0.fill(value.to_le_bytes());
        });
        packet
    }

    /// Sequence number, workers, whether it is marked as what found no room, and the first value of
    /// all that goes on.
    fn sent(switch: &mut Switch<u16, Esa<u16>>) -> Vec<(u64, u32, bool, i32)> {
        let (mut all, mut train) = (Vec::new(), vec![0; 65536]);
        while let Some(transmit) = switch.poll_transmit(Instant(0), &mut train) {
            let (bytes, segment_bytes) = (transmit.bytes, transmit.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                let parsed = GradientPacket::parse(Preamble::parse(packet).unwrap(), packet).unwrap();
                let value = i32::from_le_bytes(*parsed.payload.first_chunk().unwrap());
                let header = parsed.header;
                assert_eq!(header.flags.resend, header.flags.collision);
                all.push((header.sequence, header.directions.bitmaps[0], header.flags.collision, value));
            }
        }
        all
    }

    #[test]
    fn what_is_more_important_takes_the_place_of_what_waits_whose_sum_goes_on() {
        let mut switch = Switch::new(SwitchConfig {
            aggregators: 1,
            elements: ELEMENTS as u16,
            ways: 1,
            stale: Duration::from_secs(1),
            ecn_threshold_packets: None,
        });
        let route = SwitchRoute {
            id: JobId(1),
            key: KEY,
            generation: Generation(0),
            workers: 2,
            upstream: 100,
            level: 0,
        };
        switch.add_job(Esa { route, packets: 10 }).expect("a route");
        let send = |switch: &mut Switch<_, _>, worker: u32, sequence, value| {
            switch.handle_packet(Instant(0), 1 + worker as u16, &fragment(worker, sequence, value))
        };
        assert_eq!(send(&mut switch, 0, 3, 5), Verdict::Absorb);
        // Less important: it goes by, as in ATP.
        assert_eq!(send(&mut switch, 0, 2, 7), Verdict::Forward);
        assert_eq!(sent(&mut switch), [(2, 1, true, 7)]);
        assert_eq!(send(&mut switch, 0, 4, 9), Verdict::Absorb);
        assert_eq!(sent(&mut switch), [(3, 1, true, 5)]);
        assert_eq!(send(&mut switch, 1, 4, 1), Verdict::Forward);
        // A complete sum stays until its parameters come; in the next iteration the first is least
        // important.
        assert_eq!(send(&mut switch, 0, 5, 6), Verdict::Forward);
        assert_eq!(send(&mut switch, 0, 10, 8), Verdict::Forward);
        assert_eq!(sent(&mut switch), [(4, 3, false, 10), (5, 1, true, 6), (10, 1, true, 8)]);
        assert_eq!((switch.statistics().evicted, switch.statistics().in_use), (1, 1));
    }
}
