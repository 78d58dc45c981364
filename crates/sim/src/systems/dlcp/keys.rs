//! `[job.dlcp]`.

use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::dlcp::{Finish, RateConfig, WORKERS_MAX};
use fanin_wire::{CHUNK_ELEMENTS, LossBound, block_packet_bytes};
use serde::Deserialize;
use toml::Spanned;

use super::super::System;
use super::super::keys::{PacketLengths, timeout};
use super::{Dlcp, PushPlan, Way};
use crate::scenario_file::{Entry, Hosts, Kind, Mistake, at, keys};
use fanin_units::{Share, Size, Time};

pub(crate) const KIND: Kind = Kind { name: "dlcp", keys: keys::<Keys>, resolve };

/// Packets of a flow: 6 MB.
pub(crate) const FLOW_BLOCKS: u32 = 4096;
/// As many as a model of many small tensors has ready at once.
pub(crate) const FLOWS: u16 = 256;
/// Longer than a packet waits in the queues that a signal does not wait in.
pub(crate) const QUIET: Duration = Duration::from_micros(100);
/// §5.2.1.
const DIVIDE_ABOVE_BYTES: u64 = 4_000_000;
/// §5.1.1.
const LOSS_BOUND: f64 = 0.1;

const LENGTHS: PacketLengths<'static> = PacketLengths {
    elements: &CHUNK_ELEMENTS,
    for_mtu: &elements_for_mtu,
    packet_bytes: &|elements| block_packet_bytes(4 * elements),
};

/// The most elements that an IP packet of so many bytes carries.
pub(crate) fn elements_for_mtu(mtu: usize) -> Option<usize> {
    const IP_UDP_BYTES: usize = 28;
    let fits = |elements: &usize| block_packet_bytes(4 * elements) + IP_UDP_BYTES <= mtu;
    CHUNK_ELEMENTS.into_iter().rev().find(fits)
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// The summing machines: a server, or the workers in a ring.
    way: Option<Spanned<WayName>>,
    /// The servers' hosts by name, or how many of the workers'; unless given one, the last host
    /// that no job before has.
    servers: Option<Spanned<Hosts>>,
    /// A tensor that is larger is divided evenly among all servers, a smaller one is at one of
    /// them; 4 MB unless given.
    divide_above: Option<Spanned<Size>>,
    /// The loss bound of the flows back; nothing unless given. Above that workers keep their own
    /// gradients where they lack means, and sums are means.
    pull_bound: Option<Spanned<Share>>,
    /// Elements of a packet; the most that the MTU takes unless given.
    elements: Option<Spanned<u16>>,
    loss_bound: Option<Spanned<Share>>,
    period: Option<Spanned<Time>>,
    delta: Option<Spanned<f64>>,
    rates: Option<Spanned<RatesName>>,
    finish: Option<FinishName>,
    quiet: Option<Spanned<Time>>,
    timeout: Option<Spanned<Time>>,
}

/// How flows are sent, in `[job.dlcp]` and as `dlcp` of a `[[parameter_server]]`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PushKeys {
    /// The loss bound of each flow to the server, or at each hop of a ring, as a part of its
    /// packets; 10 % unless given.
    loss_bound: Option<Spanned<Share>>,
    /// How often receivers report; 200 us unless given.
    period: Option<Spanned<Time>>,
    /// How many times as much as arrives is sent when that is congestion; 2 unless given.
    delta: Option<Spanned<f64>>,
    /// "flow", as in the paper, or "way": all flows on a way share a rate, too, as on sockets;
    /// "flow" unless given.
    rates: Option<RatesName>,
    /// When a receiver has enough; when its sender has stopped and nothing more comes unless given.
    finish: Option<FinishName>,
    /// How long nothing more must have come after a stop before what is missing is asked for; 100
    /// us unless given.
    quiet: Option<Spanned<Time>>,
    /// Shortest wait for an answer to a signal; 1 ms unless given.
    timeout: Option<Spanned<Time>>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum WayName {
    Server,
    Ring,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum RatesName {
    Flow,
    Way,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FinishName {
    Stopped,
    BoundMet,
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    let is_ring = keys.way.as_ref().is_some_and(|way| *way.get_ref() == WayName::Ring);
    entry.workers_between(if is_ring { 2 } else { 1 }, WORKERS_MAX.into())?;
    if let Some(priority) = entry.priority() {
        return Err(at(priority, "packets of dlcp say by themselves which queue they are for"));
    }
    if is_ring {
        if let Some(servers) = &keys.servers {
            return Err(at(servers, "`servers` is about `way = \"server\"`: a ring has none"));
        }
        if let Some(size) = &keys.divide_above {
            return Err(at(size, "`divide_above` is about `servers`: a ring has none"));
        }
        if let Some(bound) = &keys.pull_bound {
            return Err(at(
                bound,
                "`pull_bound` is about `way = \"server\"`: a ring's all-gather loses nothing",
            ));
        }
    }
    if let Some(rates) = keys.rates.as_ref().filter(|rates| is_ring && *rates.get_ref() == RatesName::Way) {
        return Err(at(
            rates,
            "`rates = \"way\"` is about `way = \"server\"`: a rank of a ring has a flow at a time",
        ));
    }
    let way = match &keys.servers {
        _ if is_ring => Way::Ring,
        Some(given) => Way::Servers(entry.servers(given)?),
        None => Way::Servers(vec![entry.free_host().ok_or_else(|| {
            entry.at_system("no host is left for the server; name one with `servers`, a worker's if need be, or say `way = \"ring\"`")
        })?]),
    };
    let Keys { loss_bound, period, delta, rates, finish, quiet, timeout, .. } = keys;
    let sends =
        PushKeys { loss_bound, period, delta, rates: rates.map(Spanned::into_inner), finish, quiet, timeout }
            .resolve()?;
    Ok(Arc::new(Dlcp {
        way,
        divide_above_bytes: keys.divide_above.map_or(DIVIDE_ABOVE_BYTES, |size| size.get_ref().0),
        pull_bound: bound(keys.pull_bound.as_ref(), "pull_bound", 0.0)?,
        elements: LENGTHS.of(entry, keys.elements.as_ref())?,
        flow_blocks: FLOW_BLOCKS,
        flows: FLOWS,
        sends,
    }))
}

impl PushKeys {
    /// # Errors
    /// The number that cannot be.
    pub(crate) fn resolve(&self) -> Result<PushPlan, Mistake> {
        let usual = RateConfig::of_link(1, 1);
        let period = match &self.period {
            Some(period) if period.get_ref().0 < Duration::from_micros(1) => {
                return Err(at(period, "`period` must be 1us at least"));
            }
            Some(period) => period.get_ref().0,
            None => usual.period,
        };
        let delta = match &self.delta {
            Some(delta) if !(1.0..=1e6).contains(delta.get_ref()) => {
                return Err(at(delta, "`delta` must be 1 at least: what is sent, divided by what arrives"));
            }
            Some(delta) => *delta.get_ref(),
            None => usual.delta,
        };
        Ok(PushPlan {
            loss_bound: bound(self.loss_bound.as_ref(), "loss_bound", LOSS_BOUND)?,
            period,
            delta,
            follows: self.rates == Some(RatesName::Way),
            finish: match self.finish {
                None | Some(FinishName::Stopped) => Finish::Stopped,
                Some(FinishName::BoundMet) => Finish::BoundMet,
            },
            quiet: self.quiet.as_ref().map_or(QUIET, |quiet| quiet.get_ref().0),
            timeout: timeout(self.timeout.as_ref())?,
        })
    }
}

/// A share that may be lost.
fn bound(given: Option<&Spanned<Share>>, key: &str, unless: f64) -> Result<LossBound, Mistake> {
    let Some(place) = given else { return Ok(LossBound::new(unless).unwrap_or(LossBound::RELIABLE)) };
    let too_much = || at(place, format!("`{key}` must be less than 100%: something has to arrive"));
    LossBound::new(place.get_ref().0).ok_or_else(too_much)
}
