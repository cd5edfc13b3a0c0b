//! Observed op calls.

use autograd::{Var, next_seed, observe_ops};
use numcore::{DType, NullRuntime, Result, Tensor, fused::NnOps, ops::PointwiseOps};

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
