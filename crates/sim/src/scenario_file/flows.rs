//! `[[background]]`, and the `transport` of flows.

use std::time::Duration;

use toml::Spanned;

use super::error::{Mistake, at};
use super::lookup::{class, host};
use super::schema::{Background, BackgroundKind, File, TransportName, TransportTable};
use crate::net::{Cost, PRIORITIES, Topology, Transport};
use crate::workload::{BackgroundPlan, TransportPlan};

/// Flows of one entry: each is remembered, and looked at in every interval.
const FLOWS_MAX: u32 = 100_000;
/// The largest window that TCP can say (RFC 7323, 2.3).
const WINDOW_MAX_BYTES: u64 = 1 << 30;
/// Duplicate acknowledgements that somebody could wait for.
const DUPLICATES_MAX: u32 = 1_000_000;

pub(super) fn resolve(file: &File, topology: &Topology) -> Result<Vec<BackgroundPlan>, Mistake> {
    let mtu = *file.network.mtu.get_ref();
    file.background.iter().map(|flow| background(topology, mtu, flow)).collect()
}

/// How flows are sent; whether they take marks where the file does not say it, and their
/// `priority`, is their table's.
pub(super) fn transport(
    given: &Option<Spanned<TransportTable>>,
    ecn: &Option<Spanned<bool>>,
    usually_marked: bool,
    priority: &Option<Spanned<u8>>,
) -> Result<TransportPlan, Mistake> {
    let usual = TransportPlan::default();
    let said = ecn.as_ref().map(|ecn| *ecn.get_ref());
    let Some(place) = given else {
        return Ok(TransportPlan { ecn: said.unwrap_or(usually_marked), ..usual });
    };
    let table = place.get_ref();
    match (table.kind, ecn, said, priority) {
        (TransportName::Pias, _, _, Some(priority)) => {
            return Err(at(
                priority,
                "pias gives each segment its queue, by `demotion`; leave `priority` out",
            ));
        }
        (TransportName::Dctcp | TransportName::Pias, Some(ecn), Some(false), _) => {
            return Err(at(ecn, "dctcp and pias live by marks; leave `ecn = false` out, or take `newreno`"));
        }
        (TransportName::Pfabric, Some(ecn), Some(true), _) => {
            return Err(at(ecn, "pfabric takes no notice of marks; leave `ecn = true` out"));
        }
        _ => {}
    }
    let ecn = said.unwrap_or(usually_marked) && table.kind != TransportName::Pfabric;
    if let (Some(demotion), TransportName::Newreno | TransportName::Dctcp | TransportName::Pfabric) =
        (&table.demotion, table.kind)
    {
        return Err(at(demotion, "`demotion` is of `kind = \"pias\"`"));
    }
    if let (Some(duplicates), TransportName::Pfabric) = (&table.duplicates, table.kind) {
        return Err(at(duplicates, "pfabric does not look at duplicate acknowledgements"));
    }
    let transport = match table.kind {
        TransportName::Newreno => Transport::NewReno,
        TransportName::Dctcp => Transport::Dctcp,
        TransportName::Pfabric => Transport::Pfabric,
        TransportName::Pias => Transport::Pias { thresholds_bytes: demotion(place)? },
    };
    let window = |given: &Option<Spanned<fanin_units::Size>>, key: &str| match given {
        Some(size) if !(1..=WINDOW_MAX_BYTES).contains(&size.get_ref().0) => {
            Err(at(size, format!("`{key}` from 1 byte to 1 GiB")))
        }
        size => Ok(size.as_ref().map(|size| size.get_ref().0)),
    };
    let rto_min = match &table.rto_min {
        Some(time) if time.get_ref().0.is_zero() => return Err(at(time, "`rto_min` of more than no time")),
        time => time.as_ref().map(|time| time.get_ref().0),
    };
    let duplicates = match &table.duplicates {
        Some(count) if !(1..=DUPLICATES_MAX).contains(count.get_ref()) => {
            return Err(at(count, format!("from 1 to {DUPLICATES_MAX} duplicates")));
        }
        count => count.as_ref().map(|count| *count.get_ref()),
    };
    Ok(TransportPlan {
        transport,
        ecn,
        window_initial_bytes: window(&table.initial_window, "initial_window")?,
        window_max_bytes: window(&table.receive_window, "receive_window")?.unwrap_or(usual.window_max_bytes),
        rto_min: rto_min.unwrap_or(usual.rto_min),
        duplicates: duplicates.unwrap_or(usual.duplicates),
    })
}

/// PIAS's thresholds: they ascend, and queues that have none are not used.
fn demotion(place: &Spanned<TransportTable>) -> Result<[u64; PRIORITIES - 1], Mistake> {
    let mut thresholds = [u64::MAX; PRIORITIES - 1];
    let Some(given) = &place.get_ref().demotion else {
        let message = "pias needs `demotion`: bytes after which a flow goes one queue down, as in [\"67kB\", \"1.6MB\"]";
        return Err(at(place, message));
    };
    let sizes = given.get_ref();
    if sizes.is_empty() || sizes.len() > thresholds.len() {
        return Err(at(given, format!("from 1 to {} numbers of bytes", thresholds.len())));
    }
    if sizes.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
        return Err(at(given, "`demotion` ascends: a flow never goes up again"));
    }
    for (threshold, size) in thresholds.iter_mut().zip(sizes) {
        *threshold = size.0;
    }
    Ok(thresholds)
}

/// Bits a second, framing included, that a node's cores handle of packets as long as the MTU.
fn host_rate_bps(cost: &Cost, mtu: u32) -> f64 {
    let (frame_bytes, wire_bytes) = (mtu + 14, mtu + 38);
    f64::from(cost.cores) * f64::from(wire_bytes) * 8.0 / cost.of(frame_bytes).as_secs_f64()
}

fn background(topology: &Topology, mtu: u32, flow: &Spanned<Background>) -> Result<BackgroundPlan, Mistake> {
    let plan = flow.get_ref();
    let from = host(topology, plan.from.get_ref(), &plan.from)?;
    let to = host(topology, plan.to.get_ref(), &plan.to)?;
    if from == to {
        return Err(at(&plan.to, "a flow needs two hosts"));
    }
    let rate_bps = match (plan.kind.get_ref(), &plan.rate) {
        (BackgroundKind::Constant, Some(rate)) => Some(rate.get_ref().0),
        (BackgroundKind::Constant, None) => return Err(at(&plan.kind, "a constant flow needs a `rate`")),
        (BackgroundKind::Tcp, None) => None,
        (BackgroundKind::Tcp, Some(rate)) => {
            return Err(at(rate, "a tcp flow finds its rate itself; `rate` is for constant ones"));
        }
    };
    if let (Some(rate), Some((_, link))) = (&plan.rate, topology.neighbours(from).next())
        && rate.get_ref().0 > topology.links()[link.0 as usize].config.rate_bps
    {
        return Err(at(rate, "an impossible rate: the sender's link is slower"));
    }
    if let Some(rate) = &plan.rate {
        let most = host_rate_bps(&topology.get(from).config.sends, mtu);
        if rate.get_ref().0 as f64 > most {
            let message = format!("an impossible rate: the sender's cores handle {:.3} Gbit/s", most / 1e9);
            return Err(at(rate, message));
        }
    }
    let (start, stop) = (plan.start.0, plan.stop.map(|stop| stop.0));
    if stop.is_some_and(|stop| stop <= start) {
        return Err(at(flow, "this flow stops before it starts"));
    }
    if let (Some(table), Some(_)) = (&plan.transport, rate_bps) {
        return Err(at(table, "`transport` is of tcp flows"));
    }
    let transport = transport(&plan.transport, &plan.ecn, rate_bps.is_none(), &plan.priority)?;
    let class = class(&plan.priority, &plan.drop_class, plan.spray)?;
    let size = match &plan.size {
        Some(size) if rate_bps.is_some() => return Err(at(size, "`size` is of tcp flows")),
        Some(size) if size.get_ref().0 == 0 => return Err(at(size, "a flow of at least one byte")),
        size => size.as_ref().map(|size| size.get_ref().0),
    };
    let (count, every) = match (&plan.count, &plan.every) {
        (Some(count), _) if size.is_none() => {
            return Err(at(count, "flows that follow each other need a `size`"));
        }
        (Some(count), _) if !(1..=FLOWS_MAX).contains(count.get_ref()) => {
            return Err(at(count, format!("from 1 to {FLOWS_MAX} flows")));
        }
        (Some(count), Some(every)) => (*count.get_ref(), every.get_ref().0),
        (None, None) => (1, Duration::ZERO),
        (Some(count), None) => return Err(at(count, "`count` needs `every`: how long after the one before")),
        (None, Some(every)) => return Err(at(every, "`every` needs `count`: how many flows")),
    };
    Ok(BackgroundPlan {
        from,
        to,
        rate_bps,
        transport,
        class,
        start,
        stop,
        size,
        count,
        every,
        spread: plan.spread.0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{RACK, ok, wrong};
    use super::*;
    use crate::net::Class;

    fn flow(transport: &str) -> String {
        format!("{RACK}[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"tcp\"\nspray = true\n{transport}")
    }

    #[test]
    fn transports_have_their_keys_and_defaults() {
        let of = |text: &str| ok(&flow(text)).background[0];
        let usual = TransportPlan { ecn: true, ..TransportPlan::default() };
        assert_eq!(of("").transport, usual);
        assert_eq!(of("").class, Class { sprayed: true, ..Class::DEFAULT });
        let all = of(
            "transport = { kind = \"dctcp\", initial_window = \"30kB\", receive_window = \"1MB\", rto_min = \"5ms\", duplicates = 5 }\n",
        );
        let expected = TransportPlan {
            transport: Transport::Dctcp,
            window_initial_bytes: Some(30_000),
            window_max_bytes: 1_000_000,
            rto_min: Duration::from_millis(5),
            duplicates: 5,
            ..usual
        };
        assert_eq!(all.transport, expected);
        let pias = of("transport = { kind = \"pias\", demotion = [\"1kB\", \"9kB\"] }\n").transport.transport;
        let rest = u64::MAX;
        assert_eq!(pias, Transport::Pias { thresholds_bytes: [1000, 9000, rest, rest, rest, rest, rest] });
        let pfabric = of("transport = { kind = \"pfabric\" }\n").transport;
        assert_eq!((pfabric.transport, pfabric.ecn), (Transport::Pfabric, false));
    }

    #[test]
    fn transports_that_cannot_be_are_refused_with_the_cure() {
        for (transport, words) in [
            ("{ kind = \"dctpc\" }", "did you mean `dctcp`?"),
            ("{ kind = \"dctcp\", rto = \"1ms\" }", "did you mean `rto_min`?"),
            ("{ kind = \"pias\" }", "needs `demotion`"),
            ("{ kind = \"pias\", demotion = [\"9kB\", \"1kB\"] }", "ascends"),
            ("{ kind = \"pias\", demotion = [] }", "from 1 to 7"),
            ("{ kind = \"dctcp\", demotion = [\"9kB\"] }", "`kind = \"pias\"`"),
            ("{ kind = \"pfabric\", duplicates = 3 }", "does not look at duplicate"),
            ("{ duplicates = 0 }", "from 1 to"),
            ("{ rto_min = \"0ms\" }", "more than no time"),
            ("{ initial_window = \"0B\" }", "`initial_window` from 1 byte to 1 GiB"),
            ("{ receive_window = \"1000000GB\" }", "`receive_window` from 1 byte to 1 GiB"),
            ("{ kind = \"pias\", demotion = [\"9kB\"] }\npriority = 3", "leave `priority` out"),
            ("{ kind = \"pias\", demotion = [\"9kB\"] }\necn = false", "live by marks"),
            ("{ kind = \"dctcp\" }\necn = false", "live by marks"),
            ("{ kind = \"pfabric\" }\necn = true", "no notice of marks"),
        ] {
            let message = wrong(&flow(&format!("transport = {transport}\n")));
            assert!(message.contains(words), "{transport}: {message}");
        }
        let constant = flow("rate = \"1Gbit\"\ntransport = {}\n").replace("\"tcp\"", "\"constant\"");
        assert!(wrong(&constant).contains("`transport` is of tcp flows"));
    }
}
