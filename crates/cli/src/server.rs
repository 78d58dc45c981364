//! `fanin server`: the end of ATP's way, until it is told to stop.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use fanin_controller::{SwitchServer, SwitchServerConfig};
use fanin_protocol::control::Protocol;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::arguments::{SWITCH_DEFAULT, listen, seconds};
use crate::switch::{announce, log, wait};
use crate::tls::{Known, Own};

/// Serve ATP: admit jobs, and sum what the switches on the way did not
///
/// Workers name their rack's switch (fanin switch --protocol atp), whose upstream this is; without switches they name the
/// server itself. Listens on one port number, as a switch does. Ends on SIGTERM and SIGINT, after it has told the workers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin server --listen 0.0.0.0:4800                                          on 10.0.0.8\n  \
    fanin switch --listen 0.0.0.0:4800 --protocol atp --upstream 10.0.0.8:4800  on each rack's switch\n  \
    FANIN_PROTOCOL=atp FANIN_SWITCH=10.0.1.9:4800 ...                           on the workers of a rack")]
pub(crate) struct Arguments {
    /// Address and port, TCP and UDP; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = SWITCH_DEFAULT, value_parser = listen)]
    listen: SocketAddr,
    /// Memory for all jobs together, in units of 256 elements in flight [default: 262144]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pool_units: Option<u32>,
    /// Seconds that a rank's machine may not answer before the rank is taken for dead [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    heartbeat_timeout: Option<Duration>,
    /// Most seconds that ranks may wait for the rest of their job, whatever timeout they have [default: 3600]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    join_timeout_max: Option<Duration>,
    #[command(flatten)]
    own: Own,
    #[command(flatten)]
    known: Known,
    /// What to log to stderr: error, warn, info, debug, or a filter such as fanin_controller=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "FANIN_LOG")]
    log: String,
    /// Print one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    log(&arguments.log)?;
    // Before the server starts: a signal that comes early must find us ready.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let defaults = SwitchServerConfig::new(arguments.listen);
    fanin_controller::raise_descriptors();
    let config = SwitchServerConfig {
        protocol: Protocol::Atp,
        pool_units: arguments.pool_units.unwrap_or(defaults.pool_units),
        heartbeat_timeout: arguments.heartbeat_timeout.unwrap_or(defaults.heartbeat_timeout),
        join_timeout_max: arguments.join_timeout_max.unwrap_or(defaults.join_timeout_max),
        ..defaults
    };
    let server = SwitchServer::start_behind(config, arguments.own.acceptor(&arguments.known)?)?;
    announce("server", server.address(), 1, arguments.json)?;
    wait(&mut signals);
    server.stop();
    Ok(())
}
