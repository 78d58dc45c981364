//! The identity of a stranger that answers on a port where no switch does.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Enough for a status line, a few headers, or a greeting.
const ANSWER_BYTES: usize = 2048;

/// The answer of `address` to an ordinary HTTP request; `None` when it says nothing that a person
/// can read.
pub(super) fn introduce(address: SocketAddr, patience: Duration) -> Option<String> {
    let until = Instant::now() + patience;
    let mut connection = TcpStream::connect_timeout(&address, patience).ok()?;
    connection.set_write_timeout(Some(patience)).ok()?;
    let request = format!("GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    // A stranger that greets first may not want to hear it.
    let _ = connection.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let mut buffer = [0; ANSWER_BYTES];
    while answer.len() < ANSWER_BYTES {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || connection.set_read_timeout(Some(left)).is_err() {
            break;
        }
        match connection.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(bytes) => answer.extend_from_slice(&buffer[..bytes]),
        }
        if answer.windows(4).any(|end| end == b"\r\n\r\n") {
            break;
        }
    }
    read(&answer)
}

/// The first line, and the server's name where it gives one.
fn read(answer: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(answer);
    let mut lines = text.lines().map(printable);
    let first = lines.next().filter(|line| !line.is_empty())?;
    let server = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("server").then(|| value.trim().to_owned())
    });
    Some(match server {
        Some(server) => format!("{first:?} of {server:?}"),
        None => format!("{first:?}"),
    })
}

/// A stranger's words must not reach a terminal unchanged.
fn printable(line: &str) -> String {
    const LINE_MAX: usize = 80;
    line.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').take(LINE_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_is_named_by_what_it_says() {
        let web = b"HTTP/1.1 404 Not Found\r\nDate: x\r\nserver: nginx\r\n\r\n<html>";
        assert_eq!(read(web).as_deref(), Some("\"HTTP/1.1 404 Not Found\" of \"nginx\""));
        assert_eq!(read(b"SSH-2.0-OpenSSH_9\r\n").as_deref(), Some("\"SSH-2.0-OpenSSH_9\""));
        assert_eq!(read(b""), None);
        assert_eq!(read(b"\x1b[31mred\x07\n").as_deref(), Some("\"[31mred\""));
    }
}
