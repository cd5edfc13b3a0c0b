//! What ranks with different experts decide together, and what is refused.

use std::sync::Arc;

use distributed::{
    buckets::{BucketOptions, Unused},
    comm::{Comm, Communicator, CountingCommunicator, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, Strategy, TrainStep},
    zero::{ZeroOptions, ZeroStage},
};
use nn::{
    Init,
    moe::{MixtureOfExperts, MoeConfig},
    parallel::TensorPlan,
};
use numcore::{
    DType, Error, Result,
    ops::{Apply, PointwiseOps, ReduceOps},
};
use optim::LossScaler;
use runtime_cpu::Cpu;

use crate::{
    common::{adamw, cpu},
    expert_common::{ExpertCase, MoeGpt},
};

/// Runs on ranks of which groups of `experts` have all experts together.
fn on<T: Send>(ranks: usize, experts: usize, run: impl Fn(&Mesh<Cpu>) -> Result<T> + Sync) -> Result<Vec<T>> {
    Ranks::new(ranks)
        .run(cpu, |comm| run(&Mesh::new(&comm, ParallelPlan::of([(Axis::Data, ranks), (Axis::Expert, experts)])?)?))
}

fn refused(run: impl Fn(&Mesh<Cpu>) -> Result<()> + Sync) -> String {
    on(4, 2, run).unwrap_err().to_string()
}

#[test]
fn an_overflow_in_an_expert_is_skipped_by_all() {
    for zero in [None, Some(ZeroStage::Gradients), Some(ZeroStage::Parameters)] {
        let case = ExpertCase { frozen: &[], ..ExpertCase::new(4) };
        let outcomes = on(4, 2, |mesh| {
            let model = case.build(mesh)?;
            let builder =
                TrainStep::builder(mesh, &model).optimizer(adamw()).loss_scaling(LossScaler::starting_at(4.0)?);
            // At rank 3 the root of a zero, which has no finite gradient, is added: to its experts, which rank 1 has too.
            let loss = |step: usize| {
                let (loss, _) = case.loss(&model, mesh.world().runtime(), step, &[mesh.world().rank()])?;
                let piece = model.blocks[0].mlp.experts.down_proj.var();
                let root = piece.sub(&piece.detach())?.sqrt()?.sum(&[], false)?;
                let overflows = step == 1 && mesh.world().rank() == 3;
                Loss::sum(if overflows { loss.total().add(&root)? } else { loss.total().clone() }, loss.weight())
            };
            macro_rules! run {
                ($step:expr) => {{
                    let mut step = $step;
                    let stepped = [0, 1, 2].map(|k| step.step(|_| loss(k)).map(|metrics| metrics.stepped()).unwrap());
                    Ok((stepped, step.scaler().map(|scaler| scaler.factor())))
                }};
            }
            match zero {
                None => run!(builder.experts().build()?),
                Some(stage) => run!(builder.zero(stage).experts().build()?),
            }
        });
        assert_eq!(outcomes.unwrap(), vec![([true, false, true], Some(2.0)); 4], "{zero:?}");
    }
}

#[test]
fn ranks_that_run_out_of_examples_still_compute_those_of_others() {
    for unused in [Unused::Error, Unused::Allow] {
        let case = ExpertCase::new(4);
        let steps = on(4, 2, |mesh| {
            let model = case.build(mesh)?;
            let options = BucketOptions { unused, ..Default::default() };
            let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build()?;
            let (rank, mut losses) = (mesh.world().rank(), Vec::new());
            let loss = |batch: &usize| Ok(case.loss(&model, mesh.world().runtime(), *batch, &[rank])?.0);
            step.run(0..=rank, loss, |metrics| {
                losses.push((metrics.loss()?, metrics.weight()?));
                Ok(())
            })?;
            Ok(losses)
        });
        let steps = steps.unwrap();
        assert!(steps.iter().all(|losses| *losses == steps[0] && losses.len() == 4));
        assert_eq!(steps[0].iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [16.0, 12.0, 8.0, 4.0]);
    }
    let why = refused(|mesh| {
        let model = ExpertCase::new(4).build(mesh)?;
        let options = BucketOptions { unused: Unused::Allow, ..Default::default() };
        let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build()?;
        step.idle().map(drop)
    });
    assert!(why.contains("needs a sweep on every rank"), "{why}");
}

#[test]
fn a_rank_that_fails_ends_the_step_of_all() {
    let outcomes = on(4, 2, |mesh| {
        let case = ExpertCase::new(4);
        let model = case.build(mesh)?;
        let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build()?;
        let rank = mesh.world().rank();
        let outcome = step.step(|_| match rank {
            2 => Err(Error::state("a loss", "fails on purpose")),
            _ => Ok(case.loss(&model, mesh.world().runtime(), 0, &[rank])?.0),
        });
        Ok(outcome.map(drop).unwrap_err().to_string())
    });
    for why in outcomes.unwrap() {
        assert!(why.contains("fails on purpose"), "{why}");
    }
}

#[test]
fn a_step_must_be_told_of_experts_and_a_model_have_them() {
    let case = ExpertCase::new(4);
    let untold = |zero: bool| {
        refused(|mesh| {
            let model = case.build(mesh)?;
            let builder = TrainStep::builder(mesh, &model).optimizer(adamw());
            if zero { builder.zero(ZeroStage::State).build().map(drop) } else { builder.build().map(drop) }
        })
    };
    for why in [untold(false), untold(true)] {
        assert!(why.contains("blocks.0.mlp.experts") && why.contains("say `experts()`"), "{why}");
    }
    let whole = refused(|mesh| {
        let model = MoeGpt::new(&Init::new(mesh.world().runtime(), 7), &case.model)?;
        TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(whole.contains("2 ranks along expert") && whole.contains("Mesh::parallelize"), "{whole}");
}

#[test]
fn what_does_not_know_of_experts_is_refused() {
    let case = ExpertCase::new(4);
    let canonical = refused(|mesh| {
        let model = case.build(mesh)?;
        let options = BucketOptions { canonical: true, ..Default::default() };
        TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build().map(drop)
    });
    assert!(canonical.contains("BucketOptions::canonical"), "{canonical}");
    let frozen = refused(|mesh| {
        let model = case.build(mesh)?;
        model.blocks[1].mlp.experts.down_proj.set_requires_grad(mesh.world().rank() != 1);
        TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(frozen.contains("blocks.1.mlp.experts.down_proj") && frozen.contains("frozen"), "{frozen}");
}

#[test]
fn experts_that_cannot_be_shared_out_are_refused_with_the_numbers() {
    let layer = |experts: usize, plan: TensorPlan| {
        refused(|mesh| {
            let config = MoeConfig { shared_hidden: 3, ..MoeConfig::new(4, 4, experts, 1) };
            let layer = MixtureOfExperts::new(&Init::new(mesh.world().runtime(), 1), config)?;
            mesh.parallelize(&layer, &plan)
        })
    };
    let uneven = layer(5, TensorPlan::new().experts("experts"));
    assert!(
        uneven.contains("experts.gate_up_proj") && uneven.contains("5 experts cannot be shared out among 2"),
        "{uneven}"
    );
    let linear = layer(4, TensorPlan::new().experts("shared_experts.up_proj"));
    assert!(linear.contains("only tensors of experts"), "{linear}");
    let unknown = layer(4, TensorPlan::new().experts("mlp.experts"));
    assert!(unknown.contains("`mlp.experts` names no parameter"), "{unknown}");
    let columns = on(2, 1, |mesh| {
        let mesh = Mesh::new(mesh.world(), ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let layer = MixtureOfExperts::new(&Init::new(mesh.world().runtime(), 1), MoeConfig::new(4, 4, 4, 1))?;
        mesh.parallelize(&layer, &TensorPlan::new().column("experts"))
    });
    let columns = columns.unwrap_err().to_string();
    assert!(columns.contains("shared out by `experts`, or not at all"), "{columns}");
}

#[test]
fn ranks_that_have_an_expert_alone_sum_nothing_of_it() {
    // Sizes of which every parameter fills its 256 bytes.
    let model = MoeConfig { hidden: 8, ..ExpertCase::new(4).model };
    let experts = 2 * 4 * (2 * 8 * 8 + 8 * 8) * 8;
    let sent = |expert_ranks: usize, zero: Option<ZeroStage>| {
        let case = ExpertCase { model: model.clone(), zero, dtype: DType::F64, ..ExpertCase::new(4) };
        let sent = Ranks::new(4).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let comm: Comm<Cpu> = counting.clone();
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 4), (Axis::Expert, expert_ranks)])?)?;
            let model = case.build(&mesh)?;
            fn step<S: Strategy<Cpu>>(
                case: &ExpertCase,
                model: &MoeGpt<Cpu>,
                mesh: &Mesh<Cpu>,
                counting: &CountingCommunicator<Cpu>,
                mut step: TrainStep<Cpu, S>,
            ) -> Result<u64> {
                case.step(&mut step, model, mesh.batch(), 0)?;
                counting.reset();
                case.step(&mut step, model, mesh.batch(), 1)?;
                let of_gradients = |name: &str| name.contains("bucket") || name.contains("unit");
                let traffic = counting.by_name().into_iter();
                Ok(traffic.filter(|(name, _)| name.as_deref().is_some_and(of_gradients)).map(|(_, t)| t.sent).sum())
            }
            let builder = TrainStep::builder(&mesh, &model).optimizer(adamw());
            match zero {
                None => step(&case, &model, &mesh, &counting, builder.experts().build()?),
                Some(stage) => {
                    let options = ZeroOptions { stage, ..Default::default() };
                    step(&case, &model, &mesh, &counting, builder.zero(options).experts().build()?)
                }
            }
        });
        sent.unwrap().iter().sum::<u64>()
    };
    // Values of the last block are still there when its backward pass begins: they are gathered once.
    for (zero, of_blocks) in
        [(None, [2, 2]), (Some(ZeroStage::Gradients), [2, 2]), (Some(ZeroStage::Parameters), [3, 2])]
    {
        let exchanged = of_blocks.iter().sum::<u64>() * experts / 2;
        let [whole, halves, alone] = [1, 2, 4].map(|expert_ranks| sent(expert_ranks, zero));
        // Of a sum or a gather over n ranks each sends (n - 1) / n of the bytes; all send n - 1 times them.
        assert_eq!(whole - alone, 3 * exchanged, "{zero:?}");
        // Two groups of two ranks, each with a half of the experts.
        assert_eq!(halves - alone, 2 * exchanged / 2, "{zero:?}");
    }
}
