//! Timelines of a registry.

use alloc::format;
use alloc::string::ToString;
use alloc::vec;
use core::time::Duration;

use fanin_wire::{LossBound, SlotIndex, VERSION, WireDtype};

use super::*;
use crate::atp::Atp;
use crate::control::{
    Agreed, Hop, PORTION_WHOLE, Resume, ResumeField, SwitchTree, Terms, TreeRank, part_of, pool_units,
};
use crate::dlcp::Dlcp;
use crate::machine::JobIdentity;
use crate::switchml::{RankTerms, SwitchMl};

mod any_order;
mod atp;
mod bounds;
mod planned;
mod renewal;
mod resuming;
mod streams;

const SECOND: Duration = Duration::from_secs(1);

fn at(seconds: u64) -> Instant {
    Instant(seconds * 1_000_000_000)
}

fn registry() -> Registry {
    registry_of(2048)
}

fn registry_of(pool_units: u32) -> Registry {
    let mut last = 40;
    let config = RegistryConfig { pool_units, jobs_max: 3, ..RegistryConfig::default() };
    let generator = move || {
        last += 1;
        last
    };
    Registry::new(config, protocols(), Box::new(generator)).expect("valid limits")
}

/// Those of a usual switch.
fn protocols() -> Vec<&'static dyn Protocol> {
    vec![&SwitchMl, &Dlcp]
}

/// A request with other wishes.
fn wishing(request: JoinRequest, wish: impl FnOnce(&mut Agreed)) -> JoinRequest {
    let mut request = request;
    wish(&mut request.agreed);
    request
}

fn with_slots(slots: u16, request: JoinRequest) -> JoinRequest {
    wishing(request, |agreed| agreed.in_flight = Some(slots))
}

fn without_slots(request: JoinRequest) -> JoinRequest {
    wishing(request, |agreed| agreed.in_flight = None)
}

fn as_(wire_dtype: WireDtype, request: JoinRequest) -> JoinRequest {
    wishing(request, |agreed| agreed.wire_dtype = wire_dtype)
}

fn ask(job: &str, rank: u32, world_size: u32) -> JoinRequest {
    JoinRequest {
        portion: PORTION_WHOLE,
        job: job.into(),
        rank,
        world_size,
        protocol: "switchml".into(),
        agreed: Agreed { in_flight: Some(64), wire_dtype: WireDtype::SharedExponent, ..Agreed::default() },
        mtu: 1500,
        rate_bps: None,
        rtt: Duration::from_micros(50),
        patience: SECOND * 120,
        hops: Vec::new(),
        wire_version: VERSION,
        paths: 1,
        resume: None,
        origin: None,
    }
}

fn resuming(rank: u32, world_size: u32, completed: &[u32]) -> JoinRequest {
    let slots = completed.len() as u16;
    let resume = Resume {
        lineage: 9,
        generation: Generation(4),
        in_flight: slots,
        elements: 352,
        completed: vec![completed.to_vec()],
    };
    JoinRequest { resume: Some(resume), ..ask("a", rank, world_size) }
}

/// What a rank does, with the secret that it has.
impl Registry {
    fn secret_of(&self, job: JobId, rank: Rank) -> u64 {
        self.jobs.get(&job).map_or(0, |job| job.admission.key.secret_of(rank))
    }

    fn beats(&mut self, now: Instant, job: JobId, rank: Rank, generation: Generation) -> HeartbeatReply {
        let secret = self.secret_of(job, rank);
        self.heartbeat(now, job, rank, generation, secret).expect("its own secret")
    }

    fn attends(
        &mut self,
        now: Instant,
        job: JobId,
        rank: Rank,
        generation: Generation,
    ) -> (HeartbeatReply, Option<Attendance>) {
        let secret = self.secret_of(job, rank);
        self.attend(now, job, rank, generation, secret).expect("its own secret")
    }

    fn leaves(&mut self, now: Instant, job: JobId, rank: Rank) -> Option<Command> {
        let secret = self.secret_of(job, rank);
        self.leave(now, job, rank, secret).expect("its own secret")
    }
}

/// Joins all ranks of a job and returns its admission.
fn start(registry: &mut Registry, now: Instant, job: &str, world_size: u32) -> Admission {
    for rank in 0..world_size - 1 {
        assert!(matches!(registry.join(now, ask(job, rank, world_size)), JoinDecision::Waiting(_)));
    }
    match registry.join(now, ask(job, world_size - 1, world_size)) {
        JoinDecision::Complete { outcome: Ok(admission), .. } => admission,
        other => panic!("{other:?}"),
    }
}

fn refusal(registry: &mut Registry, request: JoinRequest) -> Refusal {
    match registry.join(at(0), request) {
        JoinDecision::Refused { reason } | JoinDecision::Complete { outcome: Err(reason), .. } => reason,
        other => panic!("{other:?}"),
    }
}

fn server() -> Registry {
    Registry::new(RegistryConfig::default(), vec![&Atp], Box::new(|| 41)).expect("valid limits")
}

fn through(instance: u64, rank: u32, world_size: u32) -> JoinRequest {
    let hop = Hop { aggregators: 512, receive_buffer_bytes: 0, ..Hop::numbered(instance) };
    JoinRequest { protocol: "atp".into(), mtu: 9000, hops: vec![hop], ..ask("a", rank, world_size) }
}

#[test]
fn ranks_wait_until_the_last_one_comes_and_all_get_the_same_admission() {
    let mut registry = registry();
    assert_eq!(registry.join(at(0), ask("a", 2, 3)), JoinDecision::Waiting(Ticket(0)));
    assert_eq!(registry.join(at(1), ask("a", 0, 3)), JoinDecision::Waiting(Ticket(1)));
    let decision = registry.join(at(2), JoinRequest { mtu: 9000, ..ask("a", 1, 3) });
    let JoinDecision::Complete { outcome: Ok(Admission { seats: told, .. }), .. } = &decision else {
        panic!("{decision:?}")
    };
    let admission = Admission {
        job: JobId(41),
        key: Key::new(42 << 64 | 43),
        generation: Generation(0),
        world_size: 3,
        shards: 1,
        resumed: false,
        protocol: "switchml",
        terms: Terms {
            in_flight: 64,
            window: 64,
            elements: 352,
            wire_dtype: WireDtype::SharedExponent,
            loss_bound: LossBound::RELIABLE,
            pool_units: 64 * 4,
        },
        tree: SwitchTree { switches: vec![], ranks: vec![TreeRank { switch: None, rate_bps: None }; 3] },
        seats: told.clone(),
    };
    let tickets = vec![Ticket(1), Ticket(2), Ticket(0)];
    let told = told.clone();
    let outcome = Ok(admission);
    let replaced = None;
    assert_eq!(decision, JoinDecision::Complete { ticket: Ticket(2), tickets, outcome, replaced });
    let parts = (0..3).map(|rank| part_of(&told, Rank(rank)).map(<[u8]>::to_vec).expect("a part"));
    let places = parts.map(|part| {
        let job = JobIdentity {
            id: JobId(41),
            key: Key::new(1),
            generation: Generation(0),
            workers: 3,
            resumed: false,
        };
        RankTerms::read(job, &part).expect("its own part").place.0
    });
    assert_eq!(places.collect::<Vec<_>>(), [0, 1, 2]);
    // 64 slots of two sums and three contributions, of 352 elements each.
    assert_eq!(registry.pool(), Pool { units: 2048, free: 2048 - 64 * 4 });
}

#[test]
fn one_request_for_slots_holds_for_all() {
    let mut registry = registry();
    registry.join(at(0), without_slots(ask("a", 0, 2)));
    let decision = registry.join(at(0), with_slots(100, ask("a", 1, 2)));
    assert!(matches!(
        decision,
        JoinDecision::Complete { outcome: Ok(Admission { terms: Terms { in_flight: 100, .. }, .. }), .. }
    ));
}

#[test]
fn without_a_request_the_slowest_rank_and_the_furthest_decide() {
    let mut registry = registry_of(4096);
    let free = |rate_bps, rtt_us, rank| JoinRequest {
        rate_bps,
        rtt: Duration::from_micros(rtt_us),
        ..without_slots(ask("a", rank, 2))
    };
    registry.join(at(0), free(None, 0, 0));
    let decision = registry.join(at(0), free(Some(5_000_000_000), 600, 1));
    // 5 Gbit/s over 800 µs are 500000 bytes, 348 packets of 1440.
    assert!(matches!(
        decision,
        JoinDecision::Complete {
            outcome: Ok(Admission { terms: Terms { in_flight: 1024, window: 512, .. }, .. }),
            ..
        }
    ));
}

#[test]
fn each_refusal_has_its_cause() {
    let mut registry = registry();
    registry.join(at(0), ask("a", 0, 2));
    let mut refused = |request| refusal(&mut registry, request);
    let version = JoinRequest { wire_version: 9, ..ask("b", 0, 1) };
    assert_eq!(refused(version), Refusal::VersionMismatch { theirs: 9, ours: VERSION });
    let nameless = JoinRequest { protocol: String::new(), ..ask("b", 0, 1) };
    assert_eq!(refused(nameless), Refusal::VersionMismatch { theirs: VERSION, ours: VERSION });
    assert_eq!(refused(ask("", 0, 1)), Refusal::JobName { bytes: 0 });
    assert_eq!(refused(ask("a\nb", 0, 1)), Refusal::JobName { bytes: 3 });
    // Right to left from here on: what follows looks like another job's line.
    assert_eq!(refused(ask("a\u{202e}b", 0, 1)), Refusal::JobName { bytes: 5 });
    assert_eq!(refused(ask(&"x".repeat(129), 0, 1)), Refusal::JobName { bytes: 129 });
    assert_eq!(refused(ask("b", 0, 4097)), Refusal::TooManyWorkers { asked: 4097, max: 4096 });
    assert_eq!(refused(ask("b", 2, 2)), Refusal::RankOutOfRange { rank: 2, world_size: 2 });
    assert_eq!(refused(ask("b", 0, 0)), Refusal::RankOutOfRange { rank: 0, world_size: 0 });
    assert_eq!(refused(ask("a", 1, 3)), Refusal::WorldSizeMismatch { rank: 1, asked: 3, job_has: 2 });
    assert_eq!(refused(ask("a", 0, 2)), Refusal::DuplicateRank { rank: 0 });
    let slots = |slots, rank| with_slots(slots, ask("a", rank, 2));
    assert_eq!(refused(slots(0, 1)), Refusal::InFlightOutOfRange { asked: 0 });
    assert_eq!(refused(slots(16385, 1)), Refusal::InFlightOutOfRange { asked: 16385 });
    let mtu = JoinRequest { mtu: 215, ..ask("b", 0, 1) };
    assert_eq!(refused(mtu.clone()), Refusal::MtuTooSmall { mtu: 215, need: 216 });
    let bfloat16 = JoinRequest { mtu: 219, ..as_(WireDtype::Bfloat16, mtu) };
    assert_eq!(refused(bfloat16), Refusal::MtuTooSmall { mtu: 219, need: 220 });
    // What it remembers is not cut anew for a path that became narrower.
    let bfloat16 = JoinRequest { mtu: 1499, ..as_(WireDtype::Bfloat16, resuming(0, 1, &[1])) };
    assert_eq!(
        refused(JoinRequest { job: "b".into(), ..bfloat16 }),
        Refusal::MtuTooSmall { mtu: 1499, need: 1500 }
    );
    assert_eq!(registry.jobs().count(), 1, "a refusal leaves nothing behind");
    let reason = refusal(&mut registry, with_slots(65, ask("a", 1, 2)));
    let Refusal::Mismatch { rank: 1, field, asked, other_rank: 0, job_has } = reason else {
        panic!("{reason:?}")
    };
    assert!(field.contains("FANIN_IN_FLIGHT") && (&*asked, &*job_has) == ("65", "64"), "{field}");
    assert_eq!(registry.jobs().count(), 0, "the ranks that waited were told");
}

#[test]
fn a_job_beyond_the_pool_is_refused_for_all_its_ranks_with_asked_and_free() {
    let mut registry = registry();
    start(&mut registry, at(0), "a", 1);
    registry.join(at(0), without_slots(ask("b", 0, 2)));
    // 1000 slots of 352 elements for two ranks count as 3000 of 256; 192 of 2048 are taken.
    let decision = registry.join(at(0), with_slots(1000, ask("b", 1, 2)));
    let reason = Refusal::PoolExhausted { asked: 3000, free: 1856 };
    let tickets = vec![Ticket(1), Ticket(2)];
    let outcome = Err(reason.clone());
    let replaced = None;
    assert_eq!(decision, JoinDecision::Complete { ticket: Ticket(2), tickets, outcome, replaced });
    assert_eq!(registry.jobs().count(), 1, "the gathering is gone, so that the ranks may ask for less");
    let message = reason.to_string();
    assert!(message.contains("needs 3000 units") && message.contains("1856 are free"), "{message}");
}

#[test]
fn jobs_of_one_machine_leave_half_of_the_pool_to_others() {
    let mut registry = registry();
    let [stranger, other] = [1, 2].map(|last| Some(IpAddr::from([10, 0, 0, last])));
    // 256 slots of 352 elements count as 768 of 2048, for one rank and for two.
    let mut asks = |job: &str, ranks: &[Option<IpAddr>]| {
        let world_size = ranks.len() as u32;
        let mut decisions = (0..).zip(ranks).map(|(rank, origin)| {
            let ask = JoinRequest { origin: *origin, ..with_slots(256, ask(job, rank, world_size)) };
            registry.join(at(0), ask)
        });
        decisions.by_ref().last().expect("a rank")
    };
    let admitted =
        |decision: &JoinDecision| matches!(decision, JoinDecision::Complete { outcome: Ok(_), .. });
    let refused = |decision: &JoinDecision| match decision {
        JoinDecision::Complete { outcome: Err(reason), .. } => Some(reason.clone()),
        _ => None,
    };
    assert!(admitted(&asks("a", &[stranger])));
    let exhausted = Some(Refusal::PoolExhausted { asked: 768, free: 256 });
    assert_eq!(refused(&asks("b", &[stranger])), exhausted, "half of 2048 less what it has");
    assert!(admitted(&asks("b", &[stranger, other])), "a job of two machines has what is free");
    let exhausted = Some(Refusal::PoolExhausted { asked: 768, free: 512 });
    assert_eq!(refused(&asks("c", &[None])), exhausted, "what is left of all");
}

#[test]
fn ranks_that_disagree_on_the_wire_dtype_are_all_told_the_same() {
    let mut registry = registry();
    let bfloat16 = |rank| as_(WireDtype::Bfloat16, ask("a", rank, 4));
    registry.join(at(0), bfloat16(3));
    registry.join(at(0), bfloat16(1));
    let decision = registry.join(at(0), ask("a", 2, 4));
    let reason = Refusal::Mismatch {
        rank: 2,
        field: "wire dtype (wire_dtype, or FANIN_WIRE_DTYPE)".into(),
        asked: "shared_exponent".into(),
        other_rank: 1,
        job_has: "bfloat16".into(),
    };
    let tickets = vec![Ticket(1), Ticket(0), Ticket(2)];
    let outcome = Err(reason.clone());
    let replaced = None;
    assert_eq!(decision, JoinDecision::Complete { ticket: Ticket(2), tickets, outcome, replaced });
    assert_eq!(registry.jobs().count(), 0, "the gathering is gone");
    let message = reason.to_string();
    assert!(
        message.starts_with("rank 2 and rank 1 differ in wire dtype")
            && message.contains("shared_exponent and bfloat16; set the same"),
        "{message}"
    );
    registry.join(at(0), as_(WireDtype::Native, ask("b", 0, 2)));
    let JoinDecision::Complete { outcome: Err(reason), .. } = registry.join(at(0), ask("b", 1, 2)) else {
        panic!()
    };
    let message = reason.to_string();
    assert!(
        message.contains("rank 0 differ")
            && message.contains("and native")
            && message.contains("FANIN_WIRE_DTYPE"),
        "{message}"
    );
}

#[test]
fn a_job_of_bfloat16_takes_its_accumulators_from_the_pool_and_gives_them_back() {
    let mut registry = registry();
    let request = as_(WireDtype::Bfloat16, ask("a", 0, 1));
    let decision = registry.join(at(0), request);
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    assert_eq!((admission.terms.elements, admission.terms.wire_dtype), (352, WireDtype::Bfloat16));
    // 64 slots of two sums of 704 elements and a contribution of 352, which count as four units of 256 each.
    assert_eq!(registry.pool(), Pool { units: 2048, free: 2048 - 64 * 4 });
    let state = registry.jobs().next().map(|view| view.state);
    assert!(matches!(state, Some(JobState::Running { wire_dtype: WireDtype::Bfloat16, .. })), "{state:?}");
    registry.leaves(at(1), admission.job, Rank(0));
    assert_eq!(registry.pool().free, 2048);
}

#[test]
fn a_chunk_of_bfloat16_leaves_room_for_its_exponent_on_the_path() {
    let mut registry = registry();
    let mut elements = |mtu, wire_dtype, name: &str| {
        let request = JoinRequest { mtu, ..as_(wire_dtype, ask(name, 0, 1)) };
        let decision = registry.join(at(0), request);
        let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
        admission.terms.elements
    };
    assert_eq!(elements(1499, WireDtype::SharedExponent, "a"), 352);
    assert_eq!(elements(1499, WireDtype::Bfloat16, "b"), 256);
    assert_eq!(elements(1500, WireDtype::Bfloat16, "c"), 352);
}

#[test]
fn a_narrow_path_has_short_chunks() {
    for (wire_dtype, length) in [(WireDtype::SharedExponent, 64), (WireDtype::Bfloat16, 32)] {
        let mut registry = registry();
        let decision = registry.join(at(0), JoinRequest { mtu: 344, ..as_(wire_dtype, ask("a", 0, 1)) });
        let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
        assert_eq!(admission.terms.elements, length);
    }
}

#[test]
fn the_number_of_jobs_is_limited() {
    let mut registry = registry();
    start(&mut registry, at(0), "a", 1);
    registry.join(at(0), ask("b", 0, 2));
    registry.join(at(0), ask("c", 0, 2));
    assert_eq!(refusal(&mut registry, ask("d", 0, 1)), Refusal::TooManyJobs { max: 3 });
    assert!(matches!(registry.join(at(0), ask("c", 1, 2)), JoinDecision::Complete { .. }));
}

#[test]
fn a_running_job_takes_no_more_ranks_until_it_ends() {
    let mut registry = registry();
    let job = start(&mut registry, at(0), "a", 2).job;
    assert_eq!(refusal(&mut registry, ask("a", 1, 2)), Refusal::JobRunning { rank: 1, world_size: 2 });
    assert_eq!(registry.leaves(at(1), job, Rank(0)), None);
    assert_eq!(registry.leaves(at(1), job, Rank(0)), None, "leaving twice counts once");
    assert_eq!(registry.leaves(at(1), job, Rank(1)), Some(Command::Remove { job }));
    assert_eq!(registry.pool().free, 2048);
    let again = start(&mut registry, at(0), "a", 2);
    assert_eq!((again.job, again.generation), (JobId(44), Generation(0)));
}

#[test]
fn a_gathering_that_stays_incomplete_is_given_up_and_names_the_missing() {
    let mut registry = registry();
    registry.join(at(0), ask("a", 1, 4));
    registry.join(at(100), JoinRequest { patience: SECOND * 10, ..ask("a", 3, 4) });
    assert_eq!(registry.tick(at(119)), vec![]);
    let reason = Refusal::JoinTimeout { missing: Ranks::from([0, 2]) };
    let tickets = vec![Ticket(0), Ticket(1)];
    assert_eq!(registry.tick(at(120)), vec![Command::Refuse { tickets, reason: reason.clone() }]);
    assert!(reason.to_string().starts_with("ranks 0 and 2 did not join in time"));
    assert_eq!(registry.jobs().count(), 0);
}

#[test]
fn the_most_patient_rank_decides_how_long_a_gathering_lasts() {
    let mut registry = registry();
    registry.join(at(0), ask("a", 0, 3));
    registry.join(at(10), JoinRequest { patience: SECOND * 600, ..ask("a", 1, 3) });
    assert_eq!(registry.tick(at(609)), vec![]);
    assert!(matches!(registry.tick(at(610))[..], [Command::Refuse { .. }]));
}

#[test]
fn no_patience_outlasts_the_limit_of_the_switch() {
    let mut registry = registry();
    registry.join(at(0), JoinRequest { patience: Duration::MAX, ..ask("a", 0, 3) });
    registry.join(at(3000), JoinRequest { patience: Duration::MAX, ..ask("a", 1, 3) });
    assert_eq!(registry.tick(at(3599)), vec![]);
    assert!(matches!(registry.tick(at(3600))[..], [Command::Refuse { .. }]));
}

#[test]
fn a_rank_that_disconnects_while_it_waits_may_come_again() {
    let mut registry = registry();
    registry.join(at(0), ask("a", 0, 3));
    registry.join(at(0), ask("a", 1, 3));
    registry.withdraw(Ticket(0));
    assert!(matches!(registry.join(at(1), ask("a", 0, 3)), JoinDecision::Waiting(_)));
    registry.withdraw(Ticket(1));
    registry.withdraw(Ticket(2));
    assert_eq!(registry.jobs().count(), 0, "the last one to go closes the door");
}

#[test]
fn a_silent_rank_is_expelled_and_every_other_hears_of_it_once() {
    let mut registry = registry();
    let Admission { job, generation, .. } = start(&mut registry, at(0), "a", 3);
    let beat = |registry: &mut Registry, now, rank| registry.beats(now, job, Rank(rank), generation);
    beat(&mut registry, at(0), 1);
    for second in 1..=5 {
        assert_eq!(registry.tick(at(second)), vec![]);
        assert_eq!(beat(&mut registry, at(second), 0), HeartbeatReply::Alive { left: Ranks::default() });
        assert_eq!(beat(&mut registry, at(second), 2), HeartbeatReply::Alive { left: Ranks::default() });
    }
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.tick(at(5) + Duration::from_nanos(1)), vec![Command::Abort { job, reason }]);
    assert_eq!(registry.pool().free, 2048);
    assert_eq!(beat(&mut registry, at(6), 0), HeartbeatReply::Aborted(reason));
    assert!(!registry.is_idle(), "rank 2 has not heard");
    assert_eq!(beat(&mut registry, at(6), 2), HeartbeatReply::Aborted(reason));
    assert_eq!(registry.tick(at(7)), vec![], "rank 1 has not heard");
    assert!(registry.is_idle(), "nobody waits for a dead rank");
    assert_eq!(beat(&mut registry, at(8), 1), HeartbeatReply::Aborted(reason));
    assert_eq!(registry.tick(at(8)), vec![Command::Remove { job }]);
    assert_eq!(beat(&mut registry, at(9), 1), HeartbeatReply::Unknown);
}

#[test]
fn a_rank_that_was_not_told_that_it_is_admitted_is_not_silent() {
    let mut registry = registry();
    let job = start(&mut registry, at(0), "job", 2).job;
    for second in 1..100 {
        registry.awaits_shell(at(second), job);
        assert_eq!(registry.tick(at(second)), []);
    }
    // For its first word it has four times as long as for each later one.
    for second in 100..120 {
        assert_eq!(registry.tick(at(second)), []);
    }
    assert!(matches!(registry.tick(at(120))[..], [Command::Abort { reason: AbortReason::Expelled(_), .. }]));
}

#[test]
fn a_rank_has_time_for_its_first_word_and_less_for_the_next() {
    let mut registry = registry();
    let Admission { job, generation, .. } = start(&mut registry, at(0), "a", 2);
    for second in 1..=20 {
        assert_eq!(registry.tick(at(second)), []);
        registry.beats(at(second), job, Rank(0), generation);
    }
    registry.beats(at(20), job, Rank(1), generation);
    for second in 21..=25 {
        assert_eq!(registry.tick(at(second)), []);
        registry.beats(at(second), job, Rank(0), generation);
    }
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.tick(at(26)), [Command::Abort { job, reason }]);
}

#[test]
fn an_abort_that_nobody_asks_about_is_forgotten() {
    let mut registry = registry();
    let job = start(&mut registry, at(0), "a", 2).job;
    assert_eq!(registry.aborted(at(1), job, AbortReason::Expelled(Rank(0))), None);
    assert_eq!(registry.tick(at(61)), vec![]);
    assert_eq!(registry.tick(at(62)), vec![Command::Remove { job }]);
}

#[test]
fn no_more_aborts_are_kept_than_jobs_may_run() {
    let mut registry = registry();
    let abort = |registry: &mut Registry, second| {
        let job = start(registry, at(second), "a", 1).job;
        (job, registry.aborted(at(second), job, AbortReason::Expelled(Rank(0))))
    };
    let (oldest, _) = abort(&mut registry, 0);
    assert_eq!(abort(&mut registry, 1).1, None);
    assert_eq!(abort(&mut registry, 2).1, None);
    assert_eq!(abort(&mut registry, 3).1, Some(Command::Remove { job: oldest }));
    assert_eq!(registry.jobs().count(), 3);
}

#[test]
fn an_aborted_job_may_be_joined_afresh_at_once() {
    let mut registry = registry();
    let old = start(&mut registry, at(0), "a", 1);
    registry.aborted(at(1), old.job, AbortReason::SwitchStopped);
    let new = start(&mut registry, at(1), "a", 1);
    assert_ne!(old.job, new.job);
    let reply = registry.beats(at(2), old.job, Rank(0), old.generation);
    assert_eq!(reply, HeartbeatReply::Aborted(AbortReason::SwitchStopped));
    let reply = registry.beats(at(2), new.job, Rank(0), new.generation);
    assert_eq!(reply, HeartbeatReply::Alive { left: Ranks::default() });
}

#[test]
fn a_rank_that_left_is_not_expelled_and_the_others_hear_that_it_left() {
    let mut registry = registry();
    let Admission { job, generation, .. } = start(&mut registry, at(0), "a", 2);
    registry.leaves(at(1), job, Rank(1));
    for second in 1..20 {
        assert_eq!(registry.tick(at(second)), vec![]);
        let reply = registry.beats(at(second), job, Rank(0), generation);
        assert_eq!(reply, HeartbeatReply::Alive { left: Ranks::from([1]) });
    }
}

#[test]
fn a_heartbeat_of_another_generation_or_rank_is_unknown() {
    let mut registry = registry();
    let job = start(&mut registry, at(0), "a", 2).job;
    assert_eq!(registry.beats(at(1), job, Rank(0), Generation(1)), HeartbeatReply::Unknown);
    assert_eq!(registry.beats(at(1), job, Rank(2), Generation(0)), HeartbeatReply::Unknown);
    assert_eq!(registry.beats(at(1), JobId(7), Rank(0), Generation(0)), HeartbeatReply::Unknown);
    assert_eq!(registry.leaves(at(1), job, Rank(200)), None);
}

#[test]
fn a_switch_that_was_not_scheduled_expels_nobody_for_it() {
    let mut registry = registry();
    let Admission { job, generation, .. } = start(&mut registry, at(0), "a", 1);
    registry.beats(at(0), job, Rank(0), generation);
    assert_eq!(registry.tick(at(1)), vec![]);
    assert_eq!(registry.tick(at(100)), vec![]);
    for second in 101..=105 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    assert!(matches!(registry.tick(at(106))[..], [Command::Abort { .. }]));
}

#[test]
fn a_stopping_switch_ends_everything_and_admits_nothing() {
    let mut registry = registry();
    let job = start(&mut registry, at(0), "a", 1).job;
    registry.join(at(0), ask("b", 0, 2));
    let reason = Refusal::SwitchStopping;
    assert_eq!(
        registry.stop(at(1)),
        vec![
            Command::Refuse { tickets: vec![Ticket(1)], reason: reason.clone() },
            Command::Abort { job, reason: AbortReason::SwitchStopped },
        ]
    );
    assert_eq!(refusal(&mut registry, ask("c", 0, 1)), reason);
}

#[test]
fn a_call_without_the_ranks_own_secret_has_no_effect() {
    let mut registry = registry();
    let Admission { job, generation, key, .. } = start(&mut registry, at(0), "a", 2);
    let (victim, other) = (Rank(1), Rank(0));
    registry.attends(at(0), job, other, generation);
    registry.beats(at(0), job, victim, generation);
    for second in 1..=5 {
        for secret in [0, u64::MAX, key.secret_of(other), key.lineage(), key.secret() as u64] {
            let denied = Err(Denied { rank: victim });
            assert_eq!(registry.heartbeat(at(second), job, victim, generation, secret), denied);
            assert_eq!(registry.leave(at(second), job, victim, secret), Err(Denied { rank: victim }));
            let attending = registry.attend(at(second), job, victim, generation, secret);
            assert_eq!(attending, Err(Denied { rank: victim }));
        }
        assert_eq!(registry.tick(at(second)), [], "nobody is expelled for it");
        let reply = registry.beats(at(second), job, other, generation);
        assert_eq!(reply, HeartbeatReply::Alive { left: Ranks::default() }, "nobody has left");
    }
    let reason = AbortReason::Expelled(victim);
    let expelled = registry.tick(at(5) + Duration::from_nanos(1));
    assert_eq!(expelled, [Command::Abort { job, reason }], "and nobody is kept alive by it");
    let reply = registry.heartbeat(at(6), job, victim, generation, 0);
    assert_eq!(reply, Err(Denied { rank: victim }), "nor told how the job ended, in its stead");
}

#[test]
fn every_job_has_a_key_of_its_own_and_every_rank_a_secret() {
    let mut registry = registry();
    let [one, two] = ["a", "b"].map(|name| start(&mut registry, at(0), name, 2).key);
    assert_ne!(one, two);
    let secrets = [one, two].map(|key| [key.secret_of(Rank(0)), key.secret_of(Rank(1)), key.lineage()]);
    let mut all = secrets.concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6);
}

#[test]
fn a_limit_of_zero_is_refused_at_construction() {
    let zero = RegistryConfig { jobs_max: 0, ..RegistryConfig::default() };
    let refused = Registry::new(zero, protocols(), Box::new(|| 0)).map(|_| ());
    assert_eq!(refused, Err(ConfigError { field: "jobs_max" }));
}

#[test]
fn one_machine_has_half_of_the_places_for_jobs_and_what_it_resumes_half_of_the_memory_for_that() {
    let [one, other] = [1, 2].map(|last| Some(IpAddr::from([10, 0, 0, last])));
    let config = RegistryConfig { jobs_max: 4, ..RegistryConfig::default() };
    let mut ids = 40..;
    let mut registry =
        Registry::new(config, protocols(), Box::new(move || ids.next().unwrap())).expect("valid limits");
    let mut join = |job: &str, world_size, lineage: Option<u64>, origin| {
        let own = resuming(0, world_size, &[0; 64]).resume;
        let resume = lineage.and_then(|lineage| Some(Resume { lineage, ..own? }));
        registry.join(at(0), JoinRequest { resume, origin, ..ask(job, 0, world_size) })
    };
    let too_many = JoinDecision::Refused { reason: Refusal::TooManyJobs { max: 2 } };
    assert!(matches!(join("a", 1, None, one), JoinDecision::Complete { .. }), "it runs");
    assert!(matches!(join("b", 2, Some(1), one), JoinDecision::Waiting(_)));
    assert_eq!(join("c", 1, None, one), too_many);
    assert_eq!(join("b", 2, Some(2), one), too_many, "another job of the name");
    assert!(matches!(join("d", 2, Some(3), other), JoinDecision::Waiting(_)), "another's, that resumes");
    assert!(matches!(join("e", 1, None, None), JoinDecision::Complete { .. }), "the switch's own machine");
    let all = JoinDecision::Refused { reason: Refusal::TooManyJobs { max: 4 } };
    assert_eq!(join("f", 1, None, other), all);
}

#[test]
fn what_one_machine_resumes_leaves_memory_for_others_that_do() {
    let config = RegistryConfig { shards: 64, ..RegistryConfig::default() };
    let mut registry = Registry::new(config, protocols(), Box::new(|| 41)).expect("valid limits");
    let mut join = |job: &str, rank, origin: [u8; 4]| {
        let resume = resuming(0, 64, &[0]).resume.expect("it resumes");
        let completed = vec![vec![0; 16_384]; 64];
        let resume = Some(Resume { in_flight: 16_384, completed, ..resume });
        registry.join(at(0), JoinRequest { resume, origin: Some(origin.into()), ..ask(job, rank, 64) })
    };
    // 2^20 counts each.
    for rank in 0..8 {
        assert!(matches!(join("a", rank, [10, 0, 0, 1]), JoinDecision::Waiting(_)));
    }
    assert!(matches!(join("a", 8, [10, 0, 0, 1]), JoinDecision::Refused { .. }));
    assert!(matches!(join("b", 0, [10, 0, 0, 2]), JoinDecision::Waiting(_)));
}
