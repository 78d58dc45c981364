use super::*;
use crate::random_workloads;
use crate::sub_models::{Job, SubModel};
use crate::topologies::{
    Rates, SWITCH_MEMORY_BYTES, make_programmable, paper_fat_tree, paper_leaf_spine, testbed,
};
use crate::topology::Topology;

fn job(topology: &Topology, workers: usize, sub_models: Vec<SubModel>) -> Job {
    let hosts: Vec<_> = topology.hosts().collect();
    let server = topology.node("ps").unwrap_or(hosts[hosts.len() - 1]);
    let workers = hosts.into_iter().filter(|host| *host != server).take(workers).collect();
    Job { name: "job".into(), workers, servers: vec![server], sub_models }
}

fn show(name: &str, workload: &Workload, residence: Residence) {
    let began = std::time::Instant::now();
    let plan = slowest_link(workload, residence, 0);
    eprintln!(
        "{name} {residence:?}: {:.4} bound {:.4} gap {:.2}% in {:?}; krgs {:.4} {:.4} atp {:.4} byteps {:?} server {:.4}",
        plan.seconds,
        plan.bound_s,
        plan.gap() * 100.0,
        began.elapsed(),
        krgs(workload, Objective::Overhead, 0).schedule.slowest(workload).seconds,
        krgs(workload, Objective::Reduction, 0).schedule.slowest(workload).seconds,
        first_switches(workload, residence, plan.bound_s).slowest(workload).seconds,
        byteps(workload, residence).map(|plan| plan.slowest(workload).seconds),
        crate::baselines::at_servers(workload).slowest(workload).seconds,
    );
}

#[test]
fn look() {
    for residence in [Residence::Step, Residence::Seconds(1e-3)] {
        let t = testbed();
        let w = Workload::new(t.clone(), vec![job(&t, 8, SubModel::divided(98_000_000, 1_000_000))]).unwrap();
        show("testbed", &w, residence);
        let mut t = paper_leaf_spine(Rates::alike(10e9));
        make_programmable(&mut t, 0.2, SWITCH_MEMORY_BYTES, 1);
        let w =
            Workload::new(t.clone(), vec![job(&t, 49, SubModel::divided(221_000_000, 2_000_000))]).unwrap();
        show("leaf-spine", &w, residence);
        let mut t = paper_fat_tree(Rates::alike(10e9));
        make_programmable(&mut t, 0.2, SWITCH_MEMORY_BYTES, 1);
        let w =
            Workload::new(t.clone(), vec![job(&t, 191, SubModel::divided(221_000_000, 2_000_000))]).unwrap();
        show("fat-tree", &w, residence);
        for seed in 0..40 {
            let w = random_workloads::workload(seed, 2, 3, 0.01);
            show(
                &format!(
                    "random {seed} ({} switches, {} programmable, {} jobs)",
                    w.topology().switches().count(),
                    w.topology().programmable().count(),
                    w.jobs().len()
                ),
                &w,
                residence,
            );
        }
    }
}
