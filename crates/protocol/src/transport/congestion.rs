//! How many fragments a worker may have on the way (ATP §3.7): slow start, then additive increase,
//! multiplicative decrease.
//!
//! The signal is an ECN mark on a parameter packet, which all workers get, or a fragment that was
//! overtaken and whose parameters say that it was lost. A timeout is none: it mostly tells of a
//! late worker, and the paper does not count it either.
//!
//! Queues that mark have marked before they overflow. So after a mark a loss is no signal: links
//! lose packets for other reasons, too. And a fragment is lost if any worker's packet is: of 8
//! workers in two racks, whose links lose a hundredth each, a sixth are. But the queue that marked
//! need not be the one that overflows. So a loss is a signal again if no mark has come for long: the
//! window could have grown back [`MARKS_MISSED`] times.
//!
//! A loss is no signal either if all windows that meet at one machine fit into the buffer of a port.
//! No queue overflows for them.

/// The bytes with which a window starts: ATP's 200 packets of 300 bytes, "within the
/// bandwidth-delay product (about 60 KB) of a 100 Gbps network" (§3.7), in packets as long as those
/// of 64 elements. As many packets of 1500 bytes would be five times that.
const WINDOW_INITIAL_BYTES: usize = 200 * 328;
/// The bytes by which a window grows: an Ethernet frame's payload (ATP §3.7: "one MTU (1500 bytes
/// or 5 packets)").
const MTU_BYTES: usize = 1500;
/// A loss is a signal again if the window could have grown back so often without a mark. With two in
/// place of 16, examples/sim/racks-with-loss.toml has half the throughput.
const MARKS_MISSED: u64 = 16;
/// The port of a cheap switch holds so much.
const PORT_BYTES: usize = 100_000;
/// A mark tells of no more packets than these.
const MARK_TELLS_MAX: u64 = 1 << 16;

/// The congestion window of one worker, in packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CongestionWindow {
    size: u32,
    size_max: u32,
    packet_bytes: usize,
    /// A loss halves no window that is not longer.
    lossless: u32,
    slow_start_threshold: u32,
    packets_per_mtu: u32,
    /// Packets above the threshold that the window has grown by, in parts of `size`.
    grown: u32,
    /// Signals of packets before this one tell of the congestion that the window was halved for
    /// already.
    recovery_end: u64,
    halved: u64,
    /// Before this packet, a loss is no signal: a mark came not long ago.
    marks_tell_until: u64,
    enabled: bool,
}

impl CongestionWindow {
    /// A window for packets of `packet_bytes`, never above `size_max` packets; always there if it
    /// is not `enabled`. At most `senders` windows meet at one machine.
    pub(crate) fn new(packet_bytes: usize, size_max: u32, senders: u16, enabled: bool) -> Self {
        let packets_per_mtu = packets(MTU_BYTES, packet_bytes);
        let initial = packets(WINDOW_INITIAL_BYTES, packet_bytes).max(packets_per_mtu);
        let mut window = Self {
            size: if enabled { initial.min(size_max) } else { size_max },
            size_max,
            packet_bytes,
            lossless: 0,
            slow_start_threshold: size_max,
            packets_per_mtu,
            grown: 0,
            recovery_end: 0,
            halved: 0,
            marks_tell_until: 0,
            enabled,
        };
        window.take_way(senders);
        window
    }

    /// Packets that may be on the way.
    pub(crate) const fn size(&self) -> u32 {
        self.size
    }

    /// How often the window was halved.
    pub(crate) const fn halved(&self) -> u64 {
        self.halved
    }

    /// A parameter packet came: one MTU more. Above the threshold, and in `doubt` about a loss that may
    /// be a signal, it is one MTU more a window.
    pub(crate) fn acknowledged(&mut self, doubt: bool) {
        if !self.enabled {
            return;
        }
        if self.size < self.slow_start_threshold && !doubt {
            self.size = (self.size + self.packets_per_mtu).min(self.slow_start_threshold);
            return;
        }
        self.grown += self.packets_per_mtu;
        while self.grown >= self.size {
            self.grown -= self.size;
            self.size = (self.size + 1).min(self.size_max);
        }
    }

    /// The packet numbered `sequence` met a long queue, which marked it; `next` is the first that
    /// was not sent yet. Halves the window, once until a packet is concerned that was sent
    /// afterwards: the packets of one window tell of one congestion.
    pub(crate) fn marked(&mut self, sequence: u64, next: u64) {
        // Half of a window grows back by an MTU a window.
        let windows = self.size.div_ceil(self.packets_per_mtu);
        let once = u64::from(self.size) * u64::from(windows) / 2;
        self.marks_tell_until = self.marks_tell_until.max(next + (MARKS_MISSED * once).min(MARK_TELLS_MAX));
        self.congested(sequence, next, self.packets_per_mtu);
    }

    /// The packet numbered `sequence` was lost. Halves the window as a mark does, if that is a signal.
    pub(crate) fn lost(&mut self, sequence: u64, next: u64) {
        if self.losses_tell(sequence) {
            self.congested(sequence, next, self.lossless);
        }
    }

    /// The packets take another way from now on. At most `senders` windows meet at one machine there,
    /// and its queues may not mark.
    pub(crate) fn take_way(&mut self, senders: u16) {
        self.marks_tell_until = 0;
        let share = PORT_BYTES / usize::from(senders.max(1));
        self.lossless = packets(share, self.packet_bytes).max(self.packets_per_mtu);
    }

    /// Whether the loss of this packet would be a signal.
    pub(crate) const fn losses_tell(&self, sequence: u64) -> bool {
        sequence >= self.marks_tell_until && self.size > self.lossless
    }

    /// Halves the window, to no less than `least`.
    fn congested(&mut self, sequence: u64, next: u64, least: u32) {
        if !self.enabled || sequence < self.recovery_end {
            return;
        }
        self.recovery_end = next;
        self.size = (self.size / 2).max(least).min(self.size_max);
        self.slow_start_threshold = self.size;
        self.grown = 0;
        self.halved += 1;
    }
}

/// Packets of so many bytes, one at least.
fn packets(bytes: usize, packet_bytes: usize) -> u32 {
    u32::try_from(bytes / packet_bytes).map_or(1, |packets| packets.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet of 64 elements.
    const SMALL: usize = 328;
    const FRAME: usize = 1408;
    /// So many that a port holds a packet of each, if that.
    const MANY: u16 = 1000;

    /// Parameter packets until the window has another size.
    fn until_it_grows(window: &mut CongestionWindow) -> u32 {
        let before = window.size();
        (1..)
            .find(|_| {
                window.acknowledged(false);
                window.size() != before
            })
            .unwrap_or(u32::MAX)
    }

    #[test]
    fn a_window_of_200_packets_grows_by_an_mtu_a_parameter_up_to_the_threshold_then_by_one_a_window() {
        let mut window = CongestionWindow::new(SMALL, 1000, MANY, true);
        // (what happens, the window after it)
        assert_eq!(window.size(), 200);
        for expected in [204, 208, 212] {
            window.acknowledged(false);
            assert_eq!(window.size(), expected);
        }
        window.marked(50, 212);
        assert_eq!(window.size(), 106);
        // Four packets, an MTU, in 106 parameters.
        let rounds: u32 = (0..4).map(|_| until_it_grows(&mut window)).sum();
        assert_eq!(window.size(), 110);
        assert!((106..=109).contains(&rounds), "{rounds}");
    }

    #[test]
    fn a_window_starts_with_as_many_bytes_whatever_the_length_of_its_packets() {
        let packets = [(SMALL, 200), (FRAME, 46), (9000, 7), (100_000, 1)];
        for (bytes, expected) in packets {
            assert_eq!(CongestionWindow::new(bytes, 1000, MANY, true).size(), expected, "{bytes}");
        }
    }

    #[test]
    fn the_signals_of_one_window_halve_it_once() {
        let mut window = CongestionWindow::new(FRAME, 400, MANY, true);
        (0..154).for_each(|_| window.acknowledged(false));
        let timeline = [
            // (marked packet, next to be sent, window)
            (10, 210, 100),
            (11, 211, 100),
            (209, 300, 100),
            (210, 310, 50),
            (309, 350, 50),
            (310, 350, 25),
        ];
        for (sequence, next, expected) in timeline {
            window.marked(sequence, next);
            assert_eq!(window.size(), expected, "mark on {sequence}");
        }
        assert_eq!(window.halved(), 3);
    }

    #[test]
    fn the_window_stays_within_one_mtu_and_the_jobs_window() {
        let mut window = CongestionWindow::new(SMALL, 202, MANY, true);
        for _ in 0..1000 {
            window.acknowledged(false);
        }
        assert_eq!(window.size(), 202);
        for round in 0..20 {
            window.marked(1000 * round, 1000 * round + 1);
        }
        assert_eq!(window.size(), 4);
        let mut narrow = CongestionWindow::new(SMALL, 1, MANY, true);
        narrow.lost(0, 1);
        assert_eq!(narrow.size(), 1, "also where the job's window is less than an MTU");
    }

    #[test]
    fn where_queues_mark_a_lost_packet_halves_nothing() {
        let mut unmarked = CongestionWindow::new(FRAME, 400, MANY, true);
        unmarked.lost(5, 46);
        assert_eq!(unmarked.size(), 23);
        let mut window = CongestionWindow::new(FRAME, 400, MANY, true);
        window.marked(5, 46);
        assert_eq!((window.size(), window.halved()), (23, 1));
        // One in six, for windows on end.
        for sequence in 46..1046 {
            window.acknowledged(window.losses_tell(sequence));
            if sequence % 6 == 0 {
                window.lost(sequence, sequence + 23);
            }
        }
        assert_eq!((window.size(), window.halved()), (50, 1), "one MTU more a window");
        window.marked(1046, 1096);
        assert_eq!((window.size(), window.halved()), (25, 2));
        // A window of 50 is whole again after 25 windows, and no mark has come in 16 times that.
        let long = 16 * 25 * 50;
        window.lost(1096 + long - 1, 1096 + long);
        assert_eq!((window.size(), window.halved()), (25, 2));
        window.lost(1096 + long, 1096 + long + 1);
        assert_eq!((window.size(), window.halved()), (12, 3));
        // On another way the marks of this one tell nothing.
        window.marked(100_000, 100_012);
        window.take_way(MANY);
        window.lost(100_020, 100_032);
        assert_eq!((window.size(), window.halved()), (3, 5));
        // A mark of a large window tells of 65,536 packets.
        let mut large = CongestionWindow::new(FRAME, 1000, MANY, true);
        (0..954).for_each(|_| large.acknowledged(false));
        large.marked(1000, 2000);
        assert!(!large.losses_tell(2000 + (1 << 16) - 1) && large.losses_tell(2000 + (1 << 16)));
    }

    #[test]
    fn a_loss_halves_no_window_for_which_no_queue_can_overflow_and_a_mark_does() {
        // Room for 35 packets.
        let mut window = CongestionWindow::new(FRAME, 400, 2, true);
        let timeline = [
            // (parameters before, lost packet, next to be sent, window)
            (4, 10, 60, 35),
            (0, 60, 95, 35),
            // Slow start is over: one more in a window.
            (72, 95, 130, 35),
            (0, 130, 165, 35),
        ];
        for (parameters, sequence, next, expected) in timeline {
            (0..parameters).for_each(|_| window.acknowledged(window.losses_tell(sequence)));
            window.lost(sequence, next);
            assert_eq!(window.size(), expected, "loss of {sequence}");
        }
        assert_eq!(window.halved(), 2, "from 50 and from 37");
        window.marked(165, 200);
        assert_eq!((window.size(), window.halved()), (17, 3));
    }

    #[test]
    fn switched_off_it_is_the_jobs_window_whatever_happens() {
        let mut window = CongestionWindow::new(FRAME, 500, MANY, false);
        window.marked(3, 10);
        window.lost(20, 30);
        window.acknowledged(false);
        assert_eq!((window.size(), window.halved()), (500, 0));
    }
}
