//! What the machines of a simulated network are busy with.

pub mod models;
mod values;
