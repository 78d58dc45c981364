//! The protocols that there are: the one list of them. Rooms outside get a protocol from here, by
//! name or as what a service serves.

use fanin_protocol::atp::Atp;
use fanin_protocol::dlcp::Dlcp;
use fanin_protocol::goat::Goat;
use fanin_protocol::switchml::SwitchMl;
use fanin_udp::{Alone, OnSockets, Serving, Together};
use fanin_wire::LossBound;

use crate::goat_planner::planner;

static GOAT: Goat = Goat { planner: Some(planner) };

/// What a service can serve, the usual one first. Jobs of those that are together are told apart by
/// what their ranks ask for.
pub static ALL: [&dyn Serving; 3] = [&Together(&SwitchMl, &Dlcp), &Alone(&Atp), &Alone(&GOAT)];

/// The protocol that jobs have unless somebody asks for another.
#[must_use]
pub fn usual() -> &'static dyn OnSockets {
    ALL[0].protocols()[0]
}

/// The protocol of this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static dyn OnSockets> {
    ALL.iter().flat_map(|served| served.protocols()).find(|protocol| protocol.name() == name)
}

/// What a service serves that is asked to serve this protocol.
#[must_use]
pub fn served(protocol: &dyn OnSockets) -> Option<&'static dyn Serving> {
    ALL.iter().copied().find(|served| served.protocols().iter().any(|other| other.name() == protocol.name()))
}

/// The protocol that a job has whose ranks ask for this one, and let such a part of their tensors
/// be lost: one that may lose something, where the same services serve one.
#[must_use]
pub fn with_bound(asked: &'static dyn OnSockets, bound: LossBound) -> &'static dyn OnSockets {
    if bound == LossBound::RELIABLE {
        return asked;
    }
    let beside = served(asked).map(Serving::protocols).unwrap_or_default();
    beside.into_iter().find(|protocol| protocol.may_lose()).unwrap_or(asked)
}

/// Whether a service whose usual protocol is `usual` serves one of the name `asked`.
#[must_use]
pub fn serves(usual: &str, asked: &dyn OnSockets) -> bool {
    usual == asked.name() || served(asked).is_some_and(|served| served.protocols()[0].name() == usual)
}

/// The names of all protocols, for people: "switchml, dlcp, atp or goat".
#[must_use]
pub fn names() -> String {
    let names: Vec<_> =
        ALL.iter().flat_map(|served| served.protocols()).map(|protocol| protocol.name()).collect();
    let (last, others) = names.split_last().expect("there are some");
    format!("{} or {last}", others.join(", "))
}

/// What a service says that it serves, as far as it is known here; else the usual one.
#[must_use]
pub fn said(name: &str) -> &'static dyn OnSockets {
    named(name).unwrap_or_else(usual)
}
