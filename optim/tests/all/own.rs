//! The optimizer's own gradients: `backward`, then `step`.

use autograd::{Var, backward_with_hooks};
use nn::{Forward, Init, Linear, ModuleExt, loss};
use numcore::{DType, ErrorKind, Result, Tensor, ops::PointwiseOps};
use optim::{
    AdamW, AdamWConfig, Combined, LossScaler, Muon, MuonConfig, NormOrder, Optimizer, OptimizerCore, Sgd, SgdConfig,
    clip_grad_norm,
};
use runtime_cpu::Cpu;

struct Task {
    cpu: Cpu,
    model: Linear<Cpu>,
}

impl Task {
    fn new() -> Task {
        let cpu = Cpu::with_threads(1);
        let model = Linear::new(&Init::new(&cpu, 3), 4, 2).unwrap();
        Task { cpu, model }
    }

    fn loss(&self, seed: u64) -> Result<Var<Cpu>> {
        let draw = |n: usize, seed| Tensor::normal(&self.cpu, [5, n], DType::F32, 0.0, 1.0, seed).map(Var::new);
        loss::mse(&self.model.forward(&draw(4, seed)?)?, &draw(2, seed + 100)?, loss::Reduction::Mean)
    }

    fn values(&self) -> Vec<Vec<f32>> {
        self.model.state_dict().unwrap().iter().map(|(_, t)| t.to_vec::<f32>().unwrap()).collect()
    }
}

fn adamw(task: &Task) -> AdamW<Cpu> {
    AdamW::new(&task.model, AdamWConfig { lr: 0.1, ..Default::default() }).unwrap()
}

/// Micro-batches accumulate until the step, and the next backward pass overwrites: bit for bit what is computed by
/// hand.
#[test]
fn steps_are_those_by_hand() {
    let (own, by_hand) = (Task::new(), Task::new());
    let (mut a, mut b) = (adamw(&own), adamw(&by_hand));
    let mut gradients = b.alloc_gradients().unwrap();
    for step in 0..3 {
        gradients.zero();
        for micro in 0..2 {
            a.backward(&own.loss(2 * step + micro).unwrap()).unwrap();
            backward_with_hooks(&by_hand.loss(2 * step + micro).unwrap(), &mut gradients).unwrap();
        }
        let norm = clip_grad_norm(a.gradients().unwrap(), 0.5, NormOrder::L2).unwrap().item().unwrap();
        assert_eq!(norm, clip_grad_norm(&mut gradients, 0.5, NormOrder::L2).unwrap().item().unwrap());
        a.step().unwrap();
        b.step_from(&gradients).unwrap();
        assert_eq!(own.values(), by_hand.values());
    }
    assert_eq!(a.steps(), 3);
}

#[test]
fn a_step_needs_gradients_of_its_own() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    let before = task.values();
    let refused = |optimizer: &mut AdamW<Cpu>| optimizer.step().unwrap_err().to_string();
    assert!(refused(&mut optimizer).contains("call `backward` first"));
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    optimizer.zero_grad();
    assert!(refused(&mut optimizer).contains("call `backward` first"));
    assert_eq!(task.values(), before);
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    optimizer.step().unwrap();
    assert!(refused(&mut optimizer).contains("call `backward` first"), "one step for each backward pass");
}

/// Gradients accumulated before it are discarded too: an interrupted backward pass has written some gradients and not
/// others.
#[test]
fn a_failed_backward_pass_leaves_nothing() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    let many = task.model.forward(&Var::new(Tensor::ones(&task.cpu, [5, 4], DType::F32).unwrap())).unwrap();
    assert!(optimizer.backward(&many).is_err(), "ten elements are no loss");
    assert!(optimizer.step().is_err());
    let weight = task.model.parameters()[0].leaf().clone();
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    let alone = optimizer.gradients().unwrap().get(&weight).unwrap().unwrap().to_vec::<f32>().unwrap();
    let expected = autograd::backward(&task.loss(0).unwrap()).unwrap();
    assert_eq!(alone, expected.get(&weight).unwrap().to_vec::<f32>().unwrap());
}

#[test]
fn an_update_that_cannot_begin_keeps_the_gradients() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    let held = task.model.parameters()[0].value().unwrap();
    assert!(matches!(optimizer.step().unwrap_err().kind(), ErrorKind::Shared { .. }));
    drop(held);
    optimizer.step().unwrap();
    assert_eq!(optimizer.steps(), 1);
}

#[test]
fn gradients_can_be_read_until_the_next_backward_pass() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    let weight = task.model.parameters()[0].leaf().clone();
    assert!(optimizer.gradients().unwrap().get(&weight).unwrap().is_none());
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    let read = |o: &mut AdamW<Cpu>| o.gradients().unwrap().get(&weight).unwrap().unwrap().to_vec::<f32>().unwrap();
    let before = read(&mut optimizer);
    optimizer.step().unwrap();
    assert_eq!(read(&mut optimizer), before);
}

/// Frozen parameters are left out; buffers fit after parameters moved and after a group was added.
#[test]
fn what_is_trained_may_change() {
    let task = Task::new();
    task.model.freeze_where(|name| name == "bias");
    let mut optimizer = Sgd::new(&task.model, SgdConfig { lr: 0.1, ..Default::default() }).unwrap();
    optimizer.backward(&task.loss(0).unwrap()).unwrap();
    optimizer.step().unwrap();
    let (weight, bias) = (task.values()[0].clone(), task.values()[1].clone());
    task.model.unfreeze();
    let mut optimizer = optimizer.group([task.model.parameters()[1].leaf()], |_| {}).unwrap();
    optimizer.backward(&task.loss(1).unwrap()).unwrap();
    optimizer.reorder(&|leaf| leaf.name().len()).unwrap();
    assert!(optimizer.step().is_err(), "gradients of another layout are gone");
    optimizer.backward(&task.loss(1).unwrap()).unwrap();
    optimizer.step().unwrap();
    assert!(task.values()[0] != weight && task.values()[1] != bias);
}

#[test]
fn combined_optimizers_and_gradients_by_leaf() {
    let (own, by_leaf) = (Task::new(), Task::new());
    let both = |task: &Task| -> Combined<Cpu> {
        let [weight, bias] = &task.model.parameters()[..] else { panic!("two parameters") };
        let muon = Muon::over(MuonConfig::default(), [weight.leaf()]).unwrap();
        Combined::new(vec![Box::new(muon), Box::new(Sgd::over(SgdConfig::default(), [bias.leaf()]).unwrap())]).unwrap()
    };
    let (mut a, mut b) = (both(&own), both(&by_leaf));
    for seed in 0..2 {
        a.backward(&own.loss(seed).unwrap()).unwrap();
        a.step().unwrap();
        b.step_with(&autograd::backward(&by_leaf.loss(seed).unwrap()).unwrap()).unwrap();
    }
    assert_eq!(own.values(), by_leaf.values());
}

#[test]
fn an_overflow_drops_the_gradients() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    let mut scaler = LossScaler::starting_at(4.0).unwrap();
    let before = task.values();
    let overflow = task.loss(0).unwrap().mul(f64::INFINITY).unwrap();
    optimizer.backward(&overflow).unwrap();
    assert!(!scaler.step(&mut optimizer).unwrap());
    assert_eq!((task.values(), scaler.factor()), (before, 2.0));
    assert!(optimizer.step().is_err(), "they are spent");
    optimizer.backward(&scaler.scale(&task.loss(0).unwrap()).unwrap()).unwrap();
    assert!(scaler.step(&mut optimizer).unwrap());
    let plain = Task::new();
    let mut other = adamw(&plain);
    other.backward(&plain.loss(0).unwrap()).unwrap();
    other.step().unwrap();
    assert_eq!(task.values(), plain.values(), "a power of two changes no bit");
}

#[test]
fn an_error_says_at_which_line_of_the_callers_it_was() {
    let task = Task::new();
    let mut optimizer = adamw(&task);
    let several = Var::leaf("x", Tensor::ones(&task.cpu, [2], DType::F32).unwrap()).unwrap();
    let freed = task.loss(0).unwrap();
    optimizer.backward(&freed).unwrap();
    let errors = [
        (line!(), optimizer.backward(&several).unwrap_err()),
        (line!(), optimizer.backward(&freed).unwrap_err()),
        (line!(), optimizer.step().unwrap_err()),
        (line!(), several.backward().map(drop).unwrap_err()),
    ];
    for (line, error) in errors {
        assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)), "{error}");
    }
}
