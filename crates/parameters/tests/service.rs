//! Workers and services over loopback.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fanin_parameters::{
    Dtype, Exchanged, Parameters, ParametersConfig, ParametersError, Server, ServerConfig,
};
use proptest::prelude::*;

/// More than a piece at each of two services.
const ELEMENTS: usize = 2 * (1 << 18) + 11;

fn serve(listen: SocketAddr, folder: Option<&Path>) -> Server {
    let config = ServerConfig { listen, snapshots: folder.map(Path::to_path_buf) };
    Server::start(&config).expect("it starts")
}

fn anywhere() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn config(servers: &[&Server], worker: u32, elements: usize) -> ParametersConfig {
    ParametersConfig {
        services: servers.iter().map(|server| server.address().to_string()).collect(),
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
    let folder = tempfile::tempdir().expect("a folder");
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
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(anywhere(), Some(folder.path()));
    let address = server.address();
    let mut worker = worker(&[&server], 0, 2);
    worker.create(&bytes(&[1.0, 1.0])).expect("room");
    drop(server);
    let older =
        fs::read_dir(folder.path()).expect("a folder").next().expect("a snapshot").expect("readable").path();
    let kept = fs::read(&older).expect("a snapshot");
    let server = serve(address, Some(folder.path()));
    exchange(&mut worker, &[2.0, 2.0]);
    exchange(&mut worker, &[4.0, 4.0]);
    drop(server);
    fs::write(&older, kept).expect("written");
    let _server = serve(address, Some(folder.path()));
    let told = worker.exchange(Some(&bytes(&[8.0, 8.0]))).expect("served");
    assert_eq!(told, Exchanged { latest: bytes(&[9.0, 9.0]), lost: 2 });
    assert_eq!(worker.exchange(Some(&bytes(&[0.0, 0.0]))).expect("served").lost, 0, "they are told once");
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
    // A worker that takes the model for a longer one asks for a piece that is none.
    assert!(said(ParametersConfig { elements: ELEMENTS, ..good.clone() }, &ask).contains("piece 1 of 1"));
    let huge = ParametersConfig { elements: 1 << 50, key: [2; 16], ..good.clone() };
    assert!(said(huge, &create).contains("more services"));
    assert!(
        said(ParametersConfig { workers: 0, key: [3; 16], ..good.clone() }, &create).contains("0 workers")
    );
    let services = |services: &[&str]| services.iter().map(|&service| service.to_owned()).collect();
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
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(anywhere(), Some(folder.path()));
    let mut wrong = worker(&[&server], 0, 2);
    // It makes the model, and fails to send what is in it.
    assert!(matches!(wrong.create(&[0; 15]), Err(ParametersError::Malformed(_))));
    drop(server);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn who_cannot_keep_the_first_parameters_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let inside = folder.path().join("inside");
    let server = serve(anywhere(), Some(&inside));
    fs::remove_dir(&inside).expect("empty");
    let error = worker(&[&server], 0, 2).create(&bytes(&[1.0, 2.0])).expect_err("no folder");
    assert!(error.to_string().contains("cannot keep parameters in"), "{error}");
}

#[test]
fn a_damaged_snapshot_ends_the_start_and_a_file_of_others_does_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = ServerConfig { listen: anywhere(), snapshots: Some(folder.path().into()) };
    fs::write(folder.path().join("notes.txt"), "mine").expect("written");
    fs::write(folder.path().join("x.unfinished"), "cut").expect("written");
    drop(Server::start(&config).expect("it starts"));
    fs::write(folder.path().join("x.parameters"), "cut").expect("written");
    let said = Server::start(&config).expect_err("damaged").to_string();
    assert!(said.contains("x.parameters") && said.contains("move it away"), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every delta is in once, whoever comes when, and whenever the service stops and is started again.
    #[test]
    fn each_delta_is_added_once(turns in prop::collection::vec((0_usize..3, any::<i16>(), prop::bool::weighted(0.1)), 1..40)) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut server = serve(anywhere(), Some(folder.path()));
        let mut workers: Vec<Parameters> = (0..3).map(|number| worker(&[&server], number, 3)).collect();
        let mut sum = 1.0;
        workers[0].create(&bytes(&[sum; 3])).expect("room");
        for (number, given, stops) in turns {
            if stops {
                let address = server.address();
                drop(server);
                server = serve(address, Some(folder.path()));
            }
            sum += f64::from(given);
            prop_assert_eq!(exchange(&mut workers[number], &[f64::from(given); 3]), bytes(&[sum; 3]));
        }
    }
}
