//! The identity of a machine: which ranks are on one.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// Names the machine that this process is on, as far as shared memory goes. Two processes with the
/// same name have the same kernel, network namespace, /dev/shm and user. Namespaces of one computer
/// are machines of their own, as are containers that share no /dev/shm.
#[must_use]
pub fn machine_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    // Without /proc, only processes that see the same of the rest are on one machine with us.
    let boot = boot.as_deref().unwrap_or("unknown").trim().to_owned();
    let identity = |path: &str| {
        fs::metadata(path)
            .map_or_else(|_| "none".into(), |status| format!("{:x}:{:x}", status.dev(), status.ino()))
    };
    let user = rustix::process::geteuid().as_raw();
    format!("{boot}/net={}/shm={}/user={user}", identity("/proc/self/ns/net"), identity("/dev/shm"))
}
