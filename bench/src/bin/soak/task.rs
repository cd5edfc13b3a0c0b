//! The training task: a model, as one module or in stages, and its data.

use weftgrad::{
    distributed::{
        pipeline::{Stage, balanced, split},
        train::Loss,
    },
    nn::{
        Embedding, Gpt, GptConfig, Init, Linear, RmsNorm, Sequential, Tanh,
        loss::{CrossEntropyOptions, Reduction, cross_entropy_with, mse},
        moe::{MixtureOfExperts, MoeConfig},
        parallel::{ContextSlot, TensorPlan, VocabularyLoss},
    },
    prelude::*,
};

use crate::program::TensorCut;

/// A model and its data.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Task {
    /// Linear and tanh layers in turn.
    Mlp { widths: Vec<usize> },
    /// A tiny GPT with a tied head.
    Gpt { layers: usize },
    /// Mixtures of experts between a table and a projection to logits.
    Experts { layers: usize },
}

/// Inputs and targets of a step.
pub(crate) type Batch = (Tensor<Cpu>, Tensor<Cpu>);

/// The stages of a model, and the loss of the last stage's output.
pub(crate) type Staged = (Vec<Box<dyn Stage<Cpu>>>, StageLoss);

/// The loss of outputs and targets.
pub(crate) type StageLoss = Box<dyn Fn(&Var<Cpu>, &Var<Cpu>) -> Result<Loss<Cpu>> + Send>;

impl Task {
    /// Builds the model as one module, and the slot for the ranks over which its sequences are cut.
    pub(crate) fn whole(&self, rt: &Cpu, seed: u64) -> Result<(Box<dyn Forward<Cpu>>, ContextSlot<Cpu>)> {
        let init = Init::new(rt, seed).dtype(DType::F64);
        Ok(match self {
            Task::Mlp { widths } => (Box::new(mlp(&init, widths)?), ContextSlot::cuts()),
            Task::Gpt { layers } => {
                let model = Gpt::new(&init, gpt(*layers))?;
                let context = model.context.clone();
                (Box::new(model), context)
            }
            Task::Experts { layers } => (Box::new(mixtures(&init, *layers)?), ContextSlot::cuts()),
        })
    }

    /// Builds the model in `count` pipeline stages, whose sequences may be cut.
    pub(crate) fn stages(&self, rt: &Cpu, seed: u64, count: usize, sequences_cut: bool) -> Result<Staged> {
        let init = Init::new(rt, seed).dtype(DType::F64);
        let task = self.clone();
        let of_whole: StageLoss = Box::new(move |y, target| task.loss(y, target));
        let of_layers = |layers: Sequential<Cpu>| {
            let layers = layers.into_layers();
            let cuts = balanced(&layers, count)?;
            split(layers, &cuts)
        };
        match self {
            Task::Mlp { widths } => Ok((of_layers(mlp(&init, widths)?)?, of_whole)),
            Task::Experts { layers } => Ok((of_layers(mixtures(&init, *layers)?)?, of_whole)),
            Task::Gpt { layers } => {
                let model = Gpt::new(&init, gpt(*layers))?;
                let (stages, loss): (_, StageLoss) = match sequences_cut {
                    false => (model.split(count)?, of_whole),
                    true => {
                        let loss = VocabularyLoss { cross_entropy: summed(), z_loss: 0.0 };
                        let (stages, of_part) = model.split_with_loss(count, loss)?;
                        let loss = move |y: &Var<Cpu>, target: &Var<Cpu>| {
                            Loss::sum(of_part.of(y, target)?, target.dims().iter().product::<usize>() as f64)
                        };
                        (stages, Box::new(loss))
                    }
                };
                Ok((stages.into_iter().map(|stage| Box::new(stage) as _).collect(), loss))
            }
        }
    }

    /// The plan by which layers are cut over ranks, or experts distributed.
    pub(crate) fn tensor_plan(&self, cut: TensorCut) -> TensorPlan {
        match self {
            Task::Experts { .. } => TensorPlan::new().experts("*.mixture.experts"),
            _ => Gpt::<Cpu>::tensor_plan().sequence_parallel(cut.sequence).exchange_in_pieces(cut.pieces),
        }
    }

    /// Draws all examples of a step.
    pub(crate) fn batch(&self, rt: &Cpu, seed: u64, examples: usize) -> Result<Batch> {
        match self {
            Task::Mlp { widths } => {
                let rows = |width, seed| Tensor::normal(rt, [examples, width], DType::F64, 0.0, 1.0, seed);
                Ok((rows(widths[0], seed)?, rows(widths[widths.len() - 1], seed + 500)?))
            }
            Task::Gpt { layers } | Task::Experts { layers } => {
                let GptConfig { vocab, context, .. } = gpt(*layers);
                let token = |k: u64| (k * k + 3 * seed + k / 5) as i64 % vocab as i64;
                let tokens: Vec<i64> = (0..(examples * (context + 1)) as u64).map(token).collect();
                let all = Tensor::from_slice(rt, [examples, context + 1], &tokens)?;
                Ok((all.narrow(1, 0, context)?, all.narrow(1, 1, context)?))
            }
        }
    }

    /// The loss of some examples, from the part of their sequences on this rank.
    pub(crate) fn loss_of_part(
        &self,
        y: &Var<Cpu>,
        target: &Var<Cpu>,
        context: &ContextSlot<Cpu>,
    ) -> Result<Loss<Cpu>> {
        let part = self.loss(y, &context.take(target, 1)?)?;
        Loss::sum(context.of_whole(part.total())?, target.dims().iter().product::<usize>() as f64)
    }

    /// The loss of some examples.
    pub(crate) fn loss(&self, y: &Var<Cpu>, target: &Var<Cpu>) -> Result<Loss<Cpu>> {
        let weight = target.dims().iter().product::<usize>() as f64;
        let sum = match self {
            Task::Mlp { .. } => mse(y, target, Reduction::Sum)?,
            Task::Gpt { .. } | Task::Experts { .. } => cross_entropy_with(y, target, summed())?,
        };
        Loss::sum(sum, weight)
    }
}

fn summed() -> CrossEntropyOptions {
    CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() }
}

/// A mixture of four experts with its norm, in a residual branch.
#[derive(Module)]
struct Mixture<R: Runtime> {
    norm: RmsNorm<R>,
    mixture: MixtureOfExperts<R>,
}

impl<R: Runtime> Forward<R> for Mixture<R> {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.add(&self.mixture.forward(&self.norm.forward(x)?)?)
    }
}

fn mixtures(init: &Init<Cpu>, layers: usize) -> Result<Sequential<Cpu>> {
    let GptConfig { vocab, width, .. } = gpt(layers);
    let mixture = || -> Result<_> {
        let (norm, mixture) =
            (RmsNorm::new(init, width)?, MixtureOfExperts::new(init, MoeConfig::new(width, 6, 4, 2))?);
        Ok(Mixture { norm, mixture })
    };
    let table = Sequential::new().push(Embedding::new(init, vocab, width)?);
    let model = (0..layers).try_fold(table, |model, _| mixture().map(|mixture| model.push(mixture)))?;
    Ok(model.push(Linear::new(init, width, vocab)?))
}

fn mlp(init: &Init<Cpu>, widths: &[usize]) -> Result<Sequential<Cpu>> {
    widths.windows(2).try_fold(Sequential::new(), |model, w| Ok(model.push(Linear::new(init, w[0], w[1])?).push(Tanh)))
}

fn gpt(layers: usize) -> GptConfig {
    GptConfig { vocab: 12, context: 8, layers, heads: 2, width: 8, tied_head: true, ..Default::default() }
}
