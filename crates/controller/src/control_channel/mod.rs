//! The control channel between a rank or a switch and the switch that it asks: its address, its
//! socket behind TLS, and a greeting that shows that a switch of this version is there.
//!
//! Both sides of control have it: a session speaks over one to each of its services, and a switch
//! with an upstream is a client of that upstream. Deliberately absent: jobs.

mod address;
mod connection;
mod guarded;
mod socket;
mod way;

pub use address::switch_address;
pub(crate) use address::with_port;
pub use connection::control_calls;
pub(crate) use connection::{Connection, GREETING, RETRY, Waiting, is_gone, was_refused};
pub(crate) use fanin_limits::explain;
pub(crate) use guarded::Guarded;
pub(crate) use socket::Lines;
pub(crate) use way::{GREETED_WITHIN, STAYS_AWAY, way_from};
