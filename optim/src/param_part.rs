//! The parameters of one group and dtype in an optimizer: values, states, counts of updates.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{ErrorKind, Flat, FlatLayout, Result, Runtime, Tensor, ops::ViewOps};

use crate::{
    FlatParams, StateSpec, StepContext, UpdateMemory, UpdatePhase, UpdateRule,
    captured::DeviceNumbers,
    cut_params::CutParams,
    memory::Values,
    params::{one_of, require_sole, state_of},
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
    /// Parameters of which this rank has a piece, and that ranks update as a whole.
    pub(crate) cut: CutParams<R>,
}

impl<R: Runtime, C: UpdateRule> ParamPart<R, C> {
    pub(crate) fn new(group: usize, config: &C, leaves: Vec<Arc<Leaf<R>>>) -> Result<Self> {
        let steps = vec![0; leaves.len()];
        let params = FlatParams::new(leaves)?;
        let kernel = config.kernel(params.half())?;
        let cut = CutParams::new(params.runtime(), params.layout(), vec![None; params.len()]);
        let states = states(config, &params, &cut)?;
        Ok(ParamPart { group, kernel, states, steps, params, numbers: DeviceNumbers::default(), cut })
    }

    pub(crate) fn reorder(&mut self, config: &C, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Result<()> {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        order.sort_by_key(|&i| key(&self.params.leaves()[i]));
        if order.is_sorted() {
            return Ok(());
        }
        let moved = self.params.permuted(&order)?;
        let cut = self.cut.permuted(moved.layout(), &order);
        for (mut new, old) in states(config, &moved, &cut)?.into_iter().zip(&mut self.states) {
            order.iter().enumerate().try_for_each(|(k, &i)| new.overwrite(k, &old.tensor(i)?))?;
            *old = new;
        }
        self.cut = cut;
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

    /// The next parameters that one call of the rule updates: one if each is `alone`. Otherwise they are adjacent ones
    /// with a gradient and equal counts of updates.
    fn next_run(&self, from: usize, grads: &Flat<R>, alone: bool) -> Option<std::ops::Range<usize>> {
        let key = |i: usize| (self.steps[i], if C::PER_PARAMETER || alone { i } else { 0 });
        next_run(self.params.len(), from, |i| (grads.is_written(i) && self.cut.get(i).is_none()).then(|| key(i)))
    }

    pub(crate) fn update(
        &mut self,
        config: &C,
        lr: f64,
        grads: &Flat<R>,
        scale: Option<&Tensor<R>>,
        in_memory: bool,
        phase: &mut UpdatePhase<'_, R>,
    ) -> Result<()> {
        let replayed = self.params.runtime().is_capturing();
        let mut at = 0;
        while let Some(ranges) = self.next_run(at, grads, !phase.changes()) {
            at = ranges.end;
            let now = StepContext { lr, step: self.steps[ranges.start] + 1 };
            let layout = self.params.layout().clone();
            if !grads.layout().span(ranges.clone()).is_empty() {
                let mut memory = memory(&mut self.params, &layout, &mut self.states, grads, scale, ranges.clone())?;
                memory.numbers = in_memory.then_some(&mut self.numbers);
                phase.run((config, &self.kernel), now, &mut memory)?;
            }
            // A captured update has not happened yet.
            if phase.changes() && !replayed {
                self.steps[ranges].fill(now.step);
            } else if phase.changes() && !in_memory {
                self.numbers.note_constant(ranges);
            }
        }
        self.update_cut(config, lr, grads, scale, phase)
    }

    fn update_cut(
        &mut self,
        config: &C,
        lr: f64,
        grads: &Flat<R>,
        scale: Option<&Tensor<R>>,
        phase: &UpdatePhase<'_, R>,
    ) -> Result<()> {
        let which: Vec<usize> =
            (0..self.steps.len()).filter(|&i| self.cut.get(i).is_some() && grads.is_written(i)).collect();
        if which.is_empty() {
            return Ok(());
        }
        phase.check_whole(config)?;
        if !phase.changes() {
            return Ok(());
        }
        // The whole is a value in the dtype of updates, without a master copy.
        let (kernel, layout, steps) = (config.kernel(None)?, self.params.layout().clone(), &self.steps);
        let (params, states) = (&mut self.params, &mut self.states);
        self.cut.update(
            &which,
            grads.layout().dtype(),
            &mut |i, f| f(&mut memory(params, &layout, states, grads, scale, i..i + 1)?),
            &mut |i, whole| config.update(&kernel, StepContext { lr, step: steps[i] + 1 }, whole),
        )?;
        match self.params.runtime().is_capturing() {
            true => which.into_iter().for_each(|i| self.numbers.note_constant(i..i + 1)),
            false => which.into_iter().for_each(|i| self.steps[i] += 1),
        }
        Ok(())
    }
}

/// Creates the states of each parameter, or of the whole of a cut one, in the dtype of updates. States of the
/// parameters' shapes have the parameters' offsets.
pub(crate) fn states<R: Runtime, C: UpdateRule>(
    config: &C,
    params: &FlatParams<R>,
    cut: &CutParams<R>,
) -> Result<Vec<Flat<R>>> {
    let state = |spec: StateSpec| state_of(params.runtime(), cut.layout(), |i| cut.kept(i, spec));
    config.tensors().into_iter().map(state).collect()
}

fn memory<'a, R: Runtime>(
    params: &'a mut FlatParams<R>,
    layout: &'a FlatLayout,
    states: &'a mut [Flat<R>],
    grads: &Flat<R>,
    scale: Option<&'a Tensor<R>>,
    ranges: std::ops::Range<usize>,
) -> Result<UpdateMemory<'a, R>> {
    let at = grads.layout().span(ranges.clone());
    let grad = grads.whole()?.narrow(0, at.start, at.len())?;
    let (values, master) = (Values::Flat(&mut params.values), params.master.as_mut());
    Ok(UpdateMemory { values, layout, states, master, grad, scale, ranges, numbers: None })
}
