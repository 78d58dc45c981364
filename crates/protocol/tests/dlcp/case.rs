//! What is played: a job, its tensors, and how bad the network is.

use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::dlcp::{Finish, JobConfig, RateConfig};
use fanin_testworld::Random;
use fanin_wire::{Dtype, Generation, JobId, Key, LossBound, Op, Pattern, ShardId, WorkerId};

/// Words of a block.
pub const ELEMENTS: usize = 32;
pub const KEY: Key = Key::new(77);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// One worker dies at some time.
    Death,
    /// The first worker that says that it has sent all of a flow dies with that, before the end is confirmed.
    DeathAfterStop,
    /// The last worker has another bound.
    OtherBound,
    /// Each machine's clock jumps once.
    Clock {
        jump_ns: i64,
    },
    /// From some time on the first path loses all that goes up by it, and this one all that goes down.
    DeadPath {
        from_ns: u64,
        down: usize,
    },
    /// What goes by the first path, either way, is under way for so long.
    SlowPath {
        us: u64,
    },
}

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    /// Whether ranks sum in a ring, without a server.
    pub ring: bool,
    pub workers: usize,
    pub tensors: Vec<(usize, Op)>,
    /// Of each tensor; where none is said, an all-reduce.
    pub patterns: Vec<Pattern>,
    pub dtype: Dtype,
    pub bound: LossBound,
    pub pull_bound: LossBound,
    pub finish: Finish,
    pub flow_blocks: u32,
    pub flows: u16,
    pub window_blocks: u32,
    pub paths: u8,
    /// Whether all flows to a peer share a rate, as on sockets.
    pub follows: bool,
    /// Of each machine's link.
    pub line_rate_bps: u64,
    /// Of a thousand packets.
    pub data_loss: u64,
    pub signal_loss: u64,
    pub doubled: u64,
    /// Whether all blocks are dropped that may be.
    pub drops_unimportant: bool,
    /// The queue of a layer of which nothing arrives that workers send for the first time.
    pub loses_queue: Option<u8>,
    /// Each packet is under way for 5 us, and up to as many more.
    pub jitter_us: u64,
    /// Workers begin within so long.
    pub late_us: u64,
    pub fault: Fault,
    /// How often the server loses its memory, within so long each time.
    pub crashes: u32,
    pub crash_us: u64,
}

impl Case {
    /// Four workers, two tensors, and nothing in the way.
    pub fn plain() -> Self {
        Self {
            seed: 1,
            ring: false,
            workers: 4,
            tensors: vec![(3000, Op::Sum), (1500, Op::Average)],
            patterns: vec![],
            dtype: Dtype::Float32,
            bound: LossBound::RELIABLE,
            pull_bound: LossBound::RELIABLE,
            finish: Finish::Stopped,
            flow_blocks: 50,
            flows: 4,
            window_blocks: 200,
            paths: 1,
            follows: false,
            line_rate_bps: 1_000_000_000,
            data_loss: 0,
            signal_loss: 0,
            doubled: 0,
            drops_unimportant: false,
            loses_queue: None,
            jitter_us: 0,
            late_us: 0,
            fault: Fault::None,
            crashes: 0,
            crash_us: 0,
        }
    }

    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random(seed);
        let bound = |random: &mut Random| {
            LossBound::from_millionths(random.pick(&[0, 0, 10_000, 100_000, 300_000, 600_000]))
                .expect("below one")
        };
        let op = |random: &mut Random| random.pick(&[Op::Sum, Op::Average]);
        let tensors: Vec<_> =
            (0..1 + random.below(4)).map(|_| (random.below(3000) as usize, op(&mut random))).collect();
        let (push, pull) = (bound(&mut random), bound(&mut random));
        let floats = [Dtype::Float32, Dtype::Float64, Dtype::Float16, Dtype::Bfloat16];
        let dtype = match random.below(5) {
            0 => random.pick(&[Dtype::Int32, Dtype::Int64, Dtype::Int8, Dtype::Uint8]),
            _ => random.pick(&floats),
        };
        // The digits of a bfloat16 tell the sums of three apart.
        let most = if dtype == Dtype::Bfloat16 { 3 } else { 5 };
        let workers = 1 + random.below(most) as usize;
        let patterns = (0..tensors.len()).map(|_| pattern(&mut random, dtype, workers)).collect();
        let case = Self {
            seed,
            ring: false,
            workers,
            tensors,
            patterns,
            dtype,
            bound: push,
            pull_bound: if random.below(5) == 0 { pull } else { LossBound::RELIABLE },
            // Drawn last, so that seeds are otherwise what they were.
            finish: Finish::Stopped,
            flow_blocks: random.pick(&[1, 7, 64, 200]),
            flows: random.pick(&[1, 2, 5]),
            window_blocks: u32::MAX,
            paths: random.pick(&[1, 3]),
            follows: false,
            line_rate_bps: 1_000_000_000,
            data_loss: random.pick(&[0, 5, 50, 300]),
            signal_loss: random.pick(&[0, 5, 50, 300]),
            doubled: random.pick(&[0, 50, 300]),
            drops_unimportant: random.below(8) == 0,
            loses_queue: None,
            jitter_us: random.pick(&[0, 20, 500]),
            late_us: random.pick(&[0, 100, 5000]),
            fault: match random.below(8) {
                0 => {
                    Fault::Clock { jump_ns: random.pick(&[3_600_000_000_000, -3_600_000_000_000, -200_000]) }
                }
                _ => Fault::None,
            },
            crashes: 0,
            crash_us: 0,
        };
        // Some are so long that what is lost early is let go before a flow ends.
        let case = if random.below(6) == 0 { case.longer() } else { case };
        let finish = random.pick(&[Finish::Stopped, Finish::Stopped, Finish::Stopped, Finish::BoundMet]);
        let window_blocks = random.pick(&[1, 300, u32::MAX]);
        let follows = random.below(2) == 0;
        Self { finish, window_blocks, follows, ..case }
    }

    fn longer(mut self) -> Self {
        self.tensors[0].0 += 9000;
        Self { flow_blocks: 400, ..self }
    }

    pub fn pattern(&self, tensor: usize) -> Pattern {
        self.patterns.get(tensor).copied().unwrap_or(Pattern::AllReduce)
    }

    pub fn config(&self) -> JobConfig {
        JobConfig {
            id: JobId(3),
            key: KEY,
            generation: Generation(0),
            workers: self.workers as u16,
            shard: ShardId(0),
            elements: ELEMENTS as u16,
            push_bound: self.bound,
            pull_bound: self.pull_bound,
            flow_blocks: self.flow_blocks,
            flows: self.flows,
            window_blocks: self.window_blocks,
            rate: RateConfig { follows: self.follows, ..RateConfig::of_link(self.line_rate_bps, 200) },
            finish: self.finish,
            quiet: Duration::from_micros(100),
            retransmission: RetransmissionConfig {
                floor: Duration::from_millis(1),
                ceiling: Duration::from_millis(50),
            },
            paths: self.paths,
            resumes_at: None,
        }
    }
}

/// Half of them are all-reduces. An int32 is not broadcast: its owner says what bytes it has.
fn pattern(random: &mut Random, dtype: Dtype, workers: usize) -> Pattern {
    let root = WorkerId(random.below(workers as u64) as u8);
    match random.below(4) {
        0 => Pattern::Reduce(root),
        1 if dtype != Dtype::Int32 => Pattern::Broadcast(root),
        _ => Pattern::AllReduce,
    }
}
