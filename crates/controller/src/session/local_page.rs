//! The page of a job whose ranks are all on this machine. No service knows such a job, so rank 0
//! tells what it does itself, for all ranks: their sums end together.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config::SessionConfig;
use super::pending::Pending;
use super::services::page;
use super::split::here;
use crate::page::{Answer, Answers, PageServer, Watch};
use crate::proto::{self, StatusReply, job};

/// Bytes of an element, as the page counts what is summed.
const ELEMENT_BYTES: u64 = 4;

/// The page, and what rank 0 notes for it.
pub(super) struct LocalPage {
    pub pending: Arc<Pending>,
    _served: Arc<PageServer>,
}

impl LocalPage {
    /// None if nobody asks for it here, or it cannot be served.
    pub fn start(config: &SessionConfig) -> Option<Self> {
        let pending = Arc::new(Pending::default());
        let served = page(config, || {
            let place = proto::Place { ranks: (0..config.world_size).collect(), ..here(config) };
            let alone = Alone {
                job: config.job.clone(),
                world_size: config.world_size,
                instance: rand::random(),
                place,
                pending: Arc::clone(&pending),
            };
            let watch = Watch::new(format!("rank 0 of {}", config.job));
            (watch.clone(), watch.run(alone))
        })?;
        Some(Self { pending, _served: served })
    }
}

/// It answers as a service would.
struct Alone {
    job: String,
    world_size: u32,
    instance: u64,
    place: proto::Place,
    pending: Arc<Pending>,
}

impl Alone {
    /// The name of what sums, as that of a service.
    fn memory(&self) -> String {
        format!("memory of {}", self.place.name)
    }

    fn status(&self, after: Option<Instant>, now: Instant) -> StatusReply {
        let work = proto::Work { told_ago_us: Some(0), ..self.pending.work(after, now) };
        let bytes: u64 = work.totals.iter().map(|total| total.bytes).sum();
        let member =
            job::Member { place: Some(self.place.clone()), work: Some(work), ..job::Member::default() };
        let running = job::Running {
            completed: bytes / ELEMENT_BYTES,
            elements: 1,
            wire_dtype: proto::WireDtype::Native.into(),
            split: Some(proto::Split {
                shares: vec![proto::split::Share { service: self.memory(), share: 1.0, host: Some(0) }],
                ..proto::Split::default()
            }),
            members: vec![member],
            ..job::Running::default()
        };
        let state = Some(job::State::Running(running));
        StatusReply {
            version: env!("CARGO_PKG_VERSION").into(),
            protocol: "memory".into(),
            instance: self.instance,
            jobs: vec![proto::Job { name: self.job.clone(), world_size: self.world_size, state }],
            ..StatusReply::default()
        }
    }
}

impl Answers for Alone {
    fn ask(&self, work: Duration) -> Pin<Box<dyn Future<Output = Vec<Answer>> + Send + '_>> {
        Box::pin(async move {
            let now = Instant::now();
            let reply = Ok(self.status(now.checked_sub(work), now));
            vec![Answer { address: self.memory(), ago: Duration::ZERO, reply }]
        })
    }
}
