//! A worker's end: its parameters, at one service or cut among several.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::time::{Duration, Instant};

use fanin_limits::{expect_answers, explain};
use hyper_util::rt::TokioIo;
use prost::bytes::Bytes;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::proto::parameters_client::ParametersClient;
use crate::proto::{BeginRequest, Delta, Dtype, LeaveRequest, Model};
use crate::{Key, PIECE_ELEMENTS};

/// Between two attempts to reach a service that is not there.
const RETRY: Duration = Duration::from_millis(200);
/// How long a service's machine may acknowledge nothing before it is tried anew. Its kernel does,
/// however long what was sent is on its way to the service.
const SILENCE: Duration = Duration::from_secs(10);
/// How much of the answers may wait for its turn.
const WINDOW_BYTES: u32 = 8 << 20;
/// How long others may take to answer when one service has failed: what they did is to be known.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// How long a model that could not be made everywhere is tried to be taken back.
const TAKE_BACK: Duration = Duration::from_secs(1);

/// A service, and how much of the parameters it keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// "host:port".
    pub address: String,
    /// Its share, of those of all services: what they sum to does not matter. A service whose share
    /// is zero is not asked.
    pub share: f64,
    /// The worker in whose process it is. A process that has ended does not come back: nobody waits
    /// for a service where the worker's machine refuses connections. `None` for `fanin parameters`,
    /// which may be started again.
    pub host: Option<u32>,
}

impl Service {
    /// A service of `fanin parameters`. Those that are named so have equal shares.
    #[must_use]
    pub fn named(address: impl Into<String>) -> Self {
        Self { address: address.into(), share: 1.0, host: None }
    }
}

/// Which training, and who takes part.
#[derive(Clone, Debug)]
pub struct ParametersConfig {
    /// They share the parameters in this order, and in these shares, which are the same for all
    /// workers.
    pub services: Vec<Service>,
    /// The key that only the workers of this training have.
    pub key: Key,
    /// This worker, from 0.
    pub worker: u32,
    /// How many there are.
    pub workers: u32,
    /// Of the parameters.
    pub dtype: Dtype,
    /// How many of them.
    pub elements: usize,
    /// How long a service that does not answer is waited for: since the last piece that it
    /// answered, however long all of them take.
    pub patience: Duration,
}

/// The result of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// The latest parameters, little-endian.
    pub latest: Vec<u8>,
    /// How many of this worker's deltas a service has lost, because it was started again from an
    /// older snapshot. It is the most of any piece, and counts only losses that were not told
    /// before.
    pub lost: u64,
}

/// Why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParametersError {
    /// Nobody answers there.
    #[error(
        "the parameter service {service} did not answer for {:.0} s ({cause}); is it running (fanin parameters --listen) and \
         is its TCP port open?",
        waited.as_secs_f64()
    )]
    Unreachable {
        /// Host and port.
        service: String,
        /// How long was waited.
        waited: Duration,
        /// What happened last.
        cause: String,
    },
    /// It answers, and does not serve this training.
    #[error("the parameter service {service} does not serve this training: {cause}")]
    Refused {
        /// Host and port.
        service: String,
        /// The service's words: why, and what to do.
        cause: String,
    },
    /// The worker in whose process it is has ended, or its machine is away.
    #[error(
        "rank {rank} is gone, and the part of the parameters that it kept ({service}: {cause}): it died, or ended before all \
         ranks had called close(); start all ranks again from a checkpoint, or keep the parameters where they outlive ranks \
         (fanin parameters --snapshots FOLDER, and DeltaOptimizer's services)"
    )]
    Gone {
        /// Host and port.
        service: String,
        /// The worker.
        rank: u32,
        /// The last failure.
        cause: String,
    },
    /// The given data is not this model's.
    #[error("{0}")]
    Malformed(String),
    /// This machine gave no thread.
    #[error("cannot start a thread for the parameter services: {0}")]
    Local(String),
}

/// A worker's connection to the services of its training.
#[derive(Debug)]
pub struct Parameters {
    config: ParametersConfig,
    parts: Vec<Part>,
    /// The number of this worker's deltas so far.
    step: u64,
    /// How many of them are lost, as was told.
    lost: u64,
    runtime: Option<Runtime>,
}

/// A call to a service.
#[derive(Clone, Debug)]
enum Call {
    Open(Model),
    Begin(BeginRequest),
    Exchange(Exchange),
    Leave(LeaveRequest),
}

/// A delta, or a question, to all pieces of a part.
#[derive(Clone, Debug)]
struct Exchange {
    key: Key,
    worker: u32,
    /// 0 for a question.
    step: u64,
    delta: Option<Bytes>,
    /// The size of the part.
    bytes: usize,
    piece_bytes: usize,
}

/// The answers of a service so far: if an exchange is broken off, the next attempt is about the
/// rest.
#[derive(Debug, Default)]
struct Answered {
    latest: Vec<u8>,
    pieces: usize,
    /// In the piece that has the fewest.
    added: Option<u64>,
    /// Whether a model is new there.
    made: bool,
}

/// The part of one service.
#[derive(Clone, Debug)]
struct Part {
    service: String,
    /// The worker in whose process it is.
    host: Option<u32>,
    /// The training's, and which part this is: what another part's service, or its folder, has is
    /// not taken for it.
    key: Key,
    elements: Range<usize>,
    client: ParametersClient<Channel>,
}

impl Parameters {
    /// Connects to nobody yet.
    ///
    /// # Errors
    /// When no service is named or an address is none, a share is no number, all are zero, or there
    /// is no element.
    pub fn new(config: ParametersConfig) -> Result<Self, ParametersError> {
        let count = config.services.len();
        if count == 0 || config.elements == 0 {
            return Err(ParametersError::Malformed(format!(
                "{} parameters at {count} services: there is at least one of both",
                config.elements
            )));
        }
        let cut = cut(config.elements, &config.services)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fanin-deltas")
            .enable_all()
            .build()
            .map_err(|error| ParametersError::Local(error.to_string()))?;
        let part = |(number, Service { address, host, .. }): (usize, &Service)| {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))
                .ok()
                .filter(|endpoint| endpoint.uri().port_u16().is_some_and(|port| port != 0))
                .filter(|endpoint| endpoint.uri().path_and_query().is_none_or(|path| path == "/"));
            let endpoint = endpoint
                .ok_or_else(|| {
                    ParametersError::Malformed(format!("{address:?} is no HOST:PORT of a parameter service"))
                })?
                .connect_timeout(config.patience.min(SILENCE))
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(2 * WINDOW_BYTES);
            let named = endpoint.uri().authority().map_or_else(String::new, ToString::to_string);
            let client = {
                let _inside = runtime.enter();
                let connector = tower::service_fn(move |_| connect(named.clone()));
                ParametersClient::new(endpoint.connect_with_connector_lazy(connector))
            };
            let key = key_of_part(config.key, number);
            let elements = cut[number].clone();
            Ok(Part { service: address.clone(), host: *host, key, elements, client })
        };
        let mut parts = config.services.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
        // There are more services than elements, or a share is zero.
        parts.retain(|part| !part.elements.is_empty());
        Ok(Self { parts, config, step: 0, lost: 0, runtime: Some(runtime) })
    }

    /// Makes the model at each service, of the first parameters, little-endian: one worker does,
    /// before all others ask for it.
    ///
    /// # Errors
    /// When a service is not reached, has no room, or cannot keep it. Then no service that is
    /// reached has it any more.
    pub fn create(&mut self, first: &[u8]) -> Result<(), ParametersError> {
        let (opened, all) = self.at_each(self.config.patience, |part| {
            Some(Call::Open(Model {
                key: part.key.to_vec(),
                dtype: self.config.dtype.into(),
                elements: part.elements.len() as u64,
                workers: self.config.workers,
            }))
        });
        // A model that was there before is not this worker's to take back.
        let made = |answered: &Option<Answered>| answered.as_ref().is_some_and(|answered| answered.made);
        let opened = self.parts.iter().zip(&opened).filter(|(_, answered)| made(answered));
        let opened: Vec<Key> = opened.map(|(part, _)| part.key).collect();
        // Nothing is there yet: they are this worker's first delta.
        let created = all.and_then(|()| self.exchange(Some(first))).and_then(|_| {
            self.everywhere(|part| Call::Begin(BeginRequest { key: part.key.to_vec() })).map(drop)
        });
        if created.is_err() {
            let worker = self.config.worker;
            let _ = self.at_each(TAKE_BACK, |part| {
                let takes_back = LeaveRequest { key: part.key.to_vec(), worker, takes_back: true };
                opened.contains(&part.key).then_some(Call::Leave(takes_back))
            });
        }
        created
    }

    /// Adds a delta, little-endian, and returns the latest parameters; without one, returns those
    /// alone. If a service is away, waits for it: a delta that it has already is not added again.
    ///
    /// # Errors
    /// When a service is not reached, or lost the model.
    pub fn exchange(&mut self, delta: Option<&[u8]>) -> Result<Exchanged, ParametersError> {
        let bytes = self.config.elements * self.config.dtype.bytes();
        if let Some(delta) = delta
            && delta.len() != bytes
        {
            let why = format!("{} bytes, and the parameters have {bytes}", delta.len());
            return Err(ParametersError::Malformed(why));
        }
        self.step += u64::from(delta.is_some());
        let (step, size) = (if delta.is_some() { self.step } else { 0 }, self.config.dtype.bytes());
        let of_parts = self.everywhere(|part| {
            let Range { start, end } = part.elements;
            Call::Exchange(Exchange {
                key: part.key,
                worker: self.config.worker,
                step,
                delta: delta.map(|delta| Bytes::copy_from_slice(&delta[size * start..size * end])),
                bytes: size * (end - start),
                piece_bytes: size * PIECE_ELEMENTS,
            })
        })?;
        let added = of_parts.iter().filter_map(|of_part| of_part.added).min().unwrap_or(self.step);
        let all_lost = self.step.saturating_sub(added).max(self.lost);
        let lost = all_lost - std::mem::replace(&mut self.lost, all_lost);
        let latest = if of_parts.len() == 1 {
            of_parts.into_iter().next().map(|of_part| of_part.latest).unwrap_or_default()
        } else {
            of_parts.iter().flat_map(|of_part| &of_part.latest).copied().collect()
        };
        Ok(Exchanged { latest, lost })
    }

    /// This worker is done. When all are, the services forget the model.
    ///
    /// # Errors
    /// When a service is not reached, or lost the model.
    pub fn leave(&self) -> Result<(), ParametersError> {
        let worker = self.config.worker;
        self.everywhere(|part| {
            Call::Leave(LeaveRequest { key: part.key.to_vec(), worker, takes_back: false })
        })
        .map(drop)
    }

    /// The answers of all services.
    fn everywhere(&self, call: impl Fn(&Part) -> Call) -> Result<Vec<Answered>, ParametersError> {
        let (answers, all) = self.at_each(self.config.patience, |part| Some(call(part)));
        all.map(|()| answers.into_iter().flatten().collect())
    }

    /// Calls the services at once, each again where it is away, until patience is over, or for a
    /// moment more when one has failed. The answers are in the order of parts; an error is the
    /// first one.
    fn at_each(
        &self,
        patience: Duration,
        call: impl Fn(&Part) -> Option<Call>,
    ) -> (Vec<Option<Answered>>, Result<(), ParametersError>) {
        let mut answers: Vec<Option<Answered>> = self.parts.iter().map(|_| None).collect();
        let Some(runtime) = &self.runtime else { return (answers, Ok(())) };
        let all = runtime.block_on(async {
            let mut calls = JoinSet::new();
            for (number, part) in self.parts.iter().enumerate() {
                if let Some(call) = call(part) {
                    let part = part.clone();
                    calls.spawn(async move { (number, until_answered(&part, &call, patience).await) });
                }
            }
            let mut all = Ok(());
            let far = tokio::time::Instant::now() + Duration::from_secs(1 << 32);
            let mut until = far;
            while let Ok(Some(ended)) = tokio::time::timeout_at(until, calls.join_next()).await {
                let ended = ended.map_err(|error| ParametersError::Local(error.to_string()));
                match ended.and_then(|(number, answer)| Ok((number, answer?))) {
                    Ok((number, answer)) => answers[number] = Some(answer),
                    Err(error) => {
                        until = until.min(tokio::time::Instant::now() + LAST_ANSWERS);
                        all = all.and(Err(error));
                    }
                }
            }
            all
        });
        (answers, all)
    }
}

impl Drop for Parameters {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn until_answered(part: &Part, call: &Call, patience: Duration) -> Result<Answered, ParametersError> {
    let mut answered = Answered::default();
    // Or since when it is waited for.
    let mut heard = Instant::now();
    for attempt in 0_u64.. {
        let mut cause = match answer(part, call, patience, &mut heard, &mut answered).await {
            Ok(()) => break,
            // The answer to an earlier attempt is lost, and it was the last one's leave.
            Err(status)
                if attempt > 0 && matches!(call, Call::Leave(_)) && status.code() == Code::NotFound =>
            {
                break;
            }
            Err(status) if is_passing(&status) => {
                let cause = explain(&status);
                if let Some(rank) = part.host.filter(|_| is_refused(&status)) {
                    return Err(ParametersError::Gone { service: part.service.clone(), rank, cause });
                }
                cause
            }
            Err(status) => {
                let is_none = status.code() == Code::Unimplemented;
                let cause = if is_none {
                    "it is no parameter service (fanin parameters)".into()
                } else {
                    explain(&status)
                };
                return Err(ParametersError::Refused { service: part.service.clone(), cause });
            }
        };
        if heard.elapsed() + RETRY >= patience {
            if let Call::Exchange(exchange) = call {
                let pieces = exchange.bytes.div_ceil(exchange.piece_bytes);
                cause = format!("{cause}; {} of {pieces} pieces are exchanged", answered.pieces);
            }
            let (service, waited) = (part.service.clone(), patience);
            return Err(match part.host {
                Some(rank) => {
                    let cause = format!("no answer for {:.0} s, {cause}", waited.as_secs_f64());
                    ParametersError::Gone { service, rank, cause }
                }
                None => ParametersError::Unreachable { service, waited, cause },
            });
        }
        tokio::time::sleep(RETRY).await;
    }
    Ok(answered)
}

/// Asks once for the pieces that are not answered yet; `heard` is when something came last.
async fn answer(
    part: &Part,
    call: &Call,
    patience: Duration,
    heard: &mut Instant,
    answered: &mut Answered,
) -> Result<(), Status> {
    let mut client = part.client.clone();
    let left = patience.saturating_sub(heard.elapsed());
    match call {
        Call::Open(model) => {
            answered.made = within(left, client.open(model.clone())).await?.into_inner().made;
            Ok(())
        }
        Call::Begin(begin) => within(left, client.begin(begin.clone())).await.map(drop),
        Call::Leave(leave) => within(left, client.leave(leave.clone())).await.map(drop),
        Call::Exchange(exchange) => {
            let asked = tokio_stream::iter(exchange.clone().pieces(answered.pieces));
            let mut answers = within(left, client.exchange(asked)).await?.into_inner();
            while answered.latest.len() < exchange.bytes {
                let left = patience.saturating_sub(heard.elapsed());
                let Some(answer) = within(left, answers.message()).await? else {
                    // As when the service stops in the middle.
                    return Err(Status::unavailable("it answered with a part of the parameters"));
                };
                *heard = Instant::now();
                let expected = exchange.piece_bytes.min(exchange.bytes - answered.latest.len());
                if answer.values.len() != expected {
                    let (piece, got) = (answered.pieces, answer.values.len());
                    let text = format!("piece {piece} has {got} bytes there, and {expected} here");
                    return Err(Status::invalid_argument(text));
                }
                answered.latest.reserve_exact(exchange.bytes - answered.latest.len());
                answered.latest.extend_from_slice(&answer.values);
                answered.pieces += 1;
                answered.added = Some(answered.added.map_or(answer.added, |added| added.min(answer.added)));
            }
            // So that the call ends, and is not broken off; all is in.
            let _ = within(patience, answers.message()).await;
            Ok(())
        }
    }
}

async fn within<T>(left: Duration, asked: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    tokio::time::timeout(left, asked).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer")))
}

impl Exchange {
    /// From a piece on.
    fn pieces(self, first: usize) -> impl Iterator<Item = Delta> + Send + 'static {
        let count = self.bytes.div_ceil(self.piece_bytes);
        (first..count).map(move |piece| {
            let from = piece * self.piece_bytes;
            let to = self.bytes.min(from + self.piece_bytes);
            let values = self.delta.as_ref().map(|delta| delta.slice(from..to)).unwrap_or_default();
            let key = if piece == first { self.key.to_vec() } else { Vec::new() };
            Delta { key, worker: self.worker, step: self.step, piece: piece as u64, values }
        })
    }
}

/// A connection that ends when the machine at the other end acknowledges nothing. HTTP/2's own
/// pings would wait behind what was sent before, as long as a slow link takes for it.
async fn connect(service: String) -> io::Result<TokioIo<TcpStream>> {
    let stream = TcpStream::connect(service).await?;
    stream.set_nodelay(true)?;
    expect_answers(&stream, SILENCE)?;
    Ok(TokioIo::new(stream))
}

/// The elements of each service, in their order: equal shares differ by one element at most.
fn cut(elements: usize, services: &[Service]) -> Result<Vec<Range<usize>>, ParametersError> {
    let total: f64 = services.iter().map(|service| service.share).sum();
    if !(total > 0.0 && total.is_finite() && services.iter().all(|service| service.share >= 0.0)) {
        let shares: Vec<f64> = services.iter().map(|service| service.share).collect();
        let why = format!("{shares:?} are no shares: each is a number from 0 on, and one is above 0");
        return Err(ParametersError::Malformed(why));
    }
    let (mut sum, mut from) = (0.0, 0);
    let mut parts: Vec<Range<usize>> = Vec::with_capacity(services.len());
    for service in services {
        sum += service.share;
        let to = (elements as f64 * sum / total) as usize;
        parts.push(from..to.min(elements));
        from = to.min(elements);
    }
    // Rounding is nobody's part.
    if let Some(last) = parts.iter_mut().rev().find(|part| part.start < part.end) {
        last.end = elements;
    }
    Ok(parts)
}

/// The number is in the first bytes; who has several models of one training tells them by the
/// others.
fn key_of_part(mut key: Key, number: usize) -> Key {
    key.iter_mut().zip((number as u32).to_le_bytes()).for_each(|(byte, number)| *byte ^= number);
    key
}

/// Whether this may be the key of a part of the model that has `whole`.
pub(crate) fn is_of_part(key: &Key, whole: &Key) -> bool {
    key[size_of::<u32>()..] == whole[size_of::<u32>()..]
}

/// Whether nobody listens there.
fn is_refused(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
        {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Whether the connection broke, or the service is away: it may be started again.
fn is_passing(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal | Code::DeadlineExceeded
    )
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;

    use super::*;

    #[tokio::test]
    async fn a_machine_that_acknowledges_nothing_is_noticed_by_the_kernel() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound").to_string();
        let stream = connect(address).await.expect("connected").into_inner();
        let socket = SockRef::from(&stream);
        let timeout = socket.tcp_user_timeout().expect("known").expect("it has one");
        assert!((SILENCE..2 * SILENCE).contains(&timeout), "{timeout:?}");
        assert!(socket.keepalive().expect("known"));
    }
}
