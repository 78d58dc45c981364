//! What happened between two states.

use std::collections::VecDeque;

use super::view::{Event, Job, JobState, Service, Severity};
use super::words::called;
use crate::proto;

/// Events that are kept.
const EVENTS_MAX: usize = 500;
/// Ranks that are named in one event.
const NAMED: usize = 8;

/// All that there are: in logs, metrics and on the page.
pub(super) const NAMES: [&str; 11] = [
    "rank_joined",
    "job_started",
    "rank_left",
    "job_aborted",
    "job_ended",
    "job_set_up_again",
    "planned_again",
    "taken_over",
    "service_silent",
    "service_back",
    "refused",
];

#[derive(Debug, Default)]
pub(super) struct Events {
    last: VecDeque<Event>,
    /// By name, all that ever were.
    counts: [u64; NAMES.len()],
}

impl Events {
    pub fn extend(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            let Event { name, job, service, text, .. } = &event;
            let (job, service) = (job.as_deref().unwrap_or(""), service.as_deref().unwrap_or(""));
            tracing::debug!(event = name, job, service, "{text}");
            debug_assert!(NAMES.contains(name), "{name} is not in the list");
            for (_, count) in NAMES.iter().zip(&mut self.counts).filter(|(known, _)| *known == name) {
                *count += 1;
            }
            self.last.push_back(event);
        }
        self.last.drain(..self.last.len().saturating_sub(EVENTS_MAX));
    }

    pub fn all(&self) -> Vec<Event> {
        self.last.iter().cloned().collect()
    }

    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        NAMES.into_iter().zip(self.counts).collect()
    }
}

/// Services that came, fell silent or are back.
pub(super) fn of_services(before: &[Service], now: &[Service], at: f64) -> Vec<Event> {
    let mut events = Vec::new();
    for service in now {
        let known = before.iter().find(|known| known.address == service.address);
        let mut say = |name, severity, text: String| {
            let service = Some(service.address.clone());
            events.push(Event { at, name, severity, job: None, service, text });
        };
        match (known.map(|known| &known.silent), &service.silent) {
            (None | Some(None), Some(why)) => {
                say(
                    "service_silent",
                    Severity::Warning,
                    format!("{} does not answer: {why}", service.address),
                );
            }
            (Some(Some(_)), None) => {
                say("service_back", Severity::Note, format!("{} answers again", service.address));
            }
            _ => {}
        }
    }
    events
}

/// Joins that a service refused, and calls of strangers.
pub(super) fn refusals(
    address: &str,
    (before, now): (&proto::StatusReply, &proto::StatusReply),
    at: f64,
) -> Vec<Event> {
    let event = |count: u64, text: String| {
        let service = Some(address.to_owned());
        let severity = Severity::Warning;
        (count > 0).then_some(Event { at, name: "refused", severity, job: None, service, text })
    };
    let refused = now.refused.saturating_sub(before.refused);
    let denied = now.denied.saturating_sub(before.denied);
    let joins = if refused == 1 { "a request to join" } else { "requests to join" };
    let calls = if denied == 1 { "a call" } else { "calls" };
    [
        event(refused, format!("{address} refused {}{joins}", number(refused))),
        event(
            denied,
            format!("{address} refused {}{calls} in a rank's name without its secret", number(denied)),
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A service sums what another one did.
pub(super) fn taken_over(address: &str, job: &str, at: f64) -> Event {
    Event {
        at,
        name: "taken_over",
        severity: Severity::Warning,
        job: Some(job.to_owned()),
        service: Some(address.to_owned()),
        text: format!("{address} has taken over the part of {job} whose service was lost"),
    }
}

fn number(count: u64) -> String {
    if count == 1 { String::new() } else { format!("{count} ") }
}

/// The jobs that began, changed or ended. A job that is not there any more has ended, if `all_are_known` that there are.
pub(super) fn of_jobs(before: &[Job], now: &[Job], all_are_known: bool, at: f64) -> Vec<Event> {
    let mut events = Vec::new();
    let mut say = |job: &Job, name, severity, text: String| {
        events.push(Event { at, name, severity, job: Some(job.name.clone()), service: None, text });
    };
    for job in now {
        let known = before.iter().find(|known| known.name == job.name);
        changed(known, job, &mut |name, severity, text| say(job, name, severity, text));
    }
    for job in before {
        let is_over = all_are_known && !now.iter().any(|other| other.name == job.name);
        // A job that gathers may have hidden a part of its name.
        if is_over && job.state == JobState::Running {
            say(job, "job_ended", Severity::Note, format!("{} is over", job.name));
        }
    }
    events
}

fn changed(before: Option<&Job>, now: &Job, say: &mut dyn FnMut(&'static str, Severity, String)) {
    let name = &now.name;
    let was = before.map(|before| before.state);
    match now.state {
        JobState::Gathering => {
            let missing = |job: &Job| job.missing.len() as u32;
            let here = now.world_size.saturating_sub(missing(now));
            let joined = before
                .filter(|before| before.state == JobState::Gathering)
                .map_or(here, |before| missing(before).saturating_sub(missing(now)));
            if joined > 0 {
                let ranks = if joined == 1 { "a rank".into() } else { format!("{joined} ranks") };
                let text = format!("{ranks} joined {name}: {here} of {} are here", now.world_size);
                say("rank_joined", Severity::Note, text);
            }
        }
        JobState::Running => {
            if was != Some(JobState::Running) {
                let text = format!("{name} runs with {} ranks", now.world_size);
                say("job_started", Severity::Note, text);
                return;
            }
            let Some(before) = before else { return };
            if before.generation != now.generation {
                say("job_set_up_again", Severity::Note, format!("{name} is set up again, and goes on"));
            }
            let plan = |job: &Job| {
                job.shares
                    .iter()
                    .map(|share| (share.service.clone(), share.share.to_bits()))
                    .collect::<Vec<_>>()
            };
            if plan(before) != plan(now) && !now.shares.is_empty() {
                let services = now.shares.len();
                let text = format!("{name} has a new plan, with {services} services");
                say("planned_again", Severity::Note, text);
            }
            let left: Vec<_> = now.left.iter().filter(|rank| !before.left.contains(rank)).collect();
            if !left.is_empty() {
                let called = |rank: &&u16| {
                    let known = now.ranks.iter().find(|known| known.rank == **rank);
                    known.map_or_else(|| format!("rank {rank}"), called)
                };
                let named: Vec<_> = left.iter().copied().take(NAMED).map(|rank| called(&rank)).collect();
                let more = left.len().saturating_sub(NAMED);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                say("rank_left", Severity::Note, format!("{}{more} left {name}", named.join(", ")));
            }
        }
        JobState::Aborted => {
            if was != Some(JobState::Aborted) {
                let reason = now.reason.as_deref().unwrap_or_default();
                say("job_aborted", Severity::Warning, format!("{name} ended: {reason}"));
            }
        }
    }
}
