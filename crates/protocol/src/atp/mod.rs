//! ATP: best-effort aggregation of many jobs in many racks (Lao et al., NSDI 2021).
//!
//! The way of a fragment: a worker cuts its tensors into fragments, numbers them in one stream, and sends each with its
//! [`Directions`](fanin_wire::Directions) to its rack's [`AtpSwitch`]. The switch adds fragments of the same sequence number
//! in an *aggregator*, if the one that the fragment hashes to is free, and sends the sum on towards the job's [`AtpServer`];
//! if it is not free, the fragment goes on as it is. A switch of the next level does the same with what comes from below.
//! The server adds whatever arrives, whole sums, partial ones and single fragments, until every worker is in, and answers with
//! the parameters. They return hop by hop through the same switches, which free the aggregator. Whatever is lost, the workers
//! send again marked *resend*, which makes the switches give up what they hold.
//!
//! Two things that every machine relies on:
//!
//! - The *place* of a fragment is its sequence number modulo the job's window. A worker sends the next fragment of a place only
//!   when it has the parameters of the last one: so the server needs one gathering and one finished fragment a place, and all
//!   workers agree on the aggregator that a place uses.
//! - A parameter packet names the aggregator that its fragment used, which the switches free, and besides the one that the
//!   fragment's place uses from now on (in the first bitmap) and the exponent of that next fragment (`next_exponent`).
//!   A worker that hands parameters back (`restore`) puts both, as it got them, where they were.

mod aggregator_table;
mod children;
mod config;
mod passing;
mod server;
mod switch;
#[cfg(test)]
mod tests;
mod worker;

use config::AGGREGATOR_ELEMENTS_MAX;
pub use config::{
    AGGREGATORS_MAX, ATP_JOBS_MAX, ATP_WORKERS_MAX, AtpConfigError, AtpJobConfig, AtpWorkerPlan,
    DEFAULT_WAYS, Hashing, Overflow, Scaling, WAYS_MAX, WINDOW_ELEMENTS_MAX,
};
use fanin_wire::GradientHeader;
pub use server::{AtpServer, AtpServerProgress, ServerJob};
pub use switch::{AtpSwitch, AtpSwitchConfig, AtpSwitchProgress, AtpSwitchStatistics, SwitchRoute};
pub use worker::{AtpWorker, AtpWorkerProgress};

/// The exponent of a fragment that its worker does not have yet (§B.3).
pub(crate) const EXPONENT_UNKNOWN: i16 = i16::MAX;

/// The aggregator that the place of these parameters uses from now on: it travels in the bitmap, which parameters do not
/// need (ATP §3.6).
pub(crate) const fn next_aggregator_index(parameters: &GradientHeader) -> u32 {
    parameters.directions.bitmaps[0]
}
