//! Two-dimensional convolution. It is linear in both operands, and its two adjoints are convolutions again. The three
//! kinds are one operation, closed under differentiation. A bias is added in the epilogue of the GEMM, as in
//! [`Linear`](super::Linear).

use std::ops::RangeInclusive;

use smallvec::{SmallVec, smallvec};

use super::{ConvOptions, Fused};
use crate::{
    Error, Result, Shape,
    ops::{Apply, Backprop, Bits, JoinOps, Matmul, Outs, PointwiseOps, ReduceOps, Saves, Spec, Specs, ViewOps},
};

/// The operand of `y = conv(x, w)` that is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvKind {
    /// `y: [N, O, P, Q]` from `x: [N, C, H, W]` and `w: [O, C/G, R, S]`.
    Forward,
    /// The adjoint in `x`, of height and width `[H, W]`, from `y` and `w`: also the transposed convolution.
    Input([usize; 2]),
    /// The adjoint in `w`, of height and width `[R, S]`, from `x` and `y`.
    Weight([usize; 2]),
}

/// A convolution or one of its adjoints. Inputs are two operands of one floating dtype, then a bias of that dtype if
/// there is one. The bias is `[O, 1, 1]` for output `y: [N, O, P, Q]` and `[C, 1, 1]` for output `x: [N, C, H, W]`, as
/// it broadcasts.
#[derive(Clone, Debug)]
pub struct Conv {
    /// The kind of convolution: forward, or one of the two gradients.
    pub kind: ConvKind,
    /// The stride between outputs, per axis.
    pub stride: [usize; 2],
    /// Zero padding at both edges of each axis of the input.
    pub padding: [usize; 2],
    /// The distance between elements of the kernel, per axis.
    pub dilation: [usize; 2],
    /// The number of channel groups; channels of different groups do not mix.
    pub groups: usize,
    /// True if a bias is added to each channel of the output; [`ConvKind::Weight`] has none.
    pub bias: bool,
}

impl Conv {
    /// This convolution as another `kind`, without a bias.
    pub fn with(&self, kind: ConvKind) -> Conv {
        Conv { kind, bias: false, ..self.clone() }
    }

    fn output(&self, axis: usize, size: usize, kernel: usize) -> Option<usize> {
        let size = crate::layout::padded(size, self.padding[axis])?;
        crate::layout::windows(size, kernel, self.stride[axis], self.dilation[axis])
    }

    /// The matrix `[N, G, C/G · R · S, P · Q]`, whose columns are the windows of the padded input.
    fn columns<T: Apply>(&self, x: &T, kernel: [usize; 2], out: [usize; 2]) -> Result<T> {
        let shape = x.spec().shape;
        let [ph, pw] = self.padding;
        let padded = x.pad(&[(0, 0), (0, 0), (ph, ph), (pw, pw)], 0.0)?;
        let windows = padded.unfold(2, kernel[0], self.stride[0], self.dilation[0])?.unfold(
            3,
            kernel[1],
            self.stride[1],
            self.dilation[1],
        )?;
        let flat = [shape[0], self.groups, shape[1] / self.groups * kernel[0] * kernel[1], out[0] * out[1]];
        windows.permute(&[0, 1, 4, 5, 2, 3])?.reshape(flat)
    }

    fn forward<T: Apply>(&self, x: &T, w: &T) -> Result<T> {
        let (xs, ws) = (x.spec().shape, w.spec().shape);
        let out = self.sizes(xs, ws)?;
        let columns = self.columns(x, [ws[2], ws[3]], out)?;
        let rows = w.reshape([self.groups, ws[0] / self.groups, ws[1] * ws[2] * ws[3]])?;
        T::apply1(Matmul, &[&rows, &columns])?.reshape([xs[0], ws[0], out[0], out[1]])
    }

    fn input_adjoint<T: Apply>(&self, y: &T, w: &T, size: [usize; 2]) -> Result<T> {
        let (ys, ws) = (y.spec().shape, w.spec().shape);
        let rows = w.reshape([self.groups, ws[0] / self.groups, ws[1] * ws[2] * ws[3]])?;
        let flat = y.reshape([ys[0], self.groups, ws[0] / self.groups, ys[2] * ys[3]])?;
        let columns = T::apply1(Matmul, &[&rows.t()?, &flat])?;
        let channels = self.groups * ws[1];
        let windows = columns.reshape([ys[0], channels, ws[2], ws[3], ys[2], ys[3]])?.permute(&[0, 1, 4, 5, 2, 3])?;
        let [h, w] = [0, 1].map(|i| size[i] + 2 * self.padding[i]);
        let padded =
            windows.fold(3, w, self.stride[1], self.dilation[1])?.fold(2, h, self.stride[0], self.dilation[0])?;
        padded.narrow(2, self.padding[0], size[0])?.narrow(3, self.padding[1], size[1])
    }

    fn weight_adjoint<T: Apply>(&self, x: &T, y: &T, kernel: [usize; 2]) -> Result<T> {
        let (xs, ys) = (x.spec().shape, y.spec().shape);
        let columns = self.columns(x, kernel, [ys[2], ys[3]])?;
        let flat = y.reshape([ys[0], self.groups, ys[1] / self.groups, ys[2] * ys[3]])?;
        let products = T::apply1(Matmul, &[&flat, &columns.t()?])?;
        products.sum(&[0])?.reshape([ys[1], xs[1] / self.groups, kernel[0], kernel[1]])
    }

    /// The height and width of `y`.
    fn sizes(&self, x: Shape, w: Shape) -> Result<[usize; 2]> {
        match (self.output(0, x[2], w[2]), self.output(1, x[3], w[3])) {
            (Some(p), Some(q)) => Ok([p, q]),
            _ => Err(Error::shape(
                "conv",
                &[x, w],
                format!(
                    "the kernel (dilation {:?}) does not fit the input padded by {:?}",
                    self.dilation, self.padding
                ),
            )),
        }
    }

    /// Checks that the input's channels and the kernel's size fit a convolution.
    fn channels(&self, x: Shape, w: Shape) -> Result<()> {
        let why = if w[2] == 0 || w[3] == 0 {
            format!("a kernel of size {} by {}", w[2], w[3])
        } else if Some(x[1]) != w[1].checked_mul(self.groups) {
            let groups = if self.groups == 1 { String::new() } else { format!(" for each of {} groups", self.groups) };
            format!("{} input channels, the weight has {}{groups}", x[1], w[1])
        } else if !w[0].is_multiple_of(self.groups) {
            format!("{} output channels do not divide into {} groups", w[0], self.groups)
        } else {
            return Ok(());
        };
        Err(Error::shape(self.name(), &[x, w], why))
    }

    /// The shapes `[x, w, y]` of a convolution, from the two operands given.
    fn relation(&self, a: Shape, b: Shape) -> Result<[Shape; 3]> {
        let relation = match self.kind {
            ConvKind::Forward => {
                let [p, q] = self.sizes(a, b)?;
                [a, b, Shape::from([a[0], b[0], p, q])]
            }
            ConvKind::Input([h, w]) => [Shape::from([a[0], b[1].saturating_mul(self.groups), h, w]), b, a],
            ConvKind::Weight([r, s]) => [a, Shape::from([b[1], a[1] / self.groups, r, s]), b],
        };
        let [x, w, y] = relation;
        let channels = Some(x[1]) == w[1].checked_mul(self.groups)
            && w[0].is_multiple_of(self.groups)
            && y[1] == w[0]
            && x[0] == y[0];
        if channels && self.sizes(x, w).is_ok_and(|s| s == [y[2], y[3]]) {
            return Ok(relation);
        }
        let why = format!(
            "as input, weight, output they do not fit (groups {}, stride {:?}, padding {:?}, dilation {:?})",
            self.groups, self.stride, self.padding, self.dilation
        );
        Err(Error::shape("conv", &relation, why))
    }
}

impl Fused for Conv {
    fn name(&self) -> &'static str {
        match self.kind {
            ConvKind::Forward => "conv",
            ConvKind::Input(_) => "conv_transpose",
            ConvKind::Weight(_) => "conv_weight",
        }
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = 2 + usize::from(self.bias);
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (a, b) = (ins[0], ins[1]);
        if !a.dtype.is_float() || ins.iter().any(|s| s.dtype != a.dtype) {
            let dtypes: Vec<_> = ins.iter().map(|s| s.dtype).collect();
            return Err(Error::dtype(self.name(), &dtypes, "operands must have one floating dtype"));
        }
        if a.shape.rank() != 4 || b.shape.rank() != 4 || self.groups == 0 || self.stride.contains(&0) {
            let why = "needs operands with four axes, and strides and groups of at least 1";
            return Err(Error::shape(self.name(), &[a.shape, b.shape], why));
        }
        if self.kind == ConvKind::Forward {
            self.channels(a.shape, b.shape)?;
        }
        let [x, w, y] = self.relation(a.shape, b.shape)?;
        let shape = match self.kind {
            ConvKind::Forward => y,
            ConvKind::Input(_) => x,
            ConvKind::Weight(_) => w,
        };
        if self.bias && (ins[2].shape.dims() != [shape[1], 1, 1] || matches!(self.kind, ConvKind::Weight(_))) {
            let why = format!("needs a bias [{}, 1, 1], and none for the adjoint in the weight", shape[1]);
            return Err(Error::shape(self.name(), &[a.shape, b.shape, ins[2].shape], why));
        }
        Ok(smallvec![Spec { shape, dtype: a.dtype }])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        if self.bias {
            // There may be a kernel for the convolution without its bias.
            return Ok(smallvec![T::apply1(self.with(self.kind), &ins[..2])?.add(ins[2])?]);
        }
        Ok(smallvec![match self.kind {
            ConvKind::Forward => self.forward(ins[0], ins[1])?,
            ConvKind::Input(size) => self.input_adjoint(ins[0], ins[1], size)?,
            ConvKind::Weight(kernel) => self.weight_adjoint(ins[0], ins[1], kernel)?,
        }])
    }

    fn computes_in_f32(&self) -> bool {
        // A convolution with a bias runs in its own dtype, if its kernel supports that, and the bias is added in it.
        !self.bias
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        let inputs = Bits(u64::from(wants.has(1)) | u64::from(wants.has(0)) << 1);
        Some(Saves { inputs, outputs: Bits::NONE })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        if self.bias {
            // The bias gradient comes before the operands' gradients, in the order of the decomposition's nodes.
            cx.give_sum_to(2, &g)?;
        }
        let size = |s: Shape| [s[2], s[3]];
        let (a, b) = (cx.input_spec(0)?.shape, cx.input_spec(1)?.shape);
        let kinds: SmallVec<[ConvKind; 2]> = match self.kind {
            ConvKind::Forward => smallvec![ConvKind::Input(size(a)), ConvKind::Weight(size(b))],
            ConvKind::Input(_) => smallvec![ConvKind::Forward, ConvKind::Weight(size(b))],
            ConvKind::Weight(_) => smallvec![ConvKind::Input(size(a)), ConvKind::Forward],
        };
        for i in (0..2).filter(|&i| cx.wants(i)).collect::<SmallVec<[usize; 2]>>() {
            let other = cx.input(1 - i)?;
            // The gradient takes the place of this op's result among input, weight and output.
            let upstream_first = match (self.kind, i) {
                (ConvKind::Forward, 0) | (ConvKind::Input(_), _) => true,
                (ConvKind::Forward, _) | (ConvKind::Weight(_), _) => false,
            };
            let ins: [&T; 2] = if upstream_first { [&g, &other] } else { [&other, &g] };
            cx.give(i, self.with(kinds[i]).into(), &ins)?;
        }
        Ok(())
    }
}

/// The height and width of a transposed convolution of `x: [N, O, P, Q]` with `w: [O, C/G, R, S]`, and the number of
/// strides of output padding on each axis.
pub(super) fn transposed(
    x: Shape,
    w: Shape,
    options: ConvOptions,
    output_padding: [usize; 2],
) -> Result<([usize; 2], [usize; 2])> {
    let ConvOptions { stride, padding, dilation, groups } = options;
    let bad = |why: String| Err(Error::shape("conv_transpose2d", &[x, w], why));
    if stride.contains(&0) || groups == 0 {
        return bad("strides and groups must be at least 1".into());
    }
    if x[1] != w[0] {
        return bad(format!("{} input channels, the weight has {}", x[1], w[0]));
    }
    if (0..2).any(|i| output_padding[i] >= stride[i].max(dilation[i])) {
        let limits = format!("the stride {stride:?} or the dilation {dilation:?}");
        return bad(format!("the output padding {output_padding:?} must be less than {limits}"));
    }
    let size = |i: usize| {
        let reach = x[2 + i].checked_sub(1)?.checked_mul(stride[i])?;
        let kernel = w[2 + i].checked_sub(1)?.checked_mul(dilation[i])?.checked_add(1)?;
        let whole = reach.checked_add(kernel)?.checked_add(output_padding[i])?;
        whole.checked_sub(padding[i].checked_mul(2)?)
    };
    match (size(0), size(1)) {
        (Some(h), Some(w)) => Ok(([h, w], [0, 1].map(|i| output_padding[i] / stride[i]))),
        _ => bad("the padding leaves nothing of the output".into()),
    }
}
