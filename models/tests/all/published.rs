//! The `config.json` of published models that are no decoders: what is in them is understood.

use models::{ClipConfig, ConfigFields, ConvNextConfig, JsonObject, ResNetConfig, T5Config, WhisperConfig};
use nn::Activation;
use serde_json::{Value, json};

fn fields(parts: &[Value]) -> ConfigFields {
    let all = parts.iter().flat_map(|part| part.as_object().cloned().unwrap()).collect();
    ConfigFields::of(JsonObject::of("config.json", all))
}

/// The names of 1000 classes.
fn classes() -> Value {
    let names: serde_json::Map<_, _> = (0..1000).map(|i| (i.to_string(), json!(format!("class {i}")))).collect();
    let numbers: serde_json::Map<_, _> = (0..1000).map(|i| (format!("class {i}"), json!(i))).collect();
    json!({"id2label": names, "label2id": numbers, "torch_dtype": "float32", "transformers_version": "4.18.0.dev0"})
}

#[test]
fn t5_and_flan_t5() {
    let sizes = json!({
        "architectures": ["T5ForConditionalGeneration"], "d_kv": 64, "decoder_start_token_id": 0, "dropout_rate": 0.1,
        "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06,
        "model_type": "t5", "n_positions": 512, "output_past": true, "pad_token_id": 0,
        "relative_attention_num_buckets": 32, "vocab_size": 32128
    });
    let small =
        json!({"d_ff": 2048, "d_model": 512, "num_heads": 8, "num_layers": 6, "task_specific_params": {"a": {}}});
    let small = T5Config::read(&fields(&[sizes.clone(), small])).unwrap();
    assert_eq!((small.tied, small.gated, small.activation), (true, false, Activation::Relu));
    assert_eq!((small.encoder_layers, small.decoder_layers, small.relative.distance), (6, Some(6), 128));
    let base = json!({
        "d_ff": 2048, "d_model": 768, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 12, "num_heads": 12,
        "num_layers": 12, "tie_word_embeddings": false, "transformers_version": "4.23.1", "use_cache": true
    });
    let base = T5Config::read(&fields(&[sizes.clone(), base])).unwrap();
    assert_eq!((base.tied, base.gated, base.activation), (false, true, Activation::GeluTanh));
    let mt5 = json!({
        "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_model": 512, "feed_forward_proj": "gated-gelu",
        "model_type": "mt5", "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "tie_word_embeddings": false,
        "tokenizer_class": "T5Tokenizer", "use_cache": true, "vocab_size": 250112
    });
    let mt5 = T5Config::read(&fields(&[sizes, mt5])).unwrap();
    assert_eq!((mt5.multilingual, mt5.tied, mt5.scaled, mt5.gated), (true, false, false, true));
}

#[test]
fn whisper_tiny() {
    let sizes = json!({
        "_name_or_path": "openai/whisper-tiny", "architectures": ["WhisperForConditionalGeneration"], "d_model": 384,
        "activation_function": "gelu", "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "decoder_layers": 4,
        "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "encoder_layers": 4, "is_encoder_decoder": true,
        "max_source_positions": 1500, "max_target_positions": 448, "model_type": "whisper", "num_hidden_layers": 4,
        "num_mel_bins": 80, "scale_embedding": false, "use_cache": true, "vocab_size": 51865
    });
    let others = json!({
        "activation_dropout": 0.0, "attention_dropout": 0.0, "begin_suppress_tokens": [220, 50257],
        "bos_token_id": 50257, "decoder_layerdrop": 0.0, "decoder_start_token_id": 50258, "dropout": 0.0,
        "encoder_layerdrop": 0.0, "eos_token_id": 50257, "forced_decoder_ids": [[1, 50259], [2, 50359]],
        "init_std": 0.02, "max_length": 448, "pad_token_id": 50257, "suppress_tokens": [1, 2], "torch_dtype": "float32"
    });
    let config = WhisperConfig::read(&fields(&[sizes, others])).unwrap();
    assert_eq!((config.encoder, config.tied, config.padding), ([4, 6, 1536], true, Some(50_257)));
}

#[test]
fn clip_of_openai() {
    let shared = json!({
        "_name_or_path": "", "add_cross_attention": false, "attention_dropout": 0.0, "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": null, "diversity_penalty": 0.0, "do_sample": false, "dropout": 0.0,
        "early_stopping": false, "hidden_act": "quick_gelu", "id2label": {"0": "LABEL_0"}, "initializer_factor": 1.0,
        "initializer_range": 0.02, "is_decoder": false, "is_encoder_decoder": false, "layer_norm_eps": 1e-05,
        "max_length": 20, "min_length": 0, "num_beams": 1, "num_hidden_layers": 12, "pruned_heads": {}
    });
    let more = json!({
        "remove_invalid_values": false, "return_dict": true, "temperature": 1.0, "tie_encoder_decoder": false,
        "tie_word_embeddings": true, "top_k": 50, "torchscript": false, "use_bfloat16": false
    });
    let tower = |own: Value| {
        let parts = [&shared, &more, &own].into_iter().flat_map(|part| part.as_object().cloned().unwrap());
        Value::Object(parts.collect())
    };
    let text = tower(json!({
        "bos_token_id": 0, "eos_token_id": 2, "hidden_size": 512, "intermediate_size": 2048, "pad_token_id": 1,
        "max_position_embeddings": 77, "model_type": "clip_text_model", "num_attention_heads": 8, "vocab_size": 49408
    }));
    let image = tower(json!({
        "hidden_size": 768, "image_size": 224, "intermediate_size": 3072, "model_type": "clip_vision_model",
        "num_attention_heads": 12, "patch_size": 32
    }));
    let config = json!({
        "architectures": ["CLIPModel"], "initializer_factor": 1.0, "logit_scale_init_value": 2.6592, "model_type": "clip",
        "projection_dim": 512, "text_config": text, "text_config_dict": null, "torch_dtype": "float32",
        "transformers_version": null, "vision_config": image, "vision_config_dict": null
    });
    let config = ClipConfig::read(&fields(&[config])).unwrap();
    let (text, image) = (config.text.unwrap(), config.image.unwrap());
    assert_eq!((text.end, image.channels, text.tower.activation), (None, 3, Activation::QuickGelu));
}

#[test]
fn resnet_50_and_convnext_tiny() {
    let resnet = json!({
        "architectures": ["ResNetForImageClassification"], "depths": [3, 4, 6, 3], "downsample_in_first_stage": false,
        "embedding_size": 64, "hidden_act": "relu", "hidden_sizes": [256, 512, 1024, 2048], "layer_type": "bottleneck",
        "model_type": "resnet", "num_channels": 3
    });
    let config = ResNetConfig::read(&fields(&[resnet, classes()])).unwrap();
    assert_eq!((config.labels, config.bottleneck, config.halves_before), (1000, true, false));
    let convnext = json!({
        "architectures": ["ConvNextForImageClassification"], "depths": [3, 3, 9, 3], "drop_path_rate": 0.0,
        "hidden_act": "gelu", "hidden_sizes": [96, 192, 384, 768], "image_size": 224, "initializer_range": 0.02,
        "layer_norm_eps": 1e-12, "layer_scale_init_value": 1e-06, "model_type": "convnext", "num_channels": 3,
        "num_stages": 4, "patch_size": 4, "out_features": ["stage4"], "out_indices": [4],
        "stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"]
    });
    let config = ConvNextConfig::read(&fields(&[convnext.clone(), classes()])).unwrap();
    assert_eq!((config.labels, config.layer_scale, config.patch), (1000, 1e-6, 4));
    // Other forms of the same.
    let squares = json!({"image_size": [224, 224], "patch_size": [4, 4], "out_indices": [-1]});
    let again = ConvNextConfig::read(&fields(&[convnext, squares, classes()])).unwrap();
    assert_eq!(ConvNextConfig { fields: config.fields.clone(), ..again }, config);
}
