//! Pretrained decoders whose layers are cut over ranks: logits, generation's steps and a training step are those of one rank.

use autograd::{Var, no_grad};
use distributed::{
    comm::{Comm, Communicator, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{
    Decoder, DecoderInputs, GenerationOptions, Lora, LoraConfig, LoraTargets, Pretrained, Prompt, Sampling,
    SaveOptions, gathered, generate,
};
use nn::{
    Forward, Init, ModuleExt,
    loss::cross_entropy_with,
    parallel::{TensorPlan, set_scores},
};
use numcore::{
    Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::ViewOps,
    placement::TensorPlacement,
};
use optim::SgdConfig;
use runtime_cpu::Cpu;

use crate::common::*;

fn cut(comm: &Comm<Cpu>, name: &str) -> Result<(Mesh<Cpu>, Decoder<Cpu>)> {
    let mesh = Mesh::new(comm, ParallelPlan::of([(Axis::Tensor, comm.size())])?)?;
    let model = Decoder::from_pretrained(reference(name), &Init::new(comm.runtime(), 0).lazily())?;
    // Its shared expert has five channels, and every rank has all of them.
    let whole: &[&str] = if name == "deepseek_v3_plain" { &["gate_proj", "up_proj", "down_proj"] } else { &[] };
    let plan = whole.iter().fold(Decoder::<Cpu>::tensor_plan(), |plan, projection| {
        plan.without(&format!("layers.*.mlp.shared_experts.{projection}"))
    });
    mesh.parallelize(&model, &plan)?;
    Ok((mesh, model))
}

#[test]
fn every_family_gives_the_logits_of_one_rank() {
    for name in ["gpt2", "llama", "qwen2", "qwen3"].into_iter().chain(decoders_with_options()) {
        let ids = Reference::read(name).tensor("ids");
        let one = decoder(name).forward(&Var::new(ids.clone())).unwrap().value().unwrap();
        let logits = Ranks::new(2).run(
            |_| Ok(cpu()),
            |comm| {
                let (_, model) = cut(&comm, name)?;
                let ids = Var::new(ids.to_device(comm.runtime())?);
                let whole = model.forward(&ids)?.value()?;
                // With a cache, of the heads that are here, token by token.
                let mut cache = model.cache(ids.dims()[1], vec![0; ids.dims()[0]]);
                for t in 0..ids.dims()[1] {
                    let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
                    let step = no_grad(|| model.forward_with(&ids.narrow(1, t, 1)?, inputs))?.value()?;
                    close(name, &step.contiguous()?, &whole.narrow(1, t, 1)?.contiguous()?, 1e-4);
                }
                whole.to_vec::<f32>()
            },
        );
        for logits in logits.unwrap() {
            let logits = Tensor::from_slice(&cpu(), one.dims(), &logits).unwrap();
            close(name, &logits, &one, 1e-4);
        }
    }
}

/// Each rank reads the rows it has, which are fewer on the last ranks, or none.
#[test]
fn a_vocabulary_is_cut_over_any_number_of_ranks() {
    for name in ["gpt2", "llama", "qwen2"] {
        let ids = Reference::read(name).tensor("ids");
        let one = decoder(name).forward(&Var::new(ids.clone())).unwrap().value().unwrap();
        for ranks in [2, 3, 5, 8, 13] {
            let plan = TensorPlan::new().vocabulary("embed_tokens").vocabulary("lm_head").optional();
            let logits = Ranks::new(ranks).run(
                |_| Ok(cpu()),
                |comm| {
                    let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, ranks)])?)?;
                    let model = Decoder::from_pretrained(reference(name), &Init::new(comm.runtime(), 0).lazily())?;
                    mesh.parallelize(&model, &plan)?;
                    model.forward(&Var::new(ids.to_device(comm.runtime())?))?.value()?.to_vec::<f32>()
                },
            );
            for logits in logits.unwrap() {
                close(name, &Tensor::from_slice(&cpu(), one.dims(), &logits).unwrap(), &one, 1e-4);
            }
        }
    }
}

#[test]
fn a_step_of_a_cut_decoder_is_that_of_the_whole() {
    for name in ["llama", "qwen3"].into_iter().chain(decoders_with_options()) {
        let ids = Reference::read(name).tensor("ids");
        let train = |ranks: usize| {
            let outcomes = Ranks::new(ranks).run(
                |_| Ok(cpu()),
                |comm| {
                    let (mesh, model) = cut(&comm, name)?;
                    let mut step = TrainStep::builder(&mesh, &model)
                        .optimizer(SgdConfig { lr: 0.1, ..Default::default() })
                        .max_norm(0.5)
                        .build()?;
                    let ids = Var::new(ids.to_device(comm.runtime())?);
                    let mut seen = Vec::new();
                    for _ in 0..3 {
                        let metrics = step.step(|_| {
                            let t = ids.dims()[1];
                            let logits = model.forward(&ids)?.narrow(1, 0, t - 1)?;
                            let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                            let targets = ids.narrow(1, 1, t - 1)?;
                            Loss::sum(cross_entropy_with(&logits, &targets, options)?, (t - 1) as f64)
                        })?;
                        seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
                    }
                    Ok(seen)
                },
            );
            outcomes.unwrap().remove(0)
        };
        for (a, b) in train(2).into_iter().zip(train(1)) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{name}: {a} and {b}");
        }
    }
}

/// Of each weight a rank reads its own piece, whatever the cut and however the file has it (GPT-2's are transposed).
#[test]
fn a_piece_is_read_alone() {
    for name in ["gpt2", "llama"] {
        let whole = decoder(name);
        let lazy = Decoder::from_pretrained(reference(name), &Init::new(&cpu(), 0).lazily()).unwrap();
        for ((name, whole), (_, lazy)) in whole.named_parameters().iter().zip(lazy.named_parameters()) {
            let (shape, rt) = (whole.shape(), lazy.leaf().runtime().clone());
            for (dim, parts) in [(0, 1), (1, 1), (0, 2)] {
                if dim >= shape.rank() || !shape[dim].is_multiple_of(2 * parts) {
                    continue;
                }
                let piece = TensorPlacement::part(shape, dim, parts, 1, 2).unwrap();
                rt.reset_peak();
                let before = rt.memory().total.live;
                let read = lazy.leaf().piece(&piece).unwrap();
                // As it is in the file, and transposed.
                assert!(rt.memory().total.peak - before <= shape.numel() * 4 + 256, "{name}");
                let due = piece.take(&whole.value().unwrap()).unwrap();
                assert_eq!(
                    read.to_bytes().unwrap(),
                    due.contiguous().unwrap().to_bytes().unwrap(),
                    "{name} {dim} {parts}"
                );
            }
        }
    }
}

#[test]
fn a_cut_model_has_no_new_adapters() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let (_, model) = cut(&comm, "llama")?;
            let config =
                LoraConfig { target_modules: LoraTargets::Names(vec!["down_proj".into()]), ..LoraConfig::default() };
            let lora = Lora::new(&model, &Init::new(comm.runtime(), 0), config).map(drop).unwrap_err().to_string();
            Ok((lora, model.num_parameters()))
        },
    );
    for (lora, count) in outcome.unwrap() {
        assert!(lora.contains("before `Mesh::parallelize`"), "{lora}");
        assert_eq!(count.total, decoder("llama").num_parameters().total);
    }
}

/// Fused projections, shared heads, uneven vocabularies and transposed weights: files of all ranks are those of one.
#[test]
fn a_cut_model_is_saved_as_the_whole_while_it_trains() {
    for (name, axes) in [
        ("gpt2", &[(Axis::Tensor, 2)][..]),
        ("llama", &[(Axis::Tensor, 4)]),
        ("qwen2", &[(Axis::Tensor, 2), (Axis::Data, 2)]),
        ("qwen3", &[(Axis::Shard, 2), (Axis::Tensor, 2)]),
        ("phi3", &[(Axis::Tensor, 2)]),
        ("gemma3", &[(Axis::Tensor, 2)]),
    ] {
        let [due, saved, copied] = [(); 3].map(|()| Scratch::new());
        decoder(name).save_pretrained(&due.0).unwrap();
        let prompts = [3, 5].map(|n| Prompt { tokens: (1..n).collect(), stream: u64::from(n) });
        let options = GenerationOptions { sampling: Some(Sampling::default()), ..Default::default() };
        let texts = generate(&decoder(name), &prompts, &options, None).unwrap();
        let run = |comm: Comm<Cpu>| {
            let mesh = Mesh::new(&comm, ParallelPlan::of(axes.to_vec())?)?;
            let model = Decoder::from_pretrained(reference(name), &Init::new(comm.runtime(), 0).lazily())?;
            // Such a plan has no cache to generate with.
            mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan().sequence_parallel(true))?;
            let builder = TrainStep::builder(&mesh, &model).optimizer(SgdConfig { lr: 0.1, ..Default::default() });
            let _step = builder.zero(ZeroStage::Parameters).build()?;
            let writes = SaveOptions { writes: comm.rank() == 0, ..Default::default() };
            model.save_pretrained_with(&saved.0, &writes)?;
            let whole = gathered(&model)?;
            if comm.rank() == 0 {
                whole.save_pretrained(&copied.0)?;
            }
            generate(&whole, &prompts[..comm.rank() % 2 + 1], &options, None)
        };
        let ranks = axes.iter().map(|(_, size)| size).product();
        for (rank, got) in Ranks::new(ranks).run(|_| Ok(cpu()), run).unwrap().iter().enumerate() {
            assert_eq!(got[..], texts[..rank % 2 + 1], "{name}");
        }
        for folder in [saved, copied] {
            same_tensors(&weight_files(&folder.0), &weight_files(&due.0));
        }
    }
}

/// A whole copy has the programs of scores of a model whose heads are cut and whose parameters are sharded.
#[test]
fn a_copy_has_the_programs_of_its_model() {
    let scored = |model: &Decoder<Cpu>| {
        let init = Init::new(model.parts.start()?.tokens.weight.leaf().runtime(), 5);
        set_scores(model, |_| learned_scores(&init, model.config().heads))
    };
    let one = decoder("llama");
    scored(&one).unwrap();
    let prompts = [3, 5].map(|n| Prompt { tokens: (1..n).collect(), stream: u64::from(n) });
    let options = GenerationOptions { sampling: Some(Sampling::default()), ..Default::default() };
    let texts = generate(&one, &prompts, &options, None).unwrap();
    assert_ne!(texts, generate(&decoder("llama"), &prompts, &options, None).unwrap());
    let run = |comm: Comm<Cpu>| {
        let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Shard, 2), (Axis::Tensor, 2)])?)?;
        let model = Decoder::from_pretrained(reference("llama"), &Init::new(comm.runtime(), 0).lazily())?;
        scored(&model)?;
        mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan())?;
        let builder = TrainStep::builder(&mesh, &model).optimizer(SgdConfig { lr: 0.1, ..Default::default() });
        let _step = builder.zero(ZeroStage::Parameters).build()?;
        generate(&gathered(&model)?, &prompts, &options, None)
    };
    for got in Ranks::new(4).run(|_| Ok(cpu()), run).unwrap() {
        assert_eq!(got, texts);
    }
}

#[test]
fn experts_and_weights_in_four_bits_are_gathered_or_refused() {
    let [folder, due, saved] = [(); 3].map(|()| Scratch::new());
    decoder("mixtral").save_pretrained(&due.0).unwrap();
    let run = |comm: Comm<Cpu>| {
        let axes = [(Axis::Data, 3), (Axis::Expert, 3)];
        let mesh = Mesh::new(&comm, ParallelPlan::of(axes)?)?;
        let model = Decoder::from_pretrained(reference("mixtral"), &Init::new(comm.runtime(), 0).lazily())?;
        mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan())?;
        let experts = model.save_pretrained(&folder.0).unwrap_err().to_string();
        let whole = gathered(&model)?;
        whole.save_pretrained_with(&saved.0, &SaveOptions { writes: comm.rank() == 0, ..Default::default() })?;
        Ok((experts, comm.rank()))
    };
    for (experts, _) in Ranks::new(3).run(|_| Ok(cpu()), run).unwrap() {
        assert!(experts.contains("models::gathered"), "{experts}");
    }
    same_tensors(&weight_files(&saved.0), &weight_files(&due.0));
    let whole = |name: &str, value: &Tensor<Cpu>| (name.to_owned(), value.to_bytes().unwrap());
    let due: Vec<_> = decoder("nf4_double").state_dict().unwrap().iter().map(|(name, v)| whole(name, v)).collect();
    let run = |comm: Comm<Cpu>| {
        let (_, model) = cut(&comm, "nf4_double")?;
        let bits = model.save_pretrained(&folder.0).unwrap_err().to_string();
        let state: Vec<_> = gathered(&model)?.state_dict()?.iter().map(|(name, v)| whole(name, v)).collect();
        Ok((bits, state == due))
    };
    for (bits, is_due) in Ranks::new(2).run(|_| Ok(cpu()), run).unwrap() {
        assert!(bits.contains("models::gathered") && is_due, "{bits}");
    }
}
