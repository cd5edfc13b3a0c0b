//! Products of matrices and convolutions.

use autograd::Var;
use numcore::{
    Result, Runtime,
    ops::{ConvNd, ConvOps, ConvPadding, MatmulOps, PadMode, PadOps, PointwiseOps, ReduceOps, ViewOps, cat, einsum},
};

use super::{
    super::call::{NodeCall, NodeOutputs, array, bad, sizes},
    OperatorRow, one, row,
};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OperatorRow<R>> {
    const CONV: &[&str] = &["auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"];
    const TRANSPOSED: &[&str] =
        &["auto_pad", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads", "strides"];
    match op {
        "MatMul" => row(&[], |c| one(product(c.x(0)?, c.x(1)?))),
        "Gemm" => row(&["alpha", "beta", "transA", "transB"], gemm),
        "Einsum" => row(&["equation"], |c| one(einsum(&c.text("equation", "").replace(' ', ""), &c.all()?))),
        "Conv" => row(CONV, |c| by_axes(c, convolved::<R, 1>, convolved::<R, 2>, convolved::<R, 3>)),
        "ConvTranspose" => row(TRANSPOSED, |c| by_axes(c, transposed::<R, 1>, transposed::<R, 2>, transposed::<R, 3>)),
        "CausalConvWithState" => row(&["activation"], causal),
        _ => None,
    }
}

/// One function for each number of axes after the first two.
pub(super) fn by_axes<R: Runtime>(
    c: &NodeCall<'_, R>,
    one: fn(&NodeCall<'_, R>) -> NodeOutputs<R>,
    two: fn(&NodeCall<'_, R>) -> NodeOutputs<R>,
    three: fn(&NodeCall<'_, R>) -> NodeOutputs<R>,
) -> NodeOutputs<R> {
    match c.x(0)?.dims().len() {
        3 => one(c),
        4 => two(c),
        5 => three(c),
        n => Err(bad(format!("windows over a value with {n} axes, and must have 3 to 5"))),
    }
}

/// Integers have no product of matrices: they are multiplied and summed, and stay of their type.
pub(super) fn product<R: Runtime>(a: &Var<R>, b: &Var<R>) -> Result<Var<R>> {
    if a.dtype().is_float() {
        return a.matmul(b);
    }
    let row = if a.dims().len() == 1 { a.unsqueeze(0)? } else { a.clone() };
    let column = if b.dims().len() == 1 { b.unsqueeze(1)? } else { b.clone() };
    let y = row.unsqueeze(-1)?.mul(&column.unsqueeze(-3)?)?.sum(&[-2])?.to_dtype(a.dtype())?;
    let y = if a.dims().len() == 1 { y.squeeze(-2)? } else { y };
    if b.dims().len() == 1 { y.squeeze(-1) } else { Ok(y) }
}

fn gemm<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let turned = |i: usize, name: &str| if c.flag(name) { c.x(i)?.t() } else { Ok(c.x(i)?.clone()) };
    let y = product(&turned(0, "transA")?, &turned(1, "transB")?)?;
    let alpha = c.float("alpha", 1.0);
    let y = if alpha == 1.0 { y } else { y.mul(alpha)? };
    let (beta, Some(bias)) = (c.float("beta", 1.0), c.opt(2)?) else { return one(Ok(y)) };
    one(if beta == 1.0 { y.add(bias) } else { y.add(&bias.mul(beta)?) })
}

/// The stride, the dilation and the padding of windows along each axis.
pub(super) struct SlidingWindow<const N: usize> {
    pub(super) stride: [usize; N],
    pub(super) dilation: [usize; N],
    pub(super) pads: [(usize, usize); N],
}

impl<const N: usize> SlidingWindow<N> {
    pub(super) fn of<R: Runtime>(c: &NodeCall<'_, R>, x: &Var<R>, kernel: [usize; N]) -> Result<SlidingWindow<N>> {
        let list = |name: &str, default: usize, n: usize| -> Result<Vec<usize>> {
            c.ints(name).map_or(Ok(vec![default; n]), |list| sizes(&list))
        };
        let stride = array("strides", &list("strides", 1, N)?)?;
        let dilation = array("dilations", &list("dilations", 1, N)?)?;
        let given = list("pads", 0, 2 * N)?;
        let dims: [usize; N] = array("the windows' axes", x.dims().get(2..).unwrap_or_default())?;
        if given.len() != 2 * N || stride.contains(&0) || kernel.contains(&0) {
            return Err(bad(format!("windows of {kernel:?} with strides {stride:?} and pads {given:?}")));
        }
        let same = c.text("auto_pad", "NOTSET");
        let pads = std::array::from_fn(|i| match same {
            "SAME_UPPER" | "SAME_LOWER" => {
                let n = dims[i];
                let span = (n.div_ceil(stride[i]).max(1) - 1) * stride[i] + (kernel[i] - 1) * dilation[i] + 1;
                let all = span.saturating_sub(n);
                if same == "SAME_UPPER" { (all / 2, all - all / 2) } else { (all - all / 2, all / 2) }
            }
            "VALID" => (0, 0),
            _ => (given[i], given[i + N]),
        });
        Ok(SlidingWindow { stride, dilation, pads })
    }

    pub(super) fn conv(&self, groups: usize) -> ConvNd<N> {
        let padding = ConvPadding::Sides(self.pads);
        ConvNd { stride: self.stride, padding, mode: PadMode::Constant(0.0), dilation: self.dilation, groups }
    }
}

/// The sizes of a weight's windows.
pub(super) fn kernel<R: Runtime, const N: usize>(weight: &Var<R>) -> Result<[usize; N]> {
    array("the kernel's shape", weight.dims().get(2..).unwrap_or_default())
}

fn convolved<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let window = SlidingWindow::<N>::of(c, x, kernel(weight)?)?;
    one(x.conv(weight, c.opt(2)?, &window.conv(c.size("group", 1)?)))
}

/// All that the kernel reaches, cut to the size that the node states.
fn transposed<R: Runtime, const N: usize>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let kernel: [usize; N] = kernel(weight)?;
    let window = SlidingWindow::of(c, x, kernel)?;
    let extra: [usize; N] = array("output_padding", &sizes(&c.ints("output_padding").unwrap_or(vec![0; N]))?)?;
    let stated = c.ints("output_shape").map(|shape| sizes(&shape)).transpose()?;
    let stated = match &stated {
        Some(shape) => Some(array::<usize, N>("output_shape", &shape[shape.len().saturating_sub(N)..])?),
        None => None,
    };
    let same = c.text("auto_pad", "NOTSET");
    let mut cuts = vec![(0isize, 0isize); 2];
    for i in 0..N {
        let size = x.dims()[i + 2].max(1);
        let full = (window.stride[i] * (size - 1) + (kernel[i] - 1) * window.dilation[i] + 1) as isize;
        let upper = |all: isize| if same == "SAME_UPPER" { all / 2 } else { all - all / 2 };
        let target = match stated {
            Some(shape) => Some(shape[i] as isize),
            None if same.starts_with("SAME") => Some((size * window.stride[i]) as isize),
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
    let options = ConvNd { padding, ..window.conv(c.size("group", 1)?) };
    let y = x.conv_transpose(weight, None, &options, [0; N])?.pad_with(&cuts, PadMode::Constant(0.0))?;
    let Some(bias) = c.opt(2)? else { return one(Ok(y)) };
    let [channels] = array("the bias's shape", &bias.dims())?;
    let mut along = vec![1; N + 2];
    along[1] = channels;
    one(y.add(&bias.reshape(along)?))
}

/// A depthwise convolution that sees only earlier elements, a state included.
fn causal<R: Runtime>(c: &NodeCall<'_, R>) -> NodeOutputs<R> {
    let (x, weight) = (c.x(0)?, c.x(1)?);
    let [width] = kernel(weight)?;
    let past = width.saturating_sub(1);
    let whole = match c.opt(3)? {
        Some(state) => cat(&[state, x], -1)?,
        None => x.pad_with(&[(0, 0), (0, 0), (past as isize, 0)], PadMode::Constant(0.0))?,
    };
    let [_, channels, len] = array("the shape", &whole.dims())?;
    let window = SlidingWindow { stride: [1], dilation: [1], pads: [(0, 0)] };
    let y = whole.conv(weight, c.opt(2)?, &window.conv(channels))?;
    let y = if matches!(c.text("activation", "none"), "silu" | "swish") { y.silu()? } else { y };
    let state = whole.narrow(-1, len.saturating_sub(past), past)?;
    Ok(vec![y, state])
}
