//! The memory that the ranks of one machine share: a file in /dev/shm that all of them have mapped,
//! and nobody can find any more.
//!
//! It is allocated whole when it is made, so that too little room is an error then, and no fault
//! later. Its name is there from the moment that it is complete until the last rank has mapped it.
//! Each rank keeps a record lock on a byte of it for as long as it lives. The kernel gives it back
//! when the process ends, however it ends, and children that a process forks do not have it
//! (fcntl(2)).
//!
//! The unsafe code of this room is here. The gates say who may touch which part of the memory when
//! (`gate`).

use crate::cut::Blocks;
use crate::error::MemoryError;
use crate::gate::{GATES, Gate, Party, RANKS_MAX, SLOTS_MAX, Seat};
use fanin_udp::NotInherited;
use fanin_wire::Rank;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Pid, getpid};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const FOLDER: &str = "/dev/shm";
/// Names layout and version of what is in the file.
const MAGIC: u64 = 0x6661_6e69_6e00_0005;
const PAGE: usize = 4096;
/// The bytes that a rank contributes at a time: those of all ranks of a usual machine together stay
/// in the cache that they share.
const BLOCK_BYTES: usize = 256 << 10;
/// Blocks of a rank that may wait to be summed.
const CONTRIBUTIONS: usize = 4;
/// The bytes that the network gets at a time.
const SEGMENT_BYTES: usize = 4 << 20;
/// Segments that may be with the network, or wait to be read.
const SEGMENTS: usize = 4;
/// The number of places if a segment is a block.
const SEGMENTS_WITHOUT_NETWORK: usize = 8;
/// The interval at which other processes are looked at while everybody gathers, once a job. A name
/// that comes to be, and a process that dies before it has the memory, wake nobody.
const GATHERING: Duration = Duration::from_millis(5);

const _: () =
    assert!(CONTRIBUTIONS <= SLOTS_MAX && SEGMENTS <= SLOTS_MAX && SEGMENTS_WITHOUT_NETWORK <= SLOTS_MAX);

/// The group that a memory is for: the same on all its ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The rank in the job of each rank on this machine; 1 to [`RANKS_MAX`] of them, and more than
    /// one if there are no other machines.
    pub ranks: Vec<u32>,
    /// How many of them sum and speak with other machines, the first ones: 1 to their number.
    pub columns: usize,
    /// Whether there are other machines.
    pub networked: bool,
}

/// Everything's place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) blocks: Blocks,
    pub(crate) ranks: usize,
    pub(crate) contributions: usize,
    pub(crate) segments: usize,
    seats_at: usize,
    contributions_at: usize,
    results_at: usize,
    bytes: usize,
}

/// At the beginning of the file. Fields that are not atomic are written before the file has a name.
#[repr(C, align(128))]
struct Header {
    magic: u64,
    /// The values that the ranks must agree on.
    agreed: [u64; 6],
    attached: AtomicU32,
    /// Why the group has ended, as `Ending` packs it; 0 while it lives.
    ended: AtomicU64,
    /// The word of the first rank; 0 before it.
    told: AtomicU32,
    /// Columns that have joined the job over machines.
    joined: AtomicU32,
    gates: [Gate; GATES],
}

/// A rank's hold on the memory of its machine's group.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    pub(crate) layout: Layout,
    pub(crate) group: Group,
    pub(crate) me: usize,
    /// Only while somebody may still look for it.
    name: String,
    owner: Pid,
    /// Before the file, as fields are dropped in their order: once the file is closed, its number
    /// may be another file's, which a child is to have.
    _not_inherited: NotInherited,
    /// The file's lock ends with it, so it is kept open as long as the memory is in use.
    file: OwnedFd,
    /// Whether it has taken its seat, and not left it.
    seated: AtomicBool,
    /// Whether it gave the file its name.
    named: bool,
}

// SAFETY: it points to memory that is shared by whole processes, and whose parts are atomics or are
// handed out by unsafe functions alone.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl Group {
    pub(crate) fn layout(&self) -> Layout {
        let (blocks, segments) = if self.networked {
            (
                Blocks {
                    columns: self.columns,
                    block_bytes: BLOCK_BYTES,
                    segment_bytes: SEGMENT_BYTES,
                    networked: true,
                },
                SEGMENTS,
            )
        } else {
            (
                Blocks {
                    columns: self.columns,
                    block_bytes: BLOCK_BYTES,
                    segment_bytes: BLOCK_BYTES,
                    networked: false,
                },
                SEGMENTS_WITHOUT_NETWORK,
            )
        };
        let ranks = self.ranks.len();
        let seats_at = size_of::<Header>().next_multiple_of(align_of::<Seat>());
        let contributions_at = (seats_at + ranks * size_of::<Seat>()).next_multiple_of(PAGE);
        let results_at = contributions_at + ranks * CONTRIBUTIONS * blocks.block_bytes;
        let bytes = results_at + segments * blocks.segment_bytes;
        Layout {
            blocks,
            ranks,
            contributions: CONTRIBUTIONS,
            segments,
            seats_at,
            contributions_at,
            results_at,
            bytes,
        }
    }

    /// How much of /dev/shm its memory takes.
    ///
    /// # Errors
    /// When there can be no such group.
    pub fn bytes(&self) -> Result<usize, MemoryError> {
        self.check()?;
        Ok(self.layout().bytes)
    }

    fn check(&self) -> Result<(), MemoryError> {
        let ranks = self.ranks.len();
        let least = if self.networked { 1 } else { 2 };
        // If no other machine has fewer ranks, each is a column.
        let columns = if self.networked { 1..=ranks } else { ranks..=ranks };
        if (least..=RANKS_MAX).contains(&ranks) && columns.contains(&self.columns) {
            return Ok(());
        }
        let cause = format!(
            "{ranks} ranks in {} columns; a machine's group has {least} to {RANKS_MAX} ranks, and a machine alone a column for each",
            self.columns
        );
        Err(MemoryError::Unusable { wanted: 0, cause: io::Error::new(io::ErrorKind::InvalidInput, cause) })
    }

    fn agreed(&self) -> [u64; 6] {
        let ranks = self.ranks.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, rank| {
            (hash ^ u64::from(*rank)).wrapping_mul(0x0100_0000_01b3)
        });
        let layout = self.layout();
        [
            self.ranks.len() as u64,
            ranks,
            self.columns as u64,
            u64::from(self.networked),
            layout.bytes as u64,
            layout.blocks.block_bytes as u64,
        ]
    }
}

/// The room in /dev/shm for the ranks of a machine, and whether it is enough.
#[derive(Debug)]
pub struct MemoryOfRanks {
    /// What they need.
    pub bytes: usize,
    /// Bytes that are free, and all.
    pub room: io::Result<(u64, u64)>,
    /// Whether they can have what they need just now.
    pub usable: Result<(), MemoryError>,
}

/// Looks whether so many ranks of a machine, one of several, could sum in shared memory: 1 to
/// [`RANKS_MAX`].
#[must_use]
pub fn memory_of_ranks(ranks: u32) -> MemoryOfRanks {
    let group = Group { ranks: (0..ranks).collect(), columns: ranks as usize, networked: true };
    let room = rustix::fs::statvfs(FOLDER)
        .map(|found| (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize))
        .map_err(io::Error::from);
    let usable = group.bytes().and_then(probe);
    MemoryOfRanks { bytes: group.bytes().unwrap_or_default(), room, usable }
}

/// Whether /dev/shm holds `bytes` more just now.
///
/// # Errors
/// [`MemoryError::Unusable`] when not, or when files in it cannot be made.
pub fn probe(bytes: usize) -> Result<(), MemoryError> {
    allocate(bytes).map(drop).map_err(|cause| MemoryError::Unusable { wanted: bytes, cause: cause.into() })
}

/// A file in /dev/shm without a name, and with all of its memory.
fn allocate(bytes: usize) -> rustix::io::Result<OwnedFd> {
    let file =
        rustix::fs::open(FOLDER, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
    Ok(file)
}

impl SharedMemory {
    /// Makes the group's memory, under `name`, as the first of its ranks.
    ///
    /// # Errors
    /// [`MemoryError::Unusable`]: the group does without.
    pub fn create(name: &str, group: Group) -> Result<Self, MemoryError> {
        group.check()?;
        let layout = group.layout();
        let unusable = |cause: io::Error| MemoryError::Unusable { wanted: layout.bytes, cause };
        let file = allocate(layout.bytes).map_err(|error| unusable(error.into()))?;
        let mut memory = Self::map(name, file, group, 0).map_err(unusable)?;
        // SAFETY: nobody else has the file yet; it is as long as its layout, zeroed, and page
        // aligned.
        unsafe {
            let header = memory.base.cast::<Header>();
            (*header.as_ptr()).magic = MAGIC;
            (*header.as_ptr()).agreed = memory.group.agreed();
        }
        memory.attach().map_err(unusable)?;
        if layout.ranks == 1 {
            return Ok(memory);
        }
        // Complete, and with its first lock: now it can be found.
        let descriptor = format!("/proc/self/fd/{}", memory.file.as_raw_fd());
        rustix::fs::linkat(CWD, descriptor, CWD, path(name), AtFlags::SYMLINK_FOLLOW)
            .map_err(|error| unusable(error.into()))?;
        memory.named = true;
        Ok(memory)
    }

    /// Opens the memory that the first of the ranks makes under `name`, as number `me` of them.
    ///
    /// # Errors
    /// When it is not there after `patience`, or is another group's.
    ///
    /// # Panics
    /// When the group has no number `me`, or that is the first.
    pub fn open(name: &str, group: Group, me: usize, patience: Duration) -> Result<Self, MemoryError> {
        group.check()?;
        assert!(
            (1..group.ranks.len()).contains(&me),
            "rank {me} of {} opens what the first one makes",
            group.ranks.len()
        );
        let layout = group.layout();
        let unreachable = |cause: io::Error| MemoryError::Unreachable { name: name.into(), cause };
        let deadline = Instant::now() + patience;
        let file = loop {
            match rustix::fs::open(
                path(name),
                OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                Mode::empty(),
            ) {
                Err(rustix::io::Errno::NOENT) if Instant::now() < deadline => std::thread::sleep(GATHERING),
                opened => break opened.map_err(|error| unreachable(error.into()))?,
            }
        };
        let status = rustix::fs::fstat(&file).map_err(|error| unreachable(error.into()))?;
        if status.st_size != layout.bytes as i64 || status.st_uid != rustix::process::geteuid().as_raw() {
            return Err(MemoryError::Foreign { name: name.into() });
        }
        let memory = Self::map(name, file, group, me).map_err(unreachable)?;
        let header = memory.header();
        if header.magic != MAGIC || header.agreed != memory.group.agreed() {
            return Err(MemoryError::Foreign { name: name.into() });
        }
        memory.attach().map_err(unreachable)?;
        Ok(memory)
    }

    /// Returns when all ranks have opened it, and its name is gone.
    ///
    /// # Errors
    /// When one does not come within `patience`, or has ended already.
    pub fn gather(&self, patience: Duration) -> Result<(), MemoryError> {
        let begin = Instant::now();
        while self.header().attached.load(Ordering::Acquire) < self.layout.ranks as u32 {
            if let Some(rank) = (0..self.layout.ranks).find(|rank| self.is_dead(*rank)) {
                return Err(MemoryError::Lost { rank: self.group.ranks[rank] });
            }
            if begin.elapsed() >= patience {
                let absent = |rank: &usize| self.seat(*rank).party() == Party::Absent;
                let missing =
                    (0..self.layout.ranks).filter(absent).map(|rank| self.group.ranks[rank]).collect();
                return Err(MemoryError::Incomplete { missing, waited: begin.elapsed() });
            }
            std::thread::sleep(GATHERING);
        }
        Ok(())
    }

    /// The rank in the job of one of this machine's.
    pub(crate) fn rank_of(&self, rank: usize) -> Rank {
        Rank(self.group.ranks[rank] as u16)
    }

    /// This rank's.
    pub(crate) fn rank(&self) -> Rank {
        self.rank_of(self.me)
    }

    /// As a column's rank, once: it has joined the job over machines. All ranks take the first
    /// one's word of what they found there.
    pub fn tell(&self, answer: u32) {
        if self.me == 0 {
            self.header().told.store(answer, Ordering::Release);
        }
        self.header().joined.fetch_add(1, Ordering::AcqRel);
    }

    /// The first rank's word, once all columns have joined; `None` when they have not within
    /// `patience`.
    ///
    /// # Errors
    /// When a column's rank has ended or left before.
    pub fn told(&self, patience: Duration) -> Result<Option<u32>, MemoryError> {
        let begin = Instant::now();
        let columns = 0..self.group.columns;
        loop {
            // Asked first: who has joined may leave as soon as all have. A rank that left may have
            // done so because another one died.
            let dead = columns.clone().find(|rank| self.is_dead(*rank));
            let gone = dead.or_else(|| columns.clone().find(|rank| self.seat(*rank).party() == Party::Left));
            if self.header().joined.load(Ordering::Acquire) == columns.len() as u32 {
                return Ok(Some(self.header().told.load(Ordering::Acquire)));
            }
            if let Some(rank) = gone {
                return Err(MemoryError::Lost { rank: self.group.ranks[rank] });
            }
            if begin.elapsed() >= patience {
                return Ok(None);
            }
            // Told once, as the group begins: no gate is open yet that could wake who waits.
            std::thread::sleep(GATHERING);
        }
    }

    fn map(name: &str, file: OwnedFd, group: Group, me: usize) -> io::Result<Self> {
        let layout = group.layout();
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), layout.bytes, protection, flags, &file, 0)? };
        // SAFETY: the mapping is ours. A child that is forked shall not have it: it is no rank.
        unsafe { rustix::mm::madvise(base, layout.bytes, Advice::LinuxDontFork)? };
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            layout,
            group,
            me,
            name: name.into(),
            owner: getpid(),
            _not_inherited: NotInherited::new(&file),
            file,
            seated: AtomicBool::new(false),
            named: false,
        })
    }

    /// Takes this rank's lock and its seat. The last one takes the name away.
    fn attach(&self) -> io::Result<()> {
        fcntl(&self.file, FcntlArg::F_SETLK(&lock_of(self.me)))?;
        self.seat(self.me).sit_down(process());
        self.seated.store(true, Ordering::Release);
        if self.header().attached.fetch_add(1, Ordering::AcqRel) + 1 == self.layout.ranks as u32 {
            // It is gone where the first rank gave up meanwhile.
            let _ = rustix::fs::unlink(path(&self.name));
        }
        Ok(())
    }

    /// Whether the process of a rank has ended that did not leave.
    pub(crate) fn is_dead(&self, rank: usize) -> bool {
        let seat = self.seat(rank);
        // A process does not see its own locks.
        if seat.party() != Party::Here || seat.process() == process() {
            return false;
        }
        let mut lock = lock_of(rank);
        // A lock that cannot be asked for says nothing.
        let free = fcntl(&self.file, FcntlArg::F_GETLK(&mut lock)).is_ok()
            && lock.l_type == nix::libc::F_UNLCK as i16;
        // It leaves before it gives its lock back.
        free && seat.party() == Party::Here
    }

    /// Tells all others that this rank takes part no more.
    pub(crate) fn leave(&self) {
        if self.is_forked() || !self.seated.swap(false, Ordering::AcqRel) {
            return;
        }
        self.seat(self.me).leave();
        self.ring_all();
    }

    pub(crate) fn ring_all(&self) {
        for rank in 0..self.layout.ranks {
            self.seat(rank).ring();
        }
    }

    pub(crate) fn is_forked(&self) -> bool {
        getpid() != self.owner
    }

    pub(crate) fn seat(&self, rank: usize) -> &Seat {
        assert!(rank < self.layout.ranks);
        // SAFETY: the layout has a place for it within the mapping, aligned; it is made of atomics,
        // to which zeros are values.
        unsafe { self.base.add(self.layout.seats_at).cast::<Seat>().add(rank).as_ref() }
    }

    pub(crate) fn gate(&self, gate: usize) -> &Gate {
        &self.header().gates[gate]
    }

    /// Why the group has ended; 0 while it lives.
    pub(crate) fn ended(&self) -> &AtomicU64 {
        &self.header().ended
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with it, page aligned. Fields that are not atomic are written
        // once, before anybody else can open the file. In the process that writes them, that is
        // before this reference exists.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// A part of a rank's block, in bytes.
    ///
    /// # Safety
    /// Nobody may write it while the slice lives: the rank's contribution is complete, and this
    /// rank has not told that it has summed it.
    pub(crate) unsafe fn contribution(&self, rank: usize, block: u64, range: Range<usize>) -> &[u8] {
        let place = self.contribution_place(rank, block, range);
        // SAFETY: the place is within the mapping; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.base.add(place.start).as_ptr(), place.len()) }
    }

    /// A part of this rank's own block, in bytes.
    ///
    /// # Safety
    /// Nobody may read or write it while the slice lives: what was there is summed, and the new
    /// contribution is not told yet.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the caller's promise")]
    pub(crate) unsafe fn own_contribution(&self, block: u64, range: Range<usize>) -> &mut [u8] {
        let place = self.contribution_place(self.me, block, range);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(place.start).as_ptr(), place.len()) }
    }

    fn contribution_place(&self, rank: usize, block: u64, range: Range<usize>) -> Range<usize> {
        let Layout { blocks, ranks, contributions, contributions_at, .. } = self.layout;
        assert!(rank < ranks && range.start <= range.end && range.end <= blocks.block_bytes);
        let slot = (block % contributions as u64) as usize;
        let begin = contributions_at + (rank * contributions + slot) * blocks.block_bytes;
        begin + range.start..begin + range.end
    }

    /// A part of a segment's sum, in bytes.
    ///
    /// # Safety
    /// Nobody may write it while the slice lives. The caller ensures this: all columns have told
    /// that the segment is ready, and this rank has not yet told that it has read it.
    pub(crate) unsafe fn result(&self, segment: u64, range: Range<usize>) -> &[u8] {
        let place = self.result_place(segment, range);
        // SAFETY: the place is within the mapping; the rest is the caller's.
        unsafe { std::slice::from_raw_parts(self.base.add(place.start).as_ptr(), place.len()) }
    }

    /// A part of this rank's column of a segment's sum, in bytes.
    ///
    /// # Safety
    /// Nobody else may read or write it while it is in use. The caller ensures this: all ranks have
    /// read the segment that stood there, and this column has not yet told that the new one is
    /// ready.
    pub(crate) unsafe fn own_result(&self, segment: u64, range: Range<usize>) -> NonNull<[u8]> {
        let place = self.result_place(segment, range);
        // SAFETY: the place is within the mapping.
        NonNull::slice_from_raw_parts(unsafe { self.base.add(place.start) }, place.len())
    }

    fn result_place(&self, segment: u64, range: Range<usize>) -> Range<usize> {
        let Layout { blocks, results_at, .. } = self.layout;
        assert!(range.start <= range.end && range.end <= blocks.segment_bytes);
        let begin = results_at + self.segment_slot(segment) * blocks.segment_bytes;
        begin + range.start..begin + range.end
    }

    /// The place of a segment in its ring.
    pub(crate) fn segment_slot(&self, segment: u64) -> usize {
        (segment % self.layout.segments as u64) as usize
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // The mapping was not inherited; what is at its address now is the child's own.
        if self.is_forked() {
            return;
        }
        self.leave();
        if self.named && self.header().attached.load(Ordering::Acquire) < self.layout.ranks as u32 {
            // Somebody did not come, and nobody is to any more.
            let _ = rustix::fs::unlink(path(&self.name));
        }
        // SAFETY: the mapping is ours, of this length, and no reference into it outlives this.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.bytes) };
    }
}

fn path(name: &str) -> String {
    format!("{FOLDER}/{name}")
}

/// The record lock of a rank: one byte.
fn lock_of(rank: usize) -> nix::libc::flock {
    nix::libc::flock {
        l_type: nix::libc::F_WRLCK as i16,
        l_whence: nix::libc::SEEK_SET as i16,
        l_start: rank as i64,
        l_len: 1,
        l_pid: 0,
    }
}

/// This process, unlike any other of the machine: process ids mean nothing between containers.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| {
        let mut bytes = [0; 8];
        // Without, a process id has to do.
        match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
            Ok(8) => u64::from_ne_bytes(bytes) | 1,
            _ => u64::from(getpid().as_raw_nonzero().get().unsigned_abs()),
        }
    })
}
