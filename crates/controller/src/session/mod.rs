//! A rank's side of control: finding its services, joining a job, watching over it, and resuming it
//! where a service restarts.
//!
//! A [`Session`] is a rank of a running job. Its tensors go over machines (`services`). If the
//! ranks of a machine sum in shared memory (`local_sums`), its tensors go there first. Some of
//! these ranks are columns: a column sends one part of all tensors over machines, and the other
//! ranks send none. Three things need no session: ranks meet before they join (`meeting`), and
//! anybody can ask a switch how it fares (`status`) and whether it sums (`probe`).

mod absent;
mod admission;
mod cancel;
mod config;
mod local_page;
mod local_ranks;
mod local_sums;
mod measure;
mod meeting;
mod oversight;
mod pace;
mod pending;
mod presence;
mod probe;
mod rank_names;
mod services;
mod shared;
mod split;
mod status;
mod thread;
mod trace;
mod warnings;
mod watch;
mod work;

use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::WorkerStatistics;
use fanin_protocol::control::Ranks;
use fanin_udp::{IoStatistics, Membership, Submission};

use self::local_sums::{LocalSums, ranks};
use self::services::Services;
use self::shared::Shared;
use crate::error::{AllReduceError, SessionError, Tensor};

pub use cancel::Cancel;
pub use config::{ServiceConfig, SessionConfig};
pub use local_ranks::LocalRanks;
pub use measure::{gauge_at, gauge_here};
pub use meeting::{Joining, Meeting, MeetingConfig};
pub use probe::{Probe, ProbeReport, ProbeSum, cut_off, resolve_switch};
pub use rank_names::RankNames;
pub use split::{MemberStatus, Place, Prediction, Share, Split};
pub use status::{
    JobStatus, JobStatusState, PlannedShare, RelayJob, RelayStatus, SwitchStatus, switch_capacity,
    switch_status, trusted_status,
};
pub use trace::{HandOver, SERVICES_IN_TRACES, TraceConfig};
pub use watch::HEARTBEATS_PER_TIMEOUT;

/// What stands for a switch in messages where there is none.
const SHARED_MEMORY: &str = "(shared memory)";
/// How long the services may take to notice that a process has ended: its connections end with it.
const NOTICED: Duration = Duration::from_millis(1500);

/// A rank of a running job. Dropping it leaves the job.
///
/// Its methods block and must not be called from an asynchronous task; they may be called from
/// several threads.
pub struct Session {
    rank: u32,
    /// The services, with commas between.
    switch: String,
    /// Where the ranks of a machine sum among themselves.
    local: Option<LocalSums>,
    /// `None` where this rank speaks to no other machine, and once it is closed. A column's thread
    /// holds them too, and whoever holds them last leaves them.
    services: Option<Arc<Services>>,
    is_closed: bool,
}

impl Session {
    /// Joins the job at its services. Returns when every rank has.
    ///
    /// # Errors
    /// When a switch is not there, is none, or speaks another version; when it refuses the rank;
    /// when other ranks do not come in time.
    pub fn connect(config: SessionConfig) -> Result<Self, SessionError> {
        Self::connect_unless(config, None, &Cancel::default())
    }

    /// As [`Self::connect`], with the ranks of the machine where they sum by themselves, until
    /// `cancel` is called: the rank's place in the job is free again then.
    ///
    /// # Errors
    /// As [`Self::connect`]; [`SessionError::Closed`] when it was cancelled.
    pub fn connect_unless(
        config: SessionConfig,
        local: Option<LocalRanks>,
        cancel: &Cancel,
    ) -> Result<Self, SessionError> {
        let rank = config.rank;
        let (local, services) = match local {
            Some(ranks) => {
                let (local, services) = LocalSums::join(config, ranks, cancel)?;
                (Some(local), services)
            }
            None => (None, Some(Arc::new(Services::join(config, cancel)?))),
        };
        let switches = services.as_ref().map(|services| services.shared.switches.clone());
        let switch = switches.unwrap_or_else(|| SHARED_MEMORY.into());
        Ok(Self { rank, switch, local, services, is_closed: false })
    }

    fn shared(&self) -> Option<&Arc<Shared>> {
        self.services.as_ref().map(|services| &services.shared)
    }

    /// Starts a collective over all ranks, in place. All ranks must submit alike ones in the same
    /// order.
    ///
    /// `done` is called once, by a thread of the data path (or by this call, when the session has
    /// ended): it must be quick. Until then the tensors must not be touched. It hands the
    /// [`HandOver`] on to who waits for the result.
    ///
    /// Returns the collective as errors name it.
    ///
    /// # Errors
    /// [`SessionError::Closed`] after [`Self::close`]: nothing is submitted then, and `done` not
    /// called.
    pub fn submit(
        &self,
        submission: Submission,
        done: impl FnOnce(Result<(), AllReduceError>, HandOver) + Send + 'static,
    ) -> Result<Tensor, SessionError> {
        if self.is_closed {
            return Err(SessionError::Closed);
        }
        match &self.local {
            Some(local) => Ok(local.submit(submission, &self.switch, done)),
            None => Ok(self.shared().ok_or(SessionError::Closed)?.submit(submission, done)),
        }
    }

    /// This process's rank.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// The job as it was admitted by the first service: packets in flight, their elements,
    /// generation. `None` after [`Self::close`], and where this rank speaks to no other machine.
    #[must_use]
    pub fn job(&self) -> Option<Membership> {
        self.shared().map(|shared| shared.job(0))
    }

    /// Whether the job has other collectives than all-reduces. A job of SwitchML has them if no
    /// rack sums for it. Alike on all ranks. `false` after [`Self::close`].
    #[must_use]
    pub fn has_roots(&self) -> bool {
        match &self.local {
            _ if self.is_closed => false,
            Some(local) => local.has_roots,
            None => self.shared().is_some_and(|shared| shared.has_roots()),
        }
    }

    /// Whether a part of the ranks can sum alone ([`Submission::among`]): in a job of GOAT. Alike on
    /// all ranks. `false` after [`Self::close`].
    #[must_use]
    pub fn has_participants(&self) -> bool {
        match &self.local {
            _ if self.is_closed => false,
            Some(local) => local.has_participants,
            None => self.shared().is_some_and(|shared| shared.has_participants()),
        }
    }

    /// Whether the job's packets are encrypted. Alike on all ranks. `false` after [`Self::close`].
    #[must_use]
    pub fn encrypts(&self) -> bool {
        match &self.local {
            _ if self.is_closed => false,
            Some(local) => local.encrypts,
            None => self.shared().is_some_and(|shared| shared.encrypts()),
        }
    }

    /// The number of each rank's machine; `None` where no ranks sum first. Alike on all ranks.
    #[must_use]
    pub fn machines(&self) -> Option<&[usize]> {
        self.local.as_ref().map(|local| local.machines.as_slice())
    }

    /// How many ranks of each machine speak for it: 1 where they do not sum among themselves. Alike
    /// on all ranks.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.local.as_ref().map_or(1, |local| local.columns)
    }

    /// Changes [`SessionConfig::timeout`], for what is under way too.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared().iter().for_each(|shared| shared.set_timeout(timeout));
        self.local.iter().for_each(|local| local.sum.set_timeout(timeout));
    }

    /// All-reduces that are not done.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        match &self.local {
            Some(local) => local.sum.outstanding(),
            None => self.shared().map_or(0, |shared| shared.driver.outstanding()),
        }
    }

    /// Why the job ended for this rank, if it did: what every all-reduce since fails with. `None`
    /// after [`Self::close`].
    #[must_use]
    pub fn failure(&self) -> Option<SessionError> {
        let of_services = || self.shared()?.failure();
        match &self.local {
            _ if self.is_closed => None,
            Some(local) => local.failure(of_services, &self.switch),
            None => of_services(),
        }
    }

    /// Ranks that have left, as far as this one has heard: those of its machine, and those that
    /// speak to the services it speaks to. Nothing has to wait for them here.
    #[must_use]
    pub fn left(&self) -> Ranks {
        let named = |shared: &Arc<Shared>| shared.config.names.all(&shared.left());
        let mut left = self.shared().map(named).unwrap_or_default();
        self.local.iter().for_each(|local| left.extend(ranks(local.sum.left()).iter()));
        left
    }

    /// Ranks of this machine that an all-reduce of this rank waits for; `None` where services know
    /// it.
    #[must_use]
    pub fn awaited(&self) -> Option<Ranks> {
        let awaited = ranks(self.local.as_ref()?.sum.awaited());
        (self.services.is_none() || !awaited.is_empty()).then_some(awaited)
    }

    /// Counters of the data path over machines; `completed` are this job's all-reduces, and `loss` is theirs.
    #[must_use]
    pub fn statistics(&self) -> WorkerStatistics {
        let over_machines = self.shared().map(|shared| shared.driver.statistics()).unwrap_or_default();
        let Some(local) = &self.local else { return over_machines };
        WorkerStatistics { completed: local.sum.completed(), loss: local.sum.loss(), ..over_machines }
    }

    /// Collectives other than all-reduces that came out well.
    #[must_use]
    pub fn others_completed(&self) -> u64 {
        match &self.local {
            Some(local) => local.sum.others_completed(),
            None => self.shared().map_or(0, |shared| shared.driver.others_completed()),
        }
    }

    /// Trains and system calls of the data path over machines.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.shared().map(|shared| shared.driver.io_statistics()).unwrap_or_default()
    }

    /// How the services share the job. `None` after [`Self::close`], and where this rank speaks to
    /// no other machine.
    #[must_use]
    pub fn split(&self) -> Option<Split> {
        let mut split = Split::of(&self.shared()?.config);
        if let Some(prediction) = &mut split.prediction {
            prediction.scale(1.0 / self.columns() as f64);
        }
        Some(split)
    }

    /// What a byte of large tensors took of late as it travels, in seconds, from a tensor's
    /// submission or the end of the one before: the median. `None` before the first.
    #[must_use]
    pub fn seconds_per_byte(&self) -> Option<f64> {
        Some(self.shared()?.pending.seconds_per_byte()? / self.columns() as f64)
    }

    /// By how much the service that is furthest from its share misses it, as a fraction of all
    /// packets so far.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        self.shared().map_or(0.0, |shared| shared.driver.imbalance())
    }

    /// Leaves the job. What is outstanding fails with [`SessionError::Closed`]; when this returns
    /// no tensor is touched. If a `done` closes the session, the rest fails after that `done` has
    /// returned. A second call has no effect.
    pub fn close(&mut self) {
        self.is_closed = true;
        if let Some(local) = &mut self.local {
            // First, as its thread speaks to the services, too.
            local.sum.stop();
            if let Some(trace) = local.trace.take() {
                trace.flush();
            }
            if self.services.is_some() && local.has_lost_a_neighbour() {
                // Until the services have noticed: the other machines are to hear of that rank, and
                // not that this one left.
                std::thread::sleep(NOTICED);
            }
        }
        // Two callers do not hold the services last, and leave nothing here: a `done`, which runs
        // on the column's thread, and a process that was forked from the rank's. The thread leaves
        // the services, after its machine's ranks.
        self.services = None;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("switch", &self.switch)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}
