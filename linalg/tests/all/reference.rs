//! Values and gradients against PyTorch's.

use linalg::*;
use numcore::ops::{PointwiseOps, ReduceOps};

use super::*;

type V = Var<Cpu>;

/// Values of which element `i` is `sin(1.3 i + 0.7 k + 0.5)`.
fn sines(k: usize, numel: usize) -> Vec<f64> {
    (0..numel).map(|i| f64::sin(1.3 * i as f64 + 0.7 * k as f64 + 0.5)).collect()
}

/// Input `k`, of matrices; those of rank 3 have 2 added on the diagonal.
fn made(k: usize, [batch, rows, columns]: [usize; 3]) -> V {
    let mut values = sines(k, batch * rows * columns);
    if rows.min(columns) == 3 {
        let diagonal = values.iter_mut().enumerate().filter(|(i, _)| i / columns % rows == i % columns);
        diagonal.for_each(|(_, value)| *value += 2.0);
    }
    Var::leaf(&format!("in{k}"), Tensor::from_slice(&cpu(), [batch, rows, columns], &values).unwrap()).unwrap()
}

#[test]
fn values_and_gradients_are_pytorchs() {
    let mut all: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(include_str!("reference.json")).unwrap();
    let mut check = |name: String, inputs: &[&V], y: Result<V>| {
        let want = all.remove(&name).unwrap_or_else(|| panic!("no reference values for {name}"));
        let of = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<_>>();
        let close = |what: &str, got: &[f64], want: &[f64]| {
            let most = want.iter().fold(1.0, |most: f64, w| most.max(w.abs()));
            let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
            assert!(
                got.len() == want.len() && worst < 1e-11 * most,
                "{name}: {what} is off by {worst}: {got:?}, not {want:?}"
            );
        };
        let y = y.unwrap();
        close("the output", &values(&y), &of(&want["out"]));
        let shape = y.spec().shape;
        let weights = Var::new(Tensor::from_slice(&cpu(), shape, &sines(9, shape.numel())).unwrap());
        let slopes = grad(&[&y.mul(&weights).unwrap().sum_all().unwrap()], inputs).unwrap();
        for (k, slope) in slopes.iter().enumerate() {
            close(&format!("gradient {k}"), &values(slope.as_ref().unwrap()), &of(&want["gradients"][k]));
        }
    };
    let (a, b, wide, tall) = (made(0, [2, 3, 3]), made(1, [2, 3, 2]), made(0, [2, 3, 4]), made(1, [2, 4, 3]));
    check("solve".into(), &[&a, &b], solve(&a, &b));
    check("solve_upper".into(), &[&a, &b], solve_triangular(&a, &b, Triangle::UPPER));
    check("solve_lower".into(), &[&a, &b], solve_triangular(&a, &b, Triangle::LOWER));
    check("solve_unit".into(), &[&a, &b], solve_triangular(&a, &b, Triangle { unit: true, ..Triangle::LOWER }));
    check("inverse".into(), &[&a], inverse(&a));
    check("det".into(), &[&a], det(&a));
    check("slogdet".into(), &[&a], slogdet(&a).map(|(_, log)| log));
    check("cholesky".into(), &[&a], cholesky(&definite(&a).unwrap()));
    for (name, x) in [("square", &a), ("tall", &tall)] {
        check(format!("qr_q_{name}"), &[x], qr(x).and_then(|(q, _)| q.square()));
        check(format!("qr_r_{name}"), &[x], qr(x).and_then(|(_, r)| r.square()));
    }
    for (name, x) in [("square", &a), ("wide", &wide), ("tall", &tall)] {
        check(format!("svd_u_{name}"), &[x], svd(x).and_then(|svd| svd.u.square()));
        check(format!("svd_v_{name}"), &[x], svd(x).and_then(|svd| svd.vt.square()));
        check(format!("svdvals_{name}"), &[x], svdvals(x));
        let norms = [
            ("fro", MatrixNorm::Frobenius),
            ("nuc", MatrixNorm::Nuclear),
            ("1", MatrixNorm::One),
            ("2", MatrixNorm::Spectral),
            ("inf", MatrixNorm::Infinity),
        ];
        for (norm, which) in norms {
            check(format!("norm_{norm}_{name}"), &[x], matrix_norm(x, which));
        }
    }
    check("eigvalsh".into(), &[&a], eigvalsh(&definite(&a).unwrap()));
    check("eigh_vectors".into(), &[&a], eigh(&definite(&a).unwrap()).and_then(|(_, vectors)| vectors.square()));
    for (name, p) in
        [("0.5", 0.5), ("1", 1.0), ("2", 2.0), ("3", 3.0), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)]
    {
        check(format!("vector_norm_{name}"), &[&wide], vector_norm(&wide, p, &[0, 2]));
    }
    assert!(all.is_empty(), "not compared: {:?}", all.keys());
}
