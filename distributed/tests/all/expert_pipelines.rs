//! Experts in the stages of pipelines: a mixture of experts in stages trains as the whole one does on one rank.

use crate::{
    expert_common::{ExpertCase, MoeBlock, MoeGpt, WIDTH},
    pipeline_common::TIMEOUT,
    pipeline_staged::How,
    prelude::*,
    tensor_common::{TensorTrace, apart, assembled, pieces},
};

/// Examples of a step.
const SEQUENCES: usize = 8;
/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

/// Loads of the blocks of a stage since they were last looked at.
type Loads = Arc<Mutex<Vec<Vec<u64>>>>;

/// A part of a [`MoeGpt`]: what comes between stages is `[B, T, C]`, and the losses of the routers so far.
struct MoeStage {
    first: usize,
    embed: Option<(Embedding<Cpu>, ContextSlot<Cpu>)>,
    blocks: Arc<Vec<MoeBlock<Cpu>>>,
    head: Option<(RmsNorm<Cpu>, Linear<Cpu>, ContextSlot<Cpu>)>,
    router: [f64; 2],
    loads: Loads,
}

impl Module<Cpu> for MoeStage {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        visitor.enter(name);
        if let Some((wte, context)) = &self.embed {
            visitor.context(context);
            wte.visit("wte", visitor);
        }
        visitor.enter("blocks");
        self.blocks.iter().enumerate().for_each(|(k, block)| block.visit(&(self.first + k).to_string(), visitor));
        visitor.leave();
        if let Some((norm, head, context)) = &self.head {
            visitor.context(context);
            norm.visit("norm", visitor);
            head.visit("head", visitor);
        }
        visitor.leave();
    }
}

impl Stage<Cpu> for MoeStage {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let (mut x, mut aux) = match (&self.embed, inputs) {
            (Some((wte, context)), [tokens]) => (wte.forward(&context.take_tokens(tokens)?)?, None),
            (None, [x, aux]) => (x.clone(), Some(aux.clone())),
            _ => unreachable!("tokens, or a value and the losses so far"),
        };
        for (k, block) in self.blocks.iter().enumerate() {
            x = block.attention.attend(block.attention.project(&block.norm1.forward(&x)?, None)?, None, &x)?;
            let out = block.mlp.forward_routed(&block.norm2.forward(&x)?)?;
            x = x.add(&out.y)?;
            let [balance, z] = self.router;
            let own = out.routing.balance_loss()?.mul(balance)?.add(&out.routing.z_loss()?.mul(z)?)?;
            aux = Some(aux.map_or_else(|| Ok(own.clone()), |aux| aux.add(&own))?);
            if is_grad_enabled() {
                let mut loads = self.loads.lock().unwrap();
                loads[k].iter_mut().zip(out.routing.loads()?).for_each(|(sum, load)| *sum += load);
            }
        }
        let aux = aux.map_or_else(|| Tensor::zeros(x.runtime(), [], x.dtype()).map(Var::new), Ok)?;
        match &self.head {
            None => Ok(vec![x, aux]),
            Some((norm, head, _)) => Ok(vec![head.forward(&norm.forward(&x)?)?, aux]),
        }
    }
}

/// A case in stages.
#[derive(Clone, Debug)]
pub struct Staged {
    pub case: ExpertCase,
    pub kind: ScheduleKind,
    /// Stages on each rank.
    pub v: usize,
    pub micros: usize,
    /// Runs of the pipeline in a step.
    pub runs: usize,
    pub how: How,
    /// Whether the first replica has all examples, and what the others compute weighs nothing.
    pub alone: bool,
}

/// What training looks at beside the step: blocks and loads of this rank's stages.
type Watched = Vec<(Arc<Vec<MoeBlock<Cpu>>>, Loads)>;

impl Staged {
    pub fn new(experts: usize) -> Self {
        let case = ExpertCase { router: [0.3, 0.1], steps: 2, ..ExpertCase::new(experts) };
        Staged { case, kind: ScheduleKind::OneFOneB, v: 1, micros: 4, runs: 1, how: How::Replicas, alone: false }
    }

    /// The examples of micro-batch `k` of a step over all replicas, of which there are `n`, that replica `r` has: consecutive ones.
    fn share(&self, k: usize, r: usize, n: usize) -> Vec<usize> {
        let of_micro = SEQUENCES / (self.micros * self.runs);
        let own = of_micro / n;
        (k * of_micro + r * own..k * of_micro + (r + 1) * own).collect()
    }

    /// This rank's stages.
    fn model(&self, mesh: &Mesh<Cpu>, plan: &TensorPlan) -> Result<(PipelineModel<Cpu>, Watched)> {
        let pipe = mesh.axis(Axis::Pipe);
        let checked = self.how.checked(self.kind, pipe.size(), self.v, self.micros).unwrap();
        let stages = checked.schedule().stages();
        let init = Init::new(mesh.world().runtime(), 7).dtype(self.case.dtype).lazily();
        let MoeGpt { wte, blocks, norm, head, .. } = MoeGpt::new(&init, &self.case.model)?;
        let (count, mut blocks) = (blocks.len(), blocks.into_iter());
        let mut cut: Vec<MoeStage> = (0..stages)
            .map(|stage| {
                let (first, end) = (stage * count / stages, (stage + 1) * count / stages);
                let loads = vec![vec![0; self.case.model.experts]; end - first];
                MoeStage {
                    first,
                    embed: None,
                    blocks: Arc::new(blocks.by_ref().take(end - first).collect()),
                    head: None,
                    router: self.case.router,
                    loads: Arc::new(Mutex::new(loads)),
                }
            })
            .collect();
        let context = ContextSlot::cuts();
        cut[0].embed = Some((wte, ContextSlot::cuts()));
        cut[stages - 1].head = Some((norm, head, context.clone()));
        for stage in &cut {
            self.case.frozen.iter().for_each(|prefix| nn::ModuleExt::freeze_where(stage, nn::under(prefix)));
        }
        let placement = checked.schedule().placement();
        let here = cut.iter().enumerate().filter(|(stage, _)| placement.rank_of(*stage) == Some(pipe.rank()));
        let watched = here.map(|(_, stage)| (stage.blocks.clone(), stage.loads.clone())).collect();
        let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
            let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
            let loss = y[0].cross_entropy_with(&context.take(&t[0], 1)?, None, options)?.add(&y[1])?;
            Loss::sum(context.of_whole(&loss)?, t[0].dims().iter().product::<usize>() as f64)
        };
        let model = PipelineModel::on(pipe.rank(), checked, cut).loss(loss).parallelize(mesh, plan)?;
        Ok((model.context_parallel(mesh, self.case.exchange)?, watched))
    }

    fn steps(
        &self,
        trainer: &mut TrainStep<Cpu>,
        watched: &Watched,
        mesh: &Mesh<Cpu>,
        steps: std::ops::Range<usize>,
    ) -> Result<TensorTrace> {
        let (mut trace, comm) = (TensorTrace::default(), mesh.batch());
        let (replica, replicas) = if self.alone { (0, 1) } else { (comm.rank(), comm.size()) };
        for step in steps {
            let metrics = trainer.step(|run| {
                let micros = run * self.micros..(run + 1) * self.micros;
                let own: Vec<usize> = micros.flat_map(|k| self.share(k, replica, replicas)).collect();
                let [x, y] = ExpertCase::batch(comm.runtime(), step, &own)?;
                let batch = MicroBatches::split(&[x.value()?], &[y.value()?], self.micros)?;
                Ok(MicroBatches { weightless: self.alone && comm.rank() > 0, ..batch })
            })?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
            for (blocks, loads) in watched.iter().filter(|_| self.case.bias_rate > 0.0) {
                for (block, loads) in blocks.iter().zip(loads.lock().unwrap().iter_mut()) {
                    block.mlp.update_balance_bias(loads, self.case.bias_rate)?;
                    loads.fill(0);
                }
            }
        }
        Ok(trace)
    }

    /// Trains steps on the ranks of a mesh, from what is in the folder, if they are not the first, and saves there.
    fn train(&self, mesh: &Mesh<Cpu>, steps: std::ops::Range<usize>, folder: Option<&Folder>) -> Result<TensorTrace> {
        manual_seed(3);
        let (model, watched) = self.model(mesh, &MoeGpt::plan())?;
        let builder =
            TrainStep::builder(mesh, model).optimizer(adamw()).max_norm(self.case.max_norm).accumulation(self.runs);
        macro_rules! train {
            ($step:expr) => {{
                let mut step = $step;
                if let Some(folder) = folder {
                    assert_eq!(step.load(folder)?.is_some(), steps.start > 0);
                }
                let trace = self.steps(&mut step, &watched, mesh, steps.clone())?;
                if let Some(folder) = folder {
                    step.save(folder, &CheckpointNotes::new())?;
                }
                (step, trace)
            }};
        }
        let pieces_of = |step: &dyn Fn() -> Result<Vec<_>>, mut trace: TensorTrace| {
            trace.pieces = step()?;
            Ok(trace)
        };
        match self.how.zero() {
            None => {
                let (step, trace) = train!(builder.experts().build()?);
                pieces_of(&|| all_pieces(&step), trace)
            }
            Some(zero) => {
                let (step, trace) = train!(builder.zero(zero).experts().build()?);
                let _all = step.gather_full_params()?;
                pieces_of(&|| all_pieces(&step), trace)
            }
        }
    }

    fn on_from(&self, axes: &[(Axis, usize)], steps: std::ops::Range<usize>, folder: Option<&Folder>) -> TensorTrace {
        let plan = ParallelPlan::of(axes.to_vec()).unwrap();
        let ranks = Ranks::new(plan.world()).timeout(TIMEOUT);
        let traces = ranks.run(cpu, |comm| self.train(&Mesh::new(&comm, plan.clone())?, steps.clone(), folder));
        assembled(traces.unwrap_or_else(|error| panic!("{axes:?} {self:?}: {error}")))
    }

    /// The whole model on one rank, with the micro-batches of all replicas together.
    fn alone(&self) -> TensorTrace {
        let mesh = NoOpCommunicator::new(&cpu(0).unwrap()).as_mesh();
        self.alone_on(&mesh).unwrap()
    }

    fn alone_on(&self, mesh: &Mesh<Cpu>) -> Result<TensorTrace> {
        manual_seed(3);
        let (case, rt) = (&self.case, mesh.world().runtime());
        let model = case.build(mesh)?;
        let micros = self.micros * self.runs;
        let builder = TrainStep::builder(mesh, &model).optimizer(adamw()).max_norm(case.max_norm).accumulation(micros);
        let (mut trainer, mut trace) = (builder.experts().build()?, TensorTrace::default());
        for step in 0..case.steps {
            let mut loads = vec![vec![0; case.model.experts]; model.blocks.len()];
            let metrics = trainer.step(|k| {
                let (loss, routings) = case.loss(&model, rt, step, &self.share(k, 0, 1))?;
                for (sum, routing) in loads.iter_mut().zip(routings) {
                    sum.iter_mut().zip(routing.loads()?).for_each(|(sum, load)| *sum += load);
                }
                Ok(loss)
            })?;
            trace.losses.push(metrics.loss()?);
            trace.norms.extend(metrics.grad_norm()?);
            for (block, loads) in model.blocks.iter().zip(&loads).filter(|_| case.bias_rate > 0.0) {
                block.mlp.update_balance_bias(loads, case.bias_rate)?;
            }
        }
        trace.pieces = pieces(&model)?;
        Ok(trace)
    }

    pub fn same(&self, axes: &[(Axis, usize)]) {
        let off = apart(&self.on_from(axes, 0..self.case.steps, None), &self.alone());
        assert!(off <= CLOSE, "{axes:?} {self:?}: {off:e}");
    }
}

type Pieces = Vec<(String, numcore::placement::TensorPlacement, Vec<f64>)>;

fn all_pieces(step: &TrainStep<Cpu>) -> Result<Pieces> {
    let stages = step.pipeline().expect("stages").stages().values().map(|stage| pieces(&**stage));
    Ok(stages.collect::<Result<Vec<_>>>()?.concat())
}

const FOUR: [(Axis, usize); 3] = [(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 2)];

#[test]
fn every_stage_of_zero_trains_as_one_rank() {
    for how in [
        How::Replicas,
        How::Zero(ZeroStage::Optimizer),
        How::Zero(ZeroStage::Gradients),
        How::Zero(ZeroStage::Parameters),
        How::Gathered,
    ] {
        Staged { how, ..Staged::new(4) }.same(&FOUR);
    }
}

/// The experts of replicas that have no example of their own have tokens of the others.
#[test]
fn experts_of_a_replica_without_examples_learn_from_others() {
    for how in [How::Replicas, How::Zero(ZeroStage::Parameters)] {
        let mut staged = Staged { how, alone: true, kind: ScheduleKind::ZbH1, ..Staged::new(4) };
        staged.case.router = [0.0; 2];
        staged.same(&FOUR);
    }
}

#[test]
fn every_schedule_trains_as_one_rank() {
    for (kind, v) in [
        (ScheduleKind::GPipe, 1),
        (ScheduleKind::ZbH1, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::Zbv, 2),
        (ScheduleKind::InterleavedZeroBubble, 2),
    ] {
        // With two stages on each rank of two layers, some have no experts.
        Staged { kind, v, ..Staged::new(4) }.same(&FOUR);
    }
}

#[test]
fn experts_of_stages_lie_over_every_axis_that_reads_other_tokens() {
    for (axes, how) in [
        (&[(Axis::Pipe, 2), (Axis::Data, 4), (Axis::Expert, 4)][..], How::Replicas),
        (&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 1)], How::Replicas),
        (&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Shard, 2), (Axis::Expert, 2)], How::Zero(ZeroStage::Parameters)),
        (&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)], How::Replicas),
        (&[(Axis::Pipe, 2), (Axis::Shard, 2), (Axis::Tensor, 2), (Axis::Expert, 2)], How::Zero(ZeroStage::Gradients)),
        (&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 4)], How::Replicas),
        (&[(Axis::Pipe, 2), (Axis::Context, 2), (Axis::Expert, 2)], How::Zero(ZeroStage::Parameters)),
        (&[(Axis::Pipe, 1), (Axis::Data, 2), (Axis::Expert, 2)], How::Replicas),
    ] {
        let mut case = Staged { how, micros: 2, ..Staged::new(4) };
        case.case.exchange = ContextExchange::Ring;
        case.same(axes);
    }
}

#[test]
fn experts_without_tokens_accumulation_and_frozen_ones() {
    // Two tokens of each micro-batch for each of eight experts, if they were even: some have none.
    let few = Staged { runs: 2, micros: 2, ..Staged::new(8) };
    few.same(&FOUR);
    let frozen: &[&[&str]] = &[&["blocks.0.mlp.experts"], &["blocks.1.mlp.experts.down_proj", "wte"], &["blocks.1"]];
    for &frozen in frozen {
        for how in [How::Replicas, How::Zero(ZeroStage::Parameters)] {
            let case = ExpertCase { frozen, ..few.case.clone() };
            Staged { case, how, ..few.clone() }.same(&FOUR);
        }
    }
}

#[test]
fn a_bias_of_each_stage_moves_by_the_loads_of_all_micro_batches() {
    let mut staged = Staged::new(4);
    staged.case.bias_rate = 0.1;
    staged.case.steps = 5;
    staged.case.model =
        MoeConfig { balance_bias: true, scores: RouterScores::Sigmoid, ..MoeConfig::new(WIDTH, 6, 4, 2) };
    staged.same(&FOUR);
    staged.same(&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)]);
}

/// An arrangement of ranks.
type Axes = &'static [(Axis, usize)];

/// Every tensor of a checkpoint, whole, as bytes.
fn contents(folder: &Folder, step: u64) -> Vec<(String, Vec<u8>)> {
    let rt = cpu(0).unwrap();
    let mut reader = CheckpointReader::open(folder.step(step)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}

#[test]
fn checkpoints_go_from_any_stages_to_any_others_to_the_bit() {
    let cuts: [(Axes, How, usize); 4] = [
        (&FOUR, How::Replicas, 1),
        (
            &[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Context, 2), (Axis::Expert, 4)],
            How::Zero(ZeroStage::Parameters),
            1,
        ),
        (&[(Axis::Pipe, 1), (Axis::Data, 2), (Axis::Expert, 1)], How::Replicas, 1),
        (&[(Axis::Pipe, 2), (Axis::Tensor, 2)], How::Zero(ZeroStage::Optimizer), 2),
    ];
    let staged = |how, v| {
        let mut staged = Staged { how, v, micros: 2, ..Staged::new(4) };
        (staged.case.dtype, staged.kind) = (DType::F32, if v > 1 { ScheduleKind::Interleaved } else { staged.kind });
        staged
    };
    for (axes, how, v) in cuts {
        let saved = Scratch::new("expert-stages");
        staged(how, v).on_from(axes, 0..2, Some(&saved.folder()));
        let first = contents(&saved.folder(), 2);
        assert!(first.iter().any(|(name, _)| name == "state/exp_avg/blocks.1.mlp.experts.down_proj"));
        for (others, how, v) in cuts {
            // Loaded, and saved again.
            staged(how, v).on_from(others, 2..2, Some(&saved.folder()));
            assert!(contents(&saved.folder(), 2) == first, "{axes:?} loaded by {others:?}");
        }
    }
}

#[test]
fn stages_say_what_they_lack() {
    let refused = |plan: TensorPlan, asks: bool| {
        let ranks = Ranks::new(4).timeout(TIMEOUT);
        let outcome = ranks.run(cpu, |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of(FOUR)?)?;
            let (model, _) = Staged::new(4).model(&mesh, &plan)?;
            let builder = TrainStep::builder(&mesh, model).optimizer(adamw());
            if asks { builder.experts().build().map(drop) } else { builder.build().map(drop) }
        });
        outcome.unwrap_err().to_string()
    };
    let unasked = refused(MoeGpt::plan(), false);
    assert!(unasked.contains("mlp.experts") && unasked.contains("say `experts()`"), "{unasked}");
    let none = refused(TensorPlan::new().vocabulary("wte"), true);
    assert!(none.contains("2 ranks along expert") && none.contains("PipelineModel::parallelize"), "{none}");
}
