//! `fanin reproduce`, which lives in the Python package: it draws.

use std::ffi::OsString;

/// Make the figures of a paper again, in the simulator
///
/// Each with the paper's value beside ours: a table, plots, and all scenarios and results.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  fanin reproduce atp --quick\n  fanin reproduce atp --only loss sharing --out /tmp/atp"
)]
pub(crate) struct Arguments {
    /// Its own subcommands and options; see fanin reproduce --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    _args: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::run::in_python("reproduce")
}
