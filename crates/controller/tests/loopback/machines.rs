//! Sessions whose ranks sum in shared memory before their tensors go over machines.

use std::sync::{Arc, Mutex};

use super::*;
use fanin_controller::{AllReduceError, Cancel, HandOver, JobStatusState, LocalRanks};
use fanin_protocol::control::Ranks;
use fanin_udp::Loss;
use fanin_wire::{LossBound, Rank};

/// Connects all ranks at once, each on its machine.
fn connect_machines(switch: &SwitchServer, job: &str, machines: &[usize]) -> Vec<Session> {
    connect_told(switch, job, machines, |config| config)
}

/// The same, of ranks that are all told more.
fn connect_told(
    switch: &SwitchServer,
    job: &str,
    machines: &[usize],
    told: impl Fn(SessionConfig) -> SessionConfig,
) -> Vec<Session> {
    let name = format!("fanin-loopback-{}-{job}", std::process::id());
    let connecting: Vec<_> = (0..machines.len() as u32)
        .map(|rank| {
            let config = told(config(switch, job, rank, machines.len() as u32));
            let ranks =
                LocalRanks::new(machines.to_vec(), rank, name.clone(), usize::MAX).expect("shared memory");
            thread::spawn(move || Session::connect_unless(config, Some(ranks), &Cancel::default()))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// Starts a sum of a tensor that stays where it is until `done` is called.
fn start(
    session: &Session,
    tensor: &mut [i32],
    done: impl FnOnce(Result<(), AllReduceError>) + Send + 'static,
) {
    // SAFETY: the caller waits for `done` before it touches the tensor, or lets it go.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Int32) };
    let submission = Submission::all_reduce(raw.expect("a tensor"), Op::Sum);
    session.submit(submission, |result, _| done(result)).expect("it is open");
}

/// Ranks, here machines, that have left the only job of the switch.
fn left(switch: SocketAddr) -> Ranks {
    let status = switch_status(&switch.to_string(), HANG).expect("a status");
    match status.jobs.into_iter().next().map(|job| job.state) {
        Some(JobStatusState::Running { left, .. }) => left,
        other => panic!("the job does not run: {other:?}"),
    }
}

#[test]
fn a_done_that_holds_the_last_session_fails_what_is_under_way_before_the_services_are_left() {
    let switch = switch();
    let address = switch.address();
    let mut others = connect_machines(&switch, "last", &[0, 0, 1]);
    let last = Arc::new(Mutex::new(Some(others.remove(0))));
    let mut tensors = [[1; 1000]; 2];
    let [first, second] = &mut tensors;
    let (tell, told) = mpsc::channel();
    let (tell_end, end) = mpsc::channel();
    if let Some(session) = &*last.lock().expect("no panic") {
        let held = Arc::clone(&last);
        start(session, first, move |result| {
            drop(held.lock().expect("no panic").take());
            let _ = tell.send(result);
        });
        start(session, second, move |result| {
            let _ = tell_end.send((result.map_err(|error| error.cause), left(address)));
        });
    }
    let neighbours: Vec<_> = (0..2).map(|_| submit(&others[0], vec![1; 1000], Op::Sum)).collect();
    // The other machine never submits the second one.
    let remote = submit(&others[1], vec![1; 1000], Op::Sum);
    told.recv_timeout(HANG).expect("the session is dropped").expect("a sum");
    let ended = end.recv_timeout(HANG).expect("the second one hangs");
    assert_eq!(ended, (Err(SessionError::Closed), Ranks::default()), "nobody has left yet");
    assert_eq!((tensors[0], remote.wait()), ([3; 1000], Ok(vec![3; 1000])));
    let neighbours: Vec<_> = neighbours.into_iter().map(UnderWay::wait).collect();
    assert_eq!(neighbours, [Ok(vec![3; 1000]), Err(SessionError::RankLeft { rank: Rank(0) })]);
    wait_until(address, "the rank's thread has not left the services", |status| {
        status.jobs.iter().all(|job| match &job.state {
            JobStatusState::Running { left, .. } => left.contains(Rank(0)),
            _ => true,
        })
    });
}

#[test]
fn a_session_that_is_closed_takes_and_tells_nothing() {
    let switch = switch();
    for mut session in connect_machines(&switch, "closed", &[0, 0, 1]) {
        session.close();
        let submitted = session.submit(Submission::all_gather(Vec::new()), |_, _| panic!("it was taken"));
        assert_eq!(submitted.map(drop), Err(SessionError::Closed));
        assert_eq!((session.failure(), session.has_roots()), (None, false));
    }
}

/// Tells how a sum of floats ended, and how much it lacks.
type Told = mpsc::Receiver<(Result<(), SessionError>, Loss)>;

/// Starts a sum of floats that stay where they are until it is told.
fn start_losing(session: &Session, tensor: &mut [f32], bound: Option<LossBound>) -> Told {
    // SAFETY: the callers wait for what is told before they touch the tensor, or let it go.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Float32) };
    let submission = Submission::all_reduce(raw.expect("a tensor"), Op::Sum).losing(bound);
    let (tell, told) = mpsc::channel();
    let done = move |result: Result<(), AllReduceError>, hand_over: HandOver| {
        let _ = tell.send((result.map_err(|error| error.cause), hand_over.loss));
    };
    session.submit(submission, done).expect("it is open");
    told
}

#[test]
fn machines_with_a_loss_bound_sum_first_and_each_of_their_ranks_is_told_what_was_lost() {
    let switch = switch();
    let (bound, elements) = (0.1, 2_000_003);
    let sessions = connect_told(&switch, "bound", &[0, 0, 1, 1, 1], |mut config| {
        config.agreed.loss_bound = LossBound::new(bound).expect("a bound");
        config
    });
    let mut tensors: Vec<Vec<f32>> = (0..5u8).map(|rank| vec![f32::from(rank); elements]).collect();
    let told: Vec<_> = sessions
        .iter()
        .zip(&mut tensors)
        .map(|(session, tensor)| start_losing(session, tensor, None))
        .collect();
    let told: Vec<_> = told.into_iter().map(|told| told.recv_timeout(HANG).expect("it ends")).collect();
    let (first, loss) = &told[0];
    assert_eq!(*first, Ok(()));
    assert!(told.iter().all(|each| *each == told[0]), "{told:?}");
    assert!(tensors.iter().all(|tensor| tensor == &tensors[0]), "the same bits");
    // Two machines, and blocks of 2,048 words at most on loopback.
    assert!(loss.contributions >= 2 * elements as u64 / 2048, "{loss:?}");
    assert!(loss.lost as f64 <= bound * loss.contributions as f64, "{loss:?}");
    let wrong = tensors[0].iter().filter(|sum| **sum != 10.0).count();
    assert!(wrong <= 2048 * loss.lost as usize, "{wrong} of what {loss:?} allows");
}

#[test]
fn ranks_of_a_machine_that_let_unlike_parts_be_lost_are_told_both() {
    let switch = switch();
    let sessions = connect_told(&switch, "unlike", &[0, 0, 1], |mut config| {
        config.agreed.loss_bound = LossBound::new(0.1).expect("a bound");
        config
    });
    let mut tensors = [[1.0; 1000]; 2];
    let bounds = [None, LossBound::new(0.02)];
    let told: Vec<_> = sessions
        .iter()
        .zip(&mut tensors)
        .zip(bounds)
        .map(|((session, tensor), bound)| start_losing(session, tensor, bound))
        .collect();
    for told in told {
        let (result, _) = told.recv_timeout(HANG).expect("it ends");
        let error = result.expect_err("they disagree");
        let (first, second) = (LossBound::new(0.1).expect("a bound"), LossBound::new(0.02).expect("a bound"));
        assert_eq!(
            error,
            SessionError::LossBoundMismatch { first: (Rank(0), first), second: (Rank(1), second) }
        );
    }
}
