//! How the floats of a job travel: the key `wire_dtype` of systems whose machines know several ways
//! (docs/compression.md).

use fanin_wire::{CHUNK_ELEMENTS, WireDtype, chunk_elements_for_mtu, chunk_packet_bytes};
use toml::Spanned;

use super::keys::PacketLengths;
use crate::scenario_file::{Entry, Mistake, at, unknown};
use crate::workload::exact_workers_max;

/// The wire dtype of a job: `unless` stands for a key that is not given.
pub(super) fn wire_dtype(
    entry: &Entry<'_>,
    given: Option<&Spanned<String>>,
    unless: WireDtype,
) -> Result<WireDtype, Mistake> {
    let Some(given) = given else { return Ok(unless) };
    let (name, names) = (given.get_ref().as_str(), WireDtype::ALL.map(WireDtype::name));
    let found = name.parse().map_err(|_| at(given, unknown("wire dtype", name, names.into_iter())))?;
    if entry.is_int32() {
        return Err(at(given, "`wire_dtype` is for floats, and int32 travels as it is: leave it out"));
    }
    let workers = entry.workers().len();
    let has_room = |wire_dtype: &WireDtype| workers <= exact_workers_max(*wire_dtype) as usize;
    if !has_room(&found) {
        let (most, others) = (exact_workers_max(found), WireDtype::ALL.into_iter().filter(has_room));
        let others: Vec<_> = others.map(WireDtype::name).collect();
        let message = format!(
            "{workers} workers: the sums of more than {most} are rounded as {name}, which could hide that a \
             contribution is missing; take one of {}, or fewer workers",
            others.join(", ")
        );
        return Err(at(given, message));
    }
    Ok(found)
}

/// Elements of a packet as int32: as given, or as many as the MTU takes.
pub(super) fn elements(
    entry: &Entry<'_>,
    given: Option<&Spanned<u16>>,
    wire_dtype: WireDtype,
) -> Result<u16, Mistake> {
    let lengths = PacketLengths {
        elements: &CHUNK_ELEMENTS,
        for_mtu: &|mtu| chunk_elements_for_mtu(mtu, wire_dtype),
        packet_bytes: &|elements| chunk_packet_bytes(elements, wire_dtype),
    };
    lengths.of(entry, given)
}

/// [`System::bound`](super::System::bound).
pub(super) fn bound(wire_dtype: WireDtype, workers: usize, largest: f64) -> f64 {
    match wire_dtype {
        // SwitchML Theorem 1: n / f, where f leaves room for n times the largest value.
        WireDtype::SharedExponent => {
            let workers = workers as f64;
            workers * workers * largest / f64::from(i32::MAX)
        }
        // Workers' numbers are such that sums are the very number.
        WireDtype::Native | WireDtype::Bfloat16 | WireDtype::Int8 | WireDtype::Int4 => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario_file::parse;
    use crate::workload::{JobReport, Options, run};

    const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 5\nrate = \"10Gbit\"\nqueue = \"8MB\"\n";
    const RACKS: &str = "[network]\ntopology = \"leaf-spine\"\nleaves = 3\nspines = 1\nhosts = 3\n";
    const LOSSES: &str =
        "[[loss]]\nloss = 0.02\nduplication = 0.01\nreordering = 0.02\nheld_back = \"50us\"\n";
    const ROUNDED: [&str; 2] = ["bfloat16", "int8"];

    fn job(system: &str, work: &str, keys: &str) -> String {
        format!("[[job]]\nsystem = \"{system}\"\nworkers = 4\n{work}\n[job.{system}]\n{keys}\n")
    }

    /// A job that has finished, so that each element of each sum was checked.
    fn played(text: &str) -> JobReport {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let options = Options { seed: 5, ..Options::default() };
        let mut report = run(&scenario, options).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert!(report.jobs[0].finished, "{text}");
        report.jobs.remove(0)
    }

    /// The last packet of a tensor has one element, of which int8 has a block for itself.
    #[test]
    fn sums_of_every_wire_dtype_are_exact_behind_racks_and_losses_whole_and_as_samples() {
        let work = "tensor = \"256004B\"\ntensors = 4";
        for (system, network) in [("switchml", RACK), ("switchml", RACKS), ("byteps", RACK)] {
            for name in ["shared_exponent", "native", "bfloat16", "int8"] {
                let [full, sample] = ["full", "sample"].map(|payload| {
                    let job = job(system, work, &format!("wire_dtype = \"{name}\""));
                    let report = played(&format!("payload = \"{payload}\"\n{network}{job}{LOSSES}"));
                    assert!(report.counters.retransmissions > Some(0), "{system} {name} {payload}");
                    (report.finished_s, report.counters)
                });
                assert_eq!(full, sample, "{system} {name}: at the same times");
            }
        }
    }

    #[test]
    fn packets_carry_as_many_more_elements_as_they_are_shorter() {
        let work = "tensor = \"256004B\"\ntensors = 4";
        for (name, packets) in [("native", 182), ("bfloat16", 91), ("int8", 51)] {
            for payload in ["full", "sample"] {
                let keys = format!("wire_dtype = \"{name}\"\nservices = 3");
                let job = job("byteps", work, &keys);
                let report = played(&format!("payload = \"{payload}\"\n{RACK}{job}"));
                // 64,001 elements in packets of 352, 704 and 1,280.
                assert_eq!(report.counters.server_aggregations, Some(4 * 4 * packets), "{name}");
            }
        }
    }

    #[test]
    fn a_long_tensor_takes_half_of_the_time_as_bfloat16_and_a_quarter_as_int8() {
        let work = "tensor = \"40MB\"\ntensors = 1\nin_flight = 1";
        let keys = [("switchml", "slots = 256\n"), ("byteps", "window = 64\n")];
        for (system, more) in keys {
            let took = |name: &str| {
                let job = job(system, work, &format!("{more}wire_dtype = \"{name}\""));
                played(&format!("payload = \"sample\"\n{RACK}{job}")).finished_s.expect("it ends")
            };
            let native = took("native");
            for (name, least, most) in
                [("shared_exponent", 0.99, 1.01), ("bfloat16", 0.5, 0.52), ("int8", 0.25, 0.28)]
            {
                let share = took(name) / native;
                assert!((least..most).contains(&share), "{system} {name}: {share}");
            }
        }
    }

    /// 4,096 elements travel as they are, and 4,097 do not: also where services have parts of them.
    #[test]
    fn short_tensors_travel_as_they_are_in_jobs_of_every_wire_dtype() {
        let layer = |elements: u64| {
            format!("{{ bytes = \"{}B\", forward = \"1us\", backward = \"1us\" }}", 4 * elements)
        };
        let work = format!("layers = [{}, {}, {}]\niterations = 3", layer(4096), layer(4097), layer(40));
        for (name, packets) in [("bfloat16", 12 + 6 + 1), ("int8", 12 + 4 + 1)] {
            for payload in ["full", "sample"] {
                let keys = format!("wire_dtype = \"{name}\"\npart_min = 1");
                let job = job("byteps", &work, &keys);
                let report = played(&format!("payload = \"{payload}\"\n{RACK}{job}"));
                assert_eq!(report.counters.server_aggregations, Some(4 * 3 * packets), "{name} {payload}");
            }
        }
    }

    #[test]
    fn rounded_sums_survive_the_death_of_their_service() {
        for name in ROUNDED {
            let keys = format!("wire_dtype = \"{name}\"\nservices = 3\ntake_over = \"1ms\"");
            let job = job("byteps", "tensor = \"2MB\"\ntensors = 3", &keys);
            let dies = "[[fault]]\nat = \"700us\"\nkind = \"service-dies\"\nnode = \"h0\"\n";
            let report = played(&format!("{RACK}{job}{dies}{LOSSES}"));
            assert_eq!(report.counters.take_overs, Some(1), "{name}");
        }
    }

    #[test]
    fn as_many_workers_as_can_be_are_summed_rounded() {
        for (name, hosts) in [("bfloat16", 32), ("int8", 16)] {
            let network =
                format!("[network]\ntopology = \"leaf-spine\"\nleaves = 4\nspines = 1\nhosts = {hosts}\n");
            let job = job("switchml", "tensor = \"20kB\"\ntensors = 2", &format!("wire_dtype = \"{name}\""));
            let all = job.replace("workers = 4", &format!("workers = {}", 4 * hosts));
            played(&format!("payload = \"sample\"\n{network}{all}"));
            let more =
                all.replace(&format!("workers = {}", 4 * hosts), &format!("workers = {}", 4 * hosts + 1));
            let text = format!("{}{more}", network.replace("leaves = 4", "leaves = 5"));
            let message = parse("test.toml", &text).expect_err("too many").to_string();
            let cause = format!("the sums of more than {} are rounded as {name}", 4 * hosts);
            assert!(
                message.contains(&cause) && message.contains("take one of shared_exponent, "),
                "{message}"
            );
        }
    }

    #[test]
    fn mistakes_in_the_key_say_their_line_and_the_cure() {
        let work = "tensor = \"1MB\"\ntensors = 1";
        for (system, work, keys, words) in [
            ("switchml", work, "wire_dtype = \"int9\"", "unknown wire dtype `int9`"),
            ("byteps", work, "wire_dtype = \"int4\"", "the sums of more than 1 are rounded as int4"),
            ("byteps", work, "wire_dtype = \"int8\"\nasynchronous = true", "deltas travel by TCP"),
            ("atp", work, "wire_dtype = \"int8\"", "unknown key `wire_dtype`"),
            (
                "switchml",
                "dtype = \"int32\"\ntensor = \"1MB\"\ntensors = 1",
                "wire_dtype = \"int8\"",
                "leave it out",
            ),
        ] {
            let message = parse("test.toml", &format!("{RACK}{}", job(system, work, keys)))
                .expect_err(words)
                .to_string();
            assert!(message.contains(words) && message.contains("test.toml:"), "{message}");
        }
    }
}
