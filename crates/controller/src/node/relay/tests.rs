use std::sync::mpsc::channel;
use std::thread;

use fanin_protocol::control::Agreed;
use fanin_tls::Trust;
use fanin_wire::WireDtype;

use super::*;
use crate::control_channel::control_calls;
use crate::node::{SwitchServer, SwitchServerConfig};
use crate::proto::heartbeat_reply::State;
use crate::protocols;

/// Longer than anything here takes on a busy machine; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

fn atp() -> &'static dyn OnSockets {
    protocols::named("atp").expect("a protocol")
}

/// A root of ATP and a switch before it.
fn chain() -> (SwitchServer, RackServer) {
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = SwitchServerConfig { protocol: atp(), ..SwitchServerConfig::new(local) };
    let server = SwitchServer::start(config).expect("a free port");
    let config = RackServerConfig::new(atp(), local, server.address().to_string());
    let switch = RackServer::start(config).expect("a free port");
    (server, switch)
}

/// Of the one rank of a job.
fn join(job: &str) -> proto::JoinRequest {
    let agreed = Agreed { wire_dtype: WireDtype::SharedExponent, ..Agreed::default() };
    proto::JoinRequest {
        job: job.into(),
        world_size: 1,
        mtu_bytes: 1500,
        wire_version: VERSION.into(),
        protocol: "atp".into(),
        settings: agreed.values().into_iter().map(Into::into).collect(),
        patience_ms: HANG.as_millis() as u64,
        ..proto::JoinRequest::default()
    }
}

#[test]
fn strangers_do_not_use_up_the_calls_of_ranks() {
    let (_server, switch) = chain();
    let joined = tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let mut client = control_calls(switch.address(), &Trust::default());
        client.join(join("runs")).await.expect("an answer").into_inner()
    });
    let Some(proto::join_reply::Outcome::Admission(admission)) = joined.outcome else { panic!("{joined:?}") };
    let (job, rank) = (JobId(admission.job_id), Rank(0));
    let relay = &switch.relay;
    let calls = |job, secret| (0..100_000).map(move |_| relay.authenticate(job, rank, secret));
    let refused = calls(JobId(job.0 ^ 1), 0).find_map(Result::err).expect("one too many");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let secret = key(&admission.key).expect("a key").secret_of(rank);
    assert!(calls(job, secret).all(|answer| answer.is_ok()));
}

#[test]
fn heartbeats_are_passed_on_while_the_data_path_answers_nobody() {
    let (server, switch) = chain();
    let callers = tokio::runtime::Runtime::new().expect("a runtime");
    callers.block_on(async {
        let mut client = control_calls(switch.address(), &Trust::default());
        let joined = client.join(join("runs")).await.expect("an answer").into_inner();
        let Some(proto::join_reply::Outcome::Admission(admission)) = joined.outcome else {
            panic!("{joined:?}")
        };

        let (open, gate) = channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (holds, held) = channel();
        let driver = Arc::clone(&switch.relay.driver);
        let holding = thread::spawn(move || {
            driver.occupy(Arc::new(move || {
                holds.send(()).expect("the test waits");
                // Until the other end is dropped.
                let _ = gate.lock().expect("one shard").recv();
            }));
        });
        held.recv().expect("its thread is held");
        // A job whose route the data path is to learn, questions how it fares, and a job that it is
        // to forget.
        let mut waiting = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let mut client = client.clone();
            waiting.spawn(async move { client.status(proto::StatusRequest::default()).await.is_ok() });
        }
        let joining = {
            let mut client = client.clone();
            let request = join("joins");
            tokio::spawn(async move { client.join(request).await })
        };
        let mut observer = control_calls(server.address(), &Trust::default());
        let both_run = async {
            while observer
                .status(proto::StatusRequest::default())
                .await
                .expect("a status")
                .into_inner()
                .jobs
                .len()
                < 2
            {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(HANG, both_run).await.expect("the server admits it");
        for _ in 0..20 {
            let message = proto::HeartbeatRequest {
                job_id: admission.job_id,
                generation: admission.generation,
                secret: key(&admission.key).expect("a key").secret_of(Rank(0)),
                ..proto::HeartbeatRequest::default()
            };
            let reply = tokio::time::timeout(HANG, client.heartbeat(message)).await;
            let reply = reply.expect("an answer while the data path is busy").expect("alive").into_inner();
            assert!(matches!(reply.state, Some(State::Alive(_))), "{reply:?}");
        }
        assert!(!joining.is_finished(), "no rank is told of a job that the data path does not know");
        assert!(waiting.try_join_next().is_none());
        drop(open);
        let all = async {
            assert!(waiting.join_all().await.into_iter().all(|answered| answered));
            let outcome = joining.await.expect("no panic").expect("an answer").into_inner().outcome;
            assert!(matches!(outcome, Some(proto::join_reply::Outcome::Admission(_))), "{outcome:?}");
        };
        tokio::time::timeout(HANG, all).await.expect("answers");
        holding.join().expect("no panic");
    });
}
