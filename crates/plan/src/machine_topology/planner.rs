//! Which strategy a machine should take (BytePS §4.2.3): all that there are, each with its time,
//! and the best.

use super::intra_machine::nvlink_tree;
use super::{MachineTopology, Outside, PartId, PartKind, Strategy, Traffic};

/// The relative difference below which two times are equal: summing the same in another order makes
/// no difference.
const SAME: f64 = 1e-9;

/// A strategy, and what it comes to on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// How.
    pub strategy: Strategy,
    /// The load on links and memories.
    pub traffic: Traffic,
    /// The time of the slowest link or memory, for a byte of the gradients of one GPU.
    pub seconds_per_byte: f64,
}

impl Planned {
    /// A strategy on a machine.
    ///
    /// # Panics
    /// As [`Strategy::Roots`] says.
    #[must_use]
    pub fn new(topology: &MachineTopology, strategy: Strategy, outside: Outside) -> Self {
        let traffic = Traffic::of(topology, &strategy, outside);
        let seconds_per_byte = traffic.slowest().1;
        Self { strategy, traffic, seconds_per_byte }
    }

    /// Whether BytePS has it, and not only compares with it.
    #[must_use]
    pub const fn is_candidate(&self) -> bool {
        matches!(self.strategy, Strategy::CpuAssisted { .. } | Strategy::Roots(_))
    }
}

/// All strategies that a machine can take, and what BytePS compares with; none without a GPU.
/// Brute-force copies only where all memories' rates are known, which these load the most (§4.2.1).
#[must_use]
pub fn planned(topology: &MachineTopology, outside: Outside) -> Vec<Planned> {
    let gpus: Vec<_> = topology.gpus().collect();
    let Some(first) = gpus.first().copied() else { return Vec::new() };
    let mut strategies = vec![Strategy::CpuAssisted { brute_force: 0.0 }];
    let memories_known = topology.parts().iter().all(|part| match part.kind {
        PartKind::Cpu { memory_bps } => memory_bps.is_finite(),
        _ => true,
    });
    if memories_known {
        let brute_force = best_brute_force(topology, outside);
        strategies.extend(Some(Strategy::CpuAssisted { brute_force }).filter(|_| brute_force > 0.0));
    }
    if gpus.len() > 1 && nvlink_tree(topology, first).len() + 1 == gpus.len() {
        // With all GPUs as roots it is what frameworks do with NVLink.
        strategies.extend(root_sets(topology, &gpus).into_iter().map(Strategy::Roots));
    } else {
        strategies.push(Strategy::Straightforward);
    }
    strategies.push(Strategy::Ring);
    strategies.into_iter().map(|strategy| Planned::new(topology, strategy, outside)).collect()
}

/// The candidate that takes the least time; of several the one that moves the fewest bytes over
/// links, and then the first.
#[must_use]
pub fn best(planned: &[Planned]) -> Option<&Planned> {
    planned.iter().filter(|planned| planned.is_candidate()).reduce(|best, other| {
        let (times, bytes) =
            ([best, other].map(|it| it.seconds_per_byte), [best, other].map(|it| it.traffic.link_bytes()));
        let less = |[one, other]: [f64; 2]| other < one * (1.0 - SAME);
        let alike = !less(times) && !less([times[1], times[0]]);
        if less(times) || (alike && less(bytes)) { other } else { best }
    })
}

/// Each GPU alone, and all. Then the GPUs whose switch has no NIC behind it: those of each switch,
/// one of each switch, and all.
fn root_sets(topology: &MachineTopology, gpus: &[PartId]) -> Vec<Vec<PartId>> {
    let of_nics: Vec<_> = topology.nics().filter_map(|nic| topology.switch_of(nic)).collect();
    let competes = |gpu: PartId| topology.switch_of(gpu).is_some_and(|switch| of_nics.contains(&switch));
    let free: Vec<_> = topology.groups().into_iter().filter(|group| !competes(group[0])).collect();
    let heads = free.iter().map(|group| group[0]).collect();
    let mut sets: Vec<_> = gpus.iter().map(|gpu| vec![*gpu]).collect();
    for more in free.iter().cloned().chain([heads, free.concat(), gpus.to_vec()]) {
        if !more.is_empty() && !sets.contains(&more) {
            sets.push(more);
        }
    }
    sets
}

/// `x` of Eqs. 8 and 9 that takes the least time. Every load is linear in `x`. So the time, the
/// largest of them, is least at an end or where two loads are equal; among several such `x` the
/// least is taken.
fn best_brute_force(topology: &MachineTopology, outside: Outside) -> f64 {
    let seconds = |brute_force| {
        let traffic = Traffic::of(topology, &Strategy::CpuAssisted { brute_force }, outside);
        traffic.all_seconds().collect::<Vec<_>>()
    };
    let mut lines: Vec<(f64, f64)> = seconds(0.0).into_iter().zip(seconds(1.0)).collect();
    lines.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    lines.dedup();
    let at = |x: f64| lines.iter().map(|(none, all)| none + (all - none) * x).fold(0.0, f64::max);
    let mut best = (0.0, at(0.0));
    let mut crossings: Vec<f64> = lines
        .iter()
        .enumerate()
        .flat_map(|(index, one)| lines[..index].iter().map(move |other| (one, other)))
        .map(|(one, other)| {
            let (apart, slopes) = (one.0 - other.0, (other.1 - other.0) - (one.1 - one.0));
            apart / slopes
        })
        .filter(|x| (0.0..=1.0).contains(x))
        .chain([1.0])
        .collect();
    crossings.sort_by(f64::total_cmp);
    for x in crossings {
        if at(x) < best.1 * (1.0 - SAME) {
            best = (x, at(x));
        }
    }
    best.0
}
