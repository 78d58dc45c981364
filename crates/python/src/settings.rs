//! The settings of a rank, as Python's table has them.

use std::fmt::Display;
use std::net::SocketAddr;
use std::path::Path;

use fanin_controller::page::Token;
use fanin_controller::{SessionConfig, protocols};
use fanin_protocol::control::Agreed;
use fanin_udp::OnSockets;
use fanin_wire::{LossBound, PATHS_MAX, Security, WireDtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What a session is told of `fanin._settings.Settings`: each field is read from the attribute of
/// its name.
#[derive(FromPyObject)]
pub(crate) struct Settings {
    in_flight: Option<u16>,
    sub_models: Option<String>,
    wire_dtype: Option<String>,
    security: String,
    protocol: String,
    loss_bound: f64,
    paths: u8,
    congestion_control: bool,
    machine: Option<String>,
    page: Option<String>,
}

impl Settings {
    /// `usual` with these settings. Raises `ValueError` for values that no session has, and for
    /// values that exclude each other.
    pub(crate) fn over(self, usual: SessionConfig) -> PyResult<SessionConfig> {
        let paths = self.paths;
        let refused = |why: String| Err(PyValueError::new_err(why));
        let Some(loss_bound) = LossBound::new(self.loss_bound) else {
            return refused(format!("loss_bound {}: a fraction of at least 0 and below 1", self.loss_bound));
        };
        if !(1..=PATHS_MAX).contains(&paths) {
            return refused(format!("paths {paths}: choose 1 to {PATHS_MAX}"));
        }
        let is_reliable = loss_bound == LossBound::RELIABLE;
        if paths > 1 && is_reliable {
            return refused(format!(
                "{paths} paths are for a job that may lose something: unset paths (FANIN_PATHS), or set a loss bound \
                 (loss_bound, or FANIN_LOSS_BOUND)"
            ));
        }
        let wire_dtype = self.wire_dtype.map(|name| wire_dtype_of(&name)).transpose()?;
        // DLCP's blocks carry floats as they are, as fast as its rate says.
        if !is_reliable && (wire_dtype.is_some_and(|it| it != WireDtype::Native) || self.in_flight.is_some())
        {
            return refused(
                "with a loss bound, floats travel in their own type, and a rate replaces the window: unset loss_bound \
                 (FANIN_LOSS_BOUND), or wire_dtype (FANIN_WIRE_DTYPE) and in_flight (FANIN_IN_FLIGHT)"
                    .into(),
            );
        }
        // Another process of the run serves it. Groups of some ranks have a rank 0, too.
        let is_first = std::env::var("RANK").map_or(true, |rank| rank.trim() == "0");
        let page = self.page.as_deref().filter(|_| is_first).map(page_at).transpose()?;
        let elements = |part: &str| {
            part.parse().map_err(|_| PyValueError::new_err(format!("sub_models: {part:?} is no number")))
        };
        let sub_models = self
            .sub_models
            .as_deref()
            .map_or(Ok(Vec::new()), |parts| parts.split(',').map(elements).collect());
        Ok(SessionConfig {
            agreed: Agreed {
                in_flight: self.in_flight,
                security: security_of(&self.security)?,
                loss_bound,
                sub_models: sub_models?,
                ..usual.agreed
            },
            wire_dtype,
            protocol: protocol_of(&self.protocol)?,
            paths,
            congestion_control: self.congestion_control,
            machine: self.machine.unwrap_or(usual.machine),
            page,
            ..usual
        })
    }
}

/// Where rank 0 serves its page, with the token that callers from elsewhere show.
fn page_at(listen: &str) -> PyResult<(SocketAddr, Option<Token>)> {
    let wrong = |why: &dyn Display| PyValueError::new_err(format!("page {listen:?}: {why}"));
    let address = listen.parse().map_err(|error| wrong(&error))?;
    let file = std::env::var_os("FANIN_PAGE_TOKEN_FILE").filter(|file| !file.is_empty());
    let token = file.map(|file| Token::of_file(Path::new(&file))).transpose();
    Ok((address, token.map_err(|error| wrong(&error))?))
}

fn wire_dtype_of(name: &str) -> PyResult<WireDtype> {
    name.parse().map_err(|_| unlike("wire_dtype", name, &WireDtype::ALL.map(WireDtype::name).join(", ")))
}

/// A protocol by its name.
pub(crate) fn protocol_of(name: &str) -> PyResult<&'static dyn OnSockets> {
    protocols::named(name).ok_or_else(|| unlike("protocol", name, &protocols::names()))
}

/// How packets are secured, by its name.
pub(crate) fn security_of(name: &str) -> PyResult<Security> {
    Security::from_name(name)
        .ok_or_else(|| unlike("security", name, &Security::ALL.map(Security::name).join(", ")))
}

fn unlike(setting: &str, name: &str, names: &str) -> PyErr {
    PyValueError::new_err(format!("{setting} {name:?}: one of {names}"))
}
