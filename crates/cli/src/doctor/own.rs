//! The findings for a rank here without a switch: which machine this is, whether its ranks sum in
//! shared memory, and where its own service would listen.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use fanin_controller::protocols;
use fanin_controller::{
    Probe, ProbeSum, Route, SwitchServer, SwitchServerConfig, SwitchStatus, Trust, interface_address,
    linked_address, machine_id, memory_of_ranks, route, subnet_of, switch_address,
};
use fanin_units::Rate;

use super::finding::{Check, Finding};
use super::machine::{self, UNTOLD};
use super::settings::{Setting, value};
use crate::arguments::SWITCH_DEFAULT;

/// The variable in which the launcher names the store, and the one that chooses an interface for
/// Gloo and for services.
const STORE: &str = "MASTER_ADDR";
const INTERFACE: &str = "GLOO_SOCKET_IFNAME";
/// Ranks that shared memory is judged for.
const RANKS: u32 = 8;
/// Only a route is asked for; nothing is sent.
const ANY_PORT: u16 = 9;

/// Whether ranks with these settings would host services where no switch is named, and nobody is
/// where one is looked for.
pub(super) fn would_host(settings: &[Setting]) -> bool {
    let switch: SocketAddr = SWITCH_DEFAULT.parse().unwrap_or(SocketAddr::from(([127, 0, 0, 1], 4800)));
    value(settings, "protocol").is_none_or(|protocol| protocol == "switchml")
        && value(settings, "plan").is_none_or(|plan| plan != "switch")
        && TcpStream::connect_timeout(&switch, Duration::from_millis(200)).is_err()
}

/// Which machine ranks here are on.
pub(super) fn machine(settings: &[Setting]) -> Finding {
    let id = machine_id();
    let message = match value(settings, "machine") {
        Some(name) => format!(
            "{name}, as FANIN_MACHINE says: ranks with the same name are on this machine (it is {id})"
        ),
        None => format!("{id}: ranks with the same boot, network, /dev/shm and user are on this machine"),
    };
    Finding::ok(Check::Machine, message)
}

/// Whether ranks of this machine can sum in shared memory.
pub(super) fn local() -> Finding {
    let memory = memory_of_ranks(RANKS);
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let room = memory.room.as_ref().map_or_else(
        |error| format!("/dev/shm does not say how large it is ({error})"),
        |(free, all)| format!("/dev/shm has {} of {} free", mib(*free), mib(*all)),
    );
    let need = format!("{RANKS} ranks need {}", mib(memory.bytes as u64));
    match memory.usable {
        Ok(()) => Finding::ok(
            Check::Local,
            format!("ranks of this machine sum in shared memory first: {room}, {need}"),
        ),
        Err(error) => Finding::warning(
            Check::Local,
            format!("ranks of this machine would sum over loopback: {error} ({room}, {need})"),
            "give /dev/shm more room: docker run --shm-size 1g, or mount -o remount,size=1g /dev/shm",
        ),
    }
}

/// The rate of this machine's link to a switch, as FANIN_RATE or the interface says.
pub(super) fn rate_bps(settings: &[Setting], route: Option<&Route>) -> Option<u64> {
    let said = value(settings, "rate").and_then(|said| said.parse::<Rate>().ok());
    said.map(|rate| rate.0).or_else(|| route?.rate_bps)
}

/// The known facts of the links from whose rates a plan follows.
pub(super) fn rates(
    settings: &[Setting],
    switch: &str,
    address: SocketAddr,
    status: &SwitchStatus,
) -> Finding {
    let is_planned = value(settings, "plan").is_none_or(|plan| plan == "auto")
        && protocols::said(&status.protocol).is_divided()
        // Servers behind switches have equal shares.
        && !protocols::said(&status.protocol).aggregates()
        // If racks are named, each sums for its own ranks.
        && status.relays.is_empty();
    if !is_planned {
        return Finding::ok(Check::Rates, "who sums how much does not follow from them here");
    }
    if address.ip().is_loopback() {
        return Finding::ok(Check::Rates, format!("no link leads to {switch}, which is on this machine"));
    }
    machine::rates(switch, rate_bps(settings, route(address).as_ref()), status.rate_bps)
}

/// The interfaces that the user names, in their order.
fn named() -> Vec<String> {
    let said = std::env::var(INTERFACE).unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    for name in said.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if names.iter().all(|other| other != name) {
            names.push(name.into());
        }
    }
    names
}

/// The address of an interface that the user names, and why it is used. Services listen at `others`
/// already.
fn address_of(
    interface: &str,
    is_one_of_several: bool,
    others: &[IpAddr],
) -> Result<(IpAddr, String), Finding> {
    let problem = |cause: String, mend: String| Finding::problem(Check::Address, cause, mend);
    let found = if is_one_of_several { linked_address(interface) } else { interface_address(interface) };
    let found = found.map_err(|error| {
        problem(
            format!("{INTERFACE} is {interface:?}: {error}"),
            format!("export {INTERFACE}=NAME of one of: ip -br address"),
        )
    })?;
    if let Some(subnet) = subnet_of(found)
        && let Some(other) = others.iter().find(|other| subnet_of(**other) == Some(subnet))
    {
        return Err(problem(
            format!(
                "{found} ({interface}) is in the subnet of {other}: Linux sends all packets of both by one \
                 interface, so ranks would not use this one"
            ),
            format!("give each interface a subnet of its own, or leave {interface} out of {INTERFACE}"),
        ));
    }
    let names = if is_one_of_several { " names " } else { "=" };
    let says = if is_one_of_several { "" } else { " says so" };
    Ok((found, format!("{INTERFACE}{names}{interface}{says}")))
}

/// The address where this machine's service would listen if the user names no interface, and why.
/// The way to `switch` may decide.
fn address(switch: Option<&str>) -> Result<(IpAddr, String), Finding> {
    let said = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(store) = said(STORE) {
        let routed = way().and_then(route).ok_or_else(|| {
            Finding::problem(
                Check::Address,
                format!("there is no way to {STORE}={store}"),
                format!("getent hosts {store}; ip route get {store}"),
            )
        })?;
        return Ok((routed.local, format!("the route to the store ({STORE}={store}) leaves from there")));
    }
    if let Some(switch) = switch
        && let Some(routed) = way_to(switch).and_then(route)
    {
        return Ok((
            routed.local,
            format!("{STORE} is not set here, and the route to {switch} leaves from there"),
        ));
    }
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    let own = (name, ANY_PORT).to_socket_addrs().into_iter().flatten().map(|address| address.ip());
    let own =
        own.into_iter().find(|ip| route((*ip, ANY_PORT).into()).is_some_and(|route| route.local == *ip));
    let why = format!(
        "{STORE} is not set here, and this machine's name ({name}) is there; the route to torch's store decides"
    );
    Ok((own.unwrap_or(Ipv4Addr::LOCALHOST.into()), why))
}

fn way_to(switch: &str) -> Option<SocketAddr> {
    let first = switch.split(',').next()?;
    switch_address(first).ok()?.to_socket_addrs().ok()?.next()
}

/// The known way to other ranks: the way to the store.
pub(super) fn way() -> Option<SocketAddr> {
    let store = std::env::var(STORE).ok()?;
    (store, ANY_PORT).to_socket_addrs().ok()?.next()
}

/// The interface and the rate of this machine's link, and whether a service can be hosted there.
pub(super) fn service(settings: &[Setting], switch: Option<&str>, patience: Duration) -> Vec<Finding> {
    let names = named();
    if names.is_empty() {
        return match address(switch) {
            Ok(found) => service_at(found, settings, switch, patience),
            Err(finding) => vec![finding],
        };
    }
    let mut findings = Vec::new();
    let mut used = Vec::new();
    for name in &names {
        match address_of(name, names.len() > 1, &used) {
            Ok(found) => {
                used.push(found.0);
                findings.extend(service_at(found, settings, switch, patience));
            }
            Err(finding) => findings.push(finding),
        }
    }
    findings
}

/// As [`service`], at one of this machine's addresses.
fn service_at(
    (address, why): (IpAddr, String),
    settings: &[Setting],
    switch: Option<&str>,
    patience: Duration,
) -> Vec<Finding> {
    let of_interface = route((address, ANY_PORT).into());
    let interface =
        fanin_controller::interface_of(address).unwrap_or_else(|| "an interface without a name".into());
    let told = fanin_controller::interface_rate_bps(&interface);
    let gigabits = |bps: f64| format!("{} Gbit/s", bps / 1e9);
    let rate = match (value(settings, "rate"), told) {
        (Some(said), told) => {
            let told = told.map_or("nothing".into(), |rate| gigabits(rate as f64));
            format!("its link carries {said}, as FANIN_RATE says (the interface tells {told})")
        }
        (None, Some(rate)) => format!("its link carries {}, as the interface tells", gigabits(rate as f64)),
        (None, None) => format!("it tells no rate, and FANIN_RATE says none: {UNTOLD}"),
    };
    let facts = format!("{address} ({interface}): {why}; {rate}");
    // If nothing but a switch of this machine is named, other machines have no part.
    let is_own = [STORE, INTERFACE].iter().all(|name| std::env::var_os(name).is_none()) && switch.is_some();
    let mut findings = vec![if address.is_loopback() && of_interface.is_some() && !is_own {
        Finding::warning(
            Check::Address,
            format!("{facts}. No other machine reaches it"),
            format!(
                "set {STORE} as the ranks have it, or export {INTERFACE}=NAME of the interface to the others"
            ),
        )
    } else {
        Finding::ok(Check::Address, facts)
    }];
    findings.push(hosted(settings, address, patience));
    findings
}

/// Hosts a service for a moment.
fn hosted(settings: &[Setting], address: IpAddr, patience: Duration) -> Finding {
    let said = |name| value(settings, name).map(|text| (name, text));
    let protocol = said("protocol").filter(|(_, text)| *text != "switchml");
    let off = protocol.or_else(|| said("plan").filter(|(_, text)| *text == "switch"));
    if let Some((name, text)) = off {
        return Finding::ok(Check::Service, format!("ranks here host none: {name}={text}"));
    }
    let cannot = |cause: String| {
        Finding::problem(
            Check::Service,
            format!("ranks here cannot host a service at {address}: {cause}"),
            "export FANIN_PLAN=switch, and name a switch (fanin switch) in FANIN_SWITCH",
        )
    };
    let server = match SwitchServer::start(SwitchServerConfig::new((address, 0).into())) {
        Ok(server) => server,
        Err(error) => return cannot(error.to_string()),
    };
    let at = server.address();
    let summed =
        Probe::open(&at.to_string(), patience, &Trust::default()).and_then(|mut probe| probe.all_reduce());
    server.stop();
    match summed {
        Ok(report) if matches!(report.sum, ProbeSum::Right { .. }) => Finding::ok(
            Check::Service,
            format!(
                "the first rank of this machine can host one: it listened on TCP and UDP {at} for a moment, and summed"
            ),
        ),
        Ok(report) => cannot(format!(
            "its packets to itself do not come back ({:?}); is UDP filtered here?",
            report.sum
        )),
        Err(error) => cannot(error.to_string()),
    }
}
