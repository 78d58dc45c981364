//! What the data path has still to do.
//!
//! An I/O thread answers when it comes round to it. A thread of its own waits for that, one task
//! after the other, in the order in which they were decided. So a decision can be taken under a
//! lock, and nobody waits for the data path with it.

use std::io;
use std::sync::{Arc, Weak, mpsc};
use std::thread::{self, JoinHandle};

use fanin_udp::ThreadEnded;

type Task<D> = Box<dyn FnOnce(&D) + Send>;

/// The tasks for one data path. Dropping it waits until they are done.
pub(super) struct TaskQueue<D: ?Sized> {
    queue: Option<Arc<mpsc::Sender<Task<D>>>>,
    thread: Option<JoinHandle<()>>,
}

/// Sends tasks as long as there is who does them.
pub(super) struct Sender<D: ?Sized>(Weak<mpsc::Sender<Task<D>>>);

impl<D: ?Sized> Sender<D> {
    /// Has something done, if it is not too late.
    pub fn send(&self, task: impl FnOnce(&D) + Send + 'static) {
        if let Some(queue) = self.0.upgrade() {
            let _ = queue.send(Box::new(task));
        }
    }
}

impl<D: Send + Sync + ?Sized + 'static> TaskQueue<D> {
    /// Starts the thread.
    pub fn start(data_path: Arc<D>) -> io::Result<Self> {
        let (queue, tasks) = mpsc::channel::<Task<D>>();
        let thread = thread::Builder::new().name("fanin-tasks".into()).spawn(move || {
            for task in tasks {
                task(&data_path);
            }
        })?;
        Ok(Self { queue: Some(Arc::new(queue)), thread: Some(thread) })
    }

    /// For a thread of which nobody waits for the end.
    pub fn sender(&self) -> Sender<D> {
        Sender(self.queue.as_ref().map_or_else(Weak::new, Arc::downgrade))
    }

    /// Has something done, after all that was sent before.
    pub fn send(&self, task: impl FnOnce(&D) + Send + 'static) {
        // Fails when the thread has panicked, which `health` says.
        self.sender().send(task);
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

impl<D: ?Sized> Drop for TaskQueue<D> {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl<D: ?Sized> std::fmt::Debug for TaskQueue<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskQueue").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_is_named_to_who_asks_for_health() {
        let tasks = TaskQueue::start(Arc::new(())).expect("a thread");
        assert_eq!(tasks.health(), Ok(()));
        tasks.send(|()| panic!("on purpose"));
        while tasks.health().is_ok() {
            thread::yield_now();
        }
        assert_eq!(tasks.health(), Err(ThreadEnded { thread: "fanin-tasks".into() }));
    }
}
