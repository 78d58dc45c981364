//! What a browser, Prometheus and a stranger find on the switch's ports.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fanin_controller::proto::join_reply::Outcome;
use fanin_controller::proto::{Counts, JoinRequest, Resume, Split, StatusRequest};
use fanin_protocol::Reason;
use fanin_protocol::switchml::RankTerms;
use fanin_wire::{
    Collective, Generation, JobId, Kind, Preamble, ShardId, SlotHeader, SlotIndex, SlotPacket, WireDtype,
    WorkerId, begin_bfloat16_payload, chunk_packet_bytes, packet_bytes,
};
use tonic::Code;

use super::*;

pub(super) fn fetch(address: SocketAddr, path: &str) -> String {
    let mut connection = TcpStream::connect(address).expect("a switch");
    let request = format!("GET {path} HTTP/1.1\r\nHost: switch\r\nConnection: close\r\n\r\n");
    connection.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).expect("an answer");
    answer
}

/// The value of the metric whose line begins with `name`.
pub(super) fn metric(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

#[test]
fn health_and_metrics_are_served_beside_grpc() {
    let switch = switch();
    assert!(fetch(switch.address(), "/healthz").ends_with("\r\n\r\nok\n"));
    let sessions = connect_all(&switch, "metrics", 2, |config| config.agreed.in_flight = Some(32));
    let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![1_i32; 20_480], Op::Sum)).collect();
    assert!(sums.into_iter().all(|sum| sum.wait().is_ok()));
    let text = fetch(switch.address(), "/metrics");
    assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains("application/openmetrics-text"), "{text}");
    assert_eq!(metric(&text, "fanin_jobs{state=\"running\"}"), 1);
    // A slot of 2048 elements counts as eight for its two sums, and as four for each rank's contribution as it came.
    assert_eq!(metric(&text, "fanin_pool_units{state=\"in_use\"}"), 32 * (8 + 2 * 4));
    assert!(metric(&text, "fanin_results_total") >= 10);
    assert!(metric(&text, "fanin_packets_total{verdict=\"absorb\"}") >= 10);
    assert!(text.trim_end().ends_with("# EOF"));
}

/// A server begins an HTTP/2 connection with its settings (RFC 9113, §3.4).
#[test]
fn the_calls_that_a_connection_has_open_are_limited() {
    const SETTINGS: u8 = 4;
    const MAX_CONCURRENT_STREAMS: u16 = 3;
    let switch = switch();
    let mut connection = TcpStream::connect(switch.address()).expect("a switch");
    connection.set_read_timeout(Some(HANG)).expect("a limit");
    // With a frame of no settings of ours.
    connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").expect("sent");
    let mut head = [0; 9];
    connection.read_exact(&mut head).expect("a frame");
    assert_eq!(head[3], SETTINGS);
    let mut settings = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    connection.read_exact(&mut settings).expect("a whole frame");
    let (settings, _) = settings.as_chunks();
    let limit = settings.iter().find_map(|[high, low, value @ ..]: &[u8; 6]| {
        (u16::from_be_bytes([*high, *low]) == MAX_CONCURRENT_STREAMS).then(|| u32::from_be_bytes(*value))
    });
    // A stream and a question for each of 64 ranks in as many jobs as may gather at once.
    assert_eq!(limit, Some(2 * 64 * 256));
}

#[test]
fn a_request_that_is_too_long_is_refused_and_a_long_one_to_resume_is_not() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut client = control(switch.address());
        let question = StatusRequest { job: Some("j".repeat(64 << 10)), ..StatusRequest::default() };
        let refused = client.status(question).await.expect_err("longer than any question");
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let plan = Split { bound: "b".repeat(64 << 10), ..Split::default() };
        let refused = JoinRequest { split: Some(plan.clone()), ..request("long", 0, 1, HANG) };
        let refused = client.join(refused).await.expect_err("longer than any request that resumes nothing");
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        let refused =
            JoinRequest { split: Some(plan), resume: Some(Resume::default()), ..request("long", 0, 1, HANG) };
        let refused = client.join(refused).await.expect_err("the rest is as long");
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
        // The largest that a worker remembers: 64 shards of 16384 slots.
        let resumed = |shards: usize| Resume {
            elements: 256,
            in_flight: 16_384,
            completed: vec![Counts { exchanges: vec![u32::MAX; 16_384] }; shards],
            ..Resume::default()
        };
        let ask = |shards| JoinRequest { resume: Some(resumed(shards)), ..request("long", 0, 1, HANG) };
        let answer = client.join(ask(64)).await.expect("an answer").into_inner();
        // Of another number of shards than this switch has.
        assert!(matches!(answer.outcome, Some(Outcome::Refusal(_))), "{answer:?}");
        let refused = client.join(ask(128)).await.expect_err("longer than any memory");
        assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    });
}

#[test]
fn who_calls_too_often_waits() {
    /// At once, and in a second after that.
    const CALLS: (u32, u32) = (8192, 4096);
    const CALLERS: u32 = 256;
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let took = runtime.block_on(async {
        let client = control(switch.address());
        let began = Instant::now();
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..CALLERS {
            let mut client = client.clone();
            callers.spawn(async move {
                for _ in 0..(CALLS.0 + CALLS.1) / CALLERS {
                    let question = StatusRequest { job: Some(String::new()), ..StatusRequest::default() };
                    client.status(question).await.expect("nobody is refused");
                }
            });
        }
        callers.join_all().await;
        began.elapsed()
    });
    // It may be slower for other reasons, but not faster.
    assert!(took > Duration::from_millis(990), "{took:?}");
}

/// The value of a rank's series; `None` when there is none.
fn of_rank(text: &str, name: &str, job: &str, rank: usize) -> Option<f64> {
    let series = format!("{name}{{job_name=\"{job}\",rank=\"{rank}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
}

/// Asks for the metrics until `found` finds what it looks for.
fn scrape_until<T>(address: SocketAddr, what: &str, mut found: impl FnMut(&str) -> Option<T>) -> T {
    let began = std::time::Instant::now();
    loop {
        let text = fetch(address, "/metrics");
        if let Some(found) = found(&text) {
            return found;
        }
        assert!(began.elapsed() < HANG, "never {what}: {text}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_late_rank_is_seen_in_its_own_series_which_go_when_it_leaves() {
    const SLOTS: u16 = 32;
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_secs(1));
    let address = switch.address();
    let mut sessions = connect_all(&switch, "late", 3, |config| config.agreed.in_flight = Some(SLOTS));
    // One exchange in each slot, without a probe.
    let chunk = usize::from(sessions[0].job().expect("open").elements());
    let tensor = || vec![1_i32; usize::from(SLOTS) * chunk];

    let began = std::time::Instant::now();
    let first: Vec<_> = sessions[..2].iter().map(|session| submit(session, tensor(), Op::Sum)).collect();
    let waiting = |text: &str, rank| of_rank(text, "fanin_waiting", "late", rank);
    scrape_until(address, "waiting for rank 2 alone", |text| {
        let waiting = [0, 1, 2].map(|rank| waiting(text, rank).expect("a series"));
        (waiting == [0.0, 0.0, f64::from(SLOTS)]).then_some(())
    });
    let punctual = began.elapsed();
    let all_but_one_here = std::time::Instant::now();
    while all_but_one_here.elapsed() <= punctual * 2 {
        thread::sleep(Duration::from_millis(5));
    }
    let late = all_but_one_here.elapsed();
    let last = submit(&sessions[2], tensor(), Op::Sum);
    assert!(first.into_iter().chain([last]).all(|sum| sum.wait().is_ok()));

    let text = fetch(address, "/metrics");
    let lateness =
        [0, 1, 2].map(|rank| of_rank(&text, "fanin_lateness_seconds_total", "late", rank).expect("a series"));
    let slots = f64::from(SLOTS);
    assert!(lateness[0].max(lateness[1]) <= slots * punctual.as_secs_f64(), "{lateness:?}");
    assert!(lateness[2] >= slots * late.as_secs_f64(), "{lateness:?}");
    assert_eq!(metric(&text, "fanin_job_results_total{job_name=\"late\"}"), u64::from(SLOTS));
    assert_eq!(metric(&text, "fanin_job_in_flight{job_name=\"late\"}"), u64::from(SLOTS));

    // Packets that were sent again measure nothing, so there may have to be some more sums.
    scrape_until(address, "a round trip of each rank", |text| {
        let sums: Vec<_> = sessions.iter().map(|session| submit(session, tensor(), Op::Sum)).collect();
        assert!(sums.into_iter().all(|sum| sum.wait().is_ok()));
        let trips = (0..3).map(|rank| of_rank(text, "fanin_round_trip_seconds", "late", rank));
        let trips: Vec<f64> = trips.collect::<Option<_>>()?;
        assert!(trips.iter().all(|trip| *trip > 0.0), "{trips:?}");
        Some(())
    });

    sessions.remove(1).close();
    let text = fetch(address, "/metrics");
    for name in ["fanin_waiting", "fanin_round_trip_seconds", "fanin_lateness_seconds_total"] {
        let here = [0, 1, 2].map(|rank| of_rank(&text, name, "late", rank).is_some());
        assert_eq!(here, [true, false, true], "{name}");
    }
    drop(sessions);
    let text = fetch(address, "/metrics");
    assert!(!text.contains("job_name"), "{text}");
}

#[test]
fn a_job_cannot_forge_series_by_its_name() {
    let switch = switch();
    let _session = connect_all(&switch, "a\"} 1 \\", 1, |_| {});
    let text = fetch(switch.address(), "/metrics");
    assert!(text.contains("fanin_job_in_flight{job_name=\"a\\\"} 1 \\\\\"} "), "{text}");
}

#[test]
fn noise_on_both_ports_changes_no_sum_and_is_counted() {
    let switch = switch();
    let address = switch.address();
    let sessions = connect_all(&switch, "noise", 2, |_| {});
    let stop = Arc::new(AtomicBool::new(false));
    let noise = {
        let stop = Arc::clone(&stop);
        thread::spawn(move || {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            while !stop.load(Ordering::Relaxed) {
                let bytes: [u8; 64] = rand::random();
                let _ = socket.send_to(&bytes[..usize::from(bytes[0]) % 64], address);
                if let Ok(mut connection) = TcpStream::connect(address) {
                    let _ = connection.write_all(&bytes);
                }
                thread::sleep(Duration::from_millis(1));
            }
        })
    };
    for round in 0..20 {
        let sums: Vec<_> =
            sessions.iter().map(|session| submit(session, vec![round; 50_000], Op::Sum)).collect();
        assert!(sums.into_iter().all(|sum| sum.wait() == Ok(vec![2 * round; 50_000])));
    }
    stop.store(true, Ordering::Relaxed);
    noise.join().expect("no panic");
    assert!(metric(&fetch(address, "/metrics"), "fanin_packets_dropped_total{reason=\"malformed\"}") > 0);
}

#[test]
fn every_reason_to_drop_a_packet_is_counted_and_changes_no_sum() {
    let switch = switch();
    let sessions = connect_all(&switch, "dropped", 2, |config| {
        config.agreed.in_flight = Some(32);
        config.wire_dtype = Some(WireDtype::Bfloat16);
    });
    let job = terms::<RankTerms>(&sessions[0]).config;
    let preamble = Preamble {
        kind: Kind::Update,
        job: job.id,
        generation: job.generation,
        worker: WorkerId(0),
        shard: ShardId(0),
    };
    // Of slots that the sum below, of one chunk, does not use.
    let collective = collective(1);
    let header = SlotHeader { slot: SlotIndex(31), next_exponent: 0, exchange: 0, chunk: 0, collective };
    let packet = |preamble: Preamble, header: SlotHeader, elements: usize| {
        let mut bytes = vec![0; packet_bytes(elements)];
        SlotPacket::write(&mut bytes, job.key, &preamble, &header, elements, |_| {});
        bytes
    };
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let send = |bytes: Vec<u8>| socket.send_to(&bytes, switch.address()).expect("sent");
    let dropped = |reason: Reason| {
        let name = format!("fanin_packets_dropped_total{{reason=\"{}\"}}", reason.name());
        metric(&fetch(switch.address(), "/metrics"), &name)
    };
    let send_and_see = |reason: Reason, bytes: Vec<u8>| {
        let (before, began) = (dropped(reason), std::time::Instant::now());
        send(bytes);
        while dropped(reason) == before {
            assert!(began.elapsed() < HANG, "{} is not counted", reason.name());
            thread::sleep(Duration::from_millis(5));
        }
    };

    let mut version = packet(preamble, header, 0);
    version[2] = fanin_wire::VERSION + 1;
    send_and_see(Reason::Malformed, vec![0; 5]);
    send_and_see(Reason::Version, version);
    let with = |preamble| packet(preamble, header, 0);
    send_and_see(Reason::UnknownJob, with(Preamble { job: JobId(job.id.0 ^ 1), ..preamble }));
    let later = Generation(job.generation.0 + 1);
    send_and_see(Reason::Generation, with(Preamble { generation: later, ..preamble }));
    send_and_see(Reason::OutOfRange, with(Preamble { worker: WorkerId(2), ..preamble }));
    send_and_see(Reason::OutOfRange, packet(preamble, SlotHeader { slot: SlotIndex(32), ..header }, 0));
    let mut forged = packet(preamble, header, 0);
    forged[16] ^= 1;
    send_and_see(Reason::Forged, forged);
    send_and_see(Reason::ChunkLength, packet(preamble, header, 256));
    send_and_see(Reason::Unexpected, with(Preamble { kind: Kind::Result, ..preamble }));
    let ahead = SlotHeader { exchange: 1, ..header };
    send_and_see(Reason::Ahead, packet(preamble, ahead, 0));
    let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![3_i32; 10], Op::Sum)).collect();
    assert!(sums.into_iter().all(|sum| sum.wait() == Ok(vec![6; 10])));

    // From here on the packets count as rank 0's own.
    send(packet(preamble, header, 0));
    send_and_see(Reason::Duplicate, packet(preamble, header, 0));
    let stale = SlotHeader { exchange: 0_u32.wrapping_sub(2), ..header };
    send_and_see(Reason::Stale, packet(preamble, stale, 0));
    let other = Preamble { worker: WorkerId(1), ..preamble };
    let bfloat16 = |preamble: Preamble, exponent: i16| {
        let wire_dtype = WireDtype::Bfloat16;
        let collective = Collective { dtype: Dtype::Float32, wire_dtype, ..collective };
        let header = SlotHeader { slot: SlotIndex(30), collective, ..header };
        let mut bytes = vec![0; chunk_packet_bytes(job.elements.into(), wire_dtype)];
        let elements = job.chunk_elements(Dtype::Float32, usize::MAX);
        SlotPacket::write(&mut bytes, job.key, &preamble, &header, elements, |payload| {
            begin_bfloat16_payload(payload, exponent);
        });
        bytes
    };
    send(bfloat16(preamble, 1));
    send_and_see(Reason::Exponent, bfloat16(other, 2));
    send_and_see(Reason::Aborted, packet(other, SlotHeader { chunk: 1, ..header }, 0));
    let of_others = [
        Reason::Foreign,
        Reason::NoRoom,
        Reason::Overlap,
        Reason::OutboxFull,
        Reason::Unannounced,
        Reason::Unplanned,
    ];
    assert!(Reason::ALL.iter().all(|reason| dropped(*reason) > 0 || of_others.contains(reason)));
}
