//! Weights in four bits, against what bitsandbytes stores and computes.

use std::{collections::BTreeMap, fs};

use autograd::{Var, no_grad};
use distributed::{
    comm::{Comm, Communicator, Ranks},
    mesh::Mesh,
    plan::{Axis, ParallelPlan},
};
use models::{
    Decoder, DecoderConfig, Lora, LoraConfig, LoraTargets, Pretrained, QuantizeConfig, SaveOptions, quantize,
};
use nn::{Forward, Init, ModuleExt};
use numcore::{
    DType, Runtime, Tensor,
    ops::PointwiseOps,
    safetensors::{self, Reader},
};
use runtime_cpu::Cpu;
use serde_json::Value;

use crate::common::*;

const FOLDERS: [&str; 2] = ["nf4_double", "nf4_plain"];

/// The type, the sizes and the bytes of each tensor.
type Contents = BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>;

/// All tensors of the files in a folder; states as what they say.
fn contents(folder: &std::path::Path) -> Contents {
    let mut all = BTreeMap::new();
    for file in weight_files(folder) {
        let reader = Reader::open(file).unwrap();
        let names: Vec<String> = reader.names().map(String::from).collect();
        for name in names {
            let (dtype, shape) = reader.tensor(&name).unwrap();
            let (dtype, mut dims, mut bytes) = (dtype, shape.dims().to_vec(), reader.bytes(&name).unwrap());
            if name.contains("quant_state") {
                let state: Value = serde_json::from_slice(&bytes).unwrap();
                (bytes, dims) = (state.to_string().into_bytes(), vec![]);
            }
            all.insert(name, (dtype, dims, bytes));
        }
    }
    all
}

/// Whether a weight is among those that bitsandbytes was given.
fn is_given(name: &str) -> bool {
    name.contains("layers.1") && name.contains("proj.weight")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn logits_and_gradients_are_those_of_bitsandbytes() {
    for name in FOLDERS {
        let (model, due) = (decoder(name), Reference::read(name));
        let ids = due.var("ids");
        close(name, &model.forward(&ids).unwrap().value().unwrap(), &due.tensor("logits"), 2e-5);
        let lora = Lora::load(&model, &init(), reference(name).join("adapter")).unwrap();
        close(name, &model.forward(&ids).unwrap().value().unwrap(), &due.tensor("adapted"), 2e-5);
        // With a weight that was bf16, bitsandbytes rounds it to that in backward, and not in forward.
        if name == "nf4_double" {
            let prefix = "base_model.model.model.";
            let ours = |theirs: &str| (theirs.strip_prefix(prefix).unwrap().into(), false);
            check_grads(&lora, &next_token_loss(&model, &ids), &due, ours);
        }
        // Without its adapters, and after they were taken out, the model is what it was.
        let plain = lora.without(|| model.forward(&ids).unwrap().value().unwrap()).unwrap();
        close(name, &plain, &due.tensor("logits"), 2e-5);
        lora.remove().unwrap();
        close(name, &model.forward(&ids).unwrap().value().unwrap(), &due.tensor("logits"), 2e-5);
    }
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    for name in FOLDERS {
        let folder = Scratch::new();
        let model = Decoder::from_pretrained(
            reference(name),
            &init().dtype(match name {
                "nf4_plain" => DType::BF16,
                _ => DType::F32,
            }),
        );
        model.unwrap().save_pretrained(&folder.0).unwrap();
        let (got, due) = (contents(&folder.0), contents(&reference(name)));
        assert!(got.keys().eq(due.keys()), "{name}");
        due.iter().for_each(|(tensor, due)| assert!(got[tensor] == *due, "{name}: {tensor} differs"));
        let config = |folder: &std::path::Path| -> Value {
            serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
        };
        let [got, due] = [config(&folder.0), config(&reference(name))].map(|c| c["quantization_config"].clone());
        assert_eq!(got, due);
        Decoder::from_pretrained(&folder.0, &init()).unwrap();
    }
}

/// A model whose second layer has the weights that bitsandbytes was given.
fn unquantised(name: &str, init: &Init<Cpu>) -> Decoder<Cpu> {
    let config = decoder(name).config().clone();
    let fields = config.fields.into_iter().filter(|(name, _)| name != "quantization_config").collect();
    let model = Decoder::new(init, DecoderConfig { fields, ..config }).unwrap();
    let due = Reference::read(name);
    for (name, parameter) in model.named_parameters().iter().filter(|(name, _)| is_given(name)) {
        let value = due.tensor(&format!("plain/model.{name}")).to_dtype(parameter.dtype()).unwrap();
        parameter.set(value).unwrap();
    }
    model
}

#[test]
fn weights_are_quantised_to_the_bits_of_bitsandbytes() {
    for name in FOLDERS {
        let double_quant = name == "nf4_double";
        let dtype = if double_quant { DType::F32 } else { DType::BF16 };
        let model = unquantised(name, &init().dtype(dtype));
        let layers = quantize(&model, &QuantizeConfig { double_quant, ..Default::default() }).unwrap();
        assert_eq!(layers.len(), 2 * 7);
        let folder = Scratch::new();
        model.save_pretrained(&folder.0).unwrap();
        let (got, due) = (contents(&folder.0), contents(&reference(name)));
        assert!(got.keys().eq(due.keys()), "{name}");
        for (tensor, (_, dims, bytes)) in due.iter().filter(|(tensor, _)| is_given(tensor)) {
            let (_, got_dims, got) = &got[tensor];
            assert_eq!(got_dims, dims, "{tensor}");
            if tensor.contains("quant_state") {
                let [got, due] = [got, bytes].map(|b| serde_json::from_slice::<Value>(b).unwrap());
                let [a, b] = [&got, &due].map(|state| state["nested_offset"].as_f64().unwrap_or(0.0));
                assert!((a - b).abs() < 1e-6 && got["shape"] == due["shape"] && got["dtype"] == due["dtype"]);
            } else if tensor.contains("nested_absmax") {
                // The mean of the scales is summed in another order.
                let (got, due) = (floats(got), floats(bytes));
                assert!(got.iter().zip(&due).all(|(g, d)| (g - d).abs() < 1e-6), "{tensor}: {got:?} {due:?}");
            } else {
                assert!(got == bytes, "{tensor} differs");
            }
        }
    }
}

#[test]
fn a_lazy_model_is_quantised_weight_by_weight() {
    let folder = Scratch::new();
    unquantised("nf4_double", &init()).save_pretrained(&folder.0).unwrap();
    let ids = Reference::read("nf4_double").var("ids");
    let eager = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    let lazy = Decoder::from_pretrained(&folder.0, &init().lazily()).unwrap();
    let of = |model: &Decoder<Cpu>| {
        quantize(model, &QuantizeConfig::default()).unwrap();
        assert!(model.parameters().iter().all(|p| p.requires_grad() == p.leaf().is_resident()));
        model.forward(&ids).unwrap().value().unwrap().to_bytes().unwrap()
    };
    assert_eq!(of(&eager), of(&lazy));
}

/// A model whose layers are far larger than what is multiplied at once.
fn wide(cpu: &Cpu) -> Decoder<Cpu> {
    let mut config = decoder("nf4_double").config().clone();
    (config.width, config.hidden, config.layers) = (512, 1024, 1);
    config.windows.truncate(1);
    config.fields.remove("quantization_config");
    Decoder::new(&Init::new(cpu, 1), config).unwrap()
}

#[test]
fn no_weight_is_whole_in_memory() {
    let cpu = cpu();
    let model = wide(&cpu);
    let ids = Var::new(Tensor::zeros(&cpu, [1, 1], DType::I64).unwrap());
    let before = cpu.memory().total.live;
    quantize(&model, &QuantizeConfig::default()).unwrap();
    let linear: usize = 512 * 64 * 2 + 512 * 32 * 2 + 3 * 512 * 1024;
    let after = cpu.memory().total.live;
    // Codes of 256 words come on top for each layer.
    assert!(before - after > linear * 4 - linear * 53 / 100 - 7 * 2048, "{before} to {after} for {linear}");
    cpu.reset_peak();
    no_grad(|| model.forward(&ids).unwrap().value().unwrap().to_bytes()).unwrap();
    let peak = cpu.memory().total.peak - after;
    assert!(peak < 512 * 1024, "{peak} bytes at once, where a weight has {}", 512 * 1024 * 4);
    // Whoever asks for a weight gets it.
    let models::UpProjection::Gated(up) = &model.parts.blocks[0].mlp.dense().unwrap().up else { panic!("a gate") };
    let weight = &up[1].weight;
    assert!(!weight.leaf().is_resident() && !weight.requires_grad());
    assert_eq!(weight.value().unwrap().dims(), [1024, 512]);
    assert_eq!(cpu.memory().total.live, after);
}

#[test]
fn a_rank_keeps_its_piece_alone() {
    let live = |ranks| {
        let run = |comm: Comm<Cpu>| {
            let (mesh, rt) = (Mesh::new(&comm, ParallelPlan::of([(Axis::Tensor, ranks)])?)?, comm.runtime());
            let model = wide(rt);
            quantize(&model, &QuantizeConfig { double_quant: false, ..Default::default() })?;
            mesh.parallelize(&model, &Decoder::<Cpu>::tensor_plan())?;
            let ids = Var::new(Tensor::zeros(rt, [1, 1], DType::I64)?);
            let logits = no_grad(|| model.forward(&ids))?.value()?.to_f64s()?;
            let parts = &model.parts;
            let others =
                [&parts.start()?.tokens.weight, parts.end()?.projection.weight()].map(|p| p.shape().numel() * 4);
            Ok((logits, rt.memory().total.live - others.iter().sum::<usize>()))
        };
        Ranks::new(ranks).run(|_| Ok(cpu()), run).unwrap().swap_remove(ranks - 1)
    };
    let ((one, all), (two, half)) = (live(1), live(2));
    assert!(one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-5), "{one:?} {two:?}");
    // Norms are on both, and codes.
    assert!(half < all / 2 + 20_000, "{half} of {all} bytes");
}

#[test]
fn what_makes_no_sense_is_an_error() {
    let model = unquantised("nf4_double", &init());
    let error = |config: QuantizeConfig| quantize(&model, &config).unwrap_err().to_string();
    assert!(error(QuantizeConfig { block: 48, ..Default::default() }).contains("48"));
    let names = LoraTargets::Names(vec!["c_attn".into()]);
    assert!(error(QuantizeConfig { target_modules: names, ..Default::default() }).contains("q_proj"));
    let lora = Lora::new(&model, &init(), LoraConfig::default()).unwrap();
    assert!(error(QuantizeConfig::default()).contains("before adapters"));
    lora.remove().unwrap();
    let only = QuantizeConfig {
        target_modules: LoraTargets::Names(vec!["q_proj".into(), "v_proj".into()]),
        exclude_modules: vec!["layers.1.self_attn.v_proj".into()],
        ..Default::default()
    };
    assert_eq!(quantize(&model, &only).unwrap().len(), 3);
    assert!(error(QuantizeConfig::default()).contains("quantised already"));
    let mut lora = Lora::new(&model, &init(), LoraConfig::default()).unwrap();
    assert!(lora.merge().unwrap_err().to_string().contains("four bits"));
}

type Named = Vec<(String, Tensor<Cpu>)>;

#[test]
fn malformed_files_are_errors() {
    let layer = "model.layers.1.mlp.up_proj.weight";
    let changed = |change: &dyn Fn(&mut Named)| {
        let folder = Scratch::copy_of_file("nf4_double", &["config.json"]);
        let mut tensors = safetensors::load(reference("nf4_double").join("model.safetensors"), &cpu()).unwrap();
        change(&mut tensors);
        safetensors::save(folder.0.join("model.safetensors"), &tensors, &Default::default()).unwrap();
        Decoder::from_pretrained(&folder.0, &init()).unwrap_err().to_string()
    };
    let with_state = |from: &'static str, to: &'static str| {
        changed(&move |tensors| {
            let state = tensors.iter_mut().find(|(n, _)| n.starts_with(layer) && n.contains("quant_state")).unwrap();
            let text = String::from_utf8(state.1.to_bytes().unwrap()).unwrap().replace(from, to);
            state.1 = Tensor::from_slice(&cpu(), [text.len()], text.as_bytes()).unwrap();
        })
    };
    let without =
        |suffix: &'static str| changed(&move |tensors| tensors.retain(|(n, _)| *n != format!("{layer}{suffix}")));
    assert!(without(".absmax").contains(&format!("{layer}.absmax")));
    assert!(without(".nested_quant_map").contains("nested_quant_map"));
    // Without its state it is bytes of no meaning.
    assert!(without(".quant_state.bitsandbytes__nf4").contains(layer));
    assert!(with_state("nf4", "fp4").contains("`nf4`"));
    assert!(with_state("[64, 64]", "[32, 128]").contains("[64, 64]"));
    assert!(with_state("[64, 64]", "[44, 32, 1]").contains("`shape`"));
    assert!(with_state("[64, 64]", "[18446744073709551615, 64]").contains("up_proj"));
    assert!(with_state("\"blocksize\": 64", "\"blocksize\": 128").contains("scales"));
    assert!(with_state("\"blocksize\": 64", "\"blocksize\": 0").contains("block"));
    assert!(with_state("\"blocksize\"", "\"rotation\": 1, \"blocksize\"").contains("`rotation`"));
    assert!(with_state("{", "[").contains("JSON"));
    let folder = Scratch::copy_of_file("nf4_double", &["config.json"]);
    let plain = unquantised("nf4_double", &init());
    let config = fs::read(folder.0.join("config.json")).unwrap();
    plain.save_pretrained_with(&folder.0, &SaveOptions::default()).unwrap();
    fs::write(folder.0.join("config.json"), config).unwrap();
    let error = Decoder::from_pretrained(&folder.0, &init()).unwrap_err().to_string();
    assert!(error.contains("none of this model's is"), "{error}");
}
