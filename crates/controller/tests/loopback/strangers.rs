//! What somebody outside a job can do to it who reaches its switch: nothing. He may know the job's
//! name, id, generation and ranks; he does not have its key.

use std::net::{SocketAddr, UdpSocket};

use fanin_protocol::{atp, switchml};
use fanin_udp::Membership;
use fanin_wire::{
    Abort, AbortReason, Collective, Directions, Flags, GradientHeader, GradientPacket, Key, Kind, Pattern,
    Preamble, Rank, ShardId, SlotHeader, SlotIndex, SlotPacket, WireDtype, WorkerId, fragment_packet_bytes,
    packet_bytes,
};
use tonic::Code;
use tonic::codegen::Bytes;
use tonic::codegen::http::Request;

use super::atp::{rack, ranks, server, summing, sums_are_exact};
use super::http::{fetch, metric};
use super::*;
use fanin_controller::JobStatusState;
use fanin_controller::proto::split::Share;
use fanin_controller::proto::{
    AttendRequest, HeartbeatRequest, JoinRequest, LeaveRequest, Place, Split, join_reply::Outcome,
};

/// Calls in the name of every rank, without its secret and with what a stranger might take for it.
fn impersonate(address: SocketAddr, job: &Membership) -> u64 {
    let (job_id, generation) = (job.id().0, u32::from(job.generation().0));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut denied = 0;
    runtime.block_on(async {
        let mut client = control(address);
        for rank in 0..2 {
            // The last is another rank's: who is in the job is not all of its ranks.
            for secret in [0, u64::from(job_id), job.key().secret_of(Rank(1 - rank))] {
                let rank = rank.into();
                let beat = HeartbeatRequest {
                    job_id,
                    rank,
                    generation,
                    smoothed_rtt_ns: Some(1),
                    secret,
                    ..HeartbeatRequest::default()
                };
                let leave = LeaveRequest { job_id, rank, passed_on: 0, secret };
                let attend = AttendRequest { job_id, rank, generation, passed_on: 0, secret, gone: false };
                let gone = AttendRequest { gone: true, ..attend };
                let stream = tokio_stream::iter([attend, gone]);
                for refused in [
                    client.heartbeat(beat).await.map(drop).expect_err("refused"),
                    client.attend(stream).await.map(drop).expect_err("refused"),
                    client.leave(leave).await.map(drop).expect_err("refused"),
                ] {
                    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
                    let named = format!("a call for rank {rank} without its secret");
                    assert!(refused.message().starts_with(&named), "{refused}");
                    denied += 1;
                }
            }
        }
    });
    denied
}

#[test]
fn a_stranger_speaks_for_no_rank() {
    let switch = switch();
    let sessions = connect_all(&switch, "spoken for", 2, |_| {});
    let job = sessions[0].job().expect("it runs");
    let mut denied = 0;
    summing(&sessions, || denied = impersonate(switch.address(), &job));
    let metrics = fetch(switch.address(), "/metrics");
    assert_eq!(metric(&metrics, "fanin_denied_total"), denied, "each is counted");
    // Nobody has left, so the job ends with the second to go.
    let (job, generation) = (job.id(), job.generation());
    for mut session in sessions {
        let after = session.job().expect("it runs");
        assert_eq!((after.id(), after.generation()), (job, generation));
        session.close();
    }
}

#[test]
fn a_stranger_speaks_for_no_rank_at_a_rack_either() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("spoken for", &[rack.address(); 2]);
    let job = sessions[0].job().expect("it runs");
    summing(&sessions, || {
        impersonate(rack.address(), &job);
        impersonate(server.address(), &job);
    });
}

/// Sends packets that are right but for their tags, until `address` has counted them, and as often
/// as there are keys to guess.
fn forge(address: SocketAddr, packets: impl Fn(Key) -> Vec<Vec<u8>>) {
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let counter = "fanin_packets_dropped_total{reason=\"forged\"}";
    let began = std::time::Instant::now();
    let mut guess = 0;
    while metric(&fetch(address, "/metrics"), counter) < 100 {
        assert!(began.elapsed() < HANG, "forged packets are not counted");
        for packet in packets(Key::new(guess)) {
            stranger.send_to(&packet, address).expect("sent");
        }
        guess += 1;
    }
    // Not even an answer that says so.
    stranger.set_nonblocking(true).expect("a socket");
    assert!(stranger.recv(&mut [0; 9000]).is_err(), "a stranger is answered");
}

#[test]
fn a_strangers_packets_have_no_effect_on_a_live_job() {
    let switch = switch();
    let sessions = connect_all(&switch, "live", 2, |_| {});
    let job = terms::<switchml::RankTerms>(&sessions[0]).config;
    let packets = |key| {
        let mut packets = Vec::new();
        for (kind, worker, exchange, elements) in [
            (Kind::Update, 0, 0, 0),
            (Kind::Update, 0, 0, usize::from(job.elements)),
            (Kind::Update, 1, 1, usize::from(job.elements)),
            (Kind::Restore, 1, 7, usize::from(job.elements)),
        ] {
            let (worker, shard) = (WorkerId(worker), ShardId(0));
            let preamble = Preamble { kind, job: job.id, generation: job.generation, worker, shard };
            let (slot, collective) = (SlotIndex(exchange as u16), collective(1000 + exchange));
            let header = SlotHeader { slot, next_exponent: 0, exchange, chunk: 0, collective };
            let mut bytes = vec![0; packet_bytes(elements)];
            SlotPacket::write(&mut bytes, key, &preamble, &header, elements, |payload| payload.fill(1));
            packets.push(bytes);
        }
        packets
    };
    summing(&sessions, || forge(switch.address(), packets));
}

#[test]
fn a_strangers_packets_have_no_effect_on_a_live_job_of_atp() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("live", &[rack.address(); 2]);
    let atp::RankTerms { config, directions, .. } = terms(&sessions[0]);
    let at_server = Directions { level: 1, ..directions };
    let packets = |key, directions: Directions| {
        let preamble = Preamble {
            kind: Kind::Gradient,
            job: config.id,
            generation: config.generation,
            worker: WorkerId::ALL,
            shard: ShardId(0),
        };
        let reason = AbortReason::Expelled(Rank(0));
        let abort = Abort { preamble: Preamble { kind: Kind::Abort, ..preamble }, reason };
        let mut packets = vec![abort.to_bytes(key).to_vec()];
        for (sequence, bit, is_ack, restore) in [
            (0, 0, false, false),
            (1, 1, false, false),
            (2, 31, false, false),
            (3, 0, true, false),
            (4, 0, false, true),
        ] {
            let mut directions = directions;
            directions.bitmaps[0] = 1 << bit;
            let collective = Collective {
                sequence: 9,
                dtype: Dtype::Int32,
                op: Op::Sum,
                pattern: Pattern::AllReduce,
                elements: 9,
                wire_dtype: WireDtype::SharedExponent,
            };
            let header = GradientHeader {
                flags: Flags { is_ack, restore, resend: restore, ..Flags::default() },
                directions,
                sequence,
                aggregator_index: sequence as u32,
                fragment: 0,
                collective,
                exponent: GradientHeader::STATIC_FACTOR,
                next_exponent: 0,
            };
            let elements = usize::from(config.elements);
            let mut bytes = vec![0; fragment_packet_bytes::<Directions>(elements)];
            GradientPacket::write(&mut bytes, key, &preamble, &header, elements, |payload| payload.fill(1));
            packets.push(bytes);
        }
        packets
    };
    summing(&sessions, || {
        forge(rack.address(), |key| packets(key, directions));
        forge(server.address(), |key| packets(key, at_server));
    });
}

/// Sends a packet again that a rank sent, until `address` has counted that it came from elsewhere;
/// whether something comes back.
fn replay(address: SocketAddr, packet: &[u8]) -> bool {
    let stranger = UdpSocket::bind("127.0.0.2:0").expect("of this machine");
    stranger.set_nonblocking(true).expect("a socket");
    let is_answered = || stranger.recv(&mut [0; 9000]).is_ok();
    let foreign = || metric(&fetch(address, "/metrics"), "fanin_packets_dropped_total{reason=\"foreign\"}");
    let (before, began) = (foreign(), std::time::Instant::now());
    while foreign() < before + 20 && began.elapsed() < HANG {
        stranger.send_to(packet, address).expect("sent");
        if is_answered() {
            return true;
        }
    }
    is_answered() || foreign() < before + 20
}

#[test]
fn a_packet_that_is_sent_again_from_elsewhere_diverts_nothing() {
    let switch = switch();
    let sessions = connect_all(&switch, "caught", 2, |_| {});
    let job = terms::<switchml::RankTerms>(&sessions[0]).config;
    // Of an exchange that is long over.
    let (kind, worker, shard) = (Kind::Update, WorkerId(0), ShardId(0));
    let preamble = Preamble { kind, job: job.id, generation: job.generation, worker, shard };
    let collective = collective(1);
    let header =
        SlotHeader { slot: SlotIndex(0), next_exponent: 0, exchange: u32::MAX, chunk: 0, collective };
    let mut packet = vec![0; packet_bytes(0)];
    SlotPacket::write(&mut packet, job.key, &preamble, &header, 0, |_| {});
    let mut is_diverted = true;
    summing(&sessions, || is_diverted = replay(switch.address(), &packet));
    assert!(!is_diverted, "what is for a rank goes to a stranger");
}

#[test]
fn a_packet_of_atp_that_is_sent_again_from_elsewhere_diverts_nothing() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("caught", &[rack.address(); 2]);
    let atp::RankTerms { config, directions, .. } = terms(&sessions[0]);
    let packet = |directions| {
        let (kind, worker) = (Kind::Gradient, WorkerId::ALL);
        let (job, generation, shard) = (config.id, config.generation, ShardId(0));
        let preamble = Preamble { kind, job, generation, worker, shard };
        let collective = collective(1);
        let header = GradientHeader {
            flags: Flags { resend: true, ..Flags::default() },
            directions,
            sequence: 0,
            aggregator_index: 0,
            fragment: 0,
            collective,
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: 0,
        };
        let mut bytes = vec![0; fragment_packet_bytes::<Directions>(config.elements.into())];
        let elements = config.elements.into();
        GradientPacket::write(&mut bytes, config.key, &preamble, &header, elements, |payload| {
            payload.fill(0)
        });
        bytes
    };
    sums_are_exact(&sessions, 1);
    let mut is_diverted = [true; 2];
    summing(&sessions, || {
        is_diverted = [
            replay(rack.address(), &packet(directions)),
            replay(server.address(), &packet(Directions { level: 1, ..directions })),
        ];
    });
    assert_eq!(is_diverted, [false; 2], "what is for a rank goes to a stranger");
}

/// Asks for twice as many jobs as may wait here of one address, and sees that half of them are
/// refused, and that another address has room.
fn crowd(switch: SocketAddr, of_one_max: usize, request: impl Fn(&str, u32) -> JoinRequest) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let client = control(switch);
        let mut waiting = tokio::task::JoinSet::new();
        for job in 0..2 * of_one_max {
            let (mut client, request) = (client.clone(), request(&format!("{job}"), 2));
            waiting.spawn(async move { client.join(request).await.map(drop) });
        }
        for _ in 0..of_one_max {
            let refused = waiting.join_next().await.expect("all asked").expect("no panic");
            let refused = refused.expect_err("refused");
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        }
        // 127.0.0.2 is this machine's, too.
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 2], 0).into()).expect("of this machine");
        let stream = socket.connect(switch).await.expect("a switch");
        let stream = Trust::default().connect(&switch.to_string(), stream).await.expect("a switch");
        let mut stream = Some(hyper_util::rt::TokioIo::new(stream));
        let connector = tower::service_fn(move |_: tonic::codegen::http::Uri| {
            let stream = stream.take();
            async move { stream.ok_or_else(|| std::io::Error::other("one connection")) }
        });
        let endpoint = tonic::transport::Endpoint::from_static("http://switch");
        let mut other =
            ControlClient::new(endpoint.connect_with_connector(connector).await.expect("a switch"));
        let reply = other.join(request("other", 1)).await.expect("an answer").into_inner();
        assert!(matches!(reply.outcome, Some(Outcome::Admission(_))), "{reply:?}");
        // Who hangs up makes room.
        waiting.shutdown().await;
    });
}

#[test]
fn one_address_leaves_room_to_others_that_join_through_the_same_switch() {
    let server = server();
    let rack = rack(server.address());
    crowd(rack.address(), 64, |job, world_size| request_of("atp", job, 0, world_size));
}

#[test]
fn one_address_does_not_fill_the_switch_with_jobs_that_wait() {
    let switch = switch();
    crowd(switch.address(), 128, |job, world_size| request(job, 0, world_size, HANG));
    let gathers = |job: &fanin_controller::JobStatus| matches!(job.state, JobStatusState::Gathering { .. });
    let otherwise = "the switch does not hear that they are gone";
    wait_until(switch.address(), otherwise, |status| !status.jobs.iter().any(gathers));
    let sessions = connect_all(&switch, "later", 2, |_| {});
    assert_eq!(sessions.len(), 2);
}

#[test]
fn a_switch_full_of_jobs_that_tell_a_lot_still_says_how_it_fares() {
    let switch = switch_with(|config| config.heartbeat_timeout = HANG);
    let share = Share { service: "s".repeat(100), share: 0.5, host: None };
    let ask = |job: &str, rank, shares| JoinRequest {
        settings: settings(&Agreed { in_flight: Some(1), ..Agreed::default() }),
        mtu_bytes: 1500,
        split: Some(Split { shares: vec![share.clone(); shares], ..Split::default() }),
        place: Some(Place { ranks: vec![u32::MAX; 1024], ..Place::default() }),
        ..request(job, rank, 2, HANG)
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let client = control(switch.address());
        for job in 0..256 {
            let (mut one, mut other) = (client.clone(), client.clone());
            // As much as is kept, and as much as a request can hold.
            let name = format!("{job}");
            let (one, other) = tokio::join!(one.join(ask(&name, 0, 100)), other.join(ask(&name, 1, 500)));
            for reply in [one, other] {
                let outcome = reply.expect("an answer").into_inner().outcome;
                assert!(matches!(outcome, Some(Outcome::Admission(_))), "{outcome:?}");
            }
        }
    });
    let status = fanin_controller::switch_status(&switch.address().to_string(), HANG).expect("a status");
    assert_eq!(status.jobs.len(), 256);
}

#[test]
fn the_secret_part_of_a_name_is_not_told_while_the_job_may_be_joined() {
    let switch = switch();
    let name = "train#5f0c9a3e";
    let config = |rank| config(&switch, name, rank, 2);
    let first = config(0);
    let waiting = thread::spawn(move || Session::connect(first));
    let address = switch.address().to_string();
    let began = std::time::Instant::now();
    let shown = loop {
        let status = fanin_controller::switch_status(&address, HANG).expect("a status");
        if let [job] = &status.jobs[..] {
            break job.name.clone();
        }
        assert!(began.elapsed() < HANG, "the rank does not wait");
    };
    assert_eq!(shown, "train#...");
    let second = Session::connect(config(1)).expect("admitted");
    let first = waiting.join().expect("no panic").expect("admitted");
    let status = fanin_controller::switch_status(&address, HANG).expect("a status");
    assert_eq!(status.jobs[0].name, name, "it runs, and takes nobody in");
    drop((first, second));
}

/// What is sent first of a request to join of which nobody sends the rest, and the answer.
async fn begin_to_join(calls: &mut h2::client::SendRequest<Bytes>, bytes: usize) -> u16 {
    let request = Request::post("http://switch/fanin.v1.Control/Join")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .expect("a request");
    let mut ready = calls.clone().ready().await.expect("a connection");
    let (answer, mut body) = ready.send_request(request, false).expect("a stream");
    let mut prefix = vec![0];
    prefix.extend((6_u32 << 20).to_be_bytes());
    prefix.resize(bytes, 0);
    body.send_data(prefix.into(), false).expect("an open stream");
    let answer = answer.await.expect("an answer");
    let code = answer.headers().get("grpc-status").expect("a status").to_str().expect("a number");
    code.parse().expect("a number")
}

#[test]
fn requests_that_are_begun_take_so_much_memory_of_an_address_and_are_given_up() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let codes = runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(switch.address()).await.expect("a switch");
        let stream = Trust::default().connect("switch", stream).await.expect("a switch");
        let (calls, connection) = h2::client::handshake(stream).await.expect("a switch");
        tokio::spawn(connection);
        let mut begun = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let mut calls = calls.clone();
            begun.spawn(async move { begin_to_join(&mut calls, 5 << 20).await });
        }
        // Somebody else joins meanwhile.
        let mut client = control(switch.address());
        let reply = client.join(request("meanwhile", 0, 1, HANG)).await.expect("an answer").into_inner();
        assert!(matches!(reply.outcome, Some(Outcome::Admission(_))), "{reply:?}");
        tokio::time::timeout(HANG, begun.join_all()).await.expect("each has an end")
    });
    // 64 MiB are for requests on their way from one address; who sent a whole one in 10 s would be heard.
    let [exhausted, late] = [Code::ResourceExhausted, Code::DeadlineExceeded]
        .map(|code| codes.iter().filter(|other| **other == code as u16).count());
    assert!(exhausted >= 16 - 12 && exhausted + late == 16, "{codes:?}");
}

#[test]
fn a_stream_that_never_says_whose_it_is_ends() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let ended = runtime.block_on(async {
        let mut client = control(switch.address());
        tokio::time::timeout(HANG, client.attend(tokio_stream::pending())).await
    });
    assert_eq!(ended.expect("it ends").map(drop).expect_err("of nobody").code(), Code::DeadlineExceeded);
}

#[test]
fn connections_that_ask_for_nothing_keep_no_rank_out() {
    fanin_controller::raise_descriptors();
    let switch = switch();
    let connect = |_| std::net::TcpStream::connect(switch.address()).expect("it listens");
    let silent: Vec<_> = (0..600).map(connect).collect();
    let sessions = connect_all(&switch, "later", 2, |_| {});
    assert_eq!(sessions.len(), 2);
    drop(silent);
}
