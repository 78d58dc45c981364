//! A worker's end: its parameters, at one service or cut among several.

use std::ops::Range;
use std::time::{Duration, Instant};

use prost::bytes::Bytes;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::proto::parameters_client::ParametersClient;
use crate::proto::{BeginRequest, Delta, Dtype, LeaveRequest, Model};
use crate::{Key, PIECE_ELEMENTS};

/// Between two attempts to reach a service that is not there.
const RETRY: Duration = Duration::from_millis(200);
/// How long a service's machine may answer nothing before it is tried anew.
const SILENCE: Duration = Duration::from_secs(10);
/// As the server's.
const WINDOW_BYTES: u32 = 8 << 20;

/// Which training, and who takes part.
#[derive(Clone, Debug)]
pub struct ParametersConfig {
    /// Each as "host:port": they share the parameters in equal parts, in this order, which is the same for all workers.
    pub services: Vec<String>,
    /// What the workers of this training have alone.
    pub key: Key,
    /// This worker, from 0.
    pub worker: u32,
    /// How many there are.
    pub workers: u32,
    /// Of the parameters.
    pub dtype: Dtype,
    /// How many of them.
    pub elements: usize,
    /// How long a service that does not answer is waited for.
    pub patience: Duration,
}

/// What came of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// The latest parameters, little-endian.
    pub latest: Vec<u8>,
    /// How many deltas of this worker a service has lost since the last exchange, as it was started again from an older snapshot: the most of any piece.
    pub lost: u64,
}

/// Why an exchange failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParametersError {
    /// Nobody answers there.
    #[error(
        "the parameter service {service} did not answer within {:.0} s ({cause}); is it running (fanin parameters --listen) and \
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
        /// What it said: why, and what to do.
        cause: String,
    },
    /// What was given is not this model's.
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
    /// Of this worker: deltas so far.
    step: u64,
    runtime: Option<Runtime>,
}

/// What one service has.
#[derive(Clone, Debug)]
struct Part {
    service: String,
    elements: Range<usize>,
    client: ParametersClient<Channel>,
}

impl Parameters {
    /// Connects to nobody yet.
    ///
    /// # Errors
    /// When no service is named or an address is none, or there are fewer elements than services.
    pub fn new(config: ParametersConfig) -> Result<Self, ParametersError> {
        let count = config.services.len();
        if count == 0 || config.elements < count {
            let (elements, cure) = (config.elements, "name at least one service, and at most one an element");
            return Err(ParametersError::Malformed(format!(
                "{elements} parameters at {count} services: {cure}"
            )));
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fanin-deltas")
            .enable_all()
            .build()
            .map_err(|error| ParametersError::Local(error.to_string()))?;
        let part = |(number, service): (usize, &String)| {
            let from = |number| config.elements * number / count;
            let endpoint = Endpoint::from_shared(format!("http://{service}"))
                .ok()
                .filter(|endpoint| endpoint.uri().port_u16().is_some_and(|port| port != 0))
                .filter(|endpoint| endpoint.uri().path_and_query().is_none_or(|path| path == "/"));
            let endpoint = endpoint
                .ok_or_else(|| {
                    ParametersError::Malformed(format!("{service:?} is no HOST:PORT of a parameter service"))
                })?
                .connect_timeout(config.patience.min(SILENCE))
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(2 * WINDOW_BYTES)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(SILENCE / 2)
                .keep_alive_timeout(SILENCE / 2);
            let client = {
                let _inside = runtime.enter();
                ParametersClient::new(endpoint.connect_lazy())
            };
            Ok(Part { service: service.clone(), elements: from(number)..from(number + 1), client })
        };
        let parts = config.services.iter().enumerate().map(part).collect::<Result<_, _>>()?;
        Ok(Self { parts, config, step: 0, runtime: Some(runtime) })
    }

    /// Makes the model at each service, of the first parameters, little-endian: one worker does, before all others ask for it.
    ///
    /// # Errors
    /// When a service is not reached, has no room, or cannot keep it.
    pub fn create(&mut self, first: &[u8]) -> Result<(), ParametersError> {
        let Self { config, .. } = &*self;
        self.at_each(|part| {
            let model = Model {
                key: config.key.to_vec(),
                dtype: config.dtype.into(),
                elements: part.elements.len() as u64,
                workers: config.workers,
            };
            move |mut client: ParametersClient<Channel>| {
                let model = model.clone();
                async move { client.open(model).await.map(drop) }
            }
        })?;
        // Nothing is there yet: they are this worker's first delta.
        self.exchange(Some(first))?;
        let begin = BeginRequest { key: self.config.key.to_vec() };
        self.at_each(|_| {
            let begin = begin.clone();
            move |mut client: ParametersClient<Channel>| {
                let begin = begin.clone();
                async move { client.begin(begin).await.map(drop) }
            }
        })
        .map(drop)
    }

    /// Adds a delta, little-endian, and returns the latest parameters; without one, returns those alone. Where a service is away, waits for it: what it has
    /// already is not added again.
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
        let (step, worker) = (if delta.is_some() { self.step } else { 0 }, self.config.worker);
        let (key, size) = (Bytes::copy_from_slice(&self.config.key), self.config.dtype.bytes());
        let of_parts = self.at_each(|part| {
            let Range { start, end } = part.elements;
            let of_part = delta.map(|delta| Bytes::copy_from_slice(&delta[size * start..size * end]));
            let pieces = (end - start).div_ceil(PIECE_ELEMENTS);
            let (key, bytes) = (key.clone(), size * (end - start));
            move |mut client: ParametersClient<Channel>| {
                let (key, of_part) = (key.clone(), of_part.clone());
                let asked = (0..pieces).map(move |piece| {
                    let from = piece * PIECE_ELEMENTS * size;
                    let values = of_part
                        .as_ref()
                        .map(|of_part| of_part.slice(from..of_part.len().min(from + PIECE_ELEMENTS * size)));
                    let key = if piece == 0 { key.to_vec() } else { Vec::new() };
                    Delta { key, worker, step, piece: piece as u64, values: values.unwrap_or_default() }
                });
                async move {
                    let mut answers = client.exchange(tokio_stream::iter(asked)).await?.into_inner();
                    let mut exchanged = Exchanged { latest: Vec::with_capacity(bytes), lost: 0 };
                    while let Some(answer) = answers.message().await? {
                        exchanged.latest.extend_from_slice(&answer.values);
                        exchanged.lost = exchanged.lost.max(answer.lost);
                    }
                    if exchanged.latest.len() == bytes {
                        Ok(exchanged)
                    } else {
                        // As when the service stops in the middle.
                        Err(Status::unavailable("it answered with a part of the parameters"))
                    }
                }
            }
        })?;
        let lost = of_parts.iter().map(|of_part| of_part.lost).max().unwrap_or_default();
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
        let leaves = LeaveRequest { key: self.config.key.to_vec(), worker: self.config.worker };
        self.at_each(|_| {
            let leaves = leaves.clone();
            move |mut client: ParametersClient<Channel>| {
                let leaves = leaves.clone();
                async move { client.leave(leaves).await.map(drop) }
            }
        })
        .map(drop)
    }

    /// Does something at all services at once, again where one is away, until patience is over.
    fn at_each<T: Send + 'static, F, Call>(
        &self,
        call: impl Fn(&Part) -> Call,
    ) -> Result<Vec<T>, ParametersError>
    where
        Call: Fn(ParametersClient<Channel>) -> F + Send + 'static,
        F: Future<Output = Result<T, Status>> + Send,
    {
        let Some(runtime) = &self.runtime else { return Ok(Vec::new()) };
        let patience = self.config.patience;
        runtime.block_on(async {
            let mut calls = JoinSet::new();
            for (number, part) in self.parts.iter().enumerate() {
                let (call, part) = (call(part), part.clone());
                calls.spawn(async move { (number, until_answered(&part, call, patience).await) });
            }
            let mut answers: Vec<Option<T>> = self.parts.iter().map(|_| None).collect();
            while let Some(ended) = calls.join_next().await {
                let (number, answer) = ended.map_err(|error| ParametersError::Local(error.to_string()))?;
                answers[number] = Some(answer?);
            }
            Ok(answers.into_iter().flatten().collect())
        })
    }
}

impl Drop for Parameters {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn until_answered<T, F>(
    part: &Part,
    call: impl Fn(ParametersClient<Channel>) -> F,
    patience: Duration,
) -> Result<T, ParametersError>
where
    F: Future<Output = Result<T, Status>>,
{
    let began = Instant::now();
    loop {
        let left = patience.saturating_sub(began.elapsed());
        let cause = match tokio::time::timeout(left, call(part.client.clone())).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(status)) if is_passing(&status) => explain(&status),
            Ok(Err(status)) => {
                return Err(ParametersError::Refused {
                    service: part.service.clone(),
                    cause: explain(&status),
                });
            }
            Err(_) => "no answer".into(),
        };
        if began.elapsed() + RETRY >= patience {
            return Err(ParametersError::Unreachable {
                service: part.service.clone(),
                waited: patience,
                cause,
            });
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Whether the connection broke, or the service is away: it may be started again.
fn is_passing(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal)
}

/// What a failed call means: what happened stands at the end of the chain.
fn explain(status: &Status) -> String {
    if status.code() == Code::Unimplemented {
        return "it is no parameter service (fanin parameters)".into();
    }
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}
