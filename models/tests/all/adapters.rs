//! LoRA, rsLoRA and DoRA against peft: logits, gradients, files, merging.

use autograd::backward;
use models::{Bert, BertInputs, Decoder, Lora, LoraConfig, LoraTargets, Pretrained, Vit};
use nn::{Forward, Gpt, GptConfig, ModuleExt};
use numcore::{DType, Tensor};
use optim::{AdamW, AdamWConfig, Optimizer};
use runtime_cpu::Cpu;

use crate::common::*;

const ALL: [(&str, &str); 3] = [("lora_llama", "llama"), ("lora_gpt2", "gpt2"), ("dora_qwen3", "qwen3")];

fn load(name: &str, base: &str) -> (Decoder<Cpu>, Lora<Cpu>) {
    let model = decoder(base);
    let lora = Lora::load(&model, &init(), reference(name)).unwrap();
    (model, lora)
}

fn logits(model: &impl Forward<Cpu>, due: &Reference) -> Tensor<Cpu> {
    model.forward(&due.var("ids")).unwrap().value().unwrap()
}

#[test]
fn logits_and_gradients_are_those_of_peft() {
    for (name, base) in ALL {
        let ((model, lora), due) = (load(name, base), Reference::read(name));
        close(name, &logits(&model, &due), &due.tensor("logits"), 2e-5);
        let table = model.table();
        let loss = next_token_loss(&model, &due.var("ids"));
        check_grads(&lora, &loss, &due, |theirs| {
            // In memory peft's magnitude is a module.
            let own = theirs.strip_prefix("base_model.model.").unwrap().replace("vector.weight", "vector");
            (table.ours(&own).unwrap().name, false)
        });
        // No gradient of the base is computed.
        let grads = backward(&next_token_loss(&model, &due.var("ids"))).unwrap();
        let adapters = lora.parameters().len();
        let all = model.parameters().iter().filter(|p| grads.get(&p.leaf()).is_some()).count();
        assert_eq!(all, adapters, "{name}");
    }
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    for (name, base) in ALL {
        let ((_, lora), scratch) = (load(name, base), Scratch::new());
        lora.save(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        let again = Lora::load(&decoder(base), &init(), &scratch.0).unwrap();
        assert_eq!(again.config(), lora.config());
        let text = std::fs::read_to_string(scratch.0.join("adapter_config.json")).unwrap();
        assert_eq!(text.contains("\"fan_in_fan_out\": true"), base == "gpt2");
        assert!(text.contains("\"task_type\": \"CAUSAL_LM\""), "{text}");
    }
}

#[test]
fn merged_weights_compute_the_same_and_come_apart_again() {
    for (name, base) in ALL {
        let ((model, mut lora), due) = (load(name, base), Reference::read(name));
        let before = decoder(base);
        lora.merge().unwrap();
        close(name, &logits(&model, &due), &due.tensor("merged_logits"), 2e-5);
        assert!(model.named_parameters().iter().all(|(n, _)| !n.contains("lora")));
        assert!(lora.merge().is_err());
        lora.unmerge().unwrap();
        close(name, &logits(&model, &due), &due.tensor("logits"), 2e-5);
        assert!(lora.unmerge().is_err());
        lora.remove().unwrap();
        for ((name, a), (_, b)) in model.named_parameters().iter().zip(before.named_parameters()) {
            close(name, &a.value().unwrap(), &b.value().unwrap(), 1e-6);
        }
    }
}

#[test]
fn a_new_adapter_changes_nothing() {
    let (plain, due) = (logits(&decoder("qwen3"), &Reference::read("qwen3")), Reference::read("qwen3"));
    for dora in [false, true] {
        let model = decoder("qwen3");
        let config = LoraConfig { dora, target_modules: LoraTargets::AllLinear, ..LoraConfig::default() };
        let lora = Lora::new(&model, &init(), config).unwrap();
        assert_eq!(lora.layers().count(), 14);
        let tolerance = if dora { 1e-6 } else { 0.0 };
        close("adapted", &logits(&model, &due), &plain, tolerance);
        close("without", &lora.without(|| logits(&model, &due)).unwrap(), &plain, 0.0);
    }
}

/// On projections of any kind and norms at any place; files have transformers' names of the layers.
#[test]
fn every_family_has_adapters() {
    for name in ["olmo2", "phi3", "smollm3", "gemma2", "gemma3", "gpt_oss"] {
        // In `f64`, where a merged weight computes the same to many digits.
        let init = init().dtype(DType::F64);
        let open = || Decoder::from_pretrained(reference(name), &init).unwrap();
        let (model, due) = (open(), Reference::read(name));
        let config = LoraConfig { rank: 2, target_modules: LoraTargets::AllLinear, ..LoraConfig::default() };
        let mut lora = Lora::new(&model, &init, config).unwrap();
        for (_, b) in lora.named_parameters().iter().filter(|(name, _)| name.contains("lora_B")) {
            b.set(Tensor::normal(&cpu(), b.shape(), DType::F64, 0.0, 0.3, 7).unwrap()).unwrap();
        }
        let (adapted, scratch) = (logits(&model, &due), Scratch::new());
        assert_ne!(adapted.to_bytes().unwrap(), due.tensor("logits").to_bytes().unwrap());
        lora.save(&scratch.0).unwrap();
        let again = open();
        Lora::load(&again, &init, &scratch.0).unwrap();
        close(name, &logits(&again, &due), &adapted, 0.0);
        lora.merge().unwrap();
        close(name, &logits(&model, &due), &adapted, 1e-10);
        let saved = numcore::safetensors::load::<Cpu>(&weight_files(&scratch.0)[0], &cpu()).unwrap();
        let projection = if name == "phi3" { "qkv_proj" } else { "q_proj" };
        let due = format!("base_model.model.model.layers.1.self_attn.{projection}.lora_A.weight");
        assert!(saved.iter().any(|(name, _)| *name == due), "{due}");
    }
}

/// An optimizer of the adapters holds and changes nothing else.
#[test]
fn only_adapters_are_trained() {
    let (model, due) = (decoder("llama"), Reference::read("llama"));
    let before = model.state_dict().unwrap();
    let config = LoraConfig { rank: 2, alpha: 4.0, dropout: 0.1, ..LoraConfig::default() };
    let lora = Lora::new(&model, &init(), config).unwrap();
    assert_eq!(model.num_parameters().trainable, lora.num_parameters().total);
    let mut optimizer = AdamW::new(&lora, AdamWConfig { lr: 1e-2, ..Default::default() }).unwrap();
    let ids = due.var("ids");
    let mut losses = Vec::new();
    for _ in 0..8 {
        let loss = next_token_loss(&model, &ids);
        losses.push(loss.item().unwrap());
        optimizer.backward(&loss).unwrap();
        optimizer.step().unwrap();
    }
    assert!(losses[7] < losses[0] - 0.1, "{losses:?}");
    lora.remove().unwrap();
    for ((name, a), (_, b)) in model.state_dict().unwrap().iter().zip(&before) {
        close(name, a, b, 0.0);
    }
}

#[test]
fn adapters_of_a_model_of_ones_own() {
    let config = GptConfig { vocab: 5, context: 4, layers: 2, heads: 1, width: 4, ..Default::default() };
    let model = Gpt::new(&init(), config).unwrap();
    let names = LoraTargets::Names(vec!["qkv".into(), "blocks.1.fc2".into()]);
    let lora = Lora::on_module(&model, &init(), LoraConfig { target_modules: names, ..LoraConfig::default() }).unwrap();
    assert_eq!(lora.layers().collect::<Vec<_>>(), ["blocks.0.qkv", "blocks.1.qkv", "blocks.1.fc2"]);
    let names: Vec<String> = lora.named_parameters().into_iter().map(|(n, _)| n).take(2).collect();
    assert_eq!(names, ["blocks.0.qkv.lora_A.weight", "blocks.0.qkv.lora_B.weight"]);
    let scratch = Scratch::new();
    lora.save(&scratch.0).unwrap();
    let saved = lora.state_dict().unwrap();
    lora.remove().unwrap();
    let again = Lora::load_on_module(&model, &init(), &scratch.0).unwrap();
    for ((name, a), (_, b)) in again.state_dict().unwrap().iter().zip(&saved) {
        close(name, a, b, 0.0);
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let targets = |names: &[&str]| LoraConfig {
        target_modules: LoraTargets::Names(names.iter().map(|n| n.to_string()).collect()),
        ..LoraConfig::default()
    };
    let error = |config: LoraConfig| Lora::new(&decoder("gpt2"), &init(), config).map(|_| ()).unwrap_err().to_string();
    assert!(error(targets(&["c_attn", "q_proj"])).contains("no linear layer is called q_proj; this model has: c_attn"));
    assert!(error(targets(&[])).contains("this model has"));
    let all = ["c_attn", "c_proj", "c_fc"].map(String::from).to_vec();
    let none = LoraConfig { target_modules: LoraTargets::AllLinear, exclude_modules: all, ..LoraConfig::default() };
    assert!(error(none).contains("no layer of this model is chosen"));
    assert!(error(LoraConfig { rank: 0, ..targets(&["c_attn"]) }).contains("rank 0"));
    assert!(error(LoraConfig { dropout: 1.0, ..targets(&["c_attn"]) }).contains("dropout of 1"));
    let model = decoder("gpt2");
    let _first = Lora::new(&model, &init(), targets(&["c_attn"])).unwrap();
    let second = Lora::new(&model, &init(), targets(&["c_attn"])).map(|_| ()).unwrap_err().to_string();
    assert!(second.contains("has an adapter already"), "{second}");
}

#[test]
fn folders_of_adapters_that_are_wrong() {
    let error = |folder: &Scratch, base: &str| {
        let model = decoder(base);
        let error = Lora::load(&model, &init(), &folder.0).map(|_| ()).unwrap_err().to_string();
        // Nothing is left in the model.
        assert!(model.named_parameters().iter().all(|(n, p)| !n.contains("lora") && p.requires_grad()));
        error
    };
    let with = |field: &str, value: serde_json::Value| {
        let folder = Scratch::copy_of("lora_llama");
        change(&folder, field, value);
        folder
    };
    assert!(error(&with("peft_type", "IA3".into()), "llama").contains("`LORA`"));
    assert!(error(&with("bias", "all".into()), "llama").contains("`bias`"));
    assert!(error(&with("target_modules", ".*q_proj".into()), "llama").contains("regular expression"));
    let head = error(&with("modules_to_save", serde_json::json!(["lm_head"])), "llama");
    assert!(head.contains("base_model.model.lm_head.weight is missing"), "{head}");
    assert!(error(&with("modules_to_save", serde_json::json!(["x_head"])), "llama").contains("no module `x_head`"));
    assert!(error(&with("layers_to_transform", serde_json::json!([1])), "llama").contains("`layers_to_transform`"));
    for start in ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"] {
        let why = error(&with("init_lora_weights", start.into()), "llama");
        assert!(why.contains("`init_lora_weights`") && why.contains("convert"), "{why}");
    }
    for start in ["gaussian", "eva", "orthogonal"] {
        Lora::load(&decoder("llama"), &init(), &with("init_lora_weights", start.into()).0).unwrap();
    }
    let huge = error(&with("r", (1u64 << 40).into()), "llama");
    assert!(huge.contains("q_proj.lora_A.weight is f32 [3, 12] in the file, and [1099511627776, 12] here"), "{huge}");
    let more = error(&with("r", 4.into()), "llama");
    assert!(more.contains("q_proj.lora_A.weight is f32 [3, 12] in the file, and [4, 12] here"), "{more}");
    let fewer = error(&with("target_modules", serde_json::json!(["q_proj"])), "llama");
    assert!(fewer.contains("v_proj.lora_A.weight is of no adapted layer"), "{fewer}");
    assert!(error(&Scratch::copy_of("lora_llama"), "gpt2").contains("no linear layer is called"));
    let tensor = Tensor::zeros(&cpu(), [1], DType::F32).unwrap();
    let folder = Scratch::copy_of("lora_llama");
    let path = folder.0.join("adapter_model.safetensors");
    numcore::safetensors::save(path, &[("x".into(), tensor)], &Default::default()).unwrap();
    assert!(error(&folder, "llama").contains("down_proj.lora_B.weight is missing"));
}

/// Whoever loads the files of a model without peft would get the base model.
#[test]
fn a_model_with_adapters_is_not_saved_as_if_it_had_none() {
    let ((model, mut lora), scratch) = (load("lora_llama", "llama"), Scratch::new());
    let error = model.save_pretrained(&scratch.0).unwrap_err().to_string();
    assert!(error.contains("merge the adapters, or save the `Lora`"), "{error}");
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 0);
    lora.merge().unwrap();
    model.save_pretrained(&scratch.0).unwrap();
    let (due, again) = (Reference::read("lora_llama"), Decoder::from_pretrained(&scratch.0, &init()).unwrap());
    close("merged", &logits(&again, &due), &due.tensor("merged_logits"), 2e-5);
}

#[test]
fn merged_adapters_are_not_passed_over() {
    for (name, base) in ALL {
        let ((model, mut lora), due) = (load(name, base), Reference::read(name));
        let plain = logits(&decoder(base), &due);
        lora.merge().unwrap();
        assert!(lora.without(|| ()).unwrap_err().to_string().contains("unmerge"));
        lora.remove().unwrap();
        close(name, &logits(&model, &due), &plain, 2e-5);
    }
}

/// What stops a merge half way leaves no layer with its update twice or never.
#[test]
fn a_merge_that_fails_goes_on_where_it_stopped() {
    for (name, base) in ALL {
        let ((model, mut lora), due) = (load(name, base), Reference::read(name));
        let bad = lora.layers().last().unwrap().to_owned() + ".lora_A.weight";
        let bad = lora.named_parameters().into_iter().find(|(n, _)| *n == bad).unwrap().1;
        bad.to_dtype(DType::F64).unwrap();
        lora.merge().unwrap_err();
        bad.to_dtype(DType::F32).unwrap();
        close(name, &logits(&model, &due), &due.tensor("logits"), 2e-5);
        lora.merge().unwrap();
        close(name, &logits(&model, &due), &due.tensor("merged_logits"), 2e-5);
        lora.unmerge().unwrap();
        close(name, &logits(&model, &due), &due.tensor("logits"), 2e-5);
    }
}

#[test]
fn adapters_go_back_after_a_panic() {
    let (model, lora) = load("lora_llama", "llama");
    let due = Reference::read("lora_llama");
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lora.without(|| panic!("within"))));
    assert!(caught.is_err());
    close("back", &logits(&model, &due), &due.tensor("logits"), 2e-5);
}

/// Norms of a half-precision base are those of its values, not rounded to its type.
#[test]
fn magnitudes_have_the_precision_of_the_adapter() {
    use numcore::ops::{PointwiseOps, ReduceOps};
    let model = Decoder::from_pretrained(reference("llama"), &init().dtype(DType::BF16)).unwrap();
    let config = LoraConfig { dora: true, ..LoraConfig::default() };
    let lora = Lora::new(&model, &init(), config).unwrap();
    for (name, magnitude) in lora.named_parameters().iter().filter(|(name, _)| name.ends_with("magnitude_vector")) {
        let of = name.replace("lora_magnitude_vector", "weight");
        let weight = model.named_parameters().into_iter().find(|(n, _)| *n == of).unwrap().1.value().unwrap();
        let norms = weight.to_dtype(DType::F32).unwrap().square().unwrap().sum(&[1]).unwrap().sqrt().unwrap();
        close(name, &magnitude.value().unwrap(), &norms, 1e-6);
    }
}

/// A BERT and a ViT with the adapters of a folder.
fn classifier(name: &str, folder: impl AsRef<std::path::Path>) -> (Lora<Cpu>, Tensor<Cpu>) {
    if name == "lora_vit" {
        let model = Vit::from_pretrained(reference("vit"), &init()).unwrap();
        let lora = Lora::load(&model, &init(), folder).unwrap();
        return (lora, logits_of(&model, &Reference::read("vit").var("pixels")));
    }
    let model = Bert::from_pretrained(reference("bert_classifier"), &init()).unwrap();
    let (lora, base) = (Lora::load(&model, &init(), folder).unwrap(), Reference::read("bert_classifier"));
    let (mask, types) = (base.var("mask"), base.var("types"));
    let inputs = BertInputs { mask: Some(&mask), token_types: Some(&types) };
    (lora, model.forward_with(&base.var("ids"), &inputs).unwrap().value().unwrap())
}

fn logits_of(model: &impl Forward<Cpu>, inputs: &autograd::Var<Cpu>) -> Tensor<Cpu> {
    model.forward(inputs).unwrap().value().unwrap()
}

/// The names of modules are those of transformers 5; those of 4, which files of models have still, are read.
#[test]
fn heads_of_classifiers_are_saved_with_the_adapters() {
    for name in ["lora_bert", "lora_vit"] {
        let due = Reference::read(name).tensor("logits");
        let (lora, logits) = classifier(name, reference(name));
        close(name, &logits, &due, 2e-5);
        let scratch = Scratch::new();
        lora.save(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        assert_eq!(classifier(name, &scratch.0).0.config(), lora.config());
        let text = std::fs::read_to_string(scratch.0.join("adapter_config.json")).unwrap();
        assert!(text.contains("\"classifier\""), "{text}");
    }
    let old = Scratch::copy_of("lora_vit");
    let file = old.0.join("adapter_model.safetensors");
    let before = |name: String| {
        let name = name.replace("vit.layers.", "vit.encoder.layer.").replace("mlp.fc2", "output.dense");
        name.replace("attention.q_proj", "attention.attention.query")
            .replace("attention.o_proj", "attention.output.dense")
    };
    let tensors = numcore::safetensors::load(&file, &cpu()).unwrap().into_iter().map(|(name, t)| (before(name), t));
    numcore::safetensors::save(&file, &tensors.collect::<Vec<_>>(), &Default::default()).unwrap();
    change(&old, "target_modules", serde_json::json!(["query", "output.dense"]));
    let (lora, logits) = classifier("lora_vit", &old.0);
    close("old names", &logits, &Reference::read("lora_vit").tensor("logits"), 2e-5);
    let again = Scratch::new();
    lora.save(&again.0).unwrap();
    same_tensors(&weight_files(&reference("lora_vit")), &weight_files(&again.0));
    classifier("lora_vit", &again.0);
}

/// Both layers of RoBERTa's classifier, and those of DistilBERT's.
#[test]
fn heads_of_other_encoders_are_saved_with_the_adapters() {
    for (name, query, heads) in [
        ("roberta_classifier", "query", ["classifier.dense.bias", "classifier.out_proj.weight"]),
        ("distilbert_classifier", "q_lin", ["pre_classifier.bias", "classifier.weight"]),
    ] {
        let open = || Bert::from_pretrained(reference(name), &init()).unwrap();
        let modules_to_save = ["classifier", "pre_classifier"][..1 + usize::from(query == "q_lin")].iter();
        let config = LoraConfig {
            target_modules: LoraTargets::Names(vec![query.into()]),
            modules_to_save: modules_to_save.map(|module| module.to_string()).collect(),
            ..LoraConfig::default()
        };
        let (model, scratch) = (open(), Scratch::new());
        let lora = Lora::new(&model, &init(), config).unwrap();
        for (name, p) in lora.named_parameters().iter().filter(|(name, _)| !name.contains("lora_A")) {
            p.set(Tensor::normal(&cpu(), p.shape(), DType::F32, 0.0, 0.3, name.len() as u64).unwrap()).unwrap();
        }
        lora.save(&scratch.0).unwrap();
        let saved = numcore::safetensors::load::<Cpu>(&weight_files(&scratch.0)[0], &cpu()).unwrap();
        for head in heads {
            assert!(saved.iter().any(|(name, _)| *name == format!("base_model.model.{head}")), "{head} of {name}");
        }
        let again = open();
        Lora::load(&again, &init(), &scratch.0).unwrap();
        let due = Reference::read(name);
        assert_ne!(logits(&model, &due).to_bytes().unwrap(), logits(&open(), &due).to_bytes().unwrap());
        close(name, &logits(&again, &due), &logits(&model, &due), 0.0);
    }
}

#[test]
fn what_is_trained_whole() {
    let model = Bert::from_pretrained(reference("bert_classifier"), &init()).unwrap();
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let config = LoraConfig {
        target_modules: LoraTargets::AllLinear,
        modules_to_save: names(&["pooler"]),
        task_type: Some("SEQ_CLS".into()),
        ..Default::default()
    };
    let lora = Lora::new(&model, &init(), config).unwrap();
    let whole: Vec<String> =
        lora.named_parameters().into_iter().map(|(n, _)| n).filter(|n| !n.contains("lora")).collect();
    assert_eq!(whole, ["pooler.weight", "pooler.bias", "head.classifier.weight", "head.classifier.bias"]);
    assert_eq!(model.num_parameters().trainable, lora.num_parameters().total);
    assert!(lora.without(|| ()).unwrap_err().to_string().contains("`modules_to_save`"));
    lora.remove().unwrap();
    assert_eq!(model.num_parameters().trainable, 0);
    let error = |base: &str, config: LoraConfig| {
        Lora::new(&decoder(base), &init(), config).map(|_| ()).unwrap_err().to_string()
    };
    let saves = |module: &str| LoraConfig { modules_to_save: names(&[module]), ..Default::default() };
    assert!(error("llama", saves("score")).contains("no module `score`"));
    let classes = LoraConfig { task_type: Some("SEQ_CLS".into()), ..Default::default() };
    assert!(error("llama", classes).contains("no module `classifier` to train whole (`task_type` is SEQ_CLS)"));
    assert!(error("qwen2", saves("embed_tokens")).contains("is tied"));
}

/// Changes a field of an adapter's configuration.
fn change(folder: &Scratch, field: &str, value: serde_json::Value) {
    let path = folder.0.join("adapter_config.json");
    let mut fields: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    fields[field] = value;
    std::fs::write(&path, fields.to_string()).unwrap();
}
