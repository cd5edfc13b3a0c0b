//! What ranks with different experts decide together, and what is refused.

use crate::{mixture::Mixture, prelude::*};

/// Runs on ranks of which groups of `experts` have all experts together.
pub fn on<T: Send>(ranks: usize, experts: usize, run: impl Fn(&Mesh<Cpu>) -> Result<T> + Sync) -> Result<Vec<T>> {
    Ranks::new(ranks)
        .run(cpu, |comm| run(&Mesh::new(&comm, ParallelPlan::of([(Axis::Data, ranks), (Axis::Expert, experts)])?)?))
}

pub fn refused(run: impl Fn(&Mesh<Cpu>) -> Result<()> + Sync) -> String {
    on(4, 2, run).unwrap_err().to_string()
}

/// The loss of some examples of a step.
pub fn loss(case: &Way, model: &Mixture, rt: &Cpu, step: usize, examples: &[usize]) -> Result<Loss<Cpu>> {
    let (x, y) = case.batch(rt, step, examples)?;
    model.loss()(&model.forward_values(&[x])?, &[y])
}

#[test]
fn ranks_that_run_out_of_examples_still_compute_those_of_others() {
    for unused in [Unused::Error, Unused::Allow] {
        let case = Way::mixture(4);
        let steps = on(4, 2, |mesh| {
            let model = case.mixture_on(mesh)?;
            let options = BucketOptions { unused, ..Default::default() };
            let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).buckets(options).experts().build()?;
            let (rank, mut losses) = (mesh.world().rank(), Vec::new());
            let loss = |batch: &usize| loss(&case, &model, mesh.world().runtime(), *batch, &[rank]);
            // No rank has a batch, so none computes for the others.
            step.run(0..0, loss, |_| Err(Error::argument("a test", "there is no step")))?;
            step.run(0..=rank, loss, |metrics| {
                losses.push((metrics.loss()?, metrics.weight()?));
                Ok(())
            })?;
            Ok(losses)
        });
        let (steps, case) = (steps.unwrap(), Way::mixture(4));
        assert!(steps.iter().all(|losses| *losses == steps[0] && losses.len() == 4));
        // One rank with the examples of those that are not done: experts of the others have their tokens.
        let rt = cpu(0).unwrap();
        let model = case.mixture_on(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
        let mut one = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw()).build().unwrap();
        for (step, (told, _)) in steps[0].iter().enumerate() {
            let left: Vec<usize> = (step..4).collect();
            let metrics = one.step(|_| loss(&case, &model, &rt, step, &left)).unwrap();
            assert!((metrics.loss().unwrap() - told).abs() < 1e-12, "{unused:?}, step {step}");
        }
        assert_eq!(steps[0].iter().map(|(_, weight)| *weight).collect::<Vec<_>>(), [16.0, 12.0, 8.0, 4.0]);
    }
    let why = refused(|mesh| {
        let model = Way::mixture(4).mixture_on(mesh)?;
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
        let case = Way { router: [0.3, 0.1], ..Way::mixture(4).config(|moe| moe.capacity = capacity) };
        // The last rank has no example, and each has a row too many.
        let loss = |model: &Mixture, rt: &Cpu, step: usize, own: &[usize]| {
            let (x, y) = case.batch(rt, step, &[own, &[8]].concat())?;
            let count = own.len();
            set_counted_rows(Some(CountedRows { count, rows: count + 1 }));
            let routed = model.routed(&[x]).and_then(|(outputs, routings)| {
                Ok((outputs, routings.iter().map(|routing| routing.loads()).collect::<Result<Vec<_>>>()?.concat()))
            });
            set_counted_rows(None);
            let (mut outputs, loads) = routed?;
            let of = |x: &Var<Cpu>| x.narrow(0, 0, count.max(1));
            outputs[0] = of(&outputs[0])?;
            let loss = model.loss()(&outputs, &[of(&y)?])?;
            let loss = Loss::sum(loss.total().clone(), (4 * count) as f64)?;
            Ok::<_, Error>((if count == 0 { loss.weightless()? } else { loss }, loads))
        };
        let trained = on(4, 2, |mesh| {
            let model = case.mixture_on(mesh)?;
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
        let model = case.mixture_on(&NoOpCommunicator::new(&rt).as_mesh()).unwrap();
        let mut one = TrainStep::builder(&NoOpCommunicator::new(&rt), &model).optimizer(adamw()).build().unwrap();
        let trained = trained.unwrap();
        for (k, (told, loads)) in trained[0].iter().enumerate() {
            let (x, y) = case.batch(&rt, k, &[0, 1, 2]).unwrap();
            let (outputs, routings) = model.routed(&[x]).unwrap();
            let own = model.loss()(&outputs, &[y]).unwrap();
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
        let model = Way::mixture(4).mixture_on(mesh)?;
        let _step = TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build()?;
        Ok(autograd::random_state().stream)
    });
    assert_eq!(streams.unwrap(), [0, 1, 2, 3]);
}

/// Rank 1 runs out of examples; its experts still have the tokens of the others, whose sums travel as means of the whole weight.
#[test]
fn means_of_halves_weigh_what_all_ranks_do() {
    let run = |compression: GradCompression, reads: &'static [usize]| {
        let case = Way::mixture(4);
        let losses = on(4, 2, |mesh| {
            let model = case.mixture_on(mesh)?;
            let options = BucketOptions { compression, ..Default::default() };
            let step = TrainStep::builder(mesh, &model).optimizer(adamw()).max_norm(1e9);
            let mut step = step.buckets(options).experts().build()?;
            let (rank, mut seen) = (mesh.world().rank(), Vec::new());
            for k in 0..4 {
                let metrics = step.step(|_| {
                    let loss = loss(&case, &model, mesh.world().runtime(), k, &[rank])?;
                    if k < reads[rank % 2] { Ok(loss) } else { loss.weightless() }
                })?;
                seen.extend(metrics.grad_norm()?);
            }
            seen.push(loss(&case, &model, mesh.world().runtime(), 9, &[0])?.total().item()?);
            Ok(seen)
        });
        losses.unwrap().concat()
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
    let case = Way::mixture(4);
    let values = Ranks::new(4).run(cpu, |comm| {
        let mesh = mesh(&comm)?;
        let model = case.whole_mixture(&Init::new(comm.runtime(), 7 + comm.rank() as u64).dtype(DType::F64))?;
        mesh.parallelize(&model, &Mixture::plan())?;
        let _step = TrainStep::builder(&mesh, &model).optimizer(adamw()).experts().build()?;
        model.blocks()[1].mlp.experts.down_proj.value()?.to_vec::<f64>()
    });
    let values = values.unwrap();
    assert!(values[0] == values[1] && values[2] == values[3] && values[0] != values[2]);
    let frozen = Ranks::new(4).run(cpu, |comm| {
        let mesh = mesh(&comm)?;
        let model = case.mixture_on(&mesh)?;
        model.blocks()[1].mlp.experts.down_proj.set_requires_grad(mesh.axis(Axis::Tensor).rank() == 0);
        TrainStep::builder(&mesh, &model).optimizer(adamw()).experts().build().map(drop)
    });
    let frozen = frozen.unwrap_err().to_string();
    assert!(frozen.contains("the experts of rank") && frozen.contains("down_proj"), "{frozen}");
}

#[test]
fn a_mixture_whose_tokens_compete_must_know_the_ranks() {
    type Set = fn(&mut MoeConfig);
    let competing: Set = |moe| moe.capacity = Some(Capacity { factor: 1.0, drop: DropBy::Weight });
    let balanced: Set = |moe| moe.balance_bias = true;
    for case in [competing, balanced].map(|set| Way::mixture(4).config(set)) {
        let build = |known: bool| {
            on(2, 1, |mesh| {
                let model = case.whole_mixture(&Init::new(mesh.world().runtime(), 7))?;
                if known {
                    mesh.parallelize(&model, &Mixture::plan())?;
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
fn a_rank_that_fails_ends_the_step_of_all() {
    let outcomes = on(4, 2, |mesh| {
        let case = Way::mixture(4);
        let model = case.mixture_on(mesh)?;
        let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).experts().build()?;
        let rank = mesh.world().rank();
        let outcome = step.step(|_| match rank {
            2 => Err(Error::state("a loss", "fails on purpose")),
            _ => Ok(loss(&case, &model, mesh.world().runtime(), 0, &[rank])?),
        });
        Ok(outcome.map(drop).unwrap_err().to_string())
    });
    for why in outcomes.unwrap() {
        assert!(why.contains("fails on purpose"), "{why}");
    }
}

#[test]
fn ranks_that_have_an_expert_alone_sum_nothing_of_it() {
    // Sizes of which every parameter fills its 256 bytes.
    let experts = 2 * 4 * (2 * 8 * 8 + 8 * 8) * 8;
    let sent = |expert_ranks: usize, stage: ZeroStage| {
        let axes = [(Axis::Data, 4), (Axis::Expert, expert_ranks)];
        let case = Way::mixture(4).config(|moe| moe.hidden = 8).zero(stage);
        let sent = Ranks::new(4).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let mesh = Mesh::new(&(counting.clone() as Comm<Cpu>), ParallelPlan::of(axes)?)?;
            let mut training = Training::new(&case, &mesh)?;
            training.take(0)?;
            counting.reset();
            training.take(1)?;
            let of_gradients = |name: &str| name.contains("bucket") || name.contains("unit");
            let traffic = counting.by_name().into_iter();
            Ok(traffic.filter(|(name, _)| name.as_deref().is_some_and(of_gradients)).map(|(_, t)| t.sent).sum::<u64>())
        });
        sent.unwrap().iter().sum::<u64>()
    };
    // Values of the last block are still there when its backward pass begins: they are gathered once.
    for (zero, of_blocks) in
        [(ZeroStage::None, [2, 2]), (ZeroStage::Gradients, [2, 2]), (ZeroStage::Parameters, [3, 2])]
    {
        let exchanged = of_blocks.iter().sum::<u64>() * experts / 2;
        let [whole, halves, alone] = [1, 2, 4].map(|expert_ranks| sent(expert_ranks, zero));
        // Of a sum or a gather over n ranks each sends (n - 1) / n of the bytes; all send n - 1 times them.
        assert_eq!(whole - alone, 3 * exchanged, "{zero:?}");
        // Two groups of two ranks, each with a half of the experts.
        assert_eq!(halves - alone, 2 * exchanged / 2, "{zero:?}");
    }
}
