//! Packets that only pass through a switch.
//!
//! A sum waits in its aggregator until it is sent. A packet that found no aggregator, is sent
//! again, or comes down from the server has no place of its own in a switch: it waits here, between
//! two drains.

use alloc::vec::Vec;

/// Bytes that wait at most, of all jobs together: several times what a driver brings between two
/// drains.
const PASSING_BYTES_MAX: usize = 4 << 20;

/// The packets of all jobs, both ways. Their memory is free again when the last of them is taken,
/// and is kept for those to come.
#[derive(Debug, Default)]
pub(super) struct Passing {
    bytes: Vec<u8>,
    end: usize,
    /// Packets that were not taken.
    waiting: usize,
}

/// One of them.
#[derive(Debug)]
pub(super) struct PassingPacket {
    begin: usize,
    length: usize,
}

impl PassingPacket {
    pub(super) const fn len(&self) -> usize {
        self.length
    }
}

impl Passing {
    /// Keeps a packet of `length` that `write` fills; it holds old bytes until then. `None` without
    /// room for it: this is a queue of a network that may lose packets.
    pub(super) fn push(&mut self, length: usize, write: impl FnOnce(&mut [u8])) -> Option<PassingPacket> {
        let begin = self.end;
        let end = begin.checked_add(length).filter(|end| *end <= PASSING_BYTES_MAX)?;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        write(&mut self.bytes[begin..end]);
        self.end = end;
        self.waiting += 1;
        Some(PassingPacket { begin, length })
    }

    /// The bytes of a packet, which waits no longer.
    pub(super) fn take(&mut self, packet: PassingPacket) -> &[u8] {
        let PassingPacket { begin, length } = packet;
        self.waiting -= 1;
        if self.waiting == 0 {
            self.end = 0;
        }
        &self.bytes[begin..begin + length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn packets_are_taken_in_any_order_and_their_memory_is_used_again() {
        let mut passing = Passing::default();
        for round in 0..3 {
            let packets = [1, 2, 3].map(|value| passing.push(2, |out| out.fill(10 * round + value)).unwrap());
            let [one, two, three] = packets;
            assert_eq!(passing.take(two), [10 * round + 2; 2]);
            assert_eq!(passing.take(three), [10 * round + 3; 2]);
            assert_eq!(passing.take(one), [10 * round + 1; 2]);
            assert_eq!(passing.bytes.len(), 6);
        }
    }

    #[test]
    fn without_room_a_packet_is_refused_until_all_are_taken() {
        let mut passing = Passing::default();
        let taken: vec::Vec<_> = core::iter::from_fn(|| passing.push(8256, |_| {})).collect();
        assert_eq!(taken.len(), PASSING_BYTES_MAX / 8256);
        for packet in taken {
            assert!(passing.push(8256, |_| {}).is_none());
            passing.take(packet);
        }
        assert!(passing.push(8256, |_| {}).is_some());
        assert!(passing.push(usize::MAX, |_| {}).is_none());
    }
}
