//! `fanin parameters`: the service.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::Request as HttpRequest;
use axum::middleware::{Next, from_fn};
use axum::response::Response as HttpResponse;
use fanin_limits::{Arrival, Peer, answered, connections_max, expect_answers, limited};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::client::is_of_part;
use crate::proto::parameters_server::{Parameters, ParametersServer};
use crate::proto::{
    BeginReply, BeginRequest, Delta, Dtype, Latest, LeaveReply, LeaveRequest, Model as ModelMessage,
    OpenReply,
};
use crate::snapshot::{SnapshotError, Snapshots};
use crate::store::{Model, Shape, Store, Unserved};
use crate::{Key, PIECE_ELEMENTS, memory};

/// How often models are saved that have changed.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// How long open calls may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// A worker's machine that answers nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(30);
/// How much of a connection's exchanges may wait for its turn.
const WINDOW_BYTES: u32 = 2 << 20;
/// Pieces of answers that wait for a slow worker, beside one that is made and one that is sent.
const ANSWERS: usize = 1;
/// Calls at once of a connection: a worker has one, and the rest of another that it gave up.
const CALLS_MAX: u32 = 2;
/// The longest piece.
const PIECE_BYTES_MAX: usize = 8 * PIECE_ELEMENTS;
/// The longest message: what is around its values, too.
const MESSAGE_BYTES_MAX: usize = PIECE_BYTES_MAX + (1 << 10);
/// The most memory of a connection. It holds what has come, and for each call its answers and its
/// delta, once as it came and once parsed.
const CONNECTION_BYTES: usize = WINDOW_BYTES as usize + CALLS_MAX as usize * (ANSWERS + 4) * PIECE_BYTES_MAX;
/// The call that is a stream.
const EXCHANGE: &str = "/fanin.parameters.v1.Parameters/Exchange";
/// All trainings together may take three eighths of the memory, and all connections one: who
/// reaches the port, half of it. A snapshot copies one piece at a time.
const MODELS: (usize, usize) = (3, 8);
const CONNECTIONS: (usize, usize) = (1, 8);
/// Most connections, whatever memory there is.
const CONNECTIONS_MAX: usize = 4096;

/// The configuration of a service at its start.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address and port, TCP; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The folder where models are kept, so that a service which is started again has them. `None`:
    /// nowhere.
    pub snapshots: Option<PathBuf>,
    /// The keys of the models whose parts it keeps; `None`: whoever reaches it may begin a training.
    pub trainings: Option<Vec<Key>>,
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

/// A running service. Dropping it stops it, as [`Server::stop`] does.
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
    /// The keys of the models whose parts are kept, unless everybody's are.
    trainings: Option<Vec<Key>>,
    /// Only one thread writes at a time: a file has one name while it is unfinished. `None` when
    /// they are kept nowhere, or it is over.
    snapshots: Mutex<Option<Snapshots>>,
}

impl Server {
    /// Reads what was saved, and serves.
    ///
    /// # Errors
    /// When the port is taken, or a snapshot is damaged.
    pub fn start(config: &ServerConfig) -> Result<Self, ServerError> {
        let snapshots = config.snapshots.as_deref().map(Snapshots::open).transpose()?;
        let memory_bytes = memory::bytes(Path::new("/"));
        let connections = memory_bytes / CONNECTIONS.1 * CONNECTIONS.0 / CONNECTION_BYTES;
        let connections = connections_max(connections.clamp(2, CONNECTIONS_MAX));
        let store = Store::new(memory_bytes / MODELS.1 * MODELS.0);
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
        let kept =
            Arc::new(Kept { store, trainings: config.trainings.clone(), snapshots: Mutex::new(snapshots) });
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
        let serving = runtime.spawn(serve(listener, Arc::clone(&kept), connections, hung_up));
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

    /// Stops it, after all that was added is saved.
    ///
    /// # Errors
    /// When something could not be saved, and is lost.
    pub fn stop(mut self) -> Result<(), SnapshotError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), SnapshotError> {
        let Some((hang_up, serving, runtime)) = self.served.take() else { return Ok(()) };
        drop(hang_up);
        let _ = runtime.block_on(async { tokio::time::timeout(HANG_UP, serving).await });
        runtime.shutdown_timeout(HANG_UP);
        let saved = self.kept.save_changed();
        // A service that is started next may use the folder.
        *self.kept.snapshots() = None;
        saved
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The log has it.
        let _ = self.end();
    }
}

impl Kept {
    fn look_after(&self, now: Instant) {
        for key in self.store.forget_abandoned(now) {
            tracing::warn!("a training that nobody asked for since a while is forgotten");
            self.forget(&key);
        }
        // Again the next time.
        let _ = self.save_changed();
    }

    /// Saves all that has changed; returns what went wrong first.
    fn save_changed(&self) -> Result<(), SnapshotError> {
        let mut all = Ok(());
        for model in self.store.models() {
            if let Err(error) = self.save(&model) {
                tracing::error!(%error, "parameters are not saved, and lost if this ends");
                all = all.and(Err(error));
            }
        }
        all
    }

    /// Saves a model if it has changed.
    fn save(&self, model: &Model) -> Result<(), SnapshotError> {
        let snapshots = self.snapshots();
        let Some(snapshots) = snapshots.as_ref() else { return Ok(()) };
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

    fn snapshots(&self) -> MutexGuard<'_, Option<Snapshots>> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first parameters are in. A model that cannot be kept is not begun.
    fn begin(&self, key: &[u8]) -> Result<(), Status> {
        let model = self.store.model(key)?;
        model.begin();
        self.save(&model).map_err(|error| {
            self.store.forget(&model.key);
            self.forget(&model.key);
            Status::failed_precondition(error.to_string())
        })
    }

    fn leave(&self, request: &LeaveRequest) -> Result<(), Status> {
        let key = self.store.model(&request.key)?.key;
        if request.takes_back {
            self.store.forget(&key);
            self.forget(&key);
        } else if self.store.leave(&key, request.worker)? {
            self.forget(&key);
        }
        Ok(())
    }

    /// Deletes the file of a model that is forgotten.
    fn forget(&self, key: &Key) {
        if let Some(Err(error)) = self.snapshots().as_ref().map(|snapshots| snapshots.forget(key)) {
            tracing::error!(%error, "a snapshot that nobody needs stays");
        }
    }
}

async fn serve(
    listener: tokio::net::TcpListener,
    kept: Arc<Kept>,
    connections_max: usize,
    hung_up: oneshot::Receiver<()>,
) {
    // A connection that is accepted from a listening socket has its options (tcp(7)).
    if let Err(error) = expect_answers(&listener, SILENCE) {
        tracing::warn!(%error, "who vanishes is not noticed");
    }
    let service = ParametersServer::new(Service { kept })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let router = Routes::new(service).into_axum_router().layer(from_fn(here));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let served = tonic::transport::Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_concurrent_streams(CALLS_MAX)
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(
            limited(incoming, connections_max, connections_max.div_ceil(2)),
            async {
                let _ = hung_up.await;
            },
        )
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the service ended");
    }
}

/// Lets a call through when its request is here.
async fn here(mut request: HttpRequest, next: Next) -> HttpResponse {
    let Some(peer) = request.extensions().get::<Peer>().cloned() else { return next.run(request).await };
    let open = peer.call();
    request.extensions_mut().insert(peer.connection);
    let arrival = Arrival { is_stream: request.uri().path() == EXCHANGE, bytes_max: MESSAGE_BYTES_MAX };
    // Its memory is its connection's.
    match arrival.of(request, None).await {
        Ok(request) => answered(next.run(request).await, open),
        Err(status) => status.into_http(),
    }
}

#[derive(Debug)]
struct Service {
    kept: Arc<Kept>,
}

impl Service {
    /// Does what a disk, or a lot of memory, is waited for on a thread of its own: who exchanges
    /// meanwhile must not wait.
    async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Kept) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let kept = Arc::clone(&self.kept);
        let done = tokio::task::spawn_blocking(move || work(&kept)).await;
        done.map_err(|error| Status::unavailable(error.to_string()))?
    }
}

#[tonic::async_trait]
impl Parameters for Service {
    type ExchangeStream = Pin<Box<dyn Stream<Item = Result<Latest, Status>> + Send>>;

    async fn open(&self, request: Request<ModelMessage>) -> Result<Response<OpenReply>, Status> {
        let address = request.remote_addr().map_or(IpAddr::from([0; 4]), |peer| peer.ip());
        let message = request.into_inner();
        let shape = Shape {
            dtype: Dtype::try_from(message.dtype)
                .map_err(|_| Status::invalid_argument("an unknown dtype"))?,
            elements: usize::try_from(message.elements).unwrap_or(usize::MAX),
            workers: message.workers,
        };
        let key =
            message.key.as_slice().try_into().map_err(|_| Status::invalid_argument("a key has 16 bytes"))?;
        let is_served = |wholes: &Vec<Key>| wholes.iter().any(|whole| is_of_part(&key, whole));
        if !self.kept.trainings.as_ref().is_none_or(is_served) {
            return Err(Unserved::Other.into());
        }
        let made = self.aside(move |kept| Ok(kept.store.open(address, key, shape)?)).await?;
        Ok(Response::new(OpenReply { made }))
    }

    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<BeginReply>, Status> {
        self.aside(move |kept| kept.begin(&request.get_ref().key)).await?;
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
            let mut key = Vec::new();
            loop {
                let answer = match tokio::time::timeout(SILENCE, deltas.message()).await {
                    Ok(Ok(None)) => return,
                    Ok(Ok(Some(delta))) => exchanged(&kept.store, &mut key, delta),
                    Ok(Err(status)) => Err(status),
                    Err(_) => Err(Status::deadline_exceeded("no delta came for long")),
                };
                let is_over = answer.is_err();
                // A peer that hung up is told nothing; what was added stays. The same holds for a
                // peer that takes no answer. So it is of who takes no answer.
                let told = tokio::time::timeout(SILENCE, answers.send(answer)).await;
                if !matches!(told, Ok(Ok(()))) || is_over {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answered))))
    }

    async fn leave(&self, request: Request<LeaveRequest>) -> Result<Response<LeaveReply>, Status> {
        self.aside(move |kept| kept.leave(request.get_ref())).await?;
        Ok(Response::new(LeaveReply {}))
    }
}

/// Answers one delta of a stream, which is of one model. Nobody holds the model that is forgotten.
fn exchanged(store: &Store, key: &mut Vec<u8>, delta: Delta) -> Result<Latest, Status> {
    if !delta.key.is_empty() {
        *key = delta.key;
    }
    let (values, added) = store.model(key)?.exchange(delta.worker, delta.step, delta.piece, &delta.values)?;
    Ok(Latest { values: values.into(), added })
}

impl From<Unserved> for Status {
    fn from(unserved: Unserved) -> Self {
        let text = unserved.to_string();
        match unserved {
            Unserved::Unknown => Self::not_found(text),
            Unserved::Taken => Self::already_exists(text),
            Unserved::Other => Self::permission_denied(text),
            Unserved::NoRoom { .. } => Self::resource_exhausted(text),
            Unserved::Malformed(_) => Self::invalid_argument(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::client::{Parameters as Worker, ParametersConfig, Service};

    fn serve(folder: Option<&Path>) -> Server {
        let snapshots = folder.map(Path::to_path_buf);
        Server::start(&ServerConfig { listen: ([127, 0, 0, 1], 0).into(), snapshots, trainings: None })
            .expect("it starts")
    }

    fn alone(server: &Server, key: Key) -> Worker {
        let mut worker = Worker::new(ParametersConfig {
            services: vec![Service::named(server.address().to_string())],
            key,
            worker: 0,
            workers: 1,
            dtype: Dtype::Float32,
            elements: 1,
            patience: Duration::from_secs(20),
        })
        .expect("an address");
        worker.create(&[0; 4]).expect("room");
        worker
    }

    #[test]
    fn who_leaves_during_a_save_holds_nobody_up() {
        let folder = crate::snapshot::tests::folder();
        let server = serve(Some(folder.path()));
        let mut stays = alone(&server, [0; 16]);
        let leaves = [1, 2, 3].map(|number| alone(&server, [number; 16]));
        // As who saves a large model does.
        let saving = server.kept.snapshots();
        let leaving = leaves.map(|worker| std::thread::spawn(move || worker.leave()));
        while server.kept.store.models().len() > 1 {
            std::thread::yield_now();
        }
        let asked = stays.exchange(None);
        drop(saving);
        asked.expect("answered meanwhile");
        for leaves in leaving {
            leaves.join().expect("no panic").expect("left");
        }
    }

    #[test]
    fn a_connection_has_few_calls_and_little_room() {
        let server = serve(None);
        let mut stream = TcpStream::connect(server.address()).expect("it listens");
        // The preface and empty settings (RFC 9113, sections 3.4 and 6.5).
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").expect("sent");
        let mut header = [0; 9];
        stream.read_exact(&mut header).expect("its settings");
        assert_eq!(header[3], 4, "SETTINGS");
        let mut settings = vec![0; usize::from(header[2])];
        stream.read_exact(&mut settings).expect("whole");
        let settings: Vec<(u8, u32)> = settings
            .as_chunks::<6>()
            .0
            .iter()
            .map(|[_, id, value @ ..]| (*id, u32::from_be_bytes(*value)))
            .collect();
        assert!(settings.contains(&(3, CALLS_MAX)) && settings.contains(&(4, WINDOW_BYTES)), "{settings:?}");
    }
}
