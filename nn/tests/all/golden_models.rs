//! Whole models against PyTorch's first loss and gradients, loaded by PyTorch's names.

use crate::common::{Case, Goldens, T, close, cpu};
use autograd::Var;
use nn::*;
use runtime_cpu::Cpu;

fn check_model(case: &Case, goldens: &Goldens, model: &impl Forward<Cpu>) {
    let prefix = format!("{}/init/", case.id);
    let start = goldens.tensors.iter().filter_map(|(n, t)| Some((n.strip_prefix(&prefix)?.to_string(), t.clone())));
    model.load_state_dict(start.collect::<Vec<(String, T)>>()).unwrap();
    let logits = model.forward(&Var::new(case.get("x0"))).unwrap();
    let loss = loss::cross_entropy(&logits, &Var::new(case.get("y0"))).unwrap();
    let want = case.case["losses"][0].as_f64().unwrap();
    let got = loss.item().unwrap();
    assert!((got - want).abs() < 1e-5 * want, "{}: loss {got}, expected {want}", case.id);
    let gradients = loss.backward().unwrap();
    for (name, p) in model.named_parameters() {
        let grad = gradients.get(&p.leaf()).unwrap_or_else(|| panic!("no gradient of {name}"));
        close(&format!("{} {name}", case.id), grad, &case.get(&format!("grad0/{name}")), 2e-5);
    }
}

#[test]
fn mlp() {
    let rt = cpu();
    let (init, goldens) = (Init::new(&rt, 0), Goldens::read(&rt, "train"));
    let linear = |i, o| Linear::new(&init, i, o).unwrap();
    let model = Sequential::new().push(linear(8, 16)).push(Tanh).push(linear(16, 16)).push(Relu).push(linear(16, 3));
    check_model(&goldens.of("mlp")[0], &goldens, &model);
}

#[test]
fn cnn() {
    let rt = cpu();
    let (init, goldens) = (Init::new(&rt, 0), Goldens::read(&rt, "train"));
    let conv = |i, o| {
        let options = ConvOptions { padding: [1, 1], ..Default::default() };
        Conv2d::new(&init, i, o, [3, 3], options).unwrap()
    };
    let model = Sequential::new().push(conv(1, 4)).push(Relu).push(MaxPool2d::new(2));
    let model = model.push(conv(4, 8)).push(Relu).push(MaxPool2d::new(2)).push(Flatten::default());
    check_model(&goldens.of("cnn")[0], &goldens, &model.push(Linear::new(&init, 32, 5).unwrap()));
}

#[test]
fn gpt() {
    let rt = cpu();
    let goldens = Goldens::read(&rt, "train");
    let case = &goldens.of("gpt")[0];
    let config = GptConfig {
        vocab: case.count("vocab"),
        context: case.count("ctx"),
        layers: case.count("layers"),
        heads: case.count("heads"),
        width: case.count("d"),
        bias: false,
        ..Default::default()
    };
    let model = Gpt::new(&Init::new(&rt, 0), config).unwrap();
    check_model(case, &goldens, &model);
    // The loss without the logits of all tokens is the same.
    let (x, y) = (Var::new(case.get("x0")), Var::new(case.get("y0")));
    let loss = model.next_token_loss(&x, &y, &parallel::VocabularyLoss::default()).unwrap();
    let want = case.case["losses"][0].as_f64().unwrap();
    assert!((loss.item().unwrap() - want).abs() < 1e-5 * want);
    let gradients = loss.backward().unwrap();
    for (name, p) in model.named_parameters() {
        close(&name, gradients.get(&p.leaf()).unwrap(), &case.get(&format!("grad0/{name}")), 2e-5);
    }
}
