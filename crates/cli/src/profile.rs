//! `fanin profile`, which lives in the Python package: it trains.

use std::ffi::OsString;

/// Find how much loss of gradients a training script forgives
///
/// Trains it again and again with packets lost, by layers and by magnitude, and says which loss
/// bound costs no epochs.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Example:\n  fanin profile loss-tolerance --target 0.9 train.py"
)]
pub(crate) struct Arguments {
    /// Its own subcommands and options; see fanin profile --help
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    _args: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    crate::run::in_python("profile")
}
