//! What ranks with different experts decide together, and what is refused.

use crate::{
    expert_common::{ExpertCase, MoeGpt},
    prelude::*,
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
            let mut step = builder.zero(zero.unwrap_or(ZeroStage::None)).experts().build()?;
            let stepped = [0, 1, 2].map(|k| step.step(|_| loss(k)).map(|metrics| metrics.stepped()).unwrap());
            Ok((stepped, step.scaler().map(|scaler| scaler.factor())))
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
        let (steps, case) = (steps.unwrap(), ExpertCase::new(4));
        assert!(steps.iter().all(|losses| *losses == steps[0] && losses.len() == 4));
        // One rank with the examples of those that are not done: experts of the others have their tokens.
        let rt = cpu(0).unwrap();
        let model = case.build(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
        let mut one = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw()).build().unwrap();
        for (step, (loss, _)) in steps[0].iter().enumerate() {
            let left: Vec<usize> = (step..4).collect();
            let metrics = one.step(|_| Ok(case.loss(&model, &rt, step, &left)?.0)).unwrap();
            assert!((metrics.loss().unwrap() - loss).abs() < 1e-12, "{unused:?}, step {step}");
        }
        assert_eq!(steps[0].iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [16.0, 12.0, 8.0, 4.0]);
    }
    let why = refused(|mesh| {
        let model = ExpertCase::new(4).build(mesh)?;
        let options = BucketOptions { unused: Unused::Allow, ..Default::default() };
        let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build()?;
        step.idle().map(drop)
    });
    assert!(why.contains("tokens of other ranks"), "{why}");
    assert!(!why.contains("Unused::Allow"), "{why}");
}

/// Tokens of rows that only fill a batch up: neither loads, nor losses of the router, nor places in an expert are theirs.
#[test]
fn rows_that_fill_a_batch_up_are_no_tokens() {
    let by = |drop| Some(Capacity { factor: 0.7, drop });
    for capacity in [None, by(DropBy::Position), by(DropBy::Weight)] {
        let mut case = ExpertCase { router: [0.3, 0.1], ..ExpertCase::new(4) };
        case.model.capacity = capacity;
        // The last rank has no example, and each has a row too many.
        let loss = |model: &MoeGpt<Cpu>, rt: &Cpu, step: usize, own: &[usize]| {
            let [x, y] = ExpertCase::batch(rt, step, &[own, &[8]].concat())?;
            let count = own.len();
            set_counted_rows(Some(CountedRows { count, rows: count + 1 }));
            let routed = model.forward(&x);
            set_counted_rows(None);
            let (logits, routings) = routed?;
            let mut sum = Var::constant(Tensor::zeros(rt, [], DType::F64)?);
            let mut loads = Vec::new();
            for routing in routings {
                let [balance, z] = [routing.balance_loss()?.mul(0.3)?, routing.z_loss()?.mul(0.1)?];
                sum = sum.add(&balance)?.add(&z)?;
                loads.extend(routing.loads()?);
            }
            let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
            let of = |x: &Var<Cpu>| x.narrow(0, 0, count.max(1));
            sum = sum.add(&of(&logits)?.cross_entropy_with(&of(&y)?, None, options)?)?;
            let loss = Loss::sum(sum, (4 * count) as f64)?;
            Ok::<_, Error>((if count == 0 { loss.weightless()? } else { loss }, loads))
        };
        let trained = on(4, 2, |mesh| {
            let model = case.build(mesh)?;
            let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build()?;
            let (rank, mut told) = (mesh.world().rank(), Vec::new());
            for k in 0..3 {
                let (own, mut loads) = (&[rank][..usize::from(rank < 3)], Vec::new());
                let metrics = step.step(|_| {
                    let (loss, own) = loss(&model, mesh.world().runtime(), k, own)?;
                    loads = own;
                    Ok(loss)
                })?;
                told.push((metrics.loss()?, loads));
            }
            Ok(told)
        });
        let rt = cpu(0).unwrap();
        let model = case.build(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
        let mut one = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw()).build().unwrap();
        let trained = trained.unwrap();
        for (k, (told, loads)) in trained[0].iter().enumerate() {
            let (own, routings) = case.loss(&model, &rt, k, &[0, 1, 2]).unwrap();
            let alone: Vec<u64> = routings.iter().flat_map(|routing| routing.loads().unwrap()).collect();
            let mut own = Some(own);
            let metrics = one.step(|_| Ok(own.take().expect("one micro-batch"))).unwrap();
            assert_eq!(*loads, alone, "{capacity:?}, step {k}");
            let off = (metrics.loss().unwrap() - told).abs();
            assert!(off < 1e-12, "{capacity:?}, step {k}: {off:e}");
        }
        assert!(trained.iter().all(|told| *told == trained[0]));
    }
}

#[test]
fn ranks_draw_the_masks_of_their_own_examples() {
    let streams = on(4, 2, |mesh| {
        let model = ExpertCase::new(4).build(mesh)?;
        let _step = TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build()?;
        Ok(autograd::random_state().stream)
    });
    assert_eq!(streams.unwrap(), [0, 1, 2, 3]);
}

/// Rank 1 runs out of examples; its experts still have the tokens of the others, whose sums travel as means of the whole weight.
#[test]
fn means_of_halves_weigh_what_all_ranks_do() {
    let run = |compression: GradCompression, reads: &'static [usize]| {
        let case = ExpertCase::new(4);
        let losses = on(2, 2, |mesh| {
            let model = case.build(mesh)?;
            let options = BucketOptions { compression, ..Default::default() };
            let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build()?;
            let rank = mesh.world().rank();
            for k in 0..4 {
                step.step(|_| {
                    let (loss, _) = case.loss(&model, mesh.world().runtime(), k, &[rank])?;
                    if k < reads[rank] { Ok(loss) } else { loss.weightless() }
                })?;
            }
            let last = case.loss(&model, mesh.world().runtime(), 9, &[0])?.0;
            last.total().item()
        });
        losses.unwrap()
    };
    for reads in [&[4, 4][..], &[4, 1], &[1, 4]] {
        let (exact, narrow) = (run(GradCompression::Own, reads), run(GradCompression::F16, reads));
        for (a, b) in narrow.iter().zip(&exact) {
            assert!((a - b).abs() <= 2e-3 * b.abs(), "{reads:?}: {narrow:?} and {exact:?}");
        }
    }
}

/// Seeds that differ by rank are healed along tensor too, and what is frozen on one rank is named.
#[test]
fn copies_of_experts_along_tensor_begin_alike() {
    let mesh =
        |comm: &Comm<Cpu>| Mesh::new(comm, ParallelPlan::of([(Axis::Data, 2), (Axis::Tensor, 2), (Axis::Expert, 2)])?);
    let case = ExpertCase::new(4);
    let values = Ranks::new(4).run(cpu, |comm| {
        let mesh = mesh(&comm)?;
        let model = MoeGpt::new(&Init::new(comm.runtime(), 7 + comm.rank() as u64).dtype(DType::F64), &case.model)?;
        mesh.parallelize(&model, &MoeGpt::plan())?;
        let _step = TrainStep::builder(&mesh, &model).optimizer(adamw()).experts().build()?;
        model.blocks[1].mlp.experts.down_proj.value()?.to_vec::<f64>()
    });
    let values = values.unwrap();
    assert!(values[0] == values[1] && values[2] == values[3] && values[0] != values[2]);
    let frozen = Ranks::new(4).run(cpu, |comm| {
        let mesh = mesh(&comm)?;
        let model = case.build(&mesh)?;
        model.blocks[1].mlp.experts.down_proj.set_requires_grad(mesh.axis(Axis::Tensor).rank() == 0);
        TrainStep::builder(&mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    let frozen = frozen.unwrap_err().to_string();
    assert!(frozen.contains("the experts of rank") && frozen.contains("down_proj"), "{frozen}");
}

#[test]
fn a_mixture_whose_tokens_compete_must_know_the_ranks() {
    let capacity = Some(nn::moe::Capacity { factor: 1.0, drop: nn::moe::DropBy::Weight });
    for model in [
        MoeConfig { capacity, ..ExpertCase::new(4).model },
        MoeConfig { balance_bias: true, ..ExpertCase::new(4).model },
    ] {
        let build = |known: bool| {
            on(2, 1, |mesh| {
                let model = MoeGpt::new(&Init::new(mesh.world().runtime(), 7), &model)?;
                if known {
                    mesh.parallelize(&model, &MoeGpt::plan())?;
                }
                TrainStep::builder(mesh, &model).optimizer(adamw()).build().map(drop)
            })
        };
        build(true).unwrap();
        let why = build(false).unwrap_err().to_string();
        assert!(why.contains("blocks.0.mlp.experts") && why.contains("TensorPlan::experts"), "{why}");
    }
}

#[test]
fn both_tensors_of_experts_are_shared_out_or_none() {
    for named in ["gate_up_proj", "down_proj"] {
        let why = refused(|mesh| {
            let model =
                MoeGpt::new(&Init::new(mesh.world().runtime(), 7).dtype(DType::F64), &ExpertCase::new(4).model)?;
            mesh.parallelize(&model, &TensorPlan::new().experts(format!("blocks.*.mlp.experts.{named}")))?;
            ExpertCase::new(4).loss(&model, mesh.world().runtime(), 0, &[0]).map(drop)
        });
        assert!(why.contains("name both in the plan"), "{why}");
    }
}

#[test]
fn the_expert_axis_makes_no_groups_with_others() {
    let outcome = on(4, 2, |mesh| {
        assert_eq!(mesh.group(&[Axis::Expert])?.size(), 2);
        Ok(mesh.group(&[Axis::Data, Axis::Expert]).map(drop).unwrap_err().to_string())
    });
    assert!(outcome.unwrap().iter().all(|why| why.contains("makes no groups with others")));
}

#[test]
fn pipelines_lay_experts_over_the_replicas_of_a_stage() {
    let outcome = Ranks::new(4).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Expert, 2)])?)?;
        let groups = PipelineGroups::new(&mesh, 2)?;
        let ranks = |comm: &Comm<Cpu>| comm.group().members().to_vec();
        assert_eq!(ranks(mesh.axis(Axis::Expert)), ranks(&groups.data));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn words_of_refusals_name_the_expert_axis() {
    let case = ExpertCase::new(4);
    let whole = refused(|mesh| {
        let model = case.build(mesh)?;
        TrainStep::builder(mesh, &model).optimizer(optim::AdafactorConfig::default()).experts().build().map(drop)
    });
    assert!(whole.contains("experts over ranks"), "{whole}");
    let other = refused(|mesh| {
        let model = case.build(mesh)?;
        let wider = ParallelPlan::of([(Axis::Data, 4), (Axis::Expert, 4)])?;
        TrainStep::builder(&Mesh::new(mesh.world(), wider)?, &model).optimizer(adamw()).experts().build().map(drop)
    });
    assert!(other.contains("over 2 ranks, and the mesh has 4 along expert"), "{other}");
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
            if zero { builder.zero(ZeroStage::Optimizer).build().map(drop) } else { builder.build().map(drop) }
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
    assert!(canonical.contains("leave `canonical` out"), "{canonical}");
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
            fn step(
                case: &ExpertCase,
                model: &MoeGpt<Cpu>,
                mesh: &Mesh<Cpu>,
                counting: &CountingCommunicator<Cpu>,
                mut step: TrainStep<Cpu>,
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
