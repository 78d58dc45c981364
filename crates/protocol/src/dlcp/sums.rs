//! Sums: what a server has of one flow, which is contributions side by side, who is in each sum,
//! and the sums; and what a ring adds up.
//!
//! A block's contributions are kept until it is decided who is in, and summed in the order of the
//! workers. So a sum is the same bits however they came, and if no contribution is lost, the bits
//! of SwitchML's native sums. If some are lost, the sum of those that came is scaled by n/|in|, so
//! that a mean is the mean of who is in (Appendix A).

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use fanin_wire::{Collective, Dtype, Op, PLACES_MAX, Pattern, WireDtype, WorkerId};

/// Words that a kernel sums are a multiple of this.
const WORDS_MULTIPLE: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Block {
    /// By place, each `words` long; none where nobody's has come.
    Gathering(Option<Box<[u8]>>),
    /// Decided: how many are in it.
    Closed(u16),
}

/// Buffers of sums that are over, for others: fresh ones cost a page fault for each 4 kB.
#[derive(Debug, Default)]
pub(super) struct Memory {
    sums: Vec<i32>,
    /// Each for the contributions to a block.
    contributions: Vec<Box<[u8]>>,
}

impl Memory {
    /// Words of the sums that there is room for.
    pub(super) fn words(&self) -> usize {
        self.sums.capacity()
    }
}

#[derive(Debug)]
pub(super) struct Sums {
    collective: Collective,
    workers: u16,
    /// The words of a full block, padded.
    words: usize,
    blocks: Vec<Block>,
    /// The workers whose contributions are in, or will be.
    inside: Vec<u64>,
    open: u32,
    lost: u64,
    /// The sums, block after block, where they are closed; and buffers for other blocks.
    memory: Memory,
}

impl Sums {
    /// With the memory of others of the same job.
    pub(super) fn new(
        collective: Collective,
        workers: u16,
        elements: u16,
        blocks: u32,
        mut memory: Memory,
    ) -> Self {
        let words = words_of_block(elements);
        let blocks = blocks as usize;
        memory.sums.resize(blocks * words, 0);
        Self {
            collective,
            workers,
            words,
            blocks: vec![Block::Gathering(None); blocks],
            inside: vec![0; blocks],
            open: blocks as u32,
            lost: 0,
            memory,
        }
    }

    /// Its memory, once nobody needs the sums any more.
    pub(super) fn into_memory(self) -> Memory {
        self.memory
    }

    /// Words of the sums that its memory has room for.
    pub(super) fn words(&self) -> usize {
        self.memory.words()
    }

    /// Contributions that are not in closed blocks.
    pub(super) const fn lost(&self) -> u64 {
        self.lost
    }

    /// Blocks of which is not decided yet who is in.
    pub(super) const fn open(&self) -> u32 {
        self.open
    }

    pub(super) fn is_closed(&self, block: u32) -> bool {
        matches!(self.blocks[block as usize], Block::Closed(_))
    }

    /// The workers whose contributions are in.
    pub(super) fn inside(&self, block: u32) -> u64 {
        self.inside[block as usize]
    }

    /// Takes a worker's contribution to a block that is open and does not have it.
    pub(super) fn contribute(&mut self, block: u32, worker: WorkerId, payload: &[u8]) {
        let Block::Gathering(contributions) = &mut self.blocks[block as usize] else {
            unreachable!("a closed block takes nothing")
        };
        let bytes = 4 * self.words;
        let all = contributions.get_or_insert_with(|| {
            let new = || vec![0; usize::from(self.workers) * bytes].into_boxed_slice();
            self.memory.contributions.pop().unwrap_or_else(new)
        });
        let own = &mut all[usize::from(worker.0) * bytes..][..bytes];
        let (values, padding) = own.split_at_mut(payload.len());
        values.copy_from_slice(payload);
        padding.fill(0);
        self.inside[block as usize] |= worker.bit();
    }

    /// Decides that those are in who are, and who brings the `last` contribution now, once and for
    /// all. A sum has `expected` contributions; a broadcast has one.
    pub(super) fn close(&mut self, block: u32, expected: u16, last: Option<(WorkerId, &[u8])>) {
        let (at, bytes) = (block as usize, 4 * self.words);
        if let Some((worker, payload)) = last {
            if payload.len() < bytes {
                // It is padded beside the others.
                self.contribute(block, worker, payload);
                return self.close(block, expected, None);
            }
            self.inside[at] |= worker.bit();
        }
        let inside = self.inside[at];
        let count = inside.count_ones() as u16;
        let Block::Gathering(contributions) = core::mem::replace(&mut self.blocks[at], Block::Closed(count))
        else {
            unreachable!("a block is closed once")
        };
        self.open -= 1;
        self.lost += u64::from(expected.saturating_sub(count));
        if count == 0 {
            return;
        }
        // The contributions that are in, in their order.
        let mut payloads = [&[][..]; PLACES_MAX as usize];
        let places = (0..usize::from(self.workers)).filter(|place| inside >> place & 1 != 0);
        for (payload, place) in payloads.iter_mut().zip(places) {
            *payload = match (last, &contributions) {
                (Some((worker, last)), _) if usize::from(worker.0) == place => last,
                (_, Some(kept)) => &kept[place * bytes..][..bytes],
                (_, None) => unreachable!("who is in was kept, or comes last"),
            };
        }
        let sum = &mut self.memory.sums[at * self.words..][..self.words];
        sum_up(&self.collective, &payloads[..usize::from(count)], expected.into(), sum);
        self.memory.contributions.extend(contributions);
    }

    /// Takes a sum of `count` contributions out of `expected`, which was decided before its server
    /// lost its memory.
    pub(super) fn restore(&mut self, block: u32, (count, expected): (u16, u16), payload: &[u8]) {
        let at = block as usize;
        let decided = core::mem::replace(&mut self.blocks[at], Block::Closed(count));
        let Block::Gathering(contributions) = decided else { unreachable!("a block is closed once") };
        self.memory.contributions.extend(contributions);
        self.open -= 1;
        self.lost += u64::from(expected.saturating_sub(count));
        read_words(payload, &mut self.memory.sums[at * self.words..][..self.words]);
    }

    /// How many are in a closed block.
    pub(super) fn contributions(&self, block: u32) -> Option<u16> {
        match self.blocks[block as usize] {
            Block::Closed(count) => Some(count),
            Block::Gathering(_) => None,
        }
    }

    /// Writes the sum of a closed block.
    pub(super) fn write(&self, block: u32, payload: &mut [u8]) {
        write_words(&self.memory.sums[block as usize * self.words..][..self.words], payload);
    }
}

/// The words that a full block's sum takes.
pub(super) const fn words_of_block(elements: u16) -> usize {
    (elements as usize).next_multiple_of(WORDS_MULTIPLE)
}

/// Sums payloads in their order, divides, and rounds once to the type.
type Kernel = fn(&[&[u8]], u32, &mut [i32]);

/// The kernel of a float type.
const fn kernel(dtype: Dtype) -> Option<Kernel> {
    match dtype {
        Dtype::Float32 => Some(fanin_quant::sum_f32),
        Dtype::Float16 => Some(fanin_quant::sum_f16),
        Dtype::Bfloat16 => Some(fanin_quant::sum_bf16),
        Dtype::Float64 => Some(fanin_quant::sum_f64),
        Dtype::Int32 | Dtype::Int64 | Dtype::Uint8 | Dtype::Int8 => None,
    }
}

/// The sum, or mean, of contributions, out of `expected`.
fn sum_up(collective: &Collective, contributions: &[&[u8]], expected: u32, sum: &mut [i32]) {
    if let (Pattern::Broadcast(_), [moved]) = (collective.pattern, contributions) {
        // Nothing is added to it, not even a NaN is made another.
        return fanin_quant::store_le(sum, moved);
    }
    let count = contributions.len() as u32;
    let Some(kernel) = kernel(collective.dtype) else {
        // Nothing of them may be lost.
        assert_eq!(count, expected, "integers are all there");
        add_integers(collective.dtype, contributions, sum);
        return divide_integers(collective, count, sum);
    };
    let is_scaled = collective.op == Op::Sum && count != expected;
    kernel(contributions, if is_scaled || collective.op == Op::Average { count } else { 1 }, sum);
    if is_scaled {
        multiply(kernel, sum, expected);
    }
}

/// As many times what is there, by the kernel that multiplies as it adds.
fn multiply(kernel: Kernel, sum: &mut [i32], times: u32) {
    let one: Vec<u8> = sum.iter().flat_map(|word| word.to_le_bytes()).collect();
    kernel(&vec![&one[..]; times as usize], 1, sum);
}

fn add_integers(dtype: Dtype, contributions: &[&[u8]], sum: &mut [i32]) {
    let add = match dtype {
        Dtype::Int32 => fanin_quant::add_le,
        Dtype::Int64 => fanin_quant::add_i64_le,
        _ => fanin_quant::add_i8_le,
    };
    for (number, contribution) in contributions.iter().enumerate() {
        match number {
            0 => fanin_quant::store_le(sum, contribution),
            _ => add(sum, contribution),
        }
    }
}

/// Divides an average of integers. The workers divide elements that travel as an int32, as with
/// SwitchML.
fn divide_integers(collective: &Collective, count: u32, sum: &mut [i32]) {
    match collective.dtype {
        _ if collective.op == Op::Sum || collective.wire_dtype == WireDtype::SharedExponent => {}
        Dtype::Int64 => fanin_quant::mean_i64(sum, count),
        Dtype::Uint8 => fanin_quant::mean_u8(sum, count),
        _ => fanin_quant::mean_i8(sum, count),
    }
}

/// Adds what came to what is here, rounded to the tensor's type.
pub(super) fn add(collective: &Collective, other: &[u8], own: &mut [u8]) {
    let words = words_of(own.len());
    let mut both = vec![0; 8 * words];
    let (others, owns) = both.split_at_mut(4 * words);
    others[..other.len()].copy_from_slice(other);
    owns[..own.len()].copy_from_slice(own);
    let mut sum = vec![0; words];
    sum_up(&Collective { op: Op::Sum, ..*collective }, &[others, owns], 2, &mut sum);
    write_words(&sum, own);
}

/// Makes the sum of `count` contributions out of `expected` what their operation asks for: their
/// mean, or as many times that.
pub(super) fn scale(collective: &Collective, sum: &mut [u8], count: u32, expected: u32) {
    let mut payload = vec![0; 4 * words_of(sum.len())];
    payload[..sum.len()].copy_from_slice(sum);
    let mut words = vec![0; payload.len() / 4];
    match kernel(collective.dtype) {
        None => {
            fanin_quant::store_le(&mut words, &payload);
            divide_integers(collective, count, &mut words);
        }
        Some(_) if collective.op == Op::Sum && count == expected => return,
        Some(kernel) => {
            kernel(&[&payload], count, &mut words);
            if collective.op == Op::Sum {
                multiply(kernel, &mut words, expected);
            }
        }
    }
    write_words(&words, sum);
}

/// Words that so many bytes take, padded.
const fn words_of(bytes: usize) -> usize {
    bytes.div_ceil(4).next_multiple_of(WORDS_MULTIPLE)
}

/// Reads words from as many bytes as there are; the rest of the last one is zeros.
fn read_words(payload: &[u8], words: &mut [i32]) {
    let word = |bytes: &[u8]| {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        i32::from_le_bytes(whole)
    };
    words.iter_mut().zip(payload.chunks(4)).for_each(|(out, bytes)| *out = word(bytes));
}

/// Writes as many of the words' bytes as there is room for.
fn write_words(words: &[i32], payload: &mut [u8]) {
    let (whole, rest) = payload.split_at_mut(payload.len() / 4 * 4);
    let (words, next) = words.split_at(whole.len() / 4);
    fanin_quant::write_le(words, whole);
    if let Some(word) = next.first() {
        rest.copy_from_slice(&word.to_le_bytes()[..rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(dtype: Dtype, op: Op) -> Collective {
        let wire_dtype = WireDtype::Native.of_tensor(dtype, 1);
        Collective { sequence: 0, dtype, op, pattern: Pattern::AllReduce, elements: 2, wire_dtype }
    }

    fn sum_of_floats(op: Op, came: &[(u8, [f32; 2])]) -> (u16, [f32; 2]) {
        let mut sums = Sums::new(collective(Dtype::Float32, op), 4, 32, 1, Memory::default());
        for (worker, values) in came {
            sums.contribute(0, WorkerId(*worker), values.map(f32::to_le_bytes).as_flattened());
        }
        sums.close(0, 4, None);
        let mut payload = [0; 8];
        sums.write(0, &mut payload);
        let value =
            |at: usize| f32::from_bits(u32::from_le_bytes(payload[at..at + 4].try_into().expect("4 bytes")));
        (sums.contributions(0).expect("closed"), [value(0), value(4)])
    }

    #[test]
    fn a_mean_is_that_of_who_is_in_and_a_sum_is_as_many_times_that() {
        let all = [(3, [1.0, 10.0]), (0, [2.0, 20.0]), (1, [3.0, 30.0]), (2, [6.0, 60.0])];
        assert_eq!(sum_of_floats(Op::Sum, &all), (4, [12.0, 120.0]));
        assert_eq!(sum_of_floats(Op::Average, &all), (4, [3.0, 30.0]));
        assert_eq!(sum_of_floats(Op::Average, &all[..3]), (3, [2.0, 20.0]));
        assert_eq!(sum_of_floats(Op::Sum, &all[..3]), (3, [8.0, 80.0]));
    }

    #[test]
    fn what_nobody_brought_is_zero_and_says_so() {
        assert_eq!(sum_of_floats(Op::Sum, &[]), (0, [0.0, 0.0]));
    }

    #[test]
    fn the_order_in_which_they_came_leaves_no_trace() {
        let values = [(0, [1e8, 0.1]), (1, [-1e8, 0.2]), (2, [1e-3, 0.3]), (3, [7.7, 0.4])];
        let mut back = values;
        back.reverse();
        let bits = |came: &[_]| sum_of_floats(Op::Sum, came).1.map(f32::to_bits);
        assert_eq!(bits(&values), bits(&back));
    }

    #[test]
    fn who_comes_last_is_summed_in_its_place_as_if_it_had_been_kept() {
        let values: Vec<[f32; 32]> = (0..4).map(|x| [[1e8, -1e8, 1e-3, 7.7][x] / 3.0; 32]).collect();
        let of = |worker: u8| values[usize::from(worker)].map(f32::to_le_bytes);
        let sum = |others: &[u8], last: Option<u8>| {
            let mut sums = Sums::new(collective(Dtype::Float32, Op::Sum), 4, 32, 1, Memory::default());
            for worker in others {
                sums.contribute(0, WorkerId(*worker), of(*worker).as_flattened());
            }
            let payload = last.map(of);
            let last = last.zip(payload.as_ref()).map(|(worker, of)| (WorkerId(worker), of.as_flattened()));
            sums.close(0, 4, last);
            let mut payload = [0; 128];
            sums.write(0, &mut payload);
            (sums.contributions(0), sums.inside(0), payload)
        };
        let kept = sum(&[0, 1, 2, 3], None);
        for last in 0..4 {
            let others: Vec<u8> = (0..4).filter(|worker| *worker != last).collect();
            assert_eq!(sum(&others, Some(last)), kept, "{last} came last");
            assert_eq!(sum(&others[1..], Some(last)).0, Some(3));
        }
        assert_eq!(sum(&[], Some(2)), sum(&[2], None), "nobody else is in");
    }

    #[test]
    fn bytes_that_are_no_words_are_summed_to_their_last() {
        let mut sums = Sums::new(collective(Dtype::Int8, Op::Sum), 2, 32, 1, Memory::default());
        sums.contribute(0, WorkerId(1), &[1, 2, 3, 4, 5]);
        sums.contribute(0, WorkerId(0), &[10, 20, 30, 40, 50]);
        sums.close(0, 2, None);
        let mut payload = [0; 5];
        sums.write(0, &mut payload);
        assert_eq!(payload, [11, 22, 33, 44, 55]);
    }

    #[test]
    fn buffers_are_used_again_and_nothing_of_who_had_them_is_seen() {
        let collective = collective(Dtype::Float32, Op::Sum);
        let mut sums = Sums::new(collective, 2, 32, 3, Memory::default());
        for block in 0..3 {
            sums.contribute(block, WorkerId(1), &[0xff; 128]);
            sums.close(block, 2, None);
        }
        let memory = sums.into_memory();
        assert_eq!((memory.contributions.len(), memory.sums.len()), (1, 96));
        // The next tensor has fewer elements, and another block.
        let mut sums = Sums::new(collective, 2, 32, 2, memory);
        sums.contribute(1, WorkerId(0), &1.5_f32.to_le_bytes());
        sums.close(1, 2, None);
        sums.close(0, 2, None);
        let mut payload = [1; 128];
        sums.write(1, &mut payload);
        assert_eq!(payload[..4], 3.0_f32.to_le_bytes());
        assert_eq!(payload[4..], [0; 124]);
        assert_eq!((sums.contributions(0), sums.contributions(1)), (Some(0), Some(1)));
        assert_eq!(sums.into_memory().contributions.len(), 1);
    }

    #[test]
    fn what_a_ring_adds_hop_by_hop_becomes_a_mean_or_a_sum_of_all() {
        let bytes = |values: [f32; 2]| values.map(f32::to_le_bytes).as_flattened().to_vec();
        for (op, count, expected) in [
            (Op::Sum, 3, [9.0, 90.0]),
            (Op::Sum, 2, [13.5, 135.0]),
            (Op::Average, 3, [3.0, 30.0]),
            (Op::Average, 2, [4.5, 45.0]),
        ] {
            let collective = collective(Dtype::Float32, op);
            let mut sum = bytes([4.0, 40.0]);
            add(&collective, &bytes([5.0, 50.0]), &mut sum);
            scale(&collective, &mut sum, count, 3);
            assert_eq!(sum, bytes(expected), "{op:?} of {count}");
        }
        let mut sum = vec![100, 200, 7];
        let collective = collective(Dtype::Uint8, Op::Average);
        add(&collective, &[3, 100, 7], &mut sum);
        scale(&collective, &mut sum, 2, 2);
        assert_eq!(sum, [51, 22, 7], "bytes wrap");
    }
}
