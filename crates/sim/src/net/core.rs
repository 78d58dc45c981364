//! The network but for its actors: what an actor's context reaches.

use oorandom::Rand64;

use super::flow::{ConstantRateConfig, Notice, TcpConfig};
use super::ids::{ActorId, FlowId, SimAddress};
use super::queue::Class;
use super::time::Time;

/// See the module.
pub(crate) struct Core {
    pub(crate) now: Time,
    pub(crate) dice: Rand64,
    pub(crate) stopped: bool,
    /// Where machines write their trains.
    pub(crate) train: Vec<u8>,
}

impl Core {
    pub(crate) fn address(&self, _actor: ActorId) -> SimAddress {
        todo!()
    }
    pub(crate) fn send_bytes(&mut self, _from: SimAddress, _to: SimAddress, _class: Class, _payload: &[u8]) {
        todo!()
    }
    pub(crate) fn send_blank(
        &mut self,
        _from: SimAddress,
        _to: SimAddress,
        _class: Class,
        _bytes: u32,
        _tag: u64,
    ) {
        todo!()
    }
    pub(crate) fn wake_at(&mut self, _actor: ActorId, _at: Time, _token: u64) {
        todo!()
    }
    pub(crate) fn notify(&mut self, _notice: Notice) {
        todo!()
    }
    pub(crate) fn open_tcp(&mut self, _config: TcpConfig) -> FlowId {
        todo!()
    }
    pub(crate) fn write(&mut self, _flow: FlowId, _bytes: u64, _arrived: Option<Notice>) {
        todo!()
    }
    pub(crate) fn fill(&mut self, _flow: FlowId) {
        todo!()
    }
    pub(crate) fn start_constant_rate(&mut self, _config: ConstantRateConfig) -> FlowId {
        todo!()
    }
    pub(crate) fn stop_flow(&mut self, _flow: FlowId) {
        todo!()
    }
}
