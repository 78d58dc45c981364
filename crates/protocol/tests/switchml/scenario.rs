//! What a seed stands for.

use std::time::Duration;

use fanin_plan::{Cluster, LoadSplit, Machine, Placement};
use fanin_protocol::Instant;
use fanin_wire::{Dtype, Op, PLACES_MAX, Pattern, WireDtype, WorkerId};
use oorandom::Rand64;

use crate::script::CHUNK_ELEMENTS;

/// One tensor of the job: the same on every worker but for its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorShape {
    /// Element type.
    pub dtype: Dtype,
    /// Sum or average.
    pub op: Op,
    /// Whose numbers they are, and who gets the sum.
    pub pattern: Pattern,
    /// Number of elements.
    pub elements: usize,
}

/// The switch loses its memory at `at` and is back after `down`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restart {
    /// When it dies.
    pub at: Instant,
    /// For how long it is away.
    pub down: Duration,
}

/// The racks of a job: each worker's, and each rack's upstream; `None` is the root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Racks {
    /// For each worker the rack that it sends to. A worker beyond the list sends to the root.
    pub of_workers: Vec<Option<usize>>,
    /// For each rack its upstream, which comes before it.
    pub upstreams: Vec<Option<usize>>,
    /// Racks that lose their memory, and when, in order.
    pub restarts: Vec<(usize, Restart)>,
}

impl Racks {
    /// The racks on a worker's way, its own first.
    pub fn way(&self, worker: u16) -> Vec<usize> {
        let own = self.of_workers.get(usize::from(worker)).copied().flatten();
        std::iter::successors(own, |rack| self.upstreams[*rack]).collect()
    }

    /// Draws one to three levels of them; a few workers send to the root or to a rack of racks. Each is away for less than what would
    /// make the root expel the workers behind it.
    fn from_seed(seed: u64, workers: u16) -> Self {
        let mut dice = Rand64::new(u128::from(seed) ^ 0x7ac4_0000_0000);
        // So many that each gets along with the places that a switch has.
        let least = if u32::from(workers) > PLACES_MAX { 4 } else { 1 };
        let count = dice.rand_range(least..7) as usize;
        let upstream = |rack: usize| match dice.rand_range(0..3) {
            0 => None,
            _ => rack.checked_sub(1).map(|last| dice.rand_range(0..last as u64 + 1) as usize),
        };
        let upstreams: Vec<_> = (0..count).map(upstream).collect();
        let of_workers = (0..workers)
            .map(|_| (dice.rand_range(0..6) > 0).then(|| dice.rand_range(0..count as u64) as usize))
            .collect();
        let mut restarts = Vec::new();
        let mut at = Instant(0);
        for _ in 0..dice.rand_range(0..4) {
            at = at + Duration::from_millis(dice.rand_range(1..60));
            let down = Duration::from_millis(dice.rand_range(1..100));
            restarts.push((dice.rand_range(0..count as u64) as usize, Restart { at, down }));
            at = at + down;
        }
        Self { of_workers, upstreams, restarts }
    }
}

/// A service dies at `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// Which.
    pub service: usize,
    /// When.
    pub at: Instant,
    /// For how long it is away; `None` is for good. One that is away when it should die comes back when it would have.
    pub down: Option<Duration>,
}

/// The services that share a job: tensors, or parts of them, go to them in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Services {
    /// How many.
    pub count: usize,
    /// Those that die, besides the restarts of the first. At least one of them lives in the end.
    pub deaths: Vec<Death>,
}

impl Default for Services {
    fn default() -> Self {
        Self { count: 1, deaths: Vec::new() }
    }
}

/// A job and everything that goes wrong with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// The seed that it was drawn from, and that the network's dice start with.
    pub seed: u64,
    /// Workers of the job.
    pub workers: u16,
    /// Slots of its pool.
    pub slots: u16,
    /// Packets of a worker that are on the way at most.
    pub window: u16,
    /// How the elements of large float tensors travel.
    pub wire_dtype: WireDtype,
    /// The tensors, in order.
    pub tensors: Vec<TensorShape>,
    /// Longest pause of a worker between two tensors.
    pub pause: Duration,
    /// Chance that a packet is lost.
    pub loss: f64,
    /// Chance that a packet arrives twice.
    pub duplication: f64,
    /// Chance that a packet is held back for up to `held_back`.
    pub reordering: f64,
    /// The longest that a packet is held back.
    pub held_back: Duration,
    /// Shortest time of a packet on its way; the longest is three times it.
    pub delay: Duration,
    /// The longest that a driver gathers packets before it asks its machine for answers.
    pub round: Duration,
    /// A worker that dies, and when.
    pub crash: Option<(u16, Instant)>,
    /// Restarts of the switch, in order.
    pub restarts: Vec<Restart>,
    /// What sums before the switch.
    pub racks: Racks,
    /// Who shares the job.
    pub services: Services,
}

impl Scenario {
    /// The same with racks before the switch, some of which restart; one in 128 with more workers than a switch has places.
    pub fn with_racks_from_seed(seed: u64) -> Self {
        let mut scenario = Self::from_seed(seed);
        if seed % 128 == 127 {
            scenario.workers = PLACES_MAX as u16 + 1 + (seed / 128 % 64) as u16;
        }
        scenario.racks = Racks::from_seed(seed, scenario.workers);
        for tensor in &mut scenario.tensors {
            tensor.pattern = Pattern::AllReduce;
        }
        scenario
    }

    /// The same with two or three services, and four tensors at least. Unless a worker crashes, one of them dies for good, of three sometimes a
    /// second one, and in one of three some is away for a while.
    pub fn with_services_from_seed(seed: u64) -> Self {
        let mut scenario = Self::from_seed(seed);
        let mut dice = Rand64::new(u128::from(seed) ^ 0x5e41_0000_0000);
        let count = dice.rand_range(2..4) as usize;
        // Each lane has some.
        let drawn = scenario.tensors.clone();
        scenario.tensors.extend(drawn.iter().cycle().take(4_usize.saturating_sub(drawn.len())));
        let mut deaths = Vec::new();
        if scenario.crash.is_none() {
            let first = dice.rand_range(0..count as u64) as usize;
            let mut moment = |most: u64| Instant(dice.rand_range(0..most * 1_000_000));
            deaths.push(Death { service: first, at: moment(80), down: None });
            let (second, away) = (moment(800), moment(300));
            if count == 3 && dice.rand_range(0..2) == 0 {
                deaths.push(Death { service: (first + 1) % 3, at: second, down: None });
            }
            if dice.rand_range(0..3) == 0 {
                let service = dice.rand_range(0..count as u64) as usize;
                let down = Some(Duration::from_millis(dice.rand_range(1..400)));
                deaths.push(Death { service, at: away, down });
            }
        }
        scenario.services = Services { count, deaths };
        scenario
    }

    /// The same with a plan that cuts each tensor into a part for each service. The plan rests on rates that are 0.1 to 10 times the true ones.
    /// Links have no rates in this world, so wrong ones change the parts alone. A part may be empty.
    pub fn with_wrong_rates_from_seed(seed: u64) -> Self {
        let mut scenario = Self::with_services_from_seed(seed);
        let mut dice = Rand64::new(u128::from(seed) ^ 0x3a7e_0000_0000);
        let mut placement = Placement::new(&wrong_shares(&mut dice, scenario.services.count));
        let cut = |whole: &TensorShape| {
            let mut parts = vec![TensorShape { elements: 0, ..*whole }; scenario.services.count];
            for (service, packets) in placement.place(whole.elements.div_ceil(CHUNK_ELEMENTS), 1) {
                let end = (packets.end * CHUNK_ELEMENTS).min(whole.elements);
                parts[service].elements = end - packets.start * CHUNK_ELEMENTS;
            }
            parts
        };
        scenario.tensors = scenario.tensors.iter().flat_map(cut).collect();
        scenario
    }

    /// Draws a scenario. One in eight has a perfect network, one in eight a worker that crashes, one in three a switch
    /// that restarts, up to three times. Large floats travel as bfloat16 in one of four, as int8 or int4 in one, and as
    /// they are in one. In one of two some tensors have a root.
    pub fn from_seed(seed: u64) -> Self {
        let mut dice = Rand64::new(u128::from(seed) ^ 0xfa51_0000_0000);
        let workers = match dice.rand_range(0..10) {
            0 => 1,
            1..=7 => dice.rand_range(2..6) as u16,
            8 => dice.rand_range(6..17) as u16,
            _ => 64,
        };
        let slots = [1, 2, 3, 8, 17][dice.rand_range(0..5) as usize];
        let budget = if workers > 16 { 6000 } else { 12_000 };
        let tensors = (0..dice.rand_range(1..6)).map(|_| shape(&mut dice, budget)).collect();
        let perfect = dice.rand_range(0..8) == 0;
        let mut chance = |most: f64| if perfect { 0.0 } else { dice.rand_float() * most };
        let (loss, duplication, reordering) = (chance(0.2), chance(0.2), chance(0.3));
        let moment = |dice: &mut Rand64| Instant(dice.rand_range(0..80_000_000));
        let crash = (dice.rand_range(0..8) == 0)
            .then(|| (dice.rand_range(0..u64::from(workers)) as u16, moment(&mut dice)));
        let mut restarts = Vec::new();
        if crash.is_none() && dice.rand_range(0..3) == 0 {
            let mut at = moment(&mut dice);
            for _ in 0..dice.rand_range(1..4) {
                let down = Duration::from_millis(dice.rand_range(1..400));
                restarts.push(Restart { at, down });
                at = at + down + Duration::from_millis(dice.rand_range(1..800));
            }
        }
        let mut scenario = Self {
            seed,
            workers,
            slots,
            window: slots,
            tensors,
            pause: Duration::from_micros(dice.rand_range(0..30_000)),
            loss,
            duplication,
            reordering,
            held_back: Duration::from_micros(dice.rand_range(1..60_000)),
            delay: Duration::from_micros(dice.rand_range(5..500)),
            round: Duration::from_micros(dice.rand_range(0..3) * dice.rand_range(0..2_000)),
            crash,
            restarts,
            // What came later is drawn last, so that all else is as the seed always had it.
            wire_dtype: [WireDtype::SharedExponent, WireDtype::Int8, WireDtype::Bfloat16, WireDtype::Native]
                [dice.rand_range(0..4) as usize],
            racks: Racks::default(),
            services: Services::default(),
        };
        if dice.rand_range(0..2) == 0 {
            for tensor in &mut scenario.tensors {
                let root = WorkerId(dice.rand_range(0..u64::from(workers)) as u8);
                tensor.pattern = match dice.rand_range(0..3) {
                    0 => Pattern::AllReduce,
                    1 => Pattern::Reduce(root),
                    _ => Pattern::Broadcast(root),
                };
                if matches!(tensor.pattern, Pattern::Broadcast(_)) && tensor.dtype == Dtype::Int32 {
                    // Bytes are what is moved.
                    tensor.dtype = Dtype::Uint8;
                }
            }
        }
        if dice.rand_range(0..2) == 0 {
            scenario.window = dice.rand_range(1..u64::from(slots) + 1) as u16;
        }
        if scenario.wire_dtype == WireDtype::Int8 && dice.rand_range(0..2) == 0 {
            scenario.wire_dtype = WireDtype::Int4;
        }
        scenario
    }
}

/// Shares by wrong rates. The last service's machine may be a spare one, and the other machines train.
fn wrong_shares(dice: &mut Rand64, services: usize) -> Vec<f64> {
    let trains = services - dice.rand_range(0..2) as usize;
    let mut machine = |index: usize| {
        let right = [1e8, 1e9, 1e10][dice.rand_range(0..3) as usize];
        let wrong = right * 10_f64.powf(2.0 * dice.rand_float() - 1.0);
        let kind = if index < trains { Machine::training } else { Machine::spare };
        kind(format!("m{index}"), wrong)
    };
    let cluster = Cluster::new((0..services).map(&mut machine).collect()).expect("rates above zero");
    LoadSplit::of(&cluster).shares
}

fn shape(dice: &mut Rand64, budget: u64) -> TensorShape {
    let dtype = Dtype::ALL[dice.rand_range(0..Dtype::ALL.len() as u64) as usize];
    let op = [Op::Sum, Op::Average][dice.rand_range(0..2) as usize];
    let elements = match dice.rand_range(0..6) {
        0 => 0,
        1 => 1,
        2 => 256,
        _ => dice.rand_range(1..budget),
    };
    TensorShape { dtype, op, pattern: Pattern::AllReduce, elements: elements as usize }
}
