//! Files of tokens alone, one after another: nanoGPT's format.

use std::{fmt, path::Path};

use bytemuck::{cast_slice, cast_slice_mut};
use numcore::{Error, Result, safetensors::replace_file};

use super::{TokenSource, decode, past_the_end, read};
use crate::files::PositionedFile;

/// How a token is stored, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    /// One byte.
    U8,
    /// One byte with a sign.
    I8,
    /// Two bytes: vocabularies of up to 65536.
    U16,
    /// Two bytes with a sign.
    I16,
    /// Four bytes.
    U32,
    /// Four bytes with a sign.
    I32,
    /// Eight bytes with a sign.
    I64,
}

impl TokenType {
    /// Bytes of a token.
    pub const fn size(self) -> usize {
        match self {
            TokenType::U8 | TokenType::I8 => 1,
            TokenType::U16 | TokenType::I16 => 2,
            TokenType::U32 | TokenType::I32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// The name used in messages: `u16`, `i32` …
    pub const fn name(self) -> &'static str {
        match self {
            TokenType::U8 => "u8",
            TokenType::I8 => "i8",
            TokenType::U16 => "u16",
            TokenType::I16 => "i16",
            TokenType::U32 => "u32",
            TokenType::I32 => "i32",
            TokenType::I64 => "i64",
        }
    }

    /// The largest token it stores.
    pub const fn largest(self) -> u32 {
        match self {
            TokenType::U8 => u8::MAX as u32,
            TokenType::I8 => i8::MAX as u32,
            TokenType::U16 => u16::MAX as u32,
            TokenType::I16 => i16::MAX as u32,
            TokenType::I32 => i32::MAX as u32,
            TokenType::U32 | TokenType::I64 => u32::MAX,
        }
    }

    /// Appends tokens as they are stored.
    pub(super) fn store(self, op: &'static str, tokens: &[u32], into: &mut Vec<u8>) -> Result<()> {
        if let Some(at) = tokens.iter().position(|&token| token > self.largest()) {
            let why = format!("token {at} is {}, and {self} holds up to {}", tokens[at], self.largest());
            return Err(Error::argument(op, why));
        }
        // The low bytes of a small number are the number.
        tokens.iter().for_each(|&token| into.extend_from_slice(&u64::from(token).to_le_bytes()[..self.size()]));
        Ok(())
    }
}

impl fmt::Display for TokenType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A file of tokens alone, one after another, of one type: what nanoGPT's `prepare.py` writes, and [`write_tokens`].
///
/// ```
/// use data::tokens::{TokenFile, TokenSource, TokenType, write_tokens};
/// # fn main() -> numcore::Result<()> {
/// let path = std::env::temp_dir().join("weftgrad-doc-token-file.bin");
/// write_tokens(&path, TokenType::U16, &[464, 3290, 318])?;
/// let tokens = TokenFile::open(&path, TokenType::U16)?;
/// assert_eq!(tokens.tokens(1, 2)?, [3290, 318]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TokenFile {
    file: PositionedFile,
    kind: TokenType,
    /// The whole file as it is stored, in words, if it was read into memory.
    stored: Option<Vec<u64>>,
}

impl TokenFile {
    /// Opens a file of tokens of this type.
    ///
    /// # Errors
    /// If it cannot be opened, or its size is no whole number of tokens.
    pub fn open(path: impl AsRef<Path>, kind: TokenType) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref())?;
        if !file.len().is_multiple_of(kind.size() as u64) {
            let why = format!(
                "its {} bytes are no whole number of tokens of {kind}: cut short, or of another type",
                file.len()
            );
            return Err(file.malformed(why));
        }
        Ok(TokenFile { file, kind, stored: None })
    }

    /// Reads the whole file into memory, as it is stored: for files that fit. Short windows are then read many times as fast, as none is a call of the operating
    /// system.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn in_memory(self) -> Result<Self> {
        let bytes = self.file.len() as usize;
        let mut words = vec![0; bytes.div_ceil(8)];
        self.file.read(0, &mut cast_slice_mut::<u64, u8>(&mut words)[..bytes])?;
        Ok(TokenFile { stored: Some(words), ..self })
    }
}

impl TokenSource for TokenFile {
    fn len(&self) -> u64 {
        self.file.len() / self.kind.size() as u64
    }

    fn tokens(&self, start: u64, count: usize) -> Result<Vec<u32>> {
        if start.checked_add(count as u64).is_none_or(|end| end > self.len()) {
            return Err(past_the_end(start, count, self.len()));
        }
        let offset = start * self.kind.size() as u64;
        let Some(words) = &self.stored else { return read(&self.file, self.kind, offset, count) };
        let stored = &cast_slice::<u64, u8>(words)[offset as usize..][..count * self.kind.size()];
        decode(&self.file, self.kind, offset, stored)
    }
}

/// Writes tokens as a file that [`TokenFile::open`] reads, all or nothing.
///
/// # Errors
/// If a token is larger than the type holds, or the file cannot be written.
pub fn write_tokens(path: impl AsRef<Path>, kind: TokenType, tokens: &[u32]) -> Result<()> {
    let mut bytes = Vec::with_capacity(tokens.len() * kind.size());
    kind.store("write_tokens", tokens, &mut bytes)?;
    replace_file(path, &bytes)
}
