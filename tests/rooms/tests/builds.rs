//! What is built once for several: held, as nobody would notice that it is built twice.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Every package with its features, as `cargo tree` shows it for these arguments.
fn packages(arguments: &[&str]) -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = ["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p} [{f}]"];
    let done = Command::new(env!("CARGO"))
        .current_dir(root)
        .args(tree)
        .args(arguments)
        .output()
        .expect("cargo tree");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let lines = String::from_utf8(done.stdout).expect("names are ASCII");
    lines.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
}

/// `cargo test` and `make checked` ask the same of every package that both compile. Else Cargo compiles the package twice,
/// and all that depends on it: the simulator, for minutes.
#[test]
fn a_build_for_tests_is_made_of_what_tests_are_made_of() {
    let tests = packages(&["--workspace", "--edges", "normal,build,dev"]);
    let checked = packages(&["--package", "fanin-python", "--features", "as-tests", "--edges", "normal"]);
    let twice: Vec<_> =
        checked.difference(&tests).filter(|package| !package.starts_with("fanin-python ")).collect();
    assert!(
        twice.is_empty(),
        "the feature as-tests of crates/python lacks something that tests ask: {twice:?}"
    );
}
