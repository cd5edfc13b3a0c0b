//! The rules of every op ([`Rule`]), the types that apply op calls ([`Apply`]), and the view of a node that gradient
//! rules get ([`Backprop`]).

use std::ops::RangeInclusive;

use smallvec::SmallVec;

use super::Op;
use crate::{DType, Error, Out, Result, Runtime, Shape, Tensor, Within};

/// The shape and dtype of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The sizes of the value.
    pub shape: Shape,
    /// The element type of the value.
    pub dtype: DType,
}

impl Spec {
    /// A shape with an element type.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Spec {
        Spec { shape: shape.into(), dtype }
    }
}

/// A compact list of specs, without the unused space of shapes up to [`MAX_RANK`](crate::MAX_RANK). The tape keeps one
/// for the inputs and outputs of every node.
#[derive(Clone, Debug, Default)]
pub struct SpecList {
    sizes: SmallVec<[usize; 6]>,
    each: SmallVec<[(u8, DType); 8]>,
}

impl SpecList {
    /// The spec at position `i`.
    pub fn get(&self, i: usize) -> Spec {
        let start = self.each[..i].iter().map(|(rank, _)| *rank as usize).sum();
        let (rank, dtype) = self.each[i];
        Spec { shape: Shape::of(&self.sizes[start..start + rank as usize]), dtype }
    }

    /// Appends a spec to the list.
    pub fn push(&mut self, shape: &Shape, dtype: DType) {
        self.sizes.extend_from_slice(shape);
        self.each.push((shape.rank() as u8, dtype));
    }
}

/// Specs of an op's outputs.
pub type Specs = SmallVec<[Spec; 2]>;
/// The outputs of an op call; most ops have one.
pub type Outs<T> = SmallVec<[T; 1]>;

/// A set of input or output positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bits(pub u64);

impl Bits {
    /// The number of positions that fit: the largest number of inputs that an op can have on the tape.
    pub const MAX: usize = 64;

    /// The set of no positions.
    pub const NONE: Bits = Bits(0);

    /// Every position, also those past [`MAX`](Bits::MAX).
    pub const ALL: Bits = Bits(u64::MAX);

    /// The set of these positions.
    pub fn of(positions: &[usize]) -> Bits {
        Bits(positions.iter().fold(0, |b, p| b | 1 << p))
    }

    /// Tells whether position `i` is in the set.
    pub fn has(self, i: usize) -> bool {
        if i < Bits::MAX { self.0 >> i & 1 == 1 } else { self == Bits::ALL }
    }

    /// The union of two sets.
    pub fn union(self, other: Bits) -> Bits {
        Bits(self.0 | other.0)
    }
}

/// The inputs and outputs that an op's gradient reads: only these are saved until backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saves {
    /// The inputs that the gradient reads.
    pub inputs: Bits,
    /// The outputs that the gradient reads.
    pub outputs: Bits,
}

impl Saves {
    /// No input and no output is read.
    pub const NONE: Saves = Saves { inputs: Bits::NONE, outputs: Bits::NONE };

    /// These inputs are read, and no output.
    pub fn inputs(positions: &[usize]) -> Saves {
        Saves { inputs: Bits::of(positions), outputs: Bits::NONE }
    }
}

/// All rules of an op, in one place.
pub trait Rule {
    /// The name of the operation in messages and profiles.
    fn name(&self) -> &'static str;
    /// The number of inputs of the op.
    fn arity(&self) -> RangeInclusive<usize>;
    /// The outputs' shapes and dtypes, or the error that the caller gets. [`Op`] checks the number of inputs before the
    /// call.
    fn infer(&self, ins: &[Spec]) -> Result<Specs>;
    /// Computes into `outs`, which have the inferred specs (an output that accumulates may be a strided view).
    fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()>;
    /// The inputs and outputs that [`gradient`](Rule::gradient) reads to compute the gradients of the inputs `wants`.
    fn saves(&self, wants: Bits) -> Result<Saves>;
    /// The gradient rule: gives one op call for each wanted input, or one call for several inputs.
    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()>;
}

/// Types that apply op calls: a tensor computes a call, a variable of the tape also records it.
pub trait Apply: Clone + Sized {
    /// The runtime that computes the tensors underneath.
    type Runtime: Runtime;

    /// The runtime of this value, which computes its op calls.
    fn runtime(&self) -> &Self::Runtime;
    /// The shape and the dtype of this value.
    fn spec(&self) -> Spec;
    /// A value without a gradient history.
    fn constant(value: Tensor<Self::Runtime>) -> Self;
    /// This value without its gradient history.
    fn detach(&self) -> Self;
    /// Applies `op` to at least one input, all on one device. An error carries the source line of the call, so methods
    /// that call it are `#[track_caller]` too.
    #[track_caller]
    fn apply(op: Op, ins: &[&Self]) -> Result<Outs<Self>>;

    /// Adds the known names of `ins` to an error that was found before an op was applied, as [`apply`](Apply::apply)
    /// does for its own errors.
    #[track_caller]
    fn explained(error: Error, ins: &[&Self]) -> Error {
        let _ = ins;
        error.at(std::panic::Location::caller())
    }

    /// Applies an op with one output; see [`apply`](Apply::apply).
    #[track_caller]
    fn apply1(op: impl Into<Op>, ins: &[&Self]) -> Result<Self> {
        Ok(Self::apply(op.into(), ins)?.remove(0))
    }
}

/// The view of a tape node that a gradient rule gets.
pub trait Backprop<T: Apply> {
    /// Tells whether input `i` needs a gradient.
    fn wants(&self, i: usize) -> bool;
    /// The spec of input `i`.
    fn input_spec(&self, i: usize) -> Result<Spec>;
    /// The spec of output `k`.
    fn output_spec(&self, k: usize) -> Result<Spec>;
    /// The number of inputs of the op call.
    fn inputs(&self) -> usize;
    /// The saved input `i`.
    fn input(&mut self, i: usize) -> Result<T>;
    /// The saved output `k`.
    fn output(&mut self, k: usize) -> Result<T>;
    /// The gradient of the loss with respect to output `k`; `None` if the output was not used.
    fn upstream(&mut self, k: usize) -> Result<Option<T>>;
    /// Tells whether given gradients are recorded on a tape, to be differentiated again.
    fn is_recorded(&self) -> bool {
        false
    }
    /// Gives the only output of this op call as the gradient of input `i`; ignored if it is not wanted. The output has
    /// the input's shape and dtype, and an input is given a gradient at most once. An input that is given none has no
    /// gradient.
    fn give(&mut self, i: usize, op: Op, ins: &[&T]) -> Result<()>;
    /// Gives the outputs of this op call as the gradients of the inputs from `first` on, in order; those that are not
    /// wanted are ignored.
    fn give_all(&mut self, first: usize, op: Op, ins: &[&T]) -> Result<()>;
}

impl<T: Apply> dyn Backprop<T> + '_ {
    /// The gradient of the only output, which exists whenever a gradient rule runs.
    pub fn grad(&mut self) -> Result<T> {
        self.upstream(0)?.ok_or_else(|| {
            crate::ErrorKind::NoGradient { op: "backward", why: "its output took no part in the loss".into() }.into()
        })
    }

    /// Gives `value` as the gradient of input `i`.
    pub fn give_value(&mut self, i: usize, value: &T) -> Result<()> {
        self.give(i, Op::identity(), &[value])
    }

    /// Gives `value`, summed over the axes along which input `i` was broadcast, as the gradient of that input.
    pub fn give_sum_to(&mut self, i: usize, value: &T) -> Result<()> {
        let to = self.input_spec(i)?.shape;
        if value.spec().shape == to {
            return self.give_value(i, value);
        }
        self.give(i, super::Reduce::sum_to(to).into(), &[value])
    }
}

/// The error for a requested gradient that does not exist by the structure of the op.
pub(crate) fn no_gradient(op: &'static str, why: &str) -> Error {
    crate::ErrorKind::NoGradient { op, why: why.into() }.into()
}

/// Checks that all inputs have one dtype; the error lists them.
#[track_caller]
pub(crate) fn same_dtype(op: &'static str, ins: &[Spec]) -> Result<DType> {
    let first = ins[0].dtype;
    if ins.iter().all(|s| s.dtype == first) {
        return Ok(first);
    }
    let dtypes: Vec<DType> = ins.iter().map(|s| s.dtype).collect();
    Err(Error::dtype(op, &dtypes, "operands must have one dtype; nothing is promoted silently, cast with `to_dtype`"))
        .at_caller()
}

/// Checks that an input has a floating dtype.
#[track_caller]
pub(crate) fn float(op: &'static str, x: Spec) -> Result<DType> {
    if x.dtype.is_float() {
        return Ok(x.dtype);
    }
    Err(Error::dtype(op, &[x.dtype], "needs a floating dtype; cast with `to_dtype`")).at_caller()
}

/// Checks that an index input is `i64`.
#[track_caller]
pub(crate) fn index(op: &'static str, x: Spec) -> Result<()> {
    if x.dtype == DType::I64 {
        return Ok(());
    }
    Err(Error::dtype(op, &[x.dtype], "indices must be i64; cast with `to_dtype`")).at_caller()
}
