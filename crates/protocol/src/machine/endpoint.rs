//! The contract that every machine shares.
//!
//! A machine owns no socket, no clock and no thread. Its driver calls it in this order, forever:
//!
//! 1. [`Endpoint::handle_packet`] for each datagram that came, [`Endpoint::handle_timeout`] when
//!    [`Endpoint::poll_timeout`] has passed, and the machine's own mutations (submit, abort, ...)
//!    as they come;
//! 2. then drain: [`Endpoint::poll_transmit`] until it returns `None`, [`Endpoint::poll_event`]
//!    until it returns `None`;
//! 3. then sleep until [`Endpoint::poll_timeout`] or the next packet.
//!
//! Several packets may be handled before one drain: that is how answers gather into trains.

use core::time::Duration;
use fanin_wire::{Preamble, WireError};

use super::Packet;

/// A point in time as the driver counts it: nanoseconds since an origin of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// Time since `earlier`; zero if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl core::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// A run of packets of one size (the last may be shorter) for the same recipients: the unit of
/// input and output.
#[derive(Debug, PartialEq, Eq)]
pub struct Transmit<'a, A> {
    /// Every one of these gets the same bytes.
    pub to: &'a [A],
    /// Bytes written to the driver's buffer.
    pub bytes: usize,
    /// Bytes of each packet; the last may have fewer.
    pub segment_bytes: usize,
}

/// A machine's verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It counted.
    Absorb,
    /// It goes on towards its server, alone or with what it was added to.
    Forward,
    /// It completed a slot or a fragment, or is the result: that goes to every worker.
    Multicast,
    /// Its sender lacks a result that is still here: it goes to that one alone.
    ReplyUnicast,
    /// It had no effect.
    Drop(Reason),
}

/// Why a packet had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Not a packet of ours: too short, wrong magic, impossible field.
    Malformed,
    /// Another version of the wire format.
    Version,
    /// No such job here.
    UnknownJob,
    /// A generation of the job that is over, or has not begun here.
    Generation,
    /// A worker, shard or slot that the job does not have.
    OutOfRange,
    /// A payload of another length than the job's chunks.
    ChunkLength,
    /// A bfloat16 payload with another exponent than all workers agreed on for its chunk.
    Exponent,
    /// A packet kind that this machine does not take, or not now.
    Unexpected,
    /// A contribution that was counted before (SwitchML Alg. 3, line 23).
    Duplicate,
    /// A turn of the slot that is over.
    Stale,
    /// A turn of the slot that cannot have begun.
    Ahead,
    /// The job was aborted.
    Aborted,
    /// From an address that is not that of the worker, switch or server which it claims to be from.
    Foreign,
    /// A sum that shares some workers, but not all, with what is already counted.
    Overlap,
    /// No room to send it on: best effort ends here.
    OutboxFull,
    /// Without the tag that only a member of the job can write.
    Forged,
    /// The flow was not announced: its rendezvous comes later, or never.
    Unannounced,
    /// Labelled by another plan than the job's (GOAT): of another planner, or for workers that were
    /// told unlike ones.
    Unplanned,
    /// A part of a sum for which the server has no memory: it comes again.
    NoRoom,
}

impl Reason {
    /// All reasons, in order: one counter each.
    pub const ALL: [Self; 19] = [
        Self::Malformed,
        Self::Version,
        Self::UnknownJob,
        Self::Generation,
        Self::OutOfRange,
        Self::ChunkLength,
        Self::Exponent,
        Self::Unexpected,
        Self::Duplicate,
        Self::Stale,
        Self::Ahead,
        Self::Aborted,
        Self::Foreign,
        Self::Overlap,
        Self::OutboxFull,
        Self::Forged,
        Self::Unannounced,
        Self::Unplanned,
        Self::NoRoom,
    ];

    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Version => "version",
            Self::UnknownJob => "unknown_job",
            Self::Generation => "generation",
            Self::OutOfRange => "out_of_range",
            Self::ChunkLength => "chunk_length",
            Self::Exponent => "exponent",
            Self::Unexpected => "unexpected",
            Self::Duplicate => "duplicate",
            Self::Stale => "stale",
            Self::Ahead => "ahead",
            Self::Aborted => "aborted",
            Self::Foreign => "foreign",
            Self::Overlap => "overlap",
            Self::OutboxFull => "outbox_full",
            Self::Forged => "forged",
            Self::Unannounced => "unannounced",
            Self::Unplanned => "unplanned",
            Self::NoRoom => "no_room",
        }
    }
}

/// Why a datagram is none of ours.
impl From<WireError> for Reason {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Version { .. } => Self::Version,
            _ => Self::Malformed,
        }
    }
}

/// A protocol state machine.
pub trait Endpoint {
    /// How the driver names a peer: a socket address, or a node of the simulator.
    type Address: Copy;
    /// An event that the machine tells its owner.
    type Event;

    /// The door: takes one datagram as it came from the network. It reads the preamble, so that a
    /// machine is never handed what is no packet of ours.
    #[inline]
    fn handle_packet(&mut self, now: Instant, from: Self::Address, bytes: &[u8]) -> Verdict {
        match Packet::parse(bytes) {
            Ok(packet) => self.handle_parsed(now, from, &packet),
            Err(reason) => self.count(Verdict::Drop(reason)),
        }
    }
    /// Takes a packet whose preamble the driver has parsed.
    #[inline]
    fn handle_parsed(&mut self, now: Instant, from: Self::Address, packet: &Packet<'_>) -> Verdict {
        debug_assert_eq!(Preamble::parse(packet.bytes), Ok(packet.preamble));
        let verdict = self.receive(now, &from, packet).unwrap_or_else(Verdict::Drop);
        self.count(verdict)
    }
    /// Does what a packet is for; or says why it has no effect. The door calls this.
    fn receive(&mut self, now: Instant, from: &Self::Address, packet: &Packet<'_>)
    -> Result<Verdict, Reason>;
    /// Counts what became of a datagram, and hands the verdict through. The door calls this.
    fn count(&mut self, verdict: Verdict) -> Verdict;
    /// Acts on what is due at `now`.
    fn handle_timeout(&mut self, now: Instant);
    /// Writes the next train into `train` (64 KiB always suffice; not less than one packet) and
    /// says whom it is for.
    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, Self::Address>>;
    /// The next thing that the owner should know.
    fn poll_event(&mut self) -> Option<Self::Event>;
    /// When [`Self::handle_timeout`] is to be called, if at all.
    fn poll_timeout(&self) -> Option<Instant>;
}
