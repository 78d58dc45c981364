//! The sending half of a connection, for any transport.

use super::pfabric::{PROBE, Pfabric};
use super::sender::{Piece, Sender};
use super::{FlowStatistics, TcpConfig, Transport};
use crate::net::time::Time;

#[derive(Debug)]
pub(crate) enum Sending {
    /// Cumulative acknowledgements move a window.
    Window(Sender),
    /// Each segment is acknowledged for itself.
    Pfabric(Pfabric),
}

impl Sending {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        match config.transport {
            Transport::NewReno | Transport::Dctcp | Transport::Pias { .. } => {
                Self::Window(Sender::new(config))
            }
            Transport::Pfabric => Self::Pfabric(Pfabric::new(config)),
        }
    }

    pub(crate) fn write(&mut self, bytes: u64) {
        match self {
            Self::Window(sender) => sender.write(bytes),
            Self::Pfabric(sender) => sender.write(bytes),
        }
    }

    /// Bytes written.
    pub(crate) const fn end(&self) -> u64 {
        match self {
            Self::Window(sender) => sender.end(),
            Self::Pfabric(sender) => sender.end(),
        }
    }

    pub(crate) fn deadline(&self) -> Option<Time> {
        match self {
            Self::Window(sender) => sender.deadline(),
            Self::Pfabric(sender) => sender.deadline(),
        }
    }

    /// Something of each part of it.
    pub(crate) fn glance(&self) -> u64 {
        match self {
            Self::Window(sender) => sender.glance(),
            Self::Pfabric(sender) => sender.glance(),
        }
    }

    /// The next segment that may be sent now.
    pub(crate) fn poll(&mut self, now: Time, statistics: &mut FlowStatistics) -> Option<Piece> {
        match self {
            Self::Window(sender) => sender.poll(now, statistics),
            Self::Pfabric(sender) => sender.poll(now, statistics),
        }
    }

    /// The rest of the flow that a packet states, if it states one.
    pub(crate) const fn remaining(&self) -> u64 {
        match self {
            Self::Window(_) => 0,
            Self::Pfabric(sender) => sender.remaining(),
        }
    }

    /// The content of the answer to a segment, when everything before `expected` is there.
    pub(crate) const fn answer(&self, sequence: u64, bytes: u32, expected: u64) -> u64 {
        match self {
            Self::Window(_) => expected,
            Self::Pfabric(_) if bytes == 0 => PROBE,
            Self::Pfabric(_) => sequence,
        }
    }

    pub(crate) fn acknowledged(&mut self, now: Time, to: u64, echo: bool, statistics: &mut FlowStatistics) {
        match self {
            Self::Window(sender) => sender.acknowledged(now, to, echo, statistics),
            Self::Pfabric(sender) => sender.acknowledged(to),
        }
    }

    /// Acts on a timeout that has passed.
    pub(crate) fn timeout(&mut self, now: Time, statistics: &mut FlowStatistics) {
        match self {
            Self::Window(sender) => sender.timeout(now, statistics),
            Self::Pfabric(sender) => sender.timeout(now, statistics),
        }
    }
}
