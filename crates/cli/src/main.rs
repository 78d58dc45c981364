//! The `fanin` command for those who install with cargo. The Python package brings the same
//! command, and `fanin run`.

use std::process::ExitCode;

fn main() -> ExitCode {
    fanin_cli::main(std::env::args_os())
}
