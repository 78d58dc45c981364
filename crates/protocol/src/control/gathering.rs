//! The ranks of one job name that wait for each other.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::IpAddr;

use fanin_wire::{Generation, IP_UDP_BYTES, JobId, Rank, VERSION};

use super::protocol::{Gathered, Limits, Protocol, Seats, Terms};
use super::{
    JoinRequest, NAMED_SUB_MODELS_MAX, Ranks, Refusal, Resume, ResumeField, SwitchTree, Ticket, is_job_name,
};
use crate::machine::Instant;

/// Most packets of a rank in flight in a shard, whatever the protocol.
pub(crate) const IN_FLIGHT_MAX: u16 = 16_384;
/// Most elements of one part of a model: all of them have fewer packets than a number of 32 bits counts.
const SUB_MODEL_MAX: u64 = 1 << 29;

/// A rank that waits, whose request was checked.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    /// Most elements that a packet on its way can have.
    elements: u16,
    request: JoinRequest,
}

/// Ranks that joined and wait for the rest.
#[derive(Debug)]
pub(super) struct Gathering {
    pub protocol: &'static dyn Protocol,
    world_size: u16,
    /// When the most patient of the ranks that came loses patience, but not after `limit`.
    deadline: Instant,
    limit: Instant,
    /// The job that its ranks were in, and are to go on with, if it still runs.
    pub replaces: Option<JobId>,
    waiting: BTreeMap<Rank, Waiting>,
}

/// What a complete gathering decides.
#[derive(Debug)]
pub(super) struct Plan {
    pub generation: Generation,
    pub resumed: bool,
    pub shards: u8,
    pub terms: Terms,
    pub tree: SwitchTree,
    pub seats: Seats,
}

/// A request that was checked by itself.
#[derive(Debug)]
pub(super) struct Checked {
    pub protocol: &'static dyn Protocol,
    pub rank: Rank,
    pub world_size: u16,
    elements: u16,
}

/// Checks what can be checked of a request by itself.
pub(super) fn check(
    request: &JoinRequest,
    served: &[&'static dyn Protocol],
    shards: u8,
) -> Result<Checked, Refusal> {
    // One of before protocols had names speaks the same packets, and another control protocol.
    if request.wire_version != VERSION || request.protocol.is_empty() {
        return Err(Refusal::VersionMismatch { theirs: request.wire_version, ours: VERSION });
    }
    let Some(protocol) = served.iter().find(|served| served.name() == request.protocol).copied() else {
        let names: Vec<&str> = served.iter().map(|served| served.name()).collect();
        let (asked, served) = (request.protocol.chars().take(NAME_MAX).collect(), names.join(" or "));
        return Err(Refusal::ProtocolMismatch { asked, served });
    };
    // Before anything is made of them, or kept: they are as many as whoever asks likes.
    let limits = protocol.limits();
    protocol.check(request)?;
    if request.hops.len() > limits.hops_max {
        let levels = u32::try_from(request.hops.len()).unwrap_or(u32::MAX);
        return Err(Refusal::TooManyLevels { levels });
    }
    let named = &request.agreed.sub_models;
    if named.len() > NAMED_SUB_MODELS_MAX
        || named.iter().any(|elements| *elements == 0 || *elements > SUB_MODEL_MAX)
    {
        return Err(Refusal::SubModels { count: u32::try_from(named.len()).unwrap_or(u32::MAX) });
    }
    if !is_job_name(&request.job) {
        return Err(Refusal::JobName { bytes: request.job.len() });
    }
    if request.world_size > limits.ranks_max {
        return Err(Refusal::TooManyWorkers { asked: request.world_size, max: limits.ranks_max });
    }
    if request.rank >= request.world_size {
        return Err(Refusal::RankOutOfRange { rank: request.rank, world_size: request.world_size });
    }
    if let Some(asked) = request.agreed.in_flight.filter(|asked| *asked == 0 || *asked > IN_FLIGHT_MAX) {
        return Err(Refusal::InFlightOutOfRange { asked });
    }
    // The smallest MTU on the rank's whole way.
    let mtu = request.hops.iter().map(|hop| hop.mtu).fold(request.mtu, usize::min);
    let need = |elements: usize| {
        let own = protocol.packet_bytes(elements, request.agreed.wire_dtype);
        own + IP_UDP_BYTES + request.agreed.security.extra_bytes()
    };
    let fits = |elements: usize| match need(elements) {
        need if need > mtu => Err(Refusal::MtuTooSmall {
            mtu: u32::try_from(mtu).unwrap_or(u32::MAX),
            need: u32::try_from(need).unwrap_or(u32::MAX),
        }),
        _ => Ok(()),
    };
    let held = protocol.elements_on_the_way(&request.hops);
    let longest = limits.packet_elements.iter().rev();
    let longest = longest.copied().find(|elements| *elements <= held && fits(*elements).is_ok());
    let Some(elements) = longest else {
        fits(limits.packet_elements[0])?;
        let (elements, least) = (u32::try_from(held).unwrap_or(u32::MAX), limits.packet_elements[0] as u32);
        return Err(Refusal::PacketsTooLong { elements, least });
    };
    if let Some(resume) = &request.resume {
        check_resume(request, resume, limits, shards)?;
        fits(resume.elements.into())?;
    }
    let (rank, world_size) = (Rank(request.rank as u16), request.world_size as u16);
    Ok(Checked { protocol, rank, world_size, elements: elements as u16 })
}

/// Most characters of a protocol's name that a refusal repeats.
const NAME_MAX: usize = 32;

/// The shards of a job: as many as the service has, and each switch on the ways of those who ask.
fn shards_of<'a>(requests: impl IntoIterator<Item = &'a JoinRequest>, of_service: u8) -> u8 {
    let hops = requests.into_iter().flat_map(|request| &request.hops);
    hops.map(|hop| hop.shards.max(1)).fold(of_service, u8::min)
}

/// Checks that a memory of a job is one that a service of so many shards can have given.
fn check_resume(request: &JoinRequest, resume: &Resume, limits: Limits, shards: u8) -> Result<(), Refusal> {
    let (rank, lengths) = (request.rank, limits.packet_elements);
    let mismatch =
        |field, rank_has: u32, job_has: u32| Refusal::ResumeMismatch { rank, field, rank_has, job_has };
    let saturate = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
    if resume.in_flight == 0 || resume.in_flight > IN_FLIGHT_MAX {
        return Err(mismatch(ResumeField::InFlight, resume.in_flight.into(), IN_FLIGHT_MAX.into()));
    }
    if !lengths.contains(&usize::from(resume.elements)) {
        return Err(mismatch(ResumeField::Elements, resume.elements.into(), saturate(lengths[0])));
    }
    let shards = shards_of([request], shards);
    if !(1..=usize::from(shards)).contains(&resume.completed.len()) {
        return Err(mismatch(ResumeField::Shards, saturate(resume.completed.len()), shards.into()));
    }
    let counted = limits.counted.of_shard(resume.in_flight);
    match resume.completed.iter().find(|counts| counts.len() != usize::from(counted)) {
        Some(counts) => Err(mismatch(ResumeField::Counts, saturate(counts.len()), counted.into())),
        None => Ok(()),
    }
}

impl Gathering {
    /// A gathering that begins now, and is given up at `limit` whatever its ranks ask for.
    pub fn new(
        protocol: &'static dyn Protocol,
        world_size: u16,
        now: Instant,
        limit: Instant,
        replaces: Option<JobId>,
    ) -> Self {
        Self { protocol, world_size, deadline: now, limit, replaces, waiting: BTreeMap::new() }
    }

    /// Lets a rank wait, or says why it does not belong here.
    pub fn join(
        &mut self,
        now: Instant,
        checked: &Checked,
        ticket: Ticket,
        request: JoinRequest,
    ) -> Result<(), Refusal> {
        let rank = request.rank;
        if request.world_size != u32::from(self.world_size) {
            return Err(Refusal::WorldSizeMismatch {
                rank,
                asked: request.world_size,
                job_has: self.world_size.into(),
            });
        }
        if self.waiting.contains_key(&checked.rank) {
            return Err(Refusal::DuplicateRank { rank });
        }
        // The first speaks for all; where it has no wish, the first that has one.
        let has_wish = |other: &(&Rank, &Waiting)| other.1.request.agreed.in_flight.is_some();
        let speakers = self.waiting.iter().next().into_iter().chain(self.waiting.iter().find(has_wish));
        for (other_rank, other) in speakers {
            let differs = request.agreed.differs(&other.request.agreed).or_else(|| {
                let (asked, has) = (checked.protocol.name(), self.protocol.name());
                let field = "protocol (protocol, or FANIN_PROTOCOL)";
                (asked != has).then(|| (field, asked.into(), has.into()))
            });
            if let Some((field, asked, job_has)) = differs {
                let (field, other_rank) = (field.into(), other_rank.0.into());
                let (asked, job_has) = (asked.into(), job_has.into());
                return Err(Refusal::Mismatch { rank, field, asked, other_rank, job_has });
            }
        }
        // Who resumes and who begins are never in one gathering.
        let other = self.waiting.values().next().and_then(|other| other.request.resume.as_ref());
        if let (Some(asked), Some(other)) = (&request.resume, other) {
            agree_on_resume(rank, asked, other)?;
        }
        self.deadline = self.deadline.max(now + request.patience).min(self.limit);
        self.waiting.insert(checked.rank, Waiting { ticket, elements: checked.elements, request });
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
        let resumes = self.waiting.values().filter_map(|waiting| waiting.request.resume.as_ref());
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
        let mut origins = self.waiting.values().map(|waiting| waiting.request.origin);
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

    /// How the job's packets are secured.
    pub fn security(&self) -> fanin_wire::Security {
        self.waiting.values().next().map(|waiting| waiting.request.agreed.security).unwrap_or_default()
    }

    /// Decides what the job will be at a service of so many shards. Every rank is here.
    pub fn plan(&self, shards: u8, receive_buffer_bytes: usize) -> Result<Plan, Refusal> {
        let requests: Vec<&JoinRequest> = self.waiting.values().map(|waiting| &waiting.request).collect();
        let shards = match requests[0] {
            // What its ranks have under way is divided.
            JoinRequest { resume: Some(resume), .. } => resume.completed.len() as u8,
            // The parts of a model are those of one stream.
            JoinRequest { agreed, .. } if !agreed.sub_models.is_empty() => 1,
            _ => shards_of(requests.iter().copied(), shards),
        };
        let tree = SwitchTree::of(&requests)?;
        let elements = self.waiting.values().map(|waiting| waiting.elements).min().unwrap_or(0);
        let ranks = Gathered { requests: &requests, tree: &tree, elements, shards, receive_buffer_bytes };
        let (terms, seats) = self.protocol.admit(&ranks)?;
        let resumed = ranks.resumes().first().map(|resume| resume.generation);
        // May wrap: the job id is new as well, so that no packet of the old generation passes.
        let generation = resumed.map_or(0, |before| before.0.wrapping_add(1));
        Ok(Plan {
            generation: Generation(generation),
            resumed: resumed.is_some(),
            shards,
            terms,
            tree,
            seats,
        })
    }
}

/// Whether two ranks that were in the same job remember the same of it.
fn agree_on_resume(rank: u32, asked: &Resume, other: &Resume) -> Result<(), Refusal> {
    let facts = |resume: &Resume| {
        [
            (ResumeField::Generation, u32::from(resume.generation.0)),
            (ResumeField::InFlight, resume.in_flight.into()),
            (ResumeField::Elements, resume.elements.into()),
            (ResumeField::Shards, resume.completed.len() as u32),
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
