//! How other threads speak to an I/O thread: a queue, and a bell that ends its sleep.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

/// The sending half.
pub(crate) struct Post<C> {
    queue: mpsc::Sender<C>,
    bell: Arc<OwnedFd>,
}

/// The receiving half, owned by the I/O thread.
pub(crate) struct Mailbox<C> {
    queue: mpsc::Receiver<C>,
    bell: Arc<OwnedFd>,
}

pub(crate) fn mailbox<C>() -> io::Result<(Post<C>, Mailbox<C>)> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = mpsc::channel();
    Ok((Post { queue: sender, bell: Arc::clone(&bell) }, Mailbox { queue: receiver, bell }))
}

impl<C> Post<C> {
    /// Queues a command and wakes the thread; gives the command back when the thread has ended.
    pub(crate) fn send(&self, command: C) -> Result<(), C> {
        self.queue.send(command).map_err(|mpsc::SendError(command)| command)?;
        // Fails only when the counter is full, and then the bell rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        Ok(())
    }

    /// Sends the command that `command` makes of a reply channel, and waits for the reply;
    /// `None` when the thread has ended.
    pub(crate) fn ask<R>(&self, command: impl FnOnce(mpsc::SyncSender<R>) -> C) -> Option<R> {
        ask(|reply| self.send(command(reply)))
    }
}

/// Sends something with a reply channel, and waits for the reply; `None` when the thread has ended.
pub(crate) fn ask<R, E>(send: impl FnOnce(mpsc::SyncSender<R>) -> Result<(), E>) -> Option<R> {
    let (sender, receiver) = mpsc::sync_channel(1);
    send(sender).ok()?;
    receiver.recv().ok()
}

impl<C> std::fmt::Debug for Post<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").finish_non_exhaustive()
    }
}

impl<C> Mailbox<C> {
    pub(crate) fn take(&self) -> Option<C> {
        self.queue.try_recv().ok()
    }

    /// What to poll for reading.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Silences the bell. Call before [`Self::take`], else a command that comes in between is slept over.
    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_to_a_thread_that_has_ended_comes_back() {
        let (post, mailbox) = mailbox::<u32>().unwrap();
        post.send(1).unwrap();
        assert_eq!(mailbox.take(), Some(1));
        assert_eq!(mailbox.take(), None);
        drop(mailbox);
        assert_eq!(post.send(2), Err(2));
    }

    #[test]
    fn the_bell_rings_until_it_is_silenced() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let (post, mailbox) = mailbox::<u32>().unwrap();
        let rings = |mailbox: &Mailbox<u32>| {
            let mut fds = [PollFd::from_borrowed_fd(mailbox.bell(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!rings(&mailbox));
        post.send(1).unwrap();
        post.send(2).unwrap();
        assert!(rings(&mailbox));
        mailbox.silence();
        assert!(!rings(&mailbox));
        assert_eq!((mailbox.take(), mailbox.take()), (Some(1), Some(2)));
    }
}
