//! How much memory this process may have.

use std::fs::read_to_string;
use std::path::Path;

/// The memory that is assumed if the machine does not tell how much it has.
const UNKNOWN: usize = 4 << 30;

/// The memory of the machine, or of the control groups that this process is in (version 2), whose
/// limits end it: the least. `root` is where the system's files are.
pub(crate) fn bytes(root: &Path) -> usize {
    let told = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|total| total.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    let of_machine = kilobytes.map_or(UNKNOWN, |kilobytes| kilobytes << 10);
    let told = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group = told.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let limits = Path::new(group).ancestors().filter_map(|group| {
        let limit = read_to_string(root.join("sys/fs/cgroup").join(group).join("memory.max")).ok()?;
        // "max" where there is none.
        limit.trim().parse().ok()
    });
    limits.fold(of_machine, usize::min)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_least_limit_counts_of_the_machine_and_of_all_groups() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        assert_eq!(bytes(root), UNKNOWN);
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("in the root")).expect("made");
            fs::write(path, text).expect("written");
        };
        write("proc/meminfo", "MemFree:  1 kB\nMemTotal:       16384 kB\n");
        assert_eq!(bytes(root), 16 << 20);
        write("proc/self/cgroup", "1:name=systemd:/x\n0::/a/b\n");
        write("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(bytes(root), 16 << 20);
        write("sys/fs/cgroup/a/memory.max", "4194304\n");
        assert_eq!(bytes(root), 4 << 20);
        // As in a container, which sees its own group as the root.
        write("proc/self/cgroup", "0::/\n");
        write("sys/fs/cgroup/memory.max", "2097152\n");
        assert_eq!(bytes(root), 2 << 20);
    }
}
