//! What protocols with aggregators ask alike of those who join, and of a switch's memory.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

use fanin_wire::{FRAGMENT_ELEMENTS, LossBound, WireDtype};

use super::{SwitchConfig, WINDOW_ELEMENTS_MAX};
use crate::control::{Gathered, Hop, JoinRequest, Memory, Refusal, Terms, pool_units};

/// Elements of the longest fragment: any that a packet can carry.
pub(crate) const ELEMENTS: u16 = FRAGMENT_ELEMENTS[FRAGMENT_ELEMENTS.len() - 1] as u16;
/// After so long without a contribution an aggregator was left behind: a worker would have sent again several times.
const STALE: Duration = Duration::from_secs(2);

/// Switches add floats as integers, and lose nothing.
pub(crate) fn check(request: &JoinRequest) -> Result<(), Refusal> {
    if request.agreed.loss_bound != LossBound::RELIABLE {
        return Err(Refusal::of_bound(request.agreed.loss_bound));
    }
    match request.agreed.wire_dtype {
        WireDtype::SharedExponent | WireDtype::Bfloat16 => Ok(()),
        asked => Err(Refusal::Unserved {
            reason: format!(
                "ATP and GOAT add integers, and make them of large floats by a factor of their own: none travel as {}; set \
                 FANIN_WIRE_DTYPE (wire_dtype) to bfloat16, unset it, or use SwitchML",
                asked.name()
            ),
        }),
    }
}

/// How the values of large floats travel, as members are told.
pub(crate) const fn wire_dtype(bfloat16: bool) -> WireDtype {
    if bfloat16 { WireDtype::Bfloat16 } else { WireDtype::SharedExponent }
}

/// Elements of the longest fragment that each switch on a way holds.
pub(crate) fn elements_held(hops: &[Hop]) -> usize {
    hops.iter().map(|hop| usize::from(hop.elements)).min().unwrap_or(usize::MAX)
}

/// Terms with such a window. The server holds a window's sums, and adds originals one by one.
pub(crate) fn terms(ranks: &Gathered<'_>, chosen: u16) -> Terms {
    let resumes = ranks.resumes();
    let (in_flight, elements) = match resumes.first() {
        Some(resume) => (resume.in_flight, resume.elements),
        None => {
            let most = WINDOW_ELEMENTS_MAX / usize::from(ranks.elements.max(1));
            (chosen.min(most as u16), ranks.elements)
        }
    };
    Terms {
        in_flight,
        window: in_flight,
        elements,
        wire_dtype: ranks.any().agreed.wire_dtype,
        loss_bound: LossBound::RELIABLE,
        // Sums have four bytes, however large values travel.
        pool_units: pool_units(in_flight, elements, WireDtype::SharedExponent, 0),
    }
}

/// The table of a switch with so much memory, in which a fragment looks for a place in so many ways.
pub(crate) fn table(memory: &Memory, ways: u8) -> Result<SwitchConfig, String> {
    let (asked, max) = (memory.aggregators, SwitchConfig::aggregators_max(ELEMENTS));
    if asked > max {
        return Err(format!("{asked} aggregators: a shard of a switch has at most {max}, which take 4 GiB"));
    }
    // Its queues are the sockets' buffers, which tell by loss.
    let ecn_threshold_packets = None;
    Ok(SwitchConfig { aggregators: asked, elements: ELEMENTS, ways, stale: STALE, ecn_threshold_packets })
}
