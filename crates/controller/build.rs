//! Compiles the control protocol without `protoc`: protox is a compiler of its own.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto/fanin.proto");
    let descriptors = protox::compile(["proto/fanin.proto"], ["proto"])?;
    // Few jobs have it, and no answer is to be as large as it.
    tonic_prost_build::configure().boxed(".fanin.v1.Admission.route").compile_fds(descriptors)?;
    Ok(())
}
