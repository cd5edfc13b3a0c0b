//! The training task: a model, whole or in stages, and its data.

use weftgrad::{
    distributed::{
        pipeline::{GptStage, Stage, Tie, balanced, split},
        train::Loss,
    },
    nn::{
        Gpt, GptConfig, Init, Linear, Sequential, Tanh,
        loss::{CrossEntropyOptions, Reduction, cross_entropy_with, mse},
        parallel::{ContextSlot, TensorPlan},
    },
    prelude::*,
};

use crate::program::TensorCut;

/// A model and its data.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Linear and tanh in turn.
    Mlp { widths: Vec<usize> },
    /// A tiny one, its head tied.
    Gpt { layers: usize },
}

/// Inputs and targets of a step.
pub type Batch = (Tensor<Cpu>, Tensor<Cpu>);

/// Stages of a model, and the parameters they share.
pub type Stages = (Vec<Box<dyn Stage<Cpu>>>, Vec<Tie>);

impl Task {
    /// The whole model as one module, and the place of the ranks that its sequences are cut over.
    pub fn whole(&self, rt: &Cpu, seed: u64) -> Result<(Box<dyn Forward<Cpu>>, ContextSlot<Cpu>)> {
        let init = Init::new(rt, seed).dtype(DType::F64);
        Ok(match self {
            Task::Mlp { widths } => (Box::new(mlp(&init, widths)?), ContextSlot::cuts()),
            Task::Gpt { layers } => {
                let model = Gpt::new(&init, gpt(*layers))?;
                let context = model.context.clone();
                (Box::new(model), context)
            }
        })
    }

    /// The model in pipeline stages.
    pub fn stages(&self, rt: &Cpu, seed: u64, count: usize) -> Result<Stages> {
        let init = Init::new(rt, seed).dtype(DType::F64);
        match self {
            Task::Mlp { widths } => {
                let layers = mlp(&init, widths)?.into_layers();
                let cuts = balanced(&layers, count)?;
                Ok((split(layers, &cuts)?, Vec::new()))
            }
            Task::Gpt { layers } => {
                let config = gpt(*layers);
                let stages = GptStage::cut(&init, config, count)?;
                Ok((stages.into_iter().map(|stage| Box::new(stage) as _).collect(), GptStage::<Cpu>::ties(&config)))
            }
        }
    }

    /// How layers are cut over ranks.
    pub fn tensor_plan(cut: TensorCut) -> TensorPlan {
        Gpt::<Cpu>::tensor_plan().sequence_parallel(cut.sequence).exchange_in_pieces(cut.pieces)
    }

    /// All examples of a step.
    pub fn batch(&self, rt: &Cpu, seed: u64, examples: usize) -> Result<Batch> {
        match self {
            Task::Mlp { widths } => {
                let rows = |width, seed| Tensor::normal(rt, [examples, width], DType::F64, 0.0, 1.0, seed);
                Ok((rows(widths[0], seed)?, rows(widths[widths.len() - 1], seed + 500)?))
            }
            Task::Gpt { layers } => {
                let GptConfig { vocab, context, .. } = gpt(*layers);
                let token = |k: u64| (k * k + 3 * seed + k / 5) as i64 % vocab as i64;
                let tokens: Vec<i64> = (0..(examples * (context + 1)) as u64).map(token).collect();
                let all = Tensor::from_slice(rt, [examples, context + 1], &tokens)?;
                Ok((all.narrow(1, 0, context)?, all.narrow(1, 1, context)?))
            }
        }
    }

    /// The loss of some examples, by the part of their sequences that is here.
    pub fn loss_of_part(&self, y: &Var<Cpu>, target: &Var<Cpu>, context: &ContextSlot<Cpu>) -> Result<Loss<Cpu>> {
        let part = self.loss(y, &context.take(target, 1)?)?;
        Loss::sum(context.of_whole(part.total())?, target.dims().iter().product::<usize>() as f64)
    }

    /// The loss of some examples.
    pub fn loss(&self, y: &Var<Cpu>, target: &Var<Cpu>) -> Result<Loss<Cpu>> {
        let weight = target.dims().iter().product::<usize>() as f64;
        let sum = match self {
            Task::Mlp { .. } => mse(y, target, Reduction::Sum)?,
            Task::Gpt { .. } => {
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                cross_entropy_with(y, target, None, options)?
            }
        };
        Loss::sum(sum, weight)
    }
}

fn mlp(init: &Init<Cpu>, widths: &[usize]) -> Result<Sequential<Cpu>> {
    widths.windows(2).try_fold(Sequential::new(), |model, w| Ok(model.push(Linear::new(init, w[0], w[1])?).push(Tanh)))
}

fn gpt(layers: usize) -> GptConfig {
    GptConfig { vocab: 12, context: 8, layers, heads: 2, width: 8, tied_head: true, ..Default::default() }
}
