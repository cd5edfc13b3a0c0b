//! Gradients as variables: of intermediates, and of gradients.

use std::sync::Arc;

use crate::common::{constant, cpu, grad_of, leaf, values};
use autograd::{Function, Var, apply_function, backward, differentiable_grad, grad};
use numcore::{
    ErrorKind, Result, Tensor,
    ops::{Backprop, Bits, MatmulOps, Outs, PointwiseOps, ReduceOps, Saves, ViewOps},
};
use runtime_cpu::Cpu;

fn first(grads: &[Option<Var<Cpu>>]) -> &Var<Cpu> {
    grads[0].as_ref().expect("a gradient")
}

#[test]
fn derivatives_of_a_power_up_to_the_fourth() {
    let rt = cpu();
    let x = leaf(&rt, "x", [3], &[1.0, 2.0, -0.5]);
    let mut y = x.pow(4.0).unwrap();
    for (factor, power) in [(4.0, 3), (12.0, 2), (24.0, 1), (24.0, 0)] {
        y = first(&differentiable_grad(&[&y], &[&x]).unwrap()).clone();
        let expected: Vec<f64> = values(&x).iter().map(|v| factor * v.powi(power)).collect();
        assert!(values(&y).iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{:?} {expected:?}", values(&y));
    }
}

#[test]
fn gradients_of_intermediates_and_of_leaves_in_one_call() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 2.0]);
    let middle = x.square().unwrap();
    let y = middle.mul(&x).unwrap().sum_all().unwrap();
    let unused = leaf(&rt, "unused", [2], &[0.0; 2]);
    let grads = grad(&[&y], &[&middle, &x, &unused, &y]).unwrap();
    assert_eq!(values(grads[0].as_ref().unwrap()), [1.0, 2.0]);
    assert_eq!(values(grads[1].as_ref().unwrap()), [3.0, 12.0]);
    assert!(grads[2].is_none());
    assert_eq!(values(grads[3].as_ref().unwrap()), [1.0]);
    assert!(!grads[1].as_ref().unwrap().requires_grad());
}

#[test]
fn an_intermediate_used_twice_has_the_sum() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[2.0]);
    let middle = x.exp().unwrap();
    let y = middle.square().unwrap().add(&middle.mul(3.0).unwrap()).unwrap();
    let grads = grad(&[&y], &[&middle]).unwrap();
    assert!((values(first(&grads))[0] - (2.0 * 2f64.exp() + 3.0)).abs() < 1e-12);
}

#[test]
fn several_outputs_add_up() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.0, 3.0]);
    let (a, b) = (x.square().unwrap(), x.mul(10.0).unwrap());
    assert_eq!(values(first(&grad(&[&a, &b], &[&x]).unwrap())), [12.0, 16.0]);
}

/// A penalty on the norm of a gradient: double backward into parameters, with the ordinary backward pass.
#[test]
fn a_gradient_penalty_reaches_the_weights() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, -1.0, 0.5]);
    let x = leaf(&rt, "x", [1, 2], &[0.3, -0.7]);
    let penalty = |w: &Var<Cpu>| {
        let y = x.matmul(w).unwrap().tanh().unwrap().sum_all().unwrap();
        let g = first(&differentiable_grad(&[&y], &[&x]).unwrap()).clone();
        g.square().unwrap().sum_all().unwrap()
    };
    let gradient = grad_of(&backward(&penalty(&w)).unwrap(), &w);
    for i in 0..4 {
        let at = |step: f64| {
            let mut moved = values(&w);
            moved[i] += step;
            penalty(&constant(&rt, [2, 2], &moved)).item().unwrap()
        };
        let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
        assert!((gradient[i] - numeric).abs() < 1e-8, "{i}: {} {numeric}", gradient[i]);
    }
}

#[test]
fn gradients_of_leaves_read_through_views_have_the_leafs_shape() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let part = w.t().unwrap().narrow(0, 1, 2).unwrap();
    let y = part.square().unwrap().sum_all().unwrap();
    let g = first(&differentiable_grad(&[&y], &[&w]).unwrap()).clone();
    assert_eq!((g.dims(), values(&g)), (vec![2, 3], vec![0.0, 4.0, 6.0, 0.0, 10.0, 12.0]));
    let gg = grad(&[&g.square().unwrap()], &[&w]).unwrap();
    assert_eq!(values(first(&gg)), [0.0, 16.0, 24.0, 0.0, 40.0, 48.0]);
}

/// The requested variable decides the shape: the gradient of a view differs from its leaf's.
#[test]
fn the_gradient_of_a_view_of_a_leaf_is_never_of_another_shape() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let seen = w.t().unwrap();
    let y = seen.square().unwrap().sum_all().unwrap();
    match grad(&[&y], &[&seen]) {
        Ok(grads) => assert_eq!(first(&grads).dims(), [3, 2]),
        Err(error) => assert!(matches!(error.kind(), ErrorKind::NoGradient { .. }), "{error}"),
    }
}

/// The function `x³`, with a gradient written by hand over variables.
struct Cube;

impl Function<Cpu> for Cube {
    fn name(&self) -> &'static str {
        "cube"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].mul(&ins[0])?.mul(&ins[0])?])
    }
    fn saves(&self) -> Saves {
        Saves::inputs(&[0])
    }
    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        let (g, x) = (cx.grad()?, cx.input(0)?);
        cx.give_value(0, &g.mul(&x.square()?.mul(3.0)?)?)
    }
}

fn apply(f: impl Function<Cpu> + 'static, ins: &[&Var<Cpu>]) -> Outs<Var<Cpu>> {
    apply_function(Arc::new(f), ins).unwrap()
}

#[test]
fn a_function_of_ones_own_differentiates_twice() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[2.0, -1.0]);
    let y = apply(Cube, &[&x]).remove(0);
    assert_eq!(values(&y), [8.0, -1.0]);
    let g = first(&differentiable_grad(&[&y], &[&x]).unwrap()).clone();
    assert_eq!(values(&g), [12.0, 3.0]);
    assert_eq!(values(first(&grad(&[&g], &[&x]).unwrap())), [12.0, -6.0]);
    assert_eq!(grad_of(&backward(&y.sum_all().unwrap()).unwrap(), &x), [12.0, 3.0]);
}

/// A function of two inputs with two outputs; everything is saved.
struct SumAndProduct;

impl Function<Cpu> for SumAndProduct {
    fn name(&self) -> &'static str {
        "sum_and_product"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].add(&ins[1])?, ins[0].mul(&ins[1])?])
    }
    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        let (sum, product) = (cx.upstream(0)?, cx.upstream(1)?);
        for (i, other) in [(0, 1), (1, 0)] {
            let of_product = product.as_ref().map(|p| p.mul(&cx.input(other)?)).transpose()?;
            match (&sum, of_product) {
                (Some(s), Some(p)) => cx.give_value(i, &s.add(&p)?)?,
                (Some(s), None) => cx.give_value(i, s)?,
                (None, Some(p)) => cx.give_value(i, &p)?,
                (None, None) => {}
            }
        }
        Ok(())
    }
}

#[test]
fn a_function_with_several_outputs_hears_which_were_used() {
    let rt = cpu();
    let (x, y) = (leaf(&rt, "x", [], &[3.0]), leaf(&rt, "y", [], &[5.0]));
    let both = |outs: &Outs<Var<Cpu>>| outs[0].mul(10.0).unwrap().add(&outs[1]).unwrap();
    let gradients = backward(&both(&apply(SumAndProduct, &[&x, &y]))).unwrap();
    assert_eq!((grad_of(&gradients, &x), grad_of(&gradients, &y)), (vec![15.0], vec![13.0]));
    let gradients = backward(&apply(SumAndProduct, &[&x, &y])[1]).unwrap();
    assert_eq!((grad_of(&gradients, &x), grad_of(&gradients, &y)), (vec![5.0], vec![3.0]));
}

/// A function that reads what it did not save, or gives no gradient: errors, not wrong gradients.
struct Careless {
    saves: Saves,
}

impl Function<Cpu> for Careless {
    fn name(&self) -> &'static str {
        "careless"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].clone()])
    }
    fn saves(&self) -> Saves {
        self.saves
    }
    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        cx.input(0).map(|_| ())
    }
}

#[test]
fn a_rule_that_reads_what_it_did_not_save_is_told_so() {
    let rt = cpu();
    let x = leaf(&rt, "x", [], &[3.0]);
    let y = apply(Careless { saves: Saves { inputs: Bits::NONE, outputs: Bits::NONE } }, &[&x]).remove(0);
    let error = backward(&y).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("careless") && error.to_string().contains("input 0"), "{error}");
}

#[test]
fn an_op_without_derivative_gives_no_gradient_or_says_so() {
    let rt = cpu();
    let x = leaf(&rt, "x", [2], &[1.5, 2.5]);
    // Step functions have the derivative 0 everywhere: no gradient arrives, and none is made up.
    assert!(grad(&[&x.floor().unwrap()], &[&x]).unwrap()[0].is_none());
    // Indices are integers, and integer variables cannot require gradients.
    assert!(!x.argmax(0).unwrap().requires_grad());
}
