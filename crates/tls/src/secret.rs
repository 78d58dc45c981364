//! A secret that both ends of a connection have, and how they prove it.
//!
//! The other end could use a secret again that was sent, even hashed: somebody in the middle would
//! pass it on. So each end proves that it knows the secret *and* the keys of this very connection.
//! TLS exports a value of these keys (RFC 8446, section 7.5). Somebody in the middle has two
//! connections, and what is proved on one is wrong on the other. The client proves first: strangers
//! get nothing from a server that they could try guesses on.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use aws_lc_rs::hmac;
use rustls::Error;

use crate::SetupError;

const WHAT: &str = "file with the secret";
/// Shorter ones could be guessed.
const BYTES_MIN: usize = 16;
/// The size of a value of the connection, and of a proof.
pub(crate) const PROOF_BYTES: usize = 32;
const LABEL: &[u8] = b"EXPORTER-fanin-secret";

/// A secret that ranks and switches have in common.
#[derive(Clone)]
pub struct Secret(Arc<hmac::Key>);

/// Who proves.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    Client,
    Server,
}

impl Secret {
    /// A secret of these bytes; `None` for so few that they could be guessed.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() >= BYTES_MIN).then(|| Self(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, bytes))))
    }

    /// The secret in a file. White space around it does not count.
    ///
    /// # Errors
    /// When the file cannot be read, or is too short.
    pub fn read(file: &Path) -> Result<Self, SetupError> {
        let bytes =
            std::fs::read(file).map_err(|cause| SetupError::File { what: WHAT, path: file.into(), cause })?;
        let bytes = bytes.trim_ascii();
        Self::new(bytes).ok_or_else(|| {
            let short = format!(
                "{} bytes could be guessed: make one by `head -c 32 /dev/urandom | base64 > FILE`",
                bytes.len()
            );
            SetupError::content(WHAT, file, short)
        })
    }

    pub(crate) fn proof(&self, role: Role, of_connection: &[u8; PROOF_BYTES]) -> [u8; PROOF_BYTES] {
        let tag = hmac::sign(&self.0, &said(role, of_connection));
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(tag.as_ref());
        proof
    }

    pub(crate) fn is_proof(
        &self,
        role: Role,
        of_connection: &[u8; PROOF_BYTES],
        proof: &[u8; PROOF_BYTES],
    ) -> bool {
        hmac::verify(&self.0, &said(role, of_connection), proof).is_ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The value that both ends of a connection know, and nobody else.
pub(crate) fn of_connection(
    export: impl FnOnce([u8; PROOF_BYTES], &[u8], Option<&[u8]>) -> Result<[u8; PROOF_BYTES], Error>,
) -> std::io::Result<[u8; PROOF_BYTES]> {
    export([0; PROOF_BYTES], LABEL, None).map_err(std::io::Error::other)
}

fn said(role: Role, of_connection: &[u8; PROOF_BYTES]) -> Vec<u8> {
    let role: &[u8] = match role {
        Role::Client => b"client",
        Role::Server => b"server",
    };
    [role, of_connection].concat()
}
