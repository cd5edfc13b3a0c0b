//! Several optimizers as one, for example Muon for the matrices of a model and AdamW for the rest.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Flat, Result, Runtime, Tensor, Within, ops::cat};

use crate::{
    FlatParams, HyperParams, LrSchedule, Optimizer, OptimizerCore, OwnGradients, hyper::require_groups,
    optimizer::PiecesOf,
};

/// Optimizers of disjoint parameters that step together, with one set of gradients.
pub struct Combined<R: Runtime> {
    all: Vec<Box<dyn Optimizer<R>>>,
    own: OwnGradients<R>,
}

impl<R: Runtime> Combined<R> {
    /// Combines these optimizers, in this order.
    ///
    /// # Errors
    /// An error if a parameter belongs to two of them.
    #[track_caller]
    pub fn new(all: Vec<Box<dyn Optimizer<R>>>) -> Result<Self> {
        let mut seen = std::collections::HashSet::new();
        for leaf in all.iter().flat_map(|o| o.params()).flat_map(|p| p.leaves()) {
            if !seen.insert(leaf.id()) {
                return Err(Error::state(&*leaf.name(), "two of the combined optimizers have this parameter"))
                    .at_caller();
            }
        }
        Ok(Combined { all, own: OwnGradients::default() })
    }

    /// The combined optimizers, in order.
    pub fn optimizers(&self) -> &[Box<dyn Optimizer<R>>] {
        &self.all
    }

    /// Calls `run` with each optimizer and its gradients, once all of them can begin an update.
    fn each(
        &mut self,
        grads: &[Flat<R>],
        mut run: impl FnMut(&mut dyn Optimizer<R>, &[Flat<R>]) -> Result<()>,
    ) -> Result<()> {
        let counts: Vec<usize> = self.all.iter().map(|o| o.params().len()).collect();
        if counts.iter().sum::<usize>() != grads.len() {
            return Err(Error::usage(
                "Combined",
                "the gradients are not those of its optimizers; make them with `alloc_gradients()`",
            ));
        }
        crate::schedule::require_rates("Combined", &self.lrs())?;
        self.check_sole()?;
        let mut rest = grads;
        for (optimizer, n) in self.all.iter_mut().zip(counts) {
            let (own, others) = rest.split_at(n);
            run(&mut **optimizer, own)?;
            rest = others;
        }
        Ok(())
    }

    /// The entries of optimizer `k` in a state dict whose names begin with the optimizer's index.
    fn own(state: &[(String, Tensor<R>)], k: usize) -> Vec<(String, Tensor<R>)> {
        let prefix = format!("{k}.");
        let entries = state.iter().filter_map(|(name, t)| Some((name.strip_prefix(&prefix)?.to_string(), t.clone())));
        entries.collect()
    }
}

impl<R: Runtime> Optimizer<R> for Combined<R> {
    fn steps(&self) -> u64 {
        self.all.first().map_or(0, |o| o.steps())
    }

    fn lrs(&self) -> Vec<f64> {
        self.all.iter().flat_map(|o| o.lrs()).collect()
    }

    fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.all.iter_mut().try_for_each(|o| o.set_lr(lr))
    }

    fn set_schedule(&mut self, schedule: Arc<dyn LrSchedule>) {
        self.all.iter_mut().for_each(|o| o.set_schedule(schedule.clone()));
    }

    /// The entries of all optimizers, each name prefixed with the optimizer's index: `0.momentum_buffer.weight`.
    fn state_dict(&self) -> Result<Vec<(String, Tensor<R>)>> {
        let mut state = Vec::new();
        for (k, optimizer) in self.all.iter().enumerate() {
            state.extend(optimizer.state_dict()?.into_iter().map(|(name, t)| (format!("{k}.{name}"), t)));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &[(String, Tensor<R>)]) -> Result<()> {
        self.check_state_dict(state)?;
        self.check_sole()?;
        let load = |(k, o): (usize, &mut Box<dyn Optimizer<R>>)| o.load_state_dict(&Self::own(state, k));
        self.all.iter_mut().enumerate().try_for_each(load)
    }

    fn advance(&mut self) -> Result<()> {
        self.prepare_advance()?;
        self.all.iter_mut().try_for_each(|o| o.advance())
    }
}

impl<R: Runtime> OptimizerCore<R> for Combined<R> {
    fn params(&self) -> Vec<&FlatParams<R>> {
        self.all.iter().flat_map(|o| o.params()).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut FlatParams<R>> {
        self.all.iter_mut().flat_map(|o| o.params_mut()).collect()
    }

    fn sum_count(&self) -> usize {
        self.all.iter().map(|o| o.sum_count()).sum()
    }

    fn sums(
        &mut self,
        rt: &R,
        grads: &[Flat<R>],
        scale: Option<&Tensor<R>>,
        counts: &dyn Fn(&Arc<Leaf<R>>) -> bool,
    ) -> Result<Option<Tensor<R>>> {
        let mut all = Vec::new();
        if self.sum_count() > 0 {
            self.each(grads, |optimizer, own| {
                all.extend(optimizer.sums(rt, own, scale, counts)?);
                Ok(())
            })?;
        }
        if all.is_empty() { Ok(None) } else { cat(&all.iter().collect::<Vec<_>>(), 0).map(Some) }
    }

    fn adapt(&mut self, sums: &[f64], loss: Option<f64>) -> Result<()> {
        let mut rest = sums;
        self.all.iter_mut().filter(|o| o.sum_count() > 0).try_for_each(|optimizer| {
            let (own, others) = rest.split_at(optimizer.sum_count().min(rest.len()));
            rest = others;
            optimizer.adapt(own, loss)
        })
    }

    fn update(&mut self, grads: &[Flat<R>], scale: Option<&Tensor<R>>) -> Result<()> {
        self.each(grads, |optimizer, own| optimizer.update(own, scale))
    }

    fn frozen(&self) -> Vec<Arc<Leaf<R>>> {
        self.all.iter().flat_map(|o| o.frozen()).collect()
    }

    fn own_gradients(&mut self) -> &mut OwnGradients<R> {
        &mut self.own
    }

    fn check_state_dict(&self, state: &[(String, Tensor<R>)]) -> Result<()> {
        let number = |name: &str| name.split_once('.').and_then(|(k, _)| k.parse::<usize>().ok());
        let stray = |(name, _): &&(String, Tensor<R>)| number(name).is_none_or(|k| k >= self.all.len());
        let mut problems: Vec<String> =
            state.iter().filter(stray).map(|(n, _)| format!("`{n}` is unexpected")).collect();
        let wrong = self.all.iter().enumerate().filter_map(|(k, o)| o.check_state_dict(&Self::own(state, k)).err());
        problems.extend(wrong.map(|e| e.to_string()));
        if problems.is_empty() { Ok(()) } else { Err(Error::state("Combined state", problems.join("; "))) }
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let all: Vec<_> = self.all.iter().map(|o| o.hyper_parameters()).collect::<Result<_>>()?;
        Ok(all.concat())
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        self.check_hyper_parameters(groups)?;
        let mut rest = groups;
        self.all.iter_mut().try_for_each(|optimizer| {
            let (own, others) = rest.split_at(optimizer.hyper_parameters()?.len());
            rest = others;
            optimizer.set_hyper_parameters(own)
        })
    }

    fn check_hyper_parameters(&self, groups: &[HyperParams]) -> Result<()> {
        require_groups("Combined", groups.len(), self.hyper_parameters()?.len())?;
        let mut rest = groups;
        self.all.iter().try_for_each(|optimizer| {
            let (own, others) = rest.split_at(optimizer.hyper_parameters()?.len());
            rest = others;
            optimizer.check_hyper_parameters(own)
        })
    }

    fn prepare_advance(&mut self) -> Result<()> {
        self.all.iter_mut().try_for_each(|o| o.prepare_advance())
    }

    fn is_elementwise(&self) -> bool {
        self.all.iter().all(|o| o.is_elementwise())
    }

    fn describe(&self) -> String {
        self.all.iter().enumerate().map(|(k, o)| format!("{k}. {}\n", o.describe())).collect()
    }

    fn reorder(&mut self, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        self.own = OwnGradients::default();
        self.all.iter_mut().try_for_each(|o| o.reorder(key))
    }

    fn update_whole(&mut self, placed: &PiecesOf<'_, R>) -> Result<Vec<usize>> {
        Ok(self.all.iter_mut().map(|o| o.update_whole(placed)).collect::<Result<Vec<_>>>()?.concat())
    }

    fn check_sole(&mut self) -> Result<()> {
        self.all.iter_mut().try_for_each(|o| o.check_sole())
    }

    fn add_params(&mut self, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
        let names: Vec<String> = leaves.iter().map(|leaf| format!("`{}`", leaf.name())).collect();
        let why = format!(
            "several optimizers in one take no further parameters, so {} cannot be trained: make them anew",
            names.join(", ")
        );
        Err(Error::unsupported("Combined", why))
    }
}
