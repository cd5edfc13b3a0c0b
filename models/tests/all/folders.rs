//! Folders that are wrong: every error says what to do, and nothing large is allocated.

use std::fs;

use models::{ConfigFields, Decoder, DecoderConfig, JsonObject, Pretrained};
use numcore::{DType, Tensor, safetensors};
use serde_json::json;

use crate::common::*;

#[track_caller]
fn expect(folder: &Scratch, due: &[&str]) {
    expect_at(&folder.0, due);
}

#[track_caller]
fn expect_at(folder: &std::path::Path, due: &[&str]) {
    let error = Decoder::from_pretrained(folder, &init()).map(|_| ()).unwrap_err().to_string();
    for part in due {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn what_is_no_folder_of_a_model() {
    expect_at(std::path::Path::new("no/such/folder"), &["no/such/folder"]);
    expect(&Scratch::new(), &["no config.json: it is no model's folder"]);
    let gguf = Scratch::new();
    fs::write(gguf.0.join("model-Q8_0.gguf"), "GGUF").unwrap();
    expect(&gguf, &["no config.json", "but a GGUF file: give its path"]);
    let folder = Scratch::copy_of("llama");
    fs::remove_file(folder.0.join("model.safetensors")).unwrap();
    expect(&folder, &["neither model.safetensors nor pytorch_model.bin", "config.json"]);
    fs::write(folder.0.join("pytorch_model.bin"), "x").unwrap();
    expect(&folder, &["pytorch_model.bin", "no ZIP archive", "safetensors"]);
}

#[test]
fn configurations_that_are_not_understood() {
    let change = |field: &'static str, value: serde_json::Value| {
        Scratch::copy_of("llama").with_config(|fields| drop(fields.insert(field.into(), value)))
    };
    expect(&change("final_logit_softcapping", json!(30.0)), &["`final_logit_softcapping`", "delete"]);
    expect(&change("attention_multiplier", json!(0.5)), &["`attention_multiplier`"]);
    expect(&change("use_attention_scale", json!(false)), &["`use_attention_scale`", "delete"]);
    expect(&change("is_causal", json!(false)), &["`is_causal` is false"]);
    for (field, value) in [
        ("is_causal", json!(true)),
        ("use_bfloat16", json!(false)),
        ("pruned_heads", json!({})),
        ("partial_rotary_factor", json!(1.0)),
        ("_model_name_or_path", json!("x")),
        ("unk_token_id", json!(0)),
        ("num_beam_groups", json!(1)),
        ("sliding_window", json!(null)),
    ] {
        Decoder::from_pretrained(&change(field, value).0, &init()).unwrap();
    }
    expect(&change("hidden_act", json!("xielu")), &["`hidden_act` is `xielu`"]);
    expect(&change("model_type", json!("gemma")), &["`gemma`", "qwen3"]);
    expect(&change("model_type", json!(3)), &["`model_type` is 3, not a string"]);
    expect(&change("hidden_size", json!("12")), &["`hidden_size` is \"12\", not a count"]);
    expect(&change("hidden_size", json!(-1)), &["not a count"]);
    expect(&change("num_key_value_heads", json!(3)), &["3 heads of keys do not divide 4"]);
    expect(&change("num_hidden_layers", json!(1u64 << 40)), &["`num_hidden_layers`", "no model"]);
    for field in ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"] {
        expect(&change(field, json!(1u64 << 62)), &[field, "larger than any model's"]);
    }
    expect(&change("head_dim", json!(u64::MAX / 2)), &["`head_dim`", "larger than any model's"]);
    expect(&change("quantization_config", json!({"load_in_4bit": true})), &["`quantization_config`"]);
    expect(&change("rope_parameters", json!({"rope_type": "dynamic", "factor": 2.0})), &["`dynamic`"]);
    expect(&change("head_dim", json!(5)), &["no pairs"]);
    let wide = Scratch::copy_of("gpt2").with_config(|fields| drop(fields.insert("n_embd".into(), json!(1u64 << 62))));
    expect(&wide, &["`n_embd`", "larger than any model's"]);
    let mut config = decoder("llama").config().clone();
    config.head_dim = 1 << 62;
    assert!(Decoder::new(&init(), config).map(|_| ()).unwrap_err().to_string().contains("larger than any"));
    let gpt2 = |field: &'static str, value: bool| {
        Scratch::copy_of("gpt2").with_config(|fields| drop(fields.insert(field.into(), value.into())))
    };
    expect(&gpt2("scale_attn_by_inverse_layer_idx", true), &["`scale_attn_by_inverse_layer_idx` is true"]);
    expect(&gpt2("scale_attn_weights", false), &["`scale_attn_weights` is false"]);
    let missing = Scratch::copy_of("llama").with_config(|fields| drop(fields.remove("hidden_size")));
    // As transformers has it where nothing is said.
    expect(&missing, &["4096", "embed_tokens.weight"]);
    let types = json!(["full_attention", "sliding_attention"]);
    let mistral = Scratch::copy_of("mistral").with_config(|fields| drop(fields.insert("layer_types".into(), types)));
    expect(&mistral, &["`layer_types`", "all layers alike"]);
    let window =
        Scratch::copy_of("mistral").with_config(|fields| drop(fields.insert("sliding_window".into(), 0.into())));
    expect(&window, &["`sliding_window` is 0"]);
    expect(&change("partial_rotary_factor", json!(0.5)), &["`partial_rotary_factor` is 0.5"]);
    expect(&change("is_encoder_decoder", json!(true)), &["`is_encoder_decoder`"]);
    let nf4 = json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_rotation": true});
    expect(&change("quantization_config", nf4), &["`bnb_4bit_rotation`"]);
    for (name, field, value, due) in [
        ("olmo2", "sliding_window", json!(4), "`sliding_window`"),
        ("phi3", "rope_scaling", json!({"type": "longrope", "factor": 2.0}), "`short_factor` is missing"),
        ("phi3", "rope_parameters", json!({"type": "linear", "factor": 2.0}), "is of no type that Phi has"),
        ("phi3", "partial_rotary_factor", json!(0.5), "`partial_rotary_factor` is 1, and 0.5 outside"),
        ("phi3_long", "head_dim", json!(10), "7 rotated components of a head of 10 (0.75 of it)"),
        ("phi3_long", "head_dim", json!(16), "`short_factor` has 3 numbers for 6 pairs"),
        ("phi3", "full_attn_mod", json!(2), "`full_attn_mod`"),
        ("phi3", "attention_bias", json!(true), "`attention_bias`"),
        ("phi3", "num_key_value_heads", json!(3), "3 heads of keys do not divide 4"),
        ("smollm3", "no_rope_layers", json!([1, 0]), "0 or 1 for each of 3 layers"),
        ("smollm3", "no_rope_layers", json!([1, 2, 0]), "0 or 1 for each of 3 layers"),
        ("smollm3", "use_sliding_window", json!(false), "`sliding_attention`"),
        ("gemma2", "use_bidirectional_attention", json!(true), "`use_bidirectional_attention` is true"),
        ("gemma2", "query_pre_attn_scalar", json!(0), "`query_pre_attn_scalar` is 0"),
        ("gemma2", "attn_logit_softcapping", json!(-1.0), "must be above 0"),
        ("gemma2", "sliding_window", json!(null), "`sliding_attention`"),
        ("gemma2", "hidden_activation", json!("xielu"), "`hidden_activation` is `xielu`"),
        ("gemma2", "no_rope_layers", json!([1, 1, 1]), "`no_rope_layers`"),
        ("gemma3", "attn_logit_softcapping", json!(3.0), "no soft cap of scores"),
        ("gemma3", "rope_parameters", json!({"rope_theta": 500.0}), "`rope_theta`"),
        ("gemma3", "rope_parameters", json!({"full_attention": {"rope_type": "dynamic"}}), "`dynamic`"),
        ("gpt_oss", "quantization_config", json!({"quant_method": "mxfp4"}), "weights are in MXFP4, and none is"),
        ("gpt_oss", "swiglu_limit", json!(0.0), "`swiglu_limit` is 0"),
        ("gpt_oss", "hidden_act", json!("gelu"), "is not `silu`"),
        ("gemma3", "rope_scaling", json!({"rope_type": "linear", "factor": 2.0}), "differs from `rope_scaling`"),
    ] {
        let folder = Scratch::copy_of(name).with_config(|fields| drop(fields.insert(field.into(), value)));
        expect(&folder, &[due]);
    }
    for text in ["", "[1]", "{\"a\":", "{\"a\": 1}"] {
        let folder = Scratch::copy_of("llama");
        fs::write(folder.0.join("config.json"), text).unwrap();
        expect(&folder, &["config.json"]);
    }
    let deep = Scratch::copy_of("llama");
    fs::write(deep.0.join("config.json"), "[".repeat(1_000_000)).unwrap();
    expect(&deep, &["no JSON"]);
}

/// The `config.json` of published models, with what transformers does not read of them.
#[test]
fn published_configurations_are_understood() {
    let published = [
        json!({
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "sliding_window_size": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
            "use_cache": true, "vocab_size": 256000
        }),
        json!({
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": null, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144
        }),
        json!({
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": null, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 65536,
            "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4,
            "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
            "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0,
            "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
            "use_cache": false, "use_sliding_window": false, "vocab_size": 128256
        }),
        json!({
            "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
            "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
            "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "transformers_version": "4.40.2", "use_cache": true, "vocab_size": 32064
        }),
        json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
            "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": false
            },
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
            "vocab_size": 201088
        }),
    ];
    for fields in published {
        let fields = ConfigFields::of(JsonObject::of("config.json", fields.as_object().unwrap().clone()));
        let config = DecoderConfig::read(&fields).unwrap_or_else(|error| panic!("{error}"));
        // The written fields describe the same model.
        let again = ConfigFields::of(JsonObject::of("config.json", config.to_json()));
        let again = DecoderConfig { fields: config.fields.clone(), ..DecoderConfig::read(&again).unwrap() };
        assert_eq!(again, config);
    }
}

#[test]
fn weights_that_do_not_fit_are_all_listed_with_both_names() {
    let folder = Scratch::copy_of("llama");
    let path = folder.0.join("model.safetensors");
    let mut tensors = safetensors::load(&path, &cpu()).unwrap();
    tensors.retain(|(name, _)| name != "model.norm.weight");
    for (name, value) in &mut tensors {
        match &**name {
            "lm_head.weight" => *value = Tensor::zeros(&cpu(), [3, 12], DType::F32).unwrap(),
            "model.layers.1.mlp.up_proj.weight" => *name = "model.layers.7.mlp.up_proj.weight".into(),
            "model.layers.0.mlp.up_proj.weight" => *value = Tensor::zeros(&cpu(), [20, 12], DType::U8).unwrap(),
            _ => {}
        }
    }
    tensors.push(("extra".into(), Tensor::zeros(&cpu(), [1], DType::F32).unwrap()));
    safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = Decoder::from_pretrained_partly(&folder.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight is [43, 12] here, [3, 12] in files as lm_head.weight"), "{error}");
    assert!(error.contains("layers.0.mlp.up_proj.weight is u8 in files"), "{error}");
    tensors.retain(|(_, value)| value.dtype() == DType::F32 && value.dims() != [3, 12]);
    safetensors::save(&path, &tensors, &Default::default()).unwrap();
    expect(
        &folder,
        &[
            "4 missing",
            "norm.weight (in files model.norm.weight)",
            "layers.1.mlp.up_proj.weight (in files model.layers.1.mlp.up_proj.weight)",
            "2 unexpected: extra, model.layers.7.mlp.up_proj.weight (here layers.7.mlp.up_proj.weight)",
        ],
    );
    // What is missing keeps what `init` draws.
    let (model, report) = Decoder::from_pretrained_partly(&folder.0, &init()).unwrap();
    assert_eq!((report.missing.len(), report.unexpected.len()), (4, 2));
    assert!(nn::ModuleExt::parameters(&model).iter().all(|p| p.leaf().is_resident()));
}

#[test]
fn a_tensor_of_a_foreign_type_spoils_itself_alone() {
    let folder = Scratch::copy_of("llama");
    let path = folder.0.join("model.safetensors");
    let tensors = safetensors::load(&path, &cpu()).unwrap();
    let with = |name: &str| {
        let mut more = tensors.clone();
        more.retain(|(n, _)| n != name);
        more.push((name.into(), Tensor::zeros(&cpu(), [4], DType::U8).unwrap()));
        safetensors::save(&path, &more, &Default::default()).unwrap();
        let bytes = fs::read(&path).unwrap();
        // The header's length is kept.
        let at = bytes.windows(6).position(|w| w == b"\"U8\",\"").unwrap();
        let mut bytes = bytes;
        bytes[at..at + 4].copy_from_slice(b"\"I8\"");
        fs::write(&path, bytes).unwrap();
    };
    with("model.layers.0.self_attn.rotary_emb.inv_freq");
    Decoder::from_pretrained(&folder.0, &init()).unwrap();
    with("model.norm.weight");
    expect(&folder, &["norm.weight", "element type I8"]);
}

#[test]
fn shards_that_are_truncated_or_missing() {
    let shard = "model-00002-of-00003.safetensors";
    let folder = Scratch::copy_of("qwen3");
    let bytes = fs::read(folder.0.join(shard)).unwrap();
    for len in [0, 7, 100, bytes.len() - 1] {
        fs::write(folder.0.join(shard), &bytes[..len]).unwrap();
        expect(&folder, &[shard]);
    }
    fs::remove_file(folder.0.join(shard)).unwrap();
    expect(&folder, &[shard]);
    let index = folder.0.join("model.safetensors.index.json");
    for (file, due) in [("\"../model.safetensors\"", "no file of the folder"), ("3", "no file of the folder")] {
        fs::write(&index, format!("{{\"weight_map\": {{\"model.norm.weight\": {file}}}}}")).unwrap();
        expect(&folder, &[due]);
    }
    fs::write(&index, "{}").unwrap();
    expect(&folder, &["`weight_map` is missing"]);
    // An index where weights should be.
    let folder = Scratch::copy_of("qwen3");
    fs::copy(folder.0.join("model.safetensors.index.json"), folder.0.join(shard)).unwrap();
    expect(&folder, &["begins as JSON does"]);
}

#[test]
fn errors_name_the_caller_s_line() {
    let missing = std::path::Path::new("no/such/folder");
    let errors = [
        Decoder::from_pretrained(missing, &init()).map(|_| ()),
        Decoder::from_pretrained_partly(missing, &init()).map(|_| ()),
        models::ConfigFields::open(missing).map(|_| ()),
        models::JsonObject::open(missing).map(|_| ()),
        models::GenerationOptions::of_folder(missing).map(|_| ()),
        models::pack_examples(&[], 0).map(|_| ()),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{k}: {error}");
    }
}
