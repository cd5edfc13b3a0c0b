//! Layer norm and RMS norm over the last axis.

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::{SmallVec, smallvec};

use super::{Fused, as_forward};
use crate::{
    AxisSet, Error, Result, Shape,
    ops::{
        Apply, Backprop, Bits, Outs, PointwiseOps, Reduce, ReduceOps, Saves, Spec, Specs, ViewOps, mean_of, moments,
    },
    pointwise::{Program, Widened, standard::SQUARES},
};

/// The statistics by which a [`Norm`] normalizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance (Ba et al. 2016).
    Layer,
    /// The root mean square alone (Zhang & Sennrich 2019).
    Rms,
}

/// Layer norm, `(x − mean) · rstd · w + b` over the last axis, or RMS norm, `x · rstd · w`.
///
/// Inputs are `x: [.., C]`, then `w: [C]` and `b: [C]` if given. Outputs are `y: [.., C]`, `rstd: [.., 1]` and, for
/// layer norm, `mean: [.., 1]` (both `f32` for half-precision inputs).
#[derive(Clone, Debug)]
pub struct Norm {
    /// The statistics that normalize a row: mean and variance, or the root mean square.
    pub kind: NormKind,
    /// The constant `ε`, added to the variance.
    pub eps: f64,
    /// True if a weight is given.
    pub weight: bool,
    /// True if a bias is given (layer norm with a weight only).
    pub bias: bool,
}

impl Norm {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of `w` among the inputs, if given.
    pub const WEIGHT: usize = 1;
    /// Position of `b` among the inputs, if given.
    pub const BIAS: usize = 2;
    /// Position of `y` among the outputs.
    pub const Y: usize = 0;
    /// Position of `rstd` among the outputs.
    pub const RSTD: usize = 1;
    /// Position of `mean` among the outputs of a layer norm.
    pub const MEAN: usize = 2;
}

static RSTD: LazyLock<Program> = LazyLock::new(|| Program::new("norm", |[v], [eps]| [(v + eps).rsqrt()]));

impl Norm {
    /// The mean (layer norm only) and `rstd` of each row, `[.., 1]`.
    fn statistics<T: Apply>(&self, x: &T) -> Result<(Option<T>, T)> {
        let rows = rows(x.spec().shape);
        let (mean, variance) = match self.kind {
            NormKind::Layer => {
                let (mean, variance) = moments(x, AxisSet::one(x.spec().shape.axis("norm", -1)?), 0)?;
                (Some(mean), variance)
            }
            NormKind::Rms => (None, mean_of(&SQUARES, &[x], rows, last(x.spec().shape))?),
        };
        Ok((mean, variance.apply_program(&RSTD, &[], &[self.eps.into()])?))
    }

    fn normalized<T: Apply>(&self, x: &T, mean: Option<&T>, rstd: &T) -> Result<T> {
        match mean {
            Some(m) => x.sub(m)?.mul(rstd),
            None => x.mul(rstd),
        }
    }
}

impl Fused for Norm {
    fn name(&self) -> &'static str {
        match self.kind {
            NormKind::Layer => "layer_norm",
            NormKind::Rms => "rms_norm",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 1 + usize::from(self.weight) + usize::from(self.bias);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let x = ins[Norm::X];
        if self.bias && !(self.weight && self.kind == NormKind::Layer) {
            let shapes: Vec<Shape> = ins.iter().map(|s| s.shape).collect();
            return Err(Error::shape(
                self.name(),
                &shapes,
                "a bias needs a layer norm with a weight; add it afterwards",
            ));
        }
        if !x.dtype.is_float() || ins.iter().any(|s| s.dtype != x.dtype) {
            let dtypes: Vec<_> = ins.iter().map(|s| s.dtype).collect();
            return Err(Error::dtype(self.name(), &dtypes, "input, weight and bias must have one floating dtype"));
        }
        let shapes: Vec<Shape> = ins.iter().map(|s| s.shape).collect();
        if x.shape.rank() == 0 || ins[1..].iter().any(|s| s.shape.dims() != [last(x.shape)]) {
            return Err(Error::shape(self.name(), &shapes, "needs x [.., C] with weight and bias [C]"));
        }
        let row = Spec { shape: rows(x.shape), dtype: x.dtype.compute() };
        Ok(match self.kind {
            NormKind::Layer => smallvec![x, row, row],
            NormKind::Rms => smallvec![x, row],
        })
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let x = ins[Norm::X];
        let (mean, rstd) = self.statistics(x)?;
        let mut y = self.normalized(x, mean.as_ref(), &rstd)?;
        if self.weight {
            y = y.mul(ins[Norm::WEIGHT])?;
        }
        if self.bias {
            y = y.add(ins[Norm::BIAS])?;
        }
        Ok([Some(y), Some(rstd), mean].into_iter().flatten().collect())
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        let inputs = Bits::of(if self.weight { &[Norm::X, Norm::WEIGHT] } else { &[Norm::X] });
        let outputs = Bits::of(if self.kind == NormKind::Layer { &[Norm::RSTD, Norm::MEAN] } else { &[Norm::RSTD] });
        Some(Saves { inputs, outputs })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let mut ins: SmallVec<[T; 5]> = smallvec![cx.input(Norm::X)?, cx.grad()?, cx.output(Norm::RSTD)?];
        if self.kind == NormKind::Layer {
            ins.push(cx.output(Norm::MEAN)?);
        }
        if self.weight {
            ins.push(cx.input(Norm::WEIGHT)?);
        }
        let refs: SmallVec<[&T; 5]> = ins.iter().collect();
        cx.give_all(0, NormGrad(self.clone()).into(), &refs)
    }
}

/// The gradients of [`Norm`]. Inputs are `x`, the upstream gradient, `rstd`, `mean` (layer norm) and `w` (if given);
/// outputs are the gradients of `x`, `w`, `b`.
#[derive(Clone, Debug)]
pub struct NormGrad(
    /// The options of the forward operation.
    pub Norm,
);

impl NormGrad {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of the upstream gradient among the inputs.
    pub const GRAD: usize = 1;
    /// Position of `rstd` among the inputs.
    pub const RSTD: usize = 2;
    /// Position of `mean` among the inputs, of a layer norm.
    pub const MEAN: usize = 3;

    /// Position of the weight among the inputs.
    pub fn weight_at(&self) -> Option<usize> {
        self.0.weight.then_some(self.rows_end())
    }

    /// The number of inputs before the weight: `x`, the gradient and the rows' statistics.
    fn rows_end(&self) -> usize {
        if self.0.kind == NormKind::Layer { 4 } else { 3 }
    }
}

impl Fused for NormGrad {
    fn name(&self) -> &'static str {
        match self.0.kind {
            NormKind::Layer => "layer_norm_grad",
            NormKind::Rms => "rms_norm_grad",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = self.weight_at().map_or(self.rows_end(), |i| i + 1);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let x = ins[NormGrad::X];
        let forward: Specs = std::iter::once(x).chain(self.weight_at().map(|i| ins[i])).collect();
        let outs = Norm { bias: false, ..self.0.clone() }.infer(&forward)?;
        let statistics = (NormGrad::RSTD..self.rows_end()).map(|i| ("a row's statistic", &ins[i], &outs[Norm::RSTD]));
        as_forward(self.name(), std::iter::once(("the gradient", &ins[NormGrad::GRAD], &x)).chain(statistics))?;
        let parameter = Spec { shape: Shape::new(&[last(x.shape)])?, dtype: x.dtype };
        let count = usize::from(self.0.weight) + usize::from(self.0.weight && self.0.bias);
        Ok(std::iter::once(x).chain(std::iter::repeat_n(parameter, count)).collect())
    }

    /// Computes, with `x̂` normalized and `h = g·w`: `dx = rstd · (h − mean(h) − x̂ · mean(h·x̂))`, `dw = Σ g·x̂`,
    /// `db = Σ g`.
    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        static DOT: LazyLock<Widened> =
            LazyLock::new(|| Widened::new(|wide| Program::new("norm_grad", |[a, b], []| [wide.of(a) * wide.of(b)])));
        let (x, g, weight) = (ins[NormGrad::X], ins[NormGrad::GRAD], self.weight_at().map(|i| ins[i]));
        let (mean, rstd) = self.0.statistics(x)?;
        let hat = self.0.normalized(x, mean.as_ref(), &rstd)?;
        let h = weight.map_or(Ok(g.clone()), |w| g.mul(w))?;
        let along = mean_of(&DOT, &[&h, &hat], rows(x.spec().shape), last(x.spec().shape))?;
        let mut d = h.sub(&hat.mul(&along)?)?;
        if mean.is_some() {
            d = d.sub(&h.mean_keepdim(&[-1])?)?;
        }
        let mut outs: Outs<T> = smallvec![d.mul(&rstd)?];
        let parameter = Shape::new(&[last(x.spec().shape)])?;
        if self.0.weight {
            let flat = [g.spec().shape.numel() / parameter[0].max(1), parameter[0]];
            let product = g.mul(&hat)?.reshape(flat)?;
            outs.push(T::apply1(Reduce::sum_to(parameter), &[&product])?);
            if self.0.bias {
                outs.push(T::apply1(Reduce::sum_to(parameter), &[&g.reshape(flat)?])?);
            }
        }
        Ok(outs)
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}

fn last(shape: Shape) -> usize {
    shape[shape.rank() - 1]
}

fn rows(shape: Shape) -> Shape {
    shape.with(shape.rank() - 1, 1)
}
