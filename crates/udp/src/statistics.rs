//! What became of trains and system calls.

/// Counters of one socket, or of all sockets of a driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStatistics {
    /// Trains that the kernel delivered; without `UDP_GRO` each is one packet.
    pub trains_received: u64,
    /// Packets in them.
    pub packets_received: u64,
    /// Bytes in these, without headers of IP and UDP.
    pub bytes_received: u64,
    /// Trains that the kernel took; without `UDP_SEGMENT` each is one packet.
    pub trains_sent: u64,
    /// Packets in them.
    pub packets_sent: u64,
    /// Bytes in these, likewise.
    pub bytes_sent: u64,
    /// Packets that the kernel did not take: the socket stayed full, or refused them. The protocol sends them again.
    pub packets_given_up: u64,
    /// ICMP errors, such as a port on which nobody listens.
    pub unreachable: u64,
    /// Trains that the kernel refused because their packets are longer than the interface carries: its MTU has fallen.
    pub too_long: u64,
    /// System calls that failed in any other way.
    pub failed: u64,
    /// Packets of secured jobs that came and are not authentic.
    pub forged: u64,
    /// Times that the thread went to sleep.
    pub sleeps: u64,
}

impl std::ops::AddAssign for IoStatistics {
    fn add_assign(&mut self, other: Self) {
        self.trains_received += other.trains_received;
        self.packets_received += other.packets_received;
        self.bytes_received += other.bytes_received;
        self.trains_sent += other.trains_sent;
        self.packets_sent += other.packets_sent;
        self.bytes_sent += other.bytes_sent;
        self.packets_given_up += other.packets_given_up;
        self.unreachable += other.unreachable;
        self.too_long += other.too_long;
        self.failed += other.failed;
        self.forged += other.forged;
        self.sleeps += other.sleeps;
    }
}
