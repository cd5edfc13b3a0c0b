//! ZeRO with parameters and gradients in host memory: the same bits, nothing on the device between uses, and checkpoints that go either way.

use crate::{
    prelude::*,
    zero_memory::{layers, loss},
};

/// What is asked of ZeRO besides.
type Adjust = fn(&mut ZeroOptions);

fn hosted(options: &mut ZeroOptions) {
    let host_if = |there| if there { StatePlace::Host } else { StatePlace::Device };
    options.parameters = host_if(options.stage.shards_parameters());
    options.gradients = host_if(options.stage != ZeroStage::Optimizer);
    options.state = StatePlace::Host;
}

fn options(stage: ZeroStage, adjust: Adjust, host: bool) -> ZeroOptions {
    let mut options = ZeroOptions { stage, units: UnitOf::children(), ..Default::default() };
    adjust(&mut options);
    if host {
        hosted(&mut options);
    }
    options
}

/// Trains with two micro-batches a step, a frozen parameter, clipping and a loss scale; the gradients of one step are not finite.
fn train(mesh: &impl AsMesh<Cpu>, dtype: DType, options: ZeroOptions) -> Result<Trace> {
    let mesh = mesh.as_mesh();
    let rt = mesh.world().runtime();
    let model = Mlp::new(&Init::new(rt, 0).dtype(dtype))?;
    model.freeze_where(nn::under("b.bias"));
    let scaler = LossScaler::starting_at(4.0)?;
    let config =
        TrainingConfig { accumulation: 2, max_norm: Some(0.5), loss_scaling: Some(scaler), ..Default::default() };
    let mut trainer = sharded(&mesh, &model, config, options)?;
    let mut trace = Trace::default();
    for step in 0..STEPS {
        let metrics = trainer.step(|k| {
            let loss = model.loss(rt, step + 10 * k, &own(mesh.world()))?;
            let scale = if (step, k) == (1, 0) { f64::INFINITY } else { 1.0 };
            distributed::train::Loss::sum(loss.total().mul(scale)?, loss.weight())
        })?;
        assert_eq!(metrics.stepped(), step != 1);
        trace.losses.extend((step != 1).then(|| metrics.loss()).transpose()?);
        trace.norms.extend(metrics.grad_norm()?.filter(|norm| norm.is_finite()));
        let _scope = trainer.gather_full_params()?;
        trace.weights.push(weights(&model)?);
    }
    Ok(trace)
}

#[test]
fn where_parameters_and_gradients_lie_changes_no_bit() {
    let all: [Adjust; 4] = [
        |_| (),
        |zero| zero.reduce_once = true,
        |zero| (zero.main_gradients, zero.reduce_dtype) = (true, Some(DType::BF16)),
        |zero| zero.whole_up_to = if zero.stage.shards_parameters() { 30 } else { 0 },
    ];
    let mut turns = Turns::one_of(5);
    for (k, adjust) in all.into_iter().enumerate() {
        for (dtype, n) in [(DType::F32, 1), (DType::BF16, 3), (DType::F32, 4)] {
            for stage in [ZeroStage::Gradients, ZeroStage::Parameters].into_iter().filter(|_| turns.come()) {
                let with = |host| everywhere(n, |comm| train(&comm, dtype, options(stage, adjust, host)));
                assert!(with(true) == with(false), "{stage:?} {dtype} on {n}, adjusted {k}");
            }
        }
    }
}

#[test]
fn replicas_of_shards_may_lie_there() {
    let plan = ParallelPlan::of([(Axis::Data, 2), (Axis::Shard, 2)]).unwrap();
    for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
        let with = |host| {
            everywhere(4, |comm| train(&Mesh::new(&comm, plan.clone())?, DType::F32, options(stage, |_| (), host)))
        };
        assert!(with(true) == with(false), "{stage:?}");
    }
}

#[test]
fn the_device_keeps_nothing_between_uses() {
    const LAYERS: usize = 5;
    for dtype in [DType::F32, DType::BF16] {
        for n in [1, 2, 4] {
            let measured = Ranks::new(n).run(cpu, |comm| {
                let rt = comm.runtime();
                let model = layers(rt, LAYERS, dtype)?;
                let mut zero =
                    ZeroOptions { stage: ZeroStage::Parameters, units: UnitOf::layers(), ..Default::default() };
                hosted(&mut zero);
                let mut trainer = sharded(&comm, &model, TrainingConfig::default(), zero)?;
                let of = |category| rt.memory().of(category);
                let made = [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(of);
                rt.reset_peak();
                trainer.step(|_| loss(&model, rt, dtype))?;
                let stepped =
                    [MemoryCategory::Parameters, MemoryCategory::Gradients, MemoryCategory::Optimizer].map(of);
                Ok((made, stepped))
            });
            let shard = dtype.size() * 128 * 128 / n;
            for (made, stepped) in measured.unwrap() {
                let what = format!("{dtype} on {n}: {made:?} {stepped:?}");
                assert_eq!(made.map(|m| m.live), [0; 3], "{what}");
                assert_eq!(stepped.map(|m| m.live), [0; 3], "{what}");
                // A shard that is gathered from and the next one; then one unit's at a time is updated.
                assert!(stepped[0].peak <= 2 * shard, "{what}");
                assert_eq!(stepped[1].peak, shard, "{what}");
            }
        }
    }
}

#[test]
fn checkpoints_go_either_way() {
    let state: Adjust = |zero| zero.state = StatePlace::Host;
    for (stage, there) in [(ZeroStage::Gradients, state), (ZeroStage::Parameters, hosted)] {
        let way = |n, host: bool| {
            let zero = options(stage, if host { there } else { |_| () }, false);
            Way { dtype: DType::BF16, ..Way::gpt(2).zero(zero).over(&[(Axis::Shard, n)]) }
        };
        for n in [1, 3] {
            let whole = way(n, false).go_on(None, 0..4, None);
            for (saves, loads) in [(false, true), (true, false), (true, true)] {
                let scratch = Scratch::new("host");
                way(n, saves).go_on(None, 0..2, Some(&scratch.folder()));
                let resumed = way(n, loads).go_on(Some(&scratch.folder()), 2..4, None);
                assert!(resumed.pieces == whole.pieces, "{stage:?}, {saves} to {loads} on {n}");
            }
        }
    }
}

#[test]
fn values_that_are_put_into_a_model_go_there() {
    let with = |host| {
        everywhere(2, |comm| {
            let model = Mlp::new(&Init::new(comm.runtime(), 0))?;
            let other = Mlp::new(&Init::new(comm.runtime(), 1))?;
            let options = options(ZeroStage::Parameters, |_| (), host);
            let mut trainer = sharded(&comm, &model, TrainingConfig::default(), options)?;
            model.load_state_dict(other.state_dict()?)?;
            trainer.step(|_| model.loss(comm.runtime(), 0, &own(&comm)))?;
            let parts = trainer.parameter_parts()?;
            let halved = parts.iter().map(|part| part.row.on(comm.runtime())?.mul(0.5)).collect::<Result<Vec<_>>>()?;
            drop(parts);
            assert!(trainer.swap_parameter_parts(&halved)?);
            let _scope = trainer.gather_full_params()?;
            Ok(Trace { weights: vec![weights(&model)?], ..Default::default() })
        })
    };
    assert!(with(true) == with(false));
}

#[test]
fn stages_of_a_pipeline_cut_along_tensor_may_keep_them_there() {
    let way = Way::gpt(2).staged(ScheduleKind::OneFOneB, 1);
    for mut way in way.over(&[(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Tensor, 2)]).strategies().split_off(1) {
        (way.sequence, way.gpt.tied_head) = (true, true);
        let outcome = |way: &Way| {
            assembled(way.each(|training| {
                let outcome = training.run()?;
                let left = training.mesh.world().runtime().memory().of(MemoryCategory::Optimizer).live;
                assert_eq!(left == 0, way.zero.state == StatePlace::Host);
                Ok(outcome)
            }))
        };
        let device = outcome(&way);
        hosted(&mut way.zero);
        assert!(outcome(&way) == device, "{way:?}");
    }
}

#[test]
fn stages_that_have_no_shards_of_them_say_so() {
    let refused = |zero: ZeroOptions| {
        let comm: Comm<Cpu> = Arc::new(NoOpCommunicator::new(&cpu(0).unwrap()));
        let model = Mlp::new(&Init::new(comm.runtime(), 0)).unwrap();
        sharded(&comm, &model, TrainingConfig::default(), zero).map(|_| ()).unwrap_err().to_string()
    };
    let gradients = ZeroOptions { gradients: StatePlace::Host, stage: ZeroStage::Optimizer, ..Default::default() };
    assert!(refused(gradients).contains("at stage 1 gradients are whole on every rank"));
    let parameters = ZeroOptions { parameters: StatePlace::Host, stage: ZeroStage::Gradients, ..Default::default() };
    assert!(refused(parameters).contains("stage 3 alone"));
}
