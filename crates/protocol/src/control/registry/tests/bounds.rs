//! Jobs with a loss bound.

use fanin_wire::{IP_UDP_BYTES, block_packet_bytes};

use super::*;
use crate::control::FlowPlan;

fn bound(percent: u32) -> LossBound {
    LossBound::from_millionths(10_000 * percent).expect("below 100 %")
}

fn losing(percent: u32, rank: u32, world_size: u32) -> JoinRequest {
    let (loss_bound, wire_dtype) = (bound(percent), WireDtype::Native);
    JoinRequest { loss_bound, wire_dtype, in_flight: None, ..ask("a", rank, world_size) }
}

#[test]
fn a_job_with_a_loss_bound_is_admitted_with_its_flows_and_pays_for_their_memory() {
    let config = RegistryConfig::default();
    let mut registry = Registry::new(config, Box::new(|| 41)).expect("valid limits");
    let slow = JoinRequest { rate_bps: Some(1_000_000_000), ..losing(1, 0, 2) };
    assert!(matches!(registry.join(at(0), slow), JoinDecision::Waiting(_)));
    let spread = JoinRequest { paths: 8, ..losing(1, 1, 2) };
    let JoinDecision::Complete { outcome: Ok(admission), .. } = registry.join(at(0), spread) else {
        panic!("refused")
    };
    let flows = FlowPlan::new(bound(1), 2, 352, 1_000_000_000).over(8);
    assert_eq!(admission.flows, Some(flows), "as fast as the slowest link, and over the most paths");
    assert_eq!((admission.in_flight, admission.wire_dtype), (flows.flows, WireDtype::Native));
    let job = admission.flow_config().expect("it has a bound").check().expect("a sound job");
    assert_eq!((job.push_bound, job.pull_bound), (bound(1), LossBound::RELIABLE));
    let taken = flows.pool_units(2, 352);
    assert_eq!(registry.pool().free, config.pool_units - taken);
    assert_eq!(start(&mut registry, at(1), "b", 2).flow_config(), None, "who asks for no bound has no flows");
}

#[test]
fn a_full_block_passes_every_path_that_was_measured_for_slots() {
    for mtu in [300, 1500, 9000] {
        for wire_dtype in WireDtype::ALL {
            let mut registry = Registry::new(RegistryConfig::default(), Box::new(|| 41)).expect("valid");
            let JoinDecision::Complete { outcome: Ok(admission), .. } =
                registry.join(at(0), JoinRequest { mtu, wire_dtype, ..losing(1, 0, 1) })
            else {
                panic!("refused")
            };
            assert!(block_packet_bytes(4 * usize::from(admission.elements)) + IP_UDP_BYTES <= mtu);
        }
    }
}

#[test]
fn ranks_that_disagree_on_the_loss_bound_are_all_told_the_same() {
    for (other, said) in [(losing(2, 1, 3), "2 %"), (ask("a", 1, 3), "0 %")] {
        let mut registry = registry();
        registry.join(at(0), losing(1, 2, 3));
        let JoinDecision::Complete { tickets, outcome: Err(reason), .. } = registry.join(at(0), other) else {
            panic!("not told")
        };
        assert_eq!(tickets.len(), 2);
        let message = reason.to_string();
        assert!(
            message.starts_with(&format!("rank 1 lets {said} of a tensor be lost, rank 2 1 %")),
            "{message}"
        );
        assert!(message.contains("FANIN_LOSS_BOUND"), "{message}");
    }
}

#[test]
fn a_loss_bound_is_refused_where_it_cannot_be_kept() {
    let hop = through(7, 0, 1).hops;
    let unserved = Refusal::BoundUnserved { asked: bound(1) };
    assert_eq!(refusal(&mut registry(), JoinRequest { hops: hop, ..losing(1, 0, 1) }), unserved, "a rack");
    let resume = resuming(0, 1, &[1]).resume;
    assert_eq!(refusal(&mut registry(), JoinRequest { resume, ..losing(1, 0, 1) }), unserved, "a restart");
    let of_atp = JoinRequest { protocol: Protocol::Atp, ..losing(1, 0, 1) };
    assert_eq!(refusal(&mut server(), of_atp), unserved);
    assert_eq!(
        refusal(&mut registry(), losing(1, 0, 65)),
        Refusal::TooManyWorkers { asked: 65, max: 64 },
        "who is in a sum is one word"
    );
}
