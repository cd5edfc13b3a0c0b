//! Max pooling over windows of an image.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::{Fused, as_forward};
use crate::{
    Error, Result, Shape, Tensor, layout,
    ops::{Apply, Backprop, Bits, IndexOps, JoinOps, Outs, ReduceOps, Saves, Spec, Specs, ViewOps},
};

/// Max pooling: the largest element of each window of `x: [N, C, H, W]`, as `[N, C, P, Q]`. NaN counts as largest;
/// padding is never chosen.
#[derive(Clone, Debug)]
pub struct MaxPool {
    /// The size of a window, per axis.
    pub kernel: [usize; 2],
    /// The stride between windows, per axis.
    pub stride: [usize; 2],
    /// Padding at both edges of each axis; at most half the kernel.
    pub padding: [usize; 2],
}

impl MaxPool {
    /// The windows, `[N, C, P, Q, R · S]`, with `outside` beyond the edges.
    fn windows<T: Apply>(&self, x: &T, outside: f64) -> Result<T> {
        let [ph, pw] = self.padding;
        let padded = x.pad(&[(0, 0), (0, 0), (ph, ph), (pw, pw)], outside)?;
        padded.unfold(2, self.kernel[0], self.stride[0], 1)?.unfold(3, self.kernel[1], self.stride[1], 1)?.flatten(4, 5)
    }

    /// The output shape `[N, C, P, Q]` for an image. The error names the sizes that do not fit.
    fn output(&self, op: &'static str, x: Shape) -> Result<Shape> {
        if x.rank() != 4 {
            return Err(Error::shape(op, &[x], "needs four axes, [N, C, H, W]"));
        }
        if (0..2).any(|i| self.padding[i] > self.kernel[i] / 2) {
            let why = format!("padding {:?} must be at most half the kernel {:?}", self.padding, self.kernel);
            return Err(Error::shape(op, &[x], why));
        }
        let along =
            |i: usize| layout::windows(layout::padded(x[i + 2], self.padding[i])?, self.kernel[i], self.stride[i], 1);
        match (along(0), along(1)) {
            (Some(p), Some(q)) => Ok(x.with(2, p).with(3, q)),
            _ => {
                let (kernel, stride, padding) = (self.kernel, self.stride, self.padding);
                let why = format!("windows of {kernel:?} with stride {stride:?} do not fit (padding {padding:?})");
                Err(Error::shape(op, &[x], why))
            }
        }
    }
}

impl Fused for MaxPool {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        Ok(smallvec![Spec { shape: self.output(self.name(), ins[0].shape)?, dtype: ins[0].dtype }])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let windows = self.windows(ins[0], f64::NEG_INFINITY)?;
        let at = windows.detach().argmax_keepdim(-1)?;
        Ok(smallvec![windows.gather(-1, &at)?.squeeze(-1)?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        Some(Saves { inputs: Bits(1), outputs: Bits::NONE })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let (g, x) = (cx.grad()?, cx.input(0)?);
        cx.give(0, MaxPoolGrad(self.clone()).into(), &[&x, &g])
    }
}

/// The gradient of [`MaxPool`]. Inputs are `x` and the upstream gradient, which flows to the first of the largest
/// elements of each window.
#[derive(Clone, Debug)]
pub struct MaxPoolGrad(
    /// The options of the forward operation.
    pub MaxPool,
);

impl Fused for MaxPoolGrad {
    fn name(&self) -> &'static str {
        "max_pool2d_grad"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let outs = self.0.infer(&ins[..1])?;
        as_forward(self.name(), [("the gradient", &ins[1], &outs[0])])?;
        Ok(smallvec![ins[0]])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (x, g, pool) = (ins[0], ins[1], &self.0);
        let windows = pool.windows(&x.detach(), f64::NEG_INFINITY)?;
        let at = windows.argmax_keepdim(-1)?;
        let shape = windows.spec().shape;
        let zeros = T::constant(Tensor::zeros(x.runtime(), shape, g.spec().dtype)?);
        let spread = zeros.scatter_add(-1, &at, &g.unsqueeze(-1)?)?;
        let spread = spread.reshape([shape[0], shape[1], shape[2], shape[3], pool.kernel[0], pool.kernel[1]])?;
        let [h, w] = [0, 1].map(|i| x.spec().shape[i + 2] + 2 * pool.padding[i]);
        let padded = spread.fold(3, w, pool.stride[1], 1)?.fold(2, h, pool.stride[0], 1)?;
        let inner = padded.narrow(2, pool.padding[0], h - 2 * pool.padding[0])?;
        Ok(smallvec![inner.narrow(3, pool.padding[1], w - 2 * pool.padding[1])?])
    }

    fn saves(&self, _: Bits) -> Option<Saves> {
        None
    }

    fn gradient<T: Apply>(&self, _: &mut dyn Backprop<T>) -> Result<()> {
        Ok(())
    }
}
