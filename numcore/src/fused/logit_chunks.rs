//! The execution of a [`LinearCrossEntropy`] on every runtime: matmuls and cross-entropy kernels, one chunk of rows
//! after another. The memory of a chunk returns to its pool before the next chunk is allocated.

use std::sync::LazyLock;

use smallvec::SmallVec;

use super::{CrossEntropyGrad, Fused, FusedOp, Linear, LinearCrossEntropy};
use crate::{
    Accumulate, DType, Layout, MemoryCategory, Out, ProgramOperand, Result, Runtime, Shape, Support, Tensor, TensorMut,
    ops::{Matmul, Op, Reduce, Rule, ScalarList, ViewOps, copy_into, fill_zero},
    pointwise::Program,
};

/// Computes the losses, or their sum, and the gradients of the sum that `op` requests.
pub(super) fn forward<R: Runtime>(op: &LinearCrossEntropy, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
    let chunks = LogitChunks::new(op, ins)?;
    let Some((loss, gradients)) = outs.split_first_mut() else { return Ok(()) };
    let dtype = chunks.w.dtype().compute();
    if !op.summed {
        let layout = *loss.view.layout;
        return chunks.run(&mut loss.reborrow(), &layout, None, gradients);
    }
    let rows = Shape::from([chunks.rows()]);
    let mut losses = TensorMut::alloc(&chunks.rt, rows, dtype)?;
    let ones = match gradients {
        [] => None,
        // Kernels read the upstream gradient row by row; every chunk uses the ones of a single chunk.
        _ => Some(Tensor::full(&chunks.rt, [chunks.chunk.min(chunks.rows().max(1))], dtype, 1.0)?),
    };
    let upstream = ones.as_ref().map(Upstream::Ones);
    chunks.run(&mut losses.out(), &Layout::contiguous(rows), upstream, gradients)?;
    Reduce::sum_to(Shape::SCALAR).run(&[&losses.freeze()?], &mut [loss.reborrow()])
}

/// Computes the gradients that `op` requests, given the gradients of the rows' losses, which follow the other inputs.
pub(super) fn backward<R: Runtime>(op: &LinearCrossEntropy, ins: &[&Tensor<R>], outs: &mut [Out<'_, R>]) -> Result<()> {
    let chunks = LogitChunks::new(op, ins)?;
    let g = ins[op.target_at() + 1].contiguous()?;
    let rows = Shape::from([chunks.rows()]);
    // The losses are by-products of the statistics that gradients are computed from.
    let mut losses = TensorMut::alloc(&chunks.rt, rows, g.dtype())?;
    chunks.run(&mut losses.out(), &Layout::contiguous(rows), Some(Upstream::Rows(&g)), outs)
}

/// The gradient of the rows' losses.
enum Upstream<'a, R: Runtime> {
    /// A vector of ones, one for each row of a chunk.
    Ones(&'a Tensor<R>),
    Rows(&'a Tensor<R>),
}

impl<R: Runtime> Upstream<'_, R> {
    fn of_rows(&self, start: usize, rows: usize) -> Result<Tensor<R>> {
        match self {
            Upstream::Ones(ones) => ones.narrow(0, 0, rows),
            Upstream::Rows(g) => g.narrow(0, start, rows),
        }
    }
}

/// The operands of a call, and how its rows are divided into chunks.
struct LogitChunks<'a, R: Runtime> {
    op: &'a LinearCrossEntropy,
    rt: R,
    x: &'a Tensor<R>,
    w: &'a Tensor<R>,
    /// `w` as `[C, V]`.
    to_logits: Tensor<R>,
    bias: Option<&'a Tensor<R>>,
    target: Tensor<R>,
    /// The number of rows whose logits are in memory at once.
    chunk: usize,
    /// The number of elements between rows of logits. Where kernels support it, rows start at multiples of 16 bytes,
    /// which makes matmuls faster.
    pitch: usize,
}

impl<'a, R: Runtime> LogitChunks<'a, R> {
    fn new(op: &'a LinearCrossEntropy, ins: &[&'a Tensor<R>]) -> Result<Self> {
        let (x, w) = (ins[LinearCrossEntropy::X], ins[LinearCrossEntropy::WEIGHT]);
        let rt = x.runtime().with_category(MemoryCategory::Activations);
        let classes = w.dims()[0];
        let pitch = match rt.supports_strided_outputs(&FusedOp::CrossEntropyGrad(CrossEntropyGrad(op.of_logits()))) {
            true => classes.next_multiple_of(16 / w.dtype().size()),
            false => classes,
        };
        let bias = op.bias.then(|| ins[LinearCrossEntropy::BIAS]);
        let target = ins[op.target_at()].contiguous()?;
        let of_runtime = || LinearCrossEntropy::chunk_of(rt.capabilities().piece, classes, w.dtype());
        let chunk = op.chunk.unwrap_or_else(of_runtime).max(1);
        Ok(LogitChunks { op, rt, x, w, to_logits: w.t()?, bias, target, chunk, pitch })
    }

    fn rows(&self) -> usize {
        self.x.dims()[0]
    }

    /// Writes the losses to `losses`, of `layout`. With an upstream gradient, it also writes the gradients of `x`, `w`
    /// and the bias to `gradients`.
    fn run(
        &self,
        losses: &mut Out<'_, R>,
        layout: &Layout,
        upstream: Option<Upstream<'_, R>>,
        gradients: &mut [Out<'_, R>],
    ) -> Result<()> {
        let (n, chunk) = (self.rows(), self.chunk);
        let mut sums = self.op.learned(self.op.gradients).zip(gradients).collect::<SmallVec<[_; 3]>>();
        let mut sums = sums
            .iter_mut()
            .map(|(i, out)| GradientSum::new(&self.rt, *i, out, n.div_ceil(chunk)))
            .collect::<Result<SmallVec<[GradientSum<'_, '_, R>; 3]>>>()?;
        for start in (0..n).step_by(chunk) {
            let rows = chunk.min(n - start);
            let (x, target) = (self.x.narrow(0, start, rows)?, self.target.narrow(0, start, rows)?);
            let logits = self.logits(&x)?;
            let mut stats = Vec::new();
            for _ in 0..2 {
                stats.push(TensorMut::alloc(&self.rt, Shape::from([rows]), losses.view.dtype)?);
            }
            let own = layout.slice(0, start, rows, 1)?;
            let mut loss = losses.reborrow();
            loss.view.layout = &own;
            let mut outs: SmallVec<[Out<'_, R>; 3]> = std::iter::once(loss).collect();
            outs.extend(stats.iter_mut().map(TensorMut::out));
            let done = FusedOp::CrossEntropy(self.op.of_logits()).run(&[&logits, &target], &mut outs);
            done.map_err(|e| e.of_part(self.op.name(), start, n))?;
            drop(outs);
            let Some(upstream) = &upstream else { continue };
            let stats = stats.into_iter().map(TensorMut::freeze).collect::<Result<Vec<_>>>()?;
            let g = upstream.of_rows(start, rows)?;
            let d = self.logits_gradient(&[&logits, &target, &stats[0], &stats[1], &g])?;
            drop(logits);
            sums.iter_mut().try_for_each(|sum| self.add_to(sum, start, &x, &d))?;
        }
        sums.into_iter().try_for_each(|sum| sum.finish(&self.rt))
    }

    /// Memory for a chunk's logits.
    fn memory(&self, rows: usize) -> Result<TensorMut<R>> {
        let (columns, dtype) = (self.w.dims()[0], self.w.dtype());
        let padded = TensorMut::alloc(&self.rt, Shape::from([rows, self.pitch]), dtype)?;
        if self.pitch == columns {
            return Ok(padded);
        }
        let layout = Layout::contiguous(*padded.shape()).slice(1, 0, columns, 1)?;
        Ok(padded.part(layout, None))
    }

    /// The logits of rows of `x`. They are rounded as the outputs of a linear layer, or, where a runtime splits the
    /// product, once more for the bias.
    fn logits(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        static PLUS: LazyLock<Program> = LazyLock::new(|| Program::new("add", |[y, b], []| [y + b]));
        let mut logits = self.memory(x.dims()[0])?;
        if let Some(bias) = self.bias {
            let linear = FusedOp::Linear(Linear { bias: true, residual: false });
            let ins = [x, &self.to_logits, bias];
            if self.takes(&linear) && linear.try_kernel(&ins, &mut [overwriting(&mut logits)])? == Support::Done {
                return logits.freeze();
            }
        }
        Matmul.run(&[x, &self.to_logits], &mut [overwriting(&mut logits)])?;
        if let Some(bias) = self.bias {
            let mut room = None;
            let bias = ProgramOperand::View(bias.view_at(&logits.shape().clone(), &mut room)?);
            let ins = [ProgramOperand::Own(0), bias];
            self.rt.pointwise(&PLUS, &ins, &[], &mut [overwriting(&mut logits)])?;
        }
        logits.freeze()
    }

    /// The gradient of a chunk's logits; `ins` are the inputs of [`CrossEntropyGrad`].
    fn logits_gradient(&self, ins: &[&Tensor<R>]) -> Result<Tensor<R>> {
        let op = FusedOp::CrossEntropyGrad(CrossEntropyGrad(self.op.of_logits()));
        let mut d = self.memory(ins[0].dims()[0])?;
        if !self.takes(&op) || op.try_kernel(ins, &mut [overwriting(&mut d)])? == Support::Decompose {
            copy_into(&op.decompose(ins)?[0], overwriting(&mut d))?;
        }
        d.freeze()
    }

    /// Tells whether a kernel of `op` can write logits with the row stride `pitch`.
    fn takes(&self, op: &FusedOp) -> bool {
        self.pitch == self.w.dims()[0] || self.rt.supports_strided_outputs(op)
    }

    /// Adds the contribution of the rows from `start` on to a gradient; `d` is the gradient of their logits.
    fn add_to(&self, sum: &mut GradientSum<'_, '_, R>, start: usize, x: &Tensor<R>, d: &Tensor<R>) -> Result<()> {
        static WIDENED: LazyLock<Program> = LazyLock::new(|| Program::new("widened", |[d], []| [d.cast(DType::F32)]));
        match sum.of {
            LinearCrossEntropy::X => {
                let layout = sum.out.view.layout.slice(0, start, d.dims()[0], 1)?;
                let mut out = sum.out.reborrow();
                out.view.layout = &layout;
                Matmul.run(&[d, self.w], &mut [out])
            }
            LinearCrossEntropy::WEIGHT => Matmul.run(&[&d.t()?, x], &mut [sum.next()]),
            _ => {
                let to = Shape::from([1, d.dims()[1]]);
                let out = sum.next();
                let op = match out.view.dtype == d.dtype() {
                    true => Reduce::sum_to(to),
                    false => Reduce::sum_of(WIDENED.clone(), ScalarList::new(), to),
                };
                let layout = out.view.layout.broadcast_to(to)?;
                let Out { mut view, how } = out;
                view.layout = &layout;
                op.run(&[d], &mut [Out { view, how }])
            }
        }
    }
}

/// The whole memory as an output that is overwritten.
fn overwriting<R: Runtime>(memory: &mut TensorMut<R>) -> Out<'_, R> {
    Out { view: memory.rewritten(), how: Accumulate::Overwrite }
}

/// A gradient that accumulates over chunks. Sums of half-precision gradients are kept in `f32` between chunks.
struct GradientSum<'o, 'a, R: Runtime> {
    /// The index of the input whose gradient this is.
    of: usize,
    out: &'o mut Out<'a, R>,
    unrounded: Option<TensorMut<R>>,
    started: bool,
}

impl<'o, 'a, R: Runtime> GradientSum<'o, 'a, R> {
    fn new(rt: &R, of: usize, out: &'o mut Out<'a, R>, chunks: usize) -> Result<Self> {
        let apart = chunks > 1 && of != LinearCrossEntropy::X && out.view.dtype.is_half();
        let unrounded =
            apart.then(|| TensorMut::alloc(rt, *out.view.layout.shape(), out.view.dtype.compute())).transpose()?;
        Ok(GradientSum { of, out, unrounded, started: false })
    }

    /// The memory that the next chunk's contribution is written or added to.
    fn next(&mut self) -> Out<'_, R> {
        match &mut self.unrounded {
            Some(memory) => memory.out(),
            None => {
                let first = !std::mem::replace(&mut self.started, true);
                let how = if first { Accumulate::Overwrite } else { Accumulate::Add };
                Out { view: self.out.view.reborrow(), how }
            }
        }
    }

    fn finish(self, rt: &R) -> Result<()> {
        match self.unrounded {
            Some(memory) => {
                Op::cast(memory.dtype(), self.out.view.dtype).run(&[&memory.freeze()?], &mut [self.out.reborrow()])
            }
            None if !self.started && self.of != LinearCrossEntropy::X => fill_zero(rt, self.out.reborrow()),
            None => Ok(()),
        }
    }
}
