//! Pooling over windows of one, two or three axes: its geometry, and the methods.

use super::{extreme_pool, mean_pool, room, taps::cell};
use crate::{Error, Result, Shape, layout, ops::Apply};

/// The geometry of a pool over the last `N` axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolOptions<const N: usize> {
    /// The size of a window, per axis.
    pub kernel: [usize; N],
    /// The stride between windows, per axis.
    pub stride: [usize; N],
    /// Padding at both edges of each axis; at most half the kernel.
    pub padding: [usize; N],
    /// The distance between elements of a window, per axis.
    pub dilation: [usize; N],
    /// True if elements left over at the end get another window, which then extends over the edge. A window that would
    /// start beyond the input and the padding before its end is dropped, as in PyTorch.
    pub ceil_mode: bool,
    /// True if elements of the padding count in the divisor of mean pooling. Positions that `ceil_mode` adds beyond the
    /// padding never count.
    pub count_include_pad: bool,
    /// The divisor of the sums of mean pooling, in place of the number of elements.
    pub divisor: Option<f64>,
}

impl<const N: usize> PoolOptions<N> {
    /// Windows that do not overlap, without padding, as in PyTorch: the stride equals the kernel.
    pub fn new(kernel: [usize; N]) -> Self {
        PoolOptions {
            kernel,
            stride: kernel,
            padding: [0; N],
            dilation: [1; N],
            ceil_mode: false,
            count_include_pad: true,
            divisor: None,
        }
    }

    /// The pooled axes of `x: [.., L1 .. LN]`. The error names the sizes that do not fit.
    pub(super) fn axes(&self, op: &'static str, x: Shape) -> Result<[WindowAxis; N]> {
        let spatial = spatial::<N>(op, x)?;
        let mut axes = [WindowAxis::default(); N];
        for (i, axis) in axes.iter_mut().enumerate() {
            if self.padding[i] > self.kernel[i] / 2 {
                let why = format!("padding {:?} must be at most half the kernel {:?}", self.padding, self.kernel);
                return Err(Error::shape(op, &[x], why));
            }
            *axis = self.axis(i, spatial[i]).ok_or_else(|| {
                let why = format!(
                    "windows of {:?} (stride {:?}, padding {:?}, dilation {:?}) do not fit",
                    self.kernel, self.stride, self.padding, self.dilation
                );
                Error::shape(op, &[x], why)
            })?;
        }
        Ok(axes)
    }

    fn axis(&self, i: usize, size: usize) -> Option<WindowAxis> {
        let (kernel, step, dilation, before) = (self.kernel[i], self.stride[i], self.dilation[i], self.padding[i]);
        let padded = size.checked_add(before.checked_mul(2)?)?;
        let count = if self.ceil_mode {
            // A window may reach up to a stride less one beyond the padding; so may the first one.
            let more = padded.saturating_add(step.checked_sub(1)?);
            let count = layout::windows(more, kernel, step, dilation)?;
            if (count - 1) * step >= size + before { count - 1 } else { count }
        } else {
            layout::windows(padded, kernel, step, dilation)?
        };
        let reach = (kernel - 1) * dilation + 1;
        let after = (count.checked_sub(1)? * step + reach).saturating_sub(size + before);
        let axis = WindowAxis { size, before, after, count, kernel, step, dilation };
        // Dilated windows may miss the input, and no elements have no maximum.
        axis.counts().all(|[inside, _]| inside > 0).then_some(axis)
    }
}

/// Windows along one axis.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WindowAxis {
    pub(super) size: usize,
    /// Positions outside of the input that windows cover at its start and at its end.
    pub(super) before: usize,
    pub(super) after: usize,
    /// The number of windows along the axis.
    pub(super) count: usize,
    pub(super) kernel: usize,
    pub(super) step: usize,
    pub(super) dilation: usize,
}

impl WindowAxis {
    /// The number of elements of each window in the input, and in the input or its padding of `before` on both sides.
    pub(super) fn counts(&self) -> impl Iterator<Item = [usize; 2]> + '_ {
        (0..self.count).map(|w| {
            // The number of elements of the window before this position.
            let ahead = |end: usize| end.saturating_sub(w * self.step).div_ceil(self.dilation).min(self.kernel);
            let end = self.before + self.size;
            [ahead(end) - ahead(self.before), ahead(end + self.before)]
        })
    }
}

/// The last `N` sizes of `x`.
pub(super) fn spatial<const N: usize>(op: &'static str, x: Shape) -> Result<[usize; N]> {
    let from = x.rank().checked_sub(N).filter(|_| (1..=3).contains(&N));
    from.and_then(|from| x[from..].try_into().ok())
        .ok_or_else(|| Error::shape(op, &[x], format!("needs at least {N} axes, and pools over one, two or three")))
}

/// Pools over the last `N` axes of `self: [.., L1 .. LN]`, `N` from 1 to 3, after any number of leading axes.
/// `P1 .. PN` are the numbers of windows, `⌊(L + 2·padding − dilation·(kernel − 1) − 1) / stride⌋ + 1` (`⌈..⌉` with
/// `ceil_mode`).
///
/// # Errors
/// Methods fail for fewer than `N` axes, padding of more than half the kernel, and windows that do not fit or miss the
/// input. They fail for regions of an empty input, and for a dtype that the method does not accept.
pub trait PoolOps: Apply {
    /// The largest element of each window, `[.., P1 .. PN]`. NaN counts as largest, padding is never chosen, and the
    /// first of equal elements gets the gradient. Any dtype but `bool`.
    #[doc(alias = "max_pool1d")]
    #[doc(alias = "max_pool3d")]
    #[doc(alias = "MaxPool3d")]
    #[track_caller]
    fn max_pool<const N: usize>(&self, options: &PoolOptions<N>) -> Result<Self> {
        extreme_pool::largest(self, options)
    }
    /// Max pooling that also returns the position of each maximum within its `L1 × .. × LN` elements, row-major
    /// (`i64`); see [`max_pool`](PoolOps::max_pool).
    #[doc(alias = "return_indices")]
    #[track_caller]
    fn max_pool_with_indices<const N: usize>(&self, options: &PoolOptions<N>) -> Result<(Self, Self)> {
        extreme_pool::with_positions(
            "max_pool",
            self,
            &extreme_pool::PoolWindows::Sliding(options.axes("max_pool", self.spec().shape)?),
        )
    }
    /// Writes `self: [.., P1 .. PN]` to `positions`, as [`max_pool_with_indices`](PoolOps::max_pool_with_indices)
    /// returns them, into zeros `[.., size]`. The last of several values for one position is kept.
    #[doc(alias = "MaxUnpool2d")]
    #[track_caller]
    fn max_unpool<const N: usize>(&self, positions: &Self, size: [usize; N]) -> Result<Self> {
        extreme_pool::put_back(self, positions, size)
    }
    /// The mean of each window, `[.., P1 .. PN]`; floating dtypes only.
    #[doc(alias = "avg_pool1d")]
    #[doc(alias = "avg_pool3d")]
    #[doc(alias = "AvgPool3d")]
    #[track_caller]
    fn avg_pool<const N: usize>(&self, options: &PoolOptions<N>) -> Result<Self> {
        mean_pool::mean("avg_pool", self, options)
    }
    /// Power-mean pooling, `(Σ |x|^p)^(1/p)` of each window, `[.., P1 .. PN]`, for floating dtypes. Padding counts as
    /// 0. The gradient is 0 where an element or the sum is 0.
    #[doc(alias = "lp_pool2d")]
    #[doc(alias = "LPPool2d")]
    #[track_caller]
    fn lp_pool<const N: usize>(&self, p: f64, options: &PoolOptions<N>) -> Result<Self> {
        mean_pool::power(self, p, options)
    }
    /// Means over `size` regions of nearly equal size, `[.., size]`: region `i` of `n` spans `⌊i·L/n⌋ .. ⌈(i+1)·L/n⌉`.
    /// Floating dtypes only.
    #[doc(alias = "adaptive_avg_pool1d")]
    #[doc(alias = "adaptive_avg_pool3d")]
    #[track_caller]
    fn adaptive_avg_pool<const N: usize>(&self, size: [usize; N]) -> Result<Self> {
        mean_pool::adaptive("adaptive_avg_pool", self, size)
    }
    /// The largest element of each of the regions of [`adaptive_avg_pool`](PoolOps::adaptive_avg_pool), `[.., size]`;
    /// the first of equal elements gets the gradient.
    #[doc(alias = "adaptive_max_pool1d")]
    #[doc(alias = "adaptive_max_pool3d")]
    #[track_caller]
    fn adaptive_max_pool<const N: usize>(&self, size: [usize; N]) -> Result<Self> {
        Ok(self.adaptive_max_pool_with_indices(size)?.0)
    }
    /// Adaptive max pooling that also returns the position of each maximum within its `L1 × .. × LN` elements (`i64`);
    /// see [`adaptive_max_pool`](PoolOps::adaptive_max_pool).
    #[track_caller]
    fn adaptive_max_pool_with_indices<const N: usize>(&self, size: [usize; N]) -> Result<(Self, Self)> {
        extreme_pool::adaptive("adaptive_max_pool", self, size)
    }
}

impl<T: Apply> PoolOps for T {}

/// The first element and the one after the last of each region of each axis.
pub(super) fn regions<const N: usize>(
    op: &'static str,
    x: Shape,
    size: [usize; N],
) -> Result<[Vec<(usize, usize)>; N]> {
    let spatial = spatial::<N>(op, x)?;
    if spatial.contains(&0) || size.contains(&0) {
        return Err(Error::shape(op, &[x], format!("neither the input nor the output {size:?} may be empty")));
    }
    Shape::new(&[&x[..x.rank() - N], &size].concat())?;
    let mut regions = [const { Vec::new() }; N];
    for (i, regions) in regions.iter_mut().enumerate() {
        *regions = room(op, size[i])?;
        regions.extend((0..size[i]).map(|r| cell(r, spatial[i], size[i])));
    }
    Ok(regions)
}
