//! How many packets a worker may have on the way: one a slot, until a queue on the way proves too
//! short for that.
//!
//! A link that loses a packet now and then is no reason to send less: a queue without room shows
//! when a quarter of a window is missing. And if nothing comes at all for a while, that proves
//! nothing yet: mostly a worker is late. After such a pause a few packets are sent again, as TCP
//! does after a timeout, and the others are in doubt. An answer to one of those shows that the
//! pause was none of the network's: the window is what it was. An answer to a packet that was sent
//! since, while they wait, shows that they are lost: the window begins anew (the idea of F-RTO, RFC
//! 5682, and Eifel, RFC 3522).

/// The least window after losses: below that, round trips and trains of a packet or two cost time.
const LEAST: u32 = 8;
/// The window with which it begins anew, and how many packets are sent again to learn what a pause
/// was.
pub(super) const ANEW: u32 = 4;
/// Windows that are answered before one that shrank grows by a packet: to find out that it was one
/// too many costs a timeout.
const CAREFUL: u32 = 8;

/// The window of one worker to one switch, in packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    size: u32,
    slots: u32,
    /// Up to here it grows by a packet an answer, from here by a packet in so many windows.
    threshold: u32,
    /// Answers since it grew by a packet.
    grown: u32,
    /// Packets that were lost, and answered, since a whole window was answered last.
    lost: u32,
    answered: u32,
    /// Losses of packets before this one are of the round trip that it shrank for already.
    recovery_end: u64,
    doubt: Option<Doubt>,
}

/// A pause that is not explained yet, and what the window was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doubt {
    size: u32,
    threshold: u32,
    /// Whether anything was answered since.
    answered: bool,
}

/// What was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// A packet that was sent once, and not before a pause that is not explained yet.
    Once,
    /// A packet that was sent more than once.
    Again,
    /// A packet that was in doubt.
    InDoubt,
}

/// The cause of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Somebody was late. Packets in doubt are on the way.
    Lateness,
    /// Packets in doubt are lost.
    Loss,
    /// Nothing is left that could tell: the stream is at its end.
    Unknown,
}

impl Window {
    /// A window over a pool of so many slots, which begins with all of them.
    pub(super) const fn new(slots: u16) -> Self {
        let slots = slots as u32;
        Self {
            size: slots,
            slots,
            threshold: slots,
            grown: 0,
            lost: 0,
            answered: 0,
            recovery_end: 0,
            doubt: None,
        }
    }

    /// Packets that may be on the way.
    pub(super) const fn size(&self) -> u32 {
        self.size
    }

    /// The packet numbered `number` was lost, while others were answered; `next` is the first that
    /// was not sent yet. When a quarter of a window is, it is halved, once a round trip.
    pub(super) fn lost(&mut self, number: u64, next: u64) {
        if number < self.recovery_end {
            return;
        }
        self.lost += 1;
        if 4 * self.lost >= self.size {
            self.size = self.half();
            self.threshold = self.size;
            self.recovery_end = next;
            (self.grown, self.lost, self.answered) = (0, 0, 0);
        }
    }

    /// Nothing was answered for a timeout, and so many packets are on the way; the number of the
    /// next is `next`. Whether they are in doubt now, but for a few that are sent again.
    pub(super) fn paused(&mut self, on_the_way: u32, next: u64) -> bool {
        if self.doubt.is_some() || on_the_way <= ANEW || 2 * on_the_way < self.size {
            return false;
        }
        self.doubt = Some(Doubt { size: self.size, threshold: self.threshold, answered: false });
        self.threshold = self.threshold.min(self.half().max(LEAST.min(self.slots)));
        self.size = ANEW;
        self.recovery_end = next;
        (self.grown, self.lost, self.answered) = (0, 0, 0);
        true
    }

    /// Whether there is a pause that is not explained yet.
    pub(super) const fn doubts(&self) -> bool {
        self.doubt.is_some()
    }

    /// Nothing was answered for a timeout once more. Whether that explains the pause before it: who
    /// was late then had come.
    pub(super) fn paused_again(&self) -> bool {
        self.doubt.is_some_and(|doubt| doubt.answered)
    }

    /// The pause is explained.
    pub(super) const fn explained(&mut self, cause: Cause) {
        let Some(doubt) = self.doubt.take() else { return };
        match cause {
            Cause::Lateness => (self.size, self.threshold) = (doubt.size, doubt.threshold),
            Cause::Loss => {}
            // It begins anew, but is soon what it was.
            Cause::Unknown => self.threshold = doubt.size,
        }
    }

    /// A packet was answered. Returns what that says of the pause before, if anything.
    #[inline]
    pub(super) fn answered(&mut self, what: Answered) -> Option<Cause> {
        if self.size == self.slots && self.lost == 0 {
            return None;
        }
        self.answered_in_small(what)
    }

    fn answered_in_small(&mut self, what: Answered) -> Option<Cause> {
        if let Some(doubt) = &mut self.doubt {
            doubt.answered = true;
            return match what {
                Answered::Once => Some(Cause::Loss),
                Answered::Again => None,
                Answered::InDoubt => Some(Cause::Lateness),
            };
        }
        self.answered += 1;
        if self.answered >= self.size {
            (self.lost, self.answered) = (0, 0);
        }
        self.grown += 1;
        if self.size < self.threshold || self.grown >= CAREFUL * self.size {
            self.size = (self.size + 1).min(self.slots);
            self.grown = 0;
        }
        None
    }

    /// Half of it, but not less than losses leave.
    fn half(&self) -> u32 {
        (self.size / 2).max(LEAST.min(self.size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_a_window_that_is_lost_halves_it_once_and_single_losses_do_not() {
        let mut window = Window::new(64);
        for packet in 0..1000 {
            window.answered(Answered::Once);
            // Every eighth is lost.
            if packet % 8 == 0 {
                window.lost(packet, packet + 64);
            }
        }
        assert_eq!(window.size(), 64);
        (2000..2064).for_each(|packet| window.lost(packet, 2064));
        assert_eq!(window.size(), 32);
        let grows_after = (1..).find(|_| {
            window.answered(Answered::Once);
            window.size() == 33
        });
        assert_eq!(grows_after, Some(32 * CAREFUL));
        for round in 40..50 {
            (64 * round..64 * round + 64).for_each(|packet| window.lost(packet, 64 * round + 64));
        }
        assert_eq!(window.size(), LEAST);
    }

    #[test]
    fn after_a_pause_an_answer_to_what_was_not_sent_again_brings_the_window_back() {
        let mut window = Window::new(32);
        assert!(!window.paused(15, 100), "less than half a window");
        assert!(window.paused(32, 100));
        assert_eq!(window.size(), ANEW);
        assert!(!window.paused(ANEW, 104) && !window.paused_again(), "who is late may be so for long");
        assert_eq!(window.answered(Answered::Again), None);
        assert_eq!(window.answered(Answered::InDoubt), Some(Cause::Lateness));
        window.explained(Cause::Lateness);
        assert_eq!(window, Window { recovery_end: 100, ..Window::new(32) });
    }

    #[test]
    fn after_a_pause_an_answer_to_what_was_sent_since_begins_the_window_anew() {
        let mut window = Window::new(32);
        assert!(window.paused(32, 100));
        assert_eq!(window.answered(Answered::Again), None);
        assert!(window.paused_again(), "or that nothing follows");
        assert_eq!(window.answered(Answered::Once), Some(Cause::Loss));
        window.explained(Cause::Loss);
        (0..12).for_each(|_| assert_eq!(window.answered(Answered::Again), None));
        assert_eq!(window.size(), 16, "soon half of what it was");
        window.answered(Answered::Once);
        assert_eq!(window.size(), 16);
        let mut at_the_end = Window::new(32);
        assert!(at_the_end.paused(32, 100));
        at_the_end.explained(Cause::Unknown);
        assert_eq!(at_the_end.size(), ANEW);
        (0..28).for_each(|_| assert_eq!(at_the_end.answered(Answered::Again), None));
        assert_eq!(at_the_end.size(), 32);
    }

    #[test]
    fn a_pool_of_a_few_slots_has_no_smaller_window() {
        let mut window = Window::new(4);
        assert!(!window.paused(4, 5));
        (0..4).for_each(|packet| window.lost(packet, 5));
        assert_eq!(window.size(), 4);
    }
}
