//! Admitted jobs, until their ranks are told: each gets its plan and then its room in the data
//! path.

use std::collections::HashMap;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

use fanin_limits::host_of;
use fanin_protocol::control::{Admission, Planner, Ticket};
use fanin_udp::{DataPath, Seat};
use fanin_wire::JobId;

use super::NotAdmitted;
use super::table::Table;
use crate::node::lock;
use crate::node::task_queue::TaskQueue;

/// By the name of the protocol, where one has a planner.
type Planners = HashMap<&'static str, Box<dyn Planner>>;

/// An admitted job.
pub struct Admitted {
    pub name: String,
    pub admission: Admission,
    /// The ranks that wait for it.
    pub tickets: Vec<Ticket>,
    /// The address from which the last of them asks.
    pub from: Option<IpAddr>,
    /// The job in whose place it is, of whose memory it has the first choice.
    pub replaces: Option<JobId>,
}

/// Prepares admitted jobs.
pub struct Preparation {
    table: Arc<Mutex<Table>>,
    /// Not locked with the table: plans take their time.
    planners: Arc<Planners>,
    /// Plans are made one at a time for each host that asks for them.
    turns: Mutex<HashMap<IpAddr, Weak<Mutex<()>>>>,
}

impl Preparation {
    pub fn new(table: Arc<Mutex<Table>>, planners: Planners) -> Self {
        Self { table, planners: Arc::new(planners), turns: Mutex::default() }
    }

    /// Makes a job's plan and room for it in the data path, and then tells the ranks that wait for
    /// it.
    pub fn begin(&self, tasks: &TaskQueue<dyn DataPath>, job: Admitted) {
        let (table, planners) = (Arc::clone(&self.table), Arc::clone(&self.planners));
        let admission = &job.admission;
        // Without switches there is nothing to plan.
        if !planners.contains_key(admission.protocol) || admission.tree.switches.is_empty() {
            return tasks.send(move |driver| {
                job.replaces.into_iter().for_each(|before| forget(&planners, before));
                run(job, &table, &planners, driver);
                settle(&planners, &table);
            });
        }
        // Who has a large tree waits for its plan, and no other job does.
        let (turn, later) = (self.turn_of(job.from), tasks.sender());
        // What is left to do if no thread can plan; the job itself goes to the thread.
        let (id, name, tickets) = (admission.job, job.name.clone(), job.tickets.clone());
        let replaces = job.replaces;
        let mut planned = job;
        let planning = thread::Builder::new().name("fanin-plan".into()).spawn(move || {
            let admission = &planned.admission;
            let planner = &planners[admission.protocol];
            let turn = lock(&turn);
            planned.replaces.into_iter().for_each(|before| planner.forget(before));
            let seats = catch_unwind(AssertUnwindSafe(|| planner.plan(admission)));
            let seats = seats.unwrap_or_else(|_| {
                tracing::error!(id = admission.job.0, "no plan is found; all is summed at the root");
                planner.forget(admission.job);
                Ok(admission.seats.clone())
            });
            drop(turn);
            later.send(move |driver| {
                let admission = &mut planned.admission;
                let has_plan = seats.and_then(|seats| {
                    let mut known = lock(&table);
                    // It may be over.
                    if !known.running().contains(&admission.job) {
                        return Err("the job ended before it was planned".into());
                    }
                    known.registry.planned(admission.job, seats.clone());
                    admission.seats = seats;
                    Ok(())
                });
                match has_plan {
                    Ok(()) => {
                        run(planned, &table, &planners, driver);
                        settle(&planners, &table);
                    }
                    Err(error) => {
                        let Admitted { name, admission, tickets, .. } = planned;
                        cannot_begin((admission.job, &name, tickets), error, &table, &planners);
                    }
                }
            });
        });
        if let Err(error) = planning {
            let (table, planners) = (Arc::clone(&self.table), Arc::clone(&self.planners));
            let error = format!("no thread to plan in: {error}");
            tasks.send(move |_| {
                replaces.into_iter().for_each(|before| give_back(&planners, &table, before));
                cannot_begin((id, &name, tickets), error, &table, &planners);
            });
        }
    }

    /// A job is over: its part of the switches' memory is another's from now on.
    pub fn forget(&self, tasks: &TaskQueue<dyn DataPath>, job: JobId) {
        let (planners, table) = (Arc::clone(&self.planners), Arc::clone(&self.table));
        // After the task that makes room for the job.
        tasks.send(move |_| give_back(&planners, &table, job));
    }

    /// Held while a plan is made for somebody who asks from there: nobody has more than one core.
    fn turn_of(&self, from: Option<IpAddr>) -> Arc<Mutex<()>> {
        let host = host_of(from.unwrap_or(IpAddr::from([0; 4])));
        let mut all = lock(&self.turns);
        all.retain(|_, turn| turn.strong_count() > 0);
        let turn = all.get(&host).and_then(Weak::upgrade).unwrap_or_default();
        all.insert(host, Arc::downgrade(&turn));
        turn
    }
}

/// Takes a job's part of the switches' memory back.
fn give_back(planners: &Planners, table: &Mutex<Table>, job: JobId) {
    forget(planners, job);
    settle(planners, table);
}

fn forget(planners: &Planners, job: JobId) {
    planners.values().for_each(|planner| planner.forget(job));
}

/// Sets jobs up again that another plan suits better, now that some job has come or gone.
fn settle(planners: &Planners, table: &Mutex<Table>) {
    for job in planners.values().flat_map(|planner| planner.unsettled()) {
        if lock(table).registry.set_up_again(job) {
            tracing::info!(id = job.0, "a job is planned anew: other jobs' need of the switches has changed");
        }
    }
}

/// Makes room for a job, and tells its ranks.
fn run(
    Admitted { name, admission, tickets, .. }: Admitted,
    table: &Mutex<Table>,
    planners: &Planners,
    driver: &dyn DataPath,
) {
    let job = admission.job;
    let (part, protocol) = (&admission.seats.root, admission.protocol);
    let seat = Seat { job: admission.identity(), protocol, part, upstream: None };
    if let Err(error) = driver.add_job(&seat) {
        // Some of its shards may have had room.
        driver.remove_job(job);
        return cannot_begin((job, &name, tickets), error.to_string(), table, planners);
    }
    tracing::info!(
        job = name,
        id = job.0,
        protocol = admission.protocol,
        generation = admission.generation.0,
        world_size = admission.world_size,
        in_flight = admission.terms.in_flight,
        elements = admission.terms.elements,
        wire_dtype = admission.terms.wire_dtype.name(),
        "a job runs"
    );
    // No rank sends before it is admitted, and none is admitted before its packets are taken.
    let hosts = lock(table).register(job, &tickets);
    driver.register(job, &hosts);
    let (late, hosts) = {
        let mut table = lock(table);
        let late = table.prepared(job);
        let hosts = table.register(job, &late);
        (late, hosts)
    };
    if !hosts.is_empty() {
        driver.register(job, &hosts);
    }
    // What is in it grows with the ranks, and each of them waits for an answer.
    let admission = Arc::new(admission);
    let mut table = lock(table);
    for ticket in tickets.into_iter().chain(late) {
        table.answer(ticket, Ok(Arc::clone(&admission)));
    }
}

/// Tells the ranks of a job that has no plan, or no room in the data path.
fn cannot_begin(
    (job, name, tickets): (JobId, &str, Vec<Ticket>),
    error: String,
    table: &Mutex<Table>,
    planners: &Planners,
) {
    tracing::warn!(job = name, error, "a job cannot begin");
    give_back(planners, table, job);
    let mut table = lock(table);
    table.without_room.push(job);
    let late = table.prepared(job);
    for ticket in tickets.into_iter().chain(late) {
        table.answer(ticket, Err(NotAdmitted::DataPath(error.clone())));
    }
}
