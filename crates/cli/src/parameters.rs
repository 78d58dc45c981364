//! `fanin parameters`: keeps the latest parameters of asynchronous training, until it is told to
//! stop.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use fanin_parameters::{Server, ServerConfig};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::arguments::listen;
use crate::output;
use crate::switch::{log, wait};

/// Keep the latest parameters of asynchronous training, and add what workers send to them
///
/// For fanin.torch.DeltaOptimizer (BytePS's asynchronous training): each worker sends by how much a
/// step changed its parameters, and gets the latest ones. Several services share the parameters of
/// a training. Listens on TCP alone; who reaches it can use half of the machine's memory, or of its
/// control group's.
///
/// With --snapshots what it has is saved every 10 seconds and when it ends (SIGTERM, SIGINT), and
/// is there again after a restart. The folder is this service's alone. When the last save fails,
/// the exit status is not 0.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin parameters                                            for workers on this machine\n  \
    fanin parameters --listen 0.0.0.0:4801 --snapshots /var/lib/fanin")]
pub(crate) struct Arguments {
    /// Address and port, TCP; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:4801", value_parser = listen)]
    listen: SocketAddr,
    /// Folder for what is saved: who can list it can take part in every training
    #[arg(long, value_name = "FOLDER")]
    snapshots: Option<PathBuf>,
    /// Level of the log on stderr: error, warn, info, debug, or a filter such as
    /// fanin_parameters=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "FANIN_LOG")]
    log: String,
    /// Print one line of JSON when it listens
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    log(&arguments.log)?;
    // Before the service starts: a signal that comes early must find us ready.
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("cannot handle signals")?;
    let config =
        ServerConfig { listen: arguments.listen, snapshots: arguments.snapshots.clone(), trainings: None };
    fanin_controller::raise_descriptors();
    let server = Server::start(&config)?;
    let (address, version) = (server.address(), env!("CARGO_PKG_VERSION"));
    output::listening(
        address,
        arguments.json,
        &format!("fanin parameter service {version} listens on {address} (TCP)"),
    )?;
    wait(&mut signals);
    Ok(server.stop()?)
}
