//! Connectionist temporal classification: labels without an alignment to time steps.

use std::sync::LazyLock;

use numcore::{
    DType, Error, Result, Tensor, Within,
    ops::{Apply, IndexOps, PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::Program,
};

use super::{Reduction, by};

/// Options of [`ctc`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug)]
pub struct CtcOptions {
    /// The class that means no label.
    pub blank: usize,
    /// True if an example whose labels do not fit into its time steps has a loss and a gradient of 0, not an infinite
    /// loss.
    pub zero_infinity: bool,
    /// The reduction of the losses; the mean is of each loss divided by the number of its labels, or by 1.
    pub reduction: Reduction,
}

impl Default for CtcOptions {
    fn default() -> Self {
        CtcOptions { blank: 0, zero_infinity: false, reduction: Reduction::Mean }
    }
}

/// The log of the probability of a state: of the sum of the three from which it is reached, times that of its class.
static STEP: LazyLock<Program> = LazyLock::new(|| {
    Program::new("ctc", |[stay, next, skip, here], [never]| {
        let most = stay.max(next).max(skip);
        let sum = (stay - most).exp() + (next - most).exp() + (skip - most).exp();
        [(most + sum.log() + here).max(never)]
    })
});

/// The log of a probability that counts as 0. No log is less, and sums of two are finite in `f32`.
const NEVER: f64 = -1e30;

/// The negative log-likelihood of label sequences, summed over all alignments (Graves et al. 2006), of
/// log-probabilities `[N, T, C]` over classes.
///
/// The first `steps[n]` time steps of an example count, and its labels are `labels[n]`, none of which is blank. An
/// example whose labels do not fit has an infinite loss. The loss of half precision is `f32`. Time steps come second
/// here, and first in PyTorch's `ctc_loss`.
///
/// ```
/// use nn::loss::{CtcOptions, ctc};
/// use numcore::{Tensor, ops::PointwiseOps};
/// use runtime_cpu::Cpu;
///
/// // One label in two time steps of even probabilities: (1, 1), (0, 1) and (1, 0) of four alignments.
/// let p = Tensor::from_slice(&Cpu::new(), [1, 2, 2], &[0.5f64; 4])?.log()?;
/// let loss = ctc(&p, &[2], &[&[1]], CtcOptions::default())?;
/// assert!((loss.item()? + 0.75f64.ln()).abs() < 1e-12);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// An error if counts of examples differ, an example has more steps than `T`, or a label is blank or no class.
#[doc(alias("ctc_loss", "CTCLoss"))]
#[track_caller]
pub fn ctc<T: Apply>(log_probs: &T, steps: &[usize], labels: &[&[usize]], options: CtcOptions) -> Result<T> {
    check(log_probs, steps, labels, options.blank).at_caller()?;
    let (shape, rt) = (log_probs.spec().shape, log_probs.runtime());
    let log_probs = if log_probs.spec().dtype.is_half() { log_probs.to_dtype(DType::F32)? } else { log_probs.clone() };
    // The states of an example: the start, then its labels with blanks before, between and after them.
    let width = 2 * labels.iter().map(|labels| labels.len()).max().unwrap_or(0) + 2;
    let label = |n: usize, w: usize| labels[n].get((w / 2).checked_sub(1)?).filter(|_| w.is_multiple_of(2)).copied();
    let constant = |holds: &dyn Fn(usize, usize) -> bool| {
        let values: Vec<bool> = (0..shape[0] * width).map(|i| holds(i / width, i % width)).collect();
        Tensor::from_slice(rt, [shape[0], width], &values).map(T::constant)
    };
    // A state is reached from the one two before if that is the start, or a blank between labels that differ.
    let skips = constant(&|n, w| label(n, w).is_some_and(|own| label(n, w - 2) != Some(own)))?;
    let ends = constant(&|n, w| w / 2 == labels[n].len())?;
    let classes: Vec<i64> =
        (0..shape[0] * width).map(|i| label(i / width, i % width).unwrap_or(options.blank) as i64).collect();
    let classes = T::constant(Tensor::from_slice(rt, [shape[0], 1, width], &classes)?);
    let emitted = log_probs.gather(2, &classes.broadcast_to([shape[0], shape[1], width])?)?.maximum(NEVER)?;
    let emitted = emitted.where_cond(&constant(&|_, w| w > 0)?.unsqueeze(1)?, NEVER)?;

    let starts = Tensor::zeros(rt, [shape[0], width], log_probs.spec().dtype).map(T::constant)?;
    let mut log_alpha = starts.where_cond(&constant(&|_, w| w == 0)?, NEVER)?;
    let never = T::constant(Tensor::full(rt, [shape[0], 2], log_probs.spec().dtype, NEVER)?);
    for t in 0..shape[1] {
        let before = cat(&[&never, &log_alpha], 1)?;
        let skip = before.narrow(1, 0, width)?.where_cond(&skips, NEVER)?;
        let others = [&before.narrow(1, 1, width)?, &skip, &emitted.select(1, t)?];
        let next = log_alpha.apply_program(&STEP, &others, &[NEVER.into()])?;
        let counts: Vec<bool> = steps.iter().map(|&count| t < count).collect();
        log_alpha = match counts.iter().all(|&counts| counts) {
            true => next,
            false => next.where_cond(&T::constant(Tensor::from_slice(rt, [shape[0], 1], &counts)?), &log_alpha)?,
        };
    }
    let losses = log_alpha.where_cond(&ends, NEVER)?.logsumexp(&[1])?.neg()?;
    // Not a number is no such loss.
    let never = losses.gt(-NEVER / 2.0)?;
    let losses = losses.masked_fill(&never, if options.zero_infinity { 0.0 } else { f64::INFINITY })?;
    let losses = match options.reduction {
        Reduction::Mean => {
            let mut lengths = labels.iter().map(|labels| labels.len().max(1) as f64);
            let next = || lengths.next().unwrap_or(1.0);
            let lengths = Tensor::from_f64_fn(rt, [shape[0]], losses.spec().dtype, next)?;
            losses.div(&T::constant(lengths))?
        }
        _ => losses,
    };
    by(losses, options.reduction)
}

fn check<T: Apply>(log_probs: &T, steps: &[usize], labels: &[&[usize]], blank: usize) -> Result<()> {
    let shape = log_probs.spec().shape;
    let refuse = |why: String| Err(T::explained(Error::shape("ctc", &[shape], why), &[log_probs]));
    if shape.rank() != 3 || steps.len() != shape[0] || labels.len() != shape[0] {
        let (steps, labels) = (steps.len(), labels.len());
        return refuse(format!(
            "needs [N, T, C], with N counts of steps and N label sequences; got {steps} and {labels}"
        ));
    }
    if let Some(count) = steps.iter().find(|&&count| count > shape[1]) {
        return refuse(format!("has {} time steps, and an example has {count}", shape[1]));
    }
    if blank >= shape[2] {
        return refuse(format!("has no class {blank}, the blank"));
    }
    match labels.iter().copied().flatten().find(|&&label| label == blank || label >= shape[2]) {
        Some(label) if *label == blank => refuse(format!("is given a label {label}, which is the blank")),
        Some(label) => refuse(format!("is given a label {label}, and has {} classes", shape[2])),
        None => Ok(()),
    }
}
