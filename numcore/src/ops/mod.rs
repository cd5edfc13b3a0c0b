//! Operations. **An op call is data**: an [`Op`] and its inputs. Each op carries all its rules in one file: what it makes of
//! shapes and dtypes, how it runs on a runtime, what it keeps for backward, and its gradient.
//!
//! Whatever can apply an op call ([`Apply`]: a tensor computes it, a variable of the tape also records it) has the whole
//! vocabulary of methods ([`PointwiseOps`], [`ReduceOps`] …), so decompositions and gradient rules are written once over it.

mod elementwise;
mod index;
mod joining;
pub(crate) mod matmul;
mod pointwise;
mod reduce;
mod rule;
mod scan;
mod sort;
mod split;
mod view;

pub use elementwise::{PointwiseOps, Rhs};
pub use index::{Gather, IndexOps, ScatterAdd};
pub use joining::{Cat, JoinOps, cat, stack};
pub use matmul::{Matmul, MatmulOps, einsum};
pub use pointwise::{Input, Pointwise, ScalarList, compute, update};
pub(crate) use pointwise::{cast, copy_into, fill_zero};
pub(crate) use reduce::finite_top;
pub use reduce::{ArgReduce, Reduce, ReduceOps};
pub use rule::{Apply, Backprop, Bits, Outs, Rule, Saves, Spec, SpecList, Specs};
pub use scan::{Scan, ScanOps};
pub use sort::{Sort, SortOps};
pub use split::Split;
pub use view::{Embed, Fold, ViewOp, ViewOps};

use crate::{Out, Result, Runtime, Tensor, fused::FusedOp};

macro_rules! op {
    ($($(#[$doc:meta])* $variant:ident($rule:ty),)*) => {
        /// An op call without its inputs.
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub enum Op { $($(#[$doc])* $variant($rule),)* }

        $(impl From<$rule> for Op { fn from(rule: $rule) -> Op { Op::$variant(rule) } })*

        impl Rule for Op {
            fn name(&self) -> &'static str { match self { $(Op::$variant(r) => r.name(),)* } }
            fn infer(&self, ins: &[Spec]) -> Result<Specs> { match self { $(Op::$variant(r) => r.infer(ins),)* } }
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
    /// Position of an extreme.
    ArgReduce(ArgReduce),
    /// The same elements, seen another way.
    View(ViewOp),
    /// The adjoint of a slice.
    Embed(Embed),
    /// The adjoint of sliding windows.
    Fold(Fold),
    /// Several tensors joined along an axis.
    Cat(Cat),
    /// One tensor as several.
    Split(Split),
    /// Matrix product.
    Matmul(Matmul),
    /// Elements picked by index.
    Gather(Gather),
    /// The adjoint of a gather.
    ScatterAdd(ScatterAdd),
    /// A recurrence along an axis.
    Scan(Scan),
    /// Sorted values and their positions.
    Sort(Sort),
    /// An operation with a kernel of its own, or its decomposition.
    Fused(FusedOp),
}

impl Op {
    /// The op that gives its input back.
    pub fn identity() -> Op {
        Pointwise::identity().into()
    }

    /// Whether it gives its one input back unchanged.
    pub fn is_identity(&self) -> bool {
        matches!(self, Op::Pointwise(p) if p.program.is_identity())
    }
}

fn check_inputs(program: &crate::pointwise::Program, ins: usize, scalars: usize) -> Result<()> {
    if program.inputs() == ins && program.scalars() == scalars {
        return Ok(());
    }
    let why =
        format!("takes {} inputs and {} scalars, {ins} and {scalars} were given", program.inputs(), program.scalars());
    Err(crate::Error::argument(program.name(), why))
}

/// Runs a kernel that can only overwrite: straight into `out`, or through fresh memory when `out` adds.
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
