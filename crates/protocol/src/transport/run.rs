//! A train as it is written: packets of one size.

use crate::machine::Transmit;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    bytes: usize,
    segment_bytes: usize,
}

impl Run {
    /// Whether a packet of this size belongs to the train, and has room; the first one decides the
    /// size.
    #[inline]
    pub(crate) const fn takes(&self, packet_bytes: usize, train: &[u8]) -> bool {
        (self.bytes == 0 || packet_bytes == self.segment_bytes) && self.bytes + packet_bytes <= train.len()
    }

    /// The place of the next packet, which the train takes.
    #[inline]
    pub(crate) fn packet<'a>(&mut self, packet_bytes: usize, train: &'a mut [u8]) -> &'a mut [u8] {
        let at = self.bytes;
        self.segment_bytes = packet_bytes;
        self.bytes += packet_bytes;
        &mut train[at..at + packet_bytes]
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The packets to be sent and their recipients; `None` when there are none. `None` when nothing
    /// is.
    #[inline]
    pub(crate) fn to<A>(self, to: &[A]) -> Option<Transmit<'_, A>> {
        let Self { bytes, segment_bytes } = self;
        (bytes > 0).then_some(Transmit { to, bytes, segment_bytes })
    }
}
