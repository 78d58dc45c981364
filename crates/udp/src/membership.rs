//! A job as one of its workers was admitted to it, whatever its protocol.

use crate::Offload;
use crate::io_thread::HostThreads;
use crate::part::Part;
use crate::protocol::OnSockets;
use crate::train_socket::Peer;
use crate::worker_driver::{Service, WorkerDriver};
use fanin_protocol::control::Agreed;
use fanin_protocol::{Machines, RetransmissionConfig, WorkerTerms};
use fanin_wire::{Dtype, Generation, JobId, Key};
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

/// A rank's terms in a job of any protocol, with the machines that follow them.
///
/// Calls through it are by job or by collective. The threads that it starts run one protocol's machines, and know no other.
#[derive(Clone)]
pub struct Membership {
    protocol: &'static dyn OnSockets,
    terms: Arc<dyn AnyTerms>,
}

/// Terms of a protocol.
struct Of<P: Machines<Peer, Part>>(P::Terms);

/// [`WorkerTerms`] of any protocol.
trait AnyTerms: Send + Sync {
    fn terms(&self) -> &dyn Any;
    fn identity(&self) -> (JobId, Key, Generation);
    fn check(&self) -> Result<(), String>;
    fn in_flight(&self) -> u16;
    fn elements(&self) -> u16;
    fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize;
    fn paths(&self) -> u8;
    fn has_roots(&self) -> bool;
    fn has_participants(&self) -> bool;
    fn lacks(&self, asked: &Agreed, paths: u8) -> Option<String>;
    fn shape(&self) -> String;
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
    fn equals(&self, other: &Membership) -> bool;
    fn launch(
        &self,
        services: Vec<Service>,
        host: Option<&HostThreads>,
        offload: Offload,
        retransmission: RetransmissionConfig,
    ) -> io::Result<WorkerDriver>;
}

impl<P: Machines<Peer, Part>> AnyTerms for Of<P> {
    fn terms(&self) -> &dyn Any {
        &self.0
    }

    fn identity(&self) -> (JobId, Key, Generation) {
        self.0.identity()
    }

    fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    fn in_flight(&self) -> u16 {
        self.0.in_flight()
    }

    fn elements(&self) -> u16 {
        self.0.elements()
    }

    fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize {
        self.0.packet_elements(dtype, elements)
    }

    fn paths(&self) -> u8 {
        self.0.paths()
    }

    fn has_roots(&self) -> bool {
        self.0.has_roots()
    }

    fn has_participants(&self) -> bool {
        self.0.has_participants()
    }

    fn lacks(&self, asked: &Agreed, paths: u8) -> Option<String> {
        self.0.lacks(asked, paths)
    }

    fn shape(&self) -> String {
        self.0.shape()
    }

    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }

    fn equals(&self, other: &Membership) -> bool {
        other.terms::<P::Terms>() == Some(&self.0)
    }

    fn launch(
        &self,
        services: Vec<Service>,
        host: Option<&HostThreads>,
        offload: Offload,
        retransmission: RetransmissionConfig,
    ) -> io::Result<WorkerDriver> {
        WorkerDriver::launch::<P>(services, host, offload, retransmission)
    }
}

impl Membership {
    /// The membership of a rank in a job of `P`, by its terms.
    #[must_use]
    pub fn of<P: Machines<Peer, Part>>(protocol: &'static P, terms: P::Terms) -> Self {
        Self { protocol, terms: Arc::new(Of::<P>(terms)) }
    }

    /// The protocol.
    #[must_use]
    pub fn protocol(&self) -> &'static dyn OnSockets {
        self.protocol
    }

    /// The terms, where they are of this type: a protocol's own.
    #[must_use]
    pub fn terms<W: WorkerTerms>(&self) -> Option<&W> {
        self.terms.terms().downcast_ref()
    }

    /// The job's id.
    #[must_use]
    pub fn id(&self) -> JobId {
        self.terms.identity().0
    }

    /// The key that its packets are tagged with.
    #[must_use]
    pub fn key(&self) -> Key {
        self.terms.identity().1
    }

    /// The secret by which a rank shows that it is of this job.
    #[must_use]
    pub fn identity(&self) -> (JobId, Key) {
        (self.id(), self.key())
    }

    /// How often it was set up again.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.terms.identity().2
    }

    /// Packets of a worker that may be in flight, in a shard: slots, a window, or flows.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.terms.in_flight()
    }

    /// Elements of a full packet, as the protocol counts them.
    #[must_use]
    pub fn elements(&self) -> u16 {
        self.terms.elements()
    }

    /// Whether it has collectives other than all-reduces.
    #[must_use]
    pub fn has_roots(&self) -> bool {
        self.terms.has_roots()
    }

    /// Whether a part of the ranks can sum alone.
    #[must_use]
    pub fn has_participants(&self) -> bool {
        self.terms.has_participants()
    }

    /// A wish of the rank that the job lacks, for people.
    #[must_use]
    pub fn lacks(&self, asked: &Agreed, paths: u8) -> Option<String> {
        self.terms.lacks(asked, paths)
    }

    /// Paths that its packets take: source ports.
    #[must_use]
    pub fn paths(&self) -> u8 {
        self.terms.paths()
    }

    /// Elements that one packet carries, of a tensor of `elements` elements.
    pub(crate) fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize {
        self.terms.packet_elements(dtype, elements)
    }

    /// Whether the job can have several services.
    pub(crate) fn is_divided(&self) -> bool {
        self.protocol.is_divided()
    }

    /// Whether every number is within its limit.
    pub(crate) fn check(&self) -> io::Result<()> {
        self.terms.check().map_err(crate::failure::invalid)
    }

    /// The terms that a job keeps under another service.
    pub(crate) fn shape(&self) -> String {
        self.terms.shape()
    }

    /// Starts the worker of a job that has these services, which are all of its protocol.
    pub(crate) fn launch(
        &self,
        services: Vec<Service>,
        host: Option<&HostThreads>,
        offload: Offload,
        retransmission: RetransmissionConfig,
    ) -> io::Result<WorkerDriver> {
        self.terms.launch(services, host, offload, retransmission)
    }
}

impl PartialEq for Membership {
    fn eq(&self, other: &Self) -> bool {
        self.terms.equals(other)
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.terms.fmt(f)
    }
}
