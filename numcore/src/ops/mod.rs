//! Operations. **An op call is data**: an [`Op`] and its inputs. Each op has all its rules in one file: shape and dtype
//! inference, execution on a runtime, the values saved for backward, and the gradient.
//!
//! Every type that can apply an op call implements [`Apply`]: a tensor computes it, a variable of the tape also records
//! it. Such a type has the whole vocabulary of methods ([`PointwiseOps`], [`ReduceOps`] …). Decompositions and gradient
//! rules are therefore written once.

mod arg_reduce;
mod by_example;
pub(crate) mod composed;
mod einsum;
mod elementwise;
mod flops;
mod index;
mod joining;
pub(crate) mod matmul;
mod moments;
mod operators;
mod pointwise;
mod reduce;
mod reductions;
pub(crate) mod rule;
mod scan;
mod sort;
mod split;
mod tangent;
mod view;
mod views;

pub use arg_reduce::ArgReduce;
pub use by_example::{all_by_example, by_example};
pub(crate) use composed::Sorted;
pub use composed::*;
pub use einsum::einsum;
pub use elementwise::{PointwiseOps, Rhs};
pub use index::{Gather, IndexOps, ScatterAdd};
pub use joining::{Cat, JoinOps, cat, stack};
pub use matmul::{Matmul, MatmulOps};
pub(crate) use moments::moments;
pub use pointwise::{Input, Pointwise, ScalarList, compute, update};
pub(crate) use pointwise::{cast, copy_into, fill_zero, launch, one_device};
pub use reduce::Reduce;
pub(crate) use reduce::{finite_top, mean_of};
pub use reductions::ReduceOps;
pub use rule::{Apply, Backprop, Bits, Outs, Rule, Saves, Spec, SpecList, Specs};
pub use scan::{Scan, ScanOps};
pub use sort::{Sort, SortOps};
pub use split::Split;
pub use tangent::tangents;
pub use view::{Embed, Fold, ViewOp, Windows};
pub use views::ViewOps;

use crate::{DType, Out, Result, Runtime, Tensor, fused::FusedOp};

macro_rules! op {
    ($($(#[$doc:meta])* $variant:ident($rule:ty),)*) => {
        /// An operation with its parameters, without its inputs.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub enum Op { $($(#[$doc])* $variant($rule),)* }

        $(impl From<$rule> for Op { fn from(rule: $rule) -> Op { Op::$variant(rule) } })*

        impl Rule for Op {
            fn name(&self) -> &'static str { match self { $(Op::$variant(r) => r.name(),)* } }
            fn arity(&self) -> std::ops::RangeInclusive<usize> { match self { $(Op::$variant(r) => r.arity(),)* } }
            fn infer(&self, ins: &[Spec]) -> Result<Specs> {
                self.check_count(ins.len())?;
                self.check_storage(ins)?;
                let outs = match self { $(Op::$variant(r) => r.infer(ins),)* }?;
                self.check_storage(&outs)?;
                outs.iter().try_for_each(|out| out.shape.checked(self.name()).map(drop))?;
                Ok(outs)
            }
            fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
                match self { $(Op::$variant(r) => r.run(ins, outs),)* }
            }
            fn saves(&self, wants: Bits) -> Result<Saves> { match self { $(Op::$variant(r) => r.saves(wants),)* } }
            fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
                match self { $(Op::$variant(r) => r.gradient(cx),)* }
            }
        }
    };
}

op! {
    /// An elementwise program, broadcasting its inputs.
    Pointwise(Pointwise),
    /// An elementwise program whose result is combined over axes.
    Reduce(Reduce),
    /// The position of an extreme along an axis.
    ArgReduce(ArgReduce),
    /// A view: the elements of the input under another layout.
    View(ViewOp),
    /// The adjoint of a slice.
    Embed(Embed),
    /// The adjoint of sliding windows.
    Fold(Fold),
    /// The concatenation of several tensors along an axis.
    Cat(Cat),
    /// The split of one tensor into several.
    Split(Split),
    /// A matrix product, batched and broadcast.
    Matmul(Matmul),
    /// A gather: elements picked by index.
    Gather(Gather),
    /// The adjoint of a gather.
    ScatterAdd(ScatterAdd),
    /// A recurrence along an axis.
    Scan(Scan),
    /// Sorted values and their positions.
    Sort(Sort),
    /// A fused operation: a kernel of the runtime, or its decomposition.
    Fused(FusedOp),
}

impl Op {
    /// The op that returns its input unchanged.
    pub fn identity() -> Op {
        Pointwise::identity().into()
    }

    /// The op that casts a value from one dtype to another; the identity if both are the same.
    pub fn cast(from: DType, to: DType) -> Op {
        if from == to { Op::identity() } else { Pointwise::cast(to).into() }
    }

    /// Checks that the op accepts `given` inputs.
    pub(crate) fn check_count(&self, given: usize) -> Result<()> {
        let takes = self.arity();
        if takes.contains(&given) {
            return Ok(());
        }
        let many = |n: usize| if n == usize::MAX { "more".to_string() } else { n.to_string() };
        let count = if takes.start() == takes.end() {
            format!("{}", takes.start())
        } else {
            format!("{} to {}", takes.start(), many(*takes.end()))
        };
        Err(crate::Error::range(self.name(), "number of operands", given, count))
    }

    /// Checks that 8-bit floats are only moved. A program checks its own operands, since it may cast them.
    fn check_storage(&self, operands: &[Spec]) -> Result<()> {
        let moves = matches!(self, Op::Pointwise(_) | Op::View(_) | Op::Cat(_) | Op::Split(_) | Op::Gather(_));
        match operands.iter().find(|x| x.dtype.is_storage()) {
            Some(x) if !moves => Err(crate::pointwise::stored_only(self.name(), x.dtype)),
            _ => Ok(()),
        }
    }

    /// Tells whether the op returns its one input unchanged.
    pub fn is_identity(&self) -> bool {
        matches!(self, Op::Pointwise(p) if p.program.is_identity())
    }
}

fn check_inputs(program: &crate::pointwise::Program, ins: usize, scalars: usize) -> Result<()> {
    crate::pointwise::require_count(program.name(), "number of inputs", ins, program.inputs())?;
    crate::pointwise::require_count(program.name(), "number of scalars", scalars, program.scalars())
}

/// Runs a kernel that can only overwrite: directly into `out`, or through fresh memory if `out` accumulates.
fn overwriting<R: Runtime>(
    rt: &R,
    out: &mut Out<'_, R>,
    kernel: impl FnOnce(crate::ViewMut<'_, R>) -> Result<()>,
) -> Result<()> {
    if out.how == crate::Accumulate::Overwrite {
        return kernel(out.view.reborrow());
    }
    let mut fresh = crate::TensorMut::alloc(rt, *out.view.layout().shape(), out.view.dtype())?;
    kernel(fresh.out().view)?;
    copy_into(&fresh.freeze()?, out.reborrow())
}
