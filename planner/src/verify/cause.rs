//! Likely causes of differences.

use std::fmt;

/// The likely cause of a difference, told from the pattern of values.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cause {
    /// Pieces of a parameter are not those of the whole one: ranks drew their initial values separately.
    InitialValues,
    /// Ranks drew different random values for the same elements, or the same for different ones.
    RandomValues,
    /// A layer computed statistics of the examples of one rank.
    BatchStatistics,
    /// Ranks read the same examples, and others were not read.
    DataReadTwice,
    /// A layer computed statistics of a piece of the features.
    PieceStatistics,
    /// The output of a layer is another on the plan's ranks: its weight is cut or combined in another way.
    LayerCut,
    /// Means of ranks with different weights were averaged without the weights.
    MeanOfMeans,
    /// The loss differs for another reason.
    LossDiffers,
    /// The difference follows from one before it in the same step.
    Follows,
    /// Every rank along an axis has a part of the gradient, and the parameter is not declared so.
    PartialGradient,
    /// The gradient is this many times that of one rank.
    Scaled(f64),
    /// Two stages have copies of one parameter that are trained separately.
    MissingTie,
    /// The gradient differs for another reason: a backward pass differs in or after this layer.
    GradientDiffers,
    /// The norm is that of other gradients than the ranks' sums.
    PartNorm,
    /// Ranks have losses or weights of their own: these ranks do not train together, or update by other options.
    NotSummed,
    /// The update differs, although the gradients of the ranks are right before their exchange.
    UpdateDiffers,
    /// A buffer is that of one rank.
    BufferOfOneRank,
    /// The parameter has no counterpart of its name, so nothing of it was compared.
    OtherNames,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Cause::InitialValues => {
                "ranks drew initial values of their own: give all ranks one seed, and cut the layer by a tensor plan"
            }
            Cause::RandomValues => {
                "random values are those of other elements: ranks with the same values need one stream, ranks with other examples another"
            }
            Cause::BatchStatistics => "statistics of the examples of one rank: take `SyncBatchNorm`",
            Cause::DataReadTwice => {
                "ranks read the same examples, and others are not read: take the share of `StepRanks::share`"
            }
            Cause::PieceStatistics => {
                "statistics of a piece of the features: name the norm in the tensor plan, or leave its input whole"
            }
            Cause::LayerCut => {
                "the layer computes something else on a piece: look at its weight in the tensor plan, and at what is exchanged before and after it"
            }
            Cause::MeanOfMeans => {
                "means of ranks with different numbers of tokens are averaged: give the sum and its weight (`Loss::sum`)"
            }
            Cause::LossDiffers => "the loss or its weight is computed otherwise than on one rank",
            Cause::Follows => "this follows",
            Cause::PartialGradient => {
                "each rank has a part of the gradient: cut the layer by a tensor plan that knows it, or sum the gradient over the axis"
            }
            Cause::Scaled(factor) => {
                return write!(
                    f,
                    "the gradient is {factor:.4} times that of one rank: it is summed or divided once too often"
                );
            }
            Cause::MissingTie => "stages train copies of one parameter separately: tie them (`PipelineModel::ties`)",
            Cause::GradientDiffers => "the backward pass differs in this layer or after it",
            Cause::PartNorm => {
                "the norm is that of other gradients, although those of the ranks are right: look at their exchange, such as a reducer of your own"
            }
            Cause::NotSummed => {
                "these ranks do not train together: build the step over the whole mesh, with the same options on all ranks"
            }
            Cause::UpdateDiffers => {
                "the exchange of gradients or the optimizer differs from one rank, although the ranks' gradients are right"
            }
            Cause::OtherNames => {
                "only one of the runs has a parameter of this name, so it was not compared: give both the same names"
            }
            Cause::BufferOfOneRank => "the buffer is that of one rank: synchronize it (`TrainStepBuilder::buffers`)",
        };
        f.write_str(text)
    }
}
