//! The switch on real sockets: one thread a shard, all on one UDP port.

use crate::io_loop::{self, Shard};
use crate::mailbox::{Post, mailbox};
use crate::socket::{bind, receive_buffer_bytes};
use crate::train_socket::{Peer, TrainSocket};
use crate::{IoStatistics, Offload};
use fanin_protocol::switchml::{JobConfig, JobProgress, Switch, SwitchEvent, SwitchStatistics};
use fanin_wire::{AbortReason, JobId, ShardId};
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Where a switch listens, and on how many cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Address and UDP port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Shards, 1 to [`crate::SHARDS_MAX`]: each a thread with a socket and slots of its own.
    pub shards: usize,
}

/// A running switch. Dropping it stops and joins its threads; its workers are not told (see [`Self::abort_job`]).
#[derive(Debug)]
pub struct SwitchDriver {
    address: SocketAddr,
    receive_buffer_bytes: usize,
    posts: Vec<Post<Command>>,
    threads: Vec<JoinHandle<()>>,
    events: Mutex<Option<Receiver<(JobId, AbortReason)>>>,
}

enum Command {
    AddJob(JobConfig, SyncSender<()>),
    RemoveJob(JobId, SyncSender<()>),
    AbortJob(JobId, AbortReason, SyncSender<()>),
    Progress(JobId, SyncSender<Option<JobProgress>>),
    Statistics(SyncSender<(SwitchStatistics, IoStatistics)>),
    Stop,
}

impl SwitchDriver {
    /// Binds the sockets and starts the threads. The switch serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound, another switch has it, or the kernel cannot steer packets to several shards.
    pub fn bind(config: SwitchConfig) -> io::Result<Self> {
        Self::bind_with_offload(config, Offload::Detect)
    }

    /// As [`Self::bind`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_with_offload(config: SwitchConfig, offload: Offload) -> io::Result<Self> {
        let (sockets, address) = bind(config.listen, config.shards)?;
        let granted = sockets.iter().map(receive_buffer_bytes).collect::<io::Result<Vec<_>>>()?;
        let (events, receiver) = mpsc::channel();
        let mut driver = Self {
            address,
            receive_buffer_bytes: granted.into_iter().min().unwrap_or(0),
            posts: Vec::with_capacity(config.shards),
            threads: Vec::with_capacity(config.shards),
            events: Mutex::new(Some(receiver)),
        };
        for (index, socket) in (0u8..).zip(sockets) {
            let socket = TrainSocket::new(socket, offload)?;
            let (post, mailbox) = mailbox()?;
            let shard = SwitchShard { machine: Switch::new(ShardId(index)), events: events.clone() };
            driver.posts.push(post);
            driver.threads.push(
                thread::Builder::new()
                    .name(format!("fanin-switch-{index}"))
                    .spawn(move || io_loop::run(shard, socket, &mailbox))?,
            );
        }
        Ok(driver)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Number of shards.
    #[must_use]
    pub const fn shards(&self) -> usize {
        self.posts.len()
    }

    /// Receive buffer that the kernel granted each shard, in bytes. All workers' windows of a shard must fit.
    #[must_use]
    pub const fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// Takes a job in, in every shard; `config.shard` is ignored. When this returns its packets are answered. A job of the
    /// same id is forgotten.
    ///
    /// # Errors
    /// When a number of `config` is outside its limit, or the switch has stopped.
    pub fn add_job(&self, config: JobConfig) -> io::Result<()> {
        let config = config.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        for (index, post) in (0u8..).zip(&self.posts) {
            post.ask(|reply| Command::AddJob(JobConfig { shard: ShardId(index), ..config }, reply))
                .ok_or_else(|| io::Error::other("the switch has stopped"))?;
        }
        Ok(())
    }

    /// Forgets a job, in every shard. When this returns its packets are unknown.
    pub fn remove_job(&self, job: JobId) {
        for post in &self.posts {
            let _ = post.ask(|reply| Command::RemoveJob(job, reply));
        }
    }

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    pub fn abort_job(&self, job: JobId, reason: AbortReason) {
        for post in &self.posts {
            let _ = post.ask(|reply| Command::AbortJob(job, reason, reply));
        }
    }

    /// How far a job is, over all shards; `None` when there is no such job.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<JobProgress> {
        self.posts
            .iter()
            .filter_map(|post| post.ask(|reply| Command::Progress(job, reply)).flatten())
            .reduce(add_progress)
    }

    /// Packets by verdict, over all shards.
    #[must_use]
    pub fn statistics(&self) -> SwitchStatistics {
        self.all_statistics().fold(SwitchStatistics::default(), |sum, (shard, _)| add_statistics(sum, shard))
    }

    /// System calls and what became of them, over all shards.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.all_statistics().fold(IoStatistics::default(), |mut sum, (_, shard)| {
            sum += shard;
            sum
        })
    }

    /// Jobs that the data path ended, and why: in the shard that found out. The first call takes the receiver.
    #[must_use]
    pub fn events(&self) -> Option<Receiver<(JobId, AbortReason)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Stops and joins the threads, and frees the port.
    pub fn shutdown(self) {
        drop(self);
    }

    fn all_statistics(&self) -> impl Iterator<Item = (SwitchStatistics, IoStatistics)> {
        self.posts.iter().filter_map(|post| post.ask(Command::Statistics))
    }
}

impl Drop for SwitchDriver {
    fn drop(&mut self) {
        for post in &self.posts {
            let _ = post.send(Command::Stop);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

fn add_progress(mut sum: JobProgress, shard: JobProgress) -> JobProgress {
    sum.slots_in_use += shard.slots_in_use;
    for (sum, shard) in sum.waiting_for.iter_mut().zip(shard.waiting_for) {
        *sum += shard;
    }
    sum.completed += shard.completed;
    sum.retransmitted += shard.retransmitted;
    for (sum, shard) in sum.lateness.iter_mut().zip(shard.lateness) {
        *sum += shard;
    }
    sum
}

fn add_statistics(mut sum: SwitchStatistics, shard: SwitchStatistics) -> SwitchStatistics {
    sum.packets_received += shard.packets_received;
    sum.absorb += shard.absorb;
    sum.multicast += shard.multicast;
    sum.reply_unicast += shard.reply_unicast;
    for (sum, shard) in sum.dropped.iter_mut().zip(shard.dropped) {
        *sum += shard;
    }
    sum
}

struct SwitchShard {
    machine: Switch<Peer>,
    events: Sender<(JobId, AbortReason)>,
}

impl Shard for SwitchShard {
    type Machine = Switch<Peer>;
    type Command = Command;

    fn machine(&mut self) -> &mut Switch<Peer> {
        &mut self.machine
    }

    /// A reply fails when nobody waits for it any more; that is no concern of ours.
    fn command(&mut self, command: Command, socket: &mut TrainSocket) -> ControlFlow<()> {
        match command {
            Command::AddJob(config, reply) => {
                self.machine.add_job(config);
                let _ = reply.send(());
            }
            Command::RemoveJob(job, reply) => {
                self.machine.remove_job(job);
                let _ = reply.send(());
            }
            Command::AbortJob(job, reason, reply) => {
                self.machine.abort_job(job, reason);
                let _ = reply.send(());
            }
            Command::Progress(job, reply) => {
                let _ = reply.send(self.machine.progress(job));
            }
            Command::Statistics(reply) => {
                let _ = reply.send((self.machine.statistics(), socket.statistics));
            }
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn event(&mut self, event: SwitchEvent) {
        let SwitchEvent::Aborted { job, reason } = event;
        // Nobody need listen.
        let _ = self.events.send((job, reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn progress_is_summed_over_the_shards() {
        let shard = |number: u32| {
            let mut shard = JobProgress {
                slots_in_use: number,
                waiting_for: [0; 64],
                completed: 10 * u64::from(number),
                retransmitted: 100 * u64::from(number),
                lateness: [Duration::ZERO; 64],
            };
            shard.waiting_for[63] = number;
            shard.lateness[2] = Duration::from_nanos(number.into());
            shard
        };
        assert_eq!(add_progress(shard(3), shard(4)), shard(7));
    }
}
