//! Saving over what is there: the folder is then what was saved last, or unchanged.

use models::{Decoder, Pretrained, SaveOptions};
use nn::{
    ModuleExt,
    parallel::{attention_slots, set_scores},
};
use numcore::{DType, ops::PointwiseOps};

use crate::common::*;

/// The first weight of the model in a folder.
fn first(folder: &Scratch) -> Vec<u8> {
    let model = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    model.parameters()[0].value().unwrap().to_bytes().unwrap()
}

fn listing(folder: &Scratch) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(&folder.0)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("model"))
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_saved_last_is_what_is_read() {
    let model = decoder("llama");
    let (scratch, sharded) = (Scratch::new(), SaveOptions { max_shard_size: 4000, ..Default::default() });
    model.save_pretrained_with(&scratch.0, &sharded).unwrap();
    let many = listing(&scratch);
    // Names that no save gives are kept.
    std::fs::write(scratch.0.join("model-notes.safetensors"), "mine").unwrap();
    let weight = &model.parameters()[0];
    weight.set(weight.value().unwrap().mul(2.0).unwrap()).unwrap();
    let doubled = weight.value().unwrap().to_bytes().unwrap();
    assert_ne!(first(&scratch), doubled);
    model.save_pretrained(&scratch.0).unwrap();
    assert_eq!(first(&scratch), doubled);
    assert_eq!(listing(&scratch), ["model-notes.safetensors", "model.safetensors"]);
    std::fs::remove_file(scratch.0.join("model-notes.safetensors")).unwrap();
    // And the other way round.
    weight.set(weight.value().unwrap().mul(2.0).unwrap()).unwrap();
    model.save_pretrained_with(&scratch.0, &sharded).unwrap();
    assert_eq!(first(&scratch), weight.value().unwrap().to_bytes().unwrap());
    assert_eq!(listing(&scratch), many);
}

#[test]
fn a_single_file_goes_before_an_index() {
    let folder = Scratch::copy_of("qwen3");
    let single = folder.0.join("model.safetensors");
    let mut tensors = Vec::new();
    for file in weight_files(&folder.0) {
        tensors.extend(numcore::safetensors::load(file, &cpu()).unwrap());
    }
    let norm = tensors.iter_mut().find(|(name, _)| name == "model.norm.weight").unwrap();
    norm.1 = norm.1.mul(3.0).unwrap();
    let due = norm.1.clone();
    numcore::safetensors::save(single, &tensors, &Default::default()).unwrap();
    let model = Decoder::from_pretrained(&folder.0, &init()).unwrap();
    let found = model.named_parameters().into_iter().find(|(name, _)| name == "norm.weight").unwrap().1;
    close("norm", &found.value().unwrap(), &due, 0.0);
}

#[test]
fn a_failed_save_leaves_the_folder_as_it_was() {
    let scratch = Scratch::new();
    let model = decoder("llama");
    model.save_pretrained(&scratch.0).unwrap();
    let before = (first(&scratch), std::fs::read(scratch.0.join("config.json")).unwrap());
    let options = SaveOptions { dtype: Some(DType::I64), ..Default::default() };
    let error = model.save_pretrained_with(&scratch.0, &options).unwrap_err().to_string();
    assert!(error.contains("i64") && error.contains("floating-point"), "{error}");
    // The second of two files cannot be begun: the first does not take its place either.
    let options = SaveOptions { max_shard_size: 4000, ..Default::default() };
    let count = {
        let other = Scratch::new();
        model.save_pretrained_with(&other.0, &options).unwrap();
        listing(&other).len() - 1
    };
    let blocked = scratch.0.join(format!("model-00002-of-{count:05}.safetensors.partial"));
    std::fs::create_dir(&blocked).unwrap();
    model.save_pretrained_with(&scratch.0, &options).unwrap_err();
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(listing(&scratch), ["model.safetensors"]);
    assert_eq!((first(&scratch), std::fs::read(scratch.0.join("config.json")).unwrap()), before);
}

#[test]
fn a_program_of_scores_is_in_no_file() {
    let (scratch, model) = (Scratch::new(), decoder("llama"));
    set_scores(&model, |_| learned_scores(&init(), model.config().heads)).unwrap();
    let error = model.save_pretrained(&scratch.0).unwrap_err().to_string();
    assert!(error.contains("layers.0.self_attn") && error.contains("program of scores"), "{error}");
    attention_slots(&model).iter().for_each(|(_, slot)| slot.set_scores(None));
    model.save_pretrained(&scratch.0).unwrap();
    assert_eq!(first(&scratch), decoder("llama").parameters()[0].value().unwrap().to_bytes().unwrap());
}

/// Adapters know the place of a token, and attend to nothing: they get no program.
#[test]
fn adapters_have_no_programs_of_scores() {
    let model = decoder("llama");
    let before = attention_slots(&model).len();
    let lora = models::Lora::new(
        &model,
        &init(),
        models::LoraConfig { target_modules: models::LoraTargets::AllLinear, ..Default::default() },
    )
    .unwrap();
    assert_eq!(attention_slots(&model).len(), before);
    set_scores(&model, |_| learned_scores(&init(), model.config().heads)).unwrap();
    let learned = nn::ModuleExt::named_parameters(&model).into_iter().filter(|(name, _)| name.contains("scores."));
    // A slope and a cap for each layer.
    assert_eq!(learned.count(), 2 * before);
    drop(lora);
}
