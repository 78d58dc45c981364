//! Services elsewhere: those that were named, and those that their jobs tell of.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::time::Duration;

use fanin_tls::Trust;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::watch::{Answer, Answers};
use crate::control_channel::{Connection, explain};
use crate::proto::{StatusReply, StatusRequest, job};

/// How long a service may take to answer: who looks waits for it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long one may take to say what it is; nobody listens that long where a port is closed.
const GREETED: Duration = Duration::from_secs(1);
/// Services that are found beyond those that were named.
const FOUND_MAX: usize = 256;

/// Asks services over their control connections.
pub(super) struct Remote {
    named: Vec<String>,
    trust: Trust,
    /// All that are asked, with the connections that there are.
    known: Mutex<BTreeMap<String, Option<Connection>>>,
}

impl Remote {
    pub fn new(named: Vec<String>, trust: Trust) -> Self {
        let known = named.iter().map(|address| (address.clone(), None)).collect();
        Self { named, trust, known: Mutex::new(known) }
    }

    async fn ask_all(&self, work: Duration) -> Vec<Answer> {
        let mut known = self.known.lock().await;
        let mut asking = JoinSet::new();
        for (address, connection) in &*known {
            let (address, connection, trust) = (address.clone(), connection.clone(), self.trust.clone());
            asking.spawn(async move {
                let answered = ask(&address, connection, &trust, work).await;
                (address, answered)
            });
        }
        let (mut answers, mut told) = (Vec::new(), BTreeSet::new());
        for (address, answered) in asking.join_all().await {
            let reply = match answered {
                Ok((connection, reply)) => {
                    told.extend(others(&reply));
                    known.insert(address.clone(), Some(connection));
                    Ok(reply)
                }
                Err(why) => {
                    known.insert(address.clone(), None);
                    Err(why)
                }
            };
            answers.push(Answer { address, reply });
        }
        // The service of a rank goes with its job.
        known.retain(|address, _| self.named.contains(address) || told.contains(address));
        for address in told {
            if known.len() < self.named.len() + FOUND_MAX {
                known.entry(address).or_default();
            }
        }
        answers
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

/// The services that the jobs of this one have.
fn others(reply: &StatusReply) -> impl Iterator<Item = String> {
    let running = reply.jobs.iter().filter_map(|job| match &job.state {
        Some(job::State::Running(running)) => running.split.as_ref(),
        _ => None,
    });
    running.flat_map(|split| &split.shares).map(|share| share.service.clone())
}
