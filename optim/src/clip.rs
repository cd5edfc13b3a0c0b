//! Gradient clipping on the device, without a wait of the host.

use std::sync::{Arc, LazyLock};

use autograd::{Gradients, Leaf};
use numcore::{
    DType, Error, Result, Runtime, Tensor, Within,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat, update},
    pointwise::Program,
};

use crate::{
    FlatGradients,
    norms::{sum_of_squares, wide, zero_if_finite},
    runs::runs,
};

/// The norm by which gradients are clipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// The square root of the sum of squares.
    L2,
    /// The largest magnitude of any element.
    Inf,
}

/// Gradients that can be measured and scaled together.
pub trait GradientSet<R: Runtime> {
    /// All gradients as they are stored, as contiguous tensors.
    fn pieces(&self) -> Result<Vec<Tensor<R>>>;
    /// The runtime; `None` if there are no parameters.
    fn runtime(&self) -> Option<R>;
    /// A pending scalar factor of all gradients.
    fn pending(&self) -> Option<&Tensor<R>>;
    /// Multiplies all gradients by a scalar on the device.
    fn scale_by(&mut self, factor: Tensor<R>) -> Result<()>;
    /// Replaces every element `x` by `min(max(x, −limit), limit)`.
    fn clamp(&mut self, limit: f64) -> Result<()>;
}

static COEFFICIENT: LazyLock<Program> =
    LazyLock::new(|| Program::new("clip_coefficient", |[norm], [max]| [(max / (norm + 1e-6)).min(1.0)]));
static SCALED_NORM: LazyLock<Program> =
    LazyLock::new(|| Program::new("scaled_norm", |[norm, factor], []| [norm * factor.cast_like(norm).abs()]));
static CLAMP: LazyLock<Program> = LazyLock::new(|| Program::new("clip_value", |[x], [limit]| [x.clamp(-limit, limit)]));

/// The norm of all gradients taken as one vector: a scalar on the device, `f32` (`f64` if a gradient is).
/// [`item`](Tensor::item) waits for it and returns it to the host.
#[track_caller]
pub fn grad_norm<R: Runtime>(gradients: &impl GradientSet<R>, norm: NormOrder) -> Result<Tensor<R>> {
    let pieces = gradients.pieces()?;
    let dtype = norm_dtype(pieces.iter().map(Tensor::dtype));
    let Some(rt) = gradients.runtime() else {
        return Err(Error::range("grad_norm", "number of parameters", 0usize, "at least 1")).at_caller();
    };
    if pieces.is_empty() {
        return Tensor::zeros(&rt, [], dtype);
    }
    let of = |x: &Tensor<R>| match norm {
        NormOrder::L2 => sum_of_squares(x),
        NormOrder::Inf => x.amax_all()?.maximum(&x.amin_all()?.neg()?),
    };
    let all = joined(&pieces, dtype, of)?;
    let total = match norm {
        NormOrder::L2 => all.sum_all()?.sqrt()?,
        NormOrder::Inf => all.amax_all()?,
    };
    match gradients.pending() {
        Some(factor) => total.apply_program(&SCALED_NORM, &[factor], &[]),
        None => Ok(total),
    }
}

/// Multiplies all gradients by `min(1, max_norm / (norm + 1e-6))`, and returns the norm before, a scalar on the device.
///
/// For [`FlatGradients`], no memory is touched: the coefficient stays on the device, and the optimizer's launch applies
/// it. A norm that is not finite makes all gradients NaN or 0, as in PyTorch; check the returned norm if that can
/// happen.
///
/// # Errors
/// An error if `max_norm` is negative or NaN.
#[track_caller]
pub fn clip_grad_norm<R: Runtime>(
    gradients: &mut impl GradientSet<R>,
    max_norm: f64,
    norm: NormOrder,
) -> Result<Tensor<R>> {
    if max_norm.is_nan() || max_norm < 0.0 {
        return Err(Error::range("clip_grad_norm", "largest norm", max_norm, "at least 0")).at_caller();
    }
    let total = grad_norm(gradients, norm)?;
    gradients.scale_by(total.apply_program(&COEFFICIENT, &[], &[max_norm.into()])?)?;
    Ok(total)
}

/// Clamps every element of every gradient to `[−limit, limit]`; NaN stays NaN.
///
/// # Errors
/// An error if `limit` is negative or NaN.
#[track_caller]
pub fn clip_grad_value<R: Runtime>(gradients: &mut impl GradientSet<R>, limit: f64) -> Result<()> {
    if limit.is_nan() || limit < 0.0 {
        return Err(Error::range("clip_grad_value", "limit", limit, "at least 0")).at_caller();
    }
    gradients.clamp(limit)
}

/// Tells whether all elements of all gradients are finite. Waits for the device.
#[track_caller]
pub fn all_finite<R: Runtime>(gradients: &impl GradientSet<R>) -> Result<bool> {
    let pieces = gradients.pieces()?;
    let dtype = norm_dtype(pieces.iter().map(Tensor::dtype));
    Ok(pieces.is_empty() || joined(&pieces, dtype, zero_if_finite)?.sum_all()?.item()?.is_finite())
}

/// Computes one value of each tensor, and concatenates the values.
fn joined<R: Runtime>(
    pieces: &[Tensor<R>],
    dtype: DType,
    of: impl Fn(&Tensor<R>) -> Result<Tensor<R>>,
) -> Result<Tensor<R>> {
    let parts = pieces.iter().map(|x| of(x)?.to_dtype(dtype)?.reshape([1])).collect::<Result<Vec<_>>>()?;
    if let [one] = &parts[..] { Ok(one.clone()) } else { cat(&parts.iter().collect::<Vec<_>>(), 0) }
}

/// The dtype in which norms of gradients of these dtypes are computed.
pub(crate) fn norm_dtype(mut dtypes: impl Iterator<Item = DType>) -> DType {
    wide(dtypes.find(|&d| d == DType::F64).unwrap_or(DType::F32))
}

impl<R: Runtime> GradientSet<R> for FlatGradients<R> {
    fn pieces(&self) -> Result<Vec<Tensor<R>>> {
        let mut pieces = Vec::new();
        for flat in self.flats() {
            for run in runs(flat.layout().len(), |i| flat.is_written(i)) {
                let at = flat.layout().span(run);
                if !at.is_empty() {
                    pieces.push(flat.whole()?.narrow(0, at.start, at.len())?);
                }
            }
        }
        Ok(pieces)
    }

    fn runtime(&self) -> Option<R> {
        self.flats().first().map(|f| f.runtime().clone())
    }

    fn pending(&self) -> Option<&Tensor<R>> {
        self.scale()
    }

    fn scale_by(&mut self, factor: Tensor<R>) -> Result<()> {
        self.multiply_by(factor)
    }

    fn clamp(&mut self, limit: f64) -> Result<()> {
        self.apply_scale()?;
        self.in_place(|memory| update(&CLAMP, &[], &[limit.into()], &mut [memory]))
    }
}

/// Replaces every gradient `g` by `f(g)`.
fn replace<R: Runtime>(gradients: &mut Gradients<R>, f: impl Fn(&Tensor<R>) -> Result<Tensor<R>>) -> Result<()> {
    let new =
        gradients.iter().map(|(leaf, g)| Ok((leaf.clone(), f(g)?))).collect::<Result<Vec<(Arc<Leaf<R>>, _)>>>()?;
    new.into_iter().try_for_each(|(leaf, g)| gradients.set(&leaf, g))
}

impl<R: Runtime> GradientSet<R> for Gradients<R> {
    fn pieces(&self) -> Result<Vec<Tensor<R>>> {
        Ok(self.iter().map(|(_, g)| g.clone()).filter(|g| g.shape().numel() > 0).collect())
    }

    fn runtime(&self) -> Option<R> {
        self.iter().next().map(|(leaf, _)| leaf.runtime().clone())
    }

    fn pending(&self) -> Option<&Tensor<R>> {
        None
    }

    fn scale_by(&mut self, factor: Tensor<R>) -> Result<()> {
        replace(self, |g| g.apply_program(&crate::memory::SCALE, &[&factor], &[]))
    }

    fn clamp(&mut self, limit: f64) -> Result<()> {
        replace(self, |g| g.clamp(-limit, limit))
    }
}
