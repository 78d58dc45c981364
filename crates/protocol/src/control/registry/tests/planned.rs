//! GOAT: what a plan is made for, and who is in it.

use super::*;
use crate::goat::{Goat, Plan};

static GOAT: Goat = Goat { planner: None };

fn root() -> Registry {
    Registry::new(RegistryConfig::default(), vec![&GOAT], Box::new(|| 41)).expect("valid limits")
}

/// A rank whose switch has 512 aggregators.
fn planned(rank: u32, world_size: u32) -> JoinRequest {
    JoinRequest { protocol: "goat".into(), mtu: 1500, ..without_slots(through(7, rank, world_size)) }
}

fn admitted(requests: [JoinRequest; 2]) -> Admission {
    let mut registry = root();
    let mut decisions = requests.map(|request| registry.join(at(0), request)).into_iter();
    match decisions.nth(1) {
        Some(JoinDecision::Complete { outcome: Ok(admission), .. }) => admission,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_may_be_as_far_apart_as_switches_hold_their_fragments() {
    let slow = |rank| JoinRequest { rate_bps: Some(1_000_000), ..planned(rank, 2) };
    let admission = admitted([slow(0), slow(1)]);
    assert_eq!(admission.terms.in_flight, 512, "the link needs 64");
    let tree = admission.tree;
    assert_eq!((tree.switches.len(), tree.ranks.len(), tree.ranks[0].rate_bps), (1, 2, Some(1_000_000)));
    let few = |rank| {
        let mut request = slow(rank);
        request.hops[0].aggregators = 3;
        request
    };
    assert_eq!(admitted([few(0), few(1)]).terms.in_flight, 64, "no less");
    let fast = |rank| JoinRequest { rate_bps: Some(100_000_000_000), ..planned(rank, 2) };
    assert_eq!(admitted([fast(0), fast(1)]).terms.in_flight, 512, "more would not be summed on the way");
    let none = |rank| JoinRequest { hops: vec![], ..fast(rank) };
    assert!(admitted([none(0), none(1)]).terms.in_flight > 512, "what the link needs");
    let asked = |rank| with_slots(40, slow(rank));
    assert_eq!(admitted([asked(0), asked(1)]).terms.in_flight, 40);
}

#[test]
fn no_window_is_wider_than_the_model_that_is_planned() {
    let small = |rank| wishing(planned(rank, 2), |agreed| agreed.sub_models = vec![1000, 4000]);
    let admission = admitted([small(0), small(1)]);
    let fragments = 1000_u64.div_ceil(admission.terms.elements.into())
        + 4000_u64.div_ceil(admission.terms.elements.into());
    assert_eq!(u64::from(admission.terms.in_flight), fragments);
    let plan = Plan::of(&admission.terms, &admission.tree, &admission.seats).expect("its own part");
    assert_eq!(plan.fragments.iter().map(|count| u64::from(*count)).sum::<u64>(), fragments);
}

#[test]
fn two_plans_are_refused_and_so_are_parts_that_no_plan_has() {
    let mut registry = root();
    let models = |rank, sub_models| wishing(planned(rank, 2), |agreed| agreed.sub_models = sub_models);
    assert!(matches!(registry.join(at(0), models(0, vec![5])), JoinDecision::Waiting(_)));
    let reason = refusal(&mut registry, models(1, vec![5, 5]));
    let Refusal::Mismatch { rank: 1, field, asked, other_rank: 0, job_has } = reason else {
        panic!("{reason:?}")
    };
    assert!(field.contains("FANIN_SUB_MODELS") && (&*asked, &*job_has) == ("5, 5", "5"), "{field}: {asked}");
    assert_eq!(registry.jobs().count(), 0, "who waited has the same answer");
    for (wrong, count) in [(vec![1; 257], 257), (vec![7, 0], 2), (vec![(1 << 29) + 1], 1)] {
        assert_eq!(refusal(&mut root(), models(0, wrong)), Refusal::SubModels { count });
    }
}

#[test]
fn what_goat_cannot_do_is_refused() {
    let refused = |request| refusal(&mut root(), request);
    let crowd = JoinRequest { world_size: 129, ..planned(0, 1) };
    assert_eq!(refused(crowd), Refusal::TooManyWorkers { asked: 129, max: 128 });
    let int8 = refused(as_(WireDtype::Int8, planned(0, 1)));
    assert!(matches!(&int8, Refusal::Unserved { reason } if reason.contains("as int8")), "{int8}");
    let (asked, served) = ("atp".into(), "goat".into());
    assert_eq!(refused(through(7, 0, 1)), Refusal::ProtocolMismatch { asked, served });
    // ATP's packets have room for four levels, and a plan's for any.
    let mut deep = planned(0, 1);
    deep.hops = (0..9).map(|instance| Hop { instance, ..deep.hops[0] }).collect();
    assert_eq!(refused(deep.clone()), Refusal::TooManyLevels { levels: 9 });
    deep.hops.pop();
    assert!(matches!(root().join(at(0), deep), JoinDecision::Complete { outcome: Ok(_), .. }));
}
