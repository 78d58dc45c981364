//! Faults of files, and of the peer that a connection leads to.

use std::io;
use std::path::PathBuf;

use crate::Fingerprint;

/// Why there is no identity, authority or secret.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read or written.
    #[error("the {what} {}: {cause}", path.display())]
    File {
        /// The content that it should have.
        what: &'static str,
        /// The path where it should be.
        path: PathBuf,
        /// The operating system's answer, or what is wrong with its content.
        cause: io::Error,
    },
    /// Key and certificate do not work.
    #[error("the certificate and its key cannot be used: {0}; do they belong together?")]
    Key(String),
}

impl SetupError {
    pub(crate) fn content(what: &'static str, path: &std::path::Path, cause: impl Into<String>) -> Self {
        let cause = io::Error::new(io::ErrorKind::InvalidData, cause.into());
        Self::File { what, path: path.into(), cause }
    }
}

/// Why a connection is not used.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    /// It broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The other end does not answer as TLS does.
    #[error("it speaks no TLS: it is a fanin of another version, or another program")]
    NotTls,
    /// The other end has not the key that it should have.
    #[error(
        "its key is {seen}, and not {known}: somebody may stand in between. If it was started again with a new key, keep its key \
         in a file (--tls-key), and start the job again"
    )]
    OtherKey {
        /// The one that it should have.
        known: Fingerprint,
        /// The one that it has.
        seen: Fingerprint,
    },
    /// The authority does not vouch for it.
    #[error("its certificate is not one that --tls-ca (FANIN_TLS_CA) vouches for: {0}")]
    Certificate(String),
    /// It asks for a secret.
    #[error(
        "it asks for a secret, and this process has none: name a file with its secret (--secret-file or FANIN_SECRET_FILE)"
    )]
    SecretNeeded,
    /// It knows of no secret.
    #[error(
        "this process has a secret, and it asks for none: start it with the same one (--secret-file or FANIN_SECRET_FILE)"
    )]
    SecretUnknown,
    /// It has another secret.
    #[error("it has another secret: name the same one at both ends (--secret-file or FANIN_SECRET_FILE)")]
    SecretWrong,
}
