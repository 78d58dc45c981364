//! The settings of ranks that start here, and who decided them.

use fanin_controller::protocols;
use serde::Deserialize;

use super::finding::{Check, Finding};

/// A setting of the ranks, as the Python package chose it: the table of settings is there, and
/// there alone.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Setting {
    name: String,
    /// `None` where there is none by default.
    value: Option<String>,
    /// The flag or the variable; `None` for the default.
    source: Option<String>,
    /// The value that was given too, and does not count.
    overruled: Option<String>,
    /// Why the value is none.
    wrong: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Settings(pub Vec<Setting>);

pub(super) fn parse(json: &str) -> Result<Settings, serde_json::Error> {
    serde_json::from_str(json).map(Settings)
}

/// The value of a setting, or its default; `None` if it has none, or nobody knows.
pub(super) fn value<'a>(settings: &'a [Setting], name: &str) -> Option<&'a str> {
    settings.iter().find(|setting| setting.name == name)?.value.as_deref()
}

/// A finding for each setting that somebody decided, and one for the rest.
pub(super) fn findings(settings: &[Setting]) -> Vec<Finding> {
    let (said, left): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.source.is_some());
    let mut findings: Vec<_> = said.into_iter().map(finding).collect();
    if !left.is_empty() {
        let names: Vec<_> = left.into_iter().map(Setting::shown).collect();
        findings.push(Finding::ok(Check::Settings, format!("by default: {}", names.join(", "))));
    }
    findings
}

fn finding(setting: &Setting) -> Finding {
    let source = setting.source.as_deref().unwrap_or_default();
    if let Some(wrong) = &setting.wrong {
        return Finding::problem(
            Check::Settings,
            wrong.as_str(),
            format!("change {source}, or leave it out"),
        );
    }
    let over = setting.overruled.as_ref().map_or(String::new(), |other| format!(", which overrules {other}"));
    Finding::ok(Check::Settings, format!("{}: {source} says so{over}", setting.shown()))
}

/// A problem where the switch would refuse ranks with these settings.
pub(super) fn against(settings: &[Setting], served: &str) -> Vec<Finding> {
    let differs = |setting: &&Setting| {
        setting.name == "protocol"
            && setting.wrong.is_none()
            && setting
                .value
                .as_deref()
                .and_then(protocols::named)
                .is_some_and(|asked| !protocols::serves(served, asked))
    };
    let differing = settings.iter().find(differs);
    let finding = differing.map(|setting| {
        Finding::problem(
            Check::Settings,
            format!("{}, and the switch serves {}: it refuses such ranks", setting.shown(), served),
            format!("export FANIN_PROTOCOL={} (on every rank), or name another switch", served),
        )
    });
    finding.into_iter().collect()
}

impl Setting {
    fn shown(&self) -> String {
        self.value.as_ref().map_or_else(|| self.name.clone(), |value| format!("{}={value}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    const SAID: &str = r#"[
        {"name": "in_flight", "value": "19", "source": "--in-flight", "overruled": "FANIN_IN_FLIGHT=17"},
        {"name": "wire_dtype", "value": "fp8", "source": "FANIN_WIRE_DTYPE", "wrong": "FANIN_WIRE_DTYPE is 'fp8': no"},
        {"name": "protocol", "value": "switchml"},
        {"name": "trace"}
    ]"#;

    #[test]
    fn each_setting_has_who_decided_it() {
        let findings = findings(&parse(SAID).expect("JSON").0);
        let messages: Vec<_> = findings.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "in_flight=19: --in-flight says so, which overrules FANIN_IN_FLIGHT=17",
                "FANIN_WIRE_DTYPE is 'fp8': no",
                "by default: protocol=switchml, trace",
            ]
        );
        assert_eq!(findings.iter().filter(|finding| finding.verdict == Verdict::Problem).count(), 1);
    }

    #[test]
    fn ranks_of_another_protocol_than_the_switch_are_a_problem() {
        let settings = parse(SAID).expect("JSON").0;
        assert_eq!(against(&settings, "switchml"), []);
        assert_eq!(against(&settings, "atp").len(), 1);
        assert_eq!(against(&[], "atp"), []);
    }
}
