//! Outputs, gradients and statistics of exported models, at other sizes than those of the export.

use autograd::{Gradients, manual_seed};
use models_import::OnnxModel;
use nn::{CountedRows, ModuleExt, set_counted_rows};
use numcore::ops::{PointwiseOps, ReduceOps, ViewOps, cat};
use runtime_cpu::Cpu;

use crate::common::*;

/// The gradients of the sum of the squares of the output.
fn gradients(y: &V) -> Gradients<Cpu> {
    y.square().unwrap().sum_all().unwrap().backward().unwrap()
}

/// Compares the gradients of all parameters that a reference has by name, and returns their number.
fn compare(model: &OnnxModel<Cpu>, gradients: &Gradients<Cpu>, values: &Values, under: &str) -> usize {
    let parameters = model.named_parameters();
    let own = |(name, due)| {
        let (_, parameter) = parameters.iter().find(|(own, _)| own == name)?;
        Some((name, gradients.get(&parameter.leaf()).unwrap_or_else(|| panic!("{name} has no gradient")), due))
    };
    values.under(under).filter_map(own).map(|(name, got, due)| close(name, got, due, 2e-5)).count()
}

#[test]
fn outputs_and_gradients_are_those_of_the_exporter() {
    // Exporters rename weights that they transpose, or arrange as gates.
    let named = [("mlp", 4), ("cnn", 9), ("block", 10), ("block_script", 14), ("lstm", 2), ("classifier", 3)];
    for (name, count) in named {
        let (model, values) = (model(name), Values::of(name));
        model.eval();
        let inputs = values.inputs();
        let y = output(&model, &inputs);
        close(name, &y.value().unwrap(), values.get("out.y"), 2e-5);
        let gradients = gradients(&y);
        assert_eq!(compare(&model, &gradients, &values, "grad."), count, "{name}");
        for (input, x) in inputs.iter().filter(|(_, x)| x.requires_grad()) {
            let due = values.get(&format!("grad.{input}"));
            close(input, gradients.get(x.as_leaf().unwrap()).unwrap(), due, 2e-5);
        }
        let trained = model.parameters().len();
        let with_gradient = model.parameters().iter().filter(|p| gradients.get(&p.leaf()).is_some()).count();
        assert_eq!(with_gradient, trained, "{name}: every parameter has a gradient");
    }
}

#[test]
fn batch_norms_train_and_keep_statistics() {
    let (model, values) = (model("cnn"), Values::of("cnn"));
    let y = output(&model, &values.inputs());
    close("y", &y.value().unwrap(), values.get("train.y"), 2e-5);
    assert_eq!(compare(&model, &gradients(&y), &values, "train.grad."), 9);
    let buffers = model.named_buffers();
    assert_eq!(buffers.len(), 4);
    for (name, buffer) in buffers {
        close(&name, &buffer.value(), values.get(&format!("train.{name}")), 2e-6);
    }
}

#[test]
fn rows_that_do_not_count_are_no_part_of_statistics() {
    let (model, values) = (model("cnn"), Values::of("cnn"));
    let (_, image) = values.inputs().remove(0);
    let padded = cat(&[&image, &image.mul(100.0).unwrap().narrow(0, 0, 2).unwrap()], 0).unwrap();
    let before = set_counted_rows(Some(CountedRows { count: 3, rows: 5 }));
    let y = output(&model, &[("image", padded)]);
    set_counted_rows(before);
    close("y", &y.narrow(0, 0, 3).unwrap().value().unwrap(), values.get("train.y"), 2e-5);
    for (name, buffer) in model.named_buffers() {
        close(&name, &buffer.value(), values.get(&format!("train.{name}")), 2e-6);
    }
}

#[test]
fn dropout_drops_in_training_alone() {
    let (model, values) = (model("mlp"), Values::of("mlp"));
    let of_seed = |seed| {
        manual_seed(seed);
        output(&model, &values.inputs()).value().unwrap().to_vec::<f32>().unwrap()
    };
    let (first, again, other) = (of_seed(1), of_seed(1), of_seed(2));
    assert_eq!(first, again);
    assert_ne!(first, other);
    model.eval();
    assert_eq!(of_seed(1), of_seed(2));
    assert_ne!(of_seed(1), first);
}
