//! Gradients of leaves that are computed while another gradient is under way.

use std::sync::{Arc, Mutex};

use crate::common::{constant, cpu, grad_of, leaf, of, run_checkpointed, values};
use autograd::{
    ArrivingGradient, Backward, BackwardHook, Function, Gradients, Leaf, LeafGrad, Var, apply_function,
    backward_with_hooks, differentiable_grad,
};
use numcore::{
    Result, Tensor,
    ops::{Backprop, Bits, MatmulOps, PointwiseOps, ReduceOps, Saves},
};
use runtime_cpu::Cpu;

type Events = Arc<Mutex<Vec<String>>>;

/// The value itself; its gradient is sent, if `sends`, and twice as large when it arrives.
struct Twice {
    events: Events,
    sends: bool,
}

impl Function<Cpu> for Twice {
    fn name(&self) -> &'static str {
        "twice"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].clone()])
    }
    fn saves(&self) -> Saves {
        Saves { inputs: Bits::NONE, outputs: Bits::NONE }
    }
    fn sends_gradient(&self) -> bool {
        self.sends
    }
    fn send_gradient(&self, upstream: Tensor<Cpu>) -> Result<ArrivingGradient<Cpu>> {
        self.events.lock().unwrap().push("sent".into());
        let events = self.events.clone();
        Ok(Box::new(move || {
            events.lock().unwrap().push("arrived".into());
            upstream.mul(2.0)
        }))
    }
    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        let upstream = cx.grad()?;
        cx.give_value(0, &upstream.mul(2.0)?)
    }
}

/// Notes when gradients are final.
struct Noted {
    events: Events,
    gradients: Gradients<Cpu>,
}

impl BackwardHook<Cpu> for Noted {
    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<Cpu>>, grad: LeafGrad<Cpu>) -> Result<()> {
        self.events.lock().unwrap().push(leaf.name().to_string());
        self.gradients.on_leaf_grad_ready(leaf, grad)
    }
}

struct Model {
    x: Var<Cpu>,
    weights: Vec<Var<Cpu>>,
    events: Events,
    sends: bool,
}

impl Model {
    fn new(sends: bool) -> Self {
        let rt = cpu();
        let numbers = |n: usize, s: f64| (0..n).map(|i| ((i * 13 % 17) as f64 / 17.0 - 0.5) * s).collect::<Vec<_>>();
        let x = leaf(&rt, "x", [3, 4], &numbers(12, 1.0));
        let weights = vec![
            leaf(&rt, "first", [4, 4], &numbers(16, 1.0)),
            leaf(&rt, "q", [4, 4], &numbers(16, 0.9)),
            leaf(&rt, "k", [4, 4], &numbers(16, 0.8)),
            leaf(&rt, "bias", [4], &numbers(4, 0.7)),
            leaf(&rt, "last", [4, 4], &numbers(16, 0.6)),
        ];
        Model { x, weights, events: Events::default(), sends }
    }

    fn twice(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        let function = Twice { events: self.events.clone(), sends: self.sends };
        Ok(apply_function(Arc::new(function), &[x])?.remove(0))
    }

    /// A loss of two layers of one input, and of a weight, `first`, that is read before, between and after them.
    fn loss(&self) -> Result<Var<Cpu>> {
        let [first, q, k, bias, last] = &self.weights[..] else { unreachable!("five weights") };
        let h = self.twice(&self.x.linear(first, None)?.tanh()?)?;
        let between = first.mul(first)?;
        let y = h.linear(q, Some(bias))?.mul(&h.linear(k, None)?)?.linear(&between, None)?.linear(first, None)?;
        self.twice(&y)?.linear(last, None)?.square()?.sum_all()
    }

    /// A loss in which `q` is read before its layer, between that and its sender, and after: three gradients, whose
    /// order counts.
    fn loss_of_shared(&self) -> Result<Var<Cpu>> {
        let [first, q, k, bias, last] = &self.weights[..] else { unreachable!("five weights") };
        let h = self.twice(&self.x.linear(first, None)?.tanh()?)?;
        let between = q.mul(k)?;
        let y = h.linear(q, Some(bias))?.linear(&between, None)?.linear(q, None)?;
        y.linear(last, None)?.square()?.sum_all()
    }

    fn gradients(&self, gradients: &Gradients<Cpu>) -> Vec<Vec<f64>> {
        std::iter::once(&self.x).chain(&self.weights).map(|v| grad_of(gradients, v)).collect()
    }

    /// The gradients of a backward pass, and what happened in which order.
    fn backward(&self, loss: &Var<Cpu>) -> (Vec<Vec<f64>>, Vec<String>) {
        let mut noted = Noted { events: self.events.clone(), gradients: Gradients::new() };
        backward_with_hooks(loss, &mut noted).unwrap();
        (self.gradients(&noted.gradients), std::mem::take(&mut *self.events.lock().unwrap()))
    }
}

#[test]
fn weight_gradients_are_computed_while_the_gradient_travels() {
    let model = Model::new(true);
    let (_, events) = model.backward(&model.loss().unwrap());
    assert_eq!(
        events,
        ["sent", "last", "arrived", "sent", "k", "bias", "q", "arrived", "x", "first"],
        "all that reads what was sent comes between"
    );
}

#[test]
fn no_bit_of_a_gradient_changes() {
    let (sending, plain) = (Model::new(true), Model::new(false));
    let (a, _) = sending.backward(&sending.loss().unwrap());
    let (b, events) = plain.backward(&plain.loss().unwrap());
    assert_eq!(a, b);
    assert!(!events.contains(&"sent".to_string()));
    let (a, events) = sending.backward(&sending.loss_of_shared().unwrap());
    let (b, _) = plain.backward(&plain.loss_of_shared().unwrap());
    assert_eq!(a, b, "gradients of one leaf are added in one order");
    assert_eq!(events, ["last", "bias", "q", "k", "sent", "arrived", "x", "first"]);
}

#[test]
fn deferred_weights_and_recorded_gradients_are_those_of_a_plain_pass() {
    let (model, plain) = (Model::new(true), Model::new(false));
    let split = |model: &Model| {
        let mut noted = Noted { events: model.events.clone(), gradients: Gradients::new() };
        let one = constant(&cpu(), [], &[1.0]);
        let backward = Backward::from(&model.loss().unwrap(), &one).unwrap();
        let deferred = backward.inputs_only(&[&model.x], &mut noted).unwrap();
        let events = std::mem::take(&mut *model.events.lock().unwrap());
        deferred.run(&mut noted).unwrap();
        model.events.lock().unwrap().clear();
        (model.gradients(&noted.gradients), events)
    };
    let ((a, events), (b, _)) = (split(&model), split(&plain));
    assert_eq!(a, b);
    assert_eq!(events, ["sent", "arrived", "sent", "arrived", "x"], "there is nothing to compute meanwhile");
    // Gradients that are differentiated again are computed as a graph.
    let all: Vec<&Var<Cpu>> = std::iter::once(&model.x).chain(&model.weights).collect();
    let graph = differentiable_grad(&[&model.loss().unwrap()], &all).unwrap();
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * b.abs().max(1.0);
    for (found, want) in graph.iter().zip(&b) {
        assert!(values(found.as_ref().unwrap()).into_iter().zip(want).all(|(a, &b)| close(a, b)));
    }
    assert!(model.events.lock().unwrap().is_empty());
}

#[test]
fn a_checkpointed_segment_sends_as_well() {
    let (model, plain) = (Model::new(true), Model::new(false));
    let segment = |model: &Model| {
        let (events, sends, q) = (model.events.clone(), model.sends, model.weights[1].clone());
        let out = run_checkpointed(&[&model.x], move |x| {
            let h = apply_function(Arc::new(Twice { events: events.clone(), sends }), &[&x[0]])?.remove(0);
            Ok(vec![h.linear(&q, None)?])
        });
        out.unwrap().remove(0).square().unwrap().sum_all().unwrap()
    };
    let run = |model: &Model| {
        let mut noted = Noted { events: model.events.clone(), gradients: Gradients::new() };
        backward_with_hooks(&segment(model), &mut noted).unwrap();
        let of = |v: &Var<Cpu>| noted.gradients.get(&of(v)).unwrap().to_f64s().unwrap();
        ([of(&model.x), of(&model.weights[1])], model.events.lock().unwrap().clone())
    };
    let ((a, events), (b, _)) = (run(&model), run(&plain));
    assert_eq!(a, b);
    assert_eq!(events[..3], ["sent", "q", "arrived"]);
}

/// A value that two layers read, with others between them. The postponed calls of the later layer do not wait for the
/// earlier one.
#[test]
fn a_sender_that_is_far_below_is_not_waited_for() {
    let run = |between: usize, sends: bool| {
        let model = Model::new(sends);
        let [first, q, k, bias, last] = &model.weights[..] else { unreachable!("five weights") };
        let h = model.twice(&model.x.linear(first, None).unwrap().tanh().unwrap()).unwrap();
        let mut y = h.linear(q, Some(bias)).unwrap();
        for _ in 0..between {
            y = y.tanh().unwrap();
        }
        let y = y.linear(last, None).unwrap().mul(&h.linear(k, None).unwrap()).unwrap();
        model.backward(&y.square().unwrap().sum_all().unwrap())
    };
    let (near, far) = (run(3, true), run(40, true));
    assert_eq!(near.1, ["last", "sent", "k", "bias", "q", "arrived", "x", "first"]);
    assert_eq!(far.1, ["last", "k", "sent", "bias", "q", "arrived", "x", "first"]);
    assert_eq!(near.0, run(3, false).0);
    assert_eq!(far.0, run(40, false).0);
}

/// A weight that a reader of a sender, a checkpointed segment before that and a layer after both use: three gradients,
/// whose order counts. The segment's input is a leaf that waits as well, or one that does not.
#[test]
fn a_segment_adds_to_what_waits() {
    let run = |sends: bool, waits: bool| {
        let model = Model::new(sends);
        let [first, q, k, bias, last] = &model.weights[..] else { unreachable!("five weights") };
        let h = model.twice(&model.x.linear(first, None).unwrap().tanh().unwrap()).unwrap();
        let own = q.clone();
        let input = if waits { k } else { first };
        let twice = move |x: &[Var<Cpu>]| Ok(vec![x[0].linear(&own, None)?.linear(&own, None)?]);
        let segment = run_checkpointed(&[input], twice).unwrap().remove(0);
        let y =
            h.linear(q, Some(bias)).unwrap().add(&h.linear(k, None).unwrap()).unwrap().linear(&segment, None).unwrap();
        let y = y.linear(q, None).unwrap().linear(last, None).unwrap();
        model.backward(&y.square().unwrap().sum_all().unwrap()).0
    };
    for waits in [false, true] {
        assert_eq!(run(true, waits), run(false, waits), "{waits}");
    }
}
