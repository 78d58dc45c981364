//! Aggregation by switches that help as far as they have room, and a server behind them that does
//! the rest: what ATP and GOAT have in common. A worker, a switch and a server, and the tables in
//! them.
//!
//! The way of a fragment: a worker cuts its tensors into fragments, numbers them in one stream, and
//! sends each with a [`Label`](fanin_wire::Label), which says where it is summed. A switch that the
//! label means adds fragments of the same sequence number in an *aggregator* and sends the sum on
//! towards the job's server; if it has no room, the fragment goes on unsummed. The server adds
//! whatever arrives, whole sums, partial ones and single fragments, until every worker is in, and
//! answers with the parameters, which return hop by hop.
//!
//! The *place* of a fragment is its sequence number modulo the job's window. A worker sends the
//! next fragment of a place only when it has the parameters of the last one. So the server needs
//! one gathering and one finished fragment a place.
//!
//! The differences are behind three traits, one a machine: how a worker labels its fragments
//! ([`Way`]), which of them a switch sums and where it sends the others ([`Route`]), and whom a
//! fragment that comes to the server is from ([`Roster`]).

use fanin_wire::Dtype;

pub(crate) mod admission;
mod aggregator_table;
mod children;
mod config;
mod halves;
mod passing;
mod server;
mod switch;
mod worker;

pub use aggregator_table::Part;
pub use children::Children;
pub use config::{
    AGGREGATORS_MAX, ConfigError, DEFAULT_WAYS, Hashing, JOBS_MAX, JobConfig, Overflow, SUB_MODELS_MAX,
    Scaling, WAYS_MAX, WINDOW_ELEMENTS_MAX, WORKERS_MAX, WorkerPlan,
};
pub(crate) use server::GoOn;
pub use server::{Admitted, Coverage, Roster, Server, ServerProgress, Workers};
pub use switch::{Route, Switch, SwitchConfig, SwitchProgress, SwitchStatistics, Treatment};
pub use worker::{Way, Worker, WorkerProgress};

/// Whether fragments can carry a dtype: they have floats and 32-bit integers alone.
pub(crate) const fn sums(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Int32)
}

/// The exponent of a fragment that its worker does not have yet (§B.3).
const EXPONENT_UNKNOWN: i16 = i16::MAX;
