//! A rank's training by some way: steps, checkpoints, and what it has of the weights.

use distributed::train::{Step, StepInput, StepWork};
use train::{Callback, Checkpoints, Evaluate, Event, Interval, Length, Monitor, Run, Trainer, WeightAveraging};

use crate::{
    mixture::{Loads, Mixture},
    pipeline_common::squares,
    prelude::*,
};

/// The model of a rank.
enum Model {
    Gpt(Gpt<Cpu>),
    Mixture(Mixture),
    Layers(Sequential<Cpu>),
    Staged,
}

impl Module<Cpu> for Model {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        match self {
            Model::Gpt(model) => model.visit(name, visitor),
            Model::Mixture(model) => model.visit(name, visitor),
            Model::Layers(model) => model.visit(name, visitor),
            Model::Staged => {}
        }
    }
}

/// A loop over steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    Steps,
    /// A replica without examples, another one in each step.
    Idle,
    /// The last replica has no batch at all.
    NoBatches,
    /// A trainer that ends with the weights of the worst step, as if it were the best.
    RestoreBest,
    /// A trainer that ends with averages of weights.
    UseAtEnd,
}

impl Loop {
    /// Tells whether a trainer takes the steps.
    pub fn is_trainer(self) -> bool {
        [Loop::RestoreBest, Loop::UseAtEnd].contains(&self)
    }
}

/// Trains all parameters from the second step on.
struct Unfreeze(Vec<Param<Cpu>>);

/// Loses a rank at a step, if it is this one.
struct Lose(Option<u64>);

/// An error on the last rank of the first world.
pub fn is_lost(world: &ElasticWorld<Cpu>) -> Result<()> {
    let comm = world.comm()?;
    match world.generation() == 0 && comm.rank() + 1 == comm.size() {
        true => Err(Error::argument("the machine", "is gone")),
        false => Ok(()),
    }
}

impl<M, B> Callback<Cpu, M, B> for Lose {
    fn on(&mut self, event: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        match event {
            Event::StepBegin if Some(run.progress().step) == self.0 => Err(Error::argument("the machine", "is gone")),
            _ => Ok(()),
        }
    }
}

impl<M, B> Callback<Cpu, M, B> for Unfreeze {
    fn on(&mut self, _: &Event<'_, Cpu>, run: &mut Run<'_, Cpu, M, B>) -> Result<()> {
        if run.progress().step > 0 {
            self.0.iter().for_each(|p| p.set_requires_grad(true));
        }
        Ok(())
    }
}

/// A rank's training by some way.
pub struct Training<'w, S = TrainStep<Cpu>> {
    pub way: &'w Way,
    pub mesh: Mesh<Cpu>,
    pub step: S,
    model: Model,
    loads: Vec<Loads>,
}

impl<'w> Training<'w> {
    pub fn new(way: &'w Way, mesh: &Mesh<Cpu>) -> Result<Self> {
        Self::with(way, mesh, |builder| builder)
    }

    /// With what else is asked of the step.
    pub fn with(
        way: &'w Way,
        mesh: &Mesh<Cpu>,
        ask: impl FnOnce(TrainStepBuilder<'_, Cpu>) -> TrainStepBuilder<'_, Cpu>,
    ) -> Result<Self> {
        manual_seed(3);
        let finish = |builder: TrainStepBuilder<'_, Cpu>| {
            let (max_norm, accumulation) = (way.max_norm, way.accumulation);
            let config = TrainingConfig { max_norm, accumulation, ..Default::default() };
            let builder = match way.rule {
                Rule::AdamW => builder.optimizer(adamw()),
                Rule::Sgd => builder.optimizer(sgd()),
                Rule::Lamb => builder.optimizer(lamb()),
                // By default it divides what is rounding alone, of gradients that are 0, by its size.
                Rule::Adafactor => builder.optimizer(AdafactorConfig { eps1: Some(1e-4), ..Default::default() }),
                Rule::Muon => builder.optimizer(muon()),
                Rule::Prodigy => builder.optimizer(prodigy()),
                Rule::Lbfgs => builder.optimizer(LbfgsConfig { history_size: 2, ..Default::default() }),
            };
            let builder = builder.config(config);
            let builder = match way.zero.stage {
                ZeroStage::None => builder.buckets(way.buckets.clone()),
                _ => builder.zero(way.zero.clone()),
            };
            let builder = match way.power {
                Some(power) => builder.reducer(move |comm| power.reducer(comm)),
                None => builder,
            };
            ask(if way.is_mixture() && !way.bare { builder.experts() } else { builder }).build()
        };
        let (step, model, loads) = match way.kind {
            _ if way.stages.is_some() => {
                let (model, loads) = way.stages_on(mesh)?;
                (finish(TrainStep::builder(mesh, model))?, Model::Staged, loads)
            }
            Kind::Gpt => {
                let model = way.gpt_on(mesh)?;
                (finish(TrainStep::builder(mesh, &model))?, Model::Gpt(model), Vec::new())
            }
            Kind::Mixture(_) => {
                let model = way.mixture_on(mesh)?;
                let loads = vec![model.loads.clone()];
                (finish(TrainStep::builder(mesh, &model))?, Model::Mixture(model), loads)
            }
            Kind::Layers(layers) => {
                let model = way.layers_of(&way.init(mesh), layers)?;
                way.freeze(&model);
                (finish(TrainStep::builder(mesh, &model))?, Model::Layers(model), Vec::new())
            }
        };
        Ok(Training { way, mesh: mesh.clone(), step, model, loads })
    }

    /// This training with its step in a wrapper.
    pub fn wrapped<S>(
        self,
        wrap: impl FnOnce(&dyn Module<Cpu>, TrainStep<Cpu>) -> Result<S>,
    ) -> Result<Training<'w, S>> {
        let Training { way, mesh, step, model, loads } = self;
        Ok(Training { step: wrap(&model, step)?, way, mesh, model, loads })
    }

    /// Takes a step.
    pub fn take(&mut self, number: usize) -> Result<TrainingMetrics<Cpu>> {
        let Self { way, mesh, model, step, .. } = self;
        let metrics = step.step(|run| input(way, mesh, model, number, run))?;
        self.loads
            .iter()
            .filter(|_| self.way.bias_rate > 0.0)
            .try_for_each(|loads| loads.update(self.way.bias_rate))?;
        Ok(metrics)
    }

    /// Takes a step whose loss has, on ranks that say so, no finite gradient by the first parameter whose name ends so.
    pub fn take_spoiled(&mut self, number: usize, name: &str, spoiled: bool) -> Result<TrainingMetrics<Cpu>> {
        let Self { way, mesh, model, step, .. } = self;
        step.step(|run| {
            let StepInput::Loss(loss) = input(way, mesh, model, number, run)? else { panic!("{way:?} has stages") };
            let all = model.named_parameters();
            // Read on every rank: what is sharded is gathered for all.
            let value = all.iter().find(|(own, _)| own.ends_with(name)).expect("a parameter").1.var();
            let root_of_zero = value.sub(&value.detach())?.sqrt()?.sum_all()?;
            let total = if spoiled { loss.total().add(&root_of_zero)? } else { loss.total().clone() };
            Ok(StepInput::from(Loss::sum(total, loss.weight())?))
        })
    }

    /// Takes steps, and tells of them.
    pub fn steps(&mut self, steps: Range<usize>) -> Result<RunOutcome> {
        let mut outcome = RunOutcome::default();
        for step in steps {
            let metrics = self.take(step)?;
            outcome.losses.push(metrics.loss()?);
            outcome.norms.extend(metrics.grad_norm()?);
        }
        Ok(RunOutcome { pieces: self.pieces()?, ..outcome })
    }

    pub fn run(&mut self) -> Result<RunOutcome> {
        self.steps(0..self.way.steps)
    }

    pub fn go_on(&mut self, from: Option<&Folder>, steps: Range<usize>, to: Option<&Folder>) -> Result<RunOutcome> {
        if let Some(from) = from {
            assert!(self.step.load(from)?.is_some());
        }
        let outcome = self.steps(steps)?;
        to.map_or(Ok(()), |to| self.step.save(to, &CheckpointNotes::new()))?;
        Ok(outcome)
    }

    /// Takes the steps of batches, of which the last replica has none.
    pub fn batches(mut self, unfreezes: bool) -> Result<RunOutcome> {
        let (way, mut outcome) = (self.way, RunOutcome::default());
        let Self { mesh, model, step, .. } = &mut self;
        let (own, replicas) = (mesh.batch().rank(), mesh.batch().size() - 1);
        let numbers = if own < replicas { 0..way.steps } else { 0..0 };
        let batches = numbers.flat_map(|number| (0..way.accumulation).map(move |run| (number, run)));
        let loss =
            |&(number, run): &(usize, usize)| input_of(way, mesh, model, number, &way.share(run, own, replicas), false);
        step.run(batches, loss, |metrics| {
            outcome.losses.push(metrics.loss()?);
            outcome.norms.extend(metrics.grad_norm()?);
            if unfreezes {
                model.unfreeze_where(|_| true);
            }
            Ok(())
        })?;
        Ok(RunOutcome { pieces: self.pieces()?, ..outcome })
    }

    /// What layers make of rows.
    pub fn output(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        let Model::Layers(layers) = &self.model else { panic!("{:?} has no layers", self.way) };
        layers.forward(x)
    }

    /// What this rank has of the weights.
    pub fn pieces(&self) -> Result<Pieces> {
        self.pieces_of(&self.step)
    }
}

impl<S: Step<Cpu>> Training<'_, S> {
    /// Takes a step of `runs` micro-batches with these examples, or an idle one.
    pub fn take_of(
        &mut self,
        number: usize,
        (runs, idle): (usize, bool),
        examples: impl Fn(usize) -> Vec<usize>,
    ) -> Result<TrainingMetrics<Cpu>> {
        let Self { way, mesh, model, step, .. } = self;
        let mut input = |run| input_of(way, mesh, model, number, &examples(run), false);
        step.step(if idle { StepWork::idle(runs, &mut input) } else { StepWork::new(runs, &mut input) })
    }

    /// Trains every parameter from the next step on.
    pub fn unfreeze(&self) {
        self.parameters().iter().for_each(|p| p.set_requires_grad(true));
    }

    fn parameters(&self) -> Vec<Param<Cpu>> {
        let modules = std::iter::once(&self.model as &dyn Module<Cpu>).chain(self.step.modules());
        modules.flat_map(|module| module.parameters()).collect()
    }

    /// Takes all steps in a trainer's loop, each from the examples of the first, in batches of `batch` examples.
    pub fn looped(
        self,
        taken: Loop,
        batch: usize,
        unfreezes: bool,
        folder: &Scratch,
        world: Option<&mut ElasticWorld<Cpu>>,
    ) -> Result<Self> {
        let all = self.parameters();
        let Training { way, mesh, step, model, loads } = self;
        // An epoch is a step. Evaluations have the examples of a step that is not taken, in the smallest batches.
        let smallest = step.ranks().share.of * way.stages.map_or(1, |stages| stages.micros);
        let loader = |number: usize, batch: usize| {
            let all: Vec<usize> = (number * way.examples..(number + 1) * way.examples).collect();
            Loader::new(InMemory::new(all)).batch(batch).workers(0)
        };
        let mut trainer = Trainer::new(&model, step, loader(0, batch)).until(Length::Steps(way.steps as u64));
        if unfreezes {
            trainer = trainer.with(Unfreeze(all));
        }
        if let Some(world) = world {
            let lost = is_lost(world).is_err().then_some(way.steps as u64 - 1);
            trainer = trainer.with(Lose(lost)).elastic(world, Interval::Steps(1));
        }
        let evaluate = Evaluate::on(loader(100, smallest)).every(Interval::Steps(1));
        let trainer = match taken {
            Loop::UseAtEnd => trainer.with(WeightAveraging::new(0.7).use_at_end()),
            _ => {
                let checkpoints = Checkpoints::in_folder(&folder.0).ignore_signals();
                trainer.with(evaluate).with(checkpoints.best(Monitor::max("validation/loss")).restore_best())
            }
        };
        let report = trainer.run(|model, batch| {
            let rows: Vec<usize> = batch.data.iter().map(|row| row % way.examples).collect();
            input_of(way, &mesh, model, batch.data[0] / way.examples, &rows, false)
        })?;
        let step = report.step;
        Ok(Training { way, mesh, step, model, loads })
    }

    /// This rank's pieces of the weights, which `inner` has trained.
    pub fn pieces_of(&self, inner: &TrainStep<Cpu>) -> Result<Pieces> {
        let _all = inner.gather_full_params()?;
        let modules = std::iter::once(&self.model as &dyn Module<Cpu>).chain(self.step.modules());
        Ok(modules.map(pieces).collect::<Result<Vec<_>>>()?.concat())
    }
}

/// What a rank computes in one run of a step.
fn input(way: &Way, mesh: &Mesh<Cpu>, model: &Model, number: usize, run: usize) -> Result<StepInput<Cpu>> {
    let comm = mesh.batch();
    let (replica, replicas) = if way.first_has_all { (0, 1) } else { (comm.rank(), comm.size()) };
    let weightless = way.first_has_all && comm.rank() > 0;
    input_of(way, mesh, model, number, &way.share(run, replica, replicas), weightless)
}

/// The input of a step from some examples.
fn input_of(
    way: &Way,
    mesh: &Mesh<Cpu>,
    model: &Model,
    number: usize,
    own: &[usize],
    weightless: bool,
) -> Result<StepInput<Cpu>> {
    let (x, y) = way.batch(mesh.world().runtime(), number, own)?;
    Ok(match model {
        Model::Gpt(model) => {
            Loss::sum(model.next_token_loss(&x, &y, &way.loss)?, (own.len() * way.tokens()) as f64)?.into()
        }
        Model::Mixture(model) => model.loss()(&model.forward_values(&[x])?, &[y])?.into(),
        Model::Layers(model) => squares(&[model.forward(&x)?], &[y])?.into(),
        Model::Staged => {
            // What does not count may be infinite.
            let y = if weightless && y.dtype().is_float() { y.value()?.mul(f64::INFINITY)? } else { y.value()? };
            let batch = MicroBatches::split(&[x.value()?], &[y], way.stages.expect("stages").micros)?;
            MicroBatches { weightless, ..batch }.into()
        }
    })
}
