//! Tells `version.rs` of which commit this is, where there is a checkout to ask. Takes in the page
//! of simulation reports, if `make build` has built it.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Without Node.js there is no page, and nothing is in the file.
fn take_in_page() {
    // A folder that is always there: Cargo takes one that is missing for a change.
    let built = Path::new("../../page/dist");
    println!("cargo:rerun-if-changed={}", built.display());
    let page = fs::read(built.join("report.html")).unwrap_or_default();
    let out = env::var_os("OUT_DIR").expect("Cargo says where files go");
    fs::write(Path::new(&out).join("report.html"), page).expect("a folder for files");
}

fn main() {
    take_in_page();
    let commit = git(&["rev-parse", "HEAD"]).map(|commit| {
        let changed = git(&["status", "--porcelain", "--", "..", "../../Cargo.lock"]);
        if changed.is_some_and(|changed| !changed.is_empty()) { format!("{commit}-dirty") } else { commit }
    });
    println!("cargo:rustc-env=BUILD_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
    println!("cargo:rerun-if-changed=..");
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
}
