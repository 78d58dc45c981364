//! The identity of a server: a key, and the certificate that carries it.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use aws_lc_rs::digest;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;

use crate::{SetupError, provider};

const CERTIFICATE: &str = "certificate (--tls-cert)";
const KEY: &str = "key (--tls-key)";
/// A key is its owner's alone.
const MODE: u32 = 0o600;
/// Name in a certificate that nobody vouches for; nobody looks at it.
const NAME: &str = "fanin";
const FINGERPRINT_BYTES: usize = 32;

static OF_PROCESS: OnceLock<Identity> = OnceLock::new();

/// By what a key is known: SHA-256 of the public key as certificates carry it
/// (SubjectPublicKeyInfo), in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; FINGERPRINT_BYTES]);

impl Fingerprint {
    /// The fingerprint of a certificate's key; `None` if it is no certificate.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let key = ParsedCertificate::try_from(certificate).ok()?.subject_public_key_info();
        let hash = digest::digest(&digest::SHA256, key.as_ref());
        hash.as_ref().try_into().ok().map(Self)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "a fingerprint has 64 hexadecimal digits";
        if text.len() != 2 * FINGERPRINT_BYTES || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        let mut bytes = [0; FINGERPRINT_BYTES];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong)?;
        }
        Ok(Self(bytes))
    }
}

/// A key and its certificate.
#[derive(Clone, Debug)]
pub struct Identity {
    pub(crate) config: Arc<ServerConfig>,
    fingerprint: Fingerprint,
}

impl Identity {
    /// The one of this process, which ends with it: all that it serves has the same.
    ///
    /// # Errors
    /// When no key can be made.
    pub fn of_process() -> Result<Self, SetupError> {
        if let Some(made) = OF_PROCESS.get() {
            return Ok(made.clone());
        }
        let made = Self::self_signed(&new_key()?)?;
        Ok(OF_PROCESS.get_or_init(|| made).clone())
    }

    /// The key that is kept in this file, with a certificate that nobody vouches for; a new key
    /// where there is no file.
    ///
    /// # Errors
    /// When the file can be neither read nor written, or holds no key.
    pub fn kept(file: &Path) -> Result<Self, SetupError> {
        let failed = |cause| SetupError::File { what: KEY, path: file.into(), cause };
        let text = match fs::read_to_string(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                keep(file, &new_key()?).map_err(failed)?;
                // Another process may have been faster.
                fs::read_to_string(file)
            }
            read => read,
        };
        let text = text.map_err(failed)?;
        let key = KeyPair::from_pem(&text)
            .map_err(|error| SetupError::content(KEY, file, format!("it holds no private key: {error}")))?;
        Self::self_signed(&key)
    }

    /// The certificate in one file, with what leads from it to its authority, and the key in
    /// another.
    ///
    /// # Errors
    /// When a file cannot be read, or they do not belong together.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, SetupError> {
        let chain = certificates(CERTIFICATE, certificate)?;
        let key = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| SetupError::content(KEY, key, error.to_string()))?;
        Self::new(chain, key)
    }

    /// By what others know its key.
    #[must_use]
    pub const fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn self_signed(key: &KeyPair) -> Result<Self, SetupError> {
        let params = CertificateParams::new([NAME.to_owned()]).map_err(broken)?;
        let certificate = params.self_signed(key).map_err(broken)?;
        let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(broken)?;
        Self::new(vec![certificate.der().clone()], key)
    }

    fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self, SetupError> {
        let fingerprint = chain.first().and_then(Fingerprint::of);
        let fingerprint = fingerprint.ok_or_else(|| broken("it is no certificate"))?;
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(broken)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(broken)?;
        // Nobody resumes a session: it would save the signature alone.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), fingerprint })
    }
}

/// All certificates of a file, at least one.
pub(crate) fn certificates(
    what: &'static str,
    file: &Path,
) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found: Vec<_> = read.map_err(|error| SetupError::content(what, file, error.to_string()))?;
    if found.is_empty() {
        return Err(SetupError::content(what, file, "it holds no certificate in PEM"));
    }
    Ok(found)
}

fn new_key() -> Result<KeyPair, SetupError> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(broken)
}

/// Writes a key into a file that is not there. A process that is slower than another one keeps the
/// other's.
fn keep(file: &Path, key: &KeyPair) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    static DRAFTS: AtomicU32 = AtomicU32::new(0);
    let mut draft = file.as_os_str().to_owned();
    draft.push(format!(".{}.{}", std::process::id(), DRAFTS.fetch_add(1, Ordering::Relaxed)));
    let draft = Path::new(&draft);
    let mut open = OpenOptions::new();
    open.write(true).create(true).truncate(true).mode(MODE);
    let written = open.open(draft).and_then(|mut opened| {
        opened.write_all(key.serialize_pem().as_bytes())?;
        opened.sync_all()
    });
    // A link is there whole or not at all, and never in the place of another.
    let linked = written.and_then(|()| match fs::hard_link(draft, file) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    });
    let _ = fs::remove_file(draft);
    linked
}

fn broken(cause: impl ToString) -> SetupError {
    SetupError::Key(cause.to_string())
}
