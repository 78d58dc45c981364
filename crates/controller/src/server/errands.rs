//! What the data path is told.
//!
//! An I/O thread answers when it comes round to it. A thread of its own waits for that, and for one errand after the other, in
//! the order in which they were decided: so a decision can be taken under a lock, and nobody waits for the data path with it.

use std::io;
use std::sync::{Arc, Weak, mpsc};
use std::thread::{self, JoinHandle};

use fanin_udp::ThreadEnded;

type Errand<D> = Box<dyn FnOnce(&D) + Send>;

/// The errands to one data path. Dropping it waits until they are done.
pub(super) struct Errands<D: ?Sized> {
    queue: Option<Arc<mpsc::Sender<Errand<D>>>>,
    thread: Option<JoinHandle<()>>,
}

/// Sends errands as long as there is who does them.
pub(super) struct Sender<D: ?Sized>(Weak<mpsc::Sender<Errand<D>>>);

impl<D: ?Sized> Sender<D> {
    /// Has something done, if it is not too late.
    pub fn send(&self, errand: impl FnOnce(&D) + Send + 'static) {
        if let Some(queue) = self.0.upgrade() {
            let _ = queue.send(Box::new(errand));
        }
    }
}

impl<D: Send + Sync + ?Sized + 'static> Errands<D> {
    /// Starts the thread.
    pub fn start(data_path: Arc<D>) -> io::Result<Self> {
        let (queue, errands) = mpsc::channel::<Errand<D>>();
        let thread = thread::Builder::new().name("fanin-errands".into()).spawn(move || {
            for errand in errands {
                errand(&data_path);
            }
        })?;
        Ok(Self { queue: Some(Arc::new(queue)), thread: Some(thread) })
    }

    /// For a thread of which nobody waits for the end.
    pub fn sender(&self) -> Sender<D> {
        Sender(self.queue.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }

    /// Has something done, after all that was sent before.
    pub fn send(&self, errand: impl FnOnce(&D) + Send + 'static) {
        // Fails when the thread has panicked, which `health` says.
        self.sender().send(errand);
    }

    /// # Errors
    /// When the thread has panicked: nothing that is decided reaches the data path any more.
    pub fn health(&self) -> Result<(), ThreadEnded> {
        match self.thread.as_ref().filter(|thread| thread.is_finished()) {
            None => Ok(()),
            Some(ended) => Err(ThreadEnded { thread: ended.thread().name().unwrap_or_default().into() }),
        }
    }
}

impl<D: ?Sized> Drop for Errands<D> {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<D: ?Sized> std::fmt::Debug for Errands<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Errands").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_is_named_to_who_asks_for_health() {
        let errands = Errands::start(Arc::new(())).expect("a thread");
        assert_eq!(errands.health(), Ok(()));
        errands.send(|()| panic!("on purpose"));
        while errands.health().is_ok() {
            thread::yield_now();
        }
        assert_eq!(errands.health(), Err(ThreadEnded { thread: "fanin-errands".into() }));
    }
}
