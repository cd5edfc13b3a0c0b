//! Features of training steps and of loops over them, and the pairs that exclude each other.
//!
//! [`COMBINATIONS`] refuses the pairs: code that makes, wraps or runs a step asks it, by [`Features::check`]. The tests
//! draw their cases from it.
//!
//! Options of one feature that contradict each other are checked by the feature, as `ZeroOptions` are. Properties of a
//! model are checked by the code that meets them: a layer that cannot be cut, or weights that no rank has whole.

use std::fmt;

use numcore::{Error, Result};

/// Defines the features with their names.
macro_rules! features {
    ($($(#[$doc:meta])* $feature:ident $name:literal,)*) => {
        /// A feature of a training step, or of the loop that runs it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Feature {
            $($(#[$doc])* $feature,)*
        }

        impl Feature {
            /// Every feature.
            pub const ALL: &[Feature] = &[$(Feature::$feature),*];

            /// The name of the feature in messages and tables.
            pub fn name(self) -> &'static str {
                match self {
                    $(Feature::$feature => $name,)*
                }
            }
        }
    };
}

features! {
    /// Several ranks along the tensor axis.
    Tensor "tensor parallelism",
    /// Several ranks along the context axis.
    Context "context parallelism",
    /// A model in pipeline stages.
    Pipeline "a pipeline",
    /// Tied parameters, of which several stages have a copy.
    Tied "parameters that stages share",
    /// Experts that are shared out among ranks.
    Experts "experts over ranks",
    /// Mixtures that count the tokens of all ranks, since a plan names their experts.
    CountedTokens "tokens counted over ranks",
    /// ZeRO stage 1: optimizer state in shards.
    ZeroOptimizer "ZeRO stage 1",
    /// ZeRO stage 2: gradients in shards too.
    ZeroGradients "ZeRO stage 2",
    /// ZeRO stage 3: parameters in shards too.
    ZeroParameters "ZeRO stage 3",
    /// Gradients that are summed over ranks in every backward pass of a step: ZeRO stages 2 and 3 without
    /// `reduce_once`, and reducers that ask for it.
    ReduceEachPass "sums in each pass",
    /// Parameters that a rank gathers as it reads them: ZeRO stage 3, unless unused parameters are allowed.
    GatherAsRead "parameters gathered as they are read",
    /// Bucket options that are set explicitly.
    Buckets "buckets",
    /// Gradients that travel as `bf16` or `f16`.
    Narrowed "narrowed gradients",
    /// A custom reducer.
    Reducer "a reducer",
    /// A reducer with state that checkpoints save.
    StatefulReducer "a reducer with state",
    /// Sums in an order that does not depend on the number of ranks.
    Canonical "canonical order",
    /// Parameters that may take no part in a loss.
    Unused "unused parameters",
    /// An optimizer whose rule needs whole parameters, such as matrices or their norms.
    WholeParameters "a rule for whole parameters",
    /// An optimizer that the program builds itself: before the step, or by a function.
    BuiltBefore "an optimizer that the program builds",
    /// Trained parameters in half precision.
    HalfParameters "half-precision parameters",
    /// Local updates: ranks train independently, and synchronize their weights at intervals.
    Local "local updates",
    /// Local updates after which ranks keep weights of their own: fragments in turn, or a rule that keeps a share.
    WeightsDiffer "weights that differ between ranks",
    /// Fast ranks that take more micro-batches than slow ones.
    Uneven "uneven micro-batches",
    /// Steps in which a rank computes nothing.
    Idle "idle ranks",
    /// Ranks that get no batch in the whole run, known to all ranks beforehand.
    NoBatches "ranks without a batch",
    /// Ranks that leave and join.
    Elastic "elastic ranks",
    /// Parameters that are trained from a later step on.
    Unfreezing "parameters that are unfrozen",
    /// The weights of the best checkpoint as the model's when the run is over.
    RestoreBest "the best weights at the end",
    /// Averages of the weights as the model's when the run is over.
    UseAtEnd "averages of weights at the end",
    /// A loop that averages gradients by hand, by `Ddp`.
    ByHand "gradients averaged by hand",
}

const _: () = assert!(Feature::ALL.len() <= u32::BITS as usize, "`Features` has a bit for each");

/// A set of features of one training step.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Features(u32);

impl Features {
    /// The set of these features.
    pub fn of(all: impl IntoIterator<Item = Feature>) -> Self {
        all.into_iter().fold(Features::default(), Features::and)
    }

    /// The set with one more feature.
    pub fn and(self, feature: Feature) -> Self {
        Features(self.0 | 1 << feature as u32)
    }

    /// The set with one more feature, if `holds`.
    pub fn and_if(self, holds: bool, feature: Feature) -> Self {
        if holds { self.and(feature) } else { self }
    }

    /// The union of two sets.
    pub fn union(self, other: Self) -> Self {
        Features(self.0 | other.0)
    }

    /// Tells whether the set has a feature.
    pub fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u32 != 0
    }

    /// The features, in the order of [`Feature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |feature| self.has(*feature))
    }

    /// Tells whether the set allows another feature.
    pub fn allow(self, feature: Feature) -> bool {
        COMBINATIONS.iter().all(|refused| refused.partner_of(feature).is_none_or(|partner| !self.has(partner)))
    }

    /// An error, with the reason, if two of the features exclude each other.
    pub fn check(self, op: &'static str) -> Result<()> {
        let Some(Refused { features: [a, b], why }) =
            COMBINATIONS.iter().find(|refused| refused.features.iter().all(|feature| self.has(*feature)))
        else {
            return Ok(());
        };
        Err(Error::config(op, a.name(), format!("{} and {} exclude each other: {why}", a.name(), b.name())))
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A pair of features that exclude each other, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The pair of features.
    pub features: [Feature; 2],
    /// The reason, and the alternative to take instead.
    pub why: &'static str,
}

impl Refused {
    fn partner_of(&self, feature: Feature) -> Option<Feature> {
        match self.features {
            [a, b] if a == feature => Some(b),
            [a, b] if b == feature => Some(a),
            _ => None,
        }
    }
}

const fn refused(features: [Feature; 2], why: &'static str) -> Refused {
    Refused { features, why }
}

const UNITS: &str = "a sharded step sums its units itself, as `ZeroOptions` say: leave one out";
const OWN_WAY: &str = "a reducer sums in a format and an order of its own: leave one out";
const SHARDS: &str = "optimizers of shards are made of a configuration: give that of a rule, or `ParamGroups` of it";
const STATE: &str = "checkpoints would have its state under one name from several ranks, which have pieces: take a reducer without a state";
const EACH_PASS: &str = "ranks exchange in every pass, so they take equally many: take ZeRO stage 1, stage 2 with `reduce_once`, or none, and no canonical \
                         order or experts over ranks";
const COUNTED: &str =
    "ranks count the tokens of all in every pass: leave the experts out of the plan (`TensorPlan::without`)";
const SERVES: &str = "experts have the tokens of other ranks: share out the examples otherwise, or compute any batch with a weight of 0 \
                      (`Loss::weightless`)";
const RUNS: &str = "stages compute the micro-batches of other ranks: give the replica any batch that is `weightless`";
const BY_HAND: &str =
    "ranks would average partial gradients as if each had other examples: train it by `TrainStep::builder`";

/// The pairs of features that exclude each other. All other pairs work.
pub static COMBINATIONS: &[Refused] = {
    use Feature::*;
    &[
        refused([Buckets, ZeroOptimizer], UNITS),
        refused([Buckets, ZeroGradients], UNITS),
        refused([Buckets, ZeroParameters], UNITS),
        refused([Reducer, ZeroOptimizer], UNITS),
        refused([Reducer, ZeroGradients], UNITS),
        refused([Reducer, ZeroParameters], UNITS),
        refused([Reducer, Narrowed], OWN_WAY),
        refused([Reducer, Canonical], OWN_WAY),
        refused([BuiltBefore, ZeroOptimizer], SHARDS),
        refused([BuiltBefore, ZeroGradients], SHARDS),
        refused([BuiltBefore, ZeroParameters], SHARDS),
        refused([Narrowed, Canonical], "chunks are gathered as they are: leave one out"),
        refused([StatefulReducer, Tensor], STATE),
        refused([StatefulReducer, Experts], STATE),
        refused([Canonical, Pipeline], "passes follow one another in the order of the schedule: leave `canonical` out"),
        refused(
            [StatefulReducer, Tied],
            "each copy has a state of its own, and checkpoints would have one: take a reducer without a state, or give stages parameters of their own",
        ),
        refused([Canonical, Experts], "experts combine the chunks of the batch: leave `canonical` out"),
        refused(
            [Canonical, Context],
            "ranks along context have parts of sequences, and no chunks of a batch: leave `canonical` out",
        ),
        refused([Uneven, Canonical], EACH_PASS),
        refused([Uneven, ReduceEachPass], EACH_PASS),
        refused([Uneven, ZeroParameters], EACH_PASS),
        refused([Uneven, Experts], EACH_PASS),
        refused(
            [Idle, GatherAsRead],
            "every rank gathers parameters as it reads them: compute any batch with a weight of 0 (`Loss::weightless`), as `run` does",
        ),
        refused([Idle, Experts], SERVES),
        refused([Idle, Pipeline], RUNS),
        refused([NoBatches, Experts], SERVES),
        refused([NoBatches, Pipeline], RUNS),
        refused([Uneven, CountedTokens], COUNTED),
        refused([Idle, CountedTokens], COUNTED),
        refused([NoBatches, CountedTokens], COUNTED),
        refused(
            [Local, Uneven],
            "ranks that train independently wait for each other at synchronizations alone: give fast ones larger shares (`SpeedShares`)",
        ),
        refused(
            [Tied, WeightsDiffer],
            "copies of one parameter would be synchronized at different times, and diverge: take one fragment and a rule that keeps nothing of a rank's own",
        ),
        refused(
            [Local, Experts],
            "ranks of one machine have experts of their own, which are neither synchronized nor saved as a whole: sum the gradients of all ranks",
        ),
        refused(
            [Local, HalfParameters],
            "each synchronization would round the weights: keep trained parameters in f32, and compute in halves by `autocast`",
        ),
        refused(
            [Elastic, WeightsDiffer],
            "there is no step after which all ranks have equal weights, and another number of ranks would lose the updates of each: take one fragment and a rule that keeps nothing of a rank's own",
        ),
        refused(
            [Local, Unfreezing],
            "ranks would not synchronize a parameter that was frozen when the step was made: make another `LocalSteps` to train it",
        ),
        refused([RestoreBest, UseAtEnd], "the run would end with those that come last: leave one out"),
        refused([Tensor, ByHand], BY_HAND),
        refused([Context, ByHand], BY_HAND),
        refused([Experts, ByHand], BY_HAND),
        refused([CountedTokens, ByHand], BY_HAND),
    ]
};
