//! What people should know, in words, and what mends it.

use super::lately::Lately;
use super::view::{Job, JobState, Rank, Service, Severity, Word};

/// All that there are: in logs, metrics and on the page.
pub(super) const WORDS: [&str; 9] =
    ["late", "stands", "losses", "slow_link", "waits", "aborted", "silent", "pool", "version"];
/// A rank is late that is the last in so many of the collectives, of so many at least.
const LAST: f64 = 0.5;
const OF: usize = 10;
/// By so much, in seconds, and as a part of a collective's time.
const LATE: f64 = 0.005;
const LATE_PART: f64 = 0.1;
/// What takes so many times as long as planned is slow.
const SLOW: f64 = 2.0;
/// More than this part of the packets should not come again.
const RESENT: f64 = 0.01;
/// A pool with less than this part free is near its end.
const POOL: f64 = 0.05;
/// Ranks whose names are told.
const NAMED: usize = 8;

/// Of a job.
pub(super) fn words(job: &Job, lately: Option<&Lately>, now: f64) -> Vec<Word> {
    match job.state {
        JobState::Gathering => vec![missing(job)],
        JobState::Aborted => vec![aborted(job)],
        JobState::Running => {
            let mut words = Vec::new();
            if let Some(lately) = lately {
                words.extend(job.ranks.iter().filter_map(|rank| late(rank, lately)));
                words.extend(stands(job, lately, now));
            }
            words.extend(slow(job));
            words
        }
    }
}

fn missing(job: &Job) -> Word {
    let named: Vec<_> = job.missing.iter().take(NAMED).map(u16::to_string).collect();
    let more = job.missing.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let ranks = if job.missing.len() == 1 { "rank" } else { "ranks" };
    let (severity, text) = match job.missing.len() {
        0 => (Severity::Note, format!("{} is about to begin", job.name)),
        _ => (Severity::Note, format!("{} waits for {ranks} {}{more}", job.name, named.join(", "))),
    };
    let cure = "start these ranks; on their machines, fanin doctor shows whether they reach the service";
    let cure = (!job.missing.is_empty()).then(|| cure.to_owned());
    Word { name: "waits", severity, text, cure, ..Word::default() }
}

fn aborted(job: &Job) -> Word {
    let reason = job.reason.as_deref().unwrap_or_default();
    Word {
        name: "aborted",
        severity: Severity::Warning,
        text: format!("{} ended: {reason}", job.name),
        cure: Some("look at the last lines of the rank that is named; start the job again".into()),
        ..Word::default()
    }
}

/// A rank as people call it.
pub(super) fn called(rank: &Rank) -> String {
    let ranks = match rank.ranks[..] {
        [] => format!("rank {}", rank.rank),
        [one] => format!("rank {one}"),
        [first, .., last] if rank.ranks.windows(2).all(|pair| pair[1] == pair[0] + 1) => {
            format!("ranks {first} to {last}")
        }
        _ => {
            let named: Vec<_> = rank.ranks.iter().take(NAMED).map(u32::to_string).collect();
            let more = if rank.ranks.len() > NAMED { " and more" } else { "" };
            format!("ranks {}{more}", named.join(", "))
        }
    };
    if rank.name.is_empty() { ranks } else { format!("{ranks} on {}", rank.name) }
}

fn late(rank: &Rank, lately: &Lately) -> Option<Word> {
    let late = rank.late.filter(|late| late.of >= OF && late.last >= LAST)?;
    let behind = lately.behind(rank.rank)?;
    let typical = lately.typical().unwrap_or_default();
    let is_late = behind >= LATE && behind >= LATE_PART * typical;
    let be = if rank.ranks.len() > 1 { "are" } else { "is" };
    is_late.then(|| Word {
        name: "late",
        about: called(rank),
        severity: Severity::Warning,
        text: format!(
            "{} {be} {:.0} ms later than the others, in {:.0} % of the last {} sums",
            called(rank),
            behind * 1e3,
            late.last * 100.0,
            late.of
        ),
        cure: Some(
            "look at what else runs on its machine, at its clock rate and at how it loads data; FANIN_TRACE shows its steps"
                .into(),
        ),
    })
}

/// Sums stand still, and wait for some ranks.
fn stands(job: &Job, lately: &Lately, now: f64) -> Option<Word> {
    let since = now - lately.last_end()?;
    let waited: Vec<_> = job.ranks.iter().filter(|rank| rank.waited_for > 0.5 && !rank.left).collect();
    let usual = lately.usual_pause().unwrap_or_default();
    (since > 5.0 && since > 5.0 * usual && !waited.is_empty()).then(|| {
        let named: Vec<_> = waited.iter().take(NAMED).map(|rank| called(rank)).collect();
        Word {
            name: "stands",
            severity: Severity::Warning,
            text: format!(
                "{} has summed nothing for {since:.0} s: it waits for {}",
                job.name,
                named.join(", ")
            ),
            cure: Some(
                "look whether that process computes, saves or stands still (py-spy dump --pid PID)".into(),
            ),
            ..Word::default()
        }
    })
}

fn slow(job: &Job) -> Option<Word> {
    let plan = job.plan.as_ref()?;
    let (predicted, measured) = plan.predicted.zip(plan.measured)?;
    let bound = plan.bound.as_deref().unwrap_or("a link");
    (predicted > 0.0 && measured > SLOW * predicted).then(|| Word {
        name: "slow_link",
        severity: Severity::Warning,
        text: format!(
            "sums of {} take {:.1} times as long as planned; the plan is bound by {bound}",
            job.name,
            measured / predicted
        ),
        cure: Some("run fanin doctor --measure on each machine: it measures the way to each service".into()),
        ..Word::default()
    })
}

/// Packets come again at services, of which a part of all is told. They do so for a rank that is
/// late, too.
pub(super) fn losses<'a>(job: &Job, resent: impl Iterator<Item = (&'a str, f64)>) -> Option<Word> {
    let explained = job.words.iter().any(|word| word.name == "late" || word.name == "stands");
    let (service, part) = resent.max_by(|(_, one), (_, other)| one.total_cmp(other))?;
    (part > RESENT && !explained).then(|| Word {
        name: "losses",
        about: service.to_owned(),
        severity: Severity::Warning,
        text: format!("{:.1} % of the packets of {} to {service} are sent again", 100.0 * part, job.name),
        cure: Some(
            "run fanin doctor on the workers: it finds ways that lose packets; loss_bound lets a training go on without them"
                .into(),
        ),
    })
}

/// What people should know of services.
pub(super) fn words_of_services(services: &[Service]) -> Vec<Word> {
    let mut words = Vec::new();
    for service in services {
        let Service { address, silent, pool, version, .. } = service;
        let mut say = |name, severity, text: String, cure: &str| {
            words.push(Word { name, about: address.clone(), severity, text, cure: Some(cure.to_owned()) });
        };
        if let Some(why) = silent {
            let text = format!("{address} does not answer: {why}");
            say(
                "silent",
                Severity::Warning,
                text,
                "start it again, or look at the link to it (fanin doctor)",
            );
        }
        if let Some(pool) = pool.filter(|pool| f64::from(pool.free) < POOL * f64::from(pool.units)) {
            let text = format!("{address} has {} of {} units of memory free", pool.free, pool.units);
            say(
                "pool",
                Severity::Warning,
                text,
                "start it with a larger --pool-units, or end jobs that are done",
            );
        }
        let ours = env!("CARGO_PKG_VERSION");
        if !version.is_empty() && version != ours {
            let text = format!("{address} has version {version}; this page's fanin has version {ours}");
            say("version", Severity::Note, text, "install the same version of fanin on all machines");
        }
    }
    words
}
