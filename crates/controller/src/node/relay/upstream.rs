//! Whom a switch asks: the upstream that it was told, or, while that stays away, the next machine
//! above it that answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fanin_tls::Trust;

use crate::control_channel::{Connection, RETRY, STAYS_AWAY, way_from};
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
    /// The machines above the configured upstream, the next one first, as its answers told.
    way: Vec<SocketAddr>,
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

    /// Who is asked now.
    pub fn name(&self) -> String {
        let state = lock(&self.state);
        state.connection.as_ref().map_or_else(|| self.configured.clone(), |known| known.switch.clone())
    }

    /// Its address. One that does not answer has an address all the same, unless it is a name.
    pub fn address(&self) -> Option<SocketAddr> {
        let state = lock(&self.state);
        state.connection.as_ref().map(|known| known.address).or_else(|| self.configured.parse().ok())
    }

    /// The connection, a new one where there is none, or where nobody has answered for long. Then
    /// the machines above the configured upstream are asked, too, and the nearest one that answers
    /// takes its place.
    pub async fn connection(&self, patience: Duration, protocol: &str) -> Result<Connection, Unanswered> {
        let above = {
            let state = lock(&self.state);
            let stays_away = state.silent.is_some_and(|since| since.elapsed() >= STAYS_AWAY);
            match &state.connection {
                Some(connection) if !stays_away => return Ok(connection.clone()),
                _ if stays_away => state.way.clone(),
                _ => Vec::new(),
            }
        };
        // All at once, and each of several once: whoever asks for this does not wait for long.
        let patience = if above.is_empty() { patience } else { patience.min(RETRY) };
        let attempts: Vec<_> = std::iter::once(self.configured.clone())
            .chain(above.iter().map(SocketAddr::to_string))
            .map(|switch| tokio::spawn(self.clone().open(switch, patience, protocol.to_owned())))
            .collect();
        let mut first = None;
        for attempt in attempts {
            match attempt.await.unwrap_or_else(|error| Err(Unanswered::of(error.to_string(), true))) {
                Ok(connection) => {
                    self.goes_to(&connection);
                    return Ok(connection);
                }
                Err(unanswered) => first = first.or(Some(unanswered)),
            }
        }
        self.is_silent();
        Err(first.expect("the configured one was asked"))
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

    /// Whom one asks above it, as an admission says that came over this connection.
    pub fn learn_way(&self, way: &[String], connection: &Connection) {
        // Of a machine in its place nothing is learnt: the configured one is below it.
        if connection.switch == self.configured {
            lock(&self.state).way = way_from(connection.address, way);
        }
    }

    /// Somebody answered.
    pub fn answered(&self) {
        lock(&self.state).silent = None;
    }

    /// Nobody answered in time.
    pub fn is_silent(&self) {
        lock(&self.state).silent.get_or_insert_with(Instant::now);
    }

    /// The connection broke.
    pub fn broke(&self) {
        let mut state = lock(&self.state);
        state.connection = None;
        state.silent.get_or_insert_with(Instant::now);
    }
}
