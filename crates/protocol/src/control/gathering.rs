//! The ranks of one job name that wait for each other.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use fanin_wire::{
    CHUNK_ELEMENTS, FRAGMENT_ELEMENTS, Generation, IP_UDP_BYTES, LEVELS_MAX, LossBound, PLANNED_WORKERS_MAX,
    RANKS_MAX, Rank, Security, VERSION, WireDtype, chunk_elements_for_mtu, chunk_packet_bytes,
    fragment_elements_for_mtu, fragment_packet_bytes,
};

use super::hierarchy::{Hierarchy, Racks, hierarchy, racks};
use super::pool_size::RATE_DEFAULT_BPS;
use super::restore::restorers;
use super::{
    FlowPlan, HOPS_MAX, Hop, JoinRequest, NAMED_SUB_MODELS_MAX, Path, Protocol, Ranks, Refusal, Resume,
    ResumeField, SLOTS_AUTOMATIC_MIN, SwitchTree, Ticket, is_job_name, pool_slots,
};
use crate::atp::{ATP_WORKERS_MAX, WINDOW_ELEMENTS_MAX};
use crate::dlcp;
use crate::machine::Instant;
use crate::switchml::SLOTS_MAX;

/// Most elements of one part of a model: all of them have fewer fragments than a number of 32 bits counts.
const SUB_MODEL_MAX: u64 = 1 << 29;

/// What a checked request leaves to remember.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    in_flight: Option<u16>,
    elements: u16,
    wire_dtype: WireDtype,
    security: Security,
    loss_bound: LossBound,
    paths: u32,
    plan: u64,
    portion: u16,
    /// Where it is known.
    rate_bps: Option<u64>,
    rtt: Duration,
    protocol: Protocol,
    sub_models: Vec<u64>,
    hops: Vec<Hop>,
    resume: Option<Resume>,
    origin: Option<IpAddr>,
}

/// Ranks that joined and wait for the rest.
#[derive(Debug)]
pub(super) struct Gathering {
    world_size: u16,
    /// When the most patient of the ranks that came loses patience, but not after `limit`.
    deadline: Instant,
    limit: Instant,
    waiting: BTreeMap<Rank, Waiting>,
}

/// What a complete gathering decides.
#[derive(Debug)]
pub(super) struct Plan {
    pub generation: Generation,
    pub in_flight: u16,
    pub elements: u16,
    pub wire_dtype: WireDtype,
    pub security: Security,
    pub resumed: bool,
    pub hierarchy: Option<Hierarchy>,
    pub switches: Option<SwitchTree>,
    pub sub_models: Vec<u64>,
    pub flows: Option<FlowPlan>,
    pub racks: Racks,
    pub restore: Vec<Vec<Vec<fanin_wire::SlotIndex>>>,
}

/// Checks what can be checked of a request by itself, and returns its rank and world size.
pub(super) fn check(request: &JoinRequest, served: Protocol, shards: u8) -> Result<(Rank, u16), Refusal> {
    if request.wire_version != VERSION {
        return Err(Refusal::VersionMismatch { theirs: request.wire_version, ours: VERSION });
    }
    if request.protocol != served {
        return Err(Refusal::ProtocolMismatch { asked: request.protocol, served });
    }
    // Before anything is made of them, or kept: they are as many as whoever asks likes.
    let loses = request.loss_bound != LossBound::RELIABLE;
    if loses && (served != Protocol::SwitchMl || !request.hops.is_empty() || request.resume.is_some()) {
        return Err(Refusal::BoundUnserved { asked: request.loss_bound });
    }
    let (hops_max, ranks_max) = match served {
        Protocol::SwitchMl if loses => (0, dlcp::WORKERS_MAX.into()),
        Protocol::SwitchMl => (HOPS_MAX, RANKS_MAX),
        Protocol::Atp => (LEVELS_MAX, ATP_WORKERS_MAX.into()),
        Protocol::Goat => (HOPS_MAX, PLANNED_WORKERS_MAX as u32),
    };
    if request.hops.len() > hops_max {
        let levels = u32::try_from(request.hops.len()).unwrap_or(u32::MAX);
        return Err(Refusal::TooManyLevels { levels });
    }
    if served.has_fragments() && request.wire_dtype != WireDtype::SharedExponent {
        return Err(Refusal::WireDtypeOfAtp { asked: request.wire_dtype });
    }
    let (named, named_max) = (&request.sub_models, NAMED_SUB_MODELS_MAX);
    if named.len() > named_max || named.iter().any(|elements| *elements == 0 || *elements > SUB_MODEL_MAX) {
        return Err(Refusal::SubModels { count: u32::try_from(named.len()).unwrap_or(u32::MAX) });
    }
    if !is_job_name(&request.job) {
        return Err(Refusal::JobName { bytes: request.job.len() });
    }
    if request.world_size > ranks_max {
        return Err(Refusal::TooManyWorkers { asked: request.world_size, max: ranks_max });
    }
    if request.rank >= request.world_size {
        return Err(Refusal::RankOutOfRange { rank: request.rank, world_size: request.world_size });
    }
    if let Some(asked) = request.in_flight.filter(|asked| *asked == 0 || *asked > SLOTS_MAX) {
        return Err(Refusal::InFlightOutOfRange { asked });
    }
    let beside = IP_UDP_BYTES + request.security.extra_bytes();
    let need = |elements: usize| match served {
        Protocol::SwitchMl => chunk_packet_bytes(elements, request.wire_dtype) + beside,
        Protocol::Atp | Protocol::Goat => fragment_packet_bytes(elements) + beside,
    };
    let mtu = path_mtu(request);
    let too_small = |need: usize| Refusal::MtuTooSmall {
        mtu: u32::try_from(mtu).unwrap_or(u32::MAX),
        need: u32::try_from(need).unwrap_or(u32::MAX),
    };
    if elements_for(request).is_none() {
        return Err(too_small(need(match served {
            Protocol::SwitchMl => CHUNK_ELEMENTS[0],
            Protocol::Atp | Protocol::Goat => FRAGMENT_ELEMENTS[0],
        })));
    }
    if let Some(resume) = &request.resume {
        check_resume(request.rank, resume, served, shards)?;
        if need(usize::from(resume.elements)) > mtu {
            return Err(too_small(need(usize::from(resume.elements))));
        }
    }
    Ok((Rank(request.rank as u16), request.world_size as u16))
}

/// The smallest MTU on a rank's whole way.
fn path_mtu(request: &JoinRequest) -> usize {
    request.hops.iter().map(|hop| hop.mtu).fold(request.mtu, usize::min)
}

/// The most elements that a packet on a rank's way can have.
fn elements_for(request: &JoinRequest) -> Option<usize> {
    let mtu = path_mtu(request).saturating_sub(request.security.extra_bytes());
    match request.protocol {
        Protocol::SwitchMl => chunk_elements_for_mtu(mtu, request.wire_dtype),
        Protocol::Atp | Protocol::Goat => {
            let most = fragment_elements_for_mtu(mtu)?;
            let held = request.hops.iter().map(|hop| usize::from(hop.elements)).fold(most, usize::min);
            FRAGMENT_ELEMENTS.into_iter().rev().find(|elements| *elements <= held)
        }
    }
}

/// Checks that a memory of a job is one that a switch like this one can have given.
fn check_resume(rank: u32, resume: &Resume, served: Protocol, shards: u8) -> Result<(), Refusal> {
    let mismatch =
        |field, rank_has: u32, job_has: u32| Refusal::ResumeMismatch { rank, field, rank_has, job_has };
    let saturate = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
    let shards = match served {
        Protocol::SwitchMl => shards,
        // Its workers hold no counts: they answer the server's resend requests.
        Protocol::Atp | Protocol::Goat => 0,
    };
    if resume.shards != shards {
        return Err(mismatch(ResumeField::Shards, resume.shards.into(), shards.into()));
    }
    if resume.in_flight == 0 || resume.in_flight > SLOTS_MAX {
        return Err(mismatch(ResumeField::InFlight, resume.in_flight.into(), SLOTS_MAX.into()));
    }
    let lengths = match served {
        Protocol::SwitchMl => &CHUNK_ELEMENTS[..],
        Protocol::Atp | Protocol::Goat => &FRAGMENT_ELEMENTS[..],
    };
    if !lengths.contains(&usize::from(resume.elements)) {
        return Err(mismatch(ResumeField::Elements, resume.elements.into(), saturate(lengths[0])));
    }
    if resume.completed.len() != usize::from(shards) {
        return Err(mismatch(ResumeField::Shards, saturate(resume.completed.len()), shards.into()));
    }
    match resume.completed.iter().find(|counts| counts.len() != usize::from(resume.in_flight)) {
        Some(counts) => Err(mismatch(ResumeField::Counts, saturate(counts.len()), resume.in_flight.into())),
        None => Ok(()),
    }
}

impl Gathering {
    /// A gathering that begins now, and is given up at `limit` whatever its ranks ask for.
    pub fn new(world_size: u16, now: Instant, limit: Instant) -> Self {
        Self { world_size, deadline: now, limit, waiting: BTreeMap::new() }
    }

    /// Lets a rank wait, whose request passed [`check`], or says why it does not belong here.
    pub fn join(
        &mut self,
        now: Instant,
        rank: Rank,
        ticket: Ticket,
        request: JoinRequest,
    ) -> Result<(), Refusal> {
        let asked_by = request.rank;
        if request.world_size != u32::from(self.world_size) {
            return Err(Refusal::WorldSizeMismatch {
                rank: asked_by,
                asked: request.world_size,
                job_has: self.world_size.into(),
            });
        }
        if self.waiting.contains_key(&rank) {
            return Err(Refusal::DuplicateRank { rank: asked_by });
        }
        if let (Some(asked), Some(job_has)) = (request.in_flight, self.in_flight_asked())
            && asked != job_has
        {
            return Err(Refusal::InFlightMismatch { rank: asked_by, asked, job_has });
        }
        if let Some((other_rank, other)) = self.waiting.iter().next() {
            if request.loss_bound != other.loss_bound {
                return Err(Refusal::BoundMismatch {
                    rank: asked_by,
                    asked: request.loss_bound,
                    other_rank: other_rank.0.into(),
                    job_has: other.loss_bound,
                });
            }
            if request.wire_dtype != other.wire_dtype {
                return Err(Refusal::WireDtypeMismatch {
                    rank: asked_by,
                    asked: request.wire_dtype,
                    other_rank: other_rank.0.into(),
                    job_has: other.wire_dtype,
                });
            }
            if request.security != other.security {
                return Err(Refusal::SecurityMismatch {
                    rank: asked_by,
                    asked: request.security,
                    other_rank: other_rank.0.into(),
                    job_has: other.security,
                });
            }
            if request.plan != other.plan {
                return Err(Refusal::PlanMismatch {
                    rank: asked_by,
                    asked: request.plan,
                    other_rank: other_rank.0.into(),
                    job_has: other.plan,
                });
            }
            if request.sub_models != other.sub_models {
                let (rank, other_rank) = (asked_by, other_rank.0.into());
                return Err(Refusal::SubModelsMismatch { rank, other_rank });
            }
            // Who resumes and who begins are never in one gathering.
            if let (Some(asked), Some(other)) = (&request.resume, &other.resume) {
                agree_on_resume(asked_by, asked, other)?;
            }
        }
        self.deadline = self.deadline.max(now + request.patience).min(self.limit);
        let elements = elements_for(&request).map_or(0, |elements| elements as u16);
        self.waiting.insert(
            rank,
            Waiting {
                ticket,
                in_flight: request.in_flight,
                elements,
                wire_dtype: request.wire_dtype,
                security: request.security,
                loss_bound: request.loss_bound,
                paths: request.paths,
                plan: request.plan,
                portion: request.portion,
                rate_bps: request.rate_bps.filter(|rate| *rate > 0),
                rtt: request.rtt,
                protocol: request.protocol,
                sub_models: request.sub_models,
                hops: request.hops,
                resume: request.resume,
                origin: request.origin,
            },
        );
        Ok(())
    }

    /// Removes a rank that gave up; true if it was here.
    pub fn withdraw(&mut self, ticket: Ticket) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|_, waiting| waiting.ticket != ticket);
        self.waiting.len() != before
    }

    /// Exchange counts that its ranks remember.
    pub fn counts(&self) -> usize {
        let resumes = self.waiting.values().filter_map(|waiting| waiting.resume.as_ref());
        resumes.map(Resume::counts).sum()
    }

    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    pub fn world_size(&self) -> u16 {
        self.world_size
    }

    /// From where all of its ranks ask, if that is known, one machine, and not the switch's own.
    pub fn origin(&self) -> Option<IpAddr> {
        let mut origins = self.waiting.values().map(|waiting| waiting.origin);
        let first = origins.next()??;
        origins.all(|other| other == Some(first)).then_some(first)
    }

    pub fn present(&self) -> Ranks {
        self.waiting.keys().copied().collect()
    }

    pub fn missing(&self) -> Ranks {
        Ranks::all(self.world_size).without(&self.present())
    }

    pub fn tickets(&self) -> Vec<Ticket> {
        self.waiting.values().map(|waiting| waiting.ticket).collect()
    }

    fn in_flight_asked(&self) -> Option<u16> {
        self.waiting.values().find_map(|waiting| waiting.in_flight)
    }

    /// What the job will be, once every rank is here.
    pub fn plan(&self, shards: u8, receive_buffer_bytes: usize) -> Result<Plan, Refusal> {
        // `join` let no rank in that asks for another.
        let wire_dtype = self.waiting.values().next().map(|waiting| waiting.wire_dtype).unwrap_or_default();
        let security = self.waiting.values().next().map(|waiting| waiting.security).unwrap_or_default();
        // `check` let no rank in that asks for another protocol.
        let protocol = self.waiting.values().next().map(|waiting| waiting.protocol).unwrap_or_default();
        let paths: Vec<&[Hop]> = self.waiting.values().map(|waiting| waiting.hops.as_slice()).collect();
        let rates = self.waiting.values().map(|waiting| waiting.rate_bps);
        let (hierarchy, switches, racks) = match protocol {
            Protocol::SwitchMl => (None, None, racks(&paths)?),
            Protocol::Atp => (Some(hierarchy(&paths)?), None, Racks::default()),
            Protocol::Goat => (None, Some(SwitchTree::of(&paths, rates)?), Racks::default()),
        };
        // `join` let no rank in that named others.
        let sub_models =
            self.waiting.values().next().map(|waiting| waiting.sub_models.clone()).unwrap_or_default();
        let resumes: Vec<&Resume> =
            self.waiting.values().filter_map(|waiting| waiting.resume.as_ref()).collect();
        if let Some(first) = resumes.first() {
            let completed: Vec<&[Vec<u32>]> =
                resumes.iter().map(|resume| resume.completed.as_slice()).collect();
            return Ok(Plan {
                // May wrap: the job id is new as well, so that no packet of the old generation passes.
                generation: Generation(first.generation.0.wrapping_add(1)),
                in_flight: first.in_flight,
                elements: first.elements,
                wire_dtype,
                security,
                resumed: true,
                hierarchy,
                switches,
                sub_models,
                // `check` let none in that resumes a job with a loss bound.
                flows: None,
                racks,
                restore: restorers(&completed)?,
            });
        }
        let fold = |start: u64, of: fn(&Waiting) -> u64, pick: fn(u64, u64) -> u64| {
            self.waiting.values().map(of).fold(start, pick)
        };
        // `check` let no rank in whose path cannot carry the smallest chunk.
        let elements = fold(u16::MAX.into(), |waiting| waiting.elements.into(), u64::min) as u16;
        let of_racks = paths.iter().copied().flatten().map(|hop| hop.receive_buffer_bytes);
        let rate_bps = fold(u64::MAX, |waiting| waiting.rate_bps.unwrap_or(RATE_DEFAULT_BPS), u64::min);
        // `join` let no rank in that asks for another.
        let bound = self.waiting.values().next().map(|waiting| waiting.loss_bound).unwrap_or_default();
        let loses = bound != LossBound::RELIABLE;
        // Shards share the link.
        let of_shard = rate_bps / u64::from(shards.max(1));
        // Blocks of a flow wait for all workers side by side: those of many workers are shorter, so that their flows fit into a pool.
        let words = CHUNK_ELEMENTS.into_iter().rev().map(|words| words as u16);
        let fits = |words: &u16| *words <= elements && FlowPlan::fits(self.world_size, *words);
        let elements = if loses { words.into_iter().find(fits).unwrap_or(elements) } else { elements };
        let most_paths = fold(1, |waiting| waiting.paths.into(), u64::max) as u32;
        let flows = FlowPlan::new(bound, self.world_size, elements, of_shard.max(1)).over(most_paths);
        let flows = loses.then_some(flows);
        let path = Path {
            rate_bps,
            rtt: self.waiting.values().map(|waiting| waiting.rtt).max().unwrap_or_default(),
            senders: if protocol.has_fragments() { self.world_size } else { racks.widest().into() },
            elements,
            wire_dtype,
            shards,
            receive_buffer_bytes: of_racks
                .filter(|_| !protocol.has_fragments())
                .fold(receive_buffer_bytes, usize::min),
            portion: self
                .waiting
                .values()
                .filter(|waiting| waiting.plan != 0)
                .map(|waiting| waiting.portion)
                .max(),
        };
        let planned = switches.as_ref().map(|switches| planned(switches, &sub_models, elements));
        let chosen = || {
            let Some(planned) = planned.filter(|planned| *planned > 0) else { return pool_slots(&path) };
            // As far ahead of a late rank as there is room where all send at once, and no further than switches sum: what is on the way
            // beyond that would come to the root once from every rank.
            let endless = Path { rate_bps: u64::MAX, rtt: Duration::MAX, ..path };
            planned.max(SLOTS_AUTOMATIC_MIN.into()).min(pool_slots(&endless).into()) as u16
        };
        let mut in_flight = self.in_flight_asked().unwrap_or_else(chosen);
        if protocol.has_fragments() {
            // The server holds a window's sums.
            in_flight = in_flight.min((WINDOW_ELEMENTS_MAX / usize::from(elements.max(1))) as u16);
        }
        if let (Some(planned), false) = (planned, sub_models.is_empty()) {
            in_flight = in_flight.min(u16::try_from(planned).unwrap_or(u16::MAX));
        }
        if let Some(flows) = flows {
            in_flight = flows.flows;
        }
        Ok(Plan {
            generation: Generation(0),
            in_flight,
            elements,
            wire_dtype: if loses { WireDtype::Native } else { wire_dtype },
            security,
            resumed: false,
            hierarchy,
            switches,
            sub_models,
            flows,
            racks,
            restore: Vec::new(),
        })
    }
}

/// Fragments that a plan says where to sum: those of the model, or as many as a switch holds of an endless one.
fn planned(switches: &SwitchTree, sub_models: &[u64], elements: u16) -> u32 {
    if sub_models.is_empty() {
        return switches.held();
    }
    let fragments = sub_models.iter().map(|part| part.div_ceil(elements.max(1).into()));
    u32::try_from(fragments.sum::<u64>()).unwrap_or(u32::MAX)
}

/// Whether two ranks that were in the same job remember the same of it.
fn agree_on_resume(rank: u32, asked: &Resume, other: &Resume) -> Result<(), Refusal> {
    let facts = |resume: &Resume| {
        [
            (ResumeField::Generation, u32::from(resume.generation.0)),
            (ResumeField::InFlight, resume.in_flight.into()),
            (ResumeField::Elements, resume.elements.into()),
        ]
    };
    let differs = facts(asked).into_iter().zip(facts(other)).find(|(rank_has, job_has)| rank_has != job_has);
    match differs {
        Some(((field, rank_has), (_, job_has))) => {
            Err(Refusal::ResumeMismatch { rank, field, rank_has, job_has })
        }
        None => Ok(()),
    }
}
