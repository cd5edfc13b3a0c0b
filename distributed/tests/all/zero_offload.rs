//! ZeRO with optimizer state in host memory: the same bits, no state on the device, and checkpoints that go either way.

use crate::{
    prelude::*,
    zero_memory::{layers, loss},
};

fn options(stage: ZeroStage, state: StatePlace) -> ZeroOptions {
    ZeroOptions { stage, units: UnitOf::children(), state, ..Default::default() }
}

#[test]
fn where_state_lies_changes_no_bit() {
    for (k, (n, stage)) in half(&WORLDS, &ZeroStage::ALL).into_iter().enumerate() {
        let way =
            Way { dtype: [DType::F32, DType::BF16][k % 2], examples: 13, ..Way::gpt(2).over(&[(Axis::Shard, n)]) };
        let with = |state| way.clone().zero(options(stage, state)).outcome();
        assert!(with(StatePlace::Host) == with(StatePlace::Device), "{way:?}");
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
