//! How much each summation service sums (BytePS §4.1), for links of any rates.
//!
//! A tensor of `M` bytes is trained on by `n` machines. A service with the share `x` moves, in each
//! direction of its link: `n x M` if its machine only sums; `M + (n - 2) x M` if it trains too,
//! since its own contribution to its own service stays at home (Eq. 3). The slowest link decides.
//! The paper solves this for equal links (Eqs. 1 and 2). Here any rates go, and the cores' rate of
//! summation is one more link. In a given time each machine can take a largest share, which grows
//! with the time and is concave in it. The time is right when these shares make one whole. So no
//! solver of linear programs is needed: every row of that program has one share and the time. The
//! tests compare the result with a solver's.

use crate::Cluster;

/// A plan: which share of every tensor is summed where, and how long that takes.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadSplit {
    /// Each machine's share; they sum to one.
    pub shares: Vec<f64>,
    /// Seconds for a byte of a tensor, from the first contribution to the last sum. Headers are not
    /// in it.
    pub seconds_per_byte: f64,
    /// The cause: the first, if several take as long.
    pub bound: Bound,
}

/// The part of the cluster that decides how long a sum takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The link out of the machine of this index.
    Up(usize),
    /// The link into it.
    Down(usize),
    /// Its cores.
    Summing(usize),
    /// A single machine trains: nothing crosses a link.
    Nothing,
}

/// Something that takes `(fixed + slope * share) / rate` seconds for a byte of a tensor.
struct Row {
    machine: usize,
    bound: Bound,
    fixed: f64,
    slope: f64,
    /// Bytes a second.
    rate: f64,
}

impl Row {
    fn seconds(&self, share: f64) -> f64 {
        (self.fixed + self.slope * share) / self.rate
    }

    /// The largest share that takes no longer than `seconds`, and how fast it grows with them.
    fn share(&self, seconds: f64) -> (f64, f64) {
        let free = seconds * self.rate - self.fixed;
        if self.slope == 0.0 || self.rate.is_infinite() {
            (1.0, 0.0)
        } else {
            (free / self.slope, self.rate / self.slope)
        }
    }
}

impl LoadSplit {
    /// The plan that takes the least time; one switch where that takes no longer, as fewer machines
    /// can fail.
    #[must_use]
    pub fn of(cluster: &Cluster) -> Self {
        let plan = Self::over_all(cluster);
        match one_switch(cluster) {
            Some(switch) if switch.seconds_per_byte <= plan.seconds_per_byte * (1.0 + 1e-12) => switch,
            _ => plan,
        }
    }

    /// The plan that takes the least time, which gives each machine something where it can.
    fn over_all(cluster: &Cluster) -> Self {
        let rows = rows(cluster);
        // Each training machine sends and receives a whole tensor, except what it sums itself.
        // Others send it that part instead.
        let least = rows.iter().map(|row| row.seconds(0.0)).fold(0.0, f64::max);
        let mut seconds = least;
        // A tangent lies above a concave sum: the time never goes past the right one, and each step
        // ends at least one piece of it.
        let shares = loop {
            let (shares, slope) = largest_shares(cluster, &rows, seconds);
            let sum: f64 = shares.iter().sum();
            let next = seconds + (1.0 - sum) / slope;
            if sum >= 1.0 || next <= seconds {
                break shares.into_iter().map(|share| share / sum).collect::<Vec<_>>();
            }
            seconds = next;
        };
        Self::with(&rows, shares)
    }

    /// What `shares` take.
    fn with(rows: &[Row], shares: Vec<f64>) -> Self {
        let (mut seconds_per_byte, mut bound) = (0.0, Bound::Nothing);
        for row in rows {
            let seconds = row.seconds(shares[row.machine]);
            if seconds > seconds_per_byte {
                (seconds_per_byte, bound) = (seconds, row.bound);
            }
        }
        Self { shares, seconds_per_byte, bound }
    }
}

/// A single switch sums all: the best machine for it that does not train, if there is one.
#[must_use]
pub fn one_switch(cluster: &Cluster) -> Option<LoadSplit> {
    let rows = rows(cluster);
    let machines = cluster.machines();
    let alone = |switch: usize| {
        let shares = (0..machines.len()).map(|machine| f64::from(machine == switch)).collect();
        LoadSplit::with(&rows, shares)
    };
    let spare = (0..machines.len()).filter(|&machine| machines[machine].sums && !machines[machine].trains);
    spare.map(alone).min_by(|a, b| a.seconds_per_byte.total_cmp(&b.seconds_per_byte))
}

/// Seconds for a byte of a tensor on a ring over the machines that train, as in Gloo and NCCL.
/// Every link carries `2 (n - 1) / n` of it (BytePS §2.2).
#[must_use]
pub fn ring(cluster: &Cluster) -> f64 {
    let n = cluster.training() as f64;
    let slowest = cluster.machines().iter().filter(|machine| machine.trains);
    let slowest = slowest.map(|machine| machine.rate_bps() / 8.0).fold(f64::INFINITY, f64::min);
    2.0 * (n - 1.0) / n / slowest
}

/// A lower bound on the seconds for a byte of a tensor, for any way to sum on these machines in any
/// number of stages. It holds if contributions travel whole and each machine is sent its own copy
/// of the sum (no sums inside the network, no multicast). A machine that trains has to receive what
/// the others have, and to send its own. Each byte's sum takes `n - 1` transfers to make and as
/// many to spread, which all links together carry.
#[must_use]
pub fn lower_bound(cluster: &Cluster) -> f64 {
    let n = cluster.training() as f64;
    if n < 2.0 {
        return 0.0;
    }
    let machines = cluster.machines();
    let own = machines.iter().filter(|machine| machine.trains).map(|machine| 8.0 / machine.rate_bps());
    let up: f64 = machines.iter().map(|machine| machine.up_bps / 8.0).sum();
    let down: f64 = machines.iter().map(|machine| machine.down_bps / 8.0).sum();
    own.fold(2.0 * (n - 1.0) / up.min(down), f64::max)
}

fn rows(cluster: &Cluster) -> Vec<Row> {
    let n = cluster.training() as f64;
    let mut rows = Vec::new();
    for (index, machine) in cluster.machines().iter().enumerate() {
        // A single machine's gradients are its sum.
        let (fixed, slope) = match machine.trains {
            _ if n < 2.0 => (0.0, 0.0),
            true => (1.0, n - 2.0),
            false => (0.0, n),
        };
        let row = |bound, fixed, slope, rate| Row { machine: index, bound, fixed, slope, rate };
        rows.push(row(Bound::Up(index), fixed, slope, machine.up_bps / 8.0));
        rows.push(row(Bound::Down(index), fixed, slope, machine.down_bps / 8.0));
        if n >= 2.0 {
            rows.push(row(Bound::Summing(index), 0.0, n, machine.summed_bytes_per_s));
        }
    }
    rows
}

/// For each machine the largest share that takes no longer than `seconds`, at most one; and how
/// fast their sum grows.
fn largest_shares(cluster: &Cluster, rows: &[Row], seconds: f64) -> (Vec<f64>, f64) {
    let mut largest: Vec<_> =
        cluster.machines().iter().map(|machine| (f64::from(u8::from(machine.sums)), 0.0)).collect();
    for row in rows {
        let (share, slope) = row.share(seconds);
        let (least, grows) = &mut largest[row.machine];
        // If two limits meet, the one that grows more slowly is the next to hold.
        if share < *least || (share == *least && slope < *grows) {
            (*least, *grows) = (share.max(0.0), slope);
        }
    }
    let slope = largest.iter().map(|(_, slope)| slope).sum();
    (largest.into_iter().map(|(share, _)| share).collect(), slope)
}

#[cfg(test)]
mod tests;
