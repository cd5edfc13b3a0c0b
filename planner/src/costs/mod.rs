//! Costs of a model's parts, as measured.

mod measure;
mod optimizer;

use std::ops::AddAssign;

use distributed::{pipeline::StagePlacement, plan::Axis};
use numcore::{DType, KernelWork};

pub use measure::PlannedModel;
pub use optimizer::OptimizerCosts;

/// The costs of a model for one micro-batch on one rank, part by part in the order of forward. Pieces along tensor,
/// parts of sequences and experts are those of one plan: [`ModelCosts::measure`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCosts {
    /// The parts.
    pub parts: Vec<PartCosts>,
}

/// The costs of a part of a model: of a block, with the embeddings before the first and the loss after the last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartCosts {
    /// The kernels of a forward pass.
    pub forward: KernelWork,
    /// The exchanges of a forward pass.
    pub forward_exchanges: Vec<ExchangeCosts>,
    /// The kernels of a backward pass.
    pub backward: BackwardWork,
    /// The exchanges of a backward pass.
    pub backward_exchanges: Vec<ExchangeCosts>,
    /// Bytes that are kept from the forward pass to the backward pass. The output is included, and the input is not.
    pub saved: u64,
    /// Bytes that are kept from the first to the second part of a split backward pass. They are gradients of values,
    /// and the input, if gradients of weights read it.
    pub deferred: u64,
    /// Bytes beside those that the part holds at most for a moment, in forward or in backward.
    pub transient: u64,
    /// Bytes of the input of a micro-batch.
    pub input: u64,
    /// Bytes of the output of a micro-batch, which is the input of the next part.
    pub output: u64,
    /// The parameters, in the order of the model.
    pub parameters: Vec<ParameterCosts>,
}

/// The kernels of a backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardWork {
    /// The whole pass.
    pub all: KernelWork,
    /// The part of a split pass that computes the gradient of the input.
    pub input: KernelWork,
    /// The part of a split pass that computes the gradients of weights.
    pub weights: KernelWork,
}

/// Exchanges of a rank along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeCosts {
    /// The axis along which the ranks lie.
    pub axis: Axis,
    /// The kind of collective ([`Collective::name`](distributed::comm::Collective::name)).
    pub kind: &'static str,
    /// The number of calls.
    pub calls: u64,
    /// The bytes of the whole values.
    pub payload: u64,
    /// The bytes that the rank sends.
    pub sent: u64,
}

/// A parameter on one rank: its piece, where it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterCosts {
    /// The name in the model.
    pub name: String,
    /// The sizes of the piece.
    pub shape: Vec<usize>,
    /// The element type.
    pub dtype: DType,
    /// False if it is frozen: it has neither a gradient nor state.
    pub trained: bool,
    /// True if it is of an expert, and ranks along [`Axis::Expert`] have others.
    pub expert: bool,
    /// True if ranks along tensor have parts of its gradient, which they sum: norms on parts of a sequence.
    pub partial: bool,
    /// A number that copies of one parameter share. Numbers ascend in the order of the model.
    pub origin: usize,
    /// The number of the unit that ZeRO gathers it with ([`UnitOf::layers`](distributed::zero::UnitOf::layers)).
    /// That of the root, which is no layer, is 0.
    pub unit: usize,
}

impl ParameterCosts {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// The bytes of the values.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.size() as u64
    }

    /// The element type in which its gradient is added up and travels.
    pub fn gradient(&self, main_gradients: bool) -> DType {
        if main_gradients && self.dtype.is_half() { DType::F32 } else { self.dtype }
    }
}

impl PartCosts {
    /// These costs, where backward runs the forward pass again and keeps the input alone, with its exchanges: the
    /// recomputation of Megatron-LM. [`Recompute::Block`](crate::Recompute::Block) keeps outputs of exchanges.
    pub fn recomputed_with_exchanges(self) -> Self {
        let [mut all, mut input] = [self.backward.all, self.backward.input];
        all += self.forward;
        input += self.forward;
        let backward_exchanges = [&self.backward_exchanges[..], &self.forward_exchanges].concat();
        let transient = self.transient.max(self.saved);
        let backward = BackwardWork { all, input, ..self.backward };
        PartCosts { backward, backward_exchanges, transient, saved: self.input, ..self }
    }
}

impl AddAssign for BackwardWork {
    fn add_assign(&mut self, other: BackwardWork) {
        self.all += other.all;
        self.input += other.input;
        self.weights += other.weights;
    }
}

impl ModelCosts {
    /// The parts of stage `stage` of `stages`: as many as [`LanguageModel::split`](nn::LanguageModel::split) gives it.
    pub fn stage(&self, stage: usize, stages: usize) -> &[PartCosts] {
        let at = |k: usize| k * self.parts.len() / stages.max(1);
        self.parts.get(at(stage)..at(stage + 1)).unwrap_or_default()
    }

    /// Bytes that a stage keeps of a micro-batch until its backward pass. They are values that its parts save, by `of`,
    /// and the input, if another rank sent it. Otherwise that is an output of the same rank, or a part of the batch.
    pub(crate) fn kept(&self, stage: usize, placement: &StagePlacement, of: impl Fn(&PartCosts) -> u64) -> u64 {
        let [received, _] = self.crossing(stage, placement);
        self.stage(stage, placement.stages()).iter().map(of).fold(received, u64::saturating_add)
    }

    /// Bytes that a stage keeps of a micro-batch from the first part of its split backward pass to the second. The
    /// first part does nothing in the first stage, whose input has no gradient.
    pub(crate) fn waiting(&self, stage: usize, placement: &StagePlacement) -> u64 {
        let [_, sent] = self.crossing(stage, placement);
        match stage {
            0 => self.kept(stage, placement, |part| part.saved).saturating_add(sent),
            _ => self.stage(stage, placement.stages()).iter().map(|part| part.deferred).sum(),
        }
    }

    /// Bytes of the messages of a stage that are in memory at once. They are the next input, the gradient of the last
    /// one, which is on its way, and the gradient of an output.
    pub(crate) fn messages(&self, stage: usize, placement: &StagePlacement) -> u64 {
        let [received, sent] = self.crossing(stage, placement);
        received.saturating_mul(2).saturating_add(sent)
    }

    /// The bytes of a micro-batch's values that a stage gets from another rank, and that it gives to one.
    fn crossing(&self, stage: usize, placement: &StagePlacement) -> [u64; 2] {
        let parts = self.stage(stage, placement.stages());
        let crosses = |a: usize, b: usize| b < placement.stages() && !placement.together(a, b);
        let received = stage.checked_sub(1).is_some_and(|before| crosses(before, stage));
        let received = parts.first().filter(|_| received).map_or(0, |part| part.input);
        [received, parts.last().filter(|_| crosses(stage, stage + 1)).map_or(0, |part| part.output)]
    }

    /// Floating-point operations of the forward and backward passes of a micro-batch, without what is recomputed: three
    /// times those of forward.
    pub fn model_flops(&self) -> f64 {
        3.0 * self.parts.iter().map(|part| part.forward.flops as f64).sum::<f64>()
    }
}
