//! Tensors of PyTorch's files (`*.bin`), read without running what they ask for.
//!
//! A file is a ZIP archive of a pickle (`data.pkl`) and of storages (`data/KEY`), which are not compressed. The pickle
//! names tensors and describes them as views of storages. It is a program of Python's pickle machine; see
//! `unpickle.rs`.

mod tensor;
mod unpickle;

use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use numcore::{DType, Error, Result, Shape, read_exact_at};
use tensor::PickledTensor;
use unpickle::unpickle;
use zip::{CompressionMethod, ZipArchive};

/// The longest pickle that is read, in bytes; those of the largest models have some hundreds of kB.
const MAX_PICKLE: u64 = 16 << 20;

/// An open file of PyTorch's, whose tensors are read piece by piece.
pub(super) struct PickleFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, PickledTensor>,
    /// The offset of each storage's bytes in the file.
    storages: BTreeMap<Arc<str>, u64>,
}

impl PickleFile {
    /// Opens a file, reads its pickle, and checks that every tensor is within its storage.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is no such archive, is big-endian, or holds anything but tensors by name.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let wrong = |why: String| Error::format(path.display().to_string(), why);
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let mut archive = ZipArchive::new(&file).map_err(|e| {
            let why = "PyTorch before 1.6 wrote another format: load it in Python, and save it by safetensors";
            wrong(format!("is no ZIP archive ({e}); {why}"))
        })?;
        let names = archive.file_names().flatten();
        let pickle = names.map(|name| name.into_owned()).find(|name| name == "data.pkl" || name.ends_with("/data.pkl"));
        let Some(pickle) = pickle else { return Err(wrong("has no `data.pkl`".into())) };
        let folder = pickle.strip_suffix("data.pkl").unwrap_or_default().to_owned();
        if let Ok(order) = bytes(&mut archive, &format!("{folder}byteorder"))
            && order != b"little"
        {
            return Err(wrong("is big-endian: save it on a little-endian machine".into()));
        }
        let program = bytes(&mut archive, &pickle).map_err(wrong)?;
        let tensors = unpickle(&program).map_err(|why| wrong(format!("{pickle}: {why}")))?;
        let mut storages = BTreeMap::new();
        for (name, tensor) in &tensors {
            let key = &tensor.storage.key;
            let entry = archive.by_name(&format!("{folder}data/{key}"));
            let entry = entry.map_err(|e| wrong(format!("`{name}` is in storage `{key}`: {e}")))?;
            let start = entry.data_start().filter(|_| entry.compression() == CompressionMethod::Stored);
            let Some(start) = start else { return Err(wrong(format!("storage `{key}` is compressed"))) };
            let stated = (tensor.storage.elements as u64).checked_mul(tensor.storage.kind.size() as u64);
            if stated != Some(entry.size()) {
                let why = format!(
                    "storage `{key}` has {} bytes, and should have {} elements of {}",
                    entry.size(),
                    tensor.storage.elements,
                    tensor.storage.kind.size()
                );
                return Err(wrong(why));
            }
            let end = start.checked_add(entry.size());
            let len = file.metadata().map_err(|e| Error::io(path, e))?.len();
            if end.is_none_or(|end| end > len) {
                return Err(wrong(format!("storage `{key}` is past the end: the file is cut off")));
            }
            storages.insert(key.clone(), start);
        }
        drop(archive);
        Ok(PickleFile { path: path.into(), file, tensors, storages })
    }

    /// The names of all tensors, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The element type and shape of a tensor.
    pub(super) fn tensor(&self, name: &str) -> Result<(DType, Shape)> {
        let tensor = self.place(name)?;
        let none = || Error::state(name, "is of integers of 8 or 16 bits, which are not supported");
        Ok((tensor.storage.kind.dtype().ok_or_else(none)?, tensor.shape))
    }

    /// Tells whether a tensor is a row-major view of its storage.
    pub(super) fn is_row_major(&self, name: &str) -> Result<bool> {
        Ok(self.place(name)?.is_row_major())
    }

    /// Reads elements of a tensor from element `from` on. A tensor that is no row-major view of its storage is read in
    /// full, and its elements are picked.
    pub(super) fn read(&self, name: &str, from: usize, into: &mut [u8]) -> Result<()> {
        let (tensor, size) = (self.place(name)?, self.tensor(name)?.0.size());
        let count = into.len() / size;
        if !into.len().is_multiple_of(size) || from.checked_add(count).is_none_or(|end| end > tensor.shape.numel()) {
            return Err(Error::state(name, format!("is {}, and has no {count} from {from} on", tensor.shape)));
        }
        let start = self.storages.get(&tensor.storage.key).copied().unwrap_or_default();
        let at = start + (tensor.offset * size) as u64;
        let io = |e| Error::io(&self.path, e);
        if tensor.is_row_major() {
            return read_exact_at(&self.file, at + (from * size) as u64, into).map_err(io);
        }
        let mut all = vec![0; tensor.span() * size];
        read_exact_at(&self.file, at, &mut all).map_err(io)?;
        for (i, to) in into.chunks_exact_mut(size).enumerate() {
            to.copy_from_slice(&all[tensor.at(from + i) * size..][..size]);
        }
        Ok(())
    }

    fn place(&self, name: &str) -> Result<&PickledTensor> {
        let none = || Error::state(name, format!("is not in {}", self.path.display()));
        self.tensors.get(name).ok_or_else(none)
    }
}

/// The bytes of an entry, or the reason why they cannot be read.
fn bytes(archive: &mut ZipArchive<&File>, name: &str) -> std::result::Result<Vec<u8>, String> {
    let entry = archive.by_name(name).map_err(|e| format!("{name}: {e}"))?;
    let mut bytes = Vec::new();
    entry.take(MAX_PICKLE + 1).read_to_end(&mut bytes).map_err(|e| format!("{name}: {e}"))?;
    match bytes.len() as u64 {
        0..=MAX_PICKLE => Ok(bytes),
        _ => Err(format!("{name} is longer than {MAX_PICKLE} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use numcore::rng::Philox;

    use super::*;

    fn program() -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("references/pickle/gpt2.bin");
        let file = File::open(path).unwrap();
        bytes(&mut ZipArchive::new(&file).unwrap(), "gpt2/data.pkl").unwrap()
    }

    /// Pickles with changed bytes, without the archive, whose checksums would notice them.
    #[test]
    fn changed_pickles_are_errors_or_other_tensors() {
        let count = std::env::var("WEFTGRAD_TEST_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(3000);
        let (whole, mut philox) = (program(), Philox::new(13, 0));
        let mut below = |n: usize| philox.next_u64() as usize % n;
        let mut read = 0;
        for _ in 0..count {
            let mut program = whole.clone();
            for _ in 0..1 + below(3) {
                let at = below(program.len());
                let values = [below(256) as u8, program[below(whole.len())], 255, program[at] ^ 1 << below(8)];
                program[at] = values[below(4)];
            }
            if let Ok(tensors) = unpickle(&program) {
                read += 1;
                for tensor in tensors.values() {
                    assert!(
                        tensor.offset + tensor.span() <= tensor.storage.elements && tensor.shape.numel() <= 1 << 20
                    );
                }
            }
        }
        assert!(read > 0 && read < count, "{read} of {count} were read");
    }

    #[test]
    fn malformed_pickles_are_errors_that_say_why() {
        for (program, due) in [
            (&b""[..], "is cut off"),
            (b".", "more values than it has"),
            (b"K", "is cut off"),
            (b"X\xff\xff\xff\xffa", "is cut off"),
            (b"X\x01\0\0\0\xff", "no UTF-8"),
            (b"N.", "no dictionary"),
            (b"(N0(0", "more values than it has"),
            (b"N(\x85", "more values than it has"),
            (b"t", "no mark"),
            (b"h\x07", "recalls value 7"),
            (b"q\x07", "more values than it has"),
            (b"NNs", "more values than it has"),
            (b"NNNs", "no dictionary"),
            (b"}(Nu", "no dictionary"),
            (b"\x8a\x09aaaaaaaaa", "more than 64 bits"),
            (b"cos\nsystem\n", "`os.system`"),
            (b"\x8c\x02os\x8c\x06system\x93", "`os.system`"),
            (b"cos", "is cut off"),
            (b"N)R", "no function"),
            (b"ctorch\nFloatStorage\n)R", "other arguments"),
            (b"ctorch._utils\n_rebuild_tensor_v2\n)R", "without strides"),
            (b"NQ", "persistent id"),
            (b"NNb", "attributes of what is no tensor"),
            (b"i", "instruction 0x69"),
            (b"}NNs.", "no name"),
        ] {
            let error = unpickle(program).map(drop).unwrap_err();
            assert!(error.contains(due), "{error}, due {due}");
        }
        let negated = b"}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQK\0K\x04\x85K\x01\x85N}}X\x03\0\0\0negNstRs.";
        assert!(unpickle(negated).map(drop).unwrap_err().contains("negates"));
        let many = vec![b'N'; 1 << 21];
        assert!(unpickle(&many).map(drop).unwrap_err().contains("values"));
        // Deep nesting ends without recursion.
        let deep = [&b"N"[..], &[0x85; 1_000_000], b"."].concat();
        assert!(unpickle(&deep).is_err());
    }

    /// A tensor of two by two elements from a storage of four, with other sizes, strides and offsets.
    #[test]
    fn tensors_past_their_storage_are_errors() {
        let tensor = |offset: &[u8], sizes: &[u8], strides: &[u8]| {
            let id = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ";
            let start = b"}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n(";
            let args = [&id[..], offset, b"(", sizes, b"t(", strides, b"tt"].concat();
            unpickle(&[&start[..], &args, b"Rs."].concat()).map(|mut tensors| tensors.remove("a").unwrap())
        };
        let whole = tensor(b"K\0", b"K\x02K\x02", b"K\x02K\x01").unwrap();
        assert!(whole.is_row_major() && whole.span() == 4);
        let columns = tensor(b"K\0", b"K\x02K\x02", b"K\x01K\x02").unwrap();
        assert!(!columns.is_row_major());
        assert_eq!((0..4).map(|i| columns.at(i)).collect::<Vec<_>>(), [0, 2, 1, 3]);
        assert_eq!(tensor(b"J\xff\xff\xff\x7f", b"K\0", b"K\x01").unwrap().span(), 0);
        for (offset, sizes, strides, due) in [
            (&b"K\x01"[..], &b"K\x02K\x02"[..], &b"K\x02K\x01"[..], "has 4 elements"),
            (b"K\0", b"K\x02K\x02", b"K\x03K\x01", "has 4 elements"),
            (b"K\0", b"K\x05", b"K\0", "has 4 elements"),
            (b"K\0", b"K\x04", b"K\x01K\x01", "has 4 elements"),
            (b"J\xff\xff\xff\xff", b"K\x01", b"K\x01", "size -1"),
            (b"K\0", b"\x8a\x08aaaaaaa\x7f", b"K\x01", "memory"),
            (b"N", b"K\x01", b"K\x01", "no number"),
        ] {
            let error = tensor(offset, sizes, strides).map(drop).unwrap_err();
            assert!(error.contains(due), "{error}, due {due}");
        }
    }
}
