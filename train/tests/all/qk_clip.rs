//! Attention scores bounded by QK-clip: to the threshold exactly, by layer, and alike however ranks share the work.

use distributed::mesh::AsMesh;
use nn::{
    Activation, EncoderBlock, EncoderBlockConfig, Gpt, GptConfig, GroupedQueryAttention, GroupedQueryConfig,
    MultiHeadAttention, parallel::VocabularyLoss,
};
use numcore::{Tensor, ops::MatmulOps};
use optim::SgdConfig;
use train::QkClip;

use crate::{common::*, prelude::*};

const WIDTH: usize = 12;

fn init(rt: &Cpu) -> Init<Cpu> {
    Init::new(rt, 3).dtype(DType::F64)
}

fn input(rt: &Cpu) -> Result<Var<Cpu>> {
    Ok(Var::new(Tensor::normal(rt, [2, 5, WIDTH], DType::F64, 0.0, 3.0, 7)?))
}

/// The largest score after another forward pass, which changes nothing.
fn largest<M: Module<Cpu>>(model: &M, forward: &dyn Fn(&M) -> Result<Var<Cpu>>) -> Result<f64> {
    let watch = QkClip::at(f64::MAX)?;
    watch.apply(&one(), model)?;
    forward(model)?;
    watch.apply(&one(), model).map(|found| found.expect("a score"))
}

/// Halves the largest score, and returns those before and after.
fn halved<M: Module<Cpu>>(model: &M, forward: &dyn Fn(&M) -> Result<Var<Cpu>>) -> Result<[f64; 2]> {
    let before = largest(model, forward)?;
    forward(model)?;
    let seen = QkClip::at(before / 2.0)?.apply(&one(), model)?;
    assert_eq!(seen, Some(before));
    assert_eq!(QkClip::at(1.0)?.apply(&one(), model)?, None, "no pass since then");
    Ok([before, largest(model, forward)?])
}

fn assert_halved([before, after]: [f64; 2]) {
    assert!((after - before / 2.0).abs() <= 1e-12 * before, "{before} became {after}");
}

fn grouped(rt: &Cpu, kv_heads: usize, head_norm: Option<f64>) -> Result<GroupedQueryAttention<Cpu>> {
    let (heads, head_dim, bias) = (4, 3, true);
    let (fused, output_bias, window) = (false, false, None);
    let config =
        GroupedQueryConfig { width: WIDTH, heads, kv_heads, head_dim, fused, bias, output_bias, head_norm, window };
    GroupedQueryAttention::new(&init(rt).biases(nn::Initializer::Normal { mean: 0.0, std: 1.0 }), config)
}

#[test]
fn scores_of_every_kind_of_attention_are_bounded() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let x = input(&rt)?;
    for kv_heads in [4, 2, 1] {
        let model = grouped(&rt, kv_heads, None)?;
        assert_halved(halved(&model, &|model| model.attend(model.project(&x, None)?, None, &x))?);
    }
    let joint = MultiHeadAttention::new(&init(&rt), WIDTH, 3)?;
    assert_halved(halved(&joint, &|model| model.forward(&x))?);
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
    assert_halved(halved(&EncoderBlock::new(&init(&rt), config)?, &|model| model.forward(&x))?);
    Ok(())
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
