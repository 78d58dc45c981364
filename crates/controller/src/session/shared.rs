//! What a session's threads share.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_protocol::control::Ranks;
use fanin_udp::{Clock, CollectiveKind, Failure, Membership, PartTimes, Submission, WorkerDriver};
use fanin_wire::{Rank, Security};

use super::admission::Admitted;
use super::config::SessionConfig;
use super::pending::{Pending, Travelled, bytes_on_wire};
use super::trace::{HandOver, SessionTrace};
use crate::control_channel::Connection;
use crate::error::{AllReduceError, Member, SessionError, Tensor};
use crate::page::PageServer;

/// One rank of a job, as long as it takes part.
pub(super) struct Shared {
    pub config: SessionConfig,
    pub rank: Rank,
    /// What it is at each service.
    pub members: Arc<[Member]>,
    /// The services, with commas between.
    pub switches: String,
    /// Of each service.
    lanes: Vec<Mutex<Lane>>,
    /// [`SessionConfig::timeout`] as it is now, in nanoseconds.
    timeout_ns: AtomicU64,
    pub driver: WorkerDriver,
    pub trace: Option<SessionTrace>,
    /// As long as there is a session that it is about.
    _page: Option<Arc<PageServer>>,
    pub pending: Arc<Pending>,
    /// Who is told when the session ends by itself.
    on_failure: Mutex<Option<OnFailure>>,
    /// Whether its owner closes it.
    is_closing: AtomicBool,
    /// Whether it is about to leave, and joins nowhere again.
    is_leaving: AtomicBool,
}

/// What people see of a session.
pub(super) struct Watched {
    pub trace: Option<SessionTrace>,
    pub page: Option<Arc<PageServer>>,
}

type OnFailure = Box<dyn FnOnce(SessionError) + Send>;

/// What is known of a job at one service.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    /// The job as it is now; a restart of the service changes it.
    pub job: Membership,
    /// Its name there, and to whom one speaks of it; another service that takes over changes both.
    pub name: String,
    pub connection: Connection,
    /// The machines that are asked if it stays away, the next one first.
    pub way: Vec<SocketAddr>,
    /// Ranks that left there.
    pub left: Ranks,
    /// Since when the service does not answer, and what was the matter last.
    pub silent: Option<(Instant, String)>,
    /// Why the rank is at joining it again, if it is.
    pub rejoining: Option<Again>,
    /// The first collective that was submitted after the rank began to join it again, if it did.
    pub resumed_before: u64,
    /// Whether other ranks may lack sums that this one got before it joined again. It hands them
    /// back, and leaves later.
    pub others_behind: bool,
}

/// Why a rank joins its job again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// The switch restarted, or another one takes over.
    SwitchRestarted,
    /// Some rank has another way, or there is another plan.
    SetUp,
}

/// How long a rank stays that is done, while others may lack sums.
pub(super) const STAYS_FOR_OTHERS: Duration = Duration::from_secs(10);
/// A service that is silent for so long tells nobody that others have caught up.
const SILENT: Duration = Duration::from_secs(3);
/// How often it looks whether they still do.
const LOOKS: Duration = Duration::from_millis(10);

impl Shared {
    /// Whether a service is in the process of a rank, and goes with it.
    pub fn hosts(&self, rank: Rank, service: usize) -> bool {
        self.config.services[service].home == Some(rank)
    }

    pub fn new(
        config: SessionConfig,
        members: Vec<Member>,
        driver: WorkerDriver,
        Watched { trace, page }: Watched,
        joined: impl IntoIterator<Item = (Admitted, Connection)>,
    ) -> Self {
        let name = config.job.clone();
        let planned = config.prediction.as_ref().map(|planned| planned.seconds_per_byte);
        let lane = |(Admitted { job, way, .. }, connection)| {
            let (name, left) = (name.clone(), Ranks::default());
            Lane {
                job,
                name,
                connection,
                way,
                left,
                silent: None,
                rejoining: None,
                resumed_before: 0,
                others_behind: false,
            }
        };
        Self {
            // Every service admitted the rank, so that it fits.
            rank: Rank(config.rank as u16),
            switches: names(members.iter().map(|member| member.switch.as_str())),
            members: members.into(),
            lanes: joined.into_iter().map(lane).map(Mutex::new).collect(),
            timeout_ns: AtomicU64::new(nanoseconds(config.timeout)),
            driver,
            trace,
            _page: page,
            pending: Arc::new(Pending::planned(planned)),
            on_failure: Mutex::default(),
            is_closing: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            config,
        }
    }

    /// Starts a collective over all ranks, in place: as [`super::Session::submit`].
    pub fn submit(
        &self,
        submission: Submission,
        done: impl FnOnce(Result<(), AllReduceError>, HandOver) + Send + 'static,
    ) -> Tensor {
        let pending = Arc::clone(&self.pending);
        let (members, switch) = (Arc::clone(&self.members), self.switches.clone());
        let (names, submitted) = (self.config.names.clone(), Instant::now());
        let name = pending.insert(&submission, submitted);
        // Whose time is predicted.
        let is_all_reduce = name.kind == CollectiveKind::AllReduce;
        let aggregates = self.config.protocol().aggregates();
        let bytes = is_all_reduce.then(|| bytes_on_wire(&name, self.config.travels_as(), aggregates));
        let trace = self.trace.clone().map(|trace| (trace, Clock.now()));
        // It holds no reference to the driver: a thread of the driver would otherwise wait for
        // itself to end.
        let done = move |result: Result<Vec<PartTimes>, Failure>| {
            let flowed = result.as_ref().ok().map(|parts| flowed(parts));
            let travelled = bytes.zip(flowed).map(|(bytes, flowed)| Travelled { bytes, flowed });
            pending.remove(name.number, Instant::now(), travelled);
            let result = result.map_err(|failure| AllReduceError {
                cause: names.error(SessionError::from_failure(&failure, &members)),
                tensor: name,
                switch,
                waited: submitted.elapsed(),
            });
            let Some((trace, submitted)) = trace else {
                let hand_over = HandOver::untraced(&result);
                return done(result.map(drop), hand_over);
            };
            let hand_over = trace.done(name, submitted, &result);
            done(result.map(drop), hand_over);
        };
        self.driver.submit(submission, Box::new(done));
        name
    }

    /// Ends the session with an error: all that is outstanding, and all that comes.
    pub fn fail(&self, error: SessionError) {
        if self.is_closing.load(Ordering::SeqCst) {
            // Nobody waits for anything any more.
            return self.driver.fail(Failure::Because(Arc::new(SessionError::Closed)));
        }
        // The log names ranks as the exception does.
        let named = self.config.names.error(error.clone());
        tracing::error!(error = %named, rank = self.config.own_name().0, "the session ends");
        self.driver.fail(Failure::Because(Arc::new(error)));
        self.tell_failure();
    }

    /// Why the session ended, if it did.
    pub fn failure(&self) -> Option<SessionError> {
        Some(self.config.names.error(SessionError::from_failure(&self.driver.failure()?, &self.members)))
    }

    /// Whether sums are under way since before a service's job was set up again.
    pub fn is_behind(&self, service: usize) -> bool {
        let before = self.lane(service).resumed_before;
        self.pending.oldest().is_some_and(|oldest| oldest.tensor.number < before)
    }

    /// Notes that the rank begins to join a service's job again, unless it is about to leave.
    pub fn begins_to_rejoin(&self, service: usize, again: Again) -> bool {
        let before = self.pending.next();
        let mut lane = self.lane(service);
        let rejoins = !self.is_leaving.load(Ordering::SeqCst);
        if rejoins {
            (lane.rejoining, lane.resumed_before) = (Some(again), before);
        }
        rejoins
    }

    /// Waits until no other rank may need this one any more. From then on it joins nowhere again.
    ///
    /// It knows of no need before it has heard that its job is set up again. It does not wait for a
    /// service that restarts. If sums are under way it leaves at once: it gives them up.
    pub fn stay_for_others(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        let is_needed = |lane: MutexGuard<'_, Lane>| {
            let is_silent = lane.silent.as_ref().is_some_and(|(since, _)| since.elapsed() > SILENT);
            !is_silent && (lane.others_behind || lane.rejoining == Some(Again::SetUp))
        };
        self.wait_while(STAYS_FOR_OTHERS, || {
            self.lanes().any(is_needed) && self.pending.oldest().is_none() && self.driver.failure().is_none()
        });
        self.is_leaving.store(true, Ordering::SeqCst);
    }

    /// Waits while something is so, and no longer than `at_most`. A thread of the driver does not
    /// wait: the watches need its answers.
    pub fn wait_while(&self, at_most: Duration, is_so: impl Fn() -> bool) {
        let until = Instant::now() + at_most;
        while !self.driver.is_its_thread() && Instant::now() < until && is_so() {
            // Watches, failures and sums change it, each at its own place: nothing tells of all.
            std::thread::sleep(LOOKS);
        }
    }

    /// Whether the rank is at joining some service's job again.
    pub fn is_rejoining(&self) -> bool {
        self.lanes().any(|lane| lane.rejoining.is_some())
    }

    /// Ranks that have left, as some service knows.
    pub fn left(&self) -> Ranks {
        let mut left = Ranks::default();
        self.lanes().for_each(|lane| left.extend(lane.left.iter()));
        left
    }

    /// Calls `told` once with [`Self::failure`] when the session ends by itself, whether or not
    /// anything is under way; in this call if it has. Not when it is closed. By a thread of the
    /// session: it must be quick, and must not hold the session.
    pub fn on_failure(&self, told: OnFailure) {
        *self.on_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(told);
        self.tell_failure();
    }

    /// Tells who wants to know it that the session has ended, if it has and its owner did not close
    /// it.
    pub fn tell_failure(&self) {
        let Some(error) = self.failure().filter(|error| !matches!(error, SessionError::Closed)) else {
            return;
        };
        let told = self.on_failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(told) = told {
            told(error);
        }
    }

    pub fn lane(&self, service: usize) -> MutexGuard<'_, Lane> {
        self.lanes[service].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lanes(&self) -> impl Iterator<Item = MutexGuard<'_, Lane>> {
        (0..self.lanes.len()).map(|service| self.lane(service))
    }

    pub fn job(&self, service: usize) -> Membership {
        self.lane(service).job.clone()
    }

    /// Whether all services have other collectives than all-reduces.
    pub fn has_roots(&self) -> bool {
        self.lanes().all(|lane| lane.job.has_roots())
    }

    /// Whether the job's packets are encrypted.
    pub fn encrypts(&self) -> bool {
        self.job(0).key().security() == Security::Encrypt
    }

    /// Whether a part of the ranks can sum alone, at all services.
    pub fn has_participants(&self) -> bool {
        self.lanes().all(|lane| lane.job.has_participants())
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns.load(Ordering::Relaxed))
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::Relaxed);
    }
}

/// Services in one text.
pub(super) fn names<'a>(switches: impl Iterator<Item = &'a str>) -> String {
    switches.collect::<Vec<_>>().join(",")
}

/// From the first result of a tensor to its last one, over all lanes.
fn flowed(parts: &[PartTimes]) -> Duration {
    let first = parts.iter().map(|part| part.times.first_result).min();
    let last = parts.iter().map(|part| part.times.last_result).max();
    first.zip(last).map_or(Duration::ZERO, |(first, last)| last.since(first))
}

/// Saturates after five centuries.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
