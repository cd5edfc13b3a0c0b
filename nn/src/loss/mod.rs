//! Losses: functions of tensors and variables alike, with PyTorch's definitions.
//!
//! An elementwise loss is one pointwise program, and its sum or mean the same program reduced: one launch forward, one
//! backward. Input and target must have one shape; nothing is broadcast, because a loss of `[N, 1]` against `[N]` is a
//! mistake.

mod binary;
mod ctc;
mod pairs;
mod policy;
mod preference;

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Scalar, Shape, Tensor, Within,
    fused::NnOps,
    ops::{Apply, IndexOps, PointwiseOps, Reduce, ReduceOps, ViewOps},
    pointwise::{Expr, Program, Widened},
};

use binary::softplus_of_negative;
pub use binary::{BinaryOptions, bce_with_logits_by, dice, focal, gaussian_nll};
pub use ctc::{CtcOptions, ctc};
pub use numcore::fused::{CrossEntropyOptions, Reduction};
pub use pairs::{TripletOptions, cosine_embedding, info_nce, margin_ranking, triplet};
pub use policy::{PolicyOptions, TokenMean, group_advantages, grpo, ppo};
pub use preference::{DpoOptions, KtoOptions, dpo, ipo, kto, logprobs, orpo};

macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident($x:ident, $y:ident $(; $number:ident)?) = $loss:expr;)*) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name<T: Apply>(input: &T, target: &T, $($number: f64,)? reduction: Reduction) -> Result<T> {
            static P: LazyLock<Widened> = LazyLock::new(|| Widened::new(|wide| {
                Program::new(stringify!($name), |[x, y], [$($number)?]| {
                    let ($x, $y) = (wide.of(x), wide.of(y));
                    [$loss]
                })
            }));
            reduced(&P, input, target, &[$($number.into())?], reduction)
        }
    )*};
}

elementwise! {
    /// The squared error `(x − y)²`.
    mse(x, y) = (x - y).square();
    /// The absolute error `|x − y|`.
    l1(x, y) = (x - y).abs();
    /// Binary cross-entropy `−(y ln x + (1 − y) ln(1 − x))` of probabilities `x`; logarithms end at −100. Prefer
    /// [`bce_with_logits`], which is exact where a probability would round to 0 or 1. Outside of [0, 1] it is NaN.
    bce(x, y) = (y - 1.0) * bounded_log(1.0 - x) - y * bounded_log(x);
    /// Binary cross-entropy of logits: `(1 − y) · x − ln sigmoid(x)`, without overflow, and with all digits of small
    /// losses and slopes.
    bce_with_logits(x, y) = {
        let negative = x.lt(0.0);
        negative.select(-(y * x), (1.0 - y) * x) + negative.select(x, -x).exp().log1p()
    };
    /// Kullback–Leibler divergence `y · (ln y − x)` of log-probabilities `x` from probabilities `y`, element by
    /// element; 0 where `y` is 0. The mean over elements is PyTorch's, and no divergence: that is [`kl_div_batchmean`].
    kl_div(x, y) = y.gt(0.0).select(y * (y.gt(0.0).select(y, 1.0).log() - x), y * 0.0);
    /// The soft margin loss `ln(1 + e^−yx)` of targets −1 and 1.
    soft_margin(x, y) = softplus_of_negative(x * y);
    /// The hinge loss of distances `x`: the distance itself for targets of 1, `max(0, margin − x)` for −1.
    hinge_embedding(x, y; margin) = y.gt(0.0).select(x, (margin - x).max(0.0));
    /// The Poisson negative log-likelihood `e^x − y x` of logarithms of rates `x` and counts `y`. The term of the count
    /// alone is left out.
    poisson_nll(x, y) = x.exp() - y * x;
}

/// The mean over rows of the Kullback–Leibler divergence of log-probabilities `input: [N, ..]` from probabilities
/// `target`.
#[track_caller]
pub fn kl_div_batchmean<T: Apply>(input: &T, target: &T) -> Result<T> {
    let rows = input.spec().shape.first().copied().unwrap_or(1);
    kl_div(input, target, Reduction::Sum)?.div(rows as f64)
}

/// The Huber loss: with `d = |x − y|`, `d²/2` up to `delta`, `delta · (d − delta/2)` beyond (Huber 1964). A `delta`
/// that is not positive is an error.
#[track_caller]
pub fn huber<T: Apply>(input: &T, target: &T, delta: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Widened> = LazyLock::new(|| {
        Widened::new(|wide| {
            Program::new("huber", |[x, y], [delta]| {
                let d = (wide.of(x) - wide.of(y)).abs();
                [d.le(delta).select(d * d * 0.5, (d - delta * 0.5) * delta)]
            })
        })
    });
    if delta.is_nan() || delta <= 0.0 {
        return Err(Error::range("huber", "delta", delta, "positive")).at_caller();
    }
    reduced(&P, input, target, &[delta.into()], reduction)
}

/// The smooth L1 loss: with `d = |x − y|`, `d²/(2 beta)` up to `beta`, `d − beta/2` beyond (Girshick 2015); [`l1`]
/// where `beta` is 0. A negative `beta` is an error.
#[track_caller]
pub fn smooth_l1<T: Apply>(input: &T, target: &T, beta: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Widened> = LazyLock::new(|| {
        Widened::new(|wide| {
            Program::new("smooth_l1", |[x, y], [beta]| {
                let d = (wide.of(x) - wide.of(y)).abs();
                [d.lt(beta).select(d * (d / beta) * 0.5, d - beta * 0.5)]
            })
        })
    });
    if beta.is_nan() || beta < 0.0 {
        return Err(Error::range("smooth_l1", "beta", beta, "at least 0")).at_caller();
    }
    if beta == 0.0 {
        return l1(input, target, reduction);
    }
    reduced(&P, input, target, &[beta.into()], reduction)
}

/// `ln x`, at least −100; NaN below 0. The inner choice keeps the derivative finite where the outer one takes the
/// bound.
fn bounded_log(x: Expr<'_>) -> Expr<'_> {
    let zero = x.eq(0.0);
    zero.select(-100.0, zero.select(1.0, x).log().max(-100.0))
}

/// A program of input and target, reduced.
#[track_caller]
fn reduced<T: Apply>(program: &Widened, input: &T, target: &T, numbers: &[Scalar], reduction: Reduction) -> Result<T> {
    let plain = program.of(DType::F32);
    let shape = same_shape(plain.name(), input, target)?;
    let to = shape_of_ones(shape)?;
    let loss = match reduction {
        Reduction::None => return input.apply_program(plain, &[target], numbers),
        Reduction::Sum => T::apply1(Reduce::sum_of(plain.clone(), numbers.into(), to), &[input, target])?,
        Reduction::Mean => {
            let mean = Reduce::mean_of(program, input.spec().dtype, numbers.into(), to, shape.numel());
            T::apply1(mean, &[input, target])?
        }
    };
    loss.reshape([])
}

/// Losses of elements or rows, reduced.
#[track_caller]
fn by<T: Apply>(losses: T, reduction: Reduction) -> Result<T> {
    match reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => losses.sum_all(),
        Reduction::Mean => losses.mean_all(),
    }
}

fn shape_of_ones(shape: Shape) -> Result<Shape> {
    Shape::new(&vec![1; shape.rank()])
}

#[track_caller]
fn same_shape<T: Apply>(op: &'static str, input: &T, target: &T) -> Result<Shape> {
    let (x, y) = (input.spec().shape, target.spec().shape);
    if x != y {
        let why = "input and target must have one shape; reshape or broadcast one of them";
        return Err(T::explained(Error::shape(op, &[x, y], why), &[input, target]));
    }
    Ok(x)
}

/// The cross-entropy of logits `[.., C]` with classes `[..]` (`i64`), averaged over rows that are not ignored; see
/// [`NnOps::cross_entropy`].
#[track_caller]
pub fn cross_entropy<T: Apply>(logits: &T, target: &T) -> Result<T> {
    logits.cross_entropy(target)
}

/// The cross-entropy of the logits `input · weightᵀ` of `input: [.., C]` with classes `[..]` (`i64`): a language
/// model's loss. Few logits are in memory at a time; see [`NnOps::linear_cross_entropy`].
#[track_caller]
pub fn linear_cross_entropy<T: Apply>(input: &T, weight: &T, target: &T) -> Result<T> {
    input.linear_cross_entropy(weight, target)
}

/// The cross-entropy of the logits `input · weightᵀ + bias`, with options; see [`NnOps::linear_cross_entropy_with`].
#[track_caller]
pub fn linear_cross_entropy_with<T: Apply>(
    input: &T,
    weight: &T,
    bias: Option<&T>,
    target: &T,
    options: CrossEntropyOptions,
) -> Result<T> {
    input.linear_cross_entropy_with(weight, bias, target, options)
}

/// The cross-entropy with options; see [`NnOps::cross_entropy_with`].
#[track_caller]
pub fn cross_entropy_with<T: Apply>(logits: &T, target: &T, options: CrossEntropyOptions) -> Result<T> {
    logits.cross_entropy_with(target, options)
}

/// The cross-entropy with `weight: [C]` of each class, and options; see [`NnOps::weighted_cross_entropy`].
#[track_caller]
pub fn weighted_cross_entropy<T: Apply>(logits: &T, target: &T, weight: &T, options: CrossEntropyOptions) -> Result<T> {
    logits.weighted_cross_entropy(target, weight, options)
}

/// The cross-entropy of logits `[.., C]` with the probabilities of their classes, `target: [.., C]`, which mixed images
/// have, and distillation: `−Σ y ln softmax(x)` of each row.
///
/// `smoothing` of the target is spread evenly over the classes. Without it, weights of classes are factors of the
/// target. The mean is over rows, as in PyTorch, and the loss of half-precision logits is `f32`.
///
/// # Errors
/// An error if the shapes differ, or `smoothing` is not in [0, 1].
#[track_caller]
pub fn soft_cross_entropy<T: Apply>(logits: &T, target: &T, smoothing: f64, reduction: Reduction) -> Result<T> {
    let shape = same_shape("soft_cross_entropy", logits, target)?;
    if !(0.0..=1.0).contains(&smoothing) {
        return Err(Error::range("soft_cross_entropy", "smoothing", smoothing, "from 0 to 1")).at_caller();
    }
    if shape.rank() == 0 || shape[shape.rank() - 1] == 0 {
        return Err(Error::shape("soft_cross_entropy", &[shape], "the last axis has the classes")).at_caller();
    }
    let [logits, target] = [logits, target].map(|x| x.to_dtype(x.spec().dtype.compute()));
    let (logits, target) = (logits?, target?);
    let even = smoothing / shape[shape.rank() - 1] as f64;
    let target = if smoothing > 0.0 { target.mul(1.0 - smoothing)?.add(even)? } else { target };
    let rows = logits.log_softmax(-1)?.mul(&target)?.sum(&[-1])?.neg()?;
    match reduction {
        Reduction::None => Ok(rows),
        Reduction::Sum => rows.sum_all(),
        Reduction::Mean => rows.mean_all(),
    }
}

/// Options of [`nll`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
pub struct NllOptions {
    /// The class whose rows do not contribute; −100 by convention.
    pub ignore_index: i64,
    /// The reduction of the losses of the rows.
    pub reduction: Reduction,
}

impl Default for NllOptions {
    fn default() -> Self {
        NllOptions { ignore_index: -100, reduction: Reduction::Mean }
    }
}

/// Negative log-likelihood of classes `[..]` (`i64`) under log-probabilities `[.., C]`.
#[track_caller]
pub fn nll<T: Apply>(input: &T, target: &T, options: NllOptions) -> Result<T> {
    nll_by_class(input, target, None, options)
}

/// Negative log-likelihood with `weight: [C]` of each class; see [`nll`]. The mean is over the targets' weights, as in
/// PyTorch.
#[track_caller]
pub fn weighted_nll<T: Apply>(input: &T, target: &T, weight: &T, options: NllOptions) -> Result<T> {
    nll_by_class(input, target, Some(weight), options)
}

#[track_caller]
fn nll_by_class<T: Apply>(input: &T, target: &T, weight: Option<&T>, options: NllOptions) -> Result<T> {
    let rows = FlatRows::of("nll", input, target)?;
    let counts = rows.target.ne(options.ignore_index as f64)?;
    let zero = T::constant(Tensor::zeros(input.runtime(), [1], DType::I64)?);
    let class = rows.target.where_cond(&counts, &zero)?;
    let of_class = match weight {
        Some(w) => w.index_select(0, &class)?,
        None => T::constant(Tensor::ones(input.runtime(), class.spec().shape, input.spec().dtype)?),
    };
    let weights = of_class.where_cond(&counts, 0.0)?;
    // Where the row does not count its value is not read either: 0 · −∞ would be NaN.
    let picked = rows.input.gather(-1, &class.unsqueeze(-1)?)?.squeeze(-1)?.where_cond(&counts, 0.0)?;
    let losses = picked.mul(&weights)?.neg()?;
    match options.reduction {
        Reduction::None => rows.restore(losses, Reduction::None),
        Reduction::Sum => losses.sum_all(),
        Reduction::Mean => losses.sum_all()?.div(&weights.sum_all()?),
    }
}

/// Input `[.., C]` and target `[..]` as `[N, C]` and `[N]`.
struct FlatRows<T> {
    input: T,
    target: T,
    lead: Shape,
}

impl<T: Apply> FlatRows<T> {
    #[track_caller]
    fn of(op: &'static str, input: &T, target: &T) -> Result<Self> {
        let (x, y) = (input.spec().shape, target.spec().shape);
        let Some((&classes, lead)) = x.split_last().filter(|(_, lead)| **lead == y[..]) else {
            let why = "needs [.., C] and classes [..] with the same leading axes";
            return Err(T::explained(Error::shape(op, &[x, y], why), &[input, target]));
        };
        let n: usize = lead.iter().product();
        Ok(FlatRows { input: input.reshape([n, classes])?, target: target.reshape([n])?, lead: y })
    }

    /// Losses that were not reduced, in the target's shape.
    fn restore(&self, loss: T, reduction: Reduction) -> Result<T> {
        if reduction == Reduction::None { loss.reshape(self.lead) } else { Ok(loss) }
    }
}
