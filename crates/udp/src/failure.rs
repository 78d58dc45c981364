//! Why an all-reduce did not complete, how a thread that is gone is named, and what nobody may ask for.

use fanin_wire::AbortReason;
use std::io;
use std::sync::Arc;
use std::thread;

/// Why an all-reduce did not complete. Its tensor holds a mixture of sums and contributions.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// A service ended the job.
    #[error("a service ended the job: {reason:?}")]
    Aborted {
        /// Its place among the job's services.
        service: usize,
        /// Why.
        reason: AbortReason,
    },
    /// The driver was stopped while the all-reduce was outstanding, or before it was submitted.
    #[error("the worker was stopped")]
    Stopped,
    /// The owner of the driver ended it, or one of its threads has ended.
    #[error("{0}")]
    Because(#[source] Arc<dyn std::error::Error + Send + Sync>),
}

impl Failure {
    /// Of what is dropped now: with a thread that panics, or because somebody stopped it.
    pub(crate) fn of_drop() -> Self {
        let thread = thread::panicking().then(|| ThreadEnded::named(thread::current().name()));
        thread.map_or(Self::Stopped, |ended| Self::Because(Arc::new(ended)))
    }
}

/// What was asked for cannot be.
pub(crate) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// A thread of the data path has ended, though nobody stopped it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the I/O thread {thread} has ended by a panic, and moves no packets any more; start the process again"
)]
pub struct ThreadEnded {
    /// Its name.
    pub thread: String,
}

impl ThreadEnded {
    pub(crate) fn named(thread: Option<&str>) -> Self {
        Self { thread: thread.unwrap_or_default().into() }
    }
}
