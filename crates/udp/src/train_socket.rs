//! A UDP socket that sends and receives trains: many packets of one size in one system call.

use crate::socket::{Direction, is_half_full, set_int_option};
use crate::{IoStatistics, NotInherited};
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, UdpSocketState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Bytes of the buffer for one train: no UDP datagram, and no train that the kernel joins, is longer.
pub(crate) const TRAIN_BYTES: usize = 1 << 16;

/// Bytes of the buffer for one packet where the kernel joins none: the longest chunk, and room to see that one is longer.
const PACKET_BYTES: usize = 8448;

/// Bytes of all receive buffers together. They are filled and read in turn, so they should stay in a core's L2 cache beside
/// the slots; four trains a system call are enough that its price no longer shows.
const RECEIVE_BYTES: usize = 4 * TRAIN_BYTES;

/// Most bytes that one IPv4 datagram carries, and so one train: the kernel segments it only on its way out.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 65_507;

/// How long a full socket may take to drain before a train is given up. The protocol sends it again after a timeout that is
/// no shorter; to wait longer would only stop the thread from receiving.
const SEND_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Attempts a train, of which each may be refused once for a full socket or for an old ICMP error.
const SEND_ATTEMPTS: usize = 4;

/// Whether the kernel cuts and joins trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offload {
    /// When it can (`UDP_SEGMENT`, `UDP_GRO`); else each packet is a system call. The rule.
    #[default]
    Detect,
    /// Never: to try the path that older kernels take.
    Never,
}

/// Who sends and is sent to.
#[derive(Clone, Copy, Debug)]
pub enum Peer {
    /// The peer of a socket: the same one, whichever of our addresses it speaks to.
    At {
        /// Its address.
        remote: SocketAddr,
        /// Our address that the peer spoke to, where the socket has several: an answer from another one would not be heard by a
        /// connected peer.
        local: Option<IpAddr>,
    },
    /// A guest on the same thread. No packet from a socket is from such a one.
    Guest(u64),
}

impl PartialEq for Peer {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::At { remote, .. }, Self::At { remote: other, .. }) => remote == other,
            (Self::Guest(number), Self::Guest(other)) => number == other,
            _ => false,
        }
    }
}

impl Eq for Peer {}

impl From<SocketAddr> for Peer {
    fn from(remote: SocketAddr) -> Self {
        Self::At { remote, local: None }
    }
}

/// The queues that a packet waited in on its way, the one before this socket included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Short,
    /// One of them was longer than its threshold.
    Long,
}

/// The memory that packets are received into, allocated once.
pub(crate) struct ReceiveBuffers {
    memory: Box<[u8]>,
    meta: [RecvMeta; BATCH_SIZE],
}

impl ReceiveBuffers {
    pub(crate) fn new() -> Self {
        Self { memory: vec![0; RECEIVE_BYTES].into(), meta: [RecvMeta::default(); BATCH_SIZE] }
    }
}

pub(crate) struct TrainSocket {
    /// A helper that outlives this process would keep the port. First, as it must go first.
    _not_inherited: NotInherited,
    socket: UdpSocket,
    state: UdpSocketState,
    offload: Offload,
    /// Bytes of one receive buffer.
    buffer_bytes: usize,
    /// Whether the socket is bound to all addresses of the machine.
    wildcard: bool,
    /// Whether the kernel takes a traffic class with a train.
    treats: bool,
    pub(crate) statistics: IoStatistics,
}

impl TrainSocket {
    pub(crate) fn new(socket: UdpSocket, offload: Offload) -> io::Result<Self> {
        let state = UdpSocketState::new((&socket).into())?;
        let mut joins = state.gro_segments() > 1;
        if offload == Offload::Never && joins {
            set_int_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 0)?;
            joins = false;
        }
        // quinn-udp asks for time stamps, which nobody reads here and the kernel would take for each packet.
        set_int_option(&socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0)?;
        let wildcard = socket.local_addr()?.ip().is_unspecified();
        let buffer_bytes = if joins { TRAIN_BYTES } else { PACKET_BYTES };
        let statistics = IoStatistics::default();
        let _not_inherited = NotInherited::new(&socket);
        Ok(Self { _not_inherited, socket, state, offload, buffer_bytes, wildcard, treats: true, statistics })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives the trains that are here, as many as one system call takes, and hands each packet to `take`. Who sent it is written once a
    /// train: to copy what was just written waits for all that the core has still to store, such as the sums of the packet before.
    /// Packets that met a long queue say so: a router marked them (ECN), or too many wait here.
    /// Returns whether it took as many as it could: of what else there may be, the kernel tells who sleeps.
    pub(crate) fn receive(
        &mut self,
        buffers: &mut ReceiveBuffers,
        mut take: impl FnMut(&Peer, Queue, &mut [u8]),
    ) -> bool {
        let count = (RECEIVE_BYTES / self.buffer_bytes).min(BATCH_SIZE);
        let mut memory = buffers.memory.chunks_exact_mut(self.buffer_bytes);
        let mut slices: [IoSliceMut<'_>; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(memory.next().unwrap_or_default()));
        let received =
            self.state.recv((&self.socket).into(), &mut slices[..count], &mut buffers.meta[..count]);
        let trains = match received {
            Ok(trains) => trains,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            Err(error) => {
                self.count_error(&error);
                return false;
            }
        };
        self.statistics.trains_received += trains as u64;
        let many_wait = trains == count && is_half_full(&self.socket, Direction::In);
        for (meta, bytes) in buffers.meta.iter().zip(&mut slices).take(trains) {
            let local = if self.wildcard { meta.dst_ip } else { None };
            let peer = Peer::At { remote: meta.addr, local };
            // The kernel joins no packets with unlike marks.
            let is_marked = many_wait || meta.ecn == Some(EcnCodepoint::Ce);
            let queue = if is_marked { Queue::Long } else { Queue::Short };
            let length = meta.len.min(bytes.len());
            self.statistics.bytes_received += length as u64;
            let train = &mut bytes[..length];
            if train.is_empty() {
                self.statistics.packets_received += 1;
                take(&peer, queue, train);
            }
            for packet in train.chunks_mut(meta.stride.max(1)) {
                self.statistics.packets_received += 1;
                take(&peer, queue, packet);
            }
        }
        trains == count
    }

    /// Whether too much of what was sent waits to leave this machine.
    pub(crate) fn is_backed_up(&self) -> bool {
        is_half_full(&self.socket, Direction::Out)
    }

    /// Sends a run of packets of `segment_bytes`, the last perhaps shorter, in as few system calls as the kernel allows. Routers treat them as
    /// their `class` says. What cannot be sent is counted and forgotten: the protocol sends it again.
    pub(crate) fn send(&mut self, to: Peer, train: &[u8], segment_bytes: usize, class: Option<u8>) {
        let segment_bytes = segment_bytes.clamp(1, DATAGRAM_BYTES_MAX);
        let mut rest = train;
        let Peer::At { remote, local } = to else {
            // A guest that has left.
            self.statistics.packets_given_up += train.len().div_ceil(segment_bytes) as u64;
            return;
        };
        while !rest.is_empty() {
            let (now, later) =
                rest.split_at((self.segments_max(segment_bytes) * segment_bytes).min(rest.len()));
            match self.send_train((remote, local), now, segment_bytes, class) {
                Sent::Yes => {
                    self.statistics.trains_sent += 1;
                    self.statistics.packets_sent += now.len().div_ceil(segment_bytes) as u64;
                    self.statistics.bytes_sent += now.len() as u64;
                    rest = later;
                }
                Sent::CutSmaller => {}
                Sent::No => {
                    self.statistics.packets_given_up += rest.len().div_ceil(segment_bytes) as u64;
                    return;
                }
            }
        }
    }

    /// Segments of one train.
    fn segments_max(&self, segment_bytes: usize) -> usize {
        match self.offload {
            Offload::Detect => self.state.max_gso_segments().min(DATAGRAM_BYTES_MAX / segment_bytes).max(1),
            Offload::Never => 1,
        }
    }

    fn send_train(
        &mut self,
        (destination, src_ip): (SocketAddr, Option<IpAddr>),
        train: &[u8],
        segment_bytes: usize,
        class: Option<u8>,
    ) -> Sent {
        let transmit = quinn_udp::Transmit {
            destination,
            // Of packets without a queue of their own, quinn-udp says it.
            ecn: class.and_then(EcnCodepoint::from_bits),
            contents: train,
            segment_size: Some(segment_bytes),
            src_ip,
        };
        for _ in 0..SEND_ATTEMPTS {
            let segments_before = self.state.max_gso_segments();
            let Err(error) = self.try_send(&transmit, segment_bytes, class) else {
                return Sent::Yes;
            };
            if error.kind() == ErrorKind::WouldBlock {
                let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::OUT)];
                if !matches!(poll(&mut fds, Some(&SEND_PATIENCE)), Ok(1..)) {
                    return Sent::No;
                }
                continue;
            }
            if self.state.max_gso_segments() < segments_before && train.len() > segment_bytes {
                // A network driver that cannot segment says so only now; quinn-udp has taken note.
                return Sent::CutSmaller;
            }
            if !self.count_error(&error) {
                return Sent::No;
            }
            // An ICMP error of an earlier packet was waiting; this packet was not tried.
        }
        Sent::No
    }

    /// How routers may treat packets goes into their headers. Those of ATP and GOAT may be marked, and windows follow the marks (ATP §3.7).
    /// Those of DLCP name their queue, and those of them which matter are marked by a full one and not dropped (DLCP §4.2). Nobody answers
    /// these marks: rates follow from what arrives.
    fn try_send(
        &mut self,
        transmit: &quinn_udp::Transmit<'_>,
        segment_bytes: usize,
        class: Option<u8>,
    ) -> io::Result<()> {
        let plainly = || self.state.try_send((&self.socket).into(), transmit);
        let Some(class) = class.filter(|class| self.treats && *class >> 2 != 0) else { return plainly() };
        match send_treated(&self.socket, transmit, segment_bytes, class) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => {
                // Either a driver cannot segment, of which quinn-udp takes note, or the treatment is what is refused.
                let result = plainly();
                self.treats = result.is_err();
                result
            }
            result => result,
        }
    }

    /// Counts an error, and says whether it was only news of an earlier packet (ICMP).
    fn count_error(&mut self, error: &io::Error) -> bool {
        // Whether anybody is there is for the control plane to judge.
        let news = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable
        );
        if news {
            self.statistics.unreachable += 1;
        } else if error.raw_os_error() == Some(libc::EMSGSIZE) {
            self.statistics.too_long += 1;
        } else {
            self.statistics.failed += 1;
        }
        news
    }
}

/// Sends a train whose IP headers have this traffic class, which quinn-udp sets to that of ECN alone.
fn send_treated(
    socket: &UdpSocket,
    transmit: &quinn_udp::Transmit<'_>,
    segment_bytes: usize,
    traffic_class: u8,
) -> io::Result<()> {
    let wide = i32::from(traffic_class);
    let from = transmit.src_ip.map(PacketInfo::new);
    // The kernel sends to an IPv4 address in an IPv6 one as IPv4, and then takes no IPv6 traffic class.
    let mut control = vec![match transmit.destination.ip().to_canonical() {
        IpAddr::V4(_) => ControlMessage::Ipv4Tos(&traffic_class),
        IpAddr::V6(_) => ControlMessage::Ipv6TClass(&wide),
    }];
    control.extend(from.as_ref().map(PacketInfo::message));
    let segment = segment_bytes as u16;
    if transmit.contents.len() > segment_bytes {
        control.push(ControlMessage::UdpGsoSegments(&segment));
    }
    let contents = [IoSlice::new(transmit.contents)];
    let to = SockaddrStorage::from(transmit.destination);
    sendmsg(socket.as_raw_fd(), &contents, &control, MsgFlags::empty(), Some(&to))?;
    Ok(())
}

/// Our address that a packet is to come from.
enum PacketInfo {
    V4(libc::in_pktinfo),
    V6(libc::in6_pktinfo),
}

impl PacketInfo {
    fn new(ours: IpAddr) -> Self {
        match ours {
            IpAddr::V4(ours) => Self::V4(libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(ours.octets()) },
                ipi_addr: libc::in_addr { s_addr: 0 },
            }),
            IpAddr::V6(ours) => Self::V6(libc::in6_pktinfo {
                ipi6_ifindex: 0,
                ipi6_addr: libc::in6_addr { s6_addr: ours.octets() },
            }),
        }
    }

    fn message(&self) -> ControlMessage<'_> {
        match self {
            Self::V4(info) => ControlMessage::Ipv4PacketInfo(info),
            Self::V6(info) => ControlMessage::Ipv6PacketInfo(info),
        }
    }
}

enum Sent {
    Yes,
    /// Not, but in smaller trains it may go.
    CutSmaller,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::{bind, connect};
    use fanin_wire::{Kind, traffic_class};
    use nix::sys::socket::{ControlMessageOwned, recvmsg};
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn pair(listen: Ipv4Addr, offload: Offload) -> (TrainSocket, TrainSocket, SocketAddr) {
        let (mut sockets, mut address) = bind(SocketAddr::from((listen, 0)), 1).unwrap();
        if listen.is_unspecified() {
            // Not the address from which the kernel would answer by itself.
            address.set_ip(Ipv4Addr::new(127, 0, 0, 2).into());
        }
        let server = TrainSocket::new(sockets.remove(0), offload).unwrap();
        let client = TrainSocket::new(connect(address, 1).unwrap(), offload).unwrap();
        (server, client, address)
    }

    /// All packets that come until there are `count`, with who sent them.
    fn packets(socket: &mut TrainSocket, count: usize) -> Vec<(Peer, Vec<u8>)> {
        let (mut buffers, mut packets) = (ReceiveBuffers::new(), Vec::new());
        while packets.len() < count {
            let mut fds = [PollFd::from_borrowed_fd(socket.socket.as_fd(), PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            socket.receive(&mut buffers, |peer, _, packet| packets.push((*peer, packet.to_vec())));
        }
        packets
    }

    #[test]
    fn a_train_arrives_packet_by_packet_with_and_without_offload() {
        for offload in [Offload::Detect, Offload::Never] {
            let (mut server, mut client, address) = pair(Ipv4Addr::LOCALHOST, offload);
            for (packet_bytes, bytes) in
                [(1056usize, 60 * 1056), (1440, 45 * 1440 - 7), (8224, 7 * 8224), (32, 64), (48, 48)]
            {
                let train: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
                client.send(address.into(), &train, packet_bytes, None);
                let received = packets(&mut server, train.chunks(packet_bytes).count());
                let expected: Vec<_> = train.chunks(packet_bytes).collect();
                assert_eq!(received.iter().map(|(_, packet)| &packet[..]).collect::<Vec<_>>(), expected);
            }
            assert_eq!(client.statistics.packets_sent, server.statistics.packets_received);
            if offload == Offload::Never {
                assert_eq!(client.statistics.trains_sent, client.statistics.packets_sent);
                assert_eq!(server.statistics.trains_received, server.statistics.packets_received);
            }
        }
    }

    #[test]
    fn an_empty_datagram_is_a_packet() {
        let (mut server, client, _) = pair(Ipv4Addr::LOCALHOST, Offload::Detect);
        client.socket.send(&[]).unwrap();
        assert_eq!(packets(&mut server, 1)[0].1, b"");
    }

    #[test]
    fn the_answer_comes_from_the_address_that_was_asked() {
        let (mut server, mut client, address) = pair(Ipv4Addr::UNSPECIFIED, Offload::Detect);
        client.send(address.into(), b"question", 8, None);
        let (peer, _) = packets(&mut server, 1).remove(0);
        assert!(matches!(peer, Peer::At { local, .. } if local == Some(address.ip())));
        server.send(peer, b"answer", 6, None);
        // The client is connected: it hears `address` alone.
        assert_eq!(packets(&mut client, 1)[0].1, b"answer");
    }

    /// The traffic classes of the packets that come until there are `bytes`.
    fn traffic_classes(socket: &TrainSocket, bytes: usize) -> Vec<i32> {
        let (mut memory, mut control) = (vec![0; TRAIN_BYTES], nix::cmsg_space!([u64; 32]));
        let (mut classes, mut received) = (Vec::new(), 0);
        while received < bytes {
            let mut fds = [PollFd::from_borrowed_fd(socket.socket.as_fd(), PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            let mut into = [IoSliceMut::new(&mut memory)];
            let fd = socket.socket.as_raw_fd();
            let train =
                recvmsg::<SockaddrStorage>(fd, &mut into, Some(&mut control), MsgFlags::empty()).unwrap();
            received += train.bytes;
            classes.extend(train.cmsgs().unwrap().filter_map(|message| match message {
                ControlMessageOwned::Ipv4Tos(class) => Some(i32::from(class)),
                ControlMessageOwned::Ipv6TClass(class) => Some(class),
                _ => None,
            }));
        }
        assert_eq!(received, bytes);
        classes
    }

    #[test]
    fn packets_say_to_routers_how_they_may_be_treated_where_their_protocol_does() {
        const BYTES: usize = 1000;
        let [block, gradient, planned, update] =
            [Kind::Block, Kind::Gradient, Kind::Planned, Kind::Update].map(|kind| kind as u8);
        let of = |kind: u8, treatment: u8| {
            let mut packet = vec![0; BYTES];
            (packet[3], packet[22]) = (kind, treatment);
            packet
        };
        for (listen, shown) in [
            (IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv4Addr::LOCALHOST)),
            (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(127, 0, 0, 2).into()),
            (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()),
            (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
            (Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
        ] {
            for offload in [Offload::Detect, Offload::Never] {
                let bound = bind(SocketAddr::from((listen, 0)), 1);
                if let (IpAddr::V6(_), Err(error)) = (listen, &bound) {
                    eprintln!("not tried on {listen}, which this machine has not: {error}");
                    continue;
                }
                let (mut sockets, mut address) = bound.unwrap();
                address.set_ip(shown);
                let mut server = TrainSocket::new(sockets.remove(0), offload).unwrap();
                let mut client = TrainSocket::new(connect(address, 1).unwrap(), offload).unwrap();
                client.send(address.into(), b"hello", 5, None);
                let (peer, _) = packets(&mut server, 1).remove(0);
                // (a packet, the class selector of its queue, whether it is ECN-capable)
                for (packet, queue, capable) in [
                    (of(block, 0x83), 4, 2),
                    (of(block, 7), 0, 0),
                    (of(block, 0x80), 7, 2),
                    (of(gradient, 0x83), 0, 2),
                    (of(planned, 0x83), 0, 2),
                    (of(update, 0x83), 0, 0),
                ] {
                    let train = packet.repeat(3);
                    client.send(address.into(), &train, BYTES, traffic_class(&train));
                    server.send(peer, &train, BYTES, traffic_class(&train));
                    for socket in [&server, &client] {
                        let classes = traffic_classes(socket, train.len());
                        assert!(!classes.is_empty());
                        let expected = queue << 5 | capable;
                        assert!(
                            classes.iter().all(|class| *class == expected),
                            "{listen}: {classes:?} for {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_routers_marked_is_told_apart() {
        const CE: u8 = 0b11;
        let (mut server, mut client, address) = pair(Ipv4Addr::LOCALHOST, Offload::Detect);
        for class in [Some(0b10), Some(CE), None] {
            client.send(address.into(), &[0; 300], 100, class);
        }
        let (mut buffers, mut queues) = (ReceiveBuffers::new(), Vec::new());
        while queues.len() < 9 {
            let mut fds = [PollFd::from_borrowed_fd(server.socket.as_fd(), PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            server.receive(&mut buffers, |_, queue, _| queues.push(queue));
        }
        let expected = [Queue::Short, Queue::Long, Queue::Short].map(|queue| [queue; 3]);
        assert_eq!(queues, expected.concat());
    }

    #[test]
    fn what_waits_behind_half_of_the_receive_buffer_met_a_long_queue() {
        let (mut server, mut client, address) = pair(Ipv4Addr::LOCALHOST, Offload::Never);
        socket2::SockRef::from(&server.socket).set_recv_buffer_size(1 << 18).unwrap();
        // As many as one call reads, and as many again; the kernel counts a packet with what it needs for it.
        let count = RECEIVE_BYTES / server.buffer_bytes;
        let mut sent = 0;
        while !is_half_full(&server.socket, Direction::In) {
            client.send(address.into(), &[0; 1000], 1000, None);
            sent += 1;
        }
        assert!(sent > count, "{sent}");
        let (mut buffers, mut queues) = (ReceiveBuffers::new(), Vec::new());
        while queues.len() < sent {
            server.receive(&mut buffers, |_, queue, _| queues.push(queue));
        }
        assert_eq!((queues[0], queues.last()), (Queue::Long, Some(&Queue::Short)));
    }

    #[test]
    fn nobody_listening_is_counted_and_no_more() {
        let (server, mut client, address) = pair(Ipv4Addr::LOCALHOST, Offload::Detect);
        drop(server);
        for _ in 0..3 {
            client.send(address.into(), b"hello", 5, None);
        }
        assert!(client.statistics.unreachable > 0);
        assert_eq!((client.statistics.failed, client.statistics.packets_given_up), (0, 0));
    }
}
