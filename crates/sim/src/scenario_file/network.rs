//! `[network]`, `[[queue]]`, and which switches are programmable: nodes and links, checked.
//! Properties of single ones of them are in `parts`. `parts`.

use std::time::Duration;

use toml::Spanned;

use super::error::{Mistake, at, unknown};
use super::lookup::number_below;
use super::parts;
use super::schema::{File, OrderName, Queue, SelectiveDropping, SwitchTable, TopologyName, WhichSwitches};
use crate::net::{
    Buffer, Cost, DROP_CLASSES, LinkConfig, NodeConfig, Order, PRIORITIES, Parts, Programmable, QueueConfig,
    Time, Topology, TopologyError,
};
use fanin_units::Size;

/// Cores of a host: more than any machine has.
const CORES_MAX: u16 = 1024;

pub(super) fn resolve(file: &File) -> Result<Topology, Mistake> {
    let (network, switch) = (&file.network, &file.switch);
    let mtu = *network.mtu.get_ref();
    let link = |rate: u64, delay: Duration| LinkConfig::new(rate, delay).with_mtu(mtu);
    let core_rate = network.core_rate.as_ref().unwrap_or(&network.rate);
    let mut queue = QueueConfig::tail_drop(holds_a_packet(&network.queue, mtu)?);
    if let Some(threshold) = &network.ecn {
        if threshold.get_ref().0 >= network.queue.get_ref().0 {
            return Err(at(threshold, "`ecn` marks nothing when it is not below `queue`"));
        }
        queue = queue.with_ecn(threshold.get_ref().0);
    }
    queue.ecn_by_port = network.ecn_by_port;
    if network.order == OrderName::LeastRemaining {
        queue.order = Order::LeastRemaining;
    }
    let mut node = NodeConfig::new(queue);
    if let Some(place) = &network.selective_dropping {
        node.queues = selective_dropping(place, &queue)?;
    }
    node.receives = Cost::of_packet(switch.processing.0.into());
    for queue in &file.queue {
        set_queues(mtu, &mut node, queue)?;
    }
    if let Some(memory) = buffer(&network.port_buffer, &network.shared_buffer, Some(&network.alpha), mtu)? {
        node.buffer = memory;
    }
    let delay = network.delay.0;
    let mut host = NodeConfig::host();
    for nic in &mut host.queues {
        nic.order = queue.order;
        nic.ecn_threshold_bytes = queue.ecn_threshold_bytes.filter(|_| network.nic_ecn);
    }
    let (packet, byte) = (Time(network.host_packet_cost.0), Time(network.host_byte_cost.0));
    host.sends = Cost { packet, byte, cores: cores(&network.host_cores)? };
    host.receives = host.sends;
    let parts = Parts {
        host,
        switch: node,
        edge: link(network.rate.get_ref().0, delay),
        core: link(core_rate.get_ref().0, network.core_delay.map_or(delay, |delay| delay.0)),
    };
    let name = *network.topology.get_ref();
    let given = [
        ("hosts", &network.hosts, ![TopologyName::Figure9, TopologyName::Own].contains(&name)),
        ("leaves", &network.leaves, name == TopologyName::LeafSpine),
        ("spines", &network.spines, name == TopologyName::LeafSpine),
        ("k", &network.k, name == TopologyName::FatTree),
    ];
    for (key, value, means) in given {
        match value {
            Some(value) if !means => {
                return Err(at(value, format!("`{key}` has no meaning for this topology")));
            }
            None if means && (key, name) != ("hosts", TopologyName::FatTree) => {
                return Err(at(&network.topology, format!("this topology needs `{key}`")));
            }
            _ => {}
        }
    }
    let number = |value: &Option<Spanned<usize>>| value.as_ref().map_or(0, |value| *value.get_ref());
    let built = match name {
        TopologyName::Rack => Topology::one_rack(number(&network.hosts), &parts),
        TopologyName::Dumbbell => Topology::dumbbell(number(&network.hosts), number(&network.hosts), &parts),
        TopologyName::Figure9 => Ok(Topology::figure9(&parts)),
        TopologyName::LeafSpine => Topology::leaf_spine(
            number(&network.leaves),
            number(&network.spines),
            number(&network.hosts),
            &parts,
        ),
        TopologyName::Own => Ok(Topology::new()),
        TopologyName::FatTree => {
            let k = number(&network.k);
            Topology::fat_tree(k, network.hosts.as_ref().map_or(k / 2, |hosts| *hosts.get_ref()), &parts)
        }
    };
    let mut topology = built.map_err(|error| at(&network.topology, error))?;
    parts::apply(file, &parts, &mut topology)?;
    set_programmable(&mut topology, switch)?;
    topology.check().map_err(|error| match error {
        TopologyError::Rate(_) => at(&network.rate, error),
        TopologyError::Mtu(_) => at(&network.mtu, "the MTU must be from 68 to 65535 bytes"),
        error => at(&network.topology, error),
    })?;
    Ok(topology)
}

/// How many cores send, and as many receive.
pub(super) fn cores(given: &Option<Spanned<u16>>) -> Result<u16, Mistake> {
    match given {
        Some(place) if !(1..=CORES_MAX).contains(place.get_ref()) => {
            Err(at(place, format!("a node has from 1 to {CORES_MAX} cores for each direction")))
        }
        given => Ok(given.as_ref().map_or(1, |cores| *cores.get_ref())),
    }
}

/// A memory that a packet fits into.
pub(super) fn holds_a_packet(bytes: &Spanned<Size>, mtu: u32) -> Result<u64, Mistake> {
    match bytes.get_ref().0 {
        bytes if bytes >= mtu.into() => Ok(bytes),
        _ => Err(at(bytes, "this holds not even one packet: make it longer than the MTU")),
    }
}

/// DLCP's queues of a port.
fn selective_dropping(
    place: &Spanned<SelectiveDropping>,
    queue: &QueueConfig,
) -> Result<[QueueConfig; PRIORITIES], Mistake> {
    let SelectiveDropping { threshold, step } = place.get_ref();
    if *queue != QueueConfig::tail_drop(queue.limit_bytes) {
        return Err(at(
            place,
            "`selective_dropping` marks by its own thresholds, in the order of arrival: no `ecn`, no `order`",
        ));
    }
    if !(step.is_finite() && *step >= 0.0) || threshold.0 == 0 {
        return Err(at(place, "a `threshold` of at least one byte, and a `step` that is not negative"));
    }
    let queues = QueueConfig::dlcp(queue.limit_bytes, threshold.0, *step);
    let highest = queues[PRIORITIES - 1].ecn_threshold_bytes.unwrap_or(0);
    if highest >= queue.limit_bytes {
        let message = format!(
            "the threshold of the last queue is {highest} bytes, and a queue holds {}: nothing would be dropped selectively",
            queue.limit_bytes
        );
        return Err(at(place, message));
    }
    Ok(queues)
}

/// Sets the queues of every switch from one entry.
fn set_queues(mtu: u32, node: &mut NodeConfig, entry: &Spanned<Queue>) -> Result<(), Mistake> {
    let queue = entry.get_ref();
    let priority = number_below(&queue.priority, PRIORITIES, "priority")?;
    let drop_class = number_below(&queue.drop_class, DROP_CLASSES, "drop_class")?;
    let threshold = match (drop_class, &queue.drop_above) {
        (Some(class), Some(above)) => Some((class, above)),
        (None, None) => None,
        _ => return Err(at(entry, "selective dropping needs both `drop_class` and `drop_above`")),
    };
    let meant = priority.map_or(0..PRIORITIES, |priority| priority.into()..usize::from(priority) + 1);
    for config in &mut node.queues[meant] {
        if let Some(limit) = &queue.limit {
            config.limit_bytes = holds_a_packet(limit, mtu)?;
        }
        if let Some(ecn) = &queue.ecn {
            config.ecn_threshold_bytes = Some(ecn.get_ref().0);
        }
        if config.ecn_threshold_bytes.is_some_and(|threshold| threshold >= config.limit_bytes) {
            return Err(at(entry, "`ecn` marks nothing when it is not below what the queue holds"));
        }
        if let Some((class, above)) = threshold {
            if above.get_ref().0 >= config.limit_bytes {
                return Err(at(
                    above,
                    "`drop_above` drops nothing when it is not below what the queue holds",
                ));
            }
            *config = config.with_drop_threshold(class, above.get_ref().0);
        }
    }
    Ok(())
}

/// The memory that queues share, if any is given.
pub(super) fn buffer(
    port: &Option<Spanned<Size>>,
    shared: &Option<Spanned<Size>>,
    alpha: Option<&Spanned<f64>>,
    mtu: u32,
) -> Result<Option<Buffer>, Mistake> {
    if let Some(alpha) = alpha.filter(|alpha| !(alpha.get_ref().is_finite() && *alpha.get_ref() > 0.0)) {
        return Err(at(alpha, "`alpha` must be a number greater than zero"));
    }
    match (port, shared) {
        (Some(port), Some(_)) => {
            Err(at(port, "a switch's memory is either each port's (`port_buffer`) or all its ports'"))
        }
        (Some(port), None) => Ok(Some(Buffer::PerPort { bytes: holds_a_packet(port, mtu)? })),
        (None, Some(shared)) => {
            let alpha = alpha.map_or(1.0, |alpha| *alpha.get_ref());
            Ok(Some(Buffer::Shared { bytes: holds_a_packet(shared, mtu)?, alpha }))
        }
        (None, None) => Ok(None),
    }
}

fn set_programmable(topology: &mut Topology, switch: &SwitchTable) -> Result<(), Mistake> {
    let Some(which) = &switch.programmable else {
        return topology
            .set_programmable(&Programmable::Share(1.0))
            .map_err(|error| at(&switch.aggregators, error));
    };
    let chosen = match which.get_ref() {
        WhichSwitches::Names(names) => {
            for name in names {
                if !topology.switches().any(|node| topology.get(node).name == *name) {
                    let known = topology.switches().map(|node| topology.get(node).name.as_str());
                    return Err(at(which, unknown("switch", name, known)));
                }
            }
            Programmable::Names(names.clone())
        }
        WhichSwitches::Layers(layers) => Programmable::Layers(layers.clone()),
        WhichSwitches::Share(share) => Programmable::Share(*share),
    };
    topology.set_programmable(&chosen).map_err(|error| at(which, error))
}
