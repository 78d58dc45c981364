//! Many worlds, each made from one number.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Random;

/// Plays each seed. `FANIN_SEED=n` plays that seed alone; then the result is false, and totals over all seeds say nothing.
///
/// # Panics
/// When a seed does. The command that plays it alone is printed first.
pub fn each_seed(seeds: impl IntoIterator<Item = u64>, mut play: impl FnMut(u64)) -> bool {
    if let Ok(seed) = std::env::var("FANIN_SEED") {
        play(seed.parse().expect("FANIN_SEED is a number"));
        return false;
    }
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| play(seed))) {
            eprintln!("replay with: {}", command(seed));
            resume_unwind(panic);
        }
    }
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

/// Cargo tells the package, the name of the program is the file's, and a test's thread is called as the test.
fn command(seed: u64) -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    let file = program.rsplit_once('-').map_or(&*program, |(file, _hash)| file);
    let thread = std::thread::current();
    format!("FANIN_SEED={seed} cargo test -p {package} --test {file} {}", thread.name().unwrap_or_default())
}
