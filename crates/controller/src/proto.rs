//! The messages of the control protocol, generated from `proto/fanin.proto`: for programs that
//! speak it themselves.
#![allow(missing_docs, reason = "the protocol file is the documentation")]

tonic::include_proto!("fanin.v1");

/// The longest answer: what `Status` says of 256 jobs, of each of which up to 24 KiB are kept that
/// its ranks told. What 64 shards of 16384 slots restore is shorter.
pub(crate) const REPLY_BYTES_MAX: usize = 8 << 20;
