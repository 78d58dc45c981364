//! What is summed by whom over which network: made from one number.

use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::atp::{AtpJobConfig, AtpSwitchConfig, DEFAULT_WAYS, Hashing, Overflow, Scaling};
use fanin_testworld::{Network, Random, Sum, Values, bfloat16_bits};
use fanin_wire::{Generation, JobId, Key, NATIVE_ELEMENTS_MAX, Op, WireDtype};

use crate::tree::Tree;

pub const ELEMENTS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Contents {
    /// Multiples of 1/128, which are exact in float32 and under the fixed factor, and so are their sums.
    Small,
    /// As these, and many whose sum overflows.
    Overflowing,
    /// Ordinary ones, and some of any bits: huge, tiny, infinite, not a number, the limits of integers.
    Wild,
    /// Quarters up to this, whose sums are exact under the fixed factor; of integers any, or 20 bits if this is 1.
    Quarters(u32),
    /// One value of each rank's, and a quarter more in each fragment.
    OfRanks(&'static [f32]),
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
    /// A switch or the server forgets everything, before so many of a million packets.
    Crashes(u64),
    /// A worker has another address from then on, before so many of a million packets. What is on its way to the old one is
    /// lost.
    Moves(u64),
}

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    /// Of each job.
    pub tree: Tree,
    pub jobs: usize,
    /// Aggregators as workers know it.
    pub aggregators: u32,
    pub switch: AtpSwitchConfig,
    pub window_max: u16,
    pub hashing: Hashing,
    pub scaling: Scaling,
    pub overflow: Overflow,
    /// How float32 tensors of more than 4,096 elements travel.
    pub wire_dtype: WireDtype,
    pub contents: Contents,
    /// Elements of each tensor.
    pub tensors: Vec<usize>,
    pub network: Network,
    /// Until the last worker begins, at most.
    pub late_us: u64,
    pub retransmission: RetransmissionConfig,
    pub fault: Fault,
}

impl Case {
    /// One rack, and nothing in the way.
    pub fn plain() -> Self {
        Self {
            seed: 1,
            tree: Tree::one_rack(4),
            jobs: 1,
            aggregators: 1000,
            switch: switch(1000, 1),
            window_max: 300,
            hashing: Hashing::Hash,
            scaling: Scaling::Static,
            overflow: Overflow::Reactive,
            wire_dtype: WireDtype::SharedExponent,
            contents: Contents::Small,
            tensors: vec![64 * 400, 64 * 100],
            network: Network::default(),
            late_us: 0,
            retransmission: RetransmissionConfig {
                floor: Duration::from_micros(500),
                ceiling: Duration::from_millis(20),
            },
            fault: Fault::None,
        }
    }

    /// As many aggregators everywhere.
    pub fn with_aggregators(self, aggregators: u32) -> Self {
        Self { aggregators, switch: AtpSwitchConfig { aggregators, ..self.switch }, ..self }
    }

    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random(seed);
        let tree: fn(usize) -> Tree = random.pick(&[Tree::direct, Tree::one_rack, Tree::three_racks]);
        let case = Self {
            seed,
            jobs: random.pick(&[1, 1, 2, 3]),
            tree: tree(1 + random.below(7) as usize),
            aggregators: random.pick(&[0, 1, 3, 16, 1000]),
            window_max: random.pick(&[1, 2, 7, 32, 300]),
            hashing: random.pick(&[Hashing::Hash, Hashing::Hash, Hashing::Linear]),
            scaling: random.pick(&[Scaling::Static, Scaling::Static, Scaling::Dynamic]),
            overflow: random.pick(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]),
            contents: random.pick(&[Contents::Small, Contents::Overflowing, Contents::Wild]),
            tensors: (0..1 + random.below(5))
                .map(|_| random.pick(&[0, 1, 63, 64, 65, 500, 64 * 40 + 3]))
                .collect(),
            network: Network {
                loss_per_mille: random.pick(&[0, 0, 10, 50, 150]),
                double_per_mille: random.pick(&[0, 20, 100]),
                jitter_us: random.pick(&[0, 5, 195]),
                ..Network::default()
            },
            late_us: random.pick(&[0, 100, 30_000]),
            fault: random.pick(&[Fault::None, Fault::None, Fault::Server, Fault::Switches, Fault::Worker]),
            ..Self::plain()
        };
        let ways = random.pick(&[1, 2, DEFAULT_WAYS]);
        Self { switch: switch(case.aggregators, ways), ..case }
    }

    pub fn workers(&self) -> usize {
        self.tree.workers.len()
    }

    pub fn worker(&self, job: usize, rank: usize) -> usize {
        1 + self.tree.switches.len() + job * self.workers() + rank
    }

    /// Of the worker at a node.
    pub fn job_and_rank(&self, node: usize) -> (usize, usize) {
        let worker = node - self.worker(0, 0);
        (worker / self.workers(), worker % self.workers())
    }

    pub fn config(&self, job: usize, generation: u16) -> AtpJobConfig {
        AtpJobConfig {
            id: JobId(100 + job as u32),
            key: Key::new(100 + job as u128),
            generation: Generation(generation),
            workers: self.workers() as u16,
            elements: ELEMENTS as u16,
            window_max: self.window_max,
            aggregators: self.aggregators,
            hashing: self.hashing,
            scaling: self.scaling,
            overflow: self.overflow,
            congestion_control: true,
            wire_dtype: self.wire_dtype,
            originals_elements_max: 0,
        }
    }

    /// Float32, int32 and bfloat16 in turn.
    pub fn tensor(&self, job: usize, rank: usize, which: usize) -> Values {
        let mut random = Random(self.seed ^ (job << 40 | rank << 20 | which) as u64);
        match self.contents {
            Contents::Wild => return Self::wild(&mut random, which, self.tensors[which]),
            Contents::Quarters(largest) => {
                return Self::quarters(&mut random, which, self.tensors[which], largest.into());
            }
            Contents::OfRanks(values) => {
                let value = |at: usize| values[rank] + (at / ELEMENTS) as f32 * 0.25;
                return Values::Float32((0..self.tensors[which]).map(value).collect());
            }
            Contents::Small | Contents::Overflowing => {}
        }
        let overflowing = self.contents == Contents::Overflowing;
        let mut value = || {
            let x = random.below(256) as i32 - 128;
            // 20, of which two are more than 2^31 / 10^8.
            let large = overflowing && random.below(100) == 0;
            if large { x + 20 * 128 } else { x }
        };
        let shift = if overflowing { 20 } else { 0 };
        let values: Vec<i32> = (0..self.tensors[which]).map(|_| value()).collect();
        match which % 3 {
            0 => Values::Float32(values.iter().map(|x| *x as f32 / 128.0).collect()),
            1 => Values::Int32(values.iter().map(|x| x << shift).collect()),
            _ => Values::Bfloat16(values.iter().map(|x| bfloat16_bits((x / 16) as f32)).collect()),
        }
    }

    fn wild(random: &mut Random, which: usize, length: usize) -> Values {
        let mut float = || {
            let bits = random.next();
            if bits.is_multiple_of(50) {
                f32::from_bits((bits >> 32) as u32)
            } else {
                (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
            }
        };
        match which % 3 {
            0 => Values::Float32((0..length).map(|_| float()).collect()),
            1 => Values::Int32(
                (0..length)
                    .map(|_| {
                        let bits = random.next();
                        if bits.is_multiple_of(50) { i32::MIN } else { (bits >> 32) as i32 }
                    })
                    .collect(),
            ),
            _ => Values::Bfloat16((0..length).map(|_| (float().to_bits() >> 16) as u16).collect()),
        }
    }

    fn quarters(random: &mut Random, which: usize, length: usize, largest: u64) -> Values {
        let range = if largest > 1 { 1 << 31 } else { 1 << 20 };
        match which {
            0 => {
                let mut float = || (random.below(8 * largest) as f32 - 4.0 * largest as f32) / 4.0;
                Values::Float32((0..length).map(|_| float()).collect())
            }
            _ => {
                let mut integer = || (random.below(range) as i64 - (range / 2) as i64) as i32;
                Values::Int32((0..length).map(|_| integer()).collect())
            }
        }
    }

    pub const fn op(&self, which: usize) -> Op {
        let only_sums = matches!(self.contents, Contents::Quarters(_) | Contents::OfRanks(_));
        if only_sums || which.is_multiple_of(2) { Op::Sum } else { Op::Average }
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
    pub fn expected(&self, job: usize, which: usize) -> Values {
        let parts: Vec<Values> = (0..self.workers()).map(|rank| self.tensor(job, rank, which)).collect();
        let average = self.op(which) == Op::Average;
        let values: Vec<Vec<f64>> = parts.iter().map(Values::to_f64).collect();
        let float = |i: usize| {
            let sum: f64 = values.iter().map(|part| part[i]).sum();
            (if average { sum / self.workers() as f64 } else { sum }) as f32
        };
        let length = self.tensors[which];
        match &parts[0] {
            Values::Bfloat16(_) => Values::Bfloat16((0..length).map(|i| bfloat16_bits(float(i))).collect()),
            Values::Int32(first) => {
                let mut sums = vec![0i32; first.len()];
                for part in &parts {
                    let Values::Int32(part) = part else { continue };
                    sums.iter_mut().zip(part).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
                }
                if average {
                    sums.iter_mut().for_each(|sum| *sum /= self.workers() as i32);
                }
                Values::Int32(sums)
            }
            _ if self.wire_dtype == WireDtype::Bfloat16 && length > NATIVE_ELEMENTS_MAX => {
                let rounded = |i: usize| f32::from_bits(u32::from(bfloat16_bits(float(i))) << 16);
                Values::Float32((0..length).map(rounded).collect())
            }
            _ => Values::Float32((0..length).map(float).collect()),
        }
    }

    /// What is wrong with a sum, from the element on for which its worker was there.
    pub fn unlike(&self, job: usize, which: usize, sum: &Sum) -> Option<String> {
        let (got, wanted) = (sum.values.to_f64(), self.expected(job, which).to_f64());
        let tolerance = self.tolerance(job, which);
        assert_eq!(got.len(), wanted.len());
        // The difference of two infinities is no number.
        let is_right = |i: usize| {
            let (got, wanted) = (got[i], wanted[i]);
            (got - wanted).abs() <= tolerance[i] || got == wanted || got.is_nan() && wanted.is_nan()
        };
        let wrong = (sum.since..got.len()).find(|i| !is_right(*i))?;
        let (got, wanted) = (got[wrong], wanted[wrong]);
        Some(format!("job {job}, element {wrong} of tensor {which} is {got} and should be {wanted}"))
    }

    /// How far an element may be from the expected one: not at all where all values and factors are chosen so.
    pub fn tolerance(&self, job: usize, which: usize) -> Vec<f64> {
        let length = self.tensors[which];
        let exact = self.scaling == Scaling::Static && self.contents != Contents::Wild;
        if exact || which % 3 == 1 {
            return vec![0.0; length];
        }
        if let Contents::Quarters(_) | Contents::OfRanks(_) = self.contents {
            // A factor that is no multiple of four rounds.
            return vec![1e-5; length];
        }
        let parts: Vec<Vec<f64>> =
            (0..self.workers()).map(|rank| self.tensor(job, rank, which).to_f64()).collect();
        let finite = |x: &f64| if x.is_finite() { x.abs() } else { 0.0 };
        // Rounding to integers is n / f: under a dynamic factor as much as the largest value of the fragment makes it.
        let of_fragment = |fragment: usize| {
            let from_to = fragment * ELEMENTS..((fragment + 1) * ELEMENTS).min(length);
            let largest =
                parts.iter().flat_map(|part| &part[from_to.clone()]).map(finite).fold(0.0, f64::max);
            let dynamic = self.scaling == Scaling::Dynamic;
            1e-7 + if dynamic {
                largest * (self.workers() * self.workers()) as f64 / f64::from(1 << 30)
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

/// A rack's switch, in which a fragment looks for a place in so many aggregators.
pub fn switch(aggregators: u32, ways: u8) -> AtpSwitchConfig {
    AtpSwitchConfig {
        aggregators,
        elements: ELEMENTS as u16,
        ways,
        stale: Duration::from_millis(5),
        ecn_threshold_packets: Some(20),
    }
}
