//! How much there is of something, and how much of it one host may have: nobody takes what all
//! others need.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{host_of, of_host_max};

/// An amount that may be in use, of all together and of one host.
#[derive(Clone, Debug)]
pub struct Budget {
    max: usize,
    of_one_max: usize,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// An amount in use, until it is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    host: IpAddr,
    amount: usize,
}

impl Budget {
    /// `of_one_max` is for one address; a network of IPv6 may have half of all.
    #[must_use]
    pub fn new(max: usize, of_one_max: usize) -> Self {
        Self { max, of_one_max, taken: Arc::default() }
    }

    /// `None` when there is no room, or none for somebody from this address.
    #[must_use]
    pub fn take(&self, address: IpAddr, amount: usize) -> Option<Reservation> {
        let mut reservation = Reservation { budget: self.clone(), host: host_of(address), amount: 0 };
        reservation.grow(amount).then_some(reservation)
    }

    /// Takes so much, whatever room there is.
    #[must_use]
    pub fn take_anyway(&self, amount: usize) -> Reservation {
        let host = IpAddr::from([0; 4]);
        *self.taken().entry(host).or_default() += amount;
        Reservation { budget: self.clone(), host, amount }
    }

    /// The rest of the room for an address.
    #[must_use]
    pub fn left_for(&self, address: IpAddr) -> usize {
        self.left(&self.taken(), host_of(address))
    }

    fn left(&self, taken: &HashMap<IpAddr, usize>, host: IpAddr) -> usize {
        let of_one = taken.get(&host).copied().unwrap_or_default();
        let of_one_left = of_host_max(host, self.max, self.of_one_max).saturating_sub(of_one);
        self.max.saturating_sub(taken.values().sum()).min(of_one_left)
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Whether there is room for so much more, which is taken then.
    pub fn grow(&mut self, amount: usize) -> bool {
        let mut taken = self.budget.taken();
        if amount > self.budget.left(&taken, self.host) {
            return false;
        }
        if amount > 0 {
            *taken.entry(self.host).or_default() += amount;
        }
        drop(taken);
        self.amount += amount;
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut taken = self.budget.taken();
        let Some(of_one) = taken.get_mut(&self.host) else { return };
        *of_one -= self.amount;
        if *of_one == 0 {
            taken.remove(&self.host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_room_for_others_and_gives_its_own_back() {
        let [one, other, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let budget = Budget::new(6, 4);
        let mut first = budget.take(one, 2).expect("room");
        assert!(first.grow(2) && !first.grow(1) && budget.take(one, 1).is_none());
        assert!(budget.take("::ffff:10.0.0.1".parse().unwrap(), 1).is_none(), "the same one");
        let last = budget.take(other, 2).expect("room");
        assert!(budget.take(third, 1).is_none(), "all is taken");
        drop((first, last));
        assert!(budget.taken().is_empty(), "who was here is forgotten");
        let [network, same] = ["fd00::1", "fd00::2"].map(|text| text.parse().unwrap());
        let _first = budget.take(network, 3).expect("half");
        assert!(budget.take(same, 2).is_none(), "a network is one");
    }
}
