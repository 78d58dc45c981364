//! The listening socket of a switch.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use fanin_udp::NotInherited;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::Stream;
use tonic::transport::server::TcpIncoming;

/// No helper that is forked from this process listens on when it has ended.
struct Listener {
    /// First, as it must go first.
    _not_inherited: NotInherited,
    incoming: TcpIncoming,
}

impl Stream for Listener {
    type Item = io::Result<TcpStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.incoming).poll_next(context)
    }
}

/// All connections, as they come.
pub(super) fn incoming(listener: TcpListener) -> impl Stream<Item = io::Result<TcpStream>> {
    let _not_inherited = NotInherited::new(&listener);
    Listener { _not_inherited, incoming: TcpIncoming::from(listener).with_nodelay(Some(true)) }
}
