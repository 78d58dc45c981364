//! Secures the packets that leave by a thread's sockets, and opens those that come, of the jobs whose members agreed on it
//! (`docs/security.md`). Machines know nothing of it: what they write and read are packets as `fanin-wire` has them.
//!
//! A nonce is never used twice under a key. Each thread draws 8 bytes of it at random and counts its packets in the other 4. It draws again when it is
//! started again, and when the count is at its end.

use crate::train_socket::{DATAGRAM_BYTES_MAX, TRAIN_BYTES};
use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::{hkdf, rand};
use fanin_wire::{
    JobId, Key, NONCE_BYTES, Preamble, SEAL_BYTES, SEAL_TAG_BYTES, SEALED_HEAD_BYTES, Security, begin_sealed,
    end_sealed,
};
use std::collections::BTreeMap;

/// Bytes of a nonce that are drawn.
const DRAWN_BYTES: usize = 8;

/// Bytes of a train that is to be secured, so that the kernel still takes it in one call: it grows by so much a packet, and a call takes at most 128.
const SECURED_TRAIN_BYTES: usize = DATAGRAM_BYTES_MAX - 128 * SEAL_BYTES;

/// HKDF derives the keys of packets for this purpose: no other use of a job's key makes the same.
const PURPOSE: &[u8] = b"fanin data path, AES-128-GCM";

/// The jobs of a thread, and how their packets are secured.
pub(crate) struct Seals {
    jobs: BTreeMap<JobId, Seal>,
    /// Whether any of them is more than tagged.
    is_any_secured: bool,
    nonces: Nonces,
    /// The train that was secured last.
    sealed: Vec<u8>,
    /// Packets of secured jobs that came and are not authentic.
    pub(crate) forged: u64,
}

struct Seal {
    key: Key,
    /// None where headers are tagged alone.
    aead: Option<LessSafeKey>,
}

/// Nonces, each once.
struct Nonces {
    drawn: [u8; DRAWN_BYTES],
    /// None at the end of a count, and at first.
    next: Option<u32>,
}

impl Seals {
    pub(crate) fn new() -> Self {
        let nonces = Nonces { drawn: [0; DRAWN_BYTES], next: None };
        Self { jobs: BTreeMap::new(), is_any_secured: false, nonces, sealed: Vec::new(), forged: 0 }
    }

    /// The packets of a job are secured as its key says, from now on.
    pub(crate) fn add(&mut self, job: JobId, key: Key) {
        let aead = (key.security() != Security::Tag).then(|| derived(key));
        self.jobs.insert(job, Seal { key, aead });
        self.look();
    }

    /// A job is over: none of its packets leaves any more.
    pub(crate) fn forget(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.look();
    }

    fn look(&mut self) {
        self.is_any_secured = self.jobs.values().any(|seal| seal.aead.is_some());
    }

    /// Bytes of a train that a machine may write.
    pub(crate) const fn train_bytes(&self) -> usize {
        if self.is_any_secured { SECURED_TRAIN_BYTES } else { TRAIN_BYTES }
    }

    /// A train as it is to leave, and how long its packets are. `None` where it must not leave: it is of several jobs, its job is not known, or the
    /// operating system has no random bytes.
    pub(crate) fn seal<'train>(
        &'train mut self,
        train: &'train [u8],
        segment_bytes: usize,
    ) -> Option<(&'train [u8], usize)> {
        let segment_bytes = segment_bytes.max(1);
        let job = job_of(train)?;
        let Seal { key, aead } = self.jobs.get(&job)?;
        if self.is_any_secured && !train.chunks(segment_bytes).all(|packet| job_of(packet) == Some(job)) {
            return None;
        }
        let Some(aead) = aead else { return Some((train, segment_bytes)) };
        let count = train.len().div_ceil(segment_bytes);
        self.sealed.resize(train.len() + count * SEAL_BYTES, 0);
        let sealed_bytes = segment_bytes + SEAL_BYTES;
        for (packet, out) in train.chunks(segment_bytes).zip(self.sealed.chunks_mut(sealed_bytes)) {
            let nonce = self.nonces.next()?;
            begin_sealed(packet, nonce, out)?;
            finish(aead, key.security(), nonce, out).ok()?;
        }
        Some((&self.sealed, sealed_bytes))
    }

    /// A packet of this job that came, as its sender wrote it. If the job is secured and the packet
    /// is not authentic, the packet is counted as forged, and `None` returned.
    pub(crate) fn open<'packet>(
        &mut self,
        job: JobId,
        packet: &'packet mut [u8],
    ) -> Option<&'packet mut [u8]> {
        if !self.is_any_secured {
            return Some(packet);
        }
        let Some(Seal { key, aead: Some(aead) }) = self.jobs.get(&job) else { return Some(packet) };
        let opened = check(aead, key.security(), packet).ok().and_then(|()| end_sealed(*key, packet));
        if opened.is_none() {
            self.forged += 1;
        }
        opened
    }
}

/// Authenticates a packet, and encrypts it where that is asked for; its tag comes to its end.
fn finish(
    aead: &LessSafeKey,
    security: Security,
    nonce: [u8; NONCE_BYTES],
    packet: &mut [u8],
) -> Result<(), Unspecified> {
    let (packet, place) = packet.split_last_chunk_mut::<SEAL_TAG_BYTES>().ok_or(Unspecified)?;
    let nonce = Nonce::assume_unique_for_key(nonce);
    let (readable, secret) = packet.split_at_mut(readable_bytes(security, packet.len()));
    let tag = aead.seal_in_place_separate_tag(nonce, Aad::from(&*readable), secret)?;
    place.copy_from_slice(tag.as_ref());
    Ok(())
}

/// Decrypts a packet where it is encrypted, if it is authentic.
fn check(aead: &LessSafeKey, security: Security, packet: &mut [u8]) -> Result<(), Unspecified> {
    let (packet, tag) = packet.split_last_chunk_mut::<SEAL_TAG_BYTES>().ok_or(Unspecified)?;
    if packet.len() < SEALED_HEAD_BYTES {
        return Err(Unspecified);
    }
    let (readable, secret) = packet.split_at_mut(readable_bytes(security, packet.len()));
    let (_, nonce) = readable[..SEALED_HEAD_BYTES].split_last_chunk().ok_or(Unspecified)?;
    let nonce = Nonce::assume_unique_for_key(*nonce);
    aead.open_in_place_separate_tag(nonce, Aad::from(&*readable), &*tag, secret).map(drop)
}

/// How much of a packet, from its beginning, is not encrypted.
fn readable_bytes(security: Security, packet_bytes: usize) -> usize {
    if security == Security::Encrypt { SEALED_HEAD_BYTES } else { packet_bytes }
}

fn job_of(packet: &[u8]) -> Option<JobId> {
    Preamble::parse(packet).ok().map(|preamble| preamble.job)
}

/// The key of a job's packets, which is made of the job's: HKDF with SHA-256 (RFC 5869), without a salt.
fn derived(key: Key) -> LessSafeKey {
    let made = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&key.secret().to_le_bytes());
    let purpose = [PURPOSE, &[key.security() as u8]];
    let key = made.expand(&purpose, &AES_128_GCM).map(UnboundKey::from);
    // HKDF makes up to 8,160 bytes, and is asked for 16. No packet leads here: keys come with admission.
    LessSafeKey::new(key.expect("HKDF makes 16 bytes"))
}

impl Nonces {
    /// `None` where the operating system has no random bytes.
    fn next(&mut self) -> Option<[u8; NONCE_BYTES]> {
        let count = match self.next {
            Some(count) => count,
            None => {
                rand::fill(&mut self.drawn).ok()?;
                0
            }
        };
        self.next = count.checked_add(1);
        let mut nonce = [0; NONCE_BYTES];
        nonce[..DRAWN_BYTES].copy_from_slice(&self.drawn);
        nonce[DRAWN_BYTES..].copy_from_slice(&count.to_le_bytes());
        Some(nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_wire::{BlockHeader, BlockPacket, FlowId, Generation, Kind, ShardId, Tag, WorkerId};
    use std::collections::BTreeSet;

    const JOB: JobId = JobId(0xdead_beef);
    const SECRET: u128 = 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100;

    /// The packets of the golden file, of every kind.
    fn golden() -> Vec<Vec<u8>> {
        let lines = include_str!("../../wire/golden/packets.txt").lines();
        let packets = lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(|line| {
            let hex: String = line.split_whitespace().skip(1).collect();
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
        });
        packets.collect()
    }

    fn seals(security: Security) -> Seals {
        let mut seals = Seals::new();
        seals.add(JOB, Key::new(SECRET).with(security));
        seals
    }

    fn sealed(seals: &mut Seals, packet: &[u8]) -> Vec<u8> {
        let (train, segment_bytes) = seals.seal(packet, packet.len()).unwrap();
        assert_eq!(train.len(), segment_bytes);
        train.to_vec()
    }

    #[test]
    fn every_kind_of_packet_comes_out_as_it_went_in() {
        for security in Security::ALL {
            let (mut here, mut there) = (seals(security), seals(security));
            for header in golden() {
                for payload in [0, 1, 1024, 8196] {
                    // A signal and an abort have none.
                    let packet = match header[3] {
                        4 | 8 => header.clone(),
                        _ => [header.clone(), (0..payload).map(|i| i as u8).collect()].concat(),
                    };
                    let mut on_the_way = sealed(&mut here, &packet);
                    assert_eq!(on_the_way.len(), packet.len() + security.extra_bytes());
                    assert_eq!(on_the_way[..12], packet[..12], "what steers is readable");
                    assert_eq!(
                        there.open(JOB, &mut on_the_way).as_deref(),
                        Some(&packet[..]),
                        "{security:?}"
                    );
                }
            }
            assert_eq!(there.forged, 0);
        }
    }

    #[test]
    fn the_bytes_of_secured_packets_are_the_golden_ones() {
        let golden_sealed = include_str!("../../wire/golden/sealed.txt");
        let packets = golden();
        let mut lines = golden_sealed.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        for security in [Security::Authenticate, Security::Encrypt] {
            let mut seals = seals(security);
            seals.nonces = Nonces { drawn: [1, 2, 3, 4, 5, 6, 7, 8], next: Some(9) };
            for number in [0, packets.len() - 1] {
                let hex: String =
                    sealed(&mut seals, &packets[number]).iter().map(|b| format!("{b:02x}")).collect();
                let line = lines.next().expect("as many lines as packets");
                assert_eq!(line.split_whitespace().skip(1).collect::<String>(), hex);
            }
        }
        assert_eq!(lines.next(), None);
    }

    #[test]
    fn a_train_is_secured_packet_by_packet_the_last_perhaps_shorter() {
        let packet = &golden()[0];
        let train = [packet.repeat(3), packet[..packet.len() - 8].to_vec()].concat();
        let (mut here, mut there) = (seals(Security::Encrypt), seals(Security::Encrypt));
        // Without a tag the last is no packet, and so none of the train leaves: a machine writes no such thing.
        assert!(here.seal(&train, packet.len()).is_none());
        let longer = [packet.clone(), vec![7; 100]].concat();
        let train = [longer.repeat(3), packet.clone()].concat();
        let (sealed, segment_bytes) = here.seal(&train, longer.len()).unwrap();
        let mut sealed = sealed.to_vec();
        let opened: Vec<_> = sealed
            .chunks_mut(segment_bytes)
            .map(|packet| there.open(JOB, packet).unwrap().to_vec())
            .collect();
        assert_eq!(opened, [longer.clone(), longer.clone(), longer, packet.clone()]);
    }

    #[test]
    fn a_packet_that_was_changed_anywhere_is_dropped_and_counted() {
        let preamble = Preamble {
            kind: Kind::Block,
            job: JOB,
            generation: Generation(0),
            worker: WorkerId(1),
            shard: ShardId(0),
        };
        let header = BlockHeader {
            flow: FlowId(1),
            block: 2,
            round: 0,
            tag: Tag { priority: 1, important: true, path: 3 },
            contributions: 1,
            last: false,
            restored: false,
        };
        let mut packet = vec![0; 36 + 16];
        for security in [Security::Authenticate, Security::Encrypt] {
            let key = Key::new(SECRET).with(security);
            BlockPacket::write(&mut packet, key, &preamble, &header, |payload| payload.fill(0x5a));
            let (mut here, mut there) = (seals(security), seals(security));
            let on_the_way = sealed(&mut here, &packet);
            let is_readable = on_the_way.windows(16).any(|window| window == [0x5a; 16]);
            assert_eq!(is_readable, security == Security::Authenticate);
            let mut changed = 0;
            for bit in 0..8 * on_the_way.len() {
                let mut other = on_the_way.clone();
                other[bit / 8] ^= 1 << (bit % 8);
                if job_of(&other) != Some(JOB) {
                    continue; // Of no job that is known: the machine drops it.
                }
                assert_eq!(there.open(JOB, &mut other), None, "bit {bit}");
                changed += 1;
            }
            for length in 12..on_the_way.len() {
                assert_eq!(there.open(JOB, &mut on_the_way.clone()[..length]), None, "{length} bytes");
                changed += 1;
            }
            // Not secured at all, under another key, or otherwise.
            assert_eq!(there.open(JOB, &mut packet.clone()), None);
            let mut other = Seals::new();
            other.add(JOB, Key::new(SECRET ^ 1).with(security));
            assert_eq!(other.open(JOB, &mut on_the_way.clone()), None);
            let [weaker] = Security::ALL
                .into_iter()
                .filter(|other| ![security, Security::Tag].contains(other))
                .collect::<Vec<_>>()[..]
            else {
                unreachable!("two are left out");
            };
            assert_eq!(seals(weaker).open(JOB, &mut on_the_way.clone()), None);
            assert_eq!(there.forged, changed + 1);
            assert_eq!(there.open(JOB, &mut on_the_way.clone()).as_deref(), Some(&packet[..]));
        }
    }

    #[test]
    fn no_nonce_is_used_twice_also_after_a_start_and_at_the_end_of_a_count() {
        let mut used = BTreeSet::new();
        for _ in 0..100 {
            let mut nonces = Nonces { drawn: [0; DRAWN_BYTES], next: None };
            for _ in 0..10 {
                assert!(used.insert(nonces.next().unwrap()));
            }
            nonces.next = Some(u32::MAX - 1);
            for _ in 0..10 {
                assert!(used.insert(nonces.next().unwrap()));
            }
        }
    }

    #[test]
    fn nothing_leaves_of_a_job_that_is_not_known_and_what_comes_of_it_is_the_machines() {
        let mut packet = golden().remove(0);
        let mut seals = Seals::new();
        assert!(seals.seal(&packet, packet.len()).is_none());
        let before = packet.clone();
        assert_eq!(seals.open(JOB, &mut packet).as_deref(), Some(&before[..]));
        seals.add(JOB, Key::new(SECRET).with(Security::Encrypt));
        assert_eq!(seals.open(JOB, &mut packet), None);
        seals.add(JobId(1), Key::new(SECRET));
        let mut other = packet.clone();
        other[4..8].copy_from_slice(&1u32.to_le_bytes());
        assert!(seals.seal(&other, other.len()).is_some());
        for train in [[other.clone(), packet.clone()].concat(), [packet.clone(), other.clone()].concat()] {
            assert!(seals.seal(&train, other.len()).is_none(), "of two jobs");
        }
        seals.forget(JOB);
        assert!(seals.seal(&packet, packet.len()).is_none());
    }
}
