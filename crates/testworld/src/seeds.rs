//! Many worlds, each made from one number.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Random;

/// Plays each seed. `FANIN_SEED=n` plays that seed alone; then the result is false, and totals over all seeds say nothing.
///
/// # Panics
/// When a seed does. The command that plays it alone is printed first.
pub fn each_seed(seeds: impl IntoIterator<Item = u64>, mut play: impl FnMut(u64)) -> bool {
    if let Some(seed) = asked() {
        play(seed);
        return false;
    }
    let test = test();
    seeds.into_iter().for_each(|seed| play_one(seed, &test, &mut play));
    true
}

fn asked() -> Option<u64> {
    std::env::var("FANIN_SEED").ok().map(|seed| seed.parse().expect("FANIN_SEED is a number"))
}

fn play_one(seed: u64, test: &str, play: impl FnOnce(u64)) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| play(seed))) {
        eprintln!("replay with: FANIN_SEED={seed} cargo test {test}");
        resume_unwind(panic);
    }
}

/// Plays each seed, on as many threads as the machine has processors. Otherwise as [`each_seed`].
///
/// # Panics
/// When a seed does.
pub fn each_seed_in_parallel(seeds: Range<u64>, play: impl Fn(u64) + Sync) -> bool {
    let test = test();
    if let Some(seed) = asked() {
        play(seed);
        return false;
    }
    let next = AtomicU64::new(seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end);
                while let Some(seed) = take() {
                    play_one(seed, &test, &play);
                }
            });
        }
    });
    true
}

/// Seeds that no run had before: so many, or as many as `FANIN_SEEDS` says.
#[must_use]
pub fn fresh_seeds(count: usize) -> Vec<u64> {
    let asked = std::env::var("FANIN_SEEDS").ok();
    let count = asked.map_or(count, |asked| asked.parse().expect("FANIN_SEEDS is a number"));
    let mut random = Random(RandomState::new().build_hasher().finish());
    (0..count).map(|_| random.next()).collect()
}

/// How cargo finds this test. It tells the package, the name of the program is the file's, and a test's thread is called as the test.
fn test() -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    let file = program.rsplit_once('-').map_or(&*program, |(file, _hash)| file);
    let thread = std::thread::current();
    format!("-p {package} --test {file} {} -- --exact", thread.name().unwrap_or_default())
}
