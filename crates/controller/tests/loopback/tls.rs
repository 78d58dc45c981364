//! Who listens to control, who stands in between, and who has no secret.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fanin_controller::{Acceptor, Identity, RackServer, RackServerConfig, Secret, trusted_status};
use fanin_wire::{Key, Rank};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;
use tonic::transport::Endpoint;

use super::http::fetch;
use super::*;
use fanin_controller::proto::join_reply::Outcome;
use fanin_controller::proto::{AttendRequest, HeartbeatRequest, StatusRequest};

/// All that passes between two ends, as somebody reads it who listens.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<u8>>>);

impl Heard {
    fn has(&self, words: &[u8]) -> bool {
        self.0.lock().expect("no panic").windows(words.len()).any(|heard| heard == words)
    }

    /// Passes what `from` says on to `to`.
    async fn listen(self, mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin) {
        let mut buffer = vec![0; 1 << 14];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            self.0.lock().expect("no panic").extend_from_slice(&buffer[..length]);
            if to.write_all(&buffer[..length]).await.is_err() {
                return;
            }
        }
    }
}

/// Where all is heard that is said to the switch.
async fn tapped(switch: SocketAddr, heard: Heard) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let switch = TcpStream::connect(switch).await.expect("a switch");
            let (from_client, to_client) = client.into_split();
            let (from_switch, to_switch) = switch.into_split();
            tokio::spawn(heard.clone().listen(from_client, to_switch));
            tokio::spawn(heard.clone().listen(from_switch, to_client));
        }
    });
    address
}

#[test]
fn who_listens_to_control_hears_neither_key_nor_secret_nor_name() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let heard = Heard::default();
        let mut client = control(tapped(switch.address(), heard.clone()).await);
        let reply = client.join(request("overheard", 0, 1, HANG)).await.expect("an answer").into_inner();
        let Some(Outcome::Admission(admission)) = reply.outcome else { panic!("{reply:?}") };
        let key = Key::from_bytes(&admission.key).expect("17 bytes");
        let secret = key.secret_of(Rank(0));
        let (job_id, generation) = (admission.job_id, admission.generation);
        let beat = HeartbeatRequest { job_id, generation, secret, ..HeartbeatRequest::default() };
        client.heartbeat(beat).await.expect("a member");
        let attends = AttendRequest { job_id, generation, secret, ..AttendRequest::default() };
        let asks = tokio_stream::StreamExt::chain(tokio_stream::once(attends), tokio_stream::pending());
        let mut said = client.attend(asks).await.expect("a member").into_inner();
        said.message().await.expect("it lives").expect("something");
        let status = client.status(StatusRequest::default()).await.expect("an answer").into_inner();
        assert!(status.jobs.iter().any(|job| job.name.starts_with("overheard")), "{status:?}");
        assert!(!heard.0.lock().expect("no panic").is_empty());
        let words: [&[u8]; 5] = [
            b"overheard",
            &key.secret().to_le_bytes(),
            &secret.to_le_bytes(),
            b"HTTP/2.0",
            b"/fanin.v1.Control",
        ];
        for words in words {
            assert!(!heard.has(words), "{:?} was heard", String::from_utf8_lossy(words));
        }
    });
}

#[test]
fn in_the_clear_a_switch_says_how_it_fares_and_nothing_else() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let told = runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{}", switch.address())).expect("an address");
        let mut old = ControlClient::new(endpoint.connect().await.expect("a switch"));
        old.join(request("old", 0, 1, HANG)).await.expect_err("in the clear")
    });
    assert_eq!(told.code(), Code::FailedPrecondition, "{told}");
    assert!(told.message().contains("encrypted") && told.message().contains("same version"), "{told}");
    assert!(fetch(switch.address(), "/healthz").ends_with("\r\n\r\nok\n"));
    assert!(fetch(switch.address(), "/fanin.v1.Control/Join").starts_with("HTTP/1.1 426 "));
    assert!(fetch(switch.address(), "/metrics").contains("# EOF"));
}

/// A folder with a secret in it, and another one.
fn secrets() -> (TempDir, [PathBuf; 2]) {
    let folder = TempDir::new().expect("a folder");
    let files = ["one", "other"].map(|name| {
        let file = folder.path().join(name);
        fs::write(&file, format!("the secret called {name}\n")).expect("written");
        file
    });
    (folder, files)
}

fn knows(secret: &Path) -> Trust {
    Trust::read(None, Some(secret)).expect("a secret")
}

fn of_those_who_know(secret: &Path) -> Acceptor {
    Acceptor::new(&Identity::of_process().expect("a key"), Some(Secret::read(secret).expect("a secret")))
}

fn untrusted<T>(found: Result<T, SessionError>) -> String {
    match found {
        Err(SessionError::Untrusted { cause, .. }) => cause,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it is trusted"),
    }
}

#[test]
fn a_switch_with_a_secret_serves_those_alone_who_know_it_and_they_speak_to_no_other() {
    let (_folder, [secret, other]) = secrets();
    let listen = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
    let with = SwitchServer::start_behind(listen, of_those_who_know(&secret)).expect("a free port");
    let without = switch();
    let address = |switch: &SwitchServer| switch.address().to_string();
    assert!(trusted_status(&address(&with), HANG, &knows(&secret)).is_ok());
    let refused = untrusted(switch_status(&address(&with), HANG));
    assert!(refused.contains("asks for a secret") && refused.contains("FANIN_SECRET_FILE"), "{refused}");
    let refused = untrusted(trusted_status(&address(&with), HANG, &knows(&other)));
    assert!(refused.contains("another secret"), "{refused}");
    let refused = untrusted(trusted_status(&address(&without), HANG, &knows(&secret)));
    assert!(refused.contains("asks for none"), "{refused}");

    let sessions = connect_all(&with, "known", 2, |config| config.trust = knows(&secret));
    let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![1; 1000], Op::Sum)).collect();
    assert!(sums.into_iter().all(|sum| sum.wait() == Ok(vec![2; 1000])));
    untrusted(Session::connect(config(&with, "stranger", 0, 1)).map(drop));
    assert!(fetch(with.address(), "/healthz").ends_with("\r\n\r\nok\n"), "for everybody");
}

#[test]
fn a_switch_on_the_way_knows_its_server_by_the_secret_and_says_so_where_it_does_not() {
    let (_folder, [secret, other]) = secrets();
    let of_server = SwitchServerConfig {
        protocol: protocol("atp"),
        ..SwitchServerConfig::new(([127, 0, 0, 1], 0).into())
    };
    let server = SwitchServer::start_behind(of_server, of_those_who_know(&secret)).expect("a free port");
    let rack = |trust| {
        let config =
            RackServerConfig::new(protocol("atp"), ([127, 0, 0, 1], 0).into(), server.address().to_string());
        RackServer::start_behind(config, of_those_who_know(&secret), trust).expect("a free port")
    };
    let (knowing, mistaken) = (rack(knows(&secret)), rack(knows(&other)));
    let config = |at: SocketAddr, job: &str| {
        let mut config = SessionConfig::new(at.to_string(), job, 0, 1);
        (config.protocol, config.trust) = (protocol("atp"), knows(&secret));
        config
    };
    let session = Session::connect(config(knowing.address(), "way")).expect("admitted");
    assert_eq!(submit(&session, vec![1.0_f32; 1000], Op::Sum).wait(), Ok(vec![1.0; 1000]));
    let refused = Session::connect(config(mistaken.address(), "lost")).map(drop).expect_err("no way");
    assert!(matches!(refused, SessionError::Chain { .. }), "{refused}");
    assert!(refused.to_string().contains("another secret"), "{refused}");
}

#[test]
fn who_stands_between_a_rank_and_a_service_whose_key_was_told_is_refused() {
    let (service, between) = (switch(), TempDir::new().expect("a folder"));
    let key = Identity::kept(&between.path().join("key")).expect("a key");
    let listen = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
    let other = SwitchServer::start_behind(listen, Acceptor::new(&key, None)).expect("a free port");
    let told = |switch: &SwitchServer| {
        let trust = Trust::default();
        let own = Identity::of_process().expect("a key");
        trust.insist(&switch.address().to_string(), own.fingerprint());
        trust
    };
    let connect = |switch: &SwitchServer| {
        let config = SessionConfig { trust: told(switch), ..config(switch, "told", 0, 1) };
        Session::connect(config).map(drop)
    };
    assert_eq!(connect(&service), Ok(()));
    let refused = untrusted(connect(&other));
    assert!(refused.contains(&key.fingerprint().to_string()), "{refused}");
    assert!(other.is_idle(), "it was told nothing");
}
