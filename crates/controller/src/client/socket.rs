//! The control connection's socket: of this process alone, and not of those that it forks.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fanin_guests::expect_answers;
use fanin_udp::NotInherited;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::guarded::Guarded;

/// How long the switch's machine may not answer before another connection is tried.
const SILENCE: Duration = Duration::from_secs(4);

/// Opens a TCP connection.
pub(super) async fn connect(address: SocketAddr) -> io::Result<TokioIo<Guarded<NotInherited>>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    expect_answers(&stream, SILENCE)?;
    let guard = NotInherited::new(&stream);
    Ok(TokioIo::new(Guarded::new(stream, guard)))
}
