//! Original values on their way to the server, and the sums that they come by.

use super::*;

#[test]
fn original_values_are_not_added_and_take_the_place_of_what_was() {
    let mut switch = switch();
    fragment(S1, 1, 0, 5).to(&mut switch, 10);
    let originals = fragment(S1, 1, 0, 5).resent().with(|header| header.flags.overflow = true);
    assert_eq!(originals.to(&mut switch, 10), Verdict::Forward);
    assert_eq!(sent(&mut switch), ["[100] #0 S1 1 passed resend overflow: 5"]);
    assert_eq!(switch.statistics().in_use, 0);
}

#[test]
fn original_values_that_come_by_take_the_place_of_a_sum_that_has_their_worker_in_it() {
    let mut switch = switch_of_sums();
    fragment(S1, 0b110, 0, 6).to(&mut switch, 11);
    let originals =
        |workers| fragment(S2, workers, 0, 5).passed().with(|header| header.flags.overflow = true);
    originals(0b10_0000).to(&mut switch, 11);
    assert_eq!(switch.statistics().in_use, 1, "worker 5 is in no sum here");
    originals(0b1000).to(&mut switch, 11);
    assert_eq!(switch.statistics().in_use, 1, "the sum of workers 3 and 4 has not come");
    originals(0b10).to(&mut switch, 11);
    assert_eq!(switch.statistics().in_use, 0);
    assert_eq!(
        sent(&mut switch),
        [
            "[100] #0 S2 100000 passed overflow: 5",
            "[100] #0 S2 1000 passed overflow: 5",
            "[100] #0 S2 10 passed overflow: 5"
        ]
    );
}

/// Workers 0 to 4 are summed at S1.
fn of_five() -> (GoatSwitch<u16>, GoatServer<u16>) {
    let (mut switch, mut server) = (switch(), server());
    let sum = PlannedSum { workers: 0b1_1111, ..PlannedSum::default() };
    let sums = BTreeMap::from([(SubModel(0), sum)]);
    switch.add_job(GoatRoute { workers: 5, sums, ..route(4) }).unwrap();
    let nodes = vec![vec![S1, SERVER]; 5];
    server.go_on_with(JobId(3), Generation(4), &ServerPlan { nodes, ..plan() }).unwrap();
    (switch, server)
}

/// A server that was started again asks for what it may have lost. Worker 0 has sent the fragment by
/// then, and sends its original values from now on. Workers 1 to 4 send it later, as scaled values,
/// since nobody asked them. All send again until the fragment is finished.
#[test]
fn original_values_that_are_sent_again_leave_the_sum_of_the_others() {
    let (mut switch, mut server) = of_five();
    let original = fragment(S1, 0b1, 0, 1).resent().with(|header| header.flags.overflow = true);
    let scaled = |worker: u32| fragment(S1, 1 << worker, 0, 1 << worker).resent();
    let duplicate = Verdict::Drop(Reason::Duplicate);
    for (packet, at_server, verdict) in [
        (original, "S1 1 passed resend overflow: 1", Verdict::Absorb),
        (scaled(1), "S1 10 passed resend: 2", Verdict::Absorb),
        (scaled(2), "S1 110 passed resend: 6", Verdict::Absorb),
        (original, "S1 1 passed resend overflow: 1", duplicate),
        (scaled(3), "S1 1110 passed resend: 14", Verdict::Absorb),
        (scaled(4), "S1 11110 passed resend: 30", Verdict::Multicast),
    ] {
        packet.to(&mut switch, 10);
        let mut carried = Vec::new();
        each_sent(&mut switch, |to, packet| {
            carried.push((line(to, packet), server.handle_packet(Instant(0), 10, packet)));
        });
        assert_eq!(carried, [(format!("[100] #0 {at_server}"), verdict)]);
    }
    assert_eq!(sent(&mut server), ["[10, 14] #0 parameters lost: 31"]);
}
