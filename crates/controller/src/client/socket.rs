//! The control connection's socket, behind TLS: of this process alone, and not of those that it forks.

use std::net::SocketAddr;
use std::time::Duration;

use fanin_tls::{ClientStream, Trust, Untrusted};
use fanin_udp::NotInherited;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::{StdError, http};
use tonic::transport::{Channel, Endpoint};

use super::connection::GREETING;
use crate::guarded::Guarded;
use crate::keepalive::expect_answers;
use crate::proto::REPLY_BYTES_MAX;
use crate::proto::control_client::ControlClient;

/// How long the switch's machine may not answer before another connection is tried.
const SILENCE: Duration = Duration::from_secs(4);

/// The calls of the switch at `address`, which `trust` knows as `switch`, `host:port`. It connects with the first call, and again when
/// the connection broke; each connection is judged anew.
pub(super) fn calls(address: SocketAddr, switch: &str, trust: &Trust) -> ControlClient<Channel> {
    let (switch, trust) = (switch.to_owned(), trust.clone());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (switch, trust) = (switch.clone(), trust.clone());
        async move { connect(address, &switch, &trust).await }
    });
    // A name that stands in requests alone.
    let endpoint = Endpoint::from_static("http://switch").connect_timeout(GREETING);
    ControlClient::new(endpoint.connect_with_connector_lazy(connector))
        .max_decoding_message_size(REPLY_BYTES_MAX)
}

async fn connect(
    address: SocketAddr,
    switch: &str,
    trust: &Trust,
) -> Result<TokioIo<ClientStream<Guarded<NotInherited>>>, StdError> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    expect_answers(&stream, SILENCE)?;
    let guard = NotInherited::new(&stream);
    match trust.connect(switch, Guarded::new(stream, guard)).await {
        Ok(stream) => Ok(TokioIo::new(stream)),
        // As where it breaks before or after.
        Err(Untrusted::Io(error)) => Err(error.into()),
        Err(untrusted) => Err(untrusted.into()),
    }
}
