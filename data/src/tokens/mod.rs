//! Tokens: files of them, and windows of a text for language models.

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

/// One long run of tokens, read in pieces.
pub trait TokenSource: Send + Sync {
    /// How many tokens there are.
    fn len(&self) -> u64;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `count` tokens from `start` on.
    ///
    /// # Errors
    /// If there are fewer, or the file cannot be read.
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
    Error::argument("tokens", format!("{count} tokens from {start} on are past the end: there are {len}"))
}

/// `count` tokens of a type that lie in `file` from byte `offset` on.
fn read(file: &PositionedFile, kind: TokenType, offset: u64, count: usize) -> Result<Vec<u32>> {
    // Before memory is taken: a malformed file may claim any count.
    let bytes = (count as u64).checked_mul(kind.size() as u64).and_then(|len| offset.checked_add(len));
    if bytes.is_none_or(|end| end > file.len()) {
        let why = format!("{count} tokens of {kind} from byte {offset} on are past its end at {}", file.len());
        return Err(file.malformed(why));
    }
    // Words, so that numbers of any type lie in them as in memory of their own.
    let bytes = count * kind.size();
    let mut words = vec![0; bytes.div_ceil(8)];
    let stored = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes];
    file.read(offset, stored)?;
    decode(file, kind, offset, stored)
}

/// Tokens of bytes as they are stored at `offset` of a file: little endian, as every host is that this workspace builds for. The bytes are aligned for the type.
fn decode(file: &PositionedFile, kind: TokenType, offset: u64, stored: &[u8]) -> Result<Vec<u32>> {
    match kind {
        // Every value is a token, and the loops without a test are vectors.
        TokenType::U8 => Ok(stored.iter().map(|&x| x.into()).collect()),
        TokenType::U16 => Ok(cast_slice::<_, u16>(stored).iter().map(|&x| x.into()).collect()),
        TokenType::U32 => Ok(cast_slice(stored).to_vec()),
        TokenType::I8 => checked::<i8>(file, offset, stored),
        TokenType::I16 => checked::<i16>(file, offset, stored),
        TokenType::I32 => checked::<i32>(file, offset, stored),
        TokenType::I64 => checked::<i64>(file, offset, stored),
    }
}

/// Tokens of a type that also holds numbers that are none.
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
