//! Sockets that a forked process must not inherit.
//!
//! A connection ends when the last process that has it ends. Programs fork helpers (PyTorch's data loaders) which may outlive a
//! process that is killed: its peer would go on believing that it lives.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// Sockets of one process that are guarded; those beyond are inherited.
const GUARDED_MAX: usize = 256;
/// No descriptor.
const NONE: RawFd = -1;

static GUARDED: [AtomicI32; GUARDED_MAX] = [const { AtomicI32::new(NONE) }; GUARDED_MAX];
static HANDLER: Once = Once::new();

/// While it lives, processes that this one forks do not get a certain descriptor. Drop it before the descriptor is closed.
#[derive(Debug)]
pub struct NotInherited(Option<usize>);

impl NotInherited {
    /// Guards a descriptor.
    pub fn new(descriptor: impl AsFd) -> Self {
        // SAFETY: the handler calls nothing but what may be called between fork and exec (signal-safety(7)), and reads a static.
        HANDLER.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(forget));
        });
        let descriptor = descriptor.as_fd().as_raw_fd();
        let is_free = |place: &AtomicI32| {
            place.compare_exchange(NONE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Self(GUARDED.iter().position(is_free))
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            GUARDED[place].store(NONE, Ordering::Release);
        }
    }
}

/// In a process that was just forked: puts /dev/null in the place of each guarded descriptor, whose number stays taken, as
/// somebody's object still names it.
extern "C" fn forget() {
    // SAFETY: a constant path, and descriptors that are guarded because they are open sockets of ours; nothing is done where one
    // of the calls fails.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        if null == NONE {
            return;
        }
        for place in &GUARDED {
            let descriptor = place.load(Ordering::Acquire);
            if descriptor != NONE {
                libc::dup3(null, descriptor, libc::O_CLOEXEC);
            }
        }
        libc::close(null);
    }
}
