//! A service dies for good, and another one of the job goes on with its part, as in the product. Each
//! rank stops the part's machine, and joins at the other service with the counts of its slots. Then
//! it hands back the sums that others lack. Registry and machines are the product's, and the checkers
//! hold each sum.
//!
//! Simplified: connections of control are not played. All ranks ask in the same moment, a time after
//! the death, and are admitted at once. Nobody can while a rank's host is away.

use fanin_protocol::WorkerMachine;
use fanin_protocol::control::Resume;
use fanin_protocol::switchml::WorkerPlan;
use fanin_wire::Key;

use super::super::pools::WorkerActor;
use super::{Job, SERVICE_PORT};
use crate::net::{ActorId, Network, SimAddress};

impl Job {
    pub(super) fn address(&self, service: usize) -> SimAddress {
        SimAddress::new(self.system.services[service], SERVICE_PORT)
    }

    /// Lets another service go on with a part; whether one does.
    pub(super) fn is_taken_over(&self, network: &mut Network, part: usize) -> bool {
        let plan = self.tenant.plan();
        let Some(heir) = self.heir(network, part) else { return false };
        if !plan.workers.iter().all(|worker| network.is_up(*worker)) {
            return false;
        }
        let before = self.parts[part].config.get();
        let actors: Vec<ActorId> =
            (0..plan.workers.len()).map(|rank| self.tenant.machine(rank, part)).collect();
        let remembers = |actor: &ActorId| {
            network.with_actor(*actor, |worker: &mut WorkerActor, _| Resume {
                lineage: before.key.lineage(),
                generation: worker.machine.generation(),
                in_flight: before.slots,
                elements: self.system.elements,
                completed: vec![worker.machine.suspend()],
            })
        };
        let resumes: Vec<Resume> = actors.iter().map(remembers).collect();
        // Another key, as the product draws one. The id stays: no service has a part twice.
        let key = Key::new(self.tenant.key(part).secret() + 1 + u128::from(before.generation.0));
        let at = (part, heir);
        let admitted =
            self.system.admitted(network.topology(), &plan.workers, at, (before.id, key), &resumes);
        let Ok(mut admitted) = admitted else { return false };
        self.system.lengthened(&mut admitted, plan.sampled);
        let config = admitted.config;
        if !self.pools[heir].admit(network, admitted.job) {
            return false;
        }
        self.parts[part].config.set(config);
        self.parts[part].at.borrow_mut().push(heir);
        let switch = self.address(heir);
        for (actor, (place, restore)) in actors.into_iter().zip(admitted.ranks) {
            network.with_actor(actor, |worker: &mut WorkerActor, context| {
                worker.machine.resume(context.now(), WorkerPlan { config, switch, place, restore });
                worker.drain(context);
            });
        }
        true
    }

    /// The next of the job's services, from the one where the part began, that lives and can be
    /// reached (`Watch::take_over` of `controller/session/watch.rs`).
    fn heir(&self, network: &Network, part: usize) -> Option<usize> {
        let count = self.parts.len();
        let lives =
            |at: &usize| network.is_up(self.system.services[*at]) && self.pools[*at].is_alive(network);
        (1..count).map(|step| (part + step) % count).find(lives)
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, run};

    /// Four workers and two hosts more at a switch, each with a service.
    fn text(job: &str, byteps: &str) -> String {
        format!(
            "[network]\ntopology = \"rack\"\nhosts = 6\nrate = \"10Gbit\"\nqueue = \"8MB\"\n\
             [[job]]\nsystem = \"byteps\"\nworkers = 4\n{job}\n\
             [job.byteps]\nservices = [\"h0\", \"h1\", \"h2\", \"h3\", \"h4\", \"h5\"]\n{byteps}"
        )
    }

    fn dies(host: &str, at_us: u64) -> String {
        format!("[[fault]]\nat = \"{at_us}us\"\nkind = \"service-dies\"\nnode = \"{host}\"\n")
    }

    fn played(text: &str, seed: u64) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        run(&scenario, Options { seed, ..Options::default() })
            .unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn taken(report: &Report) -> u64 {
        assert!(report.jobs.iter().all(|job| job.finished), "{:?}", report.jobs[0].unfinished);
        report.jobs[0].counters.take_overs.expect("counted")
    }

    const JOB: &str = "tensor = \"600kB\"\ntensors = 8";
    const SOON: &str = "take_over = \"1ms\"\nelements = 64\nwindow = 20\n";
    const LOSSES: &str = "[[loss]]\nloss = \"2%\"\nduplication = \"1%\"\n";

    #[test]
    fn another_service_takes_over_after_the_products_time() {
        let report = played(&(text(JOB, "") + &dies("h4", 500)), 1);
        assert_eq!(taken(&report), 1);
        let ended = report.jobs[0].finished_s.expect("it ends");
        assert!((3.0005..3.05).contains(&ended), "{ended} s");
        let undisturbed = played(&text(JOB, ""), 1);
        assert_eq!(taken(&undisturbed), 0);
    }

    #[test]
    fn sums_are_exact_whenever_a_service_dies_and_wherever_it_is() {
        for seed in 0..24 {
            // The last two are beside a worker.
            let host = ["h4", "h3", "h1"][seed as usize % 3];
            let payload = ["full", "sample"][seed as usize % 2];
            let scenario =
                format!("payload = \"{payload}\"\n{}{LOSSES}{}", text(JOB, SOON), dies(host, 150 * seed));
            assert_eq!(taken(&played(&scenario, seed)), 1, "{scenario}");
        }
    }

    /// The service that took over may die, too; the other one before or after that.
    #[test]
    fn sums_are_exact_after_two_services_die() {
        for seed in 0..24 {
            let second = 450 + 200 * seed;
            let faults = dies("h4", 400) + &dies("h5", second);
            let taken = taken(&played(&format!("{}{LOSSES}{faults}", text(JOB, SOON)), seed));
            // `h5` has the part of `h4`, too, or never gets it.
            assert_eq!(taken, if second > 1400 { 3 } else { 2 }, "{second}");
        }
        let all = ["h0", "h1", "h2", "h4", "h5"].map(|host| dies(host, 700)).concat();
        assert_eq!(taken(&played(&(text(JOB, SOON) + &all), 1)), 5, "one is left");
    }

    #[test]
    fn ranks_whose_host_is_away_are_waited_for_and_so_is_the_last_service() {
        let away = |host: &str, at_us: u64| {
            format!(
                "[[fault]]\nat = \"{at_us}us\"\nkind = \"node-fails\"\nnode = \"{host}\"\ndown = \"4ms\"\n"
            )
        };
        let report = played(&(text(JOB, SOON) + &dies("h4", 300) + &away("h2", 500)), 1);
        assert_eq!(taken(&report), 1);
        assert!(report.jobs[0].finished_s > Some(0.0045));
        let two = text(JOB, SOON).replace("\"h0\", \"h1\", \"h2\", \"h3\", ", "");
        let report = played(&(two + &dies("h4", 300) + &away("h5", 500)), 1);
        assert_eq!(taken(&report), 1);
        assert!(report.jobs[0].finished_s > Some(0.0045));
    }

    #[test]
    fn all_jobs_of_a_service_have_it_taken_over() {
        let job = |workers: &str| {
            format!(
                "[[job]]\nsystem = \"byteps\"\nworkers = {workers}\ntensor = \"1MB\"\ntensors = 3\n[job.byteps]\nservices = [\"h0\", \"h3\"]\nshares = [0.5, 0.5]\ntake_over = \"2ms\"\n"
            )
        };
        let jobs = job("[\"h0\", \"h1\"]") + &job("[\"h0\", \"h2\"]");
        let report =
            played(&format!("[network]\ntopology = \"rack\"\nhosts = 4\n{jobs}{}", dies("h3", 100)), 1);
        let taken: Vec<_> = report.jobs.iter().map(|job| (job.finished, job.counters.take_overs)).collect();
        assert_eq!(taken, [(true, Some(1)); 2]);
    }

    #[test]
    fn mistakes_say_their_line_and_the_cure() {
        let two = text(JOB, "").replace("\"h0\", \"h1\", \"h2\", \"h3\", ", "");
        let switchml = text(JOB, "").replace("byteps", "switchml").replace("services = [", "#");
        for (text, words) in [
            (
                two.clone() + &dies("h5", 2) + &dies("h4", 1),
                "the service on h5 is the last of job0 that lives",
            ),
            (two.clone() + &dies("h4", 1) + &dies("h4", 2) + &dies("h5", 2), "one more host in `services`"),
            (
                two.clone() + &dies("h1", 1),
                "no service is on h1 that another one takes over: those are on h4, h5",
            ),
            (two.clone() + &dies("h9", 1), "unknown node `h9`"),
            (two + "[[fault]]\nat = \"1ms\"\nkind = \"service-dies\"\n", "needs `node`"),
            (switchml + &dies("h4", 1), "only those of `byteps` are"),
        ] {
            let message = parse("test.toml", &text).expect_err(words).to_string();
            assert!(message.contains(words) && message.contains("test.toml:"), "{message}");
        }
    }
}
