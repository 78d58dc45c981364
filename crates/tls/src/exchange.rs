//! A key that two processes share through a place that others read, too, such as torch's store.
//!
//! Each puts a public key there that it made for this once. It makes of its private one and the
//! other's public one a key that nobody else can (X25519, RFC 7748; HKDF, RFC 5869). A process that
//! only reads learns nothing. A process that *writes* there can take the other's place: that is not
//! kept out here.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::agreement::{PrivateKey, UnparsedPublicKey, X25519, agree};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};

const KEY_BYTES: usize = 32;
const SALT: &[u8] = b"fanin-exchange";

/// An end of an exchange.
pub struct Exchange {
    private: PrivateKey,
    public: [u8; KEY_BYTES],
}

/// The other end's words are of no use: they are no public key, or nothing that was sealed for this
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is not what the other end put there")]
pub struct Unreadable;

impl Exchange {
    /// An end that nobody had before.
    ///
    /// # Errors
    /// When the operating system gives no random numbers.
    pub fn new() -> Result<Self, Unspecified> {
        let private = PrivateKey::generate(&X25519)?;
        let public = private.compute_public_key()?.as_ref().try_into().map_err(|_| Unspecified)?;
        Ok(Self { private, public })
    }

    /// The public key, which everybody may read.
    #[must_use]
    pub const fn public(&self) -> [u8; KEY_BYTES] {
        self.public
    }

    /// A key that this end and the one with that public key have alone, the same at both.
    ///
    /// # Errors
    /// When it is no public key.
    pub fn key(&self, other: &[u8]) -> Result<[u8; KEY_BYTES], Unreadable> {
        let both =
            if self.public.as_slice() <= other { [&self.public, other] } else { [other, &self.public] };
        let derived = |shared: &[u8]| {
            let mut key = [0; KEY_BYTES];
            let derived = Salt::new(HKDF_SHA256, SALT).extract(shared);
            derived
                .expand(&both, HKDF_SHA256)
                .and_then(|derived| derived.fill(&mut key))
                .map_err(|_| Unreadable)?;
            Ok(key)
        };
        agree(&self.private, UnparsedPublicKey::new(&X25519, other), Unreadable, derived)
    }

    /// Words that the end with that public key can read, and nobody else.
    ///
    /// # Errors
    /// When it is no public key.
    pub fn seal(&self, other: &[u8], words: &[u8]) -> Result<Vec<u8>, Unreadable> {
        let mut sealed = words.to_vec();
        let nonce = self.cipher(other)?.seal_in_place_append_tag(Aad::empty(), &mut sealed);
        let nonce = nonce.map_err(|_| Unreadable)?;
        Ok([nonce.as_ref().as_slice(), &sealed].concat())
    }

    /// Opens what the end with that public key sealed for this one.
    ///
    /// # Errors
    /// When it did not.
    pub fn open(&self, other: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Unreadable> {
        let (nonce, words) = sealed.split_at_checked(NONCE_LEN).ok_or(Unreadable)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| Unreadable)?;
        let mut words = words.to_vec();
        let opened = self.cipher(other)?.open_in_place(nonce, Aad::empty(), &mut words);
        opened.map(|words| words.to_vec()).map_err(|_| Unreadable)
    }

    fn cipher(&self, other: &[u8]) -> Result<RandomizedNonceKey, Unreadable> {
        RandomizedNonceKey::new(&AES_256_GCM, &self.key(other)?).map_err(|_| Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ends_have_one_key_and_read_what_is_sealed_and_nobody_else_does() {
        let [one, other, third] = [(); 3].map(|()| Exchange::new().expect("random numbers"));
        assert_eq!(one.key(&other.public()), other.key(&one.public()));
        assert_ne!(one.key(&other.public()), one.key(&third.public()));
        let sealed = one.seal(&other.public(), b"job").expect("a public key");
        assert!(!sealed.windows(3).any(|words| words == b"job"));
        assert_eq!(other.open(&one.public(), &sealed).as_deref(), Ok(&b"job"[..]));
        assert_eq!(third.open(&one.public(), &sealed), Err(Unreadable));
        assert_eq!(other.open(&third.public(), &sealed), Err(Unreadable));
        for changed in 0..sealed.len() {
            let mut sealed = sealed.clone();
            sealed[changed] ^= 1;
            assert_eq!(other.open(&one.public(), &sealed), Err(Unreadable));
        }
        for none in [&[][..], &[0; KEY_BYTES], &[1; 31]] {
            assert_eq!(one.key(none), Err(Unreadable), "{none:?}");
            assert_eq!(one.open(&other.public(), none), Err(Unreadable));
        }
    }
}
