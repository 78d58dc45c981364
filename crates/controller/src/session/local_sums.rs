//! A rank's sums with the ranks of its machine in shared memory, and what their failures are
//! called.

use std::sync::Arc;
use std::time::Instant;

use fanin_local::{Completed, Done, LocalConfig, LocalError, LocalSum, Network};
use fanin_protocol::control::Ranks;
use fanin_udp::{CollectiveKind, Failure, Submission};
use fanin_wire::{Collective, Dtype, LossBound, Op, RANKS_MAX, Rank, WireDtype, WorkerId};

use super::cancel::Cancel;
use super::config::SessionConfig;
use super::local_page::LocalPage;
use super::local_ranks::{LocalRanks, hear};
use super::services::Services;
use super::shared::Shared;
use super::trace::{HandOver, SessionTrace, TracedAs};
use crate::error::{AllReduceError, SessionError, Tensor};

/// Most ranks of a job that has other collectives than all-reduces: a root is named in a byte.
const ROOTS_MAX: u32 = 1 + u8::MAX as u32;

/// Most ranks of a job of which a part can sum alone: a set has a bit for each.
const PARTICIPANTS_MAX: u32 = u128::BITS;

/// The first rank of a machine tells the others these bits of the job over machines.
const HAS_ROOTS: u32 = 1;
const HAS_PARTICIPANTS: u32 = 2;
const ENCRYPTS: u32 = 4;

/// A rank's sums with its machine's.
pub(super) struct LocalSums {
    pub sum: Arc<LocalSum>,
    pub trace: Option<SessionTrace>,
    pub has_roots: bool,
    pub has_participants: bool,
    pub encrypts: bool,
    wire_dtype: WireDtype,
    /// How much of a tensor without a bound of its own may be lost.
    loss_bound: LossBound,
    /// This machine's ranks.
    here: Vec<u32>,
    /// The machine of each rank of the job.
    pub machines: Vec<usize>,
    /// In as many parts each tensor goes on.
    pub columns: usize,
    /// Rank 0's, where no service knows the job.
    page: Option<LocalPage>,
}

impl LocalSums {
    /// Joins the ranks of the machine, and the services if this one is a column.
    pub fn join(
        config: SessionConfig,
        mut ranks: LocalRanks,
        cancel: &Cancel,
    ) -> Result<(Self, Option<Arc<Services>>), SessionError> {
        let trace =
            config.trace.as_ref().map(|trace| trace.open(&config.job, TracedAs::Ranks)).transpose()?;
        let group = ranks.group();
        let memory = ranks.gather(config.join_timeout, cancel)?;
        let page = if group.networked { None } else { LocalPage::start(&config) };
        let (world_size, timeout, wire_dtype) = (config.world_size, config.timeout, config.travels_as());
        let loss_bound = config.agreed.loss_bound;
        let services = ranks.column(config).map(|config| Services::join(config, cancel)).transpose()?;
        let services = services.map(Arc::new);
        if let Some(services) = &services {
            let shared = &services.shared;
            let found = [
                (shared.has_roots(), HAS_ROOTS),
                (shared.has_participants(), HAS_PARTICIPANTS),
                (shared.encrypts(), ENCRYPTS),
            ];
            memory.tell(found.into_iter().filter(|(is_so, _)| *is_so).map(|(_, bit)| bit).sum());
        }
        // Alike on all machines: all have the same services.
        let failed = || services.as_ref()?.shared.failure();
        let told = if group.networked { hear(&memory, failed, cancel)? } else { HAS_ROOTS };
        let network = |services: &Arc<Services>| Box::new(Column(Arc::clone(services))) as Box<dyn Network>;
        let network = services.as_ref().map(network);
        let machines = ranks.machines.clone();
        let sum = LocalSum::start(LocalConfig { memory, network, machines: ranks.machines, timeout })
            .map_err(|error| SessionError::Local { what: "starting a thread", cause: error.to_string() })?;
        let sum = Arc::new(sum);
        if let Some(services) = &services {
            tell_of_failure(&services.shared, &sum);
        }
        let has_roots = told & HAS_ROOTS != 0 && world_size <= ROOTS_MAX;
        let has_participants = told & HAS_PARTICIPANTS != 0 && world_size <= PARTICIPANTS_MAX;
        let encrypts = told & ENCRYPTS != 0;
        let columns = group.columns.max(1);
        let here = group.ranks;
        let local = Self {
            sum,
            trace,
            has_roots,
            has_participants,
            encrypts,
            wire_dtype,
            loss_bound,
            here,
            machines,
            columns,
            page,
        };
        Ok((local, services))
    }

    /// As [`super::Session::submit`].
    pub fn submit(
        &self,
        submission: Submission,
        switch: &str,
        done: impl FnOnce(Result<(), AllReduceError>, HandOver) + Send + 'static,
    ) -> Tensor {
        let (submitted, unnumbered) = (Instant::now(), Tensor::of(&submission, 0));
        let (switch, wire_dtype) = (switch.to_owned(), self.wire_dtype);
        // As far as they may lose something, ranks compare what they let be lost.
        let bound = submission.loss_bound().unwrap_or(self.loss_bound);
        let bound = (self.loss_bound != LossBound::RELIABLE).then_some(bound);
        let submission = submission.losing(bound);
        let trace = self.trace.clone();
        let noted = self.page.as_ref().map(|LocalPage { pending, .. }| {
            (Arc::clone(pending), pending.insert(&submission, submitted).number)
        });
        let done = move |number, result: Result<Completed, Failure>| {
            let tensor = Tensor { number, ..unnumbered };
            if let Some((pending, noted)) = noted {
                pending.remove(noted, Instant::now(), None);
            }
            let result = result.map_err(|failure| AllReduceError {
                cause: error_of(&failure, wire_dtype, tensor, &switch),
                tensor,
                switch,
                waited: submitted.elapsed(),
            });
            let hand_over = match trace {
                Some(trace) => trace.done_here(tensor, submitted, &result),
                None => HandOver::losing(result.as_ref().map(|done| done.loss).unwrap_or_default()),
            };
            done(result.map(drop), hand_over);
        };
        let number = self.sum.submit(submission, Box::new(done));
        Tensor { number, ..unnumbered }
    }

    /// Why the sums ended, if they did, or the services did.
    pub fn failure(
        &self,
        of_services: impl FnOnce() -> Option<SessionError>,
        switch: &str,
    ) -> Option<SessionError> {
        if self.sum.failure().is_none()
            && let Some(error) = of_services()
        {
            self.sum.fail(failure_of(error));
        }
        let (kind, dtype) = (CollectiveKind::AllReduce, Dtype::Float32);
        let none = Tensor { kind, number: 0, elements: 0, dtype, op: Op::Sum };
        self.sum.failure().map(|failure| error_of(&failure, self.wire_dtype, none, switch))
    }

    /// Whether a rank of this machine died.
    pub fn has_lost_a_neighbour(&self) -> bool {
        let Some(Failure::Because(cause)) = self.sum.failure() else { return false };
        matches!(cause.downcast_ref(), Some(LocalError::Lost { rank }) if self.here.contains(rank))
    }
}

/// Ends the machine's sums with the column, also while none of them needs it: the other columns
/// would only hear later that ranks left, which did so because they knew more.
fn tell_of_failure(shared: &Shared, sum: &Arc<LocalSum>) {
    // The session's threads keep nothing of the job alive.
    let sum = Arc::downgrade(sum);
    shared.on_failure(Box::new(move |error| {
        // Who is done leaves, and takes its service along; what is under way here may need neither.
        let may_be_the_end = matches!(error, SessionError::RankLeft { .. } | SessionError::SwitchLost { .. });
        if let Some(sum) = sum.upgrade().filter(|_| !may_be_the_end) {
            sum.fail(failure_of(error));
        }
    }));
}

/// The collectives of a column over the machines. It holds the services until the rank's thread has
/// failed everything that is outstanding and left the machine's ranks.
struct Column(Arc<Services>);

impl Network for Column {
    fn submit(&self, submission: Submission, done: Done) {
        let done = |result: Result<(), AllReduceError>, told: HandOver| {
            done(result.map(|()| told.loss).map_err(|error| failure_of(error.cause)));
        };
        self.0.shared.submit(submission, done);
    }
}

/// What the machine's ranks are told of an error over machines: of a rank that is gone all learn
/// which.
fn failure_of(error: SessionError) -> Failure {
    match error {
        SessionError::RankLost { rank } => {
            Failure::Because(Arc::new(LocalError::Lost { rank: rank.0.into() }))
        }
        SessionError::RankLeft { rank } => {
            Failure::Because(Arc::new(LocalError::Left { rank: rank.0.into() }))
        }
        error => Failure::Because(Arc::new(error)),
    }
}

/// Those that a set of ranks can hold.
pub(super) fn ranks(ranks: impl IntoIterator<Item = u32>) -> Ranks {
    ranks.into_iter().filter(|rank| *rank < RANKS_MAX).map(|rank| Rank(rank as u16)).collect()
}

/// What a failure of the ranks of a machine is to `tensor`.
fn error_of(failure: &Failure, wire_dtype: WireDtype, tensor: Tensor, switch: &str) -> SessionError {
    let Failure::Because(cause) = failure else { return SessionError::Closed };
    if let Some(error) = cause.downcast_ref::<SessionError>() {
        return error.clone();
    }
    let rank = |rank: u32| Rank(rank as u16);
    match cause.downcast_ref::<LocalError>() {
        Some(LocalError::Lost { rank: lost }) => SessionError::RankLost { rank: rank(*lost) },
        Some(LocalError::Left { rank: left }) => SessionError::RankLeft { rank: rank(*left) },
        Some(LocalError::Mismatch { first: (first, allowed), second: (second, other) })
            if fanin_local::Submission { loss_bound: other.loss_bound, ..*allowed } == *other =>
        {
            SessionError::LossBoundMismatch {
                first: (rank(*first), allowed.loss_bound),
                second: (rank(*second), other.loss_bound),
            }
        }
        Some(LocalError::Mismatch { first: (first, ours), second: (second, theirs) })
            if fanin_local::Submission { participants: theirs.participants, ..*ours } == *theirs =>
        {
            SessionError::ParticipantsMismatch { first: rank(*first), second: rank(*second) }
        }
        Some(LocalError::Mismatch { first, second }) => {
            let side = |(of, submission): &(u32, fanin_local::Submission)| {
                let fanin_local::Submission { number, kind, root, elements, dtype, op, .. } = *submission;
                // As over machines: of slices the first is told of.
                let pattern = kind.pattern(WorkerId(root));
                let wire_dtype =
                    if kind.adds() { wire_dtype.of_tensor(dtype, elements) } else { WireDtype::Native };
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
