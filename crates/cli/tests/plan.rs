//! `fanin plan` as a process.

use std::process::{Command, Output};

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fanin")).arg("plan").args(arguments).output().expect("the command runs")
}

/// A file that is gone when the test ends.
struct Cluster(tempfile::NamedTempFile);

impl Cluster {
    fn new(text: &str) -> Self {
        Self::with_suffix(".toml", text)
    }

    fn with_suffix(suffix: &str, text: &str) -> Self {
        let file = tempfile::NamedTempFile::with_suffix(suffix).expect("a file");
        std::fs::write(&file, text).expect("written");
        Self(file)
    }

    fn path(&self) -> &str {
        self.0.path().to_str().expect("a path")
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = plan(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn ms(value: &serde_json::Value) -> f64 {
    (value.as_f64().expect("a number") * 1e4).round() / 10.0
}

#[test]
fn a_switch_on_a_machine_like_the_others_is_slower_than_a_ring() {
    let plan = json(&["--machines", "8", "--rate", "1gbit", "--spare", "1"]);
    assert_eq!(ms(&plan["one_switch"]["time_s"]), 1600.0);
    assert_eq!(ms(&plan["ring_s"]), 350.0);
    // BytePS, Eq. 6, for n = 8 and k = 1.
    assert_eq!(ms(&plan["split"]["time_s"]), 320.0);
    let fast = plan["purchases"].as_array().expect("a list").last().expect("a purchase").clone();
    assert_eq!(fast["what"], "10 Gbit/s for the link of spare0");
    assert_eq!(ms(&fast["one_switch_s"]), 200.0);
}

#[test]
fn the_table_names_alike_machines_once_and_whom_all_wait_for() {
    let output = plan(&["--machines", "8", "--rate", "1gbit", "--spare", "1"]);
    let table = text(&output.stdout);
    assert!(table.contains("w0 .. w7") && !table.contains("w3"), "{table}");
    assert!(table.contains("all wait for the link of w0"), "{table}");
}

#[test]
fn a_cluster_is_read_from_a_file() {
    let cluster = "[[machine]]\nname = \"gpu\"\ncount = 3\nrate = \"1gbit\"\n\
        [[machine]]\nname = \"old\"\nup = \"500mbit\"\ndown = \"1gbit\"\nsums = false\n\
        [[machine]]\nname = \"spare\"\ntrains = false\nrate = \"2.5gbit\"\n";
    let cluster = Cluster::new(cluster);
    let plan = json(&["--cluster", cluster.path()]);
    let machines = plan["machines"].as_array().expect("a list");
    let names: Vec<_> = machines.iter().map(|machine| machine["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["gpu0", "gpu1", "gpu2", "old", "spare"]);
    assert_eq!(machines[3]["share"], 0.0);
    // The slow link has to carry a whole tensor, whatever the others do.
    assert_eq!(ms(&plan["split"]["time_s"]), 400.0);
    assert_eq!(plan["split"]["bound"], "the link out of old");
}

#[test]
fn cores_count_where_they_are_given() {
    let fast = ["--machines", "8", "--rate", "10gbit", "--spare", "1", "--spare-rate", "100gbit"];
    assert_eq!(ms(&json(&fast)["one_switch"]["time_s"]), 20.0);
    let plan = json(&[&fast[..], &["--sums", "20gbit"]].concat());
    assert_eq!(ms(&plan["one_switch"]["time_s"]), 80.0);
    assert_eq!(plan["one_switch"]["bound"], "the cores of spare0");
    assert!(plan["split"]["time_s"].as_f64() < plan["one_switch"]["time_s"].as_f64());
}

#[test]
fn of_two_plans_that_take_as_long_the_one_with_one_switch_is_taken() {
    let two = ["--machines", "4", "--rate", "1gbit", "--spare", "2", "--spare-rate", "10gbit"];
    assert_eq!(json(&two)["machines"][4]["share"], 1.0);
}

#[test]
fn more_machines_than_a_service_sums_for_are_told_of_racks_before_all_figures() {
    for (machines, is_told) in [("64", false), ("65", true)] {
        let output = plan(&["--machines", machines, "--rate", "1gbit"]);
        let table = text(&output.stdout);
        assert_eq!(
            table.lines().next().is_some_and(|line| line.contains("fanin switch --upstream")),
            is_told,
            "{table}"
        );
    }
}

#[test]
fn what_fanin_takes_is_named_and_beside_what_it_gains() {
    for (spare, says) in [("0", "no gain over a ring"), ("3", "no gain over a ring")] {
        let output = plan(&["--machines", "2", "--rate", "1gbit", "--spare", spare]);
        let row = fanins_row(&output);
        assert!(row.contains("200.0 ms") && row.contains(says), "{row}");
    }
    let row = fanins_row(&plan(&["--machines", "8", "--rate", "1gbit", "--spare", "1"]));
    assert!(row.contains("320.0 ms") && row.contains("1.09 times as fast as a ring; all wait for"), "{row}");
}

fn fanins_row(output: &Output) -> String {
    let table = text(&output.stdout);
    table.lines().find(|line| line.trim_start().starts_with("fanin, ")).expect("a row").to_owned()
}

#[test]
fn a_machine_alone_needs_no_plan() {
    let output = plan(&["--machines", "1", "--rate", "1gbit"]);
    assert!(text(&output.stdout).ends_with("nothing crosses the network.\n"), "{}", text(&output.stdout));
}

#[test]
fn mistakes_are_named() {
    for (arguments, says) in [
        (&["--machines", "8"][..], "--rate"),
        (&["--machines", "8", "--rate", "fast"], "is no rate: write it as 500mbit or 1gbit"),
        (
            &["--machines", "8", "--rate", "10gbps"],
            "\"10gbps\" is no rate, as it may mean bits or bytes a second: write 10gbit",
        ),
        (&["--machines", "8", "--rate", "fastbps"], "is no rate"),
        (&["--machines", "0", "--rate", "1gbit"], "no machine trains"),
        (&["--machines", "9999999999", "--rate", "1gbit"], "more than 100000 machines"),
        (&["--cluster", "/nowhere.toml"], "cannot read the cluster /nowhere.toml"),
    ] {
        let output = plan(arguments);
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains(says), "{arguments:?}: {}", text(&output.stderr));
    }
    for (cluster, says) in [
        ("[[machine]]\nname = \"a\"\n", "machine a: it needs `rate`, or both `up` and `down`"),
        ("[[machine]]\nname = \"a\"\nrat = \"1gbit\"\n", "did you mean rate?"),
        ("[[machine]]\nname = \"a\"\nrate = \"1gbit\"\ntrains = false\n", "no machine trains"),
    ] {
        let file = Cluster::new(cluster);
        let output = plan(&["--cluster", file.path()]);
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains(says), "{cluster}: {}", text(&output.stderr));
    }
}

const PORT: &str = r#"
buffer = "60kB"
load = 1.2
[[queue]]
size = "10MB"
small = [[0, 0], [0.016, 0], [0.05, 6]]
large = [[0, 0], [0.001, 0], [0.05, 30]]
[[queue]]
size = "10MB"
small = [[0, 0], [0.004, 0], [0.05, 60]]
large = [[0, 0], [0.001, 0], [0.05, 300]]
"#;

#[test]
fn thresholds_share_the_buffer_among_the_queues() {
    let port = Cluster::new(PORT);
    let plan = json(&["--thresholds", port.path()]);
    let queues = plan["queues"].as_array().expect("a list");
    let packets: u64 = queues.iter().map(|queue| queue["packets"].as_u64().expect("a number")).sum();
    // 60 kB are 40 packets of 1,500 bytes.
    assert_eq!((queues.len(), packets), (2, 40));
    let loss = |queue: usize, which: &str| queues[queue][which].as_f64().expect("a number");
    assert!(loss(0, "large_loss") < loss(0, "small_loss"), "{plan}");
    let table = plan_of(&["--thresholds", port.path()]);
    assert!(table.contains("SMALL FROM") && table.contains("rounds of training"), "{table}");
}

#[test]
fn thresholds_of_a_link_that_carries_less_than_comes_are_warned_of() {
    for (load, is_warned) in [("1.2", true), ("0.9", false)] {
        let port = Cluster::new(&PORT.replace("load = 1.2", &format!("load = {load}")));
        let output = plan(&["--thresholds", port.path()]);
        assert_eq!(text(&output.stderr).contains("the model is wrong"), is_warned, "load {load}");
    }
}

#[test]
fn a_port_that_makes_no_sense_is_refused_with_the_place() {
    for (from, to, message) in [
        ("load = 1.2", "load = 0", "the load is 0"),
        ("[[0, 0], [0.004, 0]", "[[0, 3], [0.004, 0]", "`small` of queue 2"),
        ("buffer = \"60kB\"", "buffer = \"1GB\"", "20000 at most"),
        ("load = 1.2", "lod = 1.2", "lod"),
    ] {
        let port = Cluster::new(&PORT.replace(from, to));
        let output = plan(&["--thresholds", port.path()]);
        assert!(!output.status.success());
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
}

fn plan_of(arguments: &[&str]) -> String {
    let output = plan(arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

const TESTBED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/plan/testbed.toml");

fn plan_named<'a>(report: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let plans = report["plans"].as_array().expect("a list");
    plans
        .iter()
        .find(|plan| plan["name"].as_str().is_some_and(|its| its.contains(name)))
        .expect("a plan of this name")
}

/// GOAT's testbed. With KRGS the server gets the model once, without it from each of 8 workers. The
/// other planner's slowest link is the fastest, and within 5 % of its bound.
#[test]
fn goats_testbed_is_planned_in_several_ways() {
    let report = json(&["--goat", TESTBED]);
    let slowest = |name| plan_named(&report, name)["slowest_link_s"].as_f64().expect("a number");
    assert_eq!(plan_named(&report, "Geryon")["server_bytes"], 352_000_000);
    assert_eq!(plan_named(&report, "Eq. 4")["server_bytes"], 44_000_000);
    for other in ["Geryon", "ATP", "BytePS", "Eq. 4", "Eq. 1"] {
        assert!(slowest("fanin") <= slowest(other), "{other}");
    }
    let bound = report["slowest_link_bound_s"].as_f64().expect("a number");
    assert!(slowest("fanin") <= 1.05 * bound && slowest("fanin") >= bound * 0.999);
    let sub_models = report["jobs"][0]["sub_models"].as_array().expect("a list");
    assert_eq!(sub_models.len(), 44);
    assert_eq!(sub_models[0]["aggregation_nodes"].as_array().expect("a list").len(), 8);
    let krgs = json(&["--goat", TESTBED, "--planner", "krgs"]);
    let nodes = krgs["jobs"][0]["sub_models"][0]["aggregation_nodes"].as_array().expect("a list");
    assert!(nodes.iter().all(|node| *node == nodes[0]), "{nodes:?}");
    let table = plan_of(&["--goat", TESTBED]);
    for part in
        ["KRGS, Eq. 4 (GOAT)", "the slowest link (fanin)", "SUMS IN A STEP", "job resnet18: 8 workers"]
    {
        assert!(table.contains(part), "{table}");
    }
}

#[test]
fn a_plan_is_drawn_with_every_node_and_link() {
    let picture = Cluster::new("");
    plan_of(&["--goat", TESTBED, "--svg", picture.path()]);
    let drawn = std::fs::read_to_string(picture.path()).expect("a picture");
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>"));
    for node in ["s0", "s1", "s2", "ps", "w0", "w7"] {
        assert!(drawn.contains(&format!(">{node}</text>")), "{node}");
    }
    assert_eq!(drawn.matches("<line ").count(), 12);
}

#[test]
fn mistakes_in_a_topology_have_their_line_and_the_nearest_name() {
    let good = std::fs::read_to_string(TESTBED).expect("the example");
    for (from, to, line, message) in [
        ("servers = [\"ps\"]", "servers = [\"p\"]", "servers", "did you mean `ps`?"),
        ("sub_model = ", "submodel = ", "submodel", "did you mean `sub_model`?"),
        ("workers = 8", "workers = 9", "workers", "from 1 to 8 workers"),
        ("workers = 8", "workers = [\"w0\", \"w1\", \"w0\"]", "name", "has w0 twice"),
        ("servers = [\"ps\"]", "servers = []", "name", "has no servers"),
        ("memory = \"20MB\"", "memory = \"0MB\"", "memory", "without memory"),
        ("size = \"44MB\"", "", "name", "needs `size`"),
        ("link = [\"w7\", \"s1\"]", "link = [\"w7\", \"w6\"]", "topology", "no way from w0 to w7"),
        ("rate = \"100Gbit\"", "rate = \"100Gb\"", "rate", "is no rate"),
    ] {
        let file = Cluster::new(&good.replace(from, to));
        let output = plan(&["--goat", file.path()]);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(message), "{from}: {error}");
        let shown = error.lines().find(|shown| shown.contains(" | ") && shown.contains(line));
        assert!(shown.is_some(), "{from}: {error}");
    }
    let both = plan(&["--goat", TESTBED, "--machines", "3"]);
    assert!(text(&both.stderr).contains("cannot be used with"));
}

#[test]
fn the_example_topologies_are_planned() {
    for name in ["leaf-spine", "two-jobs"] {
        let path = format!("{}/../../examples/plan/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let report = json(&["--goat", &path]);
        let gap = plan_named(&report, "fanin")["slowest_link_s"].as_f64().expect("a number")
            / report["slowest_link_bound_s"].as_f64().expect("a number");
        assert!(gap <= 1.05, "{name}: {gap}");
    }
}

/// A timeline as FANIN_TRACE writes it: steps of two sums, of which shards have a slice each.
fn timeline() -> String {
    let mut events = vec![
        r#"{"ph":"M","pid":3,"tid":0,"name":"process_name","cat":"fanin","args":{"name":"rank 3"}}"#
            .to_owned(),
    ];
    for step in 0..5 {
        for (sum, (submitted, elements)) in [(60_000, 250_000), (80_000, 500_000)].into_iter().enumerate() {
            for shard in 0..2 {
                let (ts, number) = (step * 200_000 + submitted, 2 * step + sum as u64);
                events.push(format!(
                    r#"{{"ph":"X","pid":3,"tid":{shard},"ts":{ts}.5,"dur":{}.0,"name":"all-reduce {number}","cat":"fanin","args":{{"number":{number},"job":"train","elements":{elements},"dtype":"float32","op":"average","shard":{shard}}}}}"#,
                    100_000 + 1000 * shard,
                ));
            }
        }
    }
    format!("[{}]\n", events.join(","))
}

#[test]
fn a_step_is_predicted_by_what_a_trace_recorded() {
    let file = Cluster::with_suffix(".json", &timeline());
    let links = ["--machines", "4", "--rate", "1gbit", "--trace", file.path()];
    let plan = json(&links);
    assert_eq!(plan["size_bytes"], 3_000_000);
    assert_eq!(
        (&plan["step"]["recorded"]["steps"], &plan["step"]["recorded"]["ranks"]),
        (&4.into(), &1.into())
    );
    // The last sum of a step ends 181 ms into it, and the next step's first sum comes 79 ms later.
    let ready: Vec<f64> =
        plan["step"]["sums"].as_array().expect("sums").iter().map(|sum| ms(&sum["ready_s"])).collect();
    assert_eq!(ready, [79.0, 99.0]);
    // A ring moves 6/4 of each sum, and 6 % more: 12.7 ms for the first, which hides, and 25.4 ms.
    assert_eq!(ms(&plan["ring_s"]), 124.4);
    let faster = json(&[&links[..], &["--compute", "10"]].concat());
    assert_eq!(ms(&faster["ring_s"]), 46.1, "7.9, and both sums");
    let shown = plan_text(&links);
    assert!(shown.contains("A step of 2 sums, 3.0 MB. Computing alone takes 99.0 ms."), "{shown}");
    assert!(shown.contains("with the sums, a step took 200.0 ms there"), "{shown}");
}

#[test]
fn layers_that_somebody_wrote_down_are_a_step_too() {
    let layer =
        |bytes: &str, backward: &str| format!("[[layer]]\nbytes = \"{bytes}\"\nbackward = \"{backward}\"\n");
    let file = Cluster::new(&(layer("2MB", "20ms") + &layer("1MB", "79ms")));
    let links = ["--machines", "4", "--rate", "1gbit", "--trace", file.path()];
    assert_eq!(ms(&json(&links)["ring_s"]), 124.4, "as of the timeline above");
    let shown = plan_text(&links);
    assert!(shown.contains("A step of 2 sums, 3.0 MB. Computing alone takes 99.0 ms"), "{shown}");
    assert!(!shown.contains("Medians") && !shown.contains("there"), "nobody recorded it: {shown}");
}

fn plan_text(arguments: &[&str]) -> String {
    text(&plan(arguments).stdout).to_owned()
}

#[test]
fn what_no_step_can_be_read_from_is_named_with_the_cure() {
    let refused = |content: &str, more: &[&str]| {
        let file = Cluster::with_suffix(".json", content);
        let output = plan(&[&["--machines", "4", "--rate", "1gbit", "--trace", file.path()], more].concat());
        assert!(!output.status.success());
        text(&output.stderr).to_owned()
    };
    assert!(refused("not json", &[]).contains("no timeline, such as FANIN_TRACE"));
    assert!(refused("[]", &[]).contains("no all-reduce"));
    assert!(
        refused(&timeline().replace(r#""dtype":"float32""#, r#""dtype":"float8""#), &[]).contains("float8")
    );
    let once = timeline().replace(r#""elements":500000,"#, r#""elements":500001,"#);
    assert!(refused(&once.replacen("500001", "7", 5), &[]).contains("no step repeats 3 times"));
    assert!(refused(&timeline(), &["--compute", "0"]).contains("a number above 0"));
    assert!(refused(&timeline(), &["--size", "1MB"]).contains("cannot be used with"));
}

/// A profile as PyTorch writes it of DDP on NCCL. It has five steps of two sums, after 40 ms and
/// 60 ms of kernels. The host launches these in the first millisecond.
fn profile_of_nccl() -> String {
    let mut events = Vec::new();
    for step in 0..5 {
        let begin = 200_000 * step;
        for (place, (ready, took, elements)) in
            [(40_000, 40_000, 250_000), (60_000, 20_000, 500_000)].into_iter().enumerate()
        {
            let id = 100 + 10 * step + 2 * place;
            let submitted = begin + 300 * (1 + place);
            let (kernel, launch) = (begin + ready - took, submitted - 50);
            let sum = begin + if place == 0 { 40_020 } else { 120_020 };
            events.push(format!(
                r#"{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":2,"ts":{launch}.0,"dur":5.0,"args":{{"correlation":{id}}}}},
                {{"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":{kernel}.0,"dur":{took}.0,"args":{{"device":0,"stream":7,"correlation":{id}}}}},
                {{"ph":"X","cat":"cpu_op","name":"record_param_comms","pid":1,"tid":2,"ts":{submitted}.0,"dur":90.0,"args":{{"External id":{id},"Collective name":"allreduce","In msg nelems":{elements},"dtype":"Float","Process Group Name":"0","Group size":4}}}},
                {{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce_Sum_f32_RING_LL","pid":0,"tid":20,"ts":{sum}.0,"dur":79980.0,"args":{{"External id":{id},"device":0,"stream":20,"correlation":{}}}}}"#,
                id + 1
            ));
        }
    }
    format!(
        r#"{{"schemaVersion":1,"distributedInfo":{{"backend":"nccl","rank":0,"world_size":4}},"traceEvents":[{}]}}"#,
        events.join(",")
    )
}

#[test]
fn a_step_is_predicted_by_what_pytorchs_profiler_recorded_of_nccl() {
    let file = Cluster::with_suffix(".json", &profile_of_nccl());
    let plan = json(&["--machines", "4", "--rate", "1gbit", "--trace", file.path()]);
    assert_eq!(plan["size_bytes"], 3_000_000);
    assert_eq!(plan["step"]["recorded"]["steps"], 4);
    let ready = plan["step"]["sums"].as_array().expect("sums").iter().map(|sum| ms(&sum["ready_s"]));
    // NCCL ends a step where the next one begins. The second sum is ready at 60 ms, and its kernel
    // begins at 120 ms, behind the first one.
    assert_eq!(ready.collect::<Vec<_>>(), [40.0, 60.0]);
}

/// Messages of et_def.proto with their lengths: fields of numbers (wire type 0) and of bytes (2).
fn message(fields: &[(u8, Result<u64, &[u8]>)]) -> Vec<u8> {
    let varint = |mut value: u64| {
        let mut bytes = Vec::new();
        while value >= 0x80 {
            bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    };
    let mut content = Vec::new();
    for (number, value) in fields {
        match value {
            Ok(value) => content.extend([vec![number << 3], varint(*value)].concat()),
            Err(bytes) => {
                content
                    .extend([vec![(number << 3) | 2], varint(bytes.len() as u64), bytes.to_vec()].concat());
            }
        }
    }
    [varint(content.len() as u64), content].concat()
}

/// A step in Chakra's form: two layers compute backwards for 40 ms and 20 ms, and each has a sum.
fn execution_trace() -> Vec<u8> {
    let attribute =
        |name: &str, value: u64| message(&[(1, Err(name.as_bytes())), (9, Ok(value))])[1..].to_vec();
    let computing = |id: u64, micros: u64, after: &[u8]| {
        message(&[(1, Ok(id)), (2, Err(b"COMP_NODE")), (3, Ok(4)), (5, Err(after)), (7, Ok(micros))])
    };
    let sum = |id: u64, bytes: u64, after: &[u8]| {
        let (kind, size) = (attribute("comm_type", 0), attribute("comm_size", bytes));
        message(&[
            (1, Ok(id)),
            (2, Err(b"SUM")),
            (3, Ok(7)),
            (5, Err(after)),
            (10, Err(&kind)),
            (10, Err(&size)),
        ])
    };
    let metadata = message(&[(1, Err(b"1.0.0"))]);
    let step = [
        computing(1, 40_000, &[]),
        sum(2, 1_000_000, &[1]),
        computing(3, 20_000, &[1]),
        sum(4, 2_000_000, &[3]),
    ];
    [metadata, step.concat()].concat()
}

#[test]
fn a_step_is_predicted_by_an_execution_trace_of_chakra() {
    let file = Cluster::with_suffix(".et", "");
    std::fs::write(file.path(), execution_trace()).expect("written");
    let links = ["--machines", "4", "--rate", "1gbit", "--trace", file.path()];
    let plan = json(&[&links[..], &["--compute", "2"]].concat());
    let ready = plan["step"]["sums"].as_array().expect("sums").iter().map(|sum| ms(&sum["ready_s"]));
    assert_eq!(ready.collect::<Vec<_>>(), [20.0, 30.0]);
    assert_eq!(plan["size_bytes"], 3_000_000);
    let shown = plan_text(&links);
    assert!(shown.contains("Computing alone takes 60.0 ms") && !shown.contains("took"), "{shown}");
    let other = Cluster::with_suffix(".json", &timeline());
    let mixed = plan_of_trace(&[file.path(), other.path()]);
    assert!(mixed.contains("of one run"), "{mixed}");
    let joined = Command::new(env!("CARGO_BIN_EXE_fanin"))
        .args(["trace", file.path(), "--join", "/nowhere/all.json"])
        .output()
        .expect("the command runs");
    assert!(text(&joined.stderr).contains("no common clock"), "{}", text(&joined.stderr));
}

/// The error of `fanin plan` for files that it refuses.
fn plan_of_trace(files: &[&str]) -> String {
    let output = plan(&[&["--machines", "4", "--rate", "1gbit", "--trace"], files].concat());
    assert!(!output.status.success());
    text(&output.stderr).to_owned()
}
