//! Fused operations: each is one tape node, whether a kernel or the decomposition runs. Every file here defines one of
//! them: its shape rule, its decomposition into primitives (the reference a kernel is tested against), and its
//! gradient. The gradient is a fused operation again. Double backward goes through the decomposition.

mod attention;
mod attention_pieces;
mod attention_program;
mod block_scaled;
mod conv;
mod cross_entropy;
mod linear;
mod linear4bit;
mod linear_cross_entropy;
mod logit_chunks;
mod norm;
mod options;
mod pool;
mod rope;
mod scatter;
mod score_operands;
mod scored_attention;
mod softmax;
mod vocabulary;

pub use attention::{Attention, AttentionGrad, SdpaOptions};
pub use attention_program::AttentionProgram;
pub use block_scaled::{BlockScaledLinear, BlockScaling};
pub use conv::{Conv, ConvKind};
pub use cross_entropy::{CrossEntropy, CrossEntropyGrad};
pub(crate) use linear::sum_of_rows;
pub use linear::{Linear, LinearGrad};
pub use linear_cross_entropy::{LinearCrossEntropy, LinearCrossEntropyGrad};
pub use linear4bit::{Linear4bit, NestedScales};
pub use norm::{Norm, NormGrad, NormKind};
pub use options::{Conv1dOptions, ConvOptions, CrossEntropyOptions, Reduction};
pub use pool::{MaxPool, MaxPoolGrad};
pub use rope::RopeOptions;
pub use scatter::ScatterExtreme;
pub use score_operands::ScorePosition;
pub use scored_attention::{ScoredAttention, ScoredAttentionGrad};
pub use softmax::{Softmax, SoftmaxGrad};
pub use vocabulary::NnOps;

use std::ops::RangeInclusive;

use smallvec::SmallVec;

use crate::{
    Accumulate, Error, Layout, MemoryCategory, Out, Result, Runtime, Shape, Support, Tensor, TensorMut,
    ops::{Apply, Backprop, Bits, Op, Outs, PointwiseOps, Rule, Saves, Spec, Specs, copy_into},
};

/// The rules of a fused operation: those of [`Rule`], with a decomposition in place of a kernel.
pub trait Fused {
    /// The name of the operation in messages and profiles.
    fn name(&self) -> &'static str;
    /// The number of inputs of the operation.
    fn arity(&self) -> RangeInclusive<usize>;
    /// The outputs' shapes and dtypes, or the error that the caller gets.
    fn infer(&self, ins: &[Spec]) -> Result<Specs>;
    /// Computes the outputs from primitives: the reference for every kernel of the operation.
    fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>>;
    /// The input whose axis order output `k` should have in memory, so that views of that input can be undone without a
    /// copy.
    fn output_order_of(&self, k: usize) -> Option<usize> {
        let _ = k;
        None
    }
    /// Tells whether the decomposition of half-precision operands is computed in `f32` throughout, instead of rounding
    /// after each primitive.
    fn computes_in_f32(&self) -> bool {
        true
    }
    /// Tells whether kernels and [parts](Fused::run_in_parts) write outputs of any layout, and accumulate into them.
    fn writes_any_layout(&self) -> bool {
        false
    }
    /// Computes the outputs part by part with other operations of the runtime, if the decomposition would take more
    /// memory. The outputs are row-major and are overwritten, unless the operation
    /// [writes any layout](Fused::writes_any_layout).
    fn run_in_parts<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        let _ = (ins, outs);
        Ok(Support::Decompose)
    }
    /// The operation to record instead of this one, if the gradients of the inputs `wants` will be needed. Its outputs
    /// are those of this one, followed by the values that its gradient rule reads. `None` if this operation itself is
    /// recorded.
    fn with_gradients(&self, wants: Bits) -> Option<FusedOp> {
        let _ = wants;
        None
    }
    /// The inputs and outputs that the gradient rule reads. `None` if the operation has no gradient rule for `wants`,
    /// and is recorded as its decomposition.
    fn saves(&self, wants: Bits) -> Option<Saves>;
    /// The gradient rule of this operation.
    fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()>;
}

macro_rules! fused {
    ($($(#[$doc:meta])* $variant:ident),* $(,)?) => {
        /// A fused operation, for [`Runtime::fused`].
        #[derive(Clone, Debug)]
        #[non_exhaustive]
        pub enum FusedOp { $($(#[$doc])* $variant($variant),)* }

        $(impl From<$variant> for crate::ops::Op {
            fn from(op: $variant) -> Self { crate::ops::Op::Fused(FusedOp::$variant(op)) }
        })*

        impl FusedOp {
            /// Computes the outputs from primitives. Half-precision operands are cast to `f32` for all primitives, if
            /// the operation's `computes_in_f32` is true.
            pub fn decompose<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
                let computes_in_f32 = match self { $(FusedOp::$variant(op) => Fused::computes_in_f32(op),)* };
                if computes_in_f32 && ins.iter().any(|x| x.spec().dtype.is_half()) {
                    return self.widened(ins);
                }
                match self { $(FusedOp::$variant(op) => op.decompose(ins),)* }
            }

            fn output_order_of(&self, k: usize) -> Option<usize> {
                match self { $(FusedOp::$variant(op) => Fused::output_order_of(op, k),)* }
            }

            fn writes_any_layout(&self) -> bool {
                match self { $(FusedOp::$variant(op) => Fused::writes_any_layout(op),)* }
            }

            fn run_in_parts<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
                match self { $(FusedOp::$variant(op) => Fused::run_in_parts(op, ins, outs),)* }
            }

            /// The operation that the tape records instead of this one for gradients of the inputs `wants`; `None` if
            /// it records this one.
            pub fn with_gradients(&self, wants: Bits) -> Option<FusedOp> {
                match self { $(FusedOp::$variant(op) => Fused::with_gradients(op, wants),)* }
            }

            /// Tells whether the tape must record the decomposition instead, for gradients of the inputs `wants`.
            pub fn is_composed(&self, wants: Bits) -> bool {
                match self { $(FusedOp::$variant(op) => Fused::saves(op, wants).is_none(),)* }
            }
        }

        impl Rule for FusedOp {
            fn name(&self) -> &'static str { match self { $(FusedOp::$variant(op) => Fused::name(op),)* } }
            fn arity(&self) -> RangeInclusive<usize> { match self { $(FusedOp::$variant(op) => Fused::arity(op),)* } }
            fn infer(&self, ins: &[Spec]) -> Result<Specs> { match self { $(FusedOp::$variant(op) => Fused::infer(op, ins),)* } }
            fn run<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
                if self.run_kernel(ins, outs)? == Support::Done {
                    return Ok(());
                }
                let values = self.decompose(ins)?;
                values.iter().zip(outs).try_for_each(|(v, out)| copy_into(v, out.reborrow()))
            }
            fn saves(&self, wants: Bits) -> Result<Saves> {
                match self { $(FusedOp::$variant(op) => Ok(Fused::saves(op, wants).unwrap_or(Saves::NONE)),)* }
            }
            fn gradient<T: Apply>(&self, cx: &mut dyn Backprop<T>) -> Result<()> {
                match self { $(FusedOp::$variant(op) => Fused::gradient(op, cx),)* }
            }
        }
    };
}

fused! {
    /// Softmax or its logarithm over the last axis.
    Softmax,
    /// The gradient of softmax.
    SoftmaxGrad,
    /// Cross-entropy of each row.
    CrossEntropy,
    /// The gradient of cross-entropy.
    CrossEntropyGrad,
    /// Layer or RMS norm over the last axis.
    Norm,
    /// The gradients of a norm: of the input, the weight and the bias.
    NormGrad,
    /// Scaled dot-product attention, with masks and grouped heads.
    Attention,
    /// The gradients of attention: of queries, keys and values.
    AttentionGrad,
    /// Attention whose scores pass through a program.
    ScoredAttention,
    /// The gradients of attention with a program: of queries, keys, values and arguments.
    ScoredAttentionGrad,
    /// Two-dimensional convolution and both its adjoints.
    Conv,
    /// A matrix product with an optional bias and residual.
    Linear,
    /// The gradients of a linear layer's weight and bias.
    LinearGrad,
    /// A product with a matrix of four bits an element.
    Linear4bit,
    /// A product of operands that are rounded to 8-bit floats, with a scale per block.
    BlockScaledLinear,
    /// The cross-entropy of a linear layer's outputs.
    LinearCrossEntropy,
    /// The gradients of the cross-entropy of a linear layer's outputs.
    LinearCrossEntropyGrad,
    /// Max pooling over windows of an image.
    MaxPool,
    /// The gradient of max pooling.
    MaxPoolGrad,
    /// The largest or smallest of the values scattered to each position.
    ScatterExtreme,
}

/// Checks that each value that a forward pass computed, or will compute, has the spec `due`; the error names `op`.
fn as_forward<'a>(op: &'static str, pairs: impl IntoIterator<Item = (&'static str, &'a Spec, &'a Spec)>) -> Result<()> {
    for (what, given, due) in pairs {
        if given.dtype != due.dtype {
            let why = format!("{what} is {}, and {} in the forward pass", given.dtype, due.dtype);
            return Err(Error::dtype(op, &[given.dtype, due.dtype], why));
        }
        if given.shape != due.shape {
            let why = format!("{what} is {}, and {} in the forward pass", given.shape, due.shape);
            return Err(Error::shape(op, &[given.shape, due.shape], why));
        }
    }
    Ok(())
}

impl FusedOp {
    /// Computes the op in `f32`, by a kernel or by decomposition, and rounds its outputs at the end.
    fn widened<T: Apply>(&self, ins: &[&T]) -> Result<Outs<T>> {
        let specs: Specs = ins.iter().map(|x| x.spec()).collect();
        let wide = ins.iter().map(|x| x.to_dtype(x.spec().dtype.compute())).collect::<Result<SmallVec<[T; 8]>>>()?;
        let outs = T::apply(Op::Fused(self.clone()), &wide.iter().collect::<SmallVec<[&T; 8]>>())?;
        outs.iter().zip(self.infer(&specs)?).map(|(out, spec)| out.to_dtype(spec.dtype)).collect()
    }

    /// The layout of output `k` in fresh memory.
    pub(crate) fn layout<R: Runtime>(&self, rt: &R, k: usize, shape: Shape, ins: &[&Tensor<R>]) -> Layout {
        match self.output_order_of(k) {
            Some(i) if rt.supports_strided_outputs(self) => ins[i].layout().dense_like(shape),
            _ => Layout::contiguous(shape),
        }
    }

    /// The layouts of several outputs in shared memory, if each is ordered as an input and those inputs are adjacent
    /// parts of one memory. A view then joins the outputs into one tensor.
    pub(crate) fn adjacent_layouts<R: Runtime>(
        &self,
        rt: &R,
        outs: &[Spec],
        ins: &[&Tensor<R>],
    ) -> Option<SmallVec<[Layout; 4]>> {
        let like = |k| self.output_order_of(k).map(|i| ins[i]);
        let like = (0..outs.len()).map(like).collect::<Option<SmallVec<[_; 4]>>>()?;
        let fits = |(x, out): (&&Tensor<R>, &Spec)| {
            x.spec() == *out && x.dtype() == like[0].dtype() && x.shares_memory_with(like[0])
        };
        if like.len() < 2 || !like.iter().zip(outs).all(fits) || !rt.supports_strided_outputs(self) {
            return None;
        }
        Layout::adjacent(&like.iter().map(|x| *x.layout()).collect::<SmallVec<[_; 4]>>())
    }

    /// Runs the runtime's kernel, if it has one. Kernels fill dense memory, and few accumulate; outputs that the kernel
    /// cannot write are computed in temporaries.
    fn run_kernel<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        let rt = ins[0].runtime();
        let adds = rt.supports_accumulate(self);
        let fits = |o: &Out<'_, R>| o.view.layout().is_contiguous() && (adds || o.how == Accumulate::Overwrite);
        if self.writes_any_layout() || outs.iter().all(fits) {
            return self.try_kernel(ins, outs);
        }
        let mut aside = (outs.iter().enumerate().filter(|(_, o)| !fits(o)))
            .map(|(k, o)| {
                let layout = self.layout(rt, k, *o.view.layout().shape(), ins);
                TensorMut::alloc_at(rt.with_category(MemoryCategory::Activations), layout, o.view.dtype())
            })
            .collect::<Result<SmallVec<[TensorMut<R>; 4]>>>()?;
        let mut rest = aside.iter_mut();
        let mut to: SmallVec<[Out<'_, R>; 4]> = SmallVec::new();
        for out in outs.iter_mut() {
            match fits(out) {
                true => to.push(out.reborrow()),
                false => to.extend(rest.next().map(TensorMut::out)),
            }
        }
        let support = self.try_kernel(ins, &mut to)?;
        drop(to);
        if support == Support::Done {
            let unfit = outs.iter_mut().filter(|o| !fits(o));
            aside.into_iter().zip(unfit).try_for_each(|(value, out)| copy_into(&value.freeze()?, out.reborrow()))?;
        }
        Ok(support)
    }

    /// Runs the runtime's kernel for the op, if it has one, or computes the op in parts.
    pub(crate) fn try_kernel<R: Runtime>(&self, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<Support> {
        let views: SmallVec<[_; 8]> = ins.iter().map(|t| t.view()).collect();
        match ins[0].runtime().fused(self, &views, outs)? {
            Support::Done => Ok(Support::Done),
            Support::Decompose => self.run_in_parts(ins, outs),
        }
    }
}
