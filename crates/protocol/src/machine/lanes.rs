//! The lanes of one job that one thread drives: a machine for each, all on one socket.

use alloc::vec::Vec;
use fanin_wire::{JobId, Preamble, ShardId};

use super::{Endpoint, Instant, Packet, Reason, Transmit, Verdict};

/// A machine, and whose packets it takes.
pub struct Lane<M: Endpoint> {
    /// The machine at the other end.
    pub peer: M::Address,
    /// The job there. A service that took over what another one summed has several of ours.
    pub job: JobId,
    /// Which of that one's shards.
    pub shard: ShardId,
    /// The machine.
    pub machine: M,
}

/// Several lanes as one machine. Packets go to the lane of their sender, job and shard; trains
/// leave the lanes in turn.
pub struct Lanes<M: Endpoint> {
    lanes: Vec<Lane<M>>,
    /// The lane whose packet came last: those of one train are all for one lane.
    last: usize,
    /// The lane whose turn it is to send.
    turn: usize,
}

impl<M: Endpoint> Lanes<M> {
    /// No two lanes have the same peer, job and shard.
    #[must_use]
    pub const fn new(lanes: Vec<Lane<M>>) -> Self {
        Self { lanes, last: 0, turn: 0 }
    }

    /// The lane at this place in the list that they were made of.
    pub fn lane(&mut self, index: usize) -> Option<&mut Lane<M>> {
        self.lanes.get_mut(index)
    }

    /// All lanes, in that order.
    pub fn iter(&self) -> impl Iterator<Item = &Lane<M>> {
        self.lanes.iter()
    }

    /// All lanes, in that order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Lane<M>> {
        self.lanes.iter_mut()
    }
}

impl<M: Endpoint<Address: PartialEq>> Lanes<M> {
    /// Which lane a packet is for, or why it is for none. The address is not copied: to move it
    /// about would wait until the sums of the packet before are in the cache.
    fn lane_of(&self, from: &M::Address, packet: &Packet<'_>) -> Result<usize, Reason> {
        // A machine that is alone judges for itself.
        if self.lanes.len() == 1 {
            return Ok(0);
        }
        let Preamble { job, shard, .. } = packet.preamble;
        let is_of = |lane: &Lane<M>| lane.job == job && lane.shard == shard && lane.peer == *from;
        if self.lanes.get(self.last).is_some_and(is_of) {
            return Ok(self.last);
        }
        self.lanes.iter().position(is_of).ok_or(Reason::Foreign)
    }
}

impl<M: Endpoint<Address: PartialEq>> Endpoint for Lanes<M> {
    type Address = M::Address;
    /// With the lane's place in the list.
    type Event = (usize, M::Event);

    fn receive(&mut self, now: Instant, from: &M::Address, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.last = self.lane_of(from, packet)?;
        self.lanes[self.last].machine.receive(now, from, packet)
    }

    /// The lane whose packet came last counts it. That lane also counts packets that are for none.
    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.lanes.get_mut(self.last).map_or(verdict, |lane| lane.machine.count(verdict))
    }

    fn handle_timeout(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            if lane.machine.poll_timeout().is_some_and(|due| due <= now) {
                lane.machine.handle_timeout(now);
            }
        }
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, M::Address>> {
        let count = self.lanes.len();
        for step in 0..count {
            let lane = (self.turn + step) % count;
            // The borrow ends with the call, as the answer's `to` is asked for again below.
            let written = self.lanes[lane].machine.poll_transmit(now, train);
            if let Some(Transmit { bytes, segment_bytes, .. }) = written {
                self.turn = (lane + 1) % count;
                // A worker's packets go to its one peer.
                let to = core::slice::from_ref(&self.lanes[lane].peer);
                return Some(Transmit { to, bytes, segment_bytes });
            }
        }
        None
    }

    fn poll_event(&mut self) -> Option<(usize, M::Event)> {
        self.lanes.iter_mut().enumerate().find_map(|(place, lane)| Some((place, lane.machine.poll_event()?)))
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.lanes.iter().filter_map(|lane| lane.machine.poll_timeout()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use fanin_wire::{Generation, Kind, WorkerId};

    /// Counts the packets that it took, and the drops. It sends as many trains as it is told to.
    struct Machine {
        taken: usize,
        dropped: usize,
        trains: usize,
        due: Option<Instant>,
        to: u8,
    }

    impl Endpoint for Machine {
        type Address = u8;
        type Event = ();

        fn receive(&mut self, _: Instant, _: &u8, _: &Packet<'_>) -> Result<Verdict, Reason> {
            self.taken += 1;
            Ok(Verdict::Absorb)
        }

        fn count(&mut self, verdict: Verdict) -> Verdict {
            self.dropped += usize::from(matches!(verdict, Verdict::Drop(_)));
            verdict
        }

        fn handle_timeout(&mut self, _: Instant) {
            self.due = None;
        }

        fn poll_transmit(&mut self, _: Instant, train: &mut [u8]) -> Option<Transmit<'_, u8>> {
            self.trains = self.trains.checked_sub(1)?;
            train[0] = self.to;
            Some(Transmit { to: core::slice::from_ref(&self.to), bytes: 1, segment_bytes: 1 })
        }

        fn poll_event(&mut self) -> Option<()> {
            None
        }

        fn poll_timeout(&self) -> Option<Instant> {
            self.due
        }
    }

    fn lane(peer: u8, shard: u8, trains: usize) -> Lane<Machine> {
        let machine = Machine { taken: 0, dropped: 0, trains, due: Some(Instant(u64::from(peer))), to: peer };
        Lane { peer, job: JobId(1), shard: ShardId(shard), machine }
    }

    fn packet(shard: u8) -> [u8; 12] {
        packet_of(JobId(1), shard)
    }

    fn packet_of(job: JobId, shard: u8) -> [u8; 12] {
        let preamble = Preamble {
            kind: Kind::Result,
            job,
            generation: Generation(1),
            worker: WorkerId(0),
            shard: ShardId(shard),
        };
        preamble.to_bytes()
    }

    #[test]
    fn a_packet_goes_to_the_lane_of_its_sender_and_shard() {
        let mut lanes = Lanes::new(vec![lane(7, 0, 0), lane(7, 1, 0), lane(8, 0, 0)]);
        for (from, shard) in [(7, 1), (7, 1), (8, 0), (7, 0), (7, 1)] {
            assert_eq!(lanes.handle_packet(Instant(0), from, &packet(shard)), Verdict::Absorb);
        }
        assert_eq!(lanes.handle_packet(Instant(0), 9, &packet(0)), Verdict::Drop(Reason::Foreign));
        assert_eq!(lanes.handle_packet(Instant(0), 8, &packet(1)), Verdict::Drop(Reason::Foreign));
        assert_eq!(lanes.handle_packet(Instant(0), 8, b"short"), Verdict::Drop(Reason::Malformed));
        assert_eq!(lanes.iter_mut().map(|lane| lane.machine.taken).collect::<Vec<_>>(), [1, 3, 1]);
        let dropped: Vec<_> = lanes.iter().map(|lane| lane.machine.dropped).collect();
        assert_eq!(dropped, [0, 3, 0], "the lane whose packet came last counts the three strays");
    }

    #[test]
    fn a_service_with_two_of_our_jobs_is_heard_in_both() {
        let other = Lane { job: JobId(2), ..lane(7, 0, 0) };
        let mut lanes = Lanes::new(vec![lane(7, 0, 0), other]);
        for job in [2, 1, 2] {
            assert_eq!(lanes.handle_packet(Instant(0), 7, &packet_of(JobId(job), 0)), Verdict::Absorb);
        }
        assert_eq!(
            lanes.handle_packet(Instant(0), 7, &packet_of(JobId(3), 0)),
            Verdict::Drop(Reason::Foreign)
        );
        assert_eq!(lanes.iter_mut().map(|lane| lane.machine.taken).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn lanes_send_in_turn() {
        let mut lanes = Lanes::new(vec![lane(7, 0, 3), lane(8, 0, 1), lane(9, 0, 2)]);
        let mut train = [0; 16];
        let mut sent = vec![];
        while let Some(transmit) = lanes.poll_transmit(Instant(0), &mut train) {
            sent.push(transmit.to[0]);
        }
        assert_eq!(sent, [7, 8, 9, 7, 9, 7]);
    }

    #[test]
    fn the_first_timer_wakes_all_whose_time_has_come() {
        let mut lanes = Lanes::new(vec![lane(7, 0, 0), lane(8, 0, 0), lane(9, 0, 0)]);
        assert_eq!(lanes.poll_timeout(), Some(Instant(7)));
        lanes.handle_timeout(Instant(8));
        assert_eq!(lanes.poll_timeout(), Some(Instant(9)));
    }
}
