//! Activation checkpointing (Chen et al. 2016): a part of the model saves only its inputs, and what a policy keeps.
//! Backward computes the rest again.

use std::{fmt, rc::Rc};

use crate::{
    ObservedOp,
    ledger::{CheckpointBill, Ledger},
    rematerialize::in_scope,
};

/// Runs `f` without saving its intermediate values. The backward pass computes those that it needs again, op call by op
/// call, with the same random values and casts.
///
/// The calls are recorded as usual: gradients can be differentiated again, weight gradients can be deferred, and `f`
/// may read any variable. Modules do not run again, so statistics and counters are updated once.
///
/// # Errors
/// The backward pass fails if a leaf that `f` read has changed in between.
///
/// ```
/// # use autograd::{Var, checkpoint, saved_bytes};
/// # use numcore::{DType, NullRuntime, Tensor, ops::{MatmulOps, PointwiseOps}};
/// # let rt = NullRuntime::new();
/// let x = Var::leaf("x", Tensor::zeros(&rt, [4, 8], DType::F32)?)?;
/// let w = Var::leaf("w", Tensor::zeros(&rt, [8, 8], DType::F32)?)?;
/// let y = checkpoint(|| x.matmul(&w)?.gelu()?.matmul(&w))?;
/// assert_eq!(saved_bytes(&y).iter().map(|(_, bytes)| bytes).sum::<usize>(), 0);
/// # Ok::<(), numcore::Error>(())
/// ```
pub fn checkpoint<T>(f: impl FnOnce() -> T) -> T {
    in_scope(Keep::default(), f)
}

/// A policy of activation checkpointing: the op calls whose outputs are kept for backward.
///
/// ```
/// # use autograd::{Checkpoint, Var, products, saved_bytes};
/// # use numcore::{DType, NullRuntime, Tensor, ops::{MatmulOps, PointwiseOps}};
/// # let rt = NullRuntime::new();
/// let x = Var::leaf("x", Tensor::zeros(&rt, [4, 8], DType::F32)?)?;
/// let w = Var::leaf("layers.0.up.weight", Tensor::zeros(&rt, [8, 8], DType::F32)?)?;
/// let forward = || x.matmul(&w)?.gelu()?.matmul(&w);
/// // Backward computes the activation again, and no product.
/// let y = Checkpoint::keep(products).run(forward)?;
/// assert_eq!(saved_bytes(&y).iter().map(|(_, bytes)| bytes).sum::<usize>(), 4 * 8 * 4);
/// let y = Checkpoint::named(["up"]).run(forward)?;
/// # Ok::<(), numcore::Error>(())
/// ```
#[doc(alias("create_selective_checkpoint_contexts"))]
#[derive(Clone, Debug)]
pub struct Checkpoint {
    policy: Policy,
}

type KeepsCall = dyn Fn(&ObservedOp) -> bool;

#[derive(Clone)]
enum Policy {
    Calls(Rc<KeepsCall>),
    Budget(usize),
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Calls(_) => f.write_str("Calls"),
            Policy::Budget(bytes) => write!(f, "Budget({bytes})"),
        }
    }
}

/// Selects op calls that are matrix products, attention or convolutions, for [`Checkpoint::keep`]. Functions, such as
/// collectives, are no op calls.
pub fn products(call: &ObservedOp) -> bool {
    call.flops() > 0
}

impl Checkpoint {
    /// Keeps the outputs of the op calls for which `keeps` is true.
    pub fn keep(keeps: impl Fn(&ObservedOp) -> bool + 'static) -> Self {
        Checkpoint { policy: Policy::Calls(Rc::new(keeps)) }
    }

    /// Keeps the outputs of op calls that read a parameter of these layers. `up` and `mlp.up` are the layer of
    /// `layers.0.mlp.up.weight`; a name may begin anywhere in the path of a layer.
    pub fn named(layers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let layers: Vec<String> = layers.into_iter().map(|layer| format!(".{}.", layer.into())).collect();
        Self::keep(move |call| {
            let reads = |layer: &String| call.parameters.iter().any(|name| format!(".{name}").contains(layer));
            layers.iter().any(reads)
        })
    }

    /// Keeps at most `bytes` of values in each scope, such as a block, so that backward repeats the least computation.
    /// Computation is floating-point operations, and a fixed number of them for each byte written. Minimal cuts of the
    /// graph of recorded calls solve it. The choice is at least as good as adding outputs one by one, each the best for
    /// its bytes. For a few dozen calls it is mostly the best.
    ///
    /// Outputs of [functions](crate::apply_function) are kept in any case, and count first: they may exchange values
    /// with other ranks, which choose for themselves.
    /// The outputs are chosen when the scope has run, so until then it holds all of its values.
    pub fn budget(bytes: usize) -> Self {
        Checkpoint { policy: Policy::Budget(bytes) }
    }

    /// Runs `f`, a part of the model, under the policy.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        match &self.policy {
            Policy::Calls(keeps) => in_scope(Keep { calls: Some(keeps.clone()), ledger: None }, f),
            Policy::Budget(_) => self.run_with_bill(f).0,
        }
    }

    /// Runs `f` as [`run`](Checkpoint::run) does, and returns with its result the bytes that are kept and the
    /// computation that backward repeats.
    pub fn run_with_bill<T>(&self, f: impl FnOnce() -> T) -> (T, CheckpointBill) {
        let (calls, budget) = match &self.policy {
            Policy::Calls(keeps) => (Some(keeps.clone()), None),
            Policy::Budget(bytes) => (None, Some(*bytes)),
        };
        let ledger = Rc::new(Ledger::new(budget));
        let result = in_scope(Keep { calls, ledger: Some(ledger.clone()) }, f);
        (result, ledger.settle())
    }
}

/// The policy of an active scope.
#[derive(Clone, Default)]
pub(crate) struct Keep {
    /// The calls whose outputs are kept.
    pub(crate) calls: Option<Rc<KeepsCall>>,
    /// The list of the calls of the scope, if there is a budget or a bill.
    pub(crate) ledger: Option<Rc<Ledger>>,
}
