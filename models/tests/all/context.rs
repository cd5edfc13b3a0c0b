//! Pretrained decoders whose sequences are cut over ranks: logits and training steps are those of one rank.

use autograd::Var;
use distributed::{
    comm::{Comm, Communicator, Ranks},
    context_parallel::ContextExchange,
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
};
use models::{Bert, BertInputs, Decoder, DecoderInputs, Lora, LoraConfig, LoraTargets, Pretrained};
use nn::{
    Forward, Init, ModuleExt,
    parallel::{VocabularyLoss, set_scores},
};
use numcore::{
    DType, Result, Tensor,
    fused::{CrossEntropyOptions, Reduction},
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

const TOKENS: usize = 24;

fn cut(comm: &Comm<Cpu>, name: &str, exchange: ContextExchange) -> Result<(Mesh<Cpu>, Decoder<Cpu>)> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Context, comm.size())])?)?;
    let init = Init::new(comm.runtime(), 0).dtype(DType::F64);
    let model = Decoder::from_pretrained(reference(name), &init)?;
    mesh.context_parallel(&model, exchange)?;
    Ok((mesh, model))
}

/// Tokens `[2, T]`, and of packed rows their positions and documents, which chunks cut anywhere.
fn packed(rt: &Cpu) -> Result<[Var<Cpu>; 3]> {
    let lengths = [[5, 12, 7], [1, 8, 15]];
    let all = |of: &dyn Fn(usize, usize, usize) -> i64| {
        let row = |row: usize| {
            lengths[row].into_iter().enumerate().flat_map(move |(k, len)| (0..len).map(move |i| (row, k, i)))
        };
        let values: Vec<i64> = (0..2).flat_map(row).map(|(row, k, i)| of(row, k, i)).collect();
        Tensor::from_slice(rt, [2, TOKENS], &values).map(Var::new)
    };
    Ok([
        all(&|row, k, i| ((row * 11 + k * 5 + i * 7) % 40) as i64)?,
        all(&|_, _, i| i as i64)?,
        all(&|_, k, _| k as i64 + 1)?,
    ])
}

fn inputs<'a>([_, positions, segments]: &'a [Var<Cpu>; 3], packs: bool) -> DecoderInputs<'a, Cpu> {
    DecoderInputs { positions: packs.then_some(positions), segments: packs.then_some(segments), cache: None }
}

fn run<T: Send>(ranks: usize, f: impl Fn(Comm<Cpu>) -> Result<T> + Sync) -> Vec<T> {
    Ranks::new(ranks).run(|_| Ok(cpu()), f).unwrap()
}

#[test]
fn every_family_gives_the_logits_of_one_rank() {
    for name in ["gpt2", "llama", "mistral", "qwen3", "olmo2", "phi3_long", "gemma2", "gemma3", "deepseek_v3"] {
        for packs in [false, true] {
            let logits = |ranks: usize, exchange: ContextExchange| {
                run(ranks, |comm| {
                    let (_, model) = cut(&comm, name, exchange)?;
                    let given = packed(comm.runtime())?;
                    let logits = model.forward_with(&given[0], inputs(&given, packs))?.value()?;
                    Ok((logits.dims().to_vec(), logits.to_vec::<f64>()?, model.parts.context.part(TOKENS)?))
                })
            };
            let (dims, one, _) = logits(1, ContextExchange::AllGather).remove(0);
            let whole = Tensor::from_slice(&cpu(), dims, &one).unwrap();
            for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
                // Mistral has a sliding window, and five heads; the other two heads.
                if ["mistral", "phi3_long"].contains(&name) && exchange == ContextExchange::Ulysses {
                    continue;
                }
                for ranks in [2, 4] {
                    // DeepSeek's two heads, whose values are narrower than keys, are no four.
                    if (name, exchange, ranks) == ("deepseek_v3", ContextExchange::Ulysses, 4) {
                        continue;
                    }
                    for (dims, here, part) in logits(ranks, exchange) {
                        let here = Tensor::from_slice(&cpu(), dims, &here).unwrap();
                        let due = part.take(&whole, 1).unwrap().contiguous().unwrap();
                        close(&format!("{name} {exchange:?} {ranks} {packs}"), &here, &due, 1e-11);
                    }
                }
            }
        }
    }
}

/// Positions of a program count from the start of each packed text, and heads are those of all ranks.
#[test]
fn programs_of_scores_see_positions_of_whole_sequences() {
    for packs in [false, true] {
        let logits = |ranks: usize, exchange: ContextExchange| {
            run(ranks, |comm| {
                let (_, model) = cut(&comm, "llama", exchange)?;
                let init = Init::new(comm.runtime(), 1).dtype(DType::F64);
                set_scores(&model, |_| learned_scores(&init, model.config().heads))?;
                let given = packed(comm.runtime())?;
                let logits = model.forward_with(&given[0], inputs(&given, packs))?.value()?;
                Ok((logits.dims().to_vec(), logits.to_vec::<f64>()?, model.parts.context.part(TOKENS)?))
            })
        };
        let (dims, one, _) = logits(1, ContextExchange::AllGather).remove(0);
        let whole = Tensor::from_slice(&cpu(), dims, &one).unwrap();
        for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
            for (dims, here, part) in logits(2, exchange) {
                let here = Tensor::from_slice(&cpu(), dims, &here).unwrap();
                let due = part.take(&whole, 1).unwrap().contiguous().unwrap();
                close(&format!("{exchange:?} {packs}"), &here, &due, 1e-11);
            }
        }
    }
}

#[test]
fn steps_of_packed_rows_are_those_of_one_rank() {
    let train = |ranks: usize, exchange: ContextExchange| {
        let mut outcomes = run(ranks, |comm| {
            let (mesh, model) = cut(&comm, "llama", exchange)?;
            let optimizer = SgdConfig { lr: 0.1, ..Default::default() };
            let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).max_norm(0.5).build()?;
            let given = packed(comm.runtime())?;
            let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
            let options = VocabularyLoss { cross_entropy, z_loss: 0.0 };
            let mut seen = Vec::new();
            for _ in 0..3 {
                let metrics = step.step(|_| {
                    let logits = model.forward_with(&given[0], inputs(&given, true))?;
                    Loss::sum(model.next_token_loss(&logits, &given[0], &options)?, 2.0 * TOKENS as f64)
                })?;
                seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
            }
            Ok(seen)
        });
        outcomes.remove(0)
    };
    let alone = train(1, ContextExchange::AllGather);
    for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
        for (a, b) in train(2, exchange).into_iter().zip(&alone) {
            assert!((a - b).abs() <= 1e-11 * b.abs(), "{exchange:?}: {a} and {b}");
        }
    }
}

/// A decoder whose sequences are cut before or after adapters with dropout are put in.
fn adapted(comm: &Comm<Cpu>, name: &str, adapters_first: bool) -> Result<(Mesh<Cpu>, Decoder<Cpu>, Lora<Cpu>)> {
    let init = Init::new(comm.runtime(), 0).dtype(DType::F64);
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Context, comm.size())])?)?;
    let model = Decoder::from_pretrained(reference(name), &init)?;
    let config = LoraConfig { dropout: 0.3, target_modules: LoraTargets::AllLinear, ..LoraConfig::default() };
    if !adapters_first {
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
    }
    let lora = Lora::new(&model, &init, config)?;
    if adapters_first {
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
    }
    Ok((mesh, model, lora))
}

/// Losses of steps of its adapters.
fn losses_of_adapters(comm: &Comm<Cpu>, name: &str, adapters_first: bool) -> Result<Vec<f64>> {
    let (mesh, model, _lora) = adapted(comm, name, adapters_first)?;
    autograd::manual_seed(4);
    let optimizer = SgdConfig { lr: 0.5, ..Default::default() };
    let mut step = TrainStep::builder(&mesh, &model).optimizer(optimizer).build()?;
    let tokens = &packed(comm.runtime())?[0];
    let cross_entropy = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let loss = VocabularyLoss { cross_entropy, z_loss: 0.0 };
    let mut seen = Vec::new();
    for _ in 0..3 {
        let metrics = step.step(|_| {
            let logits = model.forward_with(tokens, DecoderInputs::default())?;
            Loss::sum(model.next_token_loss(&logits, tokens, &loss)?, 2.0 * TOKENS as f64)
        })?;
        seen.push(metrics.loss()?);
    }
    Ok(seen)
}

#[test]
fn adapters_drop_what_one_rank_drops() {
    // The second has layers that every token goes through beside its experts.
    for name in ["llama", "qwen2_moe"] {
        let one = run(1, |comm| losses_of_adapters(&comm, name, true)).remove(0);
        assert!(one[0] - one[2] > 1e-3, "{one:?}");
        for many in [2, 3].into_iter().flat_map(|ranks| run(ranks, |comm| losses_of_adapters(&comm, name, true))) {
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-11 * b.abs();
            assert!(many.len() == 3 && many.iter().zip(&one).all(close), "{name}: {many:?} {one:?}");
        }
    }
    let late =
        Ranks::new(2).run(|_| Ok(cpu()), |comm| losses_of_adapters(&comm, "llama", false)).unwrap_err().to_string();
    assert!(late.contains("q_proj") && late.contains("adapter"), "{late}");
}

#[test]
fn adapters_drop_nothing_where_sequences_cannot_be_told_apart() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let (_, model, lora) = adapted(&comm, "llama", true)?;
            let x = Var::new(Tensor::ones(comm.runtime(), [8, 24], DType::F64)?);
            lora.eval();
            model.parts.blocks[0].self_attn.o_proj.forward(&x)?;
            lora.train();
            model.parts.blocks[0].self_attn.o_proj.forward(&x).map(drop)
        },
    );
    let why = outcome.unwrap_err().to_string();
    assert!(why.contains("[8, 24]") && why.contains("o_proj") && why.contains("[.., T, C]"), "{why}");
}

#[test]
fn what_a_cut_decoder_cannot_do_it_refuses() {
    let error = |f: fn(&Decoder<Cpu>, &Var<Cpu>) -> Result<Var<Cpu>>| {
        let outcome = Ranks::new(2).run(
            |_| Ok(cpu()),
            |comm| {
                let (_, model) = cut(&comm, "mistral", ContextExchange::Ring)?;
                f(&model, &packed(comm.runtime())?[0]).map(drop)
            },
        );
        outcome.unwrap_err().to_string()
    };
    let cached = error(|model, tokens| {
        let mut cache = model.cache(TOKENS, vec![0; 2]);
        model.forward_with(tokens, DecoderInputs { cache: Some(&mut cache), ..Default::default() })
    });
    assert!(cached.contains("cut over ranks"), "{cached}");
    let sinks = run(2, |comm| {
        let (_, model) = cut(&comm, "gpt_oss", ContextExchange::AllGather)?;
        Ok(model.forward(&packed(comm.runtime())?[0]).map(drop).unwrap_err().to_string())
    });
    assert!(sinks.iter().all(|error| error.contains("sinks are computed for whole sequences")), "{sinks:?}");
}

/// Padding, segments of text, and the head for each token; RoBERTa's positions are counted over the whole sequence.
#[test]
fn encoders_of_text_give_the_logits_of_one_rank() {
    ["bert_tokens", "roberta_tokens"].into_iter().for_each(encoders_of_text);
}

fn encoders_of_text(name: &str) {
    let logits = |ranks: usize, exchange: ContextExchange| {
        run(ranks, |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, ranks)])?)?;
            let init = Init::new(comm.runtime(), 0).dtype(DType::F64);
            let model = Bert::from_pretrained(reference(name), &init)?;
            mesh.context_parallel(&model, exchange)?;
            let all = |of: &dyn Fn(usize) -> i64| {
                let values: Vec<i64> = (0..2 * TOKENS).map(of).collect();
                Tensor::from_slice(comm.runtime(), [2, TOKENS], &values).map(Var::new)
            };
            let tokens = all(&|i| (i * 7 % 40) as i64)?;
            let mask = all(&|i| i64::from(i % TOKENS < 17 + i / TOKENS * 5))?;
            let types = all(&|i| i64::from(i % TOKENS > 9))?;
            let types = (name == "bert_tokens").then_some(&types);
            let inputs = BertInputs { mask: Some(&mask), token_types: types };
            let y = model.forward_with(&tokens, &inputs)?.value()?;
            Ok((y.dims().to_vec(), y.to_vec::<f64>()?, model.context.part(TOKENS)?))
        })
    };
    let (dims, one, _) = logits(1, ContextExchange::AllGather).remove(0);
    let whole = Tensor::from_slice(&cpu(), dims, &one).unwrap();
    let classified = run(2, |comm| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Context, 2)])?)?;
        let model = Bert::from_pretrained(reference("bert_classifier"), &Init::new(comm.runtime(), 0))?;
        mesh.context_parallel(&model, ContextExchange::AllGather)?;
        let tokens = Var::new(Tensor::zeros(comm.runtime(), [1, 8], DType::I64)?);
        Ok(model.forward(&tokens).map(drop).unwrap_err().to_string())
    });
    assert!(classified.iter().all(|error| error.contains("has the first token")), "{classified:?}");
    for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
        // `Ulysses` shares out heads, which may be fewer than ranks.
        for ranks in [2, 4].into_iter().filter(|ranks| exchange != ContextExchange::Ulysses || *ranks == 2) {
            for (dims, here, part) in logits(ranks, exchange) {
                let here = Tensor::from_slice(&cpu(), dims, &here).unwrap();
                let due = part.take(&whole, 1).unwrap().contiguous().unwrap();
                close(&format!("{exchange:?} {ranks}"), &here, &due, 1e-11);
            }
        }
    }
}
