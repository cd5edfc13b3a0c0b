//! Reverse-mode automatic differentiation on a tape. A [`Var`] is a tensor and, if it needs gradients, a reference to
//! the node of the graph that computed it. [`Backward`] walks that graph once, from the last node to the first, and
//! notifies a [`BackwardHook`] when each leaf's gradient is final. One such backward pass is a *sweep*, the name of the
//! engine in this crate.
//!
//! The graph belongs to the variables that hold it: there is no process-global state, and ranks in threads share no
//! graph. Every gradient rule lives with its op in `numcore`. This crate only decides the fate of the op calls that a
//! rule gives. A call is run into a slot, accumulated into an intermediate, recorded (double backward), or deferred
//! ([`Deferred`]).
//!
//! **Invariant**: order comes from node numbers, which grow along every edge, and from the order in which leaves are
//! found. Addresses are used for look-up alone.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod address;
mod anomaly;
mod autocast;
mod backward;
mod checkpoint;
mod deferred;
mod function;
mod functional;
mod gradients;
mod hook;
mod leaf;
mod leaf_parts;
mod ledger;
mod mode;
mod node;
mod observe;
mod operators;
mod overlap;
mod per_example;
mod recipe;
mod rematerialize;
mod slots;
mod step;
mod sweep;
mod tangent;
mod var;

pub use anomaly::{InspectedCall, detect_anomaly, inspect_calls};
pub use autocast::{autocast, autocast_dtype, autocast_operands, no_autocast};
pub use backward::{Backward, backward, backward_with_hooks, differentiable_grad, grad};
pub use checkpoint::{Checkpoint, checkpoint, products};
pub use deferred::Deferred;
pub use function::{ArrivingGradient, Function, apply_function};
pub use functional::{hessian, hvp, jacobian, jvp};
pub use gradients::Gradients;
pub use hook::{BackwardHook, LeafGrad};
pub use leaf::{Leaf, LeafView, Residency};
pub use ledger::CheckpointBill;
pub use mode::{
    RandomState, is_grad_enabled, manual_seed, next_seed, no_grad, random_state, set_random_state, set_random_stream,
};
pub use observe::{ObservedCall, ObservedOp, observe_ops, observe_outputs, observed_pass, saved_bytes};
pub use per_example::per_example_gradients;
pub use rematerialize::{recomputed, with_recomputation};
pub use var::Var;
