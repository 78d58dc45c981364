//! How many packets a rank has on the way (SwitchML Appendix C), and what slots cost.

use core::time::Duration;

use fanin_wire::{WireDtype, chunk_packet_bytes};

/// Rate of an interface that does not tell.
pub const RATE_DEFAULT_BPS: u64 = 10_000_000_000;

/// What the hosts add to the network's round trip. "The delay here refers to the end-to-end delay, including the end-host
/// processing time" (SwitchML Appendix C), which a TCP connection's round trip does not show. A train of 64 KiB takes 52 µs
/// at 10 Gbit/s, and four stages hold one at a time: the worker quantises it, the switch adds it, the switch sends the
/// results, the worker reads them. About 200 µs.
pub const HOST_PROCESSING: Duration = Duration::from_micros(200);

/// Fewest packets a shard that are chosen without a request: below it, trains are too short to pay for their system calls.
pub const WINDOW_MIN: u16 = 64;
/// Fewest packets a shard of the service with the largest share of several, if [`PORT_BYTES`] has room for so many of each rank. A rank's
/// packets in flight to all services share its link. Packets beyond what it carries wait there at the start and the end of each tensor.
pub const WINDOW_MIN_OF_MANY: u16 = 32;
/// The windows of all ranks to one shard of a service have so many bytes together. The service's link is often no faster than theirs.
/// Packets that come at once then wait in the buffer of a single port. An unmanaged switch has 100 to 200 kB a port. Some of the packets
/// are on their way back as results meanwhile. Shards do not share this number: trains of 8 packets took longer than the losses.
const PORT_BYTES: usize = 200_000;
/// Fewest packets a shard of a service whose share is ever so small.
const WINDOW_LEAST: u16 = 8;
/// A share as large as the largest one of the job: [`Path::portion`] counts in parts of this.
pub const PORTION_WHOLE: u16 = 1024;
/// Most packets a shard that are chosen without a request.
pub const WINDOW_MAX: u16 = 4096;

/// Elements of a unit that the switch's memory is counted in.
pub(crate) const UNIT_ELEMENTS: u32 = 256;

/// What decides a window's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The slowest rank's rate.
    pub rate_bps: u64,
    /// The furthest rank's round trip.
    pub rtt: Duration,
    /// Ranks and racks that send to one switch: the most.
    pub senders: u16,
    /// Elements of a chunk. There are twice as many where they travel as bfloat16, up to four times as many as int8,
    /// and up to eight times as int4.
    pub elements: u16,
    /// How they travel.
    pub wire_dtype: WireDtype,
    /// Shards among which the stream is divided.
    pub shards: u8,
    /// What the kernel granted to each of the switch's sockets.
    pub receive_buffer_bytes: usize,
    /// Of a job with several services: what part its share is of the largest one's, in parts of [`PORTION_WHOLE`].
    pub portion: Option<u16>,
}

/// A window in a shard: the shard's part of the bandwidth-delay product in packets, rounded up to a power of two (SwitchML
/// Appendix C: `s · b` matches it). It is at least [`WINDOW_MIN`] and at most [`WINDOW_MAX`]. Of one of several services it is at
/// least 8 to [`WINDOW_MIN_OF_MANY`], as its share and the number of ranks are.
///
/// The receive buffer has the last word, for what overruns it is lost: all workers may send a whole window at once. Half of
/// it is used, since the kernel counts its own bookkeeping of each packet against the buffer too.
#[must_use]
pub fn window_packets(path: &Path) -> u16 {
    let packet = packet_bytes(path);
    let least = path.portion.map_or(WINDOW_MIN, |portion| {
        let room = PORT_BYTES / packet as usize / usize::from(path.senders.max(1));
        let most = u16::try_from(room).unwrap_or(u16::MAX);
        least_of_many(portion, most.clamp(WINDOW_LEAST, WINDOW_MIN_OF_MANY))
    });
    let wanted = product_packets(path).max(least).next_power_of_two();

    let fit = path.receive_buffer_bytes as u128 / 2 / packet / u128::from(path.senders.max(1));
    let fit = u16::try_from(fit).unwrap_or(WINDOW_MAX).clamp(1, WINDOW_MAX);
    wanted.min(1 << fit.ilog2())
}

/// The shard's part of the bandwidth-delay product in packets, at most [`WINDOW_MAX`]. A shorter window does not fill the path.
pub(crate) fn product_packets(path: &Path) -> u16 {
    let delay = path.rtt.saturating_add(HOST_PROCESSING).as_nanos();
    let product_bytes = u128::from(path.rate_bps).saturating_mul(delay) / (8 * 1_000_000_000);
    let packets = product_bytes.div_ceil(packet_bytes(path)).div_ceil(u128::from(path.shards.max(1)));
    u16::try_from(packets).map_or(WINDOW_MAX, |packets| packets.clamp(1, WINDOW_MAX))
}

fn packet_bytes(path: &Path) -> u128 {
    chunk_packet_bytes(usize::from(path.elements), path.wire_dtype) as u128
}

/// Windows that share a link share its rate in proportion to their lengths: with equal ones the smallest shares were summed first, while
/// the links of the services with the largest ones waited. Shares from half of the largest on have windows as long as its, because short
/// trains cost more of the processor than such a difference costs time.
fn least_of_many(portion: u16, most: u16) -> u16 {
    let most = 1 << most.ilog2();
    let least = u32::from(most) * 2 * u32::from(portion);
    let least = least.div_ceil(PORTION_WHOLE.into()).next_power_of_two();
    (least as u16).clamp(WINDOW_LEAST, most)
}

/// What a job of `slots` slots of `elements` takes of a shard's pool, in units of 256 elements: two sums in words of 32 bits, in
/// which an element that is rounded on its way counts as much as any, and of each of the `gathering` workers one contribution
/// of floats that travel as they are, or as int8 or int4.
#[must_use]
pub fn pool_units(slots: u16, elements: u16, wire_dtype: WireDtype, gathering: u8) -> u32 {
    let sum = wire_dtype.sum_words(elements.into()) as u32;
    let contribution = if wire_dtype.is_packed() { sum } else { elements.into() };
    let (sums, contributions) = (2 * sum, u32::from(gathering) * contribution);
    u32::from(slots) * (sums + contributions).div_ceil(2 * UNIT_ELEMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    fn path(rate_bps: u64, rtt_us: u64) -> Path {
        Path {
            rate_bps,
            rtt: Duration::from_micros(rtt_us),
            senders: 4,
            elements: 256,
            wire_dtype: WireDtype::SharedExponent,
            shards: 1,
            receive_buffer_bytes: 16 * MIB,
            portion: None,
        }
    }

    #[test]
    fn one_of_many_services_gets_along_with_fewer() {
        let slow = Path { portion: Some(PORTION_WHOLE), ..path(125_000_000, 50) };
        assert_eq!(window_packets(&slow), 32);
        assert_eq!(window_packets(&Path { portion: Some(PORTION_WHOLE), ..path(10_000_000_000, 50) }), 512);
        let of_share = |portion: u16| window_packets(&Path { portion: Some(portion), ..slow });
        assert_eq!(
            [PORTION_WHOLE, 512, 257, 256, 128, 1].map(of_share),
            [32, 32, 32, 16, 8, 8],
            "as the shares are"
        );
        let of_ranks = |senders| window_packets(&Path { senders, elements: 352, ..slow });
        assert_eq!([2, 4, 5, 8, 9, 64].map(of_ranks), [32, 32, 16, 16, 8, 8], "as a port's buffer is");
    }

    #[test]
    fn ten_gigabit_needs_the_next_power_of_two_above_its_product() {
        // 10 Gbit/s over 50 + 200 µs are 312500 bytes, 296 packets of 1056.
        assert_eq!(window_packets(&path(10_000_000_000, 50)), 512);
        assert_eq!(window_packets(&Path { elements: 352, ..path(10_000_000_000, 50) }), 256);
    }

    #[test]
    fn shards_divide_the_product() {
        assert_eq!(window_packets(&Path { shards: 4, ..path(10_000_000_000, 50) }), 128);
    }

    #[test]
    fn extremes_are_clamped() {
        assert_eq!(window_packets(&path(1, 0)), 64);
        assert_eq!(
            window_packets(&path(u64::MAX, u64::MAX)),
            1024,
            "the buffer has room for 1985 packets a worker"
        );
        assert_eq!(window_packets(&Path { receive_buffer_bytes: 1 << 40, ..path(u64::MAX, u64::MAX) }), 4096);
    }

    #[test]
    fn a_small_receive_buffer_wins_over_the_minimum() {
        // The usual limit of an unprivileged process, 208 KiB, for 8 workers: 12 packets each, so 8.
        let small = Path { senders: 8, receive_buffer_bytes: 212_992, ..path(10_000_000_000, 50) };
        assert_eq!(window_packets(&small), 8);
        assert_eq!(window_packets(&Path { receive_buffer_bytes: 0, ..small }), 1);
    }

    #[test]
    fn a_slot_counts_by_its_sums_and_what_gathers_in_it() {
        let units = |wire_dtype, gathering| {
            [256, 352, 1024, 2048].map(|elements| pool_units(64, elements, wire_dtype, gathering))
        };
        assert_eq!(units(WireDtype::SharedExponent, 0), [64, 128, 256, 512]);
        assert_eq!(
            units(WireDtype::Bfloat16, 0),
            [128, 192, 512, 1024],
            "twice the elements, added as int32"
        );
        for wire_dtype in [WireDtype::SharedExponent, WireDtype::Native] {
            assert_eq!(units(wire_dtype, 8), [320, 448, 1280, 2560], "8 contributions beside 2 sums");
        }
        assert_eq!(units(WireDtype::Bfloat16, 64)[0], 64 * (2 + 32));
        for wire_dtype in [WireDtype::Int8, WireDtype::Int4] {
            assert_eq!(
                units(wire_dtype, 8),
                units(WireDtype::Native, 8),
                "a byte an element or half of one, and no more words"
            );
        }
        assert_eq!(
            pool_units(1, 32, WireDtype::Int8, 62),
            5,
            "33 words of the shortest chunk, which others have 32 of"
        );
    }

    #[test]
    fn what_gathers_in_a_pool_of_a_chosen_size_is_no_more_than_half_of_the_receive_buffer() {
        let path = path(100_000_000_000, 200);
        let slots = window_packets(&path);
        let sums = pool_units(slots, path.elements, path.wire_dtype, 0);
        let all = pool_units(slots, path.elements, path.wire_dtype, path.senders as u8);
        let bytes = usize::try_from((all - sums) * 2 * 4 * UNIT_ELEMENTS).unwrap();
        assert!(slots == 1024 && bytes <= path.receive_buffer_bytes / 2, "{slots} slots: {bytes} bytes");
    }

    #[test]
    fn a_window_counts_the_exponents_in_bfloat16_payloads() {
        // Room for 64 packets of 1448 bytes from each of 4 workers, and not for 64 of 1452.
        let tight =
            Path { elements: 352, receive_buffer_bytes: 2 * 4 * 64 * 1448, ..path(10_000_000_000, 50) };
        assert_eq!(window_packets(&tight), 64);
        assert_eq!(window_packets(&Path { wire_dtype: WireDtype::Bfloat16, ..tight }), 32);
    }

    proptest! {
        #[test]
        fn a_pool_is_a_power_of_two_that_fits_the_buffer(
            rate_bps: u64, rtt_ns: u64, senders in 1_u16..=4096, shards: u8, receive_buffer_bytes in 0_usize..1 << 40,
            elements in prop::sample::select(alloc::vec![32_u16, 64, 256, 352, 1024, 2048]),
            wire_dtype in prop::sample::select(WireDtype::ALL.to_vec()),
        ) {
            let rtt = Duration::from_nanos(rtt_ns);
            let path = Path { rate_bps, rtt, senders, elements, wire_dtype, shards, receive_buffer_bytes, portion: None };
            let slots = window_packets(&path);
            let packet = chunk_packet_bytes(usize::from(elements), wire_dtype);
            let bytes = usize::from(slots) * usize::from(senders) * packet;
            prop_assert!(slots.is_power_of_two() && slots <= WINDOW_MAX);
            prop_assert!(slots == 1 || bytes <= receive_buffer_bytes / 2);
        }
    }
}
