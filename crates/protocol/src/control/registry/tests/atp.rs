//! Jobs of ATP: switches on the way, and a server.

use super::*;
use crate::atp::ServerJob;

#[test]
fn ranks_behind_two_switches_are_told_their_directions() {
    let mut registry = server();
    registry.join(at(0), through(7, 0, 2));
    let decision = registry.join(at(0), through(8, 1, 2));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    assert_eq!(admission.terms.elements, 336, "the switches' links have the smaller MTU");
    let server = ServerJob::read(admission.identity(), &admission.seats.root).expect("its own part");
    assert_eq!((server.level, server.config.aggregators), (1, 512));
    assert_eq!(server.workers[1].bitmaps, [1, 2, 0, 0]);
    let told = registry.admission(admission.job).expect("it runs");
    assert_eq!((told.way(Rank(0)).len(), told.terms.elements, told.key), (1, 336, admission.key));
    assert_eq!(registry.admission(JobId(40)), None);
}

/// A job in one shard, whose exchanges nobody counts.
fn remembered() -> Resume {
    let completed = vec![vec![]];
    Resume { lineage: 9, generation: Generation(4), in_flight: 64, elements: 64, completed }
}

#[test]
fn a_server_that_restarted_resumes_without_counts() {
    let mut registry = server();
    let again = |rank| JoinRequest { resume: Some(remembered()), ..through(7, rank, 2) };
    registry.join(at(0), again(0));
    let decision = registry.join(at(0), again(1));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    let Admission { generation, resumed, terms: Terms { elements, in_flight, .. }, .. } = admission;
    assert_eq!((generation, elements, in_flight, resumed), (Generation(5), 64, 64, true));
}

#[test]
fn a_rank_that_did_not_hear_that_its_job_goes_on_is_told_again_until_it_is_heard() {
    let mut registry = server();
    // A switch that started again since is another instance at the same place.
    let again = |instance, rank| JoinRequest { resume: Some(remembered()), ..through(instance, rank, 2) };
    registry.join(at(0), again(7, 0));
    let decision = registry.join(at(0), again(7, 1));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    let (job, generation) = (admission.job, admission.generation);
    registry.beats(at(1), job, Rank(0), generation);
    assert_eq!(registry.join(at(4), again(8, 1)), JoinDecision::Again { ticket: Ticket(2), admission });
    assert_eq!(registry.jobs().count(), 1);
    registry.beats(at(4), job, Rank(0), generation);
    registry.tick(at(4));
    assert_eq!(registry.tick(at(6)), [], "it was heard when it asked");

    let running = |rank| Refusal::JobRunning { rank, world_size: 2 };
    assert_eq!(refusal(&mut registry, again(8, 0)), running(0), "it lives in the job");
    let mut elsewhere = again(8, 1);
    elsewhere.hops.push(elsewhere.hops[0]);
    assert_eq!(refusal(&mut registry, elsewhere), running(1), "its directions are others there");
    let older = Resume { generation: Generation(3), ..remembered() };
    let older = JoinRequest { resume: Some(older), ..through(8, 1, 2) };
    assert_eq!(refusal(&mut registry, older), running(1));
    assert_eq!(refusal(&mut registry, through(8, 1, 2)), running(1), "it remembers nothing");
    registry.beats(at(6), job, Rank(1), generation);
    assert_eq!(refusal(&mut registry, again(8, 1)), running(1));
}

#[test]
fn an_atp_window_is_as_long_as_those_who_send_to_one_switch_allow_and_no_shorter_than_64() {
    // The usual limit of an unprivileged process, and what fanin asks for.
    for (receive_buffer_bytes, expected) in [(212_992, 64), (16 << 20, 256)] {
        let config = RegistryConfig { receive_buffer_bytes, ..RegistryConfig::default() };
        let mut registry = Registry::new(config, vec![&Atp], Box::new(|| 41)).expect("valid limits");
        // Sixteen racks of sixteen.
        let joined =
            (0..256).map(|rank| registry.join(at(0), without_slots(through(rank / 16, rank as u32, 256))));
        let decision = joined.last().expect("256");
        let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
        assert_eq!(admission.terms.window, expected);
    }
}

#[test]
fn what_atp_cannot_do_is_refused() {
    let refused = |registry: Registry, request| refusal(&mut { registry }, request);
    let mismatch =
        |asked: &str, served: &str| Refusal::ProtocolMismatch { asked: asked.into(), served: served.into() };
    assert_eq!(refused(server(), ask("a", 0, 1)), mismatch("switchml", "atp"));
    assert_eq!(refused(registry(), through(7, 0, 1)), mismatch("atp", "switchml or dlcp"));
    for wire_dtype in [WireDtype::Int8, WireDtype::Int4] {
        let asked = as_(wire_dtype, through(7, 0, 1));
        let Refusal::Unserved { reason } = refused(server(), asked) else { panic!("another reason") };
        let said = format!("none travel as {}", wire_dtype.name());
        assert!(reason.contains(&said) && reason.contains("FANIN_WIRE_DTYPE"), "{reason}");
    }
    let mut narrow = through(7, 0, 1);
    narrow.hops[0].mtu = 300;
    assert_eq!(refused(server(), narrow), Refusal::MtuTooSmall { mtu: 300, need: 72 + 256 + 48 });
    let mut deep = through(7, 0, 1);
    deep.hops = (0..5).map(|instance| Hop { instance, ..deep.hops[0] }).collect();
    assert_eq!(refused(server(), deep.clone()), Refusal::TooManyLevels { levels: 5 });
    // Nothing of so many is kept until other ranks come.
    deep.world_size = 2;
    assert_eq!(refused(server(), deep), Refusal::TooManyLevels { levels: 5 });
}
