//! Between the control protocol's messages and the types of the rooms below. What comes from the network is checked here.

use std::net::SocketAddr;

use fanin_protocol::atp::{AtpJobConfig, Hashing, Overflow, Scaling};
use fanin_protocol::control::{Protocol, Ranks, Refusal, ResumeField};
use fanin_wire::{AbortReason, Collective, Generation, JobId, NATIVE_ELEMENTS_MAX, Op, WireDtype, WorkerId};

use crate::error::ChainError;
use crate::proto;

/// A message that no fanin sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message's {0} is missing or out of range")]
pub struct Malformed(pub &'static str);

/// A number as the type that the rooms below use.
pub(crate) fn narrow<T: TryFrom<u32>>(value: u32, field: &'static str) -> Result<T, Malformed> {
    T::try_from(value).map_err(|_| Malformed(field))
}

fn worker(rank: u32) -> Result<WorkerId, Malformed> {
    narrow(rank, "rank").map(WorkerId)
}

impl From<WireDtype> for proto::WireDtype {
    fn from(wire_dtype: WireDtype) -> Self {
        match wire_dtype {
            WireDtype::Int32 => Self::Int32,
            WireDtype::Bfloat16 => Self::Bfloat16,
            WireDtype::Native => Self::Native,
        }
    }
}

/// A wire dtype as it came: a number that we do not know must not be taken for the default.
pub(crate) fn wire_dtype(number: i32) -> Result<WireDtype, Malformed> {
    match proto::WireDtype::try_from(number).map_err(|_| Malformed("wire_dtype"))? {
        proto::WireDtype::Int32 => Ok(WireDtype::Int32),
        proto::WireDtype::Bfloat16 => Ok(WireDtype::Bfloat16),
        proto::WireDtype::Native => Ok(WireDtype::Native),
    }
}

impl From<Protocol> for proto::Protocol {
    fn from(protocol: Protocol) -> Self {
        match protocol {
            Protocol::SwitchMl => Self::Switchml,
            Protocol::Atp => Self::Atp,
        }
    }
}

/// A protocol as it came: a number that we do not know must not be taken for the default.
pub(crate) fn protocol(number: i32) -> Result<Protocol, Malformed> {
    match proto::Protocol::try_from(number).map_err(|_| Malformed("protocol"))? {
        proto::Protocol::Switchml => Ok(Protocol::SwitchMl),
        proto::Protocol::Atp => Ok(Protocol::Atp),
    }
}

/// An ATP job as it was admitted, to its server and to its workers alike. What nobody chooses is chosen here.
pub(crate) const fn atp_job(
    (id, generation): (JobId, Generation),
    workers: u8,
    (window_max, elements): (u16, u16),
    aggregators: u32,
    hashing: Hashing,
) -> AtpJobConfig {
    AtpJobConfig {
        id,
        generation,
        workers: workers as u16,
        elements,
        window_max,
        aggregators,
        hashing,
        // Gradients of any size: with the paper's fixed factor, sums of 21.5 and more overflow (ATP §3.8, §B.3).
        scaling: Scaling::Dynamic,
        overflow: Overflow::Reactive,
        congestion_control: true,
        // As with SwitchML: a vector of metrics has elements of any size, and a NaN beside them.
        originals_elements_max: NATIVE_ELEMENTS_MAX as u32,
    }
}

fn address(text: &str) -> Result<SocketAddr, Malformed> {
    text.parse().map_err(|_| Malformed("switch"))
}

/// A refusal as a rank gets it: from the registry that admits jobs, or from a switch on the way there.
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

impl From<Refusal> for proto::Refusal {
    fn from(refusal: Refusal) -> Self {
        use proto::refusal as message;
        use proto::refusal::Reason;
        let reason = match refusal {
            Refusal::VersionMismatch { theirs, ours } => {
                Reason::VersionMismatch(message::VersionMismatch { theirs: theirs.into(), ours: ours.into() })
            }
            Refusal::JobName { bytes } => {
                Reason::JobName(message::JobName { bytes: u32::try_from(bytes).unwrap_or(u32::MAX) })
            }
            Refusal::TooManyJobs { max } => Reason::TooManyJobs(message::TooManyJobs { max }),
            Refusal::RankOutOfRange { rank, world_size } => {
                Reason::RankOutOfRange(message::RankOutOfRange { rank, world_size })
            }
            Refusal::TooManyWorkers { asked } => Reason::TooManyWorkers(message::TooManyWorkers { asked }),
            Refusal::WorldSizeMismatch { rank, asked, job_has } => {
                Reason::WorldSizeMismatch(message::WorldSizeMismatch { rank, asked, job_has })
            }
            Refusal::DuplicateRank { rank } => Reason::DuplicateRank(message::DuplicateRank { rank }),
            Refusal::JobRunning { rank, world_size } => {
                Reason::JobRunning(message::JobRunning { rank, world_size })
            }
            Refusal::InFlightOutOfRange { asked } => {
                Reason::InFlightOutOfRange(message::InFlightOutOfRange { asked: asked.into() })
            }
            Refusal::InFlightMismatch { rank, asked, job_has } => {
                Reason::InFlightMismatch(message::InFlightMismatch {
                    rank,
                    asked: asked.into(),
                    job_has: job_has.into(),
                })
            }
            Refusal::WireDtypeMismatch { rank, asked, other_rank, job_has } => {
                Reason::WireDtypeMismatch(message::WireDtypeMismatch {
                    rank,
                    asked: proto::WireDtype::from(asked).into(),
                    other_rank,
                    job_has: proto::WireDtype::from(job_has).into(),
                })
            }
            Refusal::MtuTooSmall { mtu, need } => Reason::MtuTooSmall(message::MtuTooSmall { mtu, need }),
            Refusal::PoolExhausted { asked, free } => {
                Reason::PoolExhausted(message::PoolExhausted { asked, free })
            }
            Refusal::ResumeMismatch { rank, field, rank_has, job_has } => {
                Reason::ResumeMismatch(message::ResumeMismatch {
                    rank,
                    field: message::resume_mismatch::Field::from(field).into(),
                    rank_has,
                    job_has,
                })
            }
            Refusal::ResumeGap { ahead, behind, shard, slot } => Reason::ResumeGap(message::ResumeGap {
                ahead: ahead.0.into(),
                behind: behind.0.into(),
                shard: shard.into(),
                slot: slot.into(),
            }),
            Refusal::JoinTimeout { missing } => {
                Reason::JoinTimeout(message::JoinTimeout { missing: missing.0 })
            }
            Refusal::SwitchStopping => Reason::SwitchStopping(message::SwitchStopping {}),
            Refusal::ProtocolMismatch { asked, served } => {
                Reason::ProtocolMismatch(message::ProtocolMismatch {
                    asked: proto::Protocol::from(asked).into(),
                    served: proto::Protocol::from(served).into(),
                })
            }
            Refusal::WireDtypeOfAtp { asked } => {
                let asked = proto::WireDtype::from(asked).into();
                Reason::WireDtypeOfAtp(message::WireDtypeOfAtp { asked })
            }
            Refusal::TooManyLevels { levels } => Reason::TooManyLevels(message::TooManyLevels { levels }),
            Refusal::TooManyChildren { switch, children } => {
                let switch = switch.map(|switch| switch.to_string()).unwrap_or_default();
                Reason::TooManyChildren(message::TooManyChildren { switch, children })
            }
            Refusal::PathsDisagree { rank, other_rank, switch } => {
                let switch = switch.to_string();
                Reason::PathsDisagree(message::PathsDisagree { rank, other_rank, switch })
            }
        };
        Self { reason: Some(reason) }
    }
}

impl TryFrom<proto::Refusal> for Refusal {
    type Error = Malformed;

    fn try_from(refusal: proto::Refusal) -> Result<Self, Malformed> {
        use proto::refusal::Reason;
        Ok(match refusal.reason.ok_or(Malformed("reason"))? {
            Reason::VersionMismatch(m) => {
                Self::VersionMismatch { theirs: narrow(m.theirs, "theirs")?, ours: narrow(m.ours, "ours")? }
            }
            Reason::JobName(m) => Self::JobName { bytes: narrow(m.bytes, "bytes")? },
            Reason::TooManyJobs(m) => Self::TooManyJobs { max: m.max },
            Reason::RankOutOfRange(m) => Self::RankOutOfRange { rank: m.rank, world_size: m.world_size },
            Reason::TooManyWorkers(m) => Self::TooManyWorkers { asked: m.asked },
            Reason::WorldSizeMismatch(m) => {
                Self::WorldSizeMismatch { rank: m.rank, asked: m.asked, job_has: m.job_has }
            }
            Reason::DuplicateRank(m) => Self::DuplicateRank { rank: m.rank },
            Reason::JobRunning(m) => Self::JobRunning { rank: m.rank, world_size: m.world_size },
            Reason::InFlightOutOfRange(m) => Self::InFlightOutOfRange { asked: narrow(m.asked, "asked")? },
            Reason::InFlightMismatch(m) => Self::InFlightMismatch {
                rank: m.rank,
                asked: narrow(m.asked, "asked")?,
                job_has: narrow(m.job_has, "job_has")?,
            },
            Reason::WireDtypeMismatch(m) => Self::WireDtypeMismatch {
                rank: m.rank,
                asked: wire_dtype(m.asked)?,
                other_rank: m.other_rank,
                job_has: wire_dtype(m.job_has)?,
            },
            Reason::MtuTooSmall(m) => Self::MtuTooSmall { mtu: m.mtu, need: m.need },
            Reason::PoolExhausted(m) => Self::PoolExhausted { asked: m.asked, free: m.free },
            Reason::ResumeMismatch(m) => Self::ResumeMismatch {
                rank: m.rank,
                field: m.field().into(),
                rank_has: m.rank_has,
                job_has: m.job_has,
            },
            Reason::ResumeGap(m) => Self::ResumeGap {
                ahead: worker(m.ahead)?,
                behind: worker(m.behind)?,
                shard: narrow(m.shard, "shard")?,
                slot: narrow(m.slot, "slot")?,
            },
            Reason::JoinTimeout(m) => Self::JoinTimeout { missing: Ranks(m.missing) },
            Reason::SwitchStopping(_) => Self::SwitchStopping,
            Reason::ProtocolMismatch(m) => {
                Self::ProtocolMismatch { asked: protocol(m.asked)?, served: protocol(m.served)? }
            }
            Reason::WireDtypeOfAtp(m) => Self::WireDtypeOfAtp { asked: wire_dtype(m.asked)? },
            Reason::TooManyLevels(m) => Self::TooManyLevels { levels: m.levels },
            Reason::TooManyChildren(m) => {
                let switch = (!m.switch.is_empty()).then(|| address(&m.switch)).transpose()?;
                Self::TooManyChildren { switch, children: m.children }
            }
            Reason::PathsDisagree(m) => {
                Self::PathsDisagree { rank: m.rank, other_rank: m.other_rank, switch: address(&m.switch)? }
            }
            Reason::UpstreamUnreachable(_) | Reason::SwitchLoop(_) | Reason::RouteMismatch(_) => {
                return Err(Malformed("reason"));
            }
        })
    }
}

impl From<ResumeField> for proto::refusal::resume_mismatch::Field {
    fn from(field: ResumeField) -> Self {
        match field {
            ResumeField::Resumed => Self::Resumed,
            ResumeField::Generation => Self::Generation,
            ResumeField::InFlight => Self::InFlight,
            ResumeField::Elements => Self::Elements,
            ResumeField::Shards => Self::Shards,
            ResumeField::Counts => Self::Counts,
        }
    }
}

impl From<proto::refusal::resume_mismatch::Field> for ResumeField {
    fn from(field: proto::refusal::resume_mismatch::Field) -> Self {
        use proto::refusal::resume_mismatch::Field;
        match field {
            Field::Resumed => Self::Resumed,
            Field::Generation => Self::Generation,
            Field::InFlight => Self::InFlight,
            Field::Elements => Self::Elements,
            Field::Shards => Self::Shards,
            Field::Counts => Self::Counts,
        }
    }
}

impl From<AbortReason> for proto::AbortReason {
    fn from(reason: AbortReason) -> Self {
        use proto::abort_reason::{Mismatch, Reason, SwitchStopped};
        let reason = match reason {
            AbortReason::Expelled(rank) => Reason::Expelled(rank.0.into()),
            AbortReason::Mismatch { first, second } => Reason::Mismatch(Mismatch {
                first_rank: first.0.0.into(),
                first: Some(first.1.into()),
                second_rank: second.0.0.into(),
                second: Some(second.1.into()),
            }),
            AbortReason::SwitchStopped => Reason::SwitchStopped(SwitchStopped {}),
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
            Reason::Expelled(rank) => Self::Expelled(worker(rank)?),
            Reason::Mismatch(m) => Self::Mismatch {
                first: (worker(m.first_rank)?, collective(m.first)?),
                second: (worker(m.second_rank)?, collective(m.second)?),
            },
            Reason::SwitchStopped(_) => Self::SwitchStopped,
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
    fn every_refusal_survives_the_wire() {
        let refusals = [
            Refusal::VersionMismatch { theirs: 2, ours: 1 },
            Refusal::JobName { bytes: 129 },
            Refusal::TooManyJobs { max: 3 },
            Refusal::RankOutOfRange { rank: 4, world_size: 4 },
            Refusal::TooManyWorkers { asked: 65 },
            Refusal::WorldSizeMismatch { rank: 1, asked: 2, job_has: 3 },
            Refusal::DuplicateRank { rank: 1 },
            Refusal::JobRunning { rank: 1, world_size: 2 },
            Refusal::InFlightOutOfRange { asked: 0 },
            Refusal::InFlightMismatch { rank: 1, asked: 64, job_has: 65 },
            Refusal::WireDtypeMismatch {
                rank: 1,
                asked: WireDtype::Bfloat16,
                other_rank: 2,
                job_has: WireDtype::Int32,
            },
            Refusal::MtuTooSmall { mtu: 576, need: 1104 },
            Refusal::PoolExhausted { asked: 512, free: 64 },
            Refusal::ResumeMismatch { rank: 1, field: ResumeField::Counts, rank_has: 3, job_has: 4 },
            Refusal::ResumeGap { ahead: WorkerId(1), behind: WorkerId(0), shard: 2, slot: 3 },
            Refusal::JoinTimeout { missing: Ranks(0b101) },
            Refusal::SwitchStopping,
            Refusal::ProtocolMismatch { asked: Protocol::SwitchMl, served: Protocol::Atp },
            Refusal::WireDtypeOfAtp { asked: WireDtype::Bfloat16 },
            Refusal::TooManyLevels { levels: 5 },
            Refusal::TooManyChildren { switch: Some(([10, 0, 0, 9], 4800).into()), children: 33 },
            Refusal::TooManyChildren { switch: None, children: 33 },
            Refusal::PathsDisagree { rank: 1, other_rank: 0, switch: ([10, 0, 0, 9], 4800).into() },
        ];
        for refusal in refusals {
            let refused = Refused::try_from(proto::Refusal::from(refusal));
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
            elements,
            wire_dtype,
        };
        let reasons = [
            AbortReason::Expelled(WorkerId(3)),
            AbortReason::Mismatch {
                first: (WorkerId(0), collective(1, WireDtype::Int32)),
                second: (WorkerId(1), collective(2, WireDtype::Bfloat16)),
            },
            AbortReason::SwitchStopped,
        ];
        for reason in reasons {
            assert_eq!(AbortReason::try_from(proto::AbortReason::from(reason)), Ok(reason));
        }
    }

    #[test]
    fn numbers_out_of_range_are_malformed_not_cut() {
        let reason = proto::abort_reason::Reason::Expelled(256);
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
        };
        assert_eq!(Collective::try_from(collective("complex64", 0)), Err(Malformed("dtype")));
        assert_eq!(Collective::try_from(collective("float32", 3)), Err(Malformed("wire_dtype")));
    }
}
