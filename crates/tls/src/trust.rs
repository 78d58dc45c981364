//! The end of a connection that connects, and by what it knows the other one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{
    AlertDescription, ClientConfig, DigitallySignedStruct, Error, PeerIncompatible, RootCertStore,
    SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::identity::certificates;
use crate::secret::{PROOF_BYTES, Role, of_connection};
use crate::{Fingerprint, HTTP2, HTTP2_BEHIND_SECRET, Secret, SetupError, Untrusted, provider};

const AUTHORITIES: &str = "authority's certificate (--tls-ca)";
/// Said where no name is looked at.
const ANY_NAME: &str = "fanin";

/// By what the services of a job, or whatever else a process connects to, are known. Clones share
/// what they learn.
#[derive(Clone, Debug)]
pub struct Trust(Arc<Inner>);

struct Inner {
    /// The connector if the key decides.
    by_key: TlsConnector,
    /// The connector if an authority decides, if there is one.
    by_authority: Option<TlsConnector>,
    secret: Option<Secret>,
    /// Keys, by the name of the service.
    keys: Mutex<HashMap<String, Key>>,
}

#[derive(Clone, Copy, Debug)]
struct Key {
    fingerprint: Fingerprint,
    /// By somebody who knows it, and not by the service itself at its first connection.
    is_told: bool,
}

impl Trust {
    /// The authorities' certificates and the secret in these files. Without either, the first key
    /// of a service is believed, and no other one from then on.
    ///
    /// # Errors
    /// When a file cannot be read, or does not hold what it should.
    pub fn read(authorities: Option<&Path>, secret: Option<&Path>) -> Result<Self, SetupError> {
        let secret = secret.map(Secret::read).transpose()?;
        let Some(file) = authorities else { return Ok(Self::new(None, secret)) };
        let wrong = |cause: String| SetupError::content(AUTHORITIES, file, cause);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(AUTHORITIES, file)? {
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        Ok(Self::new(Some(verifier.map_err(|error| wrong(error.to_string()))?), secret))
    }

    fn new(authorities: Option<Arc<WebPkiServerVerifier>>, secret: Option<Secret>) -> Self {
        let protocol = if secret.is_some() { HTTP2_BEHIND_SECRET } else { HTTP2 };
        let provider = provider();
        let by_key = connector(Arc::new(AnyKey(Arc::clone(&provider))), Arc::clone(&provider), protocol);
        let by_authority = authorities.map(|verifier| connector(verifier, provider, protocol));
        Self(Arc::new(Inner { by_key, by_authority, secret, keys: Mutex::default() }))
    }

    /// From now on the service has this key, and none that anybody else vouches for.
    pub fn insist(&self, service: &str, fingerprint: Fingerprint) {
        self.keys().insert(service.to_owned(), Key { fingerprint, is_told: true });
    }

    /// The key by which the service is known: it was told, or seen at its first connection. `None`
    /// if something other than its key decides.
    #[must_use]
    pub fn fingerprint(&self, service: &str) -> Option<Fingerprint> {
        self.keys().get(service).map(|key| key.fingerprint)
    }

    /// The key that the service was said to have, by somebody who knows it.
    #[must_use]
    pub fn told(&self, service: &str) -> Option<Fingerprint> {
        self.keys().get(service).filter(|key| key.is_told).map(|key| key.fingerprint)
    }

    /// Makes of a connection to the service, `host:port`, one to it and to nobody else. It has no
    /// limit of time.
    ///
    /// # Errors
    /// When the connection breaks, or does not lead to the service.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        service: &str,
        stream: S,
    ) -> Result<TlsStream<S>, Untrusted> {
        let Inner { by_key, by_authority, secret, .. } = &*self.0;
        let told = self.told(service);
        let authority = by_authority.as_ref().filter(|_| told.is_none());
        let connecting = match authority {
            Some(authority) => authority.connect(name(service)?, stream),
            None => by_key.connect(ServerName::try_from(ANY_NAME).expect("it is a name"), stream),
        };
        let mut stream = connecting.await.map_err(|error| meaning(error, secret.is_some()))?;
        if authority.is_none() {
            let (_, connection) = stream.get_ref();
            let certificate = connection.peer_certificates().and_then(|chain| chain.first());
            let seen = certificate.and_then(Fingerprint::of).ok_or(Untrusted::NotTls)?;
            // A secret proves more than the first key does.
            let known = told.or_else(|| secret.is_none().then(|| self.first(service, seen)));
            if let Some(known) = known.filter(|known| *known != seen) {
                return Err(Untrusted::OtherKey { known, seen });
            }
        }
        if let Some(secret) = secret {
            prove(secret, &mut stream).await?;
        }
        Ok(stream)
    }

    /// The key that the service had first: this one, if it had none before.
    fn first(&self, service: &str, seen: Fingerprint) -> Fingerprint {
        match self.keys().entry(service.to_owned()) {
            Entry::Occupied(known) => known.get().fingerprint,
            Entry::Vacant(new) => new.insert(Key { fingerprint: seen, is_told: false }).fingerprint,
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Trust {
    /// The first key of a service is believed.
    fn default() -> Self {
        Self::new(None, None)
    }
}

impl PartialEq for Trust {
    /// Whether they learn together.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Trust {}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by_authority = self.by_authority.is_some();
        f.debug_struct("Trust")
            .field("by_authority", &by_authority)
            .field("secret", &self.secret)
            .finish_non_exhaustive()
    }
}

/// Proves to the other end that this one knows the secret, and has it prove the same.
async fn prove<S: AsyncRead + AsyncWrite + Unpin>(
    secret: &Secret,
    stream: &mut TlsStream<S>,
) -> Result<(), Untrusted> {
    let (_, connection) = stream.get_ref();
    if connection.alpn_protocol() != Some(HTTP2_BEHIND_SECRET) {
        return Err(Untrusted::SecretUnknown);
    }
    let value = of_connection(|out, label, context| connection.export_keying_material(out, label, context))?;
    stream.write_all(&secret.proof(Role::Client, &value)).await?;
    stream.flush().await?;
    let (mut proof, mut have) = ([0; PROOF_BYTES], 0);
    while have < PROOF_BYTES {
        // A connection that breaks says no farewell, and that is an error of the connection.
        match stream.read(&mut proof[have..]).await? {
            0 => return Err(Untrusted::SecretWrong),
            more => have += more,
        }
    }
    if secret.is_proof(Role::Server, &value, &proof) { Ok(()) } else { Err(Untrusted::SecretWrong) }
}

/// The meaning of an error of the handshake.
fn meaning(error: io::Error, has_secret: bool) -> Untrusted {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::AlertReceived(AlertDescription::NoApplicationProtocol)) if has_secret => {
            Untrusted::SecretUnknown
        }
        Some(Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => Untrusted::SecretNeeded,
        Some(Error::InvalidCertificate(cause)) => Untrusted::Certificate(cause.to_string()),
        Some(
            Error::InvalidMessage(_)
            | Error::PeerIncompatible(PeerIncompatible::ServerDoesNotSupportTls12Or13),
        ) => Untrusted::NotTls,
        _ => Untrusted::Io(error),
    }
}

/// The name under which an authority knows a service.
fn name(service: &str) -> Result<ServerName<'static>, Untrusted> {
    let host = service.rsplit_once(':').map_or(service, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let wrong = |_| Untrusted::Certificate(format!("{host:?} is no name that a certificate could have"));
    ServerName::try_from(host.to_owned()).map_err(wrong)
}

fn connector(
    verifier: Arc<dyn ServerCertVerifier>,
    provider: Arc<CryptoProvider>,
    protocol: &[u8],
) -> TlsConnector {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the provider has what TLS 1.3 needs")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    config.enable_sni = false;
    // Each connection is judged anew.
    config.resumption = Resumption::disabled();
    Arc::new(config).into()
}

/// Has the other end show that a key is its own, whichever: what it must be is looked at when that
/// is done.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
