//! The order in which ranks have the tokens of a sequence: zig-zag, so that causal attention is equal work for all.

use std::ops::Range;

use nn::parallel::SequencePart;
use numcore::{
    Error, Result, Shape,
    ops::{Apply, ViewOps, cat},
};

/// The zig-zag order: of `2c` chunks of a sequence, rank `r` of `c` has chunks `r` and `2c − 1 − r`. A late chunk sees
/// as much more of the sequence as an early one sees less. Early chunks have a token more if a rank's number is odd.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZigZag {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// The number of tokens of a rank's early chunk.
    pub(super) early: usize,
    /// The number of tokens of a rank's late chunk.
    pub(super) late: usize,
}

impl ZigZag {
    /// The order of sequences of `tokens` tokens, for one rank; an error unless `c` divides `tokens`, into two
    /// or more for each rank.
    pub(super) fn of(tokens: usize, rank: usize, ranks: usize) -> Result<Self> {
        let own = tokens / ranks;
        if !tokens.is_multiple_of(ranks) || own == 1 {
            let why = format!(
                "sequences of {tokens} tokens cannot be shared out among {ranks} ranks, which have two chunks each: pad them to {}",
                tokens.next_multiple_of(ranks).max(2 * ranks)
            );
            return Err(Error::shape("context parallelism", &[Shape::new(&[tokens])?], why));
        }
        Ok(ZigZag { rank, ranks, early: own.div_ceil(2), late: own / 2 })
    }

    /// The number of tokens of the whole sequence.
    pub(super) fn tokens(&self) -> usize {
        self.ranks * (self.early + self.late)
    }

    /// The two chunks of a rank, as ranges of the sequence.
    pub(super) fn chunks_of(&self, rank: usize) -> [Range<usize>; 2] {
        let late = self.ranks * self.early + (self.ranks - 1 - rank) * self.late;
        [rank * self.early..(rank + 1) * self.early, late..late + self.late]
    }

    /// The rows of a rank's value that its chunks `from..to` have.
    pub(super) fn rows(&self, (from, to): (usize, usize)) -> Range<usize> {
        let edges = [0, self.early, self.early + self.late];
        edges[from]..edges[to]
    }

    /// The tokens of a rank.
    pub(super) fn part_of(&self, rank: usize) -> SequencePart {
        SequencePart::of(self.tokens(), self.chunks_of(rank))
    }

    /// Joins the parts of all ranks to the sequence along `dim`.
    pub(super) fn joined<T: Apply>(&self, parts: &[T], dim: usize) -> Result<T> {
        let half = |part: &T, k: usize| {
            let rows = self.rows((k, k + 1));
            part.narrow(dim as isize, rows.start, rows.len())
        };
        let early = parts.iter().map(|part| half(part, 0));
        let late = parts.iter().rev().map(|part| half(part, 1));
        let chunks = early.chain(late).collect::<Result<Vec<_>>>()?;
        cat(&chunks.iter().collect::<Vec<_>>(), dim as isize)
    }

    /// The parts of a sequence along `dim` of all ranks: `[c, ..]` with a new first dimension.
    pub(super) fn dealt<T: Apply>(&self, x: &T, dim: usize) -> Result<T> {
        let part = |rank| self.part_of(rank).take(x, dim)?.unsqueeze(0);
        let parts = (0..self.ranks).map(part).collect::<Result<Vec<_>>>()?;
        cat(&parts.iter().collect::<Vec<_>>(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use numcore::{DType, NullRuntime, Tensor};

    #[test]
    fn ranks_have_every_token_once_and_see_as_many() {
        for (ranks, own) in [1, 2, 3, 4, 5, 8].into_iter().flat_map(|ranks| [2, 3, 6, 7].map(|own| (ranks, own))) {
            let order = ZigZag::of(own * ranks, 0, ranks).unwrap();
            let mut seen = vec![0; order.tokens()];
            for rank in 0..ranks {
                let part = order.part_of(rank);
                assert_eq!(part.len(), own);
                part.ranges().iter().cloned().flatten().for_each(|token| seen[token] += 1);
                let keys: usize = part.ranges().iter().cloned().flatten().map(|token| token + 1).sum();
                // With chunks of two lengths, a rank has `own` more pairs than the rank before.
                let (keys, all) = (keys * ranks, (1..=own * ranks).sum::<usize>());
                assert!(keys.abs_diff(all) <= own % 2 * own * ranks * (ranks - 1) / 2, "{ranks} {own}: {keys} {all}");
            }
            assert_eq!(seen, vec![1; own * ranks]);
        }
        for (tokens, padded) in [(11, "12"), (2, "4"), (1, "4")] {
            let error = ZigZag::of(tokens, 0, 2).unwrap_err().to_string();
            let due = [format!("{tokens} tokens"), "2 ranks".into(), format!("pad them to {padded}")];
            assert!(due.iter().all(|due| error.contains(due)), "{error}");
        }
    }

    #[test]
    fn shapes_of_what_is_joined_and_dealt() {
        for own in [4, 5] {
            let order = ZigZag::of(3 * own, 1, 3).unwrap();
            let zeros = |dims: &[usize]| Tensor::zeros(&NullRuntime::new(), dims, DType::F32).unwrap();
            let all = order.joined(&[(); 3].map(|()| zeros(&[2, 5, own, 7])), 2).unwrap();
            assert_eq!(all.shape()[..], [2, 5, 3 * own, 7]);
            assert_eq!(order.dealt(&all, 2).unwrap().shape()[..], [3, 2, 5, own, 7]);
        }
    }
}
