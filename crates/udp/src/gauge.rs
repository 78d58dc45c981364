//! The rate of a link, measured before a job begins: one machine opens a [`Gauge`], which counts,
//! and others fill it ([`fill`]).
//!
//! A sender that sends as fast as it can floods small queues on the way. So its window is the most
//! that it sends beyond the packet that the gauge says it reached. Lost packets are not sent again:
//! the link is busy as long as packets wait in its queue.
//!
//! Strangers cannot use a gauge. It answers only those who know the ticket, never by more bytes
//! than it received, and it ends by itself.
//!
//! The rate is the median of the rates of short pieces, by the kernel's times of arrival. A busy
//! machine stops for moments, sender and gauge then wait for each other, and a mean would be too
//! low. The median also holds if several senders begin and end at different moments.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fanin_wire::{FILLER_BYTES, Filler, IP_UDP_BYTES, READING_BYTES, Reading};
use quinn_udp::{BATCH_SIZE, RecvMeta, UdpSocketState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::NotInherited;
use crate::socket::{bind, connect, path_mtu};
use crate::train_socket::{Offload, Peer, ReceiveBuffers, TRAIN_BYTES, TrainSocket};

/// Most senders that a gauge answers: as many as places at a switch.
const SENDERS_MAX: usize = 64;
/// No gauge is open for longer.
const LIFE_MAX: Duration = Duration::from_secs(10);
/// Bytes of the first moment do not count: windows grow, and a shaper hands out what it saved.
const WARM_UP: Duration = Duration::from_millis(50);
/// Each piece has this part of all bytes, within these limits, and takes so long at least: packets come in batches, an interrupt each.
const PIECES: u64 = 16;
const PIECE_BYTES: (u64, u64) = (24 << 10, 128 << 10);
const PIECE_MIN: Duration = Duration::from_millis(1);
/// Times of arrival are kept of every so many bytes, and of no more.
const MARK_BYTES: u64 = 8 << 10;
const MARKS_MAX: usize = 1 << 16;
/// How often the rate is computed.
const REFRESH: Duration = Duration::from_millis(5);
/// How often a gauge looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);
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
const SILENCE: Duration = Duration::from_millis(150);
/// How long a sender sleeps at once.
const NAP: Duration = Duration::from_millis(2);
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
        let socket = sockets.remove(0);
        // It has the kernel tell when packets came, and join trains.
        let state = UdpSocketState::new((&socket).into())?;
        let not_inherited = NotInherited::new(&socket);
        let stopped = Arc::new(AtomicBool::new(false));
        let (asked, until) = (Arc::clone(&stopped), Instant::now() + life.min(LIFE_MAX));
        thread::Builder::new().name("fanin-gauge".into()).spawn(move || {
            let mut count = Count::new(ticket);
            let mut memory = vec![0; BATCH_SIZE * TRAIN_BYTES];
            while !asked.load(Ordering::Relaxed) && Instant::now() < until {
                if wait(&socket.as_fd(), LOOK) {
                    count.receive(&socket, &state, &mut memory);
                }
            }
            // Before the socket, whose number another one may have then.
            drop(not_inherited);
            drop(socket);
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
    #[error("there is no way to {to}: {cause} (ip route get {})", to.ip())]
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
    #[error("{to} fell silent over UDP while it was measured (does a link go up and down? ip -s link)")]
    FellSilent {
        /// The gauge.
        to: SocketAddr,
    },
    /// Packets arrive that are shorter than those of a job.
    #[error(
        "packets of {bytes} bytes to {to} are lost, and shorter ones are not (give all links on the way the same MTU)"
    )]
    TooLong {
        /// The gauge.
        to: SocketAddr,
        /// The length of a packet with its headers.
        bytes: usize,
    },
    /// Hardly any packet arrived.
    #[error("too few packets reached {to} to tell a rate")]
    TooFew {
        /// The gauge.
        to: SocketAddr,
    },
}

/// Fills the gauge at `to` for so long, with at most `window_bytes` on the way. Returns the bits a
/// second that the gauge receives from all its senders together.
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
    // Packets from this sequence on have their full length.
    let mut short_until = 0;
    // When it first answered, and when it last did.
    let mut heard: Option<(Instant, Instant)> = None;
    let mut doubted = began;
    loop {
        // First: a machine that is busy may have slept, while answers came.
        let reading = read(&mut socket, &mut buffers, &last, sent);
        let now = Instant::now();
        if let Some(reading) = reading {
            last = reading;
            heard = Some((heard.map_or(now, |(first, _)| first), now));
            doubted = now;
        }
        match heard {
            None if now - began >= PATIENCE => return Err(Unmeasured::NoAnswer { to }),
            Some((_, latest)) if now - latest >= SILENCE => {
                return Err(if last.reached <= short_until {
                    Unmeasured::TooLong { to, bytes: bytes + if to.is_ipv4() { 28 } else { IP_UDP_BYTES } }
                } else {
                    Unmeasured::FellSilent { to }
                });
            }
            Some((first, _)) if now - first >= duration => break,
            _ => {}
        }
        let is_in_doubt = sent == 0 || now - doubted >= DOUBT;
        if is_in_doubt {
            (base, doubted) = (sent, now);
        }
        let window = last.reached.clamp(WINDOW_MIN, window_max.max(WINDOW_MIN));
        let room = window.saturating_sub(sent - last.reached.max(base));
        let count = match heard {
            _ if is_in_doubt => TRAIN_IN_DOUBT,
            Some(_) => room.min(TRAIN_MAX),
            None => 0,
        };
        if count == 0 {
            wait(&socket.as_fd(), NAP);
            continue;
        }
        // If nothing is heard, a link on the way may have a smaller MTU, and say nothing.
        let is_short = heard.is_none() && now - began >= PATIENCE / 2;
        let size = if is_short { READING_BYTES } else { bytes };
        for (packet, sequence) in train.chunks_exact_mut(size).zip(sent..sent + count) {
            packet[..FILLER_BYTES].copy_from_slice(&Filler { ticket, sequence }.to_bytes());
        }
        socket.send(Peer::from(to), &train[..size * count as usize], size, None);
        sent += count;
        if is_short {
            short_until = sent;
        }
    }
    let ended = Instant::now();
    while last.reached < sent && ended.elapsed() < LAST {
        wait(&socket.as_fd(), LAST.saturating_sub(ended.elapsed()));
        last = read(&mut socket, &mut buffers, &last, sent).unwrap_or(last);
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
    socket.receive(buffers, |_, _, packet| {
        let Ok(reading) = Reading::parse(packet) else { return };
        let reached = newest.map_or(last.reached, |newest| newest.reached);
        if reading.ticket == last.ticket && (reached..=sent).contains(&reading.reached) {
            newest = Some(reading);
        }
    });
    newest
}

fn wait(socket: &BorrowedFd<'_>, patience: Duration) -> bool {
    let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(patience.subsec_nanos()) };
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, Some(&patience)), Ok(1..))
}

/// What a gauge counted.
struct Count {
    ticket: u64,
    /// One more than the highest sequence of each sender.
    reached: Vec<(SocketAddr, u64)>,
    arrivals: Arrivals,
}

impl Count {
    fn new(ticket: u64) -> Self {
        Self { ticket, reached: Vec::new(), arrivals: Arrivals::default() }
    }

    /// Takes what is there, and answers each sender once.
    fn receive(&mut self, socket: &UdpSocket, state: &UdpSocketState, memory: &mut [u8]) {
        let mut meta = [RecvMeta::default(); BATCH_SIZE];
        let mut slices = memory.chunks_exact_mut(TRAIN_BYTES).map(IoSliceMut::new);
        let mut slices: [_; BATCH_SIZE] =
            std::array::from_fn(|_| slices.next().unwrap_or_else(|| IoSliceMut::new(&mut [])));
        let trains = state.recv(socket.into(), &mut slices, &mut meta).unwrap_or(0);
        let mut senders = 0_u64;
        for (meta, train) in meta.iter().zip(&slices).take(trains) {
            let train = &train[..meta.len.min(train.len())];
            for packet in train.chunks(meta.stride.max(1)) {
                let index = self.take(meta.addr, packet, meta.timestamp.unwrap_or_default());
                senders |= index.map_or(0, |index| 1 << index);
            }
        }
        if senders == 0 {
            return;
        }
        let rate_bps = self.arrivals.rate_bps();
        for (index, (to, reached)) in self.reached.iter().enumerate() {
            if senders & (1 << index) != 0 {
                let reading = Reading { ticket: self.ticket, reached: *reached, rate_bps }.to_bytes();
                // The next one says as much if this one is lost.
                let _ = socket.send_to(&reading, to);
            }
        }
    }

    /// Counts a packet, and returns the number of its sender; `None` of a stranger's.
    fn take(&mut self, from: SocketAddr, packet: &[u8], at: Duration) -> Option<usize> {
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
        self.arrivals.add(at, packet.len() + IP_UDP_BYTES + ETHERNET_BYTES);
        Some(index)
    }
}

/// When bytes came after the warm-up, by the kernel's clock.
#[derive(Default)]
struct Arrivals {
    first: Option<Duration>,
    bytes: u64,
    /// A moment, and the bytes until then.
    marks: Vec<(Duration, u64)>,
    /// The rate, and when it was computed.
    rate: u64,
    refreshed: Option<Duration>,
}

impl Arrivals {
    fn add(&mut self, at: Duration, bytes: usize) {
        let first = *self.first.get_or_insert(at);
        self.bytes += bytes as u64;
        let is_due = self.marks.last().is_none_or(|(_, until)| self.bytes - until >= MARK_BYTES);
        if is_due && at.saturating_sub(first) >= WARM_UP && self.marks.len() < MARKS_MAX {
            self.marks.push((at, self.bytes));
        }
    }

    /// The rate so far in bits a second, not older than a moment; 0 where it is too early to tell.
    fn rate_bps(&mut self) -> u64 {
        let Some((now, _)) = self.marks.last() else { return 0 };
        if self.refreshed.is_none_or(|refreshed| now.saturating_sub(refreshed) >= REFRESH) {
            self.refreshed = Some(*now);
            self.rate = rate_bps(&self.marks);
        }
        self.rate
    }
}

/// The median of the rates of pieces between these marks.
fn rate_bps(marks: &[(Duration, u64)]) -> u64 {
    let [first, .., last] = marks else { return 0 };
    let piece = ((last.1 - first.1) / PIECES).clamp(PIECE_BYTES.0, PIECE_BYTES.1);
    let (mut rates, mut begin) = (Vec::new(), first);
    for mark in marks {
        let (bytes, took) = (mark.1 - begin.1, mark.0.saturating_sub(begin.0));
        if bytes >= piece && took >= PIECE_MIN {
            rates.push(8.0 * bytes as f64 / took.as_secs_f64());
            begin = mark;
        }
    }
    rates.sort_unstable_by(f64::total_cmp);
    // A float that is too large, or a fraction, becomes the next number there is.
    rates.get(rates.len() / 2).map_or(0, |rate| *rate as u64)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

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
        let (now, from) = (Duration::from_secs(1), SocketAddr::new(HERE, 1));
        assert_eq!(count.take(from, &filler(TICKET ^ 1, 0), now), None);
        assert_eq!(count.take(from, b"hello", now), None);
        // An answer would be longer.
        assert_eq!(count.take(from, &filler(TICKET, 0)[..FILLER_BYTES], now), None);
        assert!(count.reached.is_empty() && count.arrivals.first.is_none());
        assert_eq!(count.take(from, &filler(TICKET, 6), now), Some(0));
        assert_eq!(count.take(from, &filler(TICKET, 4), now), Some(0));
        assert_eq!(count.reached, [(from, 7)]);
    }

    #[test]
    fn batches_of_an_interrupt_are_not_taken_for_the_rate() {
        // 10 Gbit/s in batches of 125 kB, each of which is taken in within 10 µs.
        let batches = (0..1000).flat_map(|batch| {
            let begin = Duration::from_micros(100 * batch);
            (0..10).map(move |part| (begin + Duration::from_micros(part), 125_000 * batch + 12_500 * part))
        });
        let rate = rate_bps(&batches.collect::<Vec<_>>());
        assert!((9_000_000_000..=11_500_000_000).contains(&rate), "{rate}");
    }

    #[test]
    fn what_a_gauge_keeps_is_bounded() {
        let (mut count, now) = (Count::new(TICKET), Duration::from_secs(1));
        for port in 0..100 {
            let known = count.take(SocketAddr::new(HERE, port), &filler(TICKET, u64::MAX), now);
            assert_eq!(known.is_some(), usize::from(port) < SENDERS_MAX);
        }
        assert_eq!(count.reached.len(), SENDERS_MAX);
        for micros in 0..2 * MARKS_MAX as u64 {
            count.arrivals.add(now + WARM_UP + Duration::from_micros(micros), MARK_BYTES as usize);
        }
        assert_eq!(count.arrivals.marks.len(), MARKS_MAX);
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
    fn a_gauge_that_falls_silent_tells_no_rate() {
        let gauge = UdpSocket::bind((HERE, 0)).expect("a socket");
        let to = gauge.local_addr().expect("bound");
        // It answers the first packet of each sender, and nothing more. A machine that is busy may
        // answer too late.
        thread::spawn(move || {
            let (mut known, mut packet) = (Vec::new(), [0; 2048]);
            while let Ok((_, from)) = gauge.recv_from(&mut packet) {
                if !known.contains(&from) {
                    known.push(from);
                    let first = Reading { ticket: TICKET, reached: 1, rate_bps: 0 };
                    gauge.send_to(&first.to_bytes(), from).expect("a way back");
                }
            }
        });
        let attempts = std::iter::repeat_with(|| fill(to, TICKET, LIFE_MAX, WINDOW));
        let mut heard = attempts.skip_while(|found| matches!(found, Err(Unmeasured::NoAnswer { .. })));
        let unmeasured = heard.next().expect("endless");
        assert!(matches!(unmeasured, Err(Unmeasured::FellSilent { .. })), "{unmeasured:?}");
    }

    #[test]
    fn packets_that_are_too_long_for_the_way_are_told_from_silence() {
        let gauge = UdpSocket::bind((HERE, 0)).expect("a socket");
        let to = gauge.local_addr().expect("bound");
        // A link that carries short packets alone, and a gauge behind it.
        thread::spawn(move || {
            let mut packet = [0; 2048];
            while let Ok((length, from)) = gauge.recv_from(&mut packet) {
                if let (READING_BYTES, Ok(filler)) = (length, Filler::parse(&packet[..length])) {
                    let reading = Reading { ticket: TICKET, reached: filler.sequence + 1, rate_bps: 0 };
                    gauge.send_to(&reading.to_bytes(), from).expect("a way back");
                }
            }
        });
        // A machine that is busy may answer too late.
        let attempts = std::iter::repeat_with(|| fill(to, TICKET, LIFE_MAX, WINDOW));
        let mut heard = attempts.skip_while(|found| matches!(found, Err(Unmeasured::NoAnswer { .. })));
        let unmeasured = heard.next().expect("endless");
        assert!(matches!(unmeasured, Err(Unmeasured::TooLong { bytes: 1428, .. })), "{unmeasured:?}");
    }

    #[test]
    fn where_there_is_no_way_the_cause_is_told() {
        let everybody = SocketAddr::from((Ipv4Addr::BROADCAST, 9));
        let unmeasured = fill(everybody, TICKET, LIFE_MAX, WINDOW);
        assert!(matches!(unmeasured, Err(Unmeasured::NoWay { .. })), "{unmeasured:?}");
    }

    #[test]
    fn a_gauge_of_another_ticket_does_not_answer() {
        let gauge = open();
        let unmeasured = fill(gauge.address(), TICKET ^ 1, Duration::from_millis(200), WINDOW);
        assert!(matches!(unmeasured, Err(Unmeasured::NoAnswer { .. })), "{unmeasured:?}");
    }

    /// Trains of so many microseconds and bytes, one after the other.
    fn rate_of(trains: impl IntoIterator<Item = (u64, usize)>) -> u64 {
        let (mut arrivals, mut at) = (Arrivals::default(), Duration::from_secs(1_700_000_000));
        for (micros, bytes) in trains {
            at += Duration::from_micros(micros);
            arrivals.add(at, bytes);
        }
        arrivals.rate_bps()
    }

    #[test]
    fn the_rate_is_that_of_what_comes_without_a_pause() {
        // 10 kB in 80 us are 1 Gbit/s. A burst that a shaper saved comes before the warm-up is over.
        let steady = || std::iter::repeat_n((80, 10_000), 1000);
        let burst = std::iter::repeat_n((1, 10_000), 1000);
        assert_eq!(rate_of(burst.chain(steady())), 1_000_000_000);
        // Each 51 trains a machine sleeps for 20 ms.
        let pauses =
            steady().enumerate().map(|(i, (us, bytes))| (us + u64::from(i % 51 == 0) * 20_000, bytes));
        assert_eq!(rate_of(pauses), 1_000_000_000);
    }

    #[test]
    fn a_slow_link_has_a_rate_and_what_is_too_slow_has_none() {
        // 1.25 kB in 1 ms are 10 Mbit/s.
        assert_eq!(rate_of(std::iter::repeat_n((1000, 1250), 250)), 10_000_000);
        assert_eq!(rate_of(std::iter::repeat_n((100_000, 1250), 3)), 0);
        assert_eq!(rate_of([(0, 1250)]), 0);
    }
}
