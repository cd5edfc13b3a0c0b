//! Feed-forward networks with a gate, one and many.

use std::sync::Arc;

use autograd::{Var, recomputed};
use numcore::{
    Error, Result, Runtime, Within,
    fused::NnOps,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps, cat},
};

use super::{ClampedSwiGlu, MoeConfig, dispatch::Dispatch};
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
    /// The gate's projections above the gated ones, `[E, 2F, C]`; or as [`ClampedSwiGlu`] says.
    pub gate_up_proj: Param<R>,
    /// The biases of these, `[E, 2F]`, if there are any.
    pub gate_up_proj_bias: Option<Param<R>>,
    /// The projections back, `[E, C, F]`; or as [`ClampedSwiGlu`] says.
    pub down_proj: Param<R>,
    /// The biases of these, `[E, C]`, if there are any.
    pub down_proj_bias: Option<Param<R>>,
    #[module(skip)]
    clamped: Option<ClampedSwiGlu>,
}

impl<R: Runtime> Experts<R> {
    #[track_caller]
    pub(super) fn new(init: &Init<R>, config: &MoeConfig) -> Result<Self> {
        let MoeConfig { width, hidden, experts, clamped, .. } = *config;
        let cuts = Cuts::Experts { compete: config.capacity.is_some() || config.balance_bias };
        let weight = |outputs, inputs| {
            let shape = if clamped.is_some() { [experts, inputs, outputs] } else { [experts, outputs, inputs] };
            Ok::<_, Error>(init.weight(shape, Initializer::by_fan(inputs))?.with_cuts(cuts))
        };
        let bias = |outputs| Ok::<_, Error>(init.bias([experts, outputs], Initializer::Zeros)?.with_cuts(cuts));
        Ok(Experts {
            gate_up_proj: weight(2 * hidden, width)?,
            gate_up_proj_bias: clamped.map(|_| bias(2 * hidden)).transpose()?,
            down_proj: weight(width, hidden)?,
            down_proj_bias: clamped.map(|_| bias(width)).transpose()?,
            clamped,
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
        let clamped = self.clamped;
        let [gate_up, down] = [(&self.gate_up_proj, &self.gate_up_proj_bias), (&self.down_proj, &self.down_proj_bias)]
            .map(|(weight, bias)| (weight.var(), bias.as_ref().map(Param::var)));
        let product = |x: &Var<R>, (weight, bias): &(Var<R>, Option<Var<R>>), expert: usize| {
            let (weight, bias) = (weight.select(0, expert)?, bias.as_ref().map(|bias| bias.select(0, expert)));
            let weight = if clamped.is_some() { weight.transpose(0, 1)? } else { weight };
            x.linear(&weight, bias.transpose()?.as_ref())
        };
        let network = |x: &Var<R>, expert: usize| {
            let hidden = product(x, &gate_up, expert)?;
            product(&recomputed(&[&hidden], move |x| activated(&x[0], clamped))?, &down, expert)
        };
        let (mut outputs, mut start) = (Vec::new(), 0);
        for (expert, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            outputs.push(network(&x.narrow(0, start, count)?, expert)?);
            start += count;
        }
        match &outputs[..] {
            // Of no rows, which keeps the parameters in the graph.
            [] => network(x, 0),
            [only] => Ok(only.clone()),
            all => cat(&all.iter().collect::<Vec<_>>(), 0),
        }
    }
}

/// The activation of gate and up, `[N, 2F]`, which are halves; in GPT-OSS they alternate.
fn activated<R: Runtime>(hidden: &Var<R>, clamped: Option<ClampedSwiGlu>) -> Result<Var<R>> {
    let Some(ClampedSwiGlu { limit, alpha }) = clamped else {
        return match &hidden.chunk(-1, 2)?[..] {
            [gate, up] => gate.swiglu(up),
            _ => Err(Error::internal("Experts", "a weight of gate and up has two halves")),
        };
    };
    let both = hidden.reshape([hidden.dims()[0], hidden.dims()[1] / 2, 2])?;
    let gate = both.select(-1, 0)?.minimum(limit)?;
    let up = both.select(-1, 1)?.clamp(-limit, limit)?;
    gate.mul(&gate.mul(alpha)?.sigmoid()?)?.mul(&up.add(1.0)?)
}
