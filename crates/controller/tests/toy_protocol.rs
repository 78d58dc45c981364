//! How a protocol moves in (CONTRIBUTING.md): a service that sums integers one packet at a time, on
//! real sockets, admitted by the real control service. It stands outside of the crates, so that all
//! that a protocol uses is public; a protocol of the product has, beside a file like this one, its
//! line in `fanin_controller::protocols::ALL`.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fanin_controller::{Session, SessionConfig, SessionError, SwitchServer, SwitchServerConfig};
use fanin_protocol::control::{
    Gathered, JoinRequest, Limits, Malformed, Memory, Protocol, Refusal, Relayed, Seats, Terms, read,
};
use fanin_protocol::{
    Address, Elements, Endpoint, Instant, JobAborted, JobIdentity, JobProgress, Machines, OwnChoices, Packet,
    Peers, Reason, Received, RetransmissionConfig, Summer, Tensor, TensorTimes, Transmit, Verdict,
    WorkerEvent, WorkerMachine, WorkerStatistics, WorkerTerms,
};
use fanin_udp::{RawTensor, Submission};
use fanin_wire::{
    AbortReason, Dtype, Generation, JobId, Key, Kind, LossBound, Op, Operation, PREAMBLE_BYTES, Preamble,
    Rank, ShardId, WireDtype, WorkerId,
};
use prost::Message;

/// Integers of a packet.
const CHUNK: usize = 256;
/// Tensor and chunk, which follow the preamble.
const HEADER_BYTES: usize = PREAMBLE_BYTES + 8;
const AGAIN: Duration = Duration::from_millis(20);

// 1. What everybody knows of it: its name, its limits, who may join, and what each member is told.

#[derive(Debug)]
struct Toy;

static TOY: Toy = Toy;

/// What a rank is told, and the root.
#[derive(Clone, PartialEq, Message)]
struct Part {
    #[prost(uint32, tag = "1")]
    workers: u32,
}

impl Protocol for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn title(&self) -> &'static str {
        "Toy"
    }

    fn sums(&self, dtype: Dtype) -> bool {
        dtype == Dtype::Int32
    }

    fn limits(&self) -> Limits {
        Limits::new(64, &[CHUNK])
    }

    fn packet_bytes(&self, elements: usize, _: WireDtype) -> usize {
        HEADER_BYTES + 4 * elements
    }

    fn check(&self, request: &JoinRequest) -> Result<(), Refusal> {
        match request.world_size % 2 {
            1 => Ok(()),
            _ => Err(Refusal::Unserved { reason: "a toy is for an odd number of ranks; add one".into() }),
        }
    }

    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
        let terms = Terms {
            in_flight: 1,
            window: 1,
            elements: ranks.elements,
            wire_dtype: WireDtype::Native,
            loss_bound: LossBound::RELIABLE,
            pool_units: 1,
        };
        let part = Part { workers: ranks.world_size().into() }.encode_to_vec();
        let ranks = vec![part.clone(); ranks.requests.len()];
        Ok((terms, Seats { root: part, ranks, ..Seats::default() }))
    }

    fn relayed(&self, _: &[u8], _: &Memory) -> Result<Relayed, String> {
        Err("a toy has no switches on the way".into())
    }
}

#[derive(Clone, Debug, PartialEq)]
struct RankTerms {
    job: JobIdentity,
    rank: Rank,
}

impl WorkerTerms for RankTerms {
    fn identity(&self) -> (JobId, Key, Generation) {
        (self.job.id, self.job.key, self.job.generation)
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn in_flight(&self) -> u16 {
        1
    }

    fn elements(&self) -> u16 {
        CHUNK as u16
    }

    fn packet_elements(&self, _: Dtype, _: usize) -> usize {
        CHUNK
    }

    fn shape(&self) -> String {
        format!("{} workers", self.job.workers)
    }
}

impl<A: Address, T: Tensor + Send + 'static> Machines<A, T> for Toy {
    type Terms = RankTerms;
    type Worker = Worker<A, T>;
    type Root = Server<A>;
    type Relay = Server<A>;

    fn rank_terms(job: JobIdentity, rank: Rank, part: &[u8], _: OwnChoices) -> Result<RankTerms, Malformed> {
        match read::<Part>(part)?.workers == u32::from(job.workers) {
            true => Ok(RankTerms { job, rank }),
            false => Err(Malformed("workers")),
        }
    }

    fn worker(terms: &RankTerms, shard: ShardId, peer: A, _: RetransmissionConfig) -> Worker<A, T> {
        Worker::new(terms.clone(), shard, peer)
    }

    fn plan(terms: &RankTerms, _: ShardId, peer: A) -> (RankTerms, A) {
        (terms.clone(), peer)
    }

    fn root(_: ShardId) -> Server<A> {
        Server {
            jobs: BTreeMap::new(),
            outbox: VecDeque::new(),
            to: Vec::new(),
            received: Received::default(),
        }
    }

    fn root_job(job: JobIdentity, part: &[u8], _: Peers<'_, A>) -> Result<ServerJob, String> {
        Ok(ServerJob { identity: job, workers: read::<Part>(part)?.workers as usize })
    }

    fn relay(_: ShardId, _: &Memory) -> Result<Server<A>, String> {
        Err("a toy has no switches on the way".into())
    }

    fn relay_job(
        _: JobIdentity,
        _: &[u8],
        _: SocketAddr,
        _: &Memory,
        _: Peers<'_, A>,
    ) -> Result<ServerJob, String> {
        Err("a toy has no switches on the way".into())
    }
}

/// A packet of the toy: who sends it, of which tensor and chunk it is, and its integers.
fn written(terms: &RankTerms, shard: ShardId, at: (u32, u32), values: &[i32]) -> Vec<u8> {
    let (job, generation) = (terms.job.id, terms.job.generation);
    let worker = WorkerId(terms.rank.0 as u8);
    let mut bytes = Preamble { kind: Kind::Update, job, generation, worker, shard }.to_bytes().to_vec();
    bytes.extend([at.0, at.1].into_iter().flat_map(u32::to_le_bytes));
    bytes.extend(values.iter().copied().flat_map(i32::to_le_bytes));
    bytes
}

/// A packet's place and integers.
type Parsed = ((u32, u32), Vec<i32>);

fn parsed(packet: &Packet<'_>) -> Result<Parsed, Reason> {
    let words = packet.bytes.get(PREAMBLE_BYTES..).ok_or(Reason::Malformed)?.chunks_exact(4);
    let words: Vec<i32> =
        words.map(|word| i32::from_le_bytes(word.try_into().expect("four bytes"))).collect();
    let [tensor, chunk, values @ ..] = &words[..] else { return Err(Reason::Malformed) };
    Ok(((*tensor as u32, *chunk as u32), values.to_vec()))
}

// 2. The worker: one chunk of one tensor is on its way.

struct Worker<A, T> {
    terms: RankTerms,
    shard: ShardId,
    peer: A,
    tensors: VecDeque<T>,
    /// The first tensor's number, and the chunk of it that is on its way.
    at: (u32, u32),
    began: Instant,
    /// When that is sent, again or for the first time.
    due: Option<Instant>,
    is_suspended: bool,
    events: VecDeque<WorkerEvent<T>>,
    statistics: WorkerStatistics,
}

impl<A, T: Tensor> Worker<A, T> {
    fn new(terms: RankTerms, shard: ShardId, peer: A) -> Self {
        Self {
            terms,
            shard,
            peer,
            tensors: VecDeque::new(),
            at: (0, 0),
            began: Instant(0),
            due: None,
            is_suspended: false,
            events: VecDeque::new(),
            statistics: WorkerStatistics::default(),
        }
    }

    fn chunk(&mut self) -> Option<&mut [i32]> {
        let chunk = self.at.1 as usize * CHUNK;
        match self.tensors.front_mut()?.elements() {
            Elements::Int32(values) => {
                let end = (chunk + CHUNK).min(values.len());
                values.get_mut(chunk..end).filter(|values| !values.is_empty())
            }
            other => panic!("{} is not summed", other.dtype().name()),
        }
    }

    /// Goes on with the next chunk, or the next tensor that has one.
    fn settle(&mut self, now: Instant) {
        while !self.tensors.is_empty() && self.chunk().is_none() {
            let tensor = self.tensors.pop_front().expect("there is one");
            let times = (self.at.1 > 0).then(|| TensorTimes {
                first_sent: self.began,
                first_result: self.began,
                last_result: now,
                loss: Default::default(),
            });
            self.events.push_back(WorkerEvent::Completed(tensor, times));
            self.statistics.completed += 1;
            self.at = (self.at.0 + 1, 0);
        }
        self.due = (!self.tensors.is_empty() && !self.is_suspended).then_some(Instant(0));
    }

    fn take(&mut self, now: Instant, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let (preamble, (at, sums)) = (packet.preamble, parsed(packet)?);
        if (preamble.job, preamble.generation) != (self.terms.job.id, self.terms.job.generation) {
            return Err(Reason::UnknownJob);
        }
        let is_awaited = at == self.at && !self.is_suspended;
        let own = self.chunk().filter(|own| is_awaited && own.len() == sums.len()).ok_or(Reason::Stale)?;
        own.copy_from_slice(&sums);
        if self.at.1 == 0 {
            self.began = now;
        }
        self.at.1 += 1;
        self.settle(now);
        Ok(Verdict::Absorb)
    }
}

impl<A: Copy, T: Tensor> Endpoint for Worker<A, T> {
    type Address = A;
    type Event = WorkerEvent<T>;

    fn receive(&mut self, now: Instant, _: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.take(now, packet)
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.statistics.received.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.due = self.due.map(|due| due.min(now));
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.due.filter(|due| *due <= now)?;
        self.due = Some(now + AGAIN);
        let (terms, shard, at) = (self.terms.clone(), self.shard, self.at);
        let packet = written(&terms, shard, at, self.chunk()?);
        train[..packet.len()].copy_from_slice(&packet);
        self.statistics.packets_sent += 1;
        let to = std::slice::from_ref(&self.peer);
        Some(Transmit { to, bytes: packet.len(), segment_bytes: packet.len() })
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.events.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }
}

impl<A: Address, T: Tensor + Send + 'static> WorkerMachine for Worker<A, T> {
    type Tensor = T;
    type Plan = (RankTerms, A);

    fn submit(&mut self, tensor: T, _: impl Into<Operation>) {
        self.tensors.push_back(tensor);
        if self.tensors.len() == 1 {
            self.settle(Instant(0));
        }
    }

    fn suspend(&mut self) -> Vec<u32> {
        (self.is_suspended, self.due) = (true, None);
        Vec::new()
    }

    fn resume(&mut self, now: Instant, (terms, peer): (RankTerms, A)) {
        (self.terms, self.peer, self.is_suspended) = (terms, peer, false);
        self.settle(now);
    }

    fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.due = None;
        std::mem::take(&mut self.tensors).into_iter()
    }

    fn generation(&self) -> Generation {
        self.terms.job.generation
    }

    fn outstanding(&self) -> usize {
        self.tensors.len()
    }

    fn statistics(&self) -> WorkerStatistics {
        self.statistics
    }

    fn progress(&self) -> u64 {
        u64::from(self.at.0) << 32 | u64::from(self.at.1)
    }
}

// 3. The service: it keeps each sum, for whoever did not hear it.

struct Server<A> {
    jobs: BTreeMap<JobId, Job<A>>,
    outbox: VecDeque<(Vec<A>, Vec<u8>)>,
    to: Vec<A>,
    received: Received,
}

struct Job<A> {
    told: ServerJob,
    /// Whom sums are for, by rank.
    peers: BTreeMap<u8, A>,
    /// Who is in each sum, and the sum.
    sums: BTreeMap<(u32, u32), (u64, Vec<i32>)>,
}

#[derive(Clone, Debug)]
struct ServerJob {
    identity: JobIdentity,
    workers: usize,
}

#[derive(Clone, Copy, Debug)]
struct Never;

impl std::fmt::Display for Never {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("there is always room for a toy")
    }
}

impl std::error::Error for Never {}

impl<A: Copy> Server<A> {
    fn take(&mut self, from: A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let (preamble, (at, values)) = (packet.preamble, parsed(packet)?);
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        job.peers.insert(preamble.worker.0, from);
        let (present, sum) = job.sums.entry(at).or_insert_with(|| (0, vec![0; values.len()]));
        let bit = 1 << preamble.worker.0;
        let is_new = *present & bit == 0 && sum.len() == values.len();
        if is_new {
            *present |= bit;
            sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum = sum.wrapping_add(*value));
        }
        if present.count_ones() as usize != job.told.workers {
            return if is_new { Ok(Verdict::Absorb) } else { Err(Reason::Duplicate) };
        }
        let terms = RankTerms { job: job.told.identity, rank: Rank(0) };
        let answer = written(&terms, preamble.shard, at, sum);
        let (to, verdict) = match is_new {
            true => (job.peers.values().copied().collect(), Verdict::Multicast),
            false => (vec![from], Verdict::ReplyUnicast),
        };
        self.outbox.push_back((to, answer));
        Ok(verdict)
    }
}

impl<A: Copy> Endpoint for Server<A> {
    type Address = A;
    type Event = JobAborted;

    fn receive(&mut self, _: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.take(*from, packet)
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.received.count(verdict)
    }

    fn handle_timeout(&mut self, _: Instant) {}

    fn poll_transmit(&mut self, _: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let (to, written) = self.outbox.pop_front()?;
        self.to = to;
        train[..written.len()].copy_from_slice(&written);
        Some(Transmit { to: &self.to, bytes: written.len(), segment_bytes: written.len() })
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        None
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}

impl<A: Copy> Summer for Server<A> {
    type Job = ServerJob;
    type Error = Never;

    fn identity(job: &ServerJob) -> (JobId, Key) {
        (job.identity.id, job.identity.key)
    }

    fn add_job(&mut self, job: ServerJob) -> Result<(), Never> {
        let (peers, sums) = (BTreeMap::new(), BTreeMap::new());
        self.jobs.insert(job.identity.id, Job { told: job, peers, sums });
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    fn abort_job(&mut self, job: JobId, _: AbortReason) {
        self.jobs.remove(&job);
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs
            .get(&job)
            .map(|job| JobProgress { completed: job.sums.len() as u64, ..JobProgress::default() })
    }

    fn received(&self) -> Received {
        self.received
    }
}

// 4. It works.

fn service() -> SwitchServer {
    let config = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
    SwitchServer::start(SwitchServerConfig { protocol: &TOY, ..config }).expect("a free port")
}

fn connect(service: &SwitchServer, rank: u32, world_size: u32) -> Result<Session, SessionError> {
    let config = SessionConfig::new(service.address().to_string(), "job", rank, world_size);
    Session::connect(SessionConfig { protocol: &TOY, ..config })
}

fn submit(session: &Session, tensor: &mut [i32]) -> mpsc::Receiver<()> {
    let (done, finished) = mpsc::channel();
    // SAFETY: the test waits for `finished` before it touches or drops the tensor.
    let tensor =
        unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Int32) }.expect("aligned");
    let submitted = session.submit(Submission::all_reduce(tensor, Op::Sum), move |outcome, _| {
        outcome.expect("a sum");
        let _ = done.send(());
    });
    submitted.expect("it runs");
    finished
}

#[test]
fn a_fifth_protocol_sums_exactly_over_real_sockets() {
    let service = service();
    let ranks = 3;
    thread::scope(|scope| {
        for rank in 0..ranks {
            let service = &service;
            scope.spawn(move || {
                let session = connect(service, rank, ranks).expect("admitted");
                for length in [1, 255, 256, 257, 10_000] {
                    let mut tensor: Vec<i32> = (0..length).map(|i| i * 7 + rank as i32).collect();
                    let finished = submit(&session, &mut tensor);
                    finished.recv_timeout(Duration::from_secs(60)).expect("in time");
                    assert!((0..length).zip(&tensor).all(|(i, sum)| *sum == 21 * i + 3), "{length} elements");
                }
            });
        }
    });
}

#[test]
fn it_is_refused_with_its_own_reason_and_where_it_is_not_served() {
    let service = service();
    let refused = connect(&service, 0, 2).expect_err("an even number").to_string();
    assert!(refused.contains("a toy is for an odd number of ranks; add one"), "{refused}");
    let usual =
        SwitchServer::start(SwitchServerConfig::new(([127, 0, 0, 1], 0).into())).expect("a free port");
    let refused = connect(&usual, 0, 1).expect_err("not served").to_string();
    assert!(
        refused.contains("asks for protocol \"toy\"") && refused.contains("serves switchml or dlcp"),
        "{refused}"
    );
}
