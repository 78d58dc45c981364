//! From which hosts the packets of a job are taken.
//!
//! A machine learns the address of a worker from its packets, for only they show which port a NAT gave it, and when it gives it another. But a
//! packet that was caught on its way can be sent again by anybody, and would have results go to him: so those of a job are taken from the
//! hosts alone that its members registered over the control connection. From there any of them may teach a port, also one that came again:
//! all that a worker has to say may be such packets, when the results were lost that it waits for. (DLCP's server prefers ports from which
//! something new came.)

use crate::train_socket::Peer;
use fanin_wire::{JobId, RANKS_MAX};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Most hosts of a job, the last that were registered: more than it has members, each under two addresses.
const HOSTS_MAX: usize = 2 * RANKS_MAX as usize;

/// The hosts of all jobs of a machine.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    jobs: BTreeMap<JobId, Vec<IpAddr>>,
    /// Whose packet was taken last, for those that follow it in a train.
    last: Option<(JobId, IpAddr)>,
    /// Packets that were not taken.
    pub(crate) foreign: u64,
}

impl Registered {
    /// A member of a job sends from this host. Until the first time its packets are taken from anywhere.
    pub(crate) fn register(&mut self, job: JobId, host: IpAddr) {
        let hosts = self.jobs.entry(job).or_default();
        let host = host.to_canonical();
        if hosts.contains(&host) {
            return;
        }
        if hosts.len() == HOSTS_MAX {
            hosts.remove(0);
        }
        hosts.push(host);
        self.last = None;
    }

    /// A job is over.
    pub(crate) fn forget(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.last = None;
    }

    /// Whether a packet of this job is for the machine, which says itself what else is wrong with it.
    pub(crate) fn takes(&mut self, from: &Peer, job: JobId) -> bool {
        let Peer::At { remote, .. } = from else { return true };
        if self.last == Some((job, remote.ip())) {
            return true;
        }
        let host = remote.ip().to_canonical();
        let is_taken = self.jobs.get(&job).is_none_or(|hosts| hosts.contains(&host));
        if is_taken {
            self.last = Some((job, remote.ip()));
        } else {
            self.foreign += 1;
        }
        is_taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    #[test]
    fn the_packets_of_a_job_are_taken_from_its_members_hosts() {
        let (job, other) = (JobId(1), JobId(2));
        let from = |address: &str| Peer::from(address.parse::<SocketAddr>().unwrap());
        let mut registered = Registered::default();
        assert!(registered.takes(&from("10.0.0.1:7"), job), "nobody is registered");
        registered.register(job, "10.0.0.2".parse().unwrap());
        for (address, job, is_taken) in [
            ("10.0.0.2:7", job, true),
            ("10.0.0.1:7", job, false),
            ("10.0.0.2:8", job, true),
            ("[::ffff:10.0.0.2]:7", job, true),
            ("[::ffff:10.0.0.1]:7", job, false),
            ("10.0.0.1:7", other, true),
            ("10.0.0.1:7", job, false),
        ] {
            assert_eq!(registered.takes(&from(address), job), is_taken, "{address} {job:?}");
        }
        assert_eq!(registered.foreign, 3);
        assert!(registered.takes(&Peer::Guest(0), job));
        registered.forget(job);
        assert!(registered.takes(&from("10.0.0.1:7"), job), "another job");
    }

    #[test]
    fn the_last_hosts_are_kept_of_too_many() {
        let (job, mut registered) = (JobId(1), Registered::default());
        let hosts: Vec<_> = (0..=HOSTS_MAX as u32).map(|host| IpAddr::from(host.to_be_bytes())).collect();
        hosts.iter().for_each(|host| registered.register(job, *host));
        assert_eq!(registered.jobs[&job], hosts[1..]);
    }
}
