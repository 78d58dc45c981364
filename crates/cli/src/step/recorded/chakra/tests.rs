//! Traces in the form of Chakra's own writers. Its generator is one. Its text converter writes a
//! graph with durations and without devices. Its PyTorch converter writes a host, kernels and NCCL.

use super::*;

fn number(name: &str, value: i64) -> Attribute {
    Attribute { name: name.to_owned(), int64_val: Some(value), ..Attribute::default() }
}

fn on_host(is_cpu_op: bool) -> Attribute {
    Attribute { name: "is_cpu_op".to_owned(), bool_val: Some(is_cpu_op), ..Attribute::default() }
}

fn computing(id: u64, duration_micros: u64, after: &[u64]) -> Node {
    Node {
        id,
        name: format!("COMP_NODE_{id}"),
        r#type: NodeType::Comp.into(),
        data_deps: after.to_vec(),
        duration_micros,
        ..Node::default()
    }
}

fn collective(id: u64, comm_type: i64, bytes: i64, after: &[u64]) -> Node {
    Node {
        name: format!("COMM_COLL_NODE_{id}"),
        r#type: NodeType::CommColl.into(),
        attr: vec![number("comm_type", comm_type), number("comm_size", bytes)],
        ..computing(id, 0, after)
    }
}

fn sum(id: u64, bytes: i64, after: &[u64]) -> Node {
    collective(id, 0, bytes, after)
}

fn read_nodes(nodes: &[Node]) -> anyhow::Result<Trace> {
    let file = tempfile::NamedTempFile::with_suffix(".et").expect("a file");
    let mut content = GlobalMetadata { version: "1.0.0".to_owned() }.encode_length_delimited_to_vec();
    nodes.iter().for_each(|node| content.extend(node.encode_length_delimited_to_vec()));
    std::fs::write(&file, content).expect("written");
    read(file.path())
}

fn steps(nodes: &[Node]) -> Vec<Vec<(usize, f64)>> {
    match read_nodes(nodes) {
        Ok(Trace::Steps(steps)) => {
            let asked = |step: &Vec<Asked>| step.iter().map(|sum| (sum.bytes, sum.submitted)).collect();
            steps.iter().map(asked).collect()
        }
        Ok(Trace::Timed(sums)) => panic!("it has start times: {sums:?}"),
        Err(error) => panic!("{error:#}"),
    }
}

fn refused(nodes: &[Node]) -> String {
    format!("{:#}", read_nodes(nodes).err().expect("no step"))
}

/// The bytes of et_def.proto, written by hand. A version of 5 bytes comes first. A node follows with
/// id 7, the name "s", the kind COMM_COLL_NODE, start 300 and duration 2. It has the attributes
/// comm_type and comm_size.
#[test]
fn messages_have_the_numbers_of_the_schema() {
    let mut content = vec![7, 0x0a, 5];
    content.extend(b"1.0.0");
    let mut node = vec![0x08, 7, 0x12, 1, b's', 0x18, 7, 0x30, 0xac, 2, 0x38, 2];
    for (name, value) in [("comm_type", 0), ("comm_size", 64)] {
        node.extend([0x52, 4 + name.len() as u8, 0x0a, name.len() as u8]);
        node.extend(name.bytes());
        node.extend([0x48, value]);
    }
    content.push(node.len() as u8);
    content.extend(node);
    let nodes = decode(&content).expect("messages");
    let [node] = &nodes[..] else { panic!("{nodes:?}") };
    assert_eq!((node.id, &node.name[..], node.r#type()), (7, "s", NodeType::CommColl));
    match of_nodes(&nodes).expect("a sum") {
        Trace::Timed(sums) => {
            assert_eq!(sums, [Asked { bytes: 64, submitted: 300.0, done: 302.0 }]);
        }
        Trace::Steps(steps) => panic!("its start is known: {steps:?}"),
    }
}

#[test]
fn a_sum_is_asked_for_when_the_computing_before_it_is_done() {
    // Chakra's text converter, for two layers: a forward pass, and a backward pass from the last on.
    let step = [
        computing(0, 20, &[]),
        computing(1, 30, &[0]),
        computing(2, 40, &[1]),
        sum(3, 4000, &[2]),
        computing(4, 5, &[2]),
        computing(5, 50, &[4]),
        sum(6, 80, &[5]),
    ];
    assert_eq!(steps(&step), [[(4000, 90.0), (80, 145.0)]]);
    // Sums after each other: the second one is asked for as its computing is done.
    let mut chained = step.to_vec();
    chained[3].duration_micros = 1000;
    chained[6].data_deps.push(3);
    assert_eq!(steps(&chained), [[(4000, 90.0), (80, 145.0)]]);
}

#[test]
fn a_device_computes_one_node_at_a_time_and_another_stream_beside_it() {
    let mut nodes = vec![computing(0, 20, &[]), computing(1, 30, &[]), sum(2, 8, &[0, 1])];
    assert_eq!(steps(&nodes), [[(8, 50.0)]]);
    nodes[1].attr.push(number("stream", 20));
    assert_eq!(steps(&nodes), [[(8, 30.0)]]);
}

#[test]
fn a_step_ends_where_computing_waits_for_sums() {
    let mut nodes = Vec::new();
    for step in 0..3 {
        let id = 10 * step;
        let last: &[u64] = if step == 0 { &[] } else { &[id - 8, id - 6] };
        nodes.extend([
            computing(id, 100, last),
            computing(id + 1, 10, &[id]),
            sum(id + 2, 64, &[id]),
            computing(id + 3, 10, &[id + 1]),
            sum(id + 4, 32, &[id + 3]),
        ]);
    }
    nodes
        .iter_mut()
        .filter(|node| node.r#type() == NodeType::CommColl)
        .for_each(|node| node.duration_micros = 50);
    // The second sum waits for the first one, to 150, and ends at 200.
    let asked: Vec<Vec<(usize, f64)>> =
        [100.0, 300.0, 500.0].map(|at| vec![(64, at), (32, at + 20.0)]).to_vec();
    assert_eq!(steps(&nodes), asked);
}

/// The form of Chakra's PyTorch converter: a host launches kernels and NCCL.
fn of_pytorch(edge_from_kernel: bool) -> Vec<Node> {
    let host =
        |id, duration, after: &[u64]| Node { attr: vec![on_host(true)], ..computing(id, duration, after) };
    let kernel = Node {
        name: "void cudnn::bn_bw_1C11_kernel_new".to_owned(),
        attr: vec![on_host(false), number("stream", 7)],
        ..computing(3, 500, &[1])
    };
    let launch = Node { r#type: NodeType::CommColl.into(), ..host(2, 6, &[1]) };
    let mut nccl = sum(4, 8_196_000, if edge_from_kernel { &[2, 3] } else { &[2] });
    nccl.attr.extend([on_host(false), number("stream", 40)]);
    vec![host(1, 9, &[]), launch, kernel, nccl]
}

#[test]
fn sums_of_a_device_wait_for_kernels_and_not_for_the_host_alone() {
    assert_eq!(steps(&of_pytorch(true)), [[(8_196_000, 509.0)]]);
    let error = refused(&of_pytorch(false));
    assert!(error.contains("node 4") && error.contains("PyTorch's profile"), "{error}");
}

#[test]
fn sums_with_start_times_are_a_timeline() {
    let mut nodes = of_pytorch(false);
    nodes[3].start_time_micros = 700;
    nodes[3].duration_micros = 20;
    match read_nodes(&nodes).expect("a sum") {
        Trace::Timed(sums) => {
            assert_eq!(sums, [Asked { bytes: 8_196_000, submitted: 700.0, done: 720.0 }]);
        }
        Trace::Steps(steps) => panic!("its start is known: {steps:?}"),
    }
}

#[test]
fn collectives_beside_sums_are_named_unless_they_carry_little() {
    let with = |comm_type: i64, bytes: i64| {
        vec![computing(0, 9, &[]), sum(1, 1000, &[0]), collective(2, comm_type, bytes, &[0])]
    };
    for (comm_type, bytes) in [(5, 9000), (2, 10), (9, 0)] {
        assert_eq!(steps(&with(comm_type, bytes)), [[(1000, 9.0)]]);
    }
    for (comm_type, name) in [(2, "all-gather"), (6, "all-to-all"), (7, "reduce-scatter")] {
        let error = refused(&with(comm_type, 11));
        assert!(error.contains(&format!("by {name}")) && error.contains("data-parallel"), "{error}");
    }
    let send = Node { r#type: NodeType::CommSend.into(), ..collective(2, 0, 11, &[0]) };
    let error = refused(&[computing(0, 9, &[]), sum(1, 1000, &[0]), send]);
    assert!(error.contains("send and receive"), "{error}");
    assert!(refused(&with(10, 1)).contains("comm_type is 10"));
}

#[test]
fn several_process_groups_are_refused_by_name() {
    let of_group = |id, name: &str| {
        let mut node = sum(id, 8, &[0]);
        let string_val = Some(name.to_owned());
        node.attr.push(Attribute { name: "pg_name".to_owned(), string_val, ..Attribute::default() });
        node
    };
    assert_eq!(steps(&[computing(0, 9, &[]), of_group(1, "0"), of_group(2, "0")])[0].len(), 2);
    let error = refused(&[computing(0, 9, &[]), of_group(1, "0"), of_group(2, "5")]);
    assert!(error.contains(r#""0", "5""#) && error.contains("one group"), "{error}");
    let along = |id, values: [bool; 2]| {
        let mut node = sum(id, 8, &[0]);
        let bool_list = Some(BoolList { values: values.to_vec() });
        node.attr.push(Attribute { name: "involved_dim".to_owned(), bool_list, ..Attribute::default() });
        node
    };
    let error = refused(&[computing(0, 9, &[]), along(1, [true, false]), along(2, [false, true])]);
    assert!(error.contains("[false, true], [true, false]"), "{error}");
}

#[test]
fn what_a_trace_lacks_is_named_with_the_node() {
    let (before, asked) = (computing(0, 9, &[]), sum(1, 8, &[0]));
    assert!(refused(std::slice::from_ref(&before)).contains("no all-reduce"));
    let mut unknown = asked.clone();
    unknown.attr.remove(0);
    let error = refused(&[before.clone(), unknown]);
    assert!(error.contains("node 1 (COMM_COLL_NODE_1)") && error.contains("comm_type"), "{error}");
    let mut no_length = asked.clone();
    no_length.attr.remove(1);
    assert!(refused(&[before.clone(), no_length]).contains("comm_size"));
    assert!(refused(&[computing(0, 0, &[]), asked.clone()]).contains("duration_micros"));
    let mut operations = computing(0, 0, &[]);
    operations.attr.push(number("num_ops", 1000));
    assert!(refused(&[operations, asked.clone()]).contains("num_ops"));
    let memory = Node { r#type: NodeType::MemLoad.into(), ..computing(2, 1, &[]) };
    assert!(refused(&[before.clone(), asked.clone(), memory]).contains("remote memory"));
    let error = refused(&[before.clone(), sum(1, 8, &[0, 77])]);
    assert!(error.contains("node 77"), "{error}");
    assert!(refused(&[computing(0, 9, &[1]), sum(1, 8, &[0])]).contains("waits for itself"));
    assert!(refused(&[before.clone(), before, asked]).contains("share an id"));
}

#[test]
fn a_file_of_another_kind_is_told() {
    let refused = |content: &[u8]| {
        let file = tempfile::NamedTempFile::with_suffix(".et").expect("a file");
        std::fs::write(&file, content).expect("written");
        format!("{:#}", read(file.path()).err().expect("no trace"))
    };
    assert!(refused(b"{\"traceEvents\":[]}").contains("et_def.proto"));
    assert!(refused(&[0, 9, 1]).contains("node 0 of the file"), "a message is cut off");
    assert!(refused(&[0x1f, 0x8b, 8]).contains("gunzip"));
    assert!(refused(&[]).contains("et_def.proto"));
}
