//! `[job.atp]`, `[job.esa]`, `[job.rss]`, `[job.ps]` and `[job.ps-n-to-n]`.

use std::sync::Arc;

use fanin_protocol::atp::{ATP_WORKERS_MAX, Hashing};
use fanin_wire::Directions;
use serde::Deserialize;
use toml::Spanned;

use super::super::System;
use super::super::aggregation::{OverflowName, ScalingName, fragments, server, window};
use super::super::keys::timeout;
use super::{Atp, Help};
use crate::scenario_file::{Entry, Kind, Mistake, at, keys};
use fanin_units::Time;

pub(crate) const ATP: Kind = kind("atp", |entry| resolve(entry, Help::Way, true));
pub(crate) const ESA: Kind = kind("esa", |entry| resolve(entry, Help::Preemptive, true));
pub(crate) const RSS: Kind = kind("rss", |entry| resolve(entry, Help::Racks, true));
pub(crate) const PS: Kind = kind("ps", |entry| resolve(entry, Help::None, true));
pub(crate) const PS_N_TO_N: Kind = kind("ps-n-to-n", |entry| resolve(entry, Help::None, false));

const fn kind(name: &'static str, resolve: fn(&mut Entry<'_>) -> Result<Arc<dyn System>, Mistake>) -> Kind {
    Kind { name, keys: keys::<Keys>, resolve }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// The parameter server's host; the last that no job before has, unless given.
    server: Option<Spanned<String>>,
    /// Elements of a packet; the most that the MTU takes unless given.
    elements: Option<Spanned<u16>>,
    /// Packets that a worker has under way at most.
    window: Option<Spanned<u16>>,
    hashing: Option<Spanned<HashingName>>,
    scaling: ScalingName,
    overflow: OverflowName,
    congestion_control: bool,
    /// Shortest wait for an answer before a packet is sent again.
    timeout: Option<Spanned<Time>>,
}

impl Default for Keys {
    fn default() -> Self {
        Self {
            server: None,
            elements: None,
            window: None,
            hashing: None,
            scaling: ScalingName::Static,
            overflow: OverflowName::Reactive,
            congestion_control: true,
            timeout: None,
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum HashingName {
    Hash,
    Linear,
    /// An equal part of the table for each job that says so, running or not; the window is no
    /// longer than that.
    Partition,
}

fn resolve(entry: &mut Entry<'_>, help: Help, has_server: bool) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    entry.workers_between(1, ATP_WORKERS_MAX.into())?;
    let server = if has_server { Some(server(entry, keys.server.as_ref())?) } else { None };
    if let (Some(place), None) = (&keys.server, server) {
        return Err(at(place, "this system has no server of its own"));
    }
    let elements = fragments::<Directions>().of(entry, keys.elements.as_ref())?;
    let window = window(elements, keys.window.as_ref())?;
    if let (Some(place), Help::None) = (&keys.hashing, help) {
        return Err(at(place, "`hashing` is about aggregators of switches, of which this system uses none"));
    }
    let (hashing, window) = hashing(entry, keys.hashing.as_ref(), window)?;
    let system = Atp {
        help,
        server,
        elements,
        window,
        hashing,
        scaling: keys.scaling.into(),
        overflow: keys.overflow.into(),
        congestion_control: keys.congestion_control,
        timeout: timeout(keys.timeout.as_ref())?,
    };
    system.fits(entry.topology(), entry.workers()).map_err(|error| entry.at_workers(error))?;
    Ok(Arc::new(system))
}

/// How a job's fragments find their aggregators; a job with a part of the table for itself has a
/// window no longer than that.
fn hashing(
    entry: &Entry<'_>,
    name: Option<&Spanned<HashingName>>,
    window: u16,
) -> Result<(Hashing, u16), Mistake> {
    match name.map(Spanned::get_ref) {
        None | Some(HashingName::Hash) => Ok((Hashing::Hash, window)),
        Some(HashingName::Linear) => Ok((Hashing::Linear, window)),
        Some(HashingName::Partition) => {
            let (before, sharing) = entry.among(|_, keys| {
                keys.get("hashing").and_then(|name| name.get_ref().as_str()) == Some("partition")
            });
            let aggregators = entry.switch().aggregators;
            let part = aggregators / sharing as u32;
            if part == 0 {
                let message = format!("{aggregators} aggregators are no part for each of {sharing} jobs");
                return Err(entry.at_system(message));
            }
            let first = part * before as u32;
            Ok((Hashing::Partition { first }, window.min(part.min(u16::MAX.into()) as u16)))
        }
    }
}
