//! Which rank reads which examples.

use numcore::{Error, Result, rng::Philox};

/// The examples of rank `rank` of `n`, of `len` in all: every `n`-th.
///
/// ```
/// assert_eq!(distributed::sampler::shard_batches(7, 0, 3), [0, 3, 6]);
/// ```
pub fn shard_batches(len: usize, rank: usize, n: usize) -> Vec<usize> {
    (rank..len).step_by(n.max(1)).collect()
}

/// What becomes of the examples that do not make a whole round of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Uneven {
    /// Some ranks have one example more: nothing is read twice, nothing left out.
    #[default]
    Keep,
    /// They are left out.
    Drop,
    /// All ranks have as many, by reading some of the first ones again.
    Repeat,
}

/// Every epoch's examples in a random order, shared out among ranks: together the ranks read each example once. The order depends on
/// seed and epoch alone, so the examples of an epoch are the same at every world size.
///
/// ```
/// use distributed::sampler::DistributedSampler;
/// # fn main() -> numcore::Result<()> {
/// let mut sampler = DistributedSampler::new(10, 1, 4)?.seed(7);
/// let first: Vec<usize> = sampler.next_batch(2).collect();
/// let note = sampler.progress(); // for the checkpoint
/// let mut resumed = DistributedSampler::new(10, 1, 4)?.seed(7);
/// resumed.resume(&note)?;
/// assert_eq!(sampler.next_batch(2).collect::<Vec<_>>(), resumed.next_batch(2).collect::<Vec<_>>());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedSampler {
    len: usize,
    rank: usize,
    ranks: usize,
    seed: u64,
    shuffle: bool,
    uneven: Uneven,
    epoch: u64,
    /// Examples of the epoch that were read before the others were shared out.
    start: usize,
    at: usize,
    own: Vec<usize>,
}

impl DistributedSampler {
    /// Of `len` examples, those of rank `rank` of `ranks`.
    pub fn new(len: usize, rank: usize, ranks: usize) -> Result<Self> {
        if rank >= ranks {
            return Err(Error::argument("DistributedSampler", format!("there is no rank {rank} among {ranks}")));
        }
        let sampler = DistributedSampler {
            len,
            rank,
            ranks,
            seed: 0,
            shuffle: true,
            uneven: Uneven::Keep,
            epoch: 0,
            start: 0,
            at: 0,
            own: Vec::new(),
        };
        Ok(sampler.drawn())
    }

    /// Another random order.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self.drawn()
    }

    /// In the examples' own order.
    pub fn in_order(mut self) -> Self {
        self.shuffle = false;
        self.drawn()
    }

    /// What becomes of the examples that do not make a whole round.
    pub fn uneven(mut self, uneven: Uneven) -> Self {
        self.uneven = uneven;
        self.drawn()
    }

    /// This rank's examples of this epoch, in order; after [`resume`](DistributedSampler::resume) those that were left.
    pub fn indices(&self) -> &[usize] {
        &self.own
    }

    /// The next examples of this epoch, at most `size`; none when the epoch is over.
    pub fn next_batch(&mut self, size: usize) -> impl Iterator<Item = usize> + '_ {
        let from = self.at;
        self.at = from.saturating_add(size).min(self.own.len());
        self.own[from..self.at].iter().copied()
    }

    /// The epoch, and how many of its examples all ranks together have read if every rank has read as many as this one.
    /// [`seek`](DistributedSampler::seek) takes it back.
    pub fn position(&self) -> (u64, usize) {
        (self.epoch, (self.start + self.at * self.ranks).min(self.len))
    }

    /// The [position](DistributedSampler::position) and what it is of, for the notes of a checkpoint: how many examples, in which order, and
    /// what becomes of those that do not make a whole round.
    pub fn progress(&self) -> String {
        let (epoch, read) = self.position();
        format!("epoch {epoch} read {read} {}", self.described())
    }

    /// Goes on from [`progress`](DistributedSampler::progress), on any number of ranks: what was not read of the epoch is shared out
    /// among these. Later epochs are whole again.
    ///
    /// # Errors
    /// When it is no progress, or of another number of examples, another order, or another [`Uneven`].
    pub fn resume(&mut self, progress: &str) -> Result<()> {
        let wrong = |why: &str| Error::argument("DistributedSampler::resume", format!("`{progress}` {why}"));
        let parsed = || {
            let rest = progress.strip_prefix("epoch ")?;
            let (epoch, rest) = rest.split_once(" read ")?;
            let (read, of) = rest.split_once(' ')?;
            Some((epoch.parse().ok()?, read.parse().ok()?, of))
        };
        let (epoch, read, of) = parsed().ok_or_else(|| wrong("is no progress of a sampler"))?;
        if of != self.described() {
            return Err(wrong(&format!("is not of this sampler, which is `{}`", self.described())));
        }
        self.seek(epoch, read).map_err(|_| wrong("is no progress of a sampler: more was read than there is"))
    }

    /// Goes to a [position](DistributedSampler::position), which may be of another number of ranks: all ranks have read `read` examples of
    /// the epoch, and the others are shared out among the ranks there are now.
    ///
    /// # Errors
    /// When the epoch has fewer examples.
    pub fn seek(&mut self, epoch: u64, read: usize) -> Result<()> {
        if read > self.len {
            let why = format!("epoch {epoch} has {} examples, not {read}", self.len);
            return Err(Error::argument("DistributedSampler::seek", why));
        }
        *self = Self { epoch, start: read, at: 0, ..self.clone() }.drawn();
        Ok(())
    }

    /// Begins an epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        *self = Self { epoch, start: 0, at: 0, ..self.clone() }.drawn();
    }

    /// What every rank of every world must have alike to go on from a position.
    fn described(&self) -> String {
        let order = if self.shuffle { "shuffled" } else { "in order" };
        let uneven = match self.uneven {
            Uneven::Keep => "keep",
            Uneven::Drop => "drop",
            Uneven::Repeat => "repeat",
        };
        format!("of {} seed {} {order} {uneven}", self.len, self.seed)
    }

    fn drawn(mut self) -> Self {
        let order: Vec<usize> = match self.shuffle {
            // The epoch's number is the stream, so no epoch repeats another's order.
            true => Philox::new(self.seed, self.epoch as u32).permutation(self.len),
            false => (0..self.len).collect(),
        };
        let left = self.len - self.start;
        let shared = match self.uneven {
            Uneven::Keep => left,
            Uneven::Drop => left / self.ranks * self.ranks,
            Uneven::Repeat => left.next_multiple_of(self.ranks),
        };
        // What is repeated is the epoch's first examples, wherever it is gone on from.
        let places = (self.start..self.start + shared).skip(self.rank).step_by(self.ranks);
        self.own = places.map(|place| order[place % self.len]).collect();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_read_everything_once() {
        for ranks in [1, 2, 3, 4, 5, 8] {
            for len in [0, 1, 7, 40] {
                let sampler = |r| DistributedSampler::new(len, r, ranks).unwrap().seed(3);
                let mut all: Vec<usize> = (0..ranks).flat_map(|r| sampler(r).indices().to_vec()).collect();
                all.sort_unstable();
                assert_eq!(all, (0..len).collect::<Vec<_>>());
                let equal = |uneven| (0..ranks).map(|r| sampler(r).uneven(uneven).indices().len()).collect::<Vec<_>>();
                assert_eq!(equal(Uneven::Drop), vec![len / ranks; ranks]);
                assert_eq!(equal(Uneven::Repeat), vec![len.div_ceil(ranks); ranks]);
            }
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat() {
        let draw = |seed, epoch| {
            let mut sampler = DistributedSampler::new(50, 1, 2).unwrap().seed(seed);
            sampler.set_epoch(epoch);
            sampler.indices().to_vec()
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert!(draw(1, 2) != draw(1, 3) && draw(1, 2) != draw(2, 2));
        assert_eq!(DistributedSampler::new(7, 0, 3).unwrap().in_order().indices(), shard_batches(7, 0, 3));
        assert!(DistributedSampler::new(7, 3, 3).is_err());
        assert!(DistributedSampler::new(7, 0, 3).unwrap().seek(0, 8).is_err());
    }

    #[test]
    fn other_ranks_go_on_where_the_first_stopped() {
        for (before, after) in [(4, 4), (4, 2), (2, 8), (1, 3), (5, 1)] {
            let sampler = |r, n| DistributedSampler::new(43, r, n).unwrap().seed(3);
            let mut seen = Vec::new();
            let mut notes = Vec::new();
            for rank in 0..before {
                let mut sampler = sampler(rank, before);
                sampler.set_epoch(2);
                seen.extend(sampler.next_batch(3));
                notes.push(sampler.progress());
            }
            assert!(
                notes.iter().all(|note| *note == format!("epoch 2 read {} of 43 seed 3 shuffled keep", 3 * before))
            );
            let mut again = Vec::new();
            for rank in 0..after {
                let mut sampler = sampler(rank, after);
                sampler.resume(&notes[0]).unwrap();
                seen.extend(sampler.next_batch(2));
                again.push(sampler.progress());
                seen.extend(sampler.next_batch(43));
                assert!(sampler.next_batch(1).next().is_none());
                sampler.set_epoch(3);
                assert_eq!(sampler.indices().len(), shard_batches(43, rank, after).len(), "the next epoch is whole");
            }
            assert!(again.iter().all(|note| note.contains(&format!("read {} of", 3 * before + 2 * after))));
            seen.sort_unstable();
            assert_eq!(seen, (0..43).collect::<Vec<_>>(), "{before} then {after}: each example once");
        }
    }

    #[test]
    fn progress_of_something_else_is_refused() {
        let mut sampler = DistributedSampler::new(10, 0, 2).unwrap().seed(3);
        for wrong in [
            "",
            "epoch 1",
            "epoch 1 read 4 of 10 seed 3",
            "epoch 1 read 11 of 10 seed 3 shuffled keep",
            "epoch 1 read 4 of 12 seed 3 shuffled keep",
            "epoch 1 read 4 of 10 seed 4 shuffled keep",
            "epoch 1 read 4 of 10 seed 3 in order keep",
            "epoch 1 read 4 of 10 seed 3 shuffled drop",
        ] {
            assert!(sampler.resume(wrong).unwrap_err().to_string().contains(wrong));
        }
        sampler.resume("epoch 1 read 4 of 10 seed 3 shuffled keep").unwrap();
        assert_eq!(sampler.position(), (1, 4));
        assert_eq!(sampler.indices().len(), 3);
        // What differs is said.
        let ordered = DistributedSampler::new(10, 0, 1).unwrap().in_order();
        let error = DistributedSampler::new(10, 0, 1).unwrap().resume(&ordered.progress()).unwrap_err().to_string();
        assert!(error.contains("in order keep") && error.contains("`of 10 seed 0 shuffled keep`"), "{error}");
    }

    #[test]
    fn positions_are_where_a_sampler_goes_on_from() {
        for uneven in [Uneven::Keep, Uneven::Drop, Uneven::Repeat] {
            for (ranks, len, shuffle) in [(1, 7, true), (3, 11, true), (4, 2, true), (3, 10, false), (5, 0, true)] {
                for rank in 0..ranks {
                    let fresh = || {
                        let sampler = DistributedSampler::new(len, rank, ranks).unwrap().seed(5).uneven(uneven);
                        if shuffle { sampler } else { sampler.in_order() }
                    };
                    let mut sampler = fresh();
                    sampler.set_epoch(4);
                    loop {
                        // A sampler that seeks or resumes, once or twice, reads what this one reads.
                        let (epoch, read) = sampler.position();
                        let (mut sought, mut resumed) = (fresh(), fresh());
                        sought.seek(epoch, read).unwrap();
                        assert_eq!(sought.position(), (epoch, read));
                        resumed.resume(&sought.progress()).unwrap();
                        assert_eq!(resumed.progress(), sampler.progress());
                        let rest: Vec<usize> = sampler.clone().next_batch(usize::MAX).collect();
                        // At the end ranks may have read one example more than others.
                        if !rest.is_empty() {
                            assert_eq!(sought.indices(), rest, "{uneven:?} {rank} of {ranks}, {read} of {len}");
                            assert_eq!(resumed.next_batch(usize::MAX).collect::<Vec<_>>(), rest);
                        }
                        if sampler.next_batch(1).next().is_none() {
                            break;
                        }
                    }
                }
            }
        }
    }
}
