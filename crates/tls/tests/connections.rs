//! Tests of which ends are believed, which are not, and what an honest end hears of it.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fanin_tls::{Acceptor, ClientStream, Fingerprint, Identity, Secret, Trust, Untrusted};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, copy_bidirectional, duplex};

const SERVICE: &str = "box:4800";
const ROOM: usize = 1 << 16;

/// Files of one test.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).expect("written");
        path
    }

    fn identity(&self, name: &str) -> Identity {
        Identity::kept(&self.0.path().join(name)).expect("a key")
    }

    fn secret(&self, text: &str) -> PathBuf {
        self.file(&format!("secret-{text}"), text)
    }
}

fn trust(authorities: Option<&Path>, secret: Option<&Path>) -> Trust {
    Trust::read(authorities, secret).expect("files")
}

fn acceptor(identity: &Identity, secret: Option<&Path>) -> Acceptor {
    Acceptor::new(identity, secret.map(|file| Secret::read(file).expect("a secret")))
}

/// The views of both ends of a connection. The server answers what it is asked.
async fn connect(
    trust: &Trust,
    service: &str,
    acceptor: &Acceptor,
) -> (Result<ClientStream<DuplexStream>, Untrusted>, io::Result<()>) {
    let (ours, theirs) = duplex(ROOM);
    let acceptor = acceptor.clone();
    let served = tokio::spawn(async move { echo(&acceptor, theirs).await });
    let mut stream = trust.connect(service, ours).await;
    if let Ok(stream) = &mut stream {
        stream.write_all(b"ping").await.expect("sent");
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"ping");
    }
    let served = if stream.is_ok() { Ok(()) } else { served.await.expect("no panic") };
    (stream, served)
}

async fn echo(acceptor: &Acceptor, stream: DuplexStream) -> io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let mut asked = [0; 4];
    stream.read_exact(&mut asked).await?;
    stream.write_all(&asked).await
}

#[tokio::test]
async fn the_first_key_of_a_service_is_believed_and_no_other_one_after_it() {
    let files = Files::new();
    let (first, other) = (files.identity("first"), files.identity("other"));
    let trust = Trust::default();
    assert!(connect(&trust, SERVICE, &acceptor(&first, None)).await.0.is_ok());
    assert_eq!(trust.fingerprint(SERVICE), Some(first.fingerprint()));
    // The key is kept: who is started again is known.
    assert!(connect(&trust, SERVICE, &acceptor(&files.identity("first"), None)).await.0.is_ok());
    let (refused, _) = connect(&trust, SERVICE, &acceptor(&other, None)).await;
    let Err(Untrusted::OtherKey { known, seen }) = refused else { panic!("{refused:?}") };
    assert_eq!((known, seen), (first.fingerprint(), other.fingerprint()));
    // Another service has a key of its own.
    assert!(connect(&trust, "rack:4800", &acceptor(&other, None)).await.0.is_ok());
}

#[tokio::test]
async fn a_key_that_was_told_is_the_only_one_whoever_vouches_for_another() {
    let files = Files::new();
    let (authority, identity) = vouched(&files, "box");
    let trust = trust(Some(&authority), None);
    let own = files.identity("own");
    trust.insist(SERVICE, own.fingerprint());
    assert!(connect(&trust, SERVICE, &acceptor(&own, None)).await.0.is_ok(), "nobody need vouch for it");
    let (refused, _) = connect(&trust, SERVICE, &acceptor(&identity, None)).await;
    assert!(matches!(refused, Err(Untrusted::OtherKey { .. })), "{refused:?}");
}

#[tokio::test]
async fn an_authority_vouches_for_a_name_and_an_address_and_nobody_else() {
    let files = Files::new();
    let (authority, identity) = vouched(&files, "box");
    let trust = trust(Some(&authority), None);
    assert!(connect(&trust, SERVICE, &acceptor(&identity, None)).await.0.is_ok());
    for (service, identity) in [("rack:4800", identity), (SERVICE, files.identity("self-signed"))] {
        let (refused, served) = connect(&trust, service, &acceptor(&identity, None)).await;
        assert!(matches!(refused, Err(Untrusted::Certificate(_))), "{refused:?}");
        assert!(served.is_err());
    }
    let (authority, identity) = vouched(&files, "::1");
    let trust = self::trust(Some(&authority), None);
    assert!(connect(&trust, "[::1]:4800", &acceptor(&identity, None)).await.0.is_ok());
}

#[tokio::test]
async fn a_secret_is_asked_for_and_shown_by_both_ends() {
    let files = Files::new();
    let identity = files.identity("key");
    let (secret, other) = (files.secret("sixteen bytes or more"), files.secret("another secret of them"));
    let (with, without) = (acceptor(&identity, Some(&secret)), acceptor(&identity, None));
    let known = trust(None, Some(&secret));
    assert!(connect(&known, SERVICE, &with).await.0.is_ok());
    // A secret proves more than a key that was the first.
    assert!(connect(&known, SERVICE, &acceptor(&files.identity("new"), Some(&secret))).await.0.is_ok());

    let (refused, served) = connect(&Trust::default(), SERVICE, &with).await;
    assert!(matches!(refused, Err(Untrusted::SecretNeeded)), "{refused:?}");
    assert!(served.is_err());
    let (refused, _) = connect(&known, SERVICE, &without).await;
    assert!(matches!(refused, Err(Untrusted::SecretUnknown)), "{refused:?}");
    let (refused, served) = connect(&trust(None, Some(&other)), SERVICE, &with).await;
    assert!(matches!(refused, Err(Untrusted::SecretWrong)), "{refused:?}");
    assert_eq!(served.expect_err("refused").kind(), io::ErrorKind::PermissionDenied);
}

/// Takes a connection under a key of its own, and passes what it reads on to the true service.
async fn in_the_middle(key: &Identity, server: &Acceptor, ours: DuplexStream) -> io::Result<()> {
    let (theirs, at_server) = duplex(ROOM);
    let server = server.clone();
    tokio::spawn(async move { echo(&server, at_server).await });
    let mut inner = Acceptor::new(key, None).accept(ours).await?;
    let mut outer = Trust::default().connect(SERVICE, theirs).await.map_err(io::Error::other)?;
    copy_bidirectional(&mut inner, &mut outer).await.map(drop)
}

#[tokio::test]
async fn somebody_in_the_middle_with_a_key_of_their_own_is_refused_where_there_is_something_to_know_by() {
    let files = Files::new();
    let (authority, identity) = vouched(&files, "box");
    let secret = files.secret("nobody else has this one");
    let told = Trust::default();
    told.insist(SERVICE, identity.fingerprint());
    let first = Trust::default();
    assert!(connect(&first, SERVICE, &acceptor(&identity, None)).await.0.is_ok());
    let by_authority = trust(Some(&authority), None);
    let by_secret = trust(None, Some(&secret));
    let server = acceptor(&identity, None);
    for (how, trust) in [("told", told), ("first", first), ("authority", by_authority), ("secret", by_secret)]
    {
        let (ours, theirs) = duplex(ROOM);
        let (key, server) = (files.identity("middle"), server.clone());
        let middle = tokio::spawn(async move { in_the_middle(&key, &server, theirs).await });
        let refused = trust.connect(SERVICE, ours).await.expect_err(how);
        assert!(!matches!(refused, Untrusted::Io(_)), "{how}: {refused}");
        middle.abort();
    }
    // Without any of it nobody can tell.
    let (ours, theirs) = duplex(ROOM);
    let key = files.identity("middle");
    tokio::spawn(async move { in_the_middle(&key, &server, theirs).await });
    assert!(Trust::default().connect(SERVICE, ours).await.is_ok());
}

/// The proof of one end is of one connection: passed on from another one it proves nothing.
#[tokio::test]
async fn a_proof_that_is_passed_on_proves_nothing() {
    let files = Files::new();
    let identity = files.identity("key");
    let secret = files.secret("nobody else has this one");
    let server = acceptor(&identity, Some(&secret));
    let (ours, inner) = duplex(ROOM);
    let (outer, theirs) = duplex(ROOM);
    let served = tokio::spawn(async move { echo(&server, theirs).await });
    // It asks for a secret as the server does, and is asked as the client would be.
    let middle = tokio::spawn(async move {
        let mut inner = raw_acceptor().accept(inner).await?;
        let mut outer = raw_connector().connect("fanin".try_into().expect("a name"), outer).await?;
        copy_bidirectional(&mut inner, &mut outer).await
    });
    let refused = trust(None, Some(&secret)).connect(SERVICE, ours).await;
    assert!(matches!(refused, Err(Untrusted::SecretWrong)), "{refused:?}");
    assert_eq!(served.await.expect("no panic").expect_err("refused").kind(), io::ErrorKind::PermissionDenied);
    middle.abort();
}

#[tokio::test]
async fn what_speaks_no_tls_is_named_as_such() {
    let (ours, mut theirs) = duplex(ROOM);
    theirs.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("sent");
    let refused = Trust::default().connect(SERVICE, ours).await;
    assert!(matches!(refused, Err(Untrusted::NotTls)), "{refused:?}");
}

#[test]
fn a_key_that_is_kept_is_its_owner_s_alone_and_the_same_for_all_who_start_at_once() {
    let files = Files::new();
    let file = files.0.path().join("folder/key.pem");
    let starting: Vec<_> = (0..8)
        .map(|_| {
            let file = file.clone();
            std::thread::spawn(move || Identity::kept(&file).expect("a key").fingerprint())
        })
        .collect();
    let keys: Vec<Fingerprint> = starting.into_iter().map(|one| one.join().expect("no panic")).collect();
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    assert_eq!(fs::metadata(&file).expect("it is kept").permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(file.parent().expect("a folder")).expect("it").count(), 1, "no draft is left");
    assert_eq!(keys[0].to_string().parse(), Ok(keys[0]));
}

#[test]
fn files_that_are_of_no_use_are_named_with_what_is_wrong() {
    let files = Files::new();
    let (_, other) = (
        vouched(&files, "box"),
        files.file("other.pem", &KeyPair::generate().expect("a key").serialize_pem()),
    );
    let errors = [
        Secret::read(&files.secret("short")).map(drop),
        Secret::read(Path::new("/nowhere")).map(drop),
        Identity::kept(&files.file("no-key.pem", "no key")).map(drop),
        Identity::read(&files.0.path().join("box.pem"), &other).map(drop),
        Trust::read(Some(&files.file("no-ca.pem", "no certificate")), None).map(drop),
    ];
    let says = ["could be guessed", "/nowhere", "no private key", "belong together", "no certificate"];
    for (error, says) in errors.into_iter().zip(says) {
        let error = error.expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// An authority's file, and the identity of a service of this name or address that it vouches for.
fn vouched(files: &Files, name: &str) -> (PathBuf, Identity) {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new([]).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key).expect("a certificate");
    let authority_file = files.file(&format!("ca-{}.pem", name.len()), &authority.pem());
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new([name.to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    let certificate = files.file("box.pem", &certificate.pem());
    let key = files.file("box-key.pem", &key.serialize_pem());
    (authority_file, Identity::read(&certificate, &key).expect("they belong together"))
}

/// TLS as a secret's holders speak it, of somebody who has none.
const BEHIND_SECRET: &[u8] = b"fanin-secret";

fn raw_acceptor() -> tokio_rustls::TlsAcceptor {
    let pair = KeyPair::generate().expect("a key");
    let certificate = CertificateParams::new(["fanin".into()]).expect("a name").self_signed(&pair);
    let certificate = certificate.expect("a certificate").der().clone();
    let pair = rustls::pki_types::PrivateKeyDer::try_from(pair.serialize_der()).expect("a key");
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], pair)
        .expect("they belong together");
    config.alpn_protocols = vec![BEHIND_SECRET.to_vec()];
    std::sync::Arc::new(config).into()
}

fn raw_connector() -> tokio_rustls::TlsConnector {
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(std::sync::Arc::new(Anybody))
        .with_no_client_auth();
    config.alpn_protocols = vec![BEHIND_SECRET.to_vec()];
    std::sync::Arc::new(config).into()
}

fn provider() -> std::sync::Arc<rustls::crypto::CryptoProvider> {
    std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

#[derive(Debug)]
struct Anybody;

impl rustls::client::danger::ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}
