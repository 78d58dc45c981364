//! How many connections a service has at once, and how many from one address: each may take memory.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpIncoming};

/// How many there are of each address.
type Here = HashMap<IpAddr, usize>;

/// A place among them, until it is dropped.
#[derive(Debug)]
struct Place {
    address: IpAddr,
    here: Arc<Mutex<Here>>,
}

/// A connection that has a place.
#[derive(Debug)]
pub(crate) struct Guest {
    stream: TcpStream,
    _place: Place,
}

/// At most `max` connections, half of them from one address: the others are closed as they come.
pub(crate) fn guests(incoming: TcpIncoming, max: usize) -> impl Stream<Item = io::Result<Guest>> {
    let here: Arc<Mutex<Here>> = Arc::default();
    incoming.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let address = stream.peer_addr().ok()?.ip().to_canonical();
            let Some(place) = enter(&here, address, max) else {
                tracing::warn!(%address, "a connection is closed: there are as many as memory is for");
                return None;
            };
            Some(Ok(Guest { stream, _place: place }))
        }
        Err(error) => Some(Err(error)),
    })
}

fn enter(here: &Arc<Mutex<Here>>, address: IpAddr, max: usize) -> Option<Place> {
    let mut counts = lock(here);
    let of_one = counts.get(&address).copied().unwrap_or_default();
    if of_one >= max.div_ceil(2) || counts.values().sum::<usize>() >= max {
        return None;
    }
    counts.insert(address, of_one + 1);
    drop(counts);
    Some(Place { address, here: Arc::clone(here) })
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = lock(&self.here);
        let left = counts.get(&self.address).map_or(0, |count| count - 1);
        if left == 0 {
            counts.remove(&self.address);
        } else {
            counts.insert(self.address, left);
        }
    }
}

fn lock(here: &Mutex<Here>) -> MutexGuard<'_, Here> {
    here.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connected for Guest {
    type ConnectInfo = ();

    fn connect_info(&self) {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others_and_gives_its_own_back() {
        let here = Arc::default();
        let [one, other, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let places = [enter(&here, one, 4), enter(&here, one, 4)];
        assert!(places.iter().all(Option::is_some), "half of four");
        assert!(enter(&here, one, 4).is_none());
        let others = [enter(&here, other, 4), enter(&here, other, 4)];
        assert!(others.iter().all(Option::is_some) && enter(&here, third, 4).is_none(), "all are taken");
        drop(places);
        assert!(enter(&here, third, 4).is_some());
        drop(others);
        assert!(lock(&here).is_empty(), "who was here is forgotten");
    }

    #[tokio::test]
    async fn who_has_no_place_is_hung_up_on() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut guests = std::pin::pin!(guests(TcpIncoming::from(listener), 2));
        let first = TcpStream::connect(address).await.expect("connected");
        let second = TcpStream::connect(address).await.expect("connected");
        let guest = guests.next().await.expect("listens").expect("accepted");
        let mut byte = [0];
        let ended = async {
            second.readable().await.expect("closed");
            second.try_read(&mut byte)
        };
        // The stream has nobody but the first, as long as it is polled.
        tokio::select! {
            _ = guests.next() => panic!("the second has no place"),
            read = ended => assert!(!matches!(read, Ok(1..)), "it was not served"),
        }
        drop((first, guest));
        let _third = TcpStream::connect(address).await.expect("connected");
        assert!(guests.next().await.expect("listens").is_ok(), "the first one's place");
    }
}
