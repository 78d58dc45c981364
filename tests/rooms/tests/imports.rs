//! Which room may import which (ARCHITECTURE.md), read from the workspace itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Room, and the rooms that it may import.
const ALLOWED: [(&str, &[&str]); 16] = [
    ("units", &[]),
    ("wire", &[]),
    ("quant", &[]),
    ("plan", &[]),
    ("protocol", &["wire", "quant"]),
    ("testworld", &["protocol", "wire"]),
    ("sim", &["plan", "protocol", "units", "wire"]),
    ("udp", &["plan", "protocol", "wire"]),
    ("local", &["udp", "quant", "wire"]),
    ("limits", &[]),
    ("tls", &[]),
    ("controller", &["plan", "protocol", "wire", "udp", "local", "limits", "tls"]),
    ("parameters", &["limits"]),
    ("cli", &["parameters", "plan", "protocol", "units", "wire", "udp", "controller", "sim"]),
    (
        "python",
        &["parameters", "plan", "protocol", "units", "wire", "quant", "udp", "controller", "cli", "sim"],
    ),
    ("rooms", &[]),
];

/// Room of `protocol`, and the rooms there that it may import. Protocols are siblings: none reaches into another.
const ALLOWED_IN_PROTOCOL: [(&str, &[&str]); 9] = [
    ("machine", &[]),
    ("transport", &["machine"]),
    ("control", &["machine"]),
    ("machines", &["machine", "transport", "control"]),
    ("switchml", &["machine", "transport", "control", "machines"]),
    ("aggregation", &["machine", "transport", "control"]),
    ("atp", &["machine", "transport", "control", "machines", "aggregation"]),
    ("goat", &["machine", "transport", "control", "machines", "aggregation"]),
    ("dlcp", &["machine", "transport", "control", "machines"]),
];

/// Rooms of `protocol` whose tests may import others, and which: who admits is tried with the protocols that there are.
const ALLOWED_IN_TESTS: [(&str, &[&str]); 1] = [("control", &["switchml", "atp", "goat", "dlcp"])];

/// Room of `sim`, and the rooms there that it may import. Three are a circle: a system says how its jobs are written.
const ALLOWED_IN_SIM: [(&str, &[&str]); 5] = [
    ("agenda", &[]),
    ("net", &["agenda"]),
    ("workload", &["net", "systems", "scenario_file"]),
    ("systems", &["net", "workload", "scenario_file"]),
    ("scenario_file", &["net", "workload", "systems"]),
];

/// Room of `controller`, and the rooms there that it may import. A session and a node share what is common, and neither knows the other.
const ALLOWED_IN_CONTROLLER: [(&str, &[&str]); 10] = [
    ("goat_planner", &[]),
    ("protocols", &["goat_planner"]),
    ("proto", &[]),
    ("error", &[]),
    ("path", &[]),
    ("convert", &["proto", "error"]),
    ("control_channel", &["proto", "error", "convert"]),
    ("page", &["proto", "error", "convert", "control_channel"]),
    ("session", &["proto", "error", "path", "convert", "protocols", "control_channel", "page"]),
    ("node", &["proto", "error", "path", "convert", "protocols", "control_channel", "page"]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("tests/rooms is two below the root")
}

#[test]
fn rooms_import_only_what_they_may() {
    let metadata = MetadataCommand::new().current_dir(root()).no_deps().exec().expect("cargo metadata");
    let allowed = BTreeMap::from(ALLOWED);
    let mut rooms = BTreeSet::new();
    for package in &metadata.packages {
        let room = package.name.strip_prefix("fanin-").expect("rooms are named fanin-*").to_owned();
        let may =
            allowed.get(room.as_str()).unwrap_or_else(|| panic!("{room} is not in ARCHITECTURE.md's table"));
        for dependency in &package.dependencies {
            // A test may use what its room may not.
            let Some(imported) = dependency.name.strip_prefix("fanin-") else { continue };
            if dependency.kind == DependencyKind::Normal {
                assert!(may.contains(&imported), "{room} must not import {imported}");
            }
        }
        rooms.insert(room);
    }
    assert_eq!(rooms, ALLOWED.map(|(room, _)| room.to_owned()).into(), "the table names every room");
}

#[test]
fn wire_depends_on_siphash_alone() {
    let metadata = MetadataCommand::new().current_dir(root()).no_deps().exec().expect("cargo metadata");
    let wire = metadata.packages.iter().find(|package| package.name == "fanin-wire").expect("wire");
    let is_normal = |dependency: &&cargo_metadata::Dependency| dependency.kind != DependencyKind::Development;
    let names: Vec<&str> =
        wire.dependencies.iter().filter(is_normal).map(|dependency| dependency.name.as_str()).collect();
    assert_eq!(names, ["siphasher"]);
}

#[test]
fn protocol_links_without_an_operating_system() {
    let build = |features: &[&str]| {
        Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--target-dir"])
            .arg(root().join("target/no_os"))
            .args(features)
            .current_dir(root().join("tests/no_os"))
            // Flags for the workspace's own tests must not reach this build.
            .env_remove("RUSTFLAGS")
            .output()
            .expect("cargo runs")
    };
    let without = build(&[]);
    assert!(without.status.success(), "{}", String::from_utf8_lossy(&without.stderr));
    let with = build(&["--features", "with_std"]);
    let said = String::from_utf8_lossy(&with.stderr);
    assert!(!with.status.success() && said.contains("panic_impl"), "the check cannot fail: {said}");
}

#[test]
fn protocols_do_not_import_each_other() {
    import_only_what_they_may("protocol", &ALLOWED_IN_PROTOCOL, true);
}

#[test]
fn rooms_of_the_simulator_and_of_the_controller_import_only_what_they_may() {
    import_only_what_they_may("sim", &ALLOWED_IN_SIM, false);
    import_only_what_they_may("controller", &ALLOWED_IN_CONTROLLER, false);
}

/// Holds the rooms of a crate to a table, and maybe their tests too: a room is a folder, or a file without one.
fn import_only_what_they_may(of: &str, allowed: &[(&str, &[&str])], with_tests: bool) {
    let source = root().join("crates").join(of).join("src");
    let entries = std::fs::read_dir(&source).expect("a crate's source").map(|entry| entry.expect("an entry"));
    let rooms: BTreeSet<_> = entries
        .map(|entry| entry.path().with_extension(""))
        .map(|path| path.file_name().and_then(|name| name.to_str()).expect("names in ASCII").to_owned())
        .filter(|room| room != "lib")
        .collect();
    let named: BTreeSet<_> = allowed.iter().map(|(room, _)| (*room).to_owned()).collect();
    assert_eq!(rooms, named, "the table names every room of {of}");
    for (room, may) in allowed {
        let folder = source.join(room);
        let mut files = if folder.is_dir() { rust_files(&folder) } else { Vec::new() };
        files.extend(Some(source.join(format!("{room}.rs"))).filter(|file| file.exists()));
        for file in files {
            let text = std::fs::read_to_string(&file).expect("a source file");
            let depth = file.strip_prefix(&source).expect("a file of the crate").components().count() - 1;
            let is_face = file.ends_with("mod.rs");
            let tests_at = text.lines().position(|line| line == "mod tests {").unwrap_or(usize::MAX);
            let of_tests = file.ends_with("tests.rs") || file.iter().any(|part| part == "tests");
            let is_test = |number: usize| number > tests_at || of_tests;
            let with = ALLOWED_IN_TESTS
                .iter()
                .find(|(of_tests, _)| of_tests == room)
                .map_or(&[][..], |(_, with)| with);
            for (number, line) in text.lines().enumerate() {
                if is_test(number) && !with_tests {
                    break;
                }
                let place = || format!("{}:{}: {}", file.display(), number + 1, line.trim());
                // `crate::{..}` and `crate::Name` would take it from the crate's face, which only hands names on.
                for path in line.split("crate::").skip(1) {
                    let imported =
                        path.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("");
                    assert!(
                        imported == *room
                            || may.contains(&imported)
                            || (is_test(number) && with.contains(&imported)),
                        "{} must not import {}",
                        room,
                        place()
                    );
                }
                // A path upwards ends within the room.
                let climbs = line.matches("super::").count();
                assert!(climbs < depth + usize::from(!is_face), "{room} must not leave itself: {}", place());
            }
        }
    }
}

fn rust_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn unsafe_code_lives_only_where_it_must() {
    for room in ["units", "wire", "protocol", "testworld", "sim", "controller", "cli"] {
        let lib =
            std::fs::read_to_string(root().join("crates").join(room).join("src/lib.rs")).expect("lib.rs");
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{room} must forbid unsafe code");
    }
}

#[test]
fn no_committed_file_names_a_download_host() {
    let listing = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().expect("git");
    assert!(listing.status.success());
    let files = String::from_utf8(listing.stdout).expect("paths are UTF-8");
    for file in files.split_terminator('\0') {
        assert!(!file.ends_with("uv.lock"), "{file} is committed");
        // Cargo.lock names the registry by its canonical address, whatever host served it; this file names the others.
        if file.ends_with("Cargo.lock") || file.ends_with("imports.rs") {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        for host in ["index-url", "extra-index", "pypi.org/simple", "find-links", "/root/", "/work/"] {
            assert!(!text.contains(host), "{file} names {host}");
        }
    }
}
