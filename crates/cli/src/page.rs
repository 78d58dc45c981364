//! `fanin page`: what services and their jobs do, as a page for a browser.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use fanin_controller::page::{PageServer, Token, Watch};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::arguments::listen;
use crate::status::asked;
use crate::switch::{log, wait};
use crate::tls::Known;
use crate::{here, output};

/// Serve a page about services, their jobs, and who is late
///
/// Each switch serves one about itself, too, at its own port. This one is about several, and about
/// all services that their jobs tell of. It asks each of them once a second while somebody looks,
/// keeps an hour, and changes nothing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin page                                  this machine's services, at http://127.0.0.1:4880\n  \
    fanin page 10.0.0.9:4800                    a switch, and the services of its jobs\n  \
    fanin page a:4800 b:4800 --listen 0.0.0.0:4880 --token-file token\n  \
    \u{20}                                          for other machines: http://ADDR:4880/#token=...")]
pub(crate) struct Arguments {
    /// Switches, or services of ranks [default: FANIN_SWITCH, or the services on this machine, or
    /// 127.0.0.1:4800]
    #[arg(value_name = "HOST:PORT")]
    services: Vec<String>,
    /// Address and port, TCP; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:4880", value_parser = listen)]
    listen: SocketAddr,
    /// A file whose first line is what callers of other machines show
    #[arg(long, value_name = "FILE", env = "FANIN_PAGE_TOKEN_FILE", hide_env_values = true)]
    token_file: Option<PathBuf>,
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

/// The services that are meant: those that are named, or FANIN_SWITCH's, or those that are here.
pub(crate) fn meant(named: &[String]) -> Vec<String> {
    let of_environment = std::env::var("FANIN_SWITCH").ok();
    let named = if named.is_empty() { of_environment } else { Some(named.join(",")) };
    asked(named.as_deref(), here::services)
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    log(&arguments.log)?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let token = arguments.token_file.as_deref().map(Token::of_file).transpose()?;
    let services = meant(&arguments.services);
    let names = services.join(", ");
    let watched = Watch::of_services(format!("fanin page {names}"), services, true, arguments.known.trust()?);
    let server = PageServer::start(arguments.listen, token, watched)?;
    let address = server.address();
    output::listening(address, arguments.json, &format!("the page about {names} is at http://{address}"))?;
    wait(&mut signals);
    Ok(())
}
