//! Admission to a job of SwitchML, and the messages to its members.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::SocketAddr;

use fanin_wire::{Generation, JobId, Key, LossBound, Rank, ShardId, SlotIndex, WorkerId};
use prost::Message;

use super::racks::{Racks, racks};
use super::restore::restorers;
use super::{Contributions, JobConfig, RankTerms, SLOTS_MAX, SwitchJob, Upstream};
use crate::control::{
    Gathered, IN_FLIGHT_MAX, Malformed, Refusal, Seats, Terms, narrow, pool_units, read, window_packets,
};
use crate::machine::JobIdentity;

const _: () = assert!(IN_FLIGHT_MAX == SLOTS_MAX, "whoever is admitted is served");

/// A pool that is chosen without a request has so many slots for each packet of a window. A slot
/// that waits for a packet that was lost comes back within a round trip or two. Meanwhile the window
/// goes round through the others.
const POOL_WINDOWS: u16 = 2;

/// The part that all members are told.
#[derive(Clone, PartialEq, Message)]
struct Common {
    #[prost(uint32, tag = "1")]
    slots: u32,
    #[prost(uint32, tag = "2")]
    elements: u32,
    /// By name.
    #[prost(string, tag = "3")]
    wire_dtype: String,
    #[prost(uint32, tag = "4")]
    shards: u32,
    #[prost(uint32, tag = "5")]
    workers: u32,
    /// Packets of a worker that are on the way at most.
    #[prost(uint32, tag = "6")]
    window: u32,
}

/// A rank's message.
#[derive(Clone, PartialEq, Message)]
struct RankPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// Its place at its switch.
    #[prost(uint32, tag = "2")]
    place: u32,
    #[prost(bool, tag = "3")]
    has_racks: bool,
    /// Slots whose last result it hands back: one entry a shard, none unless resumed.
    #[prost(message, repeated, tag = "4")]
    restore: Vec<Slots>,
}

#[derive(Clone, PartialEq, Message)]
struct Slots {
    #[prost(uint32, repeated, tag = "1")]
    slots: Vec<u32>,
}

/// The message to the root, or to a rack.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SwitchPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// Its place at its upstream, of a rack.
    #[prost(uint32, tag = "2")]
    place: u32,
    /// The rank at each place, or the lowest rank behind another rack.
    #[prost(uint32, repeated, tag = "3")]
    ranks: Vec<u32>,
    /// Bitmap of the places that are racks.
    #[prost(fixed64, tag = "4")]
    racks: u64,
}

pub(super) fn admit(ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
    let racks = racks(&ranks.ways())?;
    let mut path = ranks.path(racks.widest().into());
    let of_racks = ranks.tree.switches.iter().map(|switch| switch.hop.receive_buffer_bytes);
    path.receive_buffer_bytes = of_racks.fold(path.receive_buffer_bytes, usize::min);
    let resumes = ranks.resumes();
    // Who asks for slots has all of them in use.
    let asked = ranks.in_flight();
    let (slots, elements) = match resumes.first() {
        Some(resume) => (resume.in_flight, resume.elements),
        None => (asked.unwrap_or_else(|| POOL_WINDOWS * window_packets(&path)), ranks.elements),
    };
    let window = if asked.is_some() { slots } else { slots.div_ceil(POOL_WINDOWS) };
    let completed: Vec<&[Vec<u32>]> = resumes.iter().map(|resume| resume.completed.as_slice()).collect();
    let restore = restorers(&completed)?;
    let wire_dtype = path.wire_dtype;
    let terms = Terms {
        in_flight: slots,
        window,
        elements,
        wire_dtype,
        loss_bound: LossBound::RELIABLE,
        pool_units: pool_units(slots, elements, wire_dtype, racks.root.count()),
    };
    let common = Common {
        slots: slots.into(),
        elements: elements.into(),
        wire_dtype: wire_dtype.name().into(),
        shards: ranks.shards.into(),
        workers: ranks.world_size().into(),
        window: window.into(),
    };
    let seats = seats(&racks, &common, &restore);
    Ok((terms, seats))
}

fn seats(racks: &Racks, common: &Common, restore: &[Vec<Vec<SlotIndex>>]) -> Seats {
    let switch = |place: WorkerId, contributions: &Contributions| SwitchPart {
        common: common.clone(),
        place: place.0.into(),
        ranks: contributions.ranks.iter().map(|rank| rank.0.into()).collect(),
        racks: contributions.racks,
    };
    let slots = |shard: &Vec<SlotIndex>| Slots { slots: shard.iter().map(|slot| slot.0.into()).collect() };
    let rank = |(rank, place): (usize, &WorkerId)| RankPart {
        common: common.clone(),
        place: place.0.into(),
        has_racks: !racks.is_flat(),
        restore: restore.get(rank).map(|own| own.iter().map(slots).collect()).unwrap_or_default(),
    };
    Seats {
        root: switch(WorkerId(0), &racks.root).encode_to_vec(),
        switches: racks.iter().map(|rack| switch(rack.place, &rack.contributions).encode_to_vec()).collect(),
        ranks: racks.places.iter().enumerate().map(rank).map(|part| part.encode_to_vec()).collect(),
        shares: Vec::new(),
    }
}

impl Common {
    fn config(&self, job: JobIdentity) -> Result<JobConfig, Malformed> {
        let JobIdentity { id, key, generation, workers, resumed } = job;
        let config = JobConfig {
            id,
            key,
            generation,
            workers,
            slots: narrow(self.slots, "slots")?,
            window: narrow(self.window, "window")?,
            elements: narrow(self.elements, "elements")?,
            wire_dtype: self.wire_dtype.parse().map_err(|_| Malformed("wire_dtype"))?,
            shard: ShardId(0),
            resumed,
        };
        config.check().map_err(|_| Malformed("job"))
    }
}

/// A rank's part, read.
fn rank_terms(job: JobIdentity, part: &[u8]) -> Result<RankTerms, Malformed> {
    let RankPart { common, place, has_racks, restore } = read(part)?;
    let config = common.config(job)?;
    if job.resumed && restore.len() != common.shards as usize {
        return Err(Malformed("restore"));
    }
    let slot = |slot: &u32| match narrow(*slot, "restore")? {
        slot if slot < config.slots => Ok(SlotIndex(slot)),
        _ => Err(Malformed("restore")),
    };
    let shard = |shard: &Slots| shard.slots.iter().map(slot).collect::<Result<Vec<_>, _>>();
    let restore = restore.iter().map(shard).collect::<Result<_, _>>()?;
    Ok(RankTerms { config, place: WorkerId(narrow(place, "place")?), has_racks, restore })
}

impl RankTerms {
    /// Reads a rank's part of a job.
    ///
    /// # Errors
    /// When it is no such part.
    pub fn read(job: JobIdentity, part: &[u8]) -> Result<Self, Malformed> {
        rank_terms(job, part)
    }
}

impl<A> SwitchJob<A> {
    /// Reads the part of the root, or of a rack whose upstream is there.
    ///
    /// # Errors
    /// When it is no such part.
    pub fn read(job: JobIdentity, part: &[u8], upstream: Option<A>) -> Result<Self, Malformed> {
        SwitchPart::read(part)?.job(job, upstream)
    }
}

impl SwitchPart {
    pub(super) fn read(part: &[u8]) -> Result<Self, Malformed> {
        read(part)
    }

    /// The job as the root is told of it, or as a rack at this place of its upstream.
    fn job<A>(&self, job: JobIdentity, upstream: Option<A>) -> Result<SwitchJob<A>, Malformed> {
        let config = self.common.config(job)?;
        let rank = |rank: &u32| match narrow(*rank, "ranks")? {
            rank if rank < config.workers => Ok(Rank(rank)),
            _ => Err(Malformed("ranks")),
        };
        let ranks = self.ranks.iter().map(rank).collect::<Result<_, Malformed>>()?;
        let place = WorkerId(narrow(self.place, "place")?);
        let upstream = upstream.map(|address| Upstream { address, place });
        Ok(SwitchJob { config, contributions: Contributions { ranks, racks: self.racks }, upstream })
    }

    /// Memory that a rack's part takes of each of its shards.
    pub(super) fn pool_units(&self) -> Result<u32, Malformed> {
        let workers = narrow(self.common.workers, "workers")?;
        let (id, key, generation) = (JobId(0), Key::new(0), Generation(0));
        let nobody = JobIdentity { id, key, generation, workers, resumed: false };
        let SwitchJob { config, contributions, .. } = self.job::<SocketAddr>(nobody, None)?;
        let JobConfig { slots, elements, wire_dtype, .. } = config;
        Ok(pool_units(slots, elements, wire_dtype, contributions.count()))
    }
}
