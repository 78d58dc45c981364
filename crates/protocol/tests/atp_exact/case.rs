//! What is summed by whom over which network: made from one number.

use fanin_protocol::atp::{AtpJobConfig, DEFAULT_WAYS, Hashing, Overflow, Scaling};
use fanin_protocol::{Elements, Tensor};
use fanin_wire::{Directions, Generation, JobId, Key, Op};

pub const ELEMENTS: usize = 64;

#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    Float(Vec<f32>),
    Int(Vec<i32>),
    Bfloat(Vec<u16>),
}

/// A tensor that knows which one it is.
#[derive(Debug)]
pub struct Numbered {
    pub which: usize,
    pub numbers: Numbers,
}

impl Tensor for Numbered {
    fn elements(&mut self) -> Elements<'_> {
        match &mut self.numbers {
            Numbers::Float(x) => Elements::Float32(x),
            Numbers::Int(x) => Elements::Int32(x),
            Numbers::Bfloat(x) => Elements::Bfloat16(x),
        }
    }
}

impl Numbers {
    /// As floats, to be compared with a tolerance.
    pub fn values(&self) -> Vec<f64> {
        match self {
            Self::Float(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::Int(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::Bfloat(x) => x.iter().map(|x| bfloat16_value(*x)).collect(),
        }
    }
}

fn bfloat16_value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// To nearest, ties to even, as a worker rounds parameters.
fn bfloat16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// Workers at the server, no switch.
    Direct,
    /// One rack's switch, the server behind it.
    OneRack,
    /// Two racks of workers, and a third with the server and workers of its own (ATP Figure 9).
    ThreeRacks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Multiples of 1/128, which are exact in float32 and under the fixed factor, and so are their sums.
    Small,
    /// As these, and many whose sum overflows.
    Overflowing,
    /// Ordinary ones, and some of any bits: huge, tiny, infinite, not a number, the limits of integers.
    Wild,
}

/// What breaks, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The server forgets everything; the job goes on in another generation.
    Server,
    /// Every switch forgets everything.
    Switches,
    /// A worker of each job dies, and another takes its place (ATP §A.3).
    Worker,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub topology: Topology,
    pub jobs: usize,
    /// Of each job.
    pub workers: usize,
    pub aggregators: u32,
    pub window_max: u16,
    pub hashing: Hashing,
    pub scaling: Scaling,
    pub overflow: Overflow,
    pub values: Values,
    /// Elements of each tensor.
    pub tensors: Vec<usize>,
    pub loss_per_mille: u64,
    pub double_per_mille: u64,
    /// Largest delay of a packet; the smallest is 5.
    pub delay_us: u64,
    /// Until the last worker begins, at most.
    pub late_us: u64,
    pub fault: Fault,
    /// In how many aggregators a fragment looks for a place.
    pub ways: u8,
}

impl Case {
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random(seed);
        Self {
            seed,
            topology: random.pick(&[Topology::Direct, Topology::OneRack, Topology::ThreeRacks]),
            jobs: random.pick(&[1, 1, 2, 3]),
            workers: 1 + random.below(7) as usize,
            aggregators: random.pick(&[0, 1, 3, 16, 1000]),
            window_max: random.pick(&[1, 2, 7, 32, 300]),
            hashing: random.pick(&[Hashing::Hash, Hashing::Hash, Hashing::Linear]),
            scaling: random.pick(&[Scaling::Static, Scaling::Static, Scaling::Dynamic]),
            overflow: random.pick(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]),
            values: random.pick(&[Values::Small, Values::Overflowing, Values::Wild]),
            tensors: (0..1 + random.below(5))
                .map(|_| random.pick(&[0, 1, 63, 64, 65, 500, 64 * 40 + 3]))
                .collect(),
            loss_per_mille: random.pick(&[0, 0, 10, 50, 150]),
            double_per_mille: random.pick(&[0, 20, 100]),
            delay_us: random.pick(&[5, 10, 200]),
            late_us: random.pick(&[0, 100, 30_000]),
            fault: random.pick(&[Fault::None, Fault::None, Fault::Server, Fault::Switches, Fault::Worker]),
            ways: random.pick(&[1, 2, DEFAULT_WAYS]),
        }
    }

    pub const fn switches(&self) -> usize {
        match self.topology {
            Topology::Direct => 0,
            Topology::OneRack => 1,
            Topology::ThreeRacks => 3,
        }
    }

    /// The level that packets have at the server.
    pub const fn server_level(&self) -> u8 {
        match self.topology {
            Topology::Direct => 0,
            Topology::OneRack => 1,
            Topology::ThreeRacks => 2,
        }
    }

    /// Directions and next hop of a worker. Node 0 is the server; then come the switches, the last in the server's rack.
    pub fn place(&self, rank: usize) -> (Directions, usize) {
        let mut directions = Directions::default();
        if self.topology != Topology::ThreeRacks {
            directions.bitmaps[0] = 1 << rank;
            directions.fan_in_degrees[0] = self.workers as u8;
            return (directions, self.switches());
        }
        let in_rack = |rack: usize| (rack..self.workers).step_by(3).count();
        let rack = rank % 3;
        // At the server's switch: a bit for each rack, then one for each worker of its own.
        let racks = (0..2).filter(|rack| in_rack(*rack) > 0).count();
        directions.fan_in_degrees[1] = (racks + in_rack(2)) as u8;
        if rack == 2 {
            directions.level = 1;
            directions.bitmaps[1] = 4 << (rank / 3);
        } else {
            directions.bitmaps[0] = 1 << (rank / 3);
            directions.bitmaps[1] = 1 << rack;
            directions.fan_in_degrees[0] = in_rack(rack) as u8;
        }
        (directions, 1 + rack)
    }

    pub fn config(&self, job: usize, generation: u16) -> AtpJobConfig {
        AtpJobConfig {
            id: JobId(100 + job as u32),
            key: Key::new(100 + job as u128),
            generation: Generation(generation),
            workers: self.workers as u16,
            elements: ELEMENTS as u16,
            window_max: self.window_max,
            aggregators: self.aggregators,
            hashing: self.hashing,
            scaling: self.scaling,
            overflow: self.overflow,
            congestion_control: true,
            originals_elements_max: 0,
        }
    }

    /// Float32, int32 and bfloat16 in turn.
    pub fn tensor(&self, job: usize, rank: usize, which: usize) -> Numbers {
        let mut random = Random(self.seed ^ (job << 40 | rank << 20 | which) as u64);
        if self.values == Values::Wild {
            return Self::wild(&mut random, which, self.tensors[which]);
        }
        let overflowing = self.values == Values::Overflowing;
        let mut value = || {
            let x = random.below(256) as i32 - 128;
            // 20, of which two are more than 2^31 / 10^8.
            let large = overflowing && random.below(100) == 0;
            if large { x + 20 * 128 } else { x }
        };
        let shift = if overflowing { 20 } else { 0 };
        let values: Vec<i32> = (0..self.tensors[which]).map(|_| value()).collect();
        match which % 3 {
            0 => Numbers::Float(values.iter().map(|x| *x as f32 / 128.0).collect()),
            1 => Numbers::Int(values.iter().map(|x| x << shift).collect()),
            _ => Numbers::Bfloat(values.iter().map(|x| bfloat16_bits((x / 16) as f32)).collect()),
        }
    }

    fn wild(random: &mut Random, which: usize, length: usize) -> Numbers {
        let mut float = || {
            let bits = random.next();
            if bits.is_multiple_of(50) {
                f32::from_bits((bits >> 32) as u32)
            } else {
                (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
            }
        };
        match which % 3 {
            0 => Numbers::Float((0..length).map(|_| float()).collect()),
            1 => Numbers::Int(
                (0..length)
                    .map(|_| {
                        let bits = random.next();
                        if bits.is_multiple_of(50) { i32::MIN } else { (bits >> 32) as i32 }
                    })
                    .collect(),
            ),
            _ => Numbers::Bfloat((0..length).map(|_| (float().to_bits() >> 16) as u16).collect()),
        }
    }

    pub const fn op(which: usize) -> Op {
        if which.is_multiple_of(2) { Op::Sum } else { Op::Average }
    }

    /// The tensor that has this fragment of the stream, and the fragment's number in it; `None` behind the last.
    pub fn locate(&self, sequence: u64) -> Option<(usize, usize)> {
        let mut fragment = sequence as usize;
        for (which, elements) in self.tensors.iter().enumerate() {
            let fragments = elements.div_ceil(ELEMENTS);
            if fragment < fragments {
                return Some((which, fragment));
            }
            fragment -= fragments;
        }
        None
    }

    /// What every worker must end with: summed in another way, and rounded once.
    pub fn expected(&self, job: usize, which: usize) -> Numbers {
        let parts: Vec<Numbers> = (0..self.workers).map(|rank| self.tensor(job, rank, which)).collect();
        let average = Self::op(which) == Op::Average;
        let values: Vec<Vec<f64>> = parts.iter().map(Numbers::values).collect();
        let float = |i: usize| {
            let sum: f64 = values.iter().map(|part| part[i]).sum();
            (if average { sum / self.workers as f64 } else { sum }) as f32
        };
        let length = self.tensors[which];
        match &parts[0] {
            Numbers::Float(_) => Numbers::Float((0..length).map(float).collect()),
            Numbers::Bfloat(_) => Numbers::Bfloat((0..length).map(|i| bfloat16_bits(float(i))).collect()),
            Numbers::Int(first) => {
                let mut sums = vec![0i32; first.len()];
                for part in &parts {
                    let Numbers::Int(part) = part else { continue };
                    sums.iter_mut().zip(part).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
                }
                if average {
                    sums.iter_mut().for_each(|sum| *sum /= self.workers as i32);
                }
                Numbers::Int(sums)
            }
        }
    }

    /// How far an element may be from the expected one: not at all where all values and factors are chosen so.
    pub fn tolerance(&self, job: usize, which: usize) -> Vec<f64> {
        let length = self.tensors[which];
        let exact = self.scaling == Scaling::Static && self.values != Values::Wild;
        if exact || which % 3 == 1 {
            return vec![0.0; length];
        }
        let parts: Vec<Vec<f64>> =
            (0..self.workers).map(|rank| self.tensor(job, rank, which).values()).collect();
        let finite = |x: &f64| if x.is_finite() { x.abs() } else { 0.0 };
        // Rounding to integers is n / f: under a dynamic factor as much as the largest value of the fragment makes it.
        let of_fragment = |fragment: usize| {
            let from_to = fragment * ELEMENTS..((fragment + 1) * ELEMENTS).min(length);
            let largest =
                parts.iter().flat_map(|part| &part[from_to.clone()]).map(finite).fold(0.0, f64::max);
            let dynamic = self.scaling == Scaling::Dynamic;
            1e-7 + if dynamic {
                largest * (self.workers * self.workers) as f64 / f64::from(1 << 30)
            } else {
                0.0
            }
        };
        // The rounding of the parameters is that of their type; the sum that they are compared with is one of float64.
        let relative = if which % 3 == 2 { 1.0 / 128.0 } else { 1e-6 };
        let magnitude = |i: usize| parts.iter().map(|part| finite(&part[i])).sum::<f64>();
        (0..length).map(|i| of_fragment(i / ELEMENTS) * (1.0 + relative) + relative * magnitude(i)).collect()
    }
}
