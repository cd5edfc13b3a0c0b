//! Layers that are cut over ranks, one by one: outputs and all gradients are those of the whole layer.

use crate::prelude::*;

/// An output, and the gradient of every parameter under its name, whole.
type Gradients = BTreeMap<String, Vec<f64>>;

/// Computes `forward` with a model that is cut over `t` ranks, and with the whole one; requires equal outputs and gradients.
fn same<M: Module<Cpu>>(
    t: usize,
    plan: &TensorPlan,
    make: impl Fn(&Init<Cpu>) -> Result<M> + Sync,
    forward: impl Fn(&M, &Cpu) -> Result<Var<Cpu>> + Sync,
) {
    same_in(DType::F64, 1e-12, t, plan, make, forward);
}

/// Checks as [`same`] does, with parameters of `dtype`, within `tolerance` of the largest element.
pub fn same_in<M: Module<Cpu>>(
    dtype: DType,
    tolerance: f64,
    t: usize,
    plan: &TensorPlan,
    make: impl Fn(&Init<Cpu>) -> Result<M> + Sync,
    forward: impl Fn(&M, &Cpu) -> Result<Var<Cpu>> + Sync,
) {
    let run = |mesh: &Mesh<Cpu>| {
        let rt = mesh.world().runtime();
        let model = make(&Init::new(rt, 5).dtype(dtype))?;
        mesh.parallelize(&model, plan)?;
        let y = forward(&model, rt)?;
        let weights = Var::new(Tensor::normal(rt, y.dims(), dtype, 0.0, 1.0, 8)?);
        let gradients = backward(&y.mul(&weights)?.sum_all()?)?;
        let mut all = vec![("output".to_string(), None, false, y.value()?.to_f64s()?)];
        for (name, p) in model.named_parameters() {
            let gradient = gradients.get(&p.leaf()).unwrap().to_f64s()?;
            let partial = p.placed().is_some_and(|placed| placed.has_partial_gradient());
            all.push((name, p.placed().map(|placed| placed.placement().clone()), partial, gradient));
        }
        Ok(all)
    };
    let mesh = |comm: &Comm<Cpu>| Mesh::new(comm, ParallelPlan::of([(Axis::Tensor, comm.size())])?);
    let one = Ranks::new(1).run(cpu, |comm| run(&mesh(&comm)?)).unwrap().remove(0);
    let many = Ranks::new(t).run(cpu, |comm| run(&mesh(&comm)?)).unwrap_or_else(|error| panic!("{t} ranks: {error}"));
    let mut found = Gradients::new();
    for rank in many {
        for (name, placement, partial, values) in rank {
            let Some(placement) = placement else {
                found.insert(name, values);
                continue;
            };
            let fresh = || vec![0.0; placement.logical().numel()];
            let all = found.entry(name).or_insert_with(fresh);
            for run in placement.runs(0..values.len()) {
                for k in 0..run.len {
                    let (there, here) = (&mut all[run.logical + k], values[run.local + k]);
                    *there = if partial { *there + here } else { here };
                }
            }
        }
    }
    for (name, _, _, values) in one {
        let scale = values.iter().fold(1e-3, |m: f64, v| m.max(v.abs()));
        for (a, b) in found[&name].iter().zip(&values) {
            assert!((a - b).abs() <= tolerance * scale, "{name} on {t} ranks: {a} and {b}");
        }
    }
}

fn input(rt: &Cpu, dims: &[usize]) -> Result<Var<Cpu>> {
    Ok(Var::new(Tensor::normal(rt, dims, DType::F64, 0.0, 1.0, 3)?))
}

#[derive(Module)]
#[module(crate = "::nn")]
struct FeedForward<R: Runtime> {
    up: Linear<R>,
    down: Linear<R>,
}

#[test]
fn a_column_and_a_row_make_a_feed_forward_network() {
    for t in [1, 2, 3, 4, 5, 8] {
        let make =
            |init: &Init<Cpu>| Ok(FeedForward { up: Linear::new(init, 3, 2 * t)?, down: Linear::new(init, 2 * t, 5)? });
        let plan = TensorPlan::new().column("up").row("down");
        same(t, &plan, make, |m, rt| m.down.forward(&m.up.forward(&input(rt, &[4, 3])?)?.gelu()?));
        let onto = |m: &FeedForward<Cpu>, rt: &Cpu| {
            m.down.forward_onto(&m.up.forward(&input(rt, &[4, 3])?)?, &input(rt, &[4, 5])?)
        };
        same(t, &plan, make, onto);
        // Along the vocabulary outputs are gathered, of any number of them.
        for rows in [1, 2, 7, 13, 2 * t] {
            let make = |init: &Init<Cpu>| {
                let [up, down] = [Linear::new(init, 3, rows)?, Linear::new(init, rows, 5)?];
                Ok(FeedForward { up: up.with_cuts(Cuts::Table), down })
            };
            same(t, &TensorPlan::new().vocabulary("up"), make, |m, rt| {
                m.down.forward(&m.up.forward_onto(&input(rt, &[4, 3])?, &input(rt, &[4, rows])?)?)
            });
        }
    }
}

#[test]
fn heads_of_queries_share_those_of_keys_on_any_number_of_ranks() {
    for (t, heads, kv_heads) in [(2, 4, 2), (2, 4, 1), (4, 4, 2), (4, 4, 1), (3, 6, 3), (8, 8, 2), (2, 4, 4)] {
        let norm = nn::HeadNorm::each(1e-6);
        for head_norm in [None, Some(norm), Some(nn::HeadNorm { offset: 1.0, together: true, ..norm })] {
            let config = GroupedQueryConfig {
                width: 6,
                heads,
                kv_heads,
                head_dim: 4,
                fused: false,
                bias: true,
                output_bias: true,
                head_norm,
                window: None,
                scores: nn::ScoreOptions { scale: Some(0.7), softcap: Some(1.5), sinks: false },
            };
            let mut plan = TensorPlan::new().column("q_proj").column("k_proj").column("v_proj").row("o_proj");
            if head_norm.is_some() {
                plan = plan.partial_gradient("q_norm").partial_gradient("k_norm");
            }
            same(
                t,
                &plan,
                |init| GroupedQueryAttention::new(init, config),
                |m, rt| {
                    let x = input(rt, &[2, 5, 6])?;
                    m.attend(m.project(&x, None)?, None, &x)
                },
            );
        }
    }
    let fused = GroupedQueryConfig {
        width: 6,
        heads: 3,
        kv_heads: 3,
        head_dim: 4,
        fused: true,
        bias: true,
        output_bias: false,
        head_norm: None,
        window: None,
        scores: Default::default(),
    };
    let plan = TensorPlan::new().column("qkv_proj").row("o_proj");
    for (t, heads, kv_heads) in [(3, 3, 3), (2, 4, 2), (3, 6, 3), (5, 10, 5), (8, 8, 8)] {
        let config = GroupedQueryConfig { heads, kv_heads, ..fused };
        let make = |init: &Init<Cpu>| GroupedQueryAttention::new(init, config);
        same(t, &plan, make, |m, rt| {
            let x = input(rt, &[2, 5, 6])?;
            m.attend(m.project(&x, None)?, None, &x)
        });
    }
    let refused = Ranks::new(2).run(cpu, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, 2)])?)?;
        let config = GroupedQueryConfig { heads: 6, kv_heads: 3, ..fused };
        mesh.parallelize(&GroupedQueryAttention::new(&Init::new(comm.runtime(), 5), config)?, &plan)
    });
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("3 rows or heads cannot be shared out among 2 ranks"), "{error}");
}

#[derive(Module)]
#[module(crate = "::nn")]
struct Words<R: Runtime> {
    table: Embedding<R>,
}

#[test]
fn rows_of_a_table_are_looked_up_where_they_are() {
    let indices = |rt: &Cpu, k: &[i64]| Ok::<_, numcore::Error>(Var::new(Tensor::from_slice(rt, [k.len()], k)?));
    let sizes = [1, 2, 3, 4, 5, 8].into_iter().flat_map(|t| [1, 4, 7, 13, 4 * t].map(|rows| (t, rows)));
    for (t, rows) in sizes {
        let (last, third) = (rows as i64 - 1, rows.min(4) - 1);
        let plan = TensorPlan::new().vocabulary("table");
        let make = |init: &Init<Cpu>| Ok(Words { table: Embedding::new(init, rows, 3)? });
        let ids = [0, last, third as i64, third as i64, last / 2];
        same(t, &plan, make, |m, rt| m.table.forward(&indices(rt, &ids)?));
        same(t, &plan, make, |m, rt| m.table.project(&input(rt, &[2, 5, 3])?));
        // Of logits far below 0, and none on some ranks.
        same(t, &plan, make, |m, rt| {
            let logits = m.table.project_here(&input(rt, &[5, 3])?)?.sub(1e3)?;
            let cross_entropy = CrossEntropyOptions { reduction: Reduction::None, ..Default::default() };
            let loss = VocabularyLoss { cross_entropy, z_loss: 0.0 };
            loss.of(&logits, &indices(rt, &ids)?, m.table.weight.placed().as_deref())
        });
        let padded = |init: &Init<Cpu>| Ok(Words { table: Embedding::new(init, rows, 3)?.with_padding_idx(third)? });
        same(t, &plan, padded, |m, rt| m.table.forward(&indices(rt, &ids)?));
        for wrong in [-1, last + 1] {
            let outcome = Ranks::new(t).run(cpu, |comm| {
                let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
                let words = make(&Init::new(comm.runtime(), 0))?;
                mesh.parallelize(&words, &plan)?;
                words.table.forward(&indices(comm.runtime(), &[0, wrong])?)?.value()?.to_vec::<f32>()
            });
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("embedding") || error.contains("index"), "{t} ranks, {rows} rows, {wrong}: {error}");
        }
    }
}

#[test]
fn the_vocabulary_loss_is_the_fused_cross_entropy() {
    // On one rank, with neither exchange: against the fused operation, and z-loss against its formula.
    let rt = cpu(0).unwrap();
    let logits = Var::leaf("z", Tensor::normal(&rt, [7, 5], DType::F64, 0.0, 30.0, 1).unwrap()).unwrap();
    let targets = Var::new(Tensor::from_slice(&rt, [7], &[0i64, 4, -100, 2, 1, -100, 3]).unwrap());
    for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
        for label_smoothing in [0.0, 0.1] {
            let options = CrossEntropyOptions { label_smoothing, reduction, ..Default::default() };
            let whole = logits.cross_entropy_with(&targets, options).unwrap();
            let own = VocabularyLoss { cross_entropy: options, z_loss: 0.0 }.of(&logits, &targets, None).unwrap();
            let z = VocabularyLoss { cross_entropy: options, z_loss: 0.5 }.of(&logits, &targets, None).unwrap();
            let values = |v: &Var<Cpu>| v.value().unwrap().to_vec::<f64>().unwrap();
            let lse = logits.logsumexp(&[-1]).unwrap().square().unwrap().mul(0.5).unwrap();
            let lse: Vec<f64> =
                values(&lse).into_iter().zip([1., 1., 0., 1., 1., 0., 1.]).map(|(l, k)| l * k).collect();
            let extra = match reduction {
                Reduction::None => lse,
                Reduction::Sum => vec![lse.iter().sum()],
                Reduction::Mean => vec![lse.iter().sum::<f64>() / 5.0],
            };
            for ((a, b), (z, extra)) in values(&whole).iter().zip(values(&own)).zip(values(&z).iter().zip(extra)) {
                assert!((a - b).abs() <= 1e-12 * a.abs().max(1.0), "{reduction:?} {label_smoothing}: {a} {b}");
                assert!((z - b - extra).abs() <= 1e-12 * z.abs().max(1.0), "{reduction:?}: {z} is not {b} + {extra}");
            }
            let gradient = |v: &Var<Cpu>| {
                let g = backward(&v.sum_all().unwrap()).unwrap();
                g.get(logits.as_leaf().unwrap()).unwrap().to_vec::<f64>().unwrap()
            };
            assert_eq!(values(&whole), values(&own), "without a z-loss it is the fused operation itself");
            let of_whole = gradient(&whole);
            assert_eq!(of_whole, gradient(&own));
            // A z-loss too small to be seen leaves the composed loss.
            let composed =
                VocabularyLoss { cross_entropy: options, z_loss: 1e-30 }.of(&logits, &targets, None).unwrap();
            let both = of_whole.into_iter().zip(gradient(&composed));
            both.for_each(|(a, b)| assert!((a - b).abs() <= 1e-12, "{reduction:?} {label_smoothing}: {a} {b}"));
        }
    }
}

#[test]
fn targets_outside_the_vocabulary_are_refused_on_every_cut() {
    for t in [1, 2, 3] {
        for wrong in [-1, 6] {
            let outcome = Ranks::new(t).run(cpu, |comm| {
                let config =
                    GptConfig { vocab: 6, context: 4, layers: 1, heads: 3 * t, width: 6 * t, ..Default::default() };
                let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
                let model = Gpt::new(&Init::new(comm.runtime(), 0), config)?;
                mesh.parallelize(&model, &Gpt::<Cpu>::tensor_plan())?;
                let tokens =
                    |k: &[i64]| Ok::<_, numcore::Error>(Var::new(Tensor::from_slice(comm.runtime(), [1, 4], k)?));
                let loss = VocabularyLoss { z_loss: 1e-4, ..Default::default() };
                model.next_token_loss(&tokens(&[0, 1, 2, 3])?, &tokens(&[1, 2, wrong, 0])?, &loss)?.item()
            });
            assert!(outcome.is_err(), "{t} ranks, target {wrong}: {outcome:?}");
        }
    }
}

#[test]
fn logits_of_a_cut_model_are_all_of_them_on_every_rank() {
    for sequence in [false, true] {
        let case = Way { sequence, ..Way::gpt(2) };
        let logits = |n: usize| {
            let outcomes = Ranks::new(n).run(cpu, |comm| {
                let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, n)])?)?;
                let (x, _) = case.batch(comm.runtime(), 0, &[0, 1])?;
                case.gpt_on(&mesh)?.forward(&x)?.value()?.to_vec::<f64>()
            });
            outcomes.unwrap()
        };
        let one = logits(1).remove(0);
        for many in logits(2) {
            assert!(many.iter().zip(&one).all(|(a, b)| (a - b).abs() < 1e-12));
        }
    }
}

#[test]
fn layers_that_are_not_cut_compute_on_parts_of_the_sequence() {
    let uncut = |plan: TensorPlan| {
        plan.without("blocks.*.fc1").without("blocks.*.fc2").sequence("blocks.*.fc1").sequence("blocks.*.fc2")
    };
    let case = Way::gpt(2);
    for sequence in [false, true] {
        let plan = uncut(Gpt::<Cpu>::tensor_plan()).sequence_parallel(sequence);
        let make = |init: &Init<Cpu>| Gpt::new(init, case.gpt);
        same(2, &plan, make, |model, rt| model.forward(&case.batch(rt, 0, &[0, 1])?.0));
    }
}

#[test]
fn the_block_of_an_encoder_is_cut_by_its_heads() {
    let plan =
        || TensorPlan::new().column("query").column("key").column("value").row("output").column("fc1").row("fc2");
    for (t, pre_norm) in [(1, true), (2, true), (2, false), (4, true)] {
        let config = EncoderBlockConfig {
            width: 8,
            heads: 4,
            hidden: 12,
            activation: Activation::Gelu,
            pre_norm,
            qkv_bias: true,
            eps: 1e-6,
            dropout: 0.0,
        };
        let make = |init: &Init<Cpu>| EncoderBlock::new(init, config);
        same(t, &plan(), make, |block, rt| block.forward(&input(rt, &[2, 5, 8])?));
    }
}

#[test]
fn bytes_are_those_of_the_formulas() {
    // b·s·h elements of f64, times 2(t − 1)/t for an all-reduce: twice forward and twice backward in each block, once for the embedding's
    // lookup and the head's input; and the rows of the loss: a maximum, then two sums.
    for t in [2, 4] {
        for sequence in [false, true] {
            let case = Way { sequence, ..Way::gpt(t) };
            let sent = Ranks::new(t).run(cpu, |comm| {
                let counting = Arc::new(CountingCommunicator::new(comm));
                let comm: Comm<Cpu> = counting.clone();
                let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, t)])?)?;
                let model = case.gpt_on(&mesh)?;
                let (x, y) = case.batch(comm.runtime(), 0, &[0, 1, 2])?;
                counting.reset();
                backward(&model.next_token_loss(&x, &y, &case.loss)?)?;
                Ok(counting.total().sent)
            });
            let (rows, layers) = (3 * case.gpt.context as u64, case.gpt.layers as u64);
            let part = |bytes: u64| bytes * (t as u64 - 1) / t as u64;
            let values = part(rows * case.gpt.width as u64 * 8);
            let scalars = 2 * part(rows * 8) + 2 * part(2 * rows * 8);
            let sum = 2 * values;
            let expected = match sequence {
                // Forward 2 sums a block, and the embedding's; backward 2 a block, and the head's input.
                false => (4 * layers + 2) * sum + scalars,
                // Each sum is a reduce-scatter and an all-gather; entering the first block needs nothing, its gradient is gathered. What layers
                // that are cut along their outputs have gathered, two in a block and the head, they gather again.
                true => (4 * layers + 1) * sum + sum + values + (2 * layers + 1) * values + scalars,
            };
            for sent in sent.unwrap() {
                assert_eq!(sent, expected, "{t} ranks, sequence {sequence}");
            }
        }
    }
}
