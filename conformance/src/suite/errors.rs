//! Invalid calls: each is an error that names the operation, never a panic.

use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{ConvOptions, NnOps, SdpaOptions},
    ops::{
        FftNorm, FftOps, IndexOps, JoinOps, MatmulOps, PointwiseOps, ReduceOps, RepeatOps, ScanOps, SortOps, ViewOps,
        cat, einsum, stack,
    },
    pointwise::Program,
};

use super::report::{Section, Verdict};

/// Operands of the calls.
struct Given<R: Runtime> {
    rt: R,
    /// `[2, 3]` of `f32`.
    x: Tensor<R>,
    /// `[3, 4]` of `f32`.
    y: Tensor<R>,
    /// `[2, 3]` of `i64`.
    i: Tensor<R>,
    /// `[2, 3]` of `bool`.
    b: Tensor<R>,
    /// `[2, 3]` of `bf16`.
    h: Tensor<R>,
}

/// A call, and the word that its message must contain.
type Row<R> = (&'static str, fn(&Given<R>) -> Result<Tensor<R>>);

fn shapes<R: Runtime>() -> Vec<Row<R>> {
    vec![
        ("add", |g| g.x.add(&g.y)),
        ("where", |g| g.x.where_cond(&g.b, &g.y)),
        ("sum", |g| g.x.sum(&[2])),
        ("sum", |g| g.x.sum(&[0, -2])),
        ("sum_all", |g| g.x.sum(&[])),
        ("var_all", |g| g.x.var(&[], 1)),
        ("any_all", |g| g.b.any(&[])),
        ("name each axis", |g| g.x.logsumexp(&[])),
        ("name each axis", |g| g.x.flip(&[])),
        ("name each axis", |g| g.x.roll_axes(&[], &[])),
        ("name each axis", |g| g.x.fftn(&[], FftNorm::Ortho)),
        ("name each axis", |g| g.x.irfftn(None, &[], FftNorm::Ortho)),
        ("name each axis", |g| g.x.fftshift(&[])),
        ("amax", |g| g.x.narrow(0, 0, 0)?.amax(&[0])),
        ("argmax", |g| g.x.narrow(1, 0, 0)?.argmax(1)),
        ("argmin", |g| g.x.argmin(5)),
        ("cumsum", |g| g.x.cumsum(2)),
        ("linear_scan", |g| g.x.linear_scan(&g.y, 0)),
        ("sort", |g| Ok(g.x.sort(3, false)?.0)),
        ("topk", |g| Ok(g.x.topk(4, 1)?.0)),
        ("topk_smallest", |g| Ok(g.x.topk_smallest(4, 1)?.0)),
        ("prelu", |g| g.x.prelu(&g.x)),
        ("chunk", |g| g.x.glu(1)),
        ("reshape", |g| g.x.reshape([4, 2])),
        ("shape", |g| g.x.reshape([1; 9])),
        ("permute", |g| g.x.permute(&[0, 0])),
        ("permute", |g| g.x.permute(&[0])),
        ("transpose", |g| g.x.transpose(0, 2)),
        ("broadcast_to", |g| g.x.broadcast_to([3, 3])),
        ("broadcast_to", |g| g.x.broadcast_to([3])),
        ("slice", |g| g.x.narrow(1, 2, 2)),
        ("slice", |g| g.x.slice(0, 0, 1, 0)),
        ("slice", |g| g.x.narrow(1, usize::MAX, 2)),
        ("select: shapes [2, 3]: axis 0 of size 2 has no position 2", |g| g.x.select(0, 2)),
        ("split", |g| Ok(g.x.split(0, 0)?.remove(0))),
        ("chunk", |g| Ok(g.x.chunk(1, 2)?.remove(0))),
        ("squeeze", |g| g.x.squeeze(0)),
        ("unsqueeze", |g| g.x.unsqueeze(4)),
        ("flatten", |g| g.x.flatten(1, 0)),
        ("flip", |g| g.x.flip(&[0, 0])),
        ("unfold", |g| g.x.unfold(1, 4, 1, 1)),
        ("unfold", |g| g.x.unfold(1, 2, 0, 1)),
        ("unfold", |g| g.x.unfold(1, 0, 1, 1)),
        ("fold", |g| g.x.fold(0, 9, 1, 1)),
        ("roll", |g| g.x.roll(2, 1)),
        ("pad", |g| g.x.pad(&[(1, 1)], 0.0)),
        ("tril", |g| g.x.select(0, 0)?.tril(0)),
        ("cat", |g| cat(&[&g.x, &g.y], 0)),
        ("cat", |g| cat(&[&g.x, &g.x.unsqueeze(0)?], 0)),
        ("cat", |_| cat(&[], 0)),
        ("cat", |_| stack(&[], 0)),
        ("matmul", |g| g.x.matmul(&g.x)),
        ("matmul", |g| g.x.unsqueeze(0)?.broadcast_to([2, 2, 3])?.matmul(&g.y.unsqueeze(0)?.broadcast_to([3, 3, 4])?)),
        ("matmul", |g| g.x.sum_all()?.matmul(&g.y)),
        ("einsum", |g| einsum("i-j,jk", &[&g.x, &g.y])),
        ("einsum", |g| einsum("i..,jk", &[&g.x, &g.y])),
        ("einsum", |g| einsum("......,jk", &[&g.x, &g.y])),
        ("einsum", |g| einsum("ii", &[&g.x])),
        ("einsum", |g| einsum("ij->ii", &[&g.x])),
        ("einsum", |g| einsum("ijk...", &[&g.x])),
        ("einsum", |_| einsum("", &[])),
        ("einsum", |g| einsum("ij,kl->il", &[&g.x])),
        ("einsum", |g| einsum("ijk->i", &[&g.x])),
        ("einsum", |g| einsum("ij,ji->i", &[&g.x, &g.y])),
        ("einsum", |g| einsum("ij->iz", &[&g.x])),
    ]
}

fn indices<R: Runtime>() -> Vec<Row<R>> {
    fn at<R: Runtime>(g: &Given<R>, values: &[i64]) -> Result<Tensor<R>> {
        Tensor::from_slice(&g.rt, [values.len()], values)
    }
    vec![
        ("gather", |g| g.x.gather(1, &g.i.add(3.0)?)),
        ("gather", |g| g.x.gather(0, &g.i.sub(1.0)?)),
        ("gather", |g| g.x.gather(1, &g.x)),
        ("gather", |g| g.x.gather(1, &g.i.unsqueeze(0)?)),
        ("gather", |g| g.x.index_select(0, &at(g, &[0, 2])?)),
        ("gather", |g| g.x.index_select(1, &at(g, &[-1])?)),
        ("index_select", |g| g.x.index_select(0, &g.i)),
        ("index", |g| g.x.embedding(&at(g, &[5])?)),
        ("embedding", |g| g.x.unsqueeze(0)?.embedding(&at(g, &[0])?)),
        ("scatter_add", |g| g.x.scatter_add(1, &g.i.add(7.0)?, &g.x)),
        ("scatter_add", |g| g.x.index_add(0, &at(g, &[0, 9])?, &g.x)),
        ("scatter_add", |g| g.x.scatter_add(1, &g.i, &g.h)),
        ("one_hot", |g| g.x.one_hot(3)),
        ("index", |g| g.i.one_hot(1)),
        ("index", |g| g.i.sub(1.0)?.one_hot(3)),
        ("cross_entropy", |g| g.x.cross_entropy(&at(g, &[0, 1, 2])?)),
        ("gather", |g| {
            // A fused kernel may report the index as `cross_entropy`, and only at the next wait.
            let y = g.x.cross_entropy(&at(g, &[0, 3])?);
            let y = y.and_then(|t| t.to_bytes().map(|_| t));
            y.map_err(|e| {
                if e.to_string().contains("cross_entropy") { numcore::Error::usage("gather", e.to_string()) } else { e }
            })
        }),
    ]
}

fn types<R: Runtime>() -> Vec<Row<R>> {
    vec![
        ("add", |g| g.x.add(&g.h)),
        ("mul", |g| g.x.mul(&g.i)),
        ("exp", |g| g.i.exp()),
        ("add", |g| g.i.add(0.5)),
        ("logical_not", |g| g.x.logical_not()),
        ("logical_and", |g| g.x.logical_and(&g.x)),
        ("where", |g| g.x.where_cond(&g.x, &g.x)),
        ("masked_fill", |g| g.x.masked_fill(&g.i, 0.0)),
        ("mean", |g| g.i.mean_all()),
        ("any", |g| g.x.any_all()),
        ("linear_scan", |g| g.i.linear_scan(&g.i, 0)),
        ("matmul", |g| g.x.matmul(&g.h.t()?)),
        ("matmul", |g| g.i.matmul(&g.i.t()?)),
        ("cat", |g| cat(&[&g.x, &g.h], 0)),
        ("softmax", |g| g.i.softmax(-1)),
        ("layer_norm", |g| g.x.layer_norm(Some(&g.h.select(0, 0)?), None, 1e-5)),
        ("cross_entropy", |g| g.x.cross_entropy(&g.x.select(1, 0)?)),
        ("to_vec", |g| Tensor::from_vec(&g.rt, g.x.to_vec::<f64>()?)),
        ("from_slice", |g| Tensor::from_slice(&g.rt, [5], &[1f32, 2.0])),
        ("item", |g| g.x.item().map(|_| g.x.clone())),
        ("uniform", |g| Tensor::uniform(&g.rt, [2], DType::I64, 0.0, 1.0, 1)),
        ("uniform: low is 3, and must be at most high, which is 1", |g| {
            Tensor::uniform(&g.rt, [2], DType::F32, 3.0, 1.0, 1)
        }),
        ("uniform", |g| Tensor::uniform(&g.rt, [2], DType::F32, f64::NAN, 1.0, 1)),
        ("normal: standard deviation is -1, and must be at least 0", |g| {
            Tensor::normal(&g.rt, [2], DType::F32, 0.0, -1.0, 1)
        }),
        ("full: value is 300, and must be an exact u8", |g| Tensor::full(&g.rt, [2], DType::U8, 300i64)),
        ("full: value is -1.5, and must be an exact u8", |g| Tensor::full(&g.rt, [2], DType::U8, -1.5)),
        ("full: value is -1, and must be an exact u32", |g| Tensor::full(&g.rt, [2], DType::U32, -1i64)),
        ("full: value is 0.5, and must be an exact i64", |g| Tensor::full(&g.rt, [2], DType::I64, 0.5)),
        ("full: value is NaN, and must be an exact i32", |g| Tensor::full(&g.rt, [2], DType::I32, f64::NAN)),
        ("full", |g| Tensor::full(&g.rt, [2], DType::I64, u64::MAX)),
        ("arange: value is 300, and must be an exact u8", |g| Tensor::arange(&g.rt, 0i64, 100i64, 4, DType::U8)),
        ("arange: value is -1, and must be an exact u8", |g| Tensor::arange(&g.rt, 1i64, -1i64, 3, DType::U8)),
        ("arange", |g| Tensor::arange(&g.rt, 0.0, 0.5, 3, DType::I64)),
        ("arange", |g| Tensor::arange(&g.rt, 0i64, i64::MAX, 3, DType::I64)),
    ]
}

fn networks<R: Runtime>() -> Vec<Row<R>> {
    const PLAIN: ConvOptions = ConvOptions { stride: [1; 2], padding: [0; 2], dilation: [1; 2], groups: 1 };
    fn image<R: Runtime>(g: &Given<R>, shape: [usize; 4]) -> Result<Tensor<R>> {
        Tensor::zeros(&g.rt, shape, DType::F32)
    }
    vec![
        ("layer_norm", |g| g.x.layer_norm(Some(&g.y), None, 1e-5)),
        ("group_norm", |g| g.x.group_norm(2, None, None, 1e-5)),
        ("batch_norm", |g| Ok(g.x.select(0, 0)?.batch_norm_train(None, None, 1e-5)?.0)),
        ("attention", |g| g.x.attention(&g.x, &g.x)),
        ("attention", |g| image(g, [1, 3, 2, 4])?.attention(&image(g, [1, 2, 2, 4])?, &image(g, [1, 2, 2, 4])?)),
        ("attention", |g| {
            let q = image(g, [1, 1, 2, 4])?;
            q.attention_with(&q, &q, SdpaOptions { mask: Some(&g.y), ..Default::default() })
        }),
        ("2 input channels, the weight has 3", |g| {
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [1, 3, 2, 2])?, None, PLAIN)
        }),
        ("3 input channels, the weight has 1 for each of 2 groups", |g| {
            image(g, [1, 3, 4, 4])?.conv2d(&image(g, [2, 1, 2, 2])?, None, ConvOptions { groups: 2, ..PLAIN })
        }),
        ("3 output channels do not divide into 2 groups", |g| {
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [3, 1, 2, 2])?, None, ConvOptions { groups: 2, ..PLAIN })
        }),
        ("a kernel of size 0 by 0", |g| image(g, [1, 2, 4, 4])?.conv2d(&image(g, [1, 2, 0, 0])?, None, PLAIN)),
        ("conv", |g| image(g, [1, 2, 2, 2])?.conv2d(&image(g, [1, 2, 3, 3])?, None, PLAIN)),
        ("conv", |g| {
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [2, 1, 2, 2])?, None, ConvOptions { groups: 0, ..PLAIN })
        }),
        ("conv", |g| {
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [2, 2, 2, 2])?, None, ConvOptions { stride: [0, 1], ..PLAIN })
        }),
        ("conv", |g| {
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [2, 2, 2, 2])?, None, ConvOptions { dilation: [1, 0], ..PLAIN })
        }),
        ("conv", |g| {
            let bias = Tensor::zeros(&g.rt, [3], DType::F32)?;
            image(g, [1, 2, 4, 4])?.conv2d(&image(g, [2, 2, 2, 2])?, Some(&bias), PLAIN)
        }),
        ("conv", |g| g.x.conv2d(&g.y, None, PLAIN)),
        ("conv1d", |g| g.x.conv1d(&g.y, None, Default::default())),
        ("conv_transpose2d", |g| g.x.conv_transpose2d(&g.y, None, PLAIN, [0, 0])),
        ("conv_transpose2d", |g| {
            image(g, [1, 1, 2, 2])?.conv_transpose2d(
                &image(g, [1, 1, 2, 2])?,
                None,
                ConvOptions { padding: [5, 5], ..PLAIN },
                [0, 0],
            )
        }),
        ("the output padding [2, 0] must be less than the stride", |g| {
            let (x, w) = (image(g, [1, 1, 4, 4])?, image(g, [1, 1, 3, 3])?);
            x.conv_transpose2d(&w, None, ConvOptions { dilation: [2, 1], ..PLAIN }, [2, 0])
        }),
        ("conv_transpose2d: shapes [1, 2, 4, 4], [3, 1, 2, 2]: 2 input channels, the weight has 3", |g| {
            image(g, [1, 2, 4, 4])?.conv_transpose2d(&image(g, [3, 1, 2, 2])?, None, PLAIN, [0, 0])
        }),
        ("batch_norm: shapes [1, 2, 4, 4], [3]: 2 channels, not 3", |g| {
            let three = Tensor::ones(&g.rt, [3], DType::F32)?;
            Ok(image(g, [1, 2, 4, 4])?.batch_norm_train(Some(&three), None, 1e-5)?.0)
        }),
        ("batch_norm: shapes [1, 2, 4, 4], [3]", |g| {
            let three = Tensor::ones(&g.rt, [3], DType::F32)?;
            image(g, [1, 2, 4, 4])?.batch_norm(&three, &three, None, None, 1e-5)
        }),
        ("linear: shapes [2, 3], [3, 4], [3]: x has 3 features, the weight takes 4", |g| {
            let bias = Tensor::ones(&g.rt, [3], DType::F32)?;
            g.x.linear(&g.y, Some(&bias))
        }),
        ("max_pool2d", |g| image(g, [1, 1, 4, 4])?.max_pool2d([2, 2], [2, 2], [2, 0])),
        ("max_pool2d", |g| g.x.max_pool2d([2, 2], [2, 2], [0, 0])),
        ("avg_pool2d", |g| image(g, [1, 1, 2, 2])?.avg_pool2d([3, 3], [1, 1], [0, 0])),
        ("adaptive_avg_pool2d", |g| image(g, [1, 1, 2, 2])?.adaptive_avg_pool2d([0, 1])),
        ("rope", |g| g.x.rope(1e4, 0)),
        ("dropout", |g| g.x.dropout(1.0, 0)),
        ("dropout", |g| g.x.dropout(f64::NAN, 0)),
        ("custom", |g| {
            let program = Program::new("custom", |[a, b], []| [a + b]);
            g.x.apply_program(&program, &[], &[])
        }),
    ]
}

pub(crate) fn errors<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("errors");
    let given = Given::new(rt);
    let families: [(&str, Vec<Row<R>>); 4] =
        [("shapes", shapes()), ("indices", indices()), ("types", types()), ("networks", networks())];
    for (family, rows) in families {
        for (n, (word, call)) in rows.into_iter().enumerate() {
            section.check(format!("{family} {n}: {word}"), || {
                let given = given.as_ref().map_err(|e| numcore::Error::argument("conformance", e.to_string()))?;
                let outcome = call(given).and_then(|t| t.to_bytes().map(|_| t));
                Ok(match outcome {
                    Ok(t) => Verdict::failed(format!("no error, but {t:?}")),
                    Err(e) => {
                        Verdict::when(e.to_string().contains(word), || format!("the error does not name `{word}`: {e}"))
                    }
                })
            });
        }
    }
    section
}

impl<R: Runtime> Given<R> {
    fn new(rt: &R) -> Result<Self> {
        let x = Tensor::arange(rt, 0.0, 0.5, 6, DType::F32)?.reshape([2, 3])?;
        let y = Tensor::ones(rt, [3, 4], DType::F32)?;
        let i = Tensor::from_slice(rt, [2, 3], &[0i64, 1, 0, 1, 1, 0])?;
        Ok(Given { b: i.eq(0.0)?, h: x.to_dtype(DType::BF16)?, rt: rt.clone(), x, y, i })
    }
}
