//! The thread on which all sessions of this process speak to their services.

use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use crate::control_channel::Lines;
use crate::error::SessionError;

/// How long starting a thread may take.
const LOCKED_MAX: Duration = Duration::from_millis(500);

/// A thread for connections: their keep-alives must be answered also while nobody waits for them.
pub(super) fn runtime(name: &'static str) -> Result<Runtime, SessionError> {
    let built = Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build();
    built.map_err(|error| SessionError::Local { what: "starting a thread", cause: error.to_string() })
}

/// The thread of all sessions of this process: a program may have hundreds of groups.
#[derive(Debug)]
pub(super) struct SessionThread {
    runtime: Option<Runtime>,
    /// What runs there for several sessions.
    pub lines: Arc<Lines>,
}

/// The process that started the thread, and the thread while some session has it.
static SESSION_THREAD: Mutex<(u32, Weak<SessionThread>)> = Mutex::new((0, Weak::new()));

impl SessionThread {
    /// The thread that the sessions of this process have, started if none has one.
    pub fn shared() -> Result<Arc<Self>, SessionError> {
        let start = || {
            let runtime = Some(runtime("fanin-session")?);
            Ok(Arc::new(Self { runtime, lines: Arc::default() }))
        };
        let process = std::process::id();
        // A process may be forked while another of its threads holds the lock. The child's sessions
        // then have a thread each.
        let until = Instant::now() + LOCKED_MAX;
        let mut started = loop {
            match SESSION_THREAD.try_lock() {
                Ok(started) => break started,
                Err(TryLockError::Poisoned(started)) => break started.into_inner(),
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => return start(),
            }
        };
        let (by, thread) = &*started;
        // A forked child has its parent's sessions, and not their thread.
        if let Some(thread) = thread.upgrade().filter(|_| *by == process) {
            return Ok(thread);
        }
        let thread = start()?;
        *started = (process, Arc::downgrade(&thread));
        Ok(thread)
    }
}

impl std::ops::Deref for SessionThread {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is taken where it is dropped alone")
    }
}

impl Drop for SessionThread {
    fn drop(&mut self) {
        // Waits for nothing: a name server may not answer.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
