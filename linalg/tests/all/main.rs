//! Factorizations by what defines them, and gradients by finite differences, once and twice.
#![allow(missing_docs)]

mod reference;

use autograd::{Var, differentiable_grad, grad};
use linalg::{
    MatrixNorm, Svd, Triangle, cholesky, det, eigh, eigvalsh, inverse, logdet, matrix_norm, qr, slogdet, solve,
    solve_triangular, svd, svdvals, vector_norm,
};
use numcore::{
    DType, Result, Tensor,
    ops::{Apply, JoinOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

fn cpu() -> Cpu {
    Cpu::with_threads(1)
}

fn normal(shape: &[usize], seed: u64) -> Tensor<Cpu> {
    Tensor::normal(&cpu(), shape, DType::F64, 0.0, 1.0, seed).unwrap()
}

fn constant(shape: &[usize], seed: u64) -> Var<Cpu> {
    Var::new(normal(shape, seed))
}

/// A batch of symmetric positive definite matrices.
fn definite(x: &Var<Cpu>) -> Result<Var<Cpu>> {
    let n = x.spec().shape[x.spec().shape.rank() - 1];
    x.matmul(&x.t()?)?.add(&Var::new(Tensor::eye(&cpu(), n, DType::F64)?))
}

fn eye(n: usize) -> Vec<f64> {
    Tensor::eye(&cpu(), n, DType::F64).unwrap().to_vec().unwrap()
}

fn values(x: &Var<Cpu>) -> Vec<f64> {
    x.value().unwrap().to_f64s().unwrap()
}

#[track_caller]
fn close(a: &Var<Cpu>, b: &Var<Cpu>, within: f64) {
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len());
    let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off <= within, "{off:e}: {a:?} {b:?}");
}

/// Compares a function's gradient by each element with central differences, and, where `twice`, its second derivative
/// along a fixed direction.
fn check(name: &str, inputs: &[Tensor<Cpu>], twice: bool, f: impl Fn(&[Var<Cpu>]) -> Result<Var<Cpu>>) {
    let leaves = |values: &[Tensor<Cpu>]| -> Vec<Var<Cpu>> {
        values.iter().map(|value| Var::leaf("x", value.clone()).unwrap()).collect()
    };
    // A loss that is no symmetric function of the elements.
    let loss = |ins: &[Var<Cpu>]| -> Result<Var<Cpu>> {
        let y = f(ins)?;
        y.mul(&constant(&y.dims(), 77))?.sum_all()
    };
    // The sum of the gradients, weighted.
    let again = |ins: &[Var<Cpu>]| -> Result<Var<Cpu>> {
        let all: Vec<&Var<Cpu>> = ins.iter().collect();
        let grads = differentiable_grad(&[&loss(ins)?], &all)?;
        let mut sum = Var::new(Tensor::zeros(&cpu(), [], DType::F64)?);
        for (k, g) in grads.into_iter().enumerate() {
            let g = g.expect("a gradient");
            sum = sum.add(&g.mul(&constant(&g.dims(), 88 + k as u64))?.sum_all()?)?;
        }
        Ok(sum)
    };
    type Scalar<'f> = &'f dyn Fn(&[Var<Cpu>]) -> Result<Var<Cpu>>;
    let compare = |what: &str, f: Scalar<'_>| {
        let own = leaves(inputs);
        let all: Vec<&Var<Cpu>> = own.iter().collect();
        let grads = grad(&[&f(&own).unwrap()], &all).unwrap();
        for (k, (input, grad)) in inputs.iter().zip(grads).enumerate() {
            let ours = values(&grad.expect("a gradient"));
            let at = input.to_vec::<f64>().unwrap();
            let scale = ours.iter().fold(1.0f64, |most, g| most.max(g.abs()));
            for i in 0..at.len() {
                let moved = |by: f64| {
                    let mut values = at.clone();
                    values[i] += by;
                    let mut inputs = inputs.to_vec();
                    inputs[k] = Tensor::from_slice(&cpu(), input.dims(), &values).unwrap();
                    f(&leaves(&inputs)).unwrap().item().unwrap()
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!((ours[i] - expected).abs() <= 3e-7 * scale, "{name} {what} {k} {i}: {} {expected}", ours[i]);
            }
        }
    };
    compare("once", &loss);
    if twice {
        compare("twice", &again);
    }
}

#[test]
fn systems_are_solved_in_batches_that_broadcast() {
    for (a, b) in [
        (vec![3, 3], vec![3, 2]),
        (vec![2, 3, 3], vec![3, 1]),
        (vec![3, 3], vec![4, 2, 3, 2]),
        (vec![0, 0], vec![0, 2]),
    ] {
        let (a, b) = (constant(&a, 1), constant(&b, 2));
        let x = solve(&a, &b).unwrap();
        close(&a.matmul(&x).unwrap(), &b.broadcast_to(x.dims()).unwrap(), 1e-12);
    }
    check("solve", &[normal(&[2, 3, 3], 1), normal(&[3, 2], 2)], true, |x| solve(&x[0], &x[1]));
    check("solve a vector of matrices", &[normal(&[3, 3], 1), normal(&[2, 3, 1], 2)], true, |x| solve(&x[0], &x[1]));
}

#[test]
fn every_triangle_is_solved_and_nothing_else_is_read() {
    let diagonal = Tensor::eye(&cpu(), 4, DType::F64).unwrap().mul(3.0).unwrap();
    let (a, b) = (normal(&[2, 4, 4], 3).add(&diagonal).unwrap(), normal(&[4, 3], 4));
    for bits in 0..8 {
        let triangle = Triangle { upper: bits & 1 > 0, unit: bits & 2 > 0, transposed: bits & 4 > 0 };
        let own = Var::new(a.clone());
        let mut whole = if triangle.upper { own.triu(0) } else { own.tril(0) }.unwrap();
        if triangle.unit {
            let strict = if triangle.upper { own.triu(1) } else { own.tril(-1) }.unwrap();
            whole = strict.add(&Var::new(Tensor::eye(&cpu(), 4, DType::F64).unwrap())).unwrap();
        }
        let whole = if triangle.transposed { whole.t().unwrap() } else { whole };
        let x = solve_triangular(&own, &Var::new(b.clone()), triangle).unwrap();
        close(&whole.matmul(&x).unwrap(), &Var::new(b.clone()).broadcast_to(x.dims()).unwrap(), 1e-11);
        check(&format!("{triangle:?}"), &[a.clone(), b.clone()], bits < 2, |x| {
            solve_triangular(&x[0], &x[1], triangle)
        });
    }
}

#[test]
fn inverses_and_determinants() {
    let a = constant(&[2, 3, 3], 5);
    close(
        &a.matmul(&inverse(&a).unwrap()).unwrap(),
        &Var::new(Tensor::from_slice(&cpu(), [2, 3, 3], &[eye(3), eye(3)].concat()).unwrap()),
        1e-12,
    );
    let known = Var::new(
        Tensor::from_slice(&cpu(), [3, 2, 2], &[2.0f64, 1.0, 1.0, 3.0, 0.0, 1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 4.0])
            .unwrap(),
    );
    assert_eq!(values(&det(&known).unwrap()), [5.0, -1.0, 0.0]);
    let (sign, log) = slogdet(&known).unwrap();
    assert_eq!(values(&sign), [1.0, -1.0, 0.0]);
    assert_eq!((values(&log)[1], values(&log)[2]), (0.0, f64::NEG_INFINITY));
    let logs = values(&logdet(&known).unwrap());
    assert!((logs[0] - 5f64.ln()).abs() < 1e-15 && logs[1].is_nan() && logs[2] == f64::NEG_INFINITY, "{logs:?}");
    let early = Var::new(Tensor::from_slice(&cpu(), [2, 2, 2], &[0f64, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]).unwrap());
    assert_eq!(values(&det(&early).unwrap()), [0.0, 0.0]);
    // The determinant of a permutation of three places in a cycle.
    let cycle = Var::new(Tensor::from_slice(&cpu(), [3, 3], &[0f64, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]).unwrap());
    assert_eq!(values(&det(&cycle).unwrap()), [1.0]);
    for seed in [5, 6] {
        check("inverse", &[normal(&[2, 3, 3], seed)], true, |x| inverse(&x[0]));
        check("det", &[normal(&[2, 3, 3], seed)], true, |x| det(&x[0]));
        check("slogdet", &[normal(&[2, 3, 3], seed)], true, |x| Ok(slogdet(&x[0])?.1));
        check("logdet", &[normal(&[2, 3, 3], seed)], true, |x| logdet(&definite(&x[0])?));
    }
    assert_eq!(values(&det(&constant(&[2, 0, 0], 0)).unwrap()), [1.0, 1.0], "of no elements");
}

#[test]
fn cholesky_is_the_root_and_refuses_what_is_not_definite() {
    let a = definite(&constant(&[2, 4, 4], 7)).unwrap();
    let l = cholesky(&a).unwrap();
    close(&l.matmul(&l.t().unwrap()).unwrap(), &a, 1e-12);
    close(&l.triu(1).unwrap(), &l.mul(0.0).unwrap(), 0.0);
    check("cholesky", &[normal(&[2, 3, 3], 7)], true, |x| cholesky(&definite(&x[0])?));
    let bad = Var::new(Tensor::from_slice(&cpu(), [2, 2, 2], &[1.0f64, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 1.0]).unwrap());
    let error = cholesky(&bad).unwrap_err().to_string();
    assert!(error.contains("cholesky") && error.contains("matrix 1 of the 2 is not positive definite"), "{error}");
}

#[test]
fn qr_of_tall_and_wide_matrices() {
    for [m, n] in [[3, 3], [5, 3], [3, 5], [1, 4], [4, 1]] {
        let a = constant(&[2, m, n], 8);
        let (q, r) = qr(&a).unwrap();
        let k = m.min(n);
        assert_eq!((q.dims(), r.dims()), (vec![2, m, k], vec![2, k, n]));
        close(&q.matmul(&r).unwrap(), &a, 1e-12);
        close(
            &q.t().unwrap().matmul(&q).unwrap(),
            &Var::new(Tensor::from_slice(&cpu(), [2, k, k], &[eye(k), eye(k)].concat()).unwrap()),
            1e-12,
        );
        close(&r.tril(-1).unwrap(), &r.mul(0.0).unwrap(), 0.0);
        assert!((0..2 * k).all(|i| values(&r)[i / k * k * n + i % k * (n + 1)] > 0.0), "the diagonal");
        let a = normal(&[m, n], 8);
        check("qr, q", std::slice::from_ref(&a), true, |x| Ok(qr(&x[0])?.0));
        check("qr, r", std::slice::from_ref(&a), true, |x| Ok(qr(&x[0])?.1));
        check("qr, both", &[a], false, |x| {
            qr(&x[0]).and_then(|(q, r)| q.sum_all()?.square()?.add(&r.square()?.sum_all()?.sin()?))
        });
    }
}

#[test]
fn eigenvalues_ascend_and_vectors_have_a_sign() {
    let symmetric = |x: &Var<Cpu>| x.add(&x.t()?);
    let a = symmetric(&constant(&[2, 4, 4], 9)).unwrap();
    let (w, v) = eigh(&a).unwrap();
    close(&a.matmul(&v).unwrap(), &v.mul(&w.unsqueeze(-2).unwrap()).unwrap(), 1e-12);
    assert!(values(&w).chunks(4).all(|w| w.is_sorted()));
    let vectors = values(&v.t().unwrap());
    let largest = |v: &[f64]| v.iter().fold(0.0, |most: f64, x| if x.abs() > most.abs() { *x } else { most });
    assert!(vectors.chunks(4).all(|v| largest(v) > 0.0));
    check("eigvalsh", &[normal(&[2, 3, 3], 9)], true, |x| eigvalsh(&symmetric(&x[0])?));
    check("eigenvectors", &[normal(&[2, 3, 3], 9)], true, |x| Ok(eigh(&symmetric(&x[0])?)?.1));
    // Equal eigenvalues have a gradient, if nobody asks for that of their vectors.
    let x = Var::leaf("x", Tensor::eye(&cpu(), 3, DType::F64).unwrap()).unwrap();
    let g = grad(&[&eigvalsh(&x).unwrap().sum_all().unwrap()], &[&x]).unwrap();
    close(g[0].as_ref().unwrap(), &x, 1e-15);
}

#[test]
fn singular_values_of_every_shape() {
    for [m, n] in [[3, 3], [5, 3], [3, 5], [1, 4]] {
        let a = constant(&[2, m, n], 10);
        let Svd { u, s, vt } = svd(&a).unwrap();
        let scaled = u.mul(&s.unsqueeze(-2).unwrap()).unwrap();
        close(&scaled.matmul(&vt).unwrap(), &a, 1e-12);
        assert!(values(&s).chunks(m.min(n)).all(|s| s.is_sorted_by(|a, b| a >= b)));
        let a = normal(&[m, n], 10);
        check("svdvals", std::slice::from_ref(&a), true, |x| svdvals(&x[0]));
        check("u", std::slice::from_ref(&a), true, |x| Ok(svd(&x[0])?.u));
        check("vt", std::slice::from_ref(&a), true, |x| Ok(svd(&x[0])?.vt));
        check("all", &[a], false, |x| {
            let Svd { u, s, vt } = svd(&x[0])?;
            u.sum_all()?.mul(&s.sum_all()?)?.add(&vt.sum_all()?.square()?)
        });
    }
}

#[test]
fn norms_of_matrices_and_vectors() {
    use MatrixNorm::{Frobenius, Infinity, Nuclear, One, Spectral};
    let a = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[3.0f64, 0.0, -4.0, 5.0]).unwrap());
    let of = |norm| values(&matrix_norm(&a, norm).unwrap())[0];
    let expected = [50f64.sqrt(), 45f64.sqrt() + 5f64.sqrt(), 45f64.sqrt(), 7.0, 9.0];
    for (norm, expected) in [Frobenius, Nuclear, Spectral, One, Infinity].into_iter().zip(expected) {
        assert!((of(norm) - expected).abs() < 1e-14, "{norm:?}");
        let is_smooth = ![One, Infinity].contains(&norm);
        check(&format!("{norm:?}"), &[normal(&[2, 3, 4], 11)], is_smooth, |x| matrix_norm(&x[0], norm));
    }
    let x = Var::new(Tensor::from_slice(&cpu(), [1, 3], &[3.0f64, -4.0, 0.0]).unwrap());
    let of = |p| values(&vector_norm(&x, p, &[-1]).unwrap())[0];
    let expected = [4.0, 0.0, 2.0, 7.0, 5.0, 91f64.cbrt(), (3f64.sqrt() + 2.0).powi(2)];
    for (p, expected) in [f64::INFINITY, f64::NEG_INFINITY, 0.0, 1.0, 2.0, 3.0, 0.5].into_iter().zip(expected) {
        assert!((of(p) - expected).abs() < 1e-14, "{p}: {} {expected}", of(p));
    }
    for p in [0.5, 1.5, 3.0, -2.0] {
        let away = normal(&[2, 3, 4], 12).square().unwrap().add(0.3).unwrap();
        check(&format!("order {p}"), &[away], true, |x| vector_norm(&x[0], p, &[0, 2]));
    }
    let large = Var::new(Tensor::from_slice(&cpu(), [2], &[3e200f64, 4e200]).unwrap());
    let norm = values(&vector_norm(&large, 3.0, &[0]).unwrap())[0];
    assert!((norm / (91f64.cbrt() * 1e200) - 1.0).abs() < 1e-14, "{norm:e}");
    let zeros = Var::leaf("x", Tensor::zeros(&cpu(), [3], DType::F64).unwrap()).unwrap();
    let g = grad(&[&vector_norm(&zeros, 3.0, &[0]).unwrap()], &[&zeros]).unwrap();
    assert_eq!(values(g[0].as_ref().unwrap()), [0.0; 3]);
    assert!(vector_norm(&x, f64::NAN, &[0]).is_err());
    let odd = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[f64::NAN, 1.0, f64::INFINITY, 1.0]).unwrap());
    let norms = values(&vector_norm(&odd, 3.0, &[1]).unwrap());
    assert!(norms[0].is_nan() && norms[1] == f64::INFINITY, "{norms:?}");
    assert!(values(&eigvalsh(&constant(&[0, 0], 1)).unwrap()).is_empty());
}

#[test]
fn f32_has_its_own_precision() {
    let a = Var::new(normal(&[3, 3], 13).to_dtype(DType::F32).unwrap());
    let Svd { u, s, vt } = svd(&a).unwrap();
    assert_eq!(u.spec().dtype, DType::F32);
    close(&u.mul(&s).unwrap().matmul(&vt).unwrap(), &a, 1e-5);
}

#[test]
fn errors_name_the_function_and_the_matrix() {
    let message = |result: Result<Var<Cpu>>| result.unwrap_err().to_string();
    let (a, wide) = (constant(&[2, 3, 3], 1), constant(&[2, 3], 1));
    let half = Var::new(normal(&[2, 2], 1).to_dtype(DType::BF16).unwrap());
    let zeros = Var::new(Tensor::zeros(&cpu(), [2, 2], DType::F64).unwrap());
    let nan = Var::new(Tensor::full(&cpu(), [2, 2], DType::F64, f64::NAN).unwrap());
    for (error, parts) in [
        (message(solve(&a, &wide)), ["solve", "do not fit"]),
        (message(solve(&a, &constant(&[3, 3, 1], 1))), ["solve", "do not fit"]),
        (message(solve(&a, &Var::new(normal(&[3, 1], 1).to_dtype(DType::F32).unwrap()))), ["solve", "differ"]),
        (message(inverse(&wide)), ["inverse", "not square"]),
        (message(inverse(&half)), ["inverse", "f32 or f64"]),
        (message(inverse(&zeros)), ["inverse", "the matrix is singular"]),
        (message(solve_triangular(&zeros, &zeros, Triangle::LOWER)), ["solve_triangular", "element 0 of its diagonal"]),
        (message(cholesky(&constant(&[3], 1))), ["cholesky", "two axes"]),
        (message(svdvals(&nan)), ["svd", "finite"]),
        (message(eigvalsh(&nan)), ["eigh", "finite"]),
    ] {
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}
