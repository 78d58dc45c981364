//! Findings, and how they are shown.

use std::io::{self, IsTerminal};

use anyhow::bail;
use fanin_wire::VERSION;
use serde::Serialize;

use crate::output;

/// The width of each line of a message, behind the 20 of verdict and check.
const MESSAGE_COLUMNS: usize = 80;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Ok,
    /// Training works, but not as well as it could.
    Warning,
    /// Training would fail.
    Problem,
}

/// The object of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Check {
    Switch,
    Settings,
    Machine,
    Local,
    Address,
    Service,
    Name,
    Tcp,
    Version,
    Udp,
    Mtu,
    Offload,
    Buffers,
    Interface,
    Rates,
    Heartbeat,
    Pool,
    Jobs,
}

impl Check {
    /// Checks that need the switch's answer.
    pub(super) const OF_SWITCH: [Self; 6] =
        [Self::Version, Self::Udp, Self::Rates, Self::Heartbeat, Self::Pool, Self::Jobs];
    /// Checks that need an address.
    pub(super) const AFTER_NAME: [Self; 11] = [
        Self::Tcp,
        Self::Version,
        Self::Udp,
        Self::Mtu,
        Self::Offload,
        Self::Buffers,
        Self::Interface,
        Self::Rates,
        Self::Heartbeat,
        Self::Pool,
        Self::Jobs,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Switch => "switch",
            Self::Settings => "settings",
            Self::Machine => "machine",
            Self::Local => "local",
            Self::Address => "address",
            Self::Service => "service",
            Self::Name => "name",
            Self::Tcp => "tcp",
            Self::Version => "version",
            Self::Udp => "udp",
            Self::Mtu => "mtu",
            Self::Offload => "offload",
            Self::Buffers => "buffers",
            Self::Interface => "interface",
            Self::Rates => "rates",
            Self::Heartbeat => "heartbeat",
            Self::Pool => "pool",
            Self::Jobs => "jobs",
        }
    }
}

/// A line, and the cure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub check: Check,
    pub verdict: Verdict,
    pub message: String,
    /// A command, or what to do where no command can.
    pub mend: Option<String>,
}

impl Finding {
    pub(super) fn ok(check: Check, message: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Ok, message: message.into(), mend: None }
    }

    pub(super) fn warning(check: Check, message: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Warning, message: message.into(), mend: Some(mend.into()) }
    }

    pub(super) fn problem(check: Check, message: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Problem, message: message.into(), mend: Some(mend.into()) }
    }

    fn lines(&self, colours: bool) -> String {
        let (word, colour) = match self.verdict {
            Verdict::Ok => ("ok", "32"),
            Verdict::Warning => ("warning", "33"),
            Verdict::Problem => ("PROBLEM", "31"),
        };
        let word = format!("{word:<8}");
        let word = if colours { format!("\x1b[{colour}m{word}\x1b[0m") } else { word };
        let gap = format!("\n{:20}", "");
        let mut lines = format!("{word} {:<10} {}", self.check.name(), wrapped(&self.message).join(&gap));
        if let Some(mend) = &self.mend {
            // Whole, so that it can be copied.
            lines.push_str(&format!("{gap}mend: {mend}"));
        }
        lines
    }
}

/// A message in lines that a terminal of 100 columns has room for, beside what stands before them.
fn wrapped(message: &str) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in message.split(' ') {
        let last = lines.last_mut().expect("there is one");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= MESSAGE_COLUMNS {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// For programs.
#[derive(Serialize)]
struct Report<'a> {
    /// None where no switch is meant.
    switch: Option<&'a str>,
    version: &'static str,
    wire_version: u8,
    verdict: Verdict,
    findings: &'a [Finding],
    not_checked: &'a [Check],
}

/// Gathers findings. For people it shows each at once, since the next may take seconds.
pub(super) struct Examination {
    switch: Option<String>,
    json: bool,
    colours: bool,
    findings: Vec<Finding>,
    not_checked: Vec<Check>,
}

impl Examination {
    pub(super) fn new(switch: Option<&str>, json: bool) -> Self {
        let colours = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self {
            switch: switch.map(str::to_owned),
            json,
            colours,
            findings: Vec::new(),
            not_checked: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, finding: Finding) -> io::Result<()> {
        if !self.json {
            output::line(&finding.lines(self.colours))?;
        }
        self.findings.push(finding);
        Ok(())
    }

    pub(super) fn note_all(&mut self, findings: Vec<Finding>) -> io::Result<()> {
        findings.into_iter().try_for_each(|finding| self.note(finding))
    }

    /// Says that those of `checks` without a finding could not be made, because of what was found
    /// before.
    pub(super) fn skip(&mut self, checks: &[Check]) {
        let made = |check: &Check| self.findings.iter().any(|finding| finding.check == *check);
        self.not_checked.extend(checks.iter().filter(|check| !made(check)));
    }

    /// Prints what remains.
    ///
    /// # Errors
    /// When there is a problem, so that the command fails.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        let verdict = self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
        if self.json {
            output::line(&serde_json::to_string(&Report {
                switch: self.switch.as_deref(),
                version: env!("CARGO_PKG_VERSION"),
                wire_version: VERSION,
                verdict,
                findings: &self.findings,
                not_checked: &self.not_checked,
            })?)?;
        } else if !self.not_checked.is_empty() {
            output::line(&format!("{:8} {}", "", not_checked(&self.not_checked)))?;
        }
        let of = |wanted| {
            let names = self.findings.iter().filter(|finding| finding.verdict == wanted);
            let mut names: Vec<_> = names.map(|finding| finding.check.name()).collect();
            names.dedup();
            names.join(", ")
        };
        match verdict {
            Verdict::Problem => bail!("a problem with {}", of(Verdict::Problem)),
            Verdict::Warning if !self.json => {
                output::line(&format!("no problem; look at {}", of(Verdict::Warning)))?;
            }
            Verdict::Ok if !self.json => output::line("all is well")?,
            _ => {}
        }
        Ok(())
    }
}

fn not_checked(checks: &[Check]) -> String {
    let names: Vec<_> = checks.iter().map(|check| check.name()).collect();
    format!("not checked, because of what was found: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ok_has_what_mends_it_below() {
        let finding = Finding::warning(Check::Buffers, "small", "sysctl -w x=1");
        assert_eq!(
            finding.lines(false),
            "warning  buffers    small\n                    mend: sysctl -w x=1"
        );
        assert!(finding.lines(true).starts_with("\x1b[33mwarning"));
        assert_eq!(Finding::ok(Check::Name, "fine").lines(false), "ok       name       fine");
        let long = Finding::ok(Check::Name, "word ".repeat(50).trim_end()).lines(false);
        let lines: Vec<_> = long.lines().collect();
        assert_eq!(lines.len(), 4, "{long}");
        assert!(lines.iter().all(|line| line.len() <= 100), "{long}");
        assert!(lines[1..].iter().all(|line| line.starts_with(&" ".repeat(20))), "{long}");
    }

    #[test]
    fn the_worst_finding_decides() {
        let finish = |findings: &[Finding]| {
            let mut examination = Examination::new(Some("box:4800"), true);
            examination.findings.extend_from_slice(findings);
            examination.finish().map_err(|error| error.to_string())
        };
        let warning = Finding::warning(Check::Mtu, "", "");
        let problem = Finding::problem(Check::Udp, "", "");
        assert_eq!(finish(&[]), Ok(()));
        assert_eq!(finish(std::slice::from_ref(&warning)), Ok(()));
        assert_eq!(finish(&[problem, warning]), Err("a problem with udp".into()));
    }

    #[test]
    fn a_check_has_one_name_for_people_and_programs() {
        for check in Check::AFTER_NAME.into_iter().chain([
            Check::Switch,
            Check::Settings,
            Check::Machine,
            Check::Local,
            Check::Address,
            Check::Service,
            Check::Name,
        ]) {
            assert_eq!(serde_json::to_value(check).expect("serialisable"), check.name());
        }
    }
}
