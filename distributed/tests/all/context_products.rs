//! Context parallelism with what else there is: checkpointed segments, skipped steps, memory, ranks that disagree.

use autograd::{Backward, Gradients, checkpoint};
use numcore::ops::{MatmulOps, cat};

use crate::prelude::*;

const EXCHANGES: [ContextExchange; 3] = [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses];

fn case(c: usize, exchange: ContextExchange) -> Way {
    let mut case = Way { exchange, ..Way::gpt(2 * c) };
    case.gpt.context = 4 * c;
    case
}

fn over(comm: &Comm<Cpu>) -> Result<Mesh<Cpu>> {
    Mesh::new(comm, ParallelPlan::of([(Axis::Context, comm.size())])?)
}

/// Losses and gradient norms of steps whose blocks are recomputed in backward.
fn checkpointed(case: &Way, mesh: &Mesh<Cpu>) -> Result<Vec<f64>> {
    autograd::manual_seed(5);
    let model = Arc::new(case.gpt_on(mesh)?);
    let mut step =
        TrainStep::builder(mesh, &*model).optimizer(adamw()).zero(ZeroStage::Parameters).max_norm(0.5).build()?;
    let mut seen = Vec::new();
    for k in 0..3 {
        let (x, y) = case.batch(mesh.world().runtime(), k, &[0, 1, 2])?;
        let metrics = step.step(|_| {
            let mut h = model.embed(&x)?;
            for i in 0..case.gpt.layers {
                h = checkpoint(|| model.blocks[i].forward(&h))?;
            }
            Loss::sum(model.next_token_loss_of(&h, &y, &case.loss)?, (3 * case.gpt.context) as f64)
        })?;
        seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
    }
    Ok(seen)
}

#[test]
fn checkpointed_segments_exchange_again() {
    for exchange in EXCHANGES {
        for c in [2, 3] {
            let mut case = case(c, exchange);
            case.gpt.dropout = 0.2;
            let rt = cpu(0).unwrap();
            let one = checkpointed(&case, &NoOpCommunicator::new(&rt).as_mesh()).unwrap();
            for many in Ranks::new(c).run(cpu, |comm| checkpointed(&case, &over(&comm)?)).unwrap() {
                let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-11 * b.abs();
                assert!(many.len() == 6 && many.iter().zip(&one).all(close), "{exchange:?} {c}: {many:?} {one:?}");
            }
        }
    }
}

/// Bytes that a forward pass leaves for backward on each rank, and the most there are until backward has ended.
fn kept(c: usize, exchange: ContextExchange) -> Vec<[usize; 2]> {
    let config = GptConfig { vocab: 16, context: 256, layers: 2, heads: 8, width: 32, ..Default::default() };
    let kept = Ranks::new(c).run(cpu, |comm| {
        let rt = comm.runtime();
        let model = Gpt::new(&Init::new(rt, 3), config)?;
        over(&comm)?.context_parallel(&model, exchange)?;
        let tokens = Var::new(Tensor::zeros(rt, [1, 256], DType::I64)?);
        let live = || rt.memory().of(MemoryCategory::Activations).live;
        let before = live();
        let found = model.blocks.iter().try_fold(model.embed(&tokens)?, |x, block| block.forward(&x))?;
        let bytes = live() - before;
        rt.reset_peak();
        backward(&found.sum_all()?)?;
        Ok([bytes, rt.memory().of(MemoryCategory::Activations).peak - before])
    });
    kept.unwrap()
}

#[test]
fn activations_are_those_of_the_tokens_here() {
    let [whole, most] = kept(1, ContextExchange::AllGather)[0];
    for exchange in EXCHANGES {
        for c in [2, 4, 8] {
            for [own, peak] in kept(c, exchange) {
                // Scores of all tokens would be more.
                assert!(peak < most, "{exchange:?}: at most {peak} on each of {c} ranks, {most} on one");
                // Attention by heads keeps its output, and what it becomes for the tokens here: two layers, 256 tokens, 32 channels.
                let twice = if exchange == ContextExchange::Ulysses { 2 * 256 * 32 * 4 } else { 0 };
                assert!(
                    own * c <= whole + whole / 50 + twice,
                    "{exchange:?}: {own} on each of {c} ranks, {whole} on one"
                );
            }
        }
    }
}

#[test]
fn no_layer_keeps_a_mask_of_documents() {
    const TOKENS: usize = 128;
    for exchange in EXCHANGES {
        let kept = Ranks::new(2).run(cpu, |comm| {
            let (rt, group) = (comm.runtime(), ContextRanks::group(&comm, exchange));
            let value = |seed| Tensor::normal(rt, [1, 2, TOKENS / 2, 4], DType::F32, 0.0, 1.0, seed);
            let [q, k, v] = [Var::leaf("q", value(1)?)?, Var::leaf("k", value(2)?)?, Var::leaf("v", value(3)?)?];
            let documents: Vec<i64> = (0..TOKENS as i64).map(|i| i / 10).collect();
            let segments = Var::new(Tensor::from_slice(rt, [1, TOKENS], &documents)?);
            let options = ContextAttention { causal: true, segments: Some(&segments), ..Default::default() };
            let before = rt.memory().of(MemoryCategory::Activations).live;
            let o = group.attention([&q, &k, &v], options, "attention")?;
            let after = rt.memory().of(MemoryCategory::Activations).live;
            backward(&o.sum_all()?)?;
            Ok(after - before)
        });
        for bytes in kept.unwrap() {
            assert!(bytes < TOKENS * TOKENS * 4 / 2, "{exchange:?}: {bytes}");
        }
    }
}

/// The gradients of a projection and of a learned slope of each head, by attention with a program. Heads are cut in
/// two, as tensor parallelism cuts them; weight gradients are deferred, and attention may be recomputed.
fn program_gradients(comm: &Comm<Cpu>, exchange: ContextExchange, recomputed: bool) -> Result<Vec<f64>> {
    const TOKENS: usize = 24;
    let (rt, group) = (comm.runtime(), ContextRanks::group(comm, exchange));
    let part = group.part(TOKENS)?;
    let drawn = |shape: &[usize], seed| Tensor::normal(rt, shape, DType::F64, 0.0, 1.0, seed);
    let x = Var::leaf("x", part.take(&drawn(&[2, TOKENS, 6], 1)?, 1)?)?;
    let (w, slopes) = (Var::leaf("w", drawn(&[6, 48], 2)?)?, Var::leaf("slopes", drawn(&[4, 1, 1], 3)?)?);
    let weights = Var::new(part.take(&drawn(&[2, 4, TOKENS, 4], 4)?, 2)?);
    let [q, k, v] = x.matmul(&w)?.reshape([2, part.len(), 12, 4])?.transpose(1, 2)?.chunk(1, 3)?.try_into().unwrap();
    let program = AttentionProgram::over(1)
        .score(|s, at, args| (s + args[0] * (at.key - at.query).cast_like(s) * 0.1).tanh())
        .mask(|at, _| at.key.le(at.query) & (at.query - at.key).lt(at.head + 6));
    let mut outputs = Vec::new();
    for first in [0, 2] {
        let [q, k, v] = [&q, &k, &v].map(|x| x.narrow(1, first, 2));
        let (q, k, v, slopes) = (q?, k?, v?, slopes.narrow(0, first, 2)?);
        let program = program.clone().shifted(0, first, 0, 0);
        let attend = || {
            let options = ContextAttention { program: Some((&program, &[&slopes])), ..Default::default() };
            group.attention([&q, &k, &v], options, "attention")
        };
        outputs.push(if recomputed { checkpoint(attend)? } else { attend()? });
    }
    let loss = cat(&outputs.iter().collect::<Vec<_>>(), 1)?.mul(&weights)?.sum_all()?;
    let mut gradients = Gradients::new();
    let deferred = Backward::of(&loss)?.inputs_only(&[&x], &mut gradients)?;
    assert!(gradients.of(&x).is_some() && gradients.of(&w).is_none());
    deferred.run(&mut gradients)?;
    let of = |leaf| gradients.of(leaf).expect("a gradient").to_f64s();
    Ok([of(&w)?, of(&slopes)?].concat())
}

#[test]
fn programs_with_cut_heads_deferred_gradients_and_recomputation() {
    let one = Ranks::new(1).run(cpu, |comm| program_gradients(&comm, ContextExchange::Ring, false)).unwrap().remove(0);
    for exchange in EXCHANGES {
        for recomputed in [false, true] {
            let all = Ranks::new(2).run(cpu, |comm| program_gradients(&comm, exchange, recomputed)).unwrap();
            for (k, want) in one.iter().enumerate() {
                let got: f64 = all.iter().map(|rank| rank[k]).sum();
                assert!((got - want).abs() < 1e-11, "{exchange:?} {recomputed}: {k}: {got}, expected {want}");
            }
        }
    }
}

#[test]
fn ranks_that_differ_are_told_and_none_waits() {
    for exchange in EXCHANGES {
        let outcomes = Ranks::new(2).outcomes(cpu, |comm| {
            let model = case(2, exchange).gpt_on(&over(&comm)?)?;
            let batch = |examples: &[usize]| case(2, exchange).batch(comm.runtime(), 0, examples);
            model.forward(&batch(&[0])?.0)?;
            model.forward(&batch(if comm.rank() == 0 { &[0] } else { &[0, 1] })?.0).map(drop)
        });
        refused(outcomes.unwrap(), &["blocks.0"]);
    }
    let plans = Ranks::new(2).outcomes(cpu, |comm| {
        let model = Gpt::new(&Init::new(comm.runtime(), 0), case(2, ContextExchange::Ring).gpt)?;
        over(&comm)?.context_parallel(&model, EXCHANGES[comm.rank()])
    });
    refused(plans.unwrap(), &["the model and its context exchange of rank 0 differs from that of rank 1"]);
}
