//! The phases of an update over all parts of an optimizer.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Flat, Result, Runtime, Tensor};

use crate::{
    FlatOptimizer, Optimizer, OptimizerCore, UpdatePhase, UpdateRule, captured::require_replayable, norms,
    phase::adapted, schedule::require_rates,
};

impl<R: Runtime, C: UpdateRule> FlatOptimizer<R, C> {
    /// The rules of all groups, of those without parameters too if they are known.
    pub(crate) fn rules(&self) -> &[C] {
        self.by_name.as_ref().map_or(&self.groups, |by_name| &by_name.configs)
    }

    /// The totals of the rules' sums over the parameters for which `counts` is true: the first phase of an update.
    pub(crate) fn sums_of_rules(
        &mut self,
        rt: &R,
        grads: &[Flat<R>],
        scale: Option<&Tensor<R>>,
        counts: &dyn Fn(&Arc<Leaf<R>>) -> bool,
    ) -> Result<Option<Tensor<R>>> {
        let (count, mut rows) = (self.sum_count(), Vec::new());
        if count == 0 {
            return Ok(None);
        }
        self.run(grads, scale, &mut UpdatePhase::Sums(&mut rows))?;
        let leaves: Vec<_> = self.parts.iter().flat_map(|part| part.params.leaves()).collect();
        rows.retain(|(i, _)| counts(leaves[*i]));
        // Buckets change the order of parameters in memory, and no bit of the sums.
        rows.sort_by_key(|(i, _)| leaves[*i].name());
        let rows: Vec<_> = rows.into_iter().map(|(_, row)| row).collect();
        norms::total(rt, &rows, count).map(Some)
    }

    /// Adapts the rules of all groups to the totals of their sums.
    pub(crate) fn adapt_rules(&mut self, sums: &[f64], loss: Option<f64>) -> Result<()> {
        let groups = adapted(&self.groups, &self.lrs(), sums, loss)?;
        if let Some(by_name) = &self.by_name {
            // Groups that have no parameters yet.
            let lrs: Vec<f64> = by_name.configs.iter().map(|config| self.lr(config)).collect();
            let configs = adapted(&by_name.configs, &lrs, sums, loss)?;
            self.by_name.iter_mut().for_each(|by_name| by_name.configs.clone_from(&configs));
        }
        self.groups = groups;
        Ok(())
    }

    /// Runs a phase of an update. Sums have the numbers of parameters through all parts.
    pub(crate) fn run(
        &mut self,
        grads: &[Flat<R>],
        scale: Option<&Tensor<R>>,
        phase: &mut UpdatePhase<'_, R>,
    ) -> Result<()> {
        self.require_layouts(grads)?;
        let lrs = self.lrs();
        require_rates(C::NAME, &lrs)?;
        let rt = self.parts.first().map(|part| part.params.runtime().clone());
        let capturing = rt.as_ref().is_some_and(Runtime::is_capturing);
        if !self.capturable {
            require_replayable(rt.as_ref(), self.schedule.is_some(), &self.groups)?;
        }
        self.claim()?;
        let (mut done, mut before) = (Ok(()), 0);
        for (part, grads) in self.parts.iter_mut().zip(grads) {
            part.numbers.begin(capturing);
            let (config, lr) = (&self.groups[part.group], lrs[part.group]);
            let known = phase.rows().len();
            done = done.and_then(|()| part.update(config, lr, grads, scale, self.capturable, phase));
            phase.rows()[known..].iter_mut().for_each(|(i, _)| *i += before);
            before += part.params.len();
        }
        for (part, grads) in self.parts.iter().zip(grads) {
            part.params.release(|i| phase.changes() && grads.is_written(i))?;
        }
        done?;
        self.steps += u64::from(phase.changes() && !capturing);
        Ok(())
    }
}
