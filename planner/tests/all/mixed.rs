//! Models that exchange values between ranks with other examples: mixtures over an expert axis, batch norms of all.

use distributed::{SyncBatchNorm, buckets::BucketOptions};
use nn::{
    Dropout,
    moe::{MixtureOfExperts, MoeConfig},
};

use crate::{common::*, faults::first};

/// The balance loss of a mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Balance {
    None,
    /// By the loads of all ranks.
    All,
    /// By the loads of this rank's tokens.
    OneRank,
}

/// A mixture, and a layer after it.
#[derive(Module)]
#[module(crate = "::nn", runtime = Cpu)]
struct Mixture {
    mixture: MixtureOfExperts<Cpu>,
    dropout: Dropout,
    head: Linear<Cpu>,
}

fn mixture_report(axes: &[(Axis, usize)], zero: ZeroStage, balance: Balance, dropout: f64) -> Result<Verification> {
    let make = |mesh: &Mesh<Cpu>| {
        let config = MoeConfig::new(4, 6, 4, 2);
        let model = Mixture {
            mixture: MixtureOfExperts::new(&init(mesh), config)?,
            dropout: Dropout::new(dropout)?,
            head: Linear::new(&init(mesh), 4, 4)?,
        };
        mesh.parallelize(&model, &TensorPlan::new().experts("mixture.experts"))?;
        let builder = TrainStep::builder(mesh, &model).optimizer(adamw()).zero(zero).accumulation(2).max_norm(0.5);
        let builder = if mesh.world().size() > 1 { builder.experts() } else { builder };
        let step = builder.build()?;
        Ok((model, step))
    };
    let loss = |model: &Mixture, examples: &Examples<'_, Cpu>| {
        let x = Var::new(examples.tensors[0].clone());
        let out = model.mixture.forward_routed(&x)?;
        let y = model.head.forward(&model.dropout.forward(&out.y)?)?;
        let sum = y.sub(&x)?.square()?.sum_all()?;
        let picked = out.routing.order.picked();
        let own: Vec<f64> = picked.iter().map(|&n| n as f64 / picked.iter().sum::<usize>() as f64).collect();
        let sum = match balance {
            Balance::None => sum,
            Balance::All => sum.add(&out.routing.balance_loss()?)?,
            Balance::OneRank => sum.add(&out.routing.balance_loss_with(&own)?)?,
        };
        Loss::sum(sum, examples.rows() as f64)
    };
    Verify::new(plan(axes)).run(runtime, make, numbers(32, 4), loss)
}

#[test]
fn mixtures_over_an_expert_axis_are_those_of_one_rank() {
    use Axis::{Data, Expert, Shard, Tensor};
    let plans: [(&[(Axis, usize)], ZeroStage); 5] = [
        (&[(Data, 2), (Expert, 2)], ZeroStage::None),
        (&[(Data, 4), (Expert, 2)], ZeroStage::Optimizer),
        (&[(Data, 2), (Shard, 2), (Expert, 4)], ZeroStage::Gradients),
        (&[(Shard, 4), (Expert, 2)], ZeroStage::Parameters),
        (&[(Data, 2), (Tensor, 2), (Expert, 2)], ZeroStage::None),
    ];
    for (axes, zero) in plans {
        for (balance, dropout) in [(Balance::All, 0.0), (Balance::None, 0.5)] {
            let report = mixture_report(axes, zero, balance, dropout).unwrap();
            assert!(report.is_equal(), "{axes:?}, {zero:?}, {balance:?}, dropout {dropout}: {report}");
        }
    }
}

#[test]
fn loads_of_one_rank_are_found() {
    for axes in [&[(Axis::Data, 2), (Axis::Expert, 2)][..], &[(Axis::Data, 4), (Axis::Expert, 2)]] {
        let report = mixture_report(axes, ZeroStage::None, Balance::OneRank, 0.0).unwrap();
        let (stage, _, named) = first(report.clone());
        // The probabilities, which are parts of a sum, times shares of other loads.
        assert_eq!((stage, named.trim()), (StepPart::Forward, "mul"), "{report}");
        assert_eq!(report.differences.last().expect("a difference").stage, StepPart::Loss, "{report}");
    }
}

/// A norm of all ranks' examples, with dropout or without.
fn norm_report(dropout: f64, canonical: bool, is_of_all: bool) -> Result<Verification> {
    let make = |mesh: &Mesh<Cpu>| {
        let norm = BatchNorm::new(&init(mesh), 4)?;
        let model = Sequential::new().push(Linear::new(&init(mesh), 4, 4)?);
        let model = match is_of_all {
            true => model.push(SyncBatchNorm::over(norm, mesh.batch())),
            false => model.push(norm),
        };
        let model = model.push(Dropout::new(dropout)?);
        let buckets = BucketOptions { canonical, ..BucketOptions::default() };
        let step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(buckets).build()?;
        Ok((model, step))
    };
    let loss = |model: &Sequential<Cpu>, examples: &Examples<'_, Cpu>| {
        let x = Var::new(examples.tensors[0].clone());
        Loss::sum(model.forward(&x)?.sub(&x)?.square()?.sum_all()?, examples.rows() as f64)
    };
    Verify::new(plan(&[(Axis::Data, 2)])).run(runtime, make, numbers(16, 4), loss)
}

#[test]
fn random_values_beside_statistics_of_all_ranks_are_refused() {
    norm_report(0.0, false, true).unwrap().assert_equal();
    let refused = norm_report(0.5, false, true).unwrap_err().to_string();
    assert!(refused.contains("SyncBatchNorm") && refused.contains("set dropout to 0"), "{refused}");
    let refused = mixture_report(&[(Axis::Data, 2), (Axis::Expert, 2)], ZeroStage::None, Balance::All, 0.5);
    assert!(refused.unwrap_err().to_string().contains("exchanges values between ranks that read other examples"));
    // Statistics of one rank alone are those of its share, in the one rank's run too: a difference is a fault.
    let own = norm_report(0.5, false, false).unwrap();
    assert_eq!(own.not_compared, ["1.num_batches_tracked"], "{own}");
}

/// Chunks in canonical order have the bits of one rank, but not where statistics are those of all of them.
#[test]
fn canonical_order_beside_statistics_of_all_ranks_is_compared_within_rounding() {
    norm_report(0.0, true, true).unwrap().assert_equal();
}
