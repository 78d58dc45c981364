//! A worker whose plan changes.

use super::*;
use crate::machine::{Elements, Tensor, WorkerMachine};
use crate::transport::RetransmissionConfig;

#[derive(Debug)]
struct Zeros(Vec<i32>);

impl Tensor for Zeros {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Int32(&mut self.0)
    }
}

struct Line {
    worker: GoatWorker<u16, Zeros>,
    generation: u16,
    now: Instant,
    /// Of what it sent last.
    headers: BTreeMap<u64, PlannedHeader>,
}

fn plan_of(generation: u16, fragments: u32) -> GoatWorkerPlan<u16> {
    let sub_models = SubModels::new(&[fragments]).unwrap();
    let directions = Assignment::new(0, sub_models, vec![S1], Vec::new()).unwrap();
    GoatWorkerPlan { id: JobId(3), key: KEY, generation: Generation(generation), directions, upstream: UP }
}

impl Line {
    /// With a plan of so many fragments, and as long a window.
    fn new(fragments: u16) -> Self {
        let config = GoatJobConfig { window_max: fragments, congestion_control: false, ..config() };
        let GoatWorkerPlan { directions, upstream, .. } = plan_of(4, fragments.into());
        let floor = Duration::from_millis(10);
        let when = RetransmissionConfig { floor, ceiling: floor };
        let mut worker = GoatWorker::new(config, directions, upstream, when);
        worker.submit(Zeros(vec![0; 100 * ELEMENTS]), Op::Sum);
        Self { worker, generation: 4, now: Instant(0), headers: BTreeMap::new() }
    }

    fn resume(&mut self, fragments: u32) {
        self.generation += 1;
        self.worker.suspend();
        self.worker.resume(self.now, plan_of(self.generation, fragments));
    }

    /// The fragments that it sends.
    fn sent(&mut self) -> Vec<u64> {
        let (mut all, mut train) = (Vec::new(), vec![0; 65536]);
        while let Some(transmit) = self.worker.poll_transmit(self.now, &mut train) {
            let (bytes, segment_bytes) = (transmit.bytes, transmit.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                let parsed = PlannedPacket::parse(Preamble::parse(packet).unwrap(), packet).unwrap();
                all.push(parsed.header.sequence);
                self.headers.insert(parsed.header.sequence, parsed.header);
            }
        }
        all
    }

    /// The fragments that it sends when the server asks for the parameters of one.
    fn asked(&mut self, sequence: u64) -> Vec<u64> {
        let flags = Flags { is_ack: true, overflow: true, ..Flags::default() };
        let header = PlannedHeader { flags, ..self.headers[&sequence] };
        let mut packet = vec![0; fragment_packet_bytes::<PlannedDirections>(0)];
        PlannedPacket::write(&mut packet, KEY, &preamble(self.generation), &header, 0, |_| ());
        assert_eq!(self.worker.handle_packet(self.now, UP, &packet), Verdict::Absorb, "{sequence}");
        self.sent()
    }

    /// The fragments that it sends when the parameters of one come.
    fn answered(&mut self, sequence: u64) -> Vec<u64> {
        let packet = Packet { generation: self.generation, header: self.headers[&sequence], value: 0 };
        let bytes = packet.parameters().bytes(KEY);
        assert_eq!(self.worker.handle_packet(self.now, UP, &bytes), Verdict::Absorb, "{sequence}");
        self.sent()
    }
}

/// The fourth fragment has the label of the first: it waits until that one is done.
#[test]
fn what_a_shorter_plan_does_not_reach_is_sent_again_when_it_does() {
    let mut line = Line::new(8);
    assert_eq!(line.sent(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(line.answered(2), []);
    line.resume(3);
    assert_eq!(line.sent(), [0, 1]);
    assert_eq!(line.answered(1), []);
    assert_eq!(line.answered(0), [3, 4, 5]);
    line.now = line.worker.poll_timeout().unwrap();
    line.worker.handle_timeout(line.now);
    assert_eq!(line.sent(), [3, 4, 5], "after a timeout");
    assert_eq!(line.answered(3), [6]);
    // Another worker handed its parameters back.
    assert_eq!(line.answered(7), []);
    assert_eq!(line.answered(4), []);
    assert_eq!(line.answered(5), [8]);
    assert_eq!(line.answered(6), [9, 10]);
    // The next plan comes while some wait.
    line.resume(1);
    assert_eq!(line.sent(), [8]);
    line.resume(2);
    assert_eq!(line.sent(), [8, 9]);
    line.resume(16);
    assert_eq!(line.sent(), [8, 9, 10, 11, 12, 13, 14, 15], "as far as the window goes");
}

/// The ninth fragment has the place of the first one, and waits.
#[test]
fn who_holds_a_fragment_back_hands_the_parameters_of_its_place_over() {
    let mut line = Line::new(8);
    assert_eq!(line.sent().len(), 8);
    assert_eq!(line.answered(0), [8]);
    line.resume(3);
    assert_eq!(line.sent(), [1, 2, 3]);
    assert_eq!(line.asked(8), [], "its original values go when it is within reach");
    assert_eq!(line.asked(0), [0]);
    for (sequence, follow) in [(1, 4), (2, 5), (3, 6), (4, 7), (5, 8)] {
        assert_eq!(line.answered(sequence), [follow]);
    }
}
