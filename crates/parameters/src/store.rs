//! The latest parameters of every model, in pieces.

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_limits::{Budget, Reservation};

use crate::proto::Dtype;
use crate::{Key, PIECE_ELEMENTS, WORKERS_MAX};

/// A model that nobody has asked for so long is forgotten: its workers are gone.
pub(crate) const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);
/// So long there is at least to ask for one after a start of the service.
const RETURN: Duration = Duration::from_secs(60 * 60);
/// A model that nobody has sent a piece of for so long, before it had all of its first parameters,
/// is forgotten.
const UNFINISHED: Duration = Duration::from_secs(5 * 60);
/// The memory of a model beside its pieces, and of a piece beside its values and counters, with
/// what an allocator adds: half of it is used.
const MODEL_BYTES: usize = 1024;
const PIECE_BYTES: usize = 160;

/// All models of a service.
#[derive(Debug)]
pub(crate) struct Store {
    models: Mutex<HashMap<Key, Arc<Model>>>,
    /// The memory for all models together, with those that are being made, and those that are
    /// forgotten and still held.
    budget: Budget,
    bytes_max: usize,
}

/// The shape of a model, as all its workers know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub dtype: Dtype,
    pub elements: usize,
    pub workers: u32,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub key: Key,
    pub shape: Shape,
    pieces: Vec<Mutex<Piece>>,
    /// Whether each worker has left.
    left: Mutex<Vec<bool>>,
    used: Mutex<Instant>,
    /// Whether it has its first parameters: deltas alone are worth nothing.
    begun: AtomicBool,
    changed: AtomicBool,
    /// Its part of the service's memory.
    _reservation: Option<Reservation>,
}

/// A part of the parameters, and which deltas of each worker are in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub values: Values,
    pub added: Vec<Added>,
}

/// Deltas of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Added {
    /// The last one: what is sent again is not above it.
    pub step: u64,
    /// How many: fewer than the last one's number where a service was started again without some.
    pub count: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Values {
    Float32(Vec<f32>),
    Float64(Vec<f64>),
}

/// Why a worker's word is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unserved {
    #[error(
        "it has no parameters of this training: it was started again without its snapshot, the training was over, or ranks name \
         the services in unlike orders; start the service with the folder that it had (fanin parameters --snapshots FOLDER), or the \
         training anew with the same order on all ranks"
    )]
    Unknown,
    #[error("another training has the same key")]
    Taken,
    #[error("a rank of another training hosts it, for that alone: name a service of `fanin parameters`")]
    Other,
    #[error(
        "{asked} bytes of parameters, and {left} of {max} are free: end another training, or name more services, which share them"
    )]
    NoRoom { asked: u128, left: usize, max: usize },
    #[error("not of this training: {0}")]
    Malformed(String),
}

impl Store {
    /// Callers from one address may have three quarters: one training may be as large, and others
    /// have room.
    pub fn new(bytes_max: usize) -> Self {
        Self { models: Mutex::default(), budget: Budget::new(bytes_max, bytes_max / 4 * 3), bytes_max }
    }

    /// Makes a model of zeros, unless it is there; whether it was not.
    pub fn open(&self, address: IpAddr, key: Key, shape: Shape) -> Result<bool, Unserved> {
        if shape.elements == 0 || !(1..=WORKERS_MAX).contains(&shape.workers) {
            let (elements, workers) = (shape.elements, shape.workers);
            let why =
                format!("{elements} elements and {workers} workers, of which there are 1 to {WORKERS_MAX}");
            return Err(Unserved::Malformed(why));
        }
        if let Some(there) = lock(&self.models).get(&key) {
            return there.is_of(shape).map(|()| false);
        }
        // An honest model fits in an address space.
        let asked = shape.bytes();
        let part = usize::try_from(asked).ok().and_then(|asked| self.budget.take(address, asked));
        let part = part.ok_or_else(|| {
            let (left, max) = (self.budget.left_for(address), self.bytes_max);
            Unserved::NoRoom { asked, left, max }
        })?;
        // Not under the lock, for which all workers of all trainings would wait.
        let pieces = shape.pieces().map(|elements| Piece::zeros(shape, elements)).collect();
        let left = vec![false; shape.workers as usize];
        let made = Model::new(key, shape, left, pieces, Duration::ZERO);
        let mut models = lock(&self.models);
        if let Some(there) = models.get(&key) {
            // By the same call, which was sent again.
            return there.is_of(shape).map(|()| false);
        }
        models.insert(key, Arc::new(Model { _reservation: Some(part), ..made }));
        Ok(true)
    }

    /// Takes a model from a snapshot, whatever room there is: it was there before.
    pub fn restore(&self, model: Model) {
        model.begin();
        let _ = model.has_changed();
        let _reservation = Some(self.budget.take_anyway(model.shape.bytes() as usize));
        lock(&self.models).insert(model.key, Arc::new(Model { _reservation, ..model }));
    }

    pub fn model(&self, key: &[u8]) -> Result<Arc<Model>, Unserved> {
        let key: Key = key.try_into().map_err(|_| Unserved::Malformed("a key has 16 bytes".into()))?;
        lock(&self.models).get(&key).cloned().ok_or(Unserved::Unknown)
    }

    /// A worker is done; whether that was the last one, with whom the model is forgotten.
    pub fn leave(&self, key: &[u8], worker: u32) -> Result<bool, Unserved> {
        let model = self.model(key)?;
        *lock(&model.used) = Instant::now();
        let mut left = lock(&model.left);
        *left.get_mut(worker as usize).ok_or_else(|| model.no_worker(worker))? = true;
        let all_left = left.iter().all(|left| *left);
        model.set_changed();
        if all_left {
            self.forget(&model.key);
        }
        Ok(all_left)
    }

    /// Forgets a model, if it is there.
    pub fn forget(&self, key: &Key) {
        lock(&self.models).remove(key);
    }

    /// Forgets the models that nobody has asked for since a while, and says which.
    pub fn forget_abandoned(&self, now: Instant) -> Vec<Key> {
        lock(&self.models).extract_if(|_, model| model.is_abandoned(now)).map(|(key, _)| key).collect()
    }

    pub fn models(&self) -> Vec<Arc<Model>> {
        lock(&self.models).values().cloned().collect()
    }
}

impl Model {
    /// `idle` is since when nobody has asked for it.
    pub fn new(key: Key, shape: Shape, left: Vec<bool>, pieces: Vec<Piece>, idle: Duration) -> Self {
        let now = Instant::now();
        Self {
            key,
            shape,
            pieces: pieces.into_iter().map(Mutex::new).collect(),
            left: Mutex::new(left),
            used: Mutex::new(now.checked_sub(idle.min(ABANDONED - RETURN)).unwrap_or(now)),
            begun: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            _reservation: None,
        }
    }

    /// Adds a worker's delta to a piece, unless it is in; returns the latest parameters, and how
    /// many of its deltas are in them.
    pub fn exchange(
        &self,
        worker: u32,
        step: u64,
        piece: u64,
        delta: &[u8],
    ) -> Result<(Vec<u8>, u64), Unserved> {
        *lock(&self.used) = Instant::now();
        let no_piece = || Unserved::Malformed(format!("piece {piece} of {}", self.pieces.len()));
        let number = usize::try_from(piece).map_err(|_| no_piece())?;
        let mut piece = lock(self.pieces.get(number).ok_or_else(no_piece)?);
        let Piece { values, added } = &mut *piece;
        let added = added.get_mut(worker as usize).ok_or_else(|| self.no_worker(worker))?;
        if !delta.is_empty() && step > added.step {
            if delta.len() != values.bytes() {
                let why = format!("{} bytes for a piece of {}", delta.len(), values.bytes());
                return Err(Unserved::Malformed(why));
            }
            values.add(delta);
            *added = Added { step, count: added.count + 1 };
            // Before the piece is let go: who saves it later has this in it, or sees that it
            // changed.
            self.changed.store(true, Ordering::Release);
        }
        Ok((values.to_le_bytes(), added.count))
    }

    fn is_of(&self, shape: Shape) -> Result<(), Unserved> {
        if self.shape == shape { Ok(()) } else { Err(Unserved::Taken) }
    }

    /// Since when nobody has asked for it.
    pub fn idle(&self) -> Duration {
        lock(&self.used).elapsed()
    }

    fn is_abandoned(&self, now: Instant) -> bool {
        let limit = if self.begun.load(Ordering::Acquire) { ABANDONED } else { UNFINISHED };
        now.saturating_duration_since(*lock(&self.used)) >= limit
    }

    /// The first parameters are in.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Release);
        self.set_changed();
    }

    /// Whether there is anything to save since it was asked last.
    pub fn has_changed(&self) -> bool {
        self.begun.load(Ordering::Acquire) && self.changed.swap(false, Ordering::AcqRel)
    }

    /// It is to be saved again.
    pub fn set_changed(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// Whether each worker has left.
    pub fn left(&self) -> Vec<bool> {
        lock(&self.left).clone()
    }

    /// Copies of the pieces. Each copy is made when the piece's turn comes.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.pieces.iter().map(|piece| lock(piece).clone())
    }

    fn no_worker(&self, worker: u32) -> Unserved {
        Unserved::Malformed(format!("worker {worker} of {}", self.shape.workers))
    }
}

impl Shape {
    /// Elements of each piece.
    pub fn pieces(self) -> impl Iterator<Item = usize> {
        let count = self.elements.div_ceil(PIECE_ELEMENTS);
        (0..count).map(move |piece| PIECE_ELEMENTS.min(self.elements - piece * PIECE_ELEMENTS))
    }

    /// The memory of a model of this shape.
    fn bytes(self) -> u128 {
        let of_piece = PIECE_BYTES as u128 + u128::from(self.workers) * size_of::<Added>() as u128;
        let pieces = self.elements.div_ceil(PIECE_ELEMENTS) as u128;
        let of_workers = u128::from(self.workers);
        self.elements as u128 * self.dtype.bytes() as u128
            + pieces * of_piece
            + of_workers
            + MODEL_BYTES as u128
    }
}

impl Piece {
    fn zeros(shape: Shape, elements: usize) -> Self {
        let values = match shape.dtype {
            Dtype::Float32 => Values::Float32(vec![0.0; elements]),
            Dtype::Float64 => Values::Float64(vec![0.0; elements]),
        };
        Self { values, added: vec![Added::default(); shape.workers as usize] }
    }
}

impl Values {
    pub fn from_le_bytes(dtype: Dtype, bytes: &[u8]) -> Self {
        match dtype {
            Dtype::Float32 => {
                Self::Float32(bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect())
            }
            Dtype::Float64 => {
                Self::Float64(bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect())
            }
        }
    }

    pub fn to_le_bytes(&self) -> Vec<u8> {
        // Into places that are there, many at a time: other workers wait for the piece.
        let mut bytes = vec![0; self.bytes()];
        match self {
            Self::Float32(values) => {
                bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            Self::Float64(values) => {
                bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_le_bytes());
            }
        }
        bytes
    }

    const fn bytes(&self) -> usize {
        match self {
            Self::Float32(values) => 4 * values.len(),
            Self::Float64(values) => 8 * values.len(),
        }
    }

    fn add(&mut self, delta: &[u8]) {
        match self {
            Self::Float32(values) => {
                let delta = delta.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
                values.iter_mut().zip(delta).for_each(|(value, change)| *value += change);
            }
            Self::Float64(values) => {
                let delta = delta.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x));
                values.iter_mut().zip(delta).for_each(|(value, change)| *value += change);
            }
        }
    }
}

impl Dtype {
    /// Of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float64 => 8,
        }
    }
}

/// A key as the name of its file has it.
pub(crate) fn hex(key: &Key) -> String {
    key.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const KEY: Key = [7; 16];
    const SHAPE: Shape = Shape { dtype: Dtype::Float32, elements: 1, workers: 2 };

    fn value(bytes: &[u8]) -> f32 {
        f32::from_le_bytes(bytes.try_into().expect("one element"))
    }

    #[test]
    fn a_step_that_is_sent_again_is_added_once() {
        let store = Store::new(1 << 20);
        store.open(ONE, KEY, SHAPE).expect("room");
        let model = store.model(&KEY).expect("there");
        let send = |worker, step, delta: f32| {
            let (latest, count) = model.exchange(worker, step, 0, &delta.to_le_bytes()).expect("added");
            (value(&latest), count)
        };
        // (worker, step, delta) and the latest, how many of the worker's are in.
        for (worker, step, delta, latest, count) in [
            (0, 1, 2.0, 2.0, 1),
            (0, 1, 2.0, 2.0, 1),
            (1, 1, 8.0, 10.0, 1),
            (0, 2, 1.0, 11.0, 2),
            (0, 1, 2.0, 11.0, 2),
            (0, 2, 1.0, 11.0, 2),
            // As after a start without steps 2 to 4.
            (1, 5, 4.0, 15.0, 2),
            (1, 5, 4.0, 15.0, 2),
            (1, 2, 4.0, 15.0, 2),
        ] {
            assert_eq!(send(worker, step, delta), (latest, count), "{worker} {step}");
        }
        let (latest, count) = model.exchange(1, 0, 0, &[]).expect("a question");
        assert_eq!((value(&latest), count), (15.0, 2), "a question is told, too");
    }

    #[test]
    fn what_models_take_is_counted_and_given_back() {
        let store = Store::new(14 * SHAPE.bytes() as usize);
        let key = |number: u8| [number; 16];
        for number in 0..10 {
            store.open(ONE, key(number), SHAPE).expect("room");
            store.open(ONE, key(number), SHAPE).expect("it is there");
        }
        let full = store.open(ONE, key(10), SHAPE);
        assert!(matches!(full, Err(Unserved::NoRoom { left: ..1000, .. })), "{full:?}");
        assert_eq!(store.open([10, 0, 0, 2].into(), key(11), SHAPE), Ok(true), "another address has room");
        store.forget(&key(11));
        // In a model of one element it is not the element that counts.
        assert!(SHAPE.bytes() > 1000);
        store.leave(&key(0), 0).expect("there");
        store.leave(&key(0), 1).expect("there");
        store.open(ONE, key(10), SHAPE).expect("the first one's room");
        assert_eq!(store.forget_abandoned(Instant::now() + ABANDONED).len(), 10);
        assert_eq!(store.budget.left_for(ONE), 14 * SHAPE.bytes() as usize / 4 * 3);
    }

    #[test]
    fn a_model_that_is_not_finished_is_forgotten_sooner() {
        let store = Store::new(1 << 20);
        store.open(ONE, KEY, SHAPE).expect("room");
        store.open(ONE, [8; 16], SHAPE).expect("room");
        store.model(&KEY).expect("there").begin();
        assert_eq!(store.forget_abandoned(Instant::now() + UNFINISHED), [[8; 16]]);
        assert_eq!(store.forget_abandoned(Instant::now() + ABANDONED), [KEY]);
    }

    #[test]
    fn what_somebody_holds_is_not_free() {
        let store = Store::new(2 * SHAPE.bytes() as usize);
        assert_eq!(store.open(ONE, KEY, SHAPE), Ok(true));
        assert_eq!(store.open(ONE, KEY, SHAPE), Ok(false), "it is there");
        let held = store.model(&KEY).expect("there");
        store.forget(&KEY);
        let full = store.open(ONE, [8; 16], SHAPE);
        assert!(matches!(full, Err(Unserved::NoRoom { .. })), "{full:?}");
        drop(held);
        assert_eq!(store.open(ONE, [8; 16], SHAPE), Ok(true));
    }
}
