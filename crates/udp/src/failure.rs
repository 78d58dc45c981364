//! Why an all-reduce did not complete.

use fanin_wire::AbortReason;
use std::sync::Arc;

/// Why an all-reduce did not complete. Its tensor holds a mixture of sums and contributions.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// The switch ended the job.
    #[error("the switch ended the job: {0:?}")]
    Aborted(AbortReason),
    /// The driver was stopped while the all-reduce was outstanding, or before it was submitted.
    #[error("the worker was stopped")]
    Stopped,
    /// The owner of the driver ended it.
    #[error("{0}")]
    Because(#[source] Arc<dyn std::error::Error + Send + Sync>),
}
