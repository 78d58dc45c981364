//! Compiles the control protocol without `protoc`: protox is a compiler of its own.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/fanin.proto");
    let descriptors = protox::compile(["proto/fanin.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
