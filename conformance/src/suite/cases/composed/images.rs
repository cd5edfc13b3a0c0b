//! Images resized, sampled and unfolded; convolutions over one to three axes.

use autograd::Var;
use numcore::{
    Result, Runtime,
    ops::{
        ColumnOps, ConvNd, ConvOps, ConvPadding, GridSample, GridSampleOps, Interpolate, InterpolateOps,
        Interpolation::{self, *},
        OutsideGrid, PadMode, PointwiseOps, PoolOptions, Resize,
    },
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::{Sample, centered, spread},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = resized();
    cases.extend(sampled());
    cases.extend(unfolded());
    cases.extend(convolutions());
    cases.into_iter().map(|c| c.slack(8.0)).collect()
}

fn to<R: Runtime>(x: &[Var<R>], size: &[usize], mode: Interpolation) -> Result<Var<R>> {
    x[0].interpolate(Resize::Size(size), Interpolate::new(mode))?.square()
}

fn resized<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, &[usize], CaseFn<R>); 12] = [
        ("interpolate nearest", &[1, 2, 3, 2], |x| to(x, &[5, 4], Nearest)),
        ("interpolate nearest-exact", &[1, 2, 5], |x| to(x, &[3], NearestExact)),
        ("interpolate linear", &[1, 2, 4], |x| to(x, &[7], Linear)),
        ("interpolate bilinear", &[1, 1, 3, 4], |x| to(x, &[5, 2], Linear)),
        ("interpolate trilinear", &[1, 1, 2, 3, 2], |x| to(x, &[3, 2, 4], Linear)),
        ("interpolate bicubic", &[1, 1, 3, 4], |x| to(x, &[5, 6], Cubic)),
        ("interpolate area", &[1, 1, 5, 3], |x| to(x, &[3, 5], Area)),
        ("interpolate with corners", &[1, 2, 3, 3], |x| {
            let options = Interpolate { align_corners: true, ..Interpolate::new(Linear) };
            x[0].interpolate(Resize::Size(&[5, 2]), options)?.square()
        }),
        ("interpolate with a filter", &[1, 1, 7, 5], |x| {
            let options = Interpolate { antialias: true, ..Interpolate::new(Cubic) };
            x[0].interpolate(Resize::Scale(&[0.5, 1.7]), options)?.square()
        }),
        ("interpolate by factors", &[1, 1, 3, 4], |x| {
            x[0].interpolate(Resize::Scale(&[1.4, 0.6]), Interpolate::new(Linear))?.square()
        }),
        ("pixel_shuffle", &[1, 8, 2, 3], |x| x[0].pixel_shuffle(2)?.square()),
        ("pixel_unshuffle", &[2, 4, 6], |x| x[0].pixel_unshuffle(2)?.square()),
    ];
    rows.into_iter().map(|(name, shape, f)| case(name, [centered(shape)], f)).collect()
}

fn at<R: Runtime>(x: &[Var<R>], mode: Interpolation, outside: OutsideGrid, align_corners: bool) -> Result<Var<R>> {
    x[0].grid_sample(&x[1], GridSample { mode, outside, align_corners })
}

fn sampled<R: Runtime>() -> Vec<OpCase<R>> {
    // Coordinates are not whole: the derivative by the coordinate jumps there.
    let image = || [centered(&[2, 2, 4, 3]), spread(&[2, 2, 3, 2], -1.413, 1.377)];
    let volume = || [centered(&[1, 2, 3, 2, 3]), spread(&[1, 2, 1, 2, 3], -1.213, 1.277)];
    use OutsideGrid::*;
    let rows: [(&str, [Sample; 2], CaseFn<R>); 8] = [
        ("grid_sample", image(), |x| at(x, Linear, Zeros, false)),
        ("grid_sample with corners", image(), |x| at(x, Linear, Zeros, true)),
        ("grid_sample to the border", image(), |x| at(x, Linear, Border, false)),
        ("grid_sample reflected", image(), |x| at(x, Linear, Reflection, false)),
        ("grid_sample bicubic", image(), |x| at(x, Cubic, Zeros, false)),
        ("grid_sample bicubic reflected", image(), |x| at(x, Cubic, Reflection, true)),
        ("grid_sample of a volume", volume(), |x| at(x, Linear, Zeros, false)),
        ("grid_sample of a volume with corners", volume(), |x| at(x, Linear, Border, true)),
    ];
    let mut cases: Vec<_> = rows.into_iter().map(|(name, inputs, f)| case(name, inputs, f)).collect();
    let fixed = || [centered(&[2, 2, 4, 3]), spread(&[2, 2, 3, 2], -1.413, 1.377).fixed()];
    cases.extend([
        case("grid_sample nearest", fixed(), |x| at(x, Nearest, Zeros, false)?.square()),
        case("affine_grid", [centered(&[2, 2, 3])], |x| x[0].affine_grid(&[3, 2], false)?.square()),
        case("affine_grid of a volume", [centered(&[1, 3, 4])], |x| x[0].affine_grid(&[2, 1, 3], true)?.square()),
    ]);
    cases
}

fn unfolded<R: Runtime>() -> Vec<OpCase<R>> {
    const WIDE: PoolOptions<2> = PoolOptions {
        kernel: [2, 3],
        stride: [2, 1],
        padding: [1, 2],
        dilation: [1, 2],
        ceil_mode: false,
        count_include_pad: true,
        divisor: None,
    };
    vec![
        case("im2col", [centered(&[2, 2, 3, 4])], |x| x[0].im2col(&WIDE)?.square()),
        case("im2col of a volume", [centered(&[1, 2, 3, 2, 3])], |x| {
            x[0].im2col(&PoolOptions { stride: [1; 3], ..PoolOptions::new([2, 1, 2]) })?.square()
        }),
        case("col2im", [centered(&[1, 12, 8])], |x| x[0].col2im([3, 4], &WIDE)?.square()),
        case("col2im of a signal", [centered(&[2, 6, 3])], |x| {
            x[0].col2im([6], &PoolOptions { stride: [2], ..PoolOptions::new([2]) })?.square()
        }),
    ]
}

fn operands(x: &[usize], w: &[usize], bias: usize) -> Vec<Sample> {
    vec![centered(x), centered(w), centered(&[bias])]
}

fn convolutions<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("conv of sides", operands(&[1, 2, 4, 3], &[2, 2, 2, 2], 2), |x| {
            let padding = ConvPadding::Sides([(1, 0), (0, 2)]);
            x[0].conv(&x[1], x.get(2), &ConvNd { padding, ..Default::default() })
        }),
        case("conv that keeps sizes", operands(&[2, 2, 5], &[4, 1, 4], 4), |x| {
            let options = ConvNd { padding: ConvPadding::Same, groups: 2, ..ConvNd::<1>::default() };
            x[0].conv(&x[1], x.get(2), &options)
        }),
        case("conv reflected", operands(&[1, 1, 4, 3], &[2, 1, 3, 3], 2), |x| {
            let padding = ConvPadding::Symmetric([2, 1]);
            x[0].conv(&x[1], x.get(2), &ConvNd { padding, mode: PadMode::Reflect, ..Default::default() })
        }),
        case("conv3d", operands(&[1, 2, 3, 3, 2], &[2, 2, 2, 2, 1], 2), |x| {
            x[0].conv(&x[1], x.get(2), &ConvNd::<3>::default())
        }),
        case("conv3d with everything", operands(&[1, 2, 5, 3, 4], &[2, 1, 2, 2, 2], 2), |x| {
            let padding = ConvPadding::Symmetric([1, 0, 2]);
            let options = ConvNd { stride: [2, 1, 2], padding, dilation: [2, 1, 3], groups: 2, ..Default::default() };
            x[0].conv(&x[1], x.get(2), &options)
        }),
        case("conv3d that wraps", operands(&[1, 1, 3, 2, 2], &[1, 1, 2, 2, 2], 1), |x| {
            let (padding, mode) = (ConvPadding::Same, PadMode::Circular);
            x[0].conv(&x[1], x.get(2), &ConvNd { padding, mode, ..ConvNd::<3>::default() })
        }),
        case("conv_transpose1d", operands(&[2, 2, 3], &[2, 2, 3], 2), |x| {
            let options = ConvNd { stride: [2], ..Default::default() };
            x[0].conv_transpose(&x[1], x.get(2), &options, [1])
        }),
        case("conv_transpose3d", operands(&[1, 2, 2, 1, 2], &[2, 1, 2, 2, 2], 1), |x| {
            x[0].conv_transpose(&x[1], x.get(2), &ConvNd::<3>::default(), [0; 3])
        }),
        case("conv_transpose3d with everything", operands(&[1, 4, 2, 2, 2], &[4, 1, 3, 2, 2], 2), |x| {
            let padding = ConvPadding::Symmetric([1, 0, 1]);
            let options = ConvNd { stride: [2, 3, 1], padding, dilation: [1, 2, 2], groups: 2, ..Default::default() };
            x[0].conv_transpose(&x[1], x.get(2), &options, [1, 2, 0])
        }),
    ]
}
