//! Models on a disk: one file each, whose name is the key's.
//!
//! A file is written beside the old one, and takes its place once it is on the disk. Its header and each piece have a CRC-32 of their own. A piece has
//! its counters beside its values, so that pieces may be of different moments: what a worker sends again is added where it is not in.
//!
//! ```text
//! "fanin parameters 1\n"  key 16  dtype 1  elements 8  workers 4  left 1 a worker   CRC-32 4
//! then each piece:        added 8 a worker   values                                 CRC-32 4
//! ```
//! Numbers are little-endian.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;

use crate::proto::Dtype;
use crate::store::{Model, Piece, Shape, Values, hex};
use crate::{Key, WORKERS_MAX};

const MAGIC: &[u8; 19] = b"fanin parameters 1\n";
const EXTENSION: &str = "parameters";
/// What is being written.
const UNFINISHED: &str = "unfinished";

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
    /// A file is not as it was written.
    #[error(
        "the snapshot {} is damaged ({cause}); restore it from a copy, or move it away and start that training anew",
        path.display()
    )]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong in it.
        cause: String,
    },
}

/// The folder where models are kept.
#[derive(Debug)]
pub(crate) struct Snapshots {
    folder: PathBuf,
}

impl Snapshots {
    /// Makes the folder if there is none: who can list it knows the keys.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|cause| SnapshotError::Unusable { path: folder.into(), cause })?;
        Ok(Self { folder: folder.into() })
    }

    /// All models that were saved.
    pub fn load(&self) -> Result<Vec<Model>, SnapshotError> {
        let unusable = |cause| SnapshotError::Unusable { path: self.folder.clone(), cause };
        let mut models = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(unusable)? {
            let path = entry.map_err(unusable)?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                models.push(read(&path)?);
            }
        }
        Ok(models)
    }

    /// Writes a model down. It may change meanwhile: what is added to a piece after its turn is not in.
    pub fn save(&self, model: &Model) -> Result<(), SnapshotError> {
        let path = self.path(&model.key);
        let unfinished = path.with_extension(UNFINISHED);
        let written = write(&unfinished, model)
            .and_then(|()| fs::rename(&unfinished, &path))
            .and_then(|()| File::open(&self.folder)?.sync_all());
        written.map_err(|cause| SnapshotError::Unusable { path, cause })
    }

    /// Deletes a model's file, if there is one.
    pub fn forget(&self, key: &Key) -> Result<(), SnapshotError> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                Err(SnapshotError::Unusable { path, cause })
            }
            _ => Ok(()),
        }
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(hex(key)).with_extension(EXTENSION)
    }
}

fn write(path: &Path, model: &Model) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let Shape { dtype, elements, workers } = model.shape;
    let mut header = MAGIC.to_vec();
    header.extend(model.key);
    header.push(dtype as u8);
    header.extend((elements as u64).to_le_bytes());
    header.extend(workers.to_le_bytes());
    header.extend(model.left().into_iter().map(u8::from));
    checked(&mut file, &header)?;
    for Piece { values, added } in model.pieces() {
        let mut piece: Vec<u8> = added.iter().flat_map(|added| added.to_le_bytes()).collect();
        piece.extend(values.to_le_bytes());
        checked(&mut file, &piece)?;
    }
    file.into_inner()?.sync_all()
}

fn checked(file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.write_all(&crc32fast::hash(bytes).to_le_bytes())
}

fn read(path: &Path) -> Result<Model, SnapshotError> {
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
        let left = reader.bytes(workers as usize)?.into_iter().map(|left| left == 1).collect();
        reader.check("its header")?;
        let mut pieces = Vec::new();
        for (number, elements) in shape.pieces().enumerate() {
            let added = reader.bytes(8 * workers as usize)?;
            let added = added.as_chunks().0.iter().map(|count| u64::from_le_bytes(*count)).collect();
            let values = Values::from_le_bytes(dtype, &reader.bytes(elements * dtype.bytes())?);
            reader.check(&format!("piece {number}"))?;
            pieces.push(Piece { values, added });
        }
        if reader.file.read(&mut [0]).map_err(|error| error.to_string())? != 0 {
            return Err("something follows its end".into());
        }
        Ok(Model::new(key, shape, left, pieces))
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
mod tests {
    use super::*;
    use crate::PIECE_ELEMENTS;
    use crate::store::Store;

    const KEY: Key = *b"of one training.";
    const SHAPE: Shape = Shape { dtype: Dtype::Float64, elements: PIECE_ELEMENTS + 3, workers: 2 };

    fn saved(folder: &Path) -> (Snapshots, PathBuf) {
        let snapshots = Snapshots::open(folder).expect("a folder");
        let store = Store::new(1 << 30);
        store.open(KEY, SHAPE).expect("room");
        let model = store.model(&KEY).expect("there");
        let delta: Vec<u8> = [1.5_f64, f64::NAN, -0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        model.exchange(1, 1, 1, &delta).expect("added");
        assert!(!store.leave(&KEY, 0).expect("it is there"));
        snapshots.save(&model).expect("saved");
        let path = folder.join("6f66206f6e6520747261696e696e672e.parameters");
        assert!(path.exists());
        (snapshots, path)
    }

    #[test]
    fn a_model_is_the_same_after_it_was_saved_and_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let (snapshots, path) = saved(folder.path());
        let [model] = &snapshots.load().expect("as it was written")[..] else { panic!("one was saved") };
        assert_eq!((model.key, model.shape, model.left()), (KEY, SHAPE, vec![true, false]));
        let pieces: Vec<Piece> = model.pieces().collect();
        assert_eq!(pieces[0].added, [0, 0]);
        assert_eq!(pieces[1].added, [0, 1]);
        let expected: Vec<u8> = [1.5_f64, f64::NAN, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(pieces[1].values.to_le_bytes(), expected);
        snapshots.forget(&KEY).expect("deleted");
        snapshots.forget(&KEY).expect("it is gone already");
        assert!(!path.exists() && snapshots.load().expect("empty").is_empty());
    }

    #[test]
    fn a_file_that_is_cut_or_changed_anywhere_is_named_and_not_believed() {
        let folder = tempfile::tempdir().expect("a folder");
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
}
