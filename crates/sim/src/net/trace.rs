//! Traces in Chrome's format, as Perfetto opens them: one row a port with what it sends, and the
//! length of its queues.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};

use super::ids::PortId;
use super::packet::{Body, Packet};
use super::time::Time;

pub(crate) struct Trace {
    out: BufWriter<Box<dyn Write>>,
    /// The first one; nothing is written after it.
    failed: Option<io::Error>,
    /// The names of the ports that are traced.
    names: BTreeMap<PortId, String>,
}

impl Trace {
    pub(crate) fn new(out: Box<dyn Write>, mut names: BTreeMap<PortId, String>) -> Self {
        names.values_mut().for_each(|name| *name = escaped(name));
        let mut trace = Self { out: BufWriter::new(out), failed: None, names: BTreeMap::new() };
        trace.write(format_args!(
            "[{{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{{\"name\":\"links\"}}}}"
        ));
        for (port, name) in &names {
            trace.write(format_args!(
                ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{},\"name\":\"thread_name\",\"args\":{{\"name\":\"{name}\"}}}}",
                port.0,
            ));
        }
        Self { names, ..trace }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        if self.failed.is_none() {
            self.failed = self.out.write_fmt(text).err();
        }
    }

    pub(crate) fn transmission(
        &mut self,
        now: Time,
        takes: Time,
        port: PortId,
        packet: &Packet<'_>,
        bytes: u32,
    ) {
        let name = match packet.body {
            Body::Bytes(_) => "packet",
            Body::Blank { .. } => "blank",
            Body::Segment(segment) if segment.is_ack => "ack",
            Body::Segment(_) => "segment",
        };
        self.write(format_args!(
            ",\n{{\"ph\":\"X\",\"pid\":1,\"tid\":{},\"ts\":{},\"dur\":{},\"name\":\"{name}\",\"args\":{{\
             \"from\":{},\"to\":{},\"bytes\":{bytes},\"priority\":{},\"ecn\":{}}}}}",
            port.0,
            Micros(now),
            Micros(takes),
            packet.from.node,
            packet.to.node,
            packet.class.priority,
            packet.ecn_marked,
        ));
    }

    pub(crate) fn queue(&mut self, now: Time, port: PortId, bytes: u64) {
        let Some(name) = self.names.get(&port).filter(|_| self.failed.is_none()) else { return };
        let written = self.out.write_fmt(format_args!(
            ",\n{{\"ph\":\"C\",\"pid\":1,\"ts\":{},\"name\":\"queue, {name}\",\"args\":{{\"bytes\":{bytes}}}}}",
            Micros(now),
        ));
        self.failed = written.err();
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.write(format_args!("]\n"));
        self.failed.take().map_or_else(|| self.out.flush(), Err)
    }
}

/// Chrome's unit, exactly.
struct Micros(Time);

impl std::fmt::Display for Micros {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{:06}", self.0.0 / 1_000_000, self.0.0 % 1_000_000)
    }
}

fn escaped(name: &str) -> String {
    let plain = |c: char| if c.is_control() || c == '"' || c == '\\' { '_' } else { c };
    name.chars().map(plain).collect()
}
