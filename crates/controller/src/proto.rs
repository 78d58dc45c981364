//! The messages of the control protocol, generated from `proto/fanin.proto`: for programs that speak it themselves.
#![allow(missing_docs, reason = "the protocol file is the documentation")]

tonic::include_proto!("fanin.v1");
