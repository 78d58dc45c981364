//! Packets that wait to be sent, in the order in which they came.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Bytes that wait at most: some trains of a driver, and far more than what one batch of packets can bring.
const OUTBOX_BYTES_MAX: usize = 4 << 20;

/// The packets for one destination. Its memory is kept for those to come.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    /// What waits is `bytes[begin..end]`.
    begin: usize,
    end: usize,
    lengths: VecDeque<u16>,
}

impl Outbox {
    /// Number of packets that wait.
    pub(super) fn len(&self) -> usize {
        self.lengths.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Appends a packet of `length` that `write` fills; it holds old bytes until then. Without room for it, nothing happens and
    /// the answer is false: this is a queue of a network that may lose packets.
    pub(super) fn push(&mut self, length: usize, write: impl FnOnce(&mut [u8])) -> bool {
        let (Some(end), Ok(short)) = (self.end.checked_add(length), u16::try_from(length)) else {
            return false;
        };
        if end > OUTBOX_BYTES_MAX {
            return false;
        }
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        write(&mut self.bytes[self.end..end]);
        self.end = end;
        self.lengths.push_back(short);
        true
    }

    /// Moves the next packets, as long as they have one size, into `train`: how many bytes, and of what size each.
    pub(super) fn fill(&mut self, train: &mut [u8]) -> Option<(usize, usize)> {
        let segment_bytes = usize::from(*self.lengths.front()?);
        let mut bytes = 0;
        while self.lengths.front().is_some_and(|length| usize::from(*length) == segment_bytes)
            && bytes + segment_bytes <= train.len()
        {
            self.lengths.pop_front();
            bytes += segment_bytes;
        }
        train[..bytes].copy_from_slice(&self.bytes[self.begin..self.begin + bytes]);
        self.begin += bytes;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
        (bytes > 0).then_some((bytes, segment_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn packets_of_one_size_leave_as_one_train_in_their_order() {
        let mut outbox = Outbox::default();
        for (length, value) in [(3, 1), (3, 2), (2, 3), (3, 4)] {
            assert!(outbox.push(length, |out| out.fill(value)));
        }
        assert_eq!(outbox.len(), 4);
        let mut train = [0; 5];
        let mut trains = vec![];
        while let Some((bytes, segment_bytes)) = outbox.fill(&mut train) {
            trains.push((train[..bytes].to_vec(), segment_bytes));
        }
        let expected = [(vec![1, 1, 1], 3), (vec![2, 2, 2], 3), (vec![3, 3], 2), (vec![4, 4, 4], 3)];
        assert_eq!(trains, expected, "five bytes hold one packet of three");
        outbox.push(3, |out| out.fill(5));
        outbox.push(3, |out| out.fill(6));
        assert_eq!(outbox.fill(&mut [0; 64]), Some((6, 3)));
        assert!(outbox.is_empty());
    }

    #[test]
    fn a_full_outbox_refuses_and_takes_again_once_drained() {
        let mut outbox = Outbox::default();
        let taken = (0..1000).take_while(|_| outbox.push(8256, |_| {})).count();
        assert_eq!(taken, OUTBOX_BYTES_MAX / 8256);
        let mut train = vec![0; 65536];
        while outbox.fill(&mut train).is_some() {}
        assert!(outbox.push(8256, |_| {}));
    }
}
