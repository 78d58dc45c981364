//! Floats that have two bytes on their way. A machine that adds them needs four: integers, scaled as
//! their worker would have scaled them, or float32.

use alloc::vec::Vec;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{Dtype, Flags, FragmentPacket, GradientHeader};

use super::config::factor;
use crate::machine::Reason;

/// The memory of a machine for one packet.
#[derive(Debug, Default)]
pub(super) struct Halves {
    halves: Vec<u16>,
    payload: Vec<u8>,
}

impl Halves {
    /// The packet with elements of four bytes, which it may have already. Values that are to be
    /// added become integers for a sum of so many workers. Original values and parameters that are
    /// handed back become float32.
    pub(super) fn widen<'a, L>(
        &'a mut self,
        packet: FragmentPacket<'a, L>,
        workers: u16,
    ) -> Result<FragmentPacket<'a, L>, Reason> {
        let FragmentPacket { preamble, mut header, payload } = packet;
        let Some(half) = header.collective.half().filter(|_| header.flags.half) else {
            return Ok(FragmentPacket { preamble, header, payload });
        };
        let Flags { overflow, restore, .. } = header.flags;
        header.flags.half = false;
        self.halves.clear();
        self.halves.extend(payload.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)));
        self.payload.resize(4 * self.halves.len(), 0);
        match (half, overflow || restore) {
            (Dtype::Float16, true) => fanin_quant::widen_f16(&self.halves, &mut self.payload),
            (_, true) => fanin_quant::widen_bf16(&self.halves, &mut self.payload),
            (_, false) => {
                let is_static = header.exponent == GradientHeader::STATIC_FACTOR;
                if !is_static && Exponent::from_bits(header.exponent).finite().is_none() {
                    return Err(Reason::Exponent);
                }
                let scale = Scale::of_factor(factor(header.exponent, workers));
                match half {
                    Dtype::Float16 => fanin_quant::quantize_f16(&self.halves, &scale, &mut self.payload),
                    _ => fanin_quant::quantize_bf16(&self.halves, &scale, &mut self.payload),
                }
            }
        }
        Ok(FragmentPacket { preamble, header, payload: &self.payload })
    }

    /// Writes float32 parameters as they travel, rounded to `half`.
    pub(super) fn narrow(&mut self, half: Dtype, parameters: &[u8], out: &mut [u8]) {
        self.halves.resize(parameters.len() / 4, 0);
        match half {
            Dtype::Float16 => fanin_quant::narrow_f16(parameters, &mut self.halves),
            _ => fanin_quant::narrow_bf16(parameters, &mut self.halves),
        }
        for (value, out) in self.halves.iter().zip(out.as_chunks_mut().0) {
            *out = value.to_le_bytes();
        }
    }
}
