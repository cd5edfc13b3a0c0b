//! Local updates: ranks train by themselves and bring their weights together every so many steps, for links that are too slow for a sum of
//! gradients in each step.
//!
//! Each rank, or each machine, has a [`TrainStep`](crate::train::TrainStep) of its own, the *inner* step, with an optimizer whose state stays where it is.
//! After every [`every`](LocalUpdates::every) steps an [`OuterRule`] makes new weights for all ranks of the weights that all ranks had after the last
//! time, the *global* weights `X`, and of the mean `X̄` of those they have now:
//!
//! | rule | global weights | a rank goes on with | source |
//! |---|---|---|---|
//! | [`LocalSgd`] | `X ← X̄` | `X` | Stich, *Local SGD Converges Fast and Communicates Little*, 2018 |
//! | [`ElasticAveraging`] | `X ← X̄` | `X + (1 − α)(x − X)` | after Zhang, Choromanska, LeCun, *Deep Learning with Elastic Averaging SGD*, 2015 |
//! | [`SlowMo`] | `u ← β·u + (X − X̄)/γ`, `X ← X − α·γ·u` | `X` | Wang et al., *SlowMo*, 2019; BMUF, Chen and Huo, 2016 |
//! | [`DiLoCo`] | `v ← μ·v + (X − X̄)`, `X ← X − η·((X − X̄) + μ·v)` | `X` | Douillard et al., *DiLoCo*, 2023 |
//!
//! The mean is weighted by what the losses of each rank weighed since the last time. Weights travel as one flat range: summed by a
//! reduce-scatter, so that each rank keeps `1/N` of the global weights and of the rule's state and computes the rule for these alone, and
//! gathered again. That is `2Ψ/H` numbers a step for `Ψ` parameters and `H` steps between.
//!
//! With [`fragments`](LocalUpdates::fragments) a part of the parameters at a time is brought together, and with a [`delay`](LocalUpdates::delay)
//! the sum travels while ranks go on training (Douillard et al., *Streaming DiLoCo*, 2025).
//!
//! **Invariant**: ranks take the same number of steps between two meetings, whatever their data weighs, unless they meet
//! [by hand](LocalUpdates::every); a meeting that fails changes no weights.

mod as_step;
mod checkpoint;
mod fragment;
mod options;
mod rules;
mod step;
mod totals;

pub use options::LocalUpdates;
pub use rules::{DiLoCo, ElasticAveraging, LocalSgd, OuterRule, OuterStep, SlowMo};
pub use step::LocalSteps;

pub use crate::train::Meeting;
