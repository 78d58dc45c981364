//! `fanin server`: what the root of ATP's jobs was called.

use anyhow::bail;

/// Was the root of ATP's jobs: now fanin switch --protocol atp
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// The options that it had
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    options: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let options: String = arguments.options.iter().map(|option| format!(" {option}")).collect();
    bail!("there is one way to start a root, whatever its protocol: fanin switch --protocol atp{options}")
}
