//! Windows of a sequence of tokens, with inputs and targets.

use numcore::{Error, Result, Within};

use super::TokenSource;
use crate::{Array, Dataset};

/// Windows of `context + 1` tokens: the inputs and one more, since the target of each token is the next one. Each
/// window begins at the last target of the previous one, so every token but the first is a target once. Tokens at the
/// end that do not fill a window are left out.
///
/// ```
/// use data::{Dataset, Loader, tokens::{TokenWindows, next_tokens}};
/// # fn main() -> numcore::Result<()> {
/// let windows = TokenWindows::new((0..100u32).collect::<Vec<_>>(), 8)?;
/// assert_eq!(windows.get(1)?, [8, 9, 10, 11, 12, 13, 14, 15, 16]);
/// let loader = Loader::new(windows).batch(4).shuffle(7).collate(next_tokens);
/// for batch in loader.epoch(0)? {
///     let (inputs, targets) = batch?.data;
///     assert_eq!(inputs.to_vec::<i64>()?[1], targets.to_vec::<i64>()?[0]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TokenWindows<S> {
    source: S,
    context: usize,
    stride: usize,
}

impl<S: TokenSource> TokenWindows<S> {
    /// Windows of `context` inputs each.
    ///
    /// # Errors
    /// Fails if `context` is 0, or there are not enough tokens for one window.
    #[track_caller]
    pub fn new(source: S, context: usize) -> Result<Self> {
        if context == 0 || source.len() <= context as u64 {
            let allowed = format!("at least 1, and less than the {} tokens", source.len());
            return Err(Error::range("TokenWindows", "context", context, allowed)).at_caller();
        }
        Ok(TokenWindows { source, context, stride: context })
    }

    /// Begins a window every `stride` tokens; windows overlap if that is less than the context. With 1, a window begins
    /// at every token but the last `context`.
    ///
    /// # Errors
    /// Fails if `stride` is 0.
    #[track_caller]
    pub fn stride(mut self, stride: usize) -> Result<Self> {
        if stride == 0 {
            return Err(Error::range("TokenWindows::stride", "stride", stride, "at least 1")).at_caller();
        }
        self.stride = stride;
        Ok(self)
    }
}

impl<S: TokenSource> Dataset for TokenWindows<S> {
    type Example = Vec<u32>;

    fn len(&self) -> usize {
        ((self.source.len() - self.context as u64 - 1) / self.stride as u64) as usize + 1
    }

    fn get(&self, index: usize) -> Result<Vec<u32>> {
        crate::dataset::check_index("TokenWindows", index, self.len())?;
        self.source.tokens((index * self.stride) as u64, self.context + 1)
    }
}

/// Splits `B` windows of `T + 1` tokens into inputs and targets, both `[B, T]` of `i64`; a target is the next token.
/// Pass it to [`Loader::collate`](crate::Loader::collate).
///
/// # Errors
/// Fails if there is no window, the windows differ in length, or they have fewer than 2 tokens.
#[track_caller]
pub fn next_tokens(windows: Vec<Vec<u32>>) -> Result<(Array, Array)> {
    let length = windows.first().map_or(0, Vec::len);
    if length < 2 || windows.iter().any(|window| window.len() != length) {
        let lengths: Vec<usize> = windows.iter().map(Vec::len).collect();
        let why = format!("windows of {lengths:?} tokens: they must have one length, of at least 2");
        return Err(Error::lengths("next_tokens", &lengths, why)).at_caller();
    }
    let values = |from: usize| -> Result<Array> {
        let mut values = Vec::with_capacity(windows.len() * (length - 1));
        windows.iter().for_each(|w| values.extend(w[from..from + length - 1].iter().map(|&token| i64::from(token))));
        Array::new([windows.len(), length - 1], values)
    };
    Ok((values(0).at_caller()?, values(1).at_caller()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_but_the_first_is_a_target_once() {
        for (len, context, count) in [(9, 4, 2), (10, 4, 2), (13, 4, 3), (5, 4, 1), (2, 1, 1)] {
            let windows = TokenWindows::new((0..len).collect::<Vec<u32>>(), context).unwrap();
            assert_eq!(windows.len(), count, "{len} tokens by {context}");
            let targets: Vec<u32> = (0..count).flat_map(|i| windows.get(i).unwrap()[1..].to_vec()).collect();
            assert!(targets.into_iter().eq(1..=(count * context) as u32));
            assert!(windows.get(count).is_err());
        }
    }

    #[test]
    fn windows_overlap_by_their_stride() {
        let windows = TokenWindows::new((0..8u32).collect::<Vec<_>>(), 3).unwrap().stride(1).unwrap();
        assert_eq!((windows.len(), windows.get(4).unwrap()), (5, vec![4, 5, 6, 7]));
        assert!(windows.stride(0).is_err());
        assert!(TokenWindows::new(vec![1, 2, 3], 3).unwrap_err().to_string().contains("less than the 3 tokens"));
        assert!(TokenWindows::new(vec![1, 2, 3], 0).is_err());
    }

    #[test]
    fn targets_are_the_tokens_after() {
        let (x, y) = next_tokens(vec![vec![1, 2, 3], vec![7, 8, 9]]).unwrap();
        assert_eq!((x.dims(), x.to_vec::<i64>().unwrap()), (&[2, 2][..], vec![1, 2, 7, 8]));
        assert_eq!(y.to_vec::<i64>().unwrap(), [2, 3, 8, 9]);
        assert!(next_tokens(vec![vec![1, 2], vec![1, 2, 3]]).unwrap_err().to_string().contains("[2, 3]"));
        assert!(next_tokens(vec![vec![1]]).is_err() && next_tokens(vec![]).is_err());
    }
}
