//! Models on a disk: one file each, whose name is the key's.
//!
//! A file is written beside the old one, and takes its place once it is on the disk. Its header and
//! each piece have a CRC-32 of their own. A piece has its counters beside its values, so that
//! pieces may be of different moments: what a worker sends again is added where it is not in.
//!
//! ```text
//! "fanin parameters 1\n"  key 16  dtype 1  elements 8  workers 4  used 8  left 1 a worker   CRC-32 4
//! then each piece:        last step 8 and count 8 a worker   values                         CRC-32 4
//! ```
//! Numbers are little-endian; `used`, when a worker asked for it last, is in seconds since 1970.
//! The folder is one service's: it holds a lock on it.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crc32fast::Hasher;

use crate::proto::Dtype;
use crate::store::{Added, Model, Piece, Shape, Values, hex};
use crate::{Key, WORKERS_MAX};

const MAGIC: &[u8; 19] = b"fanin parameters 1\n";
const EXTENSION: &str = "parameters";
/// The name of the file that is being written.
const UNFINISHED: &str = "unfinished";
/// Which a service holds as long as it runs (flock(2)).
const LOCK: &str = "lock";

/// Why parameters cannot be kept, or be taken from where they were.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The folder or a file in it cannot be read or written.
    #[error("cannot keep parameters in {}: {cause}; is it a folder that this user may write?", path.display())]
    Unusable {
        /// Which.
        path: PathBuf,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// Two services would write the same files.
    #[error(
        "another service uses {}: give each a folder of its own (--snapshots FOLDER), or stop that one first",
        path.display()
    )]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The names of the files are keys, and their contents parameters.
    #[error(
        "others can read {} (its mode is {mode:o}), and with what is in it join or end trainings: chmod 700 it, or name a folder that is not \
         there yet, which is made so",
        path.display()
    )]
    Public {
        /// The folder.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// A file is not as it was written.
    #[error(
        "the snapshot {} is damaged ({cause}); restore it from a copy, or move it away and start that training anew",
        path.display()
    )]
    Damaged {
        /// Which.
        path: PathBuf,
        /// The fault in it.
        cause: String,
    },
}

/// The folder where models are kept.
#[derive(Debug)]
pub(crate) struct Snapshots {
    folder: PathBuf,
    /// Until it is dropped.
    _lock: File,
}

impl Snapshots {
    /// Makes the folder if there is none: who can list it knows the keys.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let unusable = |cause| SnapshotError::Unusable { path: folder.into(), cause };
        make(folder).map_err(unusable)?;
        let mode = fs::metadata(folder).map_err(unusable)?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SnapshotError::Public { path: folder.into(), mode });
        }
        let lock = private().write(true).create(true).truncate(false).open(folder.join(LOCK));
        let lock = lock.map_err(unusable)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { folder: folder.into(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(SnapshotError::InUse { path: folder.into() }),
            Err(TryLockError::Error(cause)) => Err(unusable(cause)),
        }
    }

    /// All models that were saved. A snapshot that was not finished is deleted.
    pub fn load(&self) -> Result<Vec<Model>, SnapshotError> {
        let unusable = |cause| SnapshotError::Unusable { path: self.folder.clone(), cause };
        let mut models = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(unusable)? {
            let path = entry.map_err(unusable)?.path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
            let is_ours =
                name.len() == 2 * size_of::<Key>() && name.bytes().all(|byte| byte.is_ascii_hexdigit());
            match extension {
                Some(UNFINISHED) if is_ours => fs::remove_file(&path).map_err(unusable)?,
                Some(EXTENSION) if is_ours => models.push(read(&path, name)?),
                Some(EXTENSION) => {
                    tracing::warn!(file = %path.display(), "left alone: its name is no training's; is it a copy?");
                }
                _ => {}
            }
        }
        Ok(models)
    }

    /// Writes a model down. It may change meanwhile: what is added to a piece after its turn is not
    /// in.
    pub fn save(&self, model: &Model) -> Result<(), SnapshotError> {
        let path = self.path(&model.key);
        let unfinished = path.with_extension(UNFINISHED);
        let written = write(&unfinished, model)
            .and_then(|()| fs::rename(&unfinished, &path))
            .and_then(|()| File::open(&self.folder)?.sync_all());
        written.map_err(|cause| {
            // On a disk that is full, above all.
            let _ = fs::remove_file(&unfinished);
            SnapshotError::Unusable { path, cause }
        })
    }

    /// Deletes a model's files, if there are any.
    pub fn forget(&self, key: &Key) -> Result<(), SnapshotError> {
        let path = self.path(key);
        for path in [path.with_extension(UNFINISHED), path] {
            match fs::remove_file(&path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    return Err(SnapshotError::Unusable { path, cause });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(hex(key)).with_extension(EXTENSION)
    }
}

/// Makes a folder and those that it is in, each on the disk when it returns.
fn make(folder: &Path) -> io::Result<()> {
    let missing: Vec<&Path> =
        folder.ancestors().take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists()).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    for made in missing {
        let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}

/// Files that are made are for this user alone.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

fn write(path: &Path, model: &Model) -> io::Result<()> {
    let mut file = BufWriter::new(private().write(true).create(true).truncate(true).open(path)?);
    let Shape { dtype, elements, workers } = model.shape;
    let mut header = MAGIC.to_vec();
    header.extend(model.key);
    header.push(dtype as u8);
    header.extend((elements as u64).to_le_bytes());
    header.extend(workers.to_le_bytes());
    let used =
        SystemTime::now().checked_sub(model.idle()).and_then(|used| used.duration_since(UNIX_EPOCH).ok());
    header.extend(used.unwrap_or_default().as_secs().to_le_bytes());
    header.extend(model.left().into_iter().map(u8::from));
    checked(&mut file, &header)?;
    for Piece { values, added } in model.pieces() {
        let mut piece: Vec<u8> =
            added.iter().flat_map(|added| [added.step, added.count]).flat_map(u64::to_le_bytes).collect();
        piece.extend(values.to_le_bytes());
        checked(&mut file, &piece)?;
    }
    file.into_inner()?.sync_all()
}

fn checked(file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.write_all(&crc32fast::hash(bytes).to_le_bytes())
}

/// `name` is the key that it is to be of.
fn read(path: &Path, name: &str) -> Result<Model, SnapshotError> {
    let damaged = |cause: String| SnapshotError::Damaged { path: path.into(), cause };
    let unusable = |cause| SnapshotError::Unusable { path: path.into(), cause };
    let file = File::open(path).map_err(unusable)?;
    let length = file.metadata().map_err(unusable)?.len();
    let mut reader = Reader { file: BufReader::new(file), sum: Hasher::new() };
    let mut model = || -> Result<Model, String> {
        if reader.take::<19>()? != *MAGIC {
            return Err("it does not begin as one of this version".into());
        }
        let key: Key = reader.take()?;
        let dtype = i32::from(reader.take::<1>()?[0]);
        let dtype = Dtype::try_from(dtype).map_err(|_| "an unknown dtype".to_owned())?;
        let elements = u64::from_le_bytes(reader.take()?);
        let workers = u32::from_le_bytes(reader.take()?);
        // Before memory is asked for by what may be no number of this file.
        if elements.checked_mul(dtype.bytes() as u64).is_none_or(|bytes| bytes > length)
            || workers > WORKERS_MAX
        {
            return Err("it is shorter than what it is to hold".into());
        }
        let shape = Shape { dtype, elements: elements as usize, workers };
        let used = Duration::from_secs(u64::from_le_bytes(reader.take()?));
        let left = reader.bytes(workers as usize)?.into_iter().map(|left| left == 1).collect();
        reader.check("its header")?;
        if hex(&key) != name {
            return Err("it is of another training than its name says".into());
        }
        let used = UNIX_EPOCH.checked_add(used).ok_or("of a time that never comes")?;
        let idle = SystemTime::now().duration_since(used).unwrap_or_default();
        let mut pieces = Vec::new();
        for (number, elements) in shape.pieces().enumerate() {
            let added = reader.bytes(size_of::<Added>() * workers as usize)?;
            let mut counts = added.as_chunks().0.iter().map(|count| u64::from_le_bytes(*count));
            let added = (0..workers)
                .map_while(|_| Some(Added { step: counts.next()?, count: counts.next()? }))
                .collect();
            let values = Values::from_le_bytes(dtype, &reader.bytes(elements * dtype.bytes())?);
            reader.check(&format!("piece {number}"))?;
            pieces.push(Piece { values, added });
        }
        if reader.file.read(&mut [0]).map_err(|error| error.to_string())? != 0 {
            return Err("something follows its end".into());
        }
        Ok(Model::new(key, shape, left, pieces, idle))
    };
    model().map_err(damaged)
}

/// Reads what has a checksum behind it.
struct Reader {
    file: BufReader<File>,
    sum: Hasher,
}

impl Reader {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn bytes(&mut self, length: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        self.file.read_exact(bytes).map_err(|_| "it ends too early".to_owned())?;
        self.sum.update(bytes);
        Ok(())
    }

    fn check(&mut self, what: &str) -> Result<(), String> {
        let sum = std::mem::replace(&mut self.sum, Hasher::new()).finalize();
        let mut written = [0; 4];
        self.file.read_exact(&mut written).map_err(|_| "it ends too early".to_owned())?;
        if u32::from_le_bytes(written) == sum {
            Ok(())
        } else {
            Err(format!("the checksum of {what} differs"))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::PIECE_ELEMENTS;
    use crate::store::Store;

    const KEY: Key = *b"of one training.";
    const SHAPE: Shape = Shape { dtype: Dtype::Float64, elements: PIECE_ELEMENTS + 3, workers: 2 };

    /// For this user alone.
    pub(crate) fn folder() -> tempfile::TempDir {
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        tempfile::Builder::new().permissions(private).tempdir().expect("a folder")
    }

    fn saved(folder: &Path) -> (Snapshots, PathBuf) {
        let snapshots = Snapshots::open(folder).expect("a folder");
        let store = Store::new(1 << 30);
        store.open([127, 0, 0, 1].into(), KEY, SHAPE).expect("room");
        let model = store.model(&KEY).expect("there");
        let delta: Vec<u8> = [1.5_f64, f64::NAN, -0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        model.exchange(1, 3, 1, &delta).expect("added");
        assert!(!store.leave(&KEY, 0).expect("it is there"));
        snapshots.save(&model).expect("saved");
        let path = folder.join("6f66206f6e6520747261696e696e672e.parameters");
        assert!(path.exists());
        (snapshots, path)
    }

    #[test]
    fn a_model_is_the_same_after_it_was_saved_and_read() {
        let folder = folder();
        let (snapshots, path) = saved(folder.path());
        let [model] = &snapshots.load().expect("as it was written")[..] else { panic!("one was saved") };
        assert_eq!((model.key, model.shape, model.left()), (KEY, SHAPE, vec![true, false]));
        let pieces: Vec<Piece> = model.pieces().collect();
        assert_eq!(pieces[0].added, [Added::default(); 2]);
        assert_eq!(pieces[1].added, [Added::default(), Added { step: 3, count: 1 }]);
        let expected: Vec<u8> = [1.5_f64, f64::NAN, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(pieces[1].values.to_le_bytes(), expected);
        snapshots.forget(&KEY).expect("deleted");
        snapshots.forget(&KEY).expect("it is gone already");
        assert!(!path.exists() && snapshots.load().expect("empty").is_empty());
    }

    #[test]
    fn a_file_that_is_cut_or_changed_anywhere_is_named_and_not_believed() {
        let folder = folder();
        let (snapshots, path) = saved(folder.path());
        let bytes = fs::read(&path).expect("written");
        let body = bytes.len() - 3 * 8 - 4;
        for (place, what) in [
            (3, "begin"),
            (25, "header"),
            (35, "dtype"),
            (42, "shorter"),
            (49, "header"),
            (200, "piece 0"),
            (body, "piece 1"),
            (bytes.len() - 1, "piece 1"),
        ] {
            let mut changed = bytes.clone();
            changed[place] ^= 0x10;
            fs::write(&path, changed).expect("written");
            let said = snapshots.load().expect_err("damaged").to_string();
            assert!(said.contains(what) && said.contains("move it away"), "{place}: {said}");
        }
        for length in [0, 10, 50, 1000, bytes.len() - 1] {
            fs::write(&path, &bytes[..length]).expect("written");
            assert!(snapshots.load().is_err(), "{length}");
        }
        fs::write(&path, [&bytes[..], b"x"].concat()).expect("written");
        assert!(snapshots.load().is_err(), "something follows");
        fs::write(&path, &bytes).expect("written");
        assert!(snapshots.load().is_ok());
    }

    #[test]
    fn a_copy_in_the_folder_takes_no_models_place() {
        let folder = folder();
        let (snapshots, path) = saved(folder.path());
        let store = Store::new(1 << 30);
        store.open([127, 0, 0, 1].into(), KEY, SHAPE).expect("room");
        let newer = store.model(&KEY).expect("there");
        newer.exchange(0, 1, 1, &[0; 24]).expect("added");
        for number in 0..8 {
            fs::copy(&path, folder.path().join(format!("copy{number}.parameters"))).expect("copied");
        }
        snapshots.save(&newer).expect("saved");
        let [model] = &snapshots.load().expect("readable")[..] else { panic!("copies are left alone") };
        assert_eq!(model.pieces().nth(1).expect("of two").added[0], Added { step: 1, count: 1 });
        // As a name it would be another training's.
        fs::copy(&path, path.with_file_name(format!("{}.parameters", "0".repeat(32)))).expect("copied");
        assert!(snapshots.load().expect_err("confused").to_string().contains("another training"));
    }

    #[test]
    fn a_folder_is_one_services() {
        let folder = folder();
        let first = Snapshots::open(folder.path()).expect("free");
        let said = Snapshots::open(folder.path()).expect_err("taken").to_string();
        assert!(said.contains("another service uses") && said.contains("a folder of its own"), "{said}");
        drop(first);
        Snapshots::open(folder.path()).expect("free again");
    }

    #[test]
    fn what_was_not_finished_goes() {
        let folder = folder();
        let (snapshots, path) = saved(folder.path());
        let unfinished = path.with_extension(UNFINISHED);
        fs::write(&unfinished, "cut").expect("written");
        assert_eq!(snapshots.load().expect("readable").len(), 1);
        assert!(!unfinished.exists(), "at the start");
        fs::write(&unfinished, "cut").expect("written");
        snapshots.forget(&KEY).expect("deleted");
        assert!(!unfinished.exists(), "with its model");
        // A folder of its name is in the way of the last step of a save.
        fs::create_dir(&path).expect("made");
        let store = Store::new(1 << 30);
        store.open([127, 0, 0, 1].into(), KEY, SHAPE).expect("room");
        let model = store.model(&KEY).expect("there");
        snapshots.save(&model).expect_err("it is a folder");
        assert!(!unfinished.exists(), "after a save that failed");
    }

    #[test]
    fn the_time_of_the_last_word_survives_a_start() {
        let folder = folder();
        let (snapshots, path) = saved(folder.path());
        // Only the header is another: as if nobody had asked for a week.
        let mut bytes = fs::read(&path).expect("written");
        let header = 19 + 16 + 1 + 8 + 4 + 8 + 2;
        let used = u64::from_le_bytes(bytes[48..56].try_into().expect("8 bytes")) - 7 * 24 * 60 * 60;
        bytes[48..56].copy_from_slice(&used.to_le_bytes());
        let sum = crc32fast::hash(&bytes[..header]);
        bytes[header..header + 4].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, bytes).expect("written");
        let store = Store::new(1 << 30);
        store.restore(snapshots.load().expect("readable").pop().expect("one"));
        let now = std::time::Instant::now();
        assert!(store.forget_abandoned(now).is_empty(), "its workers have an hour to come back");
        assert_eq!(store.forget_abandoned(now + Duration::from_secs(60 * 60)), [KEY]);
    }

    #[test]
    fn nobody_else_reads_what_is_kept() {
        let folder = folder();
        let (_snapshots, path) = saved(&folder.path().join("made"));
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        let made = folder.path().join("made");
        assert_eq!([mode(&made), mode(&path), mode(&made.join(LOCK))], [0o700, 0o600, 0o600]);
        let open = folder.path().join("open");
        DirBuilder::new().mode(0o750).create(&open).expect("made");
        let refused = Snapshots::open(&open).map(drop).expect_err("its group can list it");
        assert!(refused.to_string().contains("chmod 700"), "{refused}");
    }
}
