//! Standard output and standard error that may be closed: `fanin status | head -1` is no error.

use std::io::{self, Write};

/// Prints a line, and flushes it, so that a program that waits for it gets it.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says what nobody asked for on standard error. Nobody is there to hear when this fails.
pub(crate) fn warning(text: &str) {
    let _ = writeln!(io::stderr(), "fanin: {text}");
}
