//! The connections of a switch, each with its place among as many as there may be.

use std::io;

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
    _place: Place,
    pub caller: Caller,
}

/// The connections that have a place, which each gives back with its end; the others are closed as they come.
pub(super) fn guests(incoming: TcpIncoming) -> impl Stream<Item = io::Result<Guarded<Guest>>> {
    let callers = Callers::default();
    let crowd = Crowd::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
    incoming.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let peer = stream.peer_addr().ok()?;
            let place = crowd.enter(peer.ip(), peer.port().to_string())?;
            let caller = callers.caller(stream.connect_info());
            Some(Ok(Guarded::new(stream, Guest { _place: place, caller })))
        }
        Err(error) => Some(Err(error)),
    })
}
