//! Between the control protocol's messages and the types of the rooms below. What comes from the
//! network is checked here.

use std::net::SocketAddr;

use fanin_protocol::control::{self, Ranks, Refusal, ResumeField, is_unprintable};
use fanin_wire::{
    AbortReason, Collective, Key, LossBound, Op, Pattern, RANKS_MAX, Rank, Security, WireDtype, WorkerId,
};

use crate::error::ChainError;
use crate::proto;
use crate::proto::collective::Root;

/// A message that no fanin sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", control::Malformed(.0))]
pub struct Malformed(pub &'static str);

impl From<control::Malformed> for Malformed {
    fn from(control::Malformed(field): control::Malformed) -> Self {
        Self(field)
    }
}

impl From<Malformed> for String {
    fn from(malformed: Malformed) -> Self {
        malformed.to_string()
    }
}

/// A number as the type that the rooms below use.
pub(crate) fn narrow<T: TryFrom<u32>>(value: u32, field: &'static str) -> Result<T, Malformed> {
    Ok(control::narrow(value, field)?)
}

/// What somebody else wrote, for a person: what would not be seen, or would change how the rest is,
/// is written out.
pub(crate) fn shown(text: String) -> String {
    if !text.chars().any(is_unprintable) {
        return text;
    }
    let written = |c: char| if is_unprintable(c) { c.escape_unicode().to_string() } else { c.to_string() };
    text.chars().map(written).collect()
}

/// A job's name where another service sums in the place of this one of its services.
pub(crate) fn substitute(job: &str, service: usize) -> String {
    format!("{job}~{service}")
}

/// The name of the whole job, also by that of a [`substitute`].
pub(crate) fn whole(name: &str) -> &str {
    match name.rsplit_once('~') {
        Some((whole, part)) if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) => whole,
        _ => name,
    }
}

/// The key of a job as it came.
pub(crate) fn key(bytes: &[u8]) -> Result<Key, Malformed> {
    Key::from_bytes(bytes).ok_or(Malformed("key"))
}

/// A rank as it came.
pub(crate) fn rank(rank: u32) -> Result<Rank, Malformed> {
    let rank = narrow(rank, "rank").map(Rank)?;
    if u32::from(rank.0) < RANKS_MAX { Ok(rank) } else { Err(Malformed("rank")) }
}

/// A loss bound as it came.
pub(crate) fn loss_bound(millionths: u32) -> Result<LossBound, Malformed> {
    LossBound::from_millionths(millionths).ok_or(Malformed("loss_bound_millionths"))
}

/// A set of ranks as it came.
pub(crate) fn ranks(words: &[u64], field: &'static str) -> Result<Ranks, Malformed> {
    Ranks::from_words(words).ok_or(Malformed(field))
}

impl From<(u32, Vec<u8>)> for proto::Setting {
    fn from((number, value): (u32, Vec<u8>)) -> Self {
        Self { number, value }
    }
}

impl From<WireDtype> for proto::WireDtype {
    fn from(wire_dtype: WireDtype) -> Self {
        match wire_dtype {
            WireDtype::SharedExponent => Self::SharedExponent,
            WireDtype::Bfloat16 => Self::Bfloat16,
            WireDtype::Native => Self::Native,
            WireDtype::Int8 => Self::Int8,
            WireDtype::Int4 => Self::Int4,
        }
    }
}

/// A wire dtype as it came: a number that we do not know must not be taken for the default.
pub(crate) fn wire_dtype(number: i32) -> Result<WireDtype, Malformed> {
    match proto::WireDtype::try_from(number).map_err(|_| Malformed("wire_dtype"))? {
        proto::WireDtype::SharedExponent => Ok(WireDtype::SharedExponent),
        proto::WireDtype::Bfloat16 => Ok(WireDtype::Bfloat16),
        proto::WireDtype::Native => Ok(WireDtype::Native),
        proto::WireDtype::Int8 => Ok(WireDtype::Int8),
        proto::WireDtype::Int4 => Ok(WireDtype::Int4),
    }
}

impl From<Security> for proto::Security {
    fn from(security: Security) -> Self {
        match security {
            Security::Tag => Self::Tag,
            Security::Authenticate => Self::Authenticate,
            Security::Encrypt => Self::Encrypt,
        }
    }
}

/// How packets are secured, as it came: a number that we do not know must not be taken for the
/// weakest.
pub(crate) fn security(number: i32) -> Result<Security, Malformed> {
    match proto::Security::try_from(number).map_err(|_| Malformed("security"))? {
        proto::Security::Tag => Ok(Security::Tag),
        proto::Security::Authenticate => Ok(Security::Authenticate),
        proto::Security::Encrypt => Ok(Security::Encrypt),
    }
}

/// A refusal as a rank gets it: from the registry that admits jobs, or from a switch on the way
/// there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Registry(Refusal),
    Chain(ChainError),
}

impl From<ChainError> for proto::Refusal {
    fn from(error: ChainError) -> Self {
        use proto::refusal as message;
        use proto::refusal::Reason;
        let reason = match error {
            ChainError::UpstreamUnreachable { switch, upstream, cause, may_come } => {
                Reason::UpstreamUnreachable(message::UpstreamUnreachable {
                    switch,
                    upstream,
                    cause,
                    may_come,
                })
            }
            ChainError::Loop { switch } => Reason::SwitchLoop(message::SwitchLoop { switch }),
            ChainError::RouteMismatch { switch, upstream, cause } => {
                Reason::RouteMismatch(message::RouteMismatch { switch, upstream, cause })
            }
        };
        Self { reason: Some(reason) }
    }
}

impl TryFrom<proto::Refusal> for Refused {
    type Error = Malformed;

    fn try_from(refusal: proto::Refusal) -> Result<Self, Malformed> {
        use proto::refusal::Reason;
        Ok(Self::Chain(match refusal.reason {
            Some(Reason::UpstreamUnreachable(m)) => ChainError::UpstreamUnreachable {
                switch: m.switch,
                upstream: m.upstream,
                cause: m.cause,
                may_come: m.may_come,
            },
            Some(Reason::SwitchLoop(m)) => ChainError::Loop { switch: m.switch },
            Some(Reason::RouteMismatch(m)) => {
                ChainError::RouteMismatch { switch: m.switch, upstream: m.upstream, cause: m.cause }
            }
            reason => return Refusal::try_from(proto::Refusal { reason }).map(Self::Registry),
        }))
    }
}

/// A field of a refusal, and what the message has in its stead.
trait Field: Sized {
    type Message;
    fn to_message(self) -> Self::Message;
    fn from_message(message: Self::Message, name: &'static str) -> Result<Self, Malformed>;
}

macro_rules! number_field {
    ($($type:ty)*) => {$(
        impl Field for $type {
            type Message = u32;

            fn to_message(self) -> u32 {
                u32::try_from(self).unwrap_or(u32::MAX)
            }

            fn from_message(message: u32, name: &'static str) -> Result<Self, Malformed> {
                narrow(message, name)
            }
        }
    )*};
}
number_field!(u8 u16 u32 usize);

impl Field for Rank {
    type Message = u32;

    fn to_message(self) -> u32 {
        self.0.into()
    }

    fn from_message(message: u32, _: &'static str) -> Result<Self, Malformed> {
        rank(message)
    }
}

impl Field for Ranks {
    type Message = Vec<u64>;

    fn to_message(self) -> Vec<u64> {
        self.words().to_vec()
    }

    fn from_message(message: Vec<u64>, name: &'static str) -> Result<Self, Malformed> {
        ranks(&message, name)
    }
}

impl Field for String {
    type Message = Self;

    fn to_message(self) -> Self {
        self
    }

    /// It is shown to people.
    fn from_message(message: Self, _: &'static str) -> Result<Self, Malformed> {
        Ok(shown(message))
    }
}

impl Field for Box<str> {
    type Message = String;

    fn to_message(self) -> String {
        self.into()
    }

    fn from_message(message: String, name: &'static str) -> Result<Self, Malformed> {
        String::from_message(message, name).map(Self::from)
    }
}

impl Field for ResumeField {
    type Message = i32;

    fn to_message(self) -> i32 {
        proto::refusal::resume_mismatch::Field::from(self).into()
    }

    fn from_message(message: i32, _: &'static str) -> Result<Self, Malformed> {
        let field = proto::refusal::resume_mismatch::Field::try_from(message);
        field.unwrap_or_default().try_into()
    }
}

impl Field for SocketAddr {
    type Message = String;

    fn to_message(self) -> String {
        self.to_string()
    }

    fn from_message(message: String, name: &'static str) -> Result<Self, Malformed> {
        message.parse().map_err(|_| Malformed(name))
    }
}

impl Field for Option<SocketAddr> {
    type Message = String;

    fn to_message(self) -> String {
        self.map(SocketAddr::to_message).unwrap_or_default()
    }

    fn from_message(message: String, name: &'static str) -> Result<Self, Malformed> {
        (!message.is_empty()).then(|| SocketAddr::from_message(message, name)).transpose()
    }
}

macro_rules! refusal_messages {
    ($(
        $(#[$doc:meta])*
        $variant:ident = $name:literal $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })?
        |$f:ident| $message:expr;
    )*) => {
        impl From<Refusal> for proto::Refusal {
            fn from(refusal: Refusal) -> Self {
                use proto::refusal::{self as message, Reason};
                let reason = match refusal {
                    $(Refusal::$variant $({ $($field,)* })? => {
                        Reason::$variant(message::$variant { $($($field: $field.to_message(),)*)? })
                    })*
                };
                Self { reason: Some(reason) }
            }
        }

        impl TryFrom<proto::Refusal> for Refusal {
            type Error = Malformed;

            fn try_from(refusal: proto::Refusal) -> Result<Self, Malformed> {
                use proto::refusal::{self as message, Reason};
                Ok(match refusal.reason.ok_or(Malformed("reason"))? {
                    $(Reason::$variant(message::$variant { $($($field,)*)? }) => {
                        Self::$variant $({ $($field: Field::from_message($field, stringify!($field))?,)* })?
                    })*
                    Reason::UpstreamUnreachable(_) | Reason::SwitchLoop(_) | Reason::RouteMismatch(_) => {
                        return Err(Malformed("reason"));
                    }
                })
            }
        }
    };
}

fanin_protocol::for_each_refusal!(refusal_messages);

impl From<ResumeField> for proto::refusal::resume_mismatch::Field {
    fn from(field: ResumeField) -> Self {
        match field {
            ResumeField::Generation => Self::Generation,
            ResumeField::InFlight => Self::InFlight,
            ResumeField::Elements => Self::Elements,
            ResumeField::Shards => Self::Shards,
            ResumeField::Counts => Self::Counts,
        }
    }
}

impl TryFrom<proto::refusal::resume_mismatch::Field> for ResumeField {
    type Error = Malformed;

    fn try_from(field: proto::refusal::resume_mismatch::Field) -> Result<Self, Malformed> {
        use proto::refusal::resume_mismatch::Field;
        Ok(match field {
            Field::Unspecified => return Err(Malformed("field")),
            Field::Generation => Self::Generation,
            Field::InFlight => Self::InFlight,
            Field::Elements => Self::Elements,
            Field::Shards => Self::Shards,
            Field::Counts => Self::Counts,
        })
    }
}

impl From<AbortReason> for proto::AbortReason {
    fn from(reason: AbortReason) -> Self {
        use proto::abort_reason::{LossBounds, Mismatch, Participants, Reason, SwitchStopped};
        let reason = match reason {
            AbortReason::Expelled(rank) => Reason::Expelled(rank.0.into()),
            AbortReason::Mismatch { first, second } => Reason::Mismatch(Mismatch {
                first_rank: first.0.0.into(),
                first: Some(first.1.into()),
                second_rank: second.0.0.into(),
                second: Some(second.1.into()),
            }),
            AbortReason::SwitchStopped => Reason::SwitchStopped(SwitchStopped {}),
            AbortReason::LossBounds { first, second } => Reason::LossBounds(LossBounds {
                first_rank: first.0.0.into(),
                first: first.1.millionths(),
                second_rank: second.0.0.into(),
                second: second.1.millionths(),
            }),
            AbortReason::Participants { first, second } => Reason::Participants(Participants {
                first_rank: first.0.into(),
                second_rank: second.0.into(),
            }),
        };
        Self { reason: Some(reason) }
    }
}

impl TryFrom<proto::AbortReason> for AbortReason {
    type Error = Malformed;

    fn try_from(reason: proto::AbortReason) -> Result<Self, Malformed> {
        use proto::abort_reason::Reason;
        let collective =
            |message: Option<proto::Collective>| message.ok_or(Malformed("collective"))?.try_into();
        Ok(match reason.reason.ok_or(Malformed("reason"))? {
            Reason::Expelled(number) => Self::Expelled(rank(number)?),
            Reason::Mismatch(m) => Self::Mismatch {
                first: (rank(m.first_rank)?, collective(m.first)?),
                second: (rank(m.second_rank)?, collective(m.second)?),
            },
            Reason::SwitchStopped(_) => Self::SwitchStopped,
            Reason::Participants(m) => {
                Self::Participants { first: rank(m.first_rank)?, second: rank(m.second_rank)? }
            }
            Reason::LossBounds(m) => {
                let bound = |millionths| LossBound::from_millionths(millionths).ok_or(Malformed("bound"));
                Self::LossBounds {
                    first: (rank(m.first_rank)?, bound(m.first)?),
                    second: (rank(m.second_rank)?, bound(m.second)?),
                }
            }
        })
    }
}

impl From<Collective> for proto::Collective {
    fn from(collective: Collective) -> Self {
        let op = match collective.op {
            Op::Sum => proto::collective::Op::Sum,
            Op::Average => proto::collective::Op::Average,
        };
        Self {
            sequence: collective.sequence.into(),
            dtype: collective.dtype.name().into(),
            op: op.into(),
            elements: collective.elements,
            wire_dtype: proto::WireDtype::from(collective.wire_dtype).into(),
            root: match collective.pattern {
                Pattern::AllReduce => None,
                Pattern::Reduce(root) => Some(Root::ReducedTo(root.0.into())),
                Pattern::Broadcast(root) => Some(Root::BroadcastFrom(root.0.into())),
            },
        }
    }
}

impl TryFrom<proto::Collective> for Collective {
    type Error = Malformed;

    fn try_from(message: proto::Collective) -> Result<Self, Malformed> {
        Ok(Self {
            sequence: narrow(message.sequence, "sequence")?,
            dtype: message.dtype.parse().map_err(|_| Malformed("dtype"))?,
            op: match message.op() {
                proto::collective::Op::Sum => Op::Sum,
                proto::collective::Op::Average => Op::Average,
                proto::collective::Op::Unspecified => return Err(Malformed("op")),
            },
            pattern: match message.root {
                None => Pattern::AllReduce,
                Some(Root::ReducedTo(root)) => Pattern::Reduce(WorkerId(narrow(root, "root")?)),
                Some(Root::BroadcastFrom(root)) => Pattern::Broadcast(WorkerId(narrow(root, "root")?)),
            },
            elements: message.elements,
            wire_dtype: wire_dtype(message.wire_dtype)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_wire::Dtype;

    #[test]
    fn what_a_stranger_wrote_is_shown_as_it_is() {
        assert_eq!(shown("job\u{202e}x\n\u{1b}[2J".into()), "job\\u{202e}x\\u{a}\\u{1b}[2J");
        assert_eq!(shown("Tr\u{e4}ining \u{1f600}".into()), "Tr\u{e4}ining \u{1f600}");
    }

    #[test]
    fn every_refusal_survives_the_wire() {
        let refusals = [
            Refusal::VersionMismatch { theirs: 2, ours: 1 },
            Refusal::JobName { bytes: 129 },
            Refusal::TooManyJobs { max: 3 },
            Refusal::RankOutOfRange { rank: 4, world_size: 4 },
            Refusal::TooManyWorkers { asked: 4097, max: 4096 },
            Refusal::WorldSizeMismatch { rank: 1, asked: 2, job_has: 3 },
            Refusal::DuplicateRank { rank: 1 },
            Refusal::JobRunning { rank: 1, world_size: 2 },
            Refusal::InFlightOutOfRange { asked: 0 },
            Refusal::Mismatch {
                rank: 1,
                field: "wire dtype".into(),
                asked: "int8".into(),
                other_rank: 2,
                job_has: "native".into(),
            },
            Refusal::Unserved { reason: "a loss bound".into() },
            Refusal::PacketsTooLong { elements: 3, least: 64 },
            Refusal::MtuTooSmall { mtu: 200, need: 216 },
            Refusal::PoolExhausted { asked: 512, free: 64 },
            Refusal::ResumeMismatch { rank: 1, field: ResumeField::Counts, rank_has: 3, job_has: 4 },
            Refusal::ResumeGap { ahead: Rank(1), behind: Rank(0), shard: 2, slot: 3 },
            Refusal::JoinTimeout { missing: Ranks::from([0, 2]) },
            Refusal::SwitchStopping,
            Refusal::ProtocolMismatch { asked: "one".into(), served: "other".into() },
            Refusal::TooManyLevels { levels: 5 },
            Refusal::TooManyChildren { switch: Some(([10, 0, 0, 9], 4800).into()), children: 33 },
            Refusal::TooManyChildren { switch: None, children: 33 },
            Refusal::PathsDisagree { rank: 1, other_rank: 0, switch: ([10, 0, 0, 9], 4800).into() },
            Refusal::BeganAnew { rank: 1 },
            Refusal::WordsTooLong { of_rank: 16, of_job: 32 },
            Refusal::SubModels { count: 257 },
        ];
        for refusal in refusals {
            let refused = Refused::try_from(proto::Refusal::from(refusal.clone()));
            assert_eq!(refused, Ok(Refused::Registry(refusal)));
        }
        let switch = || "10.0.0.9:4800".to_string();
        let (upstream, cause) = ("server:4800".to_string(), "connection refused".to_string());
        let errors = [
            ChainError::UpstreamUnreachable {
                switch: switch(),
                upstream: upstream.clone(),
                cause: cause.clone(),
                may_come: true,
            },
            ChainError::Loop { switch: switch() },
            ChainError::RouteMismatch { switch: switch(), upstream, cause },
        ];
        for error in errors {
            assert_eq!(Refused::try_from(proto::Refusal::from(error.clone())), Ok(Refused::Chain(error)));
        }
        assert_eq!(Refusal::try_from(proto::Refusal { reason: None }), Err(Malformed("reason")));
    }

    #[test]
    fn every_abort_reason_survives_the_wire() {
        let collective = |elements, wire_dtype| Collective {
            sequence: 7,
            dtype: Dtype::Bfloat16,
            op: Op::Average,
            pattern: if elements == 1 { Pattern::AllReduce } else { Pattern::Reduce(WorkerId(1)) },
            elements,
            wire_dtype,
        };
        let reasons = [
            AbortReason::Expelled(Rank(3)),
            AbortReason::Mismatch {
                first: (Rank(0), collective(1, WireDtype::SharedExponent)),
                second: (Rank(1), collective(2, WireDtype::Bfloat16)),
            },
            AbortReason::SwitchStopped,
            AbortReason::LossBounds {
                first: (Rank(3), LossBound::RELIABLE),
                second: (Rank(4), LossBound::from_millionths(10_000).unwrap()),
            },
            AbortReason::Participants { first: Rank(5), second: Rank(6) },
        ];
        for reason in reasons {
            assert_eq!(AbortReason::try_from(proto::AbortReason::from(reason)), Ok(reason));
        }
    }

    #[test]
    fn numbers_out_of_range_are_malformed_not_cut() {
        let reason = proto::abort_reason::Reason::Expelled(4096);
        assert_eq!(
            AbortReason::try_from(proto::AbortReason { reason: Some(reason) }),
            Err(Malformed("rank"))
        );
        let collective = |dtype: &str, wire_dtype| proto::Collective {
            sequence: 1,
            dtype: dtype.into(),
            op: 1,
            elements: 1,
            wire_dtype,
            root: None,
        };
        assert_eq!(Collective::try_from(collective("complex64", 0)), Err(Malformed("dtype")));
        assert_eq!(Collective::try_from(collective("float32", 5)), Err(Malformed("wire_dtype")));
    }
}
