//! `[[parameter_server]]`: hosts found, tensors listed.

use std::time::Duration;

use toml::Spanned;

use super::error::{Mistake, at};
use super::flows::transport;
use super::jobs;
use super::lookup::{class, hosts};
use super::schema::{File, ParameterServer};
use crate::net::{NodeId, Topology};
use crate::workload::models::{FLOPS_PER_S, Layer};
use crate::workload::{ParameterServerPlan, Sends, TensorPlan};

const ELEMENT_BYTES: u64 = 4;
/// Flows of one entry.
const FLOWS_MAX: usize = 1 << 22;

pub(super) fn resolve(file: &File, topology: &Topology) -> Result<Vec<ParameterServerPlan>, Mistake> {
    let entries = file.parameter_server.iter().enumerate();
    entries.map(|(number, entry)| resolve_one(topology, number, entry)).collect()
}

fn resolve_one(
    topology: &Topology,
    number: usize,
    place: &Spanned<ParameterServer>,
) -> Result<ParameterServerPlan, Mistake> {
    let entry = place.get_ref();
    let all: Vec<NodeId> = topology.hosts().collect();
    let workers = hosts(topology, &all, &entry.workers)?;
    let servers = match &entry.servers {
        Some(given) => hosts(topology, &workers, given)?,
        None => workers.clone(),
    };
    let tensors = tensors(entry)?;
    let divides = |tensor: &&TensorPlan| tensor.bytes > entry.divide_above.0;
    let divided = tensors.iter().filter(divides).count();
    let parts = tensors.len() - divided + divided.saturating_mul(servers.len());
    let flows = workers.len().saturating_mul(parts);
    if flows > FLOWS_MAX {
        let message = format!(
            "{flows} flows, at most {FLOWS_MAX}: fewer workers or servers, or a larger `divide_above`"
        );
        return Err(at(place, message));
    }
    if servers == workers && workers.len() == 1 {
        return Err(at(&entry.workers, "the only worker is beside the only server: nothing would be sent"));
    }
    Ok(ParameterServerPlan {
        name: entry.name.clone().unwrap_or_else(|| format!("servers{number}")),
        workers,
        servers,
        tensors,
        divide_above_bytes: entry.divide_above.0,
        draw: entry.draw,
        jitter: entry.jitter.as_ref().map_or(0.0, |jitter| jitter.get_ref().0),
        start: entry.start.0,
        class: class(&entry.priority, &entry.drop_class, entry.spray)?,
        sends: sends(entry)?,
    })
}

/// Connections, unless it says DLCP.
fn sends(entry: &ParameterServer) -> Result<Sends, Mistake> {
    let Some(dlcp) = &entry.dlcp else {
        return Ok(Sends::Connections(transport(&entry.transport, &entry.ecn, false, &entry.priority)?));
    };
    if let Some(place) = &entry.transport {
        return Err(at(place, "flows are sent either by a `transport` or by `dlcp`"));
    }
    jobs::refuse(
        &entry.ecn,
        "ecn",
        "connections, and `dlcp`'s packets say by themselves whether they are marked",
    )?;
    jobs::refuse(
        &entry.priority,
        "priority",
        "connections, and `dlcp`'s packets say by themselves which queue they are for",
    )?;
    Ok(Sends::Dlcp(dlcp.resolve()?))
}

fn tensors(entry: &ParameterServer) -> Result<Vec<TensorPlan>, Mistake> {
    let divided = match &entry.compression {
        Some(place) if !(1.0..=1e6).contains(place.get_ref()) => {
            return Err(at(place, "`compression` divides; from 1 to 1e6"));
        }
        given => given.as_ref().map_or(1.0, |given| *given.get_ref()),
    };
    let compressed = |bytes: u64| ((bytes as f64 / divided).ceil() as u64).max(1);
    match (&entry.tensor, &entry.model) {
        (Some(tensor), None) => {
            jobs::refuse(&entry.batch, "batch", "a `model`")?;
            jobs::refuse(&entry.flops, "flops", "a `model`")?;
            jobs::refuse(&entry.jitter, "jitter", "a `model`")?;
            let bytes = tensor.get_ref().0;
            if !(1..=1 << 40).contains(&bytes) {
                return Err(at(tensor, "a tensor has from 1 byte to 1 TiB"));
            }
            Ok(vec![TensorPlan { bytes: compressed(bytes), ready: Duration::ZERO }])
        }
        (None, Some(name)) => {
            let model = jobs::model(name)?;
            let batch = jobs::batch(&entry.batch, jobs::BATCH)?;
            let flops = jobs::number(&entry.flops, FLOPS_PER_S, 1.0, jobs::FLOPS_MEANING)?;
            let mut ready = Duration::ZERO;
            let mut tensors = Vec::new();
            let layers: Vec<Layer> = model.layers();
            for layer in layers.iter().rev() {
                ready += layer.backward(batch, flops);
                let of_layer = layer.tensors().map(|parameters| parameters * ELEMENT_BYTES);
                tensors.extend(of_layer.map(|bytes| TensorPlan { bytes: compressed(bytes), ready }));
            }
            Ok(tensors)
        }
        (Some(tensor), Some(_)) => Err(at(tensor, "either a `tensor` or a `model`")),
        (None, None) => {
            Err(at(&entry.workers, "nothing to send: give a `tensor` (a size) or a `model` (a name)"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{RACK, ok, wrong};
    use super::*;
    use crate::net::Class;

    #[test]
    fn parameter_servers_have_their_keys_and_mistakes() {
        let entry = |keys: &str| format!("{RACK}[[parameter_server]]\n{keys}");
        let plan = ok(&entry("workers = [\"h1\", \"h2\"]\nservers = [\"h3\"]\ntensor = \"3MB\"\ncompression = 2.0\nstart = \"1ms\"\nname = \"push\"\nspray = true\npriority = 2\necn = true\n"))
            .parameter_servers[0]
            .clone();
        assert_eq!(plan.tensors, [TensorPlan { bytes: 1_500_000, ready: Duration::ZERO }]);
        assert_eq!(
            (plan.name.as_str(), plan.start, plan.divide_above_bytes),
            ("push", Duration::from_millis(1), 4_000_000)
        );
        assert_eq!(plan.class, Class { priority: 2, sprayed: true, ..Class::DEFAULT });
        let Sends::Connections(connections) = plan.sends else { panic!("they are connections") };
        assert!(connections.ecn && plan.workers.len() == 2 && plan.servers.len() == 1);
        for (keys, words) in [
            ("workers = 4\n", "give a `tensor`"),
            ("workers = 4\ntensor = \"1MB\"\nmodel = \"vgg16\"\n", "either a `tensor` or a `model`"),
            ("workers = 4\nmodel = \"resnet5\"\n", "did you mean `resnet50`?"),
            ("workers = 4\ntensor = \"1MB\"\nbatch = 3\n", "`batch` is about a `model`"),
            ("workers = 10\ntensor = \"1MB\"\n", "from 1 to 9 hosts"),
            ("workers = 3\nservers = 4\ntensor = \"1MB\"\n", "from 1 to 3 hosts"),
            ("workers = [\"h1\", \"h1\"]\ntensor = \"1MB\"\n", "each once"),
            ("workers = [\"g1\"]\ntensor = \"1MB\"\n", "unknown host `g1`"),
            ("workers = 1\ntensor = \"1MB\"\n", "nothing would be sent"),
            ("workers = 4\ntensor = \"0B\"\n", "from 1 byte"),
            ("workers = 4\ntensor = \"1MB\"\ncompression = 0.5\n", "from 1 to 1e6"),
            ("workers = 4\ntensor = \"1MB\"\njitter = \"10%\"\n", "`jitter` is about a `model`"),
            ("workers = 4\nmodel = \"vgg16\"\nbatch = 4294967295\n", "from 1 to 1000000 samples"),
            ("workers = 4\ntensor = \"1MB\"\nsplit = \"1MB\"\n", "unknown key `split`"),
            ("workers = 4\ntensor = \"1MB\"\ndlcp = { bound = \"1%\" }\n", "`bound`"),
            ("workers = 4\ntensor = \"1MB\"\ndlcp = { loss_bound = \"100%\" }\n", "less than 100%"),
            (
                "workers = 4\ntensor = \"1MB\"\ndlcp = {}\ntransport = {}\n",
                "either by a `transport` or by `dlcp`",
            ),
            ("workers = 4\ntensor = \"1MB\"\ndlcp = {}\npriority = 1\n", "which queue they are for"),
            ("workers = 4\ntensor = \"1MB\"\ndlcp = {}\necn = true\n", "whether they are marked"),
        ] {
            let message = wrong(&entry(keys));
            assert!(message.contains(words), "{keys}: {message}");
        }
    }
}
