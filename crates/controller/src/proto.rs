//! Generated from `proto/fanin.proto`.
#![allow(missing_docs, reason = "the protocol file is the documentation")]

tonic::include_proto!("fanin.v1");
