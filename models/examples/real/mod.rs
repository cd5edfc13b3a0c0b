//! SmolLM2 with adapters as a policy, trained on one rank, in shards (ZeRO stage 3) or in a pipeline of two stages, and
//! sums of two numbers to ask it for.

use std::path::{Path, PathBuf};

use autograd::{Var, no_grad};
use comm::{Comm, Communicator};
use data::sources::Tokenizer;
use distributed::{
    differentiable,
    mesh::Mesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, PipelineOptions, ScheduleKind},
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{
    ChatTemplate, Conversation, Decoder, DecoderInputs, GenerationOptions, Lora, LoraConfig, LoraTargets, Pretrained,
};
use nn::{Init, ModuleExt, Param, loss::cross_entropy_with};
use numcore::{
    Error, Result,
    fused::{CrossEntropyOptions, Reduction},
    ops::PointwiseOps,
};
use optim::AdamWConfig;
use runtime_cpu::Cpu;

/// The ways to train: a name, the axis that ranks lie along, and their number.
pub const LAYOUTS: [(&str, Axis, usize); 3] =
    [("one rank", Axis::Data, 1), ("ZeRO 3 on 2 ranks", Axis::Data, 2), ("2 stages", Axis::Pipe, 2)];
const MICRO_BATCHES: usize = 2;

/// The model's file, in the folder that the program was given.
pub fn file(program: &'static str) -> Result<PathBuf> {
    let folder = std::env::args().nth(1).map(PathBuf::from);
    Ok(folder.ok_or_else(|| Error::argument(program, "which folder has the model?"))?.join("smollm2.gguf"))
}

/// The model with adapters on all linear layers. Every call with a seed draws the same adapters.
fn adapted(comm: &Comm<Cpu>, file: &Path, seed: u64) -> Result<(Decoder<Cpu>, Lora<Cpu>)> {
    let init = Init::new(comm.runtime(), seed);
    let model = Decoder::from_pretrained(file, &init.clone().lazily())?;
    let config = LoraConfig { rank: 8, target_modules: LoraTargets::AllLinear, ..LoraConfig::default() };
    let lora = Lora::new(&model, &init, config)?;
    Ok((model, lora))
}

/// A policy whose adapters are trained. Its reference is the model without them.
pub struct Policy<F> {
    comm: Comm<Cpu>,
    /// The ranks that have examples of their own.
    pub batch: Comm<Cpu>,
    /// The whole model, which samples. A pipeline trains stages of a second one.
    pub model: Decoder<Cpu>,
    lora: Lora<Cpu>,
    pub step: TrainStep<Cpu>,
    /// The trained parameters of this rank's stage.
    stage: Option<Vec<(String, Param<Cpu>)>>,
    loss: F,
}

impl<F: Fn(&Var<Cpu>, &[Var<Cpu>]) -> Result<Loss<Cpu>> + Clone + Send + 'static> Policy<F> {
    /// The policy of a file. `loss` is of log-probabilities `[N, T]`, and of other tensors of the rows.
    pub fn new(comm: &Comm<Cpu>, file: &Path, seed: u64, axis: Axis, lr: f64, loss: F) -> Result<Self> {
        let mesh = Mesh::new(comm, ParallelPlan::of([(axis, comm.size())])?)?;
        let (model, lora) = adapted(comm, file, seed)?;
        let adamw = AdamWConfig { lr, weight_decay: 0.0, ..Default::default() };
        let (step, stage) = if axis == Axis::Pipe {
            let shape = PipeShape { ranks: comm.size(), stages_per_rank: 1, micro_batches: MICRO_BATCHES };
            let schedule =
                ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
            let stages = adapted(comm, file, seed)?.0.split(comm.size())?;
            let (own, loss) = (stages[comm.rank()].named_parameters(), loss.clone());
            let each = CrossEntropyOptions { reduction: Reduction::None, ..CrossEntropyOptions::default() };
            let model = PipelineModel::on(comm.rank(), schedule, stages)
                .options(PipelineOptions { dynamic_shapes: true, ..PipelineOptions::default() })
                .loss(move |logits, of| loss(&cross_entropy_with(&logits[0], &of[0], each)?.neg()?, &of[1..]));
            (TrainStep::builder(&mesh, model).optimizer(adamw).build()?, Some(own))
        } else {
            (TrainStep::builder(&mesh, &lora).optimizer(adamw).zero(ZeroStage::Parameters).build()?, None)
        };
        Ok(Policy { comm: comm.clone(), batch: mesh.axis(Axis::Data).clone(), model, lora, step, stage, loss })
    }

    /// The log-probabilities of the model without adapters.
    pub fn reference(&self, tokens: &Var<Cpu>, targets: &Var<Cpu>) -> Result<Var<Cpu>> {
        self.lora.without(|| no_grad(|| logprobs(&self.model, tokens, targets)))?
    }

    /// Trains on rows, and returns the loss of all ranks.
    pub fn train(&mut self, tokens: &Var<Cpu>, targets: &Var<Cpu>, others: &[Var<Cpu>]) -> Result<f64> {
        let Policy { model, step, loss, .. } = self;
        if self.stage.is_none() {
            return step.step(|_| loss(&logprobs(model, tokens, targets)?, others))?.loss();
        }
        let of = [targets].into_iter().chain(others).map(Var::value).collect::<Result<Vec<_>>>()?;
        let metrics = step.step(|_| MicroBatches::split(&[tokens.value()?], &of, MICRO_BATCHES))?;
        no_grad(|| self.take_over())?;
        metrics.loss()
    }

    /// Takes the adapters of all ranks' stages over into the model that samples.
    fn take_over(&self) -> Result<()> {
        for (name, parameter) in self.lora.named_parameters() {
            let value = match self.stage.iter().flatten().find(|(own, _)| *own == name) {
                Some((_, own)) => own.var(),
                None => parameter.var().mul(0.0)?,
            };
            parameter.set(differentiable::all_reduce(&self.comm, &value)?.value()?)?;
        }
        Ok(())
    }
}

/// The log-probability of each target, `[N, T]`; 0 for a target of −100.
fn logprobs(model: &Decoder<Cpu>, tokens: &Var<Cpu>, targets: &Var<Cpu>) -> Result<Var<Cpu>> {
    model.logprobs(&model.states(tokens, DecoderInputs::default())?, targets)
}

/// Sums of two numbers as conversations.
pub struct Sums {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// The tokens that end an answer.
    pub end: Vec<u32>,
}

impl Sums {
    pub fn open(file: &Path) -> Result<Self> {
        let end = GenerationOptions::of_folder(file)?.eos_token_ids;
        Ok(Sums { tokenizer: Tokenizer::open(file)?, template: ChatTemplate::of_folder(file)?, end })
    }

    /// The numbers of question `i`.
    pub fn numbers(i: usize) -> [usize; 2] {
        [i * 7 % 10, i * 3 % 8]
    }

    /// The tokens of question `i`.
    pub fn question(&self, i: usize) -> Result<Vec<u32>> {
        self.tokenizer.encode(&self.template.render(&Self::conversation(i), true)?)
    }

    /// Question `i`.
    pub fn conversation(i: usize) -> Conversation {
        let ([a, b], system) = (Self::numbers(i), "You add numbers. Answer with the number alone.");
        Conversation::new().with("system", system).with("user", &format!("What is {a} + {b}?"))
    }
}

/// The reward of an answer: a third each for beginning with a number, being one alone, and being the sum.
pub fn reward(answer: &str, sum: usize) -> f64 {
    let begins = answer.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let alone = answer.trim().parse::<usize>();
    [begins, alone.is_ok(), alone == Ok(sum)].into_iter().filter(|holds| *holds).count() as f64 / 3.0
}
