//! A rank's whole job: what it sums with the ranks of its machine in shared memory, and over machines in a [`Session`].

use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fanin_local::{Done, Group, LocalConfig, LocalError, LocalSum, MemoryError, Network, SharedMemory};
use fanin_protocol::WorkerStatistics;
use fanin_protocol::control::Ranks;
use fanin_udp::{CollectiveKind, Failure, IoStatistics, Submission};
use fanin_wire::{Collective, Op, Pattern, RANKS_MAX, Rank, WireDtype, WorkerId};

use super::config::SessionConfig;
use super::joined::{Cancel, Session};
use super::split::Split;
use super::trace::HandOver;
use crate::error::SessionError;
use crate::error::{AllReduceError, Tensor};

/// What stands for a switch in messages where there is none.
const SHARED_MEMORY: &str = "(shared memory)";
/// How long the services may take to notice that a process has ended: its connections end with it.
const NOTICED: Duration = Duration::from_millis(1500);
/// Most ranks of a job that has other collectives than all-reduces: a root is named in a byte.
const ROOTS_MAX: u32 = 1 + u8::MAX as u32;
/// How often is looked whether somebody still wants to join.
const LOOK: Duration = Duration::from_millis(50);

/// The ranks of one machine, of which this process is one.
#[derive(Debug)]
pub struct LocalRanks {
    /// Of each rank of the job its machine, numbered in the order of their first ranks.
    machines: Vec<usize>,
    rank: u32,
    name: String,
    /// The first rank's; and only where there are others, or other machines have several.
    memory: Option<SharedMemory>,
}

impl LocalRanks {
    /// The ranks of `machines`, which has the machine of each rank of the job, numbered in the order of their first ranks. The first rank of a machine makes the
    /// memory of its ranks, which find it by `name`.
    ///
    /// # Errors
    /// When the memory cannot be made. No rank of the job may use its own then.
    ///
    /// # Panics
    /// When the machines do not have `rank`.
    pub fn new(machines: Vec<usize>, rank: u32, name: String) -> Result<Self, MemoryError> {
        let mut ranks = Self { machines, rank, name, memory: None };
        let group = ranks.group();
        if group.ranks[0] == rank {
            ranks.memory = Some(SharedMemory::create(&ranks.file(), group)?);
        }
        Ok(ranks)
    }

    fn machine(&self) -> usize {
        self.machines[self.rank as usize]
    }

    fn of_machine(&self, machine: usize) -> Vec<u32> {
        (0u32..).zip(&self.machines).filter(|(_, of)| **of == machine).map(|(rank, _)| rank).collect()
    }

    fn count(&self) -> usize {
        self.machines.iter().max().map_or(0, |last| last + 1)
    }

    fn group(&self) -> Group {
        let columns = (0..self.count()).map(|machine| self.of_machine(machine).len()).min();
        Group {
            ranks: self.of_machine(self.machine()),
            columns: columns.unwrap_or_default(),
            networked: self.count() > 1,
        }
    }

    /// Two machines of one computer have memories of their own.
    fn file(&self) -> String {
        format!("{}-{}", self.name, self.machine())
    }

    /// Opens the memory, and waits for the others of the machine.
    fn gather(&mut self, patience: Duration, cancel: &Cancel) -> Result<SharedMemory, SessionError> {
        let began = Instant::now();
        let group = self.group();
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => {
                let me = group.ranks.iter().position(|rank| *rank == self.rank).unwrap_or_default();
                // The first rank has told that it is there; and may have gone again.
                loop {
                    let left = patience.saturating_sub(began.elapsed());
                    match SharedMemory::open(&self.file(), group.clone(), me, LOOK.min(left)) {
                        Err(MemoryError::Unreachable { cause, .. })
                            if cause.kind() == ErrorKind::NotFound && !left.is_zero() =>
                        {
                            cancel.cause().map_or(Ok(()), Err)?;
                        }
                        opened => break opened.map_err(no_memory)?,
                    }
                }
            }
        };
        loop {
            match memory.gather(LOOK.min(patience.saturating_sub(began.elapsed()))) {
                Err(MemoryError::Incomplete { .. }) if began.elapsed() < patience => {
                    cancel.cause().map_or(Ok(()), Err)?;
                }
                gathered => return gathered.map(|()| memory).map_err(no_memory),
            }
        }
    }
}

/// Waits until all columns of the machine have joined the job over machines, and tells what the first one found there; or why this rank's own
/// `failed` meanwhile. None takes part before: where one cannot join, all ranks join once more.
fn hear(
    memory: &SharedMemory,
    failed: impl Fn() -> Option<SessionError>,
    cancel: &Cancel,
) -> Result<bool, SessionError> {
    loop {
        // Each column has a limit of its own.
        if let Some(told) = memory.told(LOOK).map_err(no_memory)? {
            return Ok(told);
        }
        cancel.cause().or_else(&failed).map_or(Ok(()), Err)?;
    }
}

fn no_memory(error: MemoryError) -> SessionError {
    match error {
        MemoryError::Lost { rank } => SessionError::RankLost { rank: Rank(rank as u16) },
        error => {
            SessionError::Local { what: "sharing memory with this machine's ranks", cause: error.to_string() }
        }
    }
}

/// A rank of a running job. Dropping it leaves the job.
///
/// Its methods block and must not be called from an asynchronous task; they may be called from several threads.
#[derive(Debug)]
pub struct Job {
    local: Option<Local>,
    /// `None` where this rank speaks to no other machine, and once it is closed.
    session: Option<Arc<Session>>,
    rank: u32,
    switch: String,
}

#[derive(Debug)]
struct Local {
    sum: Arc<LocalSum>,
    /// Number of the next collective. Held while one is submitted.
    next: Mutex<u64>,
    /// All-reduces that came out well, and other collectives.
    completed: [Arc<AtomicU64>; 2],
    has_roots: bool,
    wire_dtype: WireDtype,
    column: Column,
    /// This machine's ranks.
    here: Vec<u32>,
    /// In as many parts each tensor goes on.
    columns: usize,
}

/// The ranks that sum one part of all tensors, one a machine: a job of its own to the services.
#[derive(Clone, Debug)]
struct Column(Arc<[u32]>);

impl Job {
    /// Joins the job, with the ranks of the machine where they sum by themselves. Returns when every rank has, until `cancel` is called.
    ///
    /// # Errors
    /// As [`Session::connect_unless`].
    pub fn connect_unless(
        config: SessionConfig,
        local: Option<LocalRanks>,
        cancel: &Cancel,
    ) -> Result<Self, SessionError> {
        let rank = config.rank;
        let Some(mut local) = local else {
            let session = Session::connect_unless(config, cancel)?;
            let switch = session.switch().to_owned();
            return Ok(Self { local: None, session: Some(Arc::new(session)), rank, switch });
        };
        let (group, machine, machines) = (local.group(), local.machine(), local.count());
        let memory = local.gather(config.join_timeout, cancel)?;
        let me = group.ranks.iter().position(|rank| *rank == config.rank).unwrap_or_default();
        let of_machine = |machine| local.of_machine(machine).get(me).copied();
        let column = Column((0..machines).filter_map(of_machine).collect());
        let (world_size, timeout, wire_dtype) = (config.world_size, config.timeout, config.travels_as());
        let session = if group.networked && me < group.columns {
            let config = SessionConfig { ranks_here: group.ranks.clone(), ..config };
            let config = SessionConfig { called: column.0.to_vec(), ..config };
            let config = of_column(config, me, group.columns, machine, &local.machines);
            let session = Session::connect_unless(config, cancel).map_err(|error| column.name(error))?;
            Some(Arc::new(session))
        } else {
            None
        };
        if let Some(session) = &session {
            memory.tell(session.has_roots());
        }
        // Alike on all machines: all have the same services.
        let failed = || Some(column.name(session.as_ref()?.failure()?));
        let has_roots = !group.networked || hear(&memory, failed, cancel)?;
        let network = session
            .clone()
            .map(|session| Box::new(Machines { session, column: column.clone() }) as Box<dyn Network>);
        let machines = std::mem::take(&mut local.machines);
        let sum = LocalSum::start(LocalConfig { memory, network, machines, timeout })
            .map_err(|error| SessionError::Local { what: "starting a thread", cause: error.to_string() })?;
        let sum = Arc::new(sum);
        if let Some(session) = &session {
            tell_of_failure(session, &column, &sum);
        }
        let switch =
            session.as_ref().map_or_else(|| SHARED_MEMORY.into(), |session| session.switch().to_owned());
        let local = Local {
            sum,
            next: Mutex::default(),
            completed: Default::default(),
            has_roots: has_roots && world_size <= ROOTS_MAX,
            wire_dtype,
            column,
            here: group.ranks,
            columns: group.columns.max(1),
        };
        Ok(Self { local: Some(local), session, rank, switch })
    }

    /// As [`Session::submit`].
    ///
    /// # Errors
    /// As [`Session::submit`].
    pub fn submit(
        &self,
        submission: Submission,
        done: impl FnOnce(Result<(), AllReduceError>, HandOver) + Send + 'static,
    ) -> Result<Tensor, SessionError> {
        let Some(local) = &self.local else {
            return self.session.as_ref().ok_or(SessionError::Closed)?.submit(submission, done);
        };
        let submitted = Instant::now();
        let mut next = local.next.lock().unwrap_or_else(PoisonError::into_inner);
        let name = Tensor::of(&submission, *next);
        *next += 1;
        let (switch, wire_dtype) = (self.switch.clone(), local.wire_dtype);
        let completed = Arc::clone(&local.completed[usize::from(name.kind != CollectiveKind::AllReduce)]);
        let done = move |result: Result<(), Failure>| {
            completed.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
            let result = result.map_err(|failure| AllReduceError {
                cause: cause(&failure, wire_dtype, name, &switch),
                tensor: name,
                switch,
                waited: submitted.elapsed(),
            });
            done(result, HandOver::default());
        };
        local.sum.submit(submission, Box::new(done));
        Ok(name)
    }

    /// Whether it has other collectives than all-reduces: those of SwitchML have, but for racks. Alike on all ranks.
    #[must_use]
    pub fn has_roots(&self) -> bool {
        match &self.local {
            Some(local) => local.has_roots,
            None => self.session.as_ref().is_some_and(|session| session.has_roots()),
        }
    }

    /// How many ranks of each machine speak for it: 1 where they do not sum among themselves. Alike on all ranks.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.local.as_ref().map_or(1, |local| local.columns)
    }

    /// Changes [`SessionConfig::timeout`], for what is under way too.
    pub fn set_timeout(&self, timeout: Duration) {
        if let Some(session) = &self.session {
            session.set_timeout(timeout);
        }
        if let Some(local) = &self.local {
            local.sum.set_timeout(timeout);
        }
    }

    /// All-reduces that are not done.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        match (&self.local, &self.session) {
            (Some(local), _) => local.sum.outstanding(),
            (None, session) => session.as_ref().map_or(0, |session| session.outstanding()),
        }
    }

    /// Why the job ended for this rank, if it did: what every all-reduce since fails with.
    #[must_use]
    pub fn failure(&self) -> Option<SessionError> {
        let of_session = || self.session.as_ref()?.failure();
        let Some(local) = &self.local else { return of_session() };
        if local.sum.failure().is_none()
            && let Some(error) = of_session()
        {
            local.sum.fail(local.column.failure(error));
        }
        let none = Tensor {
            kind: CollectiveKind::AllReduce,
            number: 0,
            elements: 0,
            dtype: fanin_wire::Dtype::Float32,
            op: Op::Sum,
        };
        local.sum.failure().map(|failure| cause(&failure, local.wire_dtype, none, &self.switch))
    }

    /// Ranks that have left, as far as this one has heard: those of its machine, and those that speak to the services it speaks to. Nothing
    /// has to wait for them here.
    #[must_use]
    pub fn left(&self) -> Ranks {
        let of_session = self.session.as_ref().map(|session| session.left()).unwrap_or_default();
        let Some(local) = &self.local else { return of_session };
        let mut left = ranks(local.sum.left());
        left.extend(local.column.ranks(&of_session).iter());
        left
    }

    /// Ranks of this machine that an all-reduce of this rank waits for; `None` where services know it.
    #[must_use]
    pub fn awaited(&self) -> Option<Ranks> {
        let local = self.local.as_ref()?;
        let awaited = ranks(local.sum.awaited());
        (self.session.is_none() || !awaited.is_empty()).then_some(awaited)
    }

    /// Counters of the data path over machines; `completed` are this job's all-reduces.
    #[must_use]
    pub fn statistics(&self) -> WorkerStatistics {
        let over_machines = self.session.as_ref().map(|session| session.statistics()).unwrap_or_default();
        let Some(local) = &self.local else { return over_machines };
        WorkerStatistics { completed: local.completed[0].load(Ordering::Relaxed), ..over_machines }
    }

    /// Collectives other than all-reduces that came out well.
    #[must_use]
    pub fn others_completed(&self) -> u64 {
        let of_session = || self.session.as_ref().map(|session| session.others_completed());
        let of_local = self.local.as_ref().map(|local| local.completed[1].load(Ordering::Relaxed));
        of_local.or_else(of_session).unwrap_or_default()
    }

    /// Trains and system calls of the data path over machines.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.session.as_ref().map(|session| session.io_statistics()).unwrap_or_default()
    }

    /// Leaves the job. What is outstanding fails with [`SessionError::Closed`]; when this returns no tensor is touched.
    pub fn close(&mut self) {
        // First, as its thread holds the session, too.
        if let Some(local) = &self.local {
            local.sum.stop();
            if self.session.is_some() && local.has_lost_a_neighbour() {
                // Of that one the other machines are to hear, and not that this rank left: it knew first.
                std::thread::sleep(NOTICED);
            }
        }
        if let Some(mut session) = self.session.take().and_then(Arc::into_inner) {
            session.close();
        }
    }

    /// As [`Session::split`], for the whole job. `None` where this rank speaks to no other machine.
    #[must_use]
    pub fn split(&self) -> Option<Split> {
        let mut split = self.session.as_ref()?.split()?;
        if let (Some(local), Some(prediction)) = (&self.local, &mut split.prediction) {
            prediction.seconds_per_byte /= local.columns as f64;
        }
        Some(split)
    }

    /// As [`Session::seconds_per_byte`], for the whole job.
    #[must_use]
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let of_column = self.session.as_ref()?.seconds_per_byte()?;
        Some(of_column / self.local.as_ref().map_or(1.0, |local| local.columns as f64))
    }

    /// As [`Session::imbalance`].
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        self.session.as_ref().map_or(0.0, |session| session.imbalance())
    }

    /// This process's rank.
    #[must_use]
    pub const fn rank(&self) -> u32 {
        self.rank
    }
}

impl Local {
    fn has_lost_a_neighbour(&self) -> bool {
        let Some(Failure::Because(cause)) = self.sum.failure() else { return false };
        matches!(cause.downcast_ref(), Some(LocalError::Lost { rank }) if self.here.contains(rank))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.close();
    }
}

/// What a column's rank is told: the machines are its ranks, and the columns of a machine share its link.
fn of_column(
    config: SessionConfig,
    column: usize,
    columns: usize,
    machine: usize,
    of_rank: &[usize],
) -> SessionConfig {
    let machines = of_rank.iter().max().map_or(0, |last| last + 1);
    let mut config = SessionConfig { rank: machine as u32, world_size: machines as u32, ..config };
    if columns > 1 {
        config.job = format!("{}.{column}", config.job);
    }
    for service in &mut config.services {
        service.home = service.home.and_then(|rank| {
            let machine = of_rank.get(usize::from(rank.0)).copied();
            machine.map(|machine| Rank(machine as u16))
        });
        service.rate_bps = service.rate_bps.map(|rate| (rate / columns as u64).max(1));
    }
    if let Some(prediction) = &mut config.prediction {
        prediction.seconds_per_byte *= columns as f64;
    }
    config
}

/// Ends the machine's sums with the column, also while none of them needs it: the other columns would only hear later that ranks left, which
/// did so because they knew more.
fn tell_of_failure(session: &Session, column: &Column, sum: &Arc<LocalSum>) {
    // The session's threads keep nothing of the job alive.
    let (column, sum) = (column.clone(), Arc::downgrade(sum));
    session.on_failure(move |error| {
        // Who is done leaves, and takes its service along; what is under way here may need neither.
        let may_be_the_end = matches!(error, SessionError::RankLeft { .. } | SessionError::SwitchLost { .. });
        if let Some(sum) = sum.upgrade().filter(|_| !may_be_the_end) {
            sum.fail(column.failure(error));
        }
    });
}

/// The collectives of a column over the machines.
struct Machines {
    session: Arc<Session>,
    column: Column,
}

impl Network for Machines {
    fn submit(&self, submission: Submission, done: Done) {
        let column = self.column.clone();
        let done = move |result: Result<(), AllReduceError>, _: HandOver| {
            done(result.map_err(|error| column.failure(error.cause)));
        };
        // It is closed after the thread that submits.
        let _ = self.session.submit(submission, done);
    }
}

impl Column {
    fn of(&self, machine: Rank) -> Rank {
        // A machine that is none of the job's keeps its number: the services made it up.
        self.0.get(usize::from(machine.0)).map_or(machine, |rank| Rank(*rank as u16))
    }

    fn ranks(&self, machines: &Ranks) -> Ranks {
        ranks(machines.iter().map(|machine| self.of(machine).0.into()))
    }

    /// The error, with ranks of the job in place of machines.
    fn name(&self, error: SessionError) -> SessionError {
        match error {
            SessionError::RankLost { rank } => SessionError::RankLost { rank: self.of(rank) },
            SessionError::RankLeft { rank } => SessionError::RankLeft { rank: self.of(rank) },
            SessionError::Expelled { rank, switch, silence } => {
                SessionError::Expelled { rank: self.of(rank), switch, silence }
            }
            SessionError::CollectiveMismatch { first, second } => SessionError::CollectiveMismatch {
                first: (self.of(first.0), first.1),
                second: (self.of(second.0), second.1),
            },
            SessionError::LossBoundMismatch { first, second } => SessionError::LossBoundMismatch {
                first: (self.of(first.0), first.1),
                second: (self.of(second.0), second.1),
            },
            SessionError::JoinTimeout { switch, job, missing_ranks, gone, waited } => {
                let (missing_ranks, gone) = (self.ranks(&missing_ranks), self.ranks(&gone));
                SessionError::JoinTimeout { switch, job, missing_ranks, gone, waited }
            }
            SessionError::AllReduceTimeout { missing_ranks, waited, switch, tensor } => {
                SessionError::AllReduceTimeout {
                    missing_ranks: self.ranks(&missing_ranks),
                    waited,
                    switch,
                    tensor,
                }
            }
            other => other,
        }
    }

    /// What the machine's ranks are told: of a rank that is gone all learn which.
    fn failure(&self, error: SessionError) -> Failure {
        match self.name(error) {
            SessionError::RankLost { rank } => {
                Failure::Because(Arc::new(LocalError::Lost { rank: rank.0.into() }))
            }
            SessionError::RankLeft { rank } => {
                Failure::Because(Arc::new(LocalError::Left { rank: rank.0.into() }))
            }
            error => Failure::Because(Arc::new(error)),
        }
    }
}

/// Those that a set of ranks can hold.
fn ranks(ranks: impl IntoIterator<Item = u32>) -> Ranks {
    ranks.into_iter().filter(|rank| *rank < RANKS_MAX).map(|rank| Rank(rank as u16)).collect()
}

/// What a failure of the ranks of a machine is to `tensor`.
fn cause(failure: &Failure, wire_dtype: WireDtype, tensor: Tensor, switch: &str) -> SessionError {
    let Failure::Because(cause) = failure else { return SessionError::Closed };
    if let Some(error) = cause.downcast_ref::<SessionError>() {
        return error.clone();
    }
    let rank = |rank: u32| Rank(rank as u16);
    match cause.downcast_ref::<LocalError>() {
        Some(LocalError::Lost { rank: lost }) => SessionError::RankLost { rank: rank(*lost) },
        Some(LocalError::Left { rank: left }) => SessionError::RankLeft { rank: rank(*left) },
        Some(LocalError::Mismatch { first, second }) => {
            let side = |(of, submission): &(u32, fanin_local::Submission)| {
                let fanin_local::Submission { number, kind, root, elements, dtype, op } = *submission;
                // As over machines: of slices the first is told of.
                let (pattern, wire_dtype) = match kind {
                    CollectiveKind::Broadcast | CollectiveKind::AllGather => {
                        (Pattern::Broadcast(WorkerId(root)), WireDtype::Native)
                    }
                    CollectiveKind::Reduce | CollectiveKind::ReduceScatter => {
                        (Pattern::Reduce(WorkerId(root)), wire_dtype.of_tensor(dtype, elements))
                    }
                    CollectiveKind::AllReduce => (Pattern::AllReduce, wire_dtype.of_tensor(dtype, elements)),
                };
                let elements = u32::try_from(elements).unwrap_or(u32::MAX);
                let sequence = number as u16;
                (rank(*of), Collective { sequence, dtype, op, pattern, elements, wire_dtype })
            };
            SessionError::CollectiveMismatch { first: side(first), second: side(second) }
        }
        Some(LocalError::Timeout { missing, waited }) => SessionError::AllReduceTimeout {
            missing_ranks: ranks(missing.iter().copied()),
            waited: *waited,
            switch: switch.into(),
            tensor,
        },
        Some(LocalError::Forked) => SessionError::Closed,
        Some(LocalError::Ended { .. }) | None => {
            SessionError::Local { what: "summing with this machine's ranks", cause: cause.to_string() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_whose_first_neighbour_has_gone_again_looks_for_its_memory_until_it_is_cancelled() {
        let name = format!("fanin-gone-{}", std::process::id());
        let mut ranks = LocalRanks::new(vec![0, 0], 1, name).expect("no memory of its own");
        let cancel = Cancel::default();
        cancel.cancel();
        let gathered = ranks.gather(Duration::from_secs(5), &cancel).map(drop);
        assert_eq!(gathered, Err(SessionError::Closed));
        let gathered = ranks.gather(Duration::from_millis(100), &Cancel::default()).map(drop);
        assert!(matches!(gathered, Err(SessionError::Local { .. })), "{gathered:?}");
    }
}
