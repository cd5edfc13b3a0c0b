//! Operators on tensors and variables: the methods of the same name.

use autograd::{Leaf, Var, backward};
use numcore::{DType, Result, Tensor, ops::PointwiseOps, ops::ReduceOps};
use runtime_cpu::Cpu;

fn pair() -> Result<(Tensor<Cpu>, Tensor<Cpu>)> {
    let cpu = Cpu::with_threads(1);
    Ok((Tensor::from_slice(&cpu, [3], &[1f32, -2.0, 4.0])?, Tensor::from_slice(&cpu, [3], &[2f32, 8.0, -0.5])?))
}

fn is(value: Result<Tensor<Cpu>>, expected: [f32; 3]) {
    assert_eq!(value.unwrap().to_vec::<f32>().unwrap(), expected);
}

#[test]
fn values_on_both_sides() -> Result<()> {
    let (a, b) = pair()?;
    is(&a + &b, [3.0, 6.0, 3.5]);
    is(&a - &b, [-1.0, -10.0, 4.5]);
    is(&a * &b, [2.0, -16.0, -2.0]);
    is(&a / &b, [0.5, -0.25, -8.0]);
    is(a.clone() + b.clone(), [3.0, 6.0, 3.5]);
    is(&a - b.clone(), [-1.0, -10.0, 4.5]);
    is(a.clone() - &b, [-1.0, -10.0, 4.5]);
    is(-&a, [-1.0, 2.0, -4.0]);
    is(-a, [-1.0, 2.0, -4.0]);
    Ok(())
}

#[test]
fn numbers_on_either_side() -> Result<()> {
    let (a, _) = pair()?;
    is(&a + 1.0, [2.0, -1.0, 5.0]);
    is(&a / 2.0, [0.5, -1.0, 2.0]);
    is(1.0 + &a, [2.0, -1.0, 5.0]);
    is(1.0 - &a, [0.0, 3.0, -3.0]);
    is(2.0 * &a, [2.0, -4.0, 8.0]);
    is(2.0 / a, [2.0, -1.0, 0.5]);
    Ok(())
}

/// The first error of a chain comes out of it.
#[test]
fn results_on_the_right() -> Result<()> {
    let (a, b) = pair()?;
    is(&a + &b * 2.0, [5.0, 14.0, 3.0]);
    is(a.clone() - &a * &b, [-1.0, 14.0, 6.0]);
    let short = Tensor::ones(a.runtime(), [2], DType::F32)?;
    let error = (&a + &a * &short).unwrap_err().to_string();
    assert!(error.contains("mul") && error.contains("[3]") && error.contains("[2]"), "{error}");
    assert!(error.contains("autograd/tests/all/operators.rs"), "{error}");
    Ok(())
}

#[test]
fn variables_are_recorded() -> Result<()> {
    let (a, b) = pair()?;
    let leaf = Leaf::new("a", a)?;
    let (a, b) = (leaf.var(), Var::new(b));
    let loss = (3.0 - (&a * &b)?)?.sum_all()?;
    let gradients = backward(&loss)?;
    is(Ok(gradients.get(&leaf).unwrap().clone()), [-2.0, -8.0, 0.5]);
    let inverse = backward(&(1.0 / &leaf.var())?.sum_all()?)?;
    is(Ok(inverse.get(&leaf).unwrap().clone()), [-1.0, -0.25, -0.0625]);
    assert_eq!(leaf.value()?.square()?.mean_all()?.item()?, 7.0);
    Ok(())
}
