//! `fanin netlab`, which lives in the Python package: its benchmark uses it too.

use std::ffi::OsString;

/// Build a laboratory of shaped, lossy links out of network namespaces
///
/// Workers w0, w1, .. and sw, which is for the switch, on one machine. Needs root.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  fanin netlab up --workers 4 --rate 1gbit --loss 0.1%\n  fanin netlab exec w0 -- ip address\n  fanin netlab down"
)]
pub(crate) struct Arguments {
    /// Its own subcommands and options; see fanin netlab --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    _args: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::run::in_python("netlab")
}
