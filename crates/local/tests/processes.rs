//! Ranks that are processes: this program again, as one rank of a group each. Some are killed.

mod common;

use common::{PATIENCE, expected, name, start, submit, tensor};
use fanin_local::{Done, Group, LocalError, Network, SharedMemory};
use fanin_udp::{Failure, Loss, Submission};
use fanin_wire::{Dtype, Op};
use rustix::process::{Pid, Signal, kill_process};
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Says to this program which rank it is: name of the memory, ranks, rank, and how many of them sum.
const RANK: &str = "FANIN_LOCAL_TEST_RANK";
/// The words of a rank when it has the memory, when a sum was right, and what ended it.
const HERE: &str = "here";
const RIGHT: &str = "right";
const ENDED: &str = "ended: ";
/// The word of a rank that awaits the first one's contribution.
const CONTRIBUTED: &str = "contributed";
const ELEMENTS: usize = 1_000_003;

/// Says to a rank that it awaits a line of its input, sums once, and is gone.
const ONCE: &str = "FANIN_LOCAL_TEST_ONCE";

/// No test, but a rank: sums until it is told to stop, or somebody else is gone.
#[test]
#[ignore = "the other tests start it"]
fn rank() {
    let Ok(what) = env::var(RANK) else { return };
    let mut words = what.split(' ');
    let name = words.next().expect("a name");
    let [ranks, me, columns] =
        [0; 3].map(|_| words.next().expect("a number").parse::<usize>().expect("a number"));
    let networked = columns < ranks;
    let group = Group { ranks: (0..ranks as u32).map(|rank| rank * 10).collect(), columns, networked };
    let memory = match me {
        0 => SharedMemory::create(name, group),
        _ => SharedMemory::open(name, group, me, PATIENCE),
    }
    .expect("shared memory");
    memory.gather(PATIENCE).expect("all ranks");
    // The others are not asked for anything.
    let machines = (0..10 * ranks).map(|rank| usize::from(rank % 10 != 0)).collect();
    let network = (networked && me < columns).then(|| Box::new(NoOthers) as Box<dyn Network>);
    let local = start(memory, network, machines);
    // Short ones keep nobody waiting for room while a rank is stopped.
    let elements = if networked { 1_003 } else { ELEMENTS };
    say(HERE);
    let once = env::var_os(ONCE).is_some();
    if once {
        std::io::stdin().read_line(&mut String::new()).expect("a line");
    }
    for number in 0.. {
        let mut memory = tensor(Dtype::Float32, elements, me, number);
        let answer = submit(&local, &mut memory, Dtype::Float32, Op::Sum);
        if networked && me > 0 && number == 0 {
            while !local.awaited().contains(&0) {
                std::thread::yield_now();
            }
            say(CONTRIBUTED);
        }
        match answer.recv_timeout(PATIENCE).expect("an answer") {
            Ok(_) => {
                assert!(memory == expected(Dtype::Float32, elements, ranks, number, Op::Sum), "a wrong sum");
                say(RIGHT);
                if once {
                    std::process::abort();
                }
            }
            Err(Failure::Because(cause)) => {
                cause.downcast_ref::<LocalError>().expect("an error of the group");
                return say(&format!("{ENDED}{cause}"));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// The network of a job that has one machine.
struct NoOthers;

impl Network for NoOthers {
    fn submit(&self, _: Submission, done: Done) {
        done(Ok(Loss::default()));
    }
}

fn say(text: &str) {
    // Past what the test harness captures; who is not heard any more is killed in a moment.
    let _ = writeln!(std::io::stdout().lock(), "\n{text}");
}

struct Rank {
    process: Child,
    says: BufReader<ChildStdout>,
    stays_open: ChildStdin,
}

impl Rank {
    fn start(name: &str, ranks: usize, me: usize) -> Self {
        Self::spawn(Self::program(name, ranks, me, ranks))
    }

    /// The program of a rank of a group in which the first `columns` add.
    fn program(name: &str, ranks: usize, me: usize, columns: usize) -> Command {
        let mut program = Command::new(env::current_exe().expect("this program"));
        program
            .args(["rank", "--exact", "--ignored", "--nocapture"])
            .env(RANK, format!("{name} {ranks} {me} {columns}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        program
    }

    fn spawn(mut program: Command) -> Self {
        let mut process = program.spawn().expect("a process");
        let says = BufReader::new(process.stdout.take().expect("piped"));
        Self { stays_open: process.stdin.take().expect("piped"), says, process }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("a process that lives");
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
    group[1].signal(Signal::STOP);
    // Longer than it takes to find out that a rank is dead.
    std::thread::sleep(Duration::from_millis(500));
    group[1].signal(Signal::CONT);
    for rank in &mut group {
        for _ in 0..50 {
            rank.hear(RIGHT).expect("a sum, as before");
        }
    }
}

#[test]
fn an_all_reduce_that_one_rank_got_before_it_died_is_the_others_too() {
    let name = name();
    let program = |me| Rank::program(&name, 3, me, 1);
    let mut first = program(0);
    first.env(ONCE, "");
    let mut ranks = [Rank::spawn(first), Rank::spawn(program(1)), Rank::spawn(program(2))];
    for rank in &mut ranks {
        rank.hear(HERE).expect("a rank that has begun");
    }
    let [mut first, mut second, mut third] = ranks;
    for rank in [&mut second, &mut third] {
        rank.hear(CONTRIBUTED).expect("a rank that awaits the first one");
    }
    second.signal(Signal::STOP);
    writeln!(first.stays_open).expect("a process that reads");
    first.hear(RIGHT).expect("a sum");
    first.process.wait().expect("an end");
    // The third says that the first is lost while the second has not read the sum.
    let lost = format!("{ENDED}rank 0 is lost");
    third.hear(RIGHT).expect("the sum that the first got");
    assert!(third.hear(ENDED).expect("an end").starts_with(&lost));
    second.signal(Signal::CONT);
    second.hear(RIGHT).expect("the sum that the first got");
    assert!(second.hear(ENDED).expect("an end").starts_with(&lost));
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
