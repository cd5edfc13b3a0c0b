//! Im2col and col2im: windows as columns of a matrix, and back; PyTorch's `nn.functional.unfold` and `fold`.

use super::PoolOptions;
use crate::{
    Error, Result, Shape,
    layout::windows,
    ops::{Apply, JoinOps, ViewOps},
};

/// Conversions between images and the matrices of their windows. `options` gives the kernel, stride, dilation and
/// padding (zeros, of any size); its other fields are ignored.
pub trait ColumnOps: Apply {
    /// Im2col, from `self: [B, C, L1 .. LN]` to `[B, C · K, P]`: every window of `K` elements becomes a column, the `P`
    /// windows in row-major order.
    ///
    /// # Errors
    /// Fails for another rank, or for windows that do not fit.
    #[doc(alias = "unfold")]
    #[doc(alias = "Unfold")]
    #[track_caller]
    fn im2col<const N: usize>(&self, options: &PoolOptions<N>) -> Result<Self> {
        let shape = self.spec().shape;
        let counts = image::<N>("im2col", shape, shape).and_then(|size| options.columns("im2col", shape, size))?;
        let pads: Vec<_> = [(0, 0); 2].into_iter().chain(options.padding.map(|p| (p, p))).collect();
        let mut x = if options.padding == [0; N] { self.clone() } else { self.pad(&pads, 0.0)? };
        for i in 0..N {
            x = x.unfold(i as isize + 2, options.kernel[i], options.stride[i], options.dilation[i])?;
        }
        let order: Vec<isize> =
            [0, 1].into_iter().chain(N + 2..2 * N + 2).chain(2..N + 2).map(|a| a as isize).collect();
        let each: usize = options.kernel.iter().product();
        x.permute(&order)?.reshape([shape[0], shape[1] * each, counts.iter().product()])
    }
    /// Col2im: the columns `self: [B, C · K, P]` of [`im2col`](ColumnOps::im2col), accumulated where windows overlap
    /// into `[B, C, size]`. It is the adjoint of `im2col`, not its inverse.
    ///
    /// # Errors
    /// Fails for another rank, if `K` does not divide the number of rows, or if there is not one column per window.
    #[doc(alias = "fold")]
    #[doc(alias = "Fold")]
    #[track_caller]
    fn col2im<const N: usize>(&self, size: [usize; N], options: &PoolOptions<N>) -> Result<Self> {
        let shape = self.spec().shape;
        let each = Shape::new(&options.kernel).map_err(|e| e.of_op("col2im"))?.numel();
        if shape.rank() != 3 || each == 0 || !shape[1].is_multiple_of(each) {
            let why = format!("needs [B, C · {each}, P]: columns of windows of {:?}", options.kernel);
            return Err(Error::shape("col2im", &[shape], why));
        }
        let counts = options.columns("col2im", shape, size)?;
        if Shape::new(&counts).map_err(|e| e.of_op("col2im"))?.numel() != shape[2] {
            let why = format!("an image of {size:?} has {counts:?} windows, there are {} columns", shape[2]);
            return Err(Error::shape("col2im", &[shape], why));
        }
        let apart = [&[shape[0], shape[1] / each][..], &options.kernel, &counts].concat();
        let order: Vec<isize> =
            [0, 1].into_iter().chain(N + 2..2 * N + 2).chain(2..N + 2).map(|a| a as isize).collect();
        let mut x = self.reshape(apart)?.permute(&order)?;
        for i in (0..N).rev() {
            let len = size[i] + 2 * options.padding[i];
            x = x.fold(i as isize + 2, len, options.stride[i], options.dilation[i])?;
        }
        (0..N).try_fold(x, |x, i| x.narrow(i as isize + 2, options.padding[i], size[i]))
    }
}

impl<T: Apply> ColumnOps for T {}

fn image<const N: usize>(op: &'static str, shape: Shape, shown: Shape) -> Result<[usize; N]> {
    let image = (shape.rank() == N + 2 && (1..=3).contains(&N)).then(|| shape[2..].try_into().ok()).flatten();
    image.ok_or_else(|| {
        Error::shape(op, &[shown], format!("needs [B, C, ..] with {N} axes after the second, at most three"))
    })
}

impl<const N: usize> PoolOptions<N> {
    /// The number of windows along each axis of an image of `size`.
    fn columns(&self, op: &'static str, shown: Shape, size: [usize; N]) -> Result<[usize; N]> {
        let mut counts = [0; N];
        for (i, count) in counts.iter_mut().enumerate() {
            let padded = self.padding[i].checked_mul(2).and_then(|p| p.checked_add(size[i]));
            let fits = padded.and_then(|n| windows(n, self.kernel[i], self.stride[i], self.dilation[i]));
            *count = fits.ok_or_else(|| {
                let why = format!("a window does not fit axis {i} of an image of {size:?}: {self:?}");
                Error::shape(op, &[shown], why)
            })?;
        }
        Ok(counts)
    }
}
