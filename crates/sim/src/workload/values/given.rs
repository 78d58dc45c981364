//! Numbers that come from outside, such as the gradients of a training, instead of drawn ones: what
//! a network makes of real ones.
//!
//! They are of any size, so that a contribution which is less than its system's own error can be
//! missing and not be found.

use std::ops::Range;
use std::sync::Arc;

use fanin_protocol::Layer;
use fanin_wire::{PACKED_BLOCK, WireDtype};

use super::{Digest, Gradient, Inside, Numbers, Source, floor_log2, power_of_two};
use crate::systems::System;
use crate::workload::{JobPlan, Workload};

/// The origin of the numbers of a job.
pub(crate) enum Origin {
    Drawn(Source),
    Given(Given),
}

impl Origin {
    /// [`Source::contribution`].
    pub(crate) fn contribution(
        &self,
        old: Option<Gradient>,
        tensor: u64,
        worker: u32,
        range: Range<usize>,
        whole: usize,
    ) -> Gradient {
        match self {
            Self::Drawn(source) => source.contribution(old, tensor, worker, range, whole),
            Self::Given(given) => {
                let numbers = given.contributions[worker as usize].part(range);
                Gradient { tensor, numbers, whole, layer: Layer::default() }
            }
        }
    }

    /// [`Source::element`].
    pub(crate) const fn element(&self, whole: usize, from: usize, at: usize) -> usize {
        match self {
            Self::Drawn(source) => source.element(whole, from, at),
            Self::Given(_) => from + at,
        }
    }

    /// [`Source::check`].
    pub(crate) fn check(&mut self, result: &Gradient, from: usize, skip: usize) -> Result<u64, usize> {
        match self {
            Self::Drawn(source) => source.check(result, from, skip),
            Self::Given(given) => given.check(&result.numbers, from, skip),
        }
    }
}

/// The numbers of a job's one tensor.
pub(crate) struct Given {
    system: Arc<dyn System>,
    wire_dtype: WireDtype,
    /// Elements of a packet.
    packet: usize,
    /// By rank.
    contributions: Vec<Numbers>,
    exact: Exact,
    /// What workers got.
    pub(crate) sums: Numbers,
}

/// The exact sums.
enum Exact {
    Float32 {
        sums: Vec<f64>,
        /// By element: the largest of any worker, without its sign.
        largest: Vec<f32>,
    },
    Int32(Vec<i32>),
}

impl Given {
    /// # Errors
    /// Why these are not the numbers of such a job.
    pub(crate) fn new(plan: &JobPlan, contributions: Vec<Numbers>) -> Result<Self, String> {
        let Workload::AllReduce { elements, count: Some(1), .. } = plan.workload else {
            return Err(format!("{} has to have a `tensor` and `tensors = 1`", plan.name));
        };
        if plan.system.is_asynchronous() {
            return Err(format!("{} sums nothing: it has `asynchronous`", plan.name));
        }
        if plan.sampled {
            return Err("numbers are given whole, which needs `payload = \"full\"`".into());
        }
        let workers = plan.workers.len();
        if contributions.len() != workers {
            return Err(format!("contributions of {} for {workers} workers", contributions.len()));
        }
        let mut exact = if plan.integers {
            Exact::Int32(vec![0; elements])
        } else {
            Exact::Float32 { sums: vec![0.0; elements], largest: vec![0.0; elements] }
        };
        for (rank, numbers) in contributions.iter().enumerate() {
            let count = numbers.count();
            if count != elements {
                return Err(format!("rank {rank} has {count} elements of a tensor of {elements}"));
            }
            exact.add(numbers).map_err(|why| format!("rank {rank}: {why}"))?;
        }
        let sums = if plan.integers {
            Numbers::Int32(vec![0; elements])
        } else {
            Numbers::Float32(vec![0.0; elements])
        };
        let (wire_dtype, (packet, _)) = (plan.travels_as(elements), plan.packet(elements));
        Ok(Self { system: plan.system.clone(), wire_dtype, packet, contributions, exact, sums })
    }

    fn check(&mut self, result: &Numbers, from: usize, skip: usize) -> Result<u64, usize> {
        let (mut digest, workers) = (Digest::default(), self.contributions.len());
        match (result, &self.exact, &mut self.sums) {
            (Numbers::Int32(result), Exact::Int32(exact), Numbers::Int32(sums)) => {
                for (i, sum) in result.iter().enumerate().skip(skip) {
                    if *sum != exact[from + i] {
                        return Err(i);
                    }
                    digest.add(sum.cast_unsigned());
                    sums[from + i] = *sum;
                }
            }
            (Numbers::Float32(result), Exact::Float32 { sums: exact, largest }, Numbers::Float32(sums)) => {
                // Elements that share what decides their rounding.
                let shared = if self.wire_dtype.is_packed() { PACKED_BLOCK } else { self.packet };
                for (index, block) in result.chunks(shared).enumerate() {
                    let begin = index * shared;
                    let range = from + begin..from + begin + block.len();
                    let most = largest[range.clone()].iter().copied().fold(0.0, f32::max);
                    for (i, sum) in block.iter().enumerate().skip(skip.saturating_sub(begin)) {
                        let (exact, largest) = (exact[range.start + i], largest[range.start + i]);
                        let bound = match self.wire_dtype {
                            WireDtype::Native | WireDtype::SharedExponent => {
                                bound(&*self.system, workers, most, largest)
                            }
                            rounded => bound_of_rounded(rounded, workers as u32, most, largest),
                        };
                        // Below the least normal float the units are as large as there.
                        let unit =
                            f64::from(f32::EPSILON) * (exact.abs() + bound + f64::from(f32::MIN_POSITIVE));
                        let error = (f64::from(*sum) - exact).abs();
                        if error.is_nan() || error > bound + unit / 2.0 {
                            return Err(begin + i);
                        }
                        digest.add(sum.to_bits());
                        sums[range.start + i] = *sum;
                    }
                }
            }
            _ => unreachable!("the tensors of a job have one type"),
        }
        Ok(digest.0)
    }

    /// [`Source::check_inside`].
    pub(super) fn check_inside(&mut self, result: &Numbers, inside: &Inside) -> Result<u64, usize> {
        let (mut digest, workers) = (Digest::default(), self.contributions.len());
        let packet_elements = self.packet;
        let is_in = |at: usize, rank: usize| {
            inside.packets.get(at / packet_elements).is_some_and(|packet| packet >> rank & 1 != 0)
        };
        match (result, &mut self.sums) {
            (Numbers::Int32(result), Numbers::Int32(sums)) => {
                for (at, sum) in result.iter().enumerate() {
                    let all = self.contributions.iter().enumerate().map(|(rank, numbers)| match numbers {
                        Numbers::Int32(x) if is_in(at, rank) => x[at],
                        _ => 0,
                    });
                    if *sum != all.fold(0_i32, i32::wrapping_add) {
                        return Err(at);
                    }
                    digest.add(sum.cast_unsigned());
                    sums[at] = *sum;
                }
            }
            (Numbers::Float32(result), Numbers::Float32(sums)) => {
                for (at, sum) in result.iter().enumerate() {
                    let Some(packet) = inside.packets.get(at / packet_elements) else { return Err(at) };
                    let (mut exact, mut largest) = (0.0, 0.0_f64);
                    for (rank, numbers) in self.contributions.iter().enumerate() {
                        if let Numbers::Float32(x) = numbers
                            && is_in(at, rank)
                        {
                            exact += f64::from(x[at]);
                            largest = largest.max(f64::from(x[at].abs()));
                        }
                    }
                    let factor = inside.factor(*packet, workers);
                    // Hop by hop in a ring, each rounded; and the two roundings of a mean and of
                    // what is multiplied by it.
                    let hops = (workers * workers) as f64 * largest * factor + 2.0 * (exact * factor).abs();
                    let bound = f64::from(f32::EPSILON) / 2.0 * (hops + f64::from(f32::MIN_POSITIVE));
                    let error = (f64::from(*sum) - exact * factor).abs();
                    if error.is_nan() || error > bound {
                        return Err(at);
                    }
                    digest.add(sum.to_bits());
                    sums[at] = *sum;
                }
            }
            _ => unreachable!("the tensors of a job have one type"),
        }
        Ok(digest.0)
    }
}

impl Exact {
    fn add(&mut self, numbers: &Numbers) -> Result<(), String> {
        match (self, numbers) {
            (Self::Int32(sums), Numbers::Int32(numbers)) => {
                sums.iter_mut().zip(numbers).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            }
            (Self::Float32 { sums, largest }, Numbers::Float32(numbers)) => {
                for (element, x) in numbers.iter().enumerate() {
                    if !x.is_finite() {
                        return Err(format!("element {element} is {x}, which no sum can be compared with"));
                    }
                    sums[element] += f64::from(*x);
                    largest[element] = largest[element].max(x.abs());
                }
            }
            _ => return Err("its numbers are not of the job's `dtype`".into()),
        }
        Ok(())
    }
}

/// How far an element of a packet may be from its exact sum: the largest numbers of packet and
/// element are these.
fn bound(system: &dyn System, workers: usize, of_packet: f32, of_element: f32) -> f64 {
    let bound = system.bound(workers, above(of_packet));
    if bound > 0.0 {
        return bound;
    }
    // Floats are added. Their sums are exact only if they need few bits, and these need more.
    let workers = workers as f64;
    workers * f64::from(f32::EPSILON) / 2.0 * workers * f64::from(of_element)
}

/// The same of floats that are rounded to few bits, each and their sum, and behind a rack the rack's
/// sum (docs/protocols/switchml.md). The largest numbers are those of a packet or of a block of int8.
fn bound_of_rounded(wire_dtype: WireDtype, workers: u32, of_block: f32, of_element: f32) -> f64 {
    // By how much of a magnitude a rounding is off, and by how much however small the magnitude is.
    let (roundoff, magnitude, least) = match wire_dtype {
        // In the switch's fixed point, and below the least normal bfloat16.
        WireDtype::Bfloat16 => {
            let fixed_point = above(of_block) * f64::from(workers.next_power_of_two()) * power_of_two(-31);
            (power_of_two(-8) + power_of_two(-23), of_element, fixed_point + power_of_two(-134))
        }
        WireDtype::Int4 => (0.5, of_block, power_of_two(-126)),
        _ => (1.0 / 63.5, of_block, power_of_two(-126)),
    };
    let workers = f64::from(workers);
    let sum = workers * f64::from(magnitude);
    let of_contributions = roundoff * sum + workers * least;
    let added = workers * f64::from(f32::EPSILON) / 2.0 * (sum + of_contributions);
    // The rack's sum, and that of all.
    (0..2).fold(of_contributions + added, |error, _| error + roundoff * (sum + error) + least)
}

/// The least power of two above `x`, which is not negative; zero of zero.
const fn above(x: f32) -> f64 {
    if x == 0.0 { 0.0 } else { power_of_two(floor_log2(x as f64) + 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario_file::parse;
    use crate::workload::{Report, sum};

    /// Four workers that have three packets of 64 elements, the last of one.
    const WORKERS: usize = 4;
    const ELEMENTS: usize = 129;

    fn summed(job: &str, contributions: Vec<Numbers>) -> Result<(Numbers, Report), String> {
        let text = format!(
            "[network]\ntopology = \"rack\"\nhosts = {}\n[[job]]\nworkers = {WORKERS}\n\
             tensor = \"{}B\"\ntensors = 1\n{job}",
            WORKERS + 1,
            4 * ELEMENTS
        );
        let scenario = parse("given.toml", &text).map_err(|error| error.to_string())?;
        sum(&scenario, 1, contributions).map_err(|error| error.to_string())
    }

    /// Each element as large as these, of the ranks in turn.
    fn floats(of: impl Fn(usize, usize) -> f32) -> Vec<Numbers> {
        (0..WORKERS)
            .map(|rank| Numbers::Float32((0..ELEMENTS).map(|element| of(rank, element)).collect()))
            .collect()
    }

    const ATP: &str = "system = \"atp\"\n[job.atp]\nelements = 64\n";

    #[test]
    fn given_numbers_are_summed_by_every_system_and_handed_back() {
        let jobs =
            [ATP, "system = \"switchml\"", "system = \"ring\"", "system = \"ps-n-to-n\"", "system = \"rss\""];
        for job in jobs {
            let drawn = |rank: usize, element: usize| (rank as f32 - 1.3) * (element as f32 * 0.7).sin();
            let (sums, report) = summed(job, floats(drawn)).unwrap();
            let Numbers::Float32(sums) = sums else { panic!("floats") };
            for (element, sum) in sums.iter().enumerate() {
                let exact: f32 = (0..WORKERS).map(|rank| drawn(rank, element)).sum();
                assert!((sum - exact).abs() < 1e-6, "{job}: element {element} is {sum}, not {exact}");
            }
            assert!(report.jobs[0].finished);

            let integers = |rank| Numbers::Int32((0..ELEMENTS as i32).map(|x| x << (8 * rank)).collect());
            let job = job.replacen('\n', "\ndtype = \"int32\"\n", 1);
            let job = if job.contains("dtype") { job } else { format!("{job}\ndtype = \"int32\"") };
            let (sums, _) = summed(&job, (0..WORKERS).map(integers).collect()).unwrap();
            let exact = |x: i32| (0..WORKERS).fold(0i32, |sum, rank| sum.wrapping_add(x << (8 * rank)));
            assert_eq!(sums, Numbers::Int32((0..ELEMENTS as i32).map(exact).collect()), "{job}");
        }
    }

    #[test]
    fn overflows_and_what_could_overflow_are_counted() {
        // B of ATP's B.2 is 5.4 for four workers. Two packets of rank 0 are beyond it. With the
        // other workers' one of them makes the sum overflow (21.5 and more).
        let large = |rank: usize, element: usize| match (rank, element / 64) {
            (0, 0) => 5.5,
            (0, 1) => 12.0,
            (_, 1) => 5.0,
            _ => 0.25,
        };
        let exact = |element: usize| (0..WORKERS).map(|rank| large(rank, element)).sum::<f32>();
        for (overflow, proactive, overflows) in [("reactive", 0, 1), ("proactive", 2, 0)] {
            let (sums, report) = summed(&format!("{ATP}overflow = \"{overflow}\"\n"), floats(large)).unwrap();
            assert_eq!(sums, Numbers::Float32((0..ELEMENTS).map(exact).collect()));
            let counters = report.jobs[0].counters;
            assert_eq!(
                (counters.proactive, counters.overflows),
                (Some(proactive), Some(overflows)),
                "{overflow}"
            );
        }
    }

    #[test]
    fn a_sum_that_lacks_a_given_contribution_is_found() {
        let plan = |text: &str| parse("given.toml", text).unwrap().jobs[0].clone();
        let text = format!(
            "[network]\ntopology = \"rack\"\nhosts = 5\n[[job]]\nworkers = {WORKERS}\ntensors = 1\n\
             tensor = \"{}B\"\n{ATP}",
            4 * ELEMENTS
        );
        let numbers = |rank: usize, _| [1.0, -2.0, 1e-6, 0.5][rank];
        let mut given = Given::new(&plan(&text), floats(numbers)).unwrap();
        let result = |lacks: f32| {
            let mut sums = vec![-0.499_999_f32; ELEMENTS];
            sums[70] -= lacks;
            Numbers::Float32(sums)
        };
        assert!(given.check(&result(0.0), 0, 0).is_ok());
        for lacks in [1.0, -2.0, 1e-6, 0.5] {
            assert_eq!(given.check(&result(lacks), 0, 0), Err(70));
        }
    }

    /// Sums behind racks and of services, of a tensor that is long enough to be rounded.
    #[test]
    fn given_numbers_that_are_rounded_are_as_exact_as_their_wire_dtype() {
        const LONG: usize = 5_000;
        let drawn = |rank: usize, element: usize| (rank as f32 - 1.3) * (element as f32 * 0.7).sin();
        let numbers = || (0..WORKERS).map(|rank| (0..LONG).map(|element| drawn(rank, element)).collect());
        for system in ["switchml", "byteps"] {
            for (wire_dtype, most) in [("bfloat16", 0.08), ("int8", 0.32)] {
                let text = format!(
                    "[network]\ntopology = \"leaf-spine\"\nleaves = 2\nspines = 1\nhosts = 2\n[[job]]\n\
                     system = \"{system}\"\nworkers = {WORKERS}\ntensor = \"{}B\"\ntensors = 1\n\
                     [job.{system}]\nwire_dtype = \"{wire_dtype}\"\n",
                    4 * LONG
                );
                let scenario = parse("given.toml", &text).unwrap_or_else(|error| panic!("{error}"));
                let given: Vec<Numbers> = numbers().map(Numbers::Float32).collect();
                let sums = sum(&scenario, 1, given.clone()).unwrap_or_else(|error| panic!("{error}")).0;
                let mut judge = Given::new(&scenario.jobs[0], given).unwrap();
                assert!(judge.check(&sums, 0, 0).is_ok(), "{system} {wire_dtype}");
                let Numbers::Float32(mut sums) = sums else { panic!("floats") };
                let exact = |at: usize| (0..WORKERS).map(|rank| drawn(rank, at)).sum::<f32>();
                let off = (0..LONG).map(|at| (sums[at] - exact(at)).abs()).fold(0.0, f32::max);
                assert!(off > most / 40.0 && off < most, "{system} {wire_dtype}: {off}");
                // Without the last worker.
                let at = (0..LONG).find(|at| drawn(WORKERS - 1, *at).abs() > 1.5).expect("a large number");
                sums[at] -= drawn(WORKERS - 1, at);
                assert_eq!(judge.check(&Numbers::Float32(sums), 0, 0), Err(at), "{system} {wire_dtype}");
            }
        }
    }

    #[test]
    fn numbers_that_are_not_the_jobs_are_refused() {
        let refused = |job: &str, numbers: Vec<Numbers>| summed(job, numbers).unwrap_err();
        let zeros = || floats(|_, _| 0.0);
        assert!(refused(ATP, zeros()[1..].to_vec()).contains("contributions of 3 for 4 workers"));
        let mut short = zeros();
        short[2] = Numbers::Float32(vec![0.0; 5]);
        assert!(refused(ATP, short).contains("rank 2 has 5 elements of a tensor of 129"));
        let not_one = floats(|rank, element| if (rank, element) == (1, 3) { f32::NAN } else { 0.0 });
        assert!(refused(ATP, not_one).contains("rank 1: element 3 is NaN"));
        assert!(refused(&format!("dtype = \"int32\"\n{ATP}"), zeros()).contains("not of the job's `dtype`"));
    }
}
