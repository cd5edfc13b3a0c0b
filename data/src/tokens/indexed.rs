//! Megatron's indexed token files: `<prefix>.bin` has the tokens, `<prefix>.idx` the starts of sequences and documents.
//!
//! The index is little-endian. It has `MMIDIDX\0\0`, the version 1 (`u64`), the token type (`u8`), and the numbers of
//! sequences and of document bounds (`u64`). Then come each sequence's length (`i32`), each one's byte offset (`i64`),
//! and the first sequence of each document with the end of the last (`i64`). A mode of each sequence (`i8`) may follow;
//! it is not read.

use std::{
    fs::File,
    io::{BufWriter, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use numcore::{Error, Result, Within, safetensors::replace_file};

use super::{TokenType, read};
use crate::{Dataset, files::PositionedFile};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER: u64 = 34;

/// Token types by their code in the index. Codes 6 and 7 are floats, which are no tokens.
const CODES: [(u8, TokenType); 6] = [
    (1, TokenType::U8),
    (2, TokenType::I8),
    (3, TokenType::I16),
    (4, TokenType::I32),
    (5, TokenType::I64),
    (8, TokenType::U16),
];

/// The documents of Megatron's `.bin` and `.idx` files. An example of this [`Dataset`] is the tokens of a document.
#[derive(Debug)]
pub struct IndexedTokens {
    tokens: PositionedFile,
    kind: TokenType,
    /// The length in tokens and the offset in bytes of each sequence, from the index. They are checked when read.
    sequences: Vec<(i32, i64)>,
    /// The first sequence of each document, and the end of the last.
    bounds: Vec<i64>,
}

impl IndexedTokens {
    /// Opens `<prefix>.bin` and `<prefix>.idx`.
    ///
    /// # Errors
    /// Fails if a file is missing, or the index is no index. A sequence or document that the index misplaces is an
    /// error when it is read.
    #[track_caller]
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self> {
        let tokens = PositionedFile::open(&with(prefix.as_ref(), ".bin")).at_caller()?;
        let index = PositionedFile::open(&with(prefix.as_ref(), ".idx")).at_caller()?;
        let header = index.bytes(0, HEADER).at_caller()?;
        if header[..9] != *MAGIC {
            return Err(index.malformed("it does not begin with MMIDIDX, so it is no index")).at_caller();
        }
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        if long(9) != VERSION {
            return Err(index.malformed(format!("version {} of the index is not known, only {VERSION}", long(9))))
                .at_caller();
        }
        let code = CODES.iter().find(|(code, _)| *code == header[17]);
        let (_, kind) =
            code.ok_or_else(|| index.malformed(format!("{} is the code of no token type", header[17]))).at_caller()?;
        let (sequences, bounds) = arrays(&index, long(18), long(26)).at_caller()?;
        Ok(IndexedTokens { tokens, kind: *kind, sequences, bounds })
    }

    /// The number of sequences; a document has one or more.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Reads the tokens of a sequence.
    ///
    /// # Errors
    /// Fails if there is no such sequence, or the index misplaces it.
    #[track_caller]
    pub fn sequence(&self, index: usize) -> Result<Vec<u32>> {
        crate::dataset::check_index("IndexedTokens::sequence", index, self.sequences.len()).at_caller()?;
        self.sequence_tokens(index, 0..self.sequence_len(index).at_caller()?).at_caller()
    }

    /// Reads a range of a document's tokens, and nothing else.
    ///
    /// # Errors
    /// Fails if there is no such document, it has fewer tokens, or the index misplaces it.
    #[track_caller]
    pub fn document_tokens(&self, index: usize, range: Range<usize>) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        let mut start = 0;
        for sequence in self.document(index).at_caller()? {
            let end = start + self.sequence_len(sequence).at_caller()?;
            let (from, to) = (range.start.max(start), range.end.min(end));
            match tokens.is_empty() {
                _ if from >= to => {}
                true => tokens = self.sequence_tokens(sequence, from - start..to - start).at_caller()?,
                false => tokens.extend(self.sequence_tokens(sequence, from - start..to - start).at_caller()?),
            }
            start = end;
        }
        if range.start > range.end || range.end > start {
            let allowed = format!("in {}..={start} in document {index}", range.start);
            return Err(Error::range("IndexedTokens", "end of the tokens", range.end, allowed)).at_caller();
        }
        Ok(tokens)
    }

    /// The number of tokens of a document, from the index.
    ///
    /// # Errors
    /// Fails if there is no such document, or the index misplaces it.
    #[track_caller]
    pub fn document_len(&self, index: usize) -> Result<usize> {
        self.document(index).at_caller()?.map(|sequence| self.sequence_len(sequence)).sum()
    }

    fn sequence_len(&self, index: usize) -> Result<usize> {
        let length = self.sequences[index].0;
        usize::try_from(length).map_err(|_| self.misplaced(format!("sequence {index} has length {length}")))
    }

    fn sequence_tokens(&self, index: usize, range: Range<usize>) -> Result<Vec<u32>> {
        let skipped = (range.start * self.kind.size()) as u64;
        let offset = u64::try_from(self.sequences[index].1).ok().and_then(|offset| offset.checked_add(skipped));
        let offset = offset
            .ok_or_else(|| self.misplaced(format!("sequence {index} lies at byte {}", self.sequences[index].1)))?;
        read(&self.tokens, self.kind, offset, range.len()).map_err(|e| e.with_operands(|| format!("sequence {index}")))
    }

    /// The sequences of a document.
    fn document(&self, index: usize) -> Result<Range<usize>> {
        crate::dataset::check_index("IndexedTokens", index, self.len())?;
        let (from, to) = (self.bounds[index], self.bounds[index + 1]);
        if from < 0 || from > to || to as u64 > self.sequences.len() as u64 {
            let why = format!("document {index} has sequences {from} to {to} of {}", self.sequences.len());
            return Err(self.misplaced(why));
        }
        Ok(from as usize..to as usize)
    }

    fn misplaced(&self, why: String) -> Error {
        self.tokens.malformed(format!("by its index, {why}"))
    }
}

impl Dataset for IndexedTokens {
    type Example = Vec<u32>;

    fn len(&self) -> usize {
        self.bounds.len().saturating_sub(1)
    }

    fn get(&self, index: usize) -> Result<Vec<u32>> {
        self.document_tokens(index, 0..self.document_len(index)?)
    }
}

type Arrays = (Vec<(i32, i64)>, Vec<i64>);

/// The arrays of the index after its header: `sequences` pairs of length and offset, and `bounds` document bounds.
fn arrays(index: &PositionedFile, sequences: u64, bounds: u64) -> Result<Arrays> {
    let size = |count: u64, of: u64| count.checked_mul(of);
    let needed = size(sequences, 12).zip(size(bounds, 8)).and_then(|(a, b)| a.checked_add(b)?.checked_add(HEADER));
    if needed.is_none_or(|needed| needed > index.len()) {
        let why =
            format!("{sequences} sequences and {bounds} document bounds do not fit into its {} bytes", index.len());
        return Err(index.malformed(why));
    }
    let lengths = numbers(&index.bytes(HEADER, sequences * 4)?, i32::from_le_bytes);
    let offsets = numbers(&index.bytes(HEADER + sequences * 4, sequences * 8)?, i64::from_le_bytes);
    let bounds = numbers(&index.bytes(HEADER + sequences * 12, bounds * 8)?, i64::from_le_bytes);
    Ok((lengths.into_iter().zip(offsets).collect(), bounds))
}

fn numbers<T, const N: usize>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| from(*chunk)).collect()
}

/// A path such as `<prefix>.bin`. A prefix may have dots of its own, so no extension is replaced.
fn with(prefix: &Path, end: &str) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// Writes files for [`IndexedTokens`], document by document.
///
/// ```
/// use data::{Dataset, tokens::{IndexedTokens, IndexedTokensWriter, TokenType}};
/// # fn main() -> numcore::Result<()> {
/// let prefix = std::env::temp_dir().join("weftgrad-doc-indexed-tokens");
/// let mut writer = IndexedTokensWriter::create(&prefix, TokenType::U16)?;
/// writer.document(&[1, 2, 3])?;
/// writer.document(&[4])?;
/// writer.finish()?;
/// assert_eq!(IndexedTokens::open(&prefix)?.get(1)?, [4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct IndexedTokensWriter {
    prefix: PathBuf,
    kind: TokenType,
    code: u8,
    tokens: BufWriter<File>,
    lengths: Vec<i32>,
    bytes: Vec<u8>,
}

impl IndexedTokensWriter {
    /// Begins `<prefix>.bin`. An old index is removed, and the new one written by
    /// [`finish`](IndexedTokensWriter::finish), so no incomplete file is readable.
    ///
    /// # Errors
    /// Fails if the format has no code for the type (`u32`), or the file cannot be created.
    #[track_caller]
    pub fn create(prefix: impl AsRef<Path>, kind: TokenType) -> Result<Self> {
        let code = CODES
            .iter()
            .find(|(_, known)| *known == kind)
            .map(|(code, _)| *code)
            .ok_or_else(|| {
                Error::unsupported("IndexedTokensWriter", format!("the format has no code for {kind}; use i32"))
            })
            .at_caller()?;
        let path = with(prefix.as_ref(), ".bin");
        // An old index would misplace the new tokens if this ends early.
        let index = with(prefix.as_ref(), ".idx");
        match std::fs::remove_file(&index) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&index, e)).at_caller(),
            _ => {}
        }
        let tokens = BufWriter::new(File::create(&path).map_err(|e| Error::io(&path, e)).at_caller()?);
        let prefix = prefix.as_ref().into();
        Ok(IndexedTokensWriter { prefix, kind, code, tokens, lengths: Vec::new(), bytes: Vec::new() })
    }

    /// Appends a document of one sequence.
    ///
    /// # Errors
    /// Fails if a token is larger than the type holds, the document is too long for an `i32`, or the file cannot be
    /// written.
    #[track_caller]
    pub fn document(&mut self, tokens: &[u32]) -> Result<()> {
        const OP: &str = "IndexedTokensWriter::document";
        let length = i32::try_from(tokens.len());
        let many = |_| Error::range(OP, "number of tokens", tokens.len(), "at most what an i32 counts");
        let length = length.map_err(many).at_caller()?;
        self.bytes.clear();
        self.kind.store(OP, tokens, &mut self.bytes).at_caller()?;
        self.tokens.write_all(&self.bytes).map_err(|e| Error::io(with(&self.prefix, ".bin"), e)).at_caller()?;
        self.lengths.push(length);
        Ok(())
    }

    /// Flushes the tokens and writes the index.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    #[track_caller]
    pub fn finish(mut self) -> Result<()> {
        self.tokens.flush().map_err(|e| Error::io(with(&self.prefix, ".bin"), e)).at_caller()?;
        let count = self.lengths.len() as u64;
        let mut index = MAGIC.to_vec();
        index.extend(VERSION.to_le_bytes());
        index.push(self.code);
        index.extend(count.to_le_bytes());
        index.extend((count + 1).to_le_bytes());
        self.lengths.iter().for_each(|length| index.extend(length.to_le_bytes()));
        let mut offset = 0i64;
        for &length in &self.lengths {
            index.extend(offset.to_le_bytes());
            offset += i64::from(length) * self.kind.size() as i64;
        }
        (0..=count).for_each(|bound| index.extend(bound.to_le_bytes()));
        replace_file(with(&self.prefix, ".idx"), &index).at_caller()
    }
}
