//! Sockets that a forked process must not inherit.
//!
//! A connection ends when the last process that has it ends. Programs fork helpers (PyTorch's data loaders) which may outlive a
//! process that is killed: its peer would go on believing that it lives.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// Places of a block.
const PLACES: usize = 256;
/// No descriptor.
const NONE: RawFd = -1;

static GUARDED: Block = Block::new();
static HANDLER: Once = Once::new();

/// Places for guarded descriptors. A block that is full is followed by another one, which stays as long as the process does: a child that was
/// just forked may take no lock, and walks them.
struct Block {
    places: [AtomicI32; PLACES],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self { places: [const { AtomicI32::new(NONE) }; PLACES], next: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The block after this one, if there is one.
    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or that of a leaked block, which is written before it is published.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// The block after this one, which another thread may have made meanwhile.
    fn next_or_new(&self) -> &'static Self {
        if let Some(next) = self.next() {
            return next;
        }
        let new = Box::into_raw(Box::new(Self::new()));
        let first = self.next.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: `new` came from a box. Either it is published, and never freed; or nobody else knows it. The other pointer is that of a
        // leaked block.
        unsafe {
            match first {
                Ok(_) => &*new,
                Err(other) => {
                    drop(Box::from_raw(new));
                    &*other
                }
            }
        }
    }
}

/// While it lives, processes that this one forks do not get a certain descriptor. Drop it before the descriptor is closed.
#[derive(Debug)]
pub struct NotInherited(&'static AtomicI32);

impl NotInherited {
    /// Guards a descriptor.
    pub fn new(descriptor: impl AsFd) -> Self {
        // SAFETY: the handler calls nothing but what may be called between fork and exec (signal-safety(7)), and reads a static.
        HANDLER.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(forget));
        });
        let descriptor = descriptor.as_fd().as_raw_fd();
        let is_free = |place: &&AtomicI32| {
            place.compare_exchange(NONE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let mut block = &GUARDED;
        loop {
            if let Some(place) = block.places.iter().find(is_free) {
                return Self(place);
            }
            block = block.next_or_new();
        }
    }
}

impl Drop for NotInherited {
    fn drop(&mut self) {
        self.0.store(NONE, Ordering::Release);
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
        let mut block = Some(&GUARDED);
        while let Some(Block { places, .. }) = block {
            for place in places {
                let descriptor = place.load(Ordering::Acquire);
                if descriptor != NONE {
                    libc::dup3(null, descriptor, libc::O_CLOEXEC);
                }
            }
            block = block.and_then(Block::next);
        }
        libc::close(null);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn however_many_are_guarded_a_child_gets_none_of_them() {
        let files: Vec<File> = (0..2 * PLACES + 1).map(|_| File::open("/").expect("it is there")).collect();
        let guards: Vec<_> = files.iter().map(NotInherited::new).collect();
        let is_root = |file: &File| file.metadata().is_ok_and(|meta| meta.is_dir());
        // SAFETY: the child calls fstat(2) and _exit(2) alone.
        let inherited = unsafe {
            let child = libc::fork();
            if child == 0 {
                let kept = files.iter().filter(|file| is_root(file)).count();
                libc::_exit(i32::from(kept > 0));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            libc::WEXITSTATUS(status)
        };
        assert_eq!(inherited, 0, "the child has a guarded descriptor");
        assert!(files.iter().all(is_root), "and they are untouched here");
        // Their places are free again.
        drop(guards);
        let _again: Vec<_> = files.iter().map(NotInherited::new).collect();
        let blocks = std::iter::successors(Some(&GUARDED), |block| block.next()).count();
        assert!(blocks <= 3 + 1, "{blocks} blocks");
    }
}
