//! Programs of scores: the interpreter of pointwise programs runs them on a block of scores, which is in L1. Positions
//! are operands beside it.
//!
//! Gradients of arguments are summed in `f64`, in memory of each task, and the sums of tasks are added in the order of
//! their numbers. Both orders follow from the sizes alone.

use std::{ops::Range, sync::Arc};

use numcore::{
    Accumulate, MAX_RANK, Result, Shape,
    fused::{Attention, ScoredAttention, ScoredAttentionGrad},
    pointwise::Program,
};
use smallvec::SmallVec;

use super::{super::FusedCall, *};
use crate::pointwise::{Form, Kernel, Launch, LoopPlan, Moving};

/// A program with its kernel.
struct Compiled {
    program: Program,
    kernel: Arc<Kernel>,
}

/// The programs of a call, and their operands beside scores.
pub(super) struct ScoreProgram {
    score: Compiled,
    /// The program of gradients, unless the gradient of a score is that of the score before the program.
    slopes: Option<Compiled>,
    /// The positions along each axis.
    positions: [Vec<i64>; ScoredAttention::AXES],
    /// The arguments, broadcast to the scores.
    args: SmallVec<[Operand; 4]>,
    sums: Vec<ArgSums>,
}

/// The sums of the gradient of an argument, `[tasks, heads, queries, keys]`, of length 1 along the axes that it lacks.
struct ArgSums {
    /// The position of the argument among the arguments.
    arg: usize,
    /// A flag for each axis of scores: true if the argument varies along it.
    varies: [bool; ScoredAttention::AXES],
    /// The sizes of a task's sums.
    sizes: [usize; 3],
    /// The keys of a task.
    keys: usize,
    /// The tasks of a key head.
    shares: usize,
    memory: CpuBuffer,
}

/// A block of scores: the example and the head, queries, and the keys from the first of a block on.
pub(super) struct ScoreBlock<'a> {
    pub at: (usize, usize),
    pub rows: &'a Range<usize>,
    pub first_key: usize,
    pub keys: usize,
}

impl ScoreProgram {
    /// The programs of a forward call.
    pub(super) fn forward<T: Float>(call: &FusedCall<'_>, op: &ScoredAttention) -> Result<Self> {
        Self::new::<T>(call, op, 0, None)
    }

    /// The programs of a backward call.
    pub(super) fn backward<T: Float>(call: &FusedCall<'_>, op: &ScoredAttentionGrad) -> Result<Self> {
        Self::new::<T>(call, &op.of, AttentionGrad::QUERIES, Some(op))
    }

    fn new<T: Float>(
        call: &FusedCall<'_>,
        op: &ScoredAttention,
        from: usize,
        grad: Option<&ScoredAttentionGrad>,
    ) -> Result<Self> {
        let [q, k] = [Attention::QUERIES, Attention::KEYS].map(|i| *call.ins[from + i].layout.shape());
        let scores = Shape::new(&[q[0], q[1], q[2], k[2]])?;
        let args = call.ins[from + ScoredAttention::ARGS..].iter();
        let args = args.map(|x| Ok(Operand { layout: x.layout.broadcast_to(scores)?, ..*x }));
        let args = args.collect::<Result<SmallVec<[Operand; 4]>>>()?;
        let compiled = |program: &Program, outputs: usize, own: Option<usize>, inputs: usize| {
            let mut form = Form::default();
            for i in 0..inputs {
                let dtype = match i {
                    0 => T::DTYPE,
                    1..=ScoredAttention::AXES => DType::I64,
                    i => args.get(i - ScoredAttention::arg(0)).map_or(T::DTYPE, |arg| arg.dtype),
                };
                form.input(dtype, (own == Some(i)).then_some(0));
            }
            (0..outputs).for_each(|_| form.output(Accumulate::Overwrite, T::DTYPE));
            let kernel = call.engine().kernels.get(program, &form, call.engine().simd)?;
            Ok::<_, numcore::Error>(Compiled { program: program.clone(), kernel })
        };
        let inputs = op.program.inputs();
        let slopes = match grad {
            Some(grad) if !grad.learned.is_empty() || !op.adds() => {
                let program = grad.program();
                Some(compiled(&program, 1 + grad.learned.len(), Some(inputs), inputs + 1)?)
            }
            _ => None,
        };
        let in_place = slopes.is_none().then_some(0);
        let positions = [0, 1, 2, 3].map(|axis| (0..scores[axis]).map(|i| (op.first[axis] + i) as i64).collect());
        let score = compiled(&op.program, 1, in_place, inputs)?;
        Ok(ScoreProgram { score, slopes, positions, args, sums: Vec::new() })
    }

    /// Tells whether gradients need the scores before the program.
    pub(super) fn keeps_raw(&self) -> bool {
        self.slopes.is_some()
    }

    /// The number of blocks of gradients beside that of scores.
    pub(super) fn learned(&self) -> usize {
        self.sums.len()
    }

    /// Makes room for the sums of arguments' gradients. A task has a chunk of `keys` keys of one of `owners` key heads.
    pub(super) fn make_sums(
        &mut self,
        call: &FusedCall<'_>,
        op: &ScoredAttentionGrad,
        p: &AttentionProblem,
        (owners, shares, keys): (usize, usize, usize),
    ) -> Result<()> {
        for &arg in &op.learned {
            let dims = call.ins[ScoredAttentionGrad::ARGS + arg].layout.dims();
            let varies = [4, 3, 2, 1].map(|back| dims.len().checked_sub(back).is_some_and(|axis| dims[axis] != 1));
            let of = |varies: bool, n: usize| if varies { n } else { 1 };
            let sizes = [of(varies[1], p.group), of(varies[2], p.queries), of(varies[3], keys)];
            let bytes = owners * shares * sizes.iter().product::<usize>() * size_of::<f64>();
            self.sums.push(ArgSums { arg, varies, sizes, keys, shares, memory: call.cpu.scratch(bytes)? });
        }
        Ok(())
    }

    /// Zeroes the sums of a task.
    ///
    /// # Safety
    /// The task is the caller's alone.
    pub(super) unsafe fn zero_sums(&self, task: usize) {
        for sums in &self.sums {
            let len = sums.len();
            // SAFETY: the memory of this task, which no other task accesses.
            unsafe { sums.base().slice_mut((task * len) as isize, len) }.fill(0.0);
        }
    }

    /// Turns products of queries and keys into scores; in place, if no gradient needs the products.
    ///
    /// # Safety
    /// Both matrices hold the block, which is this thread's alone.
    pub(super) unsafe fn scores<T: Float>(
        &self,
        simd: Simd,
        block: &ScoreBlock<'_>,
        from: Matrix<*mut T>,
        to: Matrix<*mut T>,
    ) {
        // SAFETY: the caller's guarantees.
        unsafe { self.run(simd, &self.score, block, [from].into_iter(), [to].into_iter()) }
    }

    /// Turns gradients of scores into those of products, and adds up those of arguments. `seen` is the number of keys
    /// that a query sees, and `others` has a block for each learned argument.
    ///
    /// # Safety
    /// `raw`, `ds` and `others` hold the block, which is this thread's alone; so is the task.
    pub(super) unsafe fn slopes<T: Float>(
        &self,
        simd: Simd,
        (block, seen): (&ScoreBlock<'_>, Seen),
        (raw, ds): (Matrix<*mut T>, Matrix<*mut T>),
        others: &mut [T],
        (group, task): (usize, usize),
    ) {
        let Some(slopes) = &self.slopes else { return };
        let first = others.as_mut_ptr();
        let other = |i: usize| Matrix { at: first.wrapping_add(i * ROWS * SCORE_STRIDE), ..ds };
        let outs = std::iter::once(ds).chain((0..self.sums.len()).map(other));
        // SAFETY: the caller's guarantees; the last input is the old value of the first output.
        unsafe { self.run(simd, slopes, block, [raw, ds].into_iter(), outs) };
        for (i, _) in block.rows.clone().enumerate() {
            let here = seen.of(i).min(block.keys);
            if here < block.keys {
                // A slope there may be infinite.
                // SAFETY: the hidden scores of a row of the block.
                unsafe { std::slice::from_raw_parts_mut(ds.offset(i, here).at, block.keys - here) }.fill(T::default());
            }
        }
        for (n, sums) in self.sums.iter().enumerate() {
            let [_, queries, keys] = sums.sizes;
            for (i, row) in block.rows.clone().enumerate() {
                let here = seen.of(i).min(block.keys);
                let of_row = &others[n * ROWS * SCORE_STRIDE + i * SCORE_STRIDE..][..here];
                let head = if sums.varies[1] { block.at.1 % group } else { 0 };
                let query = if sums.varies[2] { row } else { 0 };
                let at = task * sums.len() + (head * queries + query) * keys;
                if sums.varies[3] {
                    // SAFETY: sums of this task, for keys of its chunk.
                    let to = unsafe { sums.base().slice_mut((at + block.first_key % sums.keys) as isize, here) };
                    to.iter_mut().zip(of_row).for_each(|(to, x)| *to += x.to_f64());
                } else {
                    // SAFETY: a sum of this task.
                    let to = unsafe { &mut *sums.base().at(at as isize) };
                    *to += sum_of_row(simd, of_row).to_f64();
                }
            }
        }
    }

    /// Stores the gradients of arguments: sums over tasks, and zeros for arguments that learn nothing.
    pub(super) fn store<T: Float>(&self, call: &FusedCall<'_>, p: &AttentionProblem) {
        let batch = call.ins[AttentionGrad::QUERIES].layout.dims()[0];
        for (k, out) in call.outs.iter().enumerate().skip(ScoredAttention::ARGS) {
            let Some(sums) = self.sums.iter().find(|sums| ScoredAttention::ARGS + sums.arg == k) else {
                // SAFETY: an output of this call, which is contiguous.
                unsafe { Base::<u8>::new(out.ptr()).slice_mut(0, out.bytes()) }.fill(0);
                continue;
            };
            let whole = |axis: usize, n: usize| if sums.varies[axis] { n } else { 1 };
            let (heads, queries, keys) = (whole(1, p.heads), whole(2, p.queries), whole(3, p.keys));
            let rows = out.layout.numel() / keys.max(1);
            let terms = p.keys * if sums.varies[3] { 1 } else { batch * p.heads };
            call.engine().ranges(rows, super::super::grain(terms), |part| {
                let mut total = vec![0.0; keys];
                for at in part {
                    let (b, h, query) = (at / queries / heads, at / queries % heads, at % queries);
                    total.fill(0.0);
                    let key_heads = p.heads / p.group;
                    let of = |varies: bool, i: usize, n: usize| if varies { i..i + 1 } else { 0..n };
                    for b in of(sums.varies[0], b, batch) {
                        for kv in of(sums.varies[1], h / p.group, key_heads) {
                            let head = if sums.varies[1] { h % p.group } else { 0 };
                            sums.add_to(&mut total, (b * key_heads + kv) * sums.shares, head * sums.sizes[1] + query);
                        }
                    }
                    // SAFETY: a row of the output, which no other task writes.
                    let to = unsafe { out.base::<T>().slice_mut((at * keys) as isize, keys) };
                    to.iter_mut().zip(&total).for_each(|(to, x)| *to = T::from_f64(*x));
                }
            });
        }
    }

    /// Runs a program on a block: on scores, positions and arguments, and a gradient, if two are given.
    ///
    /// # Safety
    /// The matrices hold the block, which is this thread's alone.
    unsafe fn run<T: Float>(
        &self,
        simd: Simd,
        compiled: &Compiled,
        block: &ScoreBlock<'_>,
        mut ins: impl Iterator<Item = Matrix<*mut T>>,
        outs: impl Iterator<Item = Matrix<*mut T>>,
    ) {
        let (rows, keys) = (block.rows.len(), block.keys);
        if rows * keys == 0 {
            return;
        }
        let moving = |base: *mut u8, size: usize, row: isize, key: isize| {
            let mut strides = [0; MAX_RANK];
            (strides[0], strides[1]) = (row * size as isize, key * size as isize);
            Moving { base, size, strides }
        };
        let matrix = |m: Matrix<*mut T>| moving(m.at.cast(), size_of::<T>(), m.row, 1);
        let (b, h) = block.at;
        let at = [b, h, block.rows.start, block.first_key];
        let mut operands: SmallVec<[Moving; 6]> = ins.next().map(matrix).into_iter().collect();
        for (axis, positions) in self.positions.iter().enumerate() {
            let base = positions.as_ptr().wrapping_add(at[axis]).cast_mut().cast();
            operands.push(moving(base, size_of::<i64>(), isize::from(axis == 2), isize::from(axis == 3)));
        }
        for arg in &self.args {
            let (size, strides) = (arg.dtype.size(), arg.layout.strides());
            let base = arg.ptr().wrapping_offset(offset(&arg.layout, at) * size as isize);
            operands.push(moving(base, size, strides[2], strides[3]));
        }
        operands.extend(ins.map(matrix));
        operands.extend(outs.map(matrix));
        let Ok(shape) = Shape::new(&[rows, keys]) else { return };
        let plan = LoopPlan::rows(&shape, operands);
        let launch = Launch::by_rows(compiled.kernel.with(&compiled.program, &[], simd), plan);
        // SAFETY: the caller guarantees the blocks; positions and arguments are of all scores.
        unsafe { launch.tiles(0..launch.plan().tiles(), |_, _| {}) };
    }
}

impl ArgSums {
    /// The number of sums of a task.
    fn len(&self) -> usize {
        self.sizes.iter().product()
    }

    fn base(&self) -> Base<f64> {
        Base::new(self.memory.ptr().cast())
    }

    /// Adds a row of the sums of a key head's tasks, in order.
    fn add_to(&self, total: &mut [f64], first: usize, row: usize) {
        let keys = self.sizes[2];
        for share in 0..self.shares {
            let at = (first + share) * self.len() + row * keys;
            // SAFETY: sums of a task, all of which are done.
            let from = unsafe { self.base().slice(at as isize, keys) };
            let start = if self.varies[3] { share * self.keys } else { 0 };
            total.iter_mut().skip(start).zip(from).for_each(|(to, x)| *to += x);
        }
    }
}

multiversion! {
    /// The sum of a row.
    fn sum_of_row<T: (Float)>(x: &[T]) -> T {
        row_reduce::sum(x)
    }
}
