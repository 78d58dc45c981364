//! What can go wrong for a worker, as one value that names cause and cure. The Python exceptions
//! mirror it.

use std::time::Duration;

use fanin_protocol::control::{Ranks, Refusal};
use fanin_udp::{CollectiveKind, Failure, Submission};
use fanin_wire::{AbortReason, Collective, Dtype, LossBound, Op, Rank};

/// Why a session could not be, or ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The switch's address is not one.
    #[error("switch address {switch:?} is no host:port ({cause}); give it like 10.0.0.9:4800")]
    Address {
        /// As it was given.
        switch: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Nobody answered at the switch's address.
    #[error(
        "switch {switch} did not answer within {} ({cause}); is it running (fanin switch) and is UDP+TCP {port} open?",
        seconds(*waited)
    )]
    SwitchUnreachable {
        /// Host and port.
        switch: String,
        /// Its port.
        port: u16,
        /// How long it was tried.
        waited: Duration,
        /// The last thing that went wrong.
        cause: String,
    },
    /// Something answered that is no switch.
    #[error("{switch} answered, but it is not a fanin switch ({cause}); check host and port")]
    NotASwitch {
        /// Host and port.
        switch: String,
        /// What was unexpected.
        cause: String,
    },
    /// Who answered cannot show that it is the switch, or this process not that it may take part.
    #[error("{switch} is not trusted: {cause}")]
    Untrusted {
        /// Host and port.
        switch: String,
        /// What is wrong, and what to do.
        cause: String,
    },
    /// Switch and worker speak different versions.
    #[error("switch {switch} speaks {}; install the same version of fanin on both", other_version(*ours, *theirs))]
    ProtocolVersionMismatch {
        /// Host and port.
        switch: String,
        /// This process's wire version.
        ours: u32,
        /// The switch's.
        theirs: u32,
    },
    /// The switch did not admit the rank.
    #[error("switch {switch} refused job {job:?}: {reason}")]
    JoinRefused {
        /// Host and port.
        switch: String,
        /// The job.
        job: String,
        /// Why.
        reason: Refusal,
    },
    /// A switch on the way to the server could not ask on.
    #[error("job {job:?} cannot be joined: {error}")]
    Chain {
        /// The job.
        job: String,
        /// What the switch said.
        error: ChainError,
    },
    /// An ATP switch could not ask its server.
    #[error("switch {switch} has no answer: {cause}")]
    NoAnswer {
        /// Host and port.
        switch: String,
        /// What the switch said: who, why, and what to do.
        cause: String,
    },
    /// Other ranks did not join in time.
    #[error(
        "job {job:?} at switch {switch} is incomplete after {}: {}; running, with the same job name and switch?",
        seconds(*waited), absent(missing_ranks, gone, "join")
    )]
    JoinTimeout {
        /// Host and port.
        switch: String,
        /// The job.
        job: String,
        /// Ranks that are not there.
        missing_ranks: Ranks,
        /// Those of them that were there and went away.
        gone: Ranks,
        /// How long was waited.
        waited: Duration,
    },
    /// Two ranks call different collectives at the same place of the stream.
    #[error(
        "ranks {} and {} disagree: rank {} calls {}, rank {} calls {}; every rank must call the same collectives on the same \
         tensors in the same order",
        first.0.0, second.0.0, first.0.0, first.1, second.0.0, second.1
    )]
    CollectiveMismatch {
        /// The rank that came first, and its tensor.
        first: (Rank, Collective),
        /// The rank that disagreed, and its tensor.
        second: (Rank, Collective),
    },
    /// Two ranks allow for unlike losses of one tensor (DLCP).
    #[error(
        "rank {} lets {} of a tensor be lost, rank {} {}; give all ranks, and each of their tensors, the same loss bound",
        first.0.0, first.1, second.0.0, second.1
    )]
    LossBoundMismatch {
        /// The rank that came first, and its bound.
        first: (Rank, LossBound),
        /// The rank that disagreed, and its bound.
        second: (Rank, LossBound),
    },
    /// Two ranks have unlike sets of participants for one tensor (GOAT).
    #[error(
        "ranks {} and {} disagree about who takes part in a sum; give all ranks the same participants",
        first.0, second.0
    )]
    ParticipantsMismatch {
        /// The rank that came first.
        first: Rank,
        /// The rank that disagreed.
        second: Rank,
    },
    /// A rank is gone.
    #[error("rank {} is lost: the switch no longer hears from it; look at that rank's log", rank.0)]
    RankLost {
        /// The rank.
        rank: Rank,
    },
    /// This process's own rank was expelled.
    #[error(
        "this rank ({}) was expelled: switch {switch} did not hear from it for {} (suspended, swapping or cut off?)",
        rank.0, seconds(*silence)
    )]
    Expelled {
        /// The rank.
        rank: Rank,
        /// Host and port.
        switch: String,
        /// The silence that the switch allows.
        silence: Duration,
    },
    /// A rank left while others still needed it.
    #[error(
        "rank {} left the job while other ranks still wait for it; every rank must take part in every collective",
        rank.0
    )]
    RankLeft {
        /// The rank.
        rank: Rank,
    },
    /// The switch is gone, or came back without all ranks.
    #[error("switch {switch} was lost: {cause}; start it again (fanin switch) and the job anew")]
    SwitchLost {
        /// Host and port.
        switch: String,
        /// How that was found.
        cause: String,
    },
    /// A collective did not complete in time: an all-reduce, or what `tensor` says.
    #[error(
        "{tensor} over switch {switch} did not complete within {}: {}",
        seconds(*waited), blamed(missing_ranks)
    )]
    AllReduceTimeout {
        /// Ranks whose contributions the switch waits for; empty when it waits for none, or could
        /// not say.
        missing_ranks: Ranks,
        /// How long was waited.
        waited: Duration,
        /// Host and port.
        switch: String,
        /// The one that took too long.
        tensor: Tensor,
    },
    /// This machine would not give what a session needs.
    #[error("{what} failed on this machine: {cause}")]
    Local {
        /// What was tried.
        what: &'static str,
        /// The operating system's answer.
        cause: String,
    },
    /// The session was closed.
    #[error("the session is closed; connect again")]
    Closed,
}

/// Why a switch with an upstream could not pass a rank's question on. Addresses are as that switch
/// sees them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// Its upstream does not answer.
    #[error(
        "the upstream {upstream} of switch {switch} leads to no root ({cause}); does fanin switch run there, with the same --protocol, \
         and is its UDP+TCP port open?"
    )]
    UpstreamUnreachable {
        /// The switch.
        switch: String,
        /// Whom it asked.
        upstream: String,
        /// What went wrong.
        cause: String,
        /// Whether nobody answers there: somebody may yet.
        may_come: bool,
    },
    /// Its own question came back to it.
    #[error(
        "switch {switch} is its own upstream, by way of others; start the switches with --upstream towards the server (fanin \
         server)"
    )]
    Loop {
        /// The switch.
        switch: String,
    },
    /// The answer does not fit what it knows of the job.
    #[error(
        "switch {switch} and its upstream {upstream} disagree about the job ({cause}); start the job again, and the same fanin \
         on every switch and on the server"
    )]
    RouteMismatch {
        /// The switch.
        switch: String,
        /// Who answered.
        upstream: String,
        /// What does not fit.
        cause: String,
    },
}

/// Which all-reduce of a job, or other collective, an error is about: every rank calls the same one
/// by the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// What it is.
    pub kind: CollectiveKind,
    /// Its number among the job's collectives, from 0; empty tensors count.
    pub number: u64,
    /// Elements of the tensor; of all slices together where it has slices.
    pub elements: usize,
    /// Their type.
    pub dtype: Dtype,
    /// Sum or average; sum where nothing is added.
    pub op: Op,
}

/// Why a job was aborted, for people.
#[must_use]
pub fn why_aborted(reason: &AbortReason) -> String {
    match reason {
        AbortReason::Expelled(rank) => format!("rank {} was lost", rank.0),
        AbortReason::Mismatch { first, second } => {
            format!("ranks {} and {} disagree: {} against {}", first.0.0, second.0.0, first.1, second.1)
        }
        AbortReason::SwitchStopped => "the switch stops".into(),
        AbortReason::Participants { first, second } => {
            format!("ranks {} and {} disagree about who takes part in a sum", first.0, second.0)
        }
        AbortReason::LossBounds { first, second } => {
            format!(
                "ranks {} and {} disagree: loss bounds {} and {}",
                first.0.0, second.0.0, first.1, second.1
            )
        }
    }
}

/// What a switch speaks that this process does not. One of before protocols had names has the same
/// packets.
fn other_version(ours: u32, theirs: u32) -> String {
    match ours == theirs {
        true => format!("another control protocol, of the same wire version {ours}"),
        false => format!("wire version {theirs}, this process {ours}"),
    }
}

impl Tensor {
    pub(crate) const fn of(submission: &Submission, number: u64) -> Self {
        Self {
            kind: submission.kind(),
            number,
            elements: submission.elements(),
            dtype: submission.dtype(),
            op: submission.op(),
        }
    }
}

impl std::fmt::Display for Tensor {
    /// As [`Collective`] does it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.op {
            _ if !self.kind.adds() => {}
            Op::Sum => f.write_str("sum of ")?,
            Op::Average => f.write_str("average of ")?,
        }
        let kind = self.kind.name().replace('_', "-");
        write!(f, "{} {} ({kind} {})", self.elements, self.dtype.name(), self.number)
    }
}

/// How one all-reduce failed: why its session ended, and what that did to this tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.message())]
pub struct AllReduceError {
    /// What happened.
    pub cause: SessionError,
    /// The tensor that was not summed.
    pub tensor: Tensor,
    /// The switch as `host:port`; several with commas between.
    pub switch: String,
    /// Time since the submission.
    pub waited: Duration,
}

impl AllReduceError {
    fn message(&self) -> String {
        match &self.cause {
            // It says all of that itself.
            SessionError::AllReduceTimeout { tensor, .. } if *tensor == self.tensor => self.cause.to_string(),
            cause => format!(
                "{cause}; this ended the {} over switch {} after {}",
                self.tensor,
                self.switch,
                seconds(self.waited)
            ),
        }
    }
}

/// A rank, as far as the wording of its errors depends on it.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The switch as it is named in messages.
    pub switch: String,
    pub rank: Rank,
    /// After so much silence the switch expels it.
    pub heartbeat_timeout: Duration,
}

impl Member {
    /// The switch expelled this rank.
    pub fn expelled(&self) -> SessionError {
        SessionError::Expelled {
            rank: self.rank,
            switch: self.switch.clone(),
            silence: self.heartbeat_timeout,
        }
    }
}

impl SessionError {
    /// What `member` makes of an abort.
    pub(crate) fn from_abort(reason: AbortReason, member: &Member) -> Self {
        match reason {
            AbortReason::Expelled(rank) if rank == member.rank => member.expelled(),
            AbortReason::Expelled(rank) => Self::RankLost { rank },
            AbortReason::Mismatch { first, second } => Self::CollectiveMismatch { first, second },
            AbortReason::LossBounds { first, second } => Self::LossBoundMismatch { first, second },
            AbortReason::Participants { first, second } => Self::ParticipantsMismatch { first, second },
            AbortReason::SwitchStopped => {
                Self::SwitchLost { switch: member.switch.clone(), cause: "it was shut down".into() }
            }
        }
    }

    /// What a rank makes of the driver's failure: it is one of `members`, one a service.
    pub(crate) fn from_failure(failure: &Failure, members: &[Member]) -> Self {
        match failure {
            Failure::Aborted { service, reason } => Self::from_abort(*reason, &members[*service]),
            Failure::Stopped => Self::Closed,
            Failure::Because(cause) => cause
                .downcast_ref::<Self>()
                .cloned()
                .unwrap_or_else(|| Self::Local { what: "the data path", cause: cause.to_string() }),
        }
    }
}

/// A duration for a person: `5 s`, `0.25 s`.
fn seconds(duration: Duration) -> String {
    let text = format!("{:.2}", duration.as_secs_f64());
    format!("{} s", text.trim_end_matches('0').trim_end_matches('.'))
}

pub(crate) fn named(ranks: &Ranks) -> String {
    match ranks.len() {
        0 => "some ranks".into(),
        1 => format!("rank {ranks}"),
        _ => format!("ranks {ranks}"),
    }
}

/// What kept ranks from meeting, of which `gone` had come: `verb` says what they were to do.
pub(crate) fn absent(missing: &Ranks, gone: &Ranks, verb: &str) -> String {
    let never = missing.clone().without(gone);
    let their = if gone.len() == 1 { "its log" } else { "their logs" };
    let went = format!("{} came and went away before all were there (look at {their})", named(gone));
    match (never.is_empty() && !gone.is_empty(), gone.is_empty()) {
        (true, _) => went,
        (false, true) => format!("{} did not {verb}", named(&never)),
        (false, false) => format!("{} did not {verb}, and {went}", named(&never)),
    }
}

fn blamed(missing: &Ranks) -> String {
    if missing.is_empty() {
        return "the switch waits for no rank, or could not be asked; look at the other ranks' errors and the network".into();
    }
    format!("the switch has no contribution of {}; look at the log there", named(missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_happened_to_whom_and_what_to_do() {
        let unreachable = SessionError::SwitchUnreachable {
            switch: "10.0.0.9:4800".into(),
            port: 4800,
            waited: Duration::from_secs(5),
            cause: "connection refused".into(),
        };
        assert_eq!(
            unreachable.to_string(),
            "switch 10.0.0.9:4800 did not answer within 5 s (connection refused); is it running (fanin switch) and is \
             UDP+TCP 4800 open?"
        );
        let timeout = SessionError::AllReduceTimeout {
            missing_ranks: Ranks::from([1, 2]),
            waited: Duration::from_millis(1500),
            switch: "10.0.0.9:4800".into(),
            tensor: TENSOR,
        };
        let says_all = "sum of 7 float32 (all-reduce 5) over switch 10.0.0.9:4800 did not complete within 1.5 s: the switch \
                        has no contribution of ranks 1 and 2; look at the log there";
        assert_eq!(timeout.to_string(), says_all);
        let of_tensor = |tensor, cause: &SessionError| {
            let waited = Duration::from_millis(2500);
            let switch = "10.0.0.9:4800".into();
            AllReduceError { cause: cause.clone(), tensor, switch, waited }.to_string()
        };
        assert_eq!(of_tensor(TENSOR, &timeout), says_all);
        let queued = Tensor { number: 6, elements: 1, dtype: Dtype::Int32, op: Op::Average, ..TENSOR };
        let also = "; this ended the average of 1 int32 (all-reduce 6) over switch 10.0.0.9:4800 after 2.5 s";
        assert_eq!(of_tensor(queued, &timeout), format!("{says_all}{also}"));
        let moved = Tensor { kind: CollectiveKind::Broadcast, dtype: Dtype::Uint8, ..TENSOR };
        assert_eq!(
            of_tensor(moved, &timed_out(moved)),
            "7 uint8 (broadcast 5) over switch 10.0.0.9:4800 did not complete within 2 s: the switch has no contribution of \
             rank 1; look at the log there"
        );
        let lost = SessionError::RankLost { rank: Rank(3) };
        assert_eq!(of_tensor(queued, &lost), format!("{lost}{also}"));
    }

    fn timed_out(tensor: Tensor) -> SessionError {
        SessionError::AllReduceTimeout {
            missing_ranks: Ranks::from([1]),
            waited: Duration::from_secs(2),
            switch: "10.0.0.9:4800".into(),
            tensor,
        }
    }

    const TENSOR: Tensor = Tensor {
        kind: CollectiveKind::AllReduce,
        number: 5,
        elements: 7,
        dtype: Dtype::Float32,
        op: Op::Sum,
    };

    #[test]
    fn a_tensor_is_named_as_the_wire_names_it() {
        let (dtype, op) = (TENSOR.dtype, TENSOR.op);
        let wire_dtype = fanin_wire::WireDtype::Native;
        let on_the_wire = Collective {
            sequence: 5,
            dtype,
            wire_dtype,
            op,
            pattern: fanin_wire::Pattern::AllReduce,
            elements: 7,
        };
        assert_eq!(TENSOR.to_string(), on_the_wire.to_string());
        let scattered = Tensor { kind: CollectiveKind::ReduceScatter, op: Op::Average, ..TENSOR };
        assert_eq!(scattered.to_string(), "average of 7 float32 (reduce-scatter 5)");
        let moved = Tensor { kind: CollectiveKind::Broadcast, ..TENSOR };
        assert_eq!(moved.to_string(), "7 float32 (broadcast 5)");
    }

    #[test]
    fn a_rank_that_was_expelled_is_told_so_and_the_others_who_it_was() {
        let told = |rank| {
            let member = Member {
                switch: "10.0.0.9:4800".into(),
                rank: Rank(rank),
                heartbeat_timeout: Duration::from_secs(5),
            };
            SessionError::from_abort(AbortReason::Expelled(Rank(1)), &member)
        };
        assert_eq!(told(0), SessionError::RankLost { rank: Rank(1) });
        assert_eq!(
            told(1).to_string(),
            "this rank (1) was expelled: switch 10.0.0.9:4800 did not hear from it for 5 s (suspended, swapping or cut \
             off?)"
        );
    }

    #[test]
    fn a_whole_number_of_seconds_keeps_its_zeros() {
        assert_eq!(seconds(Duration::from_secs(120)), "120 s");
        assert_eq!(seconds(Duration::from_secs(100)), "100 s");
        assert_eq!(seconds(Duration::from_millis(250)), "0.25 s");
    }
}
