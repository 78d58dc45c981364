//! A protocol is a value: rooms outside its own do not name it (ARCHITECTURE.md). Each mention is a place that the next protocol would have to
//! touch, too.

use std::fs;
use std::path::{Path, PathBuf};

/// Most mentions of protocols outside their rooms: those of the one list of them, and the names that settings have by default.
const MENTIONS_MAX: usize = 20;
/// Rooms and files that know the protocols: their own, the wire's, and those of the simulator and the planner, with their commands.
const AT_HOME: [&str; 11] = [
    "protocol/src/switchml",
    "protocol/src/atp",
    "protocol/src/goat",
    "protocol/src/dlcp",
    "protocol/src/aggregation",
    "wire",
    "plan",
    "sim",
    "testworld",
    "cli/src/plan",
    "cli/src/scenario",
];
const NAMES: [&str; 4] = ["switchml", "atp", "goat", "dlcp"];
const TYPES: [&str; 4] = ["SwitchMl", "Atp", "Goat", "Dlcp"];

/// Mentions in code: as a path, as a type or a variant, or by name. Comments and texts for people are not counted.
fn mentions(code: &str) -> usize {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let begins = |at: usize| !code[..at].ends_with(is_part);
    let paths = NAMES.iter().map(|name| {
        let (path, quoted) = (format!("{name}::"), format!("\"{name}\""));
        code.match_indices(&path).filter(|(at, _)| begins(*at)).count() + code.matches(&quoted).count()
    });
    let types = TYPES.iter().map(|name| code.match_indices(name).filter(|(at, _)| begins(*at)).count());
    paths.chain(types).sum()
}

/// The code of a file: without its comments, and without the tests in it.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() && !["tests", "benches"].contains(&&*name) {
            sources(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

#[test]
fn protocols_are_not_named_outside_their_rooms() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("two below").join("crates");
    let mut files = Vec::new();
    sources(&crates, &mut files);
    let found: Vec<(String, usize)> = files
        .iter()
        .map(|file| {
            let name = file.strip_prefix(&crates).expect("in a crate").to_string_lossy().into_owned();
            let text = fs::read_to_string(file).expect("a source");
            let is_at_home = AT_HOME.iter().any(|home| name.starts_with(home));
            (name, if is_at_home { 0 } else { mentions(&code(&text)) })
        })
        .filter(|(_, mentions)| *mentions > 0)
        .collect();
    let all: usize = found.iter().map(|(_, mentions)| mentions).sum();
    assert!(
        found.iter().any(|(file, _)| file == "controller/src/protocols.rs"),
        "the list names them: {found:?}"
    );
    assert!(all <= MENTIONS_MAX, "{all} mentions: {found:?}");
}

#[test]
fn a_mention_is_found_in_each_of_its_forms_and_in_no_comment() {
    let text = "use fanin_protocol::atp::AtpServer;\n// goat::Plan\nlet name = \"dlcp\"; let data_atp = 1;\n#[cfg(test)]\nmod tests { Goat }";
    assert_eq!(mentions(&code(text)), 3);
}
