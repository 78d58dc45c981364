//! GOAT: which switch sums which part of a model is planned, so that workers need not come together
//! (Fang et al., 2024).
//!
//! The way of a fragment: a worker knows which sub-model a fragment is of, and labels it with the
//! *aggregation node* that its assignment names for that one. Switches send it on by their tables
//! until it is there. The switch that is the node adds the fragments of exactly the workers that
//! the plan has there. It does so in an aggregator that no other fragment uses, however late the
//! last one comes, and sends the sum on to the server, or to another node that adds it to others.
//! Fragments whose node is the server go there as they are. Parameters go down from switch to
//! switch, to all workers.
//!
//! The machines are those of [`aggregation`](crate::aggregation); here is what a plan tells them. A
//! plan has a generation, the job's: where it changes, all machines are told, and packets of
//! another generation are dropped. Under one generation a label that the plan does not have is
//! refused by the server ([`Reason::Unplanned`](crate::machine::Reason::Unplanned)).

mod admission;
mod plan;
mod protocol;
mod server;
mod switch;
#[cfg(test)]
mod tests;
mod tree;
mod worker;

pub use crate::aggregation::{
    ConfigError as GoatConfigError, ServerProgress as GoatServerProgress, SwitchConfig as GoatSwitchConfig,
    SwitchProgress as GoatSwitchProgress, SwitchStatistics as GoatSwitchStatistics,
    WorkerProgress as GoatWorkerProgress,
};
pub use crate::aggregation::{Overflow, SUB_MODELS_MAX, Scaling};
use crate::aggregation::{Server, Switch, Worker, WorkerPlan};
pub use admission::{Plan, number};
pub use plan::{Assignment, GoatJobConfig, Onward, PlannedSum, SubModels, sums_of};
pub use protocol::{Goat, RankTerms};
pub use server::Groups;
pub use server::{GoatServerJob, ServerPlan};
pub use switch::GoatRoute;
pub use tree::{Load, sum_on_the_way};

/// A worker of a GOAT job. `A` names the machine that its parameters come from, `T` holds a
/// tensor's memory.
pub type GoatWorker<A, T> = Worker<A, T, Assignment<A>>;
/// How it goes on with another plan.
pub type GoatWorkerPlan<A> = WorkerPlan<A, Assignment<A>>;
/// A switch: aggregators, and for each job its plan. `A` names a peer's address.
pub type GoatSwitch<A> = Switch<A, GoatRoute<A>>;
/// A parameter server of any number of jobs. `A` names a peer's address.
pub type GoatServer<A> = Server<A, Groups>;
