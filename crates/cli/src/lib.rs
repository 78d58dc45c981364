//! The `fanin` command: one file a subcommand.
//!
//! It stands outside the way of a gradient: it starts a switch, asks one, or simulates a network of
//! them. The Python package calls [`main`] as well, for all but `fanin run`, `bench`, `netlab`,
//! `profile`, `reproduce` and `sim --sweep`, which it does itself.
//!
//! Deliberately absent: anything that decides.
#![forbid(unsafe_code)]

mod arguments;
mod bench;
mod doctor;
pub mod environment;
mod here;
pub mod logging;
pub mod machine;
mod netlab;
mod output;
mod page;
mod parameters;
mod plan;
mod profile;
mod reproduce;
mod run;
pub mod scenario;
mod server;
mod sim;
mod status;
mod step;
mod switch;
mod tls;
mod top;
mod topo;
mod trace;
mod version;

pub use sim::report;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

const SUCCESS: u8 = 0;
const FAILURE: u8 = 1;
/// The command line cannot be understood; the same number as clap's and most shells'.
const USAGE: u8 = 2;

#[derive(Debug, Parser)]
#[command(
    name = "fanin",
    version,
    about = "Sums gradients on the way: in-network aggregation for ordinary machines and ordinary Ethernet",
    after_help = "Examples:\n  \
        fanin run --nproc-per-node 4 train.py      train with 4 workers on this machine\n  \
        fanin switch --listen 0.0.0.0:4800         serve jobs of other machines\n  \
        fanin switch --listen 0.0.0.0:4800 --protocol atp   sum what ATP's switches on the way do not\n  \
        fanin status --switch 10.0.0.9:4800        who waits for whom\n  \
        fanin doctor --switch 10.0.0.9:4800        why it is not reached, or slow\n  \
        fanin plan --machines 8 --rate 1gbit       how fast a cluster can sum, and what would help\n  \
        fanin topo                                 this machine inside, and how its GPUs' gradients best reach the NIC\n  \
        fanin sim examples/sim/rack.toml           the same machines in a simulated network",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Arguments),
    Switch(switch::Arguments),
    Server(server::Arguments),
    Parameters(parameters::Arguments),
    Status(status::Arguments),
    Page(page::Arguments),
    Top(top::Arguments),
    Doctor(doctor::Arguments),
    Bench(bench::Arguments),
    Netlab(netlab::Arguments),
    Plan(plan::Arguments),
    Profile(profile::Arguments),
    Sim(sim::Arguments),
    Reproduce(reproduce::Arguments),
    Topo(topo::Arguments),
    Trace(trace::Arguments),
    Version(version::Arguments),
}

/// Runs the command line `args`; the first is the program's name.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    ExitCode::from(exit_status(args))
}

/// As [`main`], with the status as a number: 0, 1 when the command failed, or 2 when it could not
/// be understood.
pub fn exit_status(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help goes to stdout and is no error. A reader that closed our output does not want to
            // hear of it.
            let _ = error.print();
            return if error.use_stderr() { USAGE } else { SUCCESS };
        }
    };
    environment::warn_of_unknown();
    let result = match cli.command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Switch(arguments) => switch::run(&arguments),
        Command::Server(arguments) => server::run(&arguments),
        Command::Parameters(arguments) => parameters::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Page(arguments) => page::run(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Netlab(arguments) => netlab::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Profile(arguments) => profile::run(&arguments),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::Reproduce(arguments) => reproduce::run(&arguments),
        Command::Topo(arguments) => topo::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Version(arguments) => version::run(&arguments),
    };
    match result {
        Ok(()) => SUCCESS,
        Err(error) => {
            eprintln!("fanin: {error:#}");
            FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_lists_run_and_shows_examples() {
        let help = Cli::command().render_help().to_string();
        for text in [
            "as torchrun does",
            "beside Gloo",
            "network namespaces",
            "loss of gradients",
            "figures of a paper",
            "Examples:",
            "fanin status --switch",
        ] {
            assert!(help.contains(text), "{help}");
        }
    }

    #[test]
    fn run_takes_the_options_of_torchrun_unchanged() {
        let line = ["fanin", "run", "--nproc-per-node", "4", "train.py", "--steps", "10"];
        assert!(Cli::try_parse_from(line).is_ok());
    }
}
