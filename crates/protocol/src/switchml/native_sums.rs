//! Sums of what travels as it is, or as int8 or int4.
//!
//! Integers wrap, so that they are added as they come, like those of every other chunk. A sum of
//! floats depends on its order: their contributions are kept side by side until all are there, and
//! summed in the order of their places. So the result is the same bits in every run, whatever was
//! lost, came twice or overtook.
//!
//! Elements that travel as int8 or int4 are summed likewise, and rounded once more; the chance in
//! that is a function of the place in the stream.
//!
//! An average is divided here, before it is rounded, and not by the workers as SwitchML has it: the
//! average of large float16 numbers is a float16, even if their sum is not. A rack's sum is rounded
//! to the tensor's type as well, and is one contribution at its upstream; the root divides.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use fanin_wire::{Dtype, Op, PLACES_MAX, ShardId, SlotHeader, SlotIndex, WorkerId};

use super::config::SwitchJob;
use super::exchange::{Rounder, rounding_seed};
use crate::machine::packing;

/// Sums payloads, and divides.
type Sum<'a> = dyn Fn(&[&[u8]], u32, &mut [i32]) + 'a;

/// The memory of a job's slots for such chunks besides their sums: as much as they ever needed at
/// once.
#[derive(Debug)]
pub(super) struct NativeSums {
    /// How many contributions there are to a chunk.
    count: u8,
    /// The divisor of the sum of an average: at the root the number of workers, in a rack one.
    divisor: u16,
    /// As whom this rounds to int8 or int4, and in which shard.
    rounder: (Rounder, ShardId),
    /// The longest.
    payload_bytes: usize,
    /// The contributions to what each slot gathers, that of place `w` at `w * payload_bytes`. At
    /// most one of a slot's two versions gathers, so this is a window of every worker, which is
    /// what the switch's receive buffer must hold anyway.
    contributions: Vec<Option<Box<[u8]>>>,
    /// Kept for other slots, so that nothing is allocated a packet.
    spare: Vec<Box<[u8]>>,
}

impl NativeSums {
    pub(super) fn new<A>(job: &SwitchJob<A>) -> Self {
        let SwitchJob { config, contributions, upstream } = job;
        let slots = usize::from(config.slots);
        Self {
            count: contributions.count(),
            divisor: if upstream.is_some() { 1 } else { config.workers },
            rounder: (
                upstream.as_ref().map_or(Rounder::Root, |upstream| Rounder::Rack(upstream.place)),
                config.shard,
            ),
            payload_bytes: config.gathered_bytes(),
            contributions: vec![None; slots],
            spare: Vec::with_capacity(slots),
        }
    }

    /// Takes a contribution to a chunk, of which it is the `first` or the `last` one; after the
    /// last, `sum` is the result.
    pub(super) fn contribute(
        &mut self,
        worker: WorkerId,
        header: &SlotHeader,
        payload: &[u8],
        (first, last): (bool, bool),
        sum: &mut [i32],
    ) {
        let SlotHeader { slot, collective, .. } = header;
        let divisor = match collective.op {
            Op::Sum => 1,
            Op::Average => u32::from(self.divisor),
        };
        let (rounder, shard) = self.rounder;
        let round = |payloads: &[&[u8]], divisor, sum: &mut [i32]| {
            let seed = rounding_seed(rounder, shard, collective, header.chunk);
            fanin_quant::sum_packed(packing(collective.wire_dtype), payloads, divisor, seed, sum);
        };
        let sum_of: &Sum<'_> = match collective.dtype {
            _ if collective.wire_dtype.is_packed() => &round,
            Dtype::Float32 => &fanin_quant::sum_f32,
            Dtype::Float16 => &fanin_quant::sum_f16,
            Dtype::Bfloat16 => &fanin_quant::sum_bf16,
            Dtype::Float64 => &fanin_quant::sum_f64,
            Dtype::Int32 => unreachable!("int32 does not travel as it is"),
            Dtype::Int64 | Dtype::Uint8 | Dtype::Int8 => {
                match collective.dtype {
                    _ if first => fanin_quant::store_le(sum, payload),
                    Dtype::Int64 => fanin_quant::add_i64_le(sum, payload),
                    _ => fanin_quant::add_i8_le(sum, payload),
                }
                match collective.dtype {
                    _ if !last || divisor == 1 => {}
                    Dtype::Int64 => fanin_quant::mean_i64(sum, divisor),
                    Dtype::Uint8 => fanin_quant::mean_u8(sum, divisor),
                    _ => fanin_quant::mean_i8(sum, divisor),
                }
                return;
            }
        };
        if !last {
            self.keep(*slot, worker, payload);
            return;
        }
        // The last one is summed from where it is.
        let kept = self.contributions[slot.index()].as_deref().unwrap_or_default();
        let mut payloads = [&[][..]; PLACES_MAX as usize];
        for (to, from) in payloads.iter_mut().zip(kept.chunks_exact(self.payload_bytes)) {
            *to = &from[..payload.len()];
        }
        payloads[usize::from(worker.0)] = payload;
        sum_of(&payloads[..usize::from(self.count)], divisor, sum);
        self.release(*slot);
    }

    /// Forgets everything: the job is over.
    pub(super) fn forget(&mut self) {
        self.contributions = Vec::new();
        self.spare = Vec::new();
    }

    /// Forgets what a slot gathers.
    pub(super) fn release(&mut self, slot: SlotIndex) {
        self.spare.extend(self.contributions[slot.index()].take());
    }

    /// Puts a contribution beside the others.
    fn keep(&mut self, slot: SlotIndex, worker: WorkerId, payload: &[u8]) {
        let bytes = usize::from(self.count) * self.payload_bytes;
        let contributions = self.contributions[slot.index()]
            .get_or_insert_with(|| self.spare.pop().unwrap_or_else(|| vec![0; bytes].into_boxed_slice()));
        let at = usize::from(worker.0) * self.payload_bytes;
        contributions[at..at + payload.len()].copy_from_slice(payload);
    }
}
