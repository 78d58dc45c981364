//! Why a rank may not join. One value makes the log line, the metric and the message.
//!
//! All refusals stand in one table, `for_each_refusal`, with what they are called and what they say;
//! `fanin-controller` makes its messages of the same table.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use core::net::SocketAddr;

use fanin_wire::{CHILDREN_MAX, LEVELS_MAX, LossBound, PLACES_MAX, Rank};

use super::gathering::IN_FLIGHT_MAX;
use super::{HOPS_MAX, JOB_NAME_BYTES_MAX, NAMED_SUB_MODELS_MAX, Ranks};

/// Hands the table of all refusals to the macro `$with`: for each what it means, its name in metrics and logs, its fields, and how
/// it is written for a person.
#[macro_export]
macro_rules! for_each_refusal {
    ($with:ident) => {
        $with! {
            /// The rank speaks another version of the wire format.
            VersionMismatch = "version_mismatch" {
                /// The rank's.
                theirs: u8,
                /// The switch's.
                ours: u8,
            }
                |f| match theirs == ours {
                    false => write!(
                        f,
                        "this process speaks wire version {theirs}, the switch {ours}; install the same fanin on both"
                    ),
                    true => write!(
                        f,
                        "this process speaks another control protocol than the switch, of the same wire version {ours}; install the same \
                         fanin on both"
                    ),
                };

            /// The job's name is empty, too long, or not printable.
            JobName = "job_name" {
                /// Its length.
                bytes: usize,
            }
                |f| write!(f, "a job name of {bytes} bytes; give a printable name of 1 to {JOB_NAME_BYTES_MAX} bytes");

            /// The switch serves as many jobs as it may.
            TooManyJobs = "too_many_jobs" {
                /// The limit.
                max: u32,
            }
                |f| write!(
                    f,
                    "the switch serves {max} jobs already, as many as it may in all or from one machine; wait until one ends \
                     (see fanin status) or use another switch"
                );

            /// The rank is not below the world size.
            RankOutOfRange = "rank_out_of_range" {
                /// The rank.
                rank: u32,
                /// What it said is the world size.
                world_size: u32,
            }
                |f| write!(f, "rank {rank} in a world of {world_size}; ranks count from 0 to world_size - 1");

            /// No job has so many ranks.
            TooManyWorkers = "too_many_workers" {
                /// The world size that was asked for.
                asked: u32,
                /// The most that the protocol has.
                max: u32,
            }
                |f| write!(f, "a world of {asked} ranks, where a job has at most {max}; use fewer ranks a job (with a loss bound, FANIN_LOSS_BOUND, it has 64, with GOAT 128)");

            /// The ranks disagree on the number of ranks.
            WorldSizeMismatch = "world_size_mismatch" {
                /// The rank that is refused.
                rank: u32,
                /// The world size that it gave.
                asked: u32,
                /// The world size that the waiting ranks gave.
                job_has: u32,
            }
                |f| write!(
                    f,
                    "rank {rank} says world_size {asked}, the ranks that wait for it say {job_has}; start all with the same \
                     world_size, or use another job name"
                );

            /// Another process has the same rank.
            DuplicateRank = "duplicate_rank" {
                /// The rank.
                rank: u32,
            }
                |f| write!(
                    f,
                    "rank {rank} has joined already; give each process a rank of its own, or use another job name"
                );

            /// A job of that name is complete and runs.
            JobRunning = "job_running" {
                /// The rank that is refused.
                rank: u32,
                /// Ranks of the running job.
                world_size: u32,
            }
                |f| write!(
                    f,
                    "rank {rank} comes too late: the job runs with its {world_size} ranks; use another job name, or wait until \
                     it ends (see fanin status)"
                );

            /// No rank may have so many packets in flight.
            InFlightOutOfRange = "in_flight_out_of_range" {
                /// How many were asked for in a shard: slots, or a window.
                asked: u16,
            }
                |f| write!(
                    f,
                    "{asked} packets in flight (slots, or a window); ask for 1 to {IN_FLIGHT_MAX}, or leave it to fanin"
                );

            /// Ranks ask for what they must ask for alike. No sum can come of it, so the ranks that wait are refused as well.
            Mismatch = "mismatch" {
                /// The rank that came last.
                rank: u32,
                /// What they disagree on.
                field: Box<str>,
                /// What it asked for.
                asked: Box<str>,
                /// A rank that waited for it.
                other_rank: u32,
                /// What that one asked for.
                job_has: Box<str>,
            }
                |f| write!(
                    f,
                    "rank {rank} and rank {other_rank} differ in {field}: {asked} and {job_has}; set the same for all ranks, or for none"
                );

            /// The protocol does not sum what the rank asks for.
            Unserved = "unserved" {
                /// Why, and what to do.
                reason: String,
            }
                |f| f.write_str(reason);

            /// No plan has such parts of a model.
            SubModels = "sub_models" {
                /// How many were named.
                count: u32,
            }
                |f| write!(
                    f,
                    "{count} sub-models: name at most {NAMED_SUB_MODELS_MAX} (sub_models, or FANIN_SUB_MODELS), each of 1 to 2^29 elements; \
                     fanin.torch.sub_models merges a model's layers"
                );

            /// Not even the smallest chunk passes the rank's path.
            MtuTooSmall = "mtu_too_small" {
                /// The path's MTU in bytes.
                mtu: u32,
                /// The MTU that is needed, in bytes.
                need: u32,
            }
                |f| write!(
                    f,
                    "the path to the switch has an MTU of {mtu} bytes, fanin needs {need}; raise it, or use another path"
                );

            /// The switch has too little memory left.
            PoolExhausted = "pool_exhausted" {
                /// Units of 256 elements that the job needs in each shard.
                asked: u32,
                /// Units of 256 elements that are free in each shard.
                free: u32,
            }
                |f| write!(
                    f,
                    "the job needs {asked} units of memory, and {free} are free (units of 256 elements, each shard; jobs \
                     of one machine have half of them all at most); ask for fewer slots or a smaller window, or for no loss bound, wait until a job ends, or start the switch with more (--pool-units)"
                );

            /// The rank and its job (or the switch) disagree on the job that is to be resumed.
            ResumeMismatch = "resume_mismatch" {
                /// The rank that is refused.
                rank: u32,
                /// What they disagree on.
                field: ResumeField,
                /// The rank's value.
                rank_has: u32,
                /// The other value.
                job_has: u32,
            }
                |f| write!(
                    f,
                    "the job cannot be resumed: rank {rank} has {} {rank_has}, the job {job_has}; start the job afresh under \
                     the name, and the switch with the options that it had",
                    field.name()
                );

            /// Two ranks are further apart than one exchange of a slot can bring them (SwitchML §4.5).
            ResumeGap = "resume_gap" {
                /// The rank that completed more exchanges.
                ahead: Rank,
                /// The rank that completed fewer.
                behind: Rank,
                /// The shard of the slot.
                shard: u8,
                /// The slot.
                slot: u16,
            }
                |f| write!(
                    f,
                    "the job cannot be resumed: rank {} is more than one exchange ahead of rank {} in slot {slot} of shard \
                     {shard}; start the job afresh",
                    ahead.0, behind.0
                );

            /// Other ranks did not come in time.
            JoinTimeout = "join_timeout" {
                /// The ranks that did not come.
                missing: Ranks,
            }
                |f| {
                    let (noun, verb) = if missing.len() == 1 { ("rank", "is it") } else { ("ranks", "are they") };
                    write!(f, "{noun} {missing} did not join in time; {verb} running, with the same job name and switch?")
                };

            /// The switch is shutting down.
            SwitchStopping = "switch_stopping"
                |f| f.write_str("the switch is shutting down; start it again (fanin switch)");

            /// The rank's job is to be summed by a protocol that is not served here.
            ProtocolMismatch = "protocol_mismatch" {
                /// What the rank asked for.
                asked: String,
                /// What is served here.
                served: String,
            }
                |f| write!(
                    f,
                    "this process asks for protocol {asked:?}, and the switch serves {served}; set FANIN_PROTOCOL (protocol) to what it \
                     serves on every rank, or start all switches with --protocol {asked}"
                );

            /// A switch on the rank's way holds no packet of the protocol.
            PacketsTooLong = "packets_too_long" {
                /// Elements of the longest packet that it holds.
                elements: u32,
                /// Elements of the shortest packet that there is.
                least: u32,
            }
                |f| write!(
                    f,
                    "a switch on the way holds packets of {elements} elements, and the shortest has {least}; install the same fanin on all switches"
                );

            /// More switches in a row than a packet has bitmaps.
            TooManyLevels = "too_many_levels" {
                /// Levels that the way to the root would need; with ATP the server's own included, if ways meet there.
                levels: u32,
            }
                |f| write!(
                    f,
                    "the ranks' ways to the root have {levels} levels where packets meet, of which there are at most {HOPS_MAX}, \
                     with ATP {LEVELS_MAX}; take switches out of the way"
                );

            /// More ranks and switches behind one switch than a bitmap has bits.
            TooManyChildren = "too_many_children" {
                /// The switch; `None` is the root: ATP's server.
                switch: Option<SocketAddr>,
                /// Ranks of the job and switches behind it.
                children: u32,
            }
                |f| match switch {
                    Some(switch) => write!(
                        f,
                        "{children} ranks and switches of the job are behind switch {switch}, it tells {PLACES_MAX} apart, \
                         with ATP {CHILDREN_MAX}; spread them over more switches"
                    ),
                    None => write!(
                        f,
                        "{children} ranks and switches of the job are at the root itself, it tells {PLACES_MAX} apart, with \
                         ATP {CHILDREN_MAX}; put switches between (fanin switch --upstream)"
                    ),
                };

            /// Two ranks' ways to the server part behind a switch that both lead through: what the switch should wait for does not
            /// add up.
            PathsDisagree = "paths_disagree" {
                /// The rank that found it so.
                rank: u32,
                /// The rank before.
                other_rank: u32,
                /// Where they part.
                switch: SocketAddr,
            }
                |f| write!(
                    f,
                    "the ways of ranks {rank} and {other_rank} to the root part behind switch {switch}, so that what it \
                     waits for does not add up; was it restarted with another --upstream? start the job again"
                );

            /// The ranks met already, and one of them says that it begins: it was started again while they said more, or joined.
            BeganAnew = "began_anew" {
                /// That rank.
                rank: u32,
            }
                |f| write!(
                    f,
                    "rank {rank} was started again while the ranks met or joined, so that all have to meet once more; start \
                     them again, with a longer timeout if that was over"
                );

            /// The ranks say too much to each other before they join.
            WordsTooLong = "words_too_long" {
                /// Bytes that one may say at a time.
                of_rank: u32,
                /// Bytes that all of them may.
                of_job: u32,
            }
                |f| write!(
                    f,
                    "what the ranks say to each other before they join has more than {of_rank} bytes a rank, or {of_job} a job; \
                     use fewer ranks a job, or fewer switches and shorter names of theirs (switch, or FANIN_SWITCH)"
                );
        }
    };
}

macro_rules! define {
    ($(
        $(#[$doc:meta])*
        $variant:ident = $name:literal $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })?
        |$f:ident| $message:expr;
    )*) => {
        /// Why a rank may not join a job.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Refusal {
            $($(#[$doc])* $variant $({ $($(#[$field_doc])* $field: $type,)* })?,)*
        }

        impl Refusal {
            /// Its name in metrics and logs.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => $name,)*
                }
            }
        }

        impl core::fmt::Display for Refusal {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self {
                    $(Self::$variant $({ $($field,)* })? => {
                        let $f = f;
                        $message
                    })*
                }
            }
        }
    };
}

for_each_refusal!(define);

impl Refusal {
    /// A loss bound where nothing can be lost.
    #[must_use]
    pub fn of_bound(asked: LossBound) -> Self {
        let reason = format!(
            "a loss bound of {asked} is for a switch that sums by itself: use one without --upstream and --protocol, or unset \
             FANIN_LOSS_BOUND (loss_bound)"
        );
        Self::Unserved { reason }
    }
}

impl core::error::Error for Refusal {}

/// What ranks that resume a job must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeField {
    /// The generation that was running.
    Generation,
    /// Packets of a rank that may be in flight in a shard: slots, or a window.
    InFlight,
    /// Elements of a chunk.
    Elements,
    /// Shards of the job.
    Shards,
    /// Number of exchange counts in a shard.
    Counts,
}

impl ResumeField {
    /// Its name in a message.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Generation => "generation",
            Self::InFlight => "packets in flight",
            Self::Elements => "elements",
            Self::Shards => "shards",
            Self::Counts => "counts",
        }
    }
}
