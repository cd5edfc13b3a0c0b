//! What cannot be computed is an error that names the operation, the shapes and the rule.

use numcore::{
    DType, Result,
    fused::NnOps,
    ops::{
        ColumnOps, ConvNd, ConvOps, ConvPadding, DiagonalOps, DistanceOps, FftNorm, FftOps, GridSample, GridSampleOps,
        Interpolate, InterpolateOps, Interpolation, PadMode, PadOps, PointwiseOps, PoolOps, PoolOptions, RepeatOps,
        Resize, ScatterOps, ScatterReduction, SearchOps, SelectOps, ViewOps, Window, meshgrid,
    },
};

use crate::common::*;

fn zeros(shape: &[usize]) -> T {
    T::zeros(&cpu(), shape, DType::F32).unwrap()
}

#[test]
fn padding() {
    let x = zeros(&[2, 3]);
    refused(x.pad_with(&[(1, 1)], PadMode::Reflect), &["pad", "[2, 3]", "1 pairs"]);
    refused(x.pad_with(&[(0, 0), (3, 0)], PadMode::Reflect), &["pad", "Reflect", "axis 1", "at most 2"]);
    refused(x.pad_with(&[(0, 3), (0, 0)], PadMode::Circular), &["pad", "Circular", "axis 0", "at most 2"]);
    refused(zeros(&[0]).pad_with(&[(1, 0)], PadMode::Replicate), &["pad", "Replicate", "[0]"]);
    refused(x.pad_with(&[(-2, -1), (0, 0)], PadMode::Constant(0.0)), &["pad", "[2, 3]", "axis 0"]);
}

#[test]
fn pools() {
    let x = zeros(&[1, 1, 4, 4]);
    refused(x.max_pool(&PoolOptions { padding: [2, 0], ..PoolOptions::new([2, 2]) }), &["max_pool", "half the kernel"]);
    refused(x.max_pool(&PoolOptions::new([5, 1])), &["max_pool", "[1, 1, 4, 4]", "do not fit"]);
    refused(x.avg_pool(&PoolOptions { stride: [0, 1], ..PoolOptions::new([2, 2]) }), &["avg_pool", "do not fit"]);
    refused(zeros(&[4]).max_pool(&PoolOptions::new([2, 2])), &["max_pool", "[4]", "at least 2 axes"]);
    refused(x.max_pool(&PoolOptions::new([1; 4])), &["max_pool", "one, two or three"]);
    let beyond = PoolOptions { padding: [1], dilation: [5], stride: [1], ..PoolOptions::new([2]) };
    refused(zeros(&[4]).max_pool(&beyond), &["max_pool", "do not fit"]);
    refused(ints(&[4], &[1; 4]).avg_pool(&PoolOptions::new([2])), &["avg_pool", "i64"]);
    refused(x.lp_pool(0.0, &PoolOptions::new([2, 2])), &["lp_pool", "0"]);
    refused(x.adaptive_avg_pool([0, 1]), &["adaptive_avg_pool", "empty"]);
    refused(zeros(&[0, 3]).adaptive_max_pool([1, 1]), &["adaptive_max_pool", "empty"]);
    refused(zeros(&[2]).max_unpool(&ints(&[1], &[0]), [4]), &["max_unpool", "[2]", "[1]"]);
    let truth = T::zeros(&cpu(), [4], DType::Bool).unwrap();
    refused(truth.max_pool(&PoolOptions::new([2])), &["max_pool", "bool"]);
}

#[test]
fn images() {
    let x = zeros(&[1, 4, 2, 3]);
    let plain = Interpolate::default();
    refused(x.interpolate(Resize::Size(&[4]), plain), &["interpolate", "[1, 4, 2, 3]", "1 new sizes"]);
    refused(x.interpolate(Resize::Size(&[4, 0]), plain), &["interpolate", "axis 3", "0"]);
    refused(x.interpolate(Resize::Scale(&[-1.0, 1.0]), plain), &["interpolate"]);
    refused(x.interpolate(Resize::Scale(&[f64::NAN, 1.0]), plain), &["interpolate"]);
    let corners = Interpolate { align_corners: true, ..plain };
    refused(x.interpolate(Resize::Size(&[4, 4]), corners), &["interpolate", "Nearest", "align_corners"]);
    refused(ints(&[1, 1, 2], &[1, 2]).interpolate(Resize::Size(&[4]), plain), &["interpolate", "i64"]);
    refused(x.pixel_shuffle(3), &["pixel_shuffle", "4 channels"]);
    refused(x.pixel_unshuffle(2), &["pixel_unshuffle", "2 × 3"]);
    refused(zeros(&[2, 2]).pixel_shuffle(1), &["pixel_shuffle", "[2, 2]"]);
    let grid = zeros(&[1, 2, 2, 2]);
    refused(x.grid_sample(&zeros(&[2, 2, 2, 2]), GridSample::default()), &["grid_sample", "[2, 2, 2, 2]"]);
    refused(x.grid_sample(&zeros(&[1, 2, 2, 3]), GridSample::default()), &["grid_sample"]);
    let area = GridSample { mode: Interpolation::Area, ..Default::default() };
    refused(x.grid_sample(&grid, area), &["grid_sample", "Area"]);
    let cubic = GridSample { mode: Interpolation::Cubic, ..Default::default() };
    refused(zeros(&[1, 1, 2, 2, 2]).grid_sample(&zeros(&[1, 1, 1, 1, 3]), cubic), &["grid_sample", "Cubic"]);
    refused(zeros(&[1, 2, 2]).affine_grid(&[2, 2], false), &["affine_grid", "[1, 2, 2]"]);
    refused(x.im2col(&PoolOptions::new([3, 1])), &["im2col", "[1, 4, 2, 3]"]);
    refused(zeros(&[1, 5, 2]).col2im([2, 2], &PoolOptions::new([2, 1])), &["col2im", "[1, 5, 2]"]);
    refused(zeros(&[1, 4, 3]).col2im([2, 2], &PoolOptions::new([2, 1])), &["col2im", "3 columns"]);
}

#[test]
fn convolutions() -> Result<()> {
    let (x, w) = (zeros(&[1, 2, 4]), zeros(&[2, 2, 3]));
    let same = ConvNd::<1> { stride: [2], padding: ConvPadding::Same, ..Default::default() };
    refused(x.conv(&w, None, &same), &["conv", "same", "[2]"]);
    refused(x.conv(&w, None, &ConvNd::<2>::default()), &["conv", "[1, 2, 4]", "4 axes"]);
    let reflected = ConvNd::<1> { padding: ConvPadding::Symmetric([4]), mode: PadMode::Reflect, ..Default::default() };
    refused(x.conv(&w, None, &reflected), &["pad", "Reflect"]);
    refused(x.conv_transpose(&w, None, &reflected, [0]), &["conv_transpose", "Reflect"]);
    let sides = ConvNd::<1> { padding: ConvPadding::Sides([(1, 0)]), ..Default::default() };
    refused(x.conv_transpose(&w, None, &sides, [0]), &["conv_transpose", "symmetric"]);
    let (x, w) = (zeros(&[1, 2, 2, 2, 2]), zeros(&[2, 1, 2, 2, 2]));
    refused(x.conv_transpose(&w, None, &ConvNd::<3>::default(), [1, 0, 0]), &["conv_transpose", "output padding"]);
    refused(x.conv(&w, None, &ConvNd::<3>::default()), &["conv"]);
    x.conv(&w, None, &ConvNd::<3> { groups: 2, ..Default::default() }).map(|_| ())
}

/// Sizes that no memory could hold are errors too, wherever they are multiplied.
#[test]
fn sizes_without_end() {
    let (x, huge) = (zeros(&[1, 4, 2, 3]), usize::MAX / 2);
    refused(x.pad_with(&[(0, 0), (0, 0), (0, 0), (isize::MAX, isize::MAX)], PadMode::Constant(0.0)), &["memory"]);
    refused(x.max_pool(&PoolOptions { padding: [huge; 2], ..PoolOptions::new([2, 2]) }), &["half the kernel"]);
    refused(x.max_pool(&PoolOptions { dilation: [usize::MAX; 2], ..PoolOptions::new([2, 2]) }), &["do not fit"]);
    refused(x.im2col(&PoolOptions { padding: [usize::MAX; 2], ..PoolOptions::new([2, 2]) }), &["im2col"]);
    refused(x.pixel_shuffle(usize::MAX), &["pixel_shuffle"]);
    refused(x.diag_embed(isize::MIN), &["memory"]);
    refused(x.repeat(&[1, 1, huge, 1]), &["memory"]);
    refused(x.repeat_interleave(huge, 0), &["memory"]);
    refused(x.max_unpool(&x.to_dtype(DType::I64).unwrap(), [huge; 2]), &["memory"]);
    refused(x.rfft(Some(huge), 0, FftNorm::Backward), &["memory"]);
    let (volume, w) = (zeros(&[1, 1, 2, 2, 2]), zeros(&[1, 1, 2, 2, 2]));
    let far = ConvNd::<3> { dilation: [usize::MAX; 3], padding: ConvPadding::Same, ..Default::default() };
    refused(volume.conv(&w, None, &far), &["memory"]);
    let far = ConvNd::<3> { dilation: [usize::MAX, 1, 1], stride: [huge, 1, 1], ..Default::default() };
    refused(volume.conv_transpose(&w, None, &far, [0; 3]), &["conv_transpose"]);
}

/// So are lists that the host would make on the way.
#[test]
fn lists_without_end() {
    let signal = zeros(&[1, 1, 4]);
    for mode in [Interpolation::Nearest, Interpolation::Linear, Interpolation::Area] {
        for size in [1 << 60, 1 << 40, usize::MAX] {
            refused(signal.interpolate(Resize::Size(&[size]), Interpolate::new(mode)), &["memory"]);
        }
        refused(signal.interpolate(Resize::Scale(&[1e18]), Interpolate::new(mode)), &["memory"]);
        refused(signal.interpolate(Resize::Scale(&[1e300]), Interpolate::new(mode)), &["memory"]);
    }
    let image = zeros(&[1, 1, 4, 4]);
    let bilinear = Interpolate::new(Interpolation::Linear);
    refused(image.interpolate(Resize::Size(&[1 << 40, 1 << 40]), bilinear), &["memory"]);
    for size in [1 << 60, 1 << 40] {
        refused(signal.adaptive_avg_pool([size]), &["memory"]);
        refused(signal.adaptive_max_pool([size]), &["memory"]);
        refused(signal.repeat_interleave_each(&[size], 0), &["memory"]);
        refused(T::window(&cpu(), Window::Hann, size, true, DType::F32), &["memory"]);
        refused(T::normal(&cpu(), [size], DType::F32, 0.0, 1.0, 1), &["memory"]);
        refused(T::normal(&cpu(), [size], DType::F64, 0.0, 1.0, 1), &["memory"]);
        refused(T::permutation(&cpu(), size, 1), &["memory"]);
    }
    refused(zeros(&[2]).repeat_interleave_each(&[usize::MAX, 2], 0), &["memory"]);
    let theta = zeros(&[1, 2, 3]);
    refused(theta.affine_grid(&[1 << 20, 1 << 20], true), &["memory"]);
    refused(theta.affine_grid(&[1 << 40, 1 << 40], false), &["memory"]);
    holds(&zeros(&[2, 2, 3]).affine_grid(&[0, 3], true).unwrap(), &[2, 0, 3, 2], &[]);
}

/// A size of 0 among them does not make their product valid.
#[test]
fn products_without_end() {
    let far = 1 << 40;
    refused(zeros(&[1, 4, 4]).col2im([far, far], &PoolOptions::new([2, 2])), &["col2im"]);
    refused(zeros(&[1, 4, 0]).col2im([far, far], &PoolOptions::new([2, 2])), &["col2im"]);
    refused(zeros(&[1, 4, 4]).col2im([4, 4], &PoolOptions::new([far, far])), &["col2im"]);
    refused(
        zeros(&[1, 4, 4]).col2im([4, 4], &PoolOptions { padding: [usize::MAX; 2], ..PoolOptions::new([2, 2]) }),
        &["col2im"],
    );
    refused(zeros(&[3, 0]).repeat(&[usize::MAX, 1]), &["memory"]);
    refused(zeros(&[0, far]).repeat_interleave(1 << 58, 1), &["memory"]);
    refused(zeros(&[1, 0, far, 1]).pixel_shuffle(1 << 31), &["memory"]);
    refused(zeros(&[1, far, 0, 0]).pixel_unshuffle(1 << 31), &["memory"]);
    let tall = zeros(&[1, 1]).broadcast_to([far, 1]).unwrap();
    refused(zeros(&[far, 0]).kron(&tall), &["memory"]);
}

/// Many times more than there is to take differences of.
#[test]
fn differences_without_end() {
    holds(&row(&[1.0, 3.0, 7.0]).diff(usize::MAX, 0).unwrap(), &[0], &[]);
}

/// An error shows the caller's arguments, not internal ones.
#[test]
fn errors_are_in_the_callers_terms() {
    let (x, w) = (zeros(&[1, 2, 4]), zeros(&[2, 3, 3]));
    refused(x.conv(&w, None, &ConvNd::<1>::default()), &["conv", "shapes [1, 2, 4], [2, 3, 3]: 2 input channels"]);
    refused(x.conv1d(&w, None, Default::default()), &["conv1d", "shapes [1, 2, 4], [2, 3, 3]: 2 input channels"]);
    refused(x.conv1d(&zeros(&[2, 2, 9]), None, Default::default()), &["conv1d", "shapes [1, 2, 4], [2, 2, 9]"]);
    refused(x.conv_transpose(&zeros(&[3, 1, 2]), None, &ConvNd::<1>::default(), [0]), &["[1, 2, 4], [3, 1, 2]"]);
    let x = zeros(&[2, 3]);
    let at = ints(&[2, 2], &[0, 1, 1, 3]);
    refused(x.gather_nd(&at, 0), &["gather_nd", "[1", "[2, 2]", "0..3"]);
    refused(x.scatter_nd(&at, &row(&[1.0, 2.0]).to_dtype(DType::F32).unwrap()), &["scatter_nd", "[2, 2]", "0..3"]);
    let far = ints(&[1, 2], &[0, 3]);
    refused(x.scatter(1, &far, &x), &["scatter:", "index 3 at position [0, 1] of the index [1, 2] is not in 0..3"]);
    for how in [ScatterReduction::Prod, ScatterReduction::Amax, ScatterReduction::Mean, ScatterReduction::Sum] {
        refused(x.scatter_reduce(1, &far, &x, how, true), &["scatter_reduce:", "is not in 0..3"]);
        refused(x.scatter_reduce(1, &far, &x, how, false), &["scatter_reduce:", "is not in 0..3"]);
    }
    refused(
        x.index_copy(1, &ints(&[1], &[5]), &zeros(&[2, 1])),
        &["index_copy:", "index 5 at position [0] of the index [1] is not in 0..3"],
    );
    refused(
        x.index_fill(1, &ints(&[1], &[5]), 1.0),
        &["index_fill:", "index 5 at position [0] of the index [1] is not in 0..3"],
    );
}

#[test]
fn indices_and_arrangements() {
    let (x, at) = (zeros(&[2, 3]), ints(&[2, 2], &[0, 1, 2, 0]));
    refused(x.scatter(1, &at, &zeros(&[2, 1])), &["scatter", "[2, 3]", "[2, 2]", "[2, 1]"]);
    refused(x.scatter(2, &at, &x), &["scatter", "axis 2"]);
    refused(x.scatter(1, &x, &x), &["scatter", "i64"]);
    refused(x.scatter(1, &at, &T::zeros(&cpu(), [2, 3], DType::F64).unwrap()), &["scatter", "f32, f64"]);
    let far = ints(&[1, 2], &[0, 3]);
    refused(x.scatter(1, &far, &x).and_then(|t| t.to_f64s()), &["is not in 0..3"]);
    for how in [ScatterReduction::Prod, ScatterReduction::Amax, ScatterReduction::Mean] {
        refused(x.scatter_reduce(1, &far, &x, how, true).and_then(|t| t.to_f64s()), &["is not in 0..3"]);
    }
    let mean = ints(&[1], &[0]).scatter_reduce(0, &ints(&[1], &[0]), &ints(&[1], &[0]), ScatterReduction::Mean, true);
    refused(mean, &["scatter_reduce", "i64"]);
    refused(x.index_copy(0, &ints(&[1], &[0]), &x), &["index_copy", "[2, 3]"]);
    refused(x.gather_nd(&ints(&[1, 3], &[0, 0, 0]), 0), &["gather_nd", "[2, 3]", "[1, 3]"]);
    refused(x.masked_select(&zeros(&[2, 3])), &["masked_select", "f32"]);
    refused(x.compress(&T::zeros(&cpu(), [4], DType::Bool).unwrap(), 1), &["compress", "[4]"]);
    refused(zeros(&[2, 3]).searchsorted(&zeros(&[3, 3]), false), &["searchsorted", "[2, 3]", "[3, 3]"]);
    refused(x.bucketize(&x, false), &["bucketize", "one axis"]);
    refused(x.repeat(&[2]), &["repeat", "[2, 3]"]);
    refused(x.repeat_interleave_each(&[1], 0), &["repeat_interleave", "axis 0"]);
    refused(x.rot90(1, [1, -1]), &["rot90", "[1, -1]"]);
    refused(x.roll_axes(&[1], &[0, 1]), &["roll"]);
    refused(zeros(&[3]).diagonal(0), &["diagonal", "[3]"]);
    refused(x.outer(&x), &["outer"]);
    refused(x.cross(&x, 0), &["cross", "axis 0"]);
    refused(zeros(&[1; 5]).kron(&x), &["kron", "four"]);
    refused(x.cdist(&zeros(&[2, 2]), 2.0), &["cdist", "[2, 3]", "[2, 2]"]);
    refused(x.cdist(&x, -1.0), &["cdist", "-1"]);
    refused(meshgrid(&[&x]), &["meshgrid"]);
}
