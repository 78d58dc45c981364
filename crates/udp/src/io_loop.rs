//! The loop of an I/O thread: it runs the machines that live on it, each on sockets of its own.
//!
//! There is one machine on most threads. On the threads of a service that a process hosts for its own ranks their lanes are guests
//! (`io_thread`): what lane and service say to each other is handed over between two machines of one thread. It touches no socket and no
//! queue, wakes nobody, and is never lost.

use crate::clock::Clock;
use crate::mailbox::{Bell, Mailbox};
use crate::ports::Ports;
use crate::seal::Seals;
use crate::train_socket::{Peer, Queue, ReceiveBuffers, TRAIN_BYTES, TrainSocket};
use fanin_protocol::{Endpoint, Instant, Packet, Verdict};
use fanin_wire::{GradientHeader, JobId, PATHS_MAX, Preamble};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::convert::Infallible;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;

/// Bytes that are handled before the machine may answer: sixteen trains, or as much in single packets. More of them gather
/// more answers into one train; but a worker whose answer waits has its window closed meanwhile.
pub(crate) const ROUND_BYTES: usize = 16 * TRAIN_BYTES;

/// What a packet counts at least in a round. An empty datagram costs as much time as a full one: a stranger who sends them as
/// fast as they are read would else keep the thread from its answers, its timers and its commands.
const PACKET_BYTES_MIN: usize = 1024;

/// Attempts to receive before the thread sleeps, where there are cores to spare. An attempt costs about half a microsecond,
/// to sleep and be woken several: a peer that answers at once is heard awake.
const SPINS: usize = 16;
/// After so many rounds in which one socket had packets, all are looked at: one that never runs dry is not the only one.
const LOOK_ROUNDS: usize = 8;

/// Cores below which the thread sleeps at once. A core that spins is one that the peer, or the training, waits for: on two
/// cores with a switch and two workers, 8 spins cost a tenth of the rate and a quarter more latency, 128 half of the rate.
const SPIN_CORES_MIN: usize = 8;

/// Up to so many sockets, less one, a sleep allocates nothing: of a worker of many paths beside a service.
const FEW: usize = 4 + PATHS_MAX as usize;

/// What a driver puts around a machine.
pub(crate) trait Shard {
    type Machine: Endpoint<Address = Peer>;
    type Command;

    fn machine(&mut self) -> &mut Self::Machine;
    /// Whether a packet of this job that a socket brought is for the machine.
    fn takes(&mut self, _from: &Peer, _job: JobId) -> bool {
        true
    }
    /// Carries out a command; `Break` ends the machine.
    fn command(&mut self, command: Self::Command, ports: &mut Ports) -> ControlFlow<()>;
    fn event(&mut self, event: <Self::Machine as Endpoint>::Event);
    /// Told after a round in which packets counted.
    fn progress(&mut self) {}
}

/// A machine on its thread, with all that it has there.
pub(crate) struct Seat<S: Shard> {
    pub(crate) shard: S,
    pub(crate) ports: Ports,
    pub(crate) mailbox: Mailbox<S::Command>,
    /// Who it is to the others on the thread.
    pub(crate) peer: Peer,
    /// Dropped last: the machine is gone.
    pub(crate) _ends: Sender<Infallible>,
}

/// A [`Seat`], whatever its machine is. Calls are by round or by train, not by packet.
pub(crate) trait Tenant: Send {
    fn peer(&self) -> Peer;
    fn ports(&self) -> &Ports;
    /// Carries out what it is told; whether it was told anything, or `Break` when it is to end.
    fn obey(&mut self) -> ControlFlow<(), bool>;
    /// Hands the machine what its sockets have, up to the bound of a round, if they may have something.
    fn receive(&mut self, buffers: &mut ReceiveBuffers, clock: Clock) -> bool;
    /// Hands the machine a train of another one on this thread.
    fn take(&mut self, now: Instant, from: Peer, train: &[u8], segment_bytes: usize);
    /// Sends what the machine has to say, to `others` by handing it over.
    fn transmit(&mut self, now: Instant, train: &mut [u8], others: Others<'_>) -> bool;
    fn tell(&mut self) -> bool;
    fn timeout(&mut self) -> Option<Instant>;
    fn handle_timeout(&mut self, now: Instant);
    fn slept(&mut self);
}

/// The other tenants of a thread, before and after one of them.
type Others<'a> = [&'a mut [Box<dyn Tenant>]; 2];

impl<S> Tenant for Seat<S>
where
    S: Shard<Command: Send> + Send,
{
    fn peer(&self) -> Peer {
        self.peer
    }

    fn ports(&self) -> &Ports {
        &self.ports
    }

    fn obey(&mut self) -> ControlFlow<(), bool> {
        let mut any = false;
        while let Some(command) = self.mailbox.take() {
            any = true;
            self.shard.command(command, &mut self.ports)?;
        }
        ControlFlow::Continue(any)
    }

    fn receive(&mut self, buffers: &mut ReceiveBuffers, clock: Clock) -> bool {
        let Self { shard, ports, .. } = self;
        let before = ports.trains_received();
        ports.receive(ROUND_BYTES, |socket, seals, limit_bytes| {
            receive(shard, (socket, seals), limit_bytes, buffers, clock)
        });
        ports.trains_received() > before
    }

    fn take(&mut self, now: Instant, from: Peer, train: &[u8], segment_bytes: usize) {
        let machine = self.shard.machine();
        let packets = train.chunks(segment_bytes.max(1));
        let mut counted = false;
        for packet in packets {
            counted |= !matches!(machine.handle_packet(now, from, packet), Verdict::Drop(_));
        }
        if counted {
            self.shard.progress();
        }
    }

    fn transmit(&mut self, now: Instant, train: &mut [u8], mut others: Others<'_>) -> bool {
        let mut any = false;
        let most = self.ports.seals.train_bytes().min(train.len());
        while let Some(transmit) = self.shard.machine().poll_transmit(now, &mut train[..most]) {
            any = true;
            let (bytes, segment_bytes) = (&mut train[..transmit.bytes], transmit.segment_bytes);
            self.ports.mark(bytes, segment_bytes);
            let bytes = &*bytes;
            let away = transmit.to.iter().filter(|to| {
                let mut all = others.iter_mut().flat_map(|others| others.iter_mut());
                let Some(other) = all.find(|other| other.peer() == **to) else { return true };
                other.take(now, self.peer, bytes, segment_bytes);
                false
            });
            self.ports.send(away.copied(), bytes, segment_bytes);
        }
        any
    }

    fn tell(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.shard.machine().poll_event() {
            any = true;
            self.shard.event(event);
        }
        any
    }

    fn timeout(&mut self) -> Option<Instant> {
        self.shard.machine().poll_timeout()
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.shard.machine().handle_timeout(now);
    }

    fn slept(&mut self) {
        self.ports.slept();
    }
}

/// Runs the tenants that `newcomers` hands over, until it says that nobody is there any more and nobody comes.
pub(crate) fn run(bell: &Bell, mut newcomers: impl FnMut(&mut Vec<Box<dyn Tenant>>) -> ControlFlow<()>) {
    let clock = Clock;
    let mut buffers = ReceiveBuffers::new();
    let mut train = vec![0; TRAIN_BYTES];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = if cores >= SPIN_CORES_MIN { SPINS } else { 0 };
    let (mut idle_rounds, mut rounds) = (0, 0usize);
    let mut tenants = Vec::new();
    while newcomers(&mut tenants).is_continue() {
        let mut busy = false;
        let mut index = 0;
        while index < tenants.len() {
            match tenants[index].obey() {
                ControlFlow::Continue(any) => {
                    busy |= any;
                    index += 1;
                }
                ControlFlow::Break(()) => {
                    busy = true;
                    // What came before the command is still said: to the network, such as an abort, and to the owner.
                    transmit(&mut tenants, index, clock.now(), &mut train);
                    tenants.remove(index).tell();
                }
            }
        }
        let mut received = false;
        for tenant in &mut tenants {
            received |= tenant.receive(&mut buffers, clock);
        }
        busy |= received;
        let now = clock.now();
        for index in 0..tenants.len() {
            if tenants[index].timeout().is_some_and(|due| due <= now) {
                tenants[index].handle_timeout(now);
            }
            busy |= transmit(&mut tenants, index, now, &mut train);
        }
        for tenant in &mut tenants {
            busy |= tenant.tell();
        }
        if busy {
            idle_rounds = 0;
            // Whoever keeps two machines of this thread busy does not keep it from its sockets, and no socket the others from theirs.
            rounds += 1;
            if !received || rounds % LOOK_ROUNDS == 0 {
                tenants.iter().for_each(|tenant| tenant.ports().look_again());
            }
        } else if idle_rounds < spins {
            idle_rounds += 1;
            tenants.iter().for_each(|tenant| tenant.ports().look_again());
            std::hint::spin_loop();
        } else {
            idle_rounds = 0;
            sleep(&mut tenants, bell, clock);
        }
    }
}

fn transmit(tenants: &mut [Box<dyn Tenant>], index: usize, now: Instant, train: &mut [u8]) -> bool {
    let (before, rest) = tenants.split_at_mut(index);
    let Some((tenant, after)) = rest.split_first_mut() else { return false };
    tenant.transmit(now, train, [before, after])
}

/// Hands the machine what the socket has, up to a limit; whether there may be more.
fn receive<S: Shard>(
    shard: &mut S,
    (socket, seals): (&mut TrainSocket, &mut Seals),
    limit_bytes: usize,
    buffers: &mut ReceiveBuffers,
    clock: Clock,
) -> bool {
    let (mut more, mut bytes, mut counted) = (true, 0, false);
    while more && bytes < limit_bytes {
        let now = clock.now();
        more = socket.receive(buffers, |peer, queue, packet| {
            bytes += packet.len().max(PACKET_BYTES_MIN);
            // Its preamble is read here, for all who ask what job it is of. To open a packet does
            // not change its preamble.
            let verdict = match Preamble::parse(packet) {
                Err(error) => shard.machine().count(Verdict::Drop(error.into())),
                Ok(preamble) if shard.takes(peer, preamble.job) => {
                    let Some(bytes) = seals.open(preamble.job, packet) else { return };
                    if queue == Queue::Long {
                        GradientHeader::mark_ecn(bytes);
                    }
                    shard.machine().handle_parsed(now, *peer, &Packet { preamble, bytes })
                }
                Ok(_) => return,
            };
            counted |= !matches!(verdict, Verdict::Drop(_));
        });
    }
    if counted {
        shard.progress();
    }
    more
}

/// Sleeps until a packet, a command or a machine's timer.
fn sleep(tenants: &mut [Box<dyn Tenant>], bell: &Bell, clock: Clock) {
    let timeout = tenants.iter_mut().filter_map(|tenant| tenant.timeout()).min();
    let timeout = timeout.map(|due| due.since(clock.now()));
    // Longer than poll can express is forever.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    tenants.iter_mut().for_each(|tenant| tenant.slept());
    // The bell after all sockets.
    let sockets = || tenants.iter().flat_map(|tenant| tenant.ports().fds());
    let count = tenants.iter().map(|tenant| tenant.ports().count()).sum();
    let mut fds = sockets().chain(std::iter::repeat(bell.as_fd()));
    let mut next = || PollFd::from_borrowed_fd(fds.next().unwrap_or(bell.as_fd()), PollFlags::IN);
    let mut few: [_; FEW];
    let mut many: Vec<_>;
    let fds = if count < FEW {
        few = std::array::from_fn(|_| next());
        &mut few[..=count]
    } else {
        many = (0..=count).map(|_| next()).collect();
        &mut many[..]
    };
    // An interrupted sleep is a short sleep, after which there may be anything.
    let woken = poll(fds, timeout.as_ref());
    let is_ready = |fd: &PollFd<'_>| woken.is_err() || !fd.revents().is_empty();
    let numbers =
        tenants.iter().flat_map(|tenant| (0..tenant.ports().count()).map(move |number| (tenant, number)));
    for ((tenant, number), fd) in numbers.zip(&*fds) {
        if is_ready(fd) {
            tenant.ports().look_at(number);
        }
    }
    if is_ready(&fds[count]) {
        bell.silence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Offload;
    use crate::socket::{bind, connect};
    use fanin_protocol::{Reason, Transmit};
    use fanin_wire::{Generation, Kind, ShardId, WorkerId};
    use std::net::{Ipv4Addr, SocketAddr};

    /// Counts datagrams.
    struct Counter(usize);

    impl Endpoint for Counter {
        type Address = Peer;
        type Event = ();

        fn receive(&mut self, _: Instant, _: &Peer, _: &Packet<'_>) -> Result<Verdict, Reason> {
            unreachable!("none is a packet of ours")
        }
        fn count(&mut self, verdict: Verdict) -> Verdict {
            self.0 += 1;
            verdict
        }
        fn handle_timeout(&mut self, _: Instant) {}
        fn poll_transmit(&mut self, _: Instant, _: &mut [u8]) -> Option<Transmit<'_, Peer>> {
            None
        }
        fn poll_event(&mut self) -> Option<()> {
            None
        }
        fn poll_timeout(&self) -> Option<Instant> {
            None
        }
    }

    impl Shard for Counter {
        type Machine = Self;
        type Command = ();

        fn machine(&mut self) -> &mut Self {
            self
        }
        fn takes(&mut self, _: &Peer, _: JobId) -> bool {
            false
        }
        fn command(&mut self, (): (), _: &mut Ports) -> ControlFlow<()> {
            ControlFlow::Continue(())
        }
        fn event(&mut self, (): ()) {}
    }

    #[test]
    fn what_is_no_packet_is_counted_by_a_machine_that_takes_none() {
        let (mut sockets, address) = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap();
        let mut server = TrainSocket::new(sockets.remove(0), Offload::Detect).unwrap();
        let mut client = TrainSocket::new(connect(address, 1).unwrap(), Offload::Detect).unwrap();
        let preamble = Preamble {
            kind: Kind::Update,
            job: JobId(1),
            generation: Generation(0),
            worker: WorkerId(0),
            shard: ShardId(0),
        };
        for packet in [&[0xff; 7][..], &preamble.to_bytes(), &[0xff; 9]] {
            client.send(address.into(), packet, packet.len(), None);
        }
        let (mut counter, mut buffers) = (Counter(0), ReceiveBuffers::new());
        receive(&mut counter, (&mut server, &mut Seals::new()), ROUND_BYTES, &mut buffers, Clock);
        assert_eq!(counter.0, 2, "both unreadable ones, and not the packet of a job");
    }

    #[test]
    fn a_round_ends_however_small_the_packets_are() {
        const SENT: usize = 4 * ROUND_BYTES / PACKET_BYTES_MIN;
        let (mut sockets, address) = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap();
        let mut server = TrainSocket::new(sockets.remove(0), Offload::Detect).unwrap();
        let mut client = TrainSocket::new(connect(address, 1).unwrap(), Offload::Detect).unwrap();
        client.send(address.into(), &[0; SENT], 1, None);
        let (mut counter, mut buffers) = (Counter(0), ReceiveBuffers::new());
        assert!(
            receive(&mut counter, (&mut server, &mut Seals::new()), ROUND_BYTES, &mut buffers, Clock),
            "there are more"
        );
        // A round ends between two system calls, of which each takes a few trains of at most 128 packets.
        assert!((1..SENT / 2).contains(&counter.0), "{} of {SENT} packets in one round", counter.0);
    }
}
