//! Tensors without elements: every family accepts them, and returns the value of its formula for no elements.

use autograd::{Var, backward};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{Attention, AttentionGrad, ConvOptions, NnOps},
    ops::{
        Apply, ConvNd, ConvOps, DiagonalOps, DistanceOps, FftOps, GridSampleOps, IndexOps, Interpolate, InterpolateOps,
        Interpolation, JoinOps, MatmulOps, PadMode, PadOps, PointwiseOps, PoolOps, PoolOptions, ReduceOps, RepeatOps,
        Resize, ScanOps, ScatterOps, ScatterReduction, SelectOps, SortOps, ViewOps, cat, stack,
    },
};

use super::report::{Section, Verdict};

/// A computation on `x: [0, 3]` and `i: [0]` (`i64`), and the expected shape and values.
struct Row<R: Runtime> {
    name: &'static str,
    f: fn(&Var<R>, &Var<R>) -> Result<Var<R>>,
    shape: &'static [usize],
    value: f64,
}

fn rows<R: Runtime>() -> Vec<Row<R>> {
    fn row<R: Runtime>(
        name: &'static str,
        shape: &'static [usize],
        value: f64,
        f: fn(&Var<R>, &Var<R>) -> Result<Var<R>>,
    ) -> Row<R> {
        Row { name, f, shape, value }
    }
    vec![
        row("exp", &[0, 3], 0.0, |x, _| x.exp()),
        row("add broadcast", &[2, 0, 3], 0.0, |x, _| x.add(&ones(x, &[2, 1, 3])?)),
        row("sum of all", &[], 0.0, |x, _| x.sum_all()),
        row("sum over nothing", &[3], 0.0, |x, _| x.sum(&[0])),
        row("sum beside nothing", &[0], 0.0, |x, _| x.sum(&[1])),
        row("prod over nothing", &[1, 3], 1.0, |x, _| x.prod_keepdim(&[0])),
        row("mean beside nothing", &[0, 1], 0.0, |x, _| x.mean_keepdim(&[1])),
        row("mean over nothing", &[3], f64::NAN, |x, _| x.mean(&[0])),
        row("norm of nothing", &[], 0.0, |x, _| x.norm_all()),
        row("logsumexp over nothing", &[3], f64::NEG_INFINITY, |x, _| x.logsumexp(&[0])),
        row("logsumexp beside nothing", &[0], 0.0, |x, _| x.logsumexp(&[1])),
        row("amax beside nothing", &[0], 0.0, |x, _| x.amax(&[1])),
        row("cumsum", &[0, 3], 0.0, |x, _| x.cumsum(0)),
        row("cumprod", &[0, 3], 0.0, |x, _| x.cumprod(1)),
        row("sort", &[0, 3], 0.0, |x, _| Ok(x.sort(0, false)?.0)),
        row("topk of none", &[0, 3], 0.0, |x, _| Ok(x.topk(0, 0)?.0)),
        row("transpose", &[3, 0], 0.0, |x, _| x.t()),
        row("reshape", &[0, 7], 0.0, |x, _| x.reshape([0, 7])),
        row("flip", &[0, 3], 0.0, |x, _| x.flip(&[0, 1])),
        row("narrow to nothing", &[0, 0], 0.0, |x, _| x.narrow(1, 2, 0)),
        row("pad", &[2, 3], 0.5, |x, _| x.pad(&[(1, 1), (0, 0)], 0.5)),
        row("roll", &[0, 3], 0.0, |x, _| x.roll(0, 5)),
        row("tril", &[0, 3], 0.0, |x, _| x.tril(0)),
        row("unfold", &[0, 2, 2], 0.0, |x, _| x.unfold(1, 2, 1, 1)),
        row("cat", &[2, 3], 1.0, |x, _| cat(&[x, &ones(x, &[2, 3])?, x], 0)),
        row("stack", &[2, 0, 3], 0.0, |x, _| stack(&[x, x], 0)),
        row("matmul of nothing", &[0, 4], 0.0, |x, _| x.matmul(&ones(x, &[3, 4])?)),
        row("matmul over nothing", &[4, 3], 0.0, |x, _| ones(x, &[4, 0])?.matmul(x)),
        row("batches of nothing", &[0, 2, 2], 0.0, |x, _| {
            x.unsqueeze(2)?.broadcast_to([0, 3, 2])?.t()?.matmul(&ones(x, &[3, 2])?)
        }),
        row("index_select of none", &[0, 3], 0.0, |x, i| x.index_select(0, i)),
        row("gather of none", &[0, 3], 0.0, |x, i| x.gather(0, &i.unsqueeze(1)?.broadcast_to([0, 3])?)),
        row("index_add of none", &[2, 3], 1.0, |x, i| ones(x, &[2, 3])?.index_add(0, i, x)),
        row("embedding of none", &[0, 3], 0.0, |x, i| cat(&[&ones(x, &[2, 3])?, x], 0)?.embedding(i)),
        row("asinh", &[0, 3], 0.0, |x, _| x.asinh()),
        row("var over nothing", &[3], f64::NAN, |x, _| x.var(&[0], 1)),
        row("prelu", &[0, 3], 0.0, |x, _| x.prelu(&ones(x, &[3])?)),
        row("glu", &[3, 0], 0.0, |x, _| cat(&[&x.t()?, &x.t()?], 0)?.glu(0)),
        row("rope", &[0, 3, 2], 0.0, |x, _| x.unsqueeze(2)?.broadcast_to([0, 3, 2])?.rope(10.0, 0)),
        row("einsum of nothing", &[4, 3], 0.0, |x, _| numcore::ops::einsum("ki,kj->ij", &[&ones(x, &[0, 4])?, x])),
        row("einsum of a diagonal of nothing", &[0], 0.0, |x, _| {
            numcore::ops::einsum("bii->b", &[&x.unsqueeze(2)?.broadcast_to([0, 3, 3])?])
        }),
        row("one_hot of none", &[0, 4], 0.0, |_, i| i.one_hot(4)?.to_dtype(DType::F32)),
        row("softmax", &[0, 3], 0.0, |x, _| x.softmax(-1)),
        row("softmax over nothing", &[0, 3], 0.0, |x, _| x.softmax(0)),
        row("log_softmax over nothing", &[0, 3], 0.0, |x, _| x.log_softmax(0)),
        row("layer_norm", &[0, 3], 0.0, |x, _| x.layer_norm(Some(&ones(x, &[3])?), None, 1e-5)),
        row("cross_entropy of no rows", &[], 0.0, |x, i| {
            x.cross_entropy_with(
                i,
                numcore::fused::CrossEntropyOptions { reduction: numcore::fused::Reduction::Sum, ..Default::default() },
            )
        }),
        row("linear_cross_entropy of no rows", &[], 0.0, |x, i| {
            let options =
                numcore::fused::CrossEntropyOptions { reduction: numcore::fused::Reduction::Sum, ..Default::default() };
            x.linear_cross_entropy_with(&ones(x, &[4, 3])?, None, i, options)
        }),
        row("attention of no queries", &[1, 1, 0, 3], 0.0, |x, _| {
            let k = ones(x, &[1, 1, 2, 3])?;
            x.reshape([1, 1, 0, 3])?.attention(&k, &k)
        }),
        row("attention to no keys", &[1, 1, 2, 3], 0.0, |x, _| {
            let k = x.reshape([1, 1, 0, 3])?;
            ones(x, &[1, 1, 2, 3])?.attention(&k, &k)
        }),
        row("conv2d of no images", &[0, 2, 1, 1], 0.0, |x, _| {
            x.reshape([0, 1, 3, 3])?.conv2d(&ones(x, &[2, 1, 3, 3])?, None, ConvOptions::default())
        }),
        row("max_pool2d of no images", &[0, 1, 2, 2], 0.0, |x, _| {
            x.reshape([0, 1, 4, 4])?.max_pool2d([2, 2], [2, 2], [0, 0])
        }),
        row("pad_with nothing inside", &[2, 3], 0.5, |x, _| x.pad_with(&[(1, 1), (0, 0)], PadMode::Constant(0.5))),
        row("pad_with beside nothing", &[0, 5], 0.0, |x, _| x.pad_with(&[(0, 0), (1, 1)], PadMode::Reflect)),
        row("repeat", &[0, 6], 0.0, |x, _| x.repeat(&[3, 2])),
        row("diff", &[0, 2], 0.0, |x, _| x.diff(1, 1)),
        row("diagonal of nothing", &[0], 0.0, |x, _| x.diagonal(0)),
        row("diag_embed", &[0, 3, 3], 0.0, |x, _| x.diag_embed(0)),
        row("cdist of no points", &[0, 2], 0.0, |x, _| x.cdist(&ones(x, &[2, 3])?, 2.0)),
        row("cdist over nothing", &[3, 2], 0.0, |x, _| x.t()?.cdist(&ones(x, &[2, 0])?, f64::INFINITY)),
        row("scatter of none", &[2, 3], 1.0, |x, i| {
            ones(x, &[2, 3])?.scatter(0, &i.unsqueeze(1)?.broadcast_to([0, 3])?, x)
        }),
        row("scatter_reduce of none", &[2, 3], 1.0, |x, i| {
            let index = i.unsqueeze(1)?.broadcast_to([0, 3])?;
            ones(x, &[2, 3])?.scatter_reduce(0, &index, x, ScatterReduction::Amax, false)
        }),
        row("gather_nd of none", &[0, 3], 0.0, |x, i| x.gather_nd(&i.unsqueeze(1)?, 0)),
        row("fft of no rows", &[0, 3, 2], 0.0, |x, _| x.rfft(Some(4), 1, Default::default())),
        row("max_pool of no signals", &[0, 2], 0.0, |x, _| {
            x.max_pool(&PoolOptions { stride: [1], dilation: [1], ceil_mode: true, ..PoolOptions::new([2]) })
        }),
        row("avg_pool of no signals", &[0, 2], 0.0, |x, _| {
            x.avg_pool(&PoolOptions { stride: [1], ..PoolOptions::new([2]) })
        }),
        row("interpolate of no signals", &[0, 1, 5], 0.0, |x, _| {
            x.unsqueeze(1)?.interpolate(Resize::Size(&[5]), Interpolate::new(Interpolation::Linear))
        }),
        row("grid_sample of no images", &[0, 1, 2, 2], 0.0, |x, _| {
            x.reshape([0, 1, 3, 1])?.grid_sample(&ones(x, &[0, 2, 2, 2])?, Default::default())
        }),
        row("conv over three axes of no volumes", &[0, 2, 1, 1, 2], 0.0, |x, _| {
            x.reshape([0, 1, 1, 1, 3])?.conv(&ones(x, &[2, 1, 1, 1, 2])?, None, &ConvNd::<3>::default())
        }),
        row("to_dtype", &[0, 3], 0.0, |x, _| x.to_dtype(DType::F16)?.to_dtype(DType::F32)),
        row("dropout", &[0, 3], 0.0, |x, _| x.dropout(0.5, 1)),
    ]
}

fn ones<R: Runtime>(like: &Var<R>, shape: &[usize]) -> Result<Var<R>> {
    Ok(Var::new(Tensor::ones(numcore::ops::Apply::runtime(like), shape, DType::F32)?))
}

pub(crate) fn empty<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("empty tensors");
    for row in rows::<R>() {
        section.check(row.name, || check(rt, &row));
    }
    section.check("gradients of keys without queries", || keys_without_queries(rt));
    section
}

/// Checks that keys and values that no query head reads still have gradients: zeros, stored or accumulated.
fn keys_without_queries<R: Runtime>(rt: &R) -> Result<Verdict> {
    let k = Var::leaf("k", Tensor::ones(rt, [1, 1, 5, 4], DType::F32)?)?;
    let v = Var::leaf("v", Tensor::ones(rt, [1, 1, 5, 4], DType::F32)?)?;
    let q = Var::leaf("q", Tensor::zeros(rt, [1, 0, 3, 4], DType::F32)?)?;
    let zero = |x: &[f64]| x.len() == 20 && x.iter().all(|&x| x == 0.0);
    let mut verdict = Verdict::PASSED;
    for round in 0..3 {
        // Memory freed here may be reused for the gradients.
        drop(Tensor::full(rt, [1, 1, 5, 4], DType::F32, 7.0)?.to_bytes()?);
        let sum = q.attention(&k, &v)?.sum_all()?;
        // Used twice: the second gradient is added to the first.
        let loss = if round == 0 { sum } else { sum.add(&q.causal_attention(&k, &v)?.sum_all()?)? };
        let gradients = backward(&loss)?;
        for leaf in [&k, &v] {
            let g = gradients.of(leaf).map(|g| g.to_f64s()).transpose()?;
            verdict = verdict.and(Verdict::when(g.as_ref().is_some_and(|g| zero(g)), || {
                format!("the gradient of {:?} in round {round} is {g:?}", leaf.dims())
            }));
        }
    }
    let mut ins = vec![q.value()?.clone(), q.value()?.clone(), Tensor::zeros(rt, [1, 0, 3], DType::F32)?];
    ins.extend([q.value()?.clone(), k.value()?.clone(), v.value()?.clone()]);
    let refs: Vec<&Tensor<R>> = ins.iter().collect();
    let outs = Tensor::apply(AttentionGrad(Attention::new(1.0)).into(), &refs)?;
    for (i, out) in outs.iter().enumerate().skip(1) {
        let values = out.to_f64s()?;
        verdict = verdict.and(Verdict::when(zero(&values), || format!("output {i} is {values:?}")));
    }
    Ok(verdict)
}

/// Checks the value, and that a backward pass gives the empty input an empty gradient.
fn check<R: Runtime>(rt: &R, row: &Row<R>) -> Result<Verdict> {
    let x = Var::leaf("x", Tensor::zeros(rt, [0, 3], DType::F32)?)?;
    let index = Var::new(Tensor::from_vec(rt, Vec::<i64>::new())?);
    let y = (row.f)(&x, &index)?;
    let values = y.value()?.to_f64s()?;
    let same = |v: &f64| *v == row.value || v.is_nan() && row.value.is_nan();
    let right = y.dims() == row.shape && values.iter().all(same);
    let forward = Verdict::when(right, || {
        format!("{:?} of shape {:?}, expected {} of {:?}", values, y.dims(), row.value, row.shape)
    });
    if !y.requires_grad() {
        return Ok(forward);
    }
    let gradients = backward(&y.sum_all()?)?;
    let shape = gradients.of(&x).map(|g| g.dims().to_vec());
    Ok(forward.and(Verdict::when(shape.as_ref().is_none_or(|s| s == &[0, 3]), || {
        format!("its gradient has the shape {shape:?}")
    })))
}
