//! Training steps: clear the gradients, forward, backward, AdamW, read the loss.

use std::{cell::OnceCell, rc::Rc};

use weftgrad::{
    Checkpoint, DType, Error, Leaf, NnOps, Result, Runtime, Tensor, Var,
    nn::{Conv2d, Forward, Gpt, GptConfig, Init, Linear, ModuleExt, Relu, Sequential, parallel::VocabularyLoss},
    ops::{PointwiseOps, ViewOps},
    optim::{AdamW, AdamWConfig, Optimizer, OptimizerCore},
    prelude::Module,
};

use super::{Case, data};

const LR: f64 = 3e-4;

fn config(lr: f64) -> AdamWConfig {
    AdamWConfig { lr, weight_decay: 1e-2, ..Default::default() }
}

/// A case of whole training steps.
pub(super) fn steps<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let mut training = Training::new(rt, name, n)?;
    (0..WARM_UP).try_for_each(|_| training.step().map(drop))?;
    Ok(case(training.long, move || training.step()?.item()))
}

/// A case of whole training steps that were captured once: each call launches one.
#[cfg(feature = "cuda")]
pub(super) fn captured(rt: &weftgrad::Cuda, name: &str, n: &[usize]) -> Result<Case> {
    let mut training = Training::new(rt, name, n)?;
    training.optimizer = training.optimizer.capturable();
    (0..WARM_UP).try_for_each(|_| training.step().map(drop))?;
    let (graph, loss) = rt.capture(|| training.step())?;
    Ok(case(training.long, move || training.launch(&graph).and_then(|()| loss.item())))
}

#[cfg(feature = "cuda")]
impl Training<weftgrad::Cuda> {
    /// Launches a captured step of this training, whose model and data must live: it reads their memory.
    fn launch(&mut self, graph: &weftgrad::runtime_cuda::Graph) -> Result<()> {
        self.optimizer.advance()?;
        graph.launch()
    }
}

/// The number of steps before the first call.
const WARM_UP: usize = 3;

/// A case whose calls return losses.
fn case(long: bool, mut step: impl FnMut() -> Result<f64> + 'static) -> Case {
    let last = Rc::new(std::cell::Cell::new(None));
    let seen = last.clone();
    let run = move || step().map(|loss| seen.set(Some(loss)));
    Case { long, loss: last, ..Case::new(run) }
}

/// A model in training.
struct Training<R: Runtime> {
    optimizer: AdamW<R>,
    loss: Box<dyn Fn() -> Result<Var<R>>>,
    long: bool,
}

impl<R: Runtime> Training<R> {
    fn new(rt: &R, name: &str, n: &[usize]) -> Result<Self> {
        match name {
            "mlp" => mlp(rt),
            "cnn" => cnn(rt),
            "gpt2" => gpt2(rt, n, DType::BF16),
            "gpt2f32" => gpt2(rt, n, DType::F32),
            "gptkept" => checkpointed(rt, n[0]),
            "gpttinybf16" => language_model(rt, tiny(), 2, data::dtype_of(name)),
            "gpt" | "gptbf16" => language_model(rt, GptConfig::default(), 8, data::dtype_of(name)),
            _ => Err(Error::argument("captured", format!("`{name}` is no training step"))),
        }
    }

    fn of<M: Module<R> + 'static>(model: M, loss: impl Fn(&M) -> Result<Var<R>> + 'static) -> Result<Self> {
        let optimizer = AdamW::new(&model, config(LR))?;
        Ok(Training { optimizer, loss: Box::new(move || loss(&model)), long: false })
    }

    fn step(&mut self) -> Result<Tensor<R>> {
        let loss = (self.loss)()?;
        self.optimizer.backward(&loss)?;
        self.optimizer.step()?;
        loss.value()
    }
}

pub(super) fn adamw<R: Runtime>(rt: &R, name: &str, n: &[usize]) -> Result<Case> {
    let each = n[0] / 16;
    let dtype = data::dtype_of(name);
    let leaf = |i: u64| Leaf::new(&format!("p{i}"), data::normal(rt, &[each], dtype, i)?);
    let leaves = (0..16).map(leaf).collect::<Result<Vec<_>>>()?;
    let mut optimizer = AdamW::over(config(1e-3), leaves.clone())?;
    let mut gradients = optimizer.alloc_gradients()?;
    let mut given = weftgrad::Gradients::new();
    for leaf in &leaves {
        given.set(leaf, data::normal(rt, &[each], dtype, 99)?.mul(1e-3)?)?;
    }
    gradients.copy_from(&given)?;
    drop((given, leaves));
    Ok(Case::new(move || optimizer.step_from(&gradients)))
}

fn mlp<R: Runtime>(rt: &R) -> Result<Training<R>> {
    let init = Init::new(rt, 0);
    let model = Sequential::new()
        .push(Linear::new(&init, 784, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 512)?)
        .push(Relu)
        .push(Linear::new(&init, 512, 10)?);
    let x = Var::new(data::normal(rt, &[128, 784], DType::F32, 1)?);
    let y = Var::new(data::classes(rt, &[128], 10, 2)?);
    Training::of(model, move |m| m.forward(&x)?.cross_entropy(&y))
}

/// A network of conv 3×3 (32) – conv 3×3 (64) – max-pool 2 – 128 – 10.
#[derive(Module)]
struct Cnn<R: Runtime> {
    c1: Conv2d<R>,
    c2: Conv2d<R>,
    f1: Linear<R>,
    f2: Linear<R>,
}

fn cnn<R: Runtime>(rt: &R) -> Result<Training<R>> {
    let init = Init::new(rt, 0);
    let model = Cnn {
        c1: Conv2d::new(&init, 1, 32, [3, 3], Default::default())?,
        c2: Conv2d::new(&init, 32, 64, [3, 3], Default::default())?,
        f1: Linear::new(&init, 64 * 12 * 12, 128)?,
        f2: Linear::new(&init, 128, 10)?,
    };
    let x = Var::new(data::normal(rt, &[64, 1, 28, 28], DType::F32, 1)?);
    let y = Var::new(data::classes(rt, &[64], 10, 2)?);
    Training::of(model, move |m| {
        let h = m.c2.forward(&m.c1.forward(&x)?.relu()?)?.relu()?.max_pool2d([2, 2], [2, 2], [0, 0])?;
        let logits = m.f2.forward(&m.f1.forward(&h.flatten(1, -1)?)?.relu()?)?;
        logits.cross_entropy(&y)
    })
}

/// Random tokens, and each one's successor.
fn tokens<R: Runtime>(rt: &R, batch: usize, config: &GptConfig) -> Result<(Var<R>, Var<R>)> {
    let length = config.context;
    let tokens = data::classes(rt, &[batch, length + 1], config.vocab, 1)?;
    let x = Var::new(tokens.narrow(1, 0, length)?.contiguous()?);
    let y: Tensor<R> = tokens.narrow(1, 1, length)?.contiguous()?;
    Ok((x, Var::new(y)))
}

fn language_model<R: Runtime>(rt: &R, config: GptConfig, batch: usize, dtype: DType) -> Result<Training<R>> {
    let (x, y) = tokens(rt, batch, &config)?;
    let model = Gpt::new(&Init::new(rt, 0), config)?;
    if dtype != DType::F32 {
        model.to_dtype(dtype)?;
    }
    let training = Training::of(model, move |m| m.next_token_loss(&x, &y, &VocabularyLoss::default()))?;
    Ok(Training { long: true, ..training })
}

/// The GPT of the case `gpt`, each block of which keeps some percent of the bytes that its backward pass reads, and
/// computes the rest again.
fn checkpointed<R: Runtime>(rt: &R, percent: usize) -> Result<Training<R>> {
    let config = GptConfig::default();
    let (x, y) = tokens(rt, 8, &config)?;
    let (model, budget) = (Gpt::new(&Init::new(rt, 0), config)?, OnceCell::new());
    let training = Training::of(model, move |m| {
        let mut h = m.embed(&x)?;
        for block in m.blocks.iter() {
            let forward = || block.forward(&h);
            let whole = || Checkpoint::keep(|_| true).run_with_bill(forward).1.kept_bytes;
            h = match percent {
                100.. => forward(),
                _ => Checkpoint::budget(*budget.get_or_init(whole) * percent / 100).run(forward),
            }?;
        }
        m.next_token_loss_of(&h, &y, &VocabularyLoss::default())
    })?;
    Ok(Training { long: true, ..training })
}

/// The smallest sensible GPT, for trying tools that take any case.
fn tiny() -> GptConfig {
    GptConfig { vocab: 61, context: 16, layers: 2, heads: 2, width: 32, ..Default::default() }
}

/// GPT-2 with 124 million parameters (Radford et al. 2019): batch and context as given.
fn gpt2<R: Runtime>(rt: &R, n: &[usize], dtype: DType) -> Result<Training<R>> {
    let size = GptConfig {
        vocab: 50257,
        context: n[1],
        layers: 12,
        heads: 12,
        width: 768,
        tied_head: true,
        ..Default::default()
    };
    language_model(rt, size, n[0], dtype)
}
