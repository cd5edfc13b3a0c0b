//! Feed-forward networks with a gate, one and many.

use std::sync::Arc;

use autograd::{Var, recomputed};
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{Apply, MatmulOps, ViewOps, cat},
};

use super::{MoeConfig, dispatch::Dispatch};
use crate::{
    Forward, Init, Initializer, Linear, Module, Param,
    parallel::{Cuts, Placed, TensorStyle},
};

/// The network `down(silu(gate(x)) · up(x))` (SwiGLU, Shazeer 2020) of `x: [.., C]`, without biases.
#[derive(Debug, Module)]
pub struct GatedMlp<R: Runtime> {
    /// The projection that goes through the activation.
    pub gate_proj: Linear<R>,
    /// The projection that it gates.
    pub up_proj: Linear<R>,
    /// The projection back.
    pub down_proj: Linear<R>,
}

impl<R: Runtime> GatedMlp<R> {
    /// A network of `hidden` channels.
    #[track_caller]
    pub fn new(init: &Init<R>, width: usize, hidden: usize) -> Result<Self> {
        let linear = |inputs, outputs| Ok::<_, Error>(Linear::new(init, inputs, outputs)?.without_bias());
        Ok(GatedMlp {
            gate_proj: linear(width, hidden)?,
            up_proj: linear(width, hidden)?,
            down_proj: linear(hidden, width)?,
        })
    }
}

impl<R: Runtime> Forward<R> for GatedMlp<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let (gate, up) = (self.gate_proj.forward(x)?, self.up_proj.forward(x)?);
        self.down_proj.forward(&recomputed(&[&gate, &up], |x| x[0].swiglu(&x[1]))?)
    }
}

/// The networks of a mixture's experts, each `down(silu(gate(x)) · up(x))`, in tensors of all of them, or of those that
/// this rank has.
#[derive(Debug, Module)]
pub struct Experts<R: Runtime> {
    /// The gate's projections above the gated ones, `[E, 2F, C]`.
    pub gate_up_proj: Param<R>,
    /// The projections back, `[E, C, F]`.
    pub down_proj: Param<R>,
}

impl<R: Runtime> Experts<R> {
    #[track_caller]
    pub(super) fn new(init: &Init<R>, config: &MoeConfig) -> Result<Self> {
        let MoeConfig { width, hidden, experts, .. } = *config;
        let cuts = Cuts::Experts { compete: config.capacity.is_some() || config.balance_bias };
        Ok(Experts {
            gate_up_proj: init.weight([experts, 2 * hidden, width], Initializer::by_fan(width))?.with_cuts(cuts),
            down_proj: init.weight([experts, width, hidden], Initializer::by_fan(hidden))?.with_cuts(cuts),
        })
    }

    /// The placement of the experts, if a plan distributes them.
    pub(super) fn placed(&self) -> Option<Arc<Placed<R>>> {
        self.gate_up_proj.placed().filter(|placed| placed.examples().is_some())
    }

    /// The outputs `[N, C]` of rows `x: [N, C]`, of which the first `counts[0]` are the first expert's, and so on. An
    /// expert without rows runs nothing, and its gradient is zero. Rows of experts that are shared out among ranks
    /// travel there, and their outputs back: all of these ranks call it.
    ///
    /// # Errors
    /// If the counts are not one for each expert, or do not add up to the rows.
    #[track_caller]
    pub fn forward_rows(&self, x: &Var<R>, counts: &[usize]) -> Result<Var<R>> {
        let (rows, experts) = (x.spec().shape[0], self.gate_up_proj.logical_shape()[0]);
        if counts.len() != experts || counts.iter().sum::<usize>() != rows {
            let why = format!(
                "{} counts of {} rows for {experts} experts and {rows} rows",
                counts.len(),
                counts.iter().sum::<usize>()
            );
            return Err(Error::shape("Experts", &[[counts.len()].into(), x.spec().shape], why)).at_caller();
        }
        let [gate_up, down] = [&self.gate_up_proj, &self.down_proj].map(|p| p.shape()[0]);
        if gate_up != down {
            let why = format!(
                "this rank has {gate_up} of {experts} experts in `gate_up_proj`, and {down} in `down_proj`: name both in the plan, by the module \
                 that they are of (`TensorPlan::experts`)"
            );
            return Err(Error::state("Experts", why)).at_caller();
        }
        match self.placed().filter(|placed| placed.style() == TensorStyle::Experts) {
            None => self.forward_here(x, counts),
            Some(placed) => {
                let dispatch = Dispatch::agree(&placed, counts)?;
                dispatch.leave(&self.forward_here(&dispatch.arrive(x)?, dispatch.counts())?)
            }
        }
    }

    /// The outputs of rows by the experts that this rank has.
    fn forward_here(&self, x: &Var<R>, counts: &[usize]) -> Result<Var<R>> {
        let (gate_up, down) = (self.gate_up_proj.var(), self.down_proj.var());
        let (mut outputs, mut start) = (Vec::new(), 0);
        for (expert, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let own = x.narrow(0, start, count)?;
            let hidden = own.linear(&gate_up.select(0, expert)?, None)?;
            let active = recomputed(&[&hidden], |x| match &x[0].chunk(-1, 2)?[..] {
                [gate, up] => gate.swiglu(up),
                _ => Err(Error::internal("Experts", "a weight of gate and up has two halves")),
            })?;
            outputs.push(active.linear(&down.select(0, expert)?, None)?);
            start += count;
        }
        match &outputs[..] {
            // A product over no rows keeps the parameters in the graph.
            [] => x
                .linear(&gate_up.select(0, 0)?, None)?
                .narrow(-1, 0, self.down_proj.shape()[2])?
                .linear(&down.select(0, 0)?, None),
            [only] => Ok(only.clone()),
            all => cat(&all.iter().collect::<Vec<_>>(), 0),
        }
    }
}
