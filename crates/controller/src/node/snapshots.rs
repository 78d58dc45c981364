//! What the data path is asked, however often it is asked.
//!
//! Everybody who asks while an answer is on its way shares the next one: it began after each of
//! their questions, so it is news to all of them. And the data path has a pause after each answer.
//! So a flood of questions costs little, and holds up nobody who asks something else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

/// How many times as long as an answer took the next one is not asked for: a tenth of the time at
/// most goes into answers.
const PAUSES: u32 = 9;
/// No longer than this: who waits for a sum asks whom it waits for, and has a second's patience.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// The answers to one question.
pub(super) struct Snapshots<T> {
    ask: Arc<dyn Fn() -> T + Send + Sync>,
    last: Arc<Mutex<Option<Last<T>>>>,
}

struct Last<T> {
    answer: Arc<T>,
    began: Instant,
    /// Not before this comes the next one.
    next: Instant,
}

impl<T: Send + Sync + 'static> Snapshots<T> {
    /// `ask` may block.
    pub fn new(ask: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self { ask: Arc::new(ask), last: Arc::default() }
    }

    /// How it is, no earlier than now; `None` when the runtime shuts down.
    pub async fn current(&self) -> Option<Arc<T>> {
        let asked = Instant::now();
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if let Some(last) = last.as_ref().filter(|last| last.began >= asked) {
            return Some(Arc::clone(&last.answer));
        }
        let ask = Arc::clone(&self.ask);
        // A task of its own, which goes on when who asked hangs up: there is never more than one
        // question at the data path.
        let asking = tokio::spawn(async move {
            if let Some(last) = last.as_ref() {
                tokio::time::sleep_until(last.next.into()).await;
            }
            let began = Instant::now();
            let answer = Arc::new(tokio::task::spawn_blocking(move || ask()).await.ok()?);
            let now = Instant::now();
            let next = now + ((now - began) * PAUSES).min(PAUSE_MAX);
            *last = Some(Last { answer: Arc::clone(&answer), began, next });
            Some(answer)
        });
        asking.await.ok().flatten()
    }
}

impl<T> std::fmt::Debug for Snapshots<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshots").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;
    use tokio::task::JoinSet;

    /// Questions that are answered, with how many there were, when the test says so.
    fn gated() -> (Arc<Snapshots<u32>>, mpsc::Sender<()>, Arc<AtomicU32>) {
        let (open, gate) = mpsc::channel();
        let (gate, asked) = (std::sync::Mutex::new(gate), Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&asked);
        let ask = move || {
            let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
            gate.lock().unwrap().recv().unwrap();
            number
        };
        (Arc::new(Snapshots::new(ask)), open, asked)
    }

    async fn begun(asked: &AtomicU32, questions: u32) {
        while asked.load(Ordering::SeqCst) < questions {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn who_asks_while_an_answer_is_on_its_way_shares_the_next_one_and_gets_nothing_older() {
        let (snapshots, open, asked) = gated();
        let first = tokio::spawn({
            let snapshots = Arc::clone(&snapshots);
            async move { snapshots.current().await }
        });
        begun(&asked, 1).await;
        let mut others = JoinSet::new();
        for _ in 0..100 {
            let snapshots = Arc::clone(&snapshots);
            others.spawn(async move { snapshots.current().await });
        }
        // On this one thread each of them asks before this goes on.
        tokio::task::yield_now().await;
        (0..2).for_each(|_| open.send(()).unwrap());
        assert_eq!(first.await.unwrap().as_deref(), Some(&1));
        assert!(others.join_all().await.iter().all(|answer| answer.as_deref() == Some(&2)));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_hangs_up_leaves_one_question_and_not_one_each() {
        let (snapshots, open, asked) = gated();
        for _ in 0..50 {
            let snapshots = Arc::clone(&snapshots);
            let asking = tokio::spawn(async move { snapshots.current().await });
            begun(&asked, 1).await;
            asking.abort();
            let _ = asking.await;
        }
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        (0..2).for_each(|_| open.send(()).unwrap());
        assert_eq!(snapshots.current().await.as_deref(), Some(&2));
    }
}
