//! How much a packet matters: its tensor's layer decides the queue, its gradients' magnitude
//! whether it may be dropped (DLCP §3.2.2).

use alloc::vec::Vec;
use core::cmp::Ordering;
use core::ops::Range;
use fanin_wire::PRIORITIES;

use crate::machine::{Elements, Layer};
use crate::transport::mix;

/// A median is estimated from one element in so many, and from so many at least.
const SAMPLED: usize = 1000;
const SAMPLE_MIN: usize = 32;

/// The queue of a layer's packets: layer x of L goes to priority xP/L, behind the signals.
pub(super) fn priority(layer: Layer) -> u8 {
    let priorities = u32::from(PRIORITIES) - 1;
    let (index, count) = (u32::from(layer.index), u32::from(layer.count.max(1)));
    1 + (index * priorities / count).min(priorities - 1) as u8
}

/// The median magnitude of the elements in `range`, from a sample: an element drawn from each of as
/// many equal parts as it has. The same `seed` draws the same.
pub(super) fn median_magnitude(elements: &Elements<'_>, range: Range<usize>, seed: u64) -> f32 {
    let count = (range.len() / SAMPLED).max(SAMPLE_MIN).min(range.len());
    if count == 0 {
        return 0.0;
    }
    let mut sample: Vec<f32> = (0..count)
        .map(|part| {
            let (begin, end) = (part * range.len() / count, (part + 1) * range.len() / count);
            let drawn = mix(seed ^ part as u64) % (end - begin) as u64;
            let at = range.start + begin + drawn as usize;
            mean_magnitude(elements, at..at + 1)
        })
        .collect();
    let (_, median, _) = sample.select_nth_unstable_by(count / 2, f32::total_cmp);
    *median
}

/// Whether the elements in `range` are more than the median. If either is no number, they count as
/// more: their reader sees to it.
pub(super) fn is_important(elements: &Elements<'_>, range: Range<usize>, median: f32) -> bool {
    mean_magnitude(elements, range).partial_cmp(&median).is_none_or(Ordering::is_gt)
}

/// The mean magnitude of the elements in `range`. It is infinite for integers, of which none may be
/// lost.
fn mean_magnitude(elements: &Elements<'_>, range: Range<usize>) -> f32 {
    let count = range.len().max(1) as f32;
    let sum = match elements {
        Elements::Float32(x) => sum_of_magnitudes(&x[range]),
        Elements::Float16(x) => sum_widened(&x[range], fanin_quant::widen_f16),
        Elements::Bfloat16(x) => sum_widened(&x[range], fanin_quant::widen_bf16),
        Elements::Float64(x) => x[range].iter().map(|x| x.abs() as f32).sum(),
        Elements::Int32(_) | Elements::Int64(_) | Elements::Uint8(_) | Elements::Int8(_) => f32::INFINITY,
    };
    sum / count
}

/// In so many lanes that no addition waits for the one before it.
fn sum_of_magnitudes(block: &[f32]) -> f32 {
    const LANES: usize = 32;
    let mut lanes = [0.0_f32; LANES];
    let (pieces, rest) = block.as_chunks::<LANES>();
    for piece in pieces {
        for (lane, x) in lanes.iter_mut().zip(piece) {
            *lane += x.abs();
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| x.abs()).sum::<f32>()
}

fn sum_widened(block: &[u16], widen: fn(&[u16], &mut [u8])) -> f32 {
    const PIECE: usize = 64;
    let mut wide = [0; 4 * PIECE];
    let mut sum = 0.0;
    for piece in block.chunks(PIECE) {
        let wide = &mut wide[..4 * piece.len()];
        widen(piece, wide);
        sum += wide.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x).abs()).sum::<f32>();
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn layers_are_spread_evenly_over_the_queues_behind_the_signals() {
        let of = |index, count| priority(Layer { index, count });
        assert_eq!((0..7).map(|index| of(index, 7)).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(
            (0..14).map(|x| of(x, 14)).collect::<Vec<_>>(),
            [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
        );
        assert_eq!((0..3).map(|index| of(index, 3)).collect::<Vec<_>>(), [1, 3, 5]);
        assert_eq!([of(0, 1), of(0, 0), of(9, 3), of(u16::MAX, u16::MAX)], [1, 1, 7, 7]);
    }

    #[test]
    fn a_sample_of_one_in_a_thousand_finds_the_median_magnitude_in_every_type() {
        // Magnitudes 0 to 1 in an order of chance, and both signs.
        let mut floats: Vec<f32> = (0..1_000_000_u64)
            .map(|i| (mix(i) % 10_000) as f32 / 10_000.0 * if i % 2 == 0 { 1.0 } else { -1.0 })
            .collect();
        let mut doubles: Vec<f64> = floats.iter().map(|x| f64::from(*x)).collect();
        let mut brains: Vec<u16> = floats.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        // A float16 has another exponent, and three more bits behind it.
        let to_half = |x: &f32| match x.to_bits() {
            bits if x.abs() < 0.000_061 => (bits >> 16 & 0x8000) as u16,
            bits => (bits >> 16 & 0x8000) as u16 | ((bits >> 13 & 0x3_ffff) - (112 << 10)) as u16,
        };
        let mut halves: Vec<u16> = floats.iter().map(to_half).collect();
        let all = 0..floats.len();
        for elements in [
            Elements::Float32(&mut floats),
            Elements::Float64(&mut doubles),
            Elements::Float16(&mut halves),
            Elements::Bfloat16(&mut brains),
        ] {
            let median = median_magnitude(&elements, all.clone(), 7);
            assert!((median - 0.5).abs() < 0.05, "{median}");
            assert_eq!(median.to_bits(), median_magnitude(&elements, all.clone(), 7).to_bits());
            assert!((mean_magnitude(&elements, 0..100_003) - 0.5).abs() < 0.01);
        }
    }

    #[test]
    fn what_is_no_number_is_important() {
        let mut values = [vec![1.0_f32; 32], vec![3.0; 31], vec![-f32::NAN]].concat();
        let elements = Elements::Float32(&mut values);
        let of_median = |median| [0..32, 32..63, 32..64].map(|range| is_important(&elements, range, median));
        assert_eq!(of_median(2.0), [false, true, true]);
        assert_eq!(of_median(f32::NAN), [true; 3]);
    }

    #[test]
    fn a_short_tensor_is_its_own_sample() {
        let mut few = vec![-3.0_f32, 1.0, 2.0];
        assert!((median_magnitude(&Elements::Float32(&mut few), 0..3, 1) - 2.0).abs() < 1e-6);
        assert!((mean_magnitude(&Elements::Float32(&mut few), 0..2) - 2.0).abs() < 1e-6);
        let mut half = vec![0x4200_u16; 70]; // 3.0
        assert!((mean_magnitude(&Elements::Float16(&mut half), 1..70) - 3.0).abs() < 1e-6);
    }
}
