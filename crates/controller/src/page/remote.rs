//! Services elsewhere: those that were named, and those that their jobs tell of.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::time::{Duration, Instant};

use fanin_tls::Trust;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::watch::{Answer, Answers};
use crate::control_channel::{Connection, explain};
use crate::convert::whole;
use crate::proto::{StatusReply, StatusRequest, job};

/// How long a service may take to answer: who looks waits for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one may take to say what it is; nobody listens that long where a port is closed.
const GREETED: Duration = Duration::from_secs(1);
/// Services that are found beyond those that were named.
const FOUND_MAX: usize = 64;

/// Asks services over their control connections.
pub(super) struct Remote {
    named: Vec<String>,
    /// Whether those are asked, too, that the jobs of the named ones tell of.
    finds: bool,
    trust: Trust,
    known: Mutex<BTreeMap<String, Asked>>,
}

/// A service that is asked.
#[derive(Clone, Default)]
struct Asked {
    connection: Option<Connection>,
    /// The jobs that led to it: it is believed what it says of them. None for one that was named.
    jobs: Option<BTreeSet<String>>,
}

impl Remote {
    pub fn new(named: Vec<String>, finds: bool, trust: Trust) -> Self {
        let known = named.iter().map(|address| (address.clone(), Asked::default())).collect();
        Self { named, finds, trust, known: Mutex::new(known) }
    }

    async fn ask_all(&self, work: Duration) -> Vec<Answer> {
        let mut known = self.known.lock().await;
        let mut asking = JoinSet::new();
        for (address, asked) in &*known {
            let (address, asked, trust) = (address.clone(), asked.clone(), self.trust.clone());
            asking.spawn(async move {
                let answered = ask(&address, asked.connection.clone(), &trust, work).await;
                (address, asked.jobs, answered, Instant::now())
            });
        }
        let (mut answers, mut told) = (Vec::new(), BTreeMap::<String, BTreeSet<String>>::new());
        for (address, jobs, answered, at) in asking.join_all().await {
            let (connection, reply) = answered.map_or_else(
                |why| (None, Err(why)),
                |(connection, reply)| (Some(connection), Ok(of_jobs(reply, jobs.as_ref()))),
            );
            if let (Ok(reply), true) = (&reply, self.finds && jobs.is_none()) {
                for (service, job) in others(reply) {
                    told.entry(service).or_default().insert(job);
                }
            }
            known.insert(address.clone(), Asked { connection, jobs });
            answers.push((address, at, reply));
        }
        // The service of a rank goes with its job.
        known.retain(|address, _| self.named.contains(address) || told.contains_key(address));
        for (address, jobs) in told {
            if known.len() < self.named.len() + FOUND_MAX || known.contains_key(&address) {
                let asked = known
                    .entry(address)
                    .or_insert_with(|| Asked { connection: None, jobs: Some(jobs.clone()) });
                asked.jobs = asked.jobs.take().map(|_| jobs);
            }
        }
        // A service is called as it was named, if it has other addresses as well.
        answers.sort_by_key(|(address, ..)| (!self.named.contains(address), address.clone()));
        answers.into_iter().map(|(address, at, reply)| Answer { address, ago: at.elapsed(), reply }).collect()
    }
}

impl Answers for Remote {
    fn ask(&self, work: Duration) -> Pin<Box<dyn Future<Output = Vec<Answer>> + Send + '_>> {
        Box::pin(self.ask_all(work))
    }
}

async fn ask(
    address: &str,
    connection: Option<Connection>,
    trust: &Trust,
    work: Duration,
) -> Result<(Connection, StatusReply), String> {
    let connected = async {
        match connection {
            Some(connection) => Ok(connection),
            None => {
                let opened = Connection::open(address, GREETED, trust).await;
                opened.map(|(connection, _)| connection).map_err(|error| error.to_string())
            }
        }
    };
    let asked = async {
        let mut connection = connected.await?;
        let work_ms = u32::try_from(work.as_millis()).unwrap_or(u32::MAX);
        let question = StatusRequest { work_ms, ..StatusRequest::default() };
        let reply = connection.client.status(question).await.map_err(|status| explain(&status))?;
        Ok((connection, reply.into_inner()))
    };
    let late = || format!("no answer within {} s", PATIENCE.as_secs());
    timeout(PATIENCE, asked).await.unwrap_or_else(|_| Err(late()))
}

/// What a service that was found says of the jobs that led to it.
fn of_jobs(mut reply: StatusReply, jobs: Option<&BTreeSet<String>>) -> StatusReply {
    if let Some(jobs) = jobs {
        let is_its = |name: &String| jobs.contains(name) || jobs.contains(whole(name));
        reply.jobs.retain(|job| is_its(&job.name));
        reply.relays.clear();
    }
    reply
}

/// The services that the jobs of this one have, each with the job.
fn others(reply: &StatusReply) -> impl Iterator<Item = (String, String)> {
    reply.jobs.iter().flat_map(|job| {
        let split = match &job.state {
            Some(job::State::Running(running)) => running.split.as_ref(),
            _ => None,
        };
        let shares = split.map(|split| split.shares.as_slice()).unwrap_or_default();
        shares.iter().map(|share| (share.service.clone(), job.name.clone()))
    })
}
