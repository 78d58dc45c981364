//! Keys that the tables of these systems have in common.

use fanin_protocol::aggregation::{Overflow, Scaling, WINDOW_ELEMENTS_MAX};
use fanin_wire::{FRAGMENT_ELEMENTS, Label, fragment_elements_for_mtu, fragment_packet_bytes};
use serde::Deserialize;
use toml::Spanned;

use super::super::keys::PacketLengths;
use crate::net::NodeId;
use crate::scenario_file::{Entry, Mistake, at};

/// In packets: beyond what a network of short delays needs.
const WINDOW: u16 = 1024;

pub(in super::super) const fn fragments<L: Label + 'static>() -> PacketLengths<'static> {
    PacketLengths {
        elements: &FRAGMENT_ELEMENTS,
        for_mtu: &fragment_elements_for_mtu::<L>,
        packet_bytes: &fragment_packet_bytes::<L>,
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(in super::super) enum ScalingName {
    Static,
    Dynamic,
}

impl From<ScalingName> for Scaling {
    fn from(name: ScalingName) -> Self {
        match name {
            ScalingName::Static => Self::Static,
            ScalingName::Dynamic => Self::Dynamic,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(in super::super) enum OverflowName {
    Reactive,
    Proactive,
}

impl From<OverflowName> for Overflow {
    fn from(name: OverflowName) -> Self {
        match name {
            OverflowName::Reactive => Self::Reactive,
            OverflowName::Proactive => Self::Proactive,
        }
    }
}

/// The server's host: the last that is free, unless named.
pub(in super::super) fn server(
    entry: &mut Entry<'_>,
    name: Option<&Spanned<String>>,
) -> Result<NodeId, Mistake> {
    match name {
        Some(name) => entry.host(name),
        None => entry.free_host().ok_or_else(|| {
            entry.at_system("no host is left for the server; name one with `server`, a worker's if need be")
        }),
    }
}

/// Most packets of a window, where they have so many elements.
pub(in super::super) fn window_max(elements: u16) -> u16 {
    (WINDOW_ELEMENTS_MAX / usize::from(elements)).min(usize::from(u16::MAX)) as u16
}

/// Packets of a worker under way at most.
pub(in super::super) fn window(elements: u16, given: Option<&Spanned<u16>>) -> Result<u16, Mistake> {
    let most = window_max(elements);
    match given {
        Some(window) if !(1..=most).contains(window.get_ref()) => {
            Err(at(window, format!("a window of packets of {elements} elements: 1 to {most}")))
        }
        Some(window) => Ok(*window.get_ref()),
        None => Ok(WINDOW.min(most)),
    }
}
