//! Products of matrices and convolutions.

use numcore::ops::{
    ConvNd, ConvOps, ConvPadding, MatmulOps, PadMode, PadOps, PointwiseOps, ReduceOps, ViewOps, einsum,
};

use super::{one, shape::sizes};
use crate::{call::Call, file::Answer, graph::T};

pub fn run(c: &Call<'_>) -> Answer<Option<Vec<T>>> {
    match c.op() {
        "MatMul" => one(product(c.x(0)?, c.x(1)?)),
        "Gemm" => gemm(c),
        "Einsum" => one(einsum(&c.text("equation", "").replace(' ', ""), &c.all()?)),
        "Conv" => by_axes(c, convolved::<1>, convolved::<2>, convolved::<3>),
        "ConvTranspose" => by_axes(c, transposed::<1>, transposed::<2>, transposed::<3>),
        "CausalConvWithState" => causal(c),
        _ => Ok(None),
    }
}

type Found = Answer<Option<Vec<T>>>;

/// One function for each number of axes after the first two.
pub fn by_axes(
    c: &Call<'_>,
    one: impl Fn(&Call<'_>) -> Found,
    two: impl Fn(&Call<'_>) -> Found,
    three: impl Fn(&Call<'_>) -> Found,
) -> Found {
    match c.x(0)?.dims().len() {
        3 => one(c),
        4 => two(c),
        5 => three(c),
        n => Err(format!("{n} axes").into()),
    }
}

/// Integers have no product of matrices: they are multiplied and summed.
pub fn product(a: &T, b: &T) -> numcore::Result<T> {
    if a.dtype().is_float() {
        return a.matmul(b);
    }
    let row = if a.dims().len() == 1 { a.unsqueeze(0)? } else { a.clone() };
    let column = if b.dims().len() == 1 { b.unsqueeze(1)? } else { b.clone() };
    let y = row.unsqueeze(-1)?.mul(&column.unsqueeze(-3)?)?.sum(&[-2])?;
    let y = if a.dims().len() == 1 { y.squeeze(-2)? } else { y };
    if b.dims().len() == 1 { y.squeeze(-1) } else { Ok(y) }
}

fn gemm(c: &Call<'_>) -> Found {
    let turned =
        |i: usize, name: &str| -> Answer<T> { Ok(if c.int(name, 0) == 1 { c.x(i)?.t()? } else { c.x(i)?.clone() }) };
    let y = product(&turned(0, "transA")?, &turned(1, "transB")?)?;
    let y = if c.has("alpha") { y.mul(c.float("alpha", 1.0))? } else { y };
    let Some(bias) = c.opt(2) else { return one(Ok(y)) };
    one(if c.has("beta") { y.add(&bias.mul(c.float("beta", 1.0))?) } else { y.add(bias) })
}

/// The stride, the dilation and the padding of windows along each axis.
pub struct Window<const N: usize> {
    pub stride: [usize; N],
    pub dilation: [usize; N],
    pub pads: [(usize, usize); N],
}

impl<const N: usize> Window<N> {
    pub fn of(c: &Call<'_>, x: &T, kernel: [usize; N]) -> Answer<Window<N>> {
        let list = |name: &str| -> Answer<[usize; N]> {
            Ok(c.ints(name).map(|v| sizes(&v)).unwrap_or(vec![1; N])[..].try_into()?)
        };
        let (stride, dilation) = (list("strides")?, list("dilations")?);
        let given = c.ints("pads").map(|v| sizes(&v)).unwrap_or(vec![0; 2 * N]);
        let same = c.text("auto_pad", "NOTSET").to_string();
        let pads = std::array::from_fn(|i| {
            if !same.starts_with("SAME") {
                return (given[i], given[i + N]);
            }
            let n = x.dims()[i + 2];
            let span = (n.div_ceil(stride[i]) - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1;
            let all = span.saturating_sub(n);
            if same == "SAME_UPPER" { (all / 2, all - all / 2) } else { (all - all / 2, all / 2) }
        });
        Ok(Window { stride, dilation, pads })
    }

    pub fn conv(&self, groups: usize) -> ConvNd<N> {
        let padding = ConvPadding::Sides(self.pads);
        ConvNd { stride: self.stride, padding, mode: PadMode::Constant(0.0), dilation: self.dilation, groups }
    }
}

fn convolved<const N: usize>(c: &Call<'_>) -> Found {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let window = Window::<N>::of(c, x, weight.dims()[2..].try_into()?)?;
    one(x.conv(weight, c.opt(2), &window.conv(c.int("group", 1) as usize)))
}

/// The whole of what the kernel reaches, cut to what is asked for.
fn transposed<const N: usize>(c: &Call<'_>) -> Found {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let kernel: [usize; N] = weight.dims()[2..].try_into()?;
    let window = Window::of(c, x, kernel)?;
    let extra = c.ints("output_padding").unwrap_or(vec![0; N]);
    let stated = c.ints("output_shape");
    let same = c.text("auto_pad", "NOTSET");
    let mut cuts = vec![(0isize, 0isize); 2];
    for i in 0..N {
        let full = (window.stride[i] * (x.dims()[i + 2] - 1) + (kernel[i] - 1) * window.dilation[i] + 1) as isize;
        let upper = |all: isize| if same == "SAME_UPPER" { all / 2 } else { all - all / 2 };
        let target = match &stated {
            Some(shape) => Some(shape[shape.len() - N + i] as isize),
            None if same.starts_with("SAME") => Some((x.dims()[i + 2] * window.stride[i]) as isize),
            None => None,
        };
        cuts.push(match target {
            Some(to) => {
                let before = upper(full + extra[i] as isize - to).max(0);
                (-before, to - full + before)
            }
            None => (-(window.pads[i].0 as isize), extra[i] as isize - window.pads[i].1 as isize),
        });
    }
    let padding = ConvPadding::Symmetric([0; N]);
    let options = ConvNd { padding, ..window.conv(c.int("group", 1) as usize) };
    let y = x.conv_transpose(weight, None, &options, [0; N])?.pad_with(&cuts, PadMode::Constant(0.0))?;
    let Some(bias) = c.opt(2) else { return one(Ok(y)) };
    let mut along = vec![1; N + 2];
    along[1] = bias.dims()[0];
    one(y.add(&bias.reshape(along)?))
}

/// A depthwise convolution that sees only what came before, a state included.
fn causal(c: &Call<'_>) -> Found {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let past = weight.dims()[2] - 1;
    let whole = match c.opt(3) {
        Some(state) => numcore::ops::cat(&[state, x], -1)?,
        None => x.pad_with(&[(0, 0), (0, 0), (past as isize, 0)], PadMode::Constant(0.0))?,
    };
    let window = Window { stride: [1], dilation: [1], pads: [(0, 0)] };
    let y = whole.conv(weight, c.opt(2), &window.conv(x.dims()[1]))?;
    let y = if matches!(c.text("activation", "none"), "silu" | "swish") { y.silu()? } else { y };
    let state = whole.narrow(-1, whole.dims()[2] - past, past)?;
    Ok(Some(vec![y, state]))
}
