//! `fanin switch`: serves jobs until it is told to stop.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use fanin_controller::page::Token;
use fanin_controller::{RackServer, RackServerConfig, ServerError, SwitchServer, SwitchServerConfig};
use fanin_udp::OnSockets;
use fanin_units::Rate;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::arguments::{SWITCH_DEFAULT, listen, protocol, seconds};
use crate::tls::{Known, Own};
use crate::{logging, output};

/// Sum the gradients of any number of jobs
///
/// Listens on one port number: UDP for gradients, TCP for control, the page (http://ADDR:PORT/),
/// metrics and health (/metrics, /healthz). Ends on SIGTERM and SIGINT, after it has told the workers.
///
/// With --upstream it is a rack: it sums what its own workers send. Its sum is one contribution at
/// its upstream. A job has as many shards as each of both has. Jobs go on when a rack is started
/// again within the root's --heartbeat-timeout.
///
/// With --protocol atp it is the root of ATP's jobs, which the paper calls their server. With
/// --upstream it is a switch on the way there: it sums what it has aggregators for and sends the
/// rest on. Its jobs wait for a switch that ends until it is back.
///
/// With --protocol goat it is a root. It plans for each job which switch sums what, and sums the
/// rest. With --upstream it is one of those switches.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin switch                                        for workers on this machine\n  \
    fanin switch --listen 0.0.0.0:4800 --shards 4       for other machines, on 4 cores\n  \
    fanin switch --listen 127.0.0.1:0 --json            on a free port, told as JSON\n  \
    fanin switch --listen 0.0.0.0:4800 --protocol atp   on 10.0.0.8, the root\n  \
    fanin switch --listen 0.0.0.0:4800 --protocol atp --upstream 10.0.0.8:4800\n  \
    \u{20}                                                  a rack's switch below it\n  \
    fanin switch --listen 0.0.0.0:4800 --protocol goat  on 10.0.0.8, the root\n  \
    fanin switch --listen 0.0.0.0:4800 --protocol goat --upstream 10.0.0.8:4800\n  \
    \u{20}                                                  a rack's switch below it\n  \
    fanin switch --listen 0.0.0.0:4800 --upstream 10.0.0.8:4800\n  \
    \u{20}                                                  a rack, whose root (fanin switch) is 10.0.0.8")]
pub(crate) struct Arguments {
    /// Address and port, TCP and UDP; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = SWITCH_DEFAULT, value_parser = listen)]
    listen: SocketAddr,
    /// How gradients are summed: switchml (in slots, also with a loss bound), atp (in aggregators
    /// on the way to a root) or goat (as atp, by a plan)
    #[arg(long, value_name = "PROTOCOL", default_value = "switchml", value_parser = protocol)]
    protocol: &'static dyn OnSockets,
    /// The next switch towards the root, or the root: this one sums for its own workers, and sends
    /// the sum on
    #[arg(long, value_name = "HOST:PORT")]
    upstream: Option<String>,
    /// With --upstream, ATP and GOAT: aggregators in each shard, for all jobs together; with 0 it
    /// only forwards [default: 4096]
    #[arg(long, value_name = "N")]
    aggregators: Option<u32>,
    /// Cores that sum [default: one in four, at least 2 and at most 8]
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// Memory in each shard, for all jobs together, in units of 256 elements (2.2 kB) [default:
    /// 262144]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pool_units: Option<u32>,
    /// Seconds that a rank's machine may not answer before the rank is taken for dead [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    heartbeat_timeout: Option<Duration>,
    /// Most seconds that ranks may wait for the rest of their job, whatever timeout they have
    /// [default: 3600]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    join_timeout_max: Option<Duration>,
    /// Rate of this machine's link in each direction, for the ranks' plan; with --upstream, of the
    /// link to there [default: what the interface tells]
    #[arg(long, env = "FANIN_RATE", value_parser = said_rate)]
    rate: Option<Rate>,
    /// A file whose first line is what callers of other machines show to see the page at
    /// http://ADDR:PORT/ [default: only callers of this machine see it]
    #[arg(long, value_name = "FILE", env = "FANIN_PAGE_TOKEN_FILE", hide_env_values = true)]
    page_token_file: Option<PathBuf>,
    #[command(flatten)]
    own: Own,
    #[command(flatten)]
    known: Known,
    /// Level of the log on stderr: error, warn, info, debug, or a filter such as
    /// fanin_controller=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "FANIN_LOG")]
    log: String,
    /// Print one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

/// A program reads this when the switch listens.
#[derive(Serialize)]
struct Listening {
    event: &'static str,
    address: SocketAddr,
    shards: usize,
    version: &'static str,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    check(arguments)?;
    log(&arguments.log)?;
    // Before the switch starts: a signal that comes early must find us ready.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let acceptor = arguments.own.acceptor(&arguments.known)?;
    if let Some(upstream) = &arguments.upstream {
        let config = rack(arguments, upstream)?;
        let shards = config.memory.shards.into();
        fanin_controller::raise_descriptors();
        let switch = RackServer::start_behind(config, acceptor, arguments.known.trust()?)?;
        announce(switch.address(), shards, arguments.json)?;
        wait(&mut signals);
        switch.stop();
        return Ok(());
    }
    let defaults = SwitchServerConfig::new(arguments.listen);
    let config = SwitchServerConfig {
        protocol: arguments.protocol,
        shards: shards(arguments),
        pool_units: arguments.pool_units.unwrap_or(defaults.pool_units),
        heartbeat_timeout: arguments.heartbeat_timeout.unwrap_or(defaults.heartbeat_timeout),
        join_timeout_max: arguments.join_timeout_max.unwrap_or(defaults.join_timeout_max),
        rate_bps: arguments.rate.map(|rate| rate.0),
        page_token: page_token(arguments)?,
        ..defaults
    };
    fanin_controller::raise_descriptors();
    let switch = SwitchServer::start_behind(config, acceptor)?;
    announce(switch.address(), config.shards, arguments.json)?;
    wait(&mut signals);
    switch.stop();
    Ok(())
}

/// Cores that sum.
fn shards(arguments: &Arguments) -> usize {
    arguments.shards.unwrap_or_else(SwitchServerConfig::automatic_shards)
}

/// A switch with an upstream.
fn rack(arguments: &Arguments, upstream: &str) -> anyhow::Result<RackServerConfig> {
    let mut config = RackServerConfig::new(arguments.protocol, arguments.listen, upstream);
    let memory = &mut config.memory;
    let shards = shards(arguments);
    memory.shards = u8::try_from(shards).map_err(|_| ServerError::Shards(shards))?;
    memory.pool_units = arguments.pool_units.unwrap_or(memory.pool_units);
    memory.aggregators = arguments.aggregators.unwrap_or(memory.aggregators);
    config.rate_bps = arguments.rate.map(|rate| rate.0);
    config.page_token = page_token(arguments)?;
    Ok(config)
}

/// What callers of other machines show.
fn page_token(arguments: &Arguments) -> anyhow::Result<Option<Token>> {
    Ok(arguments.page_token_file.as_deref().map(Token::of_file).transpose()?)
}

/// A rate, as a rank takes FANIN_RATE: without the blanks around it, and a number alone is bits.
fn said_rate(text: &str) -> Result<Rate, String> {
    let text = text.trim();
    let is_bits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_bits { format!("{text}bit").parse() } else { text.parse() }
}

/// Options of another role or protocol are a mistake, not a wish to be ignored.
fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let (protocol, is_root) = (arguments.protocol, arguments.upstream.is_none());
    let title = protocol.title();
    let of_root = [
        ("--heartbeat-timeout", arguments.heartbeat_timeout.is_some()),
        ("--join-timeout-max", arguments.join_timeout_max.is_some()),
    ];
    let given =
        |options: &[(&'static str, bool)]| options.iter().find(|(_, given)| *given).map(|(name, _)| *name);
    if arguments.aggregators.is_some() && (is_root || !protocol.aggregates()) {
        bail!(
            "--aggregators is for a switch with --upstream whose protocol has some (--protocol atp or goat); leave it out"
        );
    }
    if let Some(option) = given(&of_root).filter(|_| !is_root) {
        bail!("{option} is not for a switch with --upstream, whose root decides that; leave it out");
    }
    if arguments.pool_units.is_some() && !is_root && protocol.aggregates() {
        bail!(
            "--pool-units is not for a switch of {title} with --upstream, which has --aggregators; leave it out"
        );
    }
    Ok(())
}

/// Says that it listens.
fn announce(address: SocketAddr, shards: usize, json: bool) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    output::line(&if json {
        serde_json::to_string(&Listening { event: "listening", address, shards, version })?
    } else {
        let reach = if address.ip().is_loopback() {
            format!("; no other machine reaches it: for that, --listen 0.0.0.0:{}", address.port())
        } else {
            String::new()
        };
        format!(
            "fanin switch {version} listens on {address} (UDP and TCP; page at http://{address}/, metrics at /metrics){reach}"
        )
    })?;
    Ok(())
}

/// Waits until it is told to end.
pub(crate) fn wait(signals: &mut Signals) {
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "stopping");
    }
}

/// Logs as `--log` or the environment says.
pub(crate) fn log(filter: &str) -> anyhow::Result<()> {
    logging::start(filter, "")
        .map_err(|error| anyhow!("--log ({}) is {filter:?}: {error}", logging::VARIABLE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_as_a_rank_reads_it() {
        for text in ["1gbit", " 1gbit\t", "1000000000", " 1000000000 "] {
            assert_eq!(said_rate(text), Ok(Rate(1_000_000_000)), "{text:?}");
        }
        for text in ["10", "", "1 gbit", "fast"] {
            assert!(said_rate(text).is_err(), "{text:?}");
        }
    }
}
