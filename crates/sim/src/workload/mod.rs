//! The work of the machines of a simulated network, and the rules that hold meanwhile.
//!
//! A [`Scenario`] names a network, jobs on it, and what goes wrong. The function [`run`] plays it
//! with the product's own state machines. It returns a [`Report`], or the first [`Violation`]. A
//! job is a [`System`](crate::systems::System), which sums, and a [`Workload`], which says when
//! there is something to sum.
//!
//! Deliberately absent: how packets travel (`net`), how scenarios are written down
//! (`scenario_file`).

mod background;
mod build;
mod checker;
mod faults;
mod growth;
mod hostile;
mod job;
mod loads;
mod meter;
pub mod models;
mod parameter_server;
mod program;
mod recording;
mod report;
mod scenario;
mod schedule;
mod simulation;
mod spans;
mod tenant;
#[cfg(test)]
mod tests;
mod transport;
mod unlike;
mod values;

pub use checker::Violation;
pub(crate) use checker::first;
pub use hostile::{hostile, shrink};
pub use parameter_server::{Draw, ParameterServerPlan, Push, Sends, TensorPlan};
pub use recording::{Direction, Distribution, Places, RecordedJob, RecordedNode, Recording};
pub use report::{
    Count, Durations, FlowReport, JobReport, JobSeries, LinkReport, Measurement, ParameterServerReport,
    Report, ServerReport, SwitchReport, TrainingReport,
};
pub use scenario::{
    BackgroundPlan, Fault, FaultPlan, JobPlan, LossPlan, Scenario, SendOrder, SwitchPlan, Target, TimedLayer,
    Trained, Which, Workload,
};
pub(crate) use scenario::{SamplePayload, TCP_KINDS};
pub use simulation::{Glimpse, JobGlimpse, Look, Options, RunError, run, sum};
pub use spans::{JobSpans, LeftOut};
pub use tenant::{Process, Tenant};
pub use transport::TransportPlan;
pub(crate) use transport::mtu;
pub use unlike::{Lateness, Rates};
pub use values::{Gradient, Inside, Numbers};
pub(crate) use values::{Latest, WORKERS_MAX, exact_workers_max};
