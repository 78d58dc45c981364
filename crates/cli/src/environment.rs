//! The environment: every variable that some part of fanin reads, and a word about those that none
//! does.

use std::sync::Once;

use crate::output;

/// All of them. The settings among them are Python's (`fanin._settings`); a test there holds this
/// list to them.
pub const VARIABLES: [&str; 22] = [
    "FANIN_AS",
    "FANIN_CONGESTION_CONTROL",
    "FANIN_IN_FLIGHT",
    "FANIN_JOB",
    crate::logging::VARIABLE,
    "FANIN_LOSS_BOUND",
    "FANIN_MACHINE",
    "FANIN_PAGE",
    "FANIN_PAGE_TOKEN_FILE",
    "FANIN_PATHS",
    "FANIN_PLAN",
    "FANIN_PROTOCOL",
    "FANIN_RATE",
    "FANIN_SECRET_FILE",
    "FANIN_SECURITY",
    "FANIN_SUB_MODELS",
    "FANIN_SWITCH",
    "FANIN_TLS_CA",
    "FANIN_TLS_CERT",
    "FANIN_TLS_KEY",
    "FANIN_TRACE",
    "FANIN_WIRE_DTYPE",
];

/// Those that were a setting once, and the one in its place. The cures are Python's; a test there
/// holds this list to them.
pub const FORMER: [(&str, &str); 4] = [
    ("FANIN_EXACT", "FANIN_WIRE_DTYPE"),
    ("FANIN_OWN_SERVICES", "FANIN_PLAN"),
    ("FANIN_SLOTS", "FANIN_IN_FLIGHT"),
    ("FANIN_WINDOW", "FANIN_IN_FLIGHT"),
];

/// Says on stderr, once a process, which variables look like ours and are not. They change nothing,
/// but who set one thinks so.
pub fn warn_of_unknown() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for name in std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()) {
            if let Some(nearest) = nearest(&name) {
                output::warning(&format!(
                    "{name} is set, and is no variable of fanin's; do you mean {nearest}?"
                ));
            }
        }
    });
}

/// The variable that may be meant by one that is none; `None` for ours and for foreign ones.
fn nearest(name: &str) -> Option<&'static str> {
    // Kubernetes gives every container the addresses of its services: FANIN_SERVICE_HOST,
    // FANIN_PORT_4800_TCP.
    let of_kubernetes = name.contains("_SERVICE_") || name.contains("_PORT");
    if !name.starts_with("FANIN_") || VARIABLES.contains(&name) || of_kubernetes {
        return None;
    }
    if let Some((_, now)) = FORMER.iter().find(|(former, _)| *former == name) {
        return Some(now);
    }
    let similarity = |known: &str| strsim::jaro_winkler(name, known);
    VARIABLES.into_iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_variable_is_answered_with_the_nearest() {
        assert_eq!(nearest("FANIN_SWTICH"), Some("FANIN_SWITCH"));
        assert_eq!(nearest("FANIN_WIREDTYPE"), Some("FANIN_WIRE_DTYPE"));
        assert_eq!(nearest("FANIN_LOGS"), Some("FANIN_LOG"));
        assert_eq!(nearest("FANIN_SLOTS"), Some("FANIN_IN_FLIGHT"));
        assert_eq!(nearest("FANIN_OWN_SERVICES"), Some("FANIN_PLAN"));
    }

    #[test]
    fn ours_and_foreign_ones_are_not_spoken_of() {
        for name in
            ["FANIN_SWITCH", "FANINI", "PATH", "FANIN_SWITCH_SERVICE_HOST", "FANIN_PORT_4800_TCP_ADDR"]
        {
            assert_eq!(nearest(name), None, "{name}");
        }
    }
}
