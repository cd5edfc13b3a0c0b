//! Pretrained mixtures of experts: shared out among ranks they are those of one rank; files and configurations that do not fit.

use autograd::Var;
use distributed::{
    comm::{Comm, Communicator, Ranks},
    context_parallel::ContextExchange,
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
    train::{Loss, TrainStep},
    zero::ZeroStage,
};
use models::{
    ConfigFields, Decoder, DecoderConfig, DecoderInputs, GenerationOptions, JsonObject, Pretrained, Prompt, generate,
};
use nn::{Init, ModuleExt, moe::MixtureOfExperts, parallel::VocabularyLoss};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{CrossEntropyOptions, Reduction},
    ops::{PointwiseOps, ViewOps},
    placement::TensorPlacement,
    safetensors,
};
use optim::SgdConfig;
use runtime_cpu::Cpu;
use serde_json::json;

use crate::common::*;

const FAMILIES: [(&str, usize); 5] =
    [("mixtral", 3), ("qwen2_moe", 5), ("qwen3_moe", 6), ("gpt_oss", 5), ("deepseek_v3", 6)];

/// Losses and norms of some steps on a row for each of six shares, by ranks along these axes.
fn train(name: &str, axes: &[(Axis, usize)]) -> Vec<f64> {
    let plan = ParallelPlan::of(axes.to_vec()).unwrap();
    let ids = Reference::read(name).tensor("ids");
    let outcomes = Ranks::new(plan.world()).run(
        |_| Ok(cpu()),
        |comm| {
            let (mesh, rt) = (Mesh::new(&comm, plan.clone())?, comm.runtime());
            let model = Decoder::from_pretrained(reference(name), &Init::new(rt, 0).dtype(DType::F64).lazily())?;
            let cut = Decoder::<Cpu>::tensor_plan();
            mesh.parallelize(&model, &cut)?;
            if mesh.plan().size(Axis::Context) > 1 {
                mesh.context_parallel(&model, ContextExchange::AllGather)?;
            }
            let sgd = SgdConfig { lr: 0.1, ..Default::default() };
            let builder = TrainStep::builder(&mesh, &model).optimizer(sgd).max_norm(0.5);
            let mut step = builder.zero(ZeroStage::Parameters).experts().build()?;
            let share = |rank: usize| rank * 6 / mesh.batch().size();
            let own: Vec<i64> =
                (share(mesh.batch().rank())..share(mesh.batch().rank() + 1)).map(|i| i as i64).collect();
            // Six rows of two: each begins somewhere else.
            let rows = own.iter().map(|&i| ids.narrow(0, (i % 2) as usize, 1)?.narrow(1, i as usize, 13));
            let rows = rows.collect::<Result<Vec<_>>>()?;
            let rows = numcore::ops::cat(&rows.iter().collect::<Vec<_>>(), 0)?.to_device(rt)?;
            let (x, y) = (Var::new(rows.narrow(1, 0, 12)?), Var::new(rows.narrow(1, 1, 12)?));
            let mut seen = Vec::new();
            for _ in 0..3 {
                let metrics = step.step(|_| {
                    let (states, routings) = model.routed_states(&x, DecoderInputs::default())?;
                    let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
                    let sum = VocabularyLoss { cross_entropy: sum, z_loss: 0.0 };
                    let loss = model.next_token_loss(&model.logits(&states)?, &y, &sum)?;
                    let balance = model.balance_loss(&routings)?.mul(0.1)?;
                    Loss::sum(loss.add(&balance)?, (12 * own.len()) as f64)
                })?;
                seen.extend([metrics.loss()?, metrics.grad_norm()?.unwrap_or(0.0)]);
            }
            Ok(seen)
        },
    );
    outcomes.unwrap_or_else(|error| panic!("{name} {axes:?}: {error}")).remove(0)
}

#[test]
fn steps_of_shared_out_experts_are_those_of_one_rank() {
    for (name, experts) in FAMILIES {
        let one = train(name, &[(Axis::Data, 1)]);
        let mut cuts = vec![vec![(Axis::Data, experts), (Axis::Expert, experts)]];
        if experts == 6 {
            cuts.push(vec![(Axis::Data, 3), (Axis::Shard, 2), (Axis::Expert, 2)]);
            cuts.push(vec![(Axis::Shard, 3), (Axis::Context, 2), (Axis::Expert, 6)]);
        } else {
            cuts.push(vec![(Axis::Data, experts), (Axis::Tensor, 2), (Axis::Expert, experts)]);
        }
        for axes in cuts {
            let many = train(name, &axes);
            for (a, b) in many.iter().zip(&one) {
                assert!((a - b).abs() <= 1e-11 * b.abs(), "{name} {axes:?}: {many:?} and {one:?}");
            }
        }
    }
}

#[test]
fn a_rank_reads_its_own_experts_alone() {
    let read = |rank: Option<usize>| {
        let run = |comm: Comm<Cpu>| {
            let ranks = comm.size();
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, ranks), (Axis::Expert, ranks)])?)?;
            let rt = comm.runtime();
            let model = Decoder::from_pretrained(reference("qwen3_moe"), &Init::new(rt, 0).lazily())?;
            let plan = Decoder::<Cpu>::tensor_plan();
            mesh.parallelize(&model, &plan)?;
            let (_, gate_up) = model.named_parameters().into_iter().find(|(n, _)| n.ends_with("gate_up_proj")).unwrap();
            rt.reset_peak();
            let before = rt.memory().total.live;
            let value = gate_up.value()?;
            Ok((value.to_vec::<f32>()?, rt.memory().total.peak - before))
        };
        Ranks::new(if rank.is_some() { 6 } else { 1 }).run(|_| Ok(cpu()), run).unwrap().swap_remove(rank.unwrap_or(0))
    };
    let (whole, all) = read(None);
    for rank in [0, 5] {
        let (own, peak) = read(Some(rank));
        assert_eq!(own, whole[rank * own.len()..(rank + 1) * own.len()]);
        assert!(own.len() * 6 == whole.len() && peak * 3 < all, "{peak} bytes of {all}");
    }
}

#[test]
fn the_balance_loss_of_all_layers_is_that_of_transformers() {
    for (name, _) in FAMILIES {
        let (model, due) = (decoder(name), Reference::read(name));
        let (_, routings) = model.routed_states(&due.var("ids"), DecoderInputs::default()).unwrap();
        let tokens = (2 * 23) as f64;
        let loss = model.balance_loss(&routings).unwrap().value().unwrap().mul(1.0 / tokens).unwrap();
        // Transformers has none for DeepSeek-V3.
        if name != "deepseek_v3" {
            close(name, &loss, &due.tensor("balance_loss"), 1e-5);
        }
    }
    let dense = decoder("llama").balance_loss(&[]).map(drop).unwrap_err().to_string();
    assert!(dense.contains("this model has none"), "{dense}");
}

/// Files have experts one by one: each that is missing or left over is named as it is there.
#[test]
fn weights_of_experts_that_do_not_fit_are_listed() {
    let folder = Scratch::copy_of("mixtral");
    let path = folder.0.join("model.safetensors");
    let expert = "model.layers.1.block_sparse_moe.experts";
    let mut tensors = safetensors::load(&path, &cpu()).unwrap();
    for (name, value) in &mut tensors {
        if *name == format!("{expert}.2.w3.weight") {
            *name = format!("{expert}.3.w3.weight");
        }
        if *name == format!("{expert}.0.w2.weight") {
            *value = Tensor::zeros(&cpu(), [12, 19], DType::F32).unwrap();
        }
    }
    safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let unfit = Decoder::from_pretrained_partly(&folder.0, &init()).map(drop).unwrap_err().to_string();
    let due = format!("layers.1.mlp.experts.down_proj is [12, 20] here, [12, 19] in files as {expert}.0.w2.weight");
    assert!(unfit.contains(&due), "{unfit}");
    tensors.retain(|(_, value)| value.dims() != [12, 19]);
    safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
    for due in [
        format!("2 missing: layers.1.mlp.experts.down_proj (in files {expert}.0.w2.weight)"),
        format!("layers.1.mlp.experts.gate_up_proj (in files {expert}.2.w3.weight)"),
    ] {
        assert!(error.contains(&due), "`{due}` is not in: {error}");
    }
    // One more expert than the configuration has.
    let folder = Scratch::copy_of("mixtral");
    let mut tensors = safetensors::load(folder.0.join("model.safetensors"), &cpu()).unwrap();
    let extra = tensors.iter().find(|(name, _)| *name == format!("{expert}.0.w1.weight")).unwrap().1.clone();
    tensors.push((format!("{expert}.3.w1.weight"), extra));
    safetensors::save(folder.0.join("model.safetensors"), &tensors, &Default::default()).unwrap();
    let error = Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
    let due = format!("1 unexpected: {expert}.3.w1.weight (here layers.1.mlp.experts.gate_up_proj)");
    assert!(error.contains(&due), "{error}");
}

#[test]
fn configurations_say_which_layers_have_experts() {
    let layers = |field: &'static str, value: serde_json::Value| {
        let folder = Scratch::copy_of("qwen3_moe").with_config(|fields| drop(fields.insert(field.into(), value)));
        match Decoder::from_pretrained_partly(&folder.0, &init()) {
            Ok((model, _)) => Ok(model.config().mixtures.clone().unwrap().layers),
            Err(error) => Err(error.to_string()),
        }
    };
    assert_eq!(layers("use_cache", json!(true)).unwrap(), [false, true]);
    assert_eq!(layers("decoder_sparse_step", json!(1)).unwrap(), [true, true]);
    assert_eq!(layers("mlp_only_layers", json!([1])).unwrap(), [false, false]);
    assert!(layers("decoder_sparse_step", json!(0)).unwrap_err().contains("`decoder_sparse_step` is 0"));
    assert!(layers("mlp_only_layers", json!(["x"])).unwrap_err().contains("not a list of counts"));
    assert!(layers("num_experts", json!(7)).unwrap_err().contains("`num_local_experts` is 6, `num_experts` 7"));
    assert!(layers("hidden_act", json!("gelu")).unwrap_err().contains("`hidden_act` is not `silu`"));
    assert!(layers("num_experts_per_tok", json!(9)).unwrap_err().contains("9 of 6 experts"));
    assert!(layers("moe_intermediate_size", json!(1u64 << 40)).unwrap_err().contains("larger than any model's"));
}

/// The `config.json` of published models.
#[test]
fn published_configurations_are_understood() {
    let qwen3 = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151936
    });
    let mixtral = json!({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
        "vocab_size": 32000
    });
    let qwen2 = json!({
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": false, "output_router_logits": false,
        "router_aux_loss_coef": 0.001
    });
    // As DeepSeek-V3's, dequantised.
    let mut deepseek = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map": {},
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
        "v_head_dim": 128, "vocab_size": 129280
    });
    deepseek["rope_scaling"] = json!({
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn"
    });
    let published = [(qwen3, 128, 8, 768), (mixtral, 8, 2, 14336), (qwen2, 60, 4, 1408), (deepseek, 256, 8, 2048)];
    for (fields, experts, top_k, hidden) in published {
        let fields = ConfigFields::of(JsonObject::of("config.json", fields.as_object().unwrap().clone()));
        let config = DecoderConfig::read(&fields).unwrap();
        assert!(config.windows.iter().all(Option::is_none));
        let mixture = config.mixture_of(config.layers - 1).unwrap();
        assert_eq!((mixture.experts, mixture.top_k, mixture.hidden), (experts, top_k, hidden));
    }
}

/// Logits and scores are those of `f32` where states and weights are in `bf16`.
#[test]
fn a_router_computes_in_f32() {
    let (due, config) = (Reference::read("router"), decoder("deepseek_v3").config().clone());
    let layer = MixtureOfExperts::new(&init().dtype(DType::BF16), config.mixture_of(1).unwrap()).unwrap();
    let given = safetensors::load(reference("deepseek_v3").join("model.safetensors"), &cpu()).unwrap();
    let of_file = |end: &str| given.iter().find(|(name, _)| name == &format!("model.layers.1.mlp.gate.{end}")).unwrap();
    layer.gate.weight.set(of_file("weight").1.to_dtype(DType::BF16).unwrap()).unwrap();
    layer.gate.e_score_correction_bias.as_ref().unwrap().set(of_file("e_score_correction_bias").1.clone()).unwrap();
    let routing = layer.gate.route(&due.var("states")).unwrap();
    close("logits", &routing.logits.value().unwrap(), &due.tensor("logits"), 1e-6);
    let (experts, weights) = (routing.experts.value().unwrap(), routing.weights.value().unwrap());
    let mut picked: Vec<_> = experts.to_vec::<i64>().unwrap().into_iter().zip(weights.to_f64s().unwrap()).collect();
    picked.chunks_mut(3).for_each(|token| token.sort_by_key(|(expert, _)| *expert));
    assert!(picked.iter().map(|(expert, _)| *expert).eq(due.tensor("experts").to_vec::<i64>().unwrap()));
    let weights = picked.iter().zip(due.tensor("weights").to_f64s().unwrap()).map(|((_, a), b)| (a - b).abs());
    assert!(weights.fold(0.0, f64::max) < 1e-6);
}

#[test]
fn what_deepseek_cannot_be_is_an_error() {
    for (field, value, due) in [
        ("scoring_func", json!("softmax"), "`scoring_func` is `softmax`"),
        ("topk_method", json!("greedy"), "`topk_method` is `greedy`"),
        ("moe_layer_freq", json!(2), "`moe_layer_freq`"),
        ("n_group", json!(4), "6 experts are not divided into 4 groups"),
        ("topk_group", json!(4), "4 of 3 groups"),
        ("n_shared_experts", json!(0), "`n_shared_experts` is 0"),
        ("num_key_value_heads", json!(1), "gives keys to all 2 heads"),
        ("kv_lora_rank", json!(0), "does not fit heads of width 7"),
        ("v_head_dim", json!(4), "layers.0.self_attn.kv_b_proj.weight is"),
        ("sliding_window", json!(4), "`sliding_window`"),
    ] {
        let folder =
            Scratch::copy_of("deepseek_v3").with_config(|fields| drop(fields.insert(field.into(), value.clone())));
        let error = Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
        assert!(error.contains(due), "{field}: {error}");
    }
    // A bias of the choice that a file lacks is missing, and one of another size does not fit.
    let path = reference("deepseek_v3").join("model.safetensors");
    let bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    for (of, due) in [(None, "layers.1.mlp.gate.e_score_correction_bias (in files"), (Some(7), "f32 [7] in files")] {
        let (folder, mut tensors) = (Scratch::copy_of("deepseek_v3"), safetensors::load(&path, &cpu()).unwrap());
        tensors.retain(|(name, _)| name != bias);
        tensors.extend(of.map(|size| (bias.to_owned(), Tensor::zeros(&cpu(), [size], DType::F32).unwrap())));
        safetensors::save(folder.0.join("model.safetensors"), &tensors, &Default::default()).unwrap();
        let error = Decoder::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
        assert!(error.contains(due), "{error}");
    }
}

/// Each weight is read alone, from one file into another.
#[test]
fn a_mixture_that_is_nowhere_is_saved_expert_by_expert() {
    for (name, _) in FAMILIES {
        let rt = cpu();
        let lazy = Decoder::from_pretrained(reference(name), &Init::new(&rt, 0).lazily()).unwrap();
        let scratch = Scratch::new();
        let (_, stack) = lazy.named_parameters().into_iter().find(|(n, _)| n.ends_with("gate_up_proj")).unwrap();
        let (bytes, experts) = (stack.shape().numel() * 4, stack.shape()[0]);
        let piece = TensorPlacement::part(stack.shape(), 0, 1, 0, experts).unwrap();
        rt.reset_peak();
        let before = rt.memory().total.live;
        stack.leaf().piece(&piece).unwrap();
        assert!((rt.memory().total.peak - before) * experts <= 3 * bytes);
        lazy.save_pretrained(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
    }
}

#[test]
fn ranks_with_different_experts_do_not_generate() {
    let outcome = Ranks::new(3).run(
        |_| Ok(cpu()),
        |comm| {
            let mesh = Mesh::new(&comm, ParallelPlan::of([(Axis::Data, 3), (Axis::Expert, 3)])?)?;
            let model = Decoder::from_pretrained(reference("mixtral"), &Init::new(comm.runtime(), 0).lazily())?;
            let plan = Decoder::<Cpu>::tensor_plan();
            mesh.parallelize(&model, &plan)?;
            let prompt = Prompt { tokens: vec![1, 2], ..Default::default() };
            generate(&model, &[prompt], &GenerationOptions::default(), None).map(drop)
        },
    );
    let why = outcome.unwrap_err().to_string();
    assert!(why.contains("generate with a whole model"), "{why}");
}
