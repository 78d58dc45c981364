//! The tensors of a job as one continuous stream of chunks (SwitchML Appendix B).

use alloc::collections::VecDeque;
use core::ops::Range;
use fanin_quant::Exponent;
use fanin_wire::{Collective, Dtype, Op, Operation, Participants, Pattern, WireDtype};

use crate::machine::{Elements, Instant, Loss, Tensor, TensorTimes};

#[derive(Debug)]
pub(crate) struct Stream<T> {
    /// Elements of a chunk as int32.
    size_class: usize,
    /// How large float tensors travel.
    wire_dtype: WireDtype,
    /// Whether all chunks are of one length, however their elements travel: integers, whose floats
    /// are written as it suits until they are added.
    is_even: bool,
    /// Unfinished tensors by their first chunk, and finished ones behind an unfinished one.
    entries: VecDeque<Entry<T>>,
    /// Number of the chunk after the last.
    end: u64,
    /// Number of the next tensor.
    sequence: u16,
    outstanding: usize,
    /// Chunks of the next tensor that are not to be waited for.
    skipped: u64,
}

#[derive(Debug)]
struct Entry<T> {
    /// `None` once finished and given back.
    tensor: Option<T>,
    collective: Collective,
    participants: Participants,
    /// Elements of a chunk.
    chunk_elements: usize,
    /// Elements here; `collective` has those of the whole tensor.
    elements: usize,
    first_chunk: u64,
    chunks_left: u64,
    /// When the first of its packets was written; far in the future before.
    first_sent: Instant,
    first_result: Instant,
    /// The part that its chunks lack so far.
    loss: Loss,
}

/// A chunk and the tensor that it belongs to.
pub(crate) struct Chunk<'a, T> {
    stream: &'a mut Stream<T>,
    entry: usize,
    chunk: u64,
}

impl<T: Tensor> Stream<T> {
    pub(crate) const fn new(size_class: usize, wire_dtype: WireDtype) -> Self {
        Self {
            size_class,
            wire_dtype,
            is_even: false,
            entries: VecDeque::new(),
            end: 0,
            sequence: 0,
            outstanding: 0,
            skipped: 0,
        }
    }

    /// A stream of integers, in chunks of `elements`.
    pub(crate) fn even(elements: usize, wire_dtype: WireDtype) -> Self {
        Self { is_even: true, ..Self::new(elements, wire_dtype) }
    }

    /// How a tensor of `elements` elements travels.
    const fn wire_dtype(&self, dtype: Dtype, elements: usize, is_moved: bool) -> WireDtype {
        if is_moved && !self.is_even {
            return WireDtype::Native;
        }
        match self.wire_dtype.of_tensor(dtype, elements) {
            WireDtype::Native if self.is_even => WireDtype::SharedExponent,
            wire_dtype => wire_dtype,
        }
    }

    /// Makes an empty stream go on where another has come to: its next tensor has the number
    /// `collective`, and chunk `chunk` of the stream is the tensor's chunk `skipped`.
    pub(crate) fn begin_at(&mut self, chunk: u64, collective: u16, skipped: u32) {
        assert!(self.entries.is_empty(), "a stream begins before it has tensors");
        self.skipped = skipped.into();
        self.end = chunk.checked_sub(self.skipped).expect("a tensor begins in the stream");
        self.sequence = collective;
    }

    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    pub(crate) const fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Counts a tensor without elements: it has a number, and no chunk.
    pub(crate) const fn skip(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Appends a tensor that has elements.
    pub(crate) fn push(&mut self, mut tensor: T, Operation { op, pattern }: Operation) {
        let (whole, participants) = (tensor.whole_elements(), tensor.participants());
        let elements = tensor.elements();
        let (count, dtype) = (elements.count(), elements.dtype());
        let is_moved = matches!(pattern, Pattern::Broadcast(_));
        let collective = Collective {
            sequence: self.sequence,
            dtype,
            // Nothing is added where it is only moved.
            op: if is_moved { Op::Sum } else { op },
            pattern,
            elements: u32::try_from(whole).expect("the owner splits tensors of over u32::MAX elements"),
            wire_dtype: self.wire_dtype(dtype, whole, is_moved),
        };
        let chunk_elements =
            if self.is_even { self.size_class } else { collective.chunk_elements(self.size_class) };
        let chunks = count.div_ceil(chunk_elements) as u64;
        let skipped = core::mem::take(&mut self.skipped);
        assert!(skipped < chunks, "{skipped} of {chunks} chunks are not to be waited for");
        self.entries.push_back(Entry {
            tensor: Some(tensor),
            collective,
            participants,
            chunk_elements,
            elements: count,
            first_chunk: self.end,
            chunks_left: chunks - skipped,
            first_sent: Instant(u64::MAX),
            first_result: Instant(u64::MAX),
            loss: Loss::default(),
        });
        self.end += chunks;
        self.sequence = self.sequence.wrapping_add(1);
        self.outstanding += 1;
    }

    /// The unfinished tensor that has this chunk.
    pub(crate) fn locate(&mut self, chunk: u64) -> Option<Chunk<'_, T>> {
        if chunk >= self.end {
            return None;
        }
        let entry = self.entries.partition_point(|entry| entry.first_chunk <= chunk).checked_sub(1)?;
        self.entries[entry].tensor.is_some().then_some(Chunk { stream: self, entry, chunk })
    }

    /// The exponent of a chunk's block; unknown if the chunk is not there yet, and none where it is
    /// not scaled.
    pub(crate) fn exponent(&mut self, chunk: u64) -> Exponent {
        let Some(mut place) = self.locate(chunk) else { return Exponent::UNKNOWN };
        if !place.collective().has_exponents() {
            return Exponent::ZERO;
        }
        let range = place.range();
        place.elements().exponent(range)
    }

    /// Takes all unfinished tensors out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        self.outstanding = 0;
        self.entries.drain(..).filter_map(|entry| entry.tensor)
    }
}

impl<T: Tensor> Chunk<'_, T> {
    pub(crate) fn collective(&self) -> Collective {
        self.stream.entries[self.entry].collective
    }

    pub(crate) fn participants(&self) -> Participants {
        self.stream.entries[self.entry].participants
    }

    /// Number of the chunk within its tensor.
    pub(crate) fn chunk(&self) -> u32 {
        // A tensor has at most u32::MAX elements, so its chunks fit.
        (self.chunk - self.stream.entries[self.entry].first_chunk) as u32
    }

    /// Elements of a full chunk of the tensor.
    pub(crate) fn chunk_elements(&self) -> usize {
        self.stream.entries[self.entry].chunk_elements
    }

    /// The chunk's elements; the tensor's last chunk may have fewer.
    pub(crate) fn range(&self) -> Range<usize> {
        let entry = &self.stream.entries[self.entry];
        let begin = self.chunk() as usize * entry.chunk_elements;
        begin..(begin + entry.chunk_elements).min(entry.elements)
    }

    pub(crate) fn elements(&mut self) -> Elements<'_> {
        let entry = &mut self.stream.entries[self.entry];
        entry.tensor.as_mut().expect("a chunk is of an unfinished tensor").elements()
    }

    /// Notes that a packet of the tensor goes out. The first counts; a minimum is no branch, and
    /// every packet comes by.
    #[inline]
    pub(crate) fn sent(&mut self, now: Instant) {
        let entry = &mut self.stream.entries[self.entry];
        entry.first_sent = entry.first_sent.min(now);
    }

    /// The part that the tensor's chunks lack so far.
    pub(crate) fn loss(&mut self) -> &mut Loss {
        &mut self.stream.entries[self.entry].loss
    }

    /// Counts the chunk as done; the tensor, and when it was sent and summed, if it was its last.
    #[inline]
    pub(crate) fn finish_chunk(self, now: Instant) -> Option<(T, TensorTimes)> {
        let entry = &mut self.stream.entries[self.entry];
        entry.first_result = entry.first_result.min(now);
        entry.chunks_left -= 1;
        if entry.chunks_left > 0 {
            return None;
        }
        let times = TensorTimes {
            first_sent: entry.first_sent,
            first_result: entry.first_result,
            last_result: now,
            loss: entry.loss,
        };
        let tensor = entry.tensor.take();
        self.stream.outstanding -= 1;
        while self.stream.entries.front().is_some_and(|entry| entry.tensor.is_none()) {
            self.stream.entries.pop_front();
        }
        tensor.map(|tensor| (tensor, times))
    }
}
