//! Requests as they come: within seconds, and in so much memory.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use tokio_stream::StreamExt;
use tonic::{Code, Status};

use crate::Reservation;

/// How long a request may take to come.
const ARRIVAL_MAX: Duration = Duration::from_secs(10);
/// The bytes before each message of gRPC: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// So much of each request is counted with its call.
const SHORT: usize = 4 << 10;

/// The part of a request that is awaited before anybody looks at it.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The first message of a stream, which goes on; else all of it.
    pub is_stream: bool,
    /// Bytes that a message may have. A longer one is for who reads messages to refuse.
    pub bytes_max: usize,
}

impl Arrival {
    /// The request once it is here. A peer that sends it slowly, or half of it, holds nothing else
    /// up, and is hung up on. Memory beyond the usual is `memory`'s, if that counts it.
    ///
    /// # Errors
    /// When it does not come in time, or takes more than there is room for.
    pub async fn of(self, request: Request, memory: Option<Reservation>) -> Result<Request, Status> {
        let (head, body) = request.into_parts();
        let here = tokio::time::timeout(ARRIVAL_MAX, self.of_body(body, memory)).await;
        let body = here.unwrap_or_else(|_| {
            let text = format!("the request did not come within {} s", ARRIVAL_MAX.as_secs());
            Err(Status::deadline_exceeded(text))
        })?;
        Ok(Request::from_parts(head, body))
    }

    async fn of_body(self, mut body: Body, mut memory: Option<Reservation>) -> Result<Body, Status> {
        // A copy: a piece of a few bytes would keep all that came with it.
        let mut here = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Status::cancelled(error.to_string()))?;
            // Only an end comes after what is no data.
            let Ok(data) = frame.into_data() else { break };
            let long = |bytes: usize| bytes.saturating_sub(SHORT);
            let more = long(here.len() + data.len()) - long(here.len());
            if memory.as_mut().is_some_and(|memory| !memory.grow(more)) {
                let text =
                    "requests that are on their way from here take too much memory; send fewer at a time";
                return Err(Status::resource_exhausted(text));
            }
            here.extend_from_slice(&data);
            let Some((prefix, message)) = here.split_first_chunk::<PREFIX_BYTES>() else { continue };
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            if !self.is_stream && message.len() > length && length <= self.bytes_max {
                return Err(Status::invalid_argument("one message was expected, and more came"));
            }
            if length > self.bytes_max || (self.is_stream && message.len() >= length) {
                let here = tokio_stream::once(Ok(Bytes::from(here)));
                return Ok(Body::from_stream(here.chain(body.into_data_stream())));
            }
        }
        Ok(Body::from(here))
    }
}

/// An answer, as long as which `guard` is held.
pub fn answered<G: Send + 'static>(response: Response, guard: G) -> Response {
    response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _held = &guard;
            frame
        }))
    })
}

/// The meaning of a failed call, in few words.
#[must_use]
pub fn explain(status: &Status) -> String {
    if status.code() == Code::Unimplemented {
        return "it does not know the call".into();
    }
    // The transport's own message is "transport error"; what happened stands at the end of the
    // chain.
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::Budget;

    const ONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const MESSAGE: Arrival = Arrival { is_stream: false, bytes_max: 1 << 20 };
    const STREAM: Arrival = Arrival { is_stream: true, ..MESSAGE };

    fn message(length: u32) -> Vec<u8> {
        [&[0][..], &length.to_be_bytes(), &vec![7; length as usize]].concat()
    }

    /// These bytes, and no end.
    fn begun(bytes: Vec<u8>) -> Request {
        let begun = tokio_stream::once(Ok::<_, std::io::Error>(Bytes::from(bytes)));
        Request::new(Body::from_stream(begun.chain(tokio_stream::pending())))
    }

    async fn code(arrival: Arrival, request: Request, memory: &Budget) -> Code {
        let here = arrival.of(request, memory.take(ONE, 0)).await;
        here.map_or_else(|status| status.code(), |_| Code::Ok)
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_come_is_given_up() {
        let memory = Budget::new(1 << 20, 1 << 20);
        let half = message(100)[..50].to_vec();
        for begins in [Vec::new(), vec![0; 3], half, message(100)] {
            assert_eq!(code(MESSAGE, begun(begins), &memory).await, Code::DeadlineExceeded, "no end");
        }
        let more = [message(9), vec![0]].concat();
        assert_eq!(code(MESSAGE, begun(more), &memory).await, Code::InvalidArgument, "nobody reads it");
        assert_eq!(code(STREAM, begun(Vec::new()), &memory).await, Code::DeadlineExceeded);
        assert_eq!(code(STREAM, begun(message(100)), &memory).await, Code::Ok, "it goes on");
        let whole = STREAM.of(Request::new(Body::from(message(9))), memory.take(ONE, 0)).await;
        let whole = whole.expect("here").into_body().collect().await.expect("whole").to_bytes();
        assert_eq!(*whole, message(9));
        assert_eq!(code(MESSAGE, begun(message(2 << 20)[..9].to_vec()), &memory).await, Code::Ok, "too long");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_on_their_way_from_one_address_take_so_much_memory() {
        let memory = Budget::new(1 << 20, 300_000);
        let begins = || message(200_000)[..200_000].to_vec();
        let first = tokio::spawn({
            let reserved = memory.take(ONE, 0);
            async move { MESSAGE.of(begun(begins()), reserved).await.map(drop) }
        });
        tokio::task::yield_now().await;
        assert_eq!(code(MESSAGE, begun(begins()), &memory).await, Code::ResourceExhausted);
        assert_eq!(code(STREAM, begun(message(SHORT as u32 - 5)), &memory).await, Code::Ok, "a usual one");
        let given_up = first.await.expect("no panic").expect_err("no end");
        assert_eq!(given_up.code(), Code::DeadlineExceeded);
        assert_eq!(code(STREAM, begun(message(200_000)), &memory).await, Code::Ok, "there is room again");
    }
}
