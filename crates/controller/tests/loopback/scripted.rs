//! A control connection that says what a test wants: another version, a lost memory.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use fanin_controller::proto::control_server::{Control, ControlServer};
use fanin_controller::proto::{
    Admission, AttendRequest, HeartbeatReply, HeartbeatRequest, JoinReply, JoinRequest, LeaveReply,
    LeaveRequest, MeasureReply, MeasureRequest, MeetReply, MeetRequest, StatusReply, StatusRequest,
    heartbeat_reply::State, join_reply::Outcome,
};
use fanin_protocol::control::{self, Agreed, Gathered, PORTION_WHOLE, Protocol, SwitchTree};
use fanin_protocol::switchml::SwitchMl;
use fanin_tls::Acceptor;
use fanin_wire::{Key, VERSION, WireDtype};
use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

/// What it is named in every reply.
pub const INSTANCE: u64 = 7;

pub struct Script {
    pub wire_version: u32,
    /// What it says that it serves.
    pub protocol: &'static str,
    pub join: fn(JoinRequest) -> Outcome,
    /// Answers the heartbeat of this number; `None` fails the call.
    pub heartbeat: fn(u32) -> Option<State>,
    /// Whether it is gone as soon as a rank opens its stream.
    pub is_brief: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            wire_version: VERSION.into(),
            protocol: "switchml",
            join: admit,
            heartbeat: |_| None,
            is_brief: false,
        }
    }
}

fn admit(request: JoinRequest) -> Outcome {
    Outcome::Admission(admission(&request))
}

/// To job 1, with a heartbeat every 50 ms.
pub fn admission(request: &JoinRequest) -> Admission {
    ONE_SLOT.admission(request)
}

/// What a rank of a job of SwitchML is told.
#[derive(Clone, Copy)]
pub struct Told {
    pub slots: u16,
    pub elements: u16,
    pub shards: u8,
    pub wire_dtype: WireDtype,
}

/// In one shard.
pub const ONE_SLOT: Told = Told { slots: 1, elements: 256, shards: 1, wire_dtype: WireDtype::Native };

impl Told {
    /// To job 1, of the protocol that was asked for, with a heartbeat every 50 ms.
    pub fn admission(self, request: &JoinRequest) -> Admission {
        Admission {
            job_id: 1,
            world_size: request.world_size,
            heartbeat_timeout_ms: 250,
            switch_instance: INSTANCE,
            key: Key::new(7).to_bytes().into(),
            protocol: request.protocol.clone(),
            shards: self.shards.into(),
            part: self.part(request.rank, request.world_size),
            ..Admission::default()
        }
    }

    /// As a switch that admits ranks who ask for this tells it.
    fn part(self, rank: u32, world_size: u32) -> Vec<u8> {
        let Self { slots, elements, shards, wire_dtype } = self;
        let asks = |rank| control::JoinRequest {
            job: "scripted".into(),
            rank,
            world_size,
            protocol: SwitchMl.name().into(),
            agreed: Agreed { in_flight: Some(slots), wire_dtype, ..Agreed::default() },
            mtu: usize::from(u16::MAX),
            rate_bps: None,
            rtt: Duration::ZERO,
            paths: 1,
            portion: PORTION_WHOLE,
            hops: Vec::new(),
            patience: Duration::ZERO,
            wire_version: VERSION,
            resume: None,
            origin: None,
        };
        let asked: Vec<_> = (0..world_size).map(asks).collect();
        let requests: Vec<_> = asked.iter().collect();
        let receive_buffer_bytes = 1 << 20;
        let tree = &SwitchTree::default();
        let gathered = Gathered { requests: &requests, tree, elements, shards, receive_buffer_bytes };
        let (_, mut seats) = SwitchMl.admit(&gathered).expect("ranks that agree");
        seats.ranks.swap_remove(rank as usize)
    }
}

/// A running script. Dropping it ends it.
pub struct Scripted {
    pub address: SocketAddr,
    pub heartbeats: Arc<AtomicU32>,
    /// The ranks that left.
    pub left: mpsc::Receiver<LeaveRequest>,
    runtime: Running,
}

/// The threads of a script, until it ends.
type Running = Arc<Mutex<Option<Runtime>>>;

fn end(running: &Running) {
    if let Some(runtime) = running.lock().expect("no panic").take() {
        runtime.shutdown_background();
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        end(&self.runtime);
    }
}

struct Player {
    script: Script,
    heartbeats: Arc<AtomicU32>,
    left: mpsc::Sender<LeaveRequest>,
    runtime: Running,
}

impl Script {
    pub fn play(self) -> Scripted {
        let runtime = Runtime::new().expect("a runtime");
        let bound = tokio::net::TcpListener::bind("127.0.0.1:0");
        let listener = runtime.block_on(bound).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let heartbeats = Arc::new(AtomicU32::new(0));
        let (sender, left) = mpsc::channel();
        let running = Running::default();
        let player = Player {
            script: self,
            heartbeats: Arc::clone(&heartbeats),
            left: sender,
            runtime: Arc::clone(&running),
        };
        let server = tonic::transport::Server::builder().add_service(ControlServer::new(player));
        let acceptor = Acceptor::of_process().expect("a key");
        let incoming = TcpListenerStream::new(listener).then(move |accepted| {
            let acceptor = acceptor.clone();
            async move {
                let mut outer = acceptor.accept(accepted?).await?;
                let (inner, mut served) = tokio::io::duplex(1 << 16);
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut outer, &mut served).await });
                Ok::<_, std::io::Error>(inner)
            }
        });
        runtime.spawn(server.serve_with_incoming(incoming));
        *running.lock().expect("no panic") = Some(runtime);
        Scripted { address, heartbeats, left, runtime: running }
    }
}

#[tonic::async_trait]
impl Control for Player {
    type MeetStream = tokio_stream::Empty<Result<MeetReply, Status>>;

    /// As a switch that knows of no meetings.
    async fn meet(&self, _: Request<MeetRequest>) -> Result<Response<Self::MeetStream>, Status> {
        Err(Status::unimplemented("as scripted"))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        Ok(Response::new(JoinReply { outcome: Some((self.script.join)(request.into_inner())) }))
    }

    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        let number = self.heartbeats.fetch_add(1, Ordering::Relaxed);
        let state = (self.script.heartbeat)(number).ok_or_else(|| Status::unavailable("as scripted"))?;
        Ok(Response::new(HeartbeatReply {
            state: Some(state),
            switch_instance: INSTANCE,
            route: None,
            way: vec![],
        }))
    }

    type AttendStream = tokio_stream::Empty<Result<HeartbeatReply, Status>>;

    /// As a switch that knows of no streams, if it is not brief.
    async fn attend(
        &self,
        _: Request<Streaming<AttendRequest>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        if self.script.is_brief {
            let running = Arc::clone(&self.runtime);
            std::thread::spawn(move || end(&running));
            std::future::pending::<()>().await;
        }
        Err(Status::unimplemented("as scripted"))
    }

    async fn leave(&self, request: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        // The test may not care.
        let _ = self.left.send(request.into_inner());
        Ok(Response::new(LeaveReply {}))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let Script { wire_version, protocol, .. } = self.script;
        Ok(Response::new(StatusReply { wire_version, protocol: protocol.into(), ..StatusReply::default() }))
    }
    /// As a switch that knows of no measurements.
    async fn measure(&self, _: Request<MeasureRequest>) -> Result<Response<MeasureReply>, Status> {
        Err(Status::unimplemented("as scripted"))
    }
}
