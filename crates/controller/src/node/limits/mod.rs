//! The limits of a switch for whoever connects and calls: no address takes all of what the switch
//! has.
//!
//! A connection has a place among [`CONNECTIONS_MAX`], and soon says what it is. A call waits for
//! its turn at the rate of its address, and its request comes within seconds and in so much memory
//! (`call_rate`). Ranks that wait for others do so for a bounded number of jobs (`waiting_jobs`),
//! and what they report meanwhile has a budget of memory ([`reports_budget`]). `fanin_limits`
//! counts places and memory by address. Two limits stand elsewhere: how much ranks say to each
//! other before they join (`meetings`), and how often a relay asks its upstream for strangers
//! (`relay`).

mod call_rate;
mod listener;
mod waiting_jobs;

use std::io;
use std::time::Duration;

use fanin_limits::{Budget, Connection, connections_max, limited};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tonic::transport::Server;

pub(super) use call_rate::{CallLimits, CallRate, HANDSHAKE_COUNTS, STATUS_COUNTS, Toll, in_turn, too_many};
pub(super) use waiting_jobs::{WaitingJobs, WaitingRank};

/// The largest request is one to join that resumes a job: 64 shards of 16384 slots, whose counts
/// take up to five bytes each.
pub(super) const JOIN_BYTES_MAX: usize = 6 << 20;
/// All other requests are short, and so is the rest of that one.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The call that may be longer.
pub(super) const JOIN: &str = "/fanin.v1.Control/Join";

/// The call that stays open, and says no more than who attends.
pub(super) const ATTEND: &str = "/fanin.v1.Control/Attend";
pub(super) const ATTEND_BYTES_MAX: usize = 1 << 10;

/// How long a connection may take to say what it is, and to show that it may be here.
pub(super) const GREETING: Duration = Duration::from_secs(10);

/// Most connections at once: two for each rank that a switch can serve at any sensible size, one to
/// ask how it fares.
const CONNECTIONS_MAX: usize = 4096;
/// And from one address: more than any machine has ranks.
const CONNECTIONS_OF_ONE_MAX: usize = 512;
/// Bytes that a connection may have sent before anybody has looked at them.
const WINDOW_BYTES: u32 = 256 << 10;
/// The headers of a request are a few short lines.
const HEADERS_BYTES_MAX: u32 = 4 << 10;

/// Calls of one connection that are open at once: an ATP switch passes those of all ranks below it
/// on, a stream and a question each.
const CALLS_MAX: u32 = 2 * 64 * 256;

/// Calls of one connection that may be given up before this process has looked at them.
const RESETS_MAX: usize = 1024;

/// Bytes of what ranks report that still wait for their job, and of those that ask from one
/// address.
const REPORTS_BYTES_MAX: usize = 32 << 20;
const REPORTS_BYTES_OF_ONE_MAX: usize = 8 << 20;

/// The connections that come to a switch, each with its place.
pub(super) fn connections(listener: TcpListener) -> impl Stream<Item = io::Result<Connection>> {
    let connections = connections_max(CONNECTIONS_MAX);
    let of_one = CONNECTIONS_OF_ONE_MAX.min(connections.div_ceil(2));
    limited(listener::incoming(listener), connections, of_one)
}

/// Serves HTTP within the limits for one connection.
pub(super) fn server() -> Server {
    Server::builder()
        .accept_http1(true)
        .max_concurrent_streams(CALLS_MAX)
        // The sessions of a process share a connection, and give their calls up together where this
        // process stands still.
        .http2_max_pending_accept_reset_streams(Some(RESETS_MAX))
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_max_header_list_size(HEADERS_BYTES_MAX)
}

/// The memory for what ranks report while they wait to be admitted.
pub(super) fn reports_budget() -> Budget {
    Budget::new(REPORTS_BYTES_MAX, REPORTS_BYTES_OF_ONE_MAX)
}
