//! `plan` and what it has to be told: who is where, and how fast the links are.

use crate::client::limit;
use crate::error::to_python;
use crate::interruptible::{lock, on_a_thread};
use crate::settings::security_of;
use crate::trust::Trust;
use fanin_controller::{Cancel, Cores, route};
use fanin_plan::{Bound as Limit, Cluster, LoadSplit, Machine, Partition, lower_bound, ring};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::io::{self, ErrorKind};
use std::net::ToSocketAddrs;
use std::sync::Mutex;
use std::time::Duration;

/// The split of the load over machines that takes the least time (BytePS §4.1).
///
/// A machine is its name, whether it trains, and whether it sums. Then come the bits a second of its
/// link out of it and into it, and the bytes a second that its cores sum. Infinite bytes are no
/// limit. Returns
/// `shares`, in the order of the machines; `seconds_per_byte` of a tensor, headers apart; `bound`,
/// the link or the cores that take that long; and for comparison the seconds per byte of a `ring`
/// and the `lower_bound` of any way to sum.
///
/// Raises `ValueError` for machines that cannot be planned for.
#[pyfunction]
pub(crate) fn plan<'py>(
    py: Python<'py>,
    machines: Vec<(String, bool, bool, f64, f64, f64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let machine = |(name, trains, sums, up_bps, down_bps, summed_bytes_per_s)| Machine {
        name,
        trains,
        sums,
        up_bps,
        down_bps,
        summed_bytes_per_s,
    };
    let cluster = Cluster::new(machines.into_iter().map(machine).collect())
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let split = LoadSplit::of(&cluster);
    let of = |what: &str, index: usize| format!("{what} {}", cluster.machines()[index].name);
    let bound = match split.bound {
        Limit::Up(index) => of("the link out of", index),
        Limit::Down(index) => of("the link into", index),
        Limit::Summing(index) => of("the cores of", index),
        Limit::Nothing => "nothing".into(),
    };
    let answer = PyDict::new(py);
    answer.set_item("shares", split.shares)?;
    answer.set_item("seconds_per_byte", split.seconds_per_byte)?;
    answer.set_item("bound", bound)?;
    answer.set_item("ring", ring(&cluster))?;
    answer.set_item("lower_bound", lower_bound(&cluster))?;
    Ok(answer)
}

/// In which order partitions of gradients are sent, by their indices, so that the next forward pass
/// waits least.
///
/// A partition has three numbers: the seconds until it is there, its place among what the next
/// forward pass reads, and its bytes.
#[pyfunction]
pub(crate) fn send_order(partitions: Vec<(f64, u64, u64)>, seconds_a_byte: f64) -> Vec<usize> {
    let partition = |(ready_s, needed, bytes)| Partition { ready_s, needed, bytes };
    let partitions: Vec<Partition> = partitions.into_iter().map(partition).collect();
    fanin_plan::send_order(&partitions, seconds_a_byte)
}

/// The cores that this process may use, and the bytes a second that one of them sums.
#[pyfunction]
pub(crate) fn cores(py: Python<'_>) -> (usize, u64) {
    let cores = py.detach(Cores::of_process);
    (cores.count, cores.summed_bytes_per_s)
}

/// How this machine would send to `address`, host:port: its own address, the interface, and the
/// bits a second of that where it tells. None where it would not. Sends nothing, but may ask a name
/// server.
#[pyfunction]
pub(crate) fn route_to(py: Python<'_>, address: String) -> Option<(String, Option<String>, Option<u64>)> {
    py.detach(|| {
        let found = route(address.to_socket_addrs().ok()?.next()?)?;
        Some((found.local.to_string(), found.interface, found.rate_bps))
    })
}

/// The bits a second that the link of the switch at `address` carries, and the bytes that its cores
/// sum, as it says; None where it does not know.
///
/// Raises the errors of `fanin.errors` where no switch answers within `timeout` seconds. With a
/// `rank` it says as that rank that it waits; what `look` raises, which is called now and then,
/// ends that.
#[pyfunction]
#[pyo3(signature = (address, timeout, *, rank=None, look=None, trust=None))]
pub(crate) fn switch_capacity(
    py: Python<'_>,
    address: String,
    timeout: f64,
    rank: Option<u32>,
    look: Option<&Bound<'_, PyAny>>,
    trust: Option<&Trust>,
) -> PyResult<(Option<u64>, Option<u64>)> {
    let patience = limit(timeout)?;
    let trust = Trust::of(trust);
    let cancel = Cancel::default();
    let cancelled = cancel.clone();
    let work = move || fanin_controller::switch_capacity(&address, rank, patience, &cancelled, &trust);
    on_a_thread(py, "fanin-rate", look, || cancel.cancel(), work)?.map_err(|error| to_python(py, &error))
}

/// The obstacle between this machine and the service at `address`, host:port, over TCP or UDP, in
/// `timeout` seconds for each; None if there is none, or it cannot be told. Packets are secured as
/// those of the job that is to be there.
#[pyfunction]
#[pyo3(signature = (address, timeout, trust=None, security="tag"))]
pub(crate) fn cut_off(
    py: Python<'_>,
    address: String,
    timeout: f64,
    trust: Option<&Trust>,
    security: &str,
) -> PyResult<Option<String>> {
    let security = security_of(security)?;
    let trust = Trust::of(trust);
    let patience = crate::interruptible::duration(Some(timeout))?.unwrap_or(Duration::MAX);
    Ok(py.detach(|| fanin_controller::cut_off(&address, patience, &trust, security)))
}

/// Counts what fills it, at an address of this machine, until it is closed or its seconds are over.
#[pyclass(frozen)]
pub(crate) struct Gauge {
    #[pyo3(get)]
    port: u16,
    gauge: Mutex<Option<fanin_udp::Gauge>>,
    /// What those who fill it have to know.
    #[pyo3(get)]
    ticket: u64,
}

#[pymethods]
impl Gauge {
    /// Raises `OSError` where there is no port to be had, and `ValueError` for what is no address.
    #[new]
    fn new(address: &str, life: f64) -> PyResult<Self> {
        let at = address
            .parse()
            .map_err(|error| PyValueError::new_err(format!("{address:?} is no address: {error}")))?;
        let (gauge, ticket) = fanin_controller::gauge_here(at, limit(life)?)?;
        Ok(Self { port: gauge.address().port(), gauge: Mutex::new(Some(gauge)), ticket })
    }

    fn close(&self) {
        drop(lock(&self.gauge).take());
    }
}

/// Has the switch at `address` open a gauge, in `timeout` seconds: its port and ticket.
///
/// Raises the errors of `fanin.errors`.
#[pyfunction]
#[pyo3(signature = (address, timeout, trust=None))]
pub(crate) fn gauge_at(
    py: Python<'_>,
    address: String,
    timeout: f64,
    trust: Option<&Trust>,
) -> PyResult<(u16, u64)> {
    let (patience, trust) = (limit(timeout)?, Trust::of(trust));
    let opened = py.detach(|| fanin_controller::gauge_at(&address, patience, &trust));
    let (at, ticket) = opened.map_err(|error| to_python(py, &error))?;
    Ok((at.port(), ticket))
}

/// Fills the gauge at `address`, host:port, for so many seconds, with at most `window` bytes on the
/// way. Returns the bits a second that the gauge receives from all its senders.
///
/// Raises `OSError` where it cannot be measured.
#[pyfunction]
pub(crate) fn fill(
    py: Python<'_>,
    address: String,
    ticket: u64,
    seconds: f64,
    window: usize,
) -> PyResult<u64> {
    let duration = limit(seconds)?;
    py.detach(|| {
        let to = address.to_socket_addrs()?.next();
        let to = to.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "the name has no address"))?;
        fanin_udp::fill(to, ticket, duration, window).map_err(io::Error::other)
    })
    .map_err(PyErr::from)
}

/// An address of an interface of this machine, IPv4 where it has one.
///
/// Raises `ValueError` where there is no such interface, or it is down, or has none; with `linked`
/// also where it has no carrier.
#[pyfunction]
#[pyo3(signature = (interface, *, linked=false))]
pub(crate) fn interface_address(interface: &str, linked: bool) -> PyResult<String> {
    let found = if linked {
        fanin_controller::linked_address(interface)
    } else {
        fanin_controller::interface_address(interface)
    };
    found.map(|address| address.to_string()).map_err(|error| PyValueError::new_err(error.to_string()))
}
