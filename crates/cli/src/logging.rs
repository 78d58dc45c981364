//! Logs on stderr: of a daemon, of a rank, of a launcher's switch.

use std::fmt;
use std::io::IsTerminal;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The variable for the filter of logs: error, warn, info, debug, or a filter such as
/// `fanin_controller=debug`.
pub const VARIABLE: &str = "FANIN_LOG";

/// Logs what `filter` lets pass, each line behind `who` if that is not empty. A program that embeds
/// us may log already; then its logs get ours.
///
/// # Errors
/// When the filter is none; the message goes on where "X is ...: " ends.
pub fn start(filter: &str, who: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| format!("it must be a filter, such as error, warn, info or debug ({error})"))?;
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .event_format(Named { who: who.into(), format: Format::default() })
        .try_init();
    Ok(())
}

/// As [`start`], by the filter of [`VARIABLE`]; without one nothing is logged.
///
/// # Errors
/// As [`start`], with the variable's name.
pub fn start_if_asked(who: &str) -> Result<(), String> {
    match std::env::var(VARIABLE) {
        Ok(filter) if !filter.trim().is_empty() => {
            start(filter.trim(), who).map_err(|error| format!("{VARIABLE} is {filter:?}: {error}"))
        }
        _ => Ok(()),
    }
}

/// The usual lines, behind a name: processes of one machine share a terminal.
struct Named {
    who: String,
    format: Format,
}

impl<S, N> FormatEvent<S, N> for Named
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if !self.who.is_empty() {
            write!(writer, "{}: ", self.who)?;
        }
        self.format.format_event(context, writer, event)
    }
}
