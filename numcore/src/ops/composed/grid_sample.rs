//! Images and volumes sampled at given coordinates. The formulas are PyTorch's (`aten/src/ATen/native/GridSampler.h`).

use std::sync::LazyLock;

use super::{Interpolation, constant, room};
use crate::{
    DType, Error, Result, Scalar, Shape,
    ops::{Apply, IndexOps, MatmulOps, PointwiseOps, ViewOps, rule},
    pointwise::{Expr, Program},
};

/// The padding mode of a sampled image: the value of coordinates outside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutsideGrid {
    /// Zeros outside of the image.
    #[default]
    Zeros,
    /// The nearest element of the border.
    Border,
    /// The image mirrored at its border, repeatedly.
    Reflection,
}

/// The options of [`GridSampleOps::grid_sample`]: interpolation, padding and alignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GridSample {
    /// [`Interpolation::Nearest`] (ties to even), [`Interpolation::Linear`], or, for images, [`Interpolation::Cubic`].
    pub mode: Interpolation,
    /// The value read outside of the image.
    pub outside: OutsideGrid,
    /// True if −1 and 1 are the centers of the first and the last element, instead of the outer edges.
    pub align_corners: bool,
}

/// Sampling of images at given coordinates.
pub trait GridSampleOps: Apply {
    /// Samples an image `self: [N, C, H, W]` at `grid: [N, P, Q, 2]`, giving `[N, C, P, Q]`, or a volume
    /// `[N, C, D, H, W]` at `[N, O, P, Q, 3]`, giving `[N, C, O, P, Q]`.
    ///
    /// A coordinate is `(x, y)` or `(x, y, z)`, the last axis of the image first, each from −1 to 1. Both operands have
    /// one floating dtype. Gradients flow to both, but none to the grid with [`Interpolation::Nearest`]. A NaN
    /// coordinate gives NaN.
    ///
    /// # Errors
    /// Fails for other ranks, batches that differ, an empty image, or a mode that is not listed with
    /// [`GridSample::mode`].
    #[track_caller]
    fn grid_sample(&self, grid: &Self, options: GridSample) -> Result<Self> {
        const OP: &str = "grid_sample";
        let dtype = rule::same_dtype(OP, &[self.spec(), grid.spec()])?;
        rule::float(OP, self.spec())?;
        options.check(self.spec().shape, grid.spec().shape)?;
        let wide = |x: &Self| x.to_dtype(dtype.compute());
        options.sample(&wide(self)?, &wide(grid)?)?.to_dtype(dtype)
    }
    /// The coordinates of `size` elements under affine maps, for [`grid_sample`](GridSampleOps::grid_sample). Maps
    /// `self: [N, 2, 3]` with `size` `[P, Q]` give `[N, P, Q, 2]`; `[N, 3, 4]` with `[O, P, Q]` give `[N, O, P, Q, 3]`.
    /// Floating dtypes only.
    #[track_caller]
    fn affine_grid(&self, size: &[usize], align_corners: bool) -> Result<Self> {
        const OP: &str = "affine_grid";
        rule::float(OP, self.spec())?;
        let (shape, d) = (self.spec().shape, size.len());
        if !matches!(d, 2 | 3) || shape.rank() != 3 || shape[1..] != [d, d + 1] {
            let why = format!("{d} sizes; needs [N, 2, 3] with two or [N, 3, 4] with three");
            return Err(Error::shape(OP, &[shape], why));
        }
        Shape::new(&[&[shape[0]][..], size, &[d + 1]].concat()).map_err(|e| e.of_op(OP))?;
        let places = Shape::new(size)?.numel();
        let at = |axis: usize, p: usize| {
            let inner: usize = size[axis + 1..].iter().product();
            place(p / inner % size[axis], size[axis], align_corners)
        };
        let homogeneous = |p: usize| (0..d).rev().map(move |axis| at(axis, p)).chain([1.0]);
        let mut base: Vec<f64> = room(OP, places.saturating_mul(d + 1))?;
        base.extend((0..places).flat_map(homogeneous));
        let base = constant(self, [places, d + 1], self.spec().dtype, &base)?;
        base.matmul(&self.t()?)?.reshape([&[shape[0]][..], size, &[d]].concat())
    }
}

impl<T: Apply> GridSampleOps for T {}

/// The coordinate of element `i` of `n`, from −1 to 1.
fn place(i: usize, n: usize, align_corners: bool) -> f64 {
    match align_corners {
        true if n > 1 => 2.0 * i as f64 / (n - 1) as f64 - 1.0,
        true => 0.0,
        false => (2.0 * i as f64 + 1.0) / n as f64 - 1.0,
    }
}

/// One element that a sample reads along one axis, `[N, P]`: its position, its weight, and a mask of samples outside
/// the image. Outside, the position is one on the border and the weight is 0. The value read there is replaced by 0,
/// since its product with the weight would be NaN for an infinite pixel.
struct Tap<T> {
    at: T,
    weight: T,
    outside: Option<T>,
}

impl<T: Apply> Tap<T> {
    /// The tap that combines a tap on one axis with one on the next, which has `size` elements.
    fn and(&self, next: &Tap<T>, size: usize) -> Result<Tap<T>> {
        let outside = match (&self.outside, &next.outside) {
            (Some(a), Some(b)) => Some(a.logical_or(b)?),
            (a, b) => a.as_ref().or(b.as_ref()).cloned(),
        };
        let at = self.at.mul(size as f64)?.add(&next.at)?;
        Ok(Tap { at, weight: self.weight.mul(&next.weight)?, outside })
    }

    /// The pixels `[N, C, P]` of this tap, multiplied by its weight.
    fn read(&self, pixels: &T, places: Shape) -> Result<T> {
        static WEIGHTED: LazyLock<Program> =
            LazyLock::new(|| Program::new("grid_sample", |[x, w, outside], []| [outside.select(0.0, x) * w]));
        let read = pixels.gather(-1, &self.at.unsqueeze(1)?.broadcast_to(places)?)?;
        let weight = self.weight.unsqueeze(1)?;
        match &self.outside {
            Some(outside) => read.apply_program(&WEIGHTED, &[&weight, &outside.unsqueeze(1)?], &[]),
            None => read.mul(&weight),
        }
    }
}

impl GridSample {
    fn check(&self, x: Shape, grid: Shape) -> Result<()> {
        let d = x.rank().saturating_sub(2);
        let fits = matches!(d, 2 | 3) && grid.rank() == d + 2 && grid[0] == x[0] && grid[d + 1] == d;
        if !fits || x[2..].contains(&0) {
            let why = "needs [N, C, H, W] and [N, P, Q, 2], or [N, C, D, H, W] and [N, O, P, Q, 3], and an image that is not empty";
            return Err(Error::shape("grid_sample", &[x, grid], why));
        }
        match self.mode {
            Interpolation::Nearest | Interpolation::Linear => Ok(()),
            Interpolation::Cubic if d == 2 => Ok(()),
            mode => {
                let why = format!("{mode:?} of {d} axes; nearest and linear are known, and cubic of two");
                Err(Error::config("grid_sample", "mode", why))
            }
        }
    }

    fn sample<T: Apply>(&self, x: &T, grid: &T) -> Result<T> {
        let (shape, to) = (x.spec().shape, grid.spec().shape);
        let (n, c, sizes) = (shape[0], shape[1], &shape[2..]);
        let places = to[1..to.rank() - 1].iter().product();
        let grid = grid.reshape([n, places, sizes.len()])?;
        let pixels = x.reshape([n, c, sizes.iter().product()])?;
        // Every combination of the taps of the axes.
        let mut reads: Vec<Tap<T>> = Vec::new();
        for (axis, &size) in sizes.iter().enumerate() {
            let taps = self.taps(&grid.select(-1, sizes.len() - 1 - axis)?, size)?;
            reads = match reads.is_empty() {
                true => taps,
                false => (reads.iter().flat_map(|a| taps.iter().map(move |b| (a, b))))
                    .map(|(a, b)| a.and(b, size))
                    .collect::<Result<_>>()?,
            };
        }
        let mut sum: Option<T> = None;
        for tap in &reads {
            let read = tap.read(&pixels, [n, c, places].into())?;
            sum = Some(match sum {
                Some(sum) => sum.add(&read)?,
                None => read,
            });
        }
        let sum = sum.ok_or_else(|| Error::internal("grid_sample", "an image without axes"))?;
        sum.reshape([&[n, c], &to[1..to.rank() - 1]].concat())
    }

    /// The taps of coordinates `at: [N, P]` along an axis of `size` elements.
    fn taps<T: Apply>(&self, at: &T, size: usize) -> Result<Vec<Tap<T>>> {
        static PLACE: LazyLock<Program> =
            LazyLock::new(|| Program::new("grid_sample", |[x], [a, b]| [(x + 1.0) * a + b]));
        static NEAREST: LazyLock<Program> = LazyLock::new(|| Program::new("grid_sample", |[x], []| [x.round()]));
        let (a, b) = if self.align_corners { ((size - 1) as f64 / 2.0, 0.0) } else { (size as f64 / 2.0, -0.5) };
        let at = at.apply_program(&PLACE, &[], &[a.into(), b.into()])?;
        match self.mode {
            Interpolation::Cubic => {
                let whole = at.detach().floor()?;
                let tap = |(k, weight): (usize, &Program)| {
                    let place = whole.add(k as f64 - 1.0)?;
                    let weight = at.apply_program(weight, &[], &[])?;
                    self.tap(&weight, &place, &self.inside(&place, size)?, size)
                };
                CUBIC.iter().enumerate().map(tap).collect()
            }
            Interpolation::Linear => {
                static WEIGHT: LazyLock<[Program; 2]> = LazyLock::new(|| {
                    [false, true].map(|next| {
                        Program::new("grid_sample", |[x], []| {
                            let part = x - x.floor();
                            [if next { part } else { part * -1.0 + 1.0 }]
                        })
                    })
                });
                let at = self.inside(&at, size)?;
                let whole = at.detach().floor()?;
                let tap = |k: usize| {
                    let place = whole.add(k as f64)?;
                    self.tap(&at.apply_program(&WEIGHT[k], &[], &[])?, &place, &place, size)
                };
                (0..2).map(tap).collect()
            }
            _ => {
                let place = self.inside(&at.detach(), size)?.apply_program(&NEAREST, &[], &[])?;
                Ok(vec![self.tap(&place.mul(0.0)?.add(1.0)?, &place, &place, size)?])
            }
        }
    }

    /// Coordinates mapped into the image, according to the padding mode. The gradient beyond the border is 0, as in
    /// PyTorch.
    fn inside<T: Apply>(&self, at: &T, size: usize) -> Result<T> {
        static BORDER: LazyLock<Program> =
            LazyLock::new(|| Program::new("grid_sample", |[x], [last]| [border(x, last)]));
        static REFLECT: LazyLock<Program> = LazyLock::new(|| {
            Program::new("grid_sample", |[x], [low, span, last]| {
                let away = (x - low).abs();
                let turns = (away / span).floor();
                let rest = away - turns * span;
                let even = (turns - (turns * 0.5).floor() * 2.0).eq(0.0);
                [border(even.select(rest, span - rest) + low, last)]
            })
        });
        let last = (size - 1) as f64;
        let (low, span) = if self.align_corners { (0.0, last) } else { (-0.5, size as f64) };
        match self.outside {
            OutsideGrid::Zeros => Ok(at.clone()),
            OutsideGrid::Reflection if span > 0.0 => {
                at.apply_program(&REFLECT, &[], &[low.into(), span.into(), last.into()])
            }
            _ => at.apply_program(&BORDER, &[], &[last.into()]),
        }
    }

    /// The index of an integral coordinate; one outside is moved to the border.
    fn position<T: Apply>(&self, place: &T, size: usize) -> Result<T> {
        static POSITION: LazyLock<Program> = LazyLock::new(|| {
            Program::new("grid_sample", |[x], [last]| {
                [x.lt(0.0).select(0.0, x.gt(last).select(last, x)).cast(DType::I64)]
            })
        });
        place.detach().apply_program(&POSITION, &[], &[Scalar::F64((size - 1) as f64)])
    }

    /// A tap with a weight at an integral coordinate, read at the position `inside` the image.
    fn tap<T: Apply>(&self, weight: &T, place: &T, inside: &T, size: usize) -> Result<Tap<T>> {
        static OUTSIDE: LazyLock<Program> =
            LazyLock::new(|| Program::new("grid_sample", |[x], [last]| [x.lt(0.0) | x.gt(last)]));
        let at = self.position(inside, size)?;
        // Past the last element there is nothing to interpolate with, in every padding mode.
        if self.outside == OutsideGrid::Zeros || self.mode == Interpolation::Linear {
            let outside = place.detach().apply_program(&OUTSIDE, &[], &[((size - 1) as f64).into()])?;
            return Ok(Tap { at, weight: weight.masked_fill(&outside, 0.0)?, outside: Some(outside) });
        }
        Ok(Tap { at, weight: weight.clone(), outside: None })
    }
}

fn border<'b>(x: Expr<'b>, last: Expr<'b>) -> Expr<'b> {
    let low = x.le(0.0).select(0.0, x);
    low.ge(last).select(last, low)
}

/// The weights of the four nearest elements by the distance of a sample from the second (Keys 1981, `a = −0.75`).
static CUBIC: LazyLock<[Program; 4]> = LazyLock::new(|| {
    const A: f64 = -0.75;
    fn near(x: Expr<'_>) -> Expr<'_> {
        (x * (A + 2.0) - (A + 3.0)) * x * x + 1.0
    }
    fn far(x: Expr<'_>) -> Expr<'_> {
        ((x * A - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    }
    fn program(of: fn(Expr<'_>) -> Expr<'_>) -> Program {
        Program::new("grid_sample", |[x], []| [of(x - x.floor())])
    }
    [program(|t| far(t + 1.0)), program(near), program(|t| near(t * -1.0 + 1.0)), program(|t| far(t * -1.0 + 2.0))]
});
