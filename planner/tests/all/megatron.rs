//! Megatron-LM's GPT of 2021 and 2022, whose attention keeps its scores and whose dropout keeps its masks.

use std::sync::LazyLock;

use distributed::train::Loss;
use nn::{Embedding, Forward, Init, LayerNorm, Linear, Module, Stage, parallel::TensorPlan};
use numcore::{
    DType, NullRuntime, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
    pointwise::Program,
};
use planner::{ModelCosts, PartCosts, PlannedModel, Recompute, TrainingPlan};

use crate::common::*;

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug)]
pub struct Megatron {
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    pub vocab: usize,
    pub length: usize,
}

static DROPPED: LazyLock<Program> =
    LazyLock::new(|| Program::new("dropped", |[x, dropped], [scale]| [dropped.select(0.0, x * scale)]));
static ADDED: LazyLock<Program> = LazyLock::new(|| {
    Program::new("dropped_and_added", |[x, dropped, y], [scale]| [dropped.select(0.0, x * scale) + y])
});

/// A mask of a byte for each element.
fn mask<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    Ok(Var::new(Tensor::bernoulli(x.runtime(), x.spec().shape, 0.1, 1)?))
}

/// A block.
#[derive(Module)]
pub struct Layer<R: Runtime> {
    ln1: LayerNorm<R>,
    qkv: Linear<R>,
    proj: Linear<R>,
    ln2: LayerNorm<R>,
    fc1: Linear<R>,
    fc2: Linear<R>,
    #[module(skip)]
    head: usize,
    #[module(skip)]
    selective: bool,
}

impl<R: Runtime> Layer<R> {
    fn new(init: &Init<R>, config: Megatron, selective: bool) -> Result<Self> {
        let c = config.width;
        Ok(Layer {
            ln1: LayerNorm::new(init, c)?,
            qkv: Linear::new(init, c, 3 * c)?,
            proj: Linear::new(init, c, c)?,
            ln2: LayerNorm::new(init, c)?,
            fc1: Linear::new(init, c, 4 * c)?,
            fc2: Linear::new(init, 4 * c, c)?,
            head: c / config.heads,
            selective,
        })
    }

    /// The core of attention of `qkv: [B, T, 3C]`.
    fn attention(&self, qkv: &Var<R>) -> Result<Var<R>> {
        let [b, t, c] = qkv.dims()[..] else { unreachable!() };
        let (c, d) = (c / 3, self.head);
        let part = |k: usize| qkv.narrow(2, k * c, c)?.reshape([b, t, c / d, d])?.transpose(1, 2);
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        let core = || {
            let scores = q.matmul(&k.transpose(2, 3)?)?.mul((d as f64).powf(-0.5))?.softmax(-1)?;
            // A mask that is not kept is drawn again.
            match self.selective {
                true => scores.dropout(0.1, 1)?.matmul(&v),
                false => scores.apply_program(&DROPPED, &[&mask(&scores)?], &[1.1.into()])?.matmul(&v),
            }
        };
        let context = if self.selective { autograd::checkpoint(core)? } else { core()? };
        context.transpose(1, 2)?.reshape([b, t, c])
    }
}

impl<R: Runtime> Stage<R> for Layer<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let x = &inputs[0];
        let h = self.proj.forward(&self.attention(&self.qkv.forward(&self.ln1.forward(x)?)?)?)?;
        let x = h.apply_program(&ADDED, &[&mask(&h)?, x], &[1.1.into()])?;
        let h = self.fc2.forward(&self.fc1.forward(&self.ln2.forward(&x)?)?.gelu_tanh()?)?;
        Ok(vec![h.apply_program(&ADDED, &[&mask(&h)?, &x], &[1.1.into()])?])
    }
}

/// A part of the model: a block, with the embedding before the first, and the head after the last.
#[derive(Module)]
pub struct Part<R: Runtime> {
    wte: Option<Embedding<R>>,
    block: Option<Layer<R>>,
    lnf: Option<LayerNorm<R>>,
    head: Option<Linear<R>>,
}

impl<R: Runtime> Stage<R> for Part<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let x = match &self.wte {
            Some(wte) => {
                let x = wte.forward(&inputs[0])?;
                wte.weight.placed().map_or(Ok(x.clone()), |placed| placed.enter_sequence(&x))?
            }
            None => inputs[0].clone(),
        };
        let x = self.block.as_ref().map_or(Ok(vec![x.clone()]), |block| block.forward_values(&[x]))?.remove(0);
        let (Some(lnf), Some(head)) = (&self.lnf, &self.head) else { return Ok(vec![x]) };
        use nn::parallel::CutLayer;
        Ok(vec![head.project_here(&lnf.forward(&x)?)?])
    }
}

impl Megatron {
    /// The costs of a micro-batch of `plan.micro_batch` sequences. Blocks are all alike, so three
    /// are measured.
    pub fn costs(self, plan: &TrainingPlan, selective: bool) -> Result<ModelCosts> {
        let (b, t) = (plan.micro_batch, self.length);
        let small = TrainingPlan {
            tensor: plan.tensor,
            sequence_parallel: plan.sequence_parallel,
            micro_batch: b,
            recompute: Recompute::Nothing,
            ..TrainingPlan::default()
        };
        let measured = ModelCosts::measure(&small, false, |mesh| {
            let init = &Init::new(mesh.world().runtime(), 1).dtype(DType::BF16);
            let part = |k: usize| {
                let end = k == 3;
                Ok(Part {
                    wte: (k == 0).then(|| Embedding::new(init, self.vocab, self.width)).transpose()?,
                    block: (!end).then(|| Layer::new(init, self, selective)).transpose()?,
                    lnf: end.then(|| LayerNorm::new(init, self.width)).transpose()?,
                    head: end
                        .then(|| {
                            let head = Linear::new(init, self.width, self.vocab)?.without_bias();
                            Ok::<_, numcore::Error>(nn::parallel::CutLayer::with_cuts(head, nn::parallel::Cuts::Table))
                        })
                        .transpose()?,
                })
            };
            let parts = (0..4).map(part).collect::<Result<Vec<Part<NullRuntime>>>>()?;
            let cut = TensorPlan::new()
                .vocabulary("*.wte")
                .column("*.block.qkv")
                .row("*.block.proj")
                .column("*.block.fc1")
                .row("*.block.fc2")
                .vocabulary("*.head")
                .sequence("*.block.ln1")
                .sequence("*.block.ln2")
                .sequence("*.lnf")
                .sequence_region("*.block")
                .sequence_region("*.lnf")
                .sequence_parallel(plan.sequence_parallel);
            mesh.parallelize(&parts, &cut)?;
            let loss = move |y: &[Var<NullRuntime>], _: &[Var<NullRuntime>]| {
                // Half precision logits are widened once: Megatron's loss is in f32.
                let y = y[0].to_dtype(DType::F32)?;
                Loss::sum(y.softmax(-1)?.sum_all()?, 1.0)
            };
            let tokens = Tensor::zeros(mesh.world().runtime(), [b, t], DType::I64)?;
            Ok(PlannedModel::new(parts, loss).micro_batch(vec![tokens], vec![]))
        })?;
        let [first, middle, last, head] = &measured.parts[..] else { unreachable!() };
        let again = |part: &PartCosts| match plan.recompute {
            Recompute::Block => part.clone().recomputed_with_exchanges(),
            _ => part.clone(),
        };
        let blocks = std::iter::repeat_n(again(middle), self.layers - 2);
        let last = joined(again(last), head);
        let mut parts: Vec<PartCosts> = std::iter::once(again(first)).chain(blocks).chain([last]).collect();
        // Each rank along tensor sends its share of a value that all have, and the receivers gather it in their node.
        if !plan.sequence_parallel {
            for part in &mut parts {
                (part.input, part.output) = (part.input / plan.tensor as u64, part.output / plan.tensor as u64);
            }
        }
        Ok(ModelCosts { parts })
    }
}

/// Two parts as one.
fn joined(mut part: PartCosts, next: &PartCosts) -> PartCosts {
    part.forward += next.forward;
    part.backward += next.backward;
    part.forward_exchanges.extend(&next.forward_exchanges);
    part.backward_exchanges.extend(&next.backward_exchanges);
    part.saved += next.saved;
    part.transient = part.transient.max(next.transient);
    part.parameters.extend(next.parameters.clone());
    PartCosts { output: next.output, ..part }
}
