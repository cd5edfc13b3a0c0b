//! Checkpoints of stages: tied parameters, several optimizers in a stage, and all else that goes on.

use data::State;

use crate::{pipeline_common::ROWS, prelude::*};

/// Cuts of a model: schedule, ranks, stages on each, replicas.
const CUTS: [(ScheduleKind, usize, usize, usize); 5] = [
    (ScheduleKind::OneFOneB, 2, 1, 2),
    (ScheduleKind::ZbH1, 4, 1, 1),
    (ScheduleKind::GPipe, 1, 1, 4),
    // The first and the last stage, with both copies of a table, on one rank.
    (ScheduleKind::Zbv, 2, 2, 2),
    (ScheduleKind::LoopedBfs, 2, 2, 1),
];

fn cut(model: Way, (kind, p, v, replicas): (ScheduleKind, usize, usize, usize)) -> Way {
    let way = Way { examples: 24, ..model.staged(kind, v).micros(8 / replicas) };
    way.over(&[(Axis::Pipe, p), (Axis::Data, replicas)])
}

/// The outcome of the steps from 2 on.
fn after(mut outcome: RunOutcome) -> RunOutcome {
    (outcome.losses, outcome.norms) = (outcome.losses.split_off(2), outcome.norms.split_off(2));
    outcome
}

#[test]
fn a_tied_parameter_is_saved_once_under_its_first_name() {
    // Of layers and what follows each, the first and the last.
    let ringed = |at| cut(Way { tied: &["0.weight", "6.weight"], ..Way::layers(4) }, at);
    for stage in [ZeroStage::None, ZeroStage::Optimizer] {
        let scratch = Scratch::new("staged-tie");
        let (folder, way) = (scratch.folder(), ringed(CUTS[0]).zero(stage));
        let outcome = way.go_on(None, 0..2, Some(&folder));
        let values =
            |name: &str| outcome.pieces.iter().find(|(own, ..)| own == name).map(|(.., values)| values.clone());
        assert!(values("0.weight").is_some_and(|first| values("6.weight") == Some(first)));
        let names = contents(&folder);
        assert!(names.contains_key("parameter/0.weight") && names.contains_key("state/exp_avg/0.weight"));
        let second = names.keys().any(|name| name.contains("6.weight"));
        assert!(!second && names.contains_key("parameter/6.bias"), "{:?}", names.keys());
        let groups = way.each(|training| training.step.strategy().hyper_parameters());
        let mut named = groups.iter().flatten().flat_map(|group| &group.parameters);
        assert!(named.all(|name| name != "6.weight"), "{groups:?}");
        let want = after(way.go_on(None, 0..4, None));
        for at in CUTS.into_iter().filter(|(_, p, v, _)| p * v > 1) {
            for way in [ringed(at), ringed(at).gathered()] {
                let off = distance(&way.go_on(Some(&folder), 2..4, None), &want);
                assert!(off <= CLOSE, "{stage:?} to {way:?}: {off:e}");
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
    let gpt = |at| {
        let mut way = Way::gpt(2);
        (way.gpt.tied_head, way.gpt.layers) = (true, 4);
        cut(way, at)
    };
    let run = |way: &Way, from: Option<&Folder>, steps: Range<usize>, to: Option<&Folder>| {
        let outcome = way.ranks(|mesh| {
            let mut training = Training::with(way, mesh, |builder| builder.optimizer_with(muon_and_adamw))?;
            training.go_on(from, steps.clone(), to)
        });
        assembled(outcome.unwrap_or_else(|error| panic!("{way:?}: {error}")))
    };
    for from in [CUTS[0], CUTS[1], CUTS[3]] {
        let scratch = Scratch::new("staged-combined");
        let folder = scratch.folder();
        run(&gpt(from), None, 0..2, Some(&folder));
        let names = contents(&folder);
        assert!(names.keys().any(|name| name.starts_with("state/momentum_buffer/")), "{:?}", names.keys());
        let tables = names.keys().filter(|name| name.starts_with("state/exp_avg/wte") || name.ends_with("head.weight"));
        assert_eq!(tables.count(), 1, "{:?}", names.keys());
        let want = after(run(&gpt(from), None, 0..4, None));
        for to in CUTS {
            let got = run(&gpt(to), Some(&folder), 2..4, None);
            let off = distance(&got, &want);
            assert!(if to == from { got == want } else { off <= 1e-9 }, "{from:?} to {to:?}: {off:e}");
        }
    }
}

/// Examples that are read in a random order.
const EXAMPLES: usize = 60;

/// Training with everything that has a state of its own: dropout, a schedule, a loss scale that grows, a loader. Losses,
/// and learning rates and loss scales in the place of norms.
fn everything(way: &Way, mesh: &Mesh<Cpu>, folder: &Folder, steps: Range<usize>, save: bool) -> Result<RunOutcome> {
    let mut scaler = LossScaler::starting_at(64.0)?;
    scaler.interval = 2;
    let adamw = ParamGroups::new(AdamWConfig { lr: 1e-2, ..Default::default() });
    let adamw = adamw.scheduled(|base: f64, step: u64| base / (step + 1) as f64);
    let mut step = Training::with(way, mesh, |builder| builder.optimizer(adamw).loss_scaling(scaler))?.step;
    let (comm, micros) = (mesh.batch(), way.stages.expect("stages").micros);
    let examples = InMemory::new((0..EXAMPLES).collect::<Vec<_>>());
    let loader = Loader::new(examples).batch(micros * ROWS * comm.size()).shuffle(4).rank(comm.rank(), comm.size());
    let mut at = State::default();
    if steps.start > 0 {
        let manifest = step.load(folder)?.expect("a checkpoint");
        at = loader.state_of(&manifest.notes()["data"])?;
    } else {
        manual_seed(9);
    }
    let mut batches = loader.endless(at)?;
    let mut outcome = RunOutcome::default();
    for _ in steps {
        let (x, y) = way.batch(comm.runtime(), 0, &batches.next().expect("epochs without end")?.data)?;
        let metrics = step.step(|_| MicroBatches::split(&[x.value()?], &[y.value()?], micros))?;
        assert!(metrics.stepped());
        outcome.losses.push(metrics.loss()?);
        outcome.norms.extend([metrics.learning_rate(), step.scaler().map_or(0.0, |scaler| scaler.factor())]);
    }
    if save {
        step.save(folder, &CheckpointNotes::from([("data".into(), loader.note(batches.state()))]))?;
    }
    Ok(outcome)
}

#[test]
fn loader_schedule_scaler_and_random_numbers_go_on() {
    let mut way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1).micros(2).over(&[(Axis::Pipe, 2), (Axis::Data, 2)]);
    way.gpt.dropout = 0.3;
    for way in way.strategies() {
        let scratch = Scratch::new("staged-everything");
        let run = |steps: Range<usize>, save| {
            assembled(way.ranks(|mesh| everything(&way, mesh, &scratch.folder(), steps.clone(), save)).unwrap())
        };
        let whole = run(0..5, false);
        run(0..3, true);
        let resumed = run(3..5, false);
        assert_eq!((&resumed.losses[..], &resumed.norms[..]), (&whole.losses[3..], &whole.norms[6..]), "{way:?}");
        assert_eq!(resumed.norms, [1e-2 / 4.0, 256.0, 1e-2 / 5.0, 256.0]);
    }
}
