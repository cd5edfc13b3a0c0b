//! NumPy's arrays: `.npy`, and `.npz`, a ZIP archive of them.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufReader, Read},
    path::Path,
};

use numcore::{DType, Error, Result, Within};
use zip::ZipArchive;

use crate::{Array, Dataset, files::PositionedFile};

/// The longest header that is read, in bytes. NumPy itself warns above 10 000.
const LONGEST_HEADER: usize = 1 << 20;

/// Reads an array that `numpy.save` wrote, of either byte order and either memory order. Element types that tensors
/// lack become wider ones: `int8`, `int16` and `uint16` become `i32`, and `uint64` becomes `i64`.
///
/// ```no_run
/// use data::{Rows, sources::read_npy};
/// # fn main() -> numcore::Result<()> {
/// let examples = Rows::new(read_npy("inputs.npy")?)?.zip(Rows::new(read_npy("labels.npy")?)?)?;
/// # use data::Dataset;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if the file cannot be read or is no such file, or its size does not fit its shape. Fails too if its elements
/// are no numbers: complex, structured, text, Python's objects. A `uint64` above the largest `i64` is an error too.
#[track_caller]
#[doc(alias("npy"))]
#[doc(alias("numpy.load"))]
pub fn read_npy(path: impl AsRef<Path>) -> Result<Array> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|e| Error::io(path, e)).at_caller()?;
    read(BufReader::new(file)).map_err(|why| Error::format(path.display().to_string(), why)).at_caller()
}

/// Reads the arrays that `numpy.savez` or `numpy.savez_compressed` wrote, by name; see [`read_npy`].
///
/// # Errors
/// Fails if the file cannot be read or is no such archive, or an array in it cannot be read.
#[track_caller]
#[doc(alias("npz"))]
#[doc(alias("savez"))]
pub fn read_npz(path: impl AsRef<Path>) -> Result<BTreeMap<String, Array>> {
    let path = path.as_ref();
    let wrong = |why: String| Error::format(path.display().to_string(), why);
    let file = File::open(path).map_err(|e| Error::io(path, e)).at_caller()?;
    let archive = ZipArchive::new(BufReader::new(file));
    let mut archive = archive.map_err(|e| wrong(format!("is no ZIP archive: {e}"))).at_caller()?;
    let count = archive.len();
    let one = |number: usize| {
        let entry = archive.by_index(number).map_err(|e| wrong(format!("array {number}: {e}")))?;
        let name = entry.name().map_err(|e| wrong(format!("array {number}: {e}")))?.into_owned();
        let array = read(entry).map_err(|why| wrong(format!("`{name}`: {why}")))?;
        Ok((name.strip_suffix(".npy").unwrap_or(&name).to_owned(), array))
    };
    (0..count).map(one).collect::<Result<_>>().at_caller()
}

/// The rows of a `.npy` file, read from the file one by one: `numpy.load(mmap_mode="r")`. The array may be larger than
/// memory.
///
/// ```no_run
/// use data::{Loader, sources::NpyRows};
/// # fn main() -> numcore::Result<()> {
/// let images = NpyRows::open("images.npy")?; // [N, 3, 224, 224]
/// let loader = Loader::new(images).batch(32).shuffle(7).stack();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[doc(alias("memmap"))]
#[doc(alias("mmap_mode"))]
pub struct NpyRows {
    file: PositionedFile,
    header: Header,
}

impl NpyRows {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// Fails as [`read_npy`] does, or if the array has no axis, or is in the memory order of Fortran.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        let header = Header::read(&mut BufReader::new(file.file())).map_err(|why| file.malformed(why)).at_caller()?;
        if header.fits(file.len().saturating_sub(header.len as u64)).is_none() {
            return Err(file.malformed(header.misfit())).at_caller();
        }
        if header.dims.is_empty() || header.fortran && header.dims.len() > 1 {
            let why = "a single value, or in Fortran's order, it has no rows to read one by one: use `read_npy`";
            return Err(file.malformed(why)).at_caller();
        }
        Ok(NpyRows { file, header })
    }
}

impl Dataset for NpyRows {
    type Example = Array;

    fn len(&self) -> usize {
        self.header.dims[0]
    }

    fn get(&self, index: usize) -> Result<Array> {
        crate::dataset::check_index("NpyRows", index, self.len())?;
        let row = Header { dims: self.header.dims[1..].to_vec(), ..self.header.clone() };
        let size = row.dims.iter().product::<usize>() * row.width;
        let bytes = self.file.bytes((row.len + index * size) as u64, size as u64)?;
        row.array(bytes).map_err(|why| self.file.malformed(format!("row {index}: {why}")))
    }
}

/// The header of a file.
#[derive(Clone, Debug)]
struct Header {
    /// The code of the element type, such as `f4`.
    code: String,
    /// The bytes of an element.
    width: usize,
    big_endian: bool,
    fortran: bool,
    dims: Vec<usize>,
    /// The bytes before the elements.
    len: usize,
}

impl Header {
    fn read(from: &mut impl Read) -> Result<Header, String> {
        let mut start = [0; 10];
        from.read_exact(&mut start).map_err(|e| format!("it is no .npy file: {e}"))?;
        let [b'\x93', b'N', b'U', b'M', b'P', b'Y', version, _, low, high] = start else {
            return Err("it does not begin as .npy files do".into());
        };
        let (mut size, mut len) = (usize::from(low) | usize::from(high) << 8, 10);
        if version > 1 {
            let mut more = [0; 2];
            from.read_exact(&mut more).map_err(|e| format!("its header: {e}"))?;
            (size, len) = (size | usize::from(more[0]) << 16 | usize::from(more[1]) << 24, 12);
        }
        let mut text = Vec::new();
        from.take(size.min(LONGEST_HEADER) as u64).read_to_end(&mut text).map_err(|e| format!("its header: {e}"))?;
        let text = String::from_utf8(text).map_err(|e| format!("its header is no text: {e}"))?;
        if text.len() != size {
            return Err(format!("its header should have {size} bytes, and {} can be read", text.len()));
        }
        Header::parse(&text, len + size).ok_or_else(|| format!("elements and shape are not read from `{text}`"))
    }

    /// Parses the literal of a Python dictionary: `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
    fn parse(text: &str, len: usize) -> Option<Header> {
        let after = |key: &str| Some(text.split_once(key)?.1.trim_start());
        let (kind, _) = after("'descr':")?.strip_prefix('\'')?.split_once('\'')?;
        let order = kind.chars().next()?;
        let code = kind.strip_prefix(['<', '>', '|', '='])?;
        let (sizes, _) = after("'shape':")?.strip_prefix('(')?.split_once(')')?;
        let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
        Some(Header {
            code: code.into(),
            width: code.get(1..)?.parse().ok().filter(|&width| width > 0)?,
            big_endian: order == '>' || order == '=' && cfg!(target_endian = "big"),
            fortran: after("'fortran_order':")?.starts_with("True"),
            dims: sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?,
            len,
        })
    }

    /// The number of bytes of all elements.
    fn size(&self) -> Option<usize> {
        self.dims.iter().try_fold(self.width, |size, &n| size.checked_mul(n))
    }

    fn fits(&self, bytes: u64) -> Option<()> {
        (self.size()? as u64 == bytes).then_some(())
    }

    fn misfit(&self) -> String {
        format!("it has not the bytes of a shape {:?} of elements {}", self.dims, self.code)
    }

    /// The array of elements whose bytes these are.
    fn array(&self, mut bytes: Vec<u8>) -> Result<Array, String> {
        self.fits(bytes.len() as u64).ok_or_else(|| self.misfit())?;
        if self.big_endian != cfg!(target_endian = "big") {
            bytes.chunks_exact_mut(self.width).for_each(<[u8]>::reverse);
        }
        if self.fortran {
            bytes = row_major(&self.dims, self.width, &bytes);
        }
        let dims = &self.dims;
        let array = match &*self.code {
            "i1" => Array::new(dims, bytes.iter().map(|&x| i32::from(x as i8)).collect()),
            "i2" => Array::new(dims, wider(&bytes, |x| i32::from(i16::from_ne_bytes(x)))),
            "u2" => Array::new(dims, wider(&bytes, |x| i32::from(u16::from_ne_bytes(x)))),
            "u8" => {
                let wide = wider(&bytes, u64::from_ne_bytes).into_iter().map(i64::try_from);
                let wide = wide.collect::<Result<_, _>>();
                Array::new(dims, wide.map_err(|_| "a `uint64` is above the largest `i64`")?)
            }
            code => {
                let dtype = match code {
                    "f4" => DType::F32,
                    "f8" => DType::F64,
                    "f2" => DType::F16,
                    "i4" => DType::I32,
                    "i8" => DType::I64,
                    "u4" => DType::U32,
                    "u1" => DType::U8,
                    "b1" => DType::Bool,
                    _ => return Err(format!("elements `{code}` are no numbers that tensors have: convert them")),
                };
                Array::from_bytes(dims, dtype, bytes)
            }
        };
        array.map_err(|e| e.to_string())
    }
}

/// Reads one array to its end. No more is read than its shape needs, and one surplus byte.
fn read(mut from: impl Read) -> Result<Array, String> {
    let header = Header::read(&mut from)?;
    let size = header.size().ok_or_else(|| header.misfit())?;
    let mut bytes = Vec::new();
    from.take((size as u64).saturating_add(1)).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    header.array(bytes)
}

fn wider<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| from(*chunk)).collect()
}

/// Elements in row-major order, from those with the first axis the fastest.
fn row_major(dims: &[usize], width: usize, bytes: &[u8]) -> Vec<u8> {
    let (mut result, mut at) = (Vec::with_capacity(bytes.len()), vec![0; dims.len()]);
    while result.len() < bytes.len() {
        let place = at.iter().zip(dims).rev().fold(0, |place, (&i, &n)| place * n + i);
        result.extend_from_slice(&bytes[place * width..][..width]);
        for (i, &n) in at.iter_mut().zip(dims).rev() {
            *i = (*i + 1) % n;
            if *i > 0 {
                break;
            }
        }
    }
    result
}
