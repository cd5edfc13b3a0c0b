//! Linear layers: a transposed weight, and adapters in their place.

use autograd::Var;
use nn::*;
use numcore::{
    DType, Result, Tensor,
    ops::{PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

use crate::{common::cpu, init, same, uniform};

#[test]
fn a_transposed_weight_computes_the_same() {
    let (linear, x) = (Linear::new(&init(), 5, 3).unwrap(), uniform(&[2, 4, 5], 3));
    let transposed = TransposedLinear::new(&init(), 5, 3).unwrap();
    transposed.weight.set(linear.weight.value().unwrap().t().unwrap().contiguous().unwrap()).unwrap();
    transposed.bias.as_ref().unwrap().set(linear.bias.as_ref().unwrap().value().unwrap()).unwrap();
    same(&transposed.forward(&x).unwrap(), &linear.forward(&x).unwrap());
    assert_eq!(transposed.weight.shape().dims(), [5, 3]);
    assert!(TransposedLinear::new(&init(), 5, 3).unwrap().without_bias().bias.is_none());
}

/// An adapter that doubles the output.
#[derive(Module)]
#[module(crate = "::nn")]
struct Doubled<R: numcore::Runtime> {
    scale: Param<R>,
}

impl<R: numcore::Runtime> Adapter<R> for Doubled<R> {
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        layer.plain(x)?.mul(&self.scale.var())
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn an_adapter_stands_in_for_a_layer_of_any_model() {
    let config = GptConfig { vocab: 5, context: 4, layers: 2, heads: 1, width: 4, ..Default::default() };
    let model = Gpt::new(&init(), config).unwrap();
    let names = |model: &Gpt<Cpu>| model.named_parameters().into_iter().map(|(n, _)| n).collect::<Vec<_>>();
    let (before, mut slots) = (names(&model), Vec::new());
    walk(&model, |name, entry| {
        if let ModuleEntry::Adapter(slot) = entry {
            slots.push((name.to_string(), slot.clone()));
        }
    });
    assert_eq!(slots.len(), 9);
    let slot = slots.iter().find(|(name, _)| name == "blocks.1.fc2").unwrap().1.clone();
    let scale = Param::new(Tensor::full(&cpu(), [1], DType::F32, 2.0).unwrap()).unwrap();
    let fc2 = &model.blocks[1].fc2;
    let (x, residual) = (uniform(&[1, 3, 16], 3), uniform(&[1, 3, 4], 8));
    let (plain, onto) = (fc2.forward(&x).unwrap(), fc2.forward_onto(&x, &residual).unwrap());
    assert!(slot.replace(Some(std::sync::Arc::new(Doubled { scale }))).is_none());
    same(&fc2.forward(&x).unwrap(), &plain.mul(2.0).unwrap());
    same(&fc2.forward_onto(&x, &residual).unwrap(), &onto.add(&plain).unwrap());
    let added: Vec<String> = names(&model).into_iter().filter(|n| !before.contains(n)).collect();
    assert_eq!(added, ["blocks.1.fc2.scale"]);
    assert!(slot.replace(None).unwrap().as_any().is::<Doubled<Cpu>>());
    assert_eq!(names(&model), before);
}
