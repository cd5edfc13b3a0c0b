//! What people ask of ZeRO beside its stages: the types of gradients, when they are exchanged, what stays gathered.

use crate::{
    prelude::*,
    zero_memory::{layers, loss},
    zero_stages::options,
};

/// Collectives of the third step of two micro-batches of a model of `LAYERS` layers, each a unit: gathers and reductions.
fn calls(options: ZeroOptions) -> [u64; 2] {
    let counts = Ranks::new(2).run(cpu, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let rt = comm.runtime();
        let model = layers(rt, LAYERS as usize, DType::F32)?;
        let config = TrainingConfig { accumulation: 2, ..Default::default() };
        let mut trainer = sharded(&comm, &model, config, options.clone())?;
        for _ in 0..3 {
            counting.reset();
            trainer.step(|_| loss(&model, rt, DType::F32))?;
        }
        Ok(["all_gather", "reduce_scatter"].map(|kind| counting.of(kind).calls))
    });
    let mut counts = counts.unwrap();
    assert_eq!(counts[0], counts[1]);
    counts.remove(0)
}

const LAYERS: u64 = 5;

#[test]
fn what_they_cost_is_what_they_say() {
    let zero = |stage| options(stage, UnitOf::layers());
    let (two, three) = (zero(ZeroStage::Gradients), zero(ZeroStage::Parameters));
    // Stage 2 gathers once, after the update; stage 3 in forward and, but for the last layer, in backward.
    assert_eq!(calls(two.clone()), [LAYERS, 2 * LAYERS]);
    assert_eq!(calls(ZeroOptions { reduce_once: true, ..two.clone() }), [LAYERS, LAYERS]);
    assert_eq!(calls(three.clone()), [2 * (2 * LAYERS - 1), 2 * LAYERS]);
    assert_eq!(calls(ZeroOptions { gathered_until_backward: true, ..three.clone() }), [2 * LAYERS, 2 * LAYERS]);
    assert_eq!(calls(ZeroOptions { whole_up_to: 128 * 128, ..three.clone() }), [LAYERS, 2 * LAYERS]);
    assert_eq!(calls(ZeroOptions { whole_up_to: 128 * 128 - 1, ..three.clone() }), calls(three));
}

#[test]
fn whole_gradients_of_a_step_are_accounted_as_gradients() {
    for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
        let live = Ranks::new(2).run(cpu, |comm| {
            let (rt, mut live) = (comm.runtime(), 0);
            let model = layers(rt, LAYERS as usize, DType::F32)?;
            let config = TrainingConfig { accumulation: 2, ..Default::default() };
            let options = ZeroOptions { reduce_once: true, ..options(stage, UnitOf::layers()) };
            sharded(&comm, &model, config, options)?.step(|_| {
                live = rt.memory().of(MemoryCategory::Gradients).live;
                loss(&model, rt, DType::F32)
            })?;
            Ok(live)
        });
        let all = LAYERS as usize * 128 * 128 * 4;
        assert_eq!(live.unwrap(), [all + all / 2; 2], "{stage:?}: whole ones, and those of the shard");
    }
}

/// Bytes of gradients and bytes sent in a step of one micro-batch, of a model in `bf16` on two ranks.
fn bytes(options: ZeroOptions) -> (usize, u64) {
    let measured = Ranks::new(2).run(cpu, |comm| {
        let counting = Arc::new(CountingCommunicator::new(comm));
        let comm: Comm<Cpu> = counting.clone();
        let rt = comm.runtime();
        let model = layers(rt, 4, DType::BF16)?;
        let mut trainer = sharded(&comm, &model, TrainingConfig::default(), options.clone())?;
        trainer.step(|_| loss(&model, rt, DType::BF16))?;
        counting.reset();
        trainer.step(|_| loss(&model, rt, DType::BF16))?;
        Ok((rt.memory().of(MemoryCategory::Gradients).live, counting.of("reduce_scatter").sent))
    });
    measured.unwrap()[0]
}

#[test]
fn gradients_are_kept_and_sent_in_the_types_asked_for() {
    let parameters = 4 * 128 * 128;
    for stage in ZeroStage::ALL {
        let plain = options(stage, UnitOf::layers());
        let kept = if stage == ZeroStage::Optimizer { parameters } else { parameters / 2 };
        for (main, reduce_dtype, kept_size, sent_size) in
            [(false, None, 2, 2), (true, None, 4, 4), (true, Some(DType::BF16), 4, 2), (false, Some(DType::F32), 2, 4)]
        {
            let found = bytes(ZeroOptions { main_gradients: main, reduce_dtype, ..plain.clone() });
            assert_eq!(
                found,
                (kept * kept_size, (parameters / 2 * sent_size) as u64),
                "{stage:?} {main} {reduce_dtype:?}"
            );
        }
    }
}

/// A weight in `bf16` with 64 micro-batches of gradient 1 after one of 256: in `bf16`, 256 + 1 is 256.
fn summed(mut trainer: TrainStep<Cpu>, model: &Linear<Cpu>, rt: &Cpu) -> Result<()> {
    trainer.step(|k| {
        let x = Tensor::full(rt, [1, 1], DType::BF16, if k == 0 { 256.0 } else { 1.0 })?;
        let y = nn::Forward::forward(model, &autograd::Var::new(x))?;
        Loss::sum(y.to_dtype(DType::F32)?.sum_all()?, 1.0 / 65.0)
    })?;
    Ok(())
}

/// What the weight lost in a step of gradient descent, in all.
fn loss_of_weight(zero: Option<ZeroOptions>, buckets: BucketOptions) -> f64 {
    let found = Ranks::new(2).run(cpu, |comm| {
        let rt = comm.runtime();
        let model = Linear::new(&Init::new(rt, 0).dtype(DType::BF16), 1, 1)?.without_bias();
        model.weight.set(Tensor::zeros(rt, [1, 1], DType::BF16)?)?;
        let config = TrainingConfig { accumulation: 65, ..Default::default() };
        let sgd = SgdConfig { lr: 1.0, ..Default::default() };
        let builder = TrainStep::builder(&comm, &model).config(config);
        match &zero {
            Some(zero) => {
                let trainer = builder.optimizer(sgd).zero(zero.clone()).build()?;
                // Stage 3 has no whole weight in the end: stage 2 is asked.
                summed(trainer, &model, rt)?;
            }
            None => {
                let sgd = Sgd::over(sgd, model.parameters().iter().map(|p| p.leaf()))?;
                summed(builder.optimizer(sgd).buckets(buckets.clone()).build()?, &model, rt)?;
            }
        }
        model.weight.value()?.to_dtype(DType::F64)?.reshape([])?.item()
    });
    let found = found.unwrap();
    assert_eq!(found[0], found[1]);
    -found[0]
}

#[test]
fn micro_batches_of_halves_add_up_in_f32() {
    // The step divides by 2, what all micro-batches of both ranks weigh.
    let exact = 320.0;
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        for reduce_once in [false, true] {
            let zero = |main_gradients| ZeroOptions { main_gradients, reduce_once, ..options(stage, UnitOf::layers()) };
            let half = loss_of_weight(Some(zero(false)), BucketOptions::default());
            assert!(half <= 256.0, "in bf16 the rest is lost: {half}");
            let main = loss_of_weight(Some(zero(true)), BucketOptions::default());
            assert_eq!(main, exact, "{stage:?}, once {reduce_once}: as buckets do");
        }
    }
    let buckets = |main_gradients, compression| BucketOptions { main_gradients, compression, ..Default::default() };
    assert!(loss_of_weight(None, buckets(false, GradCompression::Own)) <= 256.0);
    assert_eq!(loss_of_weight(None, buckets(true, GradCompression::Own)), exact);
    // 320 is a number of bf16: what is sent narrowed is the sum.
    assert_eq!(loss_of_weight(None, buckets(true, GradCompression::Bf16)), exact);
}

/// Buckets whose gradients are wider than the parameters: several dtypes of parameters, frozen ones, steps that follow one another.
#[test]
fn main_gradients_of_buckets_train_as_those_of_zero() {
    for n in [1, 2, 3] {
        let of = |zero: bool| {
            everywhere(n, |comm| {
                let rt = comm.runtime();
                let model = Mlp::new(&Init::new(rt, 4).dtype(DType::BF16))?;
                model.b.weight.to_dtype(DType::F32)?;
                model.b.bias.as_ref().unwrap().set_requires_grad(false);
                let free = TrainingConfig { max_norm: None, accumulation: 2, ..config() };
                let (x, own) = (Tensor::normal(rt, [13, 5], DType::BF16, 0.0, 1.0, 3)?, own(&comm));
                let step = |k: usize| {
                    let x = autograd::Var::new(x.narrow(0, own[k % own.len()], 1)?);
                    let h = nn::Forward::forward(&model.a, &x)?.tanh()?.to_dtype(DType::F32)?;
                    let bias = model.b.bias.as_ref().unwrap().var().to_dtype(DType::F32)?;
                    let h = numcore::ops::MatmulOps::linear(&h, &model.b.weight.var(), Some(&bias))?;
                    let y = nn::Forward::forward(&model.c, &h.to_dtype(DType::BF16)?)?;
                    Loss::sum(y.to_dtype(DType::F32)?.square()?.sum_all()?, 1.0)
                };
                let mut trace = Trace::default();
                macro_rules! steps {
                    ($trainer:expr) => {{
                        let mut trainer = $trainer;
                        for _ in 0..3 {
                            trace.losses.push(trainer.step(step)?.loss()?);
                        }
                        trace.weights.push(weights(&model)?);
                    }};
                }
                if zero {
                    let stage = options(ZeroStage::Optimizer, UnitOf::whole());
                    let options = ZeroOptions { main_gradients: true, reduce_dtype: Some(DType::F32), ..stage };
                    steps!(sharded(&comm, &model, free, options)?);
                } else {
                    let options = BucketOptions { main_gradients: true, ..Default::default() };
                    steps!(bucketed(&comm, &model, free, options)?);
                }
                Ok(trace)
            })
        };
        assert_eq!(of(false), of(true), "{n} ranks");
    }
}

#[test]
fn a_type_that_sums_leave_is_refused() {
    let outcome = Ranks::new(2).run(cpu, |comm| {
        let model = Linear::new(&Init::new(comm.runtime(), 0), 2, 2)?;
        let zero = ZeroOptions { reduce_dtype: Some(DType::F16), ..Default::default() };
        sharded(&comm, &model, TrainingConfig::default(), zero).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("the range of f16: take bf16"), "{error}");
}

#[test]
fn options_that_a_stage_does_not_have_are_refused() {
    type Set = fn(&mut ZeroOptions);
    let cases: [(Set, &str); 3] = [
        (|o| o.gathered_until_backward = true, "stage 3 alone"),
        (|o| o.whole_up_to = 1, "stage 3 alone"),
        (|o| o.reduce_dtype = Some(DType::I32), "i32 is no floating type"),
    ];
    for stage in [ZeroStage::Optimizer, ZeroStage::Gradients] {
        for (set, why) in cases {
            let outcome = Ranks::new(2).run(cpu, |comm| {
                let model = Linear::new(&Init::new(comm.runtime(), 0), 2, 2)?;
                let mut options = options(stage, UnitOf::layers());
                set(&mut options);
                sharded(&comm, &model, TrainingConfig::default(), options).map(drop)
            });
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}

#[test]
fn ranks_whose_options_differ_all_learn_of_it() {
    let outcomes = Ranks::new(3).timeout(Duration::from_secs(5)).outcomes(cpu, |comm| {
        let model = Linear::new(&Init::new(comm.runtime(), 0), 2, 2)?;
        let reduce_dtype = (comm.rank() == 1).then_some(DType::F16);
        let options = ZeroOptions { reduce_dtype, ..Default::default() };
        Sharded::new(&comm, &model, ParamGroups::new(SgdConfig::default()), options).map(drop)
    });
    refused(outcomes.unwrap(), &["the sharding of the model"]);
}
