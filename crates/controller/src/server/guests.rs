//! The connections of a switch, each with its place among as many as there may be.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

use super::crowd::{Crowd, Place};

/// Most connections at once: two for each rank that a switch can serve at any sensible size, one to ask how it fares.
const CONNECTIONS_MAX: usize = 4096;
/// And from one address: an eighth, more than any machine has ranks.
const CONNECTIONS_OF_ONE_MAX: usize = 512;

/// A connection that has its place.
#[derive(Debug)]
pub(super) struct Guest {
    stream: TcpStream,
    _place: Place,
}

/// The connections that have a place; the others are closed as they come.
pub(super) fn guests(incoming: TcpIncoming) -> impl Stream<Item = io::Result<Guest>> {
    let crowd = Crowd::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
    incoming.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let peer = stream.peer_addr().ok()?;
            let place = crowd.enter(peer.ip(), peer.port().to_string())?;
            Some(Ok(Guest { stream, _place: place }))
        }
        Err(error) => Some(Err(error)),
    })
}

impl Connected for Guest {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Guest {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Guest {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
