//! Jobs with a loss bound.

use fanin_wire::{FlowId, IP_UDP_BYTES, block_packet_bytes};

use super::*;
use crate::dlcp::{self, FlowPlan};

fn bound(percent: u32) -> LossBound {
    LossBound::from_millionths(10_000 * percent).expect("below 100 %")
}

fn losing(percent: u32, rank: u32, world_size: u32) -> JoinRequest {
    let (loss_bound, wire_dtype) = (bound(percent), WireDtype::Native);
    let agreed = Agreed { loss_bound, wire_dtype, ..Agreed::default() };
    JoinRequest { protocol: "dlcp".into(), agreed, ..ask("a", rank, world_size) }
}

#[test]
fn a_job_with_a_loss_bound_is_admitted_with_its_flows_and_pays_for_their_memory() {
    let config = RegistryConfig::default();
    let mut registry = Registry::new(config, protocols(), Box::new(|| 41)).expect("valid limits");
    let slow = JoinRequest { rate_bps: Some(1_000_000_000), ..losing(1, 0, 2) };
    assert!(matches!(registry.join(at(0), slow), JoinDecision::Waiting(_)));
    let spread = JoinRequest { paths: 8, ..losing(1, 1, 2) };
    let JoinDecision::Complete { outcome: Ok(admission), .. } = registry.join(at(0), spread) else {
        panic!("refused")
    };
    let flows = FlowPlan::new(bound(1), 2, 352, 1_000_000_000).over(8);
    let Terms { in_flight, wire_dtype, pool_units, loss_bound, .. } = admission.terms;
    assert_eq!((in_flight, wire_dtype, loss_bound), (flows.flows, WireDtype::Native, bound(1)));
    let part = part_of(&admission.seats, Rank(1)).expect("a part");
    let terms = dlcp::RankTerms::read(admission.identity(), Rank(1), part).expect("a sound job");
    let who = (admission.job, admission.key, admission.generation);
    let job = flows.job_config(who, 2, 352);
    assert_eq!(terms.config, job, "as fast as the slowest link, and over the most paths");
    assert_eq!((job.push_bound, job.pull_bound), (bound(1), LossBound::RELIABLE));
    let taken = flows.pool_units(2, 352);
    assert_eq!((pool_units, registry.pool().free), (taken, config.pool_units - taken));
    let other = start(&mut registry, at(1), "b", 2);
    assert_eq!(
        (admission.protocol, other.protocol),
        ("dlcp", "switchml"),
        "who asks for no bound has no flows"
    );
}

#[test]
fn a_full_block_passes_every_path_that_was_measured_for_slots() {
    for mtu in [300, 1500, 9000] {
        for wire_dtype in WireDtype::ALL {
            let mut registry =
                Registry::new(RegistryConfig::default(), protocols(), Box::new(|| 41)).expect("valid");
            let JoinDecision::Complete { outcome: Ok(admission), .. } =
                registry.join(at(0), JoinRequest { mtu, ..as_(wire_dtype, losing(1, 0, 1)) })
            else {
                panic!("refused")
            };
            assert!(block_packet_bytes(4 * usize::from(admission.terms.elements)) + IP_UDP_BYTES <= mtu);
        }
    }
}

#[test]
fn ranks_that_disagree_on_the_loss_bound_are_all_told_the_same() {
    for (other, said) in
        [(losing(2, 1, 3), "2 %"), (as_(WireDtype::Native, without_slots(ask("a", 1, 3))), "0 %")]
    {
        let mut registry = registry();
        registry.join(at(0), losing(1, 2, 3));
        let JoinDecision::Complete { tickets, outcome: Err(reason), .. } = registry.join(at(0), other) else {
            panic!("not told")
        };
        assert_eq!(tickets.len(), 2);
        let message = reason.to_string();
        assert!(
            message.starts_with("rank 1 and rank 2 differ in loss bound")
                && message.contains(&format!(": {said} and 1 %;")),
            "{message}"
        );
        assert!(message.contains("FANIN_LOSS_BOUND"), "{message}");
    }
}

#[test]
fn a_loss_bound_is_refused_where_it_cannot_be_kept() {
    let hop = through(7, 0, 1).hops;
    let unserved = Refusal::of_bound(bound(1));
    assert_eq!(refusal(&mut registry(), JoinRequest { hops: hop, ..losing(1, 0, 1) }), unserved, "a rack");
    let reason = refusal(&mut registry(), losing(0, 0, 1)).to_string();
    assert!(reason.contains("FANIN_LOSS_BOUND") && reason.contains("use switchml"), "{reason}");
    let of_atp = JoinRequest { protocol: "atp".into(), ..losing(1, 0, 1) };
    assert_eq!(refusal(&mut server(), of_atp), unserved);
    assert_eq!(
        refusal(&mut registry(), losing(1, 0, 65)),
        Refusal::TooManyWorkers { asked: 65, max: 64 },
        "who is in a sum is one word"
    );
}

#[test]
fn a_job_with_a_bound_goes_on_where_its_slowest_rank_is() {
    // Numbers wrap.
    let at = |rank: usize| [[u32::MAX, 7], [1, 9], [u32::MAX - 1, 8]][rank];
    let resuming = |rank: u32, shards: usize| {
        let completed = at(rank as usize)[..shards].iter().map(|flow| vec![*flow]).collect();
        let resume =
            Resume { in_flight: 16, completed, ..resuming(rank, 3, &[1]).resume.expect("it resumes") };
        JoinRequest { resume: Some(resume), ..losing(1, rank, 3) }
    };
    let config = RegistryConfig { shards: 2, ..RegistryConfig::default() };
    let mut registry = Registry::new(config, protocols(), Box::new(|| 41)).expect("valid limits");
    registry.join(super::at(0), resuming(0, 2));
    registry.join(super::at(0), resuming(1, 2));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = registry.join(super::at(0), resuming(2, 2))
    else {
        panic!("refused")
    };
    let part = part_of(&admission.seats, Rank(1)).expect("a part");
    let terms = dlcp::RankTerms::read(admission.identity(), Rank(1), part).expect("a sound job");
    assert_eq!(terms.resumes_at, [FlowId(u32::MAX - 1), FlowId(7)]);
    // No worker can be so far behind another.
    let mut registry = self::registry();
    registry.join(super::at(0), resuming(0, 1));
    registry.join(super::at(0), resuming(1, 1));
    let mut behind = resuming(2, 1);
    behind.resume.as_mut().expect("it resumes").completed[0] = vec![u32::MAX - 50];
    let JoinDecision::Complete { outcome: Err(reason), .. } = registry.join(super::at(0), behind) else {
        panic!("it goes on")
    };
    assert!(
        matches!(reason, Refusal::ResumeMismatch { rank: 2, field: ResumeField::Counts, .. }),
        "{reason}"
    );
    // It counts one flow a shard.
    let mut request = resuming(0, 1);
    request.resume.as_mut().expect("it resumes").completed[0].push(0);
    let reason = refusal(&mut self::registry(), request);
    assert!(matches!(reason, Refusal::ResumeMismatch { field: ResumeField::Counts, .. }), "{reason}");
}
