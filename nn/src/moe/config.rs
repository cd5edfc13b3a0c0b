//! The configuration of a mixture of experts.

use numcore::{Error, Result};

use super::{Capacity, RouterScores};

/// The sizes of a [`MixtureOfExperts`](super::MixtureOfExperts), and how it routes.
///
/// ```
/// use nn::moe::{MoeConfig, RouterScores};
/// // As in DeepSeek-V3, but small.
/// let config = MoeConfig {
///     scores: RouterScores::Sigmoid,
///     weight_scale: 2.5,
///     balance_bias: true,
///     shared_hidden: 32,
///     ..MoeConfig::new(16, 32, 8, 2)
/// };
/// assert_eq!((config.experts, config.top_k), (8, 2));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// The channels of a token, `C`.
    pub width: usize,
    /// The hidden channels of an expert, `F`.
    pub hidden: usize,
    /// The number of experts, `E`.
    pub experts: usize,
    /// The number of experts per token, `k`.
    pub top_k: usize,
    /// The hidden channels of the shared expert, which every token uses; 0, the default, for none.
    pub shared_hidden: usize,
    /// True if the output of the shared expert is weighed by the logistic function of a projection of the token; false
    /// by default.
    pub shared_gate: bool,
    /// The function from router logits to scores; softmax by default.
    pub scores: RouterScores,
    /// True, the default, if the weights of a token's experts are divided by their sum.
    pub normalize_weights: bool,
    /// The factor on all weights; 1 by default.
    pub weight_scale: f64,
    /// The limit of tokens per expert; none by default.
    pub capacity: Option<Capacity>,
    /// True if experts are picked by score plus a bias that
    /// [`update_balance_bias`](super::MixtureOfExperts::update_balance_bias) moves; false by default.
    pub balance_bias: bool,
    /// The groups of experts, of which a token uses some; none by default.
    pub groups: Option<RouterGroups>,
    /// The form of experts in GPT-OSS; `None`, the default, for SwiGLU without biases.
    pub clamped: Option<ClampedSwiGlu>,
}

/// Groups of consecutive experts, as in DeepSeek-V3. A group's score is the sum of its two best experts' for the
/// choice. Experts of groups that are not among the best have score 0 there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// The number of groups, which divides the number of experts.
    pub count: usize,
    /// The number of groups whose experts keep their scores.
    pub kept: usize,
}

/// The form of experts in GPT-OSS: `(clamp(up) + 1) · gate · σ(α · gate)` of a gate of at most the limit. Experts and
/// router have biases. Weights are `[E, C, 2F]` and `[E, F, C]`, and channels of gate and of up alternate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedSwiGlu {
    /// The largest value of the gate, and the largest magnitude of up; 7 in GPT-OSS.
    pub limit: f64,
    /// The factor `α` within the logistic function; 1.702 in GPT-OSS.
    pub alpha: f64,
}

impl MoeConfig {
    /// `experts` networks of `hidden` channels, of which a token of `width` channels uses `top_k`; softmax scores, no
    /// token dropped.
    pub fn new(width: usize, hidden: usize, experts: usize, top_k: usize) -> Self {
        MoeConfig {
            width,
            hidden,
            experts,
            top_k,
            shared_hidden: 0,
            shared_gate: false,
            scores: RouterScores::Softmax,
            normalize_weights: true,
            weight_scale: 1.0,
            capacity: None,
            balance_bias: false,
            groups: None,
            clamped: None,
        }
    }

    /// An error unless a layer can be made of this.
    #[track_caller]
    pub fn check(&self) -> Result<()> {
        let MoeConfig { width, hidden, experts, top_k, .. } = *self;
        let wrong = |field, why: String| Err(Error::config("MoeConfig", field, why));
        if width == 0 || hidden == 0 {
            return wrong("width", format!("{width} channels and {hidden} hidden ones: both must be at least 1"));
        }
        if top_k == 0 || top_k > experts {
            return wrong("top_k", format!("a token cannot use {top_k} of {experts} experts: give 1 to {experts}"));
        }
        if let Some(RouterGroups { count, kept }) = self.groups {
            if count == 0 || !experts.is_multiple_of(count) || experts / count < 2 {
                return wrong(
                    "groups",
                    format!("{experts} experts are not divided into {count} groups of two or more"),
                );
            }
            if kept == 0 || kept > count {
                return wrong("groups", format!("{kept} of {count} groups cannot be kept: give 1 to {count}"));
            }
            let most = kept * (experts / count);
            if top_k > most {
                return wrong(
                    "top_k",
                    format!("{kept} of {count} groups have {most} experts, and a token uses {top_k}"),
                );
            }
        }
        if self.shared_gate && self.shared_hidden == 0 {
            return wrong("shared_gate", "there is no shared expert to weigh: set `shared_hidden`".into());
        }
        if !self.weight_scale.is_finite() {
            return wrong("weight_scale", format!("{} is not finite", self.weight_scale));
        }
        match self.capacity {
            Some(Capacity { factor, .. }) if !(factor > 0.0 && factor.is_finite()) => {
                wrong("capacity", format!("a factor of {factor} is not positive and finite"))
            }
            _ => Ok(()),
        }
    }
}
