//! Workers and services over loopback.

mod proxy;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fanin_parameters::{
    Dtype, Exchanged, Parameters, ParametersConfig, ParametersError, Server, ServerConfig, Service,
};
use proptest::prelude::*;
use proxy::Proxy;

/// More than four pieces at each of two services.
const ELEMENTS: usize = 8 * (1 << 16) + 11;

/// For this user alone.
fn folder() -> tempfile::TempDir {
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    tempfile::Builder::new().permissions(private).tempdir().expect("a folder")
}

fn serve(listen: SocketAddr, folder: Option<&Path>) -> Server {
    let config = ServerConfig { listen, snapshots: folder.map(Path::to_path_buf), trainings: None };
    Server::start(&config).expect("it starts")
}

fn anywhere() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn config(servers: &[&Server], worker: u32, elements: usize) -> ParametersConfig {
    config_at(&servers.iter().map(|server| server.address()).collect::<Vec<_>>(), worker, elements)
}

fn config_at(services: &[SocketAddr], worker: u32, elements: usize) -> ParametersConfig {
    ParametersConfig {
        services: services.iter().map(|service| Service::named(service.to_string())).collect(),
        key: *b"sixteen bytes of",
        worker,
        workers: 3,
        dtype: Dtype::Float64,
        elements,
        patience: Duration::from_secs(60),
    }
}

fn worker(servers: &[&Server], number: u32, elements: usize) -> Parameters {
    Parameters::new(config(servers, number, elements)).expect("addresses")
}

/// By ways that may break.
fn worker_by(proxies: &[&Proxy], number: u32, elements: usize) -> Parameters {
    let addresses: Vec<SocketAddr> = proxies.iter().map(|proxy| proxy.address).collect();
    Parameters::new(config_at(&addresses, number, elements)).expect("addresses")
}

/// The only snapshot in a folder.
fn snapshot(folder: &Path) -> PathBuf {
    let files = fs::read_dir(folder).expect("a folder").map(|file| file.expect("readable").path());
    let mut snapshots =
        files.filter(|file| file.extension().is_some_and(|extension| extension == "parameters"));
    let snapshot = snapshots.next().expect("a snapshot");
    assert_eq!(snapshots.next(), None);
    snapshot
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn exchange(worker: &mut Parameters, delta: &[f64]) -> Vec<u8> {
    let Exchanged { latest, lost } = worker.exchange(Some(&bytes(delta))).expect("served");
    assert_eq!(lost, 0);
    latest
}

/// Whole numbers, whose sums are exact in every order.
fn delta(seed: usize, elements: usize) -> Vec<f64> {
    (0..elements).map(|element| ((seed * 7 + element * 13) % 101) as f64 - 50.0).collect()
}

#[test]
fn what_all_added_is_what_all_get_and_services_share_it() {
    let (first, second) = (serve(anywhere(), None), serve(anywhere(), None));
    let servers = [&first, &second];
    let mut workers: Vec<Parameters> = (0..3).map(|number| worker(&servers, number, ELEMENTS)).collect();
    let mut expected = delta(9, ELEMENTS);
    workers[0].create(&bytes(&expected)).expect("room");
    for step in 0..4 {
        let given = delta(step, ELEMENTS);
        expected.iter_mut().zip(&given).for_each(|(sum, x)| *sum += x);
        assert_eq!(exchange(&mut workers[step % 3], &given), bytes(&expected));
    }
    assert_eq!(
        workers[2].exchange(None).expect("served").latest,
        bytes(&expected),
        "a question adds nothing"
    );
    for worker in &workers {
        worker.leave().expect("served");
    }
    let gone = workers[0].exchange(None).expect_err("forgotten");
    assert!(gone.to_string().contains("no parameters of this training"), "{gone}");
}

#[test]
fn workers_that_add_at_once_lose_nothing() {
    let server = serve(anywhere(), None);
    let first = vec![1.0; ELEMENTS];
    let mut worker_0 = worker(&[&server], 0, ELEMENTS);
    worker_0.create(&bytes(&first)).expect("room");
    let all = [worker_0, worker(&[&server], 1, ELEMENTS), worker(&[&server], 2, ELEMENTS)];
    std::thread::scope(|scope| {
        for mut worker in all {
            scope.spawn(move || {
                for step in 0..5 {
                    worker.exchange(Some(&bytes(&delta(step, ELEMENTS)))).expect("served");
                }
            });
        }
    });
    let once: Vec<f64> = (0..5)
        .map(|step| delta(step, ELEMENTS))
        .fold(first, |sum, of_step| sum.iter().zip(of_step).map(|(sum, x)| sum + 3.0 * x).collect());
    assert_eq!(worker(&[&server], 1, ELEMENTS).exchange(None).expect("served").latest, bytes(&once));
}

#[test]
fn a_service_that_is_started_again_has_what_it_had_and_workers_wait_for_it() {
    let folder = folder();
    let server = serve(anywhere(), Some(folder.path()));
    let address = server.address();
    let mut worker = worker(&[&server], 1, 5);
    worker.create(&bytes(&[1.0, 2.0, 3.0, 4.0, 5.0])).expect("room");
    drop(server);
    let again = std::thread::spawn({
        let folder = folder.path().to_path_buf();
        move || serve(address, Some(&folder))
    });
    assert_eq!(exchange(&mut worker, &[1.0; 5]), bytes(&[2.0, 3.0, 4.0, 5.0, 6.0]));
    drop(again.join().expect("it starts"));
}

#[test]
fn deltas_that_an_older_snapshot_does_not_have_are_told() {
    let folder = folder();
    let server = serve(anywhere(), Some(folder.path()));
    let address = server.address();
    let mut worker = worker(&[&server], 0, 2);
    worker.create(&bytes(&[1.0, 1.0])).expect("room");
    drop(server);
    let older = snapshot(folder.path());
    let kept = fs::read(&older).expect("a snapshot");
    let server = serve(address, Some(folder.path()));
    exchange(&mut worker, &[2.0, 2.0]);
    exchange(&mut worker, &[4.0, 4.0]);
    drop(server);
    fs::write(&older, kept).expect("written");
    let _server = serve(address, Some(folder.path()));
    // A question is told as well, as who pulls or closes asks nothing else.
    assert_eq!(worker.exchange(None).expect("served"), Exchanged { latest: bytes(&[1.0, 1.0]), lost: 2 });
    let told = worker.exchange(Some(&bytes(&[8.0, 8.0]))).expect("served");
    assert_eq!(told, Exchanged { latest: bytes(&[9.0, 9.0]), lost: 0 }, "they are told once");
}

#[test]
fn what_is_lost_is_told_even_when_the_answer_that_says_so_is_lost() {
    let folder = folder();
    let server = serve(anywhere(), Some(folder.path()));
    let address = server.address();
    let proxy = Proxy::to(address);
    let mut worker = worker_by(&[&proxy], 0, 2);
    worker.create(&bytes(&[1.0, 1.0])).expect("room");
    let kept = fs::read(snapshot(folder.path())).expect("a snapshot");
    exchange(&mut worker, &[2.0, 2.0]);
    drop(server);
    fs::write(snapshot(folder.path()), kept).expect("written");
    let _server = serve(address, Some(folder.path()));
    proxy.lose_an_answer();
    let told = worker.exchange(Some(&bytes(&[8.0, 8.0]))).expect("served");
    assert!(proxy.has_lost_it());
    assert_eq!(told, Exchanged { latest: bytes(&[9.0, 9.0]), lost: 1 });
}

#[test]
fn a_leave_whose_answer_is_lost_is_a_leave() {
    let server = serve(anywhere(), None);
    let proxy = Proxy::to(server.address());
    let mut alone =
        Parameters::new(ParametersConfig { workers: 1, ..config_at(&[proxy.address], 0, 2) }).expect("good");
    alone.create(&bytes(&[1.0, 1.0])).expect("room");
    proxy.lose_an_answer();
    alone.leave().expect("it was the last one, and the training is over");
    assert!(proxy.has_lost_it());
    alone.leave().expect_err("nothing is there to be left");
}

#[test]
fn an_exchange_goes_on_where_its_connection_broke_as_long_as_something_is_answered() {
    let server = serve(anywhere(), None);
    let proxy = Proxy::to(server.address());
    let pieces = 26;
    let elements = pieces << 16;
    // Less than all attempts take, a fifth of a second each.
    let patience = Duration::from_secs(5);
    let config = ParametersConfig { patience, ..config_at(&[proxy.address], 0, elements) };
    let mut worker = Parameters::new(config).expect("good");
    worker.create(&bytes(&vec![1.0; elements])).expect("room");
    let before = proxy.connections();
    // After the answers for a piece and a half.
    proxy.break_after(8 * (3 << 15));
    assert_eq!(exchange(&mut worker, &vec![2.0; elements]), bytes(&vec![3.0; elements]));
    assert!(proxy.connections() - before >= pieces - 1, "each got one piece through");
    proxy.break_after(8 << 10);
    let patience = Duration::from_millis(300);
    let config = ParametersConfig { patience, ..config_at(&[proxy.address], 1, elements) };
    let said =
        Parameters::new(config).expect("good").exchange(None).expect_err("nothing comes through").to_string();
    assert!(said.contains("did not answer") && said.contains("0 of 26 pieces are exchanged"), "{said}");
}

#[test]
fn services_in_another_order_or_with_anothers_folder_are_refused() {
    let folders = [(); 2].map(|()| folder());
    let servers = [0, 1].map(|number: usize| serve(anywhere(), Some(folders[number].path())));
    let addresses = [0, 1].map(|number: usize| servers[number].address());
    let mut first = worker(&[&servers[0], &servers[1]], 0, 4);
    first.create(&bytes(&[1.0, 2.0, 3.0, 4.0])).expect("room");
    let said = worker(&[&servers[1], &servers[0]], 1, 4).exchange(None).expect_err("swapped").to_string();
    assert!(said.contains("unlike orders") && said.contains("the same order on all ranks"), "{said}");
    drop(servers);
    let _swapped = [0, 1].map(|number: usize| serve(addresses[number], Some(folders[1 - number].path())));
    let error = first.exchange(None).expect_err("swapped");
    assert!(matches!(error, ParametersError::Refused { .. }), "{error}");
}

#[test]
fn two_services_in_one_folder_are_one_too_many() {
    let folder = folder();
    let _server = serve(anywhere(), Some(folder.path()));
    let config = ServerConfig { listen: anywhere(), snapshots: Some(folder.path().into()), trainings: None };
    let said = Server::start(&config).expect_err("it is taken").to_string();
    assert!(said.contains("another service uses"), "{said}");
}

#[test]
fn a_model_that_cannot_be_made_everywhere_is_taken_back() {
    let folders = [(); 2].map(|()| folder());
    let inside = folders.each_ref().map(|folder| folder.path().join("inside"));
    let servers = [0, 1].map(|number: usize| serve(anywhere(), Some(&inside[number])));
    fs::remove_dir_all(&inside[1]).expect("gone");
    let mut first = worker(&[&servers[0], &servers[1]], 0, 2);
    first.create(&bytes(&[1.0, 2.0])).expect_err("the second cannot keep it");
    fs::create_dir(&inside[1]).expect("there again");
    let error = first.exchange(None).expect_err("no service has it");
    assert!(error.to_string().contains("no parameters of this training"), "{error}");
    drop(servers);
    for folder in inside {
        let kept = fs::read_dir(folder)
            .expect("a folder")
            .filter(|file| file.as_ref().is_ok_and(|file| file.file_name() != "lock"));
        assert_eq!(kept.count(), 0);
    }
}

#[test]
fn who_cannot_make_a_model_takes_back_what_it_made_and_nothing_else() {
    let [first, second, other] = [(); 3].map(|()| serve(anywhere(), None));
    // The second one has a longer part of another training with the same key.
    worker(&[&other, &second], 0, 4).create(&bytes(&[0.0; 4])).expect("room");
    let late = Proxy::to(first.address());
    late.answer_after_ms(200);
    let create = || {
        let services = [late.address, second.address()];
        let mut refused = Parameters::new(config_at(&services, 0, 2)).expect("addresses");
        let error = refused.create(&bytes(&[1.0, 2.0])).expect_err("another training");
        assert!(error.to_string().contains("another training"), "{error}");
    };
    create();
    let error = worker(&[&first], 1, 1).exchange(None).expect_err("taken back, though it was made later");
    assert!(error.to_string().contains("no parameters of this training"), "{error}");
    let mut running = worker(&[&first], 0, 1);
    running.create(&bytes(&[5.0])).expect("room");
    create();
    assert_eq!(running.exchange(None).expect("it was there before").latest, bytes(&[5.0]));
}

#[test]
fn who_stops_and_cannot_save_says_so() {
    let folder = folder();
    let inside = folder.path().join("inside");
    let server = serve(anywhere(), Some(&inside));
    let mut worker = worker(&[&server], 0, 2);
    worker.create(&bytes(&[1.0, 2.0])).expect("room");
    fs::remove_dir_all(&inside).expect("gone");
    exchange(&mut worker, &[1.0, 1.0]);
    let said = server.stop().expect_err("lost").to_string();
    assert!(said.contains("cannot keep parameters in"), "{said}");
}

#[test]
fn a_model_of_fewer_elements_than_services_is_at_some_of_them() {
    let servers = [(); 3].map(|()| serve(anywhere(), None));
    let mut worker = worker(&servers.each_ref(), 0, 1);
    worker.create(&bytes(&[1.0])).expect("room");
    assert_eq!(exchange(&mut worker, &[2.0]), bytes(&[3.0]));
    worker.leave().expect("there");
}

#[test]
fn a_service_without_its_snapshot_is_no_service_of_the_training() {
    let server = serve(anywhere(), None);
    let address = server.address();
    let mut worker = worker(&[&server], 0, 2);
    worker.create(&bytes(&[1.0, 1.0])).expect("room");
    drop(server);
    let _server = serve(address, None);
    let error = worker.exchange(Some(&bytes(&[1.0, 1.0]))).expect_err("nothing is there");
    assert!(
        matches!(error, ParametersError::Refused { .. }) && error.to_string().contains("--snapshots"),
        "{error}"
    );
}

#[test]
fn what_is_no_part_of_a_training_is_refused_with_its_reason() {
    let server = serve(anywhere(), None);
    let said = |config: ParametersConfig, call: &dyn Fn(&mut Parameters) -> Result<(), ParametersError>| {
        Parameters::new(config).and_then(|mut worker| call(&mut worker)).expect_err("refused").to_string()
    };
    // Which is refused before the parameters are looked at.
    let create = |worker: &mut Parameters| worker.create(&[]);
    let ask = |worker: &mut Parameters| worker.exchange(None).map(drop);
    let good = config(&[&server], 0, 2);
    Parameters::new(good.clone()).expect("good").create(&[0; 16]).expect("room");
    let more = ParametersConfig { elements: 3, ..good.clone() };
    assert!(said(more.clone(), &create).contains("another training"));
    assert!(said(ParametersConfig { worker: 3, ..good.clone() }, &ask).contains("worker 3 of 3"));
    assert!(said(ParametersConfig { key: [1; 16], ..good.clone() }, &ask).contains("no parameters"));
    assert!(said(ParametersConfig { elements: ELEMENTS, ..good.clone() }, &ask).contains("16 bytes there"));
    // A worker that takes the model for a longer one sends a piece that is longer.
    let delta = |worker: &mut Parameters| worker.exchange(Some(&vec![0; 8 * ELEMENTS])).map(drop);
    let longer = ParametersConfig { elements: ELEMENTS, worker: 1, ..good.clone() };
    assert!(said(longer, &delta).contains("for a piece of 16"));
    let huge = ParametersConfig { elements: 1 << 50, key: [2; 16], ..good.clone() };
    assert!(said(huge, &create).contains("more services"));
    assert!(
        said(ParametersConfig { workers: 0, key: [3; 16], ..good.clone() }, &create).contains("0 workers")
    );
    let services = |services: &[&str]| services.iter().map(|&service| Service::named(service)).collect();
    for wrong in ["", "box", "box:0", "http://box:1", "box:1/x", "a b:1"] {
        let named = ParametersConfig { services: services(&[wrong]), ..good.clone() };
        assert!(said(named, &ask).contains("HOST:PORT"), "{wrong}");
    }
    assert!(
        said(ParametersConfig { services: services(&[]), ..good.clone() }, &ask).contains("at least one")
    );
    let nobody = ParametersConfig {
        services: services(&["127.0.0.1:1"]),
        patience: Duration::from_millis(300),
        ..good.clone()
    };
    assert!(said(nobody, &ask).contains("fanin parameters --listen"));
    let mut short = Parameters::new(good).expect("good");
    assert!(matches!(short.exchange(Some(&[0; 15])), Err(ParametersError::Malformed(_))));
    // None of it had an effect.
    assert_eq!(short.exchange(None).expect("served").latest, bytes(&[0.0, 0.0]));
}

#[test]
fn a_model_without_its_first_parameters_is_not_kept() {
    let folder = folder();
    let server = serve(anywhere(), Some(folder.path()));
    let mut wrong = worker(&[&server], 0, 2);
    // It makes the model, and fails to send what is in it.
    assert!(matches!(wrong.create(&[0; 15]), Err(ParametersError::Malformed(_))));
    drop(server);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "its lock");
}

#[test]
fn who_cannot_keep_the_first_parameters_says_so() {
    let folder = folder();
    let inside = folder.path().join("inside");
    let server = serve(anywhere(), Some(&inside));
    fs::remove_dir_all(&inside).expect("gone");
    let error = worker(&[&server], 0, 2).create(&bytes(&[1.0, 2.0])).expect_err("no folder");
    assert!(error.to_string().contains("cannot keep parameters in"), "{error}");
}

#[test]
fn a_damaged_snapshot_ends_the_start_and_a_file_of_others_does_not() {
    let folder = folder();
    let config = ServerConfig { listen: anywhere(), snapshots: Some(folder.path().into()), trainings: None };
    fs::write(folder.path().join("notes.txt"), "mine").expect("written");
    fs::write(folder.path().join("x.unfinished"), "cut").expect("written");
    drop(Server::start(&config).expect("it starts"));
    fs::write(folder.path().join("x.parameters"), "cut").expect("written");
    drop(Server::start(&config).expect("it starts"));
    let name = format!("{}.parameters", "0a".repeat(16));
    fs::write(folder.path().join(&name), "cut").expect("written");
    let said = Server::start(&config).expect_err("damaged").to_string();
    assert!(said.contains(&name) && said.contains("move it away"), "{said}");
}

/// The fate of a delta.
#[derive(Clone, Copy, Debug)]
enum Event {
    Nothing,
    /// The answer is lost, so that the delta is sent again.
    AnswerLost,
    /// Before it, the service is stopped and started again.
    Restart,
    /// Before it, the service is killed, and has what it had saved last.
    Kill,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => Just(Event::Nothing),
        2 => Just(Event::AnswerLost),
        1 => Just(Event::Restart),
        1 => Just(Event::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Every delta is in once, whoever comes when, whatever is sent again, and whenever the service
    /// stops and is started again. A delta that it has not saved is missing whole, and told.
    #[test]
    fn each_delta_is_added_once(turns in prop::collection::vec((0_usize..3, any::<i16>(), event()), 1..16)) {
        let folder = folder();
        let mut server = serve(anywhere(), Some(folder.path()));
        let address = server.address();
        let proxy = Proxy::to(address);
        let mut workers: Vec<Parameters> = (0..3).map(|number| worker_by(&[&proxy], number, 3)).collect();
        let mut sum = 1.0;
        workers[0].create(&bytes(&[sum; 3])).expect("room");
        let path = snapshot(folder.path());
        // The state of a service that is killed then, and the deltas of each worker that it has
        // lost since.
        let mut saved = (fs::read(&path).expect("begun"), sum);
        let (mut since, mut lost) = ([0; 3], [0; 3]);
        for (number, given, event) in turns {
            match event {
                Event::Nothing => {}
                Event::AnswerLost => proxy.lose_an_answer(),
                Event::Restart => {
                    drop(server);
                    saved = (fs::read(&path).expect("stopped"), sum);
                    since = [0; 3];
                    server = serve(address, Some(folder.path()));
                }
                Event::Kill => {
                    drop(server);
                    fs::write(&path, &saved.0).expect("as it was");
                    sum = saved.1;
                    lost.iter_mut().zip(std::mem::take(&mut since)).for_each(|(lost, since)| *lost += since);
                    server = serve(address, Some(folder.path()));
                }
            }
            sum += f64::from(given);
            since[number] += 1;
            let told = workers[number].exchange(Some(&bytes(&[f64::from(given); 3]))).expect("served");
            prop_assert!(proxy.has_lost_it());
            prop_assert_eq!(told, Exchanged { latest: bytes(&[sum; 3]), lost: std::mem::take(&mut lost[number]) });
        }
    }
}

#[test]
fn services_keep_as_much_as_their_shares_say() {
    let servers = [serve(anywhere(), None), serve(anywhere(), None), serve(anywhere(), None)];
    let shares = [0.25, 0.0, 0.75];
    let made = |number: u32| {
        let shared = servers.iter().zip(shares);
        let services =
            shared.map(|(server, share)| Service { share, ..Service::named(server.address().to_string()) });
        let services = services.collect();
        let good = config_at(&[], number, ELEMENTS);
        Parameters::new(ParametersConfig { services, ..good }).expect("shares")
    };
    let (mut first, mut second) = (made(0), made(1));
    first.create(&bytes(&delta(1, ELEMENTS))).expect("room");
    let expected: Vec<f64> = delta(1, ELEMENTS).iter().zip(delta(2, ELEMENTS)).map(|(x, y)| x + y).collect();
    assert_eq!(exchange(&mut second, &delta(2, ELEMENTS)), bytes(&expected));
    // A worker of other shares has pieces of other lengths there.
    let equal = [&servers[0], &servers[2]].map(Server::address);
    let mut other = Parameters::new(config_at(&equal, 2, ELEMENTS)).expect("addresses");
    assert!(other.exchange(None).is_err(), "ranks with other shares are refused");
    for shares in [[0.0, 0.0], [f64::NAN, 1.0], [-1.0, 2.0], [f64::INFINITY, 1.0]] {
        let services = equal.iter().zip(shares);
        let services = services
            .map(|(address, share)| Service { share, ..Service::named(address.to_string()) })
            .collect();
        let wrong = Parameters::new(ParametersConfig { services, ..config_at(&equal, 0, 2) });
        assert!(matches!(wrong, Err(ParametersError::Malformed(_))), "{shares:?}");
    }
}

#[test]
fn a_service_of_a_worker_that_has_ended_is_not_waited_for() {
    let (hosted, other) = (serve(anywhere(), None), serve(anywhere(), None));
    let services = vec![
        Service { host: Some(2), ..Service::named(hosted.address().to_string()) },
        Service { host: Some(0), ..Service::named(other.address().to_string()) },
    ];
    let mut worker = Parameters::new(ParametersConfig { services, ..config_at(&[], 1, 2) }).expect("shares");
    worker.create(&bytes(&[1.0, 2.0])).expect("room");
    hosted.stop().expect("nothing to save");
    // Patience is a minute.
    let gone = worker.exchange(Some(&bytes(&[1.0, 1.0]))).expect_err("it is gone");
    assert!(matches!(gone, ParametersError::Gone { rank: 2, .. }), "{gone}");
}

#[test]
fn a_hosted_service_serves_its_own_training_alone() {
    let good = config_at(&[], 0, 4);
    let trainings = vec![good.key, *b"sixteen bytes on"];
    let [first, second] = [0, 1].map(|_| {
        let config = ServerConfig { listen: anywhere(), snapshots: None, trainings: Some(trainings.clone()) };
        Server::start(&config).expect("it starts")
    });
    let with = |key| ParametersConfig { key, ..config(&[&first, &second], 0, 4) };
    let made = |key| Parameters::new(with(key)).expect("addresses").create(&bytes(&[0.0; 4]));
    trainings.iter().for_each(|&key| made(key).expect("its own, whatever part"));
    let refused = made(*b"sixteen bytes ov").expect_err("another training's");
    assert!(refused.to_string().contains("a rank of another training hosts it"), "{refused}");
}
