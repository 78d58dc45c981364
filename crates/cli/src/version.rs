//! `fanin version`.

use fanin_wire::VERSION;
use serde::Serialize;

use crate::output;

/// Print the versions of the package and of the wire format
///
/// Switch and workers must have the same wire version.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  fanin version\n  fanin version --json")]
pub(crate) struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Versions {
    version: &'static str,
    wire_version: u8,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let versions = Versions { version: env!("CARGO_PKG_VERSION"), wire_version: VERSION };
    let text = if arguments.json {
        serde_json::to_string(&versions)?
    } else {
        format!("fanin {} (wire version {})", versions.version, versions.wire_version)
    };
    Ok(output::line(&text)?)
}
