//! What people see of services and jobs: now, for an hour back, and in words.
//!
//! An [`Observer`] is handed the answers of services to `Status`, and makes one [`view::State`] of
//! them. A [`Watch`] asks for these answers again and again: of the switch that it is in, or of
//! others (`remote`), which it finds through each other. `http` serves the state, and the page that
//! draws it (`page/` in the project's root). `fanin top` draws the same state in a terminal.
//!
//! Deliberately absent: anything that is counted. Services and ranks count, and are asked.

mod events;
mod history;
mod http;
mod lately;
mod observer;
mod remote;
pub mod view;
mod watch;
mod words;

pub(crate) use self::http::{PATHS, answers};
pub use self::http::{PageError, PageServer, Token};
pub(crate) use self::observer::Named;
pub use self::watch::Watch;
pub(crate) use self::watch::{Answer, Answers};
