//! Files that may be compressed by gzip.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use flate2::bufread::GzDecoder;

/// The first bytes of a file that is compressed by gzip.
pub(crate) const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The bytes of a file from its start, unpacked if it begins as gzip does.
pub(crate) fn unpacked(path: &Path) -> io::Result<Box<dyn BufRead + Send>> {
    let mut file = BufReader::new(File::open(path)?);
    match file.fill_buf()?.starts_with(&GZIP) {
        true => Ok(Box::new(BufReader::new(Members(Some(GzDecoder::new(file)))))),
        false => Ok(Box::new(file)),
    }
}

/// The members of a gzip file, one after another, without the zeros that may pad its end. `None` after the last one.
struct Members<B>(Option<GzDecoder<B>>);

impl<B: BufRead> Read for Members<B> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.0 {
            let read = member.read(into)?;
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            self.0 = match self.0.take() {
                Some(ended) => next_member(ended.into_inner())?,
                None => None,
            };
        }
        Ok(0)
    }
}

/// The next member; `None` at the end.
fn next_member<B: BufRead>(mut file: B) -> io::Result<Option<GzDecoder<B>>> {
    loop {
        let ahead = file.fill_buf()?;
        if ahead.is_empty() {
            return Ok(None);
        }
        match ahead.iter().position(|&byte| byte != 0) {
            Some(0) => return Ok(Some(GzDecoder::new(file))),
            zeros => {
                let zeros = zeros.unwrap_or(ahead.len());
                file.consume(zeros);
            }
        }
    }
}
