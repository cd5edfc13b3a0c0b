//! ZeRO with optimizer state in host memory: the same bits, no state on the device, and checkpoints that go either way.

use crate::{
    pipeline_staged::{self as staged, How, Model},
    prelude::*,
    zero_memory::{layers, loss},
};

fn options(stage: ZeroStage, state: StatePlace) -> ZeroOptions {
    ZeroOptions { stage, units: UnitOf::children(), state, ..Default::default() }
}

fn train<M: Task>(comm: &Comm<Cpu>, dtype: DType, options: ZeroOptions) -> Result<Trace> {
    let model = M::new(&Init::new(comm.runtime(), 0).dtype(dtype))?;
    let mut trainer = sharded(comm, &model, config(), options)?;
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let metrics = trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
        trace.losses.push(metrics.loss()?);
        trace.norms.extend(metrics.grad_norm()?);
        let _scope = trainer.gather_full_params()?;
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn where_state_lies_changes_no_bit() {
    for (k, (n, stage)) in half(&WORLDS, &ZeroStage::ALL).into_iter().enumerate() {
        let dtype = [DType::F32, DType::BF16][k % 2];
        let with = |state| everywhere(n, |comm| train::<Gpt<Cpu>>(&comm, dtype, options(stage, state)));
        assert!(with(StatePlace::Host) == with(StatePlace::Device), "{stage:?} {dtype} on {n}");
    }
}

#[test]
fn state_that_does_not_begin_at_zero_is_the_same() {
    let with = |state| {
        everywhere(3, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let rule = ParamGroups::new(AdagradConfig { initial_accumulator_value: 0.3, ..Default::default() });
            let options = options(ZeroStage::Parameters, state);
            let mut trainer =
                TrainStep::builder(&comm, &model).optimizer(rule).config(config()).zero(options).build()?;
            for step in 0..STEPS {
                trainer.step(|_| model.loss(comm.runtime(), step, &own(&comm)))?;
            }
            let _scope = trainer.gather_full_params()?;
            Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
        })
    };
    assert!(with(StatePlace::Host) == with(StatePlace::Device));
}

#[test]
fn the_device_holds_one_units_state_and_none_between_steps() {
    const LAYERS: usize = 5;
    for (dtype, bytes) in [(DType::F32, 8), (DType::BF16, 12)] {
        for n in [1, 2, 4] {
            for stage in ZeroStage::ALL {
                let scratch = Scratch::new("offload-memory");
                let folder = scratch.folder();
                let measured = Ranks::new(n).run(cpu, |comm| {
                    let rt = comm.runtime();
                    let model = layers(rt, LAYERS, dtype)?;
                    let options = ZeroOptions { units: UnitOf::layers(), ..options(stage, StatePlace::Host) };
                    let mut trainer = sharded(&comm, &model, TrainingConfig::default(), options)?;
                    let state = || rt.memory().of(MemoryCategory::Optimizer);
                    let made = state();
                    rt.reset_peak();
                    trainer.step(|_| loss(&model, rt, dtype))?;
                    let stepped = state();
                    rt.reset_peak();
                    trainer.save(&folder, &CheckpointNotes::new())?;
                    Ok([made, stepped, state()])
                });
                let unit = bytes * 128 * 128 / n;
                for [made, stepped, saved] in measured.unwrap() {
                    let what = format!("{dtype} {stage:?} on {n}: {made:?} {stepped:?} {saved:?}");
                    assert_eq!([made.live, stepped.live, saved.live, saved.peak], [0; 4], "{what}");
                    // Made one buffer at a time.
                    assert!(made.peak <= unit && stepped.peak == unit, "{unit}: {what}");
                }
            }
        }
    }
}

#[test]
fn checkpoints_go_either_way() {
    use StatePlace::{Device, Host};
    let run = |comm: &Comm<Cpu>, state, folder: &distributed::checkpoint::Folder, from: usize, to: usize| {
        let model = Mlp::new(&Init::new(comm.runtime(), from as u64).dtype(DType::BF16))?;
        let mut trainer = sharded(comm, &model, config(), options(ZeroStage::Gradients, state))?;
        assert_eq!(trainer.load(folder)?.is_some(), from > 0);
        for step in from..to {
            trainer.step(|_| model.loss(comm.runtime(), step, &own(comm)))?;
        }
        if to < STEPS {
            trainer.save(folder, &CheckpointNotes::new())?;
        }
        let _scope = trainer.gather_full_params()?;
        weights(&model)
    };
    for n in [1, 3] {
        let ranks = Ranks::new(n);
        let whole = {
            let scratch = Scratch::new("offload-whole");
            ranks.run(cpu, |c| run(&c, Device, &scratch.folder(), 0, STEPS)).unwrap()
        };
        for (saves, loads) in [(Device, Host), (Host, Device), (Host, Host)] {
            let scratch = Scratch::new("offload");
            ranks.run(cpu, |c| run(&c, saves, &scratch.folder(), 0, 2)).unwrap();
            let resumed = ranks.run(cpu, |c| run(&c, loads, &scratch.folder(), 2, STEPS)).unwrap();
            assert!(resumed == whole, "{saves:?} to {loads:?} on {n}");
        }
    }
}

#[test]
fn stages_of_a_pipeline_may_keep_their_state_on_the_host() {
    let checked = How::Replicas.checked(ScheduleKind::OneFOneB, 2, 1, 4).unwrap();
    for stage in ZeroStage::ALL {
        let with = |state| {
            let ranks = staged::ranks_of(4, |comm| {
                let (model, zero) = (Model::Gpt.staged(&comm, &checked, 2), options(stage, state));
                let mut trainer = sharded_pipeline(&comm, model, config(), zero)?;
                let told = staged::steps(&comm, Model::Gpt, &mut trainer, 0..2, |t| t.gather_full_params())?;
                let left = comm.runtime().memory().of(MemoryCategory::Optimizer).live;
                assert_eq!(left == 0, state == StatePlace::Host);
                Ok(told)
            });
            ranks.unwrap()
        };
        assert!(with(StatePlace::Host) == with(StatePlace::Device), "{stage:?}");
    }
}
