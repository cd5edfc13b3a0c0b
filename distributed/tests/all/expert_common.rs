//! A language model with mixtures of experts that are shared out among ranks, and the one rank that it is compared with.

use nn::moe::Routing;

use crate::{
    prelude::*,
    tensor_common::{TensorTrace, assembled, pieces},
};

/// Examples of a step: not the same number on every rank at most world sizes.
pub const SEQUENCES: usize = 9;
const TOKENS: usize = 4;
const VOCAB: usize = 12;
pub const WIDTH: usize = 8;

#[derive(Module)]
#[module(crate = "::nn")]
pub struct MoeBlock<R: Runtime> {
    pub norm1: RmsNorm<R>,
    pub attention: GroupedQueryAttention<R>,
    pub norm2: RmsNorm<R>,
    pub mlp: MixtureOfExperts<R>,
}

#[derive(Module)]
#[module(crate = "::nn")]
pub struct MoeGpt<R: Runtime> {
    pub wte: Embedding<R>,
    pub blocks: Vec<MoeBlock<R>>,
    pub norm: RmsNorm<R>,
    pub head: Linear<R>,
    pub context: ContextSlot<R>,
}

impl MoeGpt<Cpu> {
    pub fn new(init: &Init<Cpu>, config: &MoeConfig) -> Result<Self> {
        let attention = GroupedQueryConfig {
            width: WIDTH,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            fused: false,
            bias: false,
            output_bias: false,
            head_norm: None,
            window: None,
        };
        let block = |_| {
            Ok(MoeBlock {
                norm1: RmsNorm::new(init, WIDTH)?,
                attention: GroupedQueryAttention::new(init, attention)?,
                norm2: RmsNorm::new(init, WIDTH)?,
                mlp: MixtureOfExperts::new(init, config.clone())?,
            })
        };
        Ok(MoeGpt {
            wte: Embedding::new(init, VOCAB, WIDTH)?,
            blocks: (0..2).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::new(init, WIDTH)?,
            head: Linear::new(init, WIDTH, VOCAB)?.to_vocabulary(),
            context: ContextSlot::cuts(),
        })
    }

    pub fn plan() -> TensorPlan {
        let attention = ["q_proj", "k_proj", "v_proj"]
            .iter()
            .fold(TensorPlan::new(), |plan, projection| plan.column(format!("blocks.*.attention.{projection}")));
        attention.row("blocks.*.attention.o_proj").vocabulary("wte").experts("blocks.*.mlp.experts")
    }

    /// Logits of the tokens here, and where each block routed them.
    pub fn forward(&self, tokens: &Var<Cpu>) -> Result<(Var<Cpu>, Vec<Routing<Cpu>>)> {
        let (mut x, mut routings) = (self.wte.forward(&self.context.take_tokens(tokens)?)?, Vec::new());
        for block in &self.blocks {
            x = block.attention.attend(block.attention.project(&block.norm1.forward(&x)?, None)?, None, &x)?;
            let out = block.mlp.forward_routed(&block.norm2.forward(&x)?)?;
            x = x.add(&out.y)?;
            routings.push(out.routing);
        }
        Ok((self.head.forward(&self.norm.forward(&x)?)?, routings))
    }
}

/// What is trained, and how.
#[derive(Clone, Debug)]
pub struct ExpertCase {
    pub model: MoeConfig,
    pub dtype: DType,
    pub zero: Option<ZeroStage>,
    pub exchange: ContextExchange,
    pub accumulation: usize,
    pub frozen: &'static [&'static str],
    /// The factors of the balance loss and of the z-loss.
    pub router: [f64; 2],
    /// How far the balance bias moves after a step.
    pub bias_rate: f64,
    pub steps: usize,
    pub max_norm: f64,
}

impl ExpertCase {
    /// A mixture of so many experts.
    pub fn new(experts: usize) -> Self {
        ExpertCase {
            model: MoeConfig::new(WIDTH, 6, experts, 2.min(experts)),
            dtype: DType::F64,
            zero: None,
            exchange: ContextExchange::AllGather,
            accumulation: 1,
            frozen: &[],
            router: [0.0; 2],
            bias_rate: 0.0,
            steps: 3,
            max_norm: 0.5,
        }
    }

    pub fn build(&self, mesh: &Mesh<Cpu>) -> Result<MoeGpt<Cpu>> {
        let model = MoeGpt::new(&Init::new(mesh.world().runtime(), 7).dtype(self.dtype).lazily(), &self.model)?;
        self.frozen.iter().for_each(|prefix| model.freeze_where(nn::under(prefix)));
        mesh.parallelize(&model, &MoeGpt::plan())?;
        if mesh.plan().size(Axis::Context) > 1 {
            mesh.context_parallel(&model, self.exchange)?;
        }
        Ok(model)
    }

    /// Tokens and targets of some sequences of a step.
    pub fn batch(rt: &Cpu, step: usize, examples: &[usize]) -> Result<[Var<Cpu>; 2]> {
        let token = |i: usize| ((i * 7 + i / 3 + step * 5) % VOCAB) as i64;
        let text: Vec<i64> = (0..SEQUENCES * (TOKENS + 1)).map(token).collect();
        let index: Vec<i64> = examples.iter().map(|&i| i as i64).collect();
        let text = Tensor::from_slice(rt, [SEQUENCES, TOKENS + 1], &text)?
            .index_select(0, &Tensor::from_slice(rt, [index.len()], &index)?)?;
        let part = |at| text.narrow(1, at, TOKENS)?.contiguous().map(Var::new);
        Ok([part(0)?, part(1)?])
    }

    /// The loss of some sequences of a step, and where its tokens went.
    pub fn loss(
        &self,
        model: &MoeGpt<Cpu>,
        rt: &Cpu,
        step: usize,
        examples: &[usize],
    ) -> Result<(Loss<Cpu>, Vec<Routing<Cpu>>)> {
        let [x, y] = Self::batch(rt, step, examples)?;
        let (logits, routings) = model.forward(&x)?;
        let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        let mut loss = logits.cross_entropy_with(&model.context.take(&y, 1)?, None, options)?;
        let [balance, z] = self.router;
        for routing in routings.iter().filter(|_| self.router != [0.0; 2]) {
            loss = loss.add(&routing.balance_loss()?.mul(balance)?)?.add(&routing.z_loss()?.mul(z)?)?;
        }
        Ok((Loss::sum(model.context.of_whole(&loss)?, (TOKENS * examples.len()) as f64)?, routings))
    }

    pub fn step(
        &self,
        trainer: &mut TrainStep<Cpu>,
        model: &MoeGpt<Cpu>,
        comm: &Comm<Cpu>,
        step: usize,
    ) -> Result<TrainingMetrics<Cpu>> {
        // Consecutive ones: which tokens exceed a capacity depends on their order.
        let share = |rank: usize| rank * SEQUENCES / comm.size();
        let own: Vec<usize> = (share(comm.rank())..share(comm.rank() + 1)).collect();
        let micro = own.len().div_ceil(self.accumulation);
        let mut loads = vec![vec![0; self.model.experts]; model.blocks.len()];
        let metrics = trainer.step(|k| {
            let own = &own[(k * micro).min(own.len())..((k + 1) * micro).min(own.len())];
            let (loss, routings) = self.loss(model, comm.runtime(), step, own)?;
            if self.bias_rate > 0.0 {
                for (sum, routing) in loads.iter_mut().zip(routings) {
                    sum.iter_mut().zip(routing.loads()?).for_each(|(sum, load)| *sum += load);
                }
            }
            Ok(loss)
        })?;
        for (block, loads) in model.blocks.iter().zip(&loads).filter(|_| self.bias_rate > 0.0) {
            block.mlp.update_balance_bias(loads, self.bias_rate)?;
        }
        Ok(metrics)
    }

    fn steps(&self, trainer: &mut TrainStep<Cpu>, model: &MoeGpt<Cpu>, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        let mut trace = TensorTrace::default();
        for step in 0..self.steps {
            let metrics = self.step(trainer, model, mesh.batch(), step)?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
        }
        Ok(trace)
    }

    /// Trains on the ranks of a mesh.
    pub fn train(&self, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        manual_seed(3);
        let model = self.build(mesh)?;
        let builder =
            TrainStep::builder(mesh, &model).optimizer(adamw()).max_norm(self.max_norm).accumulation(self.accumulation);
        let mut step = builder.zero(self.zero.unwrap_or(ZeroStage::None)).experts().build()?;
        let trace = self.steps(&mut step, &model, mesh)?;
        let _all = step.gather_full_params()?;
        Ok(TensorTrace { pieces: pieces(&model)?, ..trace })
    }

    /// What one rank makes of it.
    pub fn alone(&self) -> TensorTrace {
        let rt = cpu(0).unwrap();
        self.train(&NoOpCommunicator::new(&rt).as_mesh()).unwrap()
    }

    /// What ranks make of it: the whole weights, and what all ranks agree on.
    pub fn on(&self, axes: &[(Axis, usize)]) -> TensorTrace {
        let plan = ParallelPlan::of(axes.to_vec()).unwrap();
        let traces = Ranks::new(plan.world()).run(cpu, |comm| self.train(&Mesh::new(&comm, plan.clone())?));
        assembled(traces.unwrap_or_else(|error| panic!("{axes:?} {self:?}: {error}")))
    }
}
