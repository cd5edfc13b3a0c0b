//! The callbacks of this crate.

mod best_weights;
mod checkpoints;
mod divergence_guard;
mod early_stop;
mod equal_weights;
mod evaluate;
mod lr_range;
mod monitor;
mod non_finite;
mod plateau;
mod qk_clip;
mod stop_on_signal;
mod throughput;
mod weight_averaging;
mod writer;

pub use checkpoints::Checkpoints;
pub use divergence_guard::DivergenceGuard;
pub use early_stop::EarlyStop;
pub use equal_weights::EqualWeights;
pub use evaluate::Evaluate;
pub use lr_range::LrRange;
pub use monitor::Monitor;
pub use non_finite::NonFinite;
pub use plateau::ReduceOnPlateau;
pub use qk_clip::QkClip;
pub use stop_on_signal::StopOnSignal;
pub use throughput::Throughput;
pub use weight_averaging::WeightAveraging;
pub(crate) use weight_averaging::dropped;
