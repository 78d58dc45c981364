//! The connections of a switch, each with its place among as many as there may be.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use fanin_udp::NotInherited;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpIncoming};

use super::calls::{Caller, Callers};
use super::crowd::{Crowd, Place};
use crate::guarded::Guarded;

/// Most connections at once: two for each rank that a switch can serve at any sensible size, one to ask how it fares.
const CONNECTIONS_MAX: usize = 4096;
/// And from one address: an eighth, more than any machine has ranks.
const CONNECTIONS_OF_ONE_MAX: usize = 512;

/// What a connection has as long as it is open.
#[derive(Debug)]
pub(super) struct Guest {
    /// A helper that outlives this process would keep the connection open, and its peer waiting.
    _not_inherited: NotInherited,
    _place: Place,
    pub caller: Caller,
}

/// Where connections come. No helper that is forked from this process listens on when it has ended.
struct Door {
    /// First, as it must go first.
    _not_inherited: NotInherited,
    incoming: TcpIncoming,
}

impl Stream for Door {
    type Item = io::Result<TcpStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.incoming).poll_next(context)
    }
}

/// The connections that have a place, which each gives back with its end; the others are closed as they come.
pub(super) fn guests(listener: TcpListener) -> impl Stream<Item = io::Result<Guarded<Guest>>> {
    let _not_inherited = NotInherited::new(&listener);
    let incoming = Door { _not_inherited, incoming: TcpIncoming::from(listener).with_nodelay(Some(true)) };
    let callers = Callers::default();
    let crowd = Crowd::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
    incoming.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let peer = stream.peer_addr().ok()?;
            let place = crowd.enter(peer.ip(), peer.port().to_string())?;
            let caller = callers.caller(stream.connect_info());
            let _not_inherited = NotInherited::new(&stream);
            Some(Ok(Guarded::new(stream, Guest { _not_inherited, _place: place, caller })))
        }
        Err(error) => Some(Err(error)),
    })
}
