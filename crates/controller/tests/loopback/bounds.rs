//! Jobs with a loss bound, which DLCP sums.

use fanin_controller::{RackServer, RackServerConfig, ServiceConfig};
use fanin_protocol::dlcp::RankTerms;
use fanin_wire::{Generation, LossBound, Rank, WorkerId};

use super::*;

/// So small that it forgives no block of any flow here.
const NEARLY_NONE: u32 = 1;
const WORKERS: u32 = 4;

fn losing(config: &mut SessionConfig, millionths: u32) {
    config.agreed.loss_bound = LossBound::from_millionths(millionths).expect("below one");
    config.wire_dtype = Some(WireDtype::Native);
}

/// What a rank contributes: such that the order of additions shows in the bits.
fn gradients(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((i * 31 + rank * 17) % 1009) as f32 / 7.0 - 60.0).collect()
}

/// The bits that each rank gets.
fn summed(sessions: &[Session], length: usize, op: Op) -> Vec<Vec<u32>> {
    let submitted: Vec<_> = sessions
        .iter()
        .enumerate()
        .map(|(rank, session)| submit(session, gradients(rank, length), op))
        .collect();
    let bits = |sum: UnderWay<f32>| sum.wait().expect("a sum").iter().map(|x| x.to_bits()).collect();
    submitted.into_iter().map(bits).collect()
}

#[test]
fn all_ranks_get_the_same_bits_and_no_more_is_lost_than_the_bound_allows() {
    for (shards, paths) in [(1, 1), (2, 1), (2, 4)] {
        let switch = switch_with(|config| config.shards = shards);
        let sessions = connect_all(&switch, "bound", WORKERS, |config| {
            losing(config, 20_000);
            // One of the ranks asks for more than the others.
            config.paths = if config.rank == 1 { paths } else { 1 };
        });
        for session in &sessions {
            assert_eq!(terms::<RankTerms>(session).config.paths, paths);
        }
        let reliable =
            connect_all(&switch, "none", WORKERS, |config| config.wire_dtype = Some(WireDtype::Native));
        for length in [0, 1, 2049, 300_000] {
            for op in [Op::Sum, Op::Average] {
                let sums = summed(&sessions, length, op);
                assert!(sums.iter().all(|bits| *bits == sums[0]), "{length} elements, {shards} shards");
                let exact = summed(&reliable, length, op);
                let other = sums[0].iter().zip(&exact[0]).filter(|(sum, exact)| sum != exact).count();
                // A block lacks one rank's contribution or more: of each rank no more may be
                // missing than the bound says.
                assert!(other <= length / 50 * WORKERS as usize, "{other} of {length} are not whole sums");
            }
        }
    }
}

#[test]
fn a_bound_that_forgives_nothing_has_the_bits_of_reliable_sums() {
    let switch = switch_with(|config| config.shards = 2);
    let bounded = connect_all(&switch, "bound", WORKERS, |config| losing(config, NEARLY_NONE));
    let reliable =
        connect_all(&switch, "none", WORKERS, |config| config.wire_dtype = Some(WireDtype::Native));
    for length in [100, 200_001] {
        for op in [Op::Sum, Op::Average] {
            assert!(summed(&bounded, length, op) == summed(&reliable, length, op), "{length} elements");
        }
    }
}

#[test]
fn integers_and_what_is_only_moved_lose_nothing() {
    let switch = switch();
    let sessions = connect_all(&switch, "whole", WORKERS, |config| losing(config, 500_000));
    let under_way: Vec<_> =
        (1..).zip(&sessions).map(|(rank, session)| submit(session, vec![rank; 200_000], Op::Sum)).collect();
    assert!(under_way.into_iter().all(|sum| sum.wait() == Ok(vec![10; 200_000])));
    let (sender, done) = mpsc::channel();
    let mut tensors: Vec<Vec<f32>> = (0..WORKERS).map(|rank| vec![rank as f32; 200_000]).collect();
    for (session, tensor) in sessions.iter().zip(&mut tensors) {
        let sender = sender.clone();
        // SAFETY: the tensors stay where they are, untouched, until all are done.
        let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Float32) };
        let broadcast = Submission::broadcast(raw.expect("a tensor"), WorkerId(2));
        session
            .submit(broadcast, move |result, _| {
                let _ = sender.send(result.is_ok()); // who waited may be gone
            })
            .expect("open");
    }
    let is_done = |_| done.recv_timeout(HANG) == Ok(true);
    if !(0..WORKERS).all(is_done) {
        // The sessions may still write to them.
        std::mem::forget(tensors);
        panic!("a broadcast failed, or hangs");
    }
    assert!(tensors.iter().all(|tensor| *tensor == [2.0; 200_000]));
}

#[test]
fn two_services_share_a_job_with_a_bound() {
    let switches = [switch(), switch()];
    let services = switches.each_ref().map(|switch| (switch.address().to_string(), 0.5, None, None));
    let services = ServiceConfig::all(services.to_vec());
    let bounded = connect_all(&switches[0], "two", WORKERS, |config| {
        losing(config, NEARLY_NONE);
        config.services = services.clone();
    });
    let reliable =
        connect_all(&switches[0], "one", WORKERS, |config| config.wire_dtype = Some(WireDtype::Native));
    assert!(summed(&bounded, 200_000, Op::Sum) == summed(&reliable, 200_000, Op::Sum));
}

#[test]
fn ranks_with_different_bounds_are_all_told() {
    let switch = switch();
    let connecting = [10_000, 0].map(|millionths| {
        let mut config = config(&switch, "apart", u32::from(millionths == 0), 2);
        losing(&mut config, millionths);
        thread::spawn(move || Session::connect(config).expect_err("they disagree").to_string())
    });
    for rank in connecting {
        let message = rank.join().expect("no panic");
        assert!(message.contains("1 %") && message.contains("FANIN_LOSS_BOUND"), "{message}");
    }
}

#[test]
fn ranks_behind_racks_send_to_the_root_itself_which_the_racks_name() {
    let rack = |upstream: std::net::SocketAddr| {
        let local = ([127, 0, 0, 1], 0).into();
        RackServer::start(RackServerConfig::new(protocol("switchml"), local, upstream.to_string()))
            .expect("a free port")
    };
    let root = switch();
    let spine = rack(root.address());
    let racks = [rack(spine.address()), rack(root.address())];
    let at = [racks[0].address(), racks[1].address(), root.address()];
    let connecting = [0, 1, 2].map(|rank| {
        let mut config = SessionConfig::new(at[rank].to_string(), "behind", rank as u32, 3);
        losing(&mut config, 10_000);
        thread::spawn(move || Session::connect(config).expect("admitted"))
    });
    let sessions = connecting.map(|rank| rank.join().expect("no panic"));
    let sums = sessions.each_ref().map(|session| submit(session, vec![2.0_f32; 100_000], Op::Sum));
    for sum in sums {
        assert!(sum.wait().expect("a sum").iter().all(|value| *value == 6.0), "nothing is lost here");
    }
    for rack in [&spine, &racks[0], &racks[1]] {
        let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
        assert!(status.relays.iter().all(|relay| relay.jobs.is_empty()), "{status:?}");
    }
}

#[test]
fn a_bound_behind_a_switch_of_another_protocol_is_refused_with_the_cure() {
    let root = super::atp::server();
    let rack = super::atp::rack(root.address());
    let mut config = SessionConfig::new(rack.address().to_string(), "behind", 0, 1);
    losing(&mut config, 10_000);
    let error = Session::connect(config).expect_err("ATP loses nothing").to_string();
    assert!(error.contains("FANIN_PROTOCOL") && error.contains("atp"), "{error}");
}

#[test]
fn a_rank_that_dies_is_named_to_the_others() {
    let switch = switch();
    let job = "dies";
    let loss_bound = LossBound::from_millionths(10_000).expect("below one");
    let settings = settings(&Agreed { loss_bound, ..Agreed::default() });
    let asks = JoinRequest { protocol: "dlcp".into(), settings, ..request(job, 1, 2, HANG) };
    let address = switch.address();
    let dies = thread::spawn(move || drop(super::faults::Process::join(address, asks)));
    let mut config = config(&switch, job, 0, 2);
    losing(&mut config, 10_000);
    let session = Session::connect(config).expect("admitted");
    dies.join().expect("it joined");
    let error = submit(&session, gradients(0, 100_000), Op::Sum).wait().expect_err("one is dead");
    assert_eq!(error, SessionError::RankLost { rank: Rank(1) });
    assert_eq!(terms::<RankTerms>(&session).config.generation, Generation(0));
}
