//! Modules whose op calls were written as graphs, read back.

#[path = "../../../models-export/tests/recorded/modules.rs"]
mod modules;

use autograd::Var;
use models_export::{OnnxOptions, save_onnx};
use models_import::OnnxModel;
use nn::{Forward, Linear, ModuleExt, Stage};
use numcore::{
    DType, Tensor,
    ops::{JoinOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, ViewOps, cat},
};

use self::modules::{Recorded, layers, references};
use crate::exported::models_common::{Reference, Scratch, close, cpu, decoder, init};

fn comes_back(all: Vec<Recorded>, tolerance: f64) {
    let folder = Scratch::new();
    for Recorded { name, module, inputs, forward, has_batch } in all {
        let path = folder.0.join(format!("{name}.onnx"));
        let named: Vec<_> = inputs.iter().map(|(name, x)| (*name, x)).collect();
        save_onnx(&module, &path, &named, &["y"], &forward, &OnnxOptions::default()).unwrap();
        let read = OnnxModel::load(&path, &cpu()).unwrap();
        read.eval();
        // Other values than those that were recorded: what depends on them must be in the graph.
        for other in [false, true] {
            let given = |x: &Tensor<_>| if other { x.flip(&[-1]).unwrap().contiguous().unwrap() } else { x.clone() };
            let inputs: Vec<_> = inputs.iter().map(|(_, x)| Var::new(given(x))).collect();
            let (got, due) = (read.forward_values(&inputs).unwrap(), forward(&inputs).unwrap());
            let tolerance = if due[0].dtype() == DType::F64 { 1e-12 } else { tolerance };
            close(name, &got[0].value().unwrap(), &due[0].value().unwrap(), tolerance);
        }
        if !has_batch {
            continue;
        }
        let options = OnnxOptions { any_batch: true, ..Default::default() };
        save_onnx(&module, &path, &named, &["y"], &forward, &options).unwrap();
        let read = OnnxModel::load(&path, &cpu()).unwrap();
        read.eval();
        for count in [1, 5] {
            let given = |x: &Tensor<_>| {
                let x = cat(&[x; 5], 0).unwrap();
                Var::new(x.narrow(0, 0, count).unwrap().contiguous().unwrap())
            };
            let inputs: Vec<_> = inputs.iter().map(|(_, x)| given(x)).collect();
            let (got, due) = (read.forward_values(&inputs).unwrap(), forward(&inputs).unwrap());
            let tolerance = if due[0].dtype() == DType::F64 { 1e-12 } else { tolerance };
            close(name, &got[0].value().unwrap(), &due[0].value().unwrap(), tolerance);
        }
    }
}

fn options() -> OnnxOptions {
    OnnxOptions::default()
}

#[test]
fn layers_come_back_with_their_outputs() {
    comes_back(layers(), 1e-5);
}

#[test]
fn reference_models_come_back_with_their_outputs() {
    comes_back(references(), 2e-5);
}

#[test]
fn a_recorded_module_keeps_the_names_of_its_parameters_and_trains() {
    let folder = Scratch::new();
    let path = folder.0.join("model.onnx");
    let all = layers();
    let gpt = all.iter().find(|case| case.name == "gpt").unwrap();
    let named: Vec<_> = gpt.inputs.iter().map(|(name, x)| (*name, x)).collect();
    save_onnx(&gpt.module, &path, &named, &["logits"], &gpt.forward, &OnnxOptions::default()).unwrap();
    let read = OnnxModel::load(&path, &cpu()).unwrap();
    let names = |all: Vec<(String, nn::Param<_>)>| {
        let mut names: Vec<String> = all.into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    };
    // The tied head is one parameter, as in the module.
    assert_eq!(names(read.named_parameters()), names(gpt.module.named_parameters()));
    let loss = |y: Vec<Var<_>>| y[0].square().unwrap().mean_all().unwrap();
    let inputs: Vec<_> = gpt.inputs.iter().map(|(_, x)| Var::new(x.clone())).collect();
    let got = loss(read.forward_values(&inputs).unwrap()).backward().unwrap();
    let due = loss((gpt.forward)(&inputs).unwrap()).backward().unwrap();
    for (name, own) in gpt.module.named_parameters() {
        let theirs = read.named_parameters().into_iter().find(|(other, _)| *other == name).unwrap().1;
        close(&name, got.get(&theirs.leaf()).unwrap(), due.get(&own.leaf()).unwrap(), 1e-5);
    }
}

#[test]
fn what_has_no_graph_is_refused_before_anything_is_written() {
    let folder = Scratch::new();
    let path = folder.0.join("model.onnx");
    let model = Linear::new(&init(), 2, 3).unwrap();
    let x = Tensor::arange(&cpu(), 0.0, 1.0, 8, DType::F32).unwrap().reshape([4, 2]).unwrap();
    let save = |names: [&str; 2], f: &dyn Fn(&Var<_>) -> numcore::Result<Var<_>>| {
        let saved = save_onnx(&model, &path, &[(names[0], &x)], &[names[1]], |x| Ok(vec![f(&x[0])?]), &options());
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
        saved.unwrap_err().to_string()
    };
    let error = save(["x", "y"], &|x| model.forward(x)?.cumprod(1));
    assert!(error.contains("`cumprod`") && error.contains("opset 17"), "{error}");
    let error =
        save(["x", "y"], &|x| model.forward(&x.to_dtype(DType::F64)?.to_dtype(DType::BF16)?.to_dtype(DType::F32)?));
    assert!(error.contains("bf16"), "{error}");
    let error = save(["x", "y"], &|x| Ok(Var::new(model.forward(x)?.value()?.t()?)));
    assert!(error.contains("not made by an op call"), "{error}");
    let error = save(["x", "y"], &|x| model.forward(x)?.mul(x.value()?.to_vec::<f32>()?[1] as f64));
    assert!(error.contains("reads values by other means"), "{error}");
    // The order of experts' tokens is read on the host.
    let (experts, ids) = (decoder("mixtral"), Reference::read("mixtral").tensor("ids"));
    experts.eval();
    let saved = save_onnx(&experts, &path, &[("ids", &ids)], &["y"], |x| Ok(vec![experts.forward(&x[0])?]), &options());
    assert!(saved.unwrap_err().to_string().contains("differs between two forward passes"));
    // A batch of which a size is another function than a multiple.
    let any = OnnxOptions { any_batch: true, ..options() };
    let saved = save_onnx(&model, &path, &[("x", &x)], &["y"], |x| Ok(vec![x[0].matmul(&x[0].t()?)?.tril(0)?]), &any);
    assert!(saved.unwrap_err().to_string().contains("no multiple of the batch"));
    for names in [["weight", "y"], ["x", "x"], ["", "y"]] {
        assert!(save(names, &|x| model.forward(x)).contains("another value has it"));
    }
}

#[test]
fn a_module_in_training_is_refused() {
    let cnn = layers().into_iter().find(|case| case.name == "cnn").unwrap();
    cnn.module.train();
    let named: Vec<_> = cnn.inputs.iter().map(|(name, x)| (*name, x)).collect();
    let path = std::env::temp_dir().join(format!("weftgrad-never-{}.onnx", std::process::id()));
    let error = save_onnx(&cnn.module, &path, &named, &["y"], &cnn.forward, &options()).unwrap_err().to_string();
    assert!(error.contains("`1` is in training: call `eval()`"), "{error}");
    assert!(!path.exists());
}
