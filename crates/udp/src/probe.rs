//! What a diagnosis asks of this room: what the machine gives a worker's socket, and an all-reduce that owns its tensor.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use fanin_wire::{Dtype, Op};
use quinn_udp::UdpSocketState;
use rustix::net::sockopt;

use crate::socket::{BUFFER_BYTES, connect, receive_buffer_bytes};
use crate::{Failure, RawTensor, Submission, WorkerDriver};

/// What the kernel gave a worker's socket. Buffers are in bytes of payload, of which the kernel keeps the double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketProbe {
    /// The address that the kernel sends from.
    pub local: SocketAddr,
    /// What is asked for, in each direction.
    pub buffer_bytes_asked: usize,
    /// What was granted for receiving.
    pub receive_buffer_bytes: usize,
    /// What was granted for sending.
    pub send_buffer_bytes: usize,
    /// Packets that one system call sends (`UDP_SEGMENT`); 1 where the kernel cannot.
    pub send_segments_max: usize,
    /// Packets that one buffer receives (`UDP_GRO`); 1 where the kernel cannot.
    pub receive_segments_max: usize,
}

/// Opens a socket as a worker of `switch` does, and reads back what it got. Nothing is sent.
///
/// # Errors
/// When there is no route to `switch`, or the kernel gives no socket.
pub fn probe_socket(switch: SocketAddr) -> io::Result<SocketProbe> {
    let socket = connect(switch, 1)?;
    let state = UdpSocketState::new((&socket).into())?;
    Ok(SocketProbe {
        local: socket.local_addr()?,
        buffer_bytes_asked: BUFFER_BYTES,
        receive_buffer_bytes: receive_buffer_bytes(&socket)?,
        // Doubled like the receive buffer (socket(7)).
        send_buffer_bytes: sockopt::socket_send_buffer_size(&socket)? / 2,
        send_segments_max: state.max_gso_segments(),
        receive_segments_max: state.gro_segments(),
    })
}

impl WorkerDriver {
    /// As [`Self::submit`], of a tensor that nobody else owns: `done` gets it back with the sums.
    pub fn submit_owned(
        &self,
        mut tensor: Vec<f32>,
        op: Op,
        done: impl FnOnce(Result<Vec<f32>, Failure>) + Send + 'static,
    ) {
        // SAFETY: the memory belongs to the closure below, which neither reads nor frees it before it is called, and that is
        // when no thread of the driver can reach the tensor any more. Moving the vector does not move the memory.
        let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Float32) };
        match raw {
            Ok(raw) => {
                let done = move |result: Result<_, _>| done(result.map(|_| tensor));
                self.submit(Submission::all_reduce(raw, op), Box::new(done));
            }
            Err(error) => done(Err(Failure::Because(Arc::new(error)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_says_what_it_got() {
        let probe = probe_socket(([127, 0, 0, 1], 9).into()).unwrap();
        assert!(probe.local.ip().is_loopback());
        assert!(probe.receive_buffer_bytes > 0 && probe.receive_buffer_bytes <= probe.buffer_bytes_asked);
        assert!(probe.send_segments_max >= 1 && probe.receive_segments_max >= 1);
    }
}
