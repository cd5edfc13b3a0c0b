//! Gradients of norms: equal bits in every runtime configuration, and accumulated into old values.

use crate::common::*;
use numcore::{
    DType, TensorMut,
    fused::{Norm, NormGrad, NormKind},
    ops::{Apply, Op, PointwiseOps},
};
use runtime_cpu::Cpu;

/// The results of every runtime configuration for equal inputs: the gradients, and the gradients accumulated into old
/// values.
fn gradients(cpu: &Cpu, norm: &Norm, dtype: DType, [rows, width]: [usize; 2]) -> (Vec<T>, Vec<T>, Vec<T>) {
    let make = |shape: &[usize], seed| store(cpu, dtype, shape, &draw(dtype, shape.iter().product(), seed));
    let (x, g) = (make(&[rows, width], 1), make(&[rows, width], 2));
    let parameters = [(norm.weight, 3), (norm.bias, 4)].map(|(given, seed)| given.then(|| make(&[width], seed)));
    let forward: Vec<&T> = [Some(&x), parameters[0].as_ref(), parameters[1].as_ref()].into_iter().flatten().collect();
    let outs = T::apply(norm.clone().into(), &forward).unwrap();
    let ins: Vec<&T> = [&x, &g].into_iter().chain(&outs[1..]).chain(parameters[0].as_ref()).collect();
    let op = Op::from(NormGrad(norm.clone()));
    let fresh = T::apply(op.clone(), &ins).unwrap();
    let old: Vec<T> = fresh.iter().zip(5..).map(|(t, seed)| make(t.dims(), seed)).collect();
    let slot = |k: usize| -> Option<TensorMut<Cpu>> { old[k].copy().unwrap().try_mut().ok() };
    let added = T::compute_into(&op, &ins, slot).unwrap().into_iter().map(|t| t.freeze().unwrap()).collect();
    (fresh.into_vec(), old, added)
}

#[test]
fn gradients_are_the_same_everywhere_and_can_be_added() {
    let norm = |kind, weight, bias| Norm { kind, eps: 1e-5, weight, bias };
    let norms = [
        norm(NormKind::Layer, true, true),
        norm(NormKind::Layer, true, false),
        norm(NormKind::Layer, false, false),
        norm(NormKind::Rms, true, false),
    ];
    let all = runtimes();
    for (norm, dtype) in norms.iter().flat_map(|norm| FLOATS.map(|dtype| (norm, dtype))) {
        for shape in [[1, 3], [7, 64], [70, 130], [300, 1024]] {
            let (fresh, old, added) = gradients(&all[0], norm, dtype, shape);
            let what = format!("{norm:?} of {dtype} {shape:?}");
            for cpu in &all[1..] {
                let (other, _, other_added) = gradients(cpu, norm, dtype, shape);
                for (a, b) in other.iter().chain(&other_added).zip(fresh.iter().chain(&added)) {
                    same_bits(a, b, &format!("{what} on {cpu:?}"));
                }
            }
            for ((fresh, old), added) in fresh.iter().zip(&old).zip(&added) {
                if dtype.is_half() {
                    // Rounded once, since the gradient is not rounded separately: off by half a ULP.
                    let step = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
                    let [fresh, old, added] = [fresh, old, added].map(|t| t.to_f64s().unwrap());
                    let near =
                        |((f, o), a): ((&f64, &f64), &f64)| (f + o - a).abs() <= step * (f.abs() + a.abs() + 1e-3);
                    assert!(fresh.iter().zip(&old).zip(&added).all(near), "{what}");
                } else {
                    same_bits(added, &old.add(fresh).unwrap(), &what);
                }
            }
        }
    }
}

#[test]
fn no_rows_give_parameters_a_gradient_of_zeros() {
    let norm = Norm { kind: NormKind::Layer, eps: 1e-5, weight: true, bias: true };
    let (fresh, old, added) = gradients(&Cpu::with_threads(2), &norm, DType::F32, [0, 5]);
    assert!(fresh[1..].iter().all(|t| t.to_f64s().unwrap() == [0.0; 5]));
    assert!(old.iter().zip(&added).all(|(a, b)| a.to_f64s().unwrap() == b.to_f64s().unwrap()));
}
