//! How many jobs have ranks that wait, of those that ask from one address.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use fanin_limits::host_of;
use tonic::Status;

use crate::node::lock;

/// The ranks of an address may wait for half of the jobs that may wait or run at once. Others have
/// room then.
const OF_ONE_ADDRESS: u32 = 2;
/// An upstream lets ranks of a relay's address wait for a number of jobs. At the relay, the ranks of
/// an address may wait for half of that number.
const OF_ONE_AT_RELAY_MAX: usize = 64;

/// By address the names of the jobs, and how many ranks of each wait.
type Waiting = HashMap<IpAddr, BTreeMap<String, u32>>;

/// The jobs of which ranks wait.
#[derive(Debug)]
pub(in crate::node) struct WaitingJobs {
    of_one_max: usize,
    waiting: Arc<Mutex<Waiting>>,
}

/// A rank that waits, until it is dropped.
#[derive(Debug)]
pub(in crate::node) struct WaitingRank {
    address: IpAddr,
    name: String,
    waiting: Arc<Mutex<Waiting>>,
}

impl WaitingJobs {
    /// Of a root that has so many jobs at most.
    pub fn at_root(jobs_max: u32) -> Self {
        Self::new((jobs_max / OF_ONE_ADDRESS).max(1) as usize)
    }

    /// Of a switch with an upstream.
    pub fn at_relay() -> Self {
        Self::new(OF_ONE_AT_RELAY_MAX)
    }

    fn new(of_one_max: usize) -> Self {
        Self { of_one_max, waiting: Arc::default() }
    }

    /// A rank of a job begins to wait.
    ///
    /// # Errors
    /// When ranks of too many other jobs wait already that ask from this address.
    pub fn enter(&self, address: IpAddr, name: String) -> Result<WaitingRank, Status> {
        let address = host_of(address);
        let mut waiting = lock(&self.waiting);
        let of_one = waiting.get(&address);
        let is_new = of_one.is_none_or(|names| !names.contains_key(&name));
        if is_new && of_one.map_or(0, BTreeMap::len) >= self.of_one_max {
            let text =
                "ranks of too many jobs wait here already that ask from this address; start fewer at a time";
            return Err(Status::resource_exhausted(text));
        }
        *waiting.entry(address).or_default().entry(name.clone()).or_default() += 1;
        drop(waiting);
        Ok(WaitingRank { address, name, waiting: Arc::clone(&self.waiting) })
    }
}

impl Drop for WaitingRank {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting);
        let Some(names) = waiting.get_mut(&self.address) else { return };
        if let Some(count) = names.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                names.remove(&self.name);
            }
        }
        if names.is_empty() {
            waiting.remove(&self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others_and_gives_its_own_back() {
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let jobs = WaitingJobs::new(2);
        let enter = |address, name: &str| jobs.enter(address, name.into());
        let places = [enter(one, "a"), enter(one, "b"), enter(one, "b")];
        assert!(places.iter().all(Result::is_ok), "two names");
        assert!(enter(one, "c").is_err());
        assert!(enter("::ffff:10.0.0.1".parse().unwrap(), "c").is_err(), "the same one");
        let last = enter(other, "a");
        assert!(last.is_ok(), "each has its own");
        drop(last);
        drop(places);
        assert!(lock(&jobs.waiting).is_empty(), "who was here is forgotten");
        assert!(enter(one, "c").is_ok());
    }
}
