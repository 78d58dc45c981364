use super::*;
use fanin_controller::{Place, Prediction, Share};
use fanin_protocol::control::Ranks;
use fanin_wire::{Generation, JobId, Security, WireDtype};

fn status() -> SwitchStatus {
    let job = |name: &str, state| JobStatus { name: name.into(), world_size: 3, state };
    let running = JobStatusState::Running {
        job: JobId(9),
        generation: Generation(1),
        in_flight: 64,
        shards: 2,
        elements: 352,
        wire_dtype: WireDtype::Bfloat16,
        security: Security::Encrypt,
        in_use: 12,
        waiting_for: vec![(Rank(2), 12)],
        completed: 1000,
        retransmitted: 3,
        left: Ranks::default(),
        aggregations: 0,
        collisions: 0,
        loss_bound: LossBound::RELIABLE,
        lost: 0,
        planned: vec![],
        split: None,
        members: vec![],
    };
    SwitchStatus {
        rate_bps: None,
        version: "0.1.0".into(),
        wire_version: 1,
        shards: 1,
        pool_units: 1024,
        pool_free: 896,
        jobs: vec![
            job("gpt", running),
            job("late", JobStatusState::Gathering { present: Ranks::from([0, 2]) }),
        ],
        protocol: "switchml".into(),
        relays: vec![],
        outdated: 0,
        unplanned: 0,
    }
}

#[test]
fn the_table_says_who_waits_for_whom() {
    let status = status();
    let text = table(&report("box:4800", &status));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "switch box:4800: fanin 0.1.0, wire version 1, 1 shard, 128 of 1024 units of memory in use"
    );
    assert!(lines[2].contains("running  bfloat16") && lines[2].ends_with("rank 2 (12 slots)"), "{text}");
    assert!(lines[3].contains("joining") && lines[3].ends_with("rank 1"), "{text}");
}

#[test]
fn the_table_says_what_a_job_may_lose_and_has_lost() {
    let mut status = status();
    assert!(!table(&report("box:4800", &status)).contains("may lose"));
    let JobStatusState::Running { loss_bound, lost, .. } = &mut status.jobs[0].state else { panic!() };
    (*loss_bound, *lost) = (LossBound::from_millionths(12_500).unwrap(), 77);
    let report = report("box:4800", &status);
    let text = table(&report);
    assert!(text.contains("\n\njob gpt: each rank may lose 1.25 %; 77 contributions were lost"), "{text}");
    assert!(
        serde_json::to_string(&report).unwrap().contains(r#""loss":{"bound":0.0125,"contributions":77}"#)
    );
}

#[test]
fn the_table_of_a_rack_says_what_each_on_the_way_summed() {
    let rack = |address: &str, upstream: &str| RelayStatus {
        address: address.into(),
        upstream: upstream.into(),
        aggregators: 0,
        in_use: 3,
        jobs: vec![RelayJob { job: JobId(9), aggregations: 500, collisions: 0 }],
        outdated: 0,
    };
    let relays = vec![rack("10.0.0.9:4800", "10.0.0.8:4800"), rack("10.0.1.9:4800", "10.0.0.9:4800")];
    let status = SwitchStatus { relays, ..status() };
    let text = table(&report("10.0.1.9:4800", &status));
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let racks: Vec<_> =
        text.lines().map(cells).skip_while(|cells| cells.first().is_none_or(|c| c != "RACK")).collect();
    assert_eq!(racks[0], ["RACK", "UPSTREAM", "IN", "USE", "JOB", "SUMS"], "{text}");
    assert_eq!(racks[1], ["10.0.1.9:4800", "10.0.0.9:4800", "3", "gpt", "500"], "the nearest first");
    assert_eq!(racks[2][..2], ["10.0.0.9:4800", "10.0.0.8:4800"]);
}

#[test]
fn the_table_says_who_sums_what_and_who_is_where() {
    let share = |service: &str, share, host| Share { service: service.into(), share, host };
    let split = Split {
        shares: vec![share("10.0.0.1:40001", 0.25, Some(0)), share("10.0.0.9:4800", 0.75, None)],
        prediction: Some(Prediction {
            seconds_per_byte: 8e-9,
            bound: "the link into 10.0.0.9:4800".into(),
            ring_seconds_per_byte: None,
        }),
        links: "10.0.0.9:4800 tells no rate: taken for 1 Gbit/s, the slowest that is told".into(),
    };
    let member = |rank, name: &str, ranks, seconds_per_byte| MemberStatus {
        rank: Rank(rank),
        place: Place {
            machine: format!("id of {name}"),
            name: name.into(),
            address: "10.0.0.1".into(),
            ranks,
        },
        seconds_per_byte,
        imbalance: 0.002 * f64::from(rank),
    };
    let mut status = status();
    let JobStatusState::Running { split: told, members, .. } = &mut status.jobs[0].state else { panic!() };
    *told = Some(Box::new((split, 1)));
    *members = vec![member(0, "one", vec![0, 1, 2, 5], Some(10e-9)), member(1, "two", vec![], Some(9e-9))];
    let report = report("10.0.0.9:4800", &status);
    let text = table(&report);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let told = "job gpt: predicted 8.000 ms/MB, bound by the link into 10.0.0.9:4800; measured 9.000 ms/MB; imbalance 0.2 %";
    for row in [
        told,
        "links: 10.0.0.9:4800 tells no rate: taken for 1 Gbit/s, the slowest that is told",
        "10.0.0.1:40001 25.0 % rank 0",
        "10.0.0.9:4800 75.0 % nobody of the job (asked)",
        "one 10.0.0.1 0-2, 5 10.000 ms/MB",
        "two 10.0.0.1 1 9.000 ms/MB",
    ] {
        assert!(lines.contains(&row.split(' ').collect()), "{row} in\n{text}");
    }
    let json = serde_json::to_value(&report).expect("serialisable");
    assert_eq!(
        (&json["jobs"][0]["plan"]["measured"], &json["jobs"][0]["plan"]["imbalance"]),
        (&9e-9.into(), &0.002.into())
    );
    assert_eq!(json["jobs"][0]["members"][1]["ranks"], serde_json::json!([1]));
}

#[test]
fn of_many_ranks_the_table_has_a_line_a_machine_and_says_of_whom_it_does_not_know() {
    let member = |rank: u16| {
        let name = format!("node{}", rank / 8);
        let machine = format!("id of {name}");
        let known = Place { machine, name, address: "10.0.0.1".into(), ranks: vec![rank.into()] };
        let place = if rank < 96 { known } else { Place::default() };
        MemberStatus { rank: Rank(rank), place, seconds_per_byte: Some(f64::from(rank)), imbalance: 0.0 }
    };
    let mut status = status();
    let JobStatusState::Running { split, members, .. } = &mut status.jobs[0].state else { panic!() };
    *split = Some(Box::new((Split { shares: vec![], prediction: None, links: String::new() }, 0)));
    *members = (0..1024).map(member).collect();
    let text = table(&report("10.0.0.9:4800", &status));
    let of_machines: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("node")).collect();
    assert_eq!(of_machines.len(), 12, "{text}");
    let last: Vec<&str> = of_machines[11].split_whitespace().collect();
    assert_eq!(last[..3], ["node11", "10.0.0.1", "88-95"], "{text}");
    let more = "not shown: where 928 more are (ranks 96-1023); a service keeps the places of about 100 ranks";
    assert!(text.lines().any(|line| line == more) && text.lines().count() < 30, "{text}");
}

#[test]
fn of_machines_of_which_no_place_is_known_the_table_gives_no_ranks() {
    let of_machines = |machines: u16| {
        let member = |machine: u16| {
            let ranks = (0..8).map(|rank| u32::from(machine) * 8 + rank).collect();
            let (name, address) = (format!("node{machine}"), "10.0.0.1".into());
            let known = Place { machine: format!("id of {name}"), name, address, ranks };
            let place = if machine < 12 { known } else { Place::default() };
            MemberStatus { rank: Rank(machine), place, seconds_per_byte: None, imbalance: 0.0 }
        };
        let mut status = status();
        let JobStatusState::Running { split, members, .. } = &mut status.jobs[0].state else { panic!() };
        *split = Some(Box::new((Split { shares: vec![], prediction: None, links: String::new() }, 0)));
        *members = (0..machines).map(member).collect();
        table(&report("10.0.0.9:4800", &status))
    };
    for (machines, more) in [(13, "one more machine"), (128, "116 more machines")] {
        let (line, text) = (format!("not shown: where the ranks of {more} are; "), of_machines(machines));
        assert!(text.lines().any(|it| it.starts_with(&line)), "{text}");
    }
}

#[test]
fn where_nobody_was_named_nobody_is_to_be_started() {
    let error = SessionError::SwitchUnreachable {
        switch: SWITCH_DEFAULT.into(),
        port: 4800,
        waited: Duration::from_secs(1),
        cause: "connection refused".into(),
    };
    assert!(silence(&error, true).starts_with("no job runs here: "), "{}", silence(&error, true));
    assert_eq!(silence(&error, false), error.to_string());
}

#[test]
fn who_is_asked_is_who_was_named_or_is_here_or_would_be_by_default() {
    let here = || vec![([10, 0, 0, 1], 40_001).into()];
    assert_eq!(asked(Some("a:1, b"), here), ["a:1", "b"]);
    assert_eq!(asked(None, here), ["10.0.0.1:40001"]);
    assert_eq!(asked(Some(" "), here), ["10.0.0.1:40001"], "a variable that is empty is not set");
    assert_eq!(asked(None, Vec::new), [SWITCH_DEFAULT]);
}

#[test]
fn the_table_says_where_atp_adds() {
    let of_switch = RelayJob { job: JobId(9), aggregations: 500, collisions: 7 };
    let switch = RelayStatus {
        address: "10.0.1.9:4800".into(),
        upstream: "10.0.0.8:4800".into(),
        aggregators: 4096,
        in_use: 3,
        jobs: vec![of_switch],
        outdated: 0,
    };
    let mut status = SwitchStatus { protocol: "atp".into(), relays: vec![switch], ..status() };
    if let JobStatusState::Running { aggregations, collisions, .. } = &mut status.jobs[0].state {
        (*aggregations, *collisions) = (200, 8);
    }
    let text = table(&report("box:4800", &status));
    assert!(text.starts_with("switch box:4800: ATP, fanin 0.1.0"), "{text}");
    assert!(text.contains(" IN FLIGHT "), "{text}");
    assert!(text.contains("rank 2 (12 fragments)"), "{text}");
    let json = serde_json::to_value(report("box:4800", &status)).expect("serialisable");
    assert_eq!(json["jobs"][0]["in_flight"], 64);
    let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = text.lines().rev().take(2).map(cells).collect();
    assert_eq!(rows[1], ["switch", "10.0.1.9:4800", "4096", "3", "gpt", "500", "7"]);
    assert_eq!(rows[0], ["server", "gpt", "200", "8"]);
}

#[test]
fn the_table_says_which_switch_sums_which_share_by_a_plan() {
    let switch = RelayStatus {
        address: "10.0.1.9:4800".into(),
        upstream: "10.0.0.8:4800".into(),
        aggregators: 4096,
        in_use: 3,
        jobs: vec![RelayJob { job: JobId(9), aggregations: 500, collisions: 0 }],
        outdated: 2,
    };
    let mut status =
        SwitchStatus { protocol: "goat".into(), relays: vec![switch], outdated: 4, unplanned: 1, ..status() };
    if let JobStatusState::Running { planned, aggregations, .. } = &mut status.jobs[0].state {
        let share = PlannedShare { switch: "10.0.1.9:4800".into(), share: 0.75, aggregators: 64 };
        (*planned, *aggregations) = (vec![share], 200);
    }
    let text = table(&report("box:4800", &status));
    assert!(text.starts_with("switch box:4800: GOAT, fanin 0.1.0"), "{text}");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [
        &["switch", "10.0.1.9:4800", "4096", "3", "gpt", "500", "0"][..],
        &["server", "gpt", "200", "0"],
        &["gpt", "10.0.1.9:4800", "75.0", "%", "64"],
        &["gpt", "server", "25.0", "%"],
    ] {
        assert!(rows.iter().any(|other| other == row), "{row:?} in {text}");
    }
    assert!(text.ends_with("dropped as not of the plan: at the server 4 of an older one and 1 of none, at 10.0.1.9:4800 2 of an older one"), "{text}");
    let json = serde_json::to_value(report("box:4800", &status)).expect("serialisable");
    assert_eq!(json["jobs"][0]["planned"][0]["share"], 0.75);
    assert_eq!((&json["dropped"]["outdated"], &json["switches"][0]["outdated"]), (&4.into(), &2.into()));
}

#[test]
fn the_json_is_for_programs() {
    let status = status();
    let json = serde_json::to_value(report("box:4800", &status)).expect("serialisable");
    assert_eq!(json["pool"]["free"], 896);
    assert_eq!(json["jobs"][0]["state"], "running");
    assert_eq!(json["jobs"][0]["wire_dtype"], "bfloat16");
    assert_eq!(json["jobs"][0]["security"], "encrypt");
    for (travels_as, said) in [(WireDtype::SharedExponent, "integers"), (WireDtype::Bfloat16, "bfloat16")] {
        let mut of_atp = SwitchStatus { protocol: "atp".into(), ..self::status() };
        if let JobStatusState::Running { wire_dtype, .. } = &mut of_atp.jobs[0].state {
            *wire_dtype = travels_as;
        }
        let of_atp = serde_json::to_value(report("box:4800", &of_atp)).expect("serialisable");
        assert_eq!(of_atp["jobs"][0]["wire_dtype"], said);
    }
    assert_eq!(json["jobs"][0]["waiting_for"][0]["rank"], 2);
    assert_eq!(json["jobs"][1]["missing"][0], 1);
}
