//! How fast this machine's cores sum, which a plan counts where links are faster.

use std::sync::OnceLock;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Contributions that are summed at once, and words of each. They stay in a core's cache, as do
/// packets that a service just received.
const CONTRIBUTIONS: usize = 8;
const WORDS: usize = 2048;
/// How often it is measured, and for how long. The fastest counts, because other processes may have
/// had the core meanwhile.
const ROUNDS: usize = 20;
const ROUND: Duration = Duration::from_millis(1);

/// The cores of this machine that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// How many there are.
    pub count: usize,
    /// Bytes of contributions that one of them sums in a second, sockets apart.
    pub summed_bytes_per_s: u64,
}

impl Cores {
    /// Counts and measures them; the first call of a process takes some hundredths of a second.
    #[must_use]
    pub fn of_process() -> Self {
        static CORES: OnceLock<Cores> = OnceLock::new();
        *CORES.get_or_init(|| Self {
            count: available_parallelism().map_or(1, usize::from),
            summed_bytes_per_s: (0..ROUNDS).map(|_| measured()).max().unwrap_or(1),
        })
    }
}

fn measured() -> u64 {
    // No number of them is the kernels' special case.
    let payload: Vec<u8> = (0..WORDS).flat_map(|word| (word as f32).to_le_bytes()).collect();
    let payloads = vec![payload; CONTRIBUTIONS];
    let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    let mut sum = vec![0; WORDS];
    let (began, mut sums) = (Instant::now(), 0_u64);
    while began.elapsed() < ROUND {
        fanin_quant::sum_f32(&payloads, 1, std::hint::black_box(&mut sum));
        sums += 1;
    }
    let bytes = sums as f64 * (CONTRIBUTIONS * WORDS * size_of::<f32>()) as f64;
    ((bytes / began.elapsed().as_secs_f64()) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_measured_once() {
        let cores = Cores::of_process();
        assert!(cores.count >= 1 && cores.summed_bytes_per_s >= 1);
        assert_eq!(Cores::of_process(), cores);
    }
}
