//! The task that keeps a session honest as a whole: deadlines, and ranks that left.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_protocol::control::Ranks;
use fanin_tls::Trust;
use fanin_udp::path_mtu;
use fanin_wire::{IP_UDP_BYTES, Rank, packet_bytes};
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};
use tokio::time::timeout;

use super::probe::{by_any_path, cut_off_of, too_long};
use super::shared::Shared;
use super::status::{JobStatusState, SwitchStatus};
use super::warnings::say;
use super::watch::{died, lost};
use crate::control_channel::{Connection, explain, is_gone, with_port};
use crate::error::SessionError;
use crate::error::{Tensor, named};
use crate::path::route;
use crate::proto::StatusRequest;

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long nothing may move before it is asked whether a rank that left is to blame.
const STANDSTILL: Duration = Duration::from_millis(100);
/// How long nothing may move before the rank says for whom it waits, and then after twice as long
/// each time.
const PATIENCE_UNTOLD: Duration = Duration::from_secs(5);
/// How long a switch may take to say whom it waits for.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);
/// How long a service may take to answer, over TCP and over UDP, when it is tried whether anything
/// can get there.
const WAY_PATIENCE: Duration = Duration::from_secs(2);
/// After how long a service is tried again that seemed cut off.
const AGAIN: Duration = Duration::from_secs(2);
/// How often it is looked at what the kernel refuses to send.
const REFUSED: Duration = Duration::from_secs(1);

/// When a session last saw something move.
struct Progress {
    marker: u64,
    since: Instant,
    /// When it is asked next whether a rank that left is to blame.
    blame: Instant,
    /// How long nothing may move before somebody is told.
    untold: Duration,
    /// Looks whether this rank is cut off from a service.
    probing: Option<JoinHandle<Option<CutOff>>>,
    /// What was found so, for the first time, and when it is looked for again.
    cut_off: Option<(CutOff, Instant)>,
}

impl Progress {
    fn now(marker: u64) -> Self {
        let since = Instant::now();
        let blame = since + STANDSTILL;
        Self { marker, since, blame, untold: PATIENCE_UNTOLD, probing: None, cut_off: None }
    }
}

/// A service that a rank may not reach any more.
#[derive(Clone)]
struct Suspect {
    switch: String,
    address: SocketAddr,
    trust: Trust,
    /// The length of the job's packets, and how many paths they take.
    elements: u16,
    paths: u8,
}

/// One that it does not reach, and the cause.
struct CutOff {
    suspect: Suspect,
    cause: String,
}

impl CutOff {
    fn unreachable(self, waited: Duration) -> SessionError {
        let Self { suspect: Suspect { switch, .. }, cause } = self;
        let port = with_port(&switch).map_or(0, |(_, port)| port);
        SessionError::SwitchUnreachable { switch, port, waited, cause }
    }
}

/// What a service says of whom it waits for, when nothing moves here.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Word {
    /// It says nothing.
    Nothing,
    /// It does not answer heartbeats either.
    Silent { since: Duration, cause: String },
    /// It waits for these ranks: for none where it has all that it was sent.
    WaitsFor(Ranks),
}

impl Word {
    fn waits_for(&self) -> Option<&Ranks> {
        match self {
            Self::WaitsFor(ranks) => Some(ranks),
            Self::Nothing | Self::Silent { .. } => None,
        }
    }
}

struct Oversight {
    shared: Arc<Shared>,
    progress: Progress,
    /// Trains that the kernel refused as too long, of which was told, and when it is looked at
    /// next.
    too_long: (u64, Instant),
}

/// Oversees a session until it ends. Runs on the session's own runtime, which is all that may stop
/// it.
pub(super) async fn oversee(shared: Arc<Shared>) {
    let progress = Progress::now(shared.driver.progress_marker());
    let mut oversight = Oversight { shared, progress, too_long: (0, Instant::now()) };
    match oversight.run().await {
        Err(error) => oversight.shared.fail(error),
        // The data path may have been the first to know.
        Ok(()) => oversight.shared.tell_failure(),
    }
}

impl Oversight {
    async fn run(&mut self) -> Result<(), SessionError> {
        loop {
            tokio::time::sleep(TICK).await;
            if self.shared.driver.failure().is_some() {
                return Ok(());
            }
            self.tell_of_packets_too_long();
            // Who is at joining again has a patience of its own, and more to say.
            if self.shared.is_rejoining() {
                self.progress = Progress::now(self.shared.driver.progress_marker());
                continue;
            }
            self.check_deadline().await?;
            self.check_standstill().await?;
        }
    }

    /// Ends the session when the oldest all-reduce took too long, and asks the switch whom to
    /// blame.
    async fn check_deadline(&mut self) -> Result<(), SessionError> {
        let Some(oldest) = self.shared.pending.oldest() else { return Ok(()) };
        let waited = oldest.since.elapsed();
        if waited < self.shared.timeout() {
            return Ok(());
        }
        for (member, lane) in self.shared.members.iter().zip(self.shared.lanes()) {
            if let Some((since, cause)) = &lane.silent {
                return Err(lost(&member.switch, since.elapsed(), cause));
            }
        }
        if let Some((found, _)) = self.progress.cut_off.take() {
            return Err(found.unreachable(waited));
        }
        let words = self.words().await;
        let awaited = awaited(&words);
        let others = awaited.clone().without(&self.own());
        if let (true, Some(service)) = (others.is_empty() && !awaited.is_empty(), self.waits_for_us(&words)) {
            let cause = format!("it lacks what this rank sent of {}", oldest.tensor);
            return Err(CutOff { suspect: self.suspect(service), cause }.unreachable(waited));
        }
        Err(SessionError::AllReduceTimeout {
            missing_ranks: others,
            waited,
            switch: self.shared.switches.clone(),
            tensor: oldest.tensor,
        })
    }

    /// When nothing moves: ends the session if it waits in vain for a rank that left, and says now
    /// and then for whom it waits.
    async fn check_standstill(&mut self) -> Result<(), SessionError> {
        let marker = self.shared.driver.progress_marker();
        let Some(oldest) = self.shared.pending.oldest().filter(|_| marker == self.progress.marker) else {
            self.progress = Progress::now(marker);
            return Ok(());
        };
        let now = Instant::now();
        let stands = now - self.progress.since;
        if stands >= self.progress.untold {
            self.progress.untold *= 2;
            let words = self.words().await;
            self.probe(&words);
            let named: Vec<_> = self.shared.members.iter().map(|member| &*member.switch).zip(words).collect();
            let waiting = Wait { tensor: oldest.tensor, stands, timeout: self.shared.timeout() };
            let name = |ranks: &Ranks| self.shared.config.names.all(ranks);
            for line in still_waiting(&waiting, &named, &self.own(), name) {
                say(self.shared.config.own_name().0, &line);
            }
        }
        self.check_probe(stands).await?;
        let left = self.shared.left();
        if left.is_empty() || now < self.progress.blame {
            return Ok(());
        }
        // A rank that left after it gave all it owed is not to blame: only one that a slot waits
        // for.
        let awaited = awaited(&self.words().await);
        let to_blame: Option<Rank> = awaited.iter().find(|rank| left.contains(*rank));
        self.progress.blame = now + STANDSTILL;
        let Some(rank) = to_blame else { return Ok(()) };
        Err(self.why_left(rank, &left).await)
    }

    /// That a rank left, or the service that died before: ranks that were not admitted there yet
    /// left for that, and so nobody can take over. The services of those who left went with them.
    async fn why_left(&self, rank: Rank, left: &Ranks) -> SessionError {
        let mut asked = JoinSet::new();
        let went = |service| left.iter().any(|rank| self.shared.hosts(rank, service));
        for (service, lane) in self.shared.lanes().enumerate().filter(|(service, _)| !went(*service)) {
            let mut client = lane.connection.client.clone();
            let greeting = StatusRequest { job: Some(String::new()), ..StatusRequest::default() };
            asked.spawn(async move {
                let reply = timeout(STATUS_PATIENCE, client.status(greeting)).await.ok()?;
                reply.err().filter(is_gone).map(|status| (service, explain(&status)))
            });
        }
        while let Some(answer) = asked.join_next().await {
            if let Some((service, cause)) = answer.ok().flatten() {
                let rank = self.shared.config.names.of(rank);
                return died(&self.shared.members[service].switch, &cause, rank);
            }
        }
        SessionError::RankLeft { rank }
    }

    /// This rank, at its services.
    fn own(&self) -> Ranks {
        [self.shared.rank].into_iter().collect()
    }

    /// The first service that waits for this rank.
    fn waits_for_us(&self, words: &[Word]) -> Option<usize> {
        let own = self.shared.rank;
        words.iter().position(|word| word.waits_for().is_some_and(|ranks| ranks.contains(own)))
    }

    fn suspect(&self, service: usize) -> Suspect {
        let lane = self.shared.lane(service);
        let Connection { switch, address, trust, .. } = lane.connection.clone();
        Suspect { switch, address, trust, elements: lane.job.elements(), paths: lane.job.paths() }
    }

    /// A service that waits for this rank although nothing moves here may not get its packets.
    /// Where no service waits for another one, those that wait for nobody may have what this rank
    /// does not get.
    fn probe(&mut self, words: &[Word]) {
        if self.progress.probing.is_some() || self.progress.cut_off.is_some() {
            return;
        }
        let own = self.shared.rank;
        let others = awaited(words).without(&self.own());
        let is_suspect = |ranks: &Ranks| ranks.contains(own) || others.is_empty() && ranks.is_empty();
        let suspects = words.iter().enumerate().filter(|(_, word)| word.waits_for().is_some_and(is_suspect));
        let suspects: Vec<_> = suspects.map(|(service, _)| self.suspect(service)).collect();
        if !suspects.is_empty() {
            self.look_at(suspects);
        }
    }

    /// Looks whether one of these is cut off, the first of them.
    fn look_at(&mut self, suspects: Vec<Suspect>) {
        let security = self.shared.config.agreed.security;
        let look = move || {
            suspects.into_iter().find_map(|suspect| {
                let here = route(suspect.address).map(|route| route.local.to_string()).unwrap_or_default();
                let Suspect { switch, trust, elements, paths, .. } = &suspect;
                let look = || cut_off_of(switch, WAY_PATIENCE, trust, security, Some(*elements));
                let cause = by_any_path(*paths, look)?;
                Some(CutOff { suspect, cause: format!("{cause}, from {here}") })
            })
        };
        self.progress.probing = Some(spawn_blocking(look));
    }

    /// Ends the session when this rank was cut off twice from a service, seconds apart, and nothing
    /// moved in between.
    async fn check_probe(&mut self, stands: Duration) -> Result<(), SessionError> {
        if self.progress.probing.is_none()
            && let Some((found, again)) = &self.progress.cut_off
            && Instant::now() >= *again
        {
            self.look_at(vec![found.suspect.clone()]);
        }
        let Some(probing) = self.progress.probing.take_if(|probing| probing.is_finished()) else {
            return Ok(());
        };
        let found = probing.await.ok().flatten();
        let before = self.progress.cut_off.take();
        let Some(found) = found else { return Ok(()) };
        if before.is_some() {
            return Err(found.unreachable(stands));
        }
        let CutOff { suspect, cause } = &found;
        let text = format!("cut off from switch {} ({cause}); trying once more", suspect.switch);
        say(self.shared.config.own_name().0, &text);
        self.progress.cut_off = Some((found, Instant::now() + AGAIN));
        Ok(())
    }

    /// Says that this machine's kernel refuses the job's packets: once, as the protocols send them
    /// again and again.
    fn tell_of_packets_too_long(&mut self) {
        let (told, next) = self.too_long;
        if told > 0 || Instant::now() < next {
            return;
        }
        let (_, sockets) = self.shared.driver.latest_statistics_of(0);
        self.too_long = (sockets.too_long, Instant::now() + REFUSED);
        if sockets.too_long == 0 {
            return;
        }
        for service in 0..self.shared.members.len() {
            let Suspect { switch, address, elements, .. } = self.suspect(service);
            let extra = self.shared.config.agreed.security.extra_bytes();
            let bytes = packet_bytes(usize::from(elements)) + extra;
            let carried = path_mtu(address).unwrap_or_default();
            if self.shared.members.len() == 1 || carried < bytes + IP_UDP_BYTES {
                let text = format!(
                    "{} on the way to switch {switch}: its MTU is {carried} now, and was more when the job began; set it back",
                    too_long(bytes, address)
                );
                return say(self.shared.config.own_name().0, &text);
            }
        }
    }

    /// What each service says, in their order.
    async fn words(&self) -> Vec<Word> {
        let mut asked = JoinSet::new();
        let mut words = Vec::new();
        for (service, lane) in self.shared.lanes().enumerate() {
            words.push(match &lane.silent {
                Some((since, cause)) => Word::Silent { since: since.elapsed(), cause: cause.clone() },
                None => Word::Nothing,
            });
            let (mut client, id) = (lane.connection.client.clone(), lane.job.id());
            let question = StatusRequest { job: Some(lane.name.clone()), ..StatusRequest::default() };
            asked.spawn(async move {
                let reply = timeout(STATUS_PATIENCE, client.status(question)).await.ok()?.ok()?;
                let status = SwitchStatus::try_from(reply.into_inner()).ok()?;
                status.jobs.into_iter().find_map(|job| match job.state {
                    JobStatusState::Running { job, waiting_for, .. } if job == id => {
                        Some((service, waiting_for.into_iter().map(|(rank, _)| rank).collect::<Ranks>()))
                    }
                    _ => None,
                })
            });
        }
        while let Some(answer) = asked.join_next().await {
            if let Some((service, ranks)) = answer.ok().flatten() {
                words[service] = Word::WaitsFor(ranks);
            }
        }
        words
    }
}

/// The ranks whose contributions some service waits for, as far as the services say.
fn awaited(words: &[Word]) -> Ranks {
    words.iter().filter_map(Word::waits_for).flat_map(Ranks::iter).collect()
}

/// An all-reduce in which nothing moves.
struct Wait {
    tensor: Tensor,
    stands: Duration,
    timeout: Duration,
}

/// What is said while nothing moves: who is waited for, and where. `own` is this rank, which waits
/// for others alone; `name` is what ranks are called.
fn still_waiting(
    wait: &Wait,
    words: &[(&str, Word)],
    own: &Ranks,
    name: impl Fn(&Ranks) -> Ranks,
) -> Vec<String> {
    let Wait { tensor, stands, timeout } = wait;
    let said = |whom: &str, why: &str| {
        let (stands, timeout) = (stands.as_secs(), timeout.as_secs());
        format!("waiting for {whom} in {tensor} for {stands} s; {why} (timeout {timeout} s)")
    };
    let whose = |is_so: &dyn Fn(&Ranks) -> bool| {
        let such = words.iter().filter(|(_, word)| word.waits_for().is_some_and(is_so));
        let such: Vec<&str> = such.map(|(switch, _)| *switch).collect();
        (!such.is_empty()).then(|| format!("switch {}", such.join(",")))
    };
    let mut lines = Vec::new();
    for (switch, word) in words {
        if let Word::Silent { since, cause } = word {
            let why = format!("it has not answered for {} s ({cause})", since.as_secs());
            lines.push(said(&format!("switch {switch}"), &why));
        }
    }
    let awaited: Ranks =
        words.iter().filter_map(|(_, word)| word.waits_for()).flat_map(Ranks::iter).collect();
    let others = awaited.clone().without(own);
    if !others.is_empty() {
        lines.push(said(&named(&name(&others)), "connected but silent: stopped, or busy elsewhere?"));
    } else if let Some(switch) = whose(&|ranks| !ranks.is_empty()) {
        lines.push(said(&switch, "it lacks what this rank sent: trying whether packets get there"));
    } else if let Some(switch) = whose(&Ranks::is_empty) {
        lines.push(said(&switch, "it waits for no rank: trying whether its packets come here"));
    }
    if lines.is_empty() {
        let all: Vec<&str> = words.iter().map(|(switch, _)| *switch).collect();
        lines.push(said(&format!("switch {}", all.join(",")), "it does not say for whom it waits"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use fanin_udp::CollectiveKind;
    use fanin_wire::{Dtype, Op};

    use super::*;

    /// What rank 1 says, with the first words of all of it cut off.
    fn says(words: &[(&str, Word)]) -> Vec<String> {
        let (kind, dtype) = (CollectiveKind::AllReduce, Dtype::Float32);
        let tensor = Tensor { kind, number: 5, elements: 7, dtype, op: Op::Sum };
        let wait = Wait { tensor, stands: Duration::from_secs(5), timeout: Duration::from_secs(30) };
        let lines = still_waiting(&wait, words, &Ranks::from([1]), Ranks::clone);
        lines.iter().map(|line| line.replace(" in sum of 7 float32 (all-reduce 5) for 5 s", "")).collect()
    }

    fn waits_for(ranks: &[u16]) -> Word {
        Word::WaitsFor(ranks.iter().copied().map(Rank).collect())
    }

    #[test]
    fn whatever_is_waited_for_is_named_and_never_the_rank_itself() {
        let silent = || Word::Silent { since: Duration::from_secs(4), cause: "no answer".into() };
        for (words, expected) in [
            (
                vec![("a:1", waits_for(&[0, 1, 2])), ("b:1", waits_for(&[]))],
                "waiting for ranks 0 and 2; connected but silent: stopped, or busy elsewhere? (timeout 30 s)",
            ),
            (
                vec![("a:1", waits_for(&[])), ("b:1", waits_for(&[1]))],
                "waiting for switch b:1; it lacks what this rank sent: trying whether packets get there (timeout 30 s)",
            ),
            (
                vec![("a:1", waits_for(&[])), ("b:1", Word::Nothing)],
                "waiting for switch a:1; it waits for no rank: trying whether its packets come here (timeout 30 s)",
            ),
            (
                vec![("a:1", silent())],
                "waiting for switch a:1; it has not answered for 4 s (no answer) (timeout 30 s)",
            ),
            (
                vec![("a:1", Word::Nothing)],
                "waiting for switch a:1; it does not say for whom it waits (timeout 30 s)",
            ),
        ] {
            assert_eq!(says(&words), [expected]);
        }
        assert_eq!(says(&[("a:1", silent()), ("b:1", waits_for(&[2]))]).len(), 2);
    }
}
