//! IDX, the format of MNIST: a big-endian header, then numbers; often compressed by gzip.

use std::{io::Read, path::Path};

use numcore::{Error, Result, Within};

use crate::{Array, files};

/// Reads an IDX file, compressed by gzip or not. `i8`, `i16` and `i32` become `i32`; `u8`, `f32` and `f64` stay.
///
/// ```no_run
/// use data::{Dataset, Rows, sources::read_idx};
/// # fn main() -> numcore::Result<()> {
/// let images = Rows::new(read_idx("t10k-images-idx3-ubyte.gz")?)?;
/// let labels = Rows::new(read_idx("t10k-labels-idx1-ubyte.gz")?)?;
/// let digits = images.zip(labels)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if the file cannot be read or is no IDX file, or its sizes do not match its numbers.
#[track_caller]
pub fn read_idx(path: impl AsRef<Path>) -> Result<Array> {
    let path = path.as_ref();
    let bytes = unpacked(path).map_err(|e| Error::io(path, e)).at_caller()?;
    parse(&bytes).map_err(|why| Error::format(path.display().to_string(), why)).at_caller()
}

/// The file's bytes, unpacked, at most as many as its sizes can need: a few bytes can unpack to a thousand times as
/// many.
fn unpacked(path: &Path) -> std::io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (files::unpacked(path)?, Vec::new());
    file.by_ref().take(4).read_to_end(&mut bytes)?;
    let rank = bytes.get(3).copied().unwrap_or(0);
    file.by_ref().take(4 * u64::from(rank)).read_to_end(&mut bytes)?;
    let sizes = bytes.get(4..).unwrap_or_default().as_chunks::<4>().0;
    // A number has eight bytes at most. One surplus byte is noticed.
    let most = sizes.iter().fold(8, |most: u64, size| most.saturating_mul(u32::from_be_bytes(*size).into()));
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn parse(bytes: &[u8]) -> Result<Array, String> {
    let &[0, 0, code, rank] = bytes.first_chunk::<4>().ok_or("it is shorter than the header of an IDX file")? else {
        return Err("it does not begin with two zeros, so it is no IDX file".into());
    };
    let sizes = bytes[4..].as_chunks::<4>().0.get(..rank.into()).ok_or("it ends within its sizes")?;
    let sizes: Vec<usize> = sizes.iter().map(|size| u32::from_be_bytes(*size) as usize).collect();
    let values = &bytes[4 + 4 * sizes.len()..];
    let width = match code {
        0x08 | 0x09 => 1,
        0x0b => 2,
        0x0c | 0x0d => 4,
        0x0e => 8,
        _ => return Err(format!("{code:#04x} is the code of no number type")),
    };
    let needed = sizes.iter().try_fold(width, |size: usize, &n| size.checked_mul(n));
    if needed != Some(values.len()) {
        return Err(format!(
            "sizes {sizes:?} of numbers of {width} bytes do not fit its {} bytes of numbers",
            values.len()
        ));
    }
    let array = match code {
        0x08 => Array::new(sizes, values.to_vec()),
        0x09 => Array::new(sizes, values.iter().map(|&x| i32::from(x as i8)).collect()),
        0x0b => Array::new(sizes, numbers(values, |x| i32::from(i16::from_be_bytes(x)))),
        0x0c => Array::new(sizes, numbers(values, i32::from_be_bytes)),
        0x0d => Array::new(sizes, numbers(values, f32::from_be_bytes)),
        _ => Array::new(sizes, numbers(values, f64::from_be_bytes)),
    };
    array.map_err(|e| e.to_string())
}

fn numbers<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| from(*chunk)).collect()
}
