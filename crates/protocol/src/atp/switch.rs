//! ATP's rule for a switch: it sums the fragments of its level, first come, first served.

use fanin_wire::{CHILDREN_MAX, Directions, Flags, Generation, GradientHeader, JobId, Key, LEVELS_MAX};

use crate::aggregation::{Children, ConfigError, Part, Route, Treatment};
use crate::machine::Reason;

/// A job's way through one switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchRoute<A> {
    /// The job.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// How often it was set up.
    pub generation: Generation,
    /// Number of workers.
    pub workers: u16,
    /// The next switch towards the server, or the server.
    pub upstream: A,
    /// Which level's directions are this switch's.
    pub level: u8,
}

impl<A: Copy + PartialEq + core::fmt::Debug> Route<A> for SwitchRoute<A> {
    type Label = Directions;
    type Bits = u32;
    const FREES_STALE: bool = true;

    fn check(&self) -> Result<(), ConfigError> {
        if usize::from(self.level) >= LEVELS_MAX {
            return Err(ConfigError::Level(self.level));
        }
        if self.workers == 0 { Err(ConfigError::Workers(0)) } else { Ok(()) }
    }

    #[inline]
    fn job(&self) -> (JobId, Key, Generation) {
        (self.id, self.key, self.generation)
    }

    fn workers(&self) -> u16 {
        self.workers
    }

    #[inline]
    fn upstream(&self) -> &A {
        &self.upstream
    }

    fn children(&self) -> Children<A> {
        Children::new(CHILDREN_MAX)
    }

    /// The child that a fragment comes from, if it is meant for this level.
    fn sender(&self, from: A, directions: &Directions) -> Result<Option<usize>, Reason> {
        let bitmap = directions.bitmaps[usize::from(self.level)];
        if directions.level != self.level
            || !bitmap.is_power_of_two()
            || directions.fan_in_degrees[usize::from(self.level)] == 0
        {
            return Err(Reason::OutOfRange);
        }
        if from == self.upstream {
            return Err(Reason::Foreign);
        }
        Ok(Some(bitmap.trailing_zeros() as usize))
    }

    #[inline]
    fn treatment(&self, header: &GradientHeader) -> Treatment<u32> {
        let level = usize::from(self.level);
        let Flags { resend, overflow, restore, .. } = header.flags;
        if overflow || restore || (resend && level > 0) {
            return Treatment::Discard(header.aggregator_index);
        }
        let part = Part {
            index: header.aggregator_index,
            bit: header.directions.bitmaps[level],
            fan_in_degree: header.directions.fan_in_degrees[level],
            participants: 0,
            window: None,
        };
        if resend { Treatment::Flush(part) } else { Treatment::Add(part) }
    }

    fn freed_by(&self, parameters: &GradientHeader) -> Option<u32> {
        Some(parameters.aggregator_index)
    }

    fn onward(&self, directions: Directions) -> Directions {
        Directions { level: self.level + 1, ..directions }
    }

    fn of_sum(&self, directions: Directions, bitmap: u32) -> Directions {
        let mut directions = self.onward(directions);
        directions.bitmaps[usize::from(self.level)] = bitmap;
        directions
    }
}
