//! Losses: functions of tensors and variables alike, with PyTorch's definitions.
//!
//! An elementwise loss is one pointwise program, and its sum or mean the same program reduced: one launch forward, one
//! backward. Input and target must have one shape; nothing is broadcast, because a loss of `[N, 1]` against `[N]` is a
//! mistake.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Scalar, Shape, Tensor,
    fused::NnOps,
    ops::{Apply, IndexOps, PointwiseOps, Reduce, ReduceOps, ViewOps},
    pointwise::{Expr, Program},
};

pub use numcore::fused::{CrossEntropyOptions, Reduction};

macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident($x:ident, $y:ident $(; $number:ident)?) = $loss:expr;)*) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name<T: Apply>(input: &T, target: &T, $($number: f64,)? reduction: Reduction) -> Result<T> {
            static P: LazyLock<Program> = LazyLock::new(|| {
                Program::new(stringify!($name), |[$x, $y], [scale $(, $number)?]| [$loss * scale])
            });
            reduced(&P, input, target, &[$($number.into())?], reduction)
        }
    )*};
}

elementwise! {
    /// The squared error `(x − y)²`.
    mse(x, y) = (x - y).square();
    /// The absolute error `|x − y|`.
    l1(x, y) = (x - y).abs();
    /// The Huber loss: with `d = |x − y|`, `d²/2` up to `delta`, `delta · (d − delta/2)` beyond (Huber 1964).
    huber(x, y; delta) = {
        let d = (x - y).abs();
        d.le(delta).select(d * d * 0.5, (d - delta * 0.5) * delta)
    };
    /// Binary cross-entropy `−(y ln x + (1 − y) ln(1 − x))` of probabilities `x`; logarithms end at −100. Prefer
    /// [`bce_with_logits`], which is exact where a probability would round to 0 or 1.
    bce(x, y) = (y - 1.0) * bounded_log(1.0 - x) - y * bounded_log(x);
    /// Binary cross-entropy of logits: `(1 − y) · x − ln sigmoid(x)`, without overflow.
    bce_with_logits(x, y) = (1.0 - y) * x - x.log_sigmoid();
    /// Kullback–Leibler divergence `y · (ln y − x)` of log-probabilities `x` from probabilities `y`, element by
    /// element; 0 where `y` is 0. The mean over elements is PyTorch's, and no divergence: that is [`kl_div_batchmean`].
    kl_div(x, y) = y.gt(0.0).select(y * (y.gt(0.0).select(y, 1.0).log() - x), y * 0.0);
}

/// The mean over rows of the Kullback–Leibler divergence of log-probabilities `input: [N, ..]` from probabilities
/// `target`.
#[track_caller]
pub fn kl_div_batchmean<T: Apply>(input: &T, target: &T) -> Result<T> {
    let rows = input.spec().shape.first().copied().unwrap_or(1);
    kl_div(input, target, Reduction::Sum)?.mul(1.0 / rows as f64)
}

/// The smooth L1 loss: with `d = |x − y|`, `d²/(2 beta)` up to `beta`, `d − beta/2` beyond (Girshick 2015); [`l1`]
/// where `beta` is 0.
#[track_caller]
pub fn smooth_l1<T: Apply>(input: &T, target: &T, beta: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("smooth_l1", |[x, y], [scale, beta]| {
            let d = (x - y).abs();
            [d.lt(beta).select(d * d * 0.5 / beta, d - beta * 0.5) * scale]
        })
    });
    if beta == 0.0 {
        return l1(input, target, reduction);
    }
    reduced(&P, input, target, &[beta.into()], reduction)
}

/// `ln x`, at least −100. The inner choice keeps the derivative finite where the outer one takes the bound.
fn bounded_log(x: Expr<'_>) -> Expr<'_> {
    let positive = x.gt(0.0);
    positive.select(positive.select(x, 1.0).log().max(-100.0), -100.0)
}

/// A program of input, target and a scale, reduced: the scale of a mean is one over the count.
#[track_caller]
fn reduced<T: Apply>(program: &Program, input: &T, target: &T, numbers: &[Scalar], reduction: Reduction) -> Result<T> {
    let shape = same_shape(program.name(), input, target)?;
    let scale = if reduction == Reduction::Mean { 1.0 / shape.numel() as f64 } else { 1.0 };
    let scalars: Vec<Scalar> = std::iter::once(scale.into()).chain(numbers.iter().copied()).collect();
    if reduction == Reduction::None {
        return input.apply_program(program, &[target], &scalars);
    }
    let sum = Reduce::sum_of(program.clone(), scalars.into(), shape_of_ones(shape)?);
    T::apply1(sum, &[input, target])?.reshape([])
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

/// The cross-entropy of the logits `input · weightᵀ + bias` of `input: [.., C]` with classes `[..]` (`i64`), of which few are in memory at a
/// time: a language model's loss. See [`NnOps::linear_cross_entropy`].
#[track_caller]
pub fn linear_cross_entropy<T: Apply>(input: &T, weight: &T, bias: Option<&T>, target: &T) -> Result<T> {
    input.linear_cross_entropy(weight, bias, target)
}

/// The cross-entropy of a linear layer's outputs with options; see [`NnOps::linear_cross_entropy_with`].
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

/// The cross-entropy with `weight: [C]` of each class, and options; see [`NnOps::cross_entropy_with`].
#[track_caller]
pub fn cross_entropy_with<T: Apply>(
    logits: &T,
    target: &T,
    weight: Option<&T>,
    options: CrossEntropyOptions,
) -> Result<T> {
    logits.cross_entropy_with(target, weight, options)
}

/// Options of [`nll`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
pub struct NllOptions {
    /// The class whose rows do not contribute; −100 by convention.
    pub ignore_index: i64,
    /// How the losses of the rows are reduced.
    pub reduction: Reduction,
}

impl Default for NllOptions {
    fn default() -> Self {
        NllOptions { ignore_index: -100, reduction: Reduction::Mean }
    }
}

/// Negative log-likelihood of classes `[..]` (`i64`) under log-probabilities `[.., C]`, optionally with `weight: [C]`
/// of each class; the mean is over the targets' weights, as in PyTorch.
#[track_caller]
pub fn nll<T: Apply>(input: &T, target: &T, weight: Option<&T>, options: NllOptions) -> Result<T> {
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
        Reduction::Sum => losses.sum(&[], false),
        Reduction::Mean => losses.sum(&[], false)?.div(&weights.sum(&[], false)?),
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
