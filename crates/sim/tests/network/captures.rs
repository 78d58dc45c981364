//! Captures and traces, read back; hooks and progress.

use std::cell::RefCell;
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Duration;

use fanin_sim::net::{
    Class, Context, LinkId, Listener, Network, Notice, Outcome, Ports, QueueConfig, SimAddress, TcpConfig,
    Time,
};

use crate::support::*;

#[derive(Clone, Default)]
struct Shared(Rc<RefCell<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Time in nanoseconds, original length, bytes.
fn records(file: &[u8]) -> Vec<(u64, u32, Vec<u8>)> {
    assert_eq!((u32_at(file, 0), u32_at(file, 20)), (0xa1b2_3c4d, 1), "nanoseconds, Ethernet");
    let mut rest = &file[24..];
    let mut records = Vec::new();
    while !rest.is_empty() {
        let length = u32_at(rest, 8) as usize;
        let nanos = u64::from(u32_at(rest, 0)) * 1_000_000_000 + u64::from(u32_at(rest, 4));
        records.push((nanos, u32_at(rest, 12), rest[16..16 + length].to_vec()));
        rest = &rest[16 + length..];
    }
    records
}

fn rack_of_two() -> Network {
    network(rack(2, QueueConfig::tail_drop(1 << 20)), 1)
}

type Speaker = fn(&mut Context<'_>, u64);

fn say_gradient(context: &mut Context<'_>, to: u64) {
    context.send(SimAddress { node: to as u32, port: 2000 }, Class::default(), b"gradient");
}

#[test]
fn a_captured_packet_has_sound_headers_and_its_payload() {
    let mut network = rack_of_two();
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let file = Shared::default();
    network.capture(&Ports::Links(vec![LinkId(1)]), file.clone());
    let sender = network.add_actor(from, 1000, Listener(say_gradient as Speaker));
    assert!(network.actor::<Sink>(sender).is_none(), "another type");
    network.at(Time::from_micros(5), move |network| {
        network.notify(Notice { actor: sender, token: to.0.into() });
    });
    network.run_until(Time::from_millis(1));
    network.finish().unwrap();
    let records = records(&file.0.borrow());
    let [(nanos, original, frame)] = &records[..] else { panic!("one packet, on the second link alone") };
    // 84 bytes, the shortest frame, on the first link.
    assert_eq!((*nanos, *original), (5_000 + 1_084, 14 + 28 + 8));
    assert_eq!(frame.len(), 50);
    assert_eq!(frame[12..14], [8, 0]);
    let ip = &frame[14..34];
    assert_eq!((ip[0], ip[9]), (0x45, 17));
    assert_eq!(u16::from_be_bytes([ip[2], ip[3]]), 36);
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the header's checksum");
    assert_eq!(ip[12..16], [10, 0, 0, from.0 as u8 + 1]);
    assert_eq!(ip[16..20], [10, 0, 0, to.0 as u8 + 1]);
    let udp = &frame[34..];
    let field = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
    assert_eq!((field(0), field(2), field(4)), (1000, 2000, 16));
    assert_eq!(&udp[8..], b"gradient");
}

/// A single packet has its own length and no content, and marks and hops as the network made them.
#[test]
fn a_capture_shows_marks_and_hops_and_cuts_off_what_has_no_content() {
    let mut network = network(rack(3, QueueConfig::tail_drop(1 << 20).with_ecn(0)), 1);
    let [a, b, to] = ["h0", "h1", "h2"].map(|name| node(&network, name));
    let file = Shared::default();
    network.capture(&Ports::Links(vec![LinkId(0), LinkId(2)]), file.clone());
    let flow = network.open_tcp(TcpConfig { ecn: true, ..TcpConfig::new(b, to) });
    network.write(flow, 2 * 1460, None);
    source(&mut network, a, vec![Shot::new(Time::ZERO, to, 1000, 0)]);
    network.run_until(Time::from_millis(1));
    network.finish().unwrap();
    // (ECN bits, time to live, original length, length in the file) of what goes to the third host.
    let seen: Vec<_> = records(&file.0.borrow())
        .into_iter()
        .filter(|(_, _, frame)| frame[33] == to.0 as u8 + 1)
        .map(|(_, original, frame)| (frame[15], frame[22], original, frame.len()))
        .collect();
    // On the first link; then on the third it, and the segments, of which the first finds the link
    // busy.
    assert_eq!(seen, [(0, 64, 1014, 42), (0, 63, 1014, 42), (3, 63, 1514, 54), (3, 63, 1514, 54)]);
    let echoes = records(&file.0.borrow());
    let echoes = echoes.iter().filter(|(_, _, frame)| frame[23] == 6 && frame[47] == 0x50).count();
    assert_eq!(echoes, 2, "acknowledgements echo the marks");
}

#[test]
fn a_connection_is_captured_as_tcp_with_its_sequence_numbers() {
    let mut network = rack_of_two();
    let file = Shared::default();
    network.capture(&Ports::All, file.clone());
    let flow = network.open_tcp(TcpConfig::new(node(&network, "h0"), node(&network, "h1")));
    network.write(flow, 3000, None);
    network.run_until(Time::from_millis(1));
    network.finish().unwrap();
    let records = records(&file.0.borrow());
    // Three segments and their acknowledgements on two links each.
    assert_eq!(records.len(), 12);
    assert!(records.is_sorted_by_key(|record| record.0));
    let number = |frame: &[u8], at: usize| u32::from_be_bytes(frame[34 + at..][..4].try_into().unwrap());
    let mut data: Vec<_> =
        records.iter().filter(|record| record.1 > 54).map(|(_, _, frame)| number(frame, 4)).collect();
    data.sort_unstable();
    assert_eq!(data, [0, 0, 1460, 1460, 2920, 2920]);
    let last = records.last().unwrap();
    assert_eq!((last.1, number(&last.2, 8), last.2[23]), (54, 3000, 6));
}

#[test]
fn a_trace_has_every_transmission_and_what_waited() {
    let mut network = rack_of_two();
    let file = Shared::default();
    network.trace(&Ports::Links(vec![LinkId(0)]), file.clone());
    let flow = network.open_tcp(TcpConfig::new(node(&network, "h0"), node(&network, "h1")));
    network.write(flow, 3 * 1460, None);
    network.run_until(Time::from_millis(1));
    network.finish().unwrap();
    let text = String::from_utf8(file.0.borrow().clone()).unwrap();
    assert!(text.starts_with('[') && text.ends_with("]\n"));
    let events: Vec<_> = text.trim_matches(['[', ']', '\n']).split(",\n").collect();
    assert!(events.iter().all(|event| event.starts_with("{\"ph\":") && event.ends_with('}')));
    let of = |text: &str| events.iter().filter(|event| event.contains(text)).count();
    assert_eq!((of("\"thread_name\""), of("\"segment\""), of("\"ack\"")), (2, 3, 3));
    // Two wait, one after the other they go.
    let waits: Vec<_> = events
        .iter()
        .filter_map(|event| event.split_once("\"bytes\":").filter(|_| event.contains("\"ph\":\"C\"")))
        .map(|(_, bytes)| bytes.trim_end_matches('}').parse::<u32>().unwrap())
        .collect();
    assert_eq!(waits, [1538, 3076, 1538, 0]);
    assert_eq!(of("\"queue, h0 to s0\""), 4);
    assert!(events.iter().any(|event| event.contains("\"ts\":1.538000,\"dur\":1.538000")));
}

#[test]
fn a_capture_that_cannot_be_written_is_an_error_at_the_end() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut network = rack_of_two();
    network.capture(&Ports::All, Full);
    network.run_until(Time::from_millis(1));
    assert_eq!(network.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert!(network.finish().is_ok(), "there is none any more");
}

#[test]
fn samples_come_at_their_period_and_do_not_keep_a_run_going() {
    let mut network = rack_of_two();
    let flow = network.open_tcp(TcpConfig::new(node(&network, "h0"), node(&network, "h1")));
    network.write(flow, 1_000_000, None);
    let samples = Rc::new(RefCell::new(Vec::new()));
    let notes = Rc::clone(&samples);
    network.every(Duration::from_micros(100), move |network| {
        notes.borrow_mut().push((network.time(), network.flow(flow).delivered_bytes));
        true
    });
    let limited = Rc::new(RefCell::new(0));
    let count = Rc::clone(&limited);
    network.every(Duration::from_micros(10), move |_| {
        *count.borrow_mut() += 1;
        *count.borrow() < 3
    });
    let progress = Rc::new(RefCell::new(Vec::new()));
    let told = Rc::clone(&progress);
    network.on_progress(500, move |network| told.borrow_mut().push(network.progress()));
    assert_eq!(network.run_until(Time::from_millis(1000)), Outcome::Idle);
    let samples = samples.borrow();
    // A megabyte takes a millisecond; what may come after it is a timer of the connection.
    assert!(network.time() >= Time::from_millis(1) && network.time() < Time::from_millis(12));
    assert!((network.time().0 / Time::from_micros(100).0).abs_diff(samples.len() as u64) <= 1);
    assert!(samples.iter().zip(1..).all(|(sample, at)| sample.0 == Time::from_micros(100 * at)));
    assert!(samples.is_sorted_by_key(|sample| sample.1));
    assert_eq!(*limited.borrow(), 3);
    let progress = progress.borrow();
    assert!(progress.iter().zip(1..).all(|(progress, at)| progress.events == 500 * at));
    assert!(progress.is_sorted_by_key(|progress| progress.time) && progress.len() > 5);
}

#[test]
fn somebody_can_stop_a_run_and_it_goes_on_where_it_was() {
    let mut network = rack_of_two();
    let flow = network.open_tcp(TcpConfig::new(node(&network, "h0"), node(&network, "h1")));
    network.fill(flow);
    network.at(Time::from_micros(50), Network::stop);
    assert_eq!(network.run_until(Time::from_millis(1)), Outcome::Stopped);
    assert_eq!(network.time(), Time::from_micros(50));
    assert_eq!(network.run_until(Time::from_millis(1)), Outcome::TimeUp);
    assert_eq!(network.time(), Time::from_millis(1));
}

#[test]
#[should_panic(expected = "a hook must not run the network that runs it")]
fn a_hook_cannot_run_the_network() {
    let mut network = rack_of_two();
    network.at(Time::ZERO, |network| {
        network.run_until(Time::from_millis(2));
    });
    network.run_until(Time::from_millis(1));
}
