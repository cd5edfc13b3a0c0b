//! Values as bytes, between processes: little-endian numbers, and texts and lists after their lengths.

use numcore::{Error, Result};

/// Writes values one after another.
#[derive(Clone, Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// A byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    /// A number.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A length, a rank or an index.
    pub fn usize(&mut self, value: usize) -> &mut Self {
        self.u64(value as u64)
    }

    /// Bytes after their length.
    pub fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.usize(value.len());
        self.0.extend(value);
        self
    }

    /// Text.
    pub fn text(&mut self, value: &str) -> &mut Self {
        self.bytes(value.as_bytes())
    }

    /// A list of lengths or ranks.
    pub fn list(&mut self, values: &[usize]) -> &mut Self {
        self.usize(values.len());
        values.iter().for_each(|&value| {
            self.usize(value);
        });
        self
    }

    /// All that was written.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads what a [`Writer`] wrote. Bytes that end too early or say what cannot be are errors: they came from another process.
#[derive(Clone, Debug)]
pub struct WireReader<'a>(&'a [u8]);

impl<'a> WireReader<'a> {
    /// From the beginning.
    pub fn new(bytes: &'a [u8]) -> Self {
        WireReader(bytes)
    }

    /// A byte.
    pub fn u8(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    /// A number.
    pub fn u64(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| malformed("a number"))
    }

    /// A length, a rank or an index.
    pub fn usize(&mut self) -> Result<usize> {
        usize::try_from(self.u64()?).map_err(|_| malformed("a length"))
    }

    /// Bytes after their length.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.usize()?;
        self.take(length)
    }

    /// Text.
    pub fn text(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| malformed("text"))
    }

    /// A list of lengths or ranks.
    pub fn list(&mut self) -> Result<Vec<usize>> {
        let length = self.usize()?;
        if length > self.0.len() / 8 {
            return Err(malformed("a list"));
        }
        (0..length).map(|_| self.usize()).collect()
    }

    /// An error unless everything was read.
    pub fn finish(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(malformed("the end")) }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        self.0.split_off(..length).ok_or_else(|| malformed("more bytes"))
    }
}

/// The error of a message that is not what this program writes.
pub(crate) fn malformed(what: &str) -> Error {
    Error::argument(
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
