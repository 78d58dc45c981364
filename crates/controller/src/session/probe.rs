//! A diagnosis' way to a switch: the steps of a session one by one, each with a limit, and with
//! what was seen on the way.
//!
//! The data path drops what belongs to no job, so it has no echo. A job of one rank is one: it
//! takes a few slots for a moment, and proves the join, both directions of UDP, the packet's full
//! length and the sum.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fanin_protocol::WorkerStatistics;
use fanin_protocol::control::Agreed;
use fanin_tls::Trust;
use fanin_udp::{IoStatistics, Membership, Service, WorkerConfig, WorkerDriver};
use fanin_wire::{IP_UDP_BYTES, Op, Rank, Security, WireDtype, packet_bytes};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::admission::{Admitted, join, leave};
use super::config::SessionConfig;
use super::status::{JobStatusState, SwitchStatus, no_status};
use super::thread::runtime;
use super::watch::HEARTBEATS_PER_TIMEOUT;
use crate::control_channel::{Connection, with_port};
use crate::error::{Member, SessionError};
use crate::path::route;
use crate::proto::{HeartbeatRequest, StatusRequest};
use crate::protocols;

/// Slots of the probing job: enough for packets to travel in trains.
const SLOTS: u16 = 8;
/// Chunks that each shard sums.
const CHUNKS: usize = 32;
/// Looks before a rank with as many paths is cut off, at most. Each is a job at the service, which has
/// room for some hundred.
const LOOKS_MAX: u8 = 8;
/// Heartbeats whose round trip is taken.
const HEARTBEATS: usize = 20;
/// Values are whole numbers below this; quantised to 31 bits and back they keep far more than the
/// tolerance.
const VALUES: usize = 97;
const TOLERANCE: f32 = 1e-3;

/// A control connection to a switch, for a diagnosis. Its methods block.
#[derive(Debug)]
pub struct Probe {
    connection: Connection,
    patience: Duration,
    /// Of its packets, where they are not to be as long as can be.
    elements: Option<u16>,
    /// How they are secured.
    security: Security,
    runtime: Option<Runtime>,
}

/// What became of the probing job's sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeSum {
    /// It came, and was right.
    Right {
        /// How long it took.
        took: Duration,
    },
    /// It came, and was not the sum.
    Wrong,
    /// It did not come in time.
    Missing,
    /// The job ended.
    Failed(SessionError),
}

/// What was seen of a job of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeReport {
    /// The job, as it was admitted.
    pub job: Membership,
    /// Its sum.
    pub sum: ProbeSum,
    /// What the sockets saw.
    pub io: IoStatistics,
    /// What the protocol saw.
    pub worker: WorkerStatistics,
    /// Where the sum is missing: the exchanges that the switch completed, which says whether
    /// packets reached it.
    pub exchanges_at_switch: Option<u64>,
    /// After so much silence the switch expels a rank.
    pub heartbeat_timeout: Duration,
    /// Round trips of heartbeats that were answered, shortest first.
    pub heartbeats: Vec<Duration>,
    /// Heartbeats that were not answered, or not in time.
    pub heartbeats_lost: u32,
}

/// Completes `switch` to `host:port`, and looks its addresses up.
///
/// # Errors
/// When it is no address, the name is not known, or the name server does not answer in `patience`.
pub fn resolve_switch(switch: &str, patience: Duration) -> Result<(String, Vec<SocketAddr>), SessionError> {
    let (switch, _) = with_port(switch)?;
    let failed = |cause: String| SessionError::Local { what: "looking up the switch's name", cause };
    let runtime = runtime("fanin-probe")?;
    let found = runtime.block_on(async {
        timeout(patience, tokio::net::lookup_host(&switch)).await.map(|found| found.map(Vec::from_iter))
    });
    // Not dropped, which would wait for a name server that does not answer.
    runtime.shutdown_background();
    match found {
        Ok(Ok(addresses)) if addresses.is_empty() => Err(failed("the name has no address".into())),
        Ok(Ok(addresses)) => Ok((switch, addresses)),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(_) => Err(failed(format!("no answer from the name server within {patience:?}"))),
    }
}

/// What keeps this machine from the service at `switch`, over TCP or UDP, in so much time for each;
/// `None` where nothing does, or where it cannot be told: its process may be stopped. Packets are
/// secured as those of the job that is to be there.
#[must_use]
pub fn cut_off(switch: &str, patience: Duration, trust: &Trust, security: Security) -> Option<String> {
    cut_off_of(switch, patience, trust, security, None)
}

/// The cause that keeps this machine from a service, if a look finds one. Routers choose a path by the
/// port, so that a single look may take a dead path. So over several paths more looks have to find a
/// cause, too, each from a port of its own.
pub(super) fn by_any_path(paths: u8, look: impl Fn() -> Option<String> + Sync) -> Option<String> {
    let found = look()?;
    let others: Vec<_> = std::thread::scope(|scope| {
        let looks: Vec<_> = (1..paths.min(LOOKS_MAX)).map(|_| scope.spawn(&look)).collect();
        looks.into_iter().map(|look| look.join().ok().flatten()).collect()
    });
    others.iter().all(Option::is_some).then_some(found)
}

/// The same as [`cut_off`], for a job under way there. Its packets have so many elements, and they must
/// still pass.
pub(super) fn cut_off_of(
    switch: &str,
    patience: Duration,
    trust: &Trust,
    security: Security,
    elements: Option<u16>,
) -> Option<String> {
    let mut probe = match Probe::open(switch, patience, trust) {
        Ok(probe) => probe,
        Err(SessionError::SwitchUnreachable { cause, .. }) => return Some(format!("TCP: {cause}")),
        Err(SessionError::Untrusted { cause, .. }) => return Some(cause),
        Err(_) => return None,
    };
    (probe.elements, probe.security) = (elements, security);
    let report = probe.all_reduce().ok()?;
    let elements = elements.unwrap_or(report.job.elements());
    let bytes = packet_bytes(usize::from(elements)) + security.extra_bytes();
    let is_alive = report.heartbeats_lost == 0 && !report.heartbeats.is_empty();
    if report.job.elements() < elements && is_alive {
        // The service let in what its own interface, and those on the way, carry now.
        return Some(format!(
            "UDP: packets of {bytes} bytes, which the job has, are longer than an interface there carries: its MTU has fallen"
        ));
    }
    if report.sum != ProbeSum::Missing || !is_alive {
        return None;
    }
    let what = match (report.io.packets_received, report.exchanges_at_switch) {
        _ if report.io.too_long > 0 => {
            format!("{}: its MTU has fallen", too_long(bytes, probe.connection.address))
        }
        (0, Some(0)) => "no packet gets there".into(),
        (0, _) => "no packet comes back".into(),
        _ => {
            format!(
                "packets of {bytes} bytes are lost, shorter ones are not; has a link on the way a smaller MTU?"
            )
        }
    };
    Some(format!("UDP: {what}"))
}

/// That this machine sends no packets of so many bytes to `service`.
pub(super) fn too_long(bytes: usize, service: SocketAddr) -> String {
    let interface = route(service).and_then(|route| route.interface);
    let interface = interface.unwrap_or_else(|| "an interface".into());
    format!("packets of {bytes} bytes, which the job has, are longer than {interface} carries here")
}

impl Probe {
    /// Connects, and checks that it is a switch of our version; `patience` holds for each step of
    /// this and of the methods.
    ///
    /// # Errors
    /// When the switch is not there, is none, or speaks another version.
    pub fn open(switch: &str, patience: Duration, trust: &Trust) -> Result<Self, SessionError> {
        let runtime = runtime("fanin-probe")?;
        match runtime.block_on(Connection::open(switch, patience, trust)) {
            Ok((connection, _)) => {
                let (elements, security) = (None, Security::Tag);
                Ok(Self { connection, patience, elements, security, runtime: Some(runtime) })
            }
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// The address that answered.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.connection.address
    }

    /// Time of the TCP handshake.
    #[must_use]
    pub const fn handshake(&self) -> Duration {
        self.connection.rtt
    }

    /// What the switch does.
    ///
    /// # Errors
    /// When it does not answer in time, or not as a switch.
    pub fn status(&mut self) -> Result<SwitchStatus, SessionError> {
        let Some(runtime) = &self.runtime else { return Err(SessionError::Closed) };
        runtime.block_on(status(&mut self.connection, None, self.patience))
    }

    /// Runs a job of one rank: joins, sums a few full packets on every shard, measures heartbeats,
    /// leaves.
    ///
    /// # Errors
    /// When the switch refuses the job or does not answer in time. What goes wrong on the data path
    /// is in the report.
    pub fn all_reduce(&mut self) -> Result<ProbeReport, SessionError> {
        let Some(runtime) = &self.runtime else { return Err(SessionError::Closed) };
        runtime.block_on(all_reduce(&mut self.connection, self.patience, self.security, self.elements))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn status(
    connection: &mut Connection,
    job: Option<String>,
    patience: Duration,
) -> Result<SwitchStatus, SessionError> {
    let switch = connection.switch.clone();
    let lost = |cause: String| SessionError::NotASwitch { switch, cause };
    match timeout(patience, connection.client.status(StatusRequest { job, ..StatusRequest::default() })).await
    {
        Err(_) => Err(lost("it fell silent".into())),
        Ok(Err(status)) => Err(no_status(&connection.switch, &status)),
        Ok(Ok(reply)) => {
            SwitchStatus::try_from(reply.into_inner()).map_err(|malformed| lost(malformed.to_string()))
        }
    }
}

async fn all_reduce(
    connection: &mut Connection,
    patience: Duration,
    security: Security,
    elements: Option<u16>,
) -> Result<ProbeReport, SessionError> {
    let beside = IP_UDP_BYTES + security.extra_bytes();
    let protocol = protocols::named(&connection.protocol).ok_or_else(|| SessionError::NotASwitch {
        switch: connection.switch.clone(),
        cause: format!("it serves protocol {:?}; install the same fanin on both", connection.protocol),
    })?;
    let need = |elements: u16| protocol.packet_bytes(elements.into(), WireDtype::SharedExponent) + beside;
    let name = format!("fanin-doctor-{:016x}", rand::random::<u64>());
    let config = SessionConfig {
        // Without `in_flight` the probe takes all the memory that a switch has for planned sums.
        agreed: Agreed { in_flight: Some(SLOTS), security, ..Agreed::default() },
        protocol,
        // Its exponents are agreed on in packets without payload first: where only long packets are
        // lost, it shows.
        wire_dtype: Some(WireDtype::SharedExponent),
        mtu: elements.map(need),
        ..SessionConfig::new(connection.switch.clone(), name, 0, 1)
    };
    let admitted = join(connection, &config, &config.services[0], patience, None).await?;
    let report = sum(connection, &config, &admitted, patience).await;
    leave(connection, admitted.job.identity(), Rank(0)).await;
    report
}

/// Everything of the probing job between joining and leaving.
async fn sum(
    connection: &mut Connection,
    config: &SessionConfig,
    admitted: &Admitted,
    patience: Duration,
) -> Result<ProbeReport, SessionError> {
    let service = Service {
        job: admitted.job.clone(),
        switch: connection.address,
        shards: admitted.shards,
        share: 1.0,
        home: None,
    };
    let driver = WorkerDriver::start(WorkerConfig {
        services: vec![service],
        retransmission: config.retransmission,
        host: None,
    });
    let driver = driver
        .map_err(|error| SessionError::Local { what: "opening the data path", cause: error.to_string() })?;
    let elements = usize::from(admitted.job.elements()) * admitted.shards * CHUNKS;
    let tensor: Vec<f32> = (0..elements).map(|i| (i % VALUES) as f32).collect();
    let (sender, receiver) = oneshot::channel();
    let began = Instant::now();
    driver.submit_owned(tensor.clone(), Op::Sum, move |result| {
        let _ = sender.send(result.map(|sums| (sums, began.elapsed())));
    });
    let interval = admitted.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT;
    let mut pulse = Pulse { job: admitted.job.clone(), trips: Vec::new(), lost: 0, patience };
    let outcome = tokio::select! {
        outcome = timeout(patience, receiver) => outcome,
        // Never ends: it keeps the job alive where the heartbeat timeout is shorter than our
        // patience.
        never = pulse.every(connection.clone(), interval) => match never {},
    };
    let member = Member {
        switch: connection.switch.clone(),
        rank: Rank(0),
        heartbeat_timeout: admitted.heartbeat_timeout,
    };
    let sum = match outcome {
        Ok(Ok(Ok((sums, took)))) if is_near(&sums, &tensor) => ProbeSum::Right { took },
        Ok(Ok(Ok(_))) => ProbeSum::Wrong,
        Ok(Ok(Err(failure))) => ProbeSum::Failed(SessionError::from_failure(&failure, &[member])),
        Ok(Err(_)) => ProbeSum::Failed(SessionError::Closed),
        Err(_) => ProbeSum::Missing,
    };
    let exchanges_at_switch = match sum {
        ProbeSum::Missing => status(connection, Some(config.job.clone()), patience)
            .await
            .ok()
            .and_then(|status| exchanges(&status)),
        _ => None,
    };
    let _ = timeout(patience, pulse.fill(connection)).await;
    pulse.trips.sort_unstable();
    Ok(ProbeReport {
        job: admitted.job.clone(),
        sum,
        io: driver.io_statistics(),
        worker: driver.statistics(),
        exchanges_at_switch,
        heartbeat_timeout: admitted.heartbeat_timeout,
        heartbeats: pulse.trips,
        heartbeats_lost: pulse.lost,
    })
}

/// Whether the sum over one rank is the rank's own tensor.
fn is_near(sums: &[f32], tensor: &[f32]) -> bool {
    sums.len() == tensor.len() && sums.iter().zip(tensor).all(|(sum, own)| (sum - own).abs() <= TOLERANCE)
}

fn exchanges(status: &SwitchStatus) -> Option<u64> {
    status.jobs.iter().find_map(|job| match job.state {
        JobStatusState::Running { completed, .. } => Some(completed),
        _ => None,
    })
}

/// Heartbeats of the probing job, and their round trips.
struct Pulse {
    job: Membership,
    trips: Vec<Duration>,
    lost: u32,
    patience: Duration,
}

impl Pulse {
    async fn beat(&mut self, connection: &mut Connection) {
        let message = HeartbeatRequest {
            job_id: self.job.id().0,
            generation: self.job.generation().0.into(),
            secret: self.job.key().secret_of(Rank(0)),
            ..HeartbeatRequest::default()
        };
        let began = Instant::now();
        match timeout(self.patience, connection.client.heartbeat(message)).await {
            Ok(Ok(_)) => self.trips.push(began.elapsed()),
            _ => self.lost += 1,
        }
    }

    async fn every(&mut self, mut connection: Connection, interval: Duration) -> std::convert::Infallible {
        loop {
            self.beat(&mut connection).await;
            tokio::time::sleep(interval).await;
        }
    }

    /// Beats until there are enough to judge by.
    async fn fill(&mut self, connection: &mut Connection) {
        while self.trips.len() < HEARTBEATS && self.lost == 0 {
            self.beat(connection).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_name_server_and_gets_the_default_port() {
        let found = resolve_switch("127.0.0.1", Duration::from_secs(60));
        assert_eq!(found, Ok(("127.0.0.1:4800".into(), vec![([127, 0, 0, 1], 4800).into()])));
        assert!(matches!(resolve_switch("a b", Duration::from_secs(60)), Err(SessionError::Address { .. })));
    }

    #[test]
    fn a_service_is_cut_off_if_no_path_leads_there() {
        let of = |paths: u8, found: &[Option<&str>]| {
            let looks = std::sync::Mutex::new(found.iter().rev().copied().collect::<Vec<_>>());
            let next = || looks.lock().unwrap().pop().expect("so many looks and no more").map(Into::into);
            let found = by_any_path(paths, next);
            (found, looks.into_inner().unwrap().len())
        };
        let lost = Some("UDP: lost");
        assert_eq!(of(1, &[lost, None]), (Some("UDP: lost".into()), 1));
        assert_eq!(of(4, &[lost; 5]), (Some("UDP: lost".into()), 1));
        assert_eq!(of(16, &[lost; 9]), (Some("UDP: lost".into()), 1));
        assert_eq!(of(3, &[lost, lost, None]), (None, 0));
        assert_eq!(of(16, &[None, lost]), (None, 1), "a look that gets there is enough");
    }

    #[test]
    fn a_sum_is_judged_by_every_element() {
        assert!(is_near(&[1.0, 2.0004], &[1.0, 2.0]));
        assert!(!is_near(&[1.0, 2.01], &[1.0, 2.0]));
        assert!(!is_near(&[1.0, f32::NAN], &[1.0, 2.0]));
        assert!(!is_near(&[1.0], &[1.0, 2.0]));
    }
}
