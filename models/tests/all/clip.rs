//! CLIP against transformers: vectors, logits, gradients, files.

use autograd::Var;
use models::{Clip, ClipConfig, Pretrained};
use nn::{Forward, ModuleExt, loss::cross_entropy};
use numcore::{
    DType, Tensor,
    ops::{DistanceOps, PointwiseOps, ViewOps, cat},
};
use runtime_cpu::Cpu;
use serde_json::{Value, json};

use crate::common::*;

/// The second has the end of texts of older files.
const CLIPS: [&str; 2] = ["clip", "clip_old"];

fn clip(name: &str, dtype: DType) -> Clip<Cpu> {
    Clip::from_pretrained(reference(name), &init().dtype(dtype)).unwrap()
}

fn pixels(name: &str, dtype: DType) -> V {
    Var::new(Reference::read(name).tensor("pixels").to_dtype(dtype).unwrap())
}

#[test]
fn clip_is_that_of_transformers() {
    for name in CLIPS {
        let (model, due) = (clip(name, DType::F32), Reference::read(name));
        let ids = due.var("ids");
        let exact = clip(name, DType::F64).logits(&ids, &pixels(name, DType::F64)).unwrap().value().unwrap();
        close(name, &due.tensor("logits"), &exact, 2e-5);
        let logits = model.logits(&ids, &pixels(name, DType::F32)).unwrap();
        close(name, &logits.value().unwrap(), &exact, 2e-5);
        close("texts", &model.embed_texts(&ids).unwrap().value().unwrap(), &due.tensor("texts"), 2e-5);
        let images = model.embed_images(&due.var("pixels")).unwrap().value().unwrap();
        close("images", &images, &due.tensor("images"), 2e-5);
        let loss = cross_entropy(&logits, &due.var("target")).unwrap();
        check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
    }
}

/// The states and vectors of a lone tower, and the names of its files.
const TOWERS: [&str; 4] = ["clip_text", "clip_text_projected", "clip_image", "clip_image_projected"];

fn tower(model: &Clip<Cpu>, due: &Reference) -> [V; 2] {
    let states = match (&model.text, &model.image) {
        (Some(text), None) => text.states(&due.var("given")),
        (None, Some(image)) => image.states(&due.var("given")),
        _ => panic!("not one tower"),
    };
    let [states, pooled] = states.unwrap();
    let projection = model.text_projection.as_ref().or(model.image_projection.as_ref());
    [states, projection.map_or(pooled.clone(), |projection| projection.forward(&pooled).unwrap())]
}

/// A text without an end is what its first token is.
#[test]
fn lone_towers_are_those_of_transformers() {
    for name in TOWERS {
        let (model, due) = (clip(name, DType::F32), Reference::read(name));
        let [states, vectors] = tower(&model, &due);
        close(name, &states.value().unwrap(), &due.tensor("states"), 2e-5);
        close(name, &vectors.value().unwrap(), &due.tensor("vectors"), 2e-5);
        let loss = cross_entropy(&vectors, &due.var("target")).unwrap();
        check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
        let embedded = match name {
            "clip_text_projected" => model.embed_texts(&due.var("given")),
            "clip_image_projected" => model.embed_images(&due.var("given")),
            _ => {
                let error = model.embed_texts(&due.var("given")).map(drop).unwrap_err().to_string();
                assert!(error.contains("no tower of texts with a projection"), "{error}");
                continue;
            }
        };
        let unit = Var::new(due.tensor("vectors")).normalize(-1).unwrap().value().unwrap();
        close(name, &embedded.unwrap().value().unwrap(), &unit, 2e-5);
        assert!(model.logits(&due.var("given"), &due.var("given")).is_err());
    }
}

/// Names of saved files have the tower's, which older versions of transformers need.
#[test]
fn saving_a_lone_tower_gives_the_same_bits() {
    for name in TOWERS {
        let (model, scratch) = (clip(name, DType::F32), Scratch::new());
        model.save_pretrained(&scratch.0).unwrap();
        let again = Clip::from_pretrained(&scratch.0, &init()).unwrap();
        let values = |model: &Clip<Cpu>| {
            let values = model.state_dict().unwrap();
            values.iter().map(|(name, value)| (name.to_owned(), value.to_bytes().unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(values(&again), values(&model), "{name}");
        let files = [reference(name), scratch.0.clone()].map(|folder| weight_files(&folder));
        match name.ends_with("projected") {
            true => same_tensors(&files[0], &files[1]),
            false => {
                let names = numcore::safetensors::Reader::open(&files[1][0]).unwrap();
                assert!(names.names().all(|name| name.contains("_model.")), "{name}");
            }
        }
        let config = |folder: &std::path::Path| -> Value {
            serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
        };
        assert_eq!(config(&scratch.0), config(&reference(name)), "{name}");
    }
}

/// A text is what comes before its first end.
#[test]
fn padding_on_the_right_changes_nothing() {
    let (model, ids) = (clip("clip", DType::F64), Reference::read("clip").tensor("ids"));
    let due = model.embed_texts(&Var::new(ids.clone())).unwrap().value().unwrap();
    let more = Tensor::full(&cpu(), [3, 2], DType::I64, 7i64).unwrap();
    let longer = model.embed_texts(&Var::new(cat(&[&ids, &more], 1).unwrap())).unwrap().value().unwrap();
    close("longer", &longer, &due, 1e-12);
    let shorter = Var::new(ids.narrow(0, 1, 1).unwrap().narrow(1, 0, 5).unwrap());
    let shorter = model.embed_texts(&shorter).unwrap().value().unwrap();
    close("shorter", &shorter, &due.narrow(0, 1, 1).unwrap(), 1e-12);
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    for name in CLIPS {
        let (model, scratch) = (clip(name, DType::F32), Scratch::new());
        model.save_pretrained(&scratch.0).unwrap();
        same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
        let again = Clip::from_pretrained(&scratch.0, &init()).unwrap().config().clone();
        assert_eq!(ClipConfig { fields: model.config().fields.clone(), ..again }, *model.config());
    }
}

/// Files of older versions have a second object of each tower, which goes before the first.
#[test]
fn objects_of_older_versions_are_read() {
    let folder = Scratch::copy_of("clip").with_config(|fields| {
        let text = fields.insert("text_config".into(), json!({"hidden_size": 99})).unwrap();
        fields.insert("text_config_dict".into(), text);
        fields.insert("vision_config_dict".into(), Value::Null);
    });
    let (model, due) = (Clip::from_pretrained(&folder.0, &init()).unwrap(), Reference::read("clip"));
    let logits = model.logits(&due.var("ids"), &due.var("pixels")).unwrap();
    close("old", &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
    model.save_pretrained(&folder.0).unwrap();
    Clip::from_pretrained(&folder.0, &init()).unwrap();
}

#[test]
fn what_is_no_clip_is_an_error() {
    let inner = |tower: &'static str, field: &'static str, value: Value| {
        let folder = Scratch::copy_of("clip")
            .with_config(|fields| drop(fields[tower].as_object_mut().unwrap().insert(field.into(), value)));
        Clip::<Cpu>::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string()
    };
    for (tower, field, value, due) in [
        ("text_config", "num_attention_heads", json!(5), "`num_attention_heads` is 5, which does not divide 12"),
        ("text_config", "model_type", json!("siglip_text_model"), "`siglip_text_model`, not `clip_text_model`"),
        ("text_config", "hidden_act", json!("mish"), "`hidden_act` is `mish`"),
        ("text_config", "eos_token_id", json!([40, 41]), "`eos_token_id` is a list"),
        ("text_config", "attention_scale", json!(2.0), "`attention_scale`"),
        ("vision_config", "patch_size", json!(5), "`patch_size` is 5, which does not divide images of 12"),
        ("vision_config", "patch_size", json!(0), "`patch_size` is 0"),
        ("vision_config", "use_head", json!(true), "`use_head`"),
        ("vision_config", "image_size", json!(16), "image.embed_positions.weight is"),
    ] {
        let error = inner(tower, field, value);
        assert!(error.contains(due), "{field}: {error}");
    }
    let model = clip("clip", DType::F32);
    let image = Var::new(Tensor::zeros(&cpu(), [1, 3, 12, 8], DType::F32).unwrap());
    let error = model.embed_images(&image).map(drop).unwrap_err().to_string();
    assert!(error.contains("images must be [B, 3, 12, 12]"), "{error}");
    for length in [0, 12] {
        let text = Var::new(Tensor::zeros(&cpu(), [1, length], DType::I64).unwrap());
        let error = model.embed_texts(&text).map(drop).unwrap_err().to_string();
        assert!(error.contains("give 1 to 11"), "{error}");
    }
    assert_eq!(model.named_parameters().iter().filter(|(_, p)| p.shape().rank() == 0).count(), 1);
}
