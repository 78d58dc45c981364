//! A port at work: into a queue or past it, out into the link, and over it.

use super::core::{Core, Event};
use super::ids::PortId;
use super::packets::{Ecn, PacketId};
use super::queue::{Buffer, Order};
use super::statistics::DropReason;
use super::time::Time;

impl Core {
    /// A packet is to leave by a port: at once, after others, or not at all.
    pub(crate) fn enqueue(&mut self, packet: PacketId, id: PortId) {
        let record = self.packets.get_mut(packet);
        let port = &mut self.ports[id.index()];
        let priority = usize::from(record.class.priority);
        let bytes = u64::from(record.wire_bytes());
        let refused = if !port.up {
            Some(DropReason::LinkDown)
        } else if record.datagram_bytes > self.links[port.link as usize].mtu {
            Some(DropReason::TooLong)
        } else {
            None
        };
        if let Some(reason) = refused {
            self.seldom[id.index()].drops.count(reason);
            return self.packets.release(packet);
        }
        record.port = id;
        record.epoch = port.epoch;
        // A queue that gave way to a packet that did not fit either is empty, and will be looked at
        // nevertheless.
        if port.backlog == 0 && !port.wakes && self.now >= port.busy_until {
            return self.transmit(packet, id);
        }
        let node = &mut self.nodes[port.node.index()];
        let config = &self.queue_configs[port.config as usize][priority];
        let length = self.queues.get(id, priority).bytes + bytes;
        let above = |threshold: Option<u64>| threshold.is_some_and(|threshold| length > threshold);
        let marks_from = match config.ecn_threshold_bytes {
            // As much as the other queues hold counts.
            Some(threshold) if config.ecn_by_port => {
                Some(threshold.saturating_sub(self.queues.bytes(id) + bytes - length))
            }
            threshold => threshold,
        };
        let unmarkable = record.ecn == Ecn::NotCapable;
        let refused = if length > config.limit_bytes {
            Some(DropReason::Tail)
        } else if above(config.drop_thresholds_bytes[usize::from(record.class.drop_class)])
            || (config.drops_unmarkable && unmarkable && above(marks_from))
        {
            Some(DropReason::Selective)
        } else {
            let is_full = match node.buffer {
                _ if config.reserved => false,
                Buffer::PerQueue => false,
                Buffer::PerPort { bytes: memory } => self.queues.bytes(id) + bytes > memory,
                Buffer::Shared { bytes: memory, alpha } => {
                    let free = memory.saturating_sub(node.buffered_bytes);
                    bytes > free || length as f64 > alpha * free as f64
                }
            };
            is_full.then_some(DropReason::Buffer)
        };
        let by_arrival = config.order == Order::Arrival;
        if let Some(reason) = refused {
            let remaining = record.remaining;
            // A packet that met a threshold of its own is no reason for others to go.
            let may_push_out = !by_arrival && reason != DropReason::Selective;
            if may_push_out && self.give_way(remaining, id, priority, reason) {
                return self.enqueue(packet, id);
            }
            self.seldom[id.index()].count_at_queue(priority, reason);
            return self.packets.release(packet);
        }
        let queue = self.queues.get_mut(id, priority);
        let marks = above(marks_from) && !unmarkable;
        if marks {
            queue.marked += 1;
            record.ecn = Ecn::Marked;
        }
        record.next = PacketId::NONE;
        queue.grow(self.now, bytes);
        node.buffered_bytes += bytes;
        node.statistics.buffer_bytes_max = node.statistics.buffer_bytes_max.max(node.buffered_bytes);
        port.backlog |= 1 << priority;
        if !by_arrival {
            self.seldom[id.index()].least_remaining(priority).add(packet, record);
        } else {
            let last = std::mem::replace(&mut queue.tail, packet);
            if last == PacketId::NONE {
                queue.head = packet;
            } else {
                self.packets.get_mut(last).next = packet;
            }
        }
        if !port.wakes {
            port.wakes = true;
            self.agenda.at(port.busy_until, Event::Wakes { port: id, epoch: port.epoch });
        }
        if port.special {
            self.trace_queue(id);
        }
        if marks && let Some(payload) = self.packets.payload_mut(packet) {
            fanin_wire::GradientHeader::mark_ecn(payload);
        }
    }

    /// A port's link is free: its most urgent packet goes. Returns when to look again, if packets
    /// are left.
    pub(crate) fn wakes(&mut self, id: PortId, epoch: u32) -> Option<Time> {
        let port = &mut self.ports[id.index()];
        if port.epoch != epoch {
            return None; // It went down meanwhile, and what waited is lost.
        }
        if port.backlog == 0 {
            port.wakes = false;
            return None; // What waited gave way.
        }
        let packet = self.dequeue(id);
        self.transmit(packet, id);
        let port = &mut self.ports[id.index()];
        port.wakes = port.backlog != 0;
        port.wakes.then_some(port.busy_until)
    }

    /// # Panics
    /// When no packet waits.
    pub(crate) fn dequeue(&mut self, id: PortId) -> PacketId {
        let port = &mut self.ports[id.index()];
        let priority = port.backlog.trailing_zeros() as usize;
        let queue = self.queues.get_mut(id, priority);
        if queue.head == PacketId::NONE {
            return self.dequeue_least_remaining(id, priority);
        }
        let packet = queue.head;
        let record = self.packets.get(packet);
        let bytes = u64::from(record.wire_bytes());
        queue.head = record.next;
        if queue.head == PacketId::NONE {
            queue.tail = PacketId::NONE;
            port.backlog &= !(1 << priority);
        }
        queue.shrink(self.now, bytes);
        self.nodes[port.node.index()].buffered_bytes -= bytes;
        if port.special {
            self.trace_queue(id);
        }
        packet
    }

    pub(crate) fn trace_queue(&mut self, id: PortId) {
        if self.seldom[id.index()].traced
            && let Some(trace) = &mut self.trace
        {
            trace.queue(self.now, id, self.queues.bytes(id));
        }
    }

    fn transmit(&mut self, packet: PacketId, id: PortId) {
        let port = &mut self.ports[id.index()];
        let link = &self.links[port.link as usize];
        let bytes = self.packets.get(packet).wire_bytes();
        let takes = match link.picos_per_byte {
            Some(picos) => Time(u64::from(bytes) * picos),
            None => self.seldom[id.index()].rate.take(bytes),
        };
        port.busy_until = self.now + takes;
        port.busy = port.busy + takes;
        port.sent_packets += 1;
        port.sent_bytes += u64::from(bytes);
        self.packet_hops += 1;
        let arrives = port.busy_until + link.delay;
        if !port.special || !self.strays(packet, id, takes, arrives) {
            self.fly(packet, id, arrives);
        }
    }

    /// A packet sent into a link that is captured, traced or has faults. Returns whether it is lost
    /// or held back, and so does not arrive with the others.
    fn strays(&mut self, packet: PacketId, id: PortId, takes: Time, arrives: Time) -> bool {
        let seldom = &mut self.seldom[id.index()];
        if seldom.captured
            && let Some(pcap) = &mut self.pcap
        {
            pcap.packet(self.now, &self.packets.view(packet), self.packets.get(packet));
        }
        if seldom.traced
            && let Some(trace) = &mut self.trace
        {
            let bytes = self.packets.get(packet).wire_bytes();
            trace.transmission(self.now, takes, id, &self.packets.view(packet), bytes);
        }
        let Some(faults) = &mut seldom.faults else { return false };
        let fate = faults.fate(&self.packets.view(packet));
        if fate.lost {
            seldom.drops.count(DropReason::Loss);
            self.packets.release(packet);
            return true;
        }
        if fate.duplicated {
            seldom.duplicated += 1;
            let twin = self.packets.copy(packet);
            self.agenda.at(arrives + fate.held_back, Event::Arrives(twin));
        }
        if fate.held_back > Time::ZERO {
            seldom.held_back += 1;
            self.agenda.at(arrives + fate.held_back, Event::Arrives(packet));
            return true;
        }
        false
    }

    fn fly(&mut self, packet: PacketId, id: PortId, arrives: Time) {
        let port = &mut self.ports[id.index()];
        self.packets.get_mut(packet).next = PacketId::NONE;
        let last = std::mem::replace(&mut port.flying_last, packet);
        if port.flying == PacketId::NONE {
            port.flying = packet;
            self.agenda.at(arrives, Event::Lands { port: id, epoch: port.epoch });
        } else {
            let last = self.packets.get_mut(last);
            last.next = packet;
            last.next_at = arrives;
        }
    }

    /// The first packet on a link is at its end. Returns it, and when the next one will be.
    pub(crate) fn lands(&mut self, id: PortId, epoch: u32) -> (Option<PacketId>, Option<Time>) {
        let port = &mut self.ports[id.index()];
        if port.epoch != epoch {
            return (None, None); // All that was on it is lost.
        }
        let packet = port.flying;
        let record = self.packets.get(packet);
        port.flying = record.next;
        (Some(packet), (record.next != PacketId::NONE).then_some(record.next_at))
    }
}
