//! Resizing of signals, images and volumes: each mode is a linear map along one axis after the other. The positions and
//! weights are PyTorch's (`aten/src/ATen/native/UpSample.h`), in `f64`. The module also has pixel shuffles between
//! channels and positions.

use super::{
    taps::{Taps, cell},
    widened,
};
use crate::{
    Error, Result, Shape,
    ops::{Apply, ViewOps, rule::float},
};

/// The interpolation of new elements from old ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interpolation {
    /// The element at `⌊i · L / M⌋`, for `L` elements resized to `M`, or at `⌊i / factor⌋`: PyTorch's `nearest`
    /// (OpenCV's `INTER_NEAREST`), but with the exact quotient rounded down.
    #[default]
    Nearest,
    /// The element whose center is nearest, `⌊(i + ½) · L / M⌋` or `⌊(i + ½) / factor⌋`: PyTorch's `nearest-exact`.
    NearestExact,
    /// The two nearest elements along each axis, weighted by distance: PyTorch's `linear`, `bilinear` and `trilinear`.
    Linear,
    /// The four nearest elements along each axis, by a cubic kernel (Keys 1981, `a = −0.75`; `−0.5` with `antialias`):
    /// PyTorch's `bicubic`.
    Cubic,
    /// The mean of the elements of a region, as by [`adaptive_avg_pool`](super::PoolOps::adaptive_avg_pool).
    Area,
}

/// Options of [`InterpolateOps::interpolate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interpolate {
    /// The interpolation that new elements are computed with.
    pub mode: Interpolation,
    /// True if the centers of the first and last elements are aligned, instead of the outer edges. For linear and cubic
    /// interpolation only.
    pub align_corners: bool,
    /// True if an axis that shrinks is filtered first, by a wider kernel. For linear and cubic interpolation only.
    pub antialias: bool,
}

impl Interpolate {
    /// Interpolation with edges aligned, without a filter.
    pub fn new(mode: Interpolation) -> Self {
        Interpolate { mode, ..Default::default() }
    }
}

/// The target size: sizes, or scale factors, of the axes after the first two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Resize<'a> {
    /// The sizes of the result, one for each resized axis.
    Size(&'a [usize]),
    /// Scale factors: the new size is `⌊L · factor⌋`. As for PyTorch's `scale_factor`, the factor itself positions the
    /// new elements, not the ratio of the sizes.
    Scale(&'a [f64]),
}

/// Resizing of images and sequences by interpolation.
pub trait InterpolateOps: Apply {
    /// Resizes the last `K ≥ 1` axes of `self: [N, C, L1 .. LK]`, of a floating dtype, by interpolation.
    ///
    /// # Errors
    /// Fails if there is not one size for each axis after the second, or the input or output is empty or too large for
    /// memory. Fails for a factor that is not positive, and for `align_corners` or `antialias` with a mode that has
    /// none.
    #[doc(alias = "upsample")]
    #[doc(alias = "resize")]
    #[track_caller]
    fn interpolate(&self, to: Resize<'_>, options: Interpolate) -> Result<Self> {
        const OP: &str = "interpolate";
        float(OP, self.spec())?;
        let axes = options.axes(self.spec().shape, to)?;
        widened(self, |x| {
            axes.iter().enumerate().try_fold(x.clone(), |x, (i, axis)| {
                let same = axis.from == axis.to && axis.scale == 1.0;
                if same {
                    return Ok(x);
                }
                let taps = Taps::new(OP, axis.to, |i| axis.row(i, options))?;
                let taps = if options.mode == Interpolation::Area { taps.averaged() } else { taps };
                taps.apply(OP, &x, i + 2)
            })
        })
    }
    /// Pixel shuffle, from `self: [.., C·r², H, W]` to `[.., C, H·r, W·r]`: every `r²` channels become a square of
    /// `r × r` pixels (Shi et al. 2016).
    #[track_caller]
    fn pixel_shuffle(&self, r: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let Some([.., c, h, w]) = shape.get(..) else { return Err(no_image("pixel_shuffle", shape)) };
        let (lead, c, h, w) = (shape.rank() - 3, *c, *h, *w);
        if r == 0 || r.checked_mul(r).is_none_or(|square| !c.is_multiple_of(square)) {
            return Err(Error::shape("pixel_shuffle", &[shape], format!("{c} channels are no multiple of {r}²")));
        }
        let apart = self.reshape([shape[..lead].iter().product(), c / (r * r), r, r, h, w])?;
        let image = apart.permute(&[0, 1, 4, 2, 5, 3])?;
        image.reshape([&shape[..lead], &[c / (r * r), h.saturating_mul(r), w.saturating_mul(r)]].concat())
    }
    /// Inverse pixel shuffle, from `self: [.., C, H·r, W·r]` to `[.., C·r², H, W]`; see
    /// [`pixel_shuffle`](InterpolateOps::pixel_shuffle).
    #[track_caller]
    fn pixel_unshuffle(&self, r: usize) -> Result<Self> {
        let shape = self.spec().shape;
        let Some([.., c, h, w]) = shape.get(..) else { return Err(no_image("pixel_unshuffle", shape)) };
        let (lead, c, h, w) = (shape.rank() - 3, *c, *h, *w);
        if r == 0 || !h.is_multiple_of(r) || !w.is_multiple_of(r) {
            return Err(Error::shape("pixel_unshuffle", &[shape], format!("{h} × {w} pixels are no multiples of {r}")));
        }
        let apart = self.reshape([shape[..lead].iter().product(), c, h / r, r, w / r, r])?;
        let channels = apart.permute(&[0, 1, 3, 5, 2, 4])?;
        let c = c.saturating_mul(r).saturating_mul(r);
        channels.reshape([&shape[..lead], &[c, h / r, w / r]].concat())
    }
}

impl<T: Apply> InterpolateOps for T {}

fn no_image(op: &'static str, shape: Shape) -> Error {
    Error::shape(op, &[shape], "needs [.., C, H, W]")
}

/// The sizes of one axis, before and after.
struct ResizeAxis {
    from: usize,
    to: usize,
    /// The distance between new elements in units of old ones, where edges are aligned.
    scale: f64,
    /// The scale factor, if the caller gave it instead of the new size.
    factor: Option<f64>,
}

impl Interpolate {
    fn axes(&self, x: Shape, to: Resize<'_>) -> Result<Vec<ResizeAxis>> {
        const OP: &str = "interpolate";
        let smooth = matches!(self.mode, Interpolation::Linear | Interpolation::Cubic);
        if !smooth && (self.align_corners || self.antialias) {
            let why = format!("{:?} has neither `align_corners` nor `antialias`; linear and cubic have", self.mode);
            return Err(Error::config(OP, "mode", why));
        }
        let given = match to {
            Resize::Size(sizes) => sizes.len(),
            Resize::Scale(factors) => factors.len(),
        };
        if x.rank() < 3 || given != x.rank() - 2 {
            let why = format!("{given} new sizes; needs [N, C, ..] and one for each axis after the second");
            return Err(Error::shape(OP, &[x], why));
        }
        let axis = |i: usize| {
            let from = x[i + 2];
            let (to, scale, factor) = match to {
                Resize::Size(sizes) => (sizes[i], from as f64 / sizes[i] as f64, None),
                Resize::Scale(factors) => ((from as f64 * factors[i]) as usize, 1.0 / factors[i], Some(factors[i])),
            };
            if from == 0 || to == 0 || !(scale > 0.0 && scale.is_finite()) {
                return Err(Error::shape(OP, &[x], format!("axis {} of size {from} cannot become {to}", i + 2)));
            }
            Ok(ResizeAxis { from, to, scale, factor })
        };
        let axes: Vec<ResizeAxis> = (0..given).map(axis).collect::<Result<_>>()?;
        axes.iter().enumerate().fold(x, |x, (i, a)| x.with(i + 2, a.to)).checked(OP)?;
        Ok(axes)
    }
}

impl ResizeAxis {
    /// The old element that contains the position at fraction `part` (0 or ½) of new element `i`. Nothing is rounded
    /// before the division, so that integer quotients are exact.
    fn under(&self, i: usize, part: f64) -> usize {
        let at = match self.factor {
            Some(factor) => ((i as f64 + part) / factor) as usize,
            None if part == 0.0 => cell(i, self.from, self.to).0,
            None => ((2 * i as u128 + 1) * self.from as u128 / (2 * self.to as u128)) as usize,
        };
        at.min(self.from - 1)
    }

    /// The old elements and weights that a new element is computed from.
    fn row(&self, i: usize, options: Interpolate) -> Vec<(usize, f64)> {
        let last = self.from - 1;
        match options.mode {
            Interpolation::Nearest => vec![(self.under(i, 0.0), 1.0)],
            Interpolation::NearestExact => vec![(self.under(i, 0.5), 1.0)],
            Interpolation::Area => {
                let (from, to) = cell(i, self.from, self.to);
                (from..to).map(|k| (k, 1.0)).collect()
            }
            Interpolation::Linear if options.antialias => self.filtered(i, options, 1.0, |x| (1.0 - x.abs()).max(0.0)),
            Interpolation::Cubic if options.antialias => self.filtered(i, options, 2.0, |x| cubic(x, -0.5)),
            Interpolation::Linear => {
                let at = self.place(i, options).max(0.0);
                let first = (at as usize).min(last);
                let part = (at - first as f64).clamp(0.0, 1.0);
                vec![(first, 1.0 - part), ((first + 1).min(last), part)]
            }
            Interpolation::Cubic => {
                let at = self.place(i, options);
                let first = at.floor();
                let near =
                    |k: i64| ((first as i64 + k).clamp(0, last as i64) as usize, cubic(at - first - k as f64, -0.75));
                (-1..=2).map(near).collect()
            }
        }
    }

    /// The distance between new elements, in units of old ones.
    fn step(&self, options: Interpolate) -> f64 {
        match options.align_corners {
            true if self.to > 1 => (self.from - 1) as f64 / (self.to - 1) as f64,
            true => 0.0,
            false => self.scale,
        }
    }

    /// The coordinate of new element `i` among the old ones.
    fn place(&self, i: usize, options: Interpolate) -> f64 {
        let step = self.step(options);
        if options.align_corners { step * i as f64 } else { step * (i as f64 + 0.5) - 0.5 }
    }

    /// All elements under a kernel that is stretched by the downscaling factor, and never narrower than for upscaling.
    fn filtered(&self, i: usize, options: Interpolate, support: f64, kernel: impl Fn(f64) -> f64) -> Vec<(usize, f64)> {
        let step = self.step(options);
        let width = step.max(1.0);
        let (center, reach) = (step * (i as f64 + 0.5), support * width);
        let from = ((center - reach + 0.5) as i64).max(0) as usize;
        let to = ((center + reach + 0.5) as i64).min(self.from as i64) as usize;
        let weight = |k: usize| kernel((k as f64 - center + 0.5) / width);
        let total: f64 = (from..to).map(weight).sum();
        (from..to).map(|k| (k, weight(k) / total)).collect()
    }
}

/// The convolution kernel of Keys (1981).
fn cubic(x: f64, a: f64) -> f64 {
    let x = x.abs();
    if x <= 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * a
    } else {
        0.0
    }
}
