//! Files of nothing but tokens: nanoGPT's format.

use std::{fmt, path::Path};

use bytemuck::{cast_slice, cast_slice_mut};
use numcore::{Error, Result, Within, safetensors::replace_file};

use super::{TokenSource, decode, past_the_end, read};
use crate::files::PositionedFile;

/// The storage type of a token, little-endian.
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
    /// The number of bytes of a token.
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

    /// Appends the stored bytes of tokens to `into`.
    pub(super) fn store(self, op: &'static str, tokens: &[u32], into: &mut Vec<u8>) -> Result<()> {
        if let Some(at) = tokens.iter().position(|&token| token > self.largest()) {
            let allowed = format!("at most {}, as {self} holds; it is token {at}", self.largest());
            return Err(Error::range(op, "token", tokens[at], allowed));
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

/// A file of nothing but tokens, one after another, of one type. nanoGPT's `prepare.py` and [`write_tokens`] write it.
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
    /// The bytes of the complete file, in words, if it was read into memory.
    stored: Option<Vec<u64>>,
}

impl TokenFile {
    /// Opens a file of tokens of this type.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or its size is no multiple of the token size.
    #[track_caller]
    pub fn open(path: impl AsRef<Path>, kind: TokenType) -> Result<Self> {
        let file = PositionedFile::open(path.as_ref()).at_caller()?;
        if !file.len().is_multiple_of(kind.size() as u64) {
            let why = format!(
                "its {} bytes are no whole number of tokens of {kind}: cut short, or of another type",
                file.len()
            );
            return Err(file.malformed(why)).at_caller();
        }
        Ok(TokenFile { file, kind, stored: None })
    }

    /// Reads the complete file into memory, in its stored type: for files that fit. Short windows are then read many
    /// times as fast, as none needs a system call.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    #[track_caller]
    pub fn in_memory(self) -> Result<Self> {
        let bytes = self.file.len() as usize;
        let mut words = vec![0; bytes.div_ceil(8)];
        self.file.read(0, &mut cast_slice_mut::<u64, u8>(&mut words)[..bytes]).at_caller()?;
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

/// Writes a file of tokens for [`TokenFile::open`]. The file is replaced completely or not at all.
///
/// # Errors
/// Fails if a token is larger than the type holds, or the file cannot be written.
#[track_caller]
pub fn write_tokens(path: impl AsRef<Path>, kind: TokenType, tokens: &[u32]) -> Result<()> {
    let mut bytes = Vec::with_capacity(tokens.len() * kind.size());
    kind.store("write_tokens", tokens, &mut bytes).at_caller()?;
    replace_file(path, &bytes).at_caller()
}
