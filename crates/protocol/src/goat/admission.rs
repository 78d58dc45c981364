//! What the members of a GOAT job are told of its plan (GOAT §III-D, §IV).
//!
//! Fragments go up and down the tree of switches that the ranks' ways form: where a plan sends one to a switch that is not on its worker's
//! way, the switch where both ways meet sends it down. So every machine speaks with its neighbours alone.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;

use fanin_wire::{AggregationNode, NATIVE_ELEMENTS_MAX, Rank, SubModel, WireDtype};
use prost::Message;

use super::tree::{equal_parts, stretch, window_of_tree};
use super::{
    Assignment, GoatJobConfig, GoatRoute, GoatServerJob, Onward, Overflow, PlannedSum, RankTerms, Scaling,
    ServerPlan, SubModels,
};
use crate::aggregation::admission;
use crate::control::{
    Gathered, Malformed, Memory, Path, Refusal, Seats, Share, SwitchTree, Terms, WINDOW_MIN, narrow,
    product_packets, read, window_packets,
};
use crate::machine::JobIdentity;
use crate::machines::Peers;
use core::time::Duration;

/// What all members are told.
#[derive(Clone, PartialEq, Message)]
struct Common {
    /// Packets of a rank that may be in flight.
    #[prost(uint32, tag = "1")]
    window: u32,
    /// Elements of a fragment.
    #[prost(uint32, tag = "2")]
    elements: u32,
    /// Fragments of each part of the model: the stream goes through all of them again and again.
    #[prost(uint32, repeated, tag = "3")]
    sub_models: Vec<u32>,
    /// Whether large floats travel as bfloat16.
    #[prost(bool, tag = "4")]
    bfloat16: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RankPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// Of each part the node that sums this rank's fragments; 0 is the server.
    #[prost(uint32, repeated, tag = "2")]
    nodes: Vec<u32>,
}

/// Workers are bitmaps of ranks, 16 bytes, little-endian.
#[derive(Clone, PartialEq, Message)]
struct SwitchPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// Its number in packets.
    #[prost(uint32, tag = "2")]
    node: u32,
    /// Towards the other nodes that sum.
    #[prost(message, repeated, tag = "3")]
    next_hops: Vec<NextHop>,
    /// Addresses of the switches whose upstream it is, as it sees them.
    #[prost(string, repeated, tag = "4")]
    below: Vec<String>,
    /// The workers that send to it first.
    #[prost(bytes = "vec", tag = "5")]
    own: Vec<u8>,
    #[prost(message, repeated, tag = "6")]
    sums: Vec<Sum>,
}

#[derive(Clone, PartialEq, Message)]
struct NextHop {
    #[prost(uint32, tag = "1")]
    node: u32,
    /// One of those below; empty where it is the upstream.
    #[prost(string, tag = "2")]
    to: String,
}

#[derive(Clone, PartialEq, Message)]
struct Sum {
    #[prost(uint32, tag = "1")]
    sub_model: u32,
    /// Those that are waited for.
    #[prost(bytes = "vec", tag = "2")]
    workers: Vec<u8>,
    /// Of the first fragment; the others follow.
    #[prost(uint32, tag = "3")]
    first_aggregator: u32,
    /// The sums of other nodes that are waited for, too, each by its workers.
    #[prost(bytes = "vec", repeated, tag = "4")]
    sums: Vec<Vec<u8>>,
    /// Where the sum goes; 0 is the server.
    #[prost(uint32, tag = "5")]
    onward: u32,
}

#[derive(Clone, PartialEq, Message)]
struct RootPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// By rank, as it is told.
    #[prost(message, repeated, tag = "2")]
    nodes: Vec<Nodes>,
    /// Addresses of the switches whose upstream it is.
    #[prost(string, repeated, tag = "3")]
    children: Vec<String>,
    /// By rank: through which of these it gets its parameters; behind the last of them it does so itself.
    #[prost(uint32, repeated, tag = "4")]
    ways: Vec<u32>,
    #[prost(message, repeated, tag = "5")]
    onward: Vec<SumWay>,
    /// Fragments that fill the ranks' path, where the parts are equal ones of an endless stream; else 0.
    #[prost(uint32, tag = "6")]
    path: u32,
}

/// Where the sum of a node goes, if not to the server.
#[derive(Clone, PartialEq, Message)]
struct SumWay {
    #[prost(uint32, tag = "1")]
    sub_model: u32,
    #[prost(uint32, tag = "2")]
    node: u32,
    #[prost(uint32, tag = "3")]
    to: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Nodes {
    #[prost(uint32, repeated, tag = "1")]
    nodes: Vec<u32>,
}

/// A job's plan: which switch of its tree sums which part of the stream for whom.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    tree: &'a SwitchTree,
    window: u16,
    elements: u16,
    wire_dtype: WireDtype,
    /// Fragments that fill the ranks' path; none where the parts are the model's own.
    path: Option<u16>,
    /// Fragments of each part of the model.
    pub fragments: Vec<u32>,
    /// Of each rank, by part, who sums its fragments.
    pub nodes: Vec<Vec<AggregationNode>>,
    /// By part, where sums go, if not to the server: to switches on the way there.
    pub onward: Vec<Onward>,
    /// Of each switch of the tree: what follows from both, with aggregators.
    pub sums: Vec<BTreeMap<SubModel, PlannedSum>>,
}

/// A switch of the tree as packets name it.
#[must_use]
pub const fn number(switch: usize) -> AggregationNode {
    AggregationNode(switch as u16 + 1)
}

impl<'a> Plan<'a> {
    /// The plan in which no switch sums anything, for a model's own parts of so many fragments.
    #[must_use]
    pub fn of_model(terms: &Terms, tree: &'a SwitchTree, fragments: Vec<u32>) -> Self {
        let nodes = alloc::vec![alloc::vec![AggregationNode::SERVER; fragments.len()]; tree.ranks.len()];
        let sums = alloc::vec![BTreeMap::new(); tree.switches.len()];
        let onward = alloc::vec![Onward::new(); fragments.len()];
        let Terms { in_flight: window, elements, wire_dtype, .. } = *terms;
        Self { tree, window, elements, wire_dtype, path: None, fragments, nodes, onward, sums }
    }

    /// The same for equal parts of an endless stream. So many fragments fill the ranks' path.
    #[must_use]
    pub fn of_stream(terms: &Terms, tree: &'a SwitchTree, path: u16) -> Self {
        Self { path: Some(path), ..Self::of_model(terms, tree, equal_parts(terms.in_flight)) }
    }

    /// The same for a job that was admitted with these seats.
    ///
    /// # Errors
    /// When they are of no job of GOAT.
    pub fn of(terms: &Terms, tree: &'a SwitchTree, seats: &Seats) -> Result<Self, Malformed> {
        let RootPart { common, path, .. } = read(&seats.root)?;
        Ok(match narrow(path, "path")? {
            0 => Self::of_model(terms, tree, common.sub_models),
            path => Self::of_stream(terms, tree, path),
        })
    }

    /// The same, with a stream in as many fragments as suit so much of each switch's memory. No rank is further ahead of another one. A
    /// model's own parts stay as they are.
    #[must_use]
    pub fn for_memories(self, terms: &Terms, memories: &[u32]) -> Self {
        let Some(path) = self.path else { return self };
        let window = stretch(self.tree, memories, path, terms.in_flight);
        let of_model = Self::of_model(terms, self.tree, equal_parts(window));
        Self { path: Some(path), ..of_model }
    }

    /// What each member is told.
    #[must_use]
    pub fn seats(&self) -> Seats {
        let (window, elements) = (self.window.into(), self.elements.into());
        let bfloat16 = self.wire_dtype == WireDtype::Bfloat16;
        let common = Common { window, elements, sub_models: self.fragments.clone(), bfloat16 };
        let nodes = |nodes: &Vec<AggregationNode>| nodes.iter().map(|node| node.0.into()).collect();
        let rank = |own: &Vec<AggregationNode>| RankPart { common: common.clone(), nodes: nodes(own) };
        let switches = (0..self.tree.switches.len()).map(|switch| self.of_switch(switch, &common));
        Seats {
            root: self.of_root(&common).encode_to_vec(),
            switches: switches.map(|part| part.encode_to_vec()).collect(),
            ranks: self.nodes.iter().map(|own| rank(own).encode_to_vec()).collect(),
            shares: self.shares(),
        }
    }

    fn of_switch(&self, switch: usize, common: &Common) -> SwitchPart {
        let below = self.tree.switches.iter().filter(|of| of.upstream == Some(switch));
        // Down to where it is below, else up.
        let towards = |node: usize| {
            let mut at = node;
            while let Some(upstream) = self.tree.switches[at].upstream {
                if upstream == switch {
                    return self.tree.switches[at].hop.address.to_string();
                }
                at = upstream;
            }
            String::new()
        };
        let summing = (0..self.sums.len()).filter(|other| *other != switch && !self.sums[*other].is_empty());
        let own = (0..).zip(&self.tree.ranks).filter(|(_, rank)| rank.switch == Some(switch));
        let sum = |(sub_model, sum): (&SubModel, &PlannedSum)| Sum {
            sub_model: sub_model.0.into(),
            workers: sum.workers.to_le_bytes().into(),
            first_aggregator: sum.first_aggregator,
            sums: sum.sums.iter().map(|workers| workers.to_le_bytes().into()).collect(),
            onward: sum.onward.0.into(),
        };
        SwitchPart {
            common: common.clone(),
            node: number(switch).0.into(),
            next_hops: summing
                .map(|node| NextHop { node: number(node).0.into(), to: towards(node) })
                .collect(),
            below: below.map(|of| of.hop.address.to_string()).collect(),
            own: own.fold(0u128, |all, (rank, _)| all | 1 << rank).to_le_bytes().into(),
            sums: self.sums[switch].iter().map(sum).collect(),
        }
    }

    fn of_root(&self, common: &Common) -> RootPart {
        let next_to_it: Vec<usize> =
            (0..self.tree.switches.len()).filter(|of| self.tree.switches[*of].upstream.is_none()).collect();
        let mut own = next_to_it.len() as u32;
        let way = |rank: usize| match self.tree.way(Rank(rank as u16)).first() {
            Some(first) => next_to_it.iter().position(|switch| switch == first).unwrap_or(0) as u32,
            None => {
                own += 1;
                own - 1
            }
        };
        let ways = (0..self.nodes.len()).map(way).collect();
        let nodes =
            |own: &Vec<AggregationNode>| Nodes { nodes: own.iter().map(|node| node.0.into()).collect() };
        let way = |(sub_model, (node, to)): (u32, (&AggregationNode, &AggregationNode))| SumWay {
            sub_model,
            node: node.0.into(),
            to: to.0.into(),
        };
        let onward = (0..).zip(&self.onward);
        let onward = onward.flat_map(|(part, onward)| onward.iter().map(move |sum| (part, sum))).map(way);
        RootPart {
            common: common.clone(),
            nodes: self.nodes.iter().map(nodes).collect(),
            children: next_to_it.iter().map(|of| self.tree.switches[*of].hop.address.to_string()).collect(),
            ways,
            onward: onward.collect(),
            path: self.path.map_or(0, u32::from),
        }
    }

    /// Which part of all ranks' fragments each switch sums; what is left is the server's.
    fn shares(&self) -> Vec<Share> {
        let all = self.fragments.iter().copied().map(u64::from).sum::<u64>() * self.nodes.len() as u64;
        let of = |(switch, sums): (usize, &BTreeMap<SubModel, PlannedSum>)| {
            let fragments = |part: &SubModel| self.fragments[usize::from(part.0)];
            let summed = |(part, sum): (&SubModel, &PlannedSum)| {
                u64::from(fragments(part)) * u64::from(sum.workers.count_ones())
            };
            Share {
                switch,
                millionths: (1_000_000 * sums.iter().map(summed).sum::<u64>() / all.max(1)) as u32,
                aggregators: sums.keys().map(fragments).sum(),
            }
        };
        self.sums.iter().enumerate().map(of).collect()
    }
}

/// What a job will be, with a plan in which no switch sums anything.
pub(super) fn admit(ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
    let named = &ranks.any().agreed.sub_models;
    let of_model = model(named, ranks.elements);
    let path = Path { wire_dtype: WireDtype::SharedExponent, ..ranks.path(ranks.world_size()) };
    let mut chosen = ranks.in_flight().unwrap_or_else(|| match named.is_empty() {
        true => window_of_tree(ranks.tree, &ranks.tree.memories(), |held| window(&path, held)),
        false => window(&path, of_model),
    });
    if !named.is_empty() {
        chosen = chosen.min(u16::try_from(of_model).unwrap_or(u16::MAX));
    }
    let terms = admission::terms(ranks, chosen);
    let plan = match &named[..] {
        [] => Plan::of_stream(&terms, ranks.tree, product_packets(&path)),
        named => {
            let fragments = named.iter().map(|part| part.div_ceil(terms.elements.into()) as u32);
            Plan::of_model(&terms, ranks.tree, fragments.collect())
        }
    };
    SubModels::new(&plan.fragments).map_err(|error| Refusal::Unserved { reason: error.to_string() })?;
    let seats = plan.seats();
    Ok((terms, seats))
}

/// A window where ranks ask for none, and a plan says of so many fragments where they are summed.
fn window(path: &Path, planned: u32) -> u16 {
    if planned == 0 {
        return window_packets(path);
    }
    // As far ahead of a late rank as there is room where all send at once, and no further than switches sum: what is on the way beyond
    // that would come to the root once from every rank.
    let endless = Path { rate_bps: u64::MAX, rtt: Duration::MAX, ..*path };
    planned.max(WINDOW_MIN.into()).min(window_packets(&endless).into()) as u16
}

/// Fragments of a model of these parts.
fn model(sub_models: &[u64], elements: u16) -> u32 {
    let fragments = sub_models.iter().map(|part| part.div_ceil(elements.max(1).into()));
    u32::try_from(fragments.sum::<u64>()).unwrap_or(u32::MAX)
}

impl Common {
    /// The job, to its server and to its workers alike: the same choices as for ATP.
    fn job(&self, job: JobIdentity) -> Result<(GoatJobConfig, SubModels), Malformed> {
        let JobIdentity { id, key, generation, workers, .. } = job;
        let config = GoatJobConfig {
            id,
            key,
            generation,
            workers,
            elements: narrow(self.elements, "elements")?,
            window_max: narrow(self.window, "window")?,
            scaling: Scaling::Dynamic,
            overflow: Overflow::Reactive,
            congestion_control: true,
            wire_dtype: admission::wire_dtype(self.bfloat16),
            originals_elements_max: NATIVE_ELEMENTS_MAX as u32,
        };
        let sub_models = SubModels::new(&self.sub_models).map_err(|_| Malformed("sub_models"))?;
        config.check().map_err(|_| Malformed("job"))?;
        Ok((config, sub_models))
    }
}

fn nodes(numbers: &[u32]) -> Result<Vec<AggregationNode>, Malformed> {
    numbers.iter().map(|node| narrow(*node, "nodes").map(AggregationNode)).collect()
}

/// A bitmap of ranks as it came.
fn workers(bytes: &[u8]) -> Result<u128, Malformed> {
    bytes.try_into().map(u128::from_le_bytes).map_err(|_| Malformed("workers"))
}

fn address(text: &str) -> Result<SocketAddr, Malformed> {
    text.parse().map_err(|_| Malformed("address"))
}

/// What a rank makes of its part. All goes to its switch, or to the server, which knows the way.
pub(super) fn rank_terms<A>(job: JobIdentity, rank: Rank, part: &[u8]) -> Result<RankTerms<A>, Malformed> {
    let part: RankPart = read(part)?;
    let (config, sub_models) = part.common.job(job)?;
    let assignment = Assignment::new(rank.0, sub_models, nodes(&part.nodes)?, Vec::new());
    Ok(RankTerms { config, assignment: assignment.map_err(|_| Malformed("nodes"))?, windows: 1 })
}

/// What the root makes of its part.
pub(super) fn root_job<A>(
    job: JobIdentity,
    part: &[u8],
    peers: Peers<'_, A>,
) -> Result<GoatServerJob<A>, String> {
    let part: RootPart = read(part)?;
    let (config, sub_models) = part.common.job(job)?;
    let children = part.children.iter().map(|child| peers(address(child)?)).collect::<Result<_, String>>()?;
    let ways = part.ways.iter().map(|way| narrow(*way, "ways")).collect::<Result<_, _>>()?;
    let nodes = part.nodes.iter().map(|own| nodes(&own.nodes)).collect::<Result<_, _>>()?;
    let mut onward = alloc::vec![Onward::new(); sub_models.count()];
    for SumWay { sub_model, node, to } in part.onward {
        let sums = usize::try_from(sub_model).ok().and_then(|at| onward.get_mut(at));
        let [node, to] = [narrow(node, "node")?, narrow(to, "to")?].map(AggregationNode);
        sums.ok_or(Malformed("sub_model"))?.insert(node, to);
    }
    let plan = ServerPlan { sub_models, nodes, onward, children, ways };
    Ok(GoatServerJob { config, plan, restored: job.resumed })
}

/// What a switch makes of its part, whose upstream is at this address.
pub(super) fn route(
    job: JobIdentity,
    part: &[u8],
    upstream: SocketAddr,
    memory: &Memory,
) -> Result<GoatRoute<SocketAddr>, Malformed> {
    let part: SwitchPart = read(part)?;
    let next_hop = |hop: &NextHop| {
        let to = if hop.to.is_empty() { upstream } else { address(&hop.to)? };
        Ok((AggregationNode(narrow(hop.node, "node")?), to))
    };
    let sub_models = SubModels::new(&part.common.sub_models).map_err(|_| Malformed("sub_models"))?;
    let aggregators = memory.aggregators;
    let sum = |sum: &Sum| {
        let sub_model = SubModel(narrow(sum.sub_model, "sub_model")?);
        let fragments = sub_models.fragments_of(sub_model);
        if fragments == 0 {
            return Err(Malformed("sums"));
        }
        let planned = PlannedSum {
            workers: workers(&sum.workers)?,
            sums: sum.sums.iter().map(|sum| workers(sum)).collect::<Result<_, _>>()?,
            onward: AggregationNode(narrow(sum.onward, "onward")?),
            first_aggregator: sum.first_aggregator,
        };
        // A switch that was started again with less memory sends on what it was planned to sum.
        let fits = sum.first_aggregator.checked_add(fragments).is_some_and(|end| end <= aggregators);
        Ok(fits.then_some((sub_model, planned)))
    };
    Ok(GoatRoute {
        id: job.id,
        key: job.key,
        generation: job.generation,
        workers: job.workers,
        node: AggregationNode(narrow(part.node, "node")?),
        upstream,
        next_hops: part.next_hops.iter().map(next_hop).collect::<Result<_, Malformed>>()?,
        below: part.below.iter().map(|child| address(child)).collect::<Result<_, _>>()?,
        own: workers(&part.own)?,
        sums: part.sums.iter().filter_map(|planned| sum(planned).transpose()).collect::<Result<_, _>>()?,
        window_max: narrow(part.common.window, "window")?,
        sub_models,
        aggregators,
    })
}

/// Whether two parts of one switch are of the same plan, whatever the addresses of its neighbours are.
pub(super) fn is_same_plan(was: &[u8], is: &[u8]) -> bool {
    let plan = |part: &[u8]| {
        let SwitchPart { common, node, own, sums, .. } = read(part).ok()?;
        Some((common.window, common.sub_models, node, own, sums))
    };
    plan(was) == plan(is)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Hop;

    /// Two racks of two ranks and a spine hold 128 fragments on each way, and each of them 64. If all have a part of what the others
    /// lack, the racks' links carry two ranks' fragments of what the spine sums.
    #[test]
    fn the_window_is_what_a_way_holds_where_links_carry_no_more_for_it() {
        let spine = |instance, rate_bps| Hop { aggregators: 64, rate_bps, ..Hop::numbered(instance) };
        let window = |of_racks, of_spine, of_ranks| {
            let ways: Vec<[Hop; 2]> =
                [7, 7, 8, 8].map(|rack| [spine(rack, of_racks), spine(9, of_spine)]).to_vec();
            let ways: Vec<&[Hop]> = ways.iter().map(|way| &way[..]).collect();
            let tree = SwitchTree::of_ways(&ways, [of_ranks; 4].into_iter()).unwrap();
            let path = Path {
                rate_bps: 1_000_000_000,
                rtt: Duration::from_millis(1),
                senders: 4,
                elements: 336,
                wire_dtype: WireDtype::SharedExponent,
                shards: 1,
                receive_buffer_bytes: 1 << 30,
                portion: None,
            };
            window_of_tree(&tree, &tree.memories(), |held| super::window(&path, held))
        };
        let (slow, fast) = (Some(1_000_000_000), Some(10_000_000_000));
        assert_eq!(window(slow, slow, slow), 64);
        assert_eq!(window(None, None, None), 64);
        assert_eq!(window(fast, fast, slow), 128);
        assert_eq!(window(slow, fast, slow), 64, "the racks' links alone");
    }
}
