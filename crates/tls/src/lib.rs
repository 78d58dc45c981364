//! Control connections that nobody else can read: TLS 1.3, and the answer to the question who is at
//! the other end.
//!
//! A server has an [`Identity`], a key with a certificate, and an [`Acceptor`] that takes
//! connections under it. A client has a [`Trust`], which decides whether the other end is the right
//! one. It decides by the first of these that it has:
//! - A key that its ranks told each other ([`Fingerprint`]).
//! - An authority.
//! - A secret that both ends have ([`Secret`]).
//! - The key that it saw first.
//!
//! `docs/security.md` says what each of these stops.
//!
//! Deliberately absent: what is said over a connection, sockets, and settings.
#![forbid(unsafe_code)]

mod acceptor;
mod error;
mod exchange;
mod identity;
mod secret;
mod trust;

pub use acceptor::Acceptor;
pub use error::{SetupError, Untrusted};
pub use exchange::{Exchange, Unreadable};
pub use identity::{Fingerprint, Identity};
pub use secret::Secret;
pub use tokio_rustls::client::TlsStream as ClientStream;
pub use tokio_rustls::server::TlsStream as ServerStream;
pub use trust::Trust;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The first byte of a TLS connection: the content type of a handshake (RFC 8446, section 5.1).
pub const HANDSHAKE: u8 = 0x16;
/// Protocols of a connection that both ends agree on (ALPN): HTTP/2, and HTTP/2 after both have
/// proved that they know the secret.
const HTTP2: &[u8] = b"h2";
const HTTP2_BEHIND_SECRET: &[u8] = b"fanin-secret";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}
