//! Convolutions and pools.

use autograd::Var;
use numcore::{
    Result, Runtime,
    fused::{Conv1dOptions, ConvOptions, NnOps},
    ops::PointwiseOps,
};

use crate::suite::{
    case::{OpCase, case},
    sample::{Sample, centered, spread},
};

const PLAIN: ConvOptions = ConvOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };

fn conv<R: Runtime>(x: &[Var<R>], options: ConvOptions) -> Result<Var<R>> {
    x[0].conv2d(&x[1], x.get(2), options)
}

fn transposed<R: Runtime>(x: &[Var<R>], options: ConvOptions, output_padding: [usize; 2]) -> Result<Var<R>> {
    x[0].conv_transpose2d(&x[1], x.get(2), options, output_padding)
}

fn inputs(x: &[usize], w: &[usize], bias: usize) -> Vec<Sample> {
    vec![centered(x), centered(w), centered(&[bias])]
}

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = convolutions();
    cases.extend(transposes());
    cases.extend(pools());
    cases.into_iter().map(|c| c.slack(8.0)).collect()
}

fn convolutions<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("conv2d", inputs(&[1, 2, 4, 3], &[2, 2, 2, 2], 2), |x| conv(x, PLAIN)),
        case("conv2d without bias", inputs(&[2, 1, 3, 3], &[2, 1, 3, 2], 0)[..2].to_vec(), |x| conv(x, PLAIN)),
        case("conv2d stride", inputs(&[1, 1, 5, 6], &[1, 1, 2, 3], 1), |x| {
            conv(x, ConvOptions { stride: [2, 3], ..PLAIN })
        }),
        case("conv2d padding", inputs(&[1, 1, 3, 2], &[1, 1, 3, 3], 1), |x| {
            conv(x, ConvOptions { padding: [1, 2], ..PLAIN })
        }),
        case("conv2d dilation", inputs(&[1, 1, 5, 4], &[1, 1, 2, 2], 1), |x| {
            conv(x, ConvOptions { dilation: [2, 3], ..PLAIN })
        }),
        case("conv2d groups", inputs(&[1, 4, 3, 2], &[2, 2, 2, 2], 2), |x| conv(x, ConvOptions { groups: 2, ..PLAIN })),
        case("conv2d of each channel", inputs(&[1, 3, 3, 3], &[3, 1, 2, 2], 3), |x| {
            conv(x, ConvOptions { groups: 3, ..PLAIN })
        }),
        case("conv2d with everything", inputs(&[2, 2, 5, 6], &[4, 1, 2, 3], 4), |x| {
            conv(x, ConvOptions { stride: [2, 1], padding: [1, 2], dilation: [2, 1], groups: 2 })
        }),
        case("conv2d of points", inputs(&[1, 3, 2, 2], &[2, 3, 1, 1], 2), |x| conv(x, PLAIN)),
        case("conv2d that leaves a rest", inputs(&[1, 1, 6, 6], &[1, 1, 3, 3], 1), |x| {
            conv(x, ConvOptions { stride: [2, 2], ..PLAIN })
        }),
        case("conv1d", inputs(&[2, 2, 5], &[2, 2, 3], 2), |x| x[0].conv1d(&x[1], x.get(2), Default::default())),
        case("conv1d with everything", inputs(&[1, 2, 7], &[2, 1, 2], 2), |x| {
            x[0].conv1d(&x[1], x.get(2), Conv1dOptions { stride: 2, padding: 1, dilation: 2, groups: 2 })
        }),
    ]
}

fn transposes<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("conv_transpose2d", inputs(&[1, 2, 2, 3], &[2, 1, 2, 2], 1), |x| transposed(x, PLAIN, [0, 0])),
        case("conv_transpose2d stride", inputs(&[1, 1, 2, 2], &[1, 2, 3, 2], 2), |x| {
            transposed(x, ConvOptions { stride: [2, 2], ..PLAIN }, [0, 0])
        }),
        case(
            "conv_transpose2d with as much output padding as dilation allows",
            inputs(&[1, 2, 3, 2], &[2, 1, 2, 2], 1),
            |x| transposed(x, ConvOptions { stride: [1, 2], padding: [1, 0], dilation: [3, 3], groups: 1 }, [2, 2]),
        ),
        case("conv_transpose2d with everything", inputs(&[1, 2, 2, 3], &[2, 1, 3, 2], 2), |x| {
            transposed(x, ConvOptions { stride: [2, 3], padding: [1, 0], dilation: [1, 2], groups: 2 }, [1, 2])
        }),
    ]
}

fn pools<R: Runtime>() -> Vec<OpCase<R>> {
    let image = || [spread(&[1, 2, 5, 4], -2.0, 2.0)];
    vec![
        case("max_pool2d", image(), |x| x[0].max_pool2d([2, 2], [2, 2], [0, 0])).once(),
        case("max_pool2d overlapping", image(), |x| x[0].max_pool2d([3, 2], [1, 1], [0, 0])?.square()),
        case("max_pool2d padded", image(), |x| x[0].max_pool2d([3, 3], [2, 2], [1, 1])).once(),
        case("avg_pool2d", image(), |x| x[0].avg_pool2d([2, 2], [2, 2], [0, 0])?.square()),
        case("avg_pool2d padded", image(), |x| x[0].avg_pool2d([3, 2], [2, 1], [1, 1])?.square()),
        case("adaptive_avg_pool2d", image(), |x| x[0].adaptive_avg_pool2d([2, 3])?.square()),
        case("adaptive_avg_pool2d to one", image(), |x| x[0].adaptive_avg_pool2d([1, 1])?.square()),
        case("adaptive_max_pool2d", image(), |x| x[0].adaptive_max_pool2d([3, 2])?.square()),
    ]
}
