//! All jobs of a switch, from the first rank that asks to the last that leaves.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;

use fanin_wire::{AbortReason, Generation, JobId, Key, Rank};

use super::gathering::{Gathering, check};
use super::{Admission, JoinRequest, Protocol, Ranks, Refusal, Resume, Seats, Ticket};
use crate::machine::Instant;

mod config;
mod job;
mod renewal;
#[cfg(test)]
mod tests;
mod view;

pub use self::config::{ConfigError, RegistryConfig};
use self::job::{Job, Life, Presence};
use self::renewal::Renewal;
pub use self::view::{JobState, JobView};

/// Of the pool, what jobs have at most of which all ranks ask from one machine: half, so that others have room.
const POOL_OF_ONE: u32 = 2;
/// Of the jobs that gather or run at once, those of which all ranks ask from one machine: half, too.
const JOBS_OF_ONE: u32 = 2;
/// Most exchange counts that are kept of ranks which wait to resume a job: 64 MiB, 16 jobs of 64 ranks with the largest pool in one
/// shard.
const COUNTS_MAX: usize = 1 << 24;
/// And of those that ask from one machine.
const COUNTS_OF_ONE_MAX: usize = COUNTS_MAX / 2;

/// What becomes of a rank that asks to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinDecision {
    /// It waits for other ranks.
    Waiting(Ticket),
    /// It was the last one, or it asks for what the others cannot go along with: all of them get the same answer.
    Complete {
        /// The asking rank's own ticket; it is among `tickets`.
        ticket: Ticket,
        /// All ranks' tickets.
        tickets: Vec<Ticket>,
        /// The job, which runs from now on, or why it cannot.
        outcome: Result<Admission, Refusal>,
        /// The job in whose place this one is. It is over.
        replaced: Option<JobId>,
    },
    /// It is in the job that it wants to resume: the answer was lost on the way, as with a switch that ended just then. The job
    /// runs already.
    Again {
        /// The asking rank's.
        ticket: Ticket,
        /// The job.
        admission: Admission,
    },
    /// It alone is refused.
    Refused {
        /// Why.
        reason: Refusal,
    },
}

/// A rank's stream to the switch, which is open as long as its process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attendance {
    /// The job.
    pub job: JobId,
    /// The rank.
    pub rank: Rank,
    number: u64,
}

/// How a rank's stream came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// Next to the rank: its process died, or its machine.
    AtTheRank,
    /// Between the switch next to the rank and this one; the rank itself may live.
    OnTheWay,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeartbeatReply {
    /// The job runs.
    Alive {
        /// Ranks that left it.
        left: Ranks,
    },
    /// No such job, generation or rank here: the worker joins again.
    Unknown,
    /// The job is set up again, with its ranks where they are now: the worker joins again.
    SetUpAgain,
    /// The job was aborted.
    Aborted(AbortReason),
}

/// A call that was made in a rank's name without its secret. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied {
    /// Of the job's ranks the one that was named.
    pub rank: Rank,
}

impl core::fmt::Display for Denied {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "a call for rank {} without its secret; only the process that the switch admitted speaks for a rank",
            self.rank.0
        )
    }
}

impl core::error::Error for Denied {}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Tell the job's workers that it is over.
    Abort {
        /// The job.
        job: JobId,
        /// Why.
        reason: AbortReason,
    },
    /// Tell the job's ranks to join again.
    SetUpAgain {
        /// The job.
        job: JobId,
    },
    /// Forget the job.
    Remove {
        /// The job.
        job: JobId,
    },
    /// Answer ranks that wait.
    Refuse {
        /// Who.
        tickets: Vec<Ticket>,
        /// Why.
        reason: Refusal,
    },
}

/// The memory of a shard, in units of 256 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// All.
    pub units: u32,
    /// Those that no job has.
    pub free: u32,
}

/// The jobs of a switch. See the module's documentation.
pub struct Registry {
    config: RegistryConfig,
    /// Those that are served, the usual one first.
    protocols: Vec<&'static dyn Protocol>,
    /// Draws job ids and keys.
    generator: Box<dyn FnMut() -> u64 + Send>,
    /// By name, and by what those show who resume a job.
    gatherings: BTreeMap<(String, Option<u64>), Gathering>,
    jobs: BTreeMap<JobId, Job>,
    free: u32,
    next_ticket: u64,
    next_attendance: u64,
    last_tick: Option<Instant>,
    /// When it last found that it had not been scheduled for long.
    awake_since: Option<Instant>,
    stopping: bool,
}

impl Registry {
    /// An empty registry of jobs of these protocols. `generator` draws job ids and keys: from the operating system wherever there is a network, so that
    /// nobody can guess them and a packet for an earlier switch's job is not taken for this one's.
    pub fn new(
        config: RegistryConfig,
        protocols: Vec<&'static dyn Protocol>,
        generator: Box<dyn FnMut() -> u64 + Send>,
    ) -> Result<Self, ConfigError> {
        let must_not_be_zero = [
            ("shards", config.shards == 0),
            ("pool_units", config.pool_units == 0),
            ("jobs_max", config.jobs_max == 0),
            ("protocols", protocols.is_empty()),
            ("heartbeat_timeout", config.heartbeat_timeout.is_zero()),
            ("return_timeout", config.return_timeout.is_zero()),
            ("join_timeout_max", config.join_timeout_max.is_zero()),
        ];
        if let Some((field, _)) = must_not_be_zero.into_iter().find(|(_, zero)| *zero) {
            return Err(ConfigError { field });
        }
        Ok(Self {
            config,
            protocols,
            generator,
            gatherings: BTreeMap::new(),
            jobs: BTreeMap::new(),
            free: config.pool_units,
            next_ticket: 0,
            next_attendance: 0,
            last_tick: None,
            awake_since: None,
            stopping: false,
        })
    }

    /// Ends the job of a name under which a rank asks to join, if one of its ranks is gone, or this one left it for a job of
    /// another size: it cannot go on, and who starts it anew is here. To be called before [`Self::join`].
    ///
    /// Who left gave all that it owed, and the others may still collect their last sums: they have the time for it that a broken
    /// stream has to come back. `is_of` says whether who asks may be one of a job's ranks: strangers know its name, too.
    pub fn make_way(
        &mut self,
        now: Instant,
        request: &JoinRequest,
        is_of: impl Fn(JobId) -> bool,
    ) -> Vec<Command> {
        let stays_out = || self.stopping || check(request, &self.protocols, self.config.shards).is_err();
        if request.resume.is_some() || stays_out() {
            return Vec::new();
        }
        let to_blame = |job: &Job| {
            let left = || {
                let resized = request.world_size != u32::from(job.admission.world_size);
                let over = now.since(job.left_last) > self.config.return_timeout;
                job.left.iter().find(|rank| resized && over && u32::from(rank.0) == request.rank)
            };
            job.gone().or_else(left)
        };
        let named = self.jobs.iter().filter(|(_, job)| job.is_running() && job.name == request.job);
        let ended = named.filter_map(|(id, job)| Some((*id, to_blame(job)?)));
        let ended = ended.filter(|(id, _)| is_of(*id)).collect();
        self.expel(now, ended)
    }

    /// A rank asks to join a job. It waits until all have, or is refused.
    pub fn join(&mut self, now: Instant, request: JoinRequest) -> JoinDecision {
        match self.try_join(now, request) {
            Ok(decision) => decision,
            Err(reason) => JoinDecision::Refused { reason },
        }
    }

    fn try_join(&mut self, now: Instant, request: JoinRequest) -> Result<JoinDecision, Refusal> {
        if self.stopping {
            return Err(Refusal::SwitchStopping);
        }
        let checked = check(&request, &self.protocols, self.config.shards)?;
        let (rank, world_size) = (checked.rank, checked.world_size);
        let mut replaced = None;
        for (id, running) in self.jobs.iter_mut().filter(|(_, job)| job.concerns(&request)) {
            if let Some(admission) = running.admission_again(now, rank, &request) {
                let ticket = Ticket(self.next_ticket);
                self.next_ticket += 1;
                return Ok(JoinDecision::Again { ticket, admission });
            }
            if running.is_resumed_by(&request) {
                // A rank that left joins nowhere again.
                if !running.left.is_empty() {
                    return Err(Refusal::JoinTimeout { missing: running.left.clone() });
                }
                replaced = Some(*id);
                continue;
            }
            // One that left begins anew, while the rest of its job ends: before the new one is complete, as it is as large.
            if !(running.left.contains(rank) && running.admission.world_size == world_size) {
                return Err(Refusal::JobRunning {
                    rank: request.rank,
                    world_size: running.admission.world_size.into(),
                });
            }
        }
        let identity = (request.job.clone(), request.lineage());
        // A gathering that replaces a job takes no further place.
        if replaced.is_none() && !self.gatherings.contains_key(&identity) {
            let max = self.config.jobs_max;
            let of_one = self.jobs_of(|origin| origin.is_some() && origin == request.origin);
            let jobs = [(self.jobs_of(|_| true), max), (of_one, max.div_ceil(JOBS_OF_ONE))];
            if let Some((_, max)) = jobs.into_iter().find(|(jobs, max)| *jobs >= *max as usize) {
                return Err(Refusal::TooManyJobs { max });
            }
        }
        let counts = request.resume.as_ref().map_or(0, Resume::counts);
        if counts > 0 {
            let of_one =
                |gathering: &&Gathering| request.origin.is_some() && gathering.origin() == request.origin;
            let sum = |gatherings: &mut dyn Iterator<Item = &Gathering>| {
                gatherings.map(Gathering::counts).sum::<usize>()
            };
            let held = sum(&mut self.gatherings.values());
            let of_one = sum(&mut self.gatherings.values().filter(of_one));
            if held + counts > COUNTS_MAX || of_one + counts > COUNTS_OF_ONE_MAX {
                return Err(Refusal::TooManyJobs { max: self.config.jobs_max });
            }
        }
        let limit = now + self.config.join_timeout_max;
        let entry = self.gatherings.entry(identity.clone());
        let begun = || Gathering::new(checked.protocol, world_size, now, limit, replaced);
        let gathering = entry.or_insert_with(begun);
        let ticket = Ticket(self.next_ticket);
        // An empty gathering agrees with anyone, so a refusal never leaves one behind.
        match gathering.join(now, &checked, ticket, request) {
            // All are of one program, started differently: those that wait would wait in vain.
            Err(reason @ Refusal::Mismatch { .. }) => {
                self.next_ticket += 1;
                let mut tickets = gathering.tickets();
                tickets.push(ticket);
                self.gatherings.remove(&identity);
                return Ok(JoinDecision::Complete { ticket, tickets, outcome: Err(reason), replaced: None });
            }
            joined => joined?,
        }
        self.next_ticket += 1;
        if let Some(job) = replaced {
            self.set_up_again(job);
        }
        let gathering = &self.gatherings[&identity];
        if !gathering.missing().is_empty() {
            return Ok(JoinDecision::Waiting(ticket));
        }
        let tickets = gathering.tickets();
        // Drawn while the job that is replaced still has its own.
        let id = self.unused_id();
        if let Some(job) = replaced {
            self.remove(job);
        }
        let outcome = self.admit(now, &identity, id);
        self.gatherings.remove(&identity);
        Ok(JoinDecision::Complete { ticket, tickets, outcome, replaced })
    }

    /// Turns a complete gathering into a running job, if there is memory for it.
    fn admit(
        &mut self,
        now: Instant,
        identity: &(String, Option<u64>),
        id: JobId,
    ) -> Result<Admission, Refusal> {
        let gathering = &self.gatherings[identity];
        let world_size = gathering.world_size();
        let (origin, security) = (gathering.origin(), gathering.security());
        let protocol = gathering.protocol.name();
        let plan = gathering.plan(self.config.shards, self.config.receive_buffer_bytes)?;
        let asked = plan.terms.pool_units;
        let free = self.free_for(origin);
        if asked > free {
            return Err(Refusal::PoolExhausted { asked, free });
        }
        self.free -= asked;
        let secret = u128::from((self.generator)()) << 64 | u128::from((self.generator)());
        let key = Key::new(secret).with(security);
        let admission = Admission {
            job: id,
            key,
            generation: plan.generation,
            world_size,
            shards: plan.shards,
            resumed: plan.resumed,
            protocol,
            terms: plan.terms,
            tree: plan.tree,
            seats: plan.seats,
        };
        let mut job = Job {
            name: identity.0.clone(),
            lineage: identity.1,
            admission: admission.clone(),
            origin,
            left: Ranks::default(),
            left_last: now,
            untold: admission.resumed.then(|| admission.ranks()),
            behind: if admission.resumed { admission.ranks() } else { Ranks::default() },
            renewal: Renewal::None,
            life: Life::Running { presences: (0..world_size).map(|_| Presence::Admitted(now)).collect() },
        };
        job.forget_parts();
        self.jobs.insert(id, job);
        Ok(admission)
    }

    /// Jobs that gather or run of which all ranks ask from such a machine. A job that is set up again
    /// counts once.
    fn jobs_of(&self, is_it: impl Fn(Option<IpAddr>) -> bool) -> usize {
        let begun = self.gatherings.values().filter(|gathering| gathering.replaces.is_none());
        let gathering = begun.filter(|gathering| is_it(gathering.origin()));
        gathering.count() + self.jobs.values().filter(|job| job.is_running() && is_it(job.origin)).count()
    }

    /// Memory that is free for a job of which all ranks ask from one machine, or from several.
    fn free_for(&self, origin: Option<IpAddr>) -> u32 {
        let Some(origin) = origin else { return self.free };
        let theirs = self.jobs.values().filter(|job| job.is_running() && job.origin == Some(origin));
        let taken: u32 = theirs.map(|job| job.admission.terms.pool_units).sum();
        self.free.min((self.config.pool_units / POOL_OF_ONE).saturating_sub(taken))
    }

    /// A random id that no job here has.
    fn unused_id(&mut self) -> JobId {
        let mut id = JobId((self.generator)() as u32);
        // At most `2 * jobs_max` ids are taken, so this ends however poor the generator is.
        while self.jobs.contains_key(&id) {
            id = JobId(id.0.wrapping_add(1));
        }
        id
    }

    /// A running job as its members are told of it.
    #[must_use]
    pub fn admission(&self, job: JobId) -> Option<&Admission> {
        self.jobs.get(&job).filter(|job| job.is_running()).map(|job| &job.admission)
    }

    /// What a planner found for a job takes the place of what it was admitted with.
    pub fn planned(&mut self, job: JobId, seats: Seats) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.admission.seats = seats;
            job.forget_parts();
        }
    }

    /// What the ranks of a running job showed when they resumed it.
    #[must_use]
    pub fn lineage(&self, job: JobId) -> Option<u64> {
        self.jobs.get(&job).filter(|job| job.is_running())?.lineage
    }

    /// A rank that waited is gone.
    pub fn withdraw(&mut self, ticket: Ticket) {
        self.gatherings
            .retain(|_, gathering| !(gathering.withdraw(ticket) && gathering.present().is_empty()));
    }

    /// A rank says that it lives, and hears how its job is.
    pub fn heartbeat(
        &mut self,
        now: Instant,
        job: JobId,
        rank: Rank,
        generation: Generation,
        secret: u64,
    ) -> Result<HeartbeatReply, Denied> {
        let Some(job) = self.jobs.get_mut(&job) else { return Ok(HeartbeatReply::Unknown) };
        if job.admission.generation != generation || rank.0 >= job.admission.world_size {
            return Ok(HeartbeatReply::Unknown);
        }
        job.authenticate(rank, secret)?;
        Ok(match &mut job.life {
            Life::Running { presences } => {
                let presence = &mut presences[usize::from(rank.0)];
                // Of a rank whose stream ended this may be an earlier word, that came late: it opens another one if it lives.
                if matches!(presence, Presence::Admitted(_) | Presence::Heard(_)) {
                    *presence = Presence::Heard(now);
                }
                if let Some(unheard) = &mut job.untold {
                    unheard.remove(rank);
                }
                if job.untold.take_if(|unheard| unheard.is_empty()).is_some() {
                    job.admission.seats.ranks = Vec::new();
                }
                match job.renewal {
                    Renewal::None => HeartbeatReply::Alive { left: job.left.clone() },
                    Renewal::Begun | Renewal::Told => HeartbeatReply::SetUpAgain,
                }
            }
            Life::Aborted { reason, heard, .. } => {
                heard.insert(rank);
                HeartbeatReply::Aborted(*reason)
            }
        })
    }

    /// A rank of a job that was resumed has all that it asked for before that.
    pub fn caught_up(&mut self, job: JobId, rank: Rank) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.behind.remove(rank);
        }
    }

    /// Whether other ranks of a job that was resumed may lack sums that this one has. The switch may have forgotten them.
    #[must_use]
    pub fn others_behind(&self, job: JobId, rank: Rank) -> bool {
        let Some(job) = self.jobs.get(&job).filter(|job| job.is_running()) else { return false };
        job.behind.iter().any(|other| other != rank && !job.left.contains(other))
    }

    /// A rank opens the stream that stays as long as it lives, in place of one that it may have. Without a running job there
    /// is nothing to attend.
    pub fn attend(
        &mut self,
        now: Instant,
        job: JobId,
        rank: Rank,
        generation: Generation,
        secret: u64,
    ) -> Result<(HeartbeatReply, Option<Attendance>), Denied> {
        let reply = self.heartbeat(now, job, rank, generation, secret)?;
        // The death of a rank is seen also while its job is set up again.
        let (HeartbeatReply::Alive { .. } | HeartbeatReply::SetUpAgain) = reply else {
            return Ok((reply, None));
        };
        let number = self.next_attendance;
        self.next_attendance += 1;
        if let Some(Job { life: Life::Running { presences }, .. }) = self.jobs.get_mut(&job) {
            presences[usize::from(rank.0)] = Presence::Attends(number);
        }
        Ok((reply, Some(Attendance { job, rank, number })))
    }

    /// A rank's stream ended. No effect on one that has opened another since.
    pub fn detached(&mut self, now: Instant, attendance: Attendance, cause: Detached) {
        let slept = self.awake_since.is_some_and(|since| now.since(since) < self.config.heartbeat_timeout);
        let Attendance { job, rank, number } = attendance;
        if let Some(Job { life: Life::Running { presences }, .. }) = self.jobs.get_mut(&job)
            && let Some(presence) =
                presences.get_mut(usize::from(rank.0)).filter(|it| **it == Presence::Attends(number))
        {
            *presence = match cause {
                Detached::AtTheRank if !slept => Presence::Gone(now),
                // Who hears nothing of a switch for long opens another connection to it.
                Detached::AtTheRank | Detached::OnTheWay => Presence::Heard(now),
            };
        }
    }

    /// A rank leaves. When all have, the job ends.
    pub fn leave(
        &mut self,
        now: Instant,
        job: JobId,
        rank: Rank,
        secret: u64,
    ) -> Result<Option<Command>, Denied> {
        let Some(entry) = self.jobs.get_mut(&job).filter(|entry| rank.0 < entry.admission.world_size) else {
            return Ok(None);
        };
        entry.authenticate(rank, secret)?;
        if !entry.left.contains(rank) {
            entry.left.insert(rank);
            entry.left_last = now;
            // It joins nowhere again, and needs nothing: the others go on as they were.
            entry.renewal = Renewal::None;
        }
        Ok((entry.left == entry.admission.ranks()).then(|| self.remove(job)))
    }

    /// The data path found a reason to abort a job. Returns what the shell must still do for jobs that are forgotten early.
    pub fn aborted(&mut self, now: Instant, job: JobId, reason: AbortReason) -> Option<Command> {
        let entry = self.jobs.get_mut(&job).filter(|entry| entry.is_running())?;
        entry.life = Life::Aborted { reason, since: now, heard: Ranks::default() };
        // The memory is free at once: the data path answers an aborted job's packets from the reason alone.
        self.free += entry.admission.terms.pool_units;
        self.forget_surplus()
    }

    /// Drops the abort that is longest known, if more are kept than jobs may run.
    fn forget_surplus(&mut self) -> Option<Command> {
        let mut aborted: Vec<(Instant, JobId)> = Vec::new();
        for (id, job) in &self.jobs {
            if let Life::Aborted { since, .. } = job.life {
                aborted.push((since, *id));
            }
        }
        if aborted.len() <= self.config.jobs_max as usize {
            return None;
        }
        aborted.iter().min().copied().map(|(_, oldest)| self.remove(oldest))
    }

    /// The ranks of a job wait for the shell, which has not yet told them that they are admitted, and say nothing meanwhile.
    pub fn awaits_shell(&mut self, now: Instant, job: JobId) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.hear_all(now);
        }
    }

    /// Acts on what is overdue: silent ranks, incomplete gatherings, aborts that all have heard.
    pub fn tick(&mut self, now: Instant) -> Vec<Command> {
        let mut commands = Vec::new();
        self.forgive_own_silence(now);
        self.hear_those_that_wait(now);
        let dead = |(id, job): (&JobId, &Job)| Some((*id, job.dead(now, &self.config)?));
        let dead: Vec<(JobId, Rank)> = self.jobs.iter().filter_map(dead).collect();
        commands.extend(self.expel(now, dead));
        commands.extend(self.given_up(now));
        commands.extend(self.begun_anew());
        let memory = self.config.abort_memory;
        let spent: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| job.is_spent(now, memory)).map(|(id, _)| *id).collect();
        commands.extend(spent.into_iter().map(|job| self.remove(job)));
        commands
    }

    /// Ends jobs that a rank's death ended.
    fn expel(&mut self, now: Instant, dead: Vec<(JobId, Rank)>) -> Vec<Command> {
        let mut commands = Vec::new();
        for (job, rank) in dead {
            let reason = AbortReason::Expelled(rank);
            commands.push(Command::Abort { job, reason });
            commands.extend(self.aborted(now, job, reason));
        }
        commands
    }

    /// A switch that was not scheduled for long heard nobody: it must not take its own silence for the ranks'.
    fn forgive_own_silence(&mut self, now: Instant) {
        let asleep = self.last_tick.is_some_and(|last| now.since(last) > self.config.heartbeat_timeout / 2);
        self.last_tick = Some(now);
        if asleep {
            self.awake_since = Some(now);
            self.jobs.values_mut().for_each(|job| job.hear_all(now));
        }
    }

    /// The switch shuts down: ends every job and admits no more.
    pub fn stop(&mut self, now: Instant) -> Vec<Command> {
        self.stopping = true;
        let mut commands = Vec::new();
        for gathering in core::mem::take(&mut self.gatherings).values() {
            commands.push(Command::Refuse { tickets: gathering.tickets(), reason: Refusal::SwitchStopping });
        }
        let running: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| job.is_running()).map(|(id, _)| *id).collect();
        for job in running {
            let reason = AbortReason::SwitchStopped;
            commands.push(Command::Abort { job, reason });
            commands.extend(self.aborted(now, job, reason));
        }
        commands
    }

    /// Forgets a job and takes its memory back.
    fn remove(&mut self, id: JobId) -> Command {
        if let Some(job) = self.jobs.remove(&id)
            && job.is_running()
        {
            self.free += job.admission.terms.pool_units;
        }
        Command::Remove { job: id }
    }

    /// The protocols that are served, the usual one first.
    #[must_use]
    pub fn protocols(&self) -> &[&'static dyn Protocol] {
        &self.protocols
    }

    /// The limits.
    #[must_use]
    pub const fn config(&self) -> &RegistryConfig {
        &self.config
    }

    /// The memory that is taken and free.
    #[must_use]
    pub const fn pool(&self) -> Pool {
        Pool { units: self.config.pool_units, free: self.free }
    }
}

impl core::fmt::Debug for Registry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Registry")
            .field("gatherings", &self.gatherings)
            .field("jobs", &self.jobs)
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}
