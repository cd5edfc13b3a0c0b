//! Attention scores bounded by QK-clip: to the threshold exactly, by layer, and alike however ranks share the work.

use data::Last;
use distributed::{
    mesh::AsMesh,
    pipeline::{Limits, Lowering, MicroBatches, PipeShape, PipelineModel, ScheduleKind, split},
};
use nn::{
    Activation, EncoderBlock, EncoderBlockConfig, Gpt, GptConfig, GroupedQueryAttention, GroupedQueryConfig,
    MultiHeadAttention, Param, Sequential,
    parallel::{ContextSlot, VocabularyLoss},
};
use numcore::{
    Tensor,
    fused::AttentionProgram,
    ops::{Apply, MatmulOps},
};
use optim::SgdConfig;
use train::{ModelInStep, QkClip};

use crate::{common::*, prelude::*};

const WIDTH: usize = 12;

fn init(rt: &Cpu) -> Init<Cpu> {
    Init::new(rt, 3).dtype(DType::F64)
}

fn input(rt: &Cpu) -> Result<Var<Cpu>> {
    Ok(Var::new(Tensor::normal(rt, [2, 5, WIDTH], DType::F64, 0.0, 3.0, 7)?))
}

/// The largest score after another forward pass, which changes nothing.
fn largest<M: Module<Cpu>>(comm: &Comm<Cpu>, model: &M, forward: &dyn Fn(&M) -> Result<Var<Cpu>>) -> Result<f64> {
    let watch = QkClip::at(f64::MAX)?;
    watch.apply(comm, model)?;
    forward(model)?;
    watch.apply(comm, model).map(|found| found.expect("a score"))
}

/// Halves the largest score.
fn halve<M: Module<Cpu>>(comm: &Comm<Cpu>, model: &M, forward: &dyn Fn(&M) -> Result<Var<Cpu>>) -> Result<()> {
    let before = largest(comm, model, forward)?;
    forward(model)?;
    let seen = QkClip::at(before / 2.0)?.apply(comm, model)?;
    assert_eq!(seen, Some(before));
    assert_eq!(QkClip::at(1.0)?.apply(comm, model)?, None, "no pass since then");
    let after = largest(comm, model, forward)?;
    assert!((after - before / 2.0).abs() <= 1e-12 * before, "{before} became {after}");
    Ok(())
}

fn grouped(rt: &Cpu, kv_heads: usize, head_norm: Option<f64>) -> Result<GroupedQueryAttention<Cpu>> {
    let (heads, head_dim, bias) = (4, 3, true);
    let (fused, output_bias, window) = (false, false, None);
    let (head_norm, scores) = (head_norm.map(nn::HeadNorm::each), Default::default());
    let width = WIDTH;
    let config =
        GroupedQueryConfig { width, heads, kv_heads, head_dim, fused, bias, output_bias, head_norm, window, scores };
    GroupedQueryAttention::new(&init(rt).biases(nn::Initializer::Normal { mean: 0.0, std: 1.0 }), config)
}

#[test]
fn scores_of_every_kind_of_attention_are_bounded() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let x = input(&rt)?;
    for kv_heads in [4, 2, 1] {
        let model = grouped(&rt, kv_heads, None)?;
        halve(&one(), &model, &|model| model.attend(model.project(&x, None)?, None, &x))?;
    }
    let joint = MultiHeadAttention::new(&init(&rt), WIDTH, 3)?;
    halve(&one(), &joint, &|model| model.forward(&x))?;
    let (activation, pre_norm) = (Activation::Gelu, false);
    let config = EncoderBlockConfig {
        width: WIDTH,
        heads: 2,
        hidden: 8,
        activation,
        pre_norm,
        qkv_bias: true,
        eps: 1e-5,
        dropout: 0.0,
    };
    halve(&one(), &EncoderBlock::new(&init(&rt), config)?, &|model| model.forward(&x))
}

/// By a formula from the projections: the largest scaled product, of the head that has it and of the others.
#[test]
fn heads_below_the_threshold_are_left_alone() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let (x, model) = (input(&rt)?, grouped(&rt, 2, None)?);
    let of_heads = || -> Result<Vec<f64>> {
        let [q, k, _] = model.project(&x, None)?.map(|x| x.value());
        let scores = q?.reshape([2, 2, 10, 3])?.matmul(&k?.transpose(2, 3)?.contiguous()?)?;
        scores.mul(1.0 / 3f64.sqrt())?.reshape([2, 4, 25])?.amax(&[0, 2])?.to_f64s()
    };
    let before = of_heads()?;
    let mut sorted = before.clone();
    sorted.sort_by(f64::total_cmp);
    let threshold = (sorted[1] + sorted[2]) / 2.0;
    let clip = QkClip::at(threshold)?;
    clip.apply(&one(), &model)?;
    model.attend(model.project(&x, None)?, None, &x)?;
    // Passes since the last step count together.
    let less = x.mul(0.1)?;
    model.attend(model.project(&less, None)?, None, &less)?;
    assert!((clip.apply(&one(), &model)?.expect("a score") - sorted[3]).abs() <= 1e-12 * sorted[3]);
    for (before, after) in before.into_iter().zip(of_heads()?) {
        let want = before.min(threshold);
        assert!((after - want).abs() <= 1e-12 * want.abs(), "{before} became {after}, not {want}");
    }
    Ok(())
}

#[test]
fn layers_whose_scores_cannot_be_scaled_are_named() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let x = input(&rt)?;
    let refused = |model: &GroupedQueryAttention<Cpu>| {
        let clip = QkClip::at(0.1)?;
        clip.apply(&one(), model)?;
        model.attend(model.project(&x, None)?, None, &x)?;
        clip.apply(&one(), model)
    };
    let error = refused(&grouped(&rt, 4, Some(1e-5))?).unwrap_err().to_string();
    assert!(error.contains("it normalizes heads"), "{error}");
    let model = grouped(&rt, 4, None)?;
    model.named_parameters()[0].1.set_requires_grad(false);
    assert!(refused(&model).unwrap_err().to_string().contains("a projection is frozen"));
    for threshold in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(QkClip::at(threshold).is_err());
    }
    Ok(())
}

/// The way that ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sharing {
    Data,
    Zero(ZeroStage),
    Tensor,
}

/// The loss and the largest score of each of four steps with a bound on scores.
fn trained(ranks: usize, sharing: Sharing, threshold: f64) -> Result<(Vec<f64>, Vec<f64>)> {
    on_ranks(ranks, |comm| {
        let (rt, mesh) = (comm.runtime(), comm.as_mesh());
        let mesh = match sharing {
            Sharing::Tensor => Mesh::new(comm, ParallelPlan::of([(Axis::Tensor, ranks)])?)?,
            _ => mesh,
        };
        let config = GptConfig { vocab: 11, context: 6, layers: 2, heads: 4, width: 8, ..GptConfig::default() };
        let model = Gpt::new(&init(rt).clone().weights(nn::Initializer::Normal { mean: 0.0, std: 0.6 }), config)?;
        let builder = match sharing {
            Sharing::Tensor => {
                mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
                TrainStep::builder(&mesh, &model)
            }
            _ => TrainStep::builder(comm, &model),
        };
        let builder = builder.optimizer(SgdConfig { lr: 0.05, ..Default::default() });
        let mut step = match sharing {
            Sharing::Zero(stage) => {
                builder.zero(ZeroOptions { stage, units: UnitOf::children(), ..Default::default() }).build()?
            }
            _ => builder.build()?,
        };
        let (clip, mut losses, mut seen) = (QkClip::at(threshold)?, Vec::new(), Vec::new());
        clip.apply(comm, &model)?;
        let (rank, shares) = if sharing == Sharing::Tensor { (0, 1) } else { (comm.rank(), ranks) };
        for k in 0..4 {
            let tokens: Vec<i64> = (0..6 * 7).map(|i| (i * 5 + i / 7 * 3 + k * 2) % 11).collect();
            let tokens = Tensor::from_slice(rt, [6, 7], &tokens)?.narrow(0, 6 / shares * rank, 6 / shares)?;
            let [x, y] = [0, 1].map(|at| tokens.narrow(1, at, 6).and_then(|t| t.contiguous()).map(Var::new));
            let (x, y) = (x?, y?);
            let loss = || model.next_token_loss(&x, &y, &VocabularyLoss::default());
            losses.push(step.step(|_| Ok(Loss::mean(loss()?)))?.loss()?);
            seen.extend(clip.apply(comm, &model)?);
        }
        Ok((losses, seen))
    })
}

#[test]
fn ranks_clip_alike() -> Result<()> {
    let (free, scores) = trained(1, Sharing::Data, 1e9)?;
    let threshold = scores[0] * 0.4;
    let (alone, seen) = trained(1, Sharing::Data, threshold)?;
    assert!(seen[0] > threshold && seen[3] < scores[3], "{seen:?} and {scores:?}");
    assert_ne!(free, alone);
    let mut cases = vec![(2, Sharing::Data), (3, Sharing::Data), (2, Sharing::Tensor), (4, Sharing::Tensor)];
    cases.extend(ZeroStage::ALL.map(|stage| (2, Sharing::Zero(stage))));
    cases.push((3, Sharing::Zero(ZeroStage::Parameters)));
    for (ranks, sharing) in cases {
        let (losses, of_ranks) = trained(ranks, sharing, threshold)?;
        for (a, b) in losses.iter().zip(&alone).chain(of_ranks.iter().zip(&seen)) {
            assert!((a - b).abs() <= 1e-11 * b.abs().max(1.0), "{sharing:?} on {ranks}: {a} and {b}");
        }
        assert_eq!((losses.len(), of_ranks.len()), (alone.len(), seen.len()));
    }
    Ok(())
}

#[test]
fn the_loop_bounds_and_records_scores() -> Result<()> {
    let memory = Memory::default();
    on_ranks(2, |comm| {
        let model = MultiHeadAttention::new(&init(comm.runtime()), 4, 2)?;
        let step = TrainStep::builder(comm, &model).optimizer(SgdConfig { lr: 0.0, ..Default::default() }).build()?;
        Trainer::new(&model, step, loader(comm.runtime()))
            .until(Length::Steps(3))
            .record_every(Interval::Steps(1))
            .with(QkClip::at(0.01)?)
            .sink(memory.clone())
            .run(|model, batch| {
                let x = Var::new(batch.data.reshape([1, batch.rows, 4])?);
                Ok(Loss::mean(model.forward(&x)?.square()?.mean_all()?))
            })
            .map(drop)
    })?;
    let scores = memory.of("attention/largest_score");
    assert_eq!(scores.len(), 3);
    assert!(scores[0].1 > 0.02 && scores[2].1 < scores[0].1 / 2.0, "{scores:?}");
    Ok(())
}

/// Ranks that share a head of keys keep equal copies of it.
#[test]
fn shared_heads_of_keys_stay_equal() -> Result<()> {
    on_ranks(4, |comm| {
        let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Tensor, 4)])?)?;
        let (x, model) = (input(comm.runtime())?, grouped(comm.runtime(), 2, None)?);
        let plan = TensorPlan::new().column("q_proj").column("k_proj").column("v_proj").row("o_proj");
        mesh.parallelize(&model, &plan)?;
        let keys = || model.named_parameters().into_iter().filter(|(name, _)| name.starts_with("k_proj"));
        let before: Vec<Vec<f64>> = keys().map(|(_, p)| p.value()?.to_f64s()).collect::<Result<_>>()?;
        halve(comm, &model, &|model| model.attend(model.project(&x, None)?, None, &x))?;
        assert_eq!(keys().map(|(_, p)| p.value()?.to_f64s()).collect::<Result<Vec<_>>>()?, before);
        Ok(())
    })
}

#[test]
fn ranks_without_a_pass_clip_too() -> Result<()> {
    let weights = Ranks::new(3).run(cpu, |comm| {
        let (x, model) = (input(comm.runtime())?, grouped(comm.runtime(), 4, None)?);
        let clip = QkClip::at(0.5)?;
        clip.apply(&comm, &model)?;
        if comm.rank() == 1 {
            model.attend(model.project(&x, None)?, None, &x)?;
        }
        assert!(clip.apply(&comm, &model)?.expect("a score") > 1.0);
        model.named_parameters().into_iter().map(|(_, p)| p.value()?.to_f64s()).collect::<Result<Vec<_>>>()
    })?;
    assert!(weights.iter().all(|own| *own == weights[0]));
    // One rank's error is an error on all.
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let model = grouped(comm.runtime(), 4, None)?;
        model.named_parameters()[0].1.set_requires_grad(comm.rank() == 1);
        QkClip::at(0.5)?.apply(&comm, &model).map(drop)
    })?;
    let errors: Vec<String> = outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    assert!(errors[0].contains("is frozen") && errors[1].contains("rank 0 could not observe"), "{errors:?}");
    Ok(())
}

#[test]
fn programs_are_scored_by_their_own_scale() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let value = |seed| Tensor::normal(&rt, [1, 2, 4, 3], DType::F64, 0.0, 1.0, seed).and_then(Param::new);
    let (q, k, slot) = (value(1)?, value(2)?, ContextSlot::attends());
    slot.observe_scores();
    slot.attend(&AttentionProgram::causal().scale(2.0), [&q.var(), &k.var(), &k.var()], &[])?;
    let want = q.value()?.matmul(&k.value()?.transpose(2, 3)?.contiguous()?)?.mul(2.0)?.amax(&[0, 2, 3])?.to_f64s()?;
    let got = slot.take_largest_scores().expect("scores").to_f64s()?;
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-12 * b.abs()), "{got:?}, not {want:?}");
    Ok(())
}

/// Two layers of attention, of which each is a stage: the scores of one rank that has both.
#[test]
fn stages_of_a_pipeline_are_clipped() -> Result<()> {
    let scores = |ranks: usize| {
        let memory = Memory::default();
        on_ranks(ranks, |comm| {
            let rt = comm.runtime();
            let layers = || -> Result<Sequential<Cpu>> {
                let [a, b] = [0, 1].map(|seed| MultiHeadAttention::new(&Init::new(rt, seed).dtype(DType::F64), 4, 2));
                Ok(Sequential::new().push(a?).push(b?))
            };
            let shape = PipeShape { ranks: 2, stages_per_rank: 1, micro_batches: 2 };
            let (sgd, data) = (SgdConfig { lr: 0.05, ..Default::default() }, loader(rt).last(Last::Drop));
            let x = |batch: &Batch<Rows>| batch.data.reshape([batch.rows, 1, 4]);
            let loss = |y: &Var<Cpu>| Loss::sum(y.square()?.sum_all()?, 32.0);
            if ranks == 1 {
                let model = layers()?;
                let step = TrainStep::builder(comm, &model).optimizer(sgd).build()?;
                let trainer = Trainer::new(&model, step, data).until(Length::Steps(4)).record_every(Interval::Steps(1));
                let trainer = trainer.with(QkClip::at(0.02)?).sink(memory.clone());
                return trainer.run(|model, batch| loss(&model.forward(&Var::new(x(batch)?))?)).map(drop);
            }
            let checked =
                ScheduleKind::OneFOneB.generate(shape)?.lower(Lowering::default())?.check(Limits::default())?;
            let stages = split(layers()?.into_layers(), &[1])?;
            let model = PipelineModel::on(comm.rank(), checked, stages)
                .loss(|y, _| Loss::sum(y[0].square()?.sum_all()?, 4.0 * y[0].spec().shape[0] as f64));
            let step = TrainStep::builder(comm, model).optimizer(sgd).build()?;
            Trainer::new(&ModelInStep, step, data)
                .until(Length::Steps(4))
                .record_every(Interval::Steps(1))
                .with(QkClip::at(0.02)?)
                .sink(memory.clone())
                .run(|_, batch| MicroBatches::split(&[x(batch)?], &[x(batch)?], 2))
                .map(drop)
        })
        .map(|()| memory.of("attention/largest_score"))
    };
    let (alone, piped) = (scores(1)?, scores(2)?);
    assert!(alone.len() == 4 && piped.len() == 4 && alone[0].1 > 0.02, "{alone:?} and {piped:?}");
    for ((_, a), (_, b)) in alone.iter().zip(&piped) {
        assert!((a - b).abs() <= 1e-12 * a.abs(), "{alone:?} and {piped:?}");
    }
    Ok(())
}
