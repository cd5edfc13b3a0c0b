//! Losses of preferences between completions, of the log-probabilities of whole completions.

use std::sync::LazyLock;

use numcore::{
    Error, Result, Within,
    fused::{CrossEntropyOptions, NnOps, Reduction},
    ops::{Apply, PointwiseOps, ViewOps},
    pointwise::{Expr, Program},
};

use super::{by, same_shape};

/// Log-probabilities `[..]` (at least `f32`) of tokens `[..]` (`i64`) under the logits `states · weightᵀ`, for
/// `states: [.., C]` and `weight: [V, C]`. A token of −100 has 0: a prompt's, or padding.
///
/// Few logits are in memory at a time, and they are recomputed for gradients; see
/// [`NnOps::linear_cross_entropy_with`]. Summed over the last axis, they are the log-probabilities of completions that
/// the losses of preferences take.
///
/// ```
/// # use numcore::{Tensor, ops::ReduceOps};
/// # let cpu = runtime_cpu::Cpu::new();
/// let states = Tensor::from_slice(&cpu, [1, 3, 2], &[1f32, 0.0, 0.0, 1.0, 1.0, 1.0])?;
/// let weight = Tensor::from_slice(&cpu, [4, 2], &[0.0f32; 8])?;
/// let tokens = Tensor::from_slice(&cpu, [1, 3], &[-100i64, 2, 3])?;
/// let sums = nn::loss::logprobs(&states, &weight, &tokens)?.sum(&[1])?;
/// assert_eq!(sums.to_vec::<f32>()?, [-2.0 * 4f32.ln()]);
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// Fails if shapes do not fit, or a token is outside of the vocabulary.
#[doc(alias("selective_log_softmax", "gather_log_probs"))]
#[track_caller]
pub fn logprobs<T: Apply>(states: &T, weight: &T, tokens: &T) -> Result<T> {
    let options = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
    states.linear_cross_entropy_with(weight, None, tokens, options)?.neg()
}

/// Options of [`dpo`], with TRL's defaults.
#[derive(Clone, Copy, Debug)]
pub struct DpoOptions {
    /// The factor of log-ratios: the strength of the pull towards the reference.
    pub beta: f64,
    /// The probability that a preference is noted the wrong way round (conservative DPO, Mitchell 2023).
    pub label_smoothing: f64,
    /// The reduction of the losses.
    pub reduction: Reduction,
}

impl Default for DpoOptions {
    fn default() -> Self {
        DpoOptions { beta: 0.1, label_smoothing: 0.0, reduction: Reduction::Mean }
    }
}

/// The difference of the log-ratios of the chosen and the rejected completion.
fn margin<'b>([c, r, c0, r0]: [Expr<'b>; 4]) -> Expr<'b> {
    (c - c0) - (r - r0)
}

/// Direct preference optimization (Rafailov et al. 2023): `−ln σ(β h)` for the margin
/// `h = (ln π(c) − ln π₀(c)) − (ln π(r) − ln π₀(r))` of the chosen and the rejected completion of a prompt.
///
/// `policy` and `reference` are log-probabilities `[N]` of chosen and rejected completions, summed over tokens. With
/// smoothing `ε` the loss is `−(1 − ε) ln σ(β h) − ε ln σ(−β h)`. It is exactly `ln 2` where policy and reference are
/// equal.
///
/// # Errors
/// Fails if shapes differ, `beta` is not positive, or `label_smoothing` is not in [0, 0.5].
#[track_caller]
pub fn dpo<T: Apply>(policy: [&T; 2], reference: [&T; 2], options: DpoOptions) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("dpo", |ins, [beta, right, wrong]| {
            let h = margin(ins) * beta;
            [-(h.log_sigmoid() * right + (-h).log_sigmoid() * wrong)]
        })
    });
    let DpoOptions { beta, label_smoothing, reduction } = options;
    check_pairs("dpo", policy, reference)?;
    check_beta("dpo", beta)?;
    if !(0.0..=0.5).contains(&label_smoothing) {
        return Err(Error::range("dpo", "label_smoothing", label_smoothing, "in 0..=0.5")).at_caller();
    }
    let numbers = [beta.into(), (1.0 - label_smoothing).into(), label_smoothing.into()];
    by(policy[0].apply_program(&P, &[policy[1], reference[0], reference[1]], &numbers)?, reduction)
}

/// Identity preference optimization (Azar et al. 2023): `(h − 1/(2β))²` for the margin `h` of [`dpo`].
///
/// `policy` and `reference` are log-probabilities `[N]` of chosen and rejected completions; TRL takes means over
/// tokens.
///
/// # Errors
/// Fails if shapes differ, or `beta` is not positive.
#[track_caller]
pub fn ipo<T: Apply>(policy: [&T; 2], reference: [&T; 2], beta: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> =
        LazyLock::new(|| Program::new("ipo", |ins, [target]| [(margin(ins) - target).square()]));
    check_pairs("ipo", policy, reference)?;
    check_beta("ipo", beta)?;
    let target = 0.5 / beta;
    by(policy[0].apply_program(&P, &[policy[1], reference[0], reference[1]], &[target.into()])?, reduction)
}

/// Options of [`kto`], with TRL's defaults.
#[derive(Clone, Copy, Debug)]
pub struct KtoOptions {
    /// The factor of log-ratios.
    pub beta: f64,
    /// The weight of desirable completions.
    pub desirable: f64,
    /// The weight of undesirable completions.
    pub undesirable: f64,
    /// The reduction of the losses.
    pub reduction: Reduction,
}

impl Default for KtoOptions {
    fn default() -> Self {
        KtoOptions { beta: 0.1, desirable: 1.0, undesirable: 1.0, reduction: Reduction::Mean }
    }
}

/// Kahneman–Tversky optimization (Ethayarajh et al. 2024) of single completions: `λ (1 − σ(β (h − z)))` for desirable
/// ones, and `λ (1 − σ(β (z − h)))` for others, with the log-ratio `h = ln π − ln π₀`.
///
/// `policy` and `reference` are log-probabilities `[N]`, summed over tokens. `desirable: [N]` (`bool`) is true for
/// completions to be preferred. The point `z = max(0, kl)` has no gradient; `kl`, of one element, estimates the
/// divergence of the policy from the reference, over all ranks.
///
/// # Errors
/// Fails if shapes differ, or `beta` is not positive.
#[track_caller]
pub fn kto<T: Apply>(policy: &T, reference: &T, desirable: &T, kl: &T, options: KtoOptions) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("kto", |[x, x0, y, kl], [beta, desirable, undesirable]| {
            let h = (x - x0 - kl.max(0.0)) * beta;
            [y.gt(0.0).select((-h).sigmoid() * desirable, h.sigmoid() * undesirable)]
        })
    });
    let KtoOptions { beta, desirable: positive, undesirable: negative, reduction } = options;
    same_shape("kto", policy, reference)?;
    same_shape("kto", policy, desirable)?;
    check_beta("kto", beta)?;
    let shape = kl.spec().shape;
    if shape.numel() != 1 {
        return Err(T::explained(Error::shape("kto", &[shape], "the divergence is one element"), &[kl]));
    }
    let kinds = desirable.to_dtype(policy.spec().dtype)?;
    let numbers = [beta.into(), positive.into(), negative.into()];
    by(policy.apply_program(&P, &[reference, &kinds, &kl.detach().reshape([1])?], &numbers)?, reduction)
}

/// Odds ratio preference optimization (Hong et al. 2024): `−ln p(c) − β ln σ(ln odds(c) − ln odds(r))`, with
/// `odds(x) = p(x) / (1 − p(x))`. It needs no reference.
///
/// `policy` is log-probabilities `[N]` of chosen and rejected completions, means over tokens; all are negative.
///
/// # Errors
/// Fails if shapes differ, or `beta` is not positive.
#[track_caller]
pub fn orpo<T: Apply>(policy: [&T; 2], beta: f64, reduction: Reduction) -> Result<T> {
    static P: LazyLock<Program> = LazyLock::new(|| {
        Program::new("orpo", |[c, r], [beta]| {
            // A probability that rounds to 1 has finite odds.
            let [c_odds, r_odds] = [c, r].map(|x| x.min(-1e-12)).map(|x| x - (-x.expm1()).log());
            [-c - (c_odds - r_odds).log_sigmoid() * beta]
        })
    });
    same_shape("orpo", policy[0], policy[1])?;
    check_beta("orpo", beta)?;
    by(policy[0].apply_program(&P, &[policy[1]], &[beta.into()])?, reduction)
}

#[track_caller]
fn check_pairs<T: Apply>(op: &'static str, policy: [&T; 2], reference: [&T; 2]) -> Result<()> {
    for other in [policy[1], reference[0], reference[1]] {
        same_shape(op, policy[0], other)?;
    }
    Ok(())
}

#[track_caller]
fn check_beta(op: &'static str, beta: f64) -> Result<()> {
    if beta.is_nan() || beta <= 0.0 {
        return Err(Error::range(op, "beta", beta, "positive")).at_caller();
    }
    Ok(())
}
