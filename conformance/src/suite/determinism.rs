//! Determinism: results have equal bits for every number of threads, and in every run.

use autograd::{Var, backward};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{ConvOptions, NnOps},
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps},
    rng::Philox,
};

use super::{
    cases,
    close::forward_backward,
    report::{Section, Verdict},
};

/// A computation large enough to be partitioned among threads, on `x: [N]` of uniform random values.
type Work<R> = (&'static str, fn(&Var<R>) -> Result<Var<R>>);

const N: usize = 300_000;

fn works<R: Runtime>() -> Vec<Work<R>> {
    use numcore::ops::ViewOps;
    vec![
        ("pointwise", |x| x.gelu()?.mul(x)),
        ("sum of all", |x| x.sum_all()),
        ("sum of rows", |x| x.reshape([300, 1000])?.sum(&[1])),
        ("sum of columns", |x| x.reshape([3000, 100])?.sum(&[0])),
        ("sum of outer and inner axes", |x| x.reshape([50, 60, 100])?.sum(&[0, 2])),
        ("a product", |x| {
            x.narrow(0, 0, 90_000)?.reshape([300, 300])?.matmul(&x.narrow(0, 9, 90_000)?.reshape([300, 300])?)
        }),
        ("a thin product", |x| {
            x.narrow(0, 0, 120_000)?.reshape([2, 60_000])?.matmul(&x.narrow(0, 0, 180_000)?.reshape([60_000, 3])?)
        }),
        ("batches of products", |x| {
            x.narrow(0, 0, 160_000)?.reshape([40, 40, 100])?.matmul(&x.narrow(0, 0, 160_000)?.reshape([40, 100, 40])?)
        }),
        ("softmax", |x| x.reshape([300, 1000])?.softmax(-1)),
        ("layer norm", |x| {
            let w = x.narrow(0, 0, 500)?;
            x.reshape([600, 500])?.layer_norm(Some(&w), Some(&w), 1e-5)
        }),
        ("attention", |x| {
            let part = |i: usize| x.narrow(0, i, 64_000)?.reshape([2, 2, 500, 32]);
            part(0)?.causal_attention(&part(1)?, &part(2)?)
        }),
        ("convolution", |x| {
            let w = x.narrow(0, 0, 16 * 8 * 9)?.reshape([16, 8, 3, 3])?;
            let image = x.narrow(0, 0, 4 * 8 * 40 * 40)?.reshape([4, 8, 40, 40])?;
            image.conv2d(&w, None, ConvOptions { padding: [1, 1], ..Default::default() })
        }),
        ("cumsum", |x| x.reshape([3, 100_000])?.cumsum(1)),
        ("sort", |x| Ok(x.reshape([30, 10_000])?.sort(1, true)?.0)),
        ("embedding", |x| {
            let rt = numcore::ops::Apply::runtime(x);
            let mut rng = Philox::new(1, 1);
            let ids: Vec<i64> = (0..20_000).map(|_| rng.below(100) as i64).collect();
            x.narrow(0, 0, 3200)?.reshape([100, 32])?.embedding(&Var::new(Tensor::from_vec(rt, ids)?))
        }),
        ("max pool", |x| x.narrow(0, 0, 256_000)?.reshape([10, 16, 40, 40])?.max_pool2d([3, 3], [2, 2], [1, 1])),
        ("dropout", |x| x.dropout(0.4, 9)),
    ]
}

/// Compares runtimes with one, two and three threads, which `make` creates, on every case and on larger work.
pub fn determinism<R: Runtime>(make: impl Fn(usize) -> R) -> Section {
    let mut section = Section::new("determinism");
    let runtimes: Vec<R> = [1, 2, 3, 1].map(make).into();
    for (name, f) in works::<R>() {
        section.check(name, || same(&runtimes, |rt| large(rt, f)));
    }
    for (i, case) in cases::all::<R>().iter().enumerate() {
        section
            .check(&case.name, || same(&runtimes, |rt| forward_backward(rt, &cases::all()[i], &case_inputs(rt, i)?)));
    }
    section
}

fn case_inputs<R: Runtime>(rt: &R, i: usize) -> Result<Vec<Tensor<R>>> {
    cases::all::<R>()[i].tensors(rt, DType::F32)
}

/// The output and the gradient, in bits.
fn large<R: Runtime>(rt: &R, f: fn(&Var<R>) -> Result<Var<R>>) -> Result<Vec<Vec<f64>>> {
    let x = Var::leaf("x", Tensor::uniform(rt, [N], DType::F32, -1.0, 1.0, 5)?)?;
    let y = f(&x)?;
    let weights = Var::new(Tensor::uniform(rt, numcore::ops::Apply::spec(&y).shape, DType::F32, 0.5, 1.5, 6)?);
    let gradients = backward(&y.mul(&weights)?.sum_all()?)?;
    let gradient = gradients.of(&x).map(|g| g.to_f64s()).transpose()?.unwrap_or_default();
    Ok(vec![y.value()?.to_f64s()?, gradient])
}

fn same<R: Runtime>(runtimes: &[R], f: impl Fn(&R) -> Result<Vec<Vec<f64>>>) -> Result<Verdict> {
    let all = runtimes.iter().map(f).collect::<Result<Vec<_>>>()?;
    let bits = |values: &Vec<Vec<f64>>| values.iter().flatten().map(|v| v.to_bits()).collect::<Vec<u64>>();
    let first = bits(&all[0]);
    let differs = all.iter().map(bits).position(|other| other != first);
    Ok(Verdict::when(differs.is_none(), || {
        let k = differs.unwrap_or(0);
        let at = bits(&all[k]).iter().zip(&first).position(|(a, b)| a != b);
        format!("runtime {} differs from runtime 0 at element {at:?}", k)
    }))
}
