//! The sockets of a machine: one, or of a worker whose packets are spread over several paths one for each, so that routers which choose a path by
//! addresses and ports send them over all that they have (DLCP §3.2.3).

use crate::IoStatistics;
use crate::seal::Seals;
use crate::train_socket::{Peer, TrainSocket};
use fanin_wire::{GradientHeader, Kind, PATHS_MAX, Preamble, Tag, traffic_class};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::Cell;
use std::os::fd::BorrowedFd;

/// At least one socket, and at most [`PATHS_MAX`].
pub(crate) struct Ports {
    sockets: Vec<TrainSocket>,
    /// A bit for each socket that may have packets.
    may_have: Cell<u32>,
    /// Whether the others may, too: of several, the kernel is asked which do before any is read.
    may_all: Cell<bool>,
    /// How what goes through them is secured.
    pub(crate) seals: Seals,
}

impl From<TrainSocket> for Ports {
    fn from(socket: TrainSocket) -> Self {
        let seals = Seals::new();
        Self { sockets: vec![socket], may_have: Cell::new(1), may_all: Cell::new(false), seals }
    }
}

impl Ports {
    /// With more sockets beside it, alike.
    pub(crate) fn and(mut self, others: impl IntoIterator<Item = TrainSocket>) -> Self {
        self.sockets.extend(others);
        debug_assert!(self.sockets.len() <= PATHS_MAX.into());
        self
    }

    pub(crate) const fn count(&self) -> usize {
        self.sockets.len()
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(TrainSocket::as_fd)
    }

    /// One of them may have packets again.
    pub(crate) fn look_at(&self, number: usize) {
        self.may_have.set(self.may_have.get() | 1 << number);
    }

    /// Any of them may.
    pub(crate) fn look_again(&self) {
        match self.sockets.len() {
            1 => self.may_have.set(1),
            _ => self.may_all.set(true),
        }
    }

    /// A bit for each that is worth a look.
    fn ready(&self) -> u32 {
        const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        if self.may_all.take() {
            let fd_of = |number: usize| {
                let socket = self.sockets.get(number).unwrap_or(&self.sockets[0]);
                PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)
            };
            let mut fds: [_; PATHS_MAX as usize] = std::array::from_fn(fd_of);
            let fds = &mut fds[..self.sockets.len()];
            let asked = poll(fds, Some(&AT_ONCE));
            for (number, fd) in fds.iter().enumerate() {
                if asked.is_err() || !fd.revents().is_empty() {
                    self.look_at(number);
                }
            }
        }
        self.may_have.get()
    }

    /// Has each socket that is worth a look read, until `read` says that it is empty; the limit that it is told is its part of that of all.
    pub(crate) fn receive(
        &mut self,
        limit_bytes: usize,
        mut read: impl FnMut(&mut TrainSocket, &mut Seals, usize) -> bool,
    ) {
        let (mut ready, limit_bytes) = (self.ready(), limit_bytes / self.sockets.len());
        while ready != 0 {
            let number = ready.trailing_zeros() as usize;
            ready &= ready - 1;
            if !read(&mut self.sockets[number], &mut self.seals, limit_bytes) {
                self.may_have.set(self.may_have.get() & !(1 << number));
            }
        }
    }

    /// Marks a train of fragments that is to be sent while much waits to leave this machine, as a switch's queue does (ATP §3.7).
    pub(crate) fn mark(&self, train: &mut [u8], segment_bytes: usize) {
        let kind = Preamble::parse(train).map(|preamble| preamble.kind);
        if matches!(kind, Ok(Kind::Gradient | Kind::Planned)) && self.sockets[0].is_backed_up() {
            train.chunks_mut(segment_bytes.max(1)).for_each(GradientHeader::mark_ecn);
        }
    }

    /// Sends a train of one job, by the path that its first packet names, of a machine that has several.
    pub(crate) fn send(&mut self, to: impl IntoIterator<Item = Peer>, train: &[u8], segment_bytes: usize) {
        let mut to = to.into_iter().peekable();
        if to.peek().is_none() {
            return;
        }
        let path = Tag::of_any(train).map_or(0, |tag| usize::from(tag.path)) % self.sockets.len();
        let class = traffic_class(train);
        let socket = &mut self.sockets[path];
        let Some((train, segment_bytes)) = self.seals.seal(train, segment_bytes) else {
            let packets = train.len().div_ceil(segment_bytes.max(1)) as u64;
            socket.statistics.packets_given_up += packets * to.count() as u64;
            return;
        };
        to.for_each(|to| socket.send(to, train, segment_bytes, class));
    }

    /// The thread slept.
    pub(crate) fn slept(&mut self) {
        self.sockets[0].statistics.sleeps += 1;
    }

    /// Trains that came, by all of them.
    pub(crate) fn trains_received(&self) -> u64 {
        self.sockets.iter().map(|socket| socket.statistics.trains_received).sum()
    }

    /// Counters of all of them.
    pub(crate) fn statistics(&self) -> IoStatistics {
        let all = IoStatistics { forged: self.seals.forged, ..IoStatistics::default() };
        self.sockets.iter().fold(all, |mut sum, socket| {
            sum += socket.statistics;
            sum
        })
    }

    /// Others take their place, and go on with their counters and their seals.
    pub(crate) fn replace(&mut self, mut others: Self) {
        others.sockets[0].statistics = IoStatistics { forged: 0, ..self.statistics() };
        std::mem::swap(&mut self.seals, &mut others.seals);
        *self = others;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Offload;
    use crate::io_loop::ROUND_BYTES;
    use crate::socket::{bind, connect};
    use crate::train_socket::ReceiveBuffers;
    use fanin_wire::{Generation, JobId, Key, ShardId, WorkerId};
    use std::collections::BTreeMap;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::os::fd::AsRawFd;

    /// A signal of a path.
    fn packet(path: u8) -> Vec<u8> {
        let (kind, generation) = (Kind::Signal, Generation(0));
        let preamble = Preamble { kind, job: JobId(0), generation, worker: WorkerId(0), shard: ShardId(0) };
        let mut packet = [&preamble.to_bytes()[..], &[0; 52]].concat();
        packet[19] = path;
        assert_eq!(Tag::of_any(&packet).map(|tag| tag.path), Some(path));
        packet
    }

    /// The packets that each socket has, by who sent them.
    fn come(ports: &mut Ports, count: usize) -> Vec<BTreeMap<SocketAddr, Vec<Vec<u8>>>> {
        let (mut buffers, mut came) = (ReceiveBuffers::new(), 0);
        let mut packets = vec![BTreeMap::<_, Vec<_>>::new(); ports.count()];
        let numbers: Vec<_> = ports.fds().map(|fd| fd.as_raw_fd()).collect();
        while came < count {
            let mut fds: Vec<_> = ports.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            poll(&mut fds, None).unwrap();
            ports.look_again();
            ports.receive(ROUND_BYTES, |socket, _, _| {
                let fd = socket.as_fd().as_raw_fd();
                let number = numbers.iter().position(|other| *other == fd).unwrap();
                socket.receive(&mut buffers, |peer, _, packet| {
                    let Peer::At { remote, .. } = peer else { unreachable!("a socket brought it") };
                    packets[number].entry(*remote).or_default().push(packet.to_vec());
                    came += 1;
                })
            });
        }
        packets
    }

    #[test]
    fn each_path_has_a_port_of_its_own_and_what_comes_to_any_of_them_is_heard() {
        const PATHS: usize = 3;
        let (mut sockets, address) = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap();
        let mut server = Ports::from(TrainSocket::new(sockets.remove(0), Offload::Detect).unwrap());
        let mut sockets =
            (0..PATHS).map(|_| TrainSocket::new(connect(address, PATHS).unwrap(), Offload::Detect).unwrap());
        let first = Ports::from(sockets.next().unwrap());
        let mut worker = first.and(sockets);
        for ports in [&mut worker, &mut server] {
            ports.seals.add(JobId(0), Key::new(0));
        }
        let paths = [0, 1, 2, 1, 2, 1];
        paths.iter().for_each(|path| worker.send([address.into()], &packet(*path), 64));
        let came = come(&mut server, paths.len()).remove(0);
        assert_eq!(came.len(), PATHS, "as many ports as paths");
        let mut counts: Vec<_> = came.values().map(Vec::len).collect();
        counts.sort_unstable();
        assert_eq!(counts, [1, 2, 3]);
        for packets in came.values() {
            assert!(packets.iter().all(|other| *other == packets[0]), "one path a port");
        }
        // Back to each port, as many as came from there.
        for (port, packets) in &came {
            packets.iter().for_each(|packet| server.send([(*port).into()], packet, 64));
        }
        let back = come(&mut worker, paths.len());
        for (path, packets) in back.iter().enumerate() {
            let packets = &packets[&address];
            assert_eq!(packets.len(), paths.iter().filter(|other| usize::from(**other) == path).count());
            assert!(packets.iter().all(|other| *other == packet(path as u8)));
        }
        let statistics = worker.statistics();
        assert_eq!((statistics.packets_sent, statistics.packets_received), (6, 6));
    }

    #[test]
    fn a_port_that_is_empty_is_not_read_again_before_something_comes() {
        let (mut sockets, address) = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap();
        let mut server = Ports::from(TrainSocket::new(sockets.remove(0), Offload::Detect).unwrap());
        let socket = || TrainSocket::new(connect(address, 2).unwrap(), Offload::Detect).unwrap();
        let mut worker = Ports::from(socket()).and([socket()]);
        for ports in [&mut worker, &mut server] {
            ports.seals.add(JobId(0), Key::new(0));
        }
        let reads = |ports: &mut Ports| {
            let mut reads = 0;
            ports.receive(ROUND_BYTES, |_, _, limit| {
                assert_eq!(limit, ROUND_BYTES / 2);
                reads += 1;
                false
            });
            reads
        };
        worker.look_again();
        assert_eq!(reads(&mut worker), 1, "a new socket is looked at, as it may have been spoken to");
        worker.look_again();
        assert_eq!(reads(&mut worker), 0, "the kernel says that both are empty");
        // To the second.
        worker.send([address.into()], &packet(1), 64);
        let (port, _) = come(&mut server, 1).remove(0).pop_first().unwrap();
        server.send([port.into()], &packet(1), 64);
        let mut fds: Vec<_> = worker.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        poll(&mut fds, None).unwrap();
        worker.look_again();
        assert_eq!(reads(&mut worker), 1);
    }
}
