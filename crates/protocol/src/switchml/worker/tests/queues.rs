//! Workers whose packets meet in one queue in front of the switch, which drops its tail; and
//! workers that pause.

use super::*;

/// A packet that arrives at the worker or, on its way up, from it.
type Arrival = (Instant, usize, Vec<u8>);

/// A link of 1 Gbit/s to the switch that all share; results come back by a way that is wide enough.
struct Shared {
    rack: Rack,
    up: VecDeque<Arrival>,
    down: VecDeque<Arrival>,
    /// The bytes in the link's queue, and their limit.
    queued_bytes: usize,
    queue_bytes: usize,
    /// When the link has sent all of it.
    idle_from: Instant,
}

impl Shared {
    const BYTES_A_MICROSECOND: u64 = 125;
    const DELAY: Duration = Duration::from_micros(100);

    fn new(workers: u8, slots: u16, queue_bytes: usize) -> Self {
        let rack = Rack::new(workers, slots);
        let (up, down) = (VecDeque::new(), VecDeque::new());
        Self { rack, up, down, queued_bytes: 0, queue_bytes, idle_from: Instant(0) }
    }

    /// All workers reduce a tensor, of whom one hears and says nothing in `pause`. Returns how long
    /// it took.
    fn reduce(&mut self, chunks: usize, asleep: usize, pause: core::ops::Range<Duration>) -> Duration {
        let began = self.rack.now;
        let pause = began + pause.start..began + pause.end;
        for worker in &mut self.rack.workers {
            worker.submit(Numbers::Int(vec![1; chunks * ELEMENTS]), Op::Sum);
        }
        let mut train = vec![0; 65536];
        while self.rack.done.iter().any(Vec::is_empty) {
            let now = self.rack.now;
            let is_awake = |w: &usize| *w != asleep || !pause.contains(&now);
            for w in (0..self.rack.workers.len()).filter(is_awake) {
                let worker = &mut self.rack.workers[w];
                while let Some(at) = self.down.iter().position(|(at, to, _)| *to == w && *at <= now) {
                    let (_, _, packet) = self.down.remove(at).unwrap();
                    worker.handle_packet(now, (), &packet);
                }
                worker.handle_timeout(now);
                while let Some(sent) = worker.poll_transmit(now, &mut train) {
                    let (bytes, segment) = (sent.bytes, sent.segment_bytes);
                    for packet in train[..bytes].chunks(segment) {
                        if self.queued_bytes + packet.len() <= self.queue_bytes {
                            let takes = 1000 * packet.len() as u64 / Self::BYTES_A_MICROSECOND;
                            self.idle_from = self.idle_from.max(now) + Duration::from_nanos(takes);
                            self.queued_bytes += packet.len();
                            self.up.push_back((self.idle_from, w, packet.to_vec()));
                        }
                    }
                }
                while let Some(WorkerEvent::Completed(tensor, _)) = worker.poll_event() {
                    self.rack.done[w].push(tensor);
                }
            }
            while self.up.front().is_some_and(|(at, ..)| *at <= now) {
                let (_, w, packet) = self.up.pop_front().unwrap();
                self.queued_bytes -= packet.len();
                self.rack.switch.handle_packet(now, w, &packet);
            }
            while let Some(sent) = self.rack.switch.poll_transmit(now, &mut train) {
                let (to, bytes, segment) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
                for packet in train[..bytes].chunks(segment) {
                    self.down.extend(to.iter().map(|w| (now + Self::DELAY, *w, packet.to_vec())));
                }
            }
            let wakes =
                |w: usize, at: Instant| if w == asleep && pause.contains(&at) { pause.end } else { at };
            let arrivals = self.up.front().map(|(at, ..)| *at).into_iter();
            let results = self.down.iter().map(|(at, w, _)| wakes(*w, *at));
            let workers = self.rack.workers.iter().enumerate();
            let timers = workers.filter_map(|(w, worker)| Some(wakes(w, worker.poll_timeout()?)));
            let next = arrivals.chain(results).chain(timers).min();
            self.rack.now = next.unwrap_or(now).max(now);
        }
        self.rack.done.iter_mut().for_each(Vec::clear);
        self.rack.now.since(began)
    }

    fn packets_sent(&self) -> u64 {
        self.rack.workers.iter().map(|worker| worker.statistics().packets_sent).sum()
    }
}

const NEVER: core::ops::Range<Duration> = Duration::ZERO..Duration::ZERO;

#[test]
fn windows_that_do_not_fit_a_queue_shrink_until_they_do() {
    let (workers, slots, chunks) = (8, 32, 1500);
    let window_bytes = usize::from(slots) * packet_bytes();
    let all = u64::from(workers) * chunks as u64;
    let mut wide = Shared::new(workers, slots, 8 * window_bytes);
    let least = wide.reduce(chunks, 0, NEVER);
    assert_eq!(wide.packets_sent(), all);
    // Room for half of all the windows, and for a quarter: 8 packets of each worker, the least that
    // a window becomes.
    for windows in [4, 2] {
        let mut narrow = Shared::new(workers, slots, windows * window_bytes);
        let times = [0; 3].map(|_| narrow.reduce(chunks, 0, NEVER));
        assert!(times[0] <= 2 * least, "{windows}: {times:?}, {least:?} where there is room");
        assert!(times[1..].iter().all(|time| *time <= least * 6 / 5), "{windows}: {times:?} after {least:?}");
        assert!(narrow.packets_sent() <= 3 * all * 6 / 5, "{windows}: {} of {all}", narrow.packets_sent());
    }
}

#[test]
fn a_worker_that_pauses_makes_no_window_smaller_and_nobody_send_much_again() {
    let (workers, slots) = (8u8, 32);
    // In the middle of a tensor, and at its end, where nothing follows that could tell a loss.
    for (chunks, expected) in [(1500, u32::from(slots)), (usize::from(slots), 31)] {
        for ms in [5, 60, 300] {
            let mut shared = Shared::new(workers, slots, 8 * usize::from(slots) * packet_bytes());
            let alone = shared.reduce(chunks, 0, NEVER);
            let before = shared.packets_sent();
            let pause = alone / 10..alone / 10 + Duration::from_millis(ms);
            let time = shared.reduce(chunks, 3, pause.clone());
            assert!(time <= pause.end + alone, "{ms} ms: {time:?}");
            let sizes = shared.rack.workers.iter().map(|worker| worker.window.size());
            assert!(sizes.clone().all(|size| size >= expected), "{ms} ms: {:?}", sizes.collect::<Vec<_>>());
            if expected == u32::from(slots) {
                let again = shared.packets_sent() - before - u64::from(workers) * chunks as u64;
                // A few by each of those that wait, whenever a timeout ends that doubles from 13 to
                // 250 ms.
                assert!(again <= 7 * 6 * u64::from(ANEW), "{ms} ms: {again}");
            }
        }
    }
}
