//! Reading of a file's header, field by field.

use std::{
    fs::File,
    io::{BufReader, Read},
};

use numcore::{Error, Result};

use super::GgufValue;
use crate::files::PositionedFile;

/// The longest string, in bytes; chat templates have some thousands.
const MAX_TEXT: u64 = 16 << 20;

/// A reader of the fields before a file's data. Lengths are checked against the rest of the file before memory is
/// taken for them.
pub(super) struct HeaderReader<'a> {
    file: &'a PositionedFile,
    from: BufReader<&'a File>,
    at: u64,
}

impl<'a> HeaderReader<'a> {
    /// A reader at the beginning of a file, whose own position is there.
    pub(super) fn new(file: &'a PositionedFile) -> Self {
        HeaderReader { file, from: BufReader::new(file.file()), at: 0 }
    }

    /// The offset of the next field in bytes.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Reads the bytes of a number.
    pub(super) fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fits(1, N as u64)?;
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.number().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        self.number().map(u64::from_le_bytes)
    }

    /// Reads a number of entries, each of at least `size` bytes, that the rest of the file can hold.
    pub(super) fn count(&mut self, size: u64) -> Result<usize> {
        let count = self.u64()?;
        self.fits(count, size)?;
        usize::try_from(count).map_err(|_| self.wrong(format!("states {count} entries")))
    }

    /// Reads a string.
    pub(super) fn text(&mut self) -> Result<String> {
        let len = self.u64()?;
        self.fits(len, 1)?;
        if len > MAX_TEXT {
            return Err(self.wrong(format!("has a string of {len} bytes at {}, more than {MAX_TEXT}", self.at)));
        }
        let (at, mut bytes) = (self.at, vec![0; len as usize]);
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| self.wrong(format!("has a string at {at} that is no UTF-8")))
    }

    /// Reads the type and value of a key. Lists of types that no key here has are skipped: `None`.
    pub(super) fn value(&mut self, key: &str) -> Result<Option<GgufValue>> {
        let id = self.u32()?;
        Ok(Some(match id {
            4 => GgufValue::U32(self.u32()?),
            6 => GgufValue::F32(f32::from_le_bytes(self.number()?)),
            7 => match self.number()? {
                [flag @ 0..=1] => GgufValue::Bool(flag == 1),
                [other] => return Err(self.wrong(format!("`{key}` is the boolean {other}"))),
            },
            8 => GgufValue::Text(self.text()?),
            9 => return self.list(key),
            10 => GgufValue::U64(self.u64()?),
            12 => GgufValue::F64(f64::from_le_bytes(self.number()?)),
            _ => match self.integer(id)? {
                Some(x) if matches!(id, 0 | 2) => GgufValue::U32(x as u32),
                Some(x) => GgufValue::I64(x),
                None => return Err(self.wrong(format!("`{key}` has the unknown type {id}"))),
            },
        }))
    }

    /// Reads an integer of a type with a value in `i64`; `None` if the type is another.
    fn integer(&mut self, id: u32) -> Result<Option<i64>> {
        Ok(Some(match id {
            0 => self.number::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.number()?).into(),
            2 => u16::from_le_bytes(self.number()?).into(),
            3 => i16::from_le_bytes(self.number()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.number()?).into(),
            11 => i64::from_le_bytes(self.number()?),
            _ => return Ok(None),
        }))
    }

    fn list(&mut self, key: &str) -> Result<Option<GgufValue>> {
        let id = self.u32()?;
        let size = match id {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(self.wrong(format!("`{key}` is a list of lists, which are not read"))),
            _ => return Err(self.wrong(format!("`{key}` is a list of the unknown type {id}"))),
        };
        let count = self.count(size)?;
        Ok(match id {
            6 => {
                let number = |_| self.number().map(f32::from_le_bytes);
                Some(GgufValue::F32s((0..count).map(number).collect::<Result<_>>()?))
            }
            8 => Some(GgufValue::Texts((0..count).map(|_| self.text()).collect::<Result<_>>()?)),
            0..=5 => {
                let mut list = Some(Vec::new());
                for _ in 0..count {
                    let x = self.integer(id)?.and_then(|x| i32::try_from(x).ok());
                    list = list.zip(x).map(|(mut list, x)| {
                        list.push(x);
                        list
                    });
                }
                list.map(GgufValue::I32s)
            }
            _ => {
                self.skip(count as u64 * size)?;
                None
            }
        })
    }

    fn skip(&mut self, len: u64) -> Result<()> {
        self.fits(len, 1)?;
        self.from.seek_relative(len as i64).map_err(|e| Error::io(self.file.path(), e))?;
        self.at += len;
        Ok(())
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<()> {
        self.from.read_exact(into).map_err(|e| Error::io(self.file.path(), e))?;
        self.at += into.len() as u64;
        Ok(())
    }

    /// Checks that entries of a size are within the rest of the file.
    fn fits(&self, count: u64, size: u64) -> Result<()> {
        let left = self.file.len().saturating_sub(self.at);
        if count.checked_mul(size).is_some_and(|len| len <= left) {
            return Ok(());
        }
        let why = format!("needs {count} times {size} bytes at {}, and {left} follow: it is cut off", self.at);
        Err(self.wrong(why))
    }

    pub(super) fn wrong(&self, why: String) -> Error {
        self.file.malformed(why)
    }
}
