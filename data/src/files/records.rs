//! The positions of records in a text file.

use std::{
    io::{BufReader, Bytes, Read},
    iter::Peekable,
};

use numcore::{Error, Result};

use super::{GZIP, MARK, PositionedFile};

/// A file cut into records, each with the number of its first line.
#[derive(Debug)]
pub(crate) struct Records {
    file: PositionedFile,
    /// The offset, the length in bytes and the line of each record.
    places: Vec<(u64, u32, u64)>,
}

impl Records {
    /// Finds the records of `file` with `cut`, behind a byte order mark.
    pub(crate) fn new(file: PositionedFile, cut: impl FnOnce(&mut Cutter<'_>) -> Result<()>) -> Result<Self> {
        let start = file.bytes(0, file.len().min(MARK.len() as u64))?;
        if start.starts_with(&GZIP) {
            return Err(file.malformed("it is compressed by gzip: unpack it, or read it with `stream::lines`"));
        }
        let mut cutter = Cutter {
            bytes: BufReader::with_capacity(1 << 16, file.file()).bytes().peekable(),
            file: &file,
            offset: 0,
            line: 1,
            places: Vec::new(),
        };
        if start == MARK {
            (0..MARK.len()).try_for_each(|_| cutter.next().map(drop))?;
        }
        cut(&mut cutter)?;
        let places = cutter.places;
        Ok(Records { file, places })
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn file(&self) -> &PositionedFile {
        &self.file
    }

    /// The file's path, as errors name it.
    pub(crate) fn name(&self) -> String {
        self.file.path().display().to_string()
    }

    /// The line a record begins at, from 1.
    pub(crate) fn line(&self, index: usize) -> u64 {
        self.places[index].2
    }

    /// The text of a record.
    pub(crate) fn text(&self, index: usize) -> Result<String> {
        let (offset, len, _) = self.places[index];
        let bytes = self.file.bytes(offset, len.into())?;
        String::from_utf8(bytes).map_err(|e| self.malformed(index, format!("is no UTF-8 text ({})", e.utf8_error())))
    }

    /// An error about a record.
    pub(crate) fn malformed(&self, index: usize, why: impl std::fmt::Display) -> Error {
        self.file.malformed(format!("line {}: {why}", self.line(index)))
    }
}

/// A single pass over the bytes of a file, which collects the positions of records.
pub(crate) struct Cutter<'a> {
    bytes: Peekable<Bytes<BufReader<&'a std::fs::File>>>,
    file: &'a PositionedFile,
    offset: u64,
    line: u64,
    places: Vec<(u64, u32, u64)>,
}

impl Cutter<'_> {
    /// The next byte; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<u8>> {
        let Some(byte) = self.bytes.next() else { return Ok(None) };
        let byte = byte.map_err(|e| Error::io(self.file.path(), e))?;
        self.offset += 1;
        self.line += u64::from(byte == b'\n' || byte == b'\r' && !self.is_before_newline());
        Ok(Some(byte))
    }

    /// Tells whether a byte just read ends a line: a newline or a carriage return. Reads the newline after a carriage
    /// return too.
    pub(crate) fn ends_line(&mut self, byte: u8) -> Result<bool> {
        if byte == b'\r' && self.is_before_newline() {
            self.next()?;
        }
        Ok(matches!(byte, b'\n' | b'\r'))
    }

    fn is_before_newline(&mut self) -> bool {
        matches!(self.bytes.peek(), Some(Ok(b'\n')))
    }

    /// The offset and the line of the next byte.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.offset, self.line)
    }

    /// Appends a record: the bytes from a place to offset `end`.
    pub(crate) fn record(&mut self, (start, line): (u64, u64), end: u64) -> Result<()> {
        let len = u32::try_from(end - start);
        let len = len.map_err(|_| self.file.malformed(format!("line {line}: the record has more than 4 GiB")))?;
        self.places.push((start, len, line));
        Ok(())
    }
}

/// Makes a record of every line, without its end. Lines of white space alone are left out.
pub(crate) fn lines(cutter: &mut Cutter<'_>) -> Result<()> {
    loop {
        let place = cutter.place();
        let (mut end, mut blank) = (place.0, true);
        let last = loop {
            let Some(byte) = cutter.next()? else { break true };
            if cutter.ends_line(byte)? {
                break false;
            }
            blank &= byte.is_ascii_whitespace();
            end = cutter.place().0;
        };
        if !blank {
            cutter.record(place, end)?;
        }
        if last {
            return Ok(());
        }
    }
}
