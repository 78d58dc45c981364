//! `fanin topo` as a process.

use std::process::{Command, Output};

fn topo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fanin")).arg("topo").args(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

fn example(name: &str) -> String {
    format!("{}/../../examples/topo/{name}.toml", env!("CARGO_MANIFEST_DIR"))
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = topo(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn chosen(report: &serde_json::Value) -> &serde_json::Value {
    &report["strategies"][report["chosen"].as_u64().expect("there are GPUs") as usize]
}

#[test]
fn this_machine_is_read_whatever_it_has() {
    let report = json(&[]);
    let kinds: Vec<_> = report["parts"].as_array().expect("parts").iter().map(|part| &part["kind"]).collect();
    assert!(kinds.iter().any(|kind| **kind == "CPU"), "{report}");
    let no_gpu = !kinds.iter().any(|kind| **kind == "GPU");
    assert_eq!(report["chosen"].is_null(), no_gpu, "{report}");
    let output = topo(&[]);
    assert_eq!(text(&output.stdout).contains("no GPU"), no_gpu, "{}", text(&output.stdout));
}

#[test]
fn the_papers_machines_get_its_strategies_and_take_what_their_slowest_links_do() {
    let pcie = json(&[&example("pcie-only"), "--machines", "8"]);
    assert_eq!(chosen(&pcie)["kind"], "cpu-assisted");
    let nvlink = json(&[&example("nvlink"), "--machines", "8"]);
    assert_eq!(chosen(&nvlink)["roots"], serde_json::json!(["gpu2"]));
    for report in [&pcie, &nvlink] {
        // 2 (n - 1) / n of a gigabyte through 100 Gbit/s.
        assert_eq!(report["network_bytes"], 1.75e9);
        assert!((chosen(report)["time_s"].as_f64().expect("a time") - 0.14).abs() < 1e-9, "{report}");
        assert_eq!(chosen(report)["played_s"], serde_json::Value::Null);
    }
    // With as many machines more that only sum, each byte goes through the NIC once.
    let spares = json(&[&example("nvlink"), "--machines", "8", "--spare", "8", "--size", "100MB"]);
    assert_eq!(spares["network_bytes"], 1e8);
}

#[test]
fn copies_are_played_beside_the_prediction() {
    let report = json(&[&example("pcie-only"), "--machines", "8", "--size", "40MB", "--play"]);
    for strategy in report["strategies"].as_array().expect("strategies") {
        let [predicted, played] = ["time_s", "played_s"].map(|key| strategy[key].as_f64().expect("a time"));
        assert!(played > predicted && played < 2.0 * predicted, "{strategy}");
    }
}

#[test]
fn the_tree_shows_what_is_under_what_and_what_links_carry() {
    let output = topo(&[&example("nvlink"), "--machines", "8"]);
    let shown = text(&output.stdout);
    for words in [
        "CPU cpu0",
        "|- PCIe switch pcie0",
        "`- network",
        "NVLink gpu0 - gpu1",
        "reduce over NVLink to gpu2",
        "Take reduce over NVLink to gpu2: 140.0 ms.",
        "ring over the GPUs of all machines (NCCL) (compared)",
    ] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
}

#[test]
fn mistakes_name_the_line_and_the_nearest_name() {
    let file = tempfile::NamedTempFile::with_suffix(".toml").expect("a file");
    std::fs::write(
        &file,
        "[[cpu]]\nname = \"cpu0\"\n[[gpu]]\nname = \"g\"\nunder = \"cpuo\"\nrate = \"1Gbit\"\n",
    )
    .expect("written");
    let output = topo(&[file.path().to_str().expect("a path")]);
    let message = text(&output.stderr);
    assert!(
        !output.status.success()
            && message.contains(":5:9: unknown CPU or PCIe switch `cpuo`; did you mean `cpu0`?"),
        "{message}"
    );
    for (arguments, words) in [
        (["/nowhere.toml", "--machines", "2"], "cannot read the machine /nowhere.toml"),
        (["/nowhere.toml", "--machines", "0"], "from 1 to 100000 machines"),
        (["/nowhere.toml", "--size", "0B"], "at least one byte"),
    ] {
        let output = topo(&arguments);
        assert!(!output.status.success() && text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
}
