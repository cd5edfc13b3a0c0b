//! Classifiers of images with convolutions against transformers: logits, gradients, running statistics, files.

use autograd::Var;
use models::{ConvNext, ConvNextConfig, Pretrained, ResNet};
use nn::{Forward, ModuleExt, loss::cross_entropy};
use numcore::{DType, Tensor, ops::PointwiseOps};
use runtime_cpu::Cpu;
use serde_json::json;

use crate::common::*;

const RESNETS: [&str; 3] = ["resnet_basic", "resnet_bottleneck", "resnet_50"];

fn load<M: Pretrained<Cpu>>(name: &str) -> M {
    M::from_pretrained(reference(name), &init()).unwrap()
}

/// Compares a model with its reference: in evaluation, and then in training.
fn check<M: Pretrained<Cpu> + Forward<Cpu>>(name: &str) {
    let due = Reference::read(name);
    let (model, wide) = (load::<M>(name), M::from_pretrained(reference(name), &init().dtype(DType::F64)).unwrap());
    let logits = |model: &M, pixels: &Var<Cpu>| model.forward(pixels).unwrap();
    let (pixels, wider) = (due.var("pixels"), Var::new(due.tensor("pixels").to_dtype(DType::F64).unwrap()));
    model.eval();
    wide.eval();
    close(name, &due.tensor("logits"), &logits(&wide, &wider).value().unwrap(), 2e-5);
    close(name, &logits(&model, &pixels).value().unwrap(), &due.tensor("logits"), 2e-5);
    model.train();
    let logits = logits(&model, &pixels);
    close(name, &logits.value().unwrap(), &due.tensor("train_logits"), 2e-5);
    let loss = cross_entropy(&logits, &due.var("target")).unwrap();
    check_grads(&model, &loss, &due, |theirs| (model.table().ours(theirs).unwrap().name, false));
    for (name, buffer) in model.named_buffers() {
        let theirs = model.table().theirs(&name).unwrap().name;
        close(&name, &buffer.value(), &due.tensor(&format!("after/{theirs}")), 1e-6);
    }
}

#[test]
fn resnet_is_that_of_transformers_in_both_modes() {
    RESNETS.into_iter().for_each(check::<ResNet<Cpu>>);
}

#[test]
fn convnext_is_that_of_transformers() {
    check::<ConvNext<Cpu>>("convnext");
}

fn check_saving<M: Pretrained<Cpu>>(name: &str) {
    let scratch = Scratch::new();
    load::<M>(name).save_pretrained(&scratch.0).unwrap();
    same_tensors(&weight_files(&reference(name)), &weight_files(&scratch.0));
    M::from_pretrained(&scratch.0, &init()).unwrap();
}

#[test]
fn saving_what_was_loaded_gives_the_same_bits() {
    RESNETS.into_iter().for_each(check_saving::<ResNet<Cpu>>);
    check_saving::<ConvNext<Cpu>>("convnext");
}

/// A copy of a model has its running statistics, and a lazy model reads them.
#[test]
fn running_statistics_go_with_the_model() {
    let due = Reference::read("resnet_50");
    let lazy = ResNet::from_pretrained(reference("resnet_50"), &init().lazily()).unwrap();
    let copy = models::gathered(&lazy).unwrap();
    for model in [lazy, copy] {
        model.eval();
        let logits = model.forward(&due.var("pixels")).unwrap();
        close("lazy", &logits.value().unwrap(), &due.tensor("logits"), 2e-5);
    }
    let folder = Scratch::copy_of("resnet_50");
    let path = folder.0.join("model.safetensors");
    let mut tensors = numcore::safetensors::load(&path, &cpu()).unwrap();
    tensors.retain(|(name, _)| !name.ends_with("embedder.normalization.running_var"));
    numcore::safetensors::save(&path, &tensors, &Default::default()).unwrap();
    let error = ResNet::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string();
    let due = "1 missing: stem.norm.running_var (in files resnet.embedder.embedder.normalization.running_var)";
    assert!(error.contains(due), "{error}");
}

fn error<M: Pretrained<Cpu>>(name: &str, field: &str, value: serde_json::Value) -> String {
    let folder = Scratch::copy_of(name).with_config(|fields| drop(fields.insert(field.into(), value)));
    M::from_pretrained(&folder.0, &init()).map(drop).unwrap_err().to_string()
}

#[test]
fn what_is_no_such_model_is_an_error() {
    for (field, value, due) in [
        ("layer_type", json!("wide"), "`layer_type` is `wide`; basic and bottleneck are known"),
        ("depths", json!([1]), "`depths` are [1] for stages of [8, 12] channels"),
        ("depths", json!([0, 1]), "each stage needs 1 to 1000 layers"),
        ("hidden_sizes", json!([8, 16]), "unfit"),
        ("groups", json!(2), "`groups`"),
        ("model_type", json!("convnext"), "`convnext`, not `resnet`"),
    ] {
        let error = error::<ResNet<Cpu>>("resnet_basic", field, value);
        assert!(error.contains(due), "{error}");
    }
    for (field, value, due) in [
        ("num_stages", json!(3), "`num_stages` is 3, and `depths` has 2"),
        ("num_hidden_layers", json!(3), "`num_hidden_layers` is 3, and `num_stages` says 2"),
        ("patch_size", json!(0), "`patch_size` is 0"),
        ("patch_size", json!([4, 2]), "`patch_size`"),
        ("use_grn", json!(true), "`use_grn`"),
        ("layer_scale_init_value", json!(0.0), "3 unexpected"),
    ] {
        let error = error::<ConvNext<Cpu>>("convnext", field, value);
        assert!(error.contains(due), "{error}");
    }
    let image = Var::new(Tensor::zeros(&cpu(), [1, 4, 20, 12], DType::F32).unwrap());
    let wrong = load::<ResNet<Cpu>>("resnet_50").forward(&image).map(drop).unwrap_err().to_string();
    assert!(wrong.contains("images must be [B, 3, H, W]"), "{wrong}");
    let config = ConvNextConfig { layer_scale: -1.0, ..load::<ConvNext<Cpu>>("convnext").config().clone() };
    let wrong = ConvNext::new(&init(), config).map(drop).unwrap_err().to_string();
    assert!(wrong.contains("cannot be so"), "{wrong}");
}
