//! Switches and sessions on the loopback interface.

mod admission;
mod atp;
mod away;
mod between;
mod bounds;
mod faults;
mod goat;
mod http;
mod machines;
mod meetings;
mod ports;
mod racks;
mod scripted;
mod secured;
mod servers;
mod shards;
mod strangers;
mod sums;
mod tls;

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fanin_protocol::WorkerTerms;
use fanin_protocol::control::Agreed;
use fanin_tls::Trust;
use fanin_udp::{OnSockets, RawTensor, Submission};
use fanin_wire::{Collective, Dtype, Op, Pattern, WireDtype};
use tonic::transport::Channel;

use fanin_controller::proto::control_client::ControlClient;
use fanin_controller::proto::{JoinRequest, Setting};
use fanin_controller::{
    Session, SessionConfig, SessionError, SwitchServer, SwitchServerConfig, SwitchStatus, control_calls,
    protocols, switch_status,
};

/// Longer than anything here takes on a busy machine; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// The protocol of this name.
fn protocol(name: &str) -> &'static dyn OnSockets {
    protocols::named(name).expect("a protocol")
}

/// What the session's rank was told, as the job's protocol has it.
fn terms<T: WorkerTerms>(session: &Session) -> T {
    let job = session.job().expect("it runs");
    job.terms::<T>().unwrap_or_else(|| panic!("another protocol: {job:?}")).clone()
}

fn switch_with(change: impl FnOnce(&mut SwitchServerConfig)) -> SwitchServer {
    let mut config = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
    change(&mut config);
    SwitchServer::start(config).expect("a free port")
}

/// The first of a job, of so many integers.
fn collective(elements: u32) -> Collective {
    Collective {
        sequence: 0,
        dtype: Dtype::Int32,
        op: Op::Sum,
        pattern: Pattern::AllReduce,
        elements,
        wire_dtype: WireDtype::SharedExponent,
    }
}

fn switch() -> SwitchServer {
    switch_with(|_| {})
}

/// Waits until the status of the switch there is such; `otherwise` says what is wrong with one that never is.
fn wait_until(switch: SocketAddr, otherwise: &str, is_so: impl Fn(&SwitchStatus) -> bool) {
    let (address, began) = (switch.to_string(), Instant::now());
    while !is_so(&switch_status(&address, HANG).expect("a status")) {
        assert!(began.elapsed() < HANG, "{otherwise}");
        // A status is asked for: no switch tells when it changes.
        thread::sleep(Duration::from_millis(5));
    }
}

fn config(switch: &SwitchServer, job: &str, rank: u32, world_size: u32) -> SessionConfig {
    SessionConfig::new(switch.address().to_string(), job, rank, world_size)
}

/// The calls of a switch, for who has no session.
fn control(switch: SocketAddr) -> ControlClient<Channel> {
    control_calls(switch, &Trust::default())
}

/// What a rank asks without a session.
fn request(job: &str, rank: u32, world_size: u32, patience: Duration) -> JoinRequest {
    JoinRequest {
        wire_version: fanin_wire::VERSION.into(),
        job: job.into(),
        rank,
        world_size,
        mtu_bytes: 65_535,
        patience_ms: patience.as_millis() as u64,
        protocol: "switchml".into(),
        // As a session asks that is told nothing.
        settings: settings(&Agreed::default()),
        ..JoinRequest::default()
    }
}

/// What a rank asks of a protocol that makes integers of floats by a factor of its own.
fn request_of(protocol: &str, job: &str, rank: u32, world_size: u32) -> JoinRequest {
    let agreed = Agreed { wire_dtype: WireDtype::SharedExponent, ..Agreed::default() };
    let settings = settings(&agreed);
    JoinRequest { protocol: protocol.into(), settings, ..request(job, rank, world_size, HANG) }
}

fn settings(agreed: &Agreed) -> Vec<Setting> {
    agreed.values().into_iter().map(Into::into).collect()
}

/// Connects all ranks at once, as their processes would.
fn connect_all(
    switch: &SwitchServer,
    job: &str,
    world_size: u32,
    change: impl Fn(&mut SessionConfig),
) -> Vec<Session> {
    let connecting: Vec<_> = (0..world_size)
        .map(|rank| {
            let mut config = config(switch, job, rank, world_size);
            change(&mut config);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// A number that a tensor can hold.
trait Element: Copy + Send + 'static {
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::Float32;
}

impl Element for i32 {
    const DTYPE: Dtype = Dtype::Int32;
}

/// An all-reduce under way, which owns its tensor.
struct UnderWay<T> {
    tensor: Vec<T>,
    done: mpsc::Receiver<Result<(), SessionError>>,
}

impl<T> UnderWay<T> {
    fn wait(self) -> Result<Vec<T>, SessionError> {
        match self.done.recv_timeout(HANG) {
            Ok(result) => result.map(|()| self.tensor),
            Err(error) => {
                // The session may still write to it.
                std::mem::forget(self.tensor);
                panic!("an all-reduce hangs: {error}");
            }
        }
    }
}

fn submit<T: Element>(session: &Session, mut tensor: Vec<T>, op: Op) -> UnderWay<T> {
    let (sender, done) = mpsc::channel();
    // SAFETY: `UnderWay` keeps the tensor where it is, untouched, until `done` was called.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), T::DTYPE) };
    let closed = sender.clone();
    let submitted = session.submit(Submission::all_reduce(raw.expect("a tensor"), op), move |result, _| {
        let _ = sender.send(result.map_err(|error| error.cause));
    });
    if let Err(error) = submitted {
        let _ = closed.send(Err(error));
    }
    UnderWay { tensor, done }
}
