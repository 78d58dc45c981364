//! What a link carries, measured before a job begins: one machine opens a [`Gauge`], which counts, and others fill
//! it ([`fill`]).
//!
//! A sender that sends as fast as it can floods small queues on the way, and starves what else is there. So it keeps
//! no more than a window beyond what the gauge says that it reached, and what is lost is not sent again: the link is busy
//! as long as something waits in its queue. A gauge answers no packet by a longer one, answers nobody without the
//! ticket, and ends by itself, so that it is of no use to strangers.
//!
//! The rate is the median of short intervals, and not the mean: a machine whose cores are busy stops for moments,
//! and several senders neither begin nor end at once.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fanin_wire::{FILLER_BYTES, Filler, IP_UDP_BYTES, READING_BYTES, Reading};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::socket::{bind, connect, path_mtu};
use crate::train_socket::{Offload, Peer, ReceiveBuffers, TrainSocket};

/// Most senders that a gauge answers: as many as places at a switch.
const SENDERS_MAX: usize = 64;
/// No gauge is open for longer.
const LIFE_MAX: Duration = Duration::from_secs(10);
/// What comes before is not counted: windows grow, and a shaper hands out what it saved.
const WARM_UP: Duration = Duration::from_millis(50);
/// The intervals whose median is the rate.
const INTERVAL: Duration = Duration::from_millis(20);
/// Packets an interval below which one more or less shows: the mean is taken.
const FEW: u64 = 32;
/// What Ethernet puts before an IP packet, and shapers count.
const ETHERNET_BYTES: usize = 14;
/// The bytes that a filler has at most: tunnels on the way have room for themselves.
const FILLER_BYTES_MAX: usize = 1400;
/// The least window of a sender, in packets, and its first one.
const WINDOW_MIN: u64 = 16;
/// Packets a system call, and packets that are sent when nothing is heard.
const TRAIN_MAX: u64 = 44;
const TRAIN_IN_DOUBT: u64 = 4;
/// After so much silence all that is on its way counts as lost.
const DOUBT: Duration = Duration::from_millis(20);
/// How long a gauge may take to answer first, and how long it may be silent at the end.
const PATIENCE: Duration = Duration::from_millis(300);
const SILENCE: Duration = Duration::from_millis(100);
/// How long the last packets are waited for.
const LAST: Duration = Duration::from_millis(50);

/// Counts what fills it, on a port of its own, until it is dropped or its time is over.
#[derive(Debug)]
pub struct Gauge {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
}

impl Gauge {
    /// Opens one at an address of this machine, for those who know the ticket.
    ///
    /// # Errors
    /// When there is no socket or thread to be had there.
    pub fn open(at: IpAddr, ticket: u64, life: Duration) -> io::Result<Self> {
        let (mut sockets, address) = bind(SocketAddr::new(at, 0), 1)?;
        let mut socket = TrainSocket::new(sockets.remove(0), Offload::Detect)?;
        let stopped = Arc::new(AtomicBool::new(false));
        let (asked, until) = (Arc::clone(&stopped), Instant::now() + life.min(LIFE_MAX));
        thread::Builder::new().name("fanin-gauge".into()).spawn(move || {
            let mut count = Count::new(ticket);
            let mut buffers = ReceiveBuffers::new();
            while !asked.load(Ordering::Relaxed) && Instant::now() < until {
                if wait(&socket, INTERVAL) {
                    count.receive(&mut socket, &mut buffers);
                }
            }
        })?;
        Ok(Self { address, stopped })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

/// Why a link was not measured.
#[derive(Debug, thiserror::Error)]
pub enum Unmeasured {
    /// There is no way, or no socket.
    #[error("there is no way to {to}: {cause}")]
    NoWay {
        /// The gauge.
        to: SocketAddr,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// No packet came back.
    #[error("no answer from {to} over UDP within {} ms", PATIENCE.as_millis())]
    NoAnswer {
        /// The gauge.
        to: SocketAddr,
    },
    /// Packets came back, and then none.
    #[error("{to} fell silent over UDP while it was measured")]
    FellSilent {
        /// The gauge.
        to: SocketAddr,
    },
    /// Hardly any packet arrived.
    #[error("too few packets reached {to} to tell a rate")]
    TooFew {
        /// The gauge.
        to: SocketAddr,
    },
}

/// Fills the gauge at `to` for so long, with at most `window_bytes` on the way, and returns the bits a second that it
/// says it receives, from all its senders together.
///
/// # Errors
/// When it cannot be reached, or does not tell.
pub fn fill(to: SocketAddr, ticket: u64, duration: Duration, window_bytes: usize) -> Result<u64, Unmeasured> {
    let no_way = |cause| Unmeasured::NoWay { to, cause };
    let mtu = path_mtu(to).map_err(no_way)?;
    let socket = connect(to, 1).map_err(no_way)?;
    let mut socket = TrainSocket::new(socket, Offload::Detect).map_err(no_way)?;
    let bytes = mtu.saturating_sub(IP_UDP_BYTES).clamp(READING_BYTES, FILLER_BYTES_MAX);
    let window_max = (window_bytes / bytes) as u64;
    let mut train = vec![0; bytes * TRAIN_MAX as usize];
    let mut buffers = ReceiveBuffers::new();
    let began = Instant::now();
    let (mut sent, mut base, mut last) = (0, 0, Reading { ticket, reached: 0, rate_bps: 0 });
    // When it first answered, and when it last did.
    let mut heard: Option<(Instant, Instant)> = None;
    let mut doubted = began;
    loop {
        let now = Instant::now();
        match heard {
            None if now - began >= PATIENCE => return Err(Unmeasured::NoAnswer { to }),
            Some((first, _)) if now - first >= duration => break,
            _ => {}
        }
        let window = last.reached.clamp(WINDOW_MIN, window_max.max(WINDOW_MIN));
        let is_in_doubt = now - doubted >= DOUBT;
        if is_in_doubt {
            (base, doubted) = (sent, now);
        }
        let room = window.saturating_sub(sent - last.reached.max(base));
        let most = if is_in_doubt || heard.is_none() { TRAIN_IN_DOUBT } else { TRAIN_MAX };
        // Before the first answer, one short train at a time.
        let count = if heard.is_none() && !is_in_doubt && sent > 0 { 0 } else { room.min(most) };
        for (packet, sequence) in train.chunks_exact_mut(bytes).zip(sent..sent + count) {
            packet[..FILLER_BYTES].copy_from_slice(&Filler { ticket, sequence }.to_bytes());
        }
        if count > 0 {
            socket.send(Peer::from(to), &train[..bytes * count as usize], bytes, None);
            sent += count;
        }
        // Whoever has no room sleeps until something is heard.
        if count == 0 {
            wait(&socket, Duration::from_millis(2));
        }
        if let Some(reading) = read(&mut socket, &mut buffers, &last, sent) {
            let now = Instant::now();
            last = reading;
            heard = Some((heard.map_or(now, |(first, _)| first), now));
            doubted = now;
        }
    }
    let ended = Instant::now();
    while last.reached < sent && ended.elapsed() < LAST {
        wait(&socket, LAST.saturating_sub(ended.elapsed()));
        last = read(&mut socket, &mut buffers, &last, sent).unwrap_or(last);
    }
    if heard.is_some_and(|(_, latest)| ended - latest >= SILENCE) {
        return Err(Unmeasured::FellSilent { to });
    }
    if last.rate_bps == 0 { Err(Unmeasured::TooFew { to }) } else { Ok(last.rate_bps) }
}

/// The newest reading of those that came, if there is one that is newer.
fn read(
    socket: &mut TrainSocket,
    buffers: &mut ReceiveBuffers,
    last: &Reading,
    sent: u64,
) -> Option<Reading> {
    let mut newest: Option<Reading> = None;
    socket.receive(buffers, |_, packet| {
        let Ok(reading) = Reading::parse(packet) else { return };
        let reached = newest.map_or(last.reached, |newest| newest.reached);
        if reading.ticket == last.ticket && (reached..=sent).contains(&reading.reached) {
            newest = Some(reading);
        }
    });
    newest
}

fn wait(socket: &TrainSocket, patience: Duration) -> bool {
    let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(patience.subsec_nanos()) };
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, Some(&patience)), Ok(1..))
}

/// What a gauge counted.
struct Count {
    ticket: u64,
    /// One more than the highest sequence of each sender.
    reached: Vec<(SocketAddr, u64)>,
    intervals: Intervals,
}

impl Count {
    fn new(ticket: u64) -> Self {
        Self { ticket, reached: Vec::new(), intervals: Intervals::default() }
    }

    /// Takes what is there, and answers each sender once.
    fn receive(&mut self, socket: &mut TrainSocket, buffers: &mut ReceiveBuffers) {
        let now = Instant::now();
        let mut senders = 0_u64;
        socket.receive(buffers, |peer, packet| {
            let Peer::At { remote, .. } = peer else { return };
            if let Some(index) = self.take(*remote, packet, now) {
                senders |= 1 << index;
            }
        });
        let rate_bps = if senders == 0 { 0 } else { self.intervals.rate_bps(now) };
        for (index, (to, reached)) in self.reached.iter().enumerate() {
            if senders & (1 << index) != 0 {
                let reading = Reading { ticket: self.ticket, reached: *reached, rate_bps }.to_bytes();
                socket.send(Peer::from(*to), &reading, READING_BYTES, None);
            }
        }
    }

    /// Counts a packet, and returns the number of its sender; `None` of a stranger's.
    fn take(&mut self, from: SocketAddr, packet: &[u8], now: Instant) -> Option<usize> {
        let filler = Filler::parse(packet).ok().filter(|filler| filler.ticket == self.ticket)?;
        let known = self.reached.iter().position(|(sender, _)| *sender == from);
        let index = match known {
            Some(index) => index,
            None if self.reached.len() < SENDERS_MAX => {
                self.reached.push((from, 0));
                self.reached.len() - 1
            }
            None => return None,
        };
        let reached = &mut self.reached[index].1;
        *reached = (*reached).max(filler.sequence.saturating_add(1));
        self.intervals.add(now, packet.len() + IP_UDP_BYTES + ETHERNET_BYTES);
        Some(index)
    }
}

/// The bytes and packets that came in each interval since the first packet, the warm-up apart.
#[derive(Default)]
struct Intervals {
    first: Option<Instant>,
    came: Vec<(u64, u64)>,
}

impl Intervals {
    fn add(&mut self, now: Instant, bytes: usize) {
        let first = *self.first.get_or_insert(now);
        let Some(index) = index(first, now) else { return };
        if self.came.len() <= index {
            self.came.resize(index + 1, (0, 0));
        }
        self.came[index].0 += bytes as u64;
        self.came[index].1 += 1;
    }

    /// The rate so far in bits a second, from the intervals that are over; 0 before there is one.
    fn rate_bps(&self, now: Instant) -> u64 {
        let over = self.first.and_then(|first| index(first, now)).unwrap_or(0);
        let mut came = self.came[..over.min(self.came.len())].to_vec();
        if came.is_empty() {
            return 0;
        }
        came.sort_unstable();
        let (median, packets) = came[came.len() / 2];
        let is_few = packets < FEW;
        let mean = || came.iter().map(|(bytes, _)| bytes).sum::<u64>() as f64 / came.len() as f64;
        let bytes = if is_few { mean() } else { median as f64 };
        (8.0 * bytes / INTERVAL.as_secs_f64()) as u64
    }
}

/// The interval in which `now` is; `None` in the warm-up.
fn index(first: Instant, now: Instant) -> Option<usize> {
    let since = now.saturating_duration_since(first).checked_sub(WARM_UP)?;
    Some((since.as_nanos() / INTERVAL.as_nanos()) as usize)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const TICKET: u64 = 0x1234_5678_9abc_def0;
    const WINDOW: usize = 512 << 10;

    fn open() -> Gauge {
        Gauge::open(HERE, TICKET, LIFE_MAX).expect("a socket")
    }

    fn filler(ticket: u64, sequence: u64) -> [u8; 64] {
        let mut packet = [0; 64];
        packet[..FILLER_BYTES].copy_from_slice(&Filler { ticket, sequence }.to_bytes());
        packet
    }

    #[test]
    fn a_gauge_is_filled_by_several_and_tells_each_the_rate_of_all() {
        let gauge = open();
        // A machine that is busy may stop for as long as all of it takes.
        let fill = || loop {
            match fill(gauge.address(), TICKET, Duration::from_millis(200), WINDOW) {
                Ok(rate) => break rate,
                Err(Unmeasured::TooFew { .. } | Unmeasured::FellSilent { .. }) => {}
                Err(unmeasured) => panic!("{unmeasured}"),
            }
        };
        let rates: Vec<_> = thread::scope(|scope| {
            let fillers: Vec<_> = (0..2).map(|_| scope.spawn(fill)).collect();
            fillers.into_iter().map(|filler| filler.join().expect("no panic")).collect()
        });
        assert!(rates.iter().all(|rate| *rate > 0), "{rates:?}");
    }

    #[test]
    fn nobody_without_the_ticket_is_answered_or_counted() {
        let mut count = Count::new(TICKET);
        let (now, from) = (Instant::now(), SocketAddr::new(HERE, 1));
        assert_eq!(count.take(from, &filler(TICKET ^ 1, 0), now), None);
        assert_eq!(count.take(from, b"hello", now), None);
        // An answer would be longer.
        assert_eq!(count.take(from, &filler(TICKET, 0)[..FILLER_BYTES], now), None);
        assert!(count.reached.is_empty() && count.intervals.first.is_none());
        assert_eq!(count.take(from, &filler(TICKET, 6), now), Some(0));
        assert_eq!(count.take(from, &filler(TICKET, 4), now), Some(0));
        assert_eq!(count.reached, [(from, 7)]);
    }

    #[test]
    fn what_a_gauge_keeps_is_bounded() {
        let (mut count, now) = (Count::new(TICKET), Instant::now());
        for port in 0..100 {
            let known = count.take(SocketAddr::new(HERE, port), &filler(TICKET, u64::MAX), now);
            assert_eq!(known.is_some(), usize::from(port) < SENDERS_MAX);
        }
        assert_eq!(count.reached.len(), SENDERS_MAX);
        count.take(SocketAddr::new(HERE, 0), &filler(TICKET, 0), now + LIFE_MAX);
        assert!(count.intervals.came.len() <= (LIFE_MAX.as_nanos() / INTERVAL.as_nanos()) as usize);
    }

    #[test]
    fn who_is_not_there_is_given_up() {
        let silent = UdpSocket::bind((HERE, 0)).expect("a socket");
        let to = silent.local_addr().expect("bound");
        let unmeasured = fill(to, TICKET, Duration::from_millis(200), WINDOW);
        assert!(matches!(unmeasured, Err(Unmeasured::NoAnswer { .. })), "{unmeasured:?}");
        silent.set_nonblocking(true).expect("a socket");
        let came = std::iter::from_fn(|| silent.recv(&mut [0; 2048]).ok()).count() as u64;
        let trains = (PATIENCE.as_nanos() / DOUBT.as_nanos()) as u64 + 1;
        assert!((1..=trains * TRAIN_IN_DOUBT).contains(&came), "it is not flooded: {came}");
    }

    #[test]
    fn a_gauge_of_another_ticket_does_not_answer() {
        let gauge = open();
        let unmeasured = fill(gauge.address(), TICKET ^ 1, Duration::from_millis(200), WINDOW);
        assert!(matches!(unmeasured, Err(Unmeasured::NoAnswer { .. })), "{unmeasured:?}");
    }

    #[test]
    fn the_rate_is_the_median_of_intervals_after_the_warm_up() {
        let mut intervals = Intervals::default();
        let began = Instant::now();
        let at = |millis: u64| began + Duration::from_millis(millis);
        assert_eq!(intervals.rate_bps(began), 0);
        let mut add = |millis: u64, packets: usize| {
            (0..packets).for_each(|_| intervals.add(at(millis), 1250));
        };
        // A burst that a shaper saved; one interval of a machine that slept; then what it missed.
        add(0, 10_000);
        for (millis, packets) in [(60, 40), (75, 40), (100, 200), (115, 40), (140, 40)] {
            add(millis, packets);
        }
        assert_eq!(intervals.rate_bps(at(69)), 0, "no interval is over");
        assert_eq!(intervals.rate_bps(at(150)), 8 * 40 * 1250 * 50);
    }

    #[test]
    fn of_few_packets_the_mean_is_taken() {
        let mut intervals = Intervals::default();
        let began = Instant::now();
        let at = |millis: u64| began + Duration::from_millis(millis);
        for millis in [0, 55, 75, 85, 95] {
            intervals.add(at(millis), 1250);
        }
        assert_eq!(intervals.rate_bps(at(110)), 8 * 1250 * 4 * 50 / 3);
    }
}
