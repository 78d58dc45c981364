//! A worker on real sockets: its job's lanes, a thread and a socket for those of a shard number, or a socket a path.

use crate::failure::invalid;
use crate::io_thread::{HostThreads, Lease, Room};
use crate::mailbox;
use crate::part::{AllReduce, Part, PartTimes};
use crate::ports::Ports;
use crate::socket::{check_shards, connect, open};
use crate::train_socket::{Peer, TrainSocket};
use crate::worker_shard::{Command, Intake, LaneId, LanePart, Resume, Shared, ThreadStatistics, WorkerShard};
use crate::{CollectiveKind, Failure, IoStatistics, Membership, Offload, RawTensor, Submission};
use fanin_plan::{PART_PACKETS_MIN, Placement};
use fanin_protocol::{Lane, Lanes, Machines, RetransmissionConfig, WorkerStatistics};
use fanin_wire::{Participants, Pattern, ShardId, WorkerId};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Told once what became of an all-reduce, and when its parts were on their way (lanes whose part was empty apart). It is
/// usually called by an I/O thread: it must be quick, must not block, and must not panic.
pub type Done = Box<dyn FnOnce(Result<Vec<PartTimes>, Failure>) + Send>;

/// Most elements of one collective on the wire; a longer tensor is reduced in pieces. Half of what the header can say.
const PIECE_ELEMENTS_MAX: usize = 1 << 31;

/// One worker of a job, which is summed by one service or by several.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerConfig {
    /// The services; the same ones in the same order on every worker.
    pub services: Vec<Service>,
    /// When to send again.
    pub retransmission: RetransmissionConfig,
    /// The threads of a service that this process hosts: if it is one of `services`, the lanes live on them.
    pub host: Option<HostThreads>,
}

/// One service of a job: a switch, or whatever else sums as one does.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The job, as this worker was admitted to it there.
    pub job: Membership,
    /// Where it is.
    pub switch: SocketAddr,
    /// Its shards, 1 to [`crate::SHARDS_MAX`].
    pub shards: usize,
    /// Which part of all tensors it sums; what all services have together is the whole.
    pub share: f64,
    /// The worker on whose machine it is, if it is on one's. What is for that one alone, or from it, goes there: the shortest way.
    pub home: Option<WorkerId>,
}

/// A running worker. Dropping it fails what is outstanding, then stops and joins its threads.
///
/// Each shard of each service is a lane. Lanes of the same shard number share a thread and a socket; beside a service of this process,
/// which has fewer threads than others have shards, those of several numbers do.
#[derive(Debug)]
pub struct WorkerDriver {
    shared: Arc<Shared>,
    services: Vec<Service>,
    offload: Offload,
    threads: Mutex<Vec<Lease>>,
    /// What each of them told last.
    latest: Mutex<Vec<Latest>>,
}

/// What a thread told last, and where its next answer comes, if it was asked.
#[derive(Debug, Default)]
struct Latest {
    told: ThreadStatistics,
    asked: Option<Receiver<ThreadStatistics>>,
}

impl Latest {
    /// Takes the answer if it has come, and asks again.
    fn look(&mut self, ask: impl FnOnce() -> Option<Receiver<ThreadStatistics>>) {
        match self.asked.as_ref().map(Receiver::try_recv) {
            Some(Err(TryRecvError::Empty)) => return,
            Some(Ok(told)) => self.told = told,
            // It has ended, or was not asked yet.
            Some(Err(TryRecvError::Disconnected)) | None => {}
        }
        self.asked = ask();
    }
}

impl WorkerDriver {
    /// Opens the sockets and starts the threads.
    ///
    /// # Errors
    /// When a number of `config` is outside its limit, or there is no route to a switch.
    pub fn start(config: WorkerConfig) -> io::Result<Self> {
        Self::start_with_offload(config, Offload::Detect)
    }

    /// As [`Self::start`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_offload(config: WorkerConfig, offload: Offload) -> io::Result<Self> {
        let WorkerConfig { services, retransmission, host } = config;
        check(&services)?;
        let host = host.filter(|host| services.iter().any(|service| service.switch == host.address));
        // `check` let none through of which there is none.
        let job = services[0].job.clone();
        job.launch(services, host.as_ref(), offload, retransmission)
    }

    pub(crate) fn launch<P: Machines<Peer, Part>>(
        services: Vec<Service>,
        host: Option<&HostThreads>,
        offload: Offload,
        retransmission: RetransmissionConfig,
    ) -> io::Result<Self> {
        let other = services.iter().find(|service| service.job.terms::<P::Terms>().is_none());
        if let Some(other) = other {
            let (one, other) = (services[0].job.protocol().title(), other.job.protocol().title());
            return Err(invalid(format!("a job of {one} beside one of {other}: all services sum alike")));
        }
        let most = services.iter().map(|service| service.shards).max().unwrap_or_default();
        // As many cores as the service takes; those that other machines spend on theirs are no reason for more here.
        let count = host.map_or(most, |host| host.count().clamp(1, most));
        let room = |thread| host.and_then(|host| Room::beside(host, thread)).map_or_else(Room::new, Ok);
        let rooms = (0..count).map(room).collect::<io::Result<Vec<_>>>()?;
        let (theirs, mailboxes): (Vec<_>, Vec<_>) = rooms.iter().map(Room::mailbox).unzip();
        let shares: Vec<f64> = services.iter().map(|service| service.share).collect();
        let shared = Arc::new(Shared {
            posts: theirs,
            intake: Mutex::new(Intake { placement: Placement::new(&shares), ended: None }),
            counts: Arc::default(),
            progress: AtomicU64::new(0),
        });
        // Dropped with what runs already, if one cannot be started.
        let latest = (0..count).map(|_| Latest::default()).collect();
        let latest = Mutex::new(latest);
        let driver = Self { shared, services, offload, threads: Mutex::default(), latest };
        for (thread, (room, mailbox)) in rooms.into_iter().zip(mailboxes).enumerate() {
            let theirs = driver.lanes_of(thread);
            let lane = |(service, shard): &(usize, usize)| {
                let (service, shard) = (&driver.services[*service], ShardId(*shard as u8));
                let (peer, job) = (service.switch.into(), service.job.id());
                let machine = P::worker(service.job.terms()?, shard, peer, retransmission);
                Some(Lane { peer, job, shard, machine })
            };
            let lanes: Vec<_> = theirs.iter().filter_map(lane).collect();
            let jobs: Vec<_> =
                theirs.iter().map(|(service, _)| driver.services[*service].job.identity()).collect();
            let services: Vec<usize> = theirs.into_iter().map(|(service, _)| service).collect();
            let peers: Vec<SocketAddr> =
                services.iter().map(|service| driver.services[*service].switch).collect();
            // What is handed over on the thread takes no path.
            let elsewhere = services.iter().map(|service| &driver.services[*service]);
            let elsewhere =
                elsewhere.filter(|service| host.is_none_or(|host| host.address != service.switch));
            let paths = elsewhere.map(|service| service.job.paths()).max().unwrap_or(1);
            let mut ports = driver.ports(&peers, paths)?;
            jobs.into_iter().for_each(|(job, key)| ports.seals.add(job, key));
            let (lanes, shared) = (Lanes::new(lanes), Arc::clone(&driver.shared));
            let shard = WorkerShard::<P> { lanes, services, shared, progress: 0 };
            let lease = room.move_in(shard, ports, mailbox, None, format!("fanin-worker-{thread}"))?;
            driver.threads().push(lease);
        }
        Ok(driver)
    }

    /// A socket for each path to these switches.
    fn ports(&self, switches: &[SocketAddr], paths: u8) -> io::Result<Ports> {
        let paths = usize::from(paths);
        // Connected where it can be: the kernel then drops what others send, and tells of a switch that is gone.
        let socket = |_| {
            let socket =
                if let [switch] = switches { connect(*switch, paths) } else { open(switches, paths) };
            TrainSocket::new(socket?, self.offload)
        };
        let others = (1..paths).map(socket).collect::<io::Result<Vec<_>>>()?;
        Ok(Ports::from(socket(0)?).and(others))
    }

    /// Starts a collective operation over all workers, in place. All workers must submit alike ones in the same order.
    ///
    /// Each service takes a contiguous part of whole packets, as its share says, and each of its shards one of that; a slice goes to its
    /// root's own service, where there is one. `done` is called once, when no thread here can reach the tensors
    /// any more: by the I/O thread that was last to finish, or in this call when the worker has ended. They may
    /// finish in another order than they were submitted in, and the calls for two that finish together may overlap.
    pub fn submit(&self, submission: Submission, done: Done) {
        let kind = submission.kind();
        let all_reduce = AllReduce::new(kind, done, Arc::clone(&self.shared.counts));
        let without = self.services.iter().find(|service| !service.job.has_roots());
        if let (Some(Service { job, .. }), true) = (without, kind != CollectiveKind::AllReduce) {
            let message = format!(
                "this job of {} has no {}: a job of SwitchML without racks has",
                job.protocol().title(),
                kind.name()
            );
            return all_reduce.fail(Failure::Because(Arc::new(invalid(message))));
        }
        let without = self.services.iter().find(|service| !service.job.has_participants());
        if let (Some(Service { job, .. }), true) = (without, submission.participants() != Participants::ALL) {
            let message = format!(
                "in this job of {} all ranks sum; a part of them can by GOAT",
                job.protocol().title()
            );
            return all_reduce.fail(Failure::Because(Arc::new(invalid(message))));
        }
        let mut intake = self.shared.intake();
        if let Some(failure) = intake.ended.clone() {
            drop(intake);
            all_reduce.fail(failure);
            return;
        }
        // A thread hears of all its parts at once: workers that begin with different ones send in different orders.
        let mut threads: Vec<Vec<LanePart>> = (0..self.shared.posts.len()).map(|_| Vec::new()).collect();
        let treated = (submission.layer(), submission.loss_bound(), submission.participants());
        for (tensor, operation) in submission.parts {
            let homes = self.homes(kind, operation.pattern);
            for Cut { service, shard, range, piece } in self.cut(&mut intake.placement, &tensor, &homes) {
                // SAFETY: the ranges are disjoint, and `tensor` itself is not used.
                let part = unsafe { tensor.part(range) };
                let lane = self.number(service, shard);
                let part = Part::new(part, lane, piece, treated, Arc::clone(&all_reduce));
                let LaneId { thread, place } = self.lane(service, shard);
                threads[thread].push(LanePart { place, part, operation });
            }
        }
        // The I/O threads finish it, not this one.
        drop(all_reduce);
        let mut refused = Vec::new();
        for (thread, parts) in threads.into_iter().enumerate().filter(|(_, parts)| !parts.is_empty()) {
            refused.extend(self.shared.posts[thread].send(Command::Submit(parts)).err());
        }
        // Dropping what a lost thread refused may call `done`; not under the lock.
        drop(intake);
        drop(refused);
    }

    /// The services that are on the machine of a slice's root: one for each of its interfaces.
    fn homes(&self, kind: CollectiveKind, pattern: Pattern) -> Vec<usize> {
        let (true, Pattern::Reduce(root) | Pattern::Broadcast(root)) = (kind.is_sliced(), pattern) else {
            return Vec::new();
        };
        (0..self.services.len()).filter(|index| self.services[*index].home == Some(root)).collect()
    }

    /// The packets of a slice that each of its root's services gets, by their shares. A short slice goes to the first.
    fn divided(&self, homes: &[usize], packets: usize) -> Vec<(usize, Range<usize>)> {
        let homes = if packets < homes.len() * PART_PACKETS_MIN { &homes[..1] } else { homes };
        let share = |home: &usize| self.services[*home].share;
        let whole: f64 = homes.iter().map(share).sum();
        let (mut begin, mut before) = (0, 0.0);
        let mut placed = Vec::new();
        for (number, home) in homes.iter().enumerate() {
            before += share(home);
            // The last one has the rest, whatever was rounded.
            let is_last = number + 1 == homes.len();
            let end = if is_last { packets } else { (packets as f64 * before / whole) as usize };
            if begin < end {
                placed.push((*home, begin..end));
            }
            begin = begin.max(end);
        }
        placed
    }

    /// Which elements of `tensor` go where: to the services `homes`, or to all by their shares if there are none.
    fn cut(&self, placement: &mut Placement, tensor: &RawTensor, homes: &[usize]) -> Vec<Cut> {
        let mut cuts = Vec::new();
        for piece in pieces(tensor.elements(), PIECE_ELEMENTS_MAX) {
            let packet = |service: &Service| service.job.packet_elements(tensor.dtype(), piece.len());
            let longest = self.services.iter().map(packet).max().unwrap_or(1);
            let packets = piece.len().div_ceil(longest);
            let placed = match homes {
                [] => placement.place(packets, PART_PACKETS_MIN),
                homes => self.divided(homes, packets),
            };
            for (index, packets) in placed {
                let end = |packets: usize| (piece.start + packets * longest).min(piece.end);
                let range = end(packets.start)..end(packets.end);
                let service = &self.services[index];
                let parts = parts(range, packet(service), service.shards);
                cuts.extend(parts.enumerate().map(|(shard, range)| Cut {
                    service: index,
                    shard,
                    range,
                    piece: piece.len(),
                }));
            }
        }
        cuts
    }

    /// The number of a lane among all.
    fn number(&self, service: usize, shard: usize) -> usize {
        self.services[..service].iter().map(|service| service.shards).sum::<usize>() + shard
    }

    fn lane(&self, service: usize, shard: usize) -> LaneId {
        let threads = self.shared.posts.len();
        let thread = shard % threads;
        let lanes = |service: &Service| service.shards.saturating_sub(thread).div_ceil(threads);
        LaneId { thread, place: self.services[..service].iter().map(lanes).sum::<usize>() + shard / threads }
    }

    /// The lanes of a thread in their order, each as its service and that one's shard.
    fn lanes_of(&self, thread: usize) -> Vec<(usize, usize)> {
        let of_service = |service: usize| {
            (thread..self.services[service].shards)
                .step_by(self.shared.posts.len())
                .map(move |shard| (service, shard))
        };
        (0..self.services.len()).flat_map(of_service).collect()
    }

    /// Stops sending to a service and taking from it, because it is gone; what is outstanding waits. Returns for each of its shards what
    /// the protocol counts ([`WorkerMachine::suspend`]).
    #[must_use]
    pub fn suspend(&self, service: usize) -> Vec<Vec<u32>> {
        let shards = self.services[service].shards;
        let suspend = |shard| {
            let LaneId { thread, place } = self.lane(service, shard);
            self.shared.posts[thread].ask(|reply| Command::Suspend { place, reply }).unwrap_or_default()
        };
        (0..shards).map(suspend).collect()
    }

    /// Goes on under a service with empty memory, handing the sums back to it that the job's terms name.
    /// The job keeps its protocol, chunk length, wire dtype, slots and shards. Where it is the only service its sockets are new: nothing
    /// of the old one is left in them.
    ///
    /// # Errors
    /// When the job does not keep what it must, there is no route to the switch, or the worker has ended or ends
    /// meanwhile.
    pub fn resume(
        &self,
        service: usize,
        job: Membership,
        shards: usize,
        switch: SocketAddr,
    ) -> io::Result<()> {
        job.check()?;
        let Service { job: before, shards: had, .. } = &self.services[service];
        let (was, is) = (before.shape(), job.shape());
        if (before.protocol().name(), &was, *had) != (job.protocol().name(), &is, shards) {
            let message = format!("a job of {was} in {had} shards cannot go on as one of {is} in {shards}");
            return Err(invalid(message));
        }
        if let Some(failure) = self.failure() {
            return Err(io::Error::other(failure));
        }
        for shard in 0..shards {
            let lane = self.lane(service, shard);
            let is_alone = self.lanes_of(lane.thread).len() == 1;
            let ports = is_alone.then(|| self.ports(&[switch], job.paths())).transpose()?;
            let (place, shard, peer) = (lane.place, ShardId(shard as u8), switch.into());
            let job = job.clone();
            let resumed = self.shared.posts[lane.thread]
                .ask(|reply| Command::Resume(Box::new(Resume { place, job, shard, peer, ports, reply })));
            resumed.ok_or_else(|| io::Error::other(Failure::Stopped))?;
        }
        // It may have failed meanwhile; the shards stay as that left them.
        self.failure().map_or(Ok(()), |failure| Err(io::Error::other(failure)))
    }

    /// Ends everything outstanding, and everything that is submitted later, with `failure`. The first failure stays.
    pub fn fail(&self, failure: Failure) {
        self.shared.fail(failure);
    }

    /// What everything that is submitted fails with, if it does.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.intake().ended.clone()
    }

    /// All-reduces whose `done` was not called yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.shared.counts.outstanding.load(Ordering::Acquire)
    }

    /// Packets that brought the job on, so far: while it moves, the job does.
    #[must_use]
    pub fn progress_marker(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    /// By how much the service that is furthest from its share misses it, as a fraction of all packets so far.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        self.shared.intake().placement.imbalance()
    }

    /// Counters over all lanes. `completed` counts all-reduces that came out well; `smoothed_rtt` is the slowest lane's.
    #[must_use]
    pub fn statistics(&self) -> WorkerStatistics {
        let lanes = self.all_statistics().into_iter().flat_map(|(lanes, _)| lanes);
        let completed = self.shared.counts.completed.load(Ordering::Relaxed);
        WorkerStatistics { completed, ..lanes.reduce(add_statistics).unwrap_or_default() }
    }

    /// Collectives other than all-reduces that came out well.
    #[must_use]
    pub fn others_completed(&self) -> u64 {
        self.shared.counts.others_completed.load(Ordering::Relaxed)
    }

    /// Counters of the lanes of one service; `completed` is what the slowest of its shards has finished of the parts that it was given.
    #[must_use]
    pub fn statistics_of(&self, service: usize) -> WorkerStatistics {
        self.of_service(service, &self.all_statistics())
    }

    /// The same, and the counters of all sockets, as the threads told them last. It asks them anew, and waits for no answer: who watches over the
    /// worker must not stand still with it.
    #[must_use]
    pub fn latest_statistics_of(&self, service: usize) -> (WorkerStatistics, IoStatistics) {
        let mut threads = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        for (thread, latest) in threads.iter_mut().enumerate() {
            latest.look(|| self.question(thread));
        }
        let told: Vec<ThreadStatistics> = threads.iter().map(|latest| latest.told.clone()).collect();
        drop(threads);
        (self.of_service(service, &told), sockets(&told))
    }

    /// Of what each thread counted.
    fn of_service(&self, service: usize, threads: &[ThreadStatistics]) -> WorkerStatistics {
        let of_shard = |shard: usize| {
            let LaneId { thread, place } = self.lane(service, shard);
            threads.get(thread)?.0.get(place).copied()
        };
        (0..self.services[service].shards).filter_map(of_shard).reduce(add_statistics).unwrap_or_default()
    }

    /// System calls and what became of them, over all threads.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        sockets(&self.all_statistics())
    }

    /// Whether this is one of its threads. These call `done`, and must not wait for each other.
    #[must_use]
    pub fn is_its_thread(&self) -> bool {
        self.threads().iter().any(Lease::is_current)
    }

    /// Fails what is outstanding and joins the threads: afterwards no tensor is touched and `done` of each was called. Whoever
    /// still asks it things gets no answer.
    pub fn stop(&self) {
        self.shared.fail(Failure::Stopped);
        for post in &self.shared.posts {
            let _ = post.send(Command::Stop);
        }
        let threads = std::mem::take(&mut *self.threads());
        for lease in threads {
            // A `done` that held the last reference to the driver drops it on an I/O thread, which does not await itself.
            lease.wait();
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<Lease>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Of each thread: its lanes', and its socket's. Nothing of one that has ended.
    fn all_statistics(&self) -> Vec<ThreadStatistics> {
        let ask = |thread| self.question(thread).and_then(|answer| answer.recv().ok());
        (0..self.shared.posts.len()).map(|thread| ask(thread).unwrap_or_default()).collect()
    }

    fn question(&self, thread: usize) -> Option<Receiver<ThreadStatistics>> {
        mailbox::question(|reply| self.shared.posts[thread].send(Command::Statistics(reply)))
    }
}

impl Drop for WorkerDriver {
    fn drop(&mut self) {
        self.stop();
    }
}

fn check(services: &[Service]) -> io::Result<()> {
    if services.is_empty() {
        return Err(invalid("a worker without a service: name a switch"));
    }
    for Service { job, shards, share, .. } in services {
        job.check()?;
        check_shards(*shards)?;
        if services.len() > 1 && !job.is_divided() {
            let (shape, count) = (job.shape(), services.len());
            return Err(invalid(format!("a job of {shape} with {count} switches: a worker has one")));
        }
        if !(0.0..=f64::MAX).contains(share) {
            return Err(invalid(format!("a share of {share}: zero or more")));
        }
    }
    if services.iter().all(|service| service.share == 0.0) {
        return Err(invalid("no service has a share: one of them has to sum"));
    }
    Ok(())
}

/// What one lane does of a tensor.
struct Cut {
    service: usize,
    shard: usize,
    /// Elements of the tensor.
    range: Range<usize>,
    /// Elements of the piece that all lanes do together: one collective on the wire.
    piece: usize,
}

/// A tensor in pieces of at most `piece_max` elements, of which there is at least one.
fn pieces(elements: usize, piece_max: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = elements.div_ceil(piece_max).max(1);
    (0..pieces).map(move |piece| piece * piece_max..((piece + 1) * piece_max).min(elements))
}

/// What each of a service's shards does of `range`: whole chunks (all but the last part, whose last chunk may be
/// shorter), if that has [`PART_PACKETS_MIN`]. Every shard gets a part, if only an empty one, so that all of them count collectives alike.
fn parts(range: Range<usize>, chunk: usize, shards: usize) -> impl Iterator<Item = Range<usize>> {
    let chunks = range.len().div_ceil(chunk);
    let used = chunks.div_ceil(PART_PACKETS_MIN).clamp(1, shards);
    let cut = move |shard: usize| (range.start + chunks * shard.min(used) / used * chunk).min(range.end);
    (0..shards).map(move |shard| cut(shard)..cut(shard + 1))
}

fn sockets(threads: &[ThreadStatistics]) -> IoStatistics {
    threads.iter().fold(IoStatistics::default(), |mut sum, (_, thread)| {
        sum += *thread;
        sum
    })
}

fn add_statistics(mut sum: WorkerStatistics, shard: WorkerStatistics) -> WorkerStatistics {
    sum.packets_sent += shard.packets_sent;
    sum.received += shard.received;
    sum.retransmissions += shard.retransmissions;
    sum.marked += shard.marked;
    sum.smoothed_rtt = sum.smoothed_rtt.max(shard.smoothed_rtt);
    sum.completed = sum.completed.min(shard.completed);
    sum.loss += shard.loss;
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_protocol::atp::{Atp, AtpJobConfig, Hashing, Overflow, RankTerms, Scaling};
    use fanin_protocol::switchml::{JobConfig, SwitchMl};
    use fanin_wire::{Directions, Generation, JobId, Key, WireDtype};

    #[test]
    fn a_job_goes_on_as_none_of_another_protocol() {
        let job = Membership::of(&SwitchMl, (job(), WorkerId(0)).into());
        let switch = SocketAddr::from(([127, 0, 0, 1], 4800));
        let services = vec![Service { job, switch, shards: 1, share: 1.0, home: None }];
        let retransmission = RetransmissionConfig::default();
        let driver = WorkerDriver::start(WorkerConfig { services, retransmission, host: None }).unwrap();
        let config = atp_job();
        let other = Membership::of(&Atp, RankTerms { config, directions: Directions::default(), windows: 1 });
        let resumed = driver.resume(0, other, 1, switch);
        assert_eq!(resumed.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn impossible_services_are_refused_with_the_reason() {
        let service = |share, port| Service {
            job: Membership::of(&SwitchMl, (job(), WorkerId(0)).into()),
            switch: SocketAddr::from(([127, 0, 0, 1], port)),
            shards: 1,
            share,
            home: None,
        };
        let refused = |services: Vec<Service>| {
            let retransmission = RetransmissionConfig::default();
            let config = WorkerConfig { services, retransmission, host: None };
            WorkerDriver::start(config).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert!(refused(vec![]).contains("name a switch"));
        assert!(refused(vec![service(0.0, 1), service(0.0, 2)]).contains("has to sum"));
        assert!(refused(vec![service(f64::NAN, 1)]).contains("zero or more"));
        let sixth = Service { switch: "[::1]:4800".parse().unwrap(), ..service(1.0, 1) };
        assert!(refused(vec![service(1.0, 1), sixth]).contains("all by IPv6"));
        assert_eq!(refused(vec![service(1.0, 1), service(0.0, 2)]), "");
    }

    fn atp_job() -> AtpJobConfig {
        AtpJobConfig {
            id: JobId(1),
            key: Key::new(1),
            generation: Generation(1),
            workers: 1,
            elements: 256,
            window_max: 1,
            aggregators: 0,
            hashing: Hashing::Hash,
            scaling: Scaling::Static,
            overflow: Overflow::Reactive,
            congestion_control: true,
            wire_dtype: WireDtype::SharedExponent,
            originals_elements_max: 0,
        }
    }

    fn job() -> JobConfig {
        JobConfig {
            id: JobId(1),
            key: Key::new(1),
            generation: Generation(1),
            workers: 1,
            slots: 1,
            window: 1,
            elements: 256,
            wire_dtype: WireDtype::SharedExponent,
            shard: ShardId(0),
            resumed: true,
        }
    }

    #[test]
    fn a_part_of_a_tensor_is_cut_into_contiguous_parts_of_whole_chunks() {
        let ends = |part: Range<usize>| (part.start, part.end);
        let cut = |range, shards| parts(range, 4, shards).map(ends).collect::<Vec<_>>();
        assert_eq!(cut(0..10, 1), [(0, 10)]);
        assert_eq!(cut(100..233, 2), [(100, 168), (168, 233)]);
        assert_eq!(cut(0..0, 2), [(0, 0), (0, 0)]);
    }

    #[test]
    fn a_very_long_tensor_is_cut_into_pieces() {
        let cut = |elements| pieces(elements, 160).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(cut(0), [(0, 0)]);
        assert_eq!(cut(160), [(0, 160)]);
        assert_eq!(cut(300), [(0, 160), (160, 300)]);
    }

    #[test]
    fn parts_shorter_than_a_train_are_not_made() {
        let lengths = |elements| parts(0..elements, 4, 3).map(|range| range.len()).collect::<Vec<_>>();
        assert_eq!(lengths(3), [3, 0, 0]);
        assert_eq!(lengths(4 * PART_PACKETS_MIN), [128, 0, 0]);
        assert_eq!(lengths(4 * PART_PACKETS_MIN + 1), [64, 65, 0]);
        assert_eq!(lengths(4 * 2 * PART_PACKETS_MIN + 1), [84, 88, 85]);
    }
}
