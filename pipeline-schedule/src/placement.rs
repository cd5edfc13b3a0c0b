//! The placement of stages on ranks.

use numcore::{Error, Result};

/// The rank of every stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagePlacement {
    ranks: usize,
    rank_of: Vec<usize>,
}

impl StagePlacement {
    /// Places stage `s` on rank `rank_of[s]`.
    ///
    /// # Errors
    /// Fails if a rank in `0..=max` has no stage, or there is no stage.
    pub fn new(rank_of: Vec<usize>) -> Result<Self> {
        let ranks = rank_of.iter().max().map_or(0, |&last| last.saturating_add(1));
        let idle = (0..ranks).find(|rank| !rank_of.contains(rank));
        match (ranks, idle) {
            (0, _) => Err(Error::schedule("pipeline placement", "no stage at all")),
            (_, Some(rank)) => {
                Err(Error::schedule("pipeline placement", format!("rank {rank} of {ranks} has no stage")))
            }
            _ => Ok(StagePlacement { ranks, rank_of }),
        }
    }

    /// Places stage `s` on rank `s % ranks`: a loop round the ranks, `stages_per_rank` times.
    pub(super) fn looped(ranks: usize, stages_per_rank: usize) -> Self {
        StagePlacement { ranks, rank_of: (0..ranks * stages_per_rank).map(|stage| stage % ranks).collect() }
    }

    /// Places two stages on each rank, down and up again: rank `r` has stages `r` and `2·ranks − 1 − r`. First and last
    /// stage share rank 0.
    pub(super) fn folded(ranks: usize) -> Self {
        StagePlacement { ranks, rank_of: (0..ranks).chain((0..ranks).rev()).collect() }
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.rank_of.len()
    }

    /// The rank of a stage; `None` if `stage` is out of range.
    pub fn rank_of(&self, stage: usize) -> Option<usize> {
        self.rank_of.get(stage).copied()
    }

    /// The stages of a rank, in order.
    pub fn stages_on(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        self.rank_of.iter().enumerate().filter(move |&(_, &owner)| owner == rank).map(|(stage, _)| stage)
    }

    /// Tells whether both stages are on one rank, so that they need no messages. Stages out of range count as together.
    pub fn together(&self, a: usize, b: usize) -> bool {
        self.rank_of(a) == self.rank_of(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_and_fold() {
        assert_eq!(StagePlacement::looped(2, 2), StagePlacement::new(vec![0, 1, 0, 1]).unwrap());
        assert_eq!(StagePlacement::folded(3), StagePlacement::new(vec![0, 1, 2, 2, 1, 0]).unwrap());
        assert_eq!(StagePlacement::folded(3).stages_on(1).collect::<Vec<_>>(), [1, 4]);
        assert!(StagePlacement::folded(3).together(2, 3));
    }

    #[test]
    fn every_rank_has_a_stage() {
        assert!(StagePlacement::new(vec![0, 2]).unwrap_err().to_string().contains("rank 1 of 3 has no stage"));
        assert!(StagePlacement::new(vec![]).is_err());
    }
}
