//! Tokens: files of tokens, and windows of a text for language models.

mod file;
mod indexed;
mod windows;

use std::{fmt, sync::Arc};

use bytemuck::{Pod, cast_slice};

pub use file::{TokenFile, TokenType, write_tokens};
pub use indexed::{IndexedTokens, IndexedTokensWriter};
use numcore::{Error, Result};
pub use windows::{TokenWindows, next_tokens};

use crate::files::PositionedFile;

/// A long sequence of tokens, read in pieces.
pub trait TokenSource: Send + Sync {
    /// The number of tokens.
    fn len(&self) -> u64;

    /// Tells whether there is no token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `count` tokens from index `start` on.
    ///
    /// # Errors
    /// Fails if there are fewer tokens, or the file cannot be read.
    fn tokens(&self, start: u64, count: usize) -> Result<Vec<u32>>;
}

/// Tokens in memory.
impl TokenSource for Vec<u32> {
    fn len(&self) -> u64 {
        self.as_slice().len() as u64
    }

    fn tokens(&self, start: u64, count: usize) -> Result<Vec<u32>> {
        let end = start.checked_add(count as u64).filter(|&end| end <= TokenSource::len(self));
        match end {
            Some(end) => Ok(self[start as usize..end as usize].to_vec()),
            None => Err(past_the_end(start, count, TokenSource::len(self))),
        }
    }
}

impl<S: TokenSource + ?Sized> TokenSource for Arc<S> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn tokens(&self, start: u64, count: usize) -> Result<Vec<u32>> {
        (**self).tokens(start, count)
    }
}

fn past_the_end(start: u64, count: usize, len: u64) -> Error {
    let end = start.saturating_add(count as u64);
    Error::range("tokens", "end of the tokens", end, format!("at most {len}, the number of tokens"))
}

/// Reads `count` tokens of a type from byte `offset` of `file` on.
fn read(file: &PositionedFile, kind: TokenType, offset: u64, count: usize) -> Result<Vec<u32>> {
    // Checked before memory is taken: a malformed file may claim any count.
    let bytes = (count as u64).checked_mul(kind.size() as u64).and_then(|len| offset.checked_add(len));
    if bytes.is_none_or(|end| end > file.len()) {
        let why = format!("{count} tokens of {kind} from byte {offset} on are past its end at {}", file.len());
        return Err(file.malformed(why));
    }
    // Words, so that numbers of any type are aligned in them.
    let bytes = count * kind.size();
    let mut words = vec![0; bytes.div_ceil(8)];
    let stored = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes];
    file.read(offset, stored)?;
    decode(file, kind, offset, stored)
}

/// Decodes the bytes stored at `offset` of a file. They are little-endian, like every host that the project supports,
/// and aligned for the type.
fn decode(file: &PositionedFile, kind: TokenType, offset: u64, stored: &[u8]) -> Result<Vec<u32>> {
    match kind {
        // Every value is a token, so these loops have no test and vectorize.
        TokenType::U8 => Ok(stored.iter().map(|&x| x.into()).collect()),
        TokenType::U16 => Ok(cast_slice::<_, u16>(stored).iter().map(|&x| x.into()).collect()),
        TokenType::U32 => Ok(cast_slice(stored).to_vec()),
        TokenType::I8 => checked::<i8>(file, offset, stored),
        TokenType::I16 => checked::<i16>(file, offset, stored),
        TokenType::I32 => checked::<i32>(file, offset, stored),
        TokenType::I64 => checked::<i64>(file, offset, stored),
    }
}

/// Decodes tokens of a type that has values which are no tokens.
fn checked<T>(file: &PositionedFile, offset: u64, stored: &[u8]) -> Result<Vec<u32>>
where
    T: Pod + fmt::Display,
    u32: TryFrom<T>,
{
    let wrong =
        |at: usize, x: T| file.malformed(format!("byte {}: {x} is no token", offset + (at * size_of::<T>()) as u64));
    let numbers = cast_slice::<_, T>(stored).iter().enumerate();
    numbers.map(|(at, &x)| u32::try_from(x).map_err(|_| wrong(at, x))).collect()
}
