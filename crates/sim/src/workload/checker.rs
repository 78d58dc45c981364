//! The rules that hold whatever the network does, and who stops the run when one is broken.

use std::cell::RefCell;

use fanin_wire::AbortReason;

use crate::net::Context;

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A tensor came back with an element that is not the sum of each worker's contribution, once.
    WrongSum {
        /// The job.
        job: String,
        /// The worker that got it.
        rank: usize,
        /// Which tensor.
        tensor: u64,
        /// The first wrong element.
        element: usize,
    },
    /// Two workers got different bits.
    Disagreement {
        /// The job.
        job: String,
        /// The later worker.
        rank: usize,
        /// Which tensor.
        tensor: u64,
    },
    /// A tensor came back that was not under way.
    CompletedTwice {
        /// The job.
        job: String,
        /// The worker.
        rank: usize,
        /// Which tensor.
        tensor: u64,
    },
    /// A worker's flow lacks more in the sums than its loss bound allows.
    LostMore {
        /// The job.
        job: String,
        /// The rank whose contributions are missing, or in a ring the rank that did not get them.
        rank: usize,
        /// Of which tensor.
        tensor: u64,
        /// Packets.
        lost: u32,
        /// As many may be.
        allowed: u32,
    },
    /// A worker was told another loss of a tensor than there was.
    LossMistold {
        /// The job.
        job: String,
        /// The worker.
        rank: usize,
        /// Which tensor.
        tensor: u64,
    },
    /// A packet that came to a worker says that another number of contributions are in it than are.
    Miscounted {
        /// The job.
        job: String,
        /// The worker.
        rank: usize,
        /// Of which tensor.
        tensor: u64,
        /// What it says.
        said: u16,
        /// The ranks that it passed in an unbroken row.
        inside: u16,
    },
    /// A place of the window went to a later fragment while a worker lacked what was there before.
    ReusedEarly {
        /// The job.
        job: String,
        /// The worker that lacks it.
        rank: usize,
        /// The fragment that it lacks.
        lacks: u64,
        /// The fragment that took the place.
        sequence: u64,
    },
    /// At the end a service's parameters are not the sum of all deltas, each once.
    WrongParameters {
        /// The job.
        job: String,
        /// The first tensor that changed the variable.
        tensor: u64,
        /// The first wrong element.
        element: usize,
    },
    /// Workers of a job wait, and nothing has come to any of them for too long, or nothing can come
    /// any more.
    Stalled {
        /// The job.
        job: String,
        /// The ranks that wait, for which tensor and for whom; where its machines stand.
        waits: String,
    },
    /// A job was aborted though nothing in the scenario is a reason for that.
    Aborted {
        /// The job.
        job: String,
        /// The worker that heard it.
        rank: usize,
        /// The reason that it was told.
        reason: AbortReason,
    },
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::WrongSum { job, rank, tensor, element } => {
                write!(f, "{job}: element {element} of tensor {tensor} at worker {rank} is not the sum")
            }
            Self::Disagreement { job, rank, tensor } => {
                write!(f, "{job}: worker {rank} has other bits in tensor {tensor} than a worker before it")
            }
            Self::CompletedTwice { job, rank, tensor } => {
                write!(f, "{job}: worker {rank} got tensor {tensor}, which was not under way")
            }
            Self::LostMore { job, rank, tensor, lost, allowed } => write!(
                f,
                "{job}: {lost} packets of worker {rank}'s flow of tensor {tensor} are in no sum, where {allowed} may be missing"
            ),
            Self::LossMistold { job, rank, tensor } => {
                write!(f, "{job}: worker {rank} was told another loss of tensor {tensor} than there was")
            }
            Self::Miscounted { job, rank, tensor, said, inside } => write!(
                f,
                "{job}: a packet of tensor {tensor} came to worker {rank} and says {said} contributions, and {inside} are in it"
            ),
            Self::ReusedEarly { job, rank, lacks, sequence } => write!(
                f,
                "{job}: fragment {sequence} took the place of {lacks}, which worker {rank} still lacks"
            ),
            Self::WrongParameters { job, tensor, element } => write!(
                f,
                "{job}: element {element} of the parameters that tensor {tensor} changed first is not the sum of all deltas"
            ),
            Self::Stalled { job, waits } => write!(f, "{job}: no progress; {waits}"),
            Self::Aborted { job, rank, reason } => {
                write!(f, "{job}: worker {rank} was told that the job ended: {reason:?}")
            }
        }
    }
}

/// Workers that a message names: a person reads no more of them.
const SHOWN: usize = 8;

/// The first few, and how many there are beyond these.
pub(crate) fn first<T: std::fmt::Display>(all: &[T]) -> String {
    let mut text = all.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join(", ");
    if all.len() > SHOWN {
        text += &format!(", and {} more of {}", all.len() - SHOWN, all.len());
    }
    text
}

/// Takes the first violation and stops the run.
#[derive(Debug, Default)]
pub(crate) struct Referee(RefCell<Option<Violation>>);

impl Referee {
    pub(crate) fn stop(&self, context: &mut Context<'_>, violation: Violation) {
        self.note(violation);
        context.stop();
    }

    /// Notes a violation; the caller stops the run itself.
    pub(crate) fn note(&self, violation: Violation) {
        self.0.borrow_mut().get_or_insert(violation);
    }

    pub(crate) fn verdict(&self) -> Option<Violation> {
        self.0.borrow().clone()
    }
}
