//! The state, from one set of answers to the next.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use fanin_protocol::control::Ranks;
use fanin_wire::WireDtype;

use super::events::{Events, of_jobs, of_services, refusals, taken_over};
use super::history::{JOBS_MAX, KEPT, OfJob, OfService, Samples};
use super::lately::Lately;
use super::view::{Event, Job, JobState, Plan, Pool, Rank, Service, Share, State, Total, Word};
use super::watch::Answer;
use super::words::{WORDS, losses, words, words_of_services};
use crate::convert::{ranks, security, shown, whole, wire_dtype};
use crate::error::why_aborted;
use crate::proto;
use crate::proto::job::{Member, Running, State as Told};

/// Bytes of a packet beside what UDP carries: of Ethernet with its preamble and gap, IPv4 and UDP.
const HEADERS: u64 = 66;
/// Bytes of an element as it travels in a whole chunk.
const ELEMENT_BYTES: f64 = 4.0;

/// All that is known of services and their jobs.
#[derive(Debug, Default)]
pub(super) struct Observer {
    /// Who observes.
    server: String,
    every: f64,
    round: u64,
    known: BTreeMap<String, Known>,
    services: Vec<Service>,
    jobs: Vec<Job>,
    hidden_jobs: usize,
    words: Vec<Word>,
    lately: BTreeMap<String, Lately>,
    samples: Samples,
    events: Events,
}

/// The page in numbers, by the names that it has for events and words.
#[derive(Debug, Default)]
pub(crate) struct Named {
    /// How often each event has happened.
    pub events: Vec<(&'static str, u64)>,
    /// How many words of each name hold now: each rank that is late is one.
    pub words: Vec<(&'static str, u64)>,
}

/// What a service told last.
#[derive(Debug)]
struct Known {
    at: f64,
    /// In which round it was asked last.
    round: u64,
    reply: proto::StatusReply,
    silent: Option<String>,
    /// What it told the time before, if it is still the same one.
    before: Option<(f64, proto::StatusReply)>,
}

/// A job at one of its services.
#[derive(Clone, Copy)]
struct Part<'a> {
    service: &'a str,
    known: &'a Known,
    job: &'a proto::Job,
}

impl Part<'_> {
    /// Whether a job calls the service so. Behind a rack it calls the rack so.
    fn is_called(&self, service: &str) -> bool {
        let split = running(self.job).and_then(|running| running.split.as_ref());
        let here = split.and_then(|split| split.shares.get(split.here as usize));
        let called = here.filter(|_| self.known.reply.relays.is_empty());
        self.service == service || called.is_some_and(|called| called.service == service)
    }
}

impl Observer {
    pub fn new(server: String) -> Self {
        Self { server, ..Self::default() }
    }

    /// Takes what all services answered up to this time; the next one comes after so many seconds.
    pub fn take(&mut self, now: f64, every: f64, answers: Vec<Answer>) {
        (self.every, self.round) = (every, self.round + 1);
        for Answer { address, ago, reply } in answers {
            self.hear(now - ago.as_secs_f64(), address, reply);
        }
        // Nothing tells of the others any more.
        self.known.retain(|_, known| known.round == self.round);
        let services = self.services();
        let mut jobs = self.jobs(now);
        self.hidden_jobs = jobs.len().saturating_sub(JOBS_MAX);
        jobs.truncate(JOBS_MAX);
        let mut happened = of_services(&self.services, &services, now);
        let all_answer = self.known.values().all(|known| known.silent.is_none());
        happened.extend(of_jobs(&self.jobs, &jobs, all_answer && self.hidden_jobs == 0, now));
        happened.extend(self.known.iter().flat_map(|(address, known)| known.happened(address, now)));
        self.events.extend(happened);
        self.sample(now, &services, &jobs);
        let known = |(job, word): (&str, &Word)| (word.name, job.to_owned(), word.about.clone());
        let before: BTreeSet<_> = self.all_words().map(known).collect();
        self.words = words_of_services(&services);
        (self.services, self.jobs) = (services, jobs);
        for (job, word) in self.all_words().filter(|word| !before.contains(&known(*word))) {
            tracing::debug!(word = word.name, job, "{}", word.text);
        }
        self.lately.retain(|name, _| self.jobs.iter().any(|job| job.name == *name));
    }

    /// Events since it began, and the words that hold now.
    pub fn named(&self) -> Named {
        let count = |name| self.all_words().filter(|(_, word)| word.name == name).count() as u64;
        let words = WORDS.into_iter().map(|name| (name, count(name))).collect();
        Named { events: self.events.counts(), words }
    }

    /// All words, each with its job. Those of services have none.
    fn all_words(&self) -> impl Iterator<Item = (&str, &Word)> {
        let of_jobs = self.jobs.iter().flat_map(|job| job.words.iter().map(|word| (job.name.as_str(), word)));
        self.words.iter().map(|word| ("", word)).chain(of_jobs)
    }

    /// As it is, with the samples after a time.
    pub fn state(&self, now: f64, since: f64) -> State {
        State {
            now,
            version: env!("CARGO_PKG_VERSION"),
            server: self.server.clone(),
            every: self.every,
            kept: KEPT,
            services: self.services.clone(),
            jobs: self.jobs.clone(),
            hidden_jobs: self.hidden_jobs,
            words: self.words.clone(),
            events: self.events.all(),
            history: self.samples.after(since),
        }
    }

    fn hear(&mut self, at: f64, asked: String, reply: Result<proto::StatusReply, String>) {
        let round = self.round;
        let mut reply = match reply {
            Ok(reply) => reply,
            Err(why) => {
                let known = self.known.entry(asked).or_insert_with(|| Known {
                    at,
                    round: 0,
                    reply: proto::StatusReply::default(),
                    silent: None,
                    before: None,
                });
                // It may have answered by another address.
                if known.round < round {
                    (known.round, known.silent) = (round, Some(why));
                }
                return;
            }
        };
        // Switches pass the question on, and a service may have several addresses.
        let root = reply.relays.first().map_or(asked, |relay| shown(relay.upstream.clone()));
        let is_it = |(address, known): &(&String, &mut Known)| {
            let is_same = known.reply.instance == reply.instance && reply.instance != 0;
            known.round == round && known.silent.is_none() && (is_same || **address == root)
        };
        if let Some((_, known)) = self.known.iter_mut().find(is_it) {
            let is_new =
                |relay: &proto::Relay| !known.reply.relays.iter().any(|old| old.address == relay.address);
            let mut others: Vec<_> = reply.relays.drain(..).filter(is_new).collect();
            known.reply.relays.append(&mut others);
            return;
        }
        let before = self.known.remove(&root).map(|known| (known.at, known.reply));
        let before = before.filter(|(_, before)| before.instance == reply.instance);
        self.known.insert(root, Known { at, round, reply, silent: None, before });
    }

    fn services(&self) -> Vec<Service> {
        let mut services: Vec<Service> = Vec::new();
        for (address, known) in &self.known {
            let reply = &known.reply;
            let pool = Pool { units: reply.pool_units, free: reply.pool_free };
            let moved = known.moved(reply.traffic.as_ref(), |before| before.traffic);
            services.push(Service {
                address: address.clone(),
                upstream: None,
                silent: known.silent.clone(),
                protocol: shown(reply.protocol.clone()),
                version: shown(reply.version.clone()),
                shards: reply.shards,
                pool: (pool.units > 0).then_some(pool),
                rate: reply.rate_bps,
                received: moved.map(|moved| moved.received),
                sent: moved.map(|moved| moved.sent),
            });
            for relay in &reply.relays {
                let earlier = |before: &proto::StatusReply| {
                    before.relays.iter().find(|other| other.address == relay.address)?.traffic
                };
                let moved = known.moved(relay.traffic.as_ref(), earlier);
                let address = shown(relay.address.clone());
                if services.iter().any(|service| service.address == address) {
                    continue;
                }
                services.push(Service {
                    address,
                    upstream: Some(shown(relay.upstream.clone())),
                    silent: known.silent.clone(),
                    protocol: shown(reply.protocol.clone()),
                    version: String::new(),
                    shards: relay.shards,
                    pool: None,
                    rate: relay.rate_bps,
                    received: moved.map(|moved| moved.received),
                    sent: moved.map(|moved| moved.sent),
                });
            }
        }
        services
    }

    fn jobs(&mut self, now: f64) -> Vec<Job> {
        let mut parts: BTreeMap<&str, Vec<Part<'_>>> = BTreeMap::new();
        let answering = || self.known.iter().filter(|(_, known)| known.silent.is_none());
        let names: BTreeSet<&str> =
            answering().flat_map(|(_, known)| &known.reply.jobs).map(|job| job.name.as_str()).collect();
        for (service, known) in answering() {
            for job in &known.reply.jobs {
                // A program may name its job like a part.
                let name = Some(whole(&job.name)).filter(|whole| names.contains(whole)).unwrap_or(&job.name);
                parts.entry(name).or_default().push(Part { service, known, job });
            }
        }
        let mut jobs: Vec<Job> =
            parts.iter().map(|(name, parts)| job(name, parts, &mut self.lately, now)).collect();
        for job in &mut jobs {
            job.words = words(job, self.lately.get(&job.name), now);
            let answering = self.known.iter().filter(|(_, known)| known.silent.is_none());
            let resent =
                answering.filter_map(|(address, known)| Some((address.as_str(), known.resent(job)?)));
            job.words.extend(losses(job, resent));
            job.words.sort_by_key(|word| std::cmp::Reverse(word.severity));
        }
        // Those that run come first: a thousand that wait hide none of them.
        jobs.sort_by_key(|job| job.state != JobState::Running);
        jobs
    }

    fn is_known(&self, service: &str) -> bool {
        self.known.get(service).is_some_and(|known| known.silent.is_none())
    }

    fn sample(&mut self, now: f64, services: &[Service], jobs: &[Job]) {
        let of_service = |service: &Service| -> OfService {
            let known = self.known.get(&service.address);
            let moved =
                known.and_then(|known| known.moved(known.reply.traffic.as_ref(), |told| told.traffic));
            let resent = known.and_then(|known| known.a_second(resent_at));
            [service.received, service.sent, resent, moved.map(|moved| moved.dropped)]
        };
        let services: Vec<_> =
            services.iter().map(|service| (service.address.as_str(), of_service(service))).collect();
        let of_job = |job: &Job| -> OfJob {
            let parts = self.known.values().filter(|known| known.silent.is_none());
            let sum = |of: fn(&Running) -> f64| {
                let each = parts.clone().filter_map(|known| known.a_second_of(&job.name, of));
                each.fold(None, |sum: Option<f64>, one| Some(sum.unwrap_or_default() + one))
            };
            let summed =
                sum(|running| running.completed as f64 * ELEMENT_BYTES * f64::from(running.elements));
            let resent = sum(|running| running.retransmitted as f64);
            let lost = sum(|running| running.lost as f64);
            // The plan says what the services do that are not asked.
            let asked: f64 = job
                .shares
                .iter()
                .filter(|share| self.is_known(&share.service))
                .map(|share| share.share)
                .sum();
            let whole = summed.map(|summed| if asked > 0.0 { summed / asked } else { summed });
            [whole, resent, lost, job.steps, job.in_sums]
        };
        let running = jobs.iter().filter(|job| job.state == JobState::Running);
        let jobs: Vec<_> = running.map(|job| (job.name.as_str(), of_job(job))).collect();
        self.samples.take(now, &services, &jobs);
    }
}

fn running(job: &proto::Job) -> Option<&Running> {
    match &job.state {
        Some(Told::Running(running)) => Some(running),
        _ => None,
    }
}

fn resent_at(reply: &proto::StatusReply) -> f64 {
    reply.jobs.iter().filter_map(running).map(|running| running.retransmitted as f64).sum()
}

/// Bits and packets a second.
#[derive(Clone, Copy, Debug)]
struct Moved {
    received: f64,
    sent: f64,
    dropped: f64,
}

impl Known {
    fn seconds(&self) -> Option<(f64, &proto::StatusReply)> {
        let (then, before) = self.before.as_ref()?;
        (self.at > *then && self.silent.is_none()).then_some((self.at - then, before))
    }

    fn moved(
        &self,
        now: Option<&proto::Traffic>,
        before: impl Fn(&proto::StatusReply) -> Option<proto::Traffic>,
    ) -> Option<Moved> {
        let (seconds, told) = self.seconds()?;
        let (now, then) = (now?, before(told)?);
        let a_second = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let bits = |bytes: (u64, u64), packets: (u64, u64)| {
            8.0 * (a_second(bytes.0, bytes.1) + HEADERS as f64 * a_second(packets.0, packets.1))
        };
        Some(Moved {
            received: bits(
                (now.bytes_received, then.bytes_received),
                (now.packets_received, then.packets_received),
            ),
            sent: bits((now.bytes_sent, then.bytes_sent), (now.packets_sent, then.packets_sent)),
            dropped: a_second(now.dropped, then.dropped),
        })
    }

    fn a_second(&self, of: fn(&proto::StatusReply) -> f64) -> Option<f64> {
        let (seconds, before) = self.seconds()?;
        Some((of(&self.reply) - of(before)).max(0.0) / seconds)
    }

    /// Of what this service does for a job, in both answers.
    fn a_second_of(&self, job: &str, of: fn(&Running) -> f64) -> Option<f64> {
        let (seconds, before) = self.seconds()?;
        let is_its = |told: &&proto::Job| {
            let name = shown(told.name.clone());
            name == job || whole(&name) == job
        };
        let here = self.reply.jobs.iter().filter(is_its).filter_map(running);
        let mut rate = None;
        for now in here {
            let then = before.jobs.iter().filter_map(running).find(|then| then.job_id == now.job_id);
            // What began since then began at nothing.
            let gone = of(now) - then.map_or(0.0, of);
            rate = Some(rate.unwrap_or_default() + gone.max(0.0) / seconds);
        }
        rate
    }

    /// The part of a job's packets to this service that came again.
    fn resent(&self, job: &Job) -> Option<f64> {
        let again = self.a_second_of(&job.name, |running| running.retransmitted as f64)?;
        let sums = self.a_second_of(&job.name, |running| running.completed as f64)?;
        let contributions = sums * job.ranks.len().max(1) as f64;
        (contributions > 0.0).then(|| again / contributions)
    }

    /// What a service has done since it told before.
    fn happened(&self, address: &str, now: f64) -> Vec<Event> {
        let Some((_, before)) = self.seconds() else { return Vec::new() };
        let mut events = refusals(address, (before, &self.reply), now);
        let parts =
            self.reply.jobs.iter().filter(|job| whole(&job.name) != job.name && running(job).is_some());
        let new = parts.filter(|job| !before.jobs.iter().any(|known| known.name == job.name));
        events.extend(new.map(|job| taken_over(address, &shown(whole(&job.name).to_owned()), now)));
        events
    }
}

fn job(name: &str, parts: &[Part<'_>], lately: &mut BTreeMap<String, Lately>, now: f64) -> Job {
    let runs = |part: &&Part<'_>| running(part.job).is_some();
    let aborted = |part: &&Part<'_>| matches!(part.job.state, Some(Told::Aborted(_)));
    let first =
        parts.iter().find(runs).or_else(|| parts.iter().find(|part| !aborted(part))).unwrap_or(&parts[0]);
    let mut job = Job {
        name: shown(name.to_owned()),
        world_size: first.job.world_size,
        protocol: shown(first.known.reply.protocol.clone()),
        ..Job::default()
    };
    match &first.job.state {
        Some(Told::Running(told)) => {
            let known = lately.entry(job.name.clone()).or_default();
            known.take(told.job_id, now, &told.members);
            run(&mut job, told, parts, known);
        }
        Some(Told::Aborted(told)) => {
            job.state = JobState::Aborted;
            let reason = told.reason.clone().and_then(|reason| reason.try_into().ok());
            job.reason = Some(reason.map_or_else(|| "for an unknown reason".into(), |why| why_aborted(&why)));
        }
        Some(Told::Gathering(told)) => {
            let present = ranks(&told.present, "present").unwrap_or_default();
            let all = (0..told_ranks(first.job.world_size)).map(fanin_wire::Rank);
            job.missing = all.filter(|rank| !present.contains(*rank)).map(|rank| rank.0).collect();
        }
        None => {}
    }
    job
}

fn told_ranks(world_size: u32) -> u16 {
    world_size.min(fanin_wire::RANKS_MAX) as u16
}

/// What is told of a job that runs.
fn run(job: &mut Job, told: &Running, parts: &[Part<'_>], lately: &Lately) {
    job.state = JobState::Running;
    job.generation = told.generation;
    job.left = ranks(&told.left, "left").unwrap_or_default().iter().map(|rank| rank.0).collect();
    job.wire_dtype = wire_dtype(told.wire_dtype).map_or("", |dtype| dtype.name());
    job.security = security(told.security).map_or("", |security| security.name());
    job.window = u64::from(told.in_flight) * u64::from(told.shards);
    let split = told.split.clone().unwrap_or_default();
    job.shares = shares(&split, parts, &job.name);
    let measured = told.members.iter().filter_map(|member| member.seconds_per_byte);
    let measured = measured.filter(|time| time.is_finite()).min_by(f64::total_cmp);
    let text = |text: String| Some(shown(text)).filter(|text| !text.is_empty());
    job.plan = told.split.is_some().then(|| Plan {
        predicted: split.seconds_per_byte.filter(|time| time.is_finite()),
        // A ring's floats travel as they are.
        ring: split.ring_seconds_per_byte.map(|seconds| seconds * narrower(told.wire_dtype)),
        bound: text(split.bound),
        links: text(split.links),
        measured,
        imbalance: told.members.iter().map(|member| member.imbalance).fold(0.0, f64::max),
    });
    let waits = waits(parts);
    let on_ways = on_ways(parts);
    let rank = |member| Rank { via: way(member, &on_ways), ..rank(member, job, &waits, lately) };
    job.ranks = told.members.iter().map(rank).collect();
    job.sums = lately.sums();
    let works = || told.members.iter().filter_map(|member| member.work.as_ref());
    if let Some(work) = works().find(|work| !work.totals.is_empty()) {
        let total = |total: &proto::work::Total| Total {
            collective: shown(total.collective.clone()),
            dtype: shown(total.dtype.clone()),
            count: total.count,
            bytes: total.bytes,
        };
        job.totals = work.totals.iter().map(total).collect();
        job.sums_per_step = work.period;
    }
    (job.steps, job.in_sums) = pace(told, parts);
}

/// How many times as many bytes floats have in memory as on their way.
fn narrower(dtype: i32) -> f64 {
    match wire_dtype(dtype) {
        Ok(WireDtype::Bfloat16) => 2.0,
        Ok(WireDtype::Int8) => 4.0,
        Ok(WireDtype::Int4) => 8.0,
        _ => 1.0,
    }
}

/// Steps a second, and the part of the time that ranks wait for sums.
fn pace(told: &Running, parts: &[Part<'_>]) -> (Option<f64>, Option<f64>) {
    let (mut steps, mut busy) = (Vec::new(), Vec::new());
    let before = parts.iter().filter_map(|part| part.known.seconds());
    let before = before.flat_map(|(seconds, reply)| reply.jobs.iter().map(move |job| (seconds, job)));
    let earlier = before.filter_map(|(seconds, job)| Some((seconds, running(job)?)));
    let Some((seconds, then)) = earlier.into_iter().find(|(_, then)| then.job_id == told.job_id) else {
        return (None, None);
    };
    for member in &told.members {
        let before = then.members.iter().find(|before| before.rank == member.rank);
        let Some((now, then)) = member.work.as_ref().zip(before.and_then(|before| before.work.as_ref()))
        else {
            continue;
        };
        // Both were told a while before they were asked for. A rank may have told nothing, or nothing
        // between.
        let ago = |work: &proto::Work| work.told_ago_us.map(|ago| ago as f64 * 1e-6);
        let Some((ago_now, ago_then)) = ago(now).zip(ago(then)) else { continue };
        if ago_now >= seconds {
            continue;
        }
        let elapsed = seconds + ago_then - ago_now;
        let count = |work: &proto::Work| work.totals.iter().map(|total| total.count as f64).sum::<f64>();
        if let Some(period) = now.period.filter(|period| *period > 0) {
            steps.push((count(now) - count(then)).max(0.0) / f64::from(period) / elapsed);
        }
        busy.push((now.busy_us.saturating_sub(then.busy_us) as f64 * 1e-6 / elapsed).min(1.0));
    }
    let mean = |of: Vec<f64>| (!of.is_empty()).then(|| of.iter().sum::<f64>() / of.len() as f64);
    (mean(steps), mean(busy))
}

fn shares(split: &proto::Split, parts: &[Part<'_>], job: &str) -> Vec<Share> {
    let summed = |part: &Part<'_>| {
        part.known.a_second_of(job, |running| running.completed as f64 * f64::from(running.elements))
    };
    let part = |service: &str| parts.iter().find(|part| part.is_called(service));
    let all: f64 = parts.iter().filter_map(summed).sum();
    let is_whole = split.shares.iter().all(|share| part(&share.service).and_then(summed).is_some());
    let share = |share: &proto::split::Share| {
        let part = part(&share.service);
        let measured = part.and_then(summed).filter(|_| is_whole && all > 0.0);
        Share {
            // As it is asked, which may be by another address.
            service: part.map_or_else(|| shown(share.service.clone()), |part| part.service.to_owned()),
            share: share.share,
            host: share.host,
            measured: measured.map(|summed| summed / all),
        }
    };
    split.shares.iter().map(share).collect()
}

/// For each rank the part of what is being summed that waits for it and not for all.
fn waits(parts: &[Part<'_>]) -> Vec<f64> {
    let mut waiting: Vec<u32> = Vec::new();
    let mut in_use = 0;
    for told in parts.iter().filter_map(|part| running(part.job)) {
        waiting.resize(waiting.len().max(told.waiting_for.len()), 0);
        waiting.iter_mut().zip(&told.waiting_for).for_each(|(sum, one)| *sum = sum.saturating_add(*one));
        in_use = told.in_use.saturating_add(in_use);
    }
    let least = waiting.iter().min().copied().unwrap_or(0);
    let all = waiting.iter().copied().max().unwrap_or(0).max(in_use).max(1);
    waiting.into_iter().map(|count| f64::from(count - least) / f64::from(all)).collect()
}

/// A switch with an upstream on the way of a job, and the job's ranks that are below it.
struct OnWay<'a> {
    relay: &'a proto::Relay,
    below: Ranks,
}

fn on_ways<'a>(parts: &[Part<'a>]) -> Vec<OnWay<'a>> {
    let mut found = Vec::new();
    for part in parts {
        let id = running(part.job).map(|running| running.job_id);
        for relay in &part.known.reply.relays {
            let of = relay.jobs.iter().find(|of| Some(of.job_id) == id);
            let below = of.and_then(|of| ranks(&of.ranks, "ranks").ok());
            found.extend(below.map(|below| OnWay { relay, below }));
        }
    }
    // From those next to ranks up to those next to the root, which have the most ranks below them.
    found.sort_by_key(|on_way| on_way.below.len());
    found
}

/// The switch with an upstream that is next to a rank, if one is known.
fn way(member: &Member, on_ways: &[OnWay<'_>]) -> Option<String> {
    let rank = fanin_wire::Rank(u16::try_from(member.rank).ok()?);
    let serve = || on_ways.iter().filter(|on_way| on_way.below.contains(rank));
    let least = serve().next()?.below.len();
    // A switch may have no more ranks than the one below it.
    let alike: Vec<_> = serve().take_while(|on_way| on_way.below.len() == least).collect();
    let is_lowest = |one: &&&OnWay<'_>| !alike.iter().any(|other| other.relay.upstream == one.relay.address);
    alike.iter().find(is_lowest).map(|on_way| shown(on_way.relay.address.clone()))
}

fn rank(member: &Member, job: &Job, waits: &[f64], lately: &Lately) -> Rank {
    let place = member.place.clone().unwrap_or_default();
    let rank = u16::try_from(member.rank).unwrap_or(u16::MAX);
    let ranks = if place.ranks.is_empty() { vec![member.rank] } else { place.ranks };
    Rank {
        rank,
        ranks,
        machine: shown(place.machine),
        name: shown(place.name),
        address: shown(place.address),
        via: None,
        left: job.left.contains(&rank),
        round_trip: member.smoothed_rtt_ns.map(|trip| trip as f64 * 1e-9),
        waited_for: waits.get(usize::from(rank)).copied().unwrap_or_default(),
        late: lately.late(rank),
    }
}
