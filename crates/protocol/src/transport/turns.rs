//! Which job sends next: the jobs of a machine take turns, and those that have nothing to say cost
//! nothing.

use alloc::collections::{BTreeMap, VecDeque};
use fanin_wire::JobId;

/// A job that may have something to send.
pub(crate) trait Sender {
    /// Whether it stands in the line. [`Turns`] keeps this.
    fn in_line(&mut self) -> &mut bool;
    /// Whether it has something to send now.
    fn has_pending(&mut self) -> bool;
}

/// The line. A job in it may have nothing to send any more, or be gone; one that has something
/// stands in it.
#[derive(Debug, Default)]
pub(crate) struct Turns(VecDeque<JobId>);

impl Turns {
    /// To be called after anything that may have given a job something to send.
    pub(crate) fn line_up(&mut self, id: JobId, job: &mut impl Sender) {
        if !*job.in_line() && job.has_pending() {
            *job.in_line() = true;
            self.0.push_back(id);
        }
    }

    /// Takes a job out that is gone, or another one from now on.
    pub(crate) fn remove(&mut self, id: JobId) {
        self.0.retain(|other| *other != id);
    }

    /// The job whose turn it is; it goes to the end of the line.
    pub(crate) fn next<'a, S: Sender>(&mut self, jobs: &'a mut BTreeMap<JobId, S>) -> Option<&'a mut S> {
        let id = loop {
            let id = self.0.pop_front()?;
            let Some(job) = jobs.get_mut(&id) else { continue };
            if job.has_pending() {
                break id;
            }
            *job.in_line() = false;
        };
        self.0.push_back(id);
        jobs.get_mut(&id)
    }
}
