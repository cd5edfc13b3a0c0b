//! Observed op calls.

use autograd::{Var, next_seed, observe_ops, observe_outputs};
use numcore::{
    DType, NullRuntime, Result, Tensor,
    fused::NnOps,
    ops::{MatmulOps, PointwiseOps, ViewOp, ViewOps},
};

#[test]
fn calls_with_random_values_are_told() -> Result<()> {
    let x = Var::leaf("x", Tensor::zeros(&NullRuntime::new(), [3], DType::F32)?)?;
    // A seed from before does not count.
    next_seed();
    let run = || {
        let kept = x.exp()?.dropout(0.5, 3)?.exp()?;
        next_seed();
        kept.exp()?.exp()
    };
    let (result, seen) = observe_ops(run);
    result?;
    let draws: Vec<bool> = seen.iter().map(|call| call.draws).collect();
    assert_eq!(draws, [false, true, false, true, false]);
    Ok(())
}

#[test]
fn the_inputs_of_a_call_are_outputs_of_others_or_views_of_leaves() -> Result<()> {
    let rt = NullRuntime::new();
    let weight = Var::leaf("weight", Tensor::zeros(&rt, [5, 3], DType::F32)?)?;
    let x = Tensor::zeros(&rt, [2, 3], DType::F32)?;
    let (y, seen) = observe_outputs(|| Var::new(x.clone()).exp()?.matmul(&weight.t()?)?.exp());
    y?;
    let id = |x: &Tensor<NullRuntime>| (x.memory_id(), *x.layout());
    let [first, product, last] = &seen[..] else { panic!("{} calls", seen.len()) };
    assert_eq!(id(&first.inputs[0].value()?), id(&x));
    assert_eq!(id(&product.inputs[0].value()?), id(&first.outputs[0]));
    assert_eq!(id(&last.inputs[0].value()?), id(&product.outputs[0]));
    let view = product.inputs[1].leaf_view().unwrap();
    assert!(view.leaf().id() == weight.as_leaf().unwrap().id() && product.inputs[1].as_leaf().is_none());
    assert_eq!(view.views(), [ViewOp::Permute([1, 0].into_iter().collect())]);
    assert!(first.inputs[0].leaf_view().is_none());
    Ok(())
}
