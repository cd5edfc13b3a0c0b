//! The forward mode: derivatives along a direction, and derivatives of these.

use std::sync::Arc;

use crate::common::{constant, cpu, leaf, values};
use autograd::{
    Function, Var, apply_function, autocast, checkpoint, grad, hessian, hvp, is_grad_enabled, jacobian, jvp, no_grad,
};
use numcore::{
    DType, ErrorKind, Result, Tensor,
    ops::{Apply, Backprop, JoinOps, MatmulOps, PointwiseOps, ReduceOps, SortOps, ViewOps},
};
use runtime_cpu::Cpu;

type V = Var<Cpu>;

fn close(got: &V, want: &[f64]) {
    let got = values(got);
    assert_eq!(got.len(), want.len());
    assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?}, expected {want:?}");
}

#[test]
fn a_product_has_the_tangents_of_both_factors() {
    let rt = cpu();
    let (x, w) = (constant(&rt, [1, 2], &[2.0, 3.0]), constant(&rt, [2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let (dx, dw) = (constant(&rt, [1, 2], &[1.0, 0.5]), constant(&rt, [2, 2], &[0.0, 1.0, 1.0, 0.0]));
    let product = |v: &[V]| v[0].matmul(&v[1]);
    let (y, along) = jvp(product, &[&x, &w], &[&dx, &dw]).unwrap();
    close(&y, &[11.0, 16.0]);
    close(&along, &[1.0 + 1.5 + 3.0, 2.0 + 2.0 + 2.0]);
    assert!(y.tangent().is_none() && !along.requires_grad(), "nothing is recorded of constants");
}

#[test]
fn a_value_off_the_direction_has_no_tangent() {
    let rt = cpu();
    let x = constant(&rt, [3], &[3.0, 1.0, 2.0]).with_tangent(&constant(&rt, [3], &[10.0, 20.0, 30.0])).unwrap();
    assert!(x.detach().tangent().is_none());
    assert!(x.argmax(0).unwrap().tangent().is_none());
    assert!(x.gt(1.5).unwrap().tangent().is_none());
    assert!(x.floor().unwrap().tangent().is_none(), "zero by structure");
    let (sorted, order) = x.sort(0, false).unwrap();
    close(&sorted.tangent().unwrap(), &[20.0, 30.0, 10.0]);
    assert!(order.tangent().is_none());
    // An infinite slope of another operand is not multiplied by zero.
    let zero = constant(&rt, [3], &[0.0; 3]);
    assert_eq!(values(&x.mul(0.0).unwrap().add(&zero.sqrt().unwrap()).unwrap().tangent().unwrap()), [0.0; 3]);
    close(&x.mul(&zero.log().unwrap().exp().unwrap()).unwrap().tangent().unwrap(), &[0.0; 3]);
    let (_, along) = jvp(|_| Ok(zero.clone()), &[&x.detach()], &[&zero]).unwrap();
    close(&along, &[0.0; 3]);
}

#[test]
fn leaves_views_and_pieces_have_tangents() {
    let rt = cpu();
    let w = leaf(&rt, "w", [2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let dual = w.with_tangent(&constant(&rt, [2, 2], &[0.1, 0.2, 0.3, 0.4])).unwrap();
    close(&dual.t().unwrap().tangent().unwrap(), &[0.1, 0.3, 0.2, 0.4]);
    let pieces = dual.split(0, 1).unwrap();
    close(&pieces[1].tangent().unwrap(), &[0.3, 0.4]);
    let joined = numcore::ops::cat(&[&pieces[1], &w.narrow(0, 0, 1).unwrap()], 0).unwrap();
    close(&joined.tangent().unwrap(), &[0.3, 0.4, 0.0, 0.0]);
    close(&dual.pad(&[(0, 0), (1, 0)], 7.0).unwrap().tangent().unwrap(), &[0.0, 0.1, 0.2, 0.0, 0.3, 0.4]);
    assert_eq!(dual.as_leaf().map(|leaf| leaf.name().to_string()).as_deref(), Some("w"));
}

#[test]
fn casts_keep_the_precision_of_the_wider_type() {
    let rt = cpu();
    let half = |values: &[f64]| constant(&rt, [2], values).to_dtype(DType::BF16).unwrap();
    let (x, direction) = (half(&[1.5, 2.0]), half(&[1.0, 1.0]));
    let (_, along) = jvp(|x| x[0].to_dtype(DType::F32)?.mul(1.0 / 3.0), &[&x], &[&direction]).unwrap();
    assert_eq!(along.dtype(), DType::F32);
    assert!(values(&along).iter().all(|v| (v - 1.0 / 3.0).abs() < 1e-7), "{:?}", values(&along));
    let (mean, along) = jvp(|x| x[0].square()?.mean_all(), &[&x], &[&direction]).unwrap();
    assert_eq!((mean.dtype(), along.dtype()), (DType::BF16, DType::BF16));
    assert_eq!(values(&along), [3.5]);
}

#[test]
fn scopes_apply_to_values_with_tangents() {
    let rt = cpu();
    let (x, direction) = (leaf(&rt, "x", [2], &[0.5, -1.0]), constant(&rt, [2], &[1.0, 2.0]));
    let f = |x: &V| x.sin()?.mul(x)?.sum_all();
    let want = [0.5, -1.0].iter().zip([1.0, 2.0]).map(|(x, d): (&f64, f64)| d * (x.sin() + x * x.cos())).sum::<f64>();
    let (_, kept) = jvp(|x| f(&x[0]), &[&x], &[&direction]).unwrap();
    close(&kept, &[want]);
    let (_, again) = jvp(|x| checkpoint(|| f(&x[0])), &[&x], &[&direction]).unwrap();
    close(&again, &[want]);
    let of = |along: &V| values(grad(&[along], &[&x]).unwrap()[0].as_ref().unwrap());
    assert_eq!(of(&kept), of(&again));
    no_grad(|| {
        let (_, along) = jvp(|x| f(&x[0]), &[&x], &[&direction]).unwrap();
        assert!(!along.requires_grad() && !is_grad_enabled());
        close(&along, &[want]);
    });
    let (square, turned) = (constant(&rt, [1, 2], &[1.0, 2.0]), constant(&rt, [2, 1], &[1.0, 1.0]));
    let (x32, d32) = (square.to_dtype(DType::F32).unwrap(), square.to_dtype(DType::F32).unwrap());
    let w = turned.to_dtype(DType::F32).unwrap();
    let (_, along) = autocast(DType::BF16, || jvp(|x| x[0].matmul(&w), &[&x32], &[&d32])).unwrap();
    assert_eq!((along.dtype(), values(&along)), (DType::BF16, vec![3.0]));
}

#[test]
fn products_with_the_hessian() {
    let rt = cpu();
    let (x, y) = (constant(&rt, [2], &[1.0, 2.0]), constant(&rt, [2], &[3.0, -1.0]));
    let (v, w) = (constant(&rt, [2], &[1.0, 0.5]), constant(&rt, [2], &[2.0, 1.0]));
    // Σ x² y has the second derivatives 2y, 2x and 0.
    let f = |v: &[V]| v[0].square()?.mul(&v[1])?.sum_all();
    let products = hvp(f, &[&x, &y], &[&v, &w]).unwrap();
    close(&products[0], &[6.0 + 4.0, -1.0 + 4.0]);
    close(&products[1], &[2.0, 2.0]);
    let linear = hvp(|v| v[0].sum_all(), &[&x], &[&v]).unwrap();
    close(&linear[0], &[0.0, 0.0]);
    let whole = hessian(|x| x.pow(3.0)?.sum_all(), &x).unwrap();
    assert_eq!(whole.dims(), [2, 2]);
    close(&whole, &[6.0, 0.0, 0.0, 12.0]);
    close(&hessian(|x| x.sum_all(), &x).unwrap(), &[0.0; 4]);
}

#[test]
fn jacobians_by_rows_and_by_columns() {
    let rt = cpu();
    let x = constant(&rt, [2], &[1.0, 2.0]);
    let w = constant(&rt, [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let columns = jacobian(|x| x.matmul(&w)?.square(), &x).unwrap();
    assert_eq!(columns.dims(), [3, 2]);
    let product = [9.0, 12.0, 15.0];
    let want: Vec<f64> = (0..3).flat_map(|j| [1.0 + j as f64, 4.0 + j as f64].map(|w| 2.0 * product[j] * w)).collect();
    close(&columns, &want);
    let rows = jacobian(|x| x.reshape([1, 2])?.prod(&[1]), &x).unwrap();
    assert_eq!(rows.dims(), [1, 2]);
    close(&rows, &[2.0, 1.0]);
    close(&jacobian(|x| Ok(x.detach()), &x).unwrap(), &[0.0; 4]);
    assert_eq!(jacobian(|x| x.narrow(0, 0, 0), &x).unwrap().dims(), [0, 2]);
    // Of an intermediate, by whose leaf it stays differentiable elsewhere.
    let middle = leaf(&rt, "x", [2], &[1.0, 2.0]).square().unwrap();
    close(&jacobian(|m| m.sum_all(), &middle).unwrap(), &[1.0, 1.0]);
}

#[test]
fn derivatives_without_a_graph_and_of_duals() {
    let rt = cpu();
    let (x, v) = (constant(&rt, [2], &[1.0, 2.0]), constant(&rt, [2], &[1.0, 0.5]));
    no_grad(|| {
        close(&hvp(|x| x[0].square()?.sum_all(), &[&x], &[&v]).unwrap()[0], &[2.0, 1.0]);
        close(&jacobian(|x| x.square()?.sum_all(), &x).unwrap(), &[2.0, 4.0]);
        close(&hessian(|x| x.square()?.sum_all(), &x).unwrap(), &[2.0, 0.0, 0.0, 2.0]);
    });
    // A value with a tangent has gradients, but gradients have no tangents: that is said.
    let w = leaf(&rt, "w", [2], &[1.0, 2.0]);
    let y = w.with_tangent(&v).unwrap().square().unwrap().sum_all().unwrap();
    assert_eq!(y.backward().unwrap().of(&w).unwrap().to_f64s().unwrap(), [2.0, 4.0]);
    let lost = jvp(|x| Ok(grad(&[&x[0].square()?.sum_all()?], &[&x[0]])?.remove(0).unwrap()), &[&w], &[&v]);
    assert!(lost.unwrap_err().to_string().contains("a root has a tangent"));
    let lost = jvp(|x| jacobian(|x| x.square()?.sum_all(), &x[0])?.sum_all(), &[&w], &[&v]);
    assert!(lost.unwrap_err().to_string().contains("has a tangent"));
}

struct Doubled;

impl Function<Cpu> for Doubled {
    fn name(&self) -> &'static str {
        "doubled"
    }
    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(vec![ins[0].mul(2.0)?])
    }
    fn backward(&self, cx: &mut dyn Backprop<V>) -> Result<()> {
        let g = cx.grad()?.mul(2.0)?;
        cx.give_value(0, &g)
    }
}

#[test]
fn misuse_says_what_to_do() {
    let rt = cpu();
    let (x, d) = (constant(&rt, [2], &[1.0, 2.0]), constant(&rt, [2], &[1.0, 1.0]));
    let says = |result: Result<V>, words: &[&str]| {
        let error = result.unwrap_err();
        assert!(words.iter().all(|w| error.to_string().contains(w)), "{error}");
        error
    };
    says(x.with_tangent(&constant(&rt, [1], &[1.0])), &["with_tangent", "[2]", "[1]"]);
    says(x.with_tangent(&d.to_dtype(DType::F32).unwrap()), &["f64 [2]", "f32"]);
    let whole = x.to_dtype(DType::I64).unwrap();
    says(whole.with_tangent(&whole), &["only floating types"]);
    says(x.with_tangent(&d).unwrap().with_tangent(&d), &["do not nest"]);
    let nested = jvp(|x| jvp(|y| y[0].mul(&x[0]), &[&d], &[&d]).map(|(y, _)| y), &[&x], &[&d]);
    says(nested.map(|(y, _)| y), &["inside another one", "hvp"]);
    jvp(|x| x[0].square(), &[&x], &[&d]).expect("the failed one has ended");
    let function = jvp(|x| Ok(apply_function(Arc::new(Doubled), &[&x[0]])?.remove(0)), &[&x], &[&d]);
    let error = says(function.map(|(y, _)| y), &["doubled", "no rule for tangents"]);
    assert!(matches!(error.kind(), ErrorKind::Unsupported { .. }));
    says(jvp(|x| Ok(x[0].clone()), &[&x], &[]).map(|(y, _)| y), &["number of tangents", "0"]);
    says(hvp(|x| x[0].square(), &[&x], &[&d]).map(|mut all| all.remove(0)), &["hvp", "reduce it"]);
    says(hessian(|x| x.square(), &x), &["hessian", "reduce it"]);
}
