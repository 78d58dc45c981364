//! The properties of this machine that cost speed whatever the switch, told to a user who did not
//! ask. `fanin doctor` says more.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Once;

use fanin_udp::{SocketProbe, probe_socket};

use crate::output;

/// With less a rank loses packets at 10 Gbit/s (docs/operations.md, socket buffers).
const BUFFER_BYTES_MIN: usize = 1 << 20;

/// Says it on stderr, once a process.
pub fn warn() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Nothing is sent: what the kernel grants here, it grants everywhere.
        let Ok(socket) = probe_socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 9))) else { return };
        for warning in warnings(&socket) {
            output::warning(&warning);
        }
    });
}

fn warnings(socket: &SocketProbe) -> impl Iterator<Item = String> {
    let cuts_and_joins = socket.send_segments_max > 1 && socket.receive_segments_max > 1;
    let offload = (!cuts_and_joins).then(|| {
        "this kernel does not cut or join trains of packets (UDP_SEGMENT, UDP_GRO), so that each packet is a system call, \
         which costs speed; fanin doctor says more"
            .into()
    });
    let (granted, asked) = (socket.receive_buffer_bytes, socket.buffer_bytes_asked);
    let buffer = (granted < BUFFER_BYTES_MIN).then(|| {
        format!(
            "this kernel grants a receive buffer of {} KiB, so that packets may be lost; sudo sysctl -w \
             net.core.rmem_max={asked} net.core.wmem_max={asked}",
            granted >> 10
        )
    });
    offload.into_iter().chain(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_offload_and_small_buffers_are_told_and_what_is_well_is_not() {
        let well = SocketProbe {
            local: ([10, 0, 0, 5], 1).into(),
            buffer_bytes_asked: 16 << 20,
            receive_buffer_bytes: BUFFER_BYTES_MIN,
            send_buffer_bytes: 16 << 20,
            send_segments_max: 64,
            receive_segments_max: 64,
        };
        let told = |socket: SocketProbe| warnings(&socket).collect::<Vec<_>>();
        assert_eq!(told(well), [""; 0]);
        for old in
            [SocketProbe { send_segments_max: 1, ..well }, SocketProbe { receive_segments_max: 1, ..well }]
        {
            let [warning] = &told(old)[..] else { panic!("{:?}", told(old)) };
            assert!(warning.contains("each packet is a system call"), "{warning}");
        }
        let small = SocketProbe { receive_buffer_bytes: 212_992, ..well };
        let [warning] = &told(small)[..] else { panic!("{:?}", told(small)) };
        assert!(warning.contains("208 KiB") && warning.contains("net.core.rmem_max=16777216"), "{warning}");
        assert_eq!(told(SocketProbe { send_segments_max: 1, ..small }).len(), 2);
    }
}
