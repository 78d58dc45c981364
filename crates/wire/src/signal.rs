//! DLCP's signals: what two ends say of a flow, reliably and before all data (DLCP §3.2.1, §4.1).
//!
//! A flow's sender says `Start`, `Stop` and `Confirm`, its receiver `Report`, `Request` and
//! `Finish`. So the signal's kind tells two flows of the same number apart.

use crate::preamble::PREAMBLE_BYTES;
use crate::{
    Collective, FlowId, Key, Kind, LossBound, PATHS_MAX, PRIORITIES, Preamble, TAG_BYTES, WireError, bytes_at,
};

/// The bytes before a signal's own fields.
const HEADER_BYTES: usize = PREAMBLE_BYTES + 8;
/// The offset of the path that the packet takes.
pub(crate) const SIGNAL_PATH_OFFSET: usize = HEADER_BYTES - 1;
/// The longest signal, a full request.
pub const SIGNAL_BYTES_MAX: usize = HEADER_BYTES + 4 + REQUEST_BYTES + TAG_BYTES;
/// Blocks that one request speaks of, a bit each; part `i` begins with block `i * REQUEST_BLOCKS`.
pub const REQUEST_BLOCKS: u32 = 4096;
const REQUEST_BYTES: usize = REQUEST_BLOCKS as usize / 8;
const START_BYTES: usize = Collective::BYTES + 12;
const REPORT_BYTES: usize = 12;

/// The rendezvous (DLCP §3.2.1): tensor, size and bound. Data does not wait for it, and is dropped
/// where it comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The tensor, and what is done with it.
    pub collective: Collective,
    /// Elements of the flow: the tensor's, or those of a part of it. Not zero.
    pub elements: u32,
    /// Its loss bound.
    pub bound: LossBound,
    /// In which queue its blocks travel, both ways; not that of signals.
    pub priority: u8,
    /// Whether its sender has blocks to send: who only gets what another one broadcasts has none.
    pub has_blocks: bool,
}

/// The measurement of a receiver since its last report. The answer to a start has measured nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Counts the flow's reports: an older one than the last is of no use.
    pub number: u32,
    /// Data packets that came.
    pub packets: u32,
    /// In so many microseconds.
    pub period_us: u32,
}

/// A message about a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal<'a> {
    /// Sender: this flow is coming.
    Start(Start),
    /// Sender: all of this round has been sent.
    Stop,
    /// Sender: the flow's end was heard, and nothing more comes.
    Confirm,
    /// Receiver: how fast it comes.
    Report(Report),
    /// Receiver: these blocks are missing; begins the round of its number.
    Request {
        /// Which [`REQUEST_BLOCKS`] of the flow it speaks of.
        part: u16,
        /// A bit for each block, set where it is missing; as long as the part has blocks.
        missing: &'a [u8],
    },
    /// Receiver: the bound is met, nothing more is asked for.
    Finish,
}

impl Signal<'_> {
    const fn code(&self) -> u8 {
        match self {
            Self::Start(_) => 1,
            Self::Stop => 2,
            Self::Confirm => 3,
            Self::Report(_) => 4,
            Self::Request { .. } => 5,
            Self::Finish => 6,
        }
    }

    /// Length of its packet.
    #[must_use]
    pub const fn packet_bytes(&self) -> usize {
        HEADER_BYTES
            + TAG_BYTES
            + match self {
                Self::Start(_) => START_BYTES,
                Self::Report(_) => REPORT_BYTES,
                Self::Request { missing, .. } => 4 + missing.len(),
                Self::Stop | Self::Confirm | Self::Finish => 0,
            }
    }
}

/// A checked signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalPacket<'a> {
    /// Sender and job.
    pub preamble: Preamble,
    /// The flow.
    pub flow: FlowId,
    /// The round that it is about; wraps.
    pub round: u16,
    /// Which of the job's paths it takes, as a block's tag says. Below [`PATHS_MAX`].
    pub path: u8,
    /// What it says.
    pub signal: Signal<'a>,
}

impl<'a> SignalPacket<'a> {
    /// Reads what follows the preamble of a signal. Its tag is the reader's to check.
    pub fn parse(preamble: Preamble, packet: &'a [u8]) -> Result<Self, WireError> {
        if preamble.kind != Kind::Signal {
            return Err(WireError::Kind(preamble.kind as u8));
        }
        let truncated = |need| WireError::Truncated { need, have: packet.len() };
        let short = truncated(HEADER_BYTES + TAG_BYTES);
        let &[f0, f1, f2, f3, r0, r1, code, path] = bytes_at(packet, PREAMBLE_BYTES).ok_or(short)?;
        let end = packet.len().checked_sub(TAG_BYTES).ok_or(short)?;
        let body = packet.get(HEADER_BYTES..end).ok_or(short)?;
        if path >= PATHS_MAX {
            return Err(WireError::Field("path"));
        }
        let signal = match code {
            1 => Signal::Start(parse_start(fixed(body)?)?),
            2 | 3 | 6 => {
                let [] = *fixed(body)?;
                match code {
                    2 => Signal::Stop,
                    3 => Signal::Confirm,
                    _ => Signal::Finish,
                }
            }
            4 => {
                let words: &[u8; REPORT_BYTES] = fixed(body)?;
                let [number, packets, period_us] = [0, 4, 8].map(|at| word(words, at));
                Signal::Report(Report { number, packets, period_us })
            }
            5 => {
                let (&[p0, p1, z0, z1], missing) = body.split_first_chunk().ok_or(short)?;
                if [z0, z1] != [0; 2] {
                    return Err(WireError::Field("zero"));
                }
                if missing.is_empty() || missing.len() > REQUEST_BYTES {
                    return Err(WireError::PayloadLength(missing.len()));
                }
                Signal::Request { part: u16::from_le_bytes([p0, p1]), missing }
            }
            _ => return Err(WireError::Field("signal")),
        };
        Ok(Self {
            preamble,
            flow: FlowId(u32::from_le_bytes([f0, f1, f2, f3])),
            round: u16::from_le_bytes([r0, r1]),
            path,
            signal,
        })
    }

    /// Writes it as a packet of the job that has `key` into `out`, which is as long as
    /// [`Signal::packet_bytes`] says.
    ///
    /// # Panics
    /// When `out` has another length.
    pub fn write(&self, out: &mut [u8], key: Key) {
        assert_eq!(out.len(), self.signal.packet_bytes());
        out[..PREAMBLE_BYTES].copy_from_slice(&self.preamble.to_bytes());
        out[12..16].copy_from_slice(&self.flow.0.to_le_bytes());
        out[16..18].copy_from_slice(&self.round.to_le_bytes());
        out[18..HEADER_BYTES].copy_from_slice(&[self.signal.code(), self.path]);
        let end = out.len() - TAG_BYTES;
        let body = &mut out[HEADER_BYTES..end];
        match &self.signal {
            Signal::Start(start) => write_start(start, body),
            Signal::Report(Report { number, packets, period_us }) => {
                for (out, word) in body.as_chunks_mut().0.iter_mut().zip([number, packets, period_us]) {
                    *out = word.to_le_bytes();
                }
            }
            Signal::Request { part, missing } => {
                body[..2].copy_from_slice(&part.to_le_bytes());
                body[2..4].fill(0);
                body[4..].copy_from_slice(missing);
            }
            Signal::Stop | Signal::Confirm | Signal::Finish => {}
        }
        key.seal(out);
    }
}

/// The body of a signal that has one length.
fn fixed<const N: usize>(body: &[u8]) -> Result<&[u8; N], WireError> {
    body.try_into().map_err(|_| WireError::PayloadLength(body.len()))
}

const fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn parse_start(body: &[u8; START_BYTES]) -> Result<Start, WireError> {
    let (collective, rest) = body.split_first_chunk().ok_or(WireError::PayloadLength(body.len()))?;
    let (elements, millionths) = (word(rest, 0), word(rest, 4));
    let [priority, has_blocks, z0, z1] = [rest[8], rest[9], rest[10], rest[11]];
    if elements == 0 {
        return Err(WireError::Field("elements"));
    }
    if priority == 0 || priority >= PRIORITIES {
        return Err(WireError::Field("priority"));
    }
    if has_blocks > 1 || [z0, z1] != [0; 2] {
        return Err(WireError::Field("zero"));
    }
    Ok(Start {
        collective: Collective::parse(*collective)?,
        elements,
        bound: LossBound::from_millionths(millionths).ok_or(WireError::Field("bound"))?,
        priority,
        has_blocks: has_blocks == 1,
    })
}

fn write_start(start: &Start, body: &mut [u8]) {
    let Start { collective, elements, bound, priority, has_blocks } = *start;
    body[..8].copy_from_slice(&collective.to_bytes());
    body[8..12].copy_from_slice(&elements.to_le_bytes());
    body[12..16].copy_from_slice(&bound.millionths().to_le_bytes());
    body[16..20].copy_from_slice(&[priority, u8::from(has_blocks), 0, 0]);
}
