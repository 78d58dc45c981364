//! What the ranks of a job must agree on.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use fanin_wire::{LossBound, Security, WireDtype};

/// What a rank asks for, and all others must ask for, too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Packets of a rank that may be in flight in a shard, where the user overrides what is computed. A rank that says nothing agrees
    /// with any number.
    pub in_flight: Option<u16>,
    /// How the elements of large float tensors travel.
    pub wire_dtype: WireDtype,
    /// How packets are secured.
    pub security: Security,
    /// What each rank's part of a tensor may lose.
    pub loss_bound: LossBound,
    /// How tensors are cut among the job's services, and which of them this one is: a fingerprint.
    pub plan: u64,
    /// Elements of each part of the model that is planned by itself.
    pub sub_models: Vec<u64>,
}

/// A setting that ranks must agree on.
struct Field {
    /// Its name for people, with where a user says it.
    name: &'static str,
    is_same: fn(&Agreed, &Agreed) -> bool,
    /// Its value for people.
    value: fn(&Agreed) -> String,
}

/// In the order in which they are compared.
const FIELDS: [Field; 6] = [
    Field {
        name: "packets in flight (in_flight, or FANIN_IN_FLIGHT)",
        is_same: |one, other| one.in_flight.zip(other.in_flight).is_none_or(|(one, other)| one == other),
        value: |it| it.in_flight.map_or_else(|| "none".into(), |count| count.to_string()),
    },
    Field {
        name: "wire dtype (wire_dtype, or FANIN_WIRE_DTYPE)",
        is_same: |one, other| one.wire_dtype == other.wire_dtype,
        value: |it| it.wire_dtype.name().into(),
    },
    Field {
        name: "security (security, or FANIN_SECURITY)",
        is_same: |one, other| one.security == other.security,
        value: |it| it.security.name().into(),
    },
    Field {
        name: "loss bound (loss_bound, or FANIN_LOSS_BOUND)",
        is_same: |one, other| one.loss_bound == other.loss_bound,
        value: |it| it.loss_bound.to_string(),
    },
    Field {
        name: "plan: the same switches in the same order (switch, or FANIN_SWITCH)",
        is_same: |one, other| one.plan == other.plan,
        value: |it| format!("{:016x}", it.plan),
    },
    Field {
        name: "sub-models (sub_models, or FANIN_SUB_MODELS)",
        is_same: |one, other| one.sub_models == other.sub_models,
        value: |it| shown(&it.sub_models),
    },
];

/// Most parts of a model that a message lists.
const SHOWN_MAX: usize = 8;

impl Agreed {
    /// The first setting that two ranks do not agree on, and what each has.
    #[must_use]
    pub fn differs(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let field = FIELDS.iter().find(|field| !(field.is_same)(self, other))?;
        Some((field.name, (field.value)(self), (field.value)(other)))
    }
}

fn shown(sub_models: &[u64]) -> String {
    let listed: Vec<String> = sub_models.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
    match sub_models.len() {
        0 => "none".into(),
        count if count > SHOWN_MAX => format!("{} and {} more", listed.join(", "), count - SHOWN_MAX),
        _ => listed.join(", "),
    }
}
