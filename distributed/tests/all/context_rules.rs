//! Context parallelism: losses of one's own, random values after a checkpoint, mixed precision, and what ranks must have alike.

use crate::{job, prelude::*};

const EXCHANGES: [ContextExchange; 3] = [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses];

fn case(c: usize) -> Way {
    let mut case = Way::gpt(2 * c);
    case.gpt.context = 4 * c;
    case
}

fn over(comm: &Comm<Cpu>, axes: &[(Axis, usize)]) -> Result<Mesh<Cpu>> {
    Mesh::new(comm, ParallelPlan::of(axes.to_vec())?)
}

/// Losses, norms and weights of steps with a loss of one's own, a penalty on logits, and one on a parameter that every rank has.
fn own_losses(mesh: &Mesh<Cpu>) -> Result<Vec<f64>> {
    let case = case(2);
    let model = case.gpt_on(mesh)?;
    let mut step = TrainStep::builder(mesh, &model).optimizer(SgdConfig::default()).max_norm(0.05).build()?;
    let own = shard_batches(6, mesh.batch().rank(), mesh.batch().size());
    let mut seen = Vec::new();
    for k in 0..3 {
        let metrics = step.step(|_| {
            let (x, y) = case.batch(mesh.world().runtime(), k, &own)?;
            let logits = model.forward(&x)?;
            let options = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
            let rows = logits.cross_entropy_with(&model.context.take(&y, 1)?, options)?;
            let penalty = logits.square()?.sum_all()?.mul(1e-2)?;
            let sum = model.context.of_whole(&rows.sum_all()?.add(&penalty)?)?;
            let tokens = (own.len() * case.gpt.context) as f64;
            let decay = model.end()?.norm.weight.var().square()?.sum_all()?.mul(1e-2 * tokens)?;
            Loss::sum(sum.add(&decay)?, tokens)
        })?;
        seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0), metrics.weight()?]);
    }
    Ok(seen)
}

#[test]
fn a_loss_of_ones_own_stands_for_whole_sequences() {
    let one = own_losses(&NoOpCommunicator::new(&cpu(0).unwrap()).as_mesh()).unwrap();
    for axes in [&[(Axis::Context, 2)][..], &[(Axis::Data, 2), (Axis::Context, 2)]] {
        let ranks = axes.iter().map(|(_, size)| size).product();
        for many in Ranks::new(ranks).run(cpu, |comm| own_losses(&over(&comm, axes)?)).unwrap() {
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * b.abs();
            assert!(many.len() == 9 && many.iter().zip(&one).all(close), "{axes:?}: {many:?} {one:?}");
        }
    }
}

#[test]
fn ranks_that_read_one_share_draw_alike_after_a_checkpoint() {
    let path: PathBuf = std::env::temp_dir().join(format!("weftgrad-context-random-{}", job::id()));
    let case = case(2);
    case.clone().over(&[(Axis::Data, 4)]).each(|training| {
        // Ranks that have drawn differently, as with losses that draw.
        manual_seed(training.mesh.world().rank() as u64 + 10);
        training.step.save(&Folder::new(&path), &BTreeMap::new())
    });
    let staged = || case.clone().staged(ScheduleKind::OneFOneB, 1);
    for (way, ranks_that_share) in [
        (case.clone().over(&[(Axis::Context, 4)]), 4),
        (case.clone().over(&[(Axis::Data, 2), (Axis::Context, 2)]), 2),
        (staged().over(&[(Axis::Pipe, 1), (Axis::Data, 2), (Axis::Context, 2)]), 2),
        (staged().over(&[(Axis::Pipe, 2), (Axis::Context, 2)]), 2),
    ] {
        let seeds = way.each(|training| {
            training.step.load(&Folder::new(&path))?;
            Ok(autograd::random_state().seed)
        });
        assert_eq!(seeds, (0..4).map(|rank| 10 + rank / ranks_that_share).collect::<Vec<_>>(), "{:?}", way.axes);
    }
    let _ = std::fs::remove_dir_all(path);
}

#[test]
fn mixed_precision_casts_attention_as_on_one_rank() {
    for (dtype, close) in [(DType::F64, 1e-12), (DType::F32, 0.03)] {
        let losses = |mesh: &Mesh<Cpu>, exchange: ContextExchange| {
            let case = Way { dtype, exchange, ..case(2) };
            let model = case.gpt_on(mesh)?;
            let mut step = TrainStep::builder(mesh, &model).optimizer(adamw()).build()?;
            let own: Vec<usize> = (0..6).collect();
            let mut seen = Vec::new();
            for k in 0..2 {
                let metrics = step.step(|_| {
                    let (x, y) = case.batch(mesh.world().runtime(), k, &own)?;
                    let sum = autocast(DType::BF16, || model.next_token_loss(&x, &y, &case.loss))?;
                    Loss::sum(sum, (own.len() * case.gpt.context) as f64)
                })?;
                seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
            }
            Ok::<_, numcore::Error>(seen)
        };
        let one = losses(&NoOpCommunicator::new(&cpu(0).unwrap()).as_mesh(), EXCHANGES[0]).unwrap();
        for exchange in EXCHANGES {
            for many in Ranks::new(2).run(cpu, |comm| losses(&over(&comm, &[(Axis::Context, 2)])?, exchange)).unwrap() {
                let off = many.iter().zip(&one).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs() / b.abs()));
                assert!(off <= close, "{dtype} {exchange:?}: {off:e}");
            }
        }
    }
}

#[test]
fn ranks_that_read_different_examples_are_told() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let case = case(2);
        let model = case.gpt_on(&over(&comm, &[(Axis::Context, 2)])?)?;
        let (x, _) = case.batch(comm.runtime(), 0, &shard_batches(6, comm.rank(), comm.size()))?;
        model.forward(&x).map(drop)
    });
    refused(outcomes.unwrap(), &["the batch of tokens", "Mesh::batch"]);
}

/// Two models that are trained as one.
#[derive(Module)]
#[module(crate = "::nn")]
struct Pair<R: Runtime> {
    first: Gpt<R>,
    second: Gpt<R>,
}

#[test]
fn a_model_that_is_cut_in_part_is_refused_by_name() {
    let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
        let (mesh, case) = (over(&comm, &[(Axis::Context, 2)])?, case(2));
        let whole = case.gpt_on(&NoOpCommunicator::new(comm.runtime()).as_mesh())?;
        let pair = Pair { first: case.gpt_on(&mesh)?, second: whole };
        TrainStep::builder(&mesh, &pair).optimizer(adamw()).build().map(drop)
    });
    refused(outcomes.unwrap(), &["second.blocks.0", "not cut", "2 ranks"]);
    let replaced = Ranks::new(2).run(cpu, |comm| {
        let (mesh, case) = (over(&comm, &[(Axis::Context, 2)])?, case(2));
        let mut model = case.gpt_on(&mesh)?;
        let other = case.gpt_on(&NoOpCommunicator::new(comm.runtime()).as_mesh())?;
        model.blocks[1] = other.blocks.into_iter().next().unwrap_or_else(|| panic!("a model has blocks"));
        TrainStep::builder(&mesh, &model).optimizer(adamw()).build().map(drop)
    });
    let error = replaced.unwrap_err().to_string();
    assert!(error.contains("blocks.1") && error.contains("not cut"), "{error}");
}

#[test]
fn dropout_of_a_part_draws_a_byte_an_element() {
    let rt = cpu(0).unwrap();
    let live = || rt.memory().of(MemoryCategory::Activations);
    let part = SequencePart::of(4096, [0..256, 3840..4096]);
    let x = Var::new(Tensor::zeros(&rt, [1, 512, 64], DType::F32).unwrap());
    let dropout = Dropout::new(0.1).unwrap();
    let before = live().live;
    rt.reset_peak();
    let _y = dropout.forward_part(&x, Some(&part)).unwrap();
    // What is drawn, a part of it twice, and the result.
    let most = 4096 * 64 + 2 * 512 * 64 + 512 * 64 * 4;
    assert!(live().peak - before <= most + most / 10, "{} bytes, {most} are due", live().peak - before);
}

#[test]
fn gradients_of_keys_that_nobody_trains_do_not_travel() {
    for exchange in [ContextExchange::AllGather, ContextExchange::Ring] {
        let sent = Ranks::new(2).run(cpu, |comm| {
            let counting = Arc::new(CountingCommunicator::new(comm));
            let comm: Comm<Cpu> = counting.clone();
            let group = ContextRanks::group(&comm, exchange);
            let value = |seed| Tensor::normal(comm.runtime(), [1, 2, 4, 4], DType::F64, 0.0, 1.0, seed);
            let (q, k) = (Var::leaf("q", value(1)?)?, Var::new(value(2)?));
            let options = ContextAttention { causal: true, ..Default::default() };
            let o = group.attention([&q, &k, &k], options, "a")?;
            grad(&[&o.sum_all()?], &[&q])?;
            Ok(counting.total().sent / 8)
        });
        // Keys and values, of 32 elements each, once forward and once backward.
        assert_eq!(sent.unwrap(), vec![2 * 64; 2], "{exchange:?}");
    }
}
