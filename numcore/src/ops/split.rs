//! Splits: several views of one tensor, whose gradients are concatenated into one. As separate slices, each would take
//! a pass of zeros and a pass that accumulates.

use std::ops::RangeInclusive;

use smallvec::SmallVec;

use super::{Apply, Backprop, Bits, Cat, Rule, Saves, Spec, Specs, ViewOp, ViewOps, cat, copy_into};
use crate::{Out, Result, Runtime, Shape, Tensor};

/// The split of one tensor along an axis into one output per size. The adjoint of [`Cat`].
#[derive(Clone, Debug)]
pub struct Split {
    pub(super) axis: usize,
    /// The sizes of the parts, which sum to the axis' size.
    pub(super) sizes: SmallVec<[usize; 4]>,
}

impl Split {
    /// The axis that is split.
    pub fn axis(&self) -> usize {
        self.axis
    }

    /// The sizes of the parts along the axis.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The view of the input for each part.
    pub fn views(&self) -> impl Iterator<Item = ViewOp> + '_ {
        self.sizes.iter().scan(0, |next, &len| {
            let start = *next;
            *next += len;
            Some(ViewOp::Slice { axis: self.axis, start, len, step: 1 })
        })
    }
}

impl Rule for Split {
    fn name(&self) -> &'static str {
        "split"
    }

    fn arity(&self) -> RangeInclusive<usize> {
        1..=1
    }

    fn infer(&self, ins: &[Spec]) -> Result<Specs> {
        self.views().map(|v| Ok(Spec { shape: v.shape(ins[0].shape)?, dtype: ins[0].dtype })).collect()
    }

    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
        self.views().zip(outs).try_for_each(|(v, out)| copy_into(&Tensor::apply1(v, ins)?, out.reborrow()))
    }

    fn saves(&self, _: Bits) -> Result<Saves> {
        Ok(Saves::NONE)
    }

    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
        let given = (0..self.sizes.len()).map(|k| cx.upstream(k)).collect::<Result<SmallVec<[Option<T>; 4]>>>()?;
        let Some(like) = given.iter().flatten().next() else { return Ok(()) };
        let mut pieces: SmallVec<[T; 4]> = SmallVec::new();
        for (k, g) in given.iter().enumerate() {
            pieces.push(match g {
                Some(g) => g.clone(),
                None => nothing(like, cx.output_spec(k)?)?,
            });
        }
        let pieces: SmallVec<[&T; 4]> = pieces.iter().collect();
        if pieces.len() > Bits::MAX {
            return cx.give_value(0, &cat(&pieces, self.axis as isize)?);
        }
        cx.give(0, Cat { axis: self.axis, seen: true }.into(), &pieces)
    }
}

/// The gradient of a part that was not used: zeros.
#[track_caller]
fn nothing<T: Apply>(like: &T, Spec { shape, dtype }: Spec) -> Result<T> {
    let zero = Tensor::zeros(like.runtime(), Shape::SCALAR, dtype)?;
    Ok(T::constant(zero.broadcast_to(shape)?))
}
