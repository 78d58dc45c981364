use super::*;
use crate::sub_models::{Job, SubModel};
use crate::topologies::{Rates, triangle};

/// Figure 2: three fragments of one byte, four workers, a byte of memory in each switch.
fn figure_2() -> Workload {
    let topology = triangle(4, 1, Rates::alike(8.0)).expect("a topology");
    let node = |name: &str| topology.node(name).expect("a node");
    let job = Job {
        name: "figure 2".into(),
        workers: ["w1", "w2", "w3", "w4"].map(node).into(),
        servers: vec![node("ps")],
        sub_models: SubModel::divided(3, 1),
    };
    Workload::new(topology, vec![job]).expect("a workload")
}

fn node(workload: &Workload, name: &str) -> NodeId {
    workload.topology().node(name).expect("a node")
}

/// `A` is summed at `s1`, `B` at `s2`, `C` at `s3`.
fn collaborative(workload: &Workload) -> JobSchedule {
    let nodes = ["s1", "s2", "s3"].map(|name| node(workload, name));
    JobSchedule::new(vec![node(workload, "ps"); 3], nodes.into_iter().flat_map(|node| [node; 4]).collect())
}

/// GOAT §III-B, Figure 2(c): 3 fragments reach the server, and switches send 13.
#[test]
fn three_switches_with_a_fragment_each_leave_three_to_the_server() {
    let workload = figure_2();
    let plan =
        GradientSchedule::new(&workload, vec![collaborative(&workload)], Residence::Step).expect("a plan");
    let traffic = plan.traffic(&workload, 0);
    assert_eq!((traffic.server_bytes, traffic.in_network_bytes), (3, 9));
    // The figure counts what switches send: without the 12 links from workers to their switches.
    assert_eq!(traffic.hop_bytes - 12, 13);
    assert_eq!(plan.held_bytes(&workload).into_values().collect::<Vec<_>>(), [1, 1, 1]);
    assert_eq!(plan.jobs()[0].fan_in(0), [(node(&workload, "s1"), 4)].into());
    let links = plan.link_bytes(&workload);
    assert_eq!(links.iter().sum::<f64>(), 25.0);
    let slowest = plan.slowest(&workload);
    // On s1 - s2: A3, A4, B1, B2.
    assert_eq!((slowest.link, slowest.seconds), (Some(2), 4.0));
    assert_eq!(plan.slowest_of_job(&workload, 0), slowest);
}

#[test]
fn all_at_the_server_is_what_no_aggregation_costs() {
    let workload = figure_2();
    let jobs = vec![JobSchedule::at_server(4, 3, node(&workload, "ps"))];
    let plan = GradientSchedule::new(&workload, jobs, Residence::Step).expect("a plan");
    assert_eq!(plan.traffic(&workload, 0), Traffic { server_bytes: 12, in_network_bytes: 0, hop_bytes: 36 });
    assert!(plan.held_bytes(&workload).is_empty());
    assert_eq!(plan.slowest(&workload).seconds, 12.0);
}

/// BytePS §4.1.1, Eq. 3: who trains and sums the share x moves M + (n - 2) x M in each direction.
#[test]
fn a_server_beside_a_worker_moves_what_byteps_says() {
    let topology = figure_2().topology().clone();
    let workers = figure_2().jobs()[0].workers.clone();
    let job = Job {
        name: "byteps".into(),
        servers: workers.clone(),
        workers: workers.clone(),
        sub_models: SubModel::divided(4, 1),
    };
    let workload = Workload::new(topology, vec![job]).expect("a workload");
    let roots = workers.clone();
    let nodes = roots.iter().flat_map(|root| [*root; 4]).collect();
    let plan = GradientSchedule::new(&workload, vec![JobSchedule::new(roots, nodes)], Residence::Step)
        .expect("a plan");
    let links = plan.link_bytes(&workload);
    for worker in workers {
        let (_, link) = workload.topology().neighbours(worker)[0];
        assert_eq!(links[link], 4.0 + 2.0 * 1.0);
    }
    // Nobody is sent its own contribution.
    assert_eq!(plan.traffic(&workload, 0).server_bytes, 12);
}

#[test]
fn memory_is_for_the_step_or_for_what_passes_in_a_round_trip() {
    let workload = figure_2();
    let at = node(&workload, "s1");
    let all = JobSchedule::new(vec![node(&workload, "ps"); 3], vec![at; 12]);
    let refused = GradientSchedule::new(&workload, vec![all.clone()], Residence::Step).expect_err("too much");
    assert_eq!(refused, ScheduleError::Memory { switch: "s1".into(), need: 3, have: 1 });
    assert!(refused.to_string().contains("move sub-models to the server"));
    // A step takes 6 s, for what s2's workers send over one link: 2 s is what a third of it takes.
    GradientSchedule::new(&workload, vec![all.clone()], Residence::Seconds(2.0)).expect("passes");
    GradientSchedule::new(&workload, vec![all], Residence::Seconds(2.1)).expect_err("too long");
}

#[test]
fn a_plan_of_something_else_is_refused_with_its_name() {
    let workload = figure_2();
    let refused =
        |jobs| GradientSchedule::new(&workload, jobs, Residence::Step).expect_err("refused").to_string();
    let (server, worker) = (node(&workload, "ps"), node(&workload, "w1"));
    assert!(refused(vec![]).contains("another number of jobs"));
    assert!(refused(vec![JobSchedule::at_server(3, 3, server)]).contains("other workers or sub-models"));
    assert!(refused(vec![JobSchedule::at_server(4, 3, worker)]).contains("w1 cannot sum sub-model g0"));
    let mut plan = collaborative(&workload);
    plan.assign(3, 2, worker);
    assert!(refused(vec![plan.clone()]).contains("w1 cannot sum sub-model g2"));
    plan.assign(3, 2, NodeId(1000));
    assert!(refused(vec![plan]).contains("node 1000 cannot sum"));
    // s3 no longer sums.
    let mut topology = workload.topology().clone();
    topology.set_memory_bytes(node(&workload, "s3"), None);
    let left = Workload::new(topology, workload.jobs().to_vec()).expect("a workload");
    let plan = collaborative(&workload);
    let refused = GradientSchedule::new(&left, vec![plan], Residence::Step).expect_err("gone").to_string();
    assert!(refused.contains("s3 cannot sum"), "{refused}");
}
