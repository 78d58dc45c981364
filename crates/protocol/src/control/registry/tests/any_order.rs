//! What holds after any sequence of operations.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Operation {
    Join { job: u8, rank: u32, world_size: u32, slots: u16, wire_dtype: WireDtype },
    Resume { job: u8, rank: u32, world_size: u32, completed: [u32; 2] },
    Withdraw { ticket: u64 },
    Heartbeat { job: usize, rank: u8 },
    Attend { job: usize, rank: u8 },
    Detach { attendance: usize, cause: Detached },
    Leave { job: usize, rank: u8 },
    Abort { job: usize },
    Tick { after: Duration },
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (0_u8..5, 0_u32..4, 1_u32..4, 1_u16..1000, prop::sample::select(WireDtype::ALL.to_vec()))
            .prop_map(|(job, rank, world_size, slots, wire_dtype)| Operation::Join { job, rank, world_size, slots, wire_dtype }),
        4 => (0_u8..5, 0_u32..4, 1_u32..4, prop::array::uniform2(0_u32..3))
            .prop_map(|(job, rank, world_size, completed)| Operation::Resume { job, rank, world_size, completed }),
        1 => (0_u64..60).prop_map(|ticket| Operation::Withdraw { ticket }),
        2 => (0_usize..8, 0_u8..4).prop_map(|(job, rank)| Operation::Heartbeat { job, rank }),
        3 => (0_usize..8, 0_u8..4).prop_map(|(job, rank)| Operation::Attend { job, rank }),
        2 => (0_usize..8, prop::sample::select(vec![Detached::AtTheRank, Detached::OnTheWay]))
            .prop_map(|(attendance, cause)| Operation::Detach { attendance, cause }),
        2 => (0_usize..8, 0_u8..4).prop_map(|(job, rank)| Operation::Leave { job, rank }),
        1 => (0_usize..8).prop_map(|job| Operation::Abort { job }),
        2 => (0_u64..40).prop_map(|seconds| Operation::Tick { after: SECOND * seconds as u32 }),
    ]
}

fn job_name(job: u8) -> &'static str {
    ["a", "b", "c", "d", "e"][usize::from(job)]
}

/// Slots that the running jobs hold, counted anew.
fn held(registry: &Registry) -> u32 {
    let units = |view: JobView<'_>| match view.state {
        JobState::Running { in_flight, elements, wire_dtype, .. } => {
            pool_units(in_flight, elements, wire_dtype, view.world_size as u8)
        }
        _ => 0,
    };
    registry.jobs().map(units).sum()
}

proptest! {
    #[test]
    fn slots_are_conserved_answers_are_given_once_and_memory_is_bounded(
        operations in prop::collection::vec(operation(), 0..120)
    ) {
        let mut registry = registry();
        let mut now = at(0);
        let mut admitted: Vec<Admission> = Vec::new();
        let mut waiting: Vec<Ticket> = Vec::new();
        let mut attendances: Vec<Attendance> = Vec::new();
        for operation in operations {
            let mut answered: Vec<Ticket> = Vec::new();
            let request = match operation {
                Operation::Join { job, rank, world_size, slots, wire_dtype } => {
                    Some(as_(wire_dtype, with_slots(slots, ask(job_name(job), rank, world_size))))
                }
                Operation::Resume { job, rank, world_size, completed } => {
                    Some(JoinRequest { job: job_name(job).into(), ..resuming(rank, world_size, &completed) })
                }
                _ => None,
            };
            match operation {
                Operation::Join { world_size, .. } | Operation::Resume { world_size, .. } => {
                    let request = request.expect("made above");
                    for command in registry.make_way(now, &request, |_| true) {
                        let is_end = matches!(command, Command::Abort { .. } | Command::Remove { .. });
                        prop_assert!(is_end, "{:?}", command);
                    }
                    match registry.join(now, request) {
                        JoinDecision::Waiting(ticket) => waiting.push(ticket),
                        JoinDecision::Complete { ticket, tickets, outcome, .. } => {
                            match outcome {
                                // Not all of them need be there to see that they cannot agree.
                                Err(Refusal::Mismatch { .. }) => {
                                    prop_assert!((2..=world_size).contains(&(tickets.len() as u32)));
                                }
                                _ => prop_assert_eq!(tickets.len() as u32, world_size),
                            }
                            waiting.push(ticket);
                            answered.extend(tickets);
                            if let Ok(admission) = outcome {
                                prop_assert!(admitted.iter().all(|other| other.job != admission.job));
                                admitted.push(admission);
                            }
                        }
                        JoinDecision::Again { admission, .. } => prop_assert!(admitted.contains(&admission)),
                        JoinDecision::Refused { .. } => {}
                    }
                }
                Operation::Withdraw { ticket } => {
                    registry.withdraw(Ticket(ticket));
                    waiting.retain(|waiting| *waiting != Ticket(ticket));
                }
                Operation::Heartbeat { job, rank } => {
                    if let Some(admission) = admitted.get(job) {
                        registry.beats(now, admission.job, Rank(rank.into()), admission.generation);
                    }
                }
                Operation::Attend { job, rank } => {
                    if let Some(admission) = admitted.get(job) {
                        let attending =
                            registry.attends(now, admission.job, Rank(rank.into()), admission.generation);
                        attendances.extend(attending.1);
                    }
                }
                Operation::Detach { attendance, cause } => {
                    if let Some(attendance) = attendances.get(attendance) {
                        registry.detached(now, *attendance, cause);
                    }
                }
                Operation::Leave { job, rank } => {
                    admitted.get(job).map(|admission| registry.leaves(now, admission.job, Rank(rank.into())));
                }
                Operation::Abort { job } => {
                    let reason = AbortReason::Expelled(Rank(0));
                    admitted.get(job).map(|admission| registry.aborted(now, admission.job, reason));
                }
                Operation::Tick { after } => {
                    now = now + after;
                    for command in registry.tick(now) {
                        if let Command::Refuse { tickets, .. } = command {
                            answered.extend(tickets);
                        }
                    }
                }
            }
            for ticket in answered {
                let position = waiting.iter().position(|waiting| *waiting == ticket);
                prop_assert!(position.is_some(), "{:?} is answered twice, or never waited", ticket);
                position.map(|position| waiting.swap_remove(position));
            }
            let pool = registry.pool();
            prop_assert_eq!(pool.units - pool.free, held(&registry));
            prop_assert!(registry.jobs().count() <= 6, "three jobs and three aborts");
            let mut running = Vec::new();
            for view in registry.jobs() {
                if let JobState::Running { generation, .. } = view.state {
                    let identity = (view.name, generation == Generation(0));
                    prop_assert!(!running.contains(&identity), "two jobs of one name and one past");
                    running.push(identity);
                }
            }
        }
        for attendance in attendances {
            registry.detached(now, attendance, Detached::AtTheRank);
        }
        // In the end nobody waits for ever, and all slots are back.
        let mut refused = 0;
        for round in 1..100 {
            for command in registry.tick(now + SECOND * 2 * round) {
                if let Command::Refuse { tickets, .. } = command {
                    refused += tickets.len();
                }
            }
        }
        prop_assert_eq!(refused, waiting.len());
        prop_assert_eq!(registry.pool(), Pool { units: 2048, free: 2048 });
        prop_assert_eq!(registry.jobs().count(), 0);
    }
}
