//! Compiles the messages without `protoc`, as `fanin-controller` does.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/parameters.proto");
    let descriptors = protox::compile(["proto/parameters.proto"], ["proto"])?;
    tonic_prost_build::configure()
        // A piece is a part of the worker's delta, and is not copied to be sent.
        .bytes(".fanin.parameters.v1.Delta.values")
        .bytes(".fanin.parameters.v1.Latest.values")
        .compile_fds(descriptors)?;
    Ok(())
}
