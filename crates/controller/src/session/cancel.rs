//! The end of an attempt to join.

use std::sync::{Arc, OnceLock};

use tokio::sync::Notify;

use crate::error::SessionError;

/// Ends what is under way on another thread: a [`connect_unless`](super::Session::connect_unless),
/// say.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<(Notify, OnceLock<SessionError>)>);

impl Cancel {
    /// Why nobody wants to join any more, if so.
    pub(super) fn cause(&self) -> Option<SessionError> {
        self.0.1.get().cloned()
    }

    pub(super) async fn cancelled(&self) -> SessionError {
        self.0.0.notified().await;
        self.cause().unwrap_or(SessionError::Closed)
    }

    /// What becomes of `work`, [`SessionError::Closed`] where it is cancelled meanwhile: it is
    /// dropped then.
    pub(super) async fn or<T>(
        &self,
        work: impl Future<Output = Result<T, SessionError>>,
    ) -> Result<T, SessionError> {
        tokio::select! {
            done = work => done,
            cause = self.cancelled() => Err(cause),
        }
    }

    /// The rank wants to join no more. May be called before the connecting begins, too.
    pub fn cancel(&self) {
        self.because(SessionError::Closed);
    }

    /// The rank cannot join any more, which is told for the first of such causes.
    pub(super) fn because(&self, cause: SessionError) {
        // Another one was first.
        let _ = self.0.1.set(cause);
        self.0.0.notify_one();
    }
}
