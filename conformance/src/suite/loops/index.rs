//! Gathers and scatter-adds.

use autograd::{Backward, Gradients, Var};
use numcore::{
    DType, Error, Result, Runtime, Tensor,
    ops::{IndexOps, ViewOps},
};

use super::known::{FLOATS, InMemory, Known, close, draw, tolerance};
use crate::suite::{
    dtypes::computed,
    report::{Section, Verdict},
};

const SHAPES: [&[usize]; 4] = [&[9], &[6, 50], &[3, 4, 70], &[2, 3, 4, 5]];

pub(crate) fn index<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("index");
    let s = &mut section;
    for dtype in computed(rt, s, "gather", [DType::F32, DType::F16, DType::I64, DType::Bool]) {
        for (shape, axis) in axes(SHAPES) {
            s.check(format!("gather from {dtype} {shape:?} along {axis}"), || gather(rt, dtype, shape, axis));
        }
    }
    for dtype in computed(rt, s, "rows", [DType::F32, DType::BF16]) {
        for width in [1, 5, 300, 1000] {
            s.check(format!("rows of {dtype} [7, {width}]"), || rows(rt, dtype, width));
        }
    }
    for dtype in computed(rt, s, "scatter_add", FLOATS.into_iter().chain([DType::I64])) {
        for (shape, axis) in axes([&[9], &[6, 50], &[3, 4, 70], &[40, 300]]) {
            s.check(format!("scatter_add to {dtype} {shape:?} along {axis}"), || scatter(rt, dtype, shape, axis));
        }
    }
    for dtype in computed(rt, s, "gathers that are added", FLOATS) {
        s.check(format!("gathers of {dtype} that are added"), || added(rt, dtype));
    }
    s.check("half precision is rounded once", || rounded_once(rt));
    s.check("one_hot", || one_hot(rt));
    section
}

/// Every shape with each of its axes.
fn axes<const N: usize>(shapes: [&'static [usize]; N]) -> impl Iterator<Item = (&'static [usize], usize)> {
    shapes.into_iter().flat_map(|shape| (0..shape.len()).map(move |axis| (shape, axis)))
}

/// The shape with size `n` along `axis`.
fn with(shape: &[usize], axis: usize, n: usize) -> Vec<usize> {
    let mut near = shape.to_vec();
    near[axis] = n;
    near
}

/// Calls `f` with each element of `near` and the element to which its index points, in a tensor of size `far` along
/// `axis`.
fn each(near: &[usize], far: usize, axis: usize, index: &[f64], mut f: impl FnMut(usize, usize)) {
    let (along, after) = (near[axis], near[axis + 1..].iter().product::<usize>());
    for (n, &i) in index.iter().enumerate() {
        let (before, inner) = (n / (along * after), n % after);
        f(n, (before * far + i as usize) * after + inner);
    }
}

/// Random indices below a bound: dense, and with the outer and the inner axis exchanged in memory.
fn indices<R: Runtime>(rt: &R, shape: &[usize], below: usize, seed: u64) -> Result<[Known<R>; 2]> {
    let values: Vec<f64> = draw(DType::U32, shape.iter().product(), seed).iter().map(|x| x % below as f64).collect();
    let dense = Known::dense(rt, DType::I64, shape, &values)?;
    let turned = dense.tensor.transpose(0, -1)?.copy()?.transpose(0, -1)?;
    let what = format!("transposed {}", dense.what);
    Ok([dense.clone(), Known { tensor: turned, values, what }])
}

fn gather<R: Runtime>(rt: &R, dtype: DType, shape: &[usize], axis: usize) -> Result<Verdict> {
    let near = with(shape, axis, 11);
    let ids = indices(rt, &near, shape[axis], 2)?;
    Verdict::all(Known::all(rt, dtype, shape, 1)?.iter().flat_map(|x| ids.iter().map(move |i| (x, i))).map(|(x, i)| {
        let mut want = vec![0.0; i.values.len()];
        each(&near, shape[axis], axis, &i.values, |n, f| want[n] = x.values[f]);
        x.expect(&format!("gather by {}", i.what), &x.tensor.gather(axis as isize, &i.tensor)?, &want, 0.0)
    }))
}

fn rows<R: Runtime>(rt: &R, dtype: DType, width: usize) -> Result<Verdict> {
    let ids = [3i64, 0, 3, 6, 1, 1, 5];
    let index = Tensor::from_slice(rt, [ids.len()], &ids)?;
    Verdict::all(Known::all(rt, dtype, &[7, width], 3)?.iter().map(|table| {
        let picked: Vec<f64> =
            ids.iter().flat_map(|&i| &table.values[i as usize * width..][..width]).copied().collect();
        let columns = table.tensor.t()?.index_select(1, &index)?;
        let rows = table.expect("embedding", &table.tensor.embedding(&index)?, &picked, 0.0)?;
        Ok(rows.and(table.expect("columns", &columns.t()?, &picked, 0.0)?))
    }))
}

fn scatter<R: Runtime>(rt: &R, dtype: DType, shape: &[usize], axis: usize) -> Result<Verdict> {
    let near = with(shape, axis, 13);
    let ids = indices(rt, &near, shape[axis], 5)?;
    let zeros = Tensor::zeros(rt, shape, dtype)?;
    let exact = if dtype == DType::I64 { 0.0 } else { 8.0 * tolerance(dtype) };
    let sources = InMemory::ALL[..4].iter().map(|&way| Known::drawn(rt, dtype, &near, 4, way));
    let sources = sources.collect::<Result<Vec<_>>>()?;
    Verdict::all(sources.iter().flat_map(|x| ids.iter().map(move |i| (x, i))).map(|(x, i)| {
        let mut want = vec![0.0; zeros.shape().numel()];
        each(&near, shape[axis], axis, &i.values, |n, f| want[f] += x.values[n]);
        let got = zeros.scatter_add(axis as isize, &i.tensor, &x.tensor)?;
        x.expect(&format!("scatter_add by {}", i.what), &got, &want, exact)
    }))
}

/// Checks the gradient of a source that is scattered twice: two gathers, the second added to the first.
fn added<R: Runtime>(rt: &R, dtype: DType) -> Result<Verdict> {
    let upstream = Known::drawn(rt, dtype, &[7, 60], 6, InMemory::Dense)?;
    let src = Var::leaf("src", Tensor::zeros(rt, [3, 60], dtype)?)?;
    let ids = [6i64, 2, 2];
    let index = Var::new(Tensor::from_slice(rt, [3], &ids)?);
    let zeros = Var::new(Tensor::zeros(rt, [7, 60], dtype)?);
    let sums = zeros.index_add(0, &index, &src)?.index_add(0, &index, &src)?;
    let mut gradients = Gradients::new();
    Backward::from(&sums, &Var::new(upstream.tensor.clone()))?.run(&mut gradients)?;
    let got = gradients.of(&src).ok_or_else(|| Error::argument("index_add", "no gradient reached the source"))?;
    let twice = |i: &i64| upstream.values[*i as usize * 60..][..60].iter().map(|x| 2.0 * x).collect::<Vec<_>>();
    close("two gathers", got, &ids.iter().flat_map(twice).collect::<Vec<_>>(), 0.0)
}

fn rounded_once<R: Runtime>(rt: &R) -> Result<Verdict> {
    let many = Tensor::full(rt, [3000, 4], DType::BF16, 1.0)?;
    let to_first = Tensor::zeros(rt, [3000], DType::I64)?;
    let sum = Tensor::zeros(rt, [2, 4], DType::BF16)?.index_add(0, &to_first, &many)?;
    close("the sum of 3000 ones", &sum, &[3008.0, 3008.0, 3008.0, 3008.0, 0.0, 0.0, 0.0, 0.0], 0.0)
}

fn one_hot<R: Runtime>(rt: &R) -> Result<Verdict> {
    let ids = Tensor::from_slice(rt, [2, 5], &[0i64, 1, 2, 3, 0, 1, 2, 3, 0, 1])?;
    let hot = ids.narrow(0, 0, 1)?.one_hot(4)?;
    let none = ids.narrow(1, 0, 0)?.one_hot(4)?;
    let right = hot.dims() == [1, 5, 4]
        && hot.to_vec::<i64>()? == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]
        && none.dims() == [2, 0, 4];
    Ok(Verdict::when(right, || format!("{hot:?}, {none:?}")))
}
