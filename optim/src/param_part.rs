//! The parameters of one group and dtype in an optimizer: values, states, counts of updates.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{ErrorKind, Flat, Result, Runtime, Tensor, ops::ViewOps};

use crate::{
    FlatParams, StepContext, UpdateMemory, UpdateRule,
    captured::DeviceNumbers,
    memory::Values,
    params::{one_of, require_sole},
    runs::next_run,
};

/// The parameters of one group and dtype.
pub(crate) struct ParamPart<R: Runtime, C: UpdateRule> {
    pub(crate) group: usize,
    pub(crate) params: FlatParams<R>,
    /// The states, in the order of [`UpdateRule::tensors`].
    pub(crate) states: Vec<Flat<R>>,
    /// The number of updates that each parameter has had.
    pub(crate) steps: Vec<u64>,
    pub(crate) kernel: C::Kernel,
    pub(crate) numbers: DeviceNumbers<R>,
}

impl<R: Runtime, C: UpdateRule> ParamPart<R, C> {
    pub(crate) fn new(group: usize, config: &C, leaves: Vec<Arc<Leaf<R>>>) -> Result<Self> {
        let steps = vec![0; leaves.len()];
        let params = FlatParams::new(leaves)?;
        let states = config.tensors().iter().map(|s| params.state(s)).collect::<Result<_>>()?;
        let kernel = config.kernel(params.half())?;
        Ok(ParamPart { group, kernel, states, steps, params, numbers: DeviceNumbers::default() })
    }

    pub(crate) fn reorder(&mut self, config: &C, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        order.sort_by_key(|&i| key(&self.params.leaves()[i]));
        if order.is_sorted() {
            return Ok(());
        }
        let moved = self.params.permuted(&order)?;
        for (state, old) in config.tensors().iter().zip(&mut self.states) {
            let mut new = moved.state(state)?;
            order.iter().enumerate().try_for_each(|(k, &i)| new.overwrite(k, &old.tensor(i)?))?;
            *old = new;
        }
        self.steps = order.iter().map(|&i| self.steps[i]).collect();
        self.params = moved;
        self.numbers = DeviceNumbers::default();
        Ok(())
    }

    pub(crate) fn claim(&mut self) -> Result<()> {
        self.params.claim()?;
        if self.states.iter_mut().all(|s| require_sole(s).is_ok()) {
            return Ok(());
        }
        self.params.release(|_| false)?;
        let what = one_of("state tensor", self.params.leaves().iter().map(|l| l.name().to_string()));
        Err(ErrorKind::Shared { op: C::NAME, what }.into())
    }

    /// The next parameters that one call of the rule updates: adjacent ones with a gradient and equal counts of
    /// updates.
    fn next_run(&self, from: usize, grads: &Flat<R>) -> Option<std::ops::Range<usize>> {
        let key = |i: usize| (self.steps[i], if C::PER_PARAMETER { i } else { 0 });
        next_run(self.params.len(), from, |i| grads.is_written(i).then(|| key(i)))
    }

    pub(crate) fn update(
        &mut self,
        config: &C,
        lr: f64,
        grads: &Flat<R>,
        scale: Option<&Tensor<R>>,
        in_memory: bool,
    ) -> Result<()> {
        let replayed = in_memory && self.params.runtime().is_capturing();
        let mut at = 0;
        while let Some(ranges) = self.next_run(at, grads) {
            at = ranges.end;
            let now = StepContext { lr, step: self.steps[ranges.start] + 1 };
            let (layout, at) = (self.params.layout().clone(), grads.layout().span(ranges.clone()));
            if !at.is_empty() {
                let mut memory = UpdateMemory {
                    values: Values::Flat(&mut self.params.values),
                    layout: &layout,
                    states: &mut self.states,
                    master: self.params.master.as_mut(),
                    grad: grads.whole()?.narrow(0, at.start, at.len())?,
                    scale,
                    ranges: ranges.clone(),
                    numbers: in_memory.then_some(&mut self.numbers),
                };
                config.update(&self.kernel, now, &mut memory)?;
            }
            // A captured update has not happened yet.
            if !replayed {
                self.steps[ranges].fill(now.step);
            }
        }
        Ok(())
    }
}
