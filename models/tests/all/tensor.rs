//! Pretrained decoders whose layers are cut over ranks: logits, generation's steps and a training step are those of one rank.

use autograd::{Var, no_grad};
use distributed::{
    comm::{Comm, Communicator, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
};
use models::{Decoder, DecoderInputs, Lora, LoraConfig, LoraTargets, Pretrained};
use nn::{Forward, Init, ModuleExt, loss::cross_entropy_with, parallel::TensorPlan};
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
    mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan())?;
    Ok((mesh, model))
}

#[test]
fn every_family_gives_the_logits_of_one_rank() {
    for name in ["gpt2", "llama", "qwen2", "qwen3"] {
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
    for name in ["llama", "qwen3"] {
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
                            Loss::sum(cross_entropy_with(&logits, &targets, None, options)?, (t - 1) as f64)
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
fn a_cut_model_is_neither_exported_nor_adapted() {
    let outcome = Ranks::new(2).run(
        |_| Ok(cpu()),
        |comm| {
            let (_, model) = cut(&comm, "llama")?;
            let folder = std::env::temp_dir().join(format!("weftgrad-cut-{}-{}", std::process::id(), comm.rank()));
            let export = model.save_pretrained(&folder).unwrap_err().to_string();
            let config =
                LoraConfig { target_modules: LoraTargets::Names(vec!["down_proj".into()]), ..LoraConfig::default() };
            let lora = Lora::new(&model, &Init::new(comm.runtime(), 0), config).map(drop).unwrap_err().to_string();
            Ok((export, lora, folder.exists(), model.num_parameters()))
        },
    );
    for (export, lora, exists, count) in outcome.unwrap() {
        assert!(export.contains("is cut over ranks") && !exists, "{export}");
        assert!(lora.contains("before `Mesh::parallelize`"), "{lora}");
        assert_eq!(count.total, decoder("llama").num_parameters().total);
    }
}
