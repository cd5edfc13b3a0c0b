//! Convolutions over one, two and three axes with every kind of padding. Each is reduced to two-dimensional
//! convolutions, for which there are kernels.

use super::{PadMode, PadOps};
use crate::{
    Error, Result, Shape,
    fused::{Conv1dOptions, ConvOptions, NnOps},
    ops::{Apply, PointwiseOps, ViewOps},
};

/// The amount of padding around the input of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvPadding<const N: usize> {
    /// Equal padding before and after each axis.
    Symmetric([usize; N]),
    /// Padding before and after each axis, given separately.
    Sides([(usize, usize); N]),
    /// The padding that keeps the sizes at stride 1; an odd element comes after. PyTorch's `padding="same"`.
    Same,
}

/// The geometry of a convolution over `N` axes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvNd<const N: usize> {
    /// The stride between outputs, per axis.
    pub stride: [usize; N],
    /// The amount of padding around the input.
    pub padding: ConvPadding<N>,
    /// The values of the padding: PyTorch's `padding_mode`.
    pub mode: PadMode,
    /// The distance between elements of the kernel, per axis.
    pub dilation: [usize; N],
    /// The number of channel groups; channels of different groups do not mix.
    pub groups: usize,
}

impl<const N: usize> Default for ConvNd<N> {
    fn default() -> Self {
        ConvNd {
            stride: [1; N],
            padding: ConvPadding::Symmetric([0; N]),
            mode: PadMode::Constant(0.0),
            dilation: [1; N],
            groups: 1,
        }
    }
}

impl From<Conv1dOptions> for ConvNd<1> {
    fn from(o: Conv1dOptions) -> Self {
        let padding = ConvPadding::Symmetric([o.padding]);
        ConvNd { stride: [o.stride], padding, dilation: [o.dilation], groups: o.groups, ..Default::default() }
    }
}

impl From<ConvOptions> for ConvNd<2> {
    fn from(o: ConvOptions) -> Self {
        let padding = ConvPadding::Symmetric(o.padding);
        ConvNd { stride: o.stride, padding, dilation: o.dilation, groups: o.groups, ..Default::default() }
    }
}

/// Convolutions over the last `N` axes, `N` from 1 to 3.
pub trait ConvOps: Apply {
    /// Convolves `self: [B, C, L1 .. LN]` with `weight: [O, C/G, K1 .. KN]` and `bias: [O]`, all of one floating dtype,
    /// to `[B, O, P1 .. PN]`; `G` is the number of groups.
    ///
    /// # Errors
    /// Fails for other ranks, for channels that do not fit the groups, or for a kernel that does not fit the padded
    /// input. Fails for [`ConvPadding::Same`] with strides above 1, and for more padding than the mode allows.
    #[doc(alias = "conv1d")]
    #[doc(alias = "conv3d")]
    #[track_caller]
    fn conv<const N: usize>(&self, weight: &Self, bias: Option<&Self>, options: &ConvNd<N>) -> Result<Self> {
        let (shape, w) = (self.spec().shape, weight.spec().shape);
        ranks::<N>("conv", shape, w)?;
        let sides = options.sides(w)?;
        let zeros = options.mode.is_zero() && sides.iter().all(|s| s.0 == s.1);
        let pads: Vec<_> = [(0, 0); 2].into_iter().chain(sides.map(|s| (s.0 as isize, s.1 as isize))).collect();
        let padded = if zeros { self.clone() } else { self.pad_with(&pads, options.mode)? };
        let padding = if zeros { sides.map(|s| s.0) } else { [0; N] };
        let plane = Plane::new(options, padding);
        match N {
            1 => {
                let y = padded.unsqueeze(2)?.conv2d(&weight.unsqueeze(2)?, bias, plane.last);
                y.map_err(|e| e.of_line("conv"))?.squeeze(2)
            }
            2 => padded.conv2d(weight, bias, plane.last),
            _ => plane.forward(&padded, weight, bias),
        }
    }
    /// Transposed convolution of `self: [B, O, P1 .. PN]` with `weight: [O, C/G, K1 .. KN]` and `bias: [C]`, to
    /// `[B, C, L1 .. LN]`: the adjoint of [`conv`](ConvOps::conv) with zero padding. `output_padding` lengthens the
    /// result, whose size a stride leaves ambiguous. Padding other than [`ConvPadding::Symmetric`], or a mode other
    /// than zeros, is an error.
    #[doc(alias = "conv_transpose1d")]
    #[doc(alias = "conv_transpose3d")]
    #[track_caller]
    fn conv_transpose<const N: usize>(
        &self,
        weight: &Self,
        bias: Option<&Self>,
        options: &ConvNd<N>,
        output_padding: [usize; N],
    ) -> Result<Self> {
        const OP: &str = "conv_transpose";
        ranks::<N>(OP, self.spec().shape, weight.spec().shape)?;
        let ConvPadding::Symmetric(padding) = options.padding else {
            let why = format!("padding {:?}; only a symmetric one has an adjoint", options.padding);
            return Err(Error::config(OP, "padding", why));
        };
        if !options.mode.is_zero() {
            return Err(Error::config(OP, "mode", format!("padding with {:?}; only zeros are known", options.mode)));
        }
        let plane = Plane::new(options, padding);
        let last = |i: usize| output_padding[N - i];
        match N {
            1 => {
                let (x, w) = (self.unsqueeze(2)?, weight.unsqueeze(2)?);
                let y = x.conv_transpose2d(&w, bias, plane.last, [0, last(1)]);
                y.map_err(|e| e.of_line(OP))?.squeeze(2)
            }
            2 => self.conv_transpose2d(weight, bias, plane.last, [last(2), last(1)]),
            _ => plane.adjoint(self, weight, bias, [last(3), last(2), last(1)]),
        }
    }
}

impl<T: Apply> ConvOps for T {}

fn ranks<const N: usize>(op: &'static str, x: Shape, w: Shape) -> Result<()> {
    if (1..=3).contains(&N) && x.rank() == N + 2 && w.rank() == N + 2 {
        return Ok(());
    }
    let why = format!("needs operands with {} axes for a convolution over {N}, which may be one to three", N + 2);
    Err(Error::shape(op, &[x, w], why))
}

impl<const N: usize> ConvNd<N> {
    /// The padding before and after each axis.
    fn sides(&self, weight: Shape) -> Result<[(usize, usize); N]> {
        let sides = match self.padding {
            ConvPadding::Symmetric(p) => p.map(|p| (p, p)),
            ConvPadding::Sides(sides) => sides,
            ConvPadding::Same if self.stride != [1; N] => {
                let why = format!("`same` padding keeps sizes at strides of 1, not {:?}", self.stride);
                return Err(Error::config("conv", "padding", why));
            }
            ConvPadding::Same => std::array::from_fn(|i| {
                let total = self.dilation[i].saturating_mul(weight[i + 2].saturating_sub(1));
                (total / 2, total - total / 2)
            }),
        };
        if sides.iter().any(|s| s.0.max(s.1) > isize::MAX as usize / 4) {
            return Err(Error::config("conv", "padding", format!("padding {sides:?} is more than memory can hold")));
        }
        Ok(sides)
    }
}

/// A three-dimensional convolution: its first axis, and a two-dimensional convolution over the last two axes.
struct Plane {
    last: ConvOptions,
    stride: usize,
    padding: usize,
    dilation: usize,
}

impl Plane {
    fn new<const N: usize>(options: &ConvNd<N>, padding: [usize; N]) -> Plane {
        // The value for the axis `from_end` before the last one; `absent`, for an axis of size 1, if there is no such
        // axis.
        let pick = |of: &[usize; N], from_end: usize, absent: usize| {
            N.checked_sub(from_end).and_then(|i| of.get(i)).copied().unwrap_or(absent)
        };
        let both = |of: &[usize; N], absent| [pick(of, 2, absent), pick(of, 1, absent)];
        Plane {
            last: ConvOptions {
                stride: both(&options.stride, 1),
                padding: both(&padding, 0),
                dilation: both(&options.dilation, 1),
                groups: options.groups,
            },
            stride: pick(&options.stride, 3, 1),
            padding: pick(&padding, 3, 0),
            dilation: pick(&options.dilation, 3, 1),
        }
    }

    /// Convolves with the windows along the first axis as channels, and the windows' positions as a batch.
    fn forward<T: Apply>(&self, x: &T, weight: &T, bias: Option<&T>) -> Result<T> {
        let (w, p) = (weight.spec().shape, self.padding as isize);
        let padded = x.pad_with(&[(0, 0), (0, 0), (p, p), (0, 0), (0, 0)], PadMode::Constant(0.0))?;
        let windows = padded.unfold(2, w[2], self.stride, self.dilation)?.permute(&[0, 2, 1, 5, 3, 4])?;
        let s = windows.spec().shape;
        let images = windows.reshape([s[0] * s[1], s[2] * s[3], s[4], s[5]])?;
        let y = images.conv2d(&flat_depth(weight)?, bias, self.last)?;
        let t = y.spec().shape;
        y.reshape([s[0], s[1], t[1], t[2], t[3]])?.permute(&[0, 2, 1, 3, 4])
    }

    /// The length of the first axis of the adjoint, before its padding is removed and after.
    fn lengths(&self, size: usize, kernel: usize, output_padding: usize) -> Option<(usize, usize)> {
        let reach = size.checked_sub(1)?.checked_mul(self.stride)?;
        let len = self.dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(reach)?.checked_add(1)?;
        let kept = len.checked_add(output_padding)?.checked_sub(self.padding.checked_mul(2)?)?;
        (output_padding < self.stride.max(self.dilation)).then_some((len, kept))
    }

    fn adjoint<T: Apply>(&self, y: &T, weight: &T, bias: Option<&T>, output_padding: [usize; 3]) -> Result<T> {
        let (s, w) = (y.spec().shape, weight.spec().shape);
        let [first, rest @ ..] = output_padding;
        let Some((len, kept)) = self.lengths(s[2], w[2], first) else {
            let why = format!(
                "output padding {output_padding:?} must be less than the stride or the dilation, and the padding {} leave something",
                self.padding
            );
            return Err(Error::shape("conv_transpose", &[s, w], why));
        };
        let images = y.permute(&[0, 2, 1, 3, 4])?.reshape([s[0] * s[2], s[1], s[3], s[4]])?;
        let x = images.conv_transpose2d(&flat_depth(weight)?, None, self.last, rest)?;
        let t = x.spec().shape;
        let windows = x.reshape([s[0], s[2], t[1] / w[2], w[2], t[2], t[3]])?.permute(&[0, 2, 1, 4, 5, 3])?;
        let folded = windows.fold(2, len, self.stride, self.dilation)?;
        let longer = if first > 0 { folded.embed(2, len + first, 0, 1)? } else { folded };
        let whole = longer.narrow(2, self.padding, kept)?;
        match bias {
            Some(b) => whole.add(&b.reshape([b.spec().shape.numel(), 1, 1, 1])?),
            None => Ok(whole),
        }
    }
}

/// The weight `[O, C, D, H, W]` as `[O, C · D, H, W]`.
#[track_caller]
fn flat_depth<T: Apply>(weight: &T) -> Result<T> {
    let w = weight.spec().shape;
    weight.reshape([w[0], w[1] * w[2], w[3], w[4]])
}
