//! Waiting without the interpreter's lock, and yet for Ctrl-C.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often the main thread looks for signals while it waits: soon enough for a finger on Ctrl-C.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Waits until `ready` finds what it looks for, woken by `changed`. `None` after `timeout`. On any
/// thread `look` is called now and then, if it is given.
///
/// # Errors
/// What a signal handler raised, such as `KeyboardInterrupt`, or `look`.
pub(crate) fn wait<T: Send, R: Send>(
    py: Python<'_>,
    state: &Mutex<T>,
    changed: &Condvar,
    timeout: Option<Duration>,
    look: Option<&Bound<'_, PyAny>>,
    mut ready: impl FnMut(&mut T) -> Option<R> + Send,
) -> PyResult<Option<R>> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let looks = is_main_thread() || look.is_some();
    loop {
        let next_look = looks.then(|| Instant::now() + LOOK_INTERVAL);
        let until = deadline.into_iter().chain(next_look).min();
        if let Some(found) = py.detach(|| wait_until(state, changed, until, &mut ready)) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if let Some(look) = look {
            look.call0()?;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Does what blocks on a thread of its own, so that this one can look for signals, and `look`. When
/// one raises, `cancel` is called, and what comes all the same is dropped there.
///
/// # Errors
/// What a signal handler raised, or `look`; when there is no thread to be had.
pub(crate) fn on_a_thread<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    look: Option<&Bound<'_, PyAny>>,
    cancel: impl FnOnce(),
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    enum State<T> {
        Waiting,
        Gone,
        Done(T),
    }
    let meeting = Arc::new((Mutex::new(State::Waiting), Condvar::new()));
    let theirs = Arc::clone(&meeting);
    thread::Builder::new().name(name.into()).spawn(move || {
        let done = work();
        let mut state = lock(&theirs.0);
        if matches!(*state, State::Waiting) {
            *state = State::Done(done);
            theirs.1.notify_one();
        } else {
            drop(state);
            drop(done);
        }
    })?;
    let found = wait(py, &meeting.0, &meeting.1, None, look, |state| {
        match std::mem::replace(state, State::Waiting) {
            State::Done(done) => Some(done),
            other => {
                *state = other;
                None
            }
        }
    });
    match found {
        Ok(done) => Ok(done.expect("there is no timeout")),
        Err(interrupt) => {
            let state = std::mem::replace(&mut *lock(&meeting.0), State::Gone);
            cancel();
            py.detach(|| drop(state));
            Err(interrupt)
        }
    }
}

/// A mutex's guard, also when a thread panicked with it: what we guard is never half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A timeout as Python gives it: seconds, `None` or infinity for none.
pub(crate) fn duration(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds == f64::INFINITY => Ok(None),
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(duration) => Ok(Some(duration)),
            Err(_) => Err(PyValueError::new_err(format!(
                "a timeout is a number of seconds from 0 on, not {seconds}"
            ))),
        },
    }
}

fn wait_until<T, R>(
    state: &Mutex<T>,
    changed: &Condvar,
    until: Option<Instant>,
    mut ready: impl FnMut(&mut T) -> Option<R>,
) -> Option<R> {
    let mut guard = lock(state);
    loop {
        if let Some(found) = ready(&mut guard) {
            return Some(found);
        }
        guard = match until {
            None => changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
                changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

/// Python runs signal handlers on the thread that started the interpreter, which is the process's
/// first.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}
