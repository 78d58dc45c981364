//! Links and nodes that go down and come back.

use super::core::Core;
use super::ids::{LinkId, NodeId};
use super::packets::PacketId;
use super::statistics::DropReason;

impl Core {
    pub(crate) fn set_link(&mut self, link: LinkId, up: bool) {
        self.links_up[link.index()] = up;
        self.refresh(link);
        self.routes.forget();
    }

    /// Returns whether that changed anything.
    pub(crate) fn set_node(&mut self, id: NodeId, up: bool) -> bool {
        let node = &mut self.nodes[id.index()];
        if node.up == up {
            return false;
        }
        node.up = up;
        if !up {
            node.epoch += 1;
            for cores in [&mut node.sends, &mut node.receives].into_iter().flatten() {
                let mut lost = cores.forget();
                while lost != PacketId::NONE {
                    node.statistics.drops.count(DropReason::NodeDown);
                    self.packets.release(lost);
                    lost = self.packets.get(lost).next;
                }
            }
        }
        for port in node.ports.clone() {
            self.refresh(port.link());
        }
        self.routes.forget();
        true
    }

    /// Both ports of a link are up if it and both nodes are; what waits at one that goes down is
    /// lost.
    fn refresh(&mut self, link: LinkId) {
        let works = link.ports().into_iter().all(|port| self.nodes[self.ports[port.index()].node.index()].up);
        let up = self.links_up[link.index()] && works;
        for id in link.ports() {
            let was_up = std::mem::replace(&mut self.ports[id.index()].up, up);
            if was_up && !up {
                self.ports[id.index()].epoch += 1;
                self.ports[id.index()].wakes = false;
                // The packet that was being sent is lost; the link is free when it comes back.
                self.ports[id.index()].busy_until = self.now;
                let mut flying = std::mem::replace(&mut self.ports[id.index()].flying, PacketId::NONE);
                while flying != PacketId::NONE {
                    self.seldom[id.index()].drops.count(DropReason::LinkDown);
                    self.packets.release(flying);
                    flying = self.packets.get(flying).next;
                }
                while self.ports[id.index()].backlog != 0 {
                    let packet = self.dequeue(id);
                    self.seldom[id.index()].drops.count(DropReason::LinkDown);
                    self.packets.release(packet);
                }
            }
        }
    }
}
