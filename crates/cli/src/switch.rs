//! `fanin switch`: serves jobs until it is told to stop.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use fanin_controller::{SwitchServer, SwitchServerConfig};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;

use crate::arguments::{SWITCH_DEFAULT, listen, seconds};
use crate::output;

/// Sum the gradients of any number of jobs
///
/// Listens on one port number: UDP for gradients, TCP for control and metrics (http://ADDR:PORT/metrics, /healthz).
/// Ends on SIGTERM and SIGINT, after it has told the workers.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin switch                                        for workers on this machine\n  \
    fanin switch --listen 0.0.0.0:4800 --shards 4       for other machines, on 4 cores\n  \
    fanin switch --listen 127.0.0.1:0 --json            on a free port, told as JSON")]
pub(crate) struct Arguments {
    /// Address and port, TCP and UDP; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = SWITCH_DEFAULT, value_parser = listen)]
    listen: SocketAddr,
    /// Cores that sum [default: one in four, at least 2 and at most 8]
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// Slots of 256 elements in each shard, for all jobs together [default: 65536]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pool_slots: Option<u32>,
    /// Seconds after which a silent rank is expelled [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    heartbeat_timeout: Option<Duration>,
    /// Most seconds that ranks may wait for the rest of their job, whatever timeout they have [default: 3600]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    join_timeout_max: Option<Duration>,
    /// What to log to stderr: error, warn, info, debug, or a filter such as fanin_controller=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "FANIN_LOG")]
    log: String,
    /// Print one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

/// What a program reads when the switch listens.
#[derive(Serialize)]
struct Listening {
    event: &'static str,
    address: SocketAddr,
    shards: usize,
    version: &'static str,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    log(&arguments.log)?;
    // Before the switch starts: a signal that comes early must find us ready.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let defaults = SwitchServerConfig::new(arguments.listen);
    let config = SwitchServerConfig {
        shards: arguments.shards.unwrap_or_else(SwitchServerConfig::automatic_shards),
        pool_slots: arguments.pool_slots.unwrap_or(defaults.pool_slots),
        heartbeat_timeout: arguments.heartbeat_timeout.unwrap_or(defaults.heartbeat_timeout),
        join_timeout_max: arguments.join_timeout_max.unwrap_or(defaults.join_timeout_max),
        ..defaults
    };
    let switch = SwitchServer::start(config)?;
    let address = switch.address();
    let version = env!("CARGO_PKG_VERSION");
    output::line(&if arguments.json {
        serde_json::to_string(&Listening { event: "listening", address, shards: config.shards, version })?
    } else {
        format!(
            "fanin switch {version} listens on {address} (UDP and TCP; metrics at http://{address}/metrics)"
        )
    })?;
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "stopping");
    }
    switch.stop();
    Ok(())
}

fn log(filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        anyhow!("--log {filter:?} is no filter ({error}); try error, warn, info or debug")
    })?;
    let colours = std::io::stderr().is_terminal();
    // Who embeds the command may log already; then its logs get ours.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours)
        .with_writer(std::io::stderr)
        .try_init();
    Ok(())
}
