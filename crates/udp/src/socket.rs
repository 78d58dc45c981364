//! UDP sockets as the drivers want them: sized, and in a switch steered by shard.

use crate::failure::invalid;
use fanin_wire::SHARD_OFFSET;
use rustix::net::sockopt;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Most shards of one driver: each is a thread.
pub const SHARDS_MAX: usize = 64;

/// Buffer asked of the kernel, in bytes, in each direction: eight workers' windows of trains with the kernel's overhead.
pub(crate) const BUFFER_BYTES: usize = 16 << 20;

/// Not in the libc crate on all targets; `include/uapi/asm-generic/socket.h`.
const SO_ATTACH_REUSEPORT_CBPF: libc::c_int = 51;

/// The sockets of a switch, one a shard, all on the same port, and the address that they got.
pub(crate) fn bind(listen: SocketAddr, shards: usize) -> io::Result<(Vec<UdpSocket>, SocketAddr)> {
    check_shards(shards)?;
    let first = new_socket(listen, 1)?;
    // Without SO_REUSEPORT: another switch on this port is an error, not half of its packets.
    first.bind(&listen.into()).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot listen on UDP {listen}: {error}; is a switch running there?"),
        )
    })?;
    let address = local_address(&first)?;
    let mut sockets = vec![first];
    if shards > 1 {
        sockets[0].set_reuse_port(true)?;
        for _ in 1..shards {
            // The kernel numbers the sockets of a port in the order of binding; the filter returns such a number.
            let socket = new_socket(address, 1)?;
            socket.set_reuse_port(true)?;
            socket.bind(&address.into())?;
            sockets.push(socket);
        }
        steer_by_shard(&sockets[0], shards).map_err(|error| {
            let hint = "the kernel refuses to steer packets to shards (SO_ATTACH_REUSEPORT_CBPF)";
            io::Error::new(error.kind(), format!("{hint}: {error}; start the switch with --shards 1"))
        })?;
    }
    Ok((sockets.into_iter().map(UdpSocket::from).collect(), address))
}

/// A worker's socket, one of so many, which share what is asked of the kernel: it hears `switch` alone.
pub(crate) fn connect(switch: SocketAddr, of: usize) -> io::Result<UdpSocket> {
    let socket = new_socket(switch, of)?;
    socket.bind(&unspecified(switch).into())?;
    socket.connect(&switch.into())?;
    Ok(socket.into())
}

/// A worker's socket for several switches: it hears everybody, and its machines take what comes from theirs.
pub(crate) fn open(switches: &[SocketAddr], of: usize) -> io::Result<UdpSocket> {
    let Some(first) = switches.first() else { return Err(invalid("a worker without a switch")) };
    if let Some(other) = switches.iter().find(|switch| switch.is_ipv4() != first.is_ipv4()) {
        return Err(invalid(format!(
            "{first} and {other}: name the switches of a job all by IPv4, or all by IPv6"
        )));
    }
    let socket = new_socket(*first, of)?;
    socket.bind(&unspecified(*first).into())?;
    Ok(socket.into())
}

/// The bytes that an IP packet to `switch` may have, as the kernel knows it now.
///
/// # Errors
/// When there is no route to `switch`.
pub fn path_mtu(switch: SocketAddr) -> io::Result<usize> {
    let socket = UdpSocket::bind(unspecified(switch))?;
    socket.connect(switch)?;
    let mtu = match switch {
        SocketAddr::V4(_) => sockopt::ip_mtu(&socket)?,
        SocketAddr::V6(_) => sockopt::ipv6_mtu(&socket)?,
    };
    Ok(mtu as usize)
}

/// The round trip of a TCP connection's handshake, as the kernel measured it: what this process waited for a core is not
/// in it.
///
/// # Errors
/// When `stream` is no TCP socket.
pub fn handshake_round_trip(stream: &impl AsRawFd) -> io::Result<Duration> {
    // SAFETY: a `tcp_info` is numbers alone, and zeros are one.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut bytes = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, all of which `info` has, and reports in `bytes` how many.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 {
        Ok(Duration::from_micros(info.tcpi_rtt.into()))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether half of a socket's buffer is taken: of what came and was not read yet, or of what was sent and has not left this machine.
pub(crate) fn is_half_full(socket: &impl AsRawFd, direction: Direction) -> bool {
    let mut memory = [0u32; MEMORY_VALUES];
    let mut bytes = size_of_val(&memory) as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes, all of which `memory` has, and reports in `bytes` how many.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            memory.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    let at = direction as usize;
    result == 0 && memory[at] > memory[at + 1] / 2
}

/// Where the kernel says how much of a buffer is taken; how much it holds stands behind (`SO_MEMINFO`, `include/uapi/linux/sock_diag.h`).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    In = 0,
    Out = 2,
}

/// Of `SO_MEMINFO`.
const MEMORY_VALUES: usize = 9;

/// The receive buffer that the kernel granted, in bytes.
pub(crate) fn receive_buffer_bytes(socket: &impl AsFd) -> io::Result<usize> {
    // The kernel doubles what it grants, for its own overhead, and reports the double (socket(7)).
    Ok(sockopt::socket_recv_buffer_size(socket)? / 2)
}

/// Sets a socket option of type int.
pub(crate) fn set_int_option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    set_option(socket, level, name, &value)
}

pub(crate) fn check_shards(shards: usize) -> io::Result<()> {
    if shards == 0 || shards > SHARDS_MAX {
        let message = format!("{shards} shards: a driver has 1 to {SHARDS_MAX}");
        return Err(invalid(message));
    }
    Ok(())
}

fn new_socket(peer: SocketAddr, of: usize) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(peer), Type::DGRAM, Some(Protocol::UDP))?;
    let bytes = BUFFER_BYTES / of.max(1);
    // What the kernel grants less is no error: the owner reads it back and sizes its windows by it.
    if sockopt::set_socket_recv_buffer_size_force(&socket, bytes).is_err() {
        socket.set_recv_buffer_size(bytes)?;
    }
    if set_int_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes as libc::c_int).is_err() {
        socket.set_send_buffer_size(bytes)?;
    }
    Ok(socket)
}

fn local_address(socket: &Socket) -> io::Result<SocketAddr> {
    socket.local_addr()?.as_socket().ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

const fn unspecified(peer: SocketAddr) -> SocketAddr {
    match peer {
        SocketAddr::V4(_) => SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        SocketAddr::V6(_) => SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
    }
}

/// Makes the kernel hand each datagram to the socket that its shard byte numbers. A datagram that is too short for the
/// byte, or names no shard, goes to the first, whose machine drops and counts it.
fn steer_by_shard(socket: &Socket, shards: usize) -> io::Result<()> {
    let statement = |code: u32, k: usize| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k: k as u32 };
    let mut filter = [
        // A load beyond the end of the datagram ends the program with 0.
        statement(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, SHARD_OFFSET),
        libc::sock_filter { jt: 1, ..statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, shards) },
        statement(libc::BPF_RET | libc::BPF_A, 0),
        statement(libc::BPF_RET | libc::BPF_K, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, &program)
}

fn set_option<T>(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`, which outlives the call; the kernel copies from it (and from the
    // filter that a sock_fprog points to, which outlives it in the caller) and keeps no reference.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    #[test]
    fn datagrams_go_to_the_socket_that_their_shard_byte_numbers() {
        let (sockets, address) = bind(LOOPBACK, 3).unwrap();
        let sender = connect(address, 1).unwrap();
        let of_shard = |shard: u8| {
            let mut datagram = [0xa5; SHARD_OFFSET + 1];
            datagram[SHARD_OFFSET] = shard;
            datagram
        };
        for (datagram, socket) in [
            (&of_shard(0)[..], 0),
            (&of_shard(1), 1),
            (&of_shard(2), 2),
            (&of_shard(3), 0),
            (&[7; 3], 0),
            (&[], 0),
        ] {
            sender.send(datagram).unwrap();
            let mut buffer = [0; 64];
            let n = sockets[socket].recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..n], datagram);
        }
    }

    #[test]
    fn a_port_with_a_switch_on_it_is_refused() {
        for shards in [1, 2] {
            let (_sockets, address) = bind(LOOPBACK, shards).unwrap();
            for again in [1, 2] {
                assert_eq!(bind(address, again).unwrap_err().kind(), io::ErrorKind::AddrInUse);
            }
        }
    }

    #[test]
    fn shards_have_a_limit() {
        assert_eq!(bind(LOOPBACK, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(bind(LOOPBACK, SHARDS_MAX + 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_loopback_takes_more_than_an_ethernet_frame() {
        assert!(path_mtu(SocketAddr::from((Ipv4Addr::LOCALHOST, 9))).unwrap() > 1500);
    }

    #[test]
    fn the_kernel_knows_the_round_trip_of_a_handshake_and_not_that_of_a_datagram() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(handshake_round_trip(&stream).unwrap() > Duration::ZERO);
        assert!(handshake_round_trip(&UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).is_err());
    }
}
