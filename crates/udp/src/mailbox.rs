//! How other threads speak to an I/O thread: a queue, and a bell that ends its sleep.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

/// What ends the sleep of an I/O thread: one for all mailboxes that it empties.
#[derive(Clone, Debug)]
pub(crate) struct Bell(Arc<OwnedFd>);

/// The sending half.
pub(crate) struct Post<C> {
    queue: mpsc::Sender<C>,
    bell: Bell,
}

/// The receiving half, owned by the I/O thread.
pub(crate) struct Mailbox<C>(mpsc::Receiver<C>);

/// A mailbox of the thread that `bell` wakes.
pub(crate) fn mailbox<C>(bell: &Bell) -> (Post<C>, Mailbox<C>) {
    let (queue, receiver) = mpsc::channel();
    (Post { queue, bell: bell.clone() }, Mailbox(receiver))
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(crate) fn ring(&self) {
        // Fails only when the counter is full, and then the bell rings already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Call before [`Mailbox::take`], else a command that comes in between is slept over.
    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

/// What to poll for reading.
impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<C> Post<C> {
    /// Queues a command and wakes the thread; gives the command back when the thread has ended.
    pub(crate) fn send(&self, command: C) -> Result<(), C> {
        self.queue.send(command).map_err(|mpsc::SendError(command)| command)?;
        self.bell.ring();
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
    question(send)?.recv().ok()
}

/// Sends something with a reply channel, and returns where the reply comes; `None` when the thread has ended.
pub(crate) fn question<R, E>(
    send: impl FnOnce(mpsc::SyncSender<R>) -> Result<(), E>,
) -> Option<mpsc::Receiver<R>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    send(sender).ok()?;
    Some(receiver)
}

impl<C> std::fmt::Debug for Post<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").finish_non_exhaustive()
    }
}

impl<C> Mailbox<C> {
    pub(crate) fn take(&self) -> Option<C> {
        self.0.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_to_a_thread_that_has_ended_comes_back() {
        let (post, mailbox) = mailbox::<u32>(&Bell::new().unwrap());
        post.send(1).unwrap();
        assert_eq!(mailbox.take(), Some(1));
        assert_eq!(mailbox.take(), None);
        drop(mailbox);
        assert_eq!(post.send(2), Err(2));
    }

    #[test]
    fn the_bell_rings_until_it_is_silenced() {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let bell = Bell::new().unwrap();
        let (post, mailbox) = mailbox::<u32>(&bell);
        let rings = || {
            let mut fds = [PollFd::new(&bell, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!rings());
        post.send(1).unwrap();
        post.send(2).unwrap();
        assert!(rings());
        bell.silence();
        assert!(!rings());
        assert_eq!((mailbox.take(), mailbox.take()), (Some(1), Some(2)));
    }
}
