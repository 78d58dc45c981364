//! The addresses of a machine's children.

use alloc::vec;
use alloc::vec::Vec;

/// The addresses of the switches and workers whose packets come to a machine.
///
/// ATP's child is known by its place in the directions of a packet, and its last packet says where
/// it is. An address may change under a worker (NAT, DHCP, another route, another process in its
/// place), and then its next packet mends everything. A copy from the old address that comes late
/// sends one round astray, until the child sends again. The tag proves that a packet is of a member
/// of the job, and nothing which one; that is so with SwitchML too. GOAT's packets come from
/// neighbours that need not be children: control says where the children are, and when one is
/// elsewhere.
#[derive(Debug)]
pub struct Children<A> {
    known: Vec<Option<A>>,
    /// The known addresses in a row, each once: several children may be at one.
    addresses: Vec<A>,
}

impl<A: Copy + PartialEq> Children<A> {
    /// Nobody was heard of yet, of so many.
    pub(crate) fn new(count: usize) -> Self {
        Self { known: vec![None; count], addresses: Vec::with_capacity(count) }
    }

    /// So many, of whom the first are where it is said.
    pub(crate) fn known(count: usize, first: &[A]) -> Self {
        let mut children = Self::new(count.max(first.len()));
        first.iter().enumerate().for_each(|(child, address)| children.learn(child, *address));
        children
    }

    /// A packet of this child came from here.
    pub(super) fn learn(&mut self, child: usize, from: A) {
        let before = self.known[child].replace(from);
        if before == Some(from) {
            return;
        }
        if let Some(before) = before
            && !self.known.contains(&Some(before))
        {
            self.addresses.retain(|address| *address != before);
        }
        if !self.addresses.contains(&from) {
            self.addresses.push(from);
        }
    }

    /// The address of a child, if that is known.
    pub(super) fn address(&self, child: usize) -> &[A] {
        self.known[child].as_slice()
    }

    /// Puts the addresses of some of them into `some`, each once.
    pub(super) fn addresses_of(&self, is_meant: impl Fn(usize) -> bool, some: &mut Vec<A>) {
        some.clear();
        for (_, address) in self.known.iter().enumerate().filter(|(child, _)| is_meant(*child)) {
            some.extend(address.filter(|address| !some.contains(address)));
        }
    }

    /// Where they are.
    pub(super) fn addresses(&self) -> &[A] {
        &self.addresses
    }
}
