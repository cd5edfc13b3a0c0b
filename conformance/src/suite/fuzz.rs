//! Random geometry: reductions, matrix products, convolutions and pools of random shapes, against plain loops.

use numcore::{
    Result, Runtime, Shape, Tensor,
    fused::{ConvOptions, NnOps},
    ops::{MatmulOps, ReduceOps, ViewOps},
};
use proptest::prelude::*;

use super::{
    close::near,
    positions::{flat, unflat},
    programs::random,
    report::{Section, Verdict},
};
use crate::golden::Placement;

const CASES: u32 = 300;

pub(crate) fn fuzz<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("random geometry");
    let place = || prop::sample::select(Placement::ALL.to_vec());
    let dims = |most: usize, rank: std::ops::Range<usize>| prop::collection::vec(0..most, rank);
    section.check("reductions", || {
        Ok(random(CASES, (dims(5, 1..6), any::<u8>(), any::<bool>(), place()), |(dims, axes, keep, place)| {
            reduce(rt, dims, *axes, *keep, *place)
        }))
    });
    section.check("products", || {
        Ok(random(
            CASES,
            (dims(4, 0..3), [0..6usize, 0..6, 0..6], any::<[bool; 4]>(), place()),
            |(batch, mkn, flags, place)| product(rt, batch, *mkn, *flags, *place),
        ))
    });
    section.check("convolutions", || Ok(random(CASES, geometry(), |g| convolution(rt, g))));
    section.check("pools", || Ok(random(CASES, geometry(), |g| pool(rt, g))));
    section
}

/// Integers from −3 to 3: sums of them are exact, in any order.
fn numbers(n: usize, salt: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 5 + salt * 3) % 7) as f64 - 3.0).collect()
}

fn tensor<R: Runtime>(rt: &R, dims: &[usize], values: &[f64], place: Placement) -> Result<Tensor<R>> {
    place.of(&Tensor::from_slice(rt, dims, &values.iter().map(|&v| v as f32).collect::<Vec<_>>())?)
}

fn reduce<R: Runtime>(rt: &R, dims: &[usize], axes: u8, keep: bool, place: Placement) -> Result<Verdict> {
    // No axis in the set stands for all of them.
    let all = !(0..dims.len()).any(|i| axes >> i & 1 == 1);
    let is_gone = |i: usize| all || axes >> i & 1 == 1;
    let list: Vec<isize> = (0..dims.len()).filter(|&i| is_gone(i)).map(|i| i as isize).collect();
    let kept: Vec<usize> = dims.iter().enumerate().map(|(i, &d)| if is_gone(i) { 1 } else { d }).collect();
    let shape: Vec<usize> = (0..dims.len()).filter(|&i| keep || !is_gone(i)).map(|i| kept[i]).collect();
    let values = numbers(dims.iter().product(), 1);
    let outputs: usize = kept.iter().product();
    let (mut sums, mut largest) = (vec![0.0; outputs], vec![f64::NEG_INFINITY; outputs]);
    for (k, &v) in values.iter().enumerate() {
        let to: Vec<usize> = unflat(k, dims).iter().enumerate().map(|(i, &p)| if is_gone(i) { 0 } else { p }).collect();
        let to = flat(&to, &kept);
        sums[to] += v;
        largest[to] = largest[to].max(v);
    }
    let x = tensor(rt, dims, &values, place)?;
    let (sum, found) = match (keep, all) {
        (true, _) => (x.sum_keepdim(&list)?, x.amax_keepdim(&list)),
        (false, true) => (x.sum_all()?, x.amax_all()),
        (false, false) => (x.sum(&list)?, x.amax(&list)),
    };
    let right = Verdict::when(sum.dims() == shape, || format!("its shape is {}, expected {shape:?}", sum.shape()));
    let verdict = right.and(near("the sum", &sum.to_f64s()?, &sums, 0.0));
    if values.is_empty() && outputs > 0 {
        return Ok(verdict.and(Verdict::when(found.is_err(), || "the largest of nothing is no error")));
    }
    Ok(verdict.and(near("the largest", &found?.to_f64s()?, &largest, 0.0)))
}

/// Checks a product. The flags say whether either side has no batch axes, and whether either's first batch axis has
/// size 1.
fn product<R: Runtime>(
    rt: &R,
    batch: &[usize],
    [m, k, n]: [usize; 3],
    flags: [bool; 4],
    place: Placement,
) -> Result<Verdict> {
    let side = |bare: bool, one: bool, last: [usize; 2]| {
        let mut lead = if bare { Vec::new() } else { batch.to_vec() };
        if let (true, Some(first)) = (one, lead.first_mut()) {
            *first = 1;
        }
        [&lead[..], &last].concat()
    };
    let (a_dims, b_dims) = (side(flags[0], flags[2], [m, k]), side(flags[1], flags[3], [k, n]));
    let (a, b) = (numbers(a_dims.iter().product(), 2), numbers(b_dims.iter().product(), 3));
    let got = tensor(rt, &a_dims, &a, place)?.matmul(&tensor(rt, &b_dims, &b, place)?)?;
    let lead = |d: &[usize]| Shape::new(&d[..d.len() - 2]);
    let Some(lead) = lead(&a_dims)?.broadcast(&lead(&b_dims)?) else {
        return Ok(Verdict::failed("the shapes of the check"));
    };
    let dims = [&lead[..], &[m, n]].concat();
    // The row-major start of an operand's matrix at a batch position.
    let start = |position: &[usize], dims: &[usize]| {
        let own = &dims[..dims.len() - 2];
        let skip = position.len() - own.len();
        let at: Vec<usize> = own.iter().zip(&position[skip..]).map(|(&d, &p)| if d == 1 { 0 } else { p }).collect();
        flat(&at, own) * dims[dims.len() - 2] * dims[dims.len() - 1]
    };
    let cell = |at: usize| {
        let position = unflat(at, &dims);
        let (batch, i, j) = (&position[..lead.rank()], position[lead.rank()], position[lead.rank() + 1]);
        let (a_start, b_start) = (start(batch, &a_dims), start(batch, &b_dims));
        (0..k).map(|l| a[a_start + i * k + l] * b[b_start + l * n + j]).sum()
    };
    let want: Vec<f64> = (0..dims.iter().product()).map(cell).collect();
    let right = Verdict::when(got.dims() == dims, || format!("its shape is {}, expected {dims:?}", got.shape()));
    Ok(right.and(near("the product", &got.to_f64s()?, &want, 0.0)))
}

/// A convolution or a pool; the number of channels is `groups` times that of a group.
#[derive(Clone, Debug)]
struct Geometry {
    images: usize,
    groups: usize,
    channels: [usize; 2],
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    place: Placement,
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let two = |range: std::ops::Range<usize>| [range.clone(), range];
    let place = prop::sample::select(Placement::ALL.to_vec());
    (0..3usize, 1..3usize, two(1..4), two(1..8), two(1..4), two(1..4), two(0..3), two(1..3), place).prop_map(
        |(images, groups, channels, size, kernel, stride, padding, dilation, place)| Geometry {
            images,
            groups,
            channels,
            size,
            kernel,
            stride,
            padding,
            dilation,
            place,
        },
    )
}

impl Geometry {
    fn outputs(&self, i: usize, dilation: usize) -> Option<usize> {
        let reach = (self.kernel[i] - 1) * dilation + 1;
        Some((self.size[i] + 2 * self.padding[i]).checked_sub(reach)? / self.stride[i] + 1)
    }

    /// The position in the image of an element of a window, unless it is padding.
    fn source(&self, i: usize, output: usize, place: usize, dilation: usize) -> Option<usize> {
        (output * self.stride[i] + place * dilation).checked_sub(self.padding[i]).filter(|&at| at < self.size[i])
    }
}

fn convolution<R: Runtime>(rt: &R, g: &Geometry) -> Result<Verdict> {
    let Geometry { images, groups, channels: [c, o], size: [h, w], kernel: [r, s], .. } = *g;
    let (x_dims, w_dims) = ([images, groups * c, h, w], [groups * o, c, r, s]);
    let (x, weight) = (numbers(x_dims.iter().product(), 4), numbers(w_dims.iter().product(), 5));
    let options = ConvOptions { stride: g.stride, padding: g.padding, dilation: g.dilation, groups };
    let got = tensor(rt, &x_dims, &x, g.place)?.conv2d(&tensor(rt, &w_dims, &weight, g.place)?, None, options);
    let (Some(p), Some(q)) = (g.outputs(0, g.dilation[0]), g.outputs(1, g.dilation[1])) else {
        return Ok(Verdict::when(got.is_err(), || "a kernel larger than the padded image is no error"));
    };
    let dims = [images, groups * o, p, q];
    let cell = |at: usize| {
        let [n, to, y, z] = [at / (groups * o * p * q), at / (p * q) % (groups * o), at / q % p, at % q];
        let places = (0..c).flat_map(|ch| (0..r).flat_map(move |i| (0..s).map(move |j| (ch, i, j))));
        let term = |(ch, i, j): (usize, usize, usize)| {
            let (a, b) = (g.source(0, y, i, g.dilation[0])?, g.source(1, z, j, g.dilation[1])?);
            Some(x[flat(&[n, to / o * c + ch, a, b], &x_dims)] * weight[flat(&[to, ch, i, j], &w_dims)])
        };
        places.filter_map(term).sum()
    };
    let want: Vec<f64> = (0..dims.iter().product()).map(cell).collect();
    let got = got?;
    let right = Verdict::when(got.dims() == dims, || format!("its shape is {}, expected {dims:?}", got.shape()));
    Ok(right.and(near("the convolution", &got.to_f64s()?, &want, 0.0)))
}

fn pool<R: Runtime>(rt: &R, g: &Geometry) -> Result<Verdict> {
    let x_dims = [g.images, g.channels[0], g.size[0], g.size[1]];
    let x = numbers(x_dims.iter().product(), 6);
    let placed = tensor(rt, &x_dims, &x, g.place)?;
    let got = placed.max_pool2d(g.kernel, g.stride, g.padding);
    let too_padded = (0..2).any(|i| 2 * g.padding[i] > g.kernel[i]);
    let (Some(p), Some(q), false) = (g.outputs(0, 1), g.outputs(1, 1), too_padded) else {
        return Ok(Verdict::when(got.is_err(), || "a pool that does not fit is no error"));
    };
    let dims = [g.images, g.channels[0], p, q];
    let window = |at: usize| {
        let [n, c, y, z] = [at / (dims[1] * p * q), at / (p * q) % dims[1], at / q % p, at % q];
        let places = (0..g.kernel[0]).flat_map(|i| (0..g.kernel[1]).map(move |j| (i, j)));
        let value =
            |(i, j): (usize, usize)| Some(x[flat(&[n, c, g.source(0, y, i, 1)?, g.source(1, z, j, 1)?], &x_dims)]);
        places.filter_map(value).collect::<Vec<f64>>()
    };
    let windows: Vec<Vec<f64>> = (0..dims.iter().product()).map(window).collect();
    let largest: Vec<f64> = windows.iter().map(|w| w.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
    let count = (g.kernel[0] * g.kernel[1]) as f64;
    let means: Vec<f64> = windows.iter().map(|w| w.iter().sum::<f64>() / count).collect();
    let got = got?;
    let right = Verdict::when(got.dims() == dims, || format!("its shape is {}, expected {dims:?}", got.shape()));
    let mean = placed.avg_pool2d(g.kernel, g.stride, g.padding)?.to_f64s()?;
    let mean = near("the means", &mean, &means, 1e-6);
    Ok(right.and(near("the largest", &got.to_f64s()?, &largest, 0.0)).and(mean).and(same_strided(&placed)?))
}

/// Checks that a copy of a placed tensor holds the same values.
fn same_strided<R: Runtime>(x: &Tensor<R>) -> Result<Verdict> {
    let copied = x.t()?.contiguous()?.t()?.to_f64s()?;
    Ok(near("a copy of the transpose", &copied, &x.to_f64s()?, 0.0))
}
