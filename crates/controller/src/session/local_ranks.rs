//! The ranks of a machine that sum among themselves: how they find each other, and what each of
//! them is to the services.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use fanin_local::{Group, MemoryError, SharedMemory};
use fanin_wire::Rank;

use super::cancel::Cancel;
use super::config::SessionConfig;
use crate::error::SessionError;

/// How often is looked whether somebody still wants to join.
const LOOK: Duration = Duration::from_millis(50);

/// The ranks of one machine, of which this process is one.
#[derive(Debug)]
pub struct LocalRanks {
    /// Of each rank of the job its machine, numbered in the order of their first ranks.
    pub(super) machines: Vec<usize>,
    rank: u32,
    name: String,
    /// At most so many ranks of a machine speak for it.
    columns_max: usize,
    /// The first rank's; and only where there are others, or other machines have several.
    memory: Option<SharedMemory>,
}

impl LocalRanks {
    /// The ranks of `machines`, which has the machine of each rank of the job, numbered in the
    /// order of their first ranks. The first rank of a machine makes the memory of its ranks, which
    /// find it by `name`. At most `columns_max` of them, at least one, speak with other machines.
    ///
    /// # Errors
    /// When the memory cannot be made. No rank of the job may use its own then.
    ///
    /// # Panics
    /// When the machines do not have `rank`.
    pub fn new(
        machines: Vec<usize>,
        rank: u32,
        name: String,
        columns_max: usize,
    ) -> Result<Self, MemoryError> {
        let mut ranks = Self { machines, rank, name, columns_max, memory: None };
        let group = ranks.group();
        if group.ranks[0] == rank {
            ranks.memory = Some(SharedMemory::create(&ranks.file(), group)?);
        }
        Ok(ranks)
    }

    fn machine(&self) -> usize {
        self.machines[self.rank as usize]
    }

    fn of_machine(&self, machine: usize) -> Vec<u32> {
        (0u32..).zip(&self.machines).filter(|(_, of)| **of == machine).map(|(rank, _)| rank).collect()
    }

    fn count(&self) -> usize {
        self.machines.iter().max().map_or(0, |last| last + 1)
    }

    pub(super) fn group(&self) -> Group {
        let columns =
            (0..self.count()).map(|machine| self.of_machine(machine).len()).min().unwrap_or_default();
        let networked = self.count() > 1;
        // Ranks of one machine alone are columns for its cores.
        let columns = if networked { columns.min(self.columns_max.max(1)) } else { columns };
        Group { ranks: self.of_machine(self.machine()), columns, networked }
    }

    /// The session of this rank in its column. A column is one rank of each machine, and these
    /// ranks sum the same part of all tensors. To the services a column is a job whose ranks are
    /// the machines. The columns of a machine share its link. `None` if this rank is in no column,
    /// or if the job has no other machine.
    pub(super) fn column(&self, config: SessionConfig) -> Option<SessionConfig> {
        let Group { ranks, columns, networked } = self.group();
        let column = ranks.iter().position(|rank| *rank == self.rank).filter(|column| *column < columns)?;
        if !networked {
            return None;
        }
        let of_machine = |machine| self.of_machine(machine).get(column).copied();
        let mut config = SessionConfig {
            rank: self.machine() as u32,
            world_size: self.count() as u32,
            names: (0..self.count()).filter_map(of_machine).collect::<Vec<_>>().into(),
            ranks_here: ranks,
            columns: columns as u16,
            ..config
        };
        if columns > 1 {
            config.job = format!("{}.{column}", config.job);
        }
        for service in &mut config.services {
            let machine = service.home.and_then(|rank| self.machines.get(usize::from(rank.0)));
            service.home = machine.map(|machine| Rank(*machine as u16));
            service.rate_bps = service.rate_bps.map(|rate| (rate / columns as u64).max(1));
        }
        if let Some(prediction) = &mut config.prediction {
            prediction.scale(columns as f64);
        }
        Some(config)
    }

    /// Two machines of one computer have memories of their own.
    fn file(&self) -> String {
        format!("{}-{}", self.name, self.machine())
    }

    /// Opens the memory, and waits for the others of the machine.
    pub(super) fn gather(
        &mut self,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<SharedMemory, SessionError> {
        let began = Instant::now();
        let group = self.group();
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => {
                let me = group.ranks.iter().position(|rank| *rank == self.rank).unwrap_or_default();
                // The first rank has told that it is there; and may have gone again.
                loop {
                    let left = patience.saturating_sub(began.elapsed());
                    match SharedMemory::open(&self.file(), group.clone(), me, LOOK.min(left)) {
                        Err(MemoryError::Unreachable { cause, .. })
                            if cause.kind() == ErrorKind::NotFound && !left.is_zero() =>
                        {
                            cancel.cause().map_or(Ok(()), Err)?;
                        }
                        opened => break opened.map_err(no_memory)?,
                    }
                }
            }
        };
        loop {
            match memory.gather(LOOK.min(patience.saturating_sub(began.elapsed()))) {
                Err(MemoryError::Incomplete { .. }) if began.elapsed() < patience => {
                    cancel.cause().map_or(Ok(()), Err)?;
                }
                gathered => return gathered.map(|()| memory).map_err(no_memory),
            }
        }
    }
}

/// Waits until all columns of the machine have joined the job over machines, and tells what the
/// first one found there; or why this rank's own `failed` meanwhile. None takes part before: where
/// one cannot join, all ranks join once more.
pub(super) fn hear(
    memory: &SharedMemory,
    failed: impl Fn() -> Option<SessionError>,
    cancel: &Cancel,
) -> Result<u32, SessionError> {
    loop {
        // Each column has a limit of its own.
        if let Some(told) = memory.told(LOOK).map_err(no_memory)? {
            return Ok(told);
        }
        cancel.cause().or_else(&failed).map_or(Ok(()), Err)?;
    }
}

fn no_memory(error: MemoryError) -> SessionError {
    match error {
        MemoryError::Lost { rank } => SessionError::RankLost { rank: Rank(rank as u16) },
        error => {
            SessionError::Local { what: "sharing memory with this machine's ranks", cause: error.to_string() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_ranks_of_a_machine_speak_for_it_than_may() {
        let columns = |machines: &[usize], columns_max| {
            let name = format!("fanin-columns-{}", std::process::id());
            let ranks =
                LocalRanks::new(machines.to_vec(), 1, name, columns_max).expect("no memory of its own");
            ranks.group().columns
        };
        assert_eq!(columns(&[0, 0, 0, 1, 1], usize::MAX), 2);
        assert_eq!(columns(&[0, 0, 0, 1, 1], 1), 1);
        assert_eq!(columns(&[0, 0, 0, 1, 1], 0), 1);
        assert_eq!(columns(&[0, 0, 0], 1), 3, "with no other machine each sums a part");
    }

    #[test]
    fn a_rank_whose_first_neighbour_has_gone_again_looks_for_its_memory_until_it_is_cancelled() {
        let name = format!("fanin-gone-{}", std::process::id());
        let mut ranks = LocalRanks::new(vec![0, 0], 1, name, usize::MAX).expect("no memory of its own");
        let cancel = Cancel::default();
        cancel.cancel();
        let gathered = ranks.gather(Duration::from_secs(5), &cancel).map(drop);
        assert_eq!(gathered, Err(SessionError::Closed));
        let gathered = ranks.gather(Duration::from_millis(100), &Cancel::default()).map(drop);
        assert!(matches!(gathered, Err(SessionError::Local { .. })), "{gathered:?}");
    }
}
