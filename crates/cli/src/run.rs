//! `fanin run`, which lives in the Python package: it starts Python processes.

use std::ffi::OsString;

/// Launch training, as torchrun does
///
/// Takes torchrun's options and script unchanged, and starts a switch where a protocol needs one
/// and --switch names none.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Example:\n  fanin run --nproc-per-node 4 train.py --epochs 3"
)]
pub(crate) struct Arguments {
    /// torchrun's options, the script, and the script's own arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS SCRIPT ARGUMENTS")]
    _args: Vec<OsString>,
}

pub(crate) fn run(_: &Arguments) -> anyhow::Result<()> {
    in_python("run")
}

/// The answer of every subcommand that the Python package runs before this one is asked.
pub(crate) fn in_python(name: &str) -> anyhow::Result<()> {
    anyhow::bail!(
        "fanin {name} is part of the Python package, and this is the command without it; install the package's wheel (`make \
         wheel` in a clone of fanin builds it) and use its fanin, or python -m fanin {name}"
    )
}
