//! A product with a matrix that is stored in four bits an element, as QLoRA (Dettmers et al. 2023) keeps the weights it does not train.

use std::ops::RangeInclusive;

use smallvec::smallvec;

use super::Fused;
use crate::{
    DType, Error, Result, Shape,
    ops::{Apply, Backprop, Bits, IndexOps, Matmul, Outs, PointwiseOps, Saves, Spec, Specs, ViewOps, stack},
};

/// `x · wᵀ`, or `x · w`, for `w: [O, I]` whose elements are 16 code words times a scale for each block of them.
///
/// Inputs: `x`, then the elements of `w`, row-major, two in a byte, the first in its high half (`u8`); the code (`f32`, 16); the scales (`f32`,
/// one for each block). With nested scales, those are `u8` indices of a second code, and two inputs more follow: their scales and their code
/// (`f32`, 256). A kernel needs no memory for `w`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear4bit {
    /// The sizes of `w`, `[O, I]`.
    pub shape: [usize; 2],
    /// The elements of a block.
    pub block: usize,
    /// How scales are stored, if not as they are.
    pub nested: Option<NestedScales>,
    /// Whether the product is `x · w`, `[.., O]` to `[.., I]`: the gradient of `x · wᵀ`.
    pub transposed: bool,
}

/// Scales that are stored in eight bits: a code word times a scale for each block of them, plus an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NestedScales {
    /// The scales of a block.
    pub block: usize,
    /// What is added to every scale.
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

    /// The product of the other kind with the same matrix: the gradient of this one.
    fn adjoint(&self) -> Self {
        Linear4bit { transposed: !self.transposed, ..self.clone() }
    }

    /// The features of the input, and of the output.
    fn features(&self) -> [usize; 2] {
        let [outputs, inputs] = self.shape;
        if self.transposed { [outputs, inputs] } else { [inputs, outputs] }
    }

    /// `w: [O, I]` from the inputs after `x`, in `f32`.
    ///
    /// # Errors
    /// If they do not fit this operation.
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

    /// An error unless the inputs after `x` have the sizes and types of this operation.
    ///
    /// # Errors
    /// See above.
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
            // Elements are as files have them, in a column; the others are lists.
            if got.shape.numel() != count || what != "packed elements" && got.shape.rank() != 1 {
                return wrong(format!("needs {count} {what} for a weight of {:?}, given {}", self.shape, got.shape));
            }
        }
        Ok(())
    }
}

/// Each element of a list `each` times, cut to `len`.
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
        // Scales that are trained are those of the decomposition.
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
