//! Machines, each behind one link, in a network that is nowhere narrower than those (BytePS §4.1:
//! full bisection bandwidth).

use std::error::Error;
use std::fmt;

/// A machine that trains, sums, or both.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// The name for people.
    pub name: String,
    /// Whether ranks train there. They are summed on the machine first, so their number does not
    /// matter here.
    pub trains: bool,
    /// Whether a summation service may run there.
    pub sums: bool,
    /// The rate of its link out of it, in bits a second.
    pub up_bps: f64,
    /// The rate of its link into it, in bits a second.
    pub down_bps: f64,
    /// Bytes of contributions that its service can take in and add in a second; infinite where its
    /// cores never are the limit.
    pub summed_bytes_per_s: f64,
}

impl Machine {
    /// A machine that trains and sums, its link alike in both directions.
    #[must_use]
    pub fn training(name: impl Into<String>, rate_bps: f64) -> Self {
        Self {
            name: name.into(),
            trains: true,
            sums: true,
            up_bps: rate_bps,
            down_bps: rate_bps,
            summed_bytes_per_s: f64::INFINITY,
        }
    }

    /// A machine that sums and does not train (a CPU machine of BytePS, a switch of SwitchML).
    #[must_use]
    pub fn spare(name: impl Into<String>, rate_bps: f64) -> Self {
        Self { trains: false, ..Self::training(name, rate_bps) }
    }

    /// The slower direction of its link, in bits a second.
    pub(crate) fn rate_bps(&self) -> f64 {
        self.up_bps.min(self.down_bps)
    }
}

/// Machines that can be planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster(Vec<Machine>);

impl Cluster {
    /// Checks the machines.
    ///
    /// # Errors
    /// When nobody trains, nobody sums, or a rate is no positive number.
    pub fn new(machines: Vec<Machine>) -> Result<Self, ClusterError> {
        for machine in &machines {
            let rates = [
                ("rate out of it", machine.up_bps),
                ("rate into it", machine.down_bps),
                ("rate of summation", machine.summed_bytes_per_s),
            ];
            for (what, rate) in rates {
                // Infinite sums are allowed, and infinite links for machines that are one's own
                // memory away.
                if rate.is_nan() || rate <= 0.0 {
                    return Err(ClusterError::Rate { machine: machine.name.clone(), what, rate });
                }
            }
        }
        if !machines.iter().any(|machine| machine.trains) {
            return Err(ClusterError::NobodyTrains);
        }
        if !machines.iter().any(|machine| machine.sums) {
            return Err(ClusterError::NobodySums);
        }
        Ok(Self(machines))
    }

    /// The machines, in the order that shares come in.
    #[must_use]
    pub fn machines(&self) -> &[Machine] {
        &self.0
    }

    /// Machines that train: `n` of the paper.
    #[must_use]
    pub fn training(&self) -> usize {
        self.0.iter().filter(|machine| machine.trains).count()
    }
}

/// Why a cluster cannot be planned for.
#[derive(Clone, Debug, PartialEq)]
pub enum ClusterError {
    /// There is no gradient to sum.
    NobodyTrains,
    /// No machine may run a summation service.
    NobodySums,
    /// A rate is zero, negative or none.
    Rate {
        /// Of this machine.
        machine: String,
        /// Which of its rates.
        what: &'static str,
        /// The given value.
        rate: f64,
    },
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NobodyTrains => f.write_str("no machine trains: name at least one"),
            Self::NobodySums => {
                f.write_str("no machine may sum: allow services of one's own, or name a spare machine")
            }
            Self::Rate { machine, what, rate } => {
                write!(f, "machine {machine}: its {what} is {rate}, and must be more than zero")
            }
        }
    }
}

impl Error for ClusterError {}
