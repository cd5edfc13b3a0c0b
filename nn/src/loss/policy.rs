//! Losses of reinforcement: clipped policy gradients of sampled tokens.

use std::sync::LazyLock;

use numcore::{
    Error, Result, Within,
    ops::{Apply, PointwiseOps, ReduceOps},
    pointwise::{Expr, Program},
};

use super::same_shape;

/// The average of the losses of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenMean {
    /// The mean over all tokens of the batch (DAPO, Yu et al. 2025).
    Tokens,
    /// The mean over sequences of the mean over their tokens (GRPO, Shao et al. 2024).
    Sequences,
    /// The sum over `N · length`, for `N` sequences: no sequence weighs less for being long (Dr. GRPO, Liu et al.
    /// 2025).
    Length(usize),
}

/// Options of [`ppo`] and [`grpo`].
#[derive(Clone, Copy, Debug)]
pub struct PolicyOptions {
    /// The bounds of the importance ratio, `1 − clip[0]` and `1 + clip[1]`.
    pub clip: [f64; 2],
    /// The factor of the divergence from the reference; 0 in [`ppo`], which has none.
    pub kl: f64,
    /// The average of the losses.
    pub mean: TokenMean,
}

impl Default for PolicyOptions {
    fn default() -> Self {
        PolicyOptions { clip: [0.2; 2], kl: 0.0, mean: TokenMean::Sequences }
    }
}

/// The negative clipped objective of a token.
fn clipped<'b>(new: Expr<'b>, old: Expr<'b>, advantage: Expr<'b>, low: Expr<'b>, high: Expr<'b>) -> Expr<'b> {
    let ratio = (new - old).exp();
    -(ratio * advantage).min(ratio.max(low).min(high) * advantage)
}

/// The clipped policy gradient of proximal policy optimization (Schulman et al. 2017): `−min(ρ A, clip(ρ) A)` of each
/// token, with the importance ratio `ρ = exp(new − old)`.
///
/// `new` and `old` are log-probabilities `[N, T]` of sampled tokens, by the trained policy and by the one that sampled
/// them. `advantages` are `[N, T]`, or `[N, 1]`. `mask: [N, T]` is true for tokens that count. `new` alone has a
/// gradient.
///
/// # Errors
/// Fails if shapes do not fit, a bound is not in [0, 1] or negative, or `kl` is not 0.
#[track_caller]
pub fn ppo<T: Apply>(new: &T, old: &T, advantages: &T, mask: &T, options: PolicyOptions) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("ppo", |[new, old, a, m], [low, high]| {
            [m.gt(0.0).select(clipped(new, old, a, low.cast_like(new), high.cast_like(new)), 0.0)]
        })
    });
    if options.kl != 0.0 {
        return Err(Error::range("ppo", "kl", options.kl, "0: it has no reference, `grpo` has")).at_caller();
    }
    let mask = check("ppo", new, [old].as_slice(), advantages, mask, &options)?;
    let [low, high] = bounds(&options);
    let [old, advantages] = [old, advantages].map(Apply::detach);
    averaged(&new.apply_program(&P, &[&old, &advantages, &mask], &[low.into(), high.into()])?, &mask, options.mean)
}

/// Group relative policy optimization (Shao et al. 2024): the clipped policy gradient of [`ppo`] plus
/// `kl · (exp(d) − d − 1)` of each token, with `d = ln π₀ − ln π` (Schulman 2020).
///
/// Operands are those of [`ppo`]; `reference` is log-probabilities `[N, T]` by the reference. Advantages are of whole
/// completions, `[N, 1]`: see [`group_advantages`]. The divergence is exactly 0 where both policies are equal.
///
/// # Errors
/// Fails if shapes do not fit, or an option is out of range.
#[track_caller]
pub fn grpo<T: Apply>(new: &T, old: &T, reference: &T, advantages: &T, mask: &T, options: PolicyOptions) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("grpo", |[new, old, a, m, reference], [low, high, kl]| {
            let d = reference - new;
            let loss = clipped(new, old, a, low.cast_like(new), high.cast_like(new)) + (d.expm1() - d) * kl;
            [m.gt(0.0).select(loss, 0.0)]
        })
    });
    let mask = check("grpo", new, &[old, reference], advantages, mask, &options)?;
    let [low, high] = bounds(&options);
    let numbers = [low.into(), high.into(), options.kl.into()];
    let [old, advantages, reference] = [old, advantages, reference].map(Apply::detach);
    averaged(&new.apply_program(&P, &[&old, &advantages, &mask, &reference], &numbers)?, &mask, options.mean)
}

/// Advantages within groups of completions of one prompt: a reward less its group's mean, over the group's standard
/// deviation plus `1e-4` if `scaled`.
///
/// Rewards are those of consecutive groups of `group` completions. A group that lies on several ranks needs the rewards
/// of all its ranks. The deviation is that of a sample, with divisor `group − 1` (as in TRL).
///
/// ```
/// let advantages = nn::loss::group_advantages(&[1.0, 0.0, 3.0, 3.0], 2, false)?;
/// assert_eq!(advantages, [0.5, -0.5, 0.0, 0.0]);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// Fails if rewards are not whole groups of at least two, or one is not finite.
#[track_caller]
pub fn group_advantages(rewards: &[f64], group: usize, scaled: bool) -> Result<Vec<f64>> {
    if group < 2 || !rewards.len().is_multiple_of(group) {
        let allowed = format!("at least 2, and a divisor of the {} rewards", rewards.len());
        return Err(Error::range("group_advantages", "group", group, allowed)).at_caller();
    }
    if let Some(&bad) = rewards.iter().find(|reward| !reward.is_finite()) {
        return Err(Error::range("group_advantages", "reward", bad, "finite")).at_caller();
    }
    let of_group = |rewards: &[f64]| {
        let n = rewards.len() as f64;
        let mean = rewards.iter().sum::<f64>() / n;
        let variance = rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - 1.0);
        let scale = if scaled { variance.sqrt() + 1e-4 } else { 1.0 };
        rewards.iter().map(|r| (r - mean) / scale).collect::<Vec<_>>()
    };
    Ok(rewards.chunks_exact(group).flat_map(of_group).collect())
}

/// Checks shapes and options; returns the mask in the type of the log-probabilities.
#[track_caller]
fn check<T: Apply>(
    op: &'static str,
    new: &T,
    others: &[&T],
    advantages: &T,
    mask: &T,
    options: &PolicyOptions,
) -> Result<T> {
    let shape = new.spec().shape;
    for other in others.iter().copied().chain([mask]) {
        same_shape(op, new, other)?;
    }
    let of = advantages.spec().shape;
    let fits = shape.rank() == 2 && of.rank() == 2 && of[0] == shape[0] && (of[1] == shape[1] || of[1] == 1);
    if !fits {
        let why = "needs log-probabilities [N, T], and advantages [N, T] or [N, 1]";
        return Err(T::explained(Error::shape(op, &[shape, of], why), &[new, advantages]));
    }
    let PolicyOptions { clip: [low, high], kl, mean } = *options;
    if !(0.0..=1.0).contains(&low) {
        return Err(Error::range(op, "clip[0]", low, "in 0..=1")).at_caller();
    }
    if high.is_nan() || high < 0.0 {
        return Err(Error::range(op, "clip[1]", high, "at least 0")).at_caller();
    }
    if kl.is_nan() || kl < 0.0 {
        return Err(Error::range(op, "kl", kl, "at least 0")).at_caller();
    }
    if mean == TokenMean::Length(0) {
        return Err(Error::range(op, "length", 0usize, "at least 1")).at_caller();
    }
    mask.to_dtype(new.spec().dtype)
}

fn bounds(options: &PolicyOptions) -> [f64; 2] {
    [1.0 - options.clip[0], 1.0 + options.clip[1]]
}

/// Averages losses `[N, T]`, which are 0 where the mask is.
fn averaged<T: Apply>(losses: &T, mask: &T, mean: TokenMean) -> Result<T> {
    let rows = losses.spec().shape[0];
    match mean {
        TokenMean::Tokens => losses.sum_all()?.div(&mask.sum_all()?.maximum(1.0)?),
        TokenMean::Sequences => losses.sum(&[1])?.div(&mask.sum(&[1])?.maximum(1.0)?)?.mean_all(),
        TokenMean::Length(length) => losses.sum_all()?.div((rows * length) as f64),
    }
}
