//! Losses of two classes, of masks, and of Gaussian variables.

use std::sync::LazyLock;

use numcore::{
    Error, Result, Within,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
    pointwise::{Expr, Program, Widened},
};

use super::{Reduction, by, reduced, same_shape};

/// Options of [`bce_with_logits_by`].
#[derive(Debug)]
pub struct BinaryOptions<'a, T> {
    /// The weight of each loss, which broadcasts to the input.
    pub weight: Option<&'a T>,
    /// The factor of the losses of targets of 1, which broadcasts to the input: above 1 for a rare class.
    pub pos_weight: Option<&'a T>,
    /// The reduction of the losses.
    pub reduction: Reduction,
}

impl<T> Default for BinaryOptions<'_, T> {
    fn default() -> Self {
        BinaryOptions { weight: None, pos_weight: None, reduction: Reduction::Mean }
    }
}

/// The binary cross-entropy `ln(1 + e^−x)` of the logit of a class, without overflow.
pub(super) fn softplus_of_negative(x: Expr<'_>) -> Expr<'_> {
    let negative = x.lt(0.0);
    negative.select(-x, 0.0) + negative.select(x, -x).exp().log1p()
}

/// Binary cross-entropy of logits with weights. It is `(1 − y) x + (1 + (p − 1) y) ln(1 + e^−x)` for a positive weight
/// `p`. A mean is over all elements, whatever their weights, as in PyTorch.
#[track_caller]
pub fn bce_with_logits_by<T: Apply>(input: &T, target: &T, options: BinaryOptions<'_, T>) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("bce_with_logits", |[x, y, p], []| {
            [(1.0 - y) * x + ((p - 1.0) * y + 1.0) * softplus_of_negative(x)]
        })
    });
    same_shape("bce_with_logits", input, target)?;
    let BinaryOptions { weight, pos_weight, reduction } = options;
    let losses = match pos_weight {
        Some(p) => input.apply_program(&P, &[target, p], &[])?,
        None => super::bce_with_logits(input, target, Reduction::None)?,
    };
    by(if let Some(weight) = weight { losses.mul(weight)? } else { losses }, reduction)
}

/// The focal loss of logits (Lin et al. 2017): binary cross-entropy times `(1 − p)^gamma`, with the target's
/// probability `p`. An `alpha` multiplies losses of targets of 1, and `1 − alpha` those of targets of 0.
///
/// # Errors
/// An error for a negative `gamma`, or an `alpha` outside of [0, 1].
#[doc(alias = "sigmoid_focal_loss")]
#[track_caller]
pub fn focal<T: Apply>(
    input: &T,
    target: &T,
    gamma: f64,
    alpha: impl Into<Option<f64>>,
    reduction: Reduction,
) -> Result<T> {
    static P: LazyLock<Widened> = LazyLock::new(|| {
        Widened::new(|wide| {
            Program::new("focal", |[x, y], [gamma, positive, negative]| {
                let (x, y) = (wide.of(x), wide.of(y));
                let p = x.sigmoid();
                let missed = (1.0 - p) * y + p * (1.0 - y);
                let entropy = (1.0 - y) * x + softplus_of_negative(x);
                [entropy * missed.pow(gamma) * (y * positive + (1.0 - y) * negative)]
            })
        })
    });
    let alpha = alpha.into();
    if gamma.is_nan() || gamma < 0.0 {
        return Err(Error::range("focal", "gamma", gamma, "at least 0")).at_caller();
    }
    if let Some(alpha) = alpha.filter(|alpha| !(0.0..=1.0).contains(alpha)) {
        return Err(Error::range("focal", "alpha", alpha, "in 0..=1")).at_caller();
    }
    let [positive, negative] = alpha.map_or([1.0, 1.0], |alpha| [alpha, 1.0 - alpha]);
    reduced(&P, input, target, &[gamma.into(), positive.into(), negative.into()], reduction)
}

/// The Dice loss of probabilities `input: [N, ..]` (Milletari et al. 2016): the mean over `N` of
/// `1 − (2 Σ x y + smooth) / (Σ x + Σ y + smooth)`.
#[track_caller]
pub fn dice<T: Apply>(input: &T, target: &T, smooth: f64) -> Result<T> {
    let shape = same_shape("dice", input, target)?;
    let Some(&examples) = shape.first() else {
        return Err(Error::shape("dice", &[shape], "needs an axis of examples")).at_caller();
    };
    let rows = |x: &T| x.reshape([examples, shape.numel() / examples.max(1)])?.sum(&[1]);
    let both = rows(&input.mul(target)?)?.mul(2.0)?.add(smooth)?;
    let all = rows(input)?.add(&rows(target)?)?.add(smooth)?;
    both.div(&all)?.neg()?.add(1.0)?.mean_all()
}

/// The Gaussian negative log-likelihood `(ln v + (x − y)² / v) / 2` of expectations `input`, without its constant.
/// Variances `v` broadcast to the input, and count as `eps` at least.
#[track_caller]
pub fn gaussian_nll<T: Apply>(input: &T, target: &T, variance: &T, eps: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("gaussian_nll", |[x, y, v], [eps]| {
            let v = v.lt(eps).select(eps.cast_like(v), v);
            [(v.log() + (x - y).square() / v) * 0.5]
        })
    });
    same_shape("gaussian_nll", input, target)?;
    by(input.apply_program(&P, &[target, variance], &[eps.into()])?, reduction)
}
