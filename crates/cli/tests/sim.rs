//! `fanin sim` as a process: what it writes, and what it says of files that it cannot play.

use std::path::Path;
use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fanin"));
    command.arg("sim").args(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// A directory that is removed when the test ends.
struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.0.path().join(name), text).expect("a file");
        self.path(name)
    }
}

const SCENARIO: &str = "title = \"small\"\n[network]\ntopology = \"rack\"\nhosts = 3\n[[loss]]\nloss = \"1%\"\n\
    [[job]]\nsystem = \"atp\"\nworkers = 2\ntensor = \"40kB\"\ntensors = 3\n";

#[test]
fn the_same_seed_writes_the_same_bytes() {
    let directory = Directory::new();
    let file = directory.write("small.toml", SCENARIO);
    let run = |name: &str, seed: &str| {
        let paths = ["json", "pcap", "trace"].map(|kind| directory.path(&format!("{name}.{kind}")));
        let [json, pcap, trace] = &paths;
        let output = sim(&[&file, "--seed", seed, "--json", json, "--pcap", pcap, "--trace", trace]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        (paths.map(|path| std::fs::read(path).expect("it was written")), output.stdout)
    };
    let first = run("first", "7");
    assert!(first.0.iter().all(|bytes| bytes.len() > 100));
    assert!(first == run("second", "7"), "two runs with one seed differ");
    assert!(first != run("third", "8"), "two seeds give the same");
}

#[test]
fn json_says_which_program_which_seed_and_which_scenario() {
    let directory = Directory::new();
    let output = sim(&[&directory.write("small.toml", SCENARIO), "--seed", "3", "--json", "-"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("nothing but JSON");
    assert_eq!(json["fanin"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(json["fanin"]["commit"].as_str().is_some_and(|commit| !commit.is_empty()));
    assert_eq!((&json["seed"], &json["scenario"]["network"]["hosts"]), (&3.into(), &3.into()));
    assert_eq!(json["result"]["jobs"][0]["finished"], true);
}

#[test]
fn a_job_that_died_and_what_nobody_counts_are_told_in_the_table() {
    let directory = Directory::new();
    let jobs = "[[job]]\nsystem = \"ring\"\nworkers = 2\ntensor = \"40kB\"\ntensors = 3\n\
        [[fault]]\nat = \"20us\"\nkind = \"job-dies\"\njob = \"job0\"\n";
    let scenario = SCENARIO.replace("hosts = 3", "hosts = 5").replace("40kB", "4MB");
    let output = sim(&[&directory.write("died.toml", &format!("{scenario}{jobs}"))]);
    let table = text(&output.stdout);
    let row = |name: &str| table.lines().map(str::trim).find(|line| line.starts_with(name)).expect("a row");
    assert!(row("job0").ends_with("died, 0.000020 s"), "{table}");
    let ring: Vec<&str> = row("job1").split_whitespace().collect();
    assert!(ring.contains(&"-") && ring[ring.len() - 1] == "s", "{table}");
}

#[test]
fn a_table_is_for_people() {
    let directory = Directory::new();
    let output = sim(&[&directory.write("small.toml", SCENARIO)]);
    let table = text(&output.stdout);
    for word in ["small", "JOB", "job0", "atp", "every sum was right (seed 1"] {
        assert!(table.contains(word), "{word:?} is not in\n{table}");
    }
    assert!(output.stderr.is_empty(), "no terminal, no progress: {}", text(&output.stderr));
}

#[test]
fn a_job_that_has_not_finished_fails_the_run_and_is_in_the_result_nevertheless() {
    let directory = Directory::new();
    let file = directory.write("short.toml", &format!("until = \"20us\"\n{SCENARIO}"));
    let json = directory.path("short.json");
    let output = sim(&[&file, "--json", &json]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.contains("unfinished jobs") && message.contains("job0: tensors completed"), "{message}");
    let table = text(&output.stdout);
    assert!(table.contains(" tensors in the 0.000020 s after the warm-up and 6 are needed"), "{table}");
    let result = std::fs::read(json).expect("it was written");
    let result: serde_json::Value = serde_json::from_slice(&result).expect("JSON");
    let job = &result["result"]["jobs"][0];
    assert!(job["unfinished"].is_string());
    assert_eq!(job["measurement"]["enough"], false);
}

#[test]
fn mistakes_are_told_with_file_and_line() {
    let directory = Directory::new();
    let file = directory.write("wrong.toml", &SCENARIO.replace("workers", "wrokers"));
    let output = sim(&[&file]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(
        message.contains(&format!("{file}:9:1")) && message.contains("did you mean `workers`?"),
        "{message}"
    );
    let output = sim(&[&directory.path("nowhere.toml")]);
    assert!(text(&output.stderr).contains("cannot read the scenario"), "{}", text(&output.stderr));
}

#[test]
fn a_broken_rule_names_the_command_that_shows_it_again() {
    let directory = Directory::new();
    // The link stays down for longer than a job may stand still.
    let file = directory.write(
        "stall.toml",
        &format!("stall = \"10ms\"\n{SCENARIO}[[fault]]\nat = \"1us\"\nkind = \"link-fails\"\nlink = [\"h0\", \"s0\"]\ndown = \"5s\"\n"),
    );
    let output = sim(&[&file, "--seed", "9"]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.contains("no progress"), "{message}");
    assert!(message.contains(&format!("replay: fanin sim {file} --seed 9")), "{message}");
}

#[test]
fn many_runs_are_the_python_packages_and_explained_here() {
    let directory = Directory::new();
    let file = directory.write("small.toml", SCENARIO);
    for arguments in [["--sweep", "network.queue=100kB,1MB"], ["--seeds", "3"], ["--ray", "10.0.0.9:6379"]] {
        let output = sim(&[&[file.as_str()], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(1));
        let message = text(&output.stderr);
        assert!(message.contains("fanin sim --sweep is part of the Python package"), "{message}");
    }
    let output = sim(&["--help"]);
    for words in ["--sweep <PARAMETER=VALUES>", "job.0.atp.window", "goes on where it was"] {
        assert!(text(&output.stdout).contains(words), "{words} is not in the help");
    }
}

#[test]
fn the_examples_play() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/sim");
    let mut played = 0;
    for entry in std::fs::read_dir(examples).expect("examples/sim") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            continue; // Topologies, which scenarios name.
        }
        let output = sim(&[&path.display().to_string()]);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        played += 1;
    }
    assert!(played >= 7);
}

#[test]
fn a_job_without_an_end_is_told_at_once() {
    let directory = Directory::new();
    let endless = SCENARIO.replace("tensors = 3\n", "");
    let file = directory.write("endless.toml", &endless);
    let mut playing = Command::new(env!("CARGO_BIN_EXE_fanin"))
        .args(["sim", &file])
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the command runs");
    let mut line = String::new();
    std::io::BufRead::read_line(
        &mut std::io::BufReader::new(playing.stderr.as_mut().expect("piped")),
        &mut line,
    )
    .expect("a line");
    playing.kill().expect("it runs");
    playing.wait().expect("it ended");
    assert!(line.starts_with("fanin: job0 has no end (`tensors`, `iterations` or `stop`)"), "{line}");
    assert!(line.contains("to 10 s of virtual time"), "{line}");
    for ending in ["until = \"1us\"\n", ""] {
        let scenario = if ending.is_empty() { SCENARIO.to_owned() } else { format!("{ending}{endless}") };
        let output = sim(&[&directory.write("ends.toml", &scenario)]);
        assert!(!text(&output.stderr).contains("no end"), "{output:?}");
    }
}

#[test]
fn where_results_go_is_looked_at_before_anything_is_played() {
    let directory = Directory::new();
    let nowhere = directory.path("nowhere/result.json");
    // It would be played for an hour.
    let file = directory.write("endless.toml", &SCENARIO.replace("tensors = 3\n", "tensors = 100000000\n"));
    let output = sim(&[&file, "--json", &nowhere]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&format!("cannot write {nowhere}")), "{output:?}");
}
