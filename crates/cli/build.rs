//! Tells `version.rs` of which commit this is, where there is a checkout to ask.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn main() {
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
