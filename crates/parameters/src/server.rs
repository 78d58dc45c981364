//! `fanin parameters`: the service.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::proto::parameters_server::{Parameters, ParametersServer};
use crate::proto::{
    BeginReply, BeginRequest, Delta, Dtype, Latest, LeaveReply, LeaveRequest, Model as ModelMessage,
    OpenReply,
};
use crate::snapshot::{SnapshotError, Snapshots};
use crate::store::{Model, Shape, Store, Unserved};

/// How often models are saved that have changed.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// How long open calls may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// A worker's machine that answers nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);
/// How much of an exchange may be on its way, or wait for its turn.
const WINDOW_BYTES: u32 = 8 << 20;
/// Pieces of answers that wait for a slow worker.
const ANSWERS: usize = 4;
/// All trainings together may take the machine's memory divided by this; what a snapshot copies is a piece.
const MEMORY_PART: usize = 2;
/// Where the machine does not tell how much it has.
const MEMORY_UNKNOWN: usize = 4 << 30;

/// What a service is told at its start.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address and port, TCP; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where models are kept, so that a service which is started again has them. `None`: nowhere.
    pub snapshots: Option<PathBuf>,
}

/// Why a service did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {address} (TCP): {cause}; is it a free port of this machine (--listen ADDR:PORT)?"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// The folder cannot be used, or a file in it.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The operating system gave no threads.
    #[error("cannot start the threads of the service: {0}")]
    Runtime(io::Error),
}

/// A running service. Dropping it stops it, after all that was added is saved.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    served: Option<(oneshot::Sender<()>, JoinHandle<()>, Runtime)>,
    kept: Arc<Kept>,
}

/// The models, and where they are kept.
#[derive(Debug)]
struct Kept {
    store: Store,
    /// One writes at a time: a file has one name while it is unfinished.
    snapshots: Option<Mutex<Snapshots>>,
}

impl Server {
    /// Reads what was saved, and serves.
    ///
    /// # Errors
    /// When the port is taken, or a snapshot is damaged.
    pub fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        let snapshots = config.snapshots.as_deref().map(Snapshots::open).transpose()?;
        let store = Store::new(memory_bytes() / MEMORY_PART);
        for model in
            snapshots.iter().map(Snapshots::load).collect::<Result<Vec<_>, _>>()?.into_iter().flatten()
        {
            tracing::info!(
                elements = model.shape.elements,
                workers = model.shape.workers,
                "a training is there again"
            );
            store.restore(model);
        }
        let kept = Arc::new(Kept { store, snapshots: snapshots.map(Mutex::new) });
        let bind = |cause| ServerError::Bind { address: config.listen, cause };
        let listener = TcpListener::bind(config.listen).map_err(bind)?;
        listener.set_nonblocking(true).map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("fanin-parameters")
            .enable_all()
            .build()
            .map_err(ServerError::Runtime)?;
        let listener =
            runtime.block_on(async { tokio::net::TcpListener::from_std(listener) }).map_err(bind)?;
        let (hang_up, hung_up) = oneshot::channel();
        let serving = runtime.spawn(serve(listener, Arc::clone(&kept), hung_up));
        let saving = Arc::clone(&kept);
        runtime.spawn(async move {
            let mut interval = tokio::time::interval(SAVE_EVERY);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                interval.tick().await;
                let kept = Arc::clone(&saving);
                // A disk is waited for on a thread of its own.
                let _ = tokio::task::spawn_blocking(move || kept.look_after(Instant::now())).await;
            }
        });
        Ok(Self { address, served: Some((hang_up, serving, runtime)), kept })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some((hang_up, serving, runtime)) = self.served.take() else { return };
        drop(hang_up);
        let _ = runtime.block_on(async { tokio::time::timeout(HANG_UP, serving).await });
        runtime.shutdown_timeout(HANG_UP);
        self.kept.save_changed();
    }
}

impl Kept {
    fn look_after(&self, now: Instant) {
        for key in self.store.forget_abandoned(now) {
            tracing::warn!("a training that nobody asked for since a day is forgotten");
            self.forget(&key);
        }
        self.save_changed();
    }

    fn save_changed(&self) {
        for model in self.store.models() {
            if let Err(error) = self.save(&model) {
                tracing::error!(%error, "parameters are not saved, and lost if this ends");
            }
        }
    }

    /// Saves a model if it has changed.
    fn save(&self, model: &Model) -> Result<(), SnapshotError> {
        let Some(snapshots) = self.snapshots() else { return Ok(()) };
        if !model.has_changed() {
            return Ok(());
        }
        let saved = snapshots.save(model);
        if saved.is_err() {
            // As after a disk that was full.
            model.set_changed();
        }
        // It may have been forgotten meanwhile.
        if self.store.model(&model.key).is_err() {
            snapshots.forget(&model.key)?;
        }
        saved
    }

    fn snapshots(&self) -> Option<MutexGuard<'_, Snapshots>> {
        Some(self.snapshots.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn forget(&self, key: &crate::Key) {
        let forgotten = self.snapshots().map(|snapshots| snapshots.forget(key));
        if let Some(Err(error)) = forgotten {
            tracing::error!(%error, "a snapshot that nobody needs stays");
        }
    }
}

async fn serve(listener: tokio::net::TcpListener, kept: Arc<Kept>, hung_up: oneshot::Receiver<()>) {
    // What is accepted from a listening socket has its options (tcp(7)).
    let keepalive = socket2::TcpKeepalive::new().with_time(SILENCE / 3).with_interval(SILENCE / 6);
    if let Err(error) = socket2::SockRef::from(&listener).set_tcp_keepalive(&keepalive) {
        tracing::warn!(%error, "who vanishes is not noticed");
    }
    let served = tonic::transport::Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(2 * WINDOW_BYTES)
        .add_service(ParametersServer::new(Service { kept }))
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async {
            let _ = hung_up.await;
        })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the service ended");
    }
}

#[derive(Debug)]
struct Service {
    kept: Arc<Kept>,
}

#[tonic::async_trait]
impl Parameters for Service {
    type ExchangeStream = Pin<Box<dyn Stream<Item = Result<Latest, Status>> + Send>>;

    async fn open(&self, request: Request<ModelMessage>) -> Result<Response<OpenReply>, Status> {
        let message = request.into_inner();
        let shape = Shape {
            dtype: Dtype::try_from(message.dtype)
                .map_err(|_| Status::invalid_argument("an unknown dtype"))?,
            elements: usize::try_from(message.elements).unwrap_or(usize::MAX),
            workers: message.workers,
        };
        let key =
            message.key.as_slice().try_into().map_err(|_| Status::invalid_argument("a key has 16 bytes"))?;
        self.kept.store.open(key, shape)?;
        Ok(Response::new(OpenReply {}))
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        let model = self.kept.store.model(&request.into_inner().key)?;
        model.begin();
        let kept = Arc::clone(&self.kept);
        // A disk is waited for on a thread of its own.
        let saved = tokio::task::spawn_blocking(move || kept.save(&model)).await;
        let saved = saved.map_err(|error| Status::failed_precondition(error.to_string()))?;
        saved.map_err(|error| Status::failed_precondition(error.to_string()))?;
        Ok(Response::new(BeginReply {}))
    }

    async fn exchange(
        &self,
        request: Request<Streaming<Delta>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let mut deltas = request.into_inner();
        let kept = Arc::clone(&self.kept);
        let (answers, answered) = mpsc::channel(ANSWERS);
        tokio::spawn(async move {
            let mut model: Option<Arc<Model>> = None;
            loop {
                let answer = match deltas.message().await {
                    Ok(None) => return,
                    Ok(Some(delta)) => exchanged(&kept.store, &mut model, &delta),
                    Err(status) => Err(status),
                };
                let is_over = answer.is_err();
                // Who hung up is told nothing; what was added stays.
                if answers.send(answer).await.is_err() || is_over {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answered))))
    }

    async fn leave(&self, request: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        let LeaveRequest { key, worker } = request.into_inner();
        if self.kept.store.leave(&key, worker)?
            && let Ok(key) = key.as_slice().try_into()
        {
            self.kept.forget(key);
        }
        Ok(Response::new(LeaveReply {}))
    }
}

/// Answers one delta of a stream, which is of one model.
fn exchanged(store: &Store, model: &mut Option<Arc<Model>>, delta: &Delta) -> Result<Latest, Status> {
    let of_stream = match model {
        Some(model) if delta.key.is_empty() => model,
        _ => model.insert(store.model(&delta.key)?),
    };
    let (values, lost) = of_stream.exchange(delta.worker, delta.step, delta.piece, &delta.values)?;
    Ok(Latest { values: values.into(), lost })
}

impl From<Unserved> for Status {
    fn from(unserved: Unserved) -> Self {
        let text = unserved.to_string();
        match unserved {
            Unserved::Unknown => Self::not_found(text),
            Unserved::Taken => Self::already_exists(text),
            Unserved::NoRoom { .. } => Self::resource_exhausted(text),
            Unserved::Malformed(_) => Self::invalid_argument(text),
        }
    }
}

/// Of the machine.
fn memory_bytes() -> usize {
    let told = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|total| total.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kilobytes.map_or(MEMORY_UNKNOWN, |kilobytes| kilobytes << 10)
}
