//! Tokens: files of them, and windows of a text for language models.

mod file;
mod indexed;
mod windows;

use std::sync::Arc;

pub use file::{TokenFile, TokenType, write_tokens};
pub use indexed::{IndexedTokens, IndexedTokensWriter};
use numcore::{Error, Result};
pub use windows::{Windows, next_tokens};

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
    macro_rules! as_read {
        ($stored:ty, $convert:expr) => {{
            let mut stored = vec![<$stored>::default(); count];
            file.read(offset, bytemuck::cast_slice_mut(&mut stored))?;
            let convert: fn($stored) -> Option<u32> = $convert;
            let converted: Option<Vec<u32>> = stored.iter().map(|&x| convert(x)).collect();
            converted.ok_or_else(|| {
                let at = stored.iter().position(|&x| convert(x).is_none()).unwrap_or(0);
                file.malformed(format!("byte {}: {} is no token", offset + (at * kind.size()) as u64, stored[at]))
            })
        }};
    }
    match kind {
        // Every value is a token, and the loops without a test are vectors.
        TokenType::U8 => Ok(file.bytes(offset, count as u64)?.into_iter().map(u32::from).collect()),
        TokenType::U16 => {
            let mut stored = vec![0u16; count];
            file.read(offset, bytemuck::cast_slice_mut(&mut stored))?;
            Ok(stored.into_iter().map(u32::from).collect())
        }
        TokenType::U32 => {
            let mut stored = vec![0u32; count];
            file.read(offset, bytemuck::cast_slice_mut(&mut stored))?;
            Ok(stored)
        }
        TokenType::I8 => as_read!(i8, |x| x.try_into().ok()),
        TokenType::I16 => as_read!(i16, |x| x.try_into().ok()),
        TokenType::I32 => as_read!(i32, |x| x.try_into().ok()),
        TokenType::I64 => as_read!(i64, |x| x.try_into().ok()),
    }
}
