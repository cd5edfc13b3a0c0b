//! Pipelines whose stages are cut along tensor train as one rank does: by every schedule and every strategy.

use autograd::{RandomState, random_state};

use crate::{
    pipeline_common::TIMEOUT,
    pipeline_staged::{HOWS, How},
    prelude::*,
    tensor_checkpoints::{Axes, STEPS, contents, go_on},
    tensor_common::apart,
    tensor_pipeline_common::StagedCase,
};

/// `f64` sums in another order, amplified by AdamW's division by a small second moment.
const CLOSE: f64 = 1e-11;

fn same(staged: &StagedCase, axes: &[(Axis, usize)]) {
    let off = apart(&staged.on(axes), &staged.case.alone());
    assert!(off <= CLOSE, "{axes:?} {staged:?}: {off:e}");
}

const FOUR: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Tensor, 2)];
const EIGHT: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2)];
const SHARDED: &[(Axis, usize)] = &[(Axis::Pipe, 2), (Axis::Shard, 2), (Axis::Tensor, 2)];

#[test]
fn every_schedule_runs_stages_that_are_cut() {
    for (k, &kind) in ScheduleKind::ALL.iter().enumerate() {
        let v = if kind.generate(crate::pipeline_common::shape(2, 1, 4)).is_ok() { 1 } else { 2 };
        let mut staged = StagedCase::new(2, kind, v, How::Replicas);
        staged.case.model.tied_head = k % 2 == 0;
        staged.case.sequence = k % 4 < 2;
        same(&staged, FOUR);
    }
}

#[test]
fn every_strategy_trains_stages_that_are_cut() {
    for (how, sequence) in half(&HOWS, &[false, true]) {
        let mut staged = StagedCase::new(2, ScheduleKind::Zbv, 2, how);
        (staged.case.sequence, staged.case.model.tied_head) = (sequence, true);
        same(&staged, EIGHT);
    }
}

#[test]
fn options_of_zero_change_nothing_in_stages() {
    type Set = fn(&mut ZeroOptions);
    let once: Set = |zero| zero.reduce_once = true;
    let kept: Set = |zero| zero.gathered_until_backward = true;
    let all: Set = |zero| (zero.whole_up_to, zero.reduce_once, zero.gathered_until_backward) = (100, true, true);
    let stages = [ZeroStage::Gradients, ZeroStage::Parameters];
    for (adjust, kind, v, stages) in [
        (once, ScheduleKind::OneFOneB, 1, &stages[..]),
        (once, ScheduleKind::ZbH1, 1, &stages),
        (kept, ScheduleKind::OneFOneB, 1, &stages[1..]),
        (kept, ScheduleKind::Zbv, 2, &stages[1..]),
        (all, ScheduleKind::Interleaved, 2, &stages[1..]),
    ] {
        for &stage in stages {
            let mut staged = StagedCase { adjust, ..StagedCase::new(2, kind, v, How::Zero(stage)) };
            (staged.case.accumulation, staged.micros, staged.case.model.tied_head) = (2, 2, true);
            if kind == ScheduleKind::Zbv {
                (staged.case.accumulation, staged.micros) = (1, 4);
            }
            same(&staged, SHARDED);
        }
    }
}

#[test]
fn wider_tensor_axes_and_longer_pipelines() {
    let mut wide = StagedCase::new(4, ScheduleKind::ZbH1, 1, How::Zero(ZeroStage::Gradients));
    wide.case.sequence = true;
    same(&wide, &[(Axis::Pipe, 2), (Axis::Tensor, 4)]);
    let mut long = StagedCase::new(2, ScheduleKind::Interleaved, 2, How::Replicas);
    (long.case.model.layers, long.case.model.tied_head) = (4, true);
    same(&long, &[(Axis::Pipe, 4), (Axis::Tensor, 2)]);
    same(&StagedCase::new(3, ScheduleKind::GPipe, 1, How::Replicas), &[(Axis::Pipe, 1), (Axis::Tensor, 3)]);
}

#[test]
fn accumulated_and_frozen_parameters_train_alike() {
    let mut turns = Turns::one_of(2);
    for how in [How::Replicas, How::Zero(ZeroStage::Gradients), How::Zero(ZeroStage::Parameters)] {
        for (k, frozen) in [&[][..], &["blocks.0.ln1", "wte"], &["blocks.1.qkv", "lnf"]].into_iter().enumerate() {
            if !turns.come() {
                continue;
            }
            let mut staged = StagedCase::new(2, ScheduleKind::ZbH1, 1, how);
            (staged.micros, staged.case.accumulation, staged.case.frozen) = (2, 2, frozen);
            (staged.case.sequence, staged.case.model.tied_head) = (k % 2 == 0, true);
            same(&staged, EIGHT);
        }
    }
}

#[test]
fn masks_do_not_depend_on_the_cut() {
    for sequence in [false, true] {
        let mut staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas);
        (staged.case.model.dropout, staged.case.sequence) = (0.3, sequence);
        let whole = staged.on(&[(Axis::Pipe, 2)]);
        let off = apart(&staged.on(FOUR), &whole);
        assert!(off <= CLOSE, "{off:e}");
    }
}

/// Losses of an evaluation and of a step, of stages whose head gathers its logits.
#[test]
fn a_head_that_gathers_its_logits_has_the_same_loss() {
    for tied_head in [false, true] {
        for sequence in [false, true] {
            let mut staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas);
            (staged.case.model.tied_head, staged.case.steps) = (tied_head, 1);
            let case = staged.case.clone();
            let want = case.alone().losses[0];
            let plan = ParallelPlan::of(FOUR.to_vec()).unwrap();
            let all: Vec<usize> = (0..case.sequences).collect();
            let losses = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
                let mesh = Mesh::new(&comm, plan.clone())?;
                let checked = How::Replicas.checked(ScheduleKind::OneFOneB, 2, 1, 4).unwrap();
                let stages = Gpt::new(&Init::new(comm.runtime(), 7).dtype(case.dtype), case.model)?.split(2)?;
                let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked, stages)
                    .loss(move |y, t| Loss::sum(cross_entropy_with(&y[0], &t[0], None, options)?, 1.0))
                    .parallelize(&mesh, &Gpt::<Cpu>::tensor_plan().sequence_parallel(sequence))?;
                let mut step = TrainStep::builder(&mesh, model).optimizer(adamw()).build()?;
                let batch = || {
                    let (x, y) = case.batch(comm.runtime(), 0, &all)?;
                    MicroBatches::split(&[x.value()?], &[y.value()?], 4)
                };
                let output = step.evaluate_stages(batch()?)?;
                assert_eq!(step.ranks().counts_examples, mesh.axis(Axis::Tensor).rank() == 0);
                let vocab = case.model.vocab;
                assert!(output.outputs().iter().all(|y| y[0].shape().dims().last() == Some(&vocab)));
                let evaluated: f64 = step.pipeline().expect("stages").losses(&output)?.iter().map(|(sum, _)| sum).sum();
                Ok((evaluated, step.step(|_| batch())?.loss()?))
            });
            let tokens = (case.sequences * case.model.context) as f64;
            for (evaluated, trained) in losses.unwrap() {
                assert!((evaluated / tokens - want).abs() <= CLOSE, "{evaluated}, {want}");
                // Each micro-batch weighs 1.
                assert!((trained * 4.0 / tokens - want).abs() <= CLOSE, "{trained}, {want}");
            }
        }
    }
}

/// The stages of a model say what the model says, and compute what it computes, to the bit.
#[test]
fn stages_are_the_model() {
    let rt = cpu(0).unwrap();
    let case = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas).case;
    for tied_head in [false, true] {
        let config = GptConfig { tied_head, ..case.model };
        let init = || Init::new(&rt, 7).dtype(DType::BF16);
        let model = Gpt::new(&init(), config).unwrap();
        let (stages, loss) = Gpt::new(&init(), config).unwrap().split_with_loss(2, case.loss).unwrap();
        let run = |x: &Var<Cpu>| stages.iter().try_fold(vec![x.clone()], |x, stage| stage.forward_values(&x));
        let (x, y) = case.batch(&rt, 0, &[0, 1, 2]).unwrap();
        let staged = loss.of(&run(&x).unwrap()[0], &y).unwrap();
        let whole = model.next_token_loss(&x, &y, &case.loss).unwrap();
        assert_eq!(staged.value().unwrap().to_f64s().unwrap(), whole.value().unwrap().to_f64s().unwrap());
        let long = Var::new(Tensor::zeros(&rt, [1, config.context + 1], DType::I64).unwrap());
        let flat = Var::new(Tensor::zeros(&rt, [3], DType::I64).unwrap());
        let unknown = Var::new(Tensor::full(&rt, [1, 2], DType::I64, 1e6).unwrap());
        for wrong in [&long, &flat, &unknown] {
            // Each says where it was called.
            let [staged, whole] =
                [run(wrong).map(drop), model.forward(wrong).map(drop)].map(|of| of.unwrap_err().to_string());
            assert_eq!(staged.split(", at ").next(), whole.split(", at ").next());
        }
    }
}

/// Evaluations give out the logits of the whole vocabulary, on every rank of the last stage, also where training leaves them cut.
#[test]
fn evaluations_give_out_whole_logits() {
    for tied_head in [false, true] {
        let mut staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas);
        staged.case.model.tied_head = tied_head;
        let case = &staged.case;
        let all: Vec<usize> = (0..case.sequences).collect();
        let evaluated = |axes: &[(Axis, usize)]| {
            let plan = ParallelPlan::of(axes.to_vec()).unwrap();
            let outputs = Ranks::new(plan.world()).timeout(TIMEOUT).run(cpu, |comm| {
                let mesh = Mesh::new(&comm, plan.clone())?;
                let mut step = TrainStep::builder(&mesh, staged.model(&mesh)?).optimizer(adamw()).build()?;
                let (x, y) = case.batch(comm.runtime(), 0, &all)?;
                let output = step.evaluate_stages(MicroBatches::split(&[x.value()?], &[y.value()?], 4)?)?;
                let losses = step
                    .pipeline()
                    .expect("stages")
                    .losses(&output)?
                    .into_iter()
                    .map(|(sum, _)| sum)
                    .collect::<Vec<_>>();
                let logits = output.outputs().iter().map(|y| y[0].to_f64s()).collect::<Result<Vec<_>>>()?;
                Ok((losses, logits.concat()))
            });
            outputs.unwrap()
        };
        let one = evaluated(&[(Axis::Pipe, 2)]);
        let close =
            |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= CLOSE * 100.0);
        for (rank, (losses, logits)) in evaluated(FOUR).into_iter().enumerate() {
            let (of, want) = &one[rank / 2];
            assert!(close(&losses, of), "{losses:?} {of:?}");
            assert!(close(&logits, want), "rank {rank}: {} logits, {}", logits.len(), want.len());
        }
        assert!(!one[1].1.is_empty());
    }
}

#[test]
fn a_pattern_that_names_nothing_in_any_stage_is_refused_everywhere() {
    let plans = [
        ("blocks.*.mlp", Gpt::<Cpu>::tensor_plan().column("blocks.*.mlp")),
        // The second stage has `lnf`, which cannot be cut so.
        ("lnf.weight", TensorPlan::new().column("lnf")),
    ];
    for (named, plan) in plans {
        let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of(FOUR.to_vec())?)?;
            let staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas);
            let checked = How::Replicas.checked(staged.kind, 2, 1, 4).unwrap();
            let stages = Gpt::new(&Init::new(comm.runtime(), 7), staged.case.model)?.split(2)?;
            let model = PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked, stages);
            model.parallelize(&mesh, &plan).map(drop)
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}

#[test]
fn stages_that_were_not_cut_are_refused() {
    let outcomes = Ranks::new(4).timeout(TIMEOUT).outcomes(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of(FOUR.to_vec())?)?;
        let staged = StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas);
        let checked = How::Replicas.checked(staged.kind, 2, 1, 4).unwrap();
        let stages = Gpt::new(&Init::new(comm.runtime(), 7), staged.case.model)?.split(2)?;
        let model =
            PipelineModel::on(mesh.axis(Axis::Pipe).rank(), checked, stages).loss(|y, _| Ok(Loss::mean(y[0].clone())));
        TrainStep::builder(&mesh, model).optimizer(adamw()).build().map(drop)
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("cut the model by `Mesh::parallelize`"), "{error}");
    }
}

/// Loads what is in `from`, or trains, and saves into `to`.
fn go_on_staged(staged: &StagedCase, axes: Axes, from: Option<&PathBuf>, to: &PathBuf) {
    let plan = ParallelPlan::of(axes.to_vec()).unwrap();
    let (source, target) = (from.map(Folder::new), Folder::new(to));
    let run = Ranks::new(plan.world()).timeout(TIMEOUT).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, plan.clone())?;
        let builder = TrainStep::builder(&mesh, staged.model(&mesh)?).optimizer(adamw()).max_norm(0.5);
        let mut step = builder.zero(staged.how.zero().unwrap_or(ZeroStage::None.into())).build()?;
        match &source {
            Some(source) => assert!(step.load(source)?.is_some()),
            None => {
                for k in 0..STEPS {
                    staged.step(&mut step, &mesh, k)?;
                }
            }
        }
        step.save(&target, &BTreeMap::new())
    });
    run.unwrap_or_else(|error| panic!("{axes:?} {staged:?}: {error}"));
}

#[test]
fn checkpoints_pass_between_pipelines_and_any_other_cut_to_the_bit() {
    let zero = |stage| How::Zero(stage);
    let pipelines: [(Axes, ScheduleKind, usize, How); 3] = [
        (EIGHT, ScheduleKind::OneFOneB, 1, How::Replicas),
        // The first and the last stage, with both copies of the table, on one rank.
        (SHARDED, ScheduleKind::Zbv, 2, zero(ZeroStage::Parameters)),
        (&[(Axis::Pipe, 2), (Axis::Tensor, 4)], ScheduleKind::Interleaved, 2, zero(ZeroStage::Optimizer)),
    ];
    let others: [(Axes, Option<ZeroStage>); 3] = [
        (&[(Axis::Data, 1)], None),
        (&[(Axis::Tensor, 4)], None),
        (&[(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2)], Some(ZeroStage::Parameters)),
    ];
    let staged = |(_, kind, v, how): (Axes, ScheduleKind, usize, How)| {
        let mut staged = StagedCase::new(4, kind, v, how);
        (staged.case.model.layers, staged.case.model.tied_head, staged.case.dtype) = (4, true, DType::F32);
        staged
    };
    let case = staged(pipelines[0]).case;
    for (k, from) in pipelines.into_iter().enumerate() {
        let saved = Scratch::new("tensor-pipelines");
        go_on_staged(&staged(from), from.0, None, &saved.0);
        let first = contents(&saved.0);
        assert!(first.keys().any(|name| name.starts_with("state/exp_avg_sq/wte")), "{:?}", first.keys());
        let same = |again: &Scratch, by: &dyn std::fmt::Debug| {
            assert!(contents(&again.0) == first, "what {from:?} saved, loaded by {by:?}");
        };
        // Each is met by another pipeline too.
        for (axes, zero) in [others[k], others[(k + 1) % others.len()]] {
            let (there, back) = (Scratch::new("tensor-pipelines"), Scratch::new("tensor-pipelines"));
            let mut case = case.clone();
            case.zero = zero;
            go_on(&case, axes, Some(&saved.0), &there.0);
            same(&there, &axes);
            go_on_staged(&staged(from), from.0, Some(&there.0), &back.0);
            same(&back, &from);
        }
        let (next, again) = (pipelines[(k + 1) % pipelines.len()], Scratch::new("tensor-pipelines"));
        go_on_staged(&staged(next), next.0, Some(&saved.0), &again.0);
        same(&again, &next);
    }
}

#[test]
fn ranks_along_tensor_go_on_with_one_random_state() {
    let (scratch, staged) =
        (Scratch::new("random-states"), StagedCase::new(2, ScheduleKind::OneFOneB, 1, How::Replicas));
    let folder = scratch.folder();
    // Saved by ranks of which each has a seed of its own.
    let saved = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 4)])?)?;
        let model = staged.case.build(&mesh)?;
        let mut step = TrainStep::builder(&mesh, &model).optimizer(adamw()).build()?;
        manual_seed(10 + comm.rank() as u64);
        staged.case.step(&mut step, &model, &comm, 0)?;
        step.save(&folder, &BTreeMap::new())
    });
    saved.unwrap();
    let states = Ranks::new(4).timeout(TIMEOUT).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of(FOUR.to_vec())?)?;
        let mut step = TrainStep::builder(&mesh, staged.model(&mesh)?).optimizer(adamw()).build()?;
        assert!(step.load(&folder)?.is_some());
        let RandomState { seed, drawn, .. } = random_state();
        Ok((seed, drawn))
    });
    let states = states.unwrap();
    assert!(states[0] == states[1] && states[2] == states[3], "{states:?}");
    assert!(states.iter().all(|(seed, _)| *seed >= 10), "{states:?}");
}
