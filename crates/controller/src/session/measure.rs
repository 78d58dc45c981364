//! What links carry, measured where nobody tells: by those who are about to join.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fanin_tls::Trust;
use fanin_udp::Gauge;
use tokio::time::timeout;
use tonic::Code;

use super::thread::runtime;
use crate::control_channel::{Connection, explain};
use crate::error::SessionError;
use crate::proto::MeasureRequest;

/// Opens a gauge at an address of this machine, and returns it with its ticket.
///
/// # Errors
/// When there is no port to be had there.
pub fn gauge_here(at: IpAddr, life: Duration) -> io::Result<(Gauge, u64)> {
    let ticket = rand::random();
    Ok((Gauge::open(at, ticket, life)?, ticket))
}

/// Has a switch open a gauge for the link to it: where it is, and its ticket. Must not be called
/// from an asynchronous task.
///
/// # Errors
/// When it does not answer in `patience`, is no switch, or opens none.
pub fn gauge_at(switch: &str, patience: Duration, trust: &Trust) -> Result<(SocketAddr, u64), SessionError> {
    let runtime = runtime("fanin-rate")?;
    let reply = runtime.block_on(async {
        let (mut connection, _) = Connection::open(switch, patience, trust).await?;
        let lost = |cause: String| SessionError::NoAnswer { switch: switch.into(), cause };
        let reply = timeout(patience, connection.client.measure(MeasureRequest {})).await;
        let reply = reply.map_err(|_| lost("it fell silent".into()))?.map_err(|status| {
            lost(match status.code() {
                // Not the transport's words.
                Code::Unimplemented if status.message().is_empty() => "it is older than this rank".into(),
                Code::Unimplemented | Code::ResourceExhausted => status.message().to_owned(),
                _ => explain(&status),
            })
        })?;
        let reply = reply.into_inner();
        let port = u16::try_from(reply.port).map_err(|_| lost(format!("it names port {}", reply.port)))?;
        Ok((SocketAddr::new(connection.address.ip(), port), reply.ticket))
    });
    runtime.shutdown_background();
    reply
}
