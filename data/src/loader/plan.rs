//! The rows that a rank reads at each step: arithmetic alone.

use std::sync::Arc;

use numcore::{Error, Result};

use super::{Sizes, State};
use crate::order::Order;

/// The treatment of an epoch's last batch if it is incomplete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Last {
    /// Makes it smaller; the ranks' shares of it may differ by one example. A rank whose share is empty gets one row
    /// that does not count.
    #[default]
    Keep,
    /// Leaves it out: PyTorch's `drop_last`.
    Drop,
    /// Pads it to the size of the others with rows that do not count: for shapes that must not change.
    Pad,
}

/// The rows of a step's batch that a rank reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Share {
    /// A contiguous range: rank after rank.
    #[default]
    Contiguous,
    /// Every `n`-th row of `n` ranks, starting at the rank's own number.
    Interleaved,
}

/// A rank's rows of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// The indices of the examples; rows that do not count come last.
    pub indices: Vec<u64>,
    /// The [reading](Order::readings) of each example, if it is not the epoch.
    pub readings: Option<Vec<u64>>,
    /// The number of rows that count.
    pub count: usize,
    /// The number of rows that count on all ranks together.
    pub total: usize,
}

/// The steps of a rank from a state on.
#[derive(Clone)]
pub(crate) struct Plan {
    order: Arc<dyn Order>,
    batch: u64,
    last: Last,
    share: Share,
    rank: u64,
    ranks: u64,
    /// The sizes of uneven shares.
    sizes: Option<Sizes>,
    start: State,
    one_epoch: bool,
}

impl Plan {
    /// Makes an endless plan from the start of epoch 0.
    pub(super) fn new(
        order: Arc<dyn Order>,
        batch: u64,
        last: Last,
        share: Share,
        (rank, ranks): (usize, usize),
    ) -> Plan {
        let (rank, ranks, start) = (rank as u64, ranks as u64, State::default());
        Plan { order, batch, last, share, rank, ranks, sizes: None, start, one_epoch: false }
    }

    /// Replaces even shares by shares of these sizes.
    pub(super) fn uneven(self, sizes: Option<Sizes>) -> Plan {
        Plan { sizes, ..self }
    }

    /// Starts at another state.
    pub(super) fn from(self, start: State) -> Result<Plan> {
        if start.position > self.order.len() {
            let allowed = format!("at most {}, the positions of an epoch", self.order.len());
            return Err(Error::range("Loader", "position", start.position, allowed));
        }
        Ok(Plan { start, ..self })
    }

    /// Ends the plan at the end of its first epoch.
    pub(super) fn one_epoch(self) -> Plan {
        Plan { one_epoch: true, ..self }
    }

    /// The number of steps from a position to the end of its epoch.
    pub(super) fn steps_from(&self, position: u64) -> u64 {
        let left = self.order.len() - position;
        if self.last == Last::Drop { left / self.batch } else { left.div_ceil(self.batch) }
    }

    /// The state at which the plan starts.
    pub(super) fn start(&self) -> State {
        self.start
    }

    /// The state at which the `k`-th step begins; `None` past the end.
    pub(super) fn at(&self, k: u64) -> Option<State> {
        let State { epoch, position } = self.start;
        let first = self.steps_from(position);
        if k < first {
            return Some(State { epoch, position: position + k * self.batch });
        }
        let steps = self.steps_from(0);
        if self.one_epoch || steps == 0 {
            return None;
        }
        let past = k - first;
        Some(State { epoch: epoch + 1 + past / steps, position: past % steps * self.batch })
    }

    /// The state after a step that begins at `at`: in the same epoch, at its end, or at the start of the next one.
    pub(super) fn after(&self, at: State) -> State {
        let position = (at.position.saturating_add(self.batch)).min(self.order.len());
        if self.one_epoch || self.steps_from(position) > 0 {
            return State { position, ..at };
        }
        State { epoch: at.epoch + 1, position: 0 }
    }

    /// The number of a step that begins at `at`, if its epoch was read in batches of this size.
    pub(super) fn step(&self, at: State) -> u64 {
        at.position / self.batch
    }

    /// This rank's rows of the step that begins at `at`.
    ///
    /// # Errors
    /// Fails if the order gives another number of examples than there are positions, or uneven shares do not make up
    /// the batch.
    pub(super) fn rows(&self, at: State) -> Result<Rows> {
        let end = at.position.saturating_add(self.batch).min(self.order.len());
        let total = end - at.position;
        let rows = if self.last == Last::Pad { self.batch } else { total };
        let (first, stride, len) = self.own(rows)?;
        // Positions past the step's examples do not count.
        let count = (0..len).take_while(|i| first + i * stride < total).count();
        let own = |all: Vec<u64>| {
            if all.len() as u64 != total {
                let order = self.order.describe();
                let why = format!("`{order}` gave {} examples for {total} positions from {at} on", all.len());
                return Err(Error::lengths("Order::indices", &[all.len(), total as usize], why));
            }
            let mut own: Vec<u64> = (0..count as u64).map(|i| all[(first + i * stride) as usize]).collect();
            own.resize(len.max(1) as usize, all[0]);
            Ok(own)
        };
        let indices = own(self.order.indices(at.epoch, at.position..end))?;
        let readings = self.order.readings(at.epoch, at.position..end).map(own).transpose()?;
        Ok(Rows { indices, readings, count, total: total as usize })
    }

    /// This rank's share of `rows` rows: the first row, the distance to the next, and the number of rows.
    fn own(&self, rows: u64) -> Result<(u64, u64, u64)> {
        if let Some(sizes) = &self.sizes {
            let (sizes, rank) = (sizes(rows as usize), self.rank as usize);
            let Some(&own) = sizes.get(rank).filter(|_| sizes.iter().sum::<usize>() as u64 == rows) else {
                let why = format!("the shares of a batch of {rows} rows add up to it, and share {rank} is among them");
                return Err(Error::lengths("Loader::uneven", &sizes, why));
            };
            return Ok((sizes[..rank].iter().sum::<usize>() as u64, 1, own as u64));
        }
        let (each, more) = (rows / self.ranks, rows % self.ranks);
        let len = each + u64::from(self.rank < more);
        Ok(match self.share {
            Share::Contiguous => (self.rank * each + self.rank.min(more), 1, len),
            Share::Interleaved => (self.rank, self.ranks, len),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{SequentialOrder, Shuffled};

    fn plan(len: u64, batch: u64, last: Last, share: Share, rank: usize, ranks: usize) -> Plan {
        Plan::new(Arc::new(Shuffled::new(len, 5)), batch, last, share, (rank, ranks))
    }

    fn steps(plan: &Plan) -> Vec<State> {
        (0..).map_while(|k| plan.at(k)).take(1000).collect()
    }

    #[test]
    fn shares_of_ranks_make_the_step() {
        for share in [Share::Contiguous, Share::Interleaved] {
            for (ranks, len, batch) in [(1, 10, 4), (3, 17, 5), (5, 20, 8), (8, 13, 6), (4, 3, 9)] {
                let one = plan(len, batch, Last::Keep, share, 0, 1).one_epoch();
                for at in steps(&one) {
                    let whole = one.rows(at).unwrap().indices;
                    let own: Vec<Rows> =
                        (0..ranks).map(|r| plan(len, batch, Last::Keep, share, r, ranks).rows(at).unwrap()).collect();
                    let mut shared: Vec<u64> =
                        own.iter().flat_map(|rows| rows.indices[..rows.count].to_vec()).collect();
                    if share == Share::Interleaved {
                        let place = |i: &u64| whole.iter().position(|j| i == j);
                        shared.sort_by_key(place);
                    }
                    assert_eq!(shared, whole, "{share:?} {ranks} ranks, {len} in batches of {batch}");
                    assert!(own.iter().all(|rows| !rows.indices.is_empty() && rows.total == whole.len()));
                    let counts = || own.iter().map(|rows| rows.count);
                    assert!(counts().max() <= counts().min().map(|least| least + 1), "as even as can be");
                }
            }
        }
    }

    #[test]
    fn uneven_shares_make_the_step() {
        let with = |rank, sizes: fn(usize) -> Vec<usize>| Plan {
            sizes: Some(Arc::new(sizes)),
            ..plan(17, 7, Last::Keep, Share::Contiguous, rank, rank + 1)
        };
        let one = plan(17, 7, Last::Keep, Share::Contiguous, 0, 1).one_epoch();
        for at in steps(&one) {
            let shares = (0..3).map(|rank| with(rank, |rows| vec![rows - 2, 0, 2]).rows(at).unwrap());
            let shared: Vec<u64> = shares.flat_map(|rows| rows.indices[..rows.count].to_vec()).collect();
            assert_eq!(shared, one.rows(at).unwrap().indices);
        }
        let refused: [fn(usize) -> Vec<usize>; 2] = [|rows| vec![rows, 1], |rows| vec![rows]];
        assert!(refused.into_iter().all(|sizes| with(1, sizes).rows(State::default()).is_err()));
    }

    #[test]
    fn last_batches_are_kept_dropped_or_padded() {
        let rows = |last, rank| {
            let plan = plan(10, 4, last, Share::Contiguous, rank, 2).one_epoch();
            let rows: Vec<(usize, usize)> =
                steps(&plan).into_iter().map(|at| plan.rows(at).unwrap()).map(|r| (r.indices.len(), r.count)).collect();
            rows
        };
        assert_eq!(rows(Last::Keep, 1), [(2, 2), (2, 2), (1, 1)]);
        assert_eq!(rows(Last::Drop, 1), [(2, 2), (2, 2)]);
        assert_eq!(rows(Last::Pad, 0), [(2, 2), (2, 2), (2, 2)]);
        assert_eq!(rows(Last::Pad, 1), [(2, 2), (2, 2), (2, 0)]);
        // Rank 1 of 2 has no row of a step of one example.
        let plan = plan(1, 4, Last::Keep, Share::Contiguous, 1, 2);
        assert_eq!(plan.rows(State::default()).unwrap(), Rows { indices: vec![0], readings: None, count: 0, total: 1 });
    }

    #[test]
    fn steps_go_on_from_any_position_over_epochs() {
        for last in [Last::Keep, Last::Drop, Last::Pad] {
            let all: Vec<State> = steps(&plan(10, 3, last, Share::Contiguous, 0, 1))[..20].to_vec();
            for (k, &at) in all.iter().enumerate() {
                let again = plan(10, 3, last, Share::Contiguous, 0, 1).from(at).unwrap();
                assert_eq!(again.at(0), Some(at));
                assert_eq!(steps(&again)[..20 - k], all[k..], "{last:?} from {at}");
                assert!(k + 1 == all.len() || again.after(at) == all[k + 1], "{last:?} after {at}");
            }
        }
    }

    #[test]
    fn ends_are_ends() {
        let order = Arc::new(SequentialOrder::new(6));
        let plan = Plan::new(order, 3, Last::Keep, Share::Contiguous, (0, 1));
        let end = State { epoch: 2, position: 6 };
        assert_eq!(plan.clone().from(end).unwrap().one_epoch().at(0), None);
        assert_eq!(plan.clone().from(end).unwrap().at(0), Some(State { epoch: 3, position: 0 }));
        let error = plan.clone().from(State { epoch: 2, position: 7 }).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("position is 7, and must be at most 6, the positions of an epoch")));
        let empty = Plan::new(Arc::new(SequentialOrder::new(0)), 3, Last::Keep, Share::Contiguous, (0, 1));
        assert!(empty.at(0).is_none() && empty.one_epoch().at(0).is_none());
    }
}
