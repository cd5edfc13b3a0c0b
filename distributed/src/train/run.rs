//! Steps through the batches of a rank.

use std::panic::Location;

use nn::{CountedRows, set_counted_rows};
use numcore::{Error, Result, Runtime, Within};

use super::{StepInput, StepWork, TrainStep, TrainingMetrics, at_call, step::nothing};
use crate::{
    combinations::Feature,
    comm::{Communicator, all_gather_bool},
    strategy::ActiveRanks,
};

impl<R: Runtime> TrainStep<R> {
    /// Tells whether any rank has examples left; `own` is true if this rank has. Blocks.
    pub fn any_left(&self, own: bool) -> Result<bool> {
        Ok(all_gather_bool(&self.strategy.ranks().losses, own)?.contains(&true))
    }

    /// Steps through this rank's batches until every rank has run out of batches. `see` gets the metrics of every step.
    ///
    /// A step takes [`accumulation`](super::TrainingConfig::accumulation) batches, one for each micro-batch; the last
    /// step of a rank takes those that are left. The mean of a step is over the batches that all ranks took. For each
    /// missing micro-batch a rank computes its last batch again, with weight 0. A rank that never had a batch takes
    /// part as in [`idle`](TrainStep::idle).
    ///
    /// # Errors
    /// On every rank, before the first step, if a rank has no batch at all while others have some, and must compute for
    /// them. Experts compute tokens of other ranks, and stages their micro-batches. An error of `loss` or `see` on one
    /// rank is an error on all.
    #[track_caller]
    pub fn run<B, I: Into<StepInput<R>>>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        loss: impl FnMut(&B) -> Result<I>,
        see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let line = Location::caller();
        self.run_all(batches, loss, see).map_err(|error| at_call(error, line))
    }

    fn run_all<B, I: Into<StepInput<R>>>(
        &mut self,
        batches: impl IntoIterator<Item = B>,
        mut loss: impl FnMut(&B) -> Result<I>,
        mut see: impl FnMut(TrainingMetrics<R>) -> Result<()>,
    ) -> Result<()> {
        let (mut batches, mut last) = (batches.into_iter().peekable(), None);
        let active = self.active_ranks(batches.peek().is_some())?;
        let most = self.updates.config.accumulation;
        loop {
            let mut taken: Vec<B> = batches.by_ref().take(most).collect();
            if !self.any_left(!taken.is_empty())? {
                return Ok(());
            }
            let has_any = !taken.is_empty() || last.is_some();
            let mut input = |k: usize| match (taken.get(k), taken.last().or(last.as_ref())) {
                (Some(batch), _) => Ok(loss(batch)?.into()),
                (None, Some(batch)) => {
                    set_counted_rows(Some(CountedRows::NONE));
                    loss(batch)?.into().weightless()
                }
                (None, None) => nothing(k),
            };
            let own = if has_any { most } else { 0 };
            let done = self.pass_all(StepWork { own, ..StepWork::new(most, &mut input) }, active);
            set_counted_rows(None);
            let metrics = self.all(done)?;
            last = taken.pop().or(last);
            let seen = see(metrics);
            self.all(seen)?;
        }
    }

    /// Tells whether all ranks have batches, or some of them. An error on every rank if a rank without a batch cannot
    /// idle.
    fn active_ranks(&self, own: bool) -> Result<ActiveRanks> {
        let ranks = self.strategy.ranks();
        let have = all_gather_bool(&ranks.losses, own)?;
        let without: Vec<usize> = (0..have.len()).filter(|&rank| !have[rank]).collect();
        if without.is_empty() || without.len() == have.len() {
            return Ok(ActiveRanks::All);
        }
        let without: Vec<String> = without.iter().map(usize::to_string).collect();
        let fits = self.strategy.features().and(Feature::NoBatches).check("TrainStep::run");
        let named = |error: Error| error.on_rank(ranks.losses.world_rank());
        fits.within(format_args!("no batch at all on rank {}", without.join(", "))).map_err(named)?;
        Ok(ActiveRanks::Some)
    }
}
