//! Ranks that go on under a switch which forgot their job.

use super::*;

#[test]
fn a_forgotten_job_resumes_in_the_next_generation_and_says_who_restores_what() {
    let mut registry = registry();
    registry.join(at(0), resuming(1, 2, &[8, 8, 9]));
    let decision = registry.join(at(0), resuming(0, 2, &[8, 9, 8]));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    let Terms { in_flight, elements, .. } = admission.terms;
    assert_eq!((admission.generation, in_flight, elements), (Generation(5), 3, 352));
    assert!(admission.resumed);
    let restore = |rank| {
        let part = part_of(&admission.seats, Rank(rank)).expect("a part");
        RankTerms::read(admission.identity(), part).expect("its own part").restore
    };
    assert_eq!([0, 1].map(restore), [vec![vec![SlotIndex(1)]], vec![vec![SlotIndex(2)]]]);
}

#[test]
fn ranks_that_remember_different_jobs_are_told_what_differs() {
    let differ = |change: fn(&mut Resume)| {
        let mut registry = registry();
        registry.join(at(0), resuming(0, 2, &[1, 1]));
        let mut request = resuming(1, 2, &[1, 1]);
        request.resume.as_mut().map(change);
        match refusal(&mut registry, request) {
            Refusal::ResumeMismatch { rank: 1, field, rank_has, job_has } => (field, rank_has, job_has),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(differ(|resume| resume.generation = Generation(3)), (ResumeField::Generation, 3, 4));
    assert_eq!(differ(|resume| resume.elements = 256), (ResumeField::Elements, 256, 352));
    assert_eq!(differ(|resume| resume.elements = 300), (ResumeField::Elements, 300, 32));
    assert_eq!(differ(|resume| resume.completed.push(vec![1, 1])), (ResumeField::Shards, 2, 1));
    assert_eq!(differ(|resume| resume.completed.clear()), (ResumeField::Shards, 0, 1));
    assert_eq!(differ(|resume| resume.completed[0].push(1)), (ResumeField::Counts, 3, 2));
}

#[test]
fn a_resume_that_cannot_be_is_refused_for_all() {
    let mut registry = registry();
    registry.join(at(0), resuming(0, 2, &[1, 5]));
    let reason = refusal(&mut registry, resuming(1, 2, &[1, 7]));
    assert_eq!(reason, Refusal::ResumeGap { ahead: Rank(1), behind: Rank(0), shard: 0, slot: 1 });
    assert_eq!(registry.jobs().count(), 0);
}

#[test]
fn who_takes_the_name_of_a_forgotten_job_does_not_keep_its_ranks_out() {
    let another_past = |rank| {
        let mut request = resuming(rank, 2, &[7, 7]);
        request.resume.as_mut().expect("it resumes").lineage = 10;
        request
    };
    for stranger in [
        vec![ask("a", 0, 1)],
        vec![ask("a", 0, 2)],
        vec![another_past(1)],
        vec![another_past(0), another_past(1)],
    ] {
        let mut registry = registry();
        for request in stranger {
            registry.join(at(0), request);
        }
        registry.join(at(0), resuming(1, 2, &[8, 8]));
        let decision = registry.join(at(0), resuming(0, 2, &[8, 8]));
        let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
        assert!(admission.resumed && admission.generation == Generation(5));
    }
}

#[test]
fn the_key_of_a_job_is_told_to_nobody_who_does_not_show_that_he_was_in_it() {
    let mut registry = registry();
    registry.join(at(0), resuming(1, 2, &[8, 8]));
    let decision = registry.join(at(0), resuming(0, 2, &[8, 8]));
    let JoinDecision::Complete { outcome: Ok(admission), .. } = decision else { panic!("{decision:?}") };
    let mut guess = resuming(0, 2, &[8, 8]);
    guess.resume.as_mut().expect("it resumes").lineage = 10;
    assert!(matches!(registry.join(at(1), guess), JoinDecision::Waiting(_)));
    let again = registry.join(at(1), resuming(0, 2, &[8, 8]));
    assert!(matches!(again, JoinDecision::Again { admission: told, .. } if told == admission));
    // And who shows another generation of a job that runs here resumes nothing.
    let old = start(&mut registry, at(1), "b", 1);
    let resume = Resume { lineage: old.key.lineage(), ..resuming(0, 1, &[8, 8]).resume.expect("it resumes") };
    let request = JoinRequest { resume: Some(resume), ..ask("b", 0, 1) };
    assert_eq!(refusal(&mut registry, request), Refusal::JobRunning { rank: 0, world_size: 1 });
}

#[test]
fn what_ranks_that_wait_remember_is_bounded_over_all_of_them() {
    let mut registry =
        Registry::new(RegistryConfig::default(), protocols(), Box::new(|| 1)).expect("valid limits");
    let memory = vec![1; 16384];
    let of = |job: u32, rank| JoinRequest { job: format!("{job}"), ..resuming(rank, 64, &memory) };
    for job in 0..17 {
        for rank in 0..63 {
            let decision = registry.join(at(0), of(job, rank));
            let held = (job * 63 + rank) as usize * memory.len();
            let fits = held + memory.len() <= COUNTS_MAX;
            assert_eq!(matches!(decision, JoinDecision::Waiting(_)), fits, "{decision:?}");
        }
    }
    // Who remembers nothing waits all the same; and who gives up makes room.
    assert!(matches!(registry.join(at(0), ask("new", 0, 2)), JoinDecision::Waiting(_)));
    registry.withdraw(Ticket(0));
    assert!(matches!(registry.join(at(0), of(0, 0)), JoinDecision::Waiting(_)));
}
