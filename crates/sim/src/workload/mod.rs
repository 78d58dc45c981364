//! What the machines of a simulated network are busy with, and what must hold while they are.
//!
//! A [`Scenario`] names a network, jobs on it, and what goes wrong; [`run`] plays it with the product's own state machines
//! (and the simulator's ring all-reduce beside them) and returns a [`Report`], or the first [`Violation`]. A job is a
//! [`System`](crate::scenario_file::System), which sums, and a [`Workload`], which says when there is something to sum.
//!
//! Deliberately absent: how packets travel (`net`), how scenarios are written down (`scenario_file`).

mod actors;
mod build;
mod checker;
mod faults;
mod hostile;
mod job;
mod mailbox;
mod meter;
pub mod models;
pub(crate) mod placement;
mod program;
mod report;
mod ring;
mod scenario;
mod simulation;
#[cfg(test)]
mod tests;
mod values;

pub use checker::Violation;
pub use hostile::{hostile, shrink};
pub use report::{
    Count, FlowReport, JobReport, JobSeries, Measurement, Report, ServerReport, SwitchReport, TrainingReport,
};
pub use scenario::{
    BackgroundPlan, Fault, FaultPlan, JobPlan, LossPlan, Scenario, SwitchPlan, Target, Which, Workload,
};
pub use simulation::{Options, RunError, run};
