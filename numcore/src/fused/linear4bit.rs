//! A product with a matrix stored in four bits per element, as QLoRA (Dettmers et al. 2023) stores frozen weights.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::Fused;
use crate::{
    DType, Error, Result, Shape,
    ops::{Apply, Backprop, Bits, IndexOps, Matmul, Outs, PointwiseOps, Saves, Spec, Specs, ViewOps, stack},
    placement::TensorPlacement,
};

/// The product `x · wᵀ` or `x · w` with a four-bit matrix `w: [O, I]`. Each element is one of 16 code words, times the
/// scale of its block.
///
/// Inputs are `x`, the packed elements of `w`, the code (`f32`, 16) and the scales (`f32`, one per block). Elements are
/// packed as `u8`, row-major, two per byte, the first in the high half. With nested scales, the scales are `u8` indices
/// of a second code. Two inputs follow: the scales of those scales, and their code (`f32`, 256). A kernel needs no
/// memory for `w`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear4bit {
    /// The sizes of `w`, `[O, I]`.
    pub shape: [usize; 2],
    /// The number of elements of `w` that share a scale.
    pub block: usize,
    /// The eight-bit encoding of the scales; `None` for `f32` scales.
    pub nested: Option<NestedScales>,
    /// True if the product is `x · w`, `[.., O]` to `[.., I]`: the gradient of `x · wᵀ`.
    pub transposed: bool,
}

/// The eight-bit encoding of scales: each is a code word, times the scale of its block of scales, plus an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NestedScales {
    /// The number of scales that share an outer scale.
    pub block: usize,
    /// The offset that is added to every scale.
    pub offset: f32,
}

impl Linear4bit {
    /// Position of `x` among the inputs.
    pub const X: usize = 0;
    /// Position of the packed elements of `w` among the inputs.
    pub const PACKED: usize = 1;
    /// Position of the code of 16 words among the inputs.
    pub const CODE: usize = 2;
    /// Position of the scales among the inputs.
    pub const SCALES: usize = 3;
    /// Position of the scales of scales among the inputs, if they are nested.
    pub const NESTED_SCALES: usize = 4;
    /// Position of the code of scales among the inputs, if they are nested.
    pub const NESTED_CODE: usize = 5;

    /// The other product with the same matrix: the gradient of this one.
    fn adjoint(&self) -> Self {
        Linear4bit { transposed: !self.transposed, ..self.clone() }
    }

    /// The numbers of features of the input and of the output.
    fn features(&self) -> [usize; 2] {
        let [outputs, inputs] = self.shape;
        if self.transposed { [outputs, inputs] } else { [inputs, outputs] }
    }

    /// The matrix `w: [O, I]` in `f32`, decoded from the inputs after `x`.
    ///
    /// # Errors
    /// Fails if the inputs do not fit this operation, as in `check`.
    pub fn weight<T: Apply>(&self, stored: &[&T]) -> Result<T> {
        let specs: Vec<Spec> = stored.iter().map(|x| x.spec()).collect();
        self.check(&specs)?;
        let elements = self.shape[0] * self.shape[1];
        let bytes = stored[Self::PACKED - 1].flatten(0, -1)?.to_dtype(DType::F32)?;
        let high = bytes.mul(1.0 / 16.0)?.floor()?;
        let low = bytes.sub(&high.mul(16.0)?)?;
        let index = stack(&[&high, &low], 1)?.flatten(0, -1)?.narrow(0, 0, elements)?.to_dtype(DType::I64)?;
        let words = stored[Self::CODE - 1].index_select(0, &index)?;
        let scales = spread(&self.scales(stored)?, self.block, elements)?;
        words.mul(&scales)?.reshape(self.shape)
    }

    /// The scale of each block.
    fn scales<T: Apply>(&self, stored: &[&T]) -> Result<T> {
        let scales = stored[Self::SCALES - 1];
        let Some(nested) = self.nested else { return Ok(scales.clone()) };
        let words = stored[Self::NESTED_CODE - 1].index_select(0, &scales.to_dtype(DType::I64)?)?;
        let outer = spread(stored[Self::NESTED_SCALES - 1], nested.block, words.spec().shape[0])?;
        words.mul(&outer)?.add(f64::from(nested.offset))
    }

    /// Cuts a piece from the matrix: the operation with the piece, and its inputs after `x`. Elements keep their code
    /// words and scales, which are then `f32`, one per block of the piece. Where a block spans two pieces, blocks
    /// are smaller: their size divides `block`, the rows, and the columns where pieces begin and end.
    ///
    /// # Errors
    /// Fails if the inputs do not fit this operation, or a column where a piece begins is odd: two share a byte.
    pub fn piece<T: Apply>(&self, stored: &[&T], piece: &TensorPlacement) -> Result<(Self, Vec<T>)> {
        let specs: Vec<Spec> = stored.iter().map(|x| x.spec()).collect();
        self.check(&specs)?;
        let [outputs, inputs] = self.shape;
        let ends = piece.ranges(1).iter().flat_map(|range| [range.start, range.end]);
        let block = ends.fold(gcd(self.block, inputs), gcd);
        if block % 2 == 1 {
            let why = format!("columns {:?} of {inputs}: a piece begins within a byte", piece.ranges(1));
            return Err(Error::shape("linear4bit", &[self.shape.into()], why));
        }
        // The part of `[O, I]`, of which each column stands for `each`.
        let take = |list: &T, each: usize| {
            let columns = piece.ranges(1).iter().map(|range| range.start / each..range.end / each).collect();
            let part = TensorPlacement::new([outputs, inputs / each].into(), vec![piece.ranges(0).to_vec(), columns])?;
            part.take(&list.reshape([outputs, inputs / each])?)?.flatten(0, -1)
        };
        let scales = spread(&self.scales(stored)?, self.block / block, outputs * inputs / block)?;
        let parts = vec![take(stored[0], 2)?, stored[Self::CODE - 1].clone(), take(&scales, block)?];
        let local = piece.local();
        Ok((Linear4bit { shape: [local[0], local[1]], block, nested: None, ..self.clone() }, parts))
    }

    /// Checks the sizes and dtypes of the inputs after `x`.
    ///
    /// # Errors
    /// Fails if a size or a dtype is not that of this operation.
    pub fn check(&self, stored: &[Spec]) -> Result<()> {
        let wrong = |why: String| {
            let shapes: Vec<Shape> = stored.iter().map(|s| s.shape).collect();
            Err(Error::shape("linear4bit", &shapes, why))
        };
        let Some(elements) = self.shape[0].checked_mul(self.shape[1]) else {
            return wrong(format!("a weight of {:?} has more elements than memory", self.shape));
        };
        if self.block == 0 || self.nested.is_some_and(|nested| nested.block == 0) {
            return wrong("a block has at least one element".into());
        }
        let blocks = elements.div_ceil(self.block);
        let scales = if self.nested.is_some() { DType::U8 } else { DType::F32 };
        let nested = self.nested.map(|nested| blocks.div_ceil(nested.block));
        let due = [
            Some(("packed elements", elements.div_ceil(2), DType::U8)),
            Some(("code words", 16, DType::F32)),
            Some(("scales", blocks, scales)),
            nested.map(|count| ("scales of scales", count, DType::F32)),
            nested.map(|_| ("code words of scales", 256, DType::F32)),
        ];
        for ((what, count, dtype), got) in due.into_iter().flatten().zip(stored) {
            if got.dtype != dtype {
                return Err(Error::dtype("linear4bit", &[got.dtype], format!("{what} must be {dtype}")));
            }
            // Packed elements may be a column, as in files; the other inputs must be one-dimensional.
            if got.shape.numel() != count || what != "packed elements" && got.shape.rank() != 1 {
                return wrong(format!("needs {count} {what} for a weight of {:?}, given {}", self.shape, got.shape));
            }
        }
        Ok(())
    }
}

/// The greatest common divisor.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Repeats each element of a list `each` times, and truncates the result to `len`.
fn spread<T: Apply>(list: &T, each: usize, len: usize) -> Result<T> {
    let count = list.spec().shape[0];
    list.unsqueeze(1)?.broadcast_to([count, each])?.reshape([count * each])?.narrow(0, 0, len)
}

impl Fused for Linear4bit {
    fn name(&self) -> &'static str {
        "linear4bit"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        let n = if self.nested.is_some() { 6 } else { 4 };
        n..=n
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        let x = ins[Self::X];
        if !x.dtype.is_float() {
            return Err(Error::dtype("linear4bit", &[x.dtype], "x must have a floating dtype; cast with `to_dtype`"));
        }
        let [inputs, outputs] = self.features();
        if x.shape.last() != Some(&inputs) {
            let why = format!("x must be [.., {inputs}] for a weight of {:?}", self.shape);
            return Err(Error::shape("linear4bit", &[x.shape], why));
        }
        self.check(&ins[Self::PACKED..])?;
        Ok(smallvec![Spec { shape: x.shape.with(x.shape.rank() - 1, outputs), dtype: x.dtype }])
    }

    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let x = ins[Self::X];
        let weight = self.weight(&ins[Self::PACKED..])?.to_dtype(x.spec().dtype)?;
        let weight = if self.transposed { weight } else { weight.t()? };
        let product = match x.spec().shape.rank() {
            1 => T::apply1(Matmul, &[&x.unsqueeze(0)?, &weight])?.squeeze(0)?,
            _ => T::apply1(Matmul, &[x, &weight])?,
        };
        Ok(smallvec![product])
    }

    fn saves(&self, wants: Bits) -> Option<Saves> {
        // The decomposition computes the gradients of scales, if they are trained.
        let all = Bits::of(&[Self::PACKED, Self::CODE, Self::SCALES, Self::NESTED_SCALES, Self::NESTED_CODE]);
        (wants == Bits::of(&[Self::X])).then_some(Saves { inputs: all, outputs: Bits::NONE })
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let g = cx.grad()?;
        let stored = (Self::PACKED..cx.inputs()).map(|i| cx.input(i)).collect::<Result<Vec<T>>>()?;
        let ins: Vec<&T> = [&g].into_iter().chain(&stored).collect();
        cx.give(Self::X, self.adjoint().into(), &ins)
    }
}
