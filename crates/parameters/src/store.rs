//! The latest parameters of every model, in pieces.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::proto::Dtype;
use crate::{Key, PIECE_ELEMENTS, WORKERS_MAX};

/// A model that nobody has asked for so long is forgotten: its workers are gone.
pub(crate) const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// All models of a service.
#[derive(Debug)]
pub(crate) struct Store {
    models: Mutex<HashMap<Key, Arc<Model>>>,
    /// What the parameters of all models together may take.
    bytes_max: usize,
}

/// What a model is, as all its workers know it.
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
}

/// A part of the parameters, and how many deltas of each worker are in it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub values: Values,
    pub added: Vec<u64>,
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
        "it has no parameters of this training: it was started again without its snapshot, or the training was over; start the \
         service with the folder that it had (fanin parameters --snapshots FOLDER), or the training anew"
    )]
    Unknown,
    #[error("another training has the same key")]
    Taken,
    #[error(
        "{asked} bytes of parameters, and {left} of {max} are free: end another training, or name more services, which share them"
    )]
    NoRoom { asked: u128, left: usize, max: usize },
    #[error("not of this training: {0}")]
    Malformed(String),
}

impl Store {
    pub fn new(bytes_max: usize) -> Self {
        Self { models: Mutex::default(), bytes_max }
    }

    /// Makes a model of zeros, unless it is there.
    pub fn open(&self, key: Key, shape: Shape) -> Result<(), Unserved> {
        if shape.elements == 0 || !(1..=WORKERS_MAX).contains(&shape.workers) {
            let (elements, workers) = (shape.elements, shape.workers);
            let why =
                format!("{elements} elements and {workers} workers, of which there are 1 to {WORKERS_MAX}");
            return Err(Unserved::Malformed(why));
        }
        let mut models = lock(&self.models);
        if let Some(there) = models.get(&key) {
            return if there.shape == shape { Ok(()) } else { Err(Unserved::Taken) };
        }
        let used: usize = models.values().map(|model| model.shape.bytes()).sum();
        // What an honest model has fits in an address space.
        let asked = shape.elements as u128 * shape.dtype.bytes() as u128 + shape.counter_bytes();
        let left = self.bytes_max.saturating_sub(used);
        if asked > left as u128 {
            return Err(Unserved::NoRoom { asked, left, max: self.bytes_max });
        }
        let pieces = shape.pieces().map(|elements| Piece::zeros(shape, elements)).collect();
        let left = vec![false; shape.workers as usize];
        models.insert(key, Arc::new(Model::new(key, shape, left, pieces)));
        Ok(())
    }

    /// Takes a model from a snapshot, whatever room there is: it was there before.
    pub fn restore(&self, model: Model) {
        model.begin();
        let _ = model.has_changed();
        lock(&self.models).insert(model.key, Arc::new(model));
    }

    pub fn model(&self, key: &[u8]) -> Result<Arc<Model>, Unserved> {
        let key: Key = key.try_into().map_err(|_| Unserved::Malformed("a key has 16 bytes".into()))?;
        lock(&self.models).get(&key).cloned().ok_or(Unserved::Unknown)
    }

    /// A worker is done; whether that was the last one, with whom the model is forgotten.
    pub fn leave(&self, key: &[u8], worker: u32) -> Result<bool, Unserved> {
        let model = self.model(key)?;
        let mut left = lock(&model.left);
        *left.get_mut(worker as usize).ok_or_else(|| model.no_worker(worker))? = true;
        let all_left = left.iter().all(|left| *left);
        model.set_changed();
        if all_left {
            lock(&self.models).remove(&model.key);
        }
        Ok(all_left)
    }

    /// Forgets the models that nobody has asked for since a while, and says which.
    pub fn forget_abandoned(&self, now: Instant) -> Vec<Key> {
        let is_abandoned = |model: &Model| now.saturating_duration_since(*lock(&model.used)) >= ABANDONED;
        lock(&self.models).extract_if(|_, model| is_abandoned(model)).map(|(key, _)| key).collect()
    }

    pub fn models(&self) -> Vec<Arc<Model>> {
        lock(&self.models).values().cloned().collect()
    }
}

impl Model {
    pub fn new(key: Key, shape: Shape, left: Vec<bool>, pieces: Vec<Piece>) -> Self {
        Self {
            key,
            shape,
            pieces: pieces.into_iter().map(Mutex::new).collect(),
            left: Mutex::new(left),
            used: Mutex::new(Instant::now()),
            begun: AtomicBool::new(false),
            changed: AtomicBool::new(false),
        }
    }

    /// Adds a worker's delta to a piece, unless it is in; returns the latest parameters, and how many of its earlier deltas are lost.
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
        let mut lost = 0;
        if !delta.is_empty() && step > *added {
            if delta.len() != values.bytes() {
                let why = format!("{} bytes for a piece of {}", delta.len(), values.bytes());
                return Err(Unserved::Malformed(why));
            }
            values.add(delta);
            lost = step - *added - 1;
            *added = step;
            // Before the piece is let go: who saves it later has this in it, or sees that it changed.
            self.changed.store(true, Ordering::Release);
        }
        Ok((values.to_le_bytes(), lost))
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

    /// Copies of the pieces, each as it is when it is its turn.
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

    fn bytes(self) -> usize {
        self.elements * self.dtype.bytes() + self.counter_bytes() as usize
    }

    /// What the counters of all pieces take.
    fn counter_bytes(self) -> u128 {
        8 * u128::from(self.workers) * self.elements.div_ceil(PIECE_ELEMENTS) as u128
    }
}

impl Piece {
    fn zeros(shape: Shape, elements: usize) -> Self {
        let values = match shape.dtype {
            Dtype::Float32 => Values::Float32(vec![0.0; elements]),
            Dtype::Float64 => Values::Float64(vec![0.0; elements]),
        };
        Self { values, added: vec![0; shape.workers as usize] }
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
        match self {
            Self::Float32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::Float64(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
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
