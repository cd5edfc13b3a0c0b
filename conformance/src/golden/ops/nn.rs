//! Neural-network ops of the op tables.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Shape,
    fused::{Conv1dOptions, ConvOptions, NnOps, SdpaOptions},
    ops::{Apply, PointwiseOps, ViewOps},
};

use crate::golden::call::{Call, OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "layer_norm" => |c| {
            let eps = c.attrs.f64("eps", 1e-5)?;
            normalized(c, |x, w| x.layer_norm(w, c.maybe(2).map(flat).transpose()?.as_ref(), eps))
        },
        "rms_norm" => |c| {
            let eps = c.attrs.f64("eps", c.x(0)?.dtype().epsilon())?;
            normalized(c, |x, w| x.rms_norm(w, eps))
        },
        "group_norm" => |c| {
            let groups = c.attrs.need(&["groups", "num_groups"])?;
            one(c.x(0)?.group_norm(groups, c.maybe(1), c.maybe(2), c.attrs.f64("eps", 1e-5)?))
        },
        "batch_norm_train" => |c| {
            // An option of the running statistics, which are not compared.
            c.attrs.skip(&["momentum"]);
            let (y, mean, variance) = c.x(0)?.batch_norm_train(c.maybe(1), c.maybe(2), c.attrs.f64("eps", 1e-5)?)?;
            Ok(vec![y, mean, variance])
        },
        "batch_norm_eval" => {
            |c| one(c.x(0)?.batch_norm(c.x(1)?, c.x(2)?, c.maybe(3), c.maybe(4), c.attrs.f64("eps", 1e-5)?))
        }
        "attention" => |c| attention(c, None),
        "attention_mask" => |c| attention(c, Some(c.x(3)?)),
        "conv1d" => conv1d,
        "conv2d" => |c| one(c.x(0)?.conv2d(c.x(1)?, c.maybe(2), conv_options(c)?)),
        "conv_transpose2d" => |c| {
            let output_padding = c.attrs.pair(&["output_padding"], 0)?;
            one(c.x(0)?.conv_transpose2d(c.x(1)?, c.maybe(2), conv_options(c)?, output_padding))
        },
        "max_pool2d" => |c| pool(c, |x, k, s, p| x.max_pool2d(k, s, p)),
        "avg_pool2d" => |c| pool(c, |x, k, s, p| x.avg_pool2d(k, s, p)),
        "adaptive_avg_pool2d" => |c| one(c.x(0)?.adaptive_avg_pool2d(c.attrs.pair(&["size", "output_size"], 1)?)),
        "adaptive_max_pool2d" => |c| one(c.x(0)?.adaptive_max_pool2d(c.attrs.pair(&["size", "output_size"], 1)?)),
        "rope" => rope,
        "swiglu" => |c| one(c.x(0)?.swiglu(c.x(1)?)),
        "glu" => |c| {
            let halves = c.x(0)?.chunk(c.attrs.isize(&["dim"], -1)?, 2)?;
            one(halves[0].mul(&halves[1].sigmoid()?))
        },
        _ => return None,
    };
    Some(row)
}

/// A norm over the axes of its weight; several axes count as one.
fn normalized<R: Runtime>(
    c: &Call<'_, R>,
    norm: impl Fn(&Var<R>, Option<&Var<R>>) -> Result<Var<R>>,
) -> Result<Vec<Var<R>>> {
    let x = c.x(0)?;
    let shape = x.spec().shape;
    let stated = c.attrs.list(&["normalized_shape"])?.len();
    let axes = c.maybe(1).map_or(stated.max(1), |w| w.dims().len());
    if axes == 1 {
        return one(norm(x, c.maybe(1)));
    }
    let lead = shape.rank().checked_sub(axes).ok_or_else(|| too_many(shape))?;
    let rows = x.reshape([&shape[..lead], &[shape[lead..].iter().product()]].concat())?;
    one(norm(&rows, c.maybe(1).map(flat).transpose()?.as_ref())?.reshape(shape))
}

fn too_many(shape: Shape) -> Error {
    Error::shape("golden", &[shape], "has fewer axes than the norm's weight")
}

fn flat<R: Runtime>(x: &Var<R>) -> Result<Var<R>> {
    x.reshape([x.spec().shape.numel()])
}

fn attention<R: Runtime>(c: &Call<'_, R>, mask: Option<&Var<R>>) -> Result<Vec<Var<R>>> {
    let (q, k, v) = (c.x(0)?, c.x(1)?, c.x(2)?);
    c.attrs.skip(&["enable_gqa"]);
    c.attrs.only("dropout_p", &0.0.into())?;
    // The attributes for head counts must equal those of the shapes.
    for (name, x) in [("heads", q), ("kv_heads", k)] {
        if c.attrs.maybe_usize(&[name])?.is_some_and(|n| n != x.dims()[1]) {
            return Err(Error::shape("golden", &[x.spec().shape], format!("attribute `{name}` says otherwise")));
        }
    }
    one(q.attention_with(
        k,
        v,
        SdpaOptions {
            mask,
            causal: c.attrs.bool(&["causal", "is_causal"], false)?,
            scale: c.attrs.maybe_f64("scale")?,
            ..Default::default()
        },
    ))
}

fn conv_options<R: Runtime>(c: &Call<'_, R>) -> Result<ConvOptions> {
    Ok(ConvOptions {
        stride: c.attrs.pair(&["stride"], 1)?,
        padding: c.attrs.pair(&["padding"], 0)?,
        dilation: c.attrs.pair(&["dilation"], 1)?,
        groups: c.attrs.usize(&["groups"], 1)?,
    })
}

fn conv1d<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let ConvOptions { stride: [stride, _], padding: [padding, _], dilation: [dilation, _], groups } = conv_options(c)?;
    one(c.x(0)?.conv1d(c.x(1)?, c.maybe(2), Conv1dOptions { stride, padding, dilation, groups }))
}

/// A pooling op. Without a stride, windows do not overlap.
fn pool<R: Runtime>(
    c: &Call<'_, R>,
    f: impl Fn(&Var<R>, [usize; 2], [usize; 2], [usize; 2]) -> Result<Var<R>>,
) -> Result<Vec<Var<R>>> {
    let kernel = c.attrs.pair(&["kernel", "kernel_size"], 1)?;
    c.attrs.only("ceil_mode", &false.into())?;
    c.attrs.only("count_include_pad", &true.into())?;
    let stride = match c.attrs.list(&["stride"])?[..] {
        [] => kernel,
        _ => c.attrs.pair(&["stride"], 1)?,
    };
    one(f(c.x(0)?, kernel, stride, c.attrs.pair(&["padding"], 0)?))
}

/// Rotary embeddings. The layout selects the paired components: `half` i with i + D/2, `interleaved` 2i with 2i + 1.
fn rope<R: Runtime>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (x, base) = (c.x(0)?, c.attrs.f64("base", 10_000.0)?);
    let start = c.attrs.usize(&["start", "offset"], 0)?;
    if c.attrs.str("layout", "half")? != "interleaved" {
        return one(x.rope(base, start));
    }
    let shape = x.spec().shape;
    let (lead, d) = (&shape[..shape.rank() - 1], shape[shape.rank() - 1]);
    let swap = |x: &Var<R>, inner: [usize; 2]| x.reshape([lead, &inner].concat())?.t()?.reshape(shape);
    one(swap(&swap(x, [d / 2, 2])?.rope(base, start)?, [2, d / 2]))
}
