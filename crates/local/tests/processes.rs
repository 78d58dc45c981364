//! Ranks that are processes: this program again, as one rank of a group each. Some are killed.

mod common;

use common::{PATIENCE, expected, name, start, submit, tensor};
use fanin_local::{Group, LocalError, SharedMemory};
use fanin_udp::Failure;
use fanin_wire::{Dtype, Op};
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Says to this program which rank it is: name of the memory, ranks, rank.
const RANK: &str = "FANIN_LOCAL_TEST_RANK";
/// The words of a rank when it has the memory, when a sum was right, and what ended it.
const HERE: &str = "here";
const RIGHT: &str = "right";
const ENDED: &str = "ended: ";
const ELEMENTS: usize = 1_000_003;

/// No test, but a rank: sums until it is told to stop, or somebody else is gone.
#[test]
#[ignore = "the other tests start it"]
fn rank() {
    let Ok(what) = env::var(RANK) else { return };
    let mut words = what.split(' ');
    let name = words.next().expect("a name");
    let [ranks, me] = [0; 2].map(|_| words.next().expect("a number").parse::<usize>().expect("a number"));
    let group =
        Group { ranks: (0..ranks as u32).map(|rank| rank * 10).collect(), columns: ranks, networked: false };
    let memory = match me {
        0 => SharedMemory::create(name, group),
        _ => SharedMemory::open(name, group, me, PATIENCE),
    }
    .expect("shared memory");
    memory.gather(PATIENCE).expect("all ranks");
    // The others are not asked for anything.
    let machines = (0..10 * ranks).map(|rank| usize::from(rank % 10 != 0)).collect();
    let local = start(memory, None, machines);
    say(HERE);
    for number in 0.. {
        let mut memory = tensor(Dtype::Float32, ELEMENTS, me, number);
        match submit(&local, &mut memory, Dtype::Float32, Op::Sum).recv_timeout(PATIENCE).expect("an answer")
        {
            Ok(_) => {
                assert!(memory == expected(Dtype::Float32, ELEMENTS, ranks, number, Op::Sum), "a wrong sum");
                say(RIGHT);
            }
            Err(Failure::Because(cause)) => {
                cause.downcast_ref::<LocalError>().expect("an error of the group");
                return say(&format!("{ENDED}{cause}"));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

fn say(text: &str) {
    // Past what the test harness captures; who is not heard any more is killed in a moment.
    let _ = writeln!(std::io::stdout().lock(), "\n{text}");
}

struct Rank {
    process: Child,
    says: BufReader<ChildStdout>,
    _stays_open: ChildStdin,
}

impl Rank {
    fn start(name: &str, ranks: usize, me: usize) -> Self {
        let mut process = Command::new(env::current_exe().expect("this program"))
            .args(["rank", "--exact", "--ignored", "--nocapture"])
            .env(RANK, format!("{name} {ranks} {me}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let says = BufReader::new(process.stdout.take().expect("piped"));
        Self { _stays_open: process.stdin.take().expect("piped"), says, process }
    }

    /// The next thing it says that begins so.
    fn hear(&mut self, beginning: &str) -> Option<String> {
        let mut line = String::new();
        while self.says.read_line(&mut line).expect("text") > 0 {
            if line.starts_with(beginning) {
                return Some(line.trim_end().into());
            }
            assert!(!line.contains("panicked"), "{line}");
            line.clear();
        }
        None
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn group(ranks: usize) -> Vec<Rank> {
    let name = name();
    let mut group: Vec<_> = (0..ranks).map(|me| Rank::start(&name, ranks, me)).collect();
    for rank in &mut group {
        rank.hear(HERE).expect("a rank that has begun");
    }
    group
}

#[test]
fn processes_sum_and_survivors_of_a_kill_name_the_rank_and_have_no_wrong_sum() {
    for (ranks, victim, after) in [(2, 1, 0), (2, 0, 3), (3, 2, 1), (4, 1, 2), (8, 0, 1), (8, 7, 2)] {
        let mut group = group(ranks);
        for rank in &mut group {
            for _ in 0..after {
                rank.hear(RIGHT).expect("a sum");
            }
        }
        // Somewhere in a sum: they take some milliseconds each.
        std::thread::sleep(Duration::from_micros(700 * (ranks as u64 + after)));
        group[victim].process.kill().expect("a process that lives");
        for (number, rank) in group.iter_mut().enumerate().filter(|(number, _)| *number != victim) {
            let said = rank
                .hear(ENDED)
                .unwrap_or_else(|| panic!("rank {number} of {ranks} said nothing at its end"));
            let lost = format!("{ENDED}rank {} is lost", victim * 10);
            assert!(said.starts_with(&lost), "{said}");
            assert!(rank.process.wait().expect("an end").success(), "rank {number} of {ranks}");
        }
    }
}

#[test]
fn a_rank_that_is_stopped_is_waited_for() {
    let mut group = group(2);
    for rank in &mut group {
        rank.hear(RIGHT).expect("a sum");
    }
    let pid = rustix::process::Pid::from_child(&group[1].process);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("a process that lives");
    // Longer than it takes to find out that a rank is dead.
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("a process that lives");
    for rank in &mut group {
        for _ in 0..50 {
            rank.hear(RIGHT).expect("a sum, as before");
        }
    }
}

#[test]
fn who_dies_before_all_are_there_is_named() {
    let name = name();
    let mut first = Rank::start(&name, 3, 0);
    // The process must have made it, and nothing tells so but its name.
    let deadline = std::time::Instant::now() + PATIENCE;
    while !std::path::Path::new("/dev/shm").join(&name).exists() {
        assert!(std::time::Instant::now() < deadline, "no memory after {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let group = Group { ranks: vec![0, 10, 20], columns: 3, networked: false };
    let second = SharedMemory::open(&name, group, 1, PATIENCE).expect("the memory");
    first.process.kill().expect("a process that lives");
    let error = second.gather(PATIENCE).expect_err("the first is dead").to_string();
    assert!(error.starts_with("rank 0 of this machine has ended"), "{error}");
    // The name that it left behind; nobody would look for it any more.
    std::fs::remove_file(std::path::Path::new("/dev/shm").join(&name)).expect("its name");
}
