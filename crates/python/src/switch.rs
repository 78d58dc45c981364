//! `Switch`: a switch inside this process.

use crate::environment::begin_switch;
use crate::error::setup_to_python;
use crate::interruptible::{duration, lock};
use crate::settings::protocol_of;
use fanin_controller::{
    Acceptor, Fingerprint, Identity, RackServer, RackServerConfig, Secret, ServerError, SetupError,
    SwitchServer, SwitchServerConfig, Trust,
};
use fanin_udp::HostThreads;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use rustix::process::{Pid, getpid};
use std::mem;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at whether everybody has left.
const LINGER_PAUSE: Duration = Duration::from_millis(10);
/// Longer is a mistake.
const LINGER_MAX: Duration = Duration::from_secs(3600);

/// A switch inside this process, on threads of its own.
///
/// `listen` is host:port for TCP and UDP; port 0 takes a free one, and `address` tells which. `pool_units` is the memory
/// for all jobs together, in units of 256 elements; a rank whose machine does not answer for `heartbeat_timeout` seconds is expelled. With the
/// `protocol` "atp" or "goat" it is a switch of that and its root, which listens on this machine's loopback alone. With `secret_file` it serves those alone who know the
/// secret in that file.
///
/// Raises `OSError` when the address cannot be listened on, and `ValueError` for a number out of
/// its range.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Switch {
    address: SocketAddr,
    fingerprint: Fingerprint,
    running: Mutex<Option<Running>>,
    /// Held while it is stopped, without the interpreter: who stops it as well waits, and who asks
    /// it something does not.
    stopping: Mutex<()>,
    /// The process that started it. A fork of it has none of its threads, and could only wait for
    /// them.
    owner: Pid,
}

enum Running {
    Root(SwitchServer),
    BeforeRoot { switch: RackServer, server: SwitchServer },
}

impl Running {
    /// Serves those whom `acceptor` takes. A switch with aggregators is before a root of its own, which it knows as `trust` says.
    fn start(
        config: SwitchServerConfig,
        acceptor: Acceptor,
        trust: Trust,
    ) -> Result<(SocketAddr, Self), ServerError> {
        if !config.protocol.aggregates() {
            let server = SwitchServer::start_behind(config, acceptor)?;
            return Ok((server.address(), Self::Root(server)));
        }
        let hidden = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let hidden = SwitchServerConfig { listen: hidden, ..config };
        let server = SwitchServer::start_behind(hidden, acceptor.clone())?;
        let upstream = server.address().to_string();
        let mut of_switch = RackServerConfig::new(config.protocol, config.listen, upstream);
        of_switch.memory.shards =
            u8::try_from(config.shards).map_err(|_| ServerError::Shards(config.shards))?;
        let switch = RackServer::start_behind(of_switch, acceptor, trust)?;
        Ok((switch.address(), Self::BeforeRoot { switch, server }))
    }

    /// Ranks speak to the switch, and the root before which it is, which is hidden, to nobody else.
    fn threads(&self) -> Option<HostThreads> {
        match self {
            Self::Root(server) => Some(server.threads()),
            Self::BeforeRoot { .. } => None,
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            Self::Root(server) | Self::BeforeRoot { server, .. } => server.is_idle(),
        }
    }

    fn stop(self) {
        match self {
            Self::Root(server) => server.stop(),
            // The ranks hear of it through the switch.
            Self::BeforeRoot { switch, server } => {
                server.stop();
                switch.stop();
            }
        }
    }
}

impl Switch {
    /// Its threads, for a rank of this process; `None` once it has ended.
    pub(crate) fn threads(&self) -> Option<HostThreads> {
        lock(&self.running).as_ref().and_then(Running::threads)
    }
}

#[pymethods]
impl Switch {
    #[new]
    #[pyo3(signature = (
        listen="127.0.0.1:0", *, pool_units=None, heartbeat_timeout=None, protocol="switchml", shards=None, secret_file=None
    ))]
    fn new(
        py: Python<'_>,
        listen: &str,
        pool_units: Option<u32>,
        heartbeat_timeout: Option<f64>,
        protocol: &str,
        shards: Option<usize>,
        secret_file: Option<PathBuf>,
    ) -> PyResult<Self> {
        let protocol = protocol_of(protocol)?;
        let heartbeat_timeout = duration(heartbeat_timeout)?;
        begin_switch()?;
        let (acceptor, trust) =
            of_secret(secret_file.as_deref()).map_err(|error| setup_to_python(py, &error))?;
        py.detach(|| {
            let mut config = SwitchServerConfig::new(resolve(listen)?);
            config.shards = shards.unwrap_or_else(SwitchServerConfig::automatic_shards);
            // Its ranks are this program's, and wait as long as they were told to.
            config.join_timeout_max = Duration::MAX;
            config.pool_units = pool_units.unwrap_or(config.pool_units);
            config.heartbeat_timeout = heartbeat_timeout.unwrap_or(config.heartbeat_timeout);
            config.protocol = protocol;
            let fingerprint = acceptor.fingerprint();
            let (address, running) =
                Running::start(config, acceptor, trust).map_err(|error| to_python(&error))?;
            Ok(Self {
                address,
                fingerprint,
                running: Mutex::new(Some(running)),
                stopping: Mutex::default(),
                owner: getpid(),
            })
        })
    }

    /// The address at which it listens, as host:port.
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// By what its key is known.
    #[getter]
    fn fingerprint(&self) -> String {
        self.fingerprint.to_string()
    }

    /// Tells all ranks that the switch goes, and ends it. Idempotent. It waits until nobody is in
    /// any job, `linger` seconds at most: others may still lack results that this process has. In a
    /// process that was forked from the switch's it does nothing.
    #[pyo3(signature = (linger=0.0))]
    fn stop(&self, py: Python<'_>, linger: f64) -> PyResult<()> {
        let linger = duration(Some(linger))?.unwrap_or_default();
        if getpid() != self.owner {
            return Ok(());
        }
        py.detach(|| {
            let _stopping = lock(&self.stopping);
            let is_idle = || lock(&self.running).as_ref().is_none_or(Running::is_idle);
            let until = Instant::now() + linger.min(LINGER_MAX);
            while !is_idle() && Instant::now() < until {
                thread::sleep(LINGER_PAUSE);
            }
            let running = lock(&self.running).take();
            if let Some(running) = running {
                running.stop();
            }
        });
        Ok(())
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        if getpid() != self.owner {
            // Not locked: a thread that is not here may have been in it.
            mem::forget(self.running.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        // Detached when it can be: the farewell takes time. An interpreter that is ending cannot.
        if Python::try_attach(|py| self.stop(py, 0.0)).is_none() {
            drop(lock(&self.running).take());
        }
    }
}

/// An acceptor that takes only those who know the secret in a file, if there is one, and a trust
/// that knows them.
fn of_secret(file: Option<&Path>) -> Result<(Acceptor, Trust), SetupError> {
    let secret = file.map(Secret::read).transpose()?;
    Ok((Acceptor::new(&Identity::of_process()?, secret), Trust::read(None, file)?))
}

fn resolve(listen: &str) -> PyResult<SocketAddr> {
    let wrong = |cause: String| {
        PyValueError::new_err(format!(
            "listen={listen:?} is no host:port ({cause}); give it like 127.0.0.1:0"
        ))
    };
    let mut addresses = listen.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    addresses.next().ok_or_else(|| wrong("no such host".into()))
}

fn to_python(error: &ServerError) -> PyErr {
    let message = error.to_string();
    match error {
        ServerError::PortInUse { .. }
        | ServerError::Bind { .. }
        | ServerError::Runtime(_)
        | ServerError::Tls(_) => PyOSError::new_err(message),
        ServerError::Shards(_)
        | ServerError::Machine(_)
        | ServerError::Upstream(_)
        | ServerError::Config(_) => PyValueError::new_err(message),
    }
}
