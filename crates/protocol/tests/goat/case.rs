//! What is summed by whom over which network, by which plan: made from one number.

use std::collections::{BTreeMap, VecDeque};

use fanin_protocol::atp::{Overflow, Scaling};
use fanin_protocol::goat::{Assignment, GoatJobConfig, GoatRoute, Onward, ServerPlan, SubModels, sums_of};
use fanin_testworld::{Network, Random, Values, bfloat16_bits};
use fanin_wire::{AggregationNode, Generation, JobId, Key, Participants, Rank, SubModel, WireDtype};

pub const ELEMENTS: usize = 64;

/// What breaks, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// A switch forgets what it had summed.
    SwitchForgets,
    /// A switch is gone: the others send on what was for it, and a moment later a plan without it is there.
    SwitchDies,
    /// The server forgets everything; the job goes on in another generation.
    ServerForgets,
    /// Another plan takes over.
    Replanned,
}

/// Addresses: the server, then the switches, then the workers.
pub const SERVER: usize = 0;

#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    /// Pairs of switches with a link between them.
    pub links: Vec<(usize, usize)>,
    pub switches: usize,
    /// The switches next to the server; the first is.
    pub at_server: Vec<usize>,
    /// Of each worker the switch that its parameters come from, or the server.
    pub attached: Vec<Option<usize>>,
    /// Of each worker another switch, to which it sends what is summed nearer to that one.
    pub beside: Vec<Option<usize>>,
    /// Fragments of each part of the model.
    pub sub_models: Vec<u32>,
    /// Of each worker, for each of them, the switch that sums it, or the server.
    pub plan: Vec<Vec<Option<usize>>>,
    /// For each of them, to which other switches the sums of some switches go.
    pub onward: Vec<BTreeMap<usize, usize>>,
    pub aggregators: u32,
    pub ways: u8,
    pub window_max: u16,
    pub scaling: Scaling,
    pub large: bool,
    /// Elements of each tensor.
    pub tensors: Vec<usize>,
    /// The ranks that take part in each; behind the last of them all do.
    pub participants: Vec<Participants>,
    pub network: Network,
    /// Until the last worker begins, at most.
    pub late_us: u64,
    /// The shortest wait for an answer.
    pub retransmission_us: u64,
    pub fault: Fault,
}

impl Case {
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random(seed);
        let switches = 1 + random.below(5) as usize;
        // A tree, and some links besides.
        let mut links: Vec<(usize, usize)> =
            (1..switches).map(|at| (random.below(at as u64) as usize, at)).collect();
        for _ in 0..random.below(3) {
            let (a, b) = (random.below(switches as u64) as usize, random.below(switches as u64) as usize);
            if a != b {
                links.push((a, b));
            }
        }
        let workers = random.pick(&[1, 2, 3, 4, 7, 40]);
        let attached = (0..workers).map(|_| Some(random.below(switches as u64) as usize)).collect();
        let sub_models = parts(&mut random);
        let model: u32 = sub_models.iter().sum();
        let mut case = Self {
            seed,
            links,
            switches,
            at_server: vec![0],
            attached,
            beside: vec![None; workers],
            plan: Vec::new(),
            onward: Vec::new(),
            aggregators: random.pick(&[0, 1, 3, 16, 200, 200]),
            ways: random.pick(&[1, 1, 8]),
            window_max: random.pick(&[1, 3, u16::MAX]).min(model as u16),
            sub_models,
            scaling: random.pick(&[Scaling::Static, Scaling::Static, Scaling::Dynamic]),
            large: random.below(3) == 0,
            // Whole models, and other streams.
            tensors: (0..1 + random.below(4))
                .map(|_| random.pick(&[0, 1, 64, 65, model as usize * ELEMENTS, 64 * 40 + 3]))
                .collect(),
            network: Network {
                loss_per_mille: random.pick(&[0, 0, 10, 50, 150]),
                double_per_mille: random.pick(&[0, 20, 100]),
                jitter_us: random.pick(&[0, 5, 195]),
                ..Network::default()
            },
            participants: Vec::new(),
            late_us: random.pick(&[0, 100, 30_000]),
            retransmission_us: random.pick(&[500, 500, 5_000]),
            fault: random.pick(&[
                Fault::None,
                Fault::SwitchForgets,
                Fault::SwitchDies,
                Fault::ServerForgets,
                Fault::Replanned,
            ]),
        };
        case.plan = case.any_plan(&mut random);
        // The server may have several children, and workers several ways.
        let any = |random: &mut Random| random.below(switches as u64) as usize;
        for switch in 1..switches {
            if random.below(4) == 0 {
                case.at_server.push(switch);
            }
        }
        let (at_server, two_ways) = (random.below(3) == 0, random.below(2) == 0);
        for (attached, beside) in case.attached.iter_mut().zip(&mut case.beside) {
            *attached = attached.filter(|_| !(at_server && random.below(4) == 0));
            *beside = two_ways.then(|| any(&mut random)).filter(|switch| Some(*switch) != *attached);
        }
        // From numbers of their own, so that what else is drawn stays as it was.
        case.onward = case.any_onward(&mut Random(seed ^ 0x50_0505));
        if Random(seed ^ 0x71_de).below(4) == 0 {
            case.window_max = 3 * model as u16;
        }
        case
    }

    /// Cuts the model into other parts, in two of three cases.
    pub fn cut_anew(&mut self, random: &mut Random) {
        if random.below(3) > 0 {
            self.sub_models = parts(random);
        }
    }

    /// A case of several tensors, in each of which other workers take part.
    pub fn with_changing_participants(seed: u64) -> Self {
        let mut case = Self::from_seed(seed);
        let mut random = Random(seed ^ 0x5e75);
        let model = case.sub_models.iter().sum::<u32>() as usize * ELEMENTS;
        let tensors = 2 + random.below(7);
        case.tensors = (0..tensors).map(|_| random.pick(&[1, 65, model, 3 * model + 1, 64 * 20])).collect();
        let workers = case.workers() as u64;
        let some = |random: &mut Random| {
            // Most of them or few, and at least one.
            let (one, most) = (random.below(workers), random.below(3) > 0);
            let is_in = |rank: &u64| *rank == one || (random.below(4) > 0) == most;
            Participants::of((0..workers).filter(is_in).map(|rank| Rank(rank as u16))).expect("128 at most")
        };
        for _ in 0..tensors {
            let before = case.participants.last().copied();
            case.participants.push(match random.below(4) {
                0 => Participants::ALL,
                1 => before.unwrap_or_default(),
                _ => some(&mut random),
            });
        }
        case
    }

    pub fn takes_part(&self, rank: usize, which: usize) -> bool {
        self.participants_of(which).contains(Rank(rank as u16))
    }

    pub fn participants_of(&self, which: usize) -> Participants {
        self.participants.get(which).copied().unwrap_or_default()
    }

    /// One switch for a sub-model and all workers, or a few, or the server, for whom it may be.
    pub fn any_plan(&self, random: &mut Random) -> Vec<Vec<Option<usize>>> {
        let several = random.below(2) == 0;
        let mut plan = vec![Vec::new(); self.attached.len()];
        for _ in &self.sub_models {
            let one = random.below(self.switches as u64) as usize;
            for assigned in &mut plan {
                assigned.push(match random.below(8) {
                    0 => None,
                    1..=3 if several => Some(random.below(self.switches as u64) as usize),
                    _ => Some(one),
                });
            }
        }
        plan
    }

    /// Of most switches the sum of a sub-model goes to another one on their way to the server. In one of four cases it does of none.
    pub fn any_onward(&self, random: &mut Random) -> Vec<BTreeMap<usize, usize>> {
        let hops = self.hops(&self.at_server);
        let has_some = random.below(4) > 0;
        let mut onward = vec![BTreeMap::new(); self.sub_models.len()];
        for sums in onward.iter_mut().filter(|_| has_some) {
            for switch in 0..self.switches {
                let way: Vec<usize> = std::iter::successors(hops[switch].0, |at| hops[*at].0).collect();
                if !way.is_empty() && random.below(4) > 0 {
                    sums.insert(switch, random.pick(&way));
                }
            }
        }
        onward
    }

    fn onward_of(&self, sub_model: usize) -> Onward {
        let node = |switch: &usize| Self::node(Some(*switch));
        let sums = self.onward.get(sub_model).into_iter().flatten();
        sums.map(|(from, to)| (node(from), node(to))).collect()
    }

    pub fn workers(&self) -> usize {
        self.attached.len()
    }

    pub fn address(&self, switch: usize) -> usize {
        1 + switch
    }

    pub fn worker(&self, rank: usize) -> usize {
        1 + self.switches + rank
    }

    fn node(switch: Option<usize>) -> AggregationNode {
        switch.map_or(AggregationNode::SERVER, |switch| AggregationNode(1 + switch as u16))
    }

    /// From each switch the next one on a shortest way to one of these, and how far that is.
    fn hops(&self, to: &[usize]) -> Vec<(Option<usize>, usize)> {
        let mut hops = vec![None; self.switches];
        to.iter().for_each(|to| hops[*to] = Some((None, 0)));
        let mut next = VecDeque::from(to.to_vec());
        while let Some(at) = next.pop_front() {
            let further = 1 + hops[at].map_or(0, |(_, distance)| distance);
            for (a, b) in &self.links {
                for (here, there) in [(*a, *b), (*b, *a)] {
                    if here == at && hops[there].is_none() {
                        hops[there] = Some((Some(at), further));
                        next.push_back(there);
                    }
                }
            }
        }
        hops.into_iter().map(|hop| hop.expect("a tree at least")).collect()
    }

    pub fn sub_models(&self) -> SubModels {
        SubModels::new(&self.sub_models).expect("parts with fragments")
    }

    pub fn config(&self, generation: u16) -> GoatJobConfig {
        GoatJobConfig {
            id: JobId(100),
            key: Key::new(100),
            generation: Generation(generation),
            workers: self.workers() as u16,
            elements: ELEMENTS as u16,
            window_max: self.window_max,
            scaling: self.scaling,
            overflow: Overflow::Reactive,
            congestion_control: true,
            wire_dtype: WireDtype::SharedExponent,
            originals_elements_max: 0,
        }
    }

    pub fn assignment(&self, rank: usize) -> Assignment<usize> {
        let nodes = self.plan[rank].iter().map(|switch| Self::node(*switch)).collect();
        let is_nearer = |to: &usize, beside: usize| {
            let hops = self.hops(&[*to]);
            self.attached[rank].is_none_or(|attached| hops[beside].1 < hops[attached].1)
        };
        let beside = self.beside[rank].into_iter();
        let first_hops = beside.flat_map(|beside| {
            let nearer = (0..self.switches).filter(move |to| is_nearer(to, beside));
            nearer.map(move |to| (Self::node(Some(to)), self.address(beside)))
        });
        Assignment::new(rank as u16, self.sub_models(), nodes, first_hops.collect()).expect("a node for each")
    }

    /// Where a switch's packets for the server go.
    fn upstream(&self, switch: usize) -> usize {
        self.hops(&self.at_server)[switch].0.map_or(SERVER, |hop| self.address(hop))
    }

    /// Where a worker's parameters come from.
    pub fn upstream_of(&self, rank: usize) -> usize {
        self.attached[rank].map_or(SERVER, |switch| self.address(switch))
    }

    pub fn route(&self, switch: usize, generation: u16) -> GoatRoute<usize> {
        let config = self.config(generation);
        let mut next_hops = Vec::new();
        let mut below = Vec::new();
        for other in (0..self.switches).filter(|other| *other != switch) {
            if let (Some(hop), _) = self.hops(&[other])[switch] {
                next_hops.push((Self::node(Some(other)), self.address(hop)));
            }
            if self.upstream(other) == self.address(switch) {
                below.push(self.address(other));
            }
        }
        let own = (0..self.workers()).filter(|rank| self.attached[*rank] == Some(switch));
        below.extend(own.map(|rank| self.worker(rank)));
        let mut sums = BTreeMap::new();
        let mut first_aggregator = 0;
        for (sub_model, fragments) in self.sub_models.iter().enumerate() {
            let nodes = self.plan.iter().map(|assigned| Self::node(assigned[sub_model]));
            let mut of_all = sums_of(nodes, &self.onward_of(sub_model)).expect("no circle");
            if let Some(mut sum) = of_all.remove(&Self::node(Some(switch))) {
                sum.first_aggregator = first_aggregator;
                sums.insert(SubModel(sub_model as u16), sum);
                first_aggregator += fragments;
            }
        }
        GoatRoute {
            id: config.id,
            key: config.key,
            generation: config.generation,
            workers: config.workers,
            node: Self::node(Some(switch)),
            upstream: self.upstream(switch),
            next_hops,
            below,
            own: 0,
            sub_models: self.sub_models(),
            sums,
            window_max: self.window_max,
            aggregators: self.aggregators,
        }
    }

    pub fn server_plan(&self) -> ServerPlan<usize> {
        let mut children: Vec<usize> = self.at_server.iter().map(|switch| self.address(*switch)).collect();
        let own = (0..self.workers()).filter(|rank| self.attached[*rank].is_none());
        children.extend(own.map(|rank| self.worker(rank)));
        let hops = self.hops(&self.at_server);
        let way = |rank: usize| {
            let Some(mut at) = self.attached[rank] else { return self.worker(rank) };
            while let (Some(hop), _) = hops[at] {
                at = hop;
            }
            self.address(at)
        };
        let child = |address: usize| children.iter().position(|child| *child == address);
        let ways = (0..self.workers()).map(|rank| child(way(rank)).expect("next to the server") as u16);
        let nodes = self.plan.iter().map(|assigned| assigned.iter().map(|it| Self::node(*it)).collect());
        let (nodes, ways) = (nodes.collect(), ways.collect());
        let onward = (0..self.sub_models.len()).map(|sub_model| self.onward_of(sub_model)).collect();
        ServerPlan { sub_models: self.sub_models(), nodes, onward, children, ways }
    }

    /// Float32, int32 and bfloat16 in turn. Floats are multiples of 1/128, and whole numbers in bfloat16: exact under the fixed factor.
    /// Some may be too large for it.
    pub fn tensor(&self, rank: usize, which: usize) -> Values {
        let mut random = Random(self.seed ^ (rank << 20 | which) as u64);
        let mut value = || {
            let x = random.below(256) as i32 - 128;
            if self.large && random.below(100) == 0 { x + 20 * 128 } else { x }
        };
        let values: Vec<i32> = (0..self.tensors[which]).map(|_| value()).collect();
        let shift = if self.large { 20 } else { 0 };
        match which % 3 {
            0 => Values::Float32(values.iter().map(|x| *x as f32 / 128.0).collect()),
            1 => Values::Int32(values.iter().map(|x| x << shift).collect()),
            _ => Values::Bfloat16(values.iter().map(|x| bfloat16_bits((x / 16) as f32)).collect()),
        }
    }

    /// Whether a sum is what it should be. A factor of a fragment's own rounds.
    pub fn is_sum(&self, which: usize, got: &Values) -> bool {
        let taking_part = (0..self.workers()).filter(|rank| self.takes_part(*rank, which));
        let parts: Vec<Values> = taking_part.map(|rank| self.tensor(rank, which)).collect();
        match got {
            Values::Float32(got) => got.iter().enumerate().all(|(i, got)| {
                let of = |part: &Values| if let Values::Float32(part) = part { part[i] } else { f32::NAN };
                let sum: f32 = parts.iter().map(of).sum();
                let tolerance = if self.scaling == Scaling::Static { 0.0 } else { 1e-4 };
                (got - sum).abs() <= tolerance
            }),
            Values::Int32(got) => got.iter().enumerate().all(|(i, got)| {
                let of = |part: &Values| if let Values::Int32(part) = part { part[i] } else { 0 };
                *got == parts.iter().map(of).fold(0, i32::wrapping_add)
            }),
            Values::Bfloat16(got) => got.iter().enumerate().all(|(i, got)| {
                let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                let of =
                    |part: &Values| if let Values::Bfloat16(part) = part { value(part[i]) } else { f32::NAN };
                let sum: f32 = parts.iter().map(of).sum();
                let is_near = (value(*got) - sum).abs() <= sum.abs() / 128.0 + 1e-4;
                *got == bfloat16_bits(sum) || self.scaling != Scaling::Static && is_near
            }),
            _ => false,
        }
    }

    /// Fragments of all tensors.
    pub fn fragments(&self) -> u64 {
        self.tensors.iter().map(|elements| elements.div_ceil(ELEMENTS) as u64).sum()
    }
}

/// Fragments of the parts of a model.
fn parts(random: &mut Random) -> Vec<u32> {
    (0..1 + random.below(5)).map(|_| 1 + random.below(12) as u32).collect()
}
