//! Local updates: ranks train separately and synchronize their weights every `H` steps, for links too slow for a sum of
//! gradients in each step.
//!
//! Each rank, or each machine, has a [`TrainStep`](distributed::train::TrainStep) of its own, the *inner* step. The
//! state of its optimizer is not exchanged. After every [`every`](LocalUpdates::every) steps an [`OuterRule`]
//! computes new *global* weights `X` for all ranks. It uses the global weights of the last synchronization and the
//! mean `X̄` of the ranks' current weights:
//!
//! | rule | global weights | a rank's next weights | source |
//! |---|---|---|---|
//! | [`LocalSgd`] | `X ← X̄` | `X` | Stich, *Local SGD Converges Fast and Communicates Little*, 2018 |
//! | [`ElasticAveraging`] | `X ← X̄` | `X + (1 − α)(x − X)` | after Zhang, Choromanska, LeCun, *Deep Learning with Elastic Averaging SGD*, 2015 |
//! | [`SlowMo`] | `u ← β·u + (X − X̄)/γ`, `X ← X − α·γ·u` | `X` | Wang et al., *SlowMo*, 2019; BMUF, Chen and Huo, 2016 |
//! | [`DiLoCo`] | `v ← μ·v + (X − X̄)`, `X ← X − η·((X − X̄) + μ·v)` | `X` | Douillard et al., *DiLoCo*, 2023 |
//!
//! The mean is weighted by each rank's total loss weight since the last synchronization. Weights are sent as one flat
//! range. A reduce-scatter sums it. Each rank keeps `1/N` of the global weights and of the rule's state, and computes
//! the rule for these alone. An all-gather distributes the result. That is `2Ψ/H` numbers a step for `Ψ` parameters.
//!
//! With [`fragments`](LocalUpdates::fragments) a part of the parameters at a time is synchronized. With a
//! [`delay`](LocalUpdates::delay) the sum is in flight while ranks go on training (Douillard et al., *Streaming
//! DiLoCo*, 2025).
//!
//! **Invariant**: ranks take the same number of steps between two synchronizations, at any weight of their data, unless
//! they synchronize [by hand](LocalUpdates::every). A failed synchronization changes no weights.

mod as_step;
mod checkpoint;
mod fragment;
mod options;
mod rules;
mod step;
mod totals;

pub use checkpoint::lost_at_resize;
pub use options::LocalUpdates;
pub use rules::{DiLoCo, ElasticAveraging, LocalSgd, OuterChoice, OuterRule, OuterStep, SlowMo};
pub use step::LocalSteps;

pub use distributed::train::Synchronization;
