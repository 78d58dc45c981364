//! Whether the machine at the other end of a connection is there.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// How often a machine is asked, within the time after which it is taken for gone.
const PROBES_A_SILENCE: u32 = 5;
/// The kernel counts these intervals in seconds.
const PROBE_INTERVAL_MIN: Duration = Duration::from_secs(1);
const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// Has the kernel ask the machine at the other end of a TCP connection whether it is there. The
/// kernel ends the connection when it has not answered for `silence`, at most two probes later (of
/// a second each, where `silence` has up to five): a machine that vanished sends no farewell. A
/// link that is cut for less than `silence` ends nothing: its last answer may be a probe older than
/// the cut.
///
/// The other kernel answers, for a process that is stopped or starved too. HTTP/2's own pings would
/// ask the process.
///
/// # Errors
/// When the operating system refuses.
pub fn expect_answers(socket: &impl AsFd, silence: Duration) -> io::Result<()> {
    let socket = SockRef::from(socket);
    let interval = (silence / PROBES_A_SILENCE).clamp(PROBE_INTERVAL_MIN, PROBE_INTERVAL_MAX);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(interval).with_interval(interval))?;
    socket.set_tcp_user_timeout(Some(silence + interval))
}
