//! Checkpoints of staged models: exact resumption, and any other cut, number of replicas and strategy.

use data::State;
use distributed::pipeline::split;

use crate::{
    checkpoint_common::{self},
    pipeline_common::{ROWS, WIDTH},
    pipeline_staged::*,
    prelude::*,
};

/// Layers of the model, and micro-batches of a step over all replicas.
const LAYERS: usize = 4;
const MICROS: usize = 8;

/// A cut of the model: schedule, ranks, stages on each, replicas.
#[derive(Clone, Copy, Debug)]
struct Cut(ScheduleKind, usize, usize, usize);

const CUTS: [Cut; 5] = [
    Cut(ScheduleKind::OneFOneB, 2, 1, 2),
    Cut(ScheduleKind::ZbH1, 4, 1, 1),
    Cut(ScheduleKind::GPipe, 1, 1, 4),
    // The first and the last stage, with both copies of the table, on one rank.
    Cut(ScheduleKind::Zbv, 2, 2, 2),
    Cut(ScheduleKind::LoopedBfs, 2, 2, 1),
];

impl Cut {
    fn checked(self, how: How) -> Checked {
        let Cut(kind, p, v, replicas) = self;
        how.checked(kind, p, v, MICROS / replicas).unwrap()
    }

    fn ranks(self) -> usize {
        self.1 * self.3
    }
}

/// Which steps to train, in a folder: what comes before them is loaded from there, and at their end it is saved if `save`.
#[derive(Clone, Debug)]
struct Going<'a> {
    folder: &'a Folder,
    steps: Range<usize>,
    save: bool,
}

impl Going<'_> {
    fn train<G>(
        &self,
        comm: &Comm<Cpu>,
        model: Model,
        mut trainer: TrainStep<Cpu>,
        scope: impl Fn(&TrainStep<Cpu>) -> Result<G>,
    ) -> Result<Told> {
        if self.steps.start > 0 {
            assert!(trainer.load(self.folder)?.is_some());
            assert_eq!(trainer.global_step(), self.steps.start as u64);
        }
        let told = steps(comm, model, &mut trainer, self.steps.clone(), scope)?;
        if self.save {
            trainer.save(self.folder, &CheckpointNotes::new())?;
        }
        Ok(told)
    }
}

/// Of a staged model.
fn staged(comm: &Comm<Cpu>, model: Model, staged: PipelineModel<Cpu>, how: How, going: &Going) -> Result<Told> {
    match how.zero() {
        None => {
            let trainer = pipelined(comm, staged, config())?;
            going.train(comm, model, trainer, |_| Ok(()))
        }
        Some(zero) => {
            let trainer = sharded_pipeline(comm, staged, config(), zero)?;
            going.train(comm, model, trainer, |t| t.gather_full_params())
        }
    }
}

/// On all ranks of a cut.
fn cut(model: Model, cut: Cut, how: How, going: &Going) -> Told {
    let ranks = ranks_of(cut.ranks(), |comm| {
        let checked = cut.checked(how);
        let parts = model.staged(&comm, &checked, LAYERS);
        staged(&comm, model, parts, how, going)
    });
    joined(ranks.unwrap_or_else(|e| panic!("{model:?}, {cut:?}, {how:?}, {going:?}: {e}")))
}

/// What was told after the first `steps`.
fn after(steps: usize, mut told: Told) -> Told {
    (told.losses, told.norms) = (told.losses.split_off(steps), told.norms.split_off(steps));
    told.weights = told.weights.split_off(steps);
    told
}

#[test]
fn what_follows_is_what_would_have_followed() {
    for (at, how) in half(&[CUTS[0], CUTS[3]], &HOWS) {
        let scratch = Scratch::new("staged-resume");
        let folder = &scratch.folder();
        cut(Model::Gpt, at, how, &Going { folder, steps: 0..2, save: true });
        let resumed = cut(Model::Gpt, at, how, &Going { folder, steps: 2..4, save: false });
        let whole = cut(Model::Gpt, at, how, &Going { folder, steps: 0..4, save: false });
        assert!(resumed == after(2, whole), "{at:?}, {how:?}");
    }
}

#[test]
fn any_cut_and_strategy_goes_on_from_any_other() {
    let (model, want) = (Model::Gpt, after(2, reference(Model::Gpt, LAYERS, MICROS, 4)));
    let mut turns = Turns::one_of(3);
    for (k, from) in CUTS.into_iter().enumerate() {
        let (scratch, how) = (Scratch::new("staged-reshard"), HOWS[k]);
        let folder = &scratch.folder();
        cut(model, from, how, &Going { folder, steps: 0..2, save: true });
        for (j, to) in CUTS.into_iter().enumerate().filter(|_| turns.come()) {
            let other = HOWS[(k + 2 * j + 1) % HOWS.len()];
            let got = cut(model, to, other, &Going { folder, steps: 2..4, save: false });
            let off = far(&got, &want);
            assert!(off <= 1e-11, "{how:?} in {from:?} to {other:?} in {to:?}: {off:e}");
        }
    }
}

/// Trains the model in one piece.
fn whole(comm: &Comm<Cpu>, how: checkpoint_common::How, going: &Going) -> Result<Told> {
    let model = Model::Gpt;
    let whole = model.whole(comm.runtime(), LAYERS);
    let mut trainer = Any::over(comm, &whole, how, config())?;
    if going.steps.start > 0 {
        assert!(trainer.load(going.folder)?.is_some());
    }
    let mut told = Told::default();
    for step in going.steps.clone() {
        let (x, y) = model.batch(comm.runtime(), step, MICROS)?;
        let rows = MICROS * ROWS / comm.size();
        let part = |t: &Tensor<Cpu>| t.narrow(0, comm.rank() * rows, rows).map(Var::new);
        let (x, y) = (part(&x)?, part(&y)?);
        let metrics = trainer.step_with(|_| model.loss(&whole.forward(&x)?, &y))?;
        told.losses.push(metrics.loss()?);
        told.norms.extend(metrics.grad_norm()?);
        let _scope = trainer.full()?;
        told.weights.push(values(whole.state_dict()?)?);
    }
    if going.save {
        trainer.save(going.folder)?;
    }
    Ok(told)
}

#[test]
fn a_whole_model_goes_on_from_a_pipeline_and_back() {
    let (want, mut turns) = (after(2, reference(Model::Gpt, LAYERS, MICROS, 4)), Turns::one_of(3));
    for (how, other) in HOWS.into_iter().zip(checkpoint_common::HOWS.into_iter().cycle().skip(1)) {
        for (at, n) in [(CUTS[0], 1), (CUTS[3], 3)].into_iter().filter(|_| turns.come()) {
            let what = format!("{how:?} in {at:?}, {other:?} on {n}");
            let scratch = [Scratch::new("staged-to-whole"), Scratch::new("whole-to-staged")];
            let folders = [scratch[0].folder(), scratch[1].folder()];
            cut(Model::Gpt, at, how, &Going { folder: &folders[0], steps: 0..2, save: true });
            let there = Going { folder: &folders[0], steps: 2..4, save: false };
            let got = ranks_of(n, |comm| whole(&comm, other, &there)).unwrap_or_else(|e| panic!("{what}: {e}"));
            let off = far(&joined(got), &want);
            assert!(off <= 1e-11, "{what}: {off:e}");
            let back = Going { folder: &folders[1], steps: 0..2, save: true };
            ranks_of(n, |comm| whole(&comm, other, &back)).unwrap();
            let got = cut(Model::Gpt, at, how, &Going { folder: &folders[1], steps: 2..4, save: false });
            let off = far(&got, &want);
            assert!(off <= 1e-11, "{what}, back: {off:e}");
        }
    }
}

/// Four layers of which the weights of the first and the last are one, under two names.
fn ringed(comm: &Comm<Cpu>, checked: &Checked, seed: u64) -> Result<PipelineModel<Cpu>> {
    let init = Init::new(comm.runtime(), seed).dtype(DType::F64);
    let linear = |_| Linear::new(&init, WIDTH, WIDTH).map(|layer| Box::new(layer) as _);
    let layers = (0..4).map(linear).collect::<Result<Vec<_>>>()?;
    let cuts: &[usize] = if checked.schedule().stages() == 2 { &[2] } else { &[1, 2, 3] };
    let staged = PipelineModel::on(comm.rank(), checked.clone(), split(layers, cuts)?);
    Ok(staged.loss(|y, t| Model::Mlp.loss(&y[0], &t[0])).ties(vec![Tie::new(["0.weight", "3.weight"])]))
}

#[test]
fn a_tied_parameter_is_saved_once_under_its_first_name() {
    let run = |at: Cut, how: How, going: &Going| {
        let ranks = ranks_of(at.ranks(), |comm| {
            let checked = at.checked(how);
            let parts = ringed(&comm, &checked, 3 + going.steps.start as u64)?;
            staged(&comm, Model::Mlp, parts, how, going)
        });
        let told = joined(ranks.unwrap_or_else(|e| panic!("{at:?}, {how:?}, {going:?}: {e}")));
        assert!(told.weights.iter().all(|of| of["0.weight"] == of["3.weight"]));
        told
    };
    for how in [How::Replicas, How::Zero(ZeroStage::Optimizer)] {
        let scratch = Scratch::new("staged-tie");
        let folder = &scratch.folder();
        run(CUTS[0], how, &Going { folder, steps: 0..2, save: true });
        let reader = CheckpointReader::open(folder.step(2)).unwrap();
        let names: Vec<&str> = reader.manifest().names().collect();
        assert!(names.contains(&"parameter/0.weight") && names.contains(&"state/exp_avg/0.weight"));
        assert!(
            !names.iter().any(|name| name.contains("3.weight")) && names.contains(&"parameter/3.bias"),
            "{names:?}"
        );
        let want = after(2, run(CUTS[0], how, &Going { folder, steps: 0..4, save: false }));
        for at in CUTS.into_iter().filter(|cut| cut.1 * cut.2 > 1) {
            for other in [How::Replicas, How::Gathered] {
                let got = run(at, other, &Going { folder, steps: 2..4, save: false });
                let off = far(&got, &want);
                assert!(off <= 1e-11, "{how:?} to {at:?}, {other:?}: {off:e}");
            }
        }
    }
}

/// Muon for the matrices between the tables, AdamW for all else: of a stage there may be only one of them.
fn muon_and_adamw(leaves: Vec<Arc<Leaf<Cpu>>>) -> Result<Box<dyn Optimizer<Cpu>>> {
    let matrix = |l: &Arc<Leaf<Cpu>>| l.spec().shape.rank() == 2 && l.name().contains("blocks");
    let (matrices, others): (Vec<_>, Vec<_>) = leaves.into_iter().partition(matrix);
    let mut all: Vec<Box<dyn Optimizer<Cpu>>> = Vec::new();
    if !others.is_empty() {
        all.push(Box::new(AdamW::over(AdamWConfig { lr: 1e-2, ..Default::default() }, others)?));
    }
    if !matrices.is_empty() {
        all.push(Box::new(Muon::over(MuonConfig { lr: 1e-2, ..Default::default() }, matrices)?));
    }
    Ok(Box::new(Combined::new(all)?))
}

#[test]
fn a_tied_model_with_two_optimizers_in_a_stage_goes_on_in_any_cut() {
    let run = |at: Cut, going: &Going| {
        let ranks = ranks_of(at.ranks(), |comm| {
            let staged = Model::Gpt.staged(&comm, &at.checked(How::Replicas), LAYERS);
            let trainer = TrainStep::builder(&comm, staged).optimizer_with(muon_and_adamw).config(config()).build()?;
            going.train(&comm, Model::Gpt, trainer, |_| Ok(()))
        });
        joined(ranks.unwrap_or_else(|e| panic!("{at:?}, {going:?}: {e}")))
    };
    for from in [CUTS[0], CUTS[1], CUTS[3]] {
        let scratch = Scratch::new("staged-combined");
        let folder = &scratch.folder();
        run(from, &Going { folder, steps: 0..2, save: true });
        let reader = CheckpointReader::open(folder.step(2)).unwrap();
        let names: Vec<&str> = reader.manifest().names().collect();
        assert!(names.contains(&"state/exp_avg/wte.weight"), "{names:?}");
        assert!(names.iter().any(|name| name.starts_with("state/momentum_buffer/")), "{names:?}");
        assert_eq!(
            names.iter().filter(|name| name.starts_with("state/exp_avg/wte") || name.ends_with("head.weight")).count(),
            1
        );
        let want = after(2, run(from, &Going { folder, steps: 0..4, save: false }));
        for to in CUTS {
            let got = run(to, &Going { folder, steps: 2..4, save: false });
            let off = far(&got, &want);
            assert!(
                if (to.0, to.1, to.3) == (from.0, from.1, from.3) { got == want } else { off <= 1e-9 },
                "{from:?} to {to:?}: {off:e}"
            );
        }
    }
}

/// Examples that are read in a random order.
const EXAMPLES: usize = 60;

/// Training with everything that has a state of its own: dropout, a schedule, a loss scale that grows, a loader.
fn everything(comm: &Comm<Cpu>, how: How, going: &Going) -> Result<Told> {
    let checked = how.checked(ScheduleKind::OneFOneB, 2, 1, 2).unwrap();
    let gpt = GptConfig { dropout: 0.3, ..GPT };
    let cut = Gpt::new(&Init::new(comm.runtime(), 5), gpt)?.split(2)?;
    let staged = PipelineModel::on(comm.rank(), checked, cut).loss(|y, t| Model::Gpt.loss(&y[0], &t[0]));
    let mut scaler = LossScaler::starting_at(64.0)?;
    scaler.interval = 2;
    let config = TrainingConfig { loss_scaling: Some(scaler), max_norm: Some(1.0), ..Default::default() };
    let falling = |base: f64, step: u64| base / (step + 1) as f64;
    let adamw = AdamWConfig { lr: 1e-2, ..Default::default() };
    match how.zero() {
        None => {
            let adamw = adamw.clone();
            let make = move |leaves: Vec<_>| {
                Ok(Box::new(AdamW::over(adamw.clone(), &leaves)?.scheduled(falling)) as Box<dyn Optimizer<Cpu>>)
            };
            sampled(comm, going, TrainStep::builder(comm, staged).optimizer_with(make).config(config).build()?)
        }
        Some(zero) => {
            let adamw = ParamGroups::new(adamw).scheduled(falling);
            sampled(comm, going, TrainStep::builder(comm, staged).optimizer(adamw).config(config).zero(zero).build()?)
        }
    }
}

/// Losses, and learning rates and loss scales in the place of norms.
fn sampled(comm: &Comm<Cpu>, going: &Going, mut trainer: TrainStep<Cpu>) -> Result<Told> {
    let (p, m) = (2, trainer.pipeline().expect("stages").schedule().micro_batches());
    let (replica, replicas) = (comm.rank() / p, comm.size() / p);
    let examples = InMemory::new((0..EXAMPLES as i64).collect::<Vec<_>>());
    let loader = Loader::new(examples).batch(m * ROWS * replicas).shuffle(4).rank(replica, replicas);
    let mut at = State::default();
    if going.steps.start > 0 {
        let manifest = trainer.load(going.folder)?.expect("a checkpoint");
        at = loader.state_of(&manifest.notes()["data"])?;
    } else {
        autograd::manual_seed(9);
    }
    let mut batches = loader.endless(at)?;
    let (all, _) = Model::Gpt.batch(comm.runtime(), 0, EXAMPLES / ROWS)?;
    let mut told = Told::default();
    for _ in going.steps.clone() {
        let index = batches.next().expect("epochs without end")?.data;
        let x = [all.index_select(0, &Tensor::from_slice(comm.runtime(), [index.len()], &index)?)?];
        let metrics = trainer.step(|_| MicroBatches::split(&x, &x, m))?;
        assert!(metrics.stepped());
        told.losses.push(metrics.loss()?);
        told.norms.extend([metrics.learning_rate(), trainer.scaler().map_or(0.0, |scaler| scaler.factor())]);
    }
    if going.save {
        trainer.save(going.folder, &CheckpointNotes::from([("data".into(), loader.note(batches.state()))]))?;
    }
    Ok(told)
}

#[test]
fn loader_schedule_scaler_and_random_numbers_go_on() {
    for how in HOWS {
        let scratch = Scratch::new("staged-everything");
        let folder = &scratch.folder();
        let run = |steps, save| {
            let going = Going { folder, steps, save };
            joined(ranks_of(4, |comm| everything(&comm, how, &going)).unwrap())
        };
        let whole = run(0..5, false);
        run(0..3, true);
        let resumed = run(3..5, false);
        assert_eq!((&resumed.losses[..], &resumed.norms[..]), (&whole.losses[3..], &whole.norms[6..]), "{how:?}");
        assert_eq!(resumed.norms, [1e-2 / 4.0, 256.0, 1e-2 / 5.0, 256.0]);
    }
}
