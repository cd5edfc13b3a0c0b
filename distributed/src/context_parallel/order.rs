//! The order in which ranks have the tokens of a sequence: zig-zag, so that causal attention is equal work for all.

use std::ops::Range;

use nn::parallel::SequencePart;
use numcore::{
    Error, Result, Shape,
    ops::{Apply, ViewOps, cat},
};

/// The zig-zag order: of `2c` chunks of a sequence, rank `r` of `c` has chunks `r` and `2c − 1 − r`. A late chunk sees
/// as much more of the sequence as an early one sees less.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZigZag {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// The number of tokens of a chunk.
    pub(super) chunk: usize,
}

impl ZigZag {
    /// The order of sequences of `tokens` tokens, for one rank; an error unless `2c` divides `tokens`.
    pub(super) fn of(tokens: usize, rank: usize, ranks: usize) -> Result<Self> {
        let chunks = 2 * ranks;
        if !tokens.is_multiple_of(chunks) {
            let why = format!(
                "sequences of {tokens} tokens cannot be shared out among {ranks} ranks, which have two chunks each: pad them to {}",
                tokens.next_multiple_of(chunks)
            );
            return Err(Error::shape("context parallelism", &[Shape::new(&[tokens])?], why));
        }
        Ok(ZigZag { rank, ranks, chunk: tokens / chunks })
    }

    /// The number of tokens of the whole sequence.
    pub(super) fn tokens(&self) -> usize {
        2 * self.ranks * self.chunk
    }

    /// The two chunks of a rank, as ranges of the sequence.
    pub(super) fn chunks_of(&self, rank: usize) -> [Range<usize>; 2] {
        [rank, 2 * self.ranks - 1 - rank].map(|chunk| chunk * self.chunk..(chunk + 1) * self.chunk)
    }

    /// The tokens of a rank.
    pub(super) fn part_of(&self, rank: usize) -> SequencePart {
        SequencePart::of(self.tokens(), self.chunks_of(rank))
    }

    /// Joins the parts of all ranks to the sequence along `dim`.
    pub(super) fn joined<T: Apply>(&self, parts: &[T], dim: usize) -> Result<T> {
        let half = |part: &T, k: usize| part.narrow(dim as isize, k * self.chunk, self.chunk);
        let early = parts.iter().map(|part| half(part, 0));
        let late = parts.iter().rev().map(|part| half(part, 1));
        let chunks = early.chain(late).collect::<Result<Vec<_>>>()?;
        cat(&chunks.iter().collect::<Vec<_>>(), dim as isize)
    }

    /// The chunks of a sequence along `dim`, ordered by rank, two for each: `[2c, ..]` with a new first dimension.
    pub(super) fn dealt<T: Apply>(&self, x: &T, dim: usize) -> Result<T> {
        let chunk = |at: Range<usize>| x.narrow(dim as isize, at.start, at.len())?.unsqueeze(0);
        let chunks = (0..self.ranks).flat_map(|rank| self.chunks_of(rank)).map(chunk).collect::<Result<Vec<_>>>()?;
        cat(&chunks.iter().collect::<Vec<_>>(), 0)
    }

    /// A rank's two chunks, `[2, A, B, n, D]`, as `[A, B, 2n, D]`.
    pub(super) fn merged<T: Apply>(&self, chunks: &T) -> Result<T> {
        let shape = chunks.spec().shape;
        chunks.permute(&[1, 2, 0, 3, 4])?.reshape([shape[1], shape[2], 2 * shape[3], shape[4]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use numcore::{DType, NullRuntime, Tensor};

    #[test]
    fn ranks_have_every_token_once_and_see_as_many() {
        for ranks in [1, 2, 3, 4, 5, 8] {
            let order = ZigZag::of(6 * ranks, 0, ranks).unwrap();
            let mut seen = vec![0; order.tokens()];
            for rank in 0..ranks {
                let part = order.part_of(rank);
                part.ranges().iter().cloned().flatten().for_each(|token| seen[token] += 1);
                let keys: usize = part.ranges().iter().cloned().flatten().map(|token| token + 1).sum();
                assert_eq!(keys * ranks, (1..=6 * ranks).sum::<usize>(), "{ranks}");
            }
            assert_eq!(seen, vec![1; 6 * ranks]);
        }
        let error = ZigZag::of(10, 0, 2).unwrap_err().to_string();
        assert!(
            error.contains("10 tokens") && error.contains("2 ranks") && error.contains("pad them to 12"),
            "{error}"
        );
    }

    #[test]
    fn shapes_of_what_is_joined_and_dealt() {
        let order = ZigZag::of(12, 1, 3).unwrap();
        let zeros = |dims: &[usize]| Tensor::zeros(&NullRuntime::new(), dims, DType::F32).unwrap();
        let parts = [zeros(&[2, 5, 4, 7]), zeros(&[2, 5, 4, 7]), zeros(&[2, 5, 4, 7])];
        let all = order.joined(&parts, 2).unwrap();
        assert_eq!(all.shape()[..], [2, 5, 12, 7]);
        assert_eq!(order.dealt(&all, 2).unwrap().shape()[..], [6, 2, 5, 2, 7]);
        assert_eq!(order.merged(&zeros(&[2, 2, 5, 2, 7])).unwrap().shape()[..], [2, 5, 4, 7]);
    }
}
