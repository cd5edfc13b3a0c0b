//! Image layers without parameters: resizing, pixel shuffles, padding, im2col.

use autograd::Var;
use numcore::{
    Error, Result, Runtime, Within,
    ops::{Apply, ColumnOps, Interpolate, InterpolateOps, PadMode, PadOps, PoolOptions, Resize},
};

use crate::{Forward, Module};

/// Resizes the last axes of `x: [N, C, ..]` by factors: PyTorch's `Upsample(scale_factor=..)`.
#[derive(Clone, Debug, PartialEq, Module)]
pub struct Upsample {
    /// The scale factors, one for each axis after the second.
    pub factors: Vec<f64>,
    /// The interpolation of new elements.
    #[module(skip)]
    pub options: Interpolate,
}

impl<R: Runtime> Forward<R> for Upsample {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.interpolate(Resize::Scale(&self.factors), self.options).at_caller()
    }
}

/// Pixel shuffle: `[.., C·r², H, W]` becomes `[.., C, H·r, W·r]`.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct PixelShuffle {
    /// The factor `r` per axis.
    pub factor: usize,
}

impl<R: Runtime> Forward<R> for PixelShuffle {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.pixel_shuffle(self.factor).at_caller()
    }
}

/// Inverse pixel shuffle: `[.., C, H·r, W·r]` becomes `[.., C·r², H, W]`.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct PixelUnshuffle {
    /// The factor `r` per axis.
    pub factor: usize,
}

impl<R: Runtime> Forward<R> for PixelUnshuffle {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.pixel_unshuffle(self.factor).at_caller()
    }
}

/// Padding of the last axes: PyTorch's `ConstantPad2d`, `ReflectionPad2d`, `ReplicationPad2d`, `CircularPad2d` and
/// their variants for one and three axes.
#[derive(Clone, Debug, PartialEq, Module)]
pub struct Pad {
    /// The padding before and after each of the last axes, outermost first; negative counts crop.
    #[module(skip)]
    pub pads: Vec<(isize, isize)>,
    /// The rule that fills elements outside of the image.
    #[module(skip)]
    pub mode: PadMode,
}

impl<R: Runtime> Forward<R> for Pad {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        let shape = x.spec().shape;
        let Some(lead) = shape.rank().checked_sub(self.pads.len()) else {
            let why = format!("pads the last {} axes", self.pads.len());
            return Err(Error::shape("pad", &[shape], why)).at_caller();
        };
        x.pad_with(&[&vec![(0, 0); lead][..], &self.pads].concat(), self.mode).at_caller()
    }
}

/// Windows of `x: [B, C, ..]` as columns, `[B, C · K, P]`.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct Unfold<const N: usize> {
    /// The kernel, stride, padding and dilation; other options are ignored.
    #[module(skip)]
    pub options: PoolOptions<N>,
}

impl<R: Runtime, const N: usize> Forward<R> for Unfold<N> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.im2col(&self.options).at_caller()
    }
}

/// Sums columns `[B, C · K, P]` where their windows overlap, giving `[B, C, size]`.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct Fold<const N: usize> {
    /// The sizes of the output.
    #[module(skip)]
    pub size: [usize; N],
    /// The kernel, stride, padding and dilation; other options are ignored.
    #[module(skip)]
    pub options: PoolOptions<N>,
}

impl<R: Runtime, const N: usize> Forward<R> for Fold<N> {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.col2im(self.size, &self.options).at_caller()
    }
}
