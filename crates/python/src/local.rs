//! `LocalRanks`: the ranks of one machine, which sum in shared memory.

use crate::interruptible::lock;
use fanin_controller as controller;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::sync::Mutex;

/// The ranks of this process's machine. Given to a `Client`, they sum among themselves first, and
/// one rank a column speaks for them all.
///
/// `machines` has the machine of each rank of the job, numbered in the order of their first ranks;
/// `name` is one that no other job on these machines has. At most `columns_max` ranks of a machine
/// speak for it, at least one; None is no limit. The first rank of a machine allocates its
/// shared memory at once, and raises `OSError` where there is too little. All ranks of the job are
/// given such an object, or none.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct LocalRanks(Mutex<Option<controller::LocalRanks>>);

#[pymethods]
impl LocalRanks {
    #[new]
    #[pyo3(signature = (machines, rank, name, columns_max=None))]
    fn new(
        py: Python<'_>,
        machines: Vec<usize>,
        rank: u32,
        name: String,
        columns_max: Option<usize>,
    ) -> PyResult<Self> {
        if rank as usize >= machines.len() {
            return Err(PyValueError::new_err(format!(
                "rank {rank} is on none of {} machines",
                machines.len()
            )));
        }
        let columns_max = columns_max.unwrap_or(usize::MAX);
        let made = py.detach(|| controller::LocalRanks::new(machines, rank, name, columns_max));
        made.map(|ranks| Self(Mutex::new(Some(ranks)))).map_err(|error| PyOSError::new_err(error.to_string()))
    }

    /// Give the memory back, if no client has taken it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }
}

impl LocalRanks {
    pub(crate) fn take(&self) -> Option<controller::LocalRanks> {
        lock(&self.0).take()
    }
}

/// Names the machine that this process is on: equal where kernel, network namespace, /dev/shm and
/// user are.
#[pyfunction]
pub(crate) fn machine_id() -> String {
    controller::machine_id()
}
