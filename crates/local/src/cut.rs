//! How a tensor is cut: segments in the order of the stream, a slice of each segment for each column, and the pieces of the slices
//! that pass through shared memory together. The same on every rank of every machine.

use fanin_wire::Dtype;
use std::ops::Range;

/// Every cut is a multiple of it, so that no two columns write one line of a cache.
const GRAIN_ELEMENTS: usize = 64;
/// Shortest slice that pays for another column: its messages cost more than its bytes.
const SLICE_BYTES_MIN: usize = 16 << 10;

/// What the memory of a group is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Ranks that sum.
    pub(crate) columns: usize,
    /// What a rank contributes at a time.
    pub(crate) block_bytes: usize,
    /// What stands in one place of the results.
    pub(crate) segment_bytes: usize,
    /// Whether the sums go on to other machines: half precision is kept in `f32` until it comes back, and rounded once.
    pub(crate) networked: bool,
}

/// One tensor's cuts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) dtype: Dtype,
    pub(crate) elements: usize,
    /// Of a machine's sum.
    pub(crate) sum_dtype: Dtype,
    columns: usize,
    segment_elements: usize,
    /// Most elements of a column's part of a block.
    piece_elements: usize,
}

/// A part of a tensor whose sum is handed on as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Of the tensor.
    pub(crate) start: usize,
    pub(crate) elements: usize,
    /// Columns that have a slice.
    used: usize,
    /// How often every rank contributes; at least once, also to nothing.
    pub(crate) blocks: usize,
}

impl Cut {
    pub(crate) fn new(blocks: Blocks, dtype: Dtype, elements: usize) -> Self {
        let sum_dtype = match dtype {
            Dtype::Float16 | Dtype::Bfloat16 if blocks.networked => Dtype::Float32,
            other => other,
        };
        let piece = blocks.block_bytes / blocks.columns / dtype.element_bytes();
        let piece_elements = piece / GRAIN_ELEMENTS * GRAIN_ELEMENTS;
        let block_elements = piece_elements * blocks.columns;
        assert!(block_elements > 0, "a block holds a grain of every column: Blocks are made so");
        let in_segment = (blocks.segment_bytes / sum_dtype.element_bytes() / block_elements).max(1);
        let columns = blocks.columns;
        Self {
            dtype,
            elements,
            sum_dtype,
            columns,
            segment_elements: in_segment * block_elements,
            piece_elements,
        }
    }

    pub(crate) const fn columns(&self) -> usize {
        self.columns
    }

    /// At least one, so that an empty tensor has its turn, too.
    pub(crate) fn segments(&self) -> usize {
        self.elements.div_ceil(self.segment_elements).max(1)
    }

    pub(crate) fn segment(&self, index: usize) -> Segment {
        let start = index * self.segment_elements;
        let elements = (self.elements - start).min(self.segment_elements);
        let pays = (elements * self.dtype.element_bytes()).div_ceil(SLICE_BYTES_MIN);
        let mut segment = Segment { start, elements, used: pays.clamp(1, self.columns), blocks: 1 };
        let longest = (0..segment.used).map(|column| self.slice(&segment, column).len()).max();
        segment.blocks = longest.unwrap_or(0).div_ceil(self.piece_elements).max(1);
        segment
    }

    /// What a column sums of a segment, in elements from the segment's start.
    pub(crate) fn slice(&self, segment: &Segment, column: usize) -> Range<usize> {
        let cut = |column: usize| {
            let exact = segment.elements * column.min(segment.used) / segment.used;
            exact.next_multiple_of(GRAIN_ELEMENTS).min(segment.elements)
        };
        cut(column)..cut(column + 1)
    }

    /// What of a column's slice is in one block, in elements from the segment's start.
    pub(crate) fn piece(&self, segment: &Segment, column: usize, block: usize) -> Range<usize> {
        let slice = self.slice(segment, column);
        let at = |block: usize| (slice.start + block * self.piece_elements).min(slice.end);
        at(block)..at(block + 1)
    }

    /// Where a column's piece stands in a rank's block, in bytes.
    pub(crate) fn piece_offset(&self, column: usize) -> usize {
        column * self.piece_elements * self.dtype.element_bytes()
    }
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

    proptest! {
        #[test]
        fn the_pieces_cover_a_tensor_once_and_fit_their_places(
            blocks in blocks(),
            dtype in prop::sample::select(Dtype::ALL.to_vec()),
            elements in prop_oneof![0usize..300, 0usize..3_000_000],
        ) {
            let cut = Cut::new(blocks, dtype, elements);
            let mut next = 0;
            for index in 0..cut.segments() {
                let segment = cut.segment(index);
                prop_assert_eq!(segment.start, next);
                let bytes = segment.elements * cut.sum_dtype.element_bytes();
                // Longer than asked for only where one block is.
                prop_assert!(bytes <= blocks.segment_bytes.max(2 * blocks.block_bytes));
                let mut at = 0;
                for column in 0..blocks.columns {
                    let slice = cut.slice(&segment, column);
                    prop_assert_eq!(slice.start, at);
                    for block in 0..segment.blocks {
                        let piece = cut.piece(&segment, column, block);
                        prop_assert_eq!(piece.start, at);
                        at = piece.end;
                        let place = cut.piece_offset(column)..cut.piece_offset(column) + piece.len() * dtype.element_bytes();
                        let room = if column + 1 < blocks.columns { cut.piece_offset(column + 1) } else { blocks.block_bytes };
                        prop_assert!(place.end <= room, "{place:?} in {room}");
                    }
                    prop_assert_eq!(slice.end, at);
                }
                prop_assert_eq!(at, segment.elements);
                next += segment.elements;
            }
            prop_assert_eq!(next, elements);
        }
    }

    #[test]
    fn a_small_tensor_is_one_columns_and_a_large_one_is_everybodys() {
        let blocks = Blocks { columns: 4, block_bytes: 1 << 18, segment_bytes: 1 << 22, networked: true };
        let used = |elements| {
            let cut = Cut::new(blocks, Dtype::Float32, elements);
            (0..4).filter(|column| !cut.slice(&cut.segment(0), *column).is_empty()).count()
        };
        assert_eq!([1, 4096, 4097, 100_000].map(used), [1, 1, 2, 4]);
    }
}
