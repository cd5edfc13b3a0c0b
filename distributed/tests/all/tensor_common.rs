//! A GPT that is cut over ranks, and the one rank that it is compared with.

use crate::prelude::*;

/// Examples of a step, unless a case has others.
pub const SEQUENCES: usize = 6;

/// What is trained, and how.
#[derive(Clone, Debug)]
pub struct TensorCase {
    pub model: GptConfig,
    pub dtype: DType,
    pub sequence: bool,
    /// In how many pieces layers exchange parts of the sequence.
    pub pieces: usize,
    pub exchange: ContextExchange,
    pub zero: Option<ZeroStage>,
    pub accumulation: usize,
    pub frozen: &'static [&'static str],
    pub loss: VocabularyLoss,
    pub steps: usize,
    pub max_norm: f64,
    /// Examples of a step.
    pub sequences: usize,
}

impl TensorCase {
    /// A model whose sizes `t` divides.
    pub fn new(t: usize) -> Self {
        let heads = t.max(2);
        let model = GptConfig {
            vocab: 4 * heads,
            context: 2 * heads,
            layers: 2,
            heads,
            width: 4 * heads,
            ..Default::default()
        };
        let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        TensorCase {
            model,
            dtype: DType::F64,
            sequence: false,
            pieces: 1,
            exchange: ContextExchange::AllGather,
            zero: None,
            accumulation: 1,
            frozen: &[],
            loss: VocabularyLoss { cross_entropy, z_loss: 0.0 },
            steps: 3,
            max_norm: 0.5,
            sequences: SEQUENCES,
        }
    }

    /// Tokens and targets of some sequences of a step.
    pub fn batch(&self, rt: &Cpu, step: usize, examples: &[usize]) -> Result<(Var<Cpu>, Var<Cpu>)> {
        let (v, t) = (self.model.vocab, self.model.context);
        let token = |i: usize| ((i * 7 + i / 3 + step * 5) % v) as i64;
        let text: Vec<i64> = (0..self.sequences * (t + 1)).map(token).collect();
        let text = Tensor::from_slice(rt, [self.sequences, t + 1], &text)?;
        let index: Vec<i64> = examples.iter().map(|&i| i as i64).collect();
        let text = text.index_select(0, &Tensor::from_slice(rt, [index.len()], &index)?)?;
        Ok((Var::new(text.narrow(1, 0, t)?.contiguous()?), Var::new(text.narrow(1, 1, t)?.contiguous()?)))
    }

    pub fn plan(&self) -> TensorPlan {
        Gpt::<Cpu>::tensor_plan().sequence_parallel(self.sequence).exchange_in_pieces(self.pieces)
    }

    pub fn build(&self, mesh: &Mesh<Cpu>) -> Result<Gpt<Cpu>> {
        let init = Init::new(mesh.world().runtime(), 7).dtype(self.dtype).lazily();
        let model = Gpt::new(&init, self.model)?;
        self.frozen.iter().for_each(|prefix| model.freeze_where(nn::under(prefix)));
        mesh.parallelize(&model, &self.plan())?;
        mesh.context_parallel(&model, self.exchange)?;
        Ok(model)
    }

    /// Trains on the ranks of a mesh.
    pub fn train(&self, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        manual_seed(3);
        let model = self.build(mesh)?;
        let config =
            TrainingConfig { max_norm: Some(self.max_norm), accumulation: self.accumulation, ..Default::default() };
        let builder = TrainStep::builder(mesh, &model).optimizer(adamw()).config(config);
        let mut step = builder.zero(self.zero.unwrap_or(ZeroStage::None)).build()?;
        let trace = self.steps(&mut step, &model, mesh)?;
        let _all = step.gather_full_params()?;
        Ok(TensorTrace { pieces: pieces(&model)?, ..trace })
    }

    fn steps(&self, trainer: &mut TrainStep<Cpu>, model: &Gpt<Cpu>, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        let mut trace = TensorTrace::default();
        for step in 0..self.steps {
            let metrics = self.step(trainer, model, mesh.batch(), step)?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
        }
        Ok(trace)
    }

    pub fn step(
        &self,
        trainer: &mut TrainStep<Cpu>,
        model: &Gpt<Cpu>,
        comm: &Comm<Cpu>,
        step: usize,
    ) -> Result<TrainingMetrics<Cpu>> {
        let own = shard_batches(self.sequences, comm.rank(), comm.size());
        let micro = own.len().div_ceil(self.accumulation);
        trainer.step(|k| {
            let own = &own[(k * micro).min(own.len())..((k + 1) * micro).min(own.len())];
            let (x, y) = self.batch(comm.runtime(), step, own)?;
            Loss::sum(model.next_token_loss(&x, &y, &self.loss)?, (own.len() * self.model.context) as f64)
        })
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

/// What a run leaves.
#[derive(Clone, Debug, Default)]
pub struct TensorTrace {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    /// What a rank has of the weights.
    pub pieces: Vec<(String, TensorPlacement, Vec<f64>)>,
}

/// What this rank has of a model's weights.
pub fn pieces(model: &(impl Module<Cpu> + ?Sized)) -> Result<Vec<(String, TensorPlacement, Vec<f64>)>> {
    let piece = |(name, p): (String, nn::Param<Cpu>)| {
        let whole = || TensorPlacement::whole(p.shape());
        let placement = p.placed().map_or_else(whole, |placed| placed.placement().clone());
        Ok((name, placement, p.value()?.to_dtype(DType::F64)?.to_vec::<f64>()?))
    };
    model.named_parameters().into_iter().map(piece).collect()
}

/// One trace of those of all ranks: whole weights, of pieces that agree to the bit wherever two ranks have the same element.
pub fn assembled(traces: Vec<TensorTrace>) -> TensorTrace {
    let mut whole: BTreeMap<String, (TensorPlacement, Vec<Option<f64>>)> = BTreeMap::new();
    for (rank, trace) in traces.iter().enumerate() {
        assert!(
            (&trace.losses, &trace.norms) == (&traces[0].losses, &traces[0].norms),
            "rank {rank} tells another story"
        );
        for (name, placement, values) in &trace.pieces {
            let fresh = || (TensorPlacement::whole(placement.logical()), vec![None; placement.logical().numel()]);
            let (_, all) = whole.entry(name.clone()).or_insert_with(fresh);
            for run in placement.runs(0..values.len()) {
                for k in 0..run.len {
                    let (there, here) = (&mut all[run.logical + k], values[run.local + k]);
                    assert!(
                        there.is_none_or(|there| there == here),
                        "{name}: ranks differ in element {}",
                        run.logical + k
                    );
                    *there = Some(here);
                }
            }
        }
    }
    let complete = |(name, (placement, values)): (String, (TensorPlacement, Vec<Option<f64>>))| {
        let values = values.into_iter().map(|v| v.unwrap_or_else(|| panic!("{name}: an element is nowhere"))).collect();
        (name, placement, values)
    };
    TensorTrace { pieces: whole.into_iter().map(complete).collect(), ..traces[0].clone() }
}

/// The largest difference of two traces, relative to the largest value in each list.
pub fn apart(a: &TensorTrace, b: &TensorTrace) -> f64 {
    let lists = |t: &TensorTrace| {
        let weights: BTreeMap<_, _> = t.pieces.iter().map(|(name, _, values)| (name.clone(), values.clone())).collect();
        weights.into_values().chain([t.losses.clone(), t.norms.clone()]).collect::<Vec<_>>()
    };
    let (a, b) = (lists(a), lists(b));
    assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), b.iter().map(Vec::len).collect::<Vec<_>>());
    let of = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        let scale = y.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
        x.iter().zip(y).fold(0.0, |m: f64, (x, y)| if x.is_nan() { f64::NAN } else { m.max((x - y).abs() / scale) })
    };
    a.iter().zip(&b).map(of).fold(0.0, |m: f64, d| if d.is_nan() { d } else { m.max(d) })
}
