//! Standard output and standard error that may be closed: `fanin status | head -1` is no error.

use std::io::{self, Write};
use std::net::SocketAddr;

use serde::Serialize;

/// Prints a line, and flushes it, so that a program that waits for it gets it.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// The message for programs when a service listens.
#[derive(Serialize)]
struct Listening {
    event: &'static str,
    address: SocketAddr,
    version: &'static str,
}

/// Says where a service listens: to people, or as a line of JSON.
pub(crate) fn listening(address: SocketAddr, json: bool, text: &str) -> anyhow::Result<()> {
    let told = Listening { event: "listening", address, version: env!("CARGO_PKG_VERSION") };
    let told = if json { serde_json::to_string(&told)? } else { text.to_owned() };
    Ok(line(&told)?)
}

/// Says what nobody asked for on standard error. Nobody is there to hear when this fails.
pub(crate) fn warning(text: &str) {
    let _ = writeln!(io::stderr(), "fanin: {text}");
}
