//! Every family's decoder against transformers: logits, gradients, files.

use autograd::{Var, backward, no_grad};
use models::{Decoder, DecoderInputs, Pretrained, SaveOptions};
use nn::{Forward, Init, ModuleExt};
use numcore::{
    DType, Runtime, Tensor,
    fused::NnOps,
    ops::{IndexOps, PointwiseOps, ViewOps},
};

use crate::common::*;

/// The tolerance of values whose bits do not depend on the texts around them; with AMX they depend on them.
fn same_bits() -> f64 {
    if runtime_cpu::Simd::best() == runtime_cpu::Simd::Amx { 2e-5 } else { 0.0 }
}

/// Transformers' logits are in `f32`, with rounding errors of their own: those in `f64` are near both.
#[test]
fn logits_are_those_of_transformers() {
    for name in all_decoders() {
        let due = Reference::read(name);
        let of = |model: Decoder<_>| model.forward(&due.var("ids")).unwrap().value().unwrap();
        let exact = of(Decoder::from_pretrained(reference(name), &init().dtype(DType::F64)).unwrap());
        close(name, &due.tensor("logits"), &exact, 2e-5);
        close(name, &of(decoder(name)), &exact, 2e-5);
    }
}

#[test]
fn gradients_are_those_of_transformers() {
    for name in all_decoders() {
        let (model, due) = (decoder(name), Reference::read(name));
        let loss = next_token_loss(&model, &due.var("ids"));
        check_grads(&model, &loss, &due, |theirs| {
            // Transformers has one parameter of all experts too, of the name that it has here.
            if let Some(ours) = theirs.strip_prefix("model.").filter(|ours| model.table().stack(ours).is_some()) {
                return (ours.to_owned(), false);
            }
            let ours = model.table().ours(theirs).unwrap_or_else(|| panic!("no rule for {theirs}"));
            (ours.name, ours.change == models::Change::Transpose)
        });
    }
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    for name in all_decoders() {
        let scratch = Scratch::new();
        decoder(name).save_pretrained(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        let again = Decoder::from_pretrained(&scratch.0, &init()).unwrap();
        let mut due = decoder(name).config().clone();
        due.fields = again.config().fields.clone();
        assert_eq!(*again.config(), due);
    }
}

#[test]
fn files_are_divided_by_size_and_read_again() {
    let (scratch, model) = (Scratch::new(), decoder("llama"));
    let options = SaveOptions { max_shard_size: 4000, ..Default::default() };
    model.save_pretrained_with(&scratch.0, &options).unwrap();
    let files = weight_files(&scratch.0);
    assert!(files.len() > 3 && scratch.0.join("model.safetensors.index.json").is_file());
    assert!(files.iter().all(|f| f.to_str().unwrap().ends_with(&format!("of-{:05}.safetensors", files.len()))));
    same_tensors(&weight_files(&reference("llama")), &files);
    Decoder::from_pretrained(&scratch.0, &init()).unwrap();
    // A rank that does not write leaves nothing.
    let other = Scratch::new();
    model.save_pretrained_with(&other.0, &SaveOptions { writes: false, ..options }).unwrap();
    assert_eq!(std::fs::read_dir(&other.0).unwrap().count(), 0);
}

#[test]
fn element_types_are_converted_both_ways() {
    let scratch = Scratch::new();
    let narrow = Decoder::from_pretrained(reference("gpt2"), &init().dtype(DType::BF16)).unwrap();
    assert!(narrow.parameters().iter().all(|p| p.dtype() == DType::BF16));
    narrow.save_pretrained(&scratch.0).unwrap();
    let wide = Decoder::from_pretrained(&scratch.0, &init()).unwrap();
    for ((name, a), (_, b)) in wide.named_parameters().iter().zip(decoder("gpt2").named_parameters()) {
        let due = b.value().unwrap().to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        close(name, &a.value().unwrap(), &due, 0.0);
    }
    let half = SaveOptions { dtype: Some(DType::F16), ..Default::default() };
    wide.save_pretrained_with(&scratch.0, &half).unwrap();
    let text = std::fs::read_to_string(scratch.0.join("config.json")).unwrap();
    assert!(text.contains("\"dtype\": \"float16\""), "{text}");
}

#[test]
fn a_prefix_that_files_leave_out_is_understood() {
    let scratch = Scratch::copy_of("gpt2");
    let path = scratch.0.join("model.safetensors");
    let tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let mut bare: Vec<_> =
        tensors.into_iter().map(|(n, t)| (n.strip_prefix("transformer.").unwrap().to_string(), t)).collect();
    // What the hub's own file has besides.
    bare.push(("h.0.attn.bias".into(), Tensor::ones(&cpu(), [1, 1, 4, 4], DType::F32).unwrap()));
    numcore::safetensors::save(&path, &bare, &Default::default()).unwrap();
    let (model, report) = Decoder::from_pretrained_partly(&scratch.0, &init()).unwrap();
    assert_eq!(report.ignored, ["h.0.attn.bias"]);
    report.strict().unwrap();
    let due = Reference::read("gpt2");
    close("gpt2", &model.forward(&due.var("ids")).unwrap().value().unwrap(), &due.tensor("logits"), 2e-5);
}

#[test]
fn lazy_models_hold_nothing_and_read_the_same_values() {
    for name in ["qwen3", "gpt2"] {
        let lazy = Decoder::from_pretrained(reference(name), &init().lazily()).unwrap();
        for ((name, a), (_, b)) in lazy.named_parameters().iter().zip(decoder(name).named_parameters()) {
            assert!(!a.leaf().is_resident());
            close(name, &a.value().unwrap(), &b.value().unwrap(), 0.0);
        }
    }
}

/// Not all logits are in memory at a time, unless a soft cap is between them and the head.
#[test]
fn log_probabilities_are_those_of_the_logits() {
    for name in all_decoders() {
        let model = Decoder::from_pretrained(reference(name), &init().dtype(DType::F64)).unwrap();
        let ids = Reference::read(name).var("ids");
        let states = model.states(&ids, DecoderInputs::default()).unwrap();
        let all = model.logits(&states).unwrap().log_softmax(-1).unwrap();
        let due = all.gather(-1, &ids.unsqueeze(-1).unwrap()).unwrap().squeeze(-1).unwrap();
        let found = model.logprobs(&states, &ids).unwrap();
        close(name, &found.value().unwrap(), &due.value().unwrap(), 1e-12);
    }
}

/// The factor of Gemma's embeddings has the element type of the table: √12 is 3.46875 in `bf16`.
#[test]
fn the_scale_of_embeddings_is_rounded_as_in_transformers() {
    let ids = Reference::read("gemma2").var("ids");
    for (dtype, factor) in [(DType::BF16, 3.46875), (DType::F64, 12f64.sqrt())] {
        let init = init().dtype(dtype);
        let mut stages = Decoder::from_pretrained(reference("gemma2"), &init).unwrap().split(5).unwrap();
        assert!(stages[0].parts.blocks.is_empty());
        let table = stages[0].parts.start().unwrap().tokens.weight.value().unwrap().to_f64s().unwrap();
        let first = nn::Stage::forward_values(&stages.remove(0), std::slice::from_ref(&ids)).unwrap().remove(0);
        let tokens = ids.value().unwrap().to_vec::<i64>().unwrap();
        let due = tokens.iter().flat_map(|&token| &table[token as usize * 12..][..12]).map(|x| x * factor);
        let due: Vec<f64> = due.collect();
        let due = Tensor::from_slice(&cpu(), first.dims(), &due).unwrap().to_dtype(dtype).unwrap();
        close("embeddings", &first.value().unwrap(), &due, 0.0);
    }
}

/// Packed documents give the logits that each gives alone.
#[test]
fn packed_documents_do_not_see_each_other() {
    let ids = Reference::read("llama").tensor("ids").narrow(0, 0, 1).unwrap();
    let numbers = |list: Vec<i64>| Var::new(Tensor::from_slice(&cpu(), [1, list.len()], &list).unwrap());
    for name in DECODERS {
        let model = decoder(name);
        let positions = numbers((0..9).chain(0..14).collect());
        let segments = numbers([1; 9].into_iter().chain([2; 14]).collect());
        let inputs = DecoderInputs { positions: Some(&positions), segments: Some(&segments), cache: None };
        let packed = model.forward_with(&Var::new(ids.clone()), inputs).unwrap().value().unwrap();
        for (start, len) in [(0, 9), (9, 14)] {
            let alone = Var::new(ids.narrow(1, start, len).unwrap());
            let alone = model.forward(&alone).unwrap().value().unwrap();
            close(name, &packed.narrow(1, start, len).unwrap(), &alone, same_bits());
        }
    }
}

/// However a text is divided into calls with a cache, its logits are those of one call without.
#[test]
fn a_cache_changes_nothing() {
    for name in DECODERS {
        let (model, ids) = (decoder(name), Reference::read(name).tensor("ids"));
        let logits = model.forward(&Var::new(ids.clone())).unwrap().value().unwrap();
        for parts in [vec![23], vec![1; 23], vec![7, 1, 1, 9, 5]] {
            let (mut cache, mut at) = (model.cache(23, vec![0, 0]), 0);
            for len in parts {
                let tokens = Var::new(ids.narrow(1, at, len).unwrap());
                let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
                let found = no_grad(|| model.forward_with(&tokens, inputs)).unwrap();
                close(name, &found.value().unwrap(), &logits.narrow(1, at, len).unwrap(), same_bits());
                at += len;
            }
            assert_eq!(cache.len(), 23);
        }
    }
}

/// Rows that are padded on the left give what they give alone.
#[test]
fn padding_on_the_left_changes_nothing() {
    for name in DECODERS {
        let (model, due) = (decoder(name), Reference::read(name));
        let (ids, logits) = (due.tensor("ids"), due.tensor("logits"));
        let row = |i: usize, len: usize| ids.narrow(0, i, 1).unwrap().narrow(1, 0, len).unwrap();
        let pad = Tensor::zeros(&cpu(), [1, 6], DType::I64).unwrap();
        let short = numcore::ops::cat(&[&pad, &row(0, 10)], 1).unwrap();
        let both = numcore::ops::cat(&[&short, &row(1, 16)], 0).unwrap();
        let mut cache = model.cache(16, vec![6, 0]);
        let mut found = Vec::new();
        for (at, len) in [(0, 9), (9, 7)] {
            let tokens = Var::new(both.narrow(1, at, len).unwrap());
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            found.push(no_grad(|| model.forward_with(&tokens, inputs)).unwrap().value().unwrap());
        }
        let found = numcore::ops::cat(&[&found[0], &found[1]], 1).unwrap();
        let of =
            |x: &Tensor<_>, i: usize, at: usize, len: usize| x.narrow(0, i, 1).unwrap().narrow(1, at, len).unwrap();
        close(name, &of(&found, 0, 6, 10), &of(&logits, 0, 0, 10), 2e-5);
        close(name, &of(&found, 1, 0, 16), &of(&logits, 1, 0, 16), 2e-5);
    }
}

/// A layer that fails, after others have added to the cache.
struct Failing;

impl nn::Adapter<runtime_cpu::Cpu> for Failing {
    fn forward(&self, _: &nn::Linear<runtime_cpu::Cpu>, _: &V) -> numcore::Result<V> {
        Err(numcore::Error::state("layer", "fails"))
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl nn::Module<runtime_cpu::Cpu> for Failing {
    fn visit(&self, _: &str, _: &mut dyn nn::Visitor<runtime_cpu::Cpu>) {}
}

#[test]
fn a_call_that_fails_adds_nothing_to_a_cache() {
    let (model, due) = (decoder("llama"), Reference::read("llama"));
    let (ids, logits) = (due.tensor("ids"), due.tensor("logits"));
    let mut cache = model.cache(23, vec![0, 0]);
    let mut call = |at: usize, len: usize| {
        let tokens = Var::new(ids.narrow(1, at, len).unwrap());
        let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
        no_grad(|| model.forward_with(&tokens, inputs)).and_then(|logits| logits.value())
    };
    let slot = &model.parts.blocks[1].mlp.dense().unwrap().down_proj.adapter;
    for (at, len) in [(0, 9), (9, 14)] {
        slot.replace(Some(std::sync::Arc::new(Failing)));
        call(at, len).unwrap_err();
        call(at, len - 3).unwrap_err();
        slot.replace(None);
        close("again", &call(at, len).unwrap(), &logits.narrow(1, at, len).unwrap(), 2e-5);
    }
}

/// Nothing is allocated for tokens that never come, and nothing is kept that no query sees any more.
#[test]
fn a_cache_grows_with_its_tokens_up_to_the_window() {
    for (name, grows) in [("llama", true), ("mistral", false)] {
        let model = decoder(name);
        let memory = || model.parts.start().unwrap().tokens.weight.leaf().runtime().memory().total.live;
        let ids = Reference::read(name).tensor("ids");
        let mut cache = model.cache(usize::MAX, vec![0]);
        let step = ids.narrow(0, 0, 1).unwrap();
        let all = numcore::ops::cat(&[&step; 8], 1).unwrap();
        let due = model.forward(&Var::new(all)).unwrap().value().unwrap();
        let mut held = Vec::new();
        for i in 0..8 {
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            let found = no_grad(|| model.forward_with(&Var::new(step.clone()), inputs)).unwrap().value().unwrap();
            close(name, &found, &due.narrow(1, 23 * i, 23).unwrap(), 5e-5);
            drop(found);
            held.push(memory());
        }
        assert_eq!(held[7] > held[2], grows, "{held:?}");
    }
}

/// Rows of different lengths, and a call that fails, where tokens were dropped already.
#[test]
fn a_window_is_kept_with_padding_and_after_failures() {
    let (model, due) = (decoder("mistral"), Reference::read("mistral"));
    let ids = numcore::ops::cat(&[&due.tensor("ids"); 4], 1).unwrap();
    let whole = model.forward(&Var::new(ids.narrow(0, 1, 1).unwrap().narrow(1, 3, 89).unwrap())).unwrap();
    let mut cache = model.cache(200, vec![0, 3]);
    let mut last = None;
    for at in 0..92 {
        if at == 80 {
            // The first row has a token that is none: no layer keeps anything of this call.
            let wrong = Var::new(Tensor::from_slice(&cpu(), [2, 1], &[1i64, 10_000]).unwrap());
            let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
            no_grad(|| model.forward_with(&wrong, inputs)).map(|_| ()).unwrap_err();
        }
        let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
        let step = Var::new(ids.narrow(1, at, 1).unwrap());
        last = Some(no_grad(|| model.forward_with(&step, inputs)).unwrap().value().unwrap());
    }
    let last = last.unwrap().narrow(0, 1, 1).unwrap();
    close("padded", &last, &whole.value().unwrap().narrow(1, 88, 1).unwrap(), 5e-5);
}

#[test]
fn what_a_cache_cannot_do_is_an_error() {
    let model = decoder("llama");
    let mut small = models::KvCache::new(1, 4, vec![0]);
    let inputs = DecoderInputs { cache: Some(&mut small), ..Default::default() };
    let one = Var::new(Tensor::zeros(&cpu(), [1, 1], DType::I64).unwrap());
    let error = no_grad(|| model.forward_with(&one, inputs)).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("number of layers is 2, and must be 1"), "{error}");
    let tokens = |b: usize, t: usize| Var::new(Tensor::zeros(&cpu(), [b, t], DType::I64).unwrap());
    let call = |b, t| {
        let mut cache = model.cache(4, vec![0, 0]);
        let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
        no_grad(|| model.forward_with(&tokens(b, t), inputs)).map(|_| ()).unwrap_err().to_string()
    };
    assert!(call(2, 5).contains("room for 4 tokens"), "{}", call(2, 5));
    assert!(call(1, 2).contains("number of rows is 1, and must be 2"), "{}", call(1, 2));
    let mut cache = model.cache(4, vec![0]);
    let inputs = DecoderInputs { cache: Some(&mut cache), ..Default::default() };
    let error = model.forward_with(&tokens(1, 1), inputs).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no_grad"), "{error}");
    let long = decoder("gpt2").forward(&tokens(1, 65)).map(|_| ()).unwrap_err().to_string();
    assert!(long.contains("context of 64"), "{long}");
}

#[test]
fn a_copy_of_a_tied_weight_is_left_out() {
    let folder = Scratch::copy_of("qwen2");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let head = tensors.iter().find(|(name, _)| name == "model.embed_tokens.weight").unwrap().1.clone();
    tensors.push(("lm_head.weight".into(), head));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let (_, report) = Decoder::from_pretrained_partly(&folder.0, &init()).unwrap();
    report.strict().unwrap();
    assert_eq!(report.ignored, ["lm_head.weight"]);
    let head = &mut tensors.last_mut().unwrap().1;
    *head = head.add(1e-3).unwrap();
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = Decoder::from_pretrained_partly(&folder.0, &init()).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight is no copy") && error.contains("tie_word_embeddings"), "{error}");
}

/// A name with the prefix and one without it mean one parameter.
#[test]
fn of_two_weights_of_one_meaning_the_second_is_unexpected() {
    let folder = Scratch::copy_of("llama");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    let norm = tensors.iter().find(|(name, _)| name == "model.norm.weight").unwrap().1.clone();
    tensors.push(("norm.weight".into(), norm));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let (_, report) = Decoder::from_pretrained_partly(&folder.0, &init()).unwrap();
    assert_eq!(report.unexpected.into_iter().collect::<Vec<_>>(), [("norm.weight".into(), Some("norm.weight".into()))]);
}

/// Transformers' defaults of what a file leaves out; null is no default.
#[test]
fn windows_that_are_not_given_are_those_of_transformers() {
    let windows = |name: &str, change: fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let folder = Scratch::copy_of(name).with_config(change);
        Decoder::from_pretrained(&folder.0, &init()).unwrap().config().windows.clone()
    };
    assert_eq!(windows("mistral", |fields| drop(fields.remove("sliding_window"))), [Some(4096); 2]);
    assert_eq!(windows("mistral", |fields| drop(fields.insert("sliding_window".into(), ().into()))), [None; 2]);
    let qwen = |fields: &mut serde_json::Map<String, serde_json::Value>| {
        fields.retain(|name, _| !["layer_types", "sliding_window"].contains(&&**name));
    };
    assert_eq!(windows("qwen2", qwen), [None, Some(4096)]);
    let neither: fn(&mut serde_json::Map<String, serde_json::Value>) = |fields| {
        fields.retain(|name, _| !["layer_types", "sliding_window", "max_window_layers"].contains(&&**name));
        fields.insert("use_sliding_window".into(), true.into());
    };
    assert_eq!(windows("qwen2", neither), [None; 2]);
}

/// Such a model could be computed, and would be another one after saving and loading.
#[test]
fn what_a_family_cannot_be_is_an_error() {
    let error = |name: &str, change: fn(&mut models::DecoderConfig)| {
        let mut config = decoder(name).config().clone();
        change(&mut config);
        Decoder::new(&init(), config).map(|_| ()).unwrap_err().to_string()
    };
    assert!(error("llama", |config| config.windows = vec![Some(4); 2]).contains("`llama` cannot be so"));
    assert!(error("qwen3", |config| config.windows = vec![Some(4), Some(5)]).contains("`qwen3` cannot be so"));
    assert!(error("qwen2", |config| config.qkv_bias = false).contains("`qwen2` cannot be so"));
    assert!(error("gpt2", |config| config.head_dim = 5).contains("`gpt2` cannot be so"));
    assert!(error("llama", |config| config.rope = None).contains("`llama` cannot be so"));
}

#[test]
fn a_model_can_be_made_without_a_file() {
    let config = decoder("qwen3").config().clone();
    let model = Decoder::new(&Init::new(&cpu(), 1), config).unwrap();
    let scratch = Scratch::new();
    model.save_pretrained(&scratch.0).unwrap();
    let again = Decoder::from_pretrained(&scratch.0, &init()).unwrap();
    let ids = Reference::read("qwen3").var("ids");
    let logits = |m: &Decoder<_>| m.forward(&ids).unwrap().value().unwrap();
    close("again", &logits(&again), &logits(&model), 0.0);
}

/// As by transformers, whose embeddings are given `pad_token_id`: negative ones count from the end. GPT-2's is not.
#[test]
fn the_embedding_of_padding_is_not_trained() {
    let load = |name: &str, pad: serde_json::Value| {
        let folder = Scratch::copy_of(name).with_config(|fields| drop(fields.insert("pad_token_id".into(), pad)));
        Decoder::from_pretrained(&folder.0, &init())
    };
    for (pad, frozen) in [(3, 3), (-1, 42)] {
        let model = load("llama", pad.into()).unwrap();
        let ids = V::new(Tensor::from_slice(&cpu(), [1, 4], &[3i64, 42, 5, 3]).unwrap());
        let gradients = backward(&next_token_loss(&model, &ids)).unwrap();
        let table = gradients.get(&model.parts.start().unwrap().tokens.weight.leaf()).unwrap().to_f64s().unwrap();
        let trained = |row: usize| table[row * 12..(row + 1) * 12].iter().any(|&x| x != 0.0);
        assert_eq!([3, 42, 5].map(trained), [3 != frozen, 42 != frozen, true]);
        assert_eq!(model.config().to_json()["pad_token_id"], frozen);
    }
    assert_eq!(load("gpt2", 3.into()).unwrap().config().padding, None);
    let error = load("llama", 43.into()).unwrap_err().to_string();
    assert!(error.contains("`pad_token_id` is 43, and there are 43 tokens"), "{error}");
}
