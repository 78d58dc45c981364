//! The cuts of a collective's tensors, which are the same on every rank of every machine. Segments
//! follow in the order of the stream. Each column has a slice of each segment. Pieces of the slices
//! pass through shared memory together.
//!
//! A segment has a stretch of every tensor, one behind the other. So a collective that has a slice
//! for each rank is one stream, too. Each machine has a part of a segment: the stretches of its
//! ranks' slices. The columns divide each machine's part evenly, so that each column sends as much to
//! every machine.

use fanin_wire::Dtype;
use std::ops::Range;
use std::sync::Arc;

/// Every cut of a single tensor is a multiple of it, so that no two columns write one line of a
/// cache.
const GRAIN_ELEMENTS: usize = 64;
/// Shortest slice that pays for another column: its messages cost more than its bytes.
const SLICE_BYTES_MIN: usize = 16 << 10;

/// The sizes that the memory of a group is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Ranks that sum.
    pub(crate) columns: usize,
    /// The bytes that a rank contributes at a time.
    pub(crate) block_bytes: usize,
    /// The bytes in one place of the results.
    pub(crate) segment_bytes: usize,
    /// Whether the sums go on to other machines: half precision is kept in `f32` until it comes
    /// back, and rounded once.
    pub(crate) networked: bool,
}

/// One collective's cuts.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) dtype: Dtype,
    /// Of each tensor.
    pub(crate) elements: usize,
    /// The dtype of a machine's sum.
    pub(crate) sum_dtype: Dtype,
    /// The index at which the tensors of the first machine begin, of the next, and so on, and their
    /// number. A single tensor is every machine's.
    groups: Arc<[usize]>,
    columns: usize,
    networked: bool,
    adds: bool,
    /// Most elements of a tensor in a segment.
    stretch_elements: usize,
    /// Most elements of a column's part of a block.
    piece_elements: usize,
}

/// A part of all tensors whose sums are handed on together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Of each tensor.
    pub(crate) start: usize,
    /// Of each tensor.
    pub(crate) elements: usize,
    /// Columns that have a slice.
    used: usize,
    /// How often every rank contributes; at least once, also to nothing.
    pub(crate) blocks: usize,
}

/// The part of one tensor in a range of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) tensor: usize,
    pub(crate) of_tensor: Range<usize>,
    pub(crate) of_segment: Range<usize>,
}

impl Segment {
    /// Its part of a tensor.
    pub(crate) const fn of(self, tensor: usize) -> Stretch {
        let Self { start, elements, .. } = self;
        Stretch {
            tensor,
            of_tensor: start..start + elements,
            of_segment: tensor * elements..(tensor + 1) * elements,
        }
    }
}

impl Cut {
    /// Cuts tensors of `elements` each, in `groups`. The ranks' tensors are added, or one rank's
    /// goes to all.
    pub(crate) fn new(
        blocks: Blocks,
        groups: Arc<[usize]>,
        adds: bool,
        dtype: Dtype,
        elements: usize,
    ) -> Self {
        let sum_dtype = match dtype {
            Dtype::Float16 | Dtype::Bfloat16 if blocks.networked => Dtype::Float32,
            other => other,
        };
        let piece = blocks.block_bytes / blocks.columns / dtype.element_bytes();
        let piece_elements = piece / GRAIN_ELEMENTS * GRAIN_ELEMENTS;
        let block_elements = piece_elements * blocks.columns;
        assert!(block_elements > 0, "a block holds a grain of every column: Blocks are made so");
        let in_segment = (blocks.segment_bytes / sum_dtype.element_bytes() / block_elements).max(1);
        let tensors = groups.last().copied().unwrap_or(1);
        let stretch = in_segment * block_elements / tensors;
        assert!(
            stretch > 0,
            "a segment holds something of every tensor: there are no more than elements in a block"
        );
        Self {
            dtype,
            elements,
            sum_dtype,
            groups,
            columns: blocks.columns,
            networked: blocks.networked,
            adds,
            stretch_elements: (stretch / GRAIN_ELEMENTS * GRAIN_ELEMENTS).max(stretch.min(GRAIN_ELEMENTS)),
            piece_elements,
        }
    }

    pub(crate) const fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn tensors(&self) -> usize {
        self.groups.last().copied().unwrap_or(1)
    }

    /// At least one, so that an empty tensor has its turn, too.
    pub(crate) fn segments(&self) -> usize {
        self.elements.div_ceil(self.stretch_elements).max(1)
    }

    pub(crate) fn segment(&self, index: usize) -> Segment {
        let start = index * self.stretch_elements;
        let elements = (self.elements - start).min(self.stretch_elements);
        let bytes = elements * self.tensors() * self.dtype.element_bytes();
        let used = if self.networked || self.tensors() == 1 {
            bytes.div_ceil(SLICE_BYTES_MIN).clamp(1, self.columns)
        } else {
            // Then each column's slice is what its own rank gets.
            self.columns
        };
        let mut segment = Segment { start, elements, used, blocks: 1 };
        if self.adds {
            let slice = |column| self.slices(segment, column).map(|slice| slice.len()).sum::<usize>();
            let longest = (0..used).map(slice).max().unwrap_or_default();
            segment.blocks = longest.div_ceil(self.piece_elements).max(1);
        }
        segment
    }

    /// The slices of a segment for a column, one for each machine where tensors belong to some, in
    /// elements of the segment.
    pub(crate) fn slices(&self, segment: Segment, column: usize) -> impl Iterator<Item = Range<usize>> {
        let Segment { elements, used, .. } = segment;
        let grain = if self.tensors() == 1 { GRAIN_ELEMENTS } else { 1 };
        self.groups.windows(2).map(move |group| {
            let (begin, length) = (group[0] * elements, (group[1] - group[0]) * elements);
            let cut = |column: usize| {
                begin + (length * column.min(used) / used).next_multiple_of(grain).min(length)
            };
            cut(column)..cut(column + 1)
        })
    }

    /// The part of a column's slices that is in one block, of how many a rank contributes.
    pub(crate) fn piece(
        &self,
        segment: Segment,
        column: usize,
        block: usize,
    ) -> impl Iterator<Item = Stretch> {
        let (mut skip, mut take) = (block * self.piece_elements, self.piece_elements);
        self.slices(segment, column).flat_map(move |slice| {
            let start = (slice.start + skip).min(slice.end);
            skip -= start - slice.start;
            let end = (start + take).min(slice.end);
            take -= end - start;
            stretches(segment, start..end)
        })
    }

    /// The offset of a column's piece in a rank's block, in bytes.
    pub(crate) fn piece_offset(&self, column: usize) -> usize {
        column * self.piece_elements * self.dtype.element_bytes()
    }
}

/// The part of each tensor in a range of a segment.
fn stretches(segment: Segment, range: Range<usize>) -> impl Iterator<Item = Stretch> {
    // In a segment without elements every range is empty.
    let Segment { start: of_each, elements, .. } = segment;
    let each = elements.max(1);
    let tensors = if range.is_empty() { 0..0 } else { range.start / each..range.end.div_ceil(each) };
    tensors.map(move |tensor| {
        let first = tensor * each;
        let of_segment = range.start.max(first)..range.end.min(first + each);
        let of_tensor = of_each + of_segment.start - first..of_each + of_segment.end - first;
        Stretch { tensor, of_tensor, of_segment }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks() -> impl Strategy<Value = Blocks> {
        (1usize..=64, 15u32..19, 0u32..5, any::<bool>()).prop_map(|(columns, block, times, networked)| {
            Blocks {
                columns,
                // Two kilobytes are a grain of the longest elements four times over.
                block_bytes: (1 << block).max(columns * 2048),
                segment_bytes: (1usize << block).max(columns * 2048) << times,
                networked,
            }
        })
    }

    /// A single tensor; or one for each rank of one machine, or of several.
    fn groups(blocks: Blocks, is_one: bool, more: &[usize]) -> Arc<[usize]> {
        let machines: Vec<usize> = match (is_one, blocks.networked) {
            (true, _) => vec![1],
            (false, false) => vec![blocks.columns],
            (false, true) => more.iter().map(|more| blocks.columns.min(8) + more).collect(),
        };
        let border = |count: &usize, at: &mut usize| {
            *at += count;
            *at
        };
        let mut at = 0;
        std::iter::once(0).chain(machines.iter().map(|count| border(count, &mut at))).collect()
    }

    proptest! {
        #[test]
        fn the_pieces_cover_all_tensors_once_and_fit_their_places(
            blocks in blocks(),
            is_one in any::<bool>(),
            more in prop::collection::vec(0usize..4, 2..5),
            dtype in prop::sample::select(Dtype::ALL.to_vec()),
            elements in prop_oneof![0usize..300, 0usize..300_000],
        ) {
            let cut = Cut::new(blocks, groups(blocks, is_one, &more), true, dtype, elements);
            let mut next = 0;
            for index in 0..cut.segments() {
                let segment = cut.segment(index);
                prop_assert_eq!(segment.start, next);
                let bytes = segment.elements * cut.tensors() * cut.sum_dtype.element_bytes();
                // Longer than asked for only where one block is.
                prop_assert!(bytes <= blocks.segment_bytes.max(2 * blocks.block_bytes));
                let mut all = Vec::new();
                for column in 0..blocks.columns {
                    let mut pieces = Vec::new();
                    for block in 0..segment.blocks {
                        let piece: Vec<_> = cut.piece(segment, column, block).collect();
                        let length: usize = piece.iter().map(|stretch| stretch.of_segment.len()).sum();
                        let place = cut.piece_offset(column)..cut.piece_offset(column) + length * dtype.element_bytes();
                        let room = if column + 1 < blocks.columns { cut.piece_offset(column + 1) } else { blocks.block_bytes };
                        prop_assert!(place.end <= room, "{place:?} in {room}");
                        pieces.extend(piece);
                    }
                    let of_pieces: usize = pieces.iter().map(|piece| piece.of_segment.len()).sum();
                    prop_assert_eq!(of_pieces, cut.slices(segment, column).map(|slice| slice.len()).sum::<usize>());
                    all.extend(pieces);
                }
                all.sort_by_key(|piece| piece.of_segment.start);
                let mut at = 0;
                for Stretch { tensor, of_tensor, of_segment } in all {
                    prop_assert_eq!(of_segment.start, at);
                    prop_assert_eq!(of_tensor.len(), of_segment.len());
                    prop_assert_eq!(tensor * segment.elements + of_tensor.start - segment.start, at);
                    prop_assert!(of_tensor.end <= segment.start + segment.elements);
                    at = of_segment.end;
                }
                prop_assert_eq!(at, segment.elements * cut.tensors());
                next += segment.elements;
            }
            prop_assert_eq!(next, elements);
        }
    }

    fn one() -> Arc<[usize]> {
        Arc::from([0, 1])
    }

    #[test]
    fn a_small_tensor_is_one_columns_and_a_large_one_is_everybodys() {
        let blocks = Blocks { columns: 4, block_bytes: 1 << 18, segment_bytes: 1 << 22, networked: true };
        let used = |elements| {
            let cut = Cut::new(blocks, one(), true, Dtype::Float32, elements);
            let is_used = |column: &usize| cut.slices(cut.segment(0), *column).any(|slice| !slice.is_empty());
            (0..4).filter(is_used).count()
        };
        assert_eq!([1, 4096, 4097, 100_000].map(used), [1, 1, 2, 4]);
    }

    #[test]
    fn a_column_has_what_its_own_ranks_get() {
        let slices = |networked, groups: &[usize], elements| {
            let blocks = Blocks { columns: 2, block_bytes: 1 << 18, segment_bytes: 1 << 22, networked };
            let cut = Cut::new(blocks, groups.into(), true, Dtype::Float32, elements);
            let ends = |slice: Range<usize>| (slice.start, slice.end);
            [0, 1].map(|column| cut.slices(cut.segment(0), column).map(ends).collect::<Vec<_>>())
        };
        assert_eq!(slices(false, &[0, 2], 7), [[(0, 7)], [(7, 14)]]);
        assert_eq!(
            slices(true, &[0, 2, 4], 9001),
            [[(0, 9001), (18002, 27003)], [(9001, 18002), (27003, 36004)]]
        );
        // Each column has half of three ranks' tensors on one machine.
        assert_eq!(
            slices(true, &[0, 3, 5], 5000),
            [[(0, 7500), (15000, 20000)], [(7500, 15000), (20000, 25000)]]
        );
    }
}
