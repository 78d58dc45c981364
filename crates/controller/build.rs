//! Compiles the control protocol without `protoc`: protox is a compiler of its own. Takes in the
//! page that `make build` built, or one that says how to build it.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// What is served where the page was not built.
const NOT_BUILT: &str = "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>fanin</title>\
    <p>This fanin was built without its page, because Node.js was missing. Install Node.js 20 or newer, and run \
    <code>make build</code> again. <code>fanin top</code> shows the same in a terminal.</p></html>\n";

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
    take_in_page(&PathBuf::from(env::var("OUT_DIR")?))?;
    Ok(())
}

fn take_in_page(out: &Path) -> Result<(), Box<dyn Error>> {
    // A folder that is always there: Cargo takes one that is missing for a change.
    let built = Path::new("../../page/dist");
    println!("cargo::rerun-if-changed={}", built.display());
    let files = ["index.html", "page.js", "page.css"];
    let is_built = files.iter().all(|file| built.join(file).exists());
    for file in files {
        match is_built {
            true => drop(fs::copy(built.join(file), out.join(file))?),
            false => fs::write(out.join(file), if file == "index.html" { NOT_BUILT } else { "" })?,
        }
    }
    Ok(())
}
