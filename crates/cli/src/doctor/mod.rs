//! `fanin doctor`: what stands between this machine and a switch, and what mends it.
//!
//! Each check has a limit and makes findings; a check that needs an earlier one that failed is
//! listed as not made.

mod data_path;
mod finding;
mod jobs;
mod machine;
mod own;
mod reach;
mod settings;
mod stranger;

use std::net::SocketAddr;
use std::time::Duration;

use fanin_controller::protocols;
use fanin_controller::{Probe, ProbeReport, SessionError, SwitchStatus, Trust, gauge_at, route};
use fanin_udp::{fill, path_mtu, probe_socket};

use self::finding::{Check, Examination, Finding};
use self::machine::Window;
use self::settings::Setting;
use crate::arguments::seconds;
use crate::tls::Known;

/// For how long a link is filled, and how many bytes are on the way meanwhile, as when ranks join
/// (`_rates.py`).
const MEASURED_FOR: Duration = Duration::from_millis(250);
const MEASURED_WITH: usize = 512_000;

/// Find out why workers here do not reach a switch, or are slow
///
/// Takes the settings of ranks as flags (--wire-dtype, --trace: docs/settings.md), and says of each
/// who decided. Says which machine this is, whether its ranks sum in shared memory, and where their
/// own services would listen. Checks the name, TCP and UDP by a job of one rank, which takes a few
/// slots for a moment. Checks path MTU, segmentation offload, socket buffers, interface, heartbeat,
/// versions, and ranks that are missing. Needs no root. Each finding comes with what mends it.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status:\n  \
    0  no problem; there may be warnings: training works, but not as well as it could\n  \
    1  a problem: training would fail\n  \
    2  the command line cannot be understood\n\n\
    Examples:\n  \
    fanin doctor                                  this machine, and the switch of FANIN_SWITCH if it is set\n  \
    fanin doctor --switch 10.0.0.9:4800\n  \
    fanin doctor --json | jq '.findings[] | select(.verdict != \"ok\")'\n  \
    fanin doctor && torchrun train.py             train only if it can work")]
pub(crate) struct Arguments {
    /// The switches, if any [default: FANIN_SWITCH, or 127.0.0.1:4800 if somebody listens there]
    #[arg(long, value_name = "HOST:PORT[,..]")]
    switch: Option<String>,
    /// Seconds that each step of a check may take
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds, allow_negative_numbers = true)]
    timeout: Duration,
    /// Say what the link to each switch carries, which fills it for a moment; ranks that join next
    /// measure anew
    #[arg(long)]
    measure: bool,
    #[command(flatten)]
    known: Known,
    /// The Python package's knowledge of the ranks' settings, as JSON
    #[arg(long, hide = true, default_value = "[]", value_parser = settings::parse)]
    settings: settings::Settings,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let environment = std::env::var_os("FANIN_SWITCH").map(|value| value.to_string_lossy().into_owned());
    let (switch, settings) = (arguments.switch.as_deref(), &arguments.settings.0);
    let is_named = switch.is_some() || environment.as_deref().is_some_and(|named| !named.is_empty());
    let named = is_named || !own::would_host(settings);
    let chosen = named.then(|| reach::choose(switch, environment.as_deref()));
    let switch = chosen.as_ref().map(|(switch, _)| switch.clone());
    let mut examination = Examination::new(switch.as_deref(), arguments.json);
    examination.note(chosen.map_or_else(reach::none_chosen, |(_, finding)| finding))?;
    examination.note_all(settings::findings(settings))?;
    examination.note(own::machine(settings))?;
    examination.note(own::local())?;
    examination.note_all(own::service(settings, switch.as_deref(), arguments.timeout))?;
    if switch.is_none()
        && let Some(way) = own::way()
    {
        let of_way =
            |finding: &Finding| [Check::Mtu, Check::Offload, Check::Buffers].contains(&finding.check);
        examination.note_all(local(way, settings, None, None).into_iter().filter(of_way).collect())?;
    }
    // Several have commas between, and each is examined.
    for switch in switch.iter().flat_map(|named| named.split(',')) {
        examine(&mut examination, switch, arguments, settings)?;
    }
    examination.finish()
}

fn examine(
    examination: &mut Examination,
    switch: &str,
    arguments: &Arguments,
    settings: &[Setting],
) -> anyhow::Result<()> {
    let patience = arguments.timeout;
    let (name, addresses) = match reach::resolve(switch, patience) {
        Ok((name, addresses, finding)) => {
            examination.note(finding)?;
            (name, addresses)
        }
        Err(finding) => {
            examination.note(finding)?;
            examination.skip(&Check::AFTER_NAME);
            return Ok(());
        }
    };
    let (address, findings, probe) = reach::control(&name, &addresses, patience, &arguments.known.trust()?);
    examination.note_all(findings)?;
    let Some(mut probe) = probe else {
        examination.note_all(local(address, settings, None, None))?;
        examination.skip(&Check::OF_SWITCH);
        return Ok(());
    };
    let status = match probe.status() {
        Ok(status) => status,
        Err(error) => {
            examination.note(reach::lost(&error))?;
            examination.note_all(local(address, settings, None, None))?;
            examination.skip(&Check::OF_SWITCH);
            return Ok(());
        }
    };
    examination.note(reach::version(&status))?;
    examination.note_all(settings::against(settings, &status.protocol))?;
    let report = probe.all_reduce();
    examination.note(data_path::udp(&report, address))?;
    examination.note_all(local(address, settings, Some((&probe, &status)), Some(&report)))?;
    examination.note(own::rates(settings, &name, address, &status))?;
    if arguments.measure {
        let told = own::rate_bps(settings, route(address).as_ref()).into_iter().chain(status.rate_bps).min();
        let measured = measured(&name, patience, &arguments.known.trust()?);
        examination.note(machine::measured(&name, told, measured))?;
    }
    match &report {
        Ok(report) => examination.note(data_path::heartbeat(report))?,
        Err(_) => examination.skip(&[Check::Heartbeat]),
    }
    examination.note(jobs::pool(&status))?;
    examination.note_all(jobs::jobs(&status, &name))?;
    Ok(())
}

/// The bits a second that reach a switch from here, or why that cannot be told.
fn measured(switch: &str, patience: Duration, trust: &Trust) -> Result<u64, String> {
    let (gauge, ticket) = gauge_at(switch, patience, trust).map_err(|error| error.to_string())?;
    fill(gauge, ticket, MEASURED_FOR, MEASURED_WITH).map_err(|error| error.to_string())
}

/// This machine's findings about the way to `address`, with what the switch added to it.
fn local(
    address: SocketAddr,
    settings: &[Setting],
    switch: Option<(&Probe, &SwitchStatus)>,
    report: Option<&Result<ProbeReport, SessionError>>,
) -> Vec<Finding> {
    // Read after the probe, whose packets may have taught the kernel a smaller MTU.
    let mtu = path_mtu(address);
    let protocol = switch.map_or_else(protocols::usual, |(_, status)| protocols::said(&status.protocol));
    let mut findings = vec![data_path::mtu(protocol, &mtu, address, report)];
    let route = route(address);
    match probe_socket(address) {
        Ok(socket) => {
            let window = Window {
                rate_bps: own::rate_bps(settings, route.as_ref()),
                rtt: rtt(switch.map(|(probe, _)| probe), report),
                shards: switch.map_or(1, |(_, status)| u8::try_from(status.shards).unwrap_or(u8::MAX)),
                elements: data_path::chunk_elements(protocol, &mtu, report),
            };
            let io = report.and_then(|report| report.as_ref().ok()).map(|report| report.io);
            findings.push(machine::offload(&socket, io.as_ref(), route.as_ref()));
            findings.push(machine::buffers(&socket, &window));
        }
        Err(error) => {
            findings.push(Finding::problem(
                Check::Buffers,
                format!("this machine gives no socket to {address}: {error}"),
                format!("ip route get {}", address.ip()),
            ));
        }
    }
    findings.push(machine::interface(address, route.as_ref(), settings::value(settings, "rate")));
    findings
}

/// The shortest round trip that was seen: a longer one was waiting for a processor, not for the
/// path.
fn rtt(probe: Option<&Probe>, report: Option<&Result<ProbeReport, SessionError>>) -> Duration {
    let heartbeats = report.and_then(|report| report.as_ref().ok()).map(|report| &report.heartbeats[..]);
    let shortest = heartbeats.and_then(<[Duration]>::first).copied();
    probe.map(Probe::handshake).into_iter().chain(shortest).min().unwrap_or_default()
}
