//! Products of 8-bit operands with a scale per block, emulated: DeepSeek-V3's recipe (arXiv 2412.19437, section 3.3).

use std::{ops::RangeInclusive, sync::LazyLock};

use smallvec::smallvec;

use super::Fused;
use crate::{
    DType, Error, Result, Shape,
    ops::{
        Apply, Backprop, Bits, JoinOps, Matmul, MatmulOps, Op, Outs, PointwiseOps, ReduceOps, Saves, Spec, Specs,
        ViewOps, matmul,
    },
    pointwise::Program,
};

/// The number of elements along each side of a block of a weight, and the length of a tile.
const SIDE: usize = 128;

/// The largest code's value.
const LARGEST: f64 = DType::F8E4M3.largest();

/// Rounds a matrix, or matrices, to `f8e4m3` with an `f32` scale for each block. The scale divides the largest
/// magnitude of the block by 448, so nothing overflows.
///
/// A weight has blocks of 128 × 128. Other operands of products have tiles of 128 elements along the axis that is
/// summed. The last block of an axis may be smaller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockScaling {
    /// True if scales are rounded up to powers of two. Operands are then exactly codes times scales; otherwise the
    /// products of codes and scales are rounded to `f32`.
    pub powers_of_two: bool,
}

impl BlockScaling {
    /// Quantises a weight `[O, I]`: codes `[O, I]` of `f8e4m3`, and `f32` scales `[⌈O/128⌉, ⌈I/128⌉]` by which codes
    /// are multiplied. They are `weight` and `weight_scale_inv` in DeepSeek-V3's files.
    ///
    /// # Errors
    /// Fails if `weight` is no matrix of `f32`, `f16` or `bf16`, or if the device does not store `f8e4m3`.
    #[track_caller]
    pub fn quantize<T: Apply>(self, weight: &T) -> Result<[T; 2]> {
        let Spec { shape, .. } = checked("quantize", weight.spec())?;
        if shape.rank() != 2 {
            return Err(T::explained(Error::shape("quantize", &[shape], "needs a weight [O, I]"), &[weight]));
        }
        let blocks = blocked(&weight.detach(), [SIDE; 2])?;
        let scales = self.scales(&blocks)?;
        let codes = blocks.div(&scales)?.to_dtype(DType::F8E4M3)?;
        Ok([unblocked(&codes, shape)?, scales.squeeze(-1)?.squeeze(-2)?])
    }

    /// Returns the `f32` weight `[O, I]` of codes and scales: the inverse of [`quantize`](Self::quantize).
    ///
    /// # Errors
    /// Fails if the scales are not `f32`, or not `[⌈O/128⌉, ⌈I/128⌉]`.
    #[track_caller]
    pub fn dequantize<T: Apply>(codes: &T, scales: &T) -> Result<T> {
        let (shape, given) = (codes.spec().shape, scales.spec().shape);
        let due: Vec<usize> = shape.iter().map(|n| n.div_ceil(SIDE)).collect();
        if due.len() != 2 || given.dims() != due {
            let why = "needs codes [O, I], and scales [⌈O/128⌉, ⌈I/128⌉]";
            return Err(T::explained(Error::shape("dequantize", &[shape, given], why), &[codes, scales]));
        }
        unblocked(&blocked(codes, [SIDE; 2])?.mul(&scales.unsqueeze(1)?.unsqueeze(-1)?)?, shape)
    }

    /// The scale of each block of `blocks: [.., R, r, C, c]`, `[.., R, 1, C, 1]`.
    fn scales<T: Apply>(self, blocks: &T) -> Result<T> {
        /// The scale of the largest magnitude, at least the smallest normal number of `f32`.
        static EXACT: LazyLock<Program> =
            LazyLock::new(|| Program::new("block_scale", |[a], []| [(a / LARGEST).max(f64::from(f32::MIN_POSITIVE))]));
        /// The power of two at or above that scale. The logarithm may be off by a rounding, so neighbours are compared.
        static ROUNDED: LazyLock<Program> = LazyLock::new(|| {
            Program::new("block_scale_of_two", |[a], []| {
                let scale = (a / LARGEST).max(f64::from(f32::MIN_POSITIVE));
                let near = scale.log2().ceil().exp2();
                let above = near.lt(scale).select(near * 2.0, near);
                let below = above * 0.5;
                [below.ge(scale).select(below, above)]
            })
        });
        let program = if self.powers_of_two { &ROUNDED } else { &EXACT };
        blocks.abs()?.amax_keepdim(&[-3, -1])?.apply_program(program, &[], &[])
    }

    /// `x: [.., R, C]` in `f32`, rounded with a scale per block. The gradient passes unchanged (straight-through).
    fn rounded<T: Apply>(self, x: &T, block: [usize; 2]) -> Result<T> {
        static ROUND: LazyLock<Program> = LazyLock::new(|| {
            Program::new("block_rounded", |[x, value, scale], []| {
                // The difference is 0, and has the gradient.
                [(x - value) + (value / scale).cast(DType::F8E4M3).cast(DType::F32) * scale]
            })
        });
        let blocks = blocked(x, block)?;
        let value = blocks.detach();
        let scales = self.scales(&value)?;
        unblocked(&blocks.apply_program(&ROUND, &[&value, &scales], &[])?, x.spec().shape)
    }
}

/// `x: [.., R, C]` in `f32` as blocks `[.., ⌈R/r⌉, r, ⌈C/c⌉, c]`, the last ones filled up with zeros.
fn blocked<T: Apply>(x: &T, block: [usize; 2]) -> Result<T> {
    let shape = x.spec().shape;
    let at = shape.rank() - 2;
    let mut pads = vec![(0, 0); shape.rank()];
    let mut blocks = shape[..at].to_vec();
    for (i, side) in block.into_iter().enumerate() {
        pads[at + i].1 = shape[at + i].next_multiple_of(side) - shape[at + i];
        blocks.extend([shape[at + i].div_ceil(side), side]);
    }
    let x = x.to_dtype(DType::F32)?;
    if pads.iter().all(|pad| *pad == (0, 0)) { x.reshape(&blocks) } else { x.pad(&pads, 0.0)?.reshape(&blocks) }
}

/// The elements `[.., R, C]` of blocks.
fn unblocked<T: Apply>(blocks: &T, shape: Shape) -> Result<T> {
    let (full, at) = (blocks.spec().shape, shape.rank() - 2);
    let mut filled = shape[..at].to_vec();
    filled.extend([full[at] * full[at + 1], full[at + 2] * full[at + 3]]);
    blocks.reshape(&filled)?.narrow(-2, 0, shape[at])?.narrow(-1, 0, shape[at + 1])
}

/// Checks that an operand can be rounded by blocks.
fn checked(op: &'static str, x: Spec) -> Result<Spec> {
    if !x.dtype.is_float() || x.dtype == DType::F64 {
        return Err(Error::dtype(op, &[x.dtype], "8-bit operands are made of `f32`, `f16` or `bf16`; cast first"));
    }
    match x.shape.rank() {
        0 | 1 => Err(Error::shape(op, &[x.shape], "needs at least two axes")),
        _ => Ok(x),
    }
}

/// The product `x · wᵀ` of `x: [.., M, I]` and `w: [O, I]`, both rounded by blocks and multiplied in `f32`:
/// `[.., M, O]`.
///
/// In backward, the upstream gradient is rounded too, in tiles along `O` for the gradient of `x`. For that of `w` it is
/// rounded along all rows `M`, as are the rows of `x` then. Roundings have straight-through gradients.
#[derive(Clone, Debug)]
pub struct BlockScaledLinear {
    /// The form of the scales.
    pub scaling: BlockScaling,
}

impl BlockScaledLinear {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of `w` among the inputs.
    pub const WEIGHT: usize = 1;

    /// Gives `a · b`, in `f32`, as the gradient of input `i`.
    fn product_to<T: Apply>(cx: &mut dyn Backprop<T>, i: usize, a: &T, b: &T) -> Result<()> {
        match cx.input_spec(i)?.dtype {
            DType::F32 => cx.give(i, Op::Matmul(Matmul), &[a, b]),
            dtype => cx.give(i, Op::cast(DType::F32, dtype), &[&a.matmul(b)?]),
        }
    }
}

impl Fused for BlockScaledLinear {
    fn name(&self) -> &'static str {
        "block_scaled_linear"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let (x, w) = (checked(self.name(), ins[Self::X])?, checked(self.name(), ins[Self::WEIGHT])?);
        if x.dtype != w.dtype {
            return Err(Error::dtype(self.name(), &[x.dtype, w.dtype], "input and weight must have one dtype"));
        }
        if w.shape.rank() != 2 || x.shape.last() != w.shape.last() {
            return Err(Error::shape(self.name(), &[x.shape, w.shape], "needs x [.., M, I] and a weight [O, I]"));
        }
        Ok(smallvec![Spec { shape: x.shape.with(x.shape.rank() - 1, w.shape[0]), dtype: x.dtype }])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let (x, w) = (ins[Self::X], ins[Self::WEIGHT]);
        let rounded = self.scaling.rounded(x, [1, SIDE])?;
        let product = rounded.matmul(&self.scaling.rounded(w, [SIDE; 2])?.t()?)?;
        Ok(smallvec![product.to_dtype(x.spec().dtype)?])
    }

    fn computes_in_f32(&self) -> bool {
        // Operands are cast where they are rounded.
        false
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        Some(matmul::saves(wants))
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        if cx.wants(Self::X) {
            let w = self.scaling.rounded(&cx.input(Self::WEIGHT)?, [SIDE; 2])?;
            Self::product_to(cx, Self::X, &self.scaling.rounded(&g, [1, SIDE])?, &w)?;
        }
        if cx.wants(Self::WEIGHT) {
            let by_rows = |x: &T| self.scaling.rounded(&x.flatten(0, -2)?, [SIDE, 1]);
            let (x, g) = (by_rows(&cx.input(Self::X)?)?, by_rows(&g)?);
            Self::product_to(cx, Self::WEIGHT, &g.t()?, &x)?;
        }
        Ok(())
    }
}
