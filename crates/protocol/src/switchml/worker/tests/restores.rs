//! A switch gets back what it forgot, whatever else the network has no room for.

use super::*;

/// A tensor has 40 chunks a slot: far fewer are enough.
const TIMEOUTS: usize = 2000;

/// Two workers, one of them ahead by so many slots as their switch forgets all. The network takes
/// so many of the first packets of each after that, as if the others were lost in a queue. Returns
/// whether both then have all sums.
fn goes_on(slots: u16, ahead: u16, kept: usize) -> bool {
    let mut rack = Rack::new(2, slots);
    let tensor = |w: usize| {
        Numbers::Int(
            (0..40 * i32::from(slots) * ELEMENTS as i32).map(|x| x.wrapping_mul(w as i32 + 1)).collect(),
        )
    };
    for w in 0..2 {
        rack.workers[w].submit(tensor(w), Op::Sum);
    }
    let mut train = vec![0; 65536];
    for w in 0..2 {
        while let Some(sent) = rack.workers[w].poll_transmit(rack.now, &mut train) {
            let (bytes, segment) = (sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment) {
                rack.switch.handle_packet(rack.now, w, packet);
            }
        }
    }
    // The first results reach worker 0 alone, then the switch dies.
    let mut left = ahead;
    while let Some(sent) = rack.switch.poll_transmit(rack.now, &mut train) {
        let (bytes, segment) = (sent.bytes, sent.segment_bytes);
        for packet in train[..bytes].chunks(segment) {
            if left > 0 {
                left -= 1;
                rack.workers[0].handle_packet(rack.now, (), packet);
            }
        }
    }
    let completed: Vec<_> = rack.workers.iter_mut().map(Worker::suspend).collect();
    let restore: Vec<SlotIndex> = (0..slots)
        .filter(|s| completed[0][usize::from(*s)] != completed[1][usize::from(*s)])
        .map(SlotIndex)
        .collect();
    assert_eq!(restore.len(), usize::from(ahead));
    let config = rack.forget();
    rack.resume(config, [restore, vec![]]);
    // Only so many packets of each worker's first window find room in a queue; after that nothing
    // is ever lost.
    let mut sent = [0usize; 2];
    rack.settle(|packet| {
        if packet[3] == Kind::Result as u8 {
            return false;
        }
        let w = usize::from(packet[10]);
        sent[w] += 1;
        sent[w] > kept && sent[w] <= usize::from(slots)
    });
    for _ in 0..TIMEOUTS {
        if rack.done.iter().all(|done| done.len() == 1) {
            let expected = Numbers::Int(
                (0..40 * i32::from(slots) * ELEMENTS as i32).map(|x| x.wrapping_mul(3)).collect(),
            );
            assert!(rack.done.iter().all(|done| *done == [expected.clone()]));
            return true;
        }
        if !rack.sleep() {
            return false;
        }
        rack.settle(|_| false);
    }
    false
}

#[test]
fn sums_that_are_handed_back_do_not_wait_for_a_window_that_shrank() {
    for (slots, ahead) in [(64, 4), (64, 10), (64, 20), (64, 40), (32, 10), (16, 6)] {
        for kept in [slots / 4, slots / 3, slots / 2, slots * 3 / 4] {
            assert!(goes_on(slots, ahead, kept.into()), "{slots} slots, {ahead} ahead, {kept} kept");
        }
    }
}
