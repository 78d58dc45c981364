//! Compiles the control protocol without `protoc`: protox is a compiler of its own.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/fanin.proto");
    let descriptors = protox::compile(["proto/fanin.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // Few jobs have it, and no answer is to be as large as it.
        .boxed(".fanin.v1.Admission.route")
        // All ranks are told the same.
        .bytes(".fanin.v1.MeetReply.Met.texts")
        .bytes(".fanin.v1.MeetRequest.text")
        .compile_fds(descriptors)?;
    Ok(())
}
