use std::net::{SocketAddr, TcpListener};
use std::sync::Condvar;
use std::sync::mpsc::Receiver;

use super::super::http::Served;
use super::super::metrics;
use super::super::reports::Measurements;
use super::super::service::ControlService;
use super::*;
use crate::control_channel::control_calls;
use crate::proto::heartbeat_reply::State as Pulse;
use crate::proto::{HeartbeatRequest, StatusRequest};
use crate::protocols;
use fanin_protocol::control::{Agreed, Hop, PORTION_WHOLE, Planner, Resume, Seats};
use fanin_protocol::goat::Goat;
use fanin_tls::{Acceptor, Trust};
use fanin_udp::{HostThreads, Seat};
use std::time::Duration;

/// Longer than anything here takes on a busy machine; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

fn request(job: &str) -> JoinRequest {
    JoinRequest {
        protocol: "switchml".into(),
        agreed: Agreed {
            in_flight: Some(1),
            wire_dtype: fanin_wire::WireDtype::SharedExponent,
            ..Agreed::default()
        },
        portion: PORTION_WHOLE,
        job: job.into(),
        rank: 0,
        world_size: 1,
        mtu: 1500,
        rate_bps: None,
        rtt: Duration::ZERO,
        paths: 1,
        hops: Vec::new(),
        patience: Duration::from_secs(1),
        wire_version: fanin_wire::VERSION,
        resume: None,
        origin: None,
    }
}

/// A rank next to the root.
fn caller(job: JobId, rank: Rank, generation: Generation, secret: u64) -> Caller {
    Caller { job, rank, generation, secret, passed_on: 0 }
}

fn resume() -> Resume {
    Resume { lineage: 1, generation: Generation(0), in_flight: 1, elements: 256, completed: vec![vec![0]] }
}

async fn admitted(jobs: &Jobs, job: &str) -> Outcome {
    match jobs.join(request(job), vec![]) {
        Joined::Waiting(mut place) => place.outcome().await,
        Joined::Done(outcome) => outcome,
    }
}

/// Of jobs of one protocol.
fn registry_of(protocol: &'static dyn Protocol, ids: Box<dyn FnMut() -> u64 + Send>) -> Registry {
    Registry::new(RegistryConfig::default(), vec![protocol], ids).expect("usual limits")
}

fn jobs(driver: Arc<dyn DataPath>) -> Jobs {
    let mut ids = 7..;
    let ids = Box::new(move || ids.next().unwrap());
    Jobs::new(registry_of(protocols::usual(), ids), driver).unwrap()
}

#[tokio::test]
async fn a_round_trip_is_kept_for_a_rank_of_a_job_and_goes_with_the_job() {
    let jobs = jobs(protocols::usual().root(([127, 0, 0, 1], 0).into(), 1).unwrap());
    let Admission { job, key, generation, .. } =
        admitted(&jobs, "job").await.expect("admitted").as_ref().clone();
    let measured = Measurements { round_trip: Some(Duration::from_micros(50)), ..Measurements::default() };
    let trip = || Told { measured, work: None };
    for (job, rank) in [(job, 0), (job, 1), (JobId(8), 0)] {
        let _ =
            jobs.heartbeat(caller(job, Rank(rank), generation, key.secret_of(Rank(rank))), trip(), vec![]);
    }
    let secret = key.secret_of(Rank(0));
    let denied = jobs.heartbeat(caller(job, Rank(0), generation, 0), trip(), vec![]);
    assert_eq!((denied, jobs.denied()), (Err(Denied { rank: Rank(0) }), 1));
    jobs.heartbeat(caller(job, Rank(0), generation, secret), Told::default(), vec![]).expect("its own");
    let reported = jobs.reported(job).members.clone();
    assert_eq!((reported.len(), reported[&Rank(0)].measured), (1, measured));
    assert_eq!(jobs.lock().jobs.len(), 1);
    jobs.leave(job, Rank(0), secret).expect("its own");
    jobs.heartbeat(caller(job, Rank(0), generation, secret), trip(), vec![]).expect("its own");
    jobs.report(job, 0, Report::default());
    assert!(jobs.lock().jobs.is_empty());
}

/// A data path that answers when the test lets it.
#[derive(Debug, Default)]
struct Gated {
    state: Mutex<Gate>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Gate {
    is_closed: bool,
    passes: u32,
    waiting: u32,
    refuses: bool,
    told: Vec<&'static str>,
}

impl Gated {
    fn close(&self, is_closed: bool) {
        self.state.lock().unwrap().is_closed = is_closed;
        self.changed.notify_all();
    }

    /// Lets so many through, while it is closed.
    fn let_pass(&self, count: u32) {
        self.state.lock().unwrap().passes = count;
        self.changed.notify_all();
    }

    fn pass(&self, what: &'static str) {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        let waits = |state: &mut Gate| state.is_closed && state.passes == 0;
        let mut state = self.changed.wait_while(state, waits).unwrap();
        state.passes = state.passes.saturating_sub(1);
        state.waiting -= 1;
        state.told.push(what);
    }
}

impl DataPath for Gated {
    fn local_addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], 1).into()
    }
    fn shards(&self) -> usize {
        1
    }
    fn receive_buffer_bytes(&self) -> usize {
        1 << 20
    }
    fn events(&self) -> Option<Receiver<JobAborted>> {
        None
    }
    fn add_job(&self, _: &Seat<'_>) -> io::Result<()> {
        self.pass("add");
        if self.state.lock().unwrap().refuses { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
    }
    fn register(&self, _: JobId, _: &[IpAddr]) {
        self.pass("register");
    }
    fn remove_job(&self, _: JobId) {
        self.pass("remove");
    }
    fn abort_job(&self, _: JobId, _: AbortReason) {
        self.pass("abort");
    }
    fn figures(&self, _: &[JobId]) -> Figures {
        self.pass("figures");
        Figures::default()
    }
    fn health(&self) -> Result<(), ThreadEnded> {
        Ok(())
    }
    fn threads(&self) -> HostThreads {
        unreachable!("nobody here has a lane")
    }
    fn occupy(&self, _: Arc<dyn Fn() + Send + Sync>) {
        unreachable!("it has no threads")
    }
}

#[test]
fn heartbeats_are_answered_while_the_data_path_answers_nobody() {
    let gated = Arc::new(Gated::default());
    let jobs = Arc::new(jobs(Arc::clone(&gated) as Arc<dyn DataPath>));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let service =
        ControlService { jobs: Arc::clone(&jobs), instance: 1, rate_bps: None, gauges: Arc::default() };
    let scraped = Arc::clone(&jobs);
    let text = move |named| metrics::text(Arc::clone(&scraped), named);
    let served =
        Served::start((listener, Acceptor::of_process().unwrap()), service, None, HANG, text, || Ok(()))
            .unwrap();
    let ticking = Arc::clone(&jobs);
    served.every(Duration::from_millis(1), move || ticking.tick());

    let callers = tokio::runtime::Runtime::new().unwrap();
    callers.block_on(async {
        let client = control_calls(address, &Trust::default());
        let Admission { job, key, generation, .. } =
            admitted(&jobs, "runs").await.expect("admitted").as_ref().clone();
        gated.close(true);
        let mut flood = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let mut client = client.clone();
            flood.spawn(async move { client.status(StatusRequest::default()).await.map(drop) });
        }
        // Another rank joins, a job ends, and all of it waits for the data path too.
        let joining = {
            let mut client = client.clone();
            let request = proto::JoinRequest {
                job: "joins".into(),
                world_size: 1,
                mtu_bytes: 1500,
                wire_version: fanin_wire::VERSION.into(),
                protocol: "switchml".into(),
                settings: Agreed::default().values().into_iter().map(Into::into).collect(),
                ..proto::JoinRequest::default()
            };
            tokio::spawn(async move { client.join(request).await })
        };
        let everything_waits = async {
            while gated.state.lock().unwrap().waiting < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(HANG, everything_waits).await.expect("a question and a task");
        let mut client = client.clone();
        for _ in 0..20 {
            let message = HeartbeatRequest {
                job_id: job.0,
                generation: generation.0.into(),
                secret: key.secret_of(Rank(0)),
                ..HeartbeatRequest::default()
            };
            let reply = tokio::time::timeout(HANG, client.heartbeat(message)).await;
            let reply = reply.expect("an answer while the data path is busy").unwrap().into_inner();
            assert!(matches!(reply.state, Some(Pulse::Alive(_))), "{reply:?}");
        }
        assert!(!joining.is_finished(), "no rank is told of a job that the data path does not know");
        assert!(flood.try_join_next().is_none());
        gated.close(false);
        let all = async {
            assert!(flood.join_all().await.iter().all(Result::is_ok));
            let outcome = joining.await.unwrap().unwrap().into_inner().outcome;
            assert!(matches!(outcome, Some(proto::join_reply::Outcome::Admission(_))), "{outcome:?}");
        };
        tokio::time::timeout(HANG, all).await.expect("answers");
    });
}

#[tokio::test]
async fn a_job_whose_plan_and_room_take_longer_than_a_rank_may_be_silent_runs_all_the_same() {
    let gated = Arc::new(Gated::default());
    let patience = Duration::from_millis(20);
    let config = RegistryConfig { heartbeat_timeout: patience, ..RegistryConfig::default() };
    let registry = Registry::new(config, vec![protocols::usual()], Box::new(|| 7)).unwrap();
    let jobs = Jobs::new(registry, Arc::clone(&gated) as Arc<dyn DataPath>).unwrap();
    gated.close(true);
    let Joined::Waiting(mut place) = jobs.join(request("job"), vec![]) else { panic!("it waits") };
    let began = Instant::now();
    while began.elapsed() < 3 * patience {
        jobs.tick();
    }
    gated.close(false);
    let Admission { job, key, generation, .. } = place.outcome().await.expect("admitted").as_ref().clone();
    let secret = key.secret_of(Rank(0));
    let reply = jobs.heartbeat(caller(job, Rank(0), generation, secret), Told::default(), vec![]);
    assert_eq!(reply, Ok(HeartbeatReply::Alive { left: Ranks::default() }));
}

#[tokio::test]
async fn a_stream_ends_when_its_rank_opens_another() {
    let jobs = jobs(Arc::new(Gated::default()));
    let Admission { job, key, generation, .. } =
        admitted(&jobs, "job").await.expect("admitted").as_ref().clone();
    let secret = key.secret_of(Rank(0));
    let attend = || jobs.attend(caller(job, Rank(0), generation, secret));
    let attend = || attend().expect("its own").stays.expect("it runs");
    let (first, mut second) = (attend(), attend());
    tokio::time::timeout(HANG, first.superseded).await.expect("it ends").expect_err("nothing to say");
    assert_eq!(second.superseded.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    jobs.leave(job, Rank(0), secret).expect("its own");
    assert!(jobs.lock().jobs.is_empty());
}

#[tokio::test]
async fn from_where_a_rank_sends_is_told_to_the_data_path_before_the_rank_and_when_it_changes() {
    let gated = Arc::new(Gated::default());
    let jobs = jobs(Arc::clone(&gated) as Arc<dyn DataPath>);
    let [one, other] = [1, 2].map(|last| vec![IpAddr::from([10, 0, 0, last])]);
    let Joined::Waiting(mut place) = jobs.join(request("job"), one.clone()) else { panic!("it waits") };
    let Admission { job, key, generation, .. } = place.outcome().await.expect("admitted").as_ref().clone();
    assert_eq!(gated.state.lock().unwrap().told, ["add", "register"]);
    let (rank, secret) = (Rank(0), key.secret_of(Rank(0)));
    for (hosts, secret) in [(&one, secret), (&other, secret), (&other, secret), (&one, 0)] {
        let _ = jobs.heartbeat(caller(job, rank, generation, secret), Told::default(), hosts.clone());
    }
    jobs.leave(job, rank, secret).expect("its own");
    let _ = jobs.heartbeat(caller(job, rank, generation, secret), Told::default(), one);
    assert!(jobs.lock().jobs.is_empty());
    drop(place);
    drop(jobs);
    assert_eq!(gated.state.lock().unwrap().told, ["add", "register", "register", "remove"]);
}

#[tokio::test]
async fn a_job_runs_however_long_the_next_one_takes_to_find_room() {
    let gated = Arc::new(Gated::default());
    let patience = Duration::from_millis(20);
    let config = RegistryConfig { heartbeat_timeout: patience, ..RegistryConfig::default() };
    let mut ids = 7..;
    let registry =
        Registry::new(config, vec![protocols::usual()], Box::new(move || ids.next().unwrap())).unwrap();
    let jobs = Jobs::new(registry, Arc::clone(&gated) as Arc<dyn DataPath>).unwrap();
    gated.close(true);
    let hosts = || vec![IpAddr::from([10, 0, 0, 1])];
    let [mut first, _second] = ["first", "second"].map(|job| match jobs.join(request(job), hosts()) {
        Joined::Waiting(place) => place,
        Joined::Done(outcome) => panic!("answered before the data path: {outcome:?}"),
    });
    // The first one's room is made, and the second one's takes longer than a rank may be silent.
    gated.let_pass(2);
    let Admission { job, key, generation, .. } = first.outcome().await.expect("admitted").as_ref().clone();
    let secret = key.secret_of(Rank(0));
    let reply = jobs.heartbeat(caller(job, Rank(0), generation, secret), Told::default(), hosts());
    assert_eq!(reply, Ok(HeartbeatReply::Alive { left: Ranks::default() }));
    gated.close(false);
}

#[tokio::test]
async fn ranks_that_resume_jobs_of_one_name_from_one_address_leave_places_for_others() {
    let jobs = jobs(Arc::new(Gated::default()));
    let from = |last: u8, lineage| {
        let resume = Resume { lineage, ..resume() };
        jobs.wait([10, 0, 0, last].into(), &JoinRequest { resume: Some(resume), ..request("resumed") })
    };
    let waiting: Vec<_> = (0..256).filter_map(|lineage| from(1, lineage).ok()).collect();
    assert_eq!(waiting.len(), 128);
    assert!(from(2, 0).is_ok());
}

#[tokio::test]
async fn a_stranger_does_not_end_a_job_whose_rank_is_gone_for_a_moment() {
    let jobs = jobs(Arc::new(Gated::default()));
    let [own, strangers] = [1, 2].map(|last| vec![IpAddr::from([10, 0, 0, last])]);
    let Joined::Waiting(mut place) = jobs.join(request("job"), own.clone()) else { panic!("it waits") };
    let Admission { job, key, generation, .. } = place.outcome().await.expect("admitted").as_ref().clone();
    let secret = key.secret_of(Rank(0));
    let attend = || jobs.attend(caller(job, Rank(0), generation, secret)).expect("its own");
    let stays = attend().stays.expect("it runs");
    jobs.detached(stays.attendance, Detached::AtTheRank);
    // It says that its packets come from where the job's do.
    let told = [strangers, own.clone()].concat();
    assert!(matches!(jobs.join(request("job"), told), Joined::Done(Err(_))));
    assert!(attend().stays.is_some(), "it is back");
    let stays = attend().stays.expect("it runs");
    jobs.detached(stays.attendance, Detached::AtTheRank);
    assert!(matches!(jobs.join(request("job"), own), Joined::Waiting(_)), "as it begins anew");
}

/// A protocol that admits as GOAT does, and plans so.
static PLANS: Goat = Goat { planner: Some(|| Box::new(Test)) };

/// Waits for the job of a window of 2, and finds nothing for the one of 3.
struct Test;

/// As no admission without a plan has it.
const PLANNED: u32 = 123_456;

static MAY_GO: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

impl Planner for Test {
    fn plan(&self, admission: &Admission) -> Result<Seats, String> {
        if admission.terms.in_flight == 2 {
            drop(MAY_GO.1.wait_while(MAY_GO.0.lock().unwrap(), |may_go| !*may_go));
        }
        assert_ne!(admission.terms.in_flight, 3, "on purpose");
        let mut seats = admission.seats.clone();
        seats.shares[0].millionths = PLANNED;
        Ok(seats)
    }

    fn forget(&self, _: JobId) {}

    fn unsettled(&self) -> Vec<JobId> {
        Vec::new()
    }
}

fn planning(driver: Arc<dyn DataPath>) -> Jobs {
    let mut ids = 7..;
    Jobs::new(registry_of(&PLANS, Box::new(move || ids.next().unwrap())), driver).unwrap()
}

/// The rank of a job with such a window, behind a switch.
fn planned(job: &str, window: u16) -> JoinRequest {
    let hop = Hop {
        instance: 1,
        address: ([10, 0, 0, 1], 4800).into(),
        shards: 1,
        aggregators: 64,
        elements: 2048,
        receive_buffer_bytes: 16 << 20,
        mtu: 1500,
        rate_bps: None,
    };
    let mut request = JoinRequest { protocol: "goat".into(), hops: vec![hop], ..request(job) };
    request.agreed.in_flight = Some(window);
    request
}

#[tokio::test]
async fn a_plan_that_takes_for_ever_holds_no_other_job_up() {
    let jobs = planning(Arc::new(Gated::default()));
    let goes_on = Resume { in_flight: 2, completed: vec![vec![]], ..resume() };
    let slow = JoinRequest { resume: Some(goes_on), ..planned("slow", 2) };
    let [one, another] = [1, 2].map(|last| vec![IpAddr::from([10, 0, 0, last])]);
    let asked = [0, 1].map(|_| match jobs.join(slow.clone(), one.clone()) {
        Joined::Waiting(place) => place,
        Joined::Done(outcome) => panic!("answered before it is planned: {outcome:?}"),
    });
    let Joined::Waiting(mut other) = jobs.join(planned("other", 1), another) else { panic!("it waits") };
    let outcome = tokio::time::timeout(HANG, other.outcome()).await.expect("it does not wait for the first");
    let Admission { job, key, .. } = outcome.expect("admitted").as_ref().clone();
    jobs.leave(job, Rank(0), key.secret_of(Rank(0))).expect("its own");
    *MAY_GO.0.lock().unwrap() = true;
    MAY_GO.1.notify_all();
    // A rank that asks once more meanwhile is told of the plan, too.
    for mut place in asked {
        let admission = place.outcome().await.expect("admitted");
        assert_eq!(admission.seats.shares[0].millionths, PLANNED);
    }
}

#[tokio::test]
async fn a_job_for_which_no_plan_is_found_is_summed_at_the_server() {
    let jobs = planning(Arc::new(Gated::default()));
    let Joined::Waiting(mut place) = jobs.join(planned("job", 3), vec![]) else { panic!("it waits") };
    let admission = place.outcome().await.expect("admitted");
    assert!(admission.seats.shares.iter().all(|share| share.millionths == 0), "{:?}", admission.seats.shares);
    assert_eq!(jobs.health(), Ok(()));
}

#[tokio::test]
async fn a_rank_is_told_again_of_its_job_after_the_data_path_knows_it() {
    let gated = Arc::new(Gated::default());
    let jobs = jobs(Arc::clone(&gated) as Arc<dyn DataPath>);
    let request = JoinRequest { resume: Some(resume()), ..request("resumed") };
    gated.close(true);
    let [mut first, mut again] = [0, 1].map(|_| match jobs.join(request.clone(), vec![]) {
        Joined::Waiting(place) => place,
        Joined::Done(outcome) => panic!("answered before the data path: {outcome:?}"),
    });
    gated.close(false);
    let told = first.outcome().await.expect("admitted");
    assert_eq!(again.outcome().await.expect("told again"), told);
}

#[tokio::test]
async fn what_was_decided_is_carried_out_in_that_order_and_a_job_without_room_ends() {
    let gated = Arc::new(Gated::default());
    let jobs = jobs(Arc::clone(&gated) as Arc<dyn DataPath>);
    let Admission { job, key, .. } = admitted(&jobs, "first").await.expect("admitted").as_ref().clone();
    gated.close(true);
    gated.state.lock().unwrap().refuses = true;
    jobs.leave(job, Rank(0), key.secret_of(Rank(0))).expect("its own");
    let Joined::Waiting(mut place) = jobs.join(request("second"), vec![]) else {
        panic!("answered too early")
    };
    gated.close(false);
    assert!(matches!(place.outcome().await, Err(NotAdmitted::DataPath(_))));
    jobs.tick();
    let aborted = |job: &JobSnapshot| matches!(job.state, JobState::Aborted { .. });
    assert!(jobs.snapshot().iter().all(aborted), "{:?}", jobs.snapshot());
    drop(place);
    drop(jobs);
    assert_eq!(gated.state.lock().unwrap().told, ["add", "register", "remove", "add", "remove"]);
}
