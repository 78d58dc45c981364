//! `fanin bench`, which lives in the Python package: it measures the PyTorch backend.

use std::ffi::OsString;

/// Measure all-reduces beside Gloo, on shaped links or loopback; and what compression does
///
/// Ranks and a switch as processes; fanin and Gloo take turns in one run, and every sum is checked.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  fanin bench allreduce --workers 4 --size 25MB\n  fanin bench allreduce --workers 8 --rate 1gbit --json result.json\n  fanin bench compression --gradients gradients.pt"
)]
pub(crate) struct Arguments {
    /// Its own subcommands and options; see fanin bench --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    _args: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::run::in_python("bench")
}
