//! Rust's errors as the exceptions of `fanin.errors`: one class a kind, with the same fields.

use fanin_controller::{AllReduceError, ChainError, SessionError, SetupError, Tensor};
use fanin_protocol::control::{Ranks, Refusal};
use fanin_wire::{Op, RANKS_MAX};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The exception for `error`; the error of importing `fanin.errors` if that fails.
pub(crate) fn to_python(py: Python<'_>, error: &SessionError) -> PyErr {
    make(py, error).unwrap_or_else(|error| error)
}

/// The exception for files of keys, certificates or secrets that are of no use.
pub(crate) fn setup_to_python(py: Python<'_>, error: &SetupError) -> PyErr {
    raise(py, "FaninError", error.to_string(), &PyDict::new(py)).unwrap_or_else(|error| error)
}

/// The exception for an all-reduce that failed: that of its cause, which also names the tensor.
pub(crate) fn all_reduce_to_python(py: Python<'_>, error: &AllReduceError) -> PyErr {
    let make = || {
        let fields = PyDict::new(py);
        let class = class_of(py, &error.cause, &fields)?;
        if !matches!(error.cause, SessionError::AllReduceTimeout { .. }) {
            fields.set_item("waited", error.waited.as_secs_f64())?;
        }
        fields.set_item("switch", &error.switch)?;
        fields.set_item("tensor", name(py, &error.tensor)?)?;
        raise(py, class, error.to_string(), &fields)
    };
    make().unwrap_or_else(|error| error)
}

/// The `fanin.errors.Tensor` of an all-reduce.
fn name<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let op = match tensor.op {
        Op::Sum => "sum",
        Op::Average => "avg",
    };
    let class = py.import("fanin.errors")?.getattr("Tensor")?;
    class.call1((tensor.number, tensor.elements, tensor.dtype.name(), op, tensor.kind.name()))
}

fn make(py: Python<'_>, error: &SessionError) -> PyResult<PyErr> {
    let fields = PyDict::new(py);
    let class = class_of(py, error, &fields)?;
    raise(py, class, error.to_string(), &fields)
}

/// The name of the exception's class; enters its fields.
fn class_of(py: Python<'_>, error: &SessionError, fields: &Bound<'_, PyDict>) -> PyResult<&'static str> {
    Ok(match error {
        SessionError::SwitchUnreachable { switch, waited, .. } => {
            fields.set_item("switch", switch)?;
            fields.set_item("waited", waited.as_secs_f64())?;
            "SwitchUnreachable"
        }
        SessionError::Address { .. } => "SwitchUnreachable",
        SessionError::NotASwitch { .. } => "NotASwitch",
        SessionError::Untrusted { switch, .. } => {
            fields.set_item("switch", switch)?;
            "Untrusted"
        }
        SessionError::ProtocolVersionMismatch { ours, theirs, .. } => {
            fields.set_item("ours", ours)?;
            fields.set_item("theirs", theirs)?;
            "ProtocolVersionMismatch"
        }
        SessionError::JoinRefused { switch, reason, .. } => {
            fields.set_item("switch", switch)?;
            refused(reason.clone(), fields)?
        }
        SessionError::Chain { error: ChainError::UpstreamUnreachable { switch, .. }, .. } => {
            fields.set_item("switch", switch)?;
            "SwitchUnreachable"
        }
        SessionError::Chain { .. } => "JoinRefused",
        SessionError::NoAnswer { switch, .. } => {
            fields.set_item("switch", switch)?;
            "SwitchUnreachable"
        }
        SessionError::JoinTimeout { switch, missing_ranks, waited, .. } => {
            fields.set_item("switch", switch)?;
            fields.set_item("waited", waited.as_secs_f64())?;
            missing(missing_ranks, fields, "JoinTimeout")?
        }
        SessionError::AllReduceTimeout { missing_ranks, waited, switch, tensor } => {
            fields.set_item("switch", switch)?;
            fields.set_item("waited", waited.as_secs_f64())?;
            fields.set_item("tensor", name(py, tensor)?)?;
            missing(missing_ranks, fields, "AllReduceTimeout")?
        }
        SessionError::CollectiveMismatch { .. }
        | SessionError::LossBoundMismatch { .. }
        | SessionError::ParticipantsMismatch { .. } => "CollectiveMismatch",
        SessionError::RankLost { rank } | SessionError::Expelled { rank, .. } => {
            fields.set_item("rank", rank.0)?;
            "RankLost"
        }
        SessionError::RankLeft { rank } => {
            fields.set_item("rank", rank.0)?;
            "RankLeft"
        }
        SessionError::SwitchLost { .. } => "SwitchLost",
        SessionError::Closed => "Closed",
        SessionError::Local { .. } => "FaninError",
    })
}

/// The exception for a rank or a world size that is no number of the control protocol.
pub(crate) fn rank_out_of_range(
    py: Python<'_>,
    rank: &Bound<'_, PyAny>,
    world_size: &Bound<'_, PyAny>,
) -> PyErr {
    let message = format!(
        "rank {rank} in a world of {world_size}; ranks count from 0 to world_size - 1, and a job has 1 to {RANKS_MAX}"
    );
    raise(py, "RankOutOfRange", message, &PyDict::new(py)).unwrap_or_else(|error| error)
}

fn raise(py: Python<'_>, class: &str, message: String, fields: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    let class = py.import("fanin.errors")?.getattr(class)?;
    Ok(PyErr::from_value(class.call((message,), Some(fields))?))
}

fn refused(reason: Refusal, fields: &Bound<'_, PyDict>) -> PyResult<&'static str> {
    Ok(match reason {
        // Told from the switch's side, where the other is the rank.
        Refusal::VersionMismatch { theirs, ours } => {
            fields.set_item("ours", theirs)?;
            fields.set_item("theirs", ours)?;
            "ProtocolVersionMismatch"
        }
        Refusal::DuplicateRank { .. } => "DuplicateRank",
        Refusal::WorldSizeMismatch { .. } => "WorldSizeMismatch",
        Refusal::Mismatch { field, .. } => {
            fields.set_item("field", &*field)?;
            "SettingMismatch"
        }
        Refusal::ProtocolMismatch { .. } => "ProtocolMismatch",
        Refusal::RankOutOfRange { .. } | Refusal::TooManyWorkers { .. } => "RankOutOfRange",
        Refusal::PoolExhausted { asked, free } => {
            fields.set_item("asked", asked)?;
            fields.set_item("free", free)?;
            "PoolExhausted"
        }
        Refusal::JoinTimeout { missing: ranks } => missing(&ranks, fields, "JoinTimeout")?,
        Refusal::SwitchStopping => "SwitchLost",
        Refusal::BeganAnew { rank } => {
            fields.set_item("rank", rank)?;
            "BeganAnew"
        }
        // No class of their own.
        Refusal::Unserved { .. }
        | Refusal::PacketsTooLong { .. }
        | Refusal::JobName { .. }
        | Refusal::TooManyJobs { .. }
        | Refusal::JobRunning { .. }
        | Refusal::InFlightOutOfRange { .. }
        | Refusal::MtuTooSmall { .. }
        | Refusal::ResumeMismatch { .. }
        | Refusal::ResumeGap { .. }
        | Refusal::TooManyLevels { .. }
        | Refusal::TooManyChildren { .. }
        | Refusal::PathsDisagree { .. }
        | Refusal::SubModels { .. }
        | Refusal::WordsTooLong { .. } => "JoinRefused",
    })
}

fn missing(ranks: &Ranks, fields: &Bound<'_, PyDict>, class: &'static str) -> PyResult<&'static str> {
    let ranks: Vec<u32> = ranks.iter().map(|rank| rank.0.into()).collect();
    fields.set_item("missing_ranks", ranks)?;
    Ok(class)
}
