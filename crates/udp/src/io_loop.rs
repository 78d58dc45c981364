//! The loop that runs one machine on one socket, on a thread of its own.

use crate::clock::Clock;
use crate::mailbox::Mailbox;
use crate::train_socket::{Peer, ReceiveBuffers, TRAIN_BYTES, TrainSocket};
use fanin_protocol::{Endpoint, Instant, Verdict};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ops::ControlFlow;

/// Bytes that are handled before the machine may answer: sixteen trains, or as much in single packets. More of them gather
/// more answers into one train; but a worker whose answer waits has its window closed meanwhile.
const ROUND_BYTES: usize = 16 * TRAIN_BYTES;

/// What a packet counts at least in a round. An empty datagram costs as much time as a full one: a stranger who sends them as
/// fast as they are read would else keep the thread from its answers, its timers and its commands.
const PACKET_BYTES_MIN: usize = 1024;

/// Attempts to receive before the thread sleeps, where there are cores to spare. An attempt costs about half a microsecond,
/// to sleep and be woken several: a peer that answers at once is heard awake.
const SPINS: usize = 16;

/// Cores below which the thread sleeps at once. A core that spins is one that the peer, or the training, waits for: on two
/// cores with a switch and two workers, 8 spins cost a tenth of the rate and a quarter more latency, 128 half of the rate.
const SPIN_CORES_MIN: usize = 8;

/// What a driver puts around a machine.
pub(crate) trait Shard {
    type Machine: Endpoint<Address = Peer>;
    type Command;

    fn machine(&mut self) -> &mut Self::Machine;
    /// Carries out a command; `Break` ends the loop.
    fn command(&mut self, command: Self::Command, socket: &mut TrainSocket) -> ControlFlow<()>;
    fn event(&mut self, event: <Self::Machine as Endpoint>::Event);
    /// Told after a round in which so many packets counted.
    fn progress(&mut self, _packets: u64) {}
}

/// Runs `shard` until a command ends it.
pub(crate) fn run<S: Shard>(mut shard: S, mut socket: TrainSocket, mailbox: &Mailbox<S::Command>) {
    let clock = Clock;
    let mut buffers = ReceiveBuffers::new();
    let mut train = vec![0; TRAIN_BYTES];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let spins = if cores >= SPIN_CORES_MIN { SPINS } else { 0 };
    let mut idle_rounds = 0;
    loop {
        let mut busy = false;
        while let Some(command) = mailbox.take() {
            busy = true;
            if shard.command(command, &mut socket).is_break() {
                // What came before the command is still said: to the network, such as an abort, and to the owner.
                transmit(&mut shard, &mut socket, &mut train, clock.now());
                while let Some(event) = shard.machine().poll_event() {
                    shard.event(event);
                }
                return;
            }
        }
        busy |= receive(&mut shard, &mut socket, &mut buffers, clock);
        let now = clock.now();
        if shard.machine().poll_timeout().is_some_and(|due| due <= now) {
            shard.machine().handle_timeout(now);
        }
        busy |= transmit(&mut shard, &mut socket, &mut train, now);
        while let Some(event) = shard.machine().poll_event() {
            busy = true;
            shard.event(event);
        }
        if busy {
            idle_rounds = 0;
        } else if idle_rounds < spins {
            idle_rounds += 1;
            std::hint::spin_loop();
        } else {
            idle_rounds = 0;
            sleep(shard.machine().poll_timeout(), &mut socket, mailbox, clock);
        }
    }
}

/// Hands the machine what the socket has, up to the bound of a round.
fn receive<S: Shard>(
    shard: &mut S,
    socket: &mut TrainSocket,
    buffers: &mut ReceiveBuffers,
    clock: Clock,
) -> bool {
    let (mut any, mut bytes, mut counted) = (false, 0, 0);
    while bytes < ROUND_BYTES {
        let now = clock.now();
        let machine = shard.machine();
        let received = socket.receive(buffers, |peer, packet| {
            bytes += packet.len().max(PACKET_BYTES_MIN);
            if !matches!(machine.handle_packet(now, peer, packet), Verdict::Drop(_)) {
                counted += 1;
            }
        });
        if received == 0 {
            break;
        }
        any = true;
    }
    if counted > 0 {
        shard.progress(counted);
    }
    any
}

fn transmit<S: Shard>(shard: &mut S, socket: &mut TrainSocket, train: &mut [u8], now: Instant) -> bool {
    let mut any = false;
    while let Some(transmit) = shard.machine().poll_transmit(now, train) {
        any = true;
        for &to in transmit.to {
            socket.send(to, &train[..transmit.bytes], transmit.segment_bytes);
        }
    }
    any
}

/// Sleeps until a packet, a command or the machine's timer.
fn sleep<C>(timeout: Option<Instant>, socket: &mut TrainSocket, mailbox: &Mailbox<C>, clock: Clock) {
    let timeout = timeout.map(|due| due.since(clock.now()));
    // Longer than poll can express is forever.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    socket.statistics.sleeps += 1;
    let mut fds = [
        PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(mailbox.bell(), PollFlags::IN),
    ];
    // An interrupted sleep is a short sleep.
    let _ = poll(&mut fds, timeout.as_ref());
    if fds[1].revents().contains(PollFlags::IN) {
        mailbox.silence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Offload;
    use crate::socket::{bind, connect};
    use fanin_protocol::{Reason, Transmit};
    use std::net::{Ipv4Addr, SocketAddr};

    /// Counts packets, and drops them.
    struct Counter(usize);

    impl Endpoint for Counter {
        type Address = Peer;
        type Event = ();

        fn handle_packet(&mut self, _: Instant, _: Peer, _: &[u8]) -> Verdict {
            self.0 += 1;
            Verdict::Drop(Reason::Malformed)
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
        fn command(&mut self, (): (), _: &mut TrainSocket) -> ControlFlow<()> {
            ControlFlow::Continue(())
        }
        fn event(&mut self, (): ()) {}
    }

    #[test]
    fn a_round_ends_however_small_the_packets_are() {
        const SENT: usize = 4 * ROUND_BYTES / PACKET_BYTES_MIN;
        let (mut sockets, address) = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap();
        let mut server = TrainSocket::new(sockets.remove(0), Offload::Detect).unwrap();
        let mut client = TrainSocket::new(connect(address).unwrap(), Offload::Detect).unwrap();
        client.send(address.into(), &[0; SENT], 1);
        let (mut counter, mut buffers) = (Counter(0), ReceiveBuffers::new());
        assert!(receive(&mut counter, &mut server, &mut buffers, Clock));
        // A round ends between two system calls, of which each takes a few trains of at most 128 packets.
        assert!((1..SENT / 2).contains(&counter.0), "{} of {SENT} packets in one round", counter.0);
    }
}
