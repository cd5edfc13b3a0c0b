//! Values as bytes, between processes: little-endian numbers, and texts and lists after their lengths.

use numcore::{Error, Result};

/// Writes values one after another.
#[derive(Clone, Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Writes a byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    /// Writes a number.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Writes a length, a rank or an index, as a `u64`.
    pub fn usize(&mut self, value: usize) -> &mut Self {
        self.u64(value as u64)
    }

    /// Writes bytes after their length.
    pub fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.usize(value.len());
        self.0.extend(value);
        self
    }

    /// Writes UTF-8 text after its length in bytes.
    pub fn text(&mut self, value: &str) -> &mut Self {
        self.bytes(value.as_bytes())
    }

    /// Writes a list of lengths or ranks after its length.
    pub fn list(&mut self, values: &[usize]) -> &mut Self {
        self.usize(values.len());
        values.iter().for_each(|&value| {
            self.usize(value);
        });
        self
    }

    /// Returns all written bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads the values of a [`Writer`]. Bytes that end too early or cannot be valid are errors: they came from another
/// process.
#[derive(Clone, Debug)]
pub struct WireReader<'a>(&'a [u8]);

impl<'a> WireReader<'a> {
    /// Makes a reader at the beginning of the bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        WireReader(bytes)
    }

    /// Reads a byte.
    pub fn u8(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    /// Reads a number.
    pub fn u64(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| malformed("a number"))
    }

    /// Reads a length, a rank or an index.
    pub fn usize(&mut self) -> Result<usize> {
        usize::try_from(self.u64()?).map_err(|_| malformed("a length"))
    }

    /// Reads bytes after their length.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.usize()?;
        self.take(length)
    }

    /// Reads text after its length.
    pub fn text(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| malformed("text"))
    }

    /// Reads a list of lengths or ranks.
    pub fn list(&mut self) -> Result<Vec<usize>> {
        let length = self.usize()?;
        if length > self.0.len() / 8 {
            return Err(malformed("a list"));
        }
        (0..length).map(|_| self.usize()).collect()
    }

    /// Checks that everything was read.
    pub fn finish(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(malformed("the end")) }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        self.0.split_off(..length).ok_or_else(|| malformed("more bytes"))
    }
}

/// The error of a message that this program cannot have written.
pub(crate) fn malformed(what: &str) -> Error {
    Error::format(
        "message",
        format!("a message of another rank is malformed where {what} should be: do all ranks run one program?"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_cut_messages_are_errors() {
        let mut w = Writer::default();
        w.u8(7).u64(u64::MAX).text("größe").list(&[1, 0, 3]).bytes(&[]);
        let bytes = w.finish();
        let read = |bytes: &[u8]| -> Result<()> {
            let mut r = WireReader::new(bytes);
            assert_eq!((r.u8()?, r.u64()?, r.text()?), (7, u64::MAX, "größe"));
            assert_eq!((r.list()?, r.bytes()?), (vec![1, 0, 3], &[][..]));
            r.finish()
        };
        read(&bytes).unwrap();
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end]).is_err(), "cut at {end}");
        }
        assert!(read(&[&bytes[..], &[0]].concat()).is_err());
        assert!(WireReader::new(&u64::MAX.to_le_bytes()).list().is_err(), "no memory for what is not there");
    }
}
