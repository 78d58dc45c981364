use std::time::Duration;

use super::super::view::Severity;
use super::*;
use crate::proto::job::{Aborted, Gathering};
use crate::proto::work::{Done, Total as WorkTotal};
use crate::proto::{Place, Relay, RelayJob, Split, StatusReply, Traffic, Work, split};

const ADDRESS: &str = "10.0.0.9:4800";

/// Ranks whose collectives took so many milliseconds each, of which so many are done.
fn running(took_ms: &[u64], done: u64) -> Running {
    let totals = vec![WorkTotal {
        collective: "all_reduce".into(),
        dtype: "float32".into(),
        count: done,
        bytes: 400 * done,
    }];
    let member = |(rank, ms): (usize, &u64)| {
        let one = |number| Done { number, ago_us: 1000, took_us: ms * 1000, bytes: 400, ..Done::default() };
        let done = (done.saturating_sub(20)..done).map(one).collect();
        let work =
            Work { done, totals: totals.clone(), busy_us: 10_000, period: Some(2), told_ago_us: Some(0) };
        let place = Place { name: format!("gpu-{rank}"), machine: rank.to_string(), ..Place::default() };
        Member { rank: rank as u32, place: Some(place), work: Some(work), ..Member::default() }
    };
    Running {
        job_id: 7,
        in_flight: 10,
        shards: 2,
        elements: 250,
        completed: done,
        members: took_ms.iter().enumerate().map(member).collect(),
        ..Running::default()
    }
}

fn job(name: &str, world_size: u32, state: Told) -> proto::Job {
    proto::Job { name: name.into(), world_size, state: Some(state) }
}

fn reply(jobs: Vec<proto::Job>) -> StatusReply {
    StatusReply {
        jobs,
        protocol: "switchml".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        pool_units: 100,
        pool_free: 50,
        ..StatusReply::default()
    }
}

fn of(address: &str, reply: StatusReply) -> Answer {
    Answer { address: address.into(), ago: Duration::ZERO, reply: Ok(reply) }
}

/// The state after these answers, a second apart.
fn observed(answers: Vec<Vec<Answer>>) -> State {
    let mut observer = Observer::new("test".into());
    let seconds = answers.len();
    for (second, answers) in answers.into_iter().enumerate() {
        observer.take(1000.0 + second as f64, 1.0, answers);
    }
    observer.state(1000.0 + seconds as f64, 0.0)
}

fn names(state: &State) -> Vec<&'static str> {
    state.events.iter().map(|event| event.name).collect()
}

#[test]
fn a_job_begins_runs_and_ends() {
    let gathering =
        |present: u64| reply(vec![job("gpt", 4, Told::Gathering(Gathering { present: vec![present] }))]);
    let runs = |done| reply(vec![job("gpt", 4, Told::Running(running(&[50, 50, 50, 50], done)))]);
    let mut observer = Observer::new("test".into());
    observer.take(1.0, 1.0, vec![of(ADDRESS, gathering(0b0011))]);
    let state = observer.state(1.0, 0.0);
    assert_eq!((state.jobs[0].state, &state.jobs[0].missing), (JobState::Gathering, &vec![2, 3]));
    assert_eq!(state.jobs[0].words[0].text, "gpt waits for ranks 2, 3");
    observer.take(2.0, 1.0, vec![of(ADDRESS, runs(100))]);
    observer.take(3.0, 1.0, vec![of(ADDRESS, runs(110))]);
    let state = observer.state(3.0, 0.0);
    let gpt = &state.jobs[0];
    assert_eq!((gpt.state, gpt.window, gpt.steps), (JobState::Running, 20, Some(5.0)));
    // 100 chunks of 250 floats since there was no job, and 10 after that.
    assert_eq!(state.history.jobs["gpt"].summed, [None, Some(100_000.0), Some(10_000.0)]);
    observer.take(4.0, 1.0, vec![of(ADDRESS, reply(vec![]))]);
    let state = observer.state(4.0, 3.5);
    assert_eq!(names(&state), ["rank_joined", "job_started", "job_ended"]);
    assert_eq!(state.history.times, [4.0]);
}

#[test]
fn a_rank_that_is_late_is_named_in_words() {
    let state = observed(vec![vec![of(
        ADDRESS,
        reply(vec![job("gpt", 4, Told::Running(running(&[80, 79, 39, 80], 30)))]),
    )]]);
    let words: Vec<_> = state.jobs[0].words.iter().map(|word| word.text.as_str()).collect();
    assert_eq!(words, ["rank 2 on gpu-2 is 40 ms later than the others, in 100 % of the last 20 sums"]);
    assert_eq!(state.jobs[0].words[0].severity, Severity::Warning);
    // No rank waits much longer than the others.
    let state = observed(vec![vec![of(
        ADDRESS,
        reply(vec![job("gpt", 4, Told::Running(running(&[80, 79, 76, 80], 30)))]),
    )]]);
    assert_eq!(state.jobs[0].words, []);
}

#[test]
fn metrics_have_each_event_and_the_words_that_hold_by_the_names_of_the_page() {
    let mut observer = Observer::new("test".into());
    let job = |took: &[u64], done| reply(vec![job("gpt", 3, Told::Running(running(took, done)))]);
    observer.take(1000.0, 1.0, vec![of(ADDRESS, job(&[50, 9, 50], 30))]);
    let told = observer.named();
    let counted: Vec<_> = told.events.iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [&("job_started", 1)]);
    assert_eq!(told.events.len(), 11, "those that never happened are 0");
    let hold = |observer: &Observer| {
        let words = observer.named().words;
        words.into_iter().filter(|(_, count)| *count > 0).collect::<Vec<_>>()
    };
    assert_eq!(hold(&observer), [("late", 1)]);
    let silent = Answer { address: ADDRESS.into(), ago: Duration::ZERO, reply: Err("no route".into()) };
    observer.take(1001.0, 1.0, vec![silent]);
    assert_eq!(hold(&observer), [("silent", 1)]);
}

#[test]
fn packets_that_come_again_are_told_unless_a_rank_is_late() {
    let runs = |took: &[u64], completed, retransmitted| {
        let running = Running { completed, retransmitted, ..running(took, 30) };
        vec![of(ADDRESS, reply(vec![job("gpt", 2, Told::Running(running))]))]
    };
    let names = |took: &[u64], again| -> Vec<&'static str> {
        let state = observed(vec![runs(took, 0, 0), runs(took, 1000, again)]);
        state.jobs[0].words.iter().map(|word| word.name).collect()
    };
    assert_eq!(names(&[50, 50], 19), Vec::<&str>::new());
    assert_eq!(names(&[50, 50], 60), ["losses"]);
    assert_eq!(names(&[50, 5], 60), ["late"]);
}

#[test]
fn traffic_is_what_the_link_carries_with_its_headers() {
    let moved = |bytes, packets| {
        let traffic = Traffic { bytes_received: bytes, packets_received: packets, ..Traffic::default() };
        StatusReply { traffic: Some(traffic), rate_bps: Some(1_000_000_000), ..reply(vec![]) }
    };
    let state = observed(vec![vec![of(ADDRESS, moved(0, 0))], vec![of(ADDRESS, moved(100_000, 100))]]);
    assert_eq!(state.services[0].received, Some(8.0 * (100_000.0 + 66.0 * 100.0)));
    // It began anew, and counts from 0.
    let anew = StatusReply { instance: 9, ..moved(1, 1) };
    let state = observed(vec![vec![of(ADDRESS, moved(100_000, 100))], vec![of(ADDRESS, anew)]]);
    assert_eq!(state.services[0].received, None);
}

#[test]
fn a_service_that_falls_silent_is_told_and_its_jobs_go() {
    let runs = || reply(vec![job("gpt", 2, Told::Running(running(&[5, 5], 30)))]);
    let silent =
        || Answer { address: ADDRESS.into(), ago: Duration::ZERO, reply: Err("connection refused".into()) };
    let state =
        observed(vec![vec![of(ADDRESS, runs())], vec![silent()], vec![silent()], vec![of(ADDRESS, runs())]]);
    assert_eq!(names(&state), ["job_started", "service_silent", "service_back", "job_started"]);
    let state = observed(vec![vec![silent()]]);
    assert_eq!(state.services[0].silent.as_deref(), Some("connection refused"));
    // Of one that nobody asks any more nothing is told.
    assert_eq!(observed(vec![vec![of(ADDRESS, runs())], vec![]]).services, []);
}

#[test]
fn a_job_of_several_services_is_one_job_with_the_share_of_each() {
    let share = |service: &str, share| split::Share { service: service.into(), share, host: None };
    let runs = |here, completed| {
        let split = Split { shares: vec![share("a:1", 0.75), share("b:2", 0.25)], here, ..Split::default() };
        let running = Running { split: Some(split), completed, ..running(&[5, 5], 30) };
        reply(vec![job("gpt", 2, Told::Running(running))])
    };
    let state = observed(vec![
        vec![of("a:1", runs(0, 0)), of("localhost:2", runs(1, 0))],
        vec![of("a:1", runs(0, 700)), of("localhost:2", runs(1, 300))],
    ]);
    assert_eq!(state.history.jobs["gpt"].summed[1], Some(1_000_000.0));
    let measured: Vec<_> = state.jobs[0].shares.iter().map(|share| share.measured).collect();
    assert_eq!((state.jobs.len(), measured), (1, vec![Some(0.7), Some(0.3)]));
    // It is called as it was asked, also where the job calls it otherwise.
    assert_eq!(
        state.services.iter().map(|service| service.address.as_str()).collect::<Vec<_>>(),
        ["a:1", "localhost:2"]
    );
}

#[test]
fn a_service_that_sums_a_part_tells_of_the_whole() {
    let share = |service: &str, share| split::Share { service: service.into(), share, host: None };
    let runs = |completed| {
        let split = Split { shares: vec![share("a:1", 0.25), share("b:2", 0.75)], ..Split::default() };
        let running = Running { split: Some(split), completed, ..running(&[5, 5], 30) };
        vec![of("a:1", reply(vec![job("gpt", 2, Told::Running(running))]))]
    };
    let state = observed(vec![runs(0), runs(100)]);
    assert_eq!(state.history.jobs["gpt"].summed[1], Some(400_000.0));
    assert!(state.jobs[0].shares.iter().all(|share| share.measured.is_none()));
}

#[test]
fn a_part_that_another_service_took_over_is_a_part_of_its_job() {
    let whole = || job("gpt", 2, Told::Running(running(&[5, 5], 30)));
    let part = || {
        let of_another = Running { job_id: 8, ..running(&[5, 5], 30) };
        job("gpt~1", 2, Told::Running(of_another))
    };
    let state = observed(vec![
        vec![of(ADDRESS, reply(vec![whole()]))],
        vec![of(ADDRESS, reply(vec![whole(), part()]))],
    ]);
    assert_eq!((state.jobs.len(), names(&state)), (1, vec!["job_started", "taken_over"]));
}

#[test]
fn an_address_by_which_a_service_is_not_reached_silences_it_not() {
    let told = || StatusReply { instance: 5, ..reply(vec![]) };
    let silent = Answer { address: ADDRESS.into(), ago: Duration::ZERO, reply: Err("no route".into()) };
    let state = observed(vec![vec![of("127.0.0.1:4800", told()), silent]]);
    let silent: Vec<_> = state.services.iter().map(|service| service.silent.is_some()).collect();
    assert_eq!(silent, [true, false], "the other address has a row of its own");
    assert_eq!(state.words.iter().map(|word| word.name).collect::<Vec<_>>(), ["silent"]);
}

#[test]
fn racks_are_services_on_the_way_to_their_root() {
    let relay = |address: &str, upstream: &str, below: u64| Relay {
        address: address.into(),
        upstream: upstream.into(),
        jobs: vec![RelayJob { job_id: 7, ranks: vec![below], ..RelayJob::default() }],
        ..Relay::default()
    };
    // Ranks behind a rack call the job's service by the rack's address.
    let share = split::Share { service: "rack-a:1".into(), share: 1.0, host: None };
    let split = Split { shares: vec![share], ..Split::default() };
    let runs = job("gpt", 2, Told::Running(Running { split: Some(split), ..running(&[5, 5], 30) }));
    let told = || StatusReply { instance: 5, ..reply(vec![runs.clone()]) };
    let one = StatusReply { relays: vec![relay("rack-a:1", "root:1", 0b01)], ..told() };
    let other = StatusReply {
        relays: vec![relay("pod:1", "root:1", 0b10), relay("rack-b:1", "pod:1", 0b10)],
        ..told()
    };
    let state = observed(vec![vec![of("rack-a:1", one), of("rack-b:1", other), of("10.0.0.1:1", told())]]);
    assert_eq!(state.jobs.len(), 1);
    let via: Vec<_> = state.jobs[0].ranks.iter().map(|rank| rank.via.as_deref()).collect();
    assert_eq!(via, [Some("rack-a:1"), Some("rack-b:1")], "each by the switch next to it");
    let ways: Vec<_> = state
        .services
        .iter()
        .map(|service| (service.address.as_str(), service.upstream.as_deref()))
        .collect();
    assert_eq!(
        ways,
        [
            ("root:1", None),
            ("rack-a:1", Some("root:1")),
            ("pod:1", Some("root:1")),
            ("rack-b:1", Some("pod:1"))
        ]
    );
}

#[test]
fn ranks_that_leave_refusals_and_reasons_are_events() {
    let runs = |left: u64| {
        let running = Running { left: vec![left], ..running(&[5, 5, 5], 30) };
        reply(vec![job("gpt", 3, Told::Running(running))])
    };
    let refused = StatusReply { refused: 2, denied: 1, ..runs(0b100) };
    let why = proto::AbortReason { reason: Some(proto::abort_reason::Reason::Expelled(1)) };
    let aborted = reply(vec![job("gpt", 3, Told::Aborted(Aborted { job_id: 7, reason: Some(why) }))]);
    let aborted = StatusReply { refused: 2, denied: 1, ..aborted };
    let state =
        observed(vec![vec![of(ADDRESS, runs(0))], vec![of(ADDRESS, refused)], vec![of(ADDRESS, aborted)]]);
    assert_eq!(names(&state), ["job_started", "rank_left", "refused", "refused", "job_aborted"]);
    assert_eq!(state.events[1].text, "rank 2 on gpu-2 left gpt");
    assert_eq!(state.events[4].text, "gpt ended: rank 1 was lost");
}

#[test]
fn a_thousand_jobs_and_names_with_markup_are_told_within_bounds() {
    let gathering = |name: &str| job(name, 2, Told::Gathering(Gathering { present: vec![1] }));
    let mut jobs: Vec<_> = (0..1000).map(|number| gathering(&format!("job {number}"))).collect();
    jobs.push(job("<script>\u{1b}[2J", 2, Told::Running(running(&[5, 5], 30))));
    let answers = || vec![of(ADDRESS, reply(jobs.clone()))];
    let state = observed(vec![answers(), answers(), answers()]);
    assert_eq!((state.jobs.len(), state.hidden_jobs), (JOBS_MAX, 901));
    assert_eq!(state.jobs[0].name, "<script>\\u{1b}[2J", "those that run come first");
    assert_eq!(state.events.len(), JOBS_MAX, "each once");
}

#[test]
fn a_job_of_4096_ranks_is_told_in_a_few_hundred_kilobytes() {
    let took: Vec<u64> = (0..4096).map(|rank| 50 + rank % 7).collect();
    let state =
        observed(vec![vec![of(ADDRESS, reply(vec![job("large", 4096, Told::Running(running(&took, 30)))]))]]);
    let bytes = serde_json::to_string(&state).unwrap().len();
    assert!(state.jobs[0].ranks.len() == 4096 && bytes < 2_000_000, "{bytes}");
}
