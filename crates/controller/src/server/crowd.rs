//! How many of a kind there may be at once, and how many from one address: nobody takes the place of all others.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fanin_guests::host_of;

/// By address the names that are here, each once for all who came under it.
type Here = HashMap<IpAddr, BTreeMap<String, u32>>;

/// Those who are here.
#[derive(Clone, Debug)]
pub(super) struct Crowd {
    max: usize,
    of_one_max: usize,
    here: Arc<Mutex<Here>>,
}

/// A place among them, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    address: IpAddr,
    name: String,
    here: Arc<Mutex<Here>>,
}

impl Crowd {
    pub fn new(max: usize, of_one_max: usize) -> Self {
        Self { max, of_one_max, here: Arc::default() }
    }

    /// `None` when there is no place, or none for somebody from this address.
    pub fn enter(&self, address: IpAddr, name: String) -> Option<Place> {
        let address = host_of(address);
        let mut here = lock(&self.here);
        let all: usize = here.values().map(BTreeMap::len).sum();
        let of_one = here.get(&address);
        let is_new = of_one.is_none_or(|names| !names.contains_key(&name));
        if is_new && (all >= self.max || of_one.map_or(0, BTreeMap::len) >= self.of_one_max) {
            return None;
        }
        *here.entry(address).or_default().entry(name.clone()).or_default() += 1;
        drop(here);
        Some(Place { address, name, here: Arc::clone(&self.here) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut here = lock(&self.here);
        let Some(names) = here.get_mut(&self.address) else { return };
        if let Some(count) = names.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                names.remove(&self.name);
            }
        }
        if names.is_empty() {
            here.remove(&self.address);
        }
    }
}

fn lock(here: &Mutex<Here>) -> MutexGuard<'_, Here> {
    here.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others_and_gives_its_own_back() {
        let [one, other, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let crowd = Crowd::new(3, 2);
        let enter = |address, name: &str| crowd.enter(address, name.into());
        let places = [enter(one, "a"), enter(one, "b"), enter(one, "b")];
        assert!(places.iter().all(Option::is_some), "two names");
        assert!(enter(one, "c").is_none());
        assert!(enter("::ffff:10.0.0.1".parse().unwrap(), "c").is_none(), "the same one");
        let last = enter(other, "a");
        assert!(last.is_some() && enter(third, "a").is_none(), "all are taken");
        drop(last);
        drop(places);
        assert!(lock(&crowd.here).is_empty(), "who was here is forgotten");
        assert!(enter(one, "c").is_some());
    }
}
