//! Asks for what is shown, again and again: every second while somebody looks, and now and then
//! otherwise.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fanin_tls::Trust;
use tokio::sync::Notify;

use super::observer::{Named, Observer};
use super::remote::Remote;
use super::view::State;
use crate::proto::StatusReply;

/// Between two samples, while somebody looks.
const EVERY: Duration = Duration::from_secs(1);
/// And while nobody does.
const IDLE: Duration = Duration::from_secs(10);
/// Somebody looks who has done so of late.
const LOOKS: Duration = Duration::from_secs(15);
/// How long all answers may take together.
const PATIENCE: Duration = Duration::from_secs(5);
/// After so long what is known is no longer shown as what is.
const STALE: Duration = Duration::from_secs(30);

/// What one service answered, or why it did not.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Where it was asked.
    pub address: String,
    /// How long ago it came.
    pub ago: Duration,
    pub reply: Result<StatusReply, String>,
}

/// It knows what services answer.
pub(crate) trait Answers: Send + Sync + 'static {
    /// Now, with what ranks did in the last while.
    fn ask(&self, work: Duration) -> Pin<Box<dyn Future<Output = Vec<Answer>> + Send + '_>>;
}

/// What is known of services and their jobs. Clones see the same.
#[derive(Clone)]
pub struct Watch(Arc<Inner>);

struct Inner {
    observer: Mutex<Observer>,
    /// When somebody looked last.
    looked: Mutex<Option<Instant>>,
    /// When something was known last.
    taken: Mutex<Instant>,
    /// The same moment by both clocks.
    began: (Instant, f64),
    wakes: Notify,
}

impl Watch {
    /// Nothing is known yet. `server` is shown as the one that tells.
    pub(crate) fn new(server: String) -> Self {
        let observer = Mutex::new(Observer::new(server));
        let (looked, taken) = (Mutex::new(None), Mutex::new(Instant::now()));
        let began = (Instant::now(), unix_now());
        Self(Arc::new(Inner { observer, looked, taken, began, wakes: Notify::new() }))
    }

    /// As `server` shows it: what these services do, and those of their jobs, if it `finds` them.
    /// Each is known by what `trust` says. The future asks them until it is dropped.
    pub fn of_services(
        server: String,
        services: Vec<String>,
        finds: bool,
        trust: Trust,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let watch = Self::new(server);
        (watch.clone(), watch.run(Remote::new(services, finds, trust)))
    }

    /// Asks until it is dropped.
    pub(crate) async fn run(self, answers: impl Answers) {
        let mut work = IDLE;
        loop {
            let began = Instant::now();
            let every = if self.is_looked_at() { EVERY } else { IDLE };
            // A service that does not answer at all ends neither this nor what is known.
            if let Ok(told) = tokio::time::timeout(PATIENCE, answers.ask(work + EVERY)).await {
                lock(&self.0.observer).take(self.now(), every.as_secs_f64(), told);
                *lock(&self.0.taken) = Instant::now();
            }
            let pause = every.saturating_sub(began.elapsed());
            if every == IDLE {
                // Whoever begins to look does not wait for it.
                let _ = tokio::time::timeout(pause, self.0.wakes.notified()).await;
            } else {
                tokio::time::sleep(pause).await;
            }
            work = began.elapsed();
        }
    }

    /// Since when nothing new is known, if that is too long.
    pub(crate) fn stale(&self) -> Option<Duration> {
        Some(lock(&self.0.taken).elapsed()).filter(|since| *since > STALE)
    }

    /// Seconds since 1970, which go on evenly.
    fn now(&self) -> f64 {
        let (began, unix) = self.0.began;
        unix + began.elapsed().as_secs_f64()
    }

    /// The state, with the samples after a time: seconds since 1970. To look is to be shown more of
    /// them.
    #[must_use]
    pub fn state(&self, since: f64) -> State {
        let looked = lock(&self.0.looked).replace(Instant::now());
        if looked.is_none_or(|looked| looked.elapsed() > LOOKS) {
            self.0.wakes.notify_one();
        }
        lock(&self.0.observer).state(self.now(), since)
    }

    /// The same in numbers by name. To read these is not to look.
    pub(crate) fn named(&self) -> Named {
        lock(&self.0.observer).named()
    }

    fn is_looked_at(&self) -> bool {
        lock(&self.0.looked).is_some_and(|looked| looked.elapsed() <= LOOKS)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
