//! `Client`: one membership of one rank in one job.

use crate::environment::begin_rank;
use crate::error::{rank_out_of_range, to_python};
use crate::interruptible::{duration, lock};
use crate::ledger::Completion;
use crate::local::LocalRanks;
use crate::meeting::Meeting;
use crate::membership::Membership;
use crate::pending::Pending;
use crate::settings::Settings;
use crate::switch::Switch;
use crate::trust::Trust;
use fanin_controller::{Prediction, ServiceConfig, Session, SessionConfig, SessionError, Share, TraceConfig};
use fanin_protocol::{Layer, Reason};
use fanin_udp::OnSockets;
use fanin_udp::{CollectiveKind, RawTensor, Submission};
use fanin_wire::{Dtype, LossBound, Op, Participants, Rank, WorkerId};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// "No timeout" in a form that a deadline can be computed from.
const TIMEOUT_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// A membership of one rank in one job, which one service sums or several.
///
/// `services` has an address, host:port, a share, a rate and a rank for each. Of all tensors
/// together a service sums its share. This rank and it are to speak at that many bits a second, or
/// as fast as the interface is where the rate is None. It is in that rank's process, or in none's.
/// The services are the same, in the same order, on all ranks.
///
/// The constructor blocks, without the interpreter's lock, until all ranks have joined. `timeout`
/// (seconds) bounds that, and later each all-reduce. `settings` are those of `fanin._settings`.
///
/// - `trace`: the file of a timeline, and the rank that this process has in it.
/// - `prediction`: what the plan of the shares takes, in seconds a byte, what takes that long, and
///   what a ring takes.
///   `links`: what the links were told to carry. `fanin status` shows both, and rank 0 says so if
///   large all-reduces do not fit the prediction.
/// - `local`: this machine's ranks, which sum among themselves first. If there is no other machine,
///   `services` may be empty.
/// - `hosted`: a switch of this process. If it is one of `services`, packets to it touch no socket.
/// - `meeting`: where the ranks found each other. `BeganAnew` tells them when one is started again
///   before all have joined.
/// - `look`: called now and then while the constructor blocks. What it raises ends that.
/// - `trust`: by what the services are known.
///
/// Raises the errors of `fanin.errors`, and `ValueError` for settings that no job has.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Client {
    membership: Arc<Membership>,
    rank: u32,
    world_size: u32,
    protocol: &'static dyn OnSockets,
    timeout: Mutex<f64>,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (
        services, job, rank, world_size, settings=None, *, timeout=300.0, trace=None, prediction=None, links=None,
        local=None, hosted=None, meeting=None, look=None, trust=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
    fn new(
        py: Python<'_>,
        services: Vec<(String, f64, Option<u64>, Option<u32>)>,
        job: String,
        rank: &Bound<'_, PyAny>,
        world_size: &Bound<'_, PyAny>,
        settings: Option<Settings>,
        timeout: f64,
        trace: Option<(PathBuf, u32)>,
        prediction: Option<(f64, String, f64)>,
        links: Option<String>,
        local: Option<&LocalRanks>,
        hosted: Option<&Switch>,
        meeting: Option<&Meeting>,
        look: Option<&Bound<'_, PyAny>>,
        trust: Option<&Trust>,
    ) -> PyResult<Self> {
        let (rank, world_size) = ranks(rank, world_size)?;
        let limit = limit(timeout)?;
        let usual = SessionConfig::new("", job, rank, world_size);
        let told = match settings {
            Some(settings) => settings.over(usual)?,
            None => usual,
        };
        begin_rank(rank)?;
        let protocol = told.protocol;
        let config = SessionConfig {
            services: ServiceConfig::all(services),
            host: hosted.and_then(Switch::threads),
            trace: trace.map(|(file, rank)| TraceConfig { file, rank }),
            prediction: prediction.map(|(seconds_per_byte, bound, ring)| Prediction {
                seconds_per_byte,
                bound,
                ring_seconds_per_byte: Some(ring),
            }),
            links: links.unwrap_or_default(),
            timeout: limit,
            join_timeout: limit,
            trust: Trust::of(trust),
            ..told
        };
        let membership = Arc::new(Membership::join(
            py,
            config,
            local.and_then(LocalRanks::take),
            meeting.and_then(Meeting::open),
            look,
        )?);
        Ok(Self { membership, rank, world_size, protocol, timeout: Mutex::new(timeout) })
    }

    /// The services, as they were given, with commas between.
    #[getter]
    fn switch(&self) -> String {
        self.membership.switch()
    }

    /// Name of the job.
    #[getter]
    fn job(&self) -> &str {
        &self.membership.job
    }

    /// This process's rank, from 0.
    #[getter]
    const fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[getter]
    const fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Names of the dtypes that the job sums: the same on all ranks.
    #[getter]
    fn dtypes(&self) -> Vec<&'static str> {
        self.summed().map(Dtype::name).collect()
    }

    /// Whether the job has other collectives than all_reduce: the same on all ranks.
    #[getter]
    fn has_roots(&self) -> bool {
        self.membership.with_session(|session| session.has_roots()).unwrap_or_default()
    }

    /// Whether a part of the ranks can sum alone, the same on all ranks.
    #[getter]
    fn has_participants(&self) -> bool {
        self.membership.with_session(Session::has_participants).unwrap_or_default()
    }

    /// Whether the job's packets are encrypted, the same on all ranks.
    #[getter]
    fn encrypts(&self) -> bool {
        self.membership.with_session(Session::encrypts).unwrap_or_default()
    }

    /// The number of each rank's machine: the same on all ranks. If no ranks sum first, each rank
    /// counts as a machine.
    #[getter]
    fn machines(&self) -> Vec<usize> {
        let machines = self.membership.with_session(|session| session.machines().map(<[usize]>::to_vec));
        machines.flatten().unwrap_or_else(|| (0..self.world_size as usize).collect())
    }

    /// How many ranks of each machine speak for it, 1 where they do not sum among themselves: the
    /// same on all ranks.
    #[getter]
    fn columns(&self) -> usize {
        self.membership.with_session(Session::columns).unwrap_or(1)
    }

    /// Seconds that each all-reduce may take, from its submission or from the end of the one before
    /// it.
    #[getter]
    fn timeout(&self) -> f64 {
        *lock(&self.timeout)
    }

    /// Changes `timeout`, for what is under way too. No effect once the client is closed.
    fn set_timeout(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let limit = limit(seconds)?;
        let changed = py.detach(|| self.membership.with_session(|session| session.set_timeout(limit)));
        if changed.is_some() {
            *lock(&self.timeout) = seconds;
        }
        Ok(())
    }

    /// Starts a collective, in place, on `parts`: the address of each, and how many contiguous
    /// elements are there.
    ///
    /// `collective` is "all_reduce", "reduce" or "broadcast" of one part, the last two with a
    /// `root`; or "reduce_scatter" or "all_gather" of as many parts as there are ranks, all of one
    /// length, the `i`-th of which is rank `i`'s. Bytes that are only moved are moved unchanged:
    /// give them as uint8. `average` is for those that add.
    ///
    /// `keep` is held until completion: it owns the memory, which nobody may touch meanwhile. With
    /// `notify`, the `Pending` is also handed out by `next_completion` once it is done. Every rank
    /// submits in the same order.
    ///
    /// `layer` is the place of the gradients' layer in a model, from its input, and how many layers it
    /// has. DLCP's packets tell routers. Without it they go first. `loss_bound` is the part of each
    /// rank's elements that may be lost, in place of the job's, if that may lose any. All ranks give
    /// the same.
    ///
    /// `participants` are the ranks that sum, and get the sum; None is all. The others submit the
    /// same, contribute nothing, and keep what they have. A set may differ from the one before only once
    /// all ranks of that one have its sums.
    ///
    /// Raises `Closed`, and `ValueError` for what cannot be: a collective or dtype that the job does
    /// not have, participants in a job that has no such sets, or an address that is not aligned for it. So are an index of a layer that is not
    /// below their count, and a bound that is no fraction. All else is told by the `Pending`.
    #[pyo3(signature = (parts, dtype, collective, root, average, keep, notify, layer=None, loss_bound=None, participants=None))]
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
    fn submit<'py>(
        &self,
        py: Python<'py>,
        parts: Vec<(usize, usize)>,
        dtype: &str,
        collective: &str,
        root: u32,
        average: bool,
        keep: Py<PyAny>,
        notify: bool,
        layer: Option<(u32, u32)>,
        loss_bound: Option<f64>,
        participants: Option<Vec<u32>>,
    ) -> PyResult<Bound<'py, Pending>> {
        let dtype = self.summed().find(|summed| summed.name() == dtype).ok_or_else(|| {
            PyValueError::new_err(format!("dtype {dtype:?}: one of {}", self.dtypes().join(", ")))
        })?;
        let tensor = |(address, elements): &(usize, usize)| {
            // SAFETY: Python's side of the contract, as documented: `keep` owns the memory, which
            // only we use until the end. The ledger holds it until the driver has called back.
            unsafe { RawTensor::new(std::ptr::with_exposed_provenance_mut(*address), *elements, dtype) }
                .map_err(|error| PyValueError::new_err(error.to_string()))
        };
        let op = if average { Op::Average } else { Op::Sum };
        let layer = layer.map(layer_of).transpose()?.unwrap_or_default();
        let bound = loss_bound.map(bound_of).transpose()?;
        let parts = parts.iter().map(tensor).collect::<PyResult<_>>()?;
        let participants = participants.map_or(Ok(Participants::ALL), |ranks| self.participants(&ranks))?;
        let submission = self.submission(collective, parts, op, root)?;
        let submission = submission.of_layer(layer).losing(bound).among(participants);
        let Some(ledger) = self.membership.ledger() else { return Err(to_python(py, &SessionError::Closed)) };
        ledger.reap(py);
        let completion = Arc::new(Completion::default());
        // All Python objects are made before the session is locked: making one may run the garbage
        // collector, and with it somebody's destructor that closes this client.
        let (ticket, pending) = ledger.enter(notify, |ticket| {
            let (completion, membership) = (Arc::clone(&completion), Arc::clone(&self.membership));
            Bound::new(py, Pending::new(keep, ticket, completion, membership))
        })?;
        let membership = Arc::downgrade(&self.membership);
        let done = move |outcome, hand_over| {
            completion.set(outcome, hand_over);
            // Gone only when the client is, and with it every entry that this one could be missing
            // from.
            if let Some(membership) = membership.upgrade() {
                membership.finish(ticket);
            }
        };
        let submitted = self.membership.with_session(|session| session.submit(submission, done));
        let Some(Ok(tensor)) = submitted else {
            ledger.cancel(ticket);
            return Err(to_python(py, &SessionError::Closed));
        };
        pending.get().submitted(tensor);
        Ok(pending)
    }

    /// The next `Pending` that is done and was submitted with `notify`. Blocks, without the
    /// interpreter's lock; None once the client is closed and drained, and in a forked process.
    /// Several threads may call it.
    fn next_completion(&self, py: Python<'_>) -> PyResult<Option<Py<Pending>>> {
        let Some(ledger) = self.membership.ledger() else { return Ok(None) };
        ledger.reap(py);
        ledger.next(py)
    }

    /// Why the membership ended by itself, as the exception that every all-reduce since raises;
    /// None while it lives, and once it is closed. May be asked at any time, from any thread.
    fn failure(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let failure = py.detach(|| self.membership.with_session(Session::failure)).flatten()?;
        Some(to_python(py, &failure).into_value(py).into_any())
    }

    /// Ranks that have left the job, as far as this one has heard, whether or not something waits
    /// for them. Empty once it is closed.
    fn left(&self, py: Python<'_>) -> Vec<u16> {
        let left = py.detach(|| self.membership.with_session(Session::left)).unwrap_or_default();
        left.iter().map(|rank| rank.0).collect()
    }

    /// Counters of this membership: packets sent, received and sent again, answers that met a long
    /// queue (`marked`, of ATP and GOAT), packets without effect by reason, the smoothed round trip in nanoseconds, all-reduces and other collectives
    /// completed, and outstanding. With a loss bound, it also counts for the sums that came: the
    /// `contributions` that their blocks would have, those `lost`, the blocks that are `unsummed`
    /// because they have nobody's, and how often some were asked for again (`loss_rounds`).
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (statistics, others, io, outstanding) = py.detach(|| {
            self.membership
                .with_session(|session| {
                    let (statistics, others) = (session.statistics(), session.others_completed());
                    (statistics, others, session.io_statistics(), session.outstanding())
                })
                .unwrap_or_default()
        });
        let counters = PyDict::new(py);
        counters.set_item("packets_sent", statistics.packets_sent)?;
        counters.set_item("packets_received", statistics.received.packets + io.forged)?;
        counters.set_item("retransmissions", statistics.retransmissions)?;
        counters.set_item("marked", statistics.marked)?;
        counters.set_item("smoothed_rtt_ns", statistics.smoothed_rtt.as_nanos())?;
        counters.set_item("completed", statistics.completed)?;
        counters.set_item("others_completed", others)?;
        counters.set_item("contributions", statistics.loss.contributions)?;
        counters.set_item("lost", statistics.loss.lost)?;
        counters.set_item("unsummed", statistics.loss.unsummed)?;
        counters.set_item("loss_rounds", statistics.loss.rounds)?;
        counters.set_item("trains_sent", io.trains_sent)?;
        counters.set_item("trains_received", io.trains_received)?;
        counters.set_item("packets_given_up", io.packets_given_up)?;
        counters.set_item("sleeps", io.sleeps)?;
        counters.set_item("outstanding", outstanding)?;
        for reason in Reason::ALL {
            let unread = if reason == Reason::Forged { io.forged } else { 0 };
            let dropped = statistics.received.dropped[reason as usize] + unread;
            counters.set_item(format!("dropped_{}", reason.name()), dropped)?;
        }
        Ok(counters)
    }

    /// How the job is shared among its services, and how they fare: a dict of `services`, of each a
    /// dict of address (`service`), `share` of all tensors and, where it is in a rank's process,
    /// that rank (`host`); `predicted`, what a byte takes by the plan, in seconds as it travels,
    /// headers apart, and `bound`, what takes that long, or None where it was not planned; `links`,
    /// what they were told to carry and what was taken for those that tell nothing, None where no
    /// share follows from it; `measured`, what a byte of large all-reduces took of late (from the
    /// submission, or the end of the one before; the median), or None before the first;
    /// `imbalance`, by how much a service misses its share of the packets, at most. None where no
    /// service sums, and once the client is closed.
    #[getter]
    fn plan<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let told = py.detach(|| {
            self.membership.with_session(|job| (job.split(), job.seconds_per_byte(), job.imbalance()))
        });
        let Some((Some(split), measured, imbalance)) = told else { return Ok(None) };
        let services = split.shares.into_iter().map(|Share { service, share, host }| {
            let of_service = PyDict::new(py);
            of_service.set_item("service", service)?;
            of_service.set_item("share", share)?;
            of_service.set_item("host", host)?;
            Ok(of_service)
        });
        let plan = PyDict::new(py);
        plan.set_item("services", services.collect::<PyResult<Vec<_>>>()?)?;
        let (predicted, bound) = split.prediction.map(|told| (told.seconds_per_byte, told.bound)).unzip();
        plan.set_item("predicted", predicted)?;
        plan.set_item("bound", bound)?;
        plan.set_item("links", Some(split.links).filter(|links| !links.is_empty()))?;
        plan.set_item("measured", measured)?;
        plan.set_item("imbalance", imbalance)?;
        Ok(Some(plan))
    }

    /// Leaves the job and fails what is outstanding with `Closed`. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.membership.leave());
        if let Some(ledger) = self.membership.ledger() {
            ledger.reap(py);
        }
    }
}

impl Client {
    /// The collective of that name, if the job has it.
    fn submission(&self, name: &str, parts: Vec<RawTensor>, op: Op, root: u32) -> PyResult<Submission> {
        let refused = |why: String| Err(PyValueError::new_err(format!("collective {name:?}: {why}")));
        let Some(kind) = CollectiveKind::ALL.into_iter().find(|kind| kind.name() == name) else {
            return refused(format!("one of {}", CollectiveKind::ALL.map(CollectiveKind::name).join(", ")));
        };
        let expected = if kind.is_sliced() { self.world_size as usize } else { 1 };
        if parts.len() != expected {
            return refused(format!("{} parts, and not {expected}", parts.len()));
        }
        if parts.iter().any(|part| part.elements() != parts[0].elements()) {
            return refused("parts of different lengths".into());
        }
        if kind != CollectiveKind::AllReduce && !self.has_roots() {
            return refused("this job has all_reduce alone".into());
        }
        if root >= self.world_size {
            return refused(format!("rank {root} of {} as its root", self.world_size));
        }
        Ok(Submission::new(kind, parts, op, WorkerId(root as u8)))
    }

    /// The set of these ranks, if the job has such sets.
    fn participants(&self, ranks: &[u32]) -> PyResult<Participants> {
        let refused = |why: String| Err(PyValueError::new_err(format!("participants {ranks:?}: {why}")));
        if !self.has_participants() {
            return refused("in this job all ranks sum; a part of them can by GOAT".into());
        }
        if ranks.is_empty() {
            return refused("one rank at least takes part".into());
        }
        if let Some(other) = ranks.iter().find(|rank| **rank >= self.world_size) {
            return refused(format!("rank {other} of {}", self.world_size));
        }
        let set = Participants::of(ranks.iter().map(|rank| Rank(*rank as u16)));
        let all = (0..self.world_size).all(|rank| ranks.contains(&rank));
        Ok(set.filter(|_| !all).unwrap_or_default())
    }

    fn summed(&self) -> impl Iterator<Item = Dtype> {
        let protocol = self.protocol;
        Dtype::ALL.into_iter().filter(move |dtype| protocol.sums(*dtype))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let attached = Python::try_attach(|py| {
            py.detach(|| self.membership.leave());
            // Nobody can fetch them any more, and they hold the membership that holds them.
            if let Some(ledger) = self.membership.ledger() {
                ledger.abandon(py);
            }
        });
        if attached.is_none() {
            // The interpreter is ending; its objects end with the process.
            self.membership.leave();
        }
    }
}

/// A layer as machines are told it, in 16 bits: of a longer model it is as far back as before.
fn layer_of((index, count): (u32, u32)) -> PyResult<Layer> {
    if index >= count {
        let why = format!("layer {index} of {count}: layers count from 0, so that it must be below {count}");
        return Err(PyValueError::new_err(why));
    }
    let most = u64::from(u16::MAX);
    let told = |x: u32| (u64::from(x) * most / u64::from(count).max(most)) as u16;
    Ok(Layer { index: told(index), count: told(count) })
}

/// The loss bound of a tensor that has its own.
fn bound_of(fraction: f64) -> PyResult<LossBound> {
    let why =
        || PyValueError::new_err(format!("loss_bound {fraction}: a fraction of at least 0 and below 1"));
    LossBound::new(fraction).ok_or_else(why)
}

/// A timeout in seconds as a duration from which a deadline can be computed.
pub(crate) fn limit(seconds: f64) -> PyResult<Duration> {
    Ok(duration(Some(seconds))?.unwrap_or(TIMEOUT_MAX).min(TIMEOUT_MAX))
}

/// Numbers that no message to the switch can hold are refused as it would refuse them.
fn ranks(rank: &Bound<'_, PyAny>, world_size: &Bound<'_, PyAny>) -> PyResult<(u32, u32)> {
    let py = rank.py();
    let number = |value: &Bound<'_, PyAny>| value.extract::<u32>();
    number(rank).and_then(|rank| Ok((rank, number(world_size)?))).map_err(|error| {
        if error.is_instance_of::<PyOverflowError>(py) {
            rank_out_of_range(py, rank, world_size)
        } else {
            error
        }
    })
}
