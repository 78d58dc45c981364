//! The machine that a switch asks. It is the configured upstream, or the next machine above it that
//! answers, while the upstream stays away.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fanin_tls::Trust;
use tokio::task::JoinHandle;

use crate::control_channel::{Connection, GREETED_WITHIN, STAYS_AWAY, way_from};
use crate::error::SessionError;
use crate::node::lock;

/// The connection of a switch to whom it asks. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Upstream {
    /// As it was told.
    configured: String,
    /// By what whoever is asked is known.
    trust: Trust,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// The connection, while it works.
    connection: Option<Connection>,
    /// Since when nobody answers.
    silent: Option<Instant>,
    /// Whether the machines above it are asked just now.
    looks: bool,
    /// The machines above the configured upstream, the next one first, as its answers told.
    way: Vec<SocketAddr>,
}

/// A question that has no answer yet. If it is given up, whoever was asked is silent.
#[derive(Debug)]
pub(super) struct Asked<'a>(Option<&'a Upstream>);

impl Asked<'_> {
    /// There was an answer, or a failure that says more.
    pub fn ends(mut self) {
        self.0 = None;
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if let Some(upstream) = self.0 {
            upstream.is_silent();
        }
    }
}

/// Why nobody is asked.
#[derive(Debug)]
pub(super) struct Unanswered {
    pub cause: String,
    /// Nobody answers, and somebody may yet.
    pub may_come: bool,
}

impl Unanswered {
    const fn of(cause: String, may_come: bool) -> Self {
        Self { cause, may_come }
    }
}

impl Upstream {
    pub fn new(configured: String, trust: Trust) -> Self {
        Self { configured, trust, state: Arc::default() }
    }

    /// The machine that is asked now.
    pub fn name(&self) -> String {
        let state = lock(&self.state);
        state.connection.as_ref().map_or_else(|| self.configured.clone(), |known| known.switch.clone())
    }

    /// The address of that machine. A configured upstream that does not answer has one all the
    /// same, unless it is a name.
    pub fn address(&self) -> Option<SocketAddr> {
        let state = lock(&self.state);
        state.connection.as_ref().map(|known| known.address).or_else(|| self.configured.parse().ok())
    }

    /// The connection, a new one where there is none.
    ///
    /// If nobody has answered for long, the machines above the configured upstream are asked, too,
    /// whether or not the caller waits. The nearest one that answers takes its place.
    pub async fn connection(&self, patience: Duration, protocol: &str) -> Result<Connection, Unanswered> {
        let above = {
            let mut state = lock(&self.state);
            let stays_away = state.silent.is_some_and(|since| since.elapsed() + GREETED_WITHIN >= STAYS_AWAY);
            let above = if stays_away { state.way.clone() } else { Vec::new() };
            match &state.connection {
                Some(connection) if above.is_empty() || state.looks => return Ok(connection.clone()),
                _ if above.is_empty() => None,
                _ => Some((above, std::mem::replace(&mut state.looks, true))),
            }
        };
        match above {
            None => {
                let opened = self.clone().open(self.configured.clone(), patience, protocol.to_owned()).await;
                opened.inspect(|connection| self.goes_to(connection)).inspect_err(|_| self.is_silent())
            }
            Some((_, true)) => Err(Unanswered::of("nobody on the way has answered yet".into(), true)),
            Some((above, false)) => answer(tokio::spawn(self.clone().look(above, protocol.to_owned()))).await,
        }
    }

    /// Asks the configured upstream and all above it at once.
    async fn look(self, above: Vec<SocketAddr>, protocol: String) -> Result<Connection, Unanswered> {
        let open = |switch| tokio::spawn(self.clone().open(switch, GREETED_WITHIN, protocol.clone()));
        let nearest = open(self.configured.clone());
        let others: Vec<_> = above.iter().map(|address| open(address.to_string())).collect();
        let mut found = answer(nearest).await;
        for other in others {
            if found.is_ok() {
                break;
            }
            // If nobody answers, the configured upstream is named.
            found = answer(other).await.or(found);
        }
        lock(&self.state).looks = false;
        found.inspect(|connection| self.goes_to(connection))
    }

    async fn open(
        self,
        switch: String,
        patience: Duration,
        protocol: String,
    ) -> Result<Connection, Unanswered> {
        let (connection, _) =
            Connection::open(&switch, patience, &self.trust).await.map_err(|error| match error {
                // Its cure is for a worker.
                SessionError::SwitchUnreachable { cause, .. } => Unanswered::of(cause, true),
                error => Unanswered::of(error.to_string(), false),
            })?;
        if connection.protocol != protocol {
            let its = &connection.protocol;
            return Err(Unanswered::of(format!("it serves {its}, and this switch {protocol}"), false));
        }
        Ok(connection)
    }

    fn goes_to(&self, connection: &Connection) {
        let mut state = lock(&self.state);
        let before = state.connection.as_ref().map_or(&self.configured, |known| &known.switch);
        if *before != connection.switch {
            tracing::warn!(upstream = before, by = connection.switch, "the upstream stays away");
        }
        state.connection = Some(connection.clone());
        state.silent = None;
    }

    /// The machines above the one at this connection, as an admission says that came from there.
    pub fn learn_way(&self, way: &[String], connection: &Connection) {
        // A machine that took its place knows fewer of them.
        if connection.switch == self.configured {
            lock(&self.state).way = way_from(connection.address, way);
        }
    }

    /// Somebody answered.
    pub fn answered(&self) {
        lock(&self.state).silent = None;
    }

    /// Somebody is asked, who is silent unless this [`ends`](Asked::ends).
    pub fn asked(&self) -> Asked<'_> {
        Asked(Some(self))
    }

    fn is_silent(&self) {
        lock(&self.state).silent.get_or_insert_with(Instant::now);
    }

    /// The connection broke.
    pub fn broke(&self) {
        let mut state = lock(&self.state);
        state.connection = None;
        state.silent.get_or_insert_with(Instant::now);
    }
}

async fn answer(asked: JoinHandle<Result<Connection, Unanswered>>) -> Result<Connection, Unanswered> {
    asked.await.unwrap_or_else(|error| Err(Unanswered::of(error.to_string(), true)))
}
