//! Losses of two classes, of signs, and of counts.

use std::sync::LazyLock;

use numcore::{
    Error, Result, Within,
    ops::{Apply, PointwiseOps, ReduceOps, ViewOps},
    pointwise::{Expr, Program},
};

use super::{Reduction, by, same_shape};

/// Options of [`bce_with_logits_by`] and [`focal`].
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
fn softplus_of_negative(x: Expr<'_>) -> Expr<'_> {
    let negative = x.lt(0.0);
    negative.select(-x, 0.0) + negative.select(x, -x).exp().log1p()
}

/// Binary cross-entropy of logits `x` with weights: `(1 − y) x + (1 + (p − 1) y) ln(1 + e^−x)` for a positive weight `p`.
/// A mean is over all elements, whatever their weights, as in PyTorch.
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
    by(weight.map_or(Ok(losses.clone()), |weight| losses.mul(weight))?, reduction)
}

/// The focal loss of logits (Lin et al. 2017): binary cross-entropy times `(1 − p)^gamma`, where `p` is the probability of
/// the target; times `alpha` for targets of 1 and `1 − alpha` for targets of 0 if there is an `alpha`.
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
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("focal", |[x, y], [gamma, positive, negative]| {
            let p = x.sigmoid();
            let missed = (1.0 - p) * y + p * (1.0 - y);
            let entropy = (1.0 - y) * x + softplus_of_negative(x);
            [entropy * missed.pow(gamma) * (y * positive + (1.0 - y) * negative)]
        })
    });
    let alpha = alpha.into();
    if gamma.is_nan() || gamma < 0.0 {
        return Err(Error::range("focal", "gamma", gamma, "at least 0")).at_caller();
    }
    if let Some(alpha) = alpha.filter(|alpha| !(0.0..=1.0).contains(alpha)) {
        return Err(Error::range("focal", "alpha", alpha, "in 0..=1")).at_caller();
    }
    same_shape("focal", input, target)?;
    let [positive, negative] = alpha.map_or([1.0, 1.0], |alpha| [alpha, 1.0 - alpha]);
    by(input.apply_program(&P, &[target], &[gamma.into(), positive.into(), negative.into()])?, reduction)
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

/// The soft margin loss `ln(1 + e^−yx)` of targets −1 and 1.
#[track_caller]
pub fn soft_margin<T: Apply>(input: &T, target: &T, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> =
        LazyLock::new(|| Program::new("soft_margin", |[x, y], []| [softplus_of_negative(x * y)]));
    same_shape("soft_margin", input, target)?;
    by(input.apply_program(&P, &[target], &[])?, reduction)
}

/// The hinge loss of distances `input`: the distance itself for targets of 1, `max(0, margin − x)` for −1.
#[track_caller]
pub fn hinge_embedding<T: Apply>(input: &T, target: &T, margin: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("hinge_embedding", |[x, y], [margin]| [y.gt(0.0).select(x, (margin - x).max(0.0).cast_like(x))])
    });
    same_shape("hinge_embedding", input, target)?;
    by(input.apply_program(&P, &[target], &[margin.into()])?, reduction)
}

/// The Poisson negative log-likelihood of counts, of logarithms of rates `input`: `e^x − y x`, without the term of the
/// count alone.
#[track_caller]
pub fn poisson_nll<T: Apply>(input: &T, target: &T, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| Program::new("poisson_nll", |[x, y], []| [x.exp() - y * x]));
    same_shape("poisson_nll", input, target)?;
    by(input.apply_program(&P, &[target], &[])?, reduction)
}

/// The Gaussian negative log-likelihood `(ln v + (x − y)² / v) / 2` of expectations `input` and variances `v`, of at
/// least `eps`, which broadcast to the input; without its constant.
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
