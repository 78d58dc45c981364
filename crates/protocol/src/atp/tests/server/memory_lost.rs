//! Servers that lost their memory.

use super::*;

/// Worker 0 has the parameters of fragment 8 and sent 12; worker 1 lacks them; the server knows
/// nothing.
#[test]
fn a_server_that_lost_its_memory_gets_parameters_back_from_who_has_them() {
    // Whoever speaks first.
    for order in [[0, 1], [1, 0]] {
        let mut server = plain(true);
        for worker in order {
            if worker == 0 {
                assert_eq!(from_worker(0, 12, ONE).resent().to(&mut server, 1), Verdict::Absorb);
            } else {
                from_worker(1, 8, ONE).resent().to_at(&mut server, 2, MS);
            }
        }
        from_worker(1, 8, ONE).resent().to_at(&mut server, 2, 3 * MS);
        let requests = sent(&mut server);
        assert!(requests.iter().any(|line| line.contains("#8 parameters overflow: request")), "{requests:?}");
        // Worker 1 answers with original values, worker 0 with what it has.
        original(1, 8, 1.0).to_at(&mut server, 2, 3 * MS);
        assert_eq!(restored(0, 8, 0.5).to_at(&mut server, 1, 3 * MS), Verdict::Multicast);
        let answer = packets(&mut server).pop().unwrap();
        assert!(line(&answer.1).contains("#8 parameters: 0.5"), "{order:?}");
        let header = GradientPacket::parse(Preamble::parse(&answer.1).unwrap(), &answer.1).unwrap().header;
        assert_eq!(next_aggregator_index(&header), 11, "the aggregator that worker 0 uses already");
        // And on it goes.
        from_worker(0, 12, ONE).resent().to_at(&mut server, 1, 5 * MS);
        assert_eq!(from_worker(1, 12, ONE).to_at(&mut server, 2, 5 * MS), Verdict::Multicast);
        assert!(sent(&mut server).iter().any(|line| line.contains("#12 parameters lost: 2")));
    }
}

#[test]
fn parameters_that_are_handed_back_count_where_they_are_missed_only() {
    let mut server = plain(true);
    assert_eq!(restored(0, 8, 0.5).to(&mut server, 1), Verdict::Multicast, "unasked, but the server forgot");
    assert_eq!(sent(&mut server), ["[1] #8 parameters: 0.5"]);
    assert_eq!(restored(0, 12, 7.0).to(&mut server, 1), Verdict::Drop(Reason::Unexpected));
    assert_eq!(from_worker(1, 8, ONE).resent().to(&mut server, 2), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut server), ["[2] #8 parameters lost: 0.5"]);
}

/// Worker 0 is a window ahead and always speaks first, as timers that were set at once make it.
#[test]
fn who_waits_for_the_earlier_fragment_is_not_drowned_out_by_who_waits_for_the_later() {
    for together in [true, false] {
        let mut server = plain(true);
        from_worker(0, 12, ONE).resent().to(&mut server, 1);
        from_worker(1, 8, ONE).resent().to(&mut server, 2);
        for round in 1..3 {
            sent(&mut server);
            from_worker(0, 12, ONE).resent().to_at(&mut server, 1, 10 * round * MS);
            let mut requests = if together { vec![] } else { sent(&mut server) };
            from_worker(1, 8, ONE).resent().to_at(&mut server, 2, 10 * round * MS);
            requests.extend(sent(&mut server));
            let earlier = "[1, 2] #8 parameters overflow: request".to_string();
            assert!(requests.contains(&earlier), "round {round}, {together}: {requests:?}");
        }
    }
}

#[test]
fn a_server_that_lost_its_memory_sums_what_nobody_has() {
    let mut server = plain(true);
    from_worker(0, 8, ONE).resent().to(&mut server, 1);
    assert_eq!(sent(&mut server), ["[1] #8 parameters overflow: request"]);
    assert_eq!(from_worker(1, 8, 2 * ONE).resent().to(&mut server, 2), Verdict::Multicast);
    assert_eq!(sent(&mut server), ["[1, 2] #8 parameters lost: 3"]);
}

#[test]
fn a_restored_server_whose_first_fragment_overflows_waits_for_the_originals() {
    let mut server = plain(true);
    from_worker(0, 8, i32::MAX).to(&mut server, 1);
    from_worker(1, 8, 1).to(&mut server, 2);
    assert_eq!(sent(&mut server), ["[1, 2] #8 parameters overflow: request"]);
    assert_eq!(from_worker(0, 8, i32::MAX).to(&mut server, 1), Verdict::Drop(Reason::Unexpected));
    original(0, 8, 30.0).to(&mut server, 1);
    original(1, 8, 1.0).to(&mut server, 2);
    assert_eq!(sent(&mut server), ["[1, 2] #8 parameters: 31"]);
}
