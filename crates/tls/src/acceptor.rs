//! The end of a connection that serves.

use std::io;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::secret::{PROOF_BYTES, Role, of_connection};
use crate::{Fingerprint, HTTP2, HTTP2_BEHIND_SECRET, Identity, Secret, SetupError};

/// Takes connections under an identity, from those alone who know the secret, if there is one.
#[derive(Clone)]
pub struct Acceptor {
    tls: TlsAcceptor,
    secret: Option<Secret>,
    fingerprint: Fingerprint,
}

impl Acceptor {
    /// Takes connections under this identity, from those alone who know this secret.
    #[must_use]
    pub fn new(identity: &Identity, secret: Option<Secret>) -> Self {
        // An end without the secret shares no protocol with an end that has one, and is told so by
        // TLS.
        let protocol = if secret.is_some() { HTTP2_BEHIND_SECRET } else { HTTP2 };
        let mut config = ServerConfig::clone(&identity.config);
        config.alpn_protocols = vec![protocol.to_vec()];
        Self { tls: Arc::new(config).into(), secret, fingerprint: identity.fingerprint() }
    }

    /// Takes connections of everybody, under the identity of this process.
    ///
    /// # Errors
    /// When no key can be made.
    pub fn of_process() -> Result<Self, SetupError> {
        Ok(Self::new(&Identity::of_process()?, None))
    }

    /// By what others know it.
    #[must_use]
    pub const fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Hears a connection's other end before it is served. It has no limit of time.
    ///
    /// # Errors
    /// When the connection breaks, the other end speaks no TLS 1.3, or does not know the secret.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let mut stream = self.tls.accept(stream).await?;
        let Some(secret) = &self.secret else { return Ok(stream) };
        let (_, connection) = stream.get_ref();
        let refused = |cause: &str| io::Error::new(io::ErrorKind::PermissionDenied, cause);
        if connection.alpn_protocol() != Some(HTTP2_BEHIND_SECRET) {
            return Err(refused("it knows of no secret"));
        }
        let value =
            of_connection(|out, label, context| connection.export_keying_material(out, label, context))?;
        let mut proof = [0; PROOF_BYTES];
        stream.read_exact(&mut proof).await?;
        if !secret.is_proof(Role::Client, &value, &proof) {
            // It is told by the end of the connection.
            let _ = stream.shutdown().await;
            return Err(refused("it has another secret"));
        }
        stream.write_all(&secret.proof(Role::Server, &value)).await?;
        stream.flush().await?;
        Ok(stream)
    }
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Acceptor")
            .field("fingerprint", &self.fingerprint)
            .field("secret", &self.secret)
            .finish()
    }
}
