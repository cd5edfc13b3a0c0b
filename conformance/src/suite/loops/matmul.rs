//! Matrix products: sizes around the edges of tiles, every layout, batches, half precision, accumulation.

use numcore::{
    DType, Result, Runtime, Tensor, TensorMut,
    ops::{Matmul, MatmulOps, Op, ViewOp, ViewOps},
};

use super::known::{FLOATS, InMemory, Known, close};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

/// The numbers of batches, rows, terms of a sum, and columns.
type Sizes = [usize; 4];

pub(crate) fn matmul<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("matmul");
    let s = &mut section;
    let edges = [1, 2, 3, 7, 8, 16, 17, 48, 49, 100];
    for [m, n] in edges.into_iter().flat_map(|m| edges.map(|n| [m, n])) {
        s.check(format!("sizes [{m}, k] · [k, {n}]"), || sizes(rt, [m, n]));
    }
    for dtype in computed(rt, s, "layouts", FLOATS) {
        for [m, k, n] in [[33, 40, 29], [1, 40, 30], [30, 40, 1], [5, 1, 6], [70, 130, 60]] {
            s.check(format!("layouts of {dtype} [{m}, {k}] · [{k}, {n}]"), || layouts(rt, dtype, [1, m, k, n]));
        }
    }
    for dtype in computed(rt, s, "batches", [DType::F32, DType::F64, DType::BF16]) {
        for sizes in [[7, 5, 6, 4], [3, 33, 17, 20], [40, 16, 16, 16]] {
            s.check(format!("batches of {dtype} {sizes:?}"), || batches(rt, dtype, sizes));
        }
    }
    for [m, k, n] in [[300, 257, 500], [1, 3000, 700], [700, 3000, 1], [1000, 3, 1000]] {
        s.check(format!("many tiles [{m}, {k}] · [{k}, {n}]"), || {
            let a = Known::drawn(rt, DType::F32, &[m, k], 9, InMemory::Dense)?;
            let b = Known::drawn(rt, DType::F32, &[k, n], 10, InMemory::Transposed)?;
            product(&a, &b, [1, m, k, n])
        });
    }
    for dtype in computed(rt, s, "products that are added", FLOATS) {
        s.check(format!("products of {dtype} that are added, and written through a view"), || added(rt, dtype));
        s.check(format!("sizes of 0 in {dtype}"), || nothing(rt, dtype));
    }
    for dtype in computed(rt, s, "linear", FLOATS) {
        for [m, k, n] in [[1, 3, 1], [6, 5, 7], [36, 700, 1], [4, 600, 50], [70, 33, 100], [130, 513, 20], [6, 0, 5]] {
            s.check(format!("linear of {dtype} [{m}, {k}] to {n}"), || linear(rt, dtype, [1, m, k, n]));
        }
    }
    section
}

/// `[B, M, K] · [B, K, N]` in `f64`, and the largest sum of magnitudes, which bounds the rounding.
fn multiply(a: &[f64], b: &[f64], [batch, m, k, n]: Sizes) -> (Vec<f64>, f64) {
    let (mut out, mut sizes) = (vec![0.0; batch * m * n], vec![0.0; batch * m * n]);
    for (at, &x) in a.iter().enumerate().filter(|_| n > 0) {
        let (row, term) = (at / k, at / k / m * k + at % k);
        let target = out[row * n..][..n].iter_mut().zip(&mut sizes[row * n..][..n]);
        for ((sum, size), &y) in target.zip(&b[term * n..][..n]) {
            *sum += x * y;
            *size += (x * y).abs();
        }
    }
    (out, sizes.into_iter().fold(1.0, f64::max))
}

/// The error of a product's element, relative to its sum of magnitudes: half precision is rounded once.
fn unit(dtype: DType) -> f64 {
    if dtype.is_half() { dtype.epsilon() } else { 4.0 * dtype.epsilon() }
}

fn product<R: Runtime>(a: &Known<R>, b: &Known<R>, sizes: Sizes) -> Result<Verdict> {
    let (want, size) = multiply(&a.values, &b.values, sizes);
    a.expect(
        &format!("the product with {}", b.what),
        &a.tensor.matmul(&b.tensor)?,
        &want,
        unit(a.tensor.dtype()) * size,
    )
}

fn sizes<R: Runtime>(rt: &R, [m, n]: [usize; 2]) -> Result<Verdict> {
    Verdict::all([1, 2, 5, 64, 97].into_iter().map(|k| {
        let a = Known::drawn(rt, DType::F32, &[m, k], 1, InMemory::Dense)?;
        product(&a, &Known::drawn(rt, DType::F32, &[k, n], 2, InMemory::Dense)?, [1, m, k, n])
    }))
}

fn layouts<R: Runtime>(rt: &R, dtype: DType, sizes: Sizes) -> Result<Verdict> {
    let [_, m, k, n] = sizes;
    let (left, right) = (Known::all(rt, dtype, &[m, k], 3)?, Known::all(rt, dtype, &[k, n], 4)?);
    Verdict::all(left.iter().flat_map(|a| right.iter().map(move |b| product(a, b, sizes))))
}

/// Checks batches in every layout, and one matrix shared by all of a batch.
fn batches<R: Runtime>(rt: &R, dtype: DType, sizes: Sizes) -> Result<Verdict> {
    let [batch, m, k, n] = sizes;
    let b = Known::drawn(rt, dtype, &[batch, k, n], 6, InMemory::Transposed)?;
    let own = Verdict::all(Known::all(rt, dtype, &[batch, m, k], 5)?.iter().map(|a| product(a, &b, sizes)))?;
    let a = Known::drawn(rt, dtype, &[batch, m, k], 7, InMemory::Dense)?;
    let mut shared = Known::drawn(rt, dtype, &[1, k, n], 8, InMemory::Dense)?;
    shared.values = shared.values.repeat(batch);
    Ok(own.and(product(&a, &shared, sizes)?))
}

fn added<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let a = Known::drawn(rt, dtype, &[60, 70], 11, InMemory::Dense)?;
    let b = Known::drawn(rt, dtype, &[70, 50], 12, InMemory::Transposed)?;
    let (want, size) = multiply(&a.values, &b.values, [1, 60, 70, 50]);
    let twice: Vec<f64> = want.iter().map(|x| 2.0 * x).collect();
    let mut out = TensorMut::alloc(rt, [60, 50].into(), dtype)?;
    let mut turned = TensorMut::alloc(rt, [50, 60].into(), dtype)?;
    let turn = [ViewOp::Permute([1, 0].as_slice().into())];
    for _ in 0..2 {
        out.accumulate(&Op::Matmul(Matmul), &[&a.tensor, &b.tensor])?;
        turned.accumulate_view(&turn, &Op::Matmul(Matmul), &[&a.tensor, &b.tensor])?;
    }
    let bound = 4.0 * dtype.epsilon() * size;
    let direct = close("the product twice", &out.freeze()?, &twice, bound)?;
    Ok(direct.and(close("the product twice through a view", &turned.freeze()?.t()?, &twice, bound)?))
}

fn nothing<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    Verdict::all([[0, 3, 4], [3, 0, 4], [3, 4, 0], [0, 0, 0]].into_iter().map(|[m, k, n]| {
        let (a, b) = (Tensor::ones(rt, [m, k], dtype)?, Tensor::ones(rt, [k, n], dtype)?);
        let empty = close("an empty product", &a.matmul(&b)?, &vec![0.0; m * n], 0.0)?;
        let mut out = TensorMut::zeros(rt, [m, n].into(), dtype)?;
        out.accumulate(&Op::identity(), &[&Tensor::ones(rt, [m, n], dtype)?])?;
        out.accumulate(&Op::Matmul(Matmul), &[&a, &b])?;
        Ok(empty.and(close("nothing that is added", &out.freeze()?, &vec![1.0; m * n], 0.0)?))
    }))
}

/// Checks linear layers: `x: [M, K]`, `w: [N, K]`, bias and residual in every layout.
fn linear<R: Runtime>(rt: &R, dtype: DType, sizes: Sizes) -> Result<Verdict> {
    let [_, m, k, n] = sizes;
    let w = Known::drawn(rt, dtype, &[n, k], 2, InMemory::Dense)?;
    let turned: Vec<f64> = (0..k * n).map(|i| w.values[i % n * k + i / n]).collect();
    let others: Vec<_> = Known::all(rt, dtype, &[n], 3)?.into_iter().zip(Known::all(rt, dtype, &[m, n], 4)?).collect();
    let inputs = Known::all(rt, dtype, &[m, k], 1)?;
    Verdict::all(inputs.iter().flat_map(|x| {
        let (product, size) = multiply(&x.values, &turned, sizes);
        // In half precision all terms are added in `f32` and rounded once.
        let bound =
            if dtype.is_half() { dtype.epsilon() * (k as f64).sqrt().max(1.0) } else { unit(dtype) * (size + 8.0) };
        others.iter().map({
            let w = &w.tensor;
            move |(bias, r)| {
                let want: Vec<f64> = (0..m * n).map(|i| product[i] + bias.values[i % n] + r.values[i]).collect();
                let got = x.tensor.linear_onto(w, Some(&bias.tensor), &r.tensor)?;
                x.expect(&format!("linear with {} and {}", bias.what, r.what), &got, &want, bound)
            }
        })
    }))
}
