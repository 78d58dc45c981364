//! The control connection to a switch, opened and checked.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_tls::{Trust, Untrusted};
use fanin_wire::VERSION;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::address::with_port;
use super::explain;
use super::socket::{self, Line, Lines};
use crate::convert::shown;
use crate::error::SessionError;
use crate::proto::control_client::ControlClient;
use crate::proto::{StatusReply, StatusRequest};

/// Between two attempts to reach a switch that is not there.
pub(crate) const RETRY: Duration = Duration::from_millis(200);
/// How long who takes a connection may take to say who it is.
pub(crate) const GREETING: Duration = Duration::from_secs(5);
/// When somebody who waits says so first, and how long after that again.
const FIRST_WORD: Duration = Duration::from_secs(1);
const NEXT_WORD: Duration = Duration::from_secs(5);
/// What to do about a switch that is not there.
const CURE: &str = "is `fanin switch` running there?";

/// A switch that answered.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    /// Host and port as the user gave them, for messages.
    pub switch: String,
    /// The address that answered.
    pub address: SocketAddr,
    /// Round trip of a TCP handshake with it.
    pub rtt: Duration,
    /// What it says that it serves: the usual one, where it serves several.
    pub protocol: String,
    /// By what it is known, and others are that are spoken of with it.
    pub trust: Trust,
    pub client: ControlClient<Channel>,
    /// Kept for others, if `client` may be theirs, too.
    pub _line: Option<Arc<Line>>,
}

/// The calls of the switch at `address`, for a program that makes them by itself. The first one
/// connects.
#[must_use]
pub fn control_calls(address: SocketAddr, trust: &Trust) -> ControlClient<Channel> {
    socket::calls(address, &address.to_string(), trust)
}

impl Connection {
    /// Finds the switch, trying again until `patience` is over, and checks that it is one of our
    /// version.
    pub async fn open(
        switch: &str,
        patience: Duration,
        trust: &Trust,
    ) -> Result<(Self, StatusReply), SessionError> {
        Self::open_saying(switch, patience, trust, None, |_| {}).await
    }

    /// As [`Self::open`], over one of the `lines` where that can be; now and then says for what it
    /// waits.
    pub async fn open_saying(
        switch: &str,
        patience: Duration,
        trust: &Trust,
        lines: Option<&Lines>,
        mut say: impl FnMut(&str),
    ) -> Result<(Self, StatusReply), SessionError> {
        let (switch, port) = with_port(switch)?;
        let mut waiting = Waiting::new(patience);
        let began = Instant::now();
        loop {
            let left = patience.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
            let attempt = {
                let attempt = async {
                    // Looking a name up has no limit of its own.
                    let reached = tokio::time::timeout(left, Self::reach(&switch, left)).await;
                    let (address, rtt) = reached
                        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer")))?;
                    // Who took the connection is judged by its own silence, also when that uses up
                    // the patience.
                    Ok(Self::greet(switch.clone(), (address, rtt), left.min(GREETING), trust, lines).await)
                };
                tokio::pin!(attempt);
                loop {
                    tokio::select! {
                        ended = &mut attempt => break ended,
                        // It may be a while until an attempt ends of which nobody hears.
                        () = tokio::time::sleep(waiting.until_due()) => {
                            say(&waiting.says(&format!("the switch {switch}: no answer; {CURE}")));
                        }
                    }
                }
            };
            let mut closes = false;
            let cause: io::Error = match attempt {
                Ok(Err(Ungreeted::Refused)) => io::ErrorKind::ConnectionRefused.into(),
                Ok(Err(Ungreeted::Closed(cause))) => {
                    closes = true;
                    io::Error::other(cause)
                }
                Ok(Err(Ungreeted::Wrong(error))) => return Err(error),
                Ok(Ok(greeted)) => return Ok(greeted),
                Err(cause) => cause,
            };
            let refused = cause.kind() == io::ErrorKind::ConnectionRefused;
            let cause = if refused { cause.kind().to_string() } else { cause.to_string() };
            if waiting.is_due(refused) {
                say(&waiting.says(&format!("the switch {switch}: {cause}; {CURE}")));
            }
            if began.elapsed() + RETRY >= patience {
                if closes {
                    let cause = format!("{cause}, also when it was asked again; or it has no place for more");
                    return Err(SessionError::NotASwitch { switch, cause });
                }
                return Err(SessionError::SwitchUnreachable { switch, port, waited: patience, cause });
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn reach(switch: &str, patience: Duration) -> io::Result<(SocketAddr, Duration)> {
        let began = Instant::now();
        let addresses: Vec<SocketAddr> = tokio::net::lookup_host(switch).await?.collect();
        first_to_answer(&addresses, patience.saturating_sub(began.elapsed())).await
    }

    async fn greet(
        switch: String,
        (address, rtt): (SocketAddr, Duration),
        patience: Duration,
        trust: &Trust,
        lines: Option<&Lines>,
    ) -> Result<(Self, StatusReply), Ungreeted> {
        let not_a_switch =
            |cause: String| Ungreeted::Wrong(SessionError::NotASwitch { switch: switch.clone(), cause });
        let (mut client, line) = match lines {
            Some(lines) => lines.calls(address, &switch, trust),
            None => (socket::calls(address, &switch, trust), None),
        };
        // Of no job: only whether it is a switch, and which version.
        let question = StatusRequest { job: Some(String::new()), ..StatusRequest::default() };
        let status = match tokio::time::timeout(patience, client.status(question)).await {
            Ok(Ok(reply)) => reply.into_inner(),
            Ok(Err(status)) if was_refused(&status) => return Err(Ungreeted::Refused),
            Ok(Err(status)) => {
                return Err(match cause_of::<Untrusted>(&status) {
                    Some(untrusted) if !matches!(untrusted, Untrusted::Io(_) | Untrusted::NotTls) => {
                        Ungreeted::Wrong(SessionError::Untrusted { switch, cause: untrusted.to_string() })
                    }
                    _ if was_closed(&status) => Ungreeted::Closed(explain(&status)),
                    _ => not_a_switch(explain(&status)),
                });
            }
            Err(_) => return Err(not_a_switch("it did not answer a status request".into())),
        };
        // One of before protocols had names speaks the same packets, and another control protocol.
        if status.wire_version != u32::from(VERSION) || status.protocol.is_empty() {
            return Err(Ungreeted::Wrong(SessionError::ProtocolVersionMismatch {
                switch,
                ours: VERSION.into(),
                theirs: status.wire_version,
            }));
        }
        let protocol = shown(status.protocol.clone());
        Ok((Self { switch, address, rtt, protocol, trust: trust.clone(), client, _line: line }, status))
    }
}

/// Why who took a connection was not greeted as a switch.
enum Ungreeted {
    /// It ended just then.
    Refused,
    /// It took the connection and said nothing, or that it has no place: as a switch does that
    /// others keep busy.
    Closed(String),
    /// It is none, or none of ours.
    Wrong(SessionError),
}

/// When somebody who waits says for what: a second after the beginning, or at once, and then every
/// few.
pub(crate) struct Waiting {
    began: Instant,
    patience: Duration,
    due: Instant,
    has_spoken: bool,
}

impl Waiting {
    pub fn new(patience: Duration) -> Self {
        let began = Instant::now();
        Self { began, patience, due: began + FIRST_WORD, has_spoken: false }
    }

    /// Whether it is time; for what is certain already, at once the first time.
    pub fn is_due(&self, is_certain: bool) -> bool {
        (is_certain && !self.has_spoken) || Instant::now() >= self.due
    }

    pub fn until_due(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// What there is to say of waiting for `what`.
    pub fn says(&mut self, what: &str) -> String {
        self.has_spoken = true;
        self.due = Instant::now() + NEXT_WORD;
        let (waited, patience) = (self.began.elapsed().as_secs(), self.patience.as_secs_f64());
        format!("waiting for {what} ({waited} s of {patience:.0} s)")
    }
}

/// A handshake that took so long was held up, by a busy core or a packet that was lost, or the switch is far away.
const HANDSHAKE_LONG: Duration = Duration::from_millis(1);
/// Handshakes more after one that took long, and how long each may take. The least round trip of all counts. A single lost packet costs a
/// second. As a round trip it would make the whole job's pool too large for every queue on the way.
const HANDSHAKES_MORE: usize = 3;
const HANDSHAKE_MORE_MAX: Duration = Duration::from_millis(100);

/// The first of a host's addresses that takes a TCP connection, and the handshake's round trip.
/// Each gets its share of `patience`: one behind which packets vanish must not keep us from the
/// next.
async fn first_to_answer(addresses: &[SocketAddr], patience: Duration) -> io::Result<(SocketAddr, Duration)> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        let share = patience / u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        match tokio::time::timeout(share, tokio::net::TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                let mut least = fanin_udp::handshake_round_trip(&stream)?;
                for _ in 0..HANDSHAKES_MORE {
                    if least < HANDSHAKE_LONG {
                        break;
                    }
                    // There is a way: one that is not taken a second time changes nothing.
                    let again = tokio::net::TcpStream::connect(address);
                    let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_MORE_MAX, again).await else { break };
                    least = fanin_udp::handshake_round_trip(&stream).map_or(least, |again| least.min(again));
                }
                return Ok((*address, least));
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, "no answer"),
        }
    }
    Err(last)
}

/// Whether a call failed because nobody listens there any more.
pub(crate) fn was_refused(status: &Status) -> bool {
    cause_of::<io::Error>(status).is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Whether who was there is not any more: nobody listens, or somebody else does.
pub(crate) fn is_gone(status: &Status) -> bool {
    was_refused(status) || matches!(cause_of(status), Some(Untrusted::OtherKey { .. }))
}

/// What of this kind made a call fail.
fn cause_of<E: std::error::Error + 'static>(status: &Status) -> Option<&E> {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

/// Whether a connection ended before an answer, or the answer is that there are too many.
fn was_closed(status: &Status) -> bool {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut closed = status.code() == Code::ResourceExhausted;
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        let ended = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe, io::ErrorKind::UnexpectedEof];
        closed |= kind.is_some_and(|kind| ended.contains(&kind));
        let of_http = error.downcast_ref::<hyper::Error>();
        closed |= of_http.is_some_and(|error| error.is_closed() || error.is_canceled());
        cause = error.source();
    }
    closed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_swallows_packets_does_not_hide_the_next_one() {
        // Its queue holds one connection, which nobody accepts; the kernel drops what comes after.
        let silent = tokio::net::TcpSocket::new_v4().expect("a socket");
        silent.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let silent = silent.listen(0).expect("listening");
        let silent_address = silent.local_addr().expect("bound");
        let _queued = tokio::net::TcpStream::connect(silent_address).await.expect("queued");
        let answers = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let answers_address = answers.local_addr().expect("bound");
        let addresses = [silent_address, answers_address];
        let found = first_to_answer(&addresses, Duration::from_secs(2)).await.expect("the second answers");
        assert_eq!(found.0, answers_address);
        assert!(found.1 < Duration::from_secs(1), "the round trip is that of the address that answered");
    }
}
