//! Gather and its adjoint. Every index is checked before the first element moves. An index that repeats along inner
//! axes (an embedding's row) moves contiguous runs.

use std::ops::Range;

use numcore::{Accumulate, DType, ErrorKind, Layout, MAX_RANK, Out, Result, Shape, View, ViewMut};
use smallvec::SmallVec;

use crate::{
    Cpu, Engine, Simd,
    element::{Lane, Stored, by_dtype},
    operand::{Base, Operand},
    pointwise::convert,
    simd::multiversion,
    walk::{Walk, WalkAxis},
};

/// Elements moved by one task.
const GRAIN: usize = 1 << 15;
/// Columns of one task of a scatter.
const COLUMNS: usize = 256;

pub(crate) fn gather(cpu: &Cpu, x: View<'_, Cpu>, axis: usize, index: View<'_, Cpu>, out: Out<'_, Cpu>) -> Result<()> {
    let (x, index, to) = (Operand::from(x), Operand::from(index), Operand::from(&out.view));
    if to.layout.numel() == 0 {
        return Ok(());
    }
    check("gather", &index, x.layout.dims()[axis])?;
    let moves = Moves::new(to.layout.strides(), x.layout.strides(), &index, axis);
    let add = out.how == Accumulate::Add;
    by_dtype!(x.dtype, T => moves.gather::<T>(&cpu.queue.engine, to.base(), x.base(), index.base(), add));
    Ok(())
}

/// Accumulates `src` at the indices. Half-precision elements are accumulated in `f32` and rounded once.
pub(crate) fn scatter_add(
    cpu: &Cpu,
    src: View<'_, Cpu>,
    axis: usize,
    index: View<'_, Cpu>,
    out: ViewMut<'_, Cpu>,
) -> Result<()> {
    let (src, index, to) = (Operand::from(src), Operand::from(index), Operand::from(&out));
    if src.layout.numel() == 0 {
        return Ok(());
    }
    check("scatter_add", &index, to.layout.dims()[axis])?;
    let engine = &*cpu.queue.engine;
    if !to.dtype.is_half() {
        let moves = Moves::new(src.layout.strides(), to.layout.strides(), &index, axis);
        by_dtype!(src.dtype, T => moves.scatter::<T, T>(engine, src.base(), to.base(), index.base()));
        return Ok(());
    }
    let dense = Layout::contiguous(*to.layout.shape());
    let memory = cpu.scratch(dense.numel() * size_of::<f32>())?;
    let acc = Operand::of(&memory, dense, DType::F32);
    let moves = Moves::new(src.layout.strides(), dense.strides(), &index, axis);
    convert(engine, to, acc, Accumulate::Overwrite)?;
    match src.dtype {
        DType::F16 => moves.scatter::<half::f16, f32>(engine, src.base(), acc.base(), index.base()),
        _ => moves.scatter::<half::bf16, f32>(engine, src.base(), acc.base(), index.base()),
    }
    convert(engine, acc, to, Accumulate::Overwrite)
}

/// Checks that every index is in `0..size`. The error names the first that is not.
fn check(op: &'static str, index: &Operand, size: usize) -> Result<()> {
    let base = index.base::<i64>();
    // A broadcast index is checked once.
    let distinct = index.layout.dims().iter().zip(index.layout.strides()).filter(|(_, s)| **s != 0);
    let walk = Walk::of(distinct.map(|(&size, &stride)| WalkAxis { size, strides: [stride] }));
    let mut wrong = None;
    walk.each(0, walk.len(), |_, [at]| {
        // SAFETY: a position of the view, which nothing writes.
        let i = unsafe { base.get(at) };
        if (i as u64) >= size as u64 && wrong.is_none() {
            wrong = Some((i, at));
        }
    });
    let Some((i, offset)) = wrong else { return Ok(()) };
    let position = position(&index.layout, offset);
    Err(ErrorKind::Index { op, index: Some(i), position, of: *index.layout.shape(), size: Some(size) }.into())
}

/// The first position of a layout that is `offset` elements from its first element.
fn position(layout: &Layout, offset: isize) -> Shape {
    let all = Walk::of(layout.dims().iter().zip(layout.strides()).map(|(&size, &s)| WalkAxis { size, strides: [s] }));
    let mut n = 0;
    while all.at(n) != [offset] {
        n += 1;
    }
    let mut at = *layout.shape();
    for i in (0..layout.rank()).rev() {
        let size = layout.dims()[i];
        at = at.with(i, n % size);
        n /= size;
    }
    at
}

/// The walk by which elements move between an indexed operand (`far`) and the operand of the index's shape (`near`).
struct Moves {
    /// Strides of near, far and index along the axis; far's is per unit of the index's value.
    axis: WalkAxis<3>,
    /// The other axes before it, after it, and last a contiguous run of elements that share an index.
    before: Axes,
    after: Walk<3>,
    run: usize,
}

type Axes = SmallVec<[WalkAxis<3>; MAX_RANK]>;

impl Moves {
    fn new(near: &[isize], far: &[isize], index: &Operand, axis: usize) -> Moves {
        let (dims, strides) = (index.layout.dims(), index.layout.strides());
        let at = |i: usize| WalkAxis { size: dims[i], strides: [near[i], far[i], strides[i]] };
        let after = Walk::of((axis + 1..dims.len()).map(at));
        let (after, run) = after.split_inner(|a| a.strides == [1, 1, 0]);
        Moves { axis: at(axis), before: (0..axis).map(at).collect(), after, run: run.size }
    }

    /// Computes `near[.., i, ..] = far[.., index[.., i, ..], ..]`.
    fn gather<T: Stored>(&self, engine: &Engine, near: Base<T>, far: Base<T>, index: Base<i64>, add: bool) {
        let step = self.axis.strides[1];
        let mut axis = self.axis;
        axis.strides[1] = 0;
        let cells = Walk::of(self.before.iter().copied().chain([axis]).chain(self.after.axes()));
        engine.ranges(cells.len(), (GRAIN / self.run).max(1), |part| {
            cells.each(part.start, part.end, |_, [to, from, at]| {
                // SAFETY: positions of the views; the index was checked; no two tasks share an output.
                let (to, from) = unsafe {
                    let from = from + index.get(at) as isize * step;
                    (near.slice_mut(to, self.run), far.slice(from, self.run))
                };
                if add { add_run(engine.simd, to, from) } else { copy_run(to, from) }
            });
        });
    }

    /// Computes `far[.., index[.., i, ..], ..] += near[.., i, ..]`, in ascending order of `i`. No two tasks write one
    /// destination: each walks the whole axis for its columns.
    fn scatter<T: Stored, W: Stored<Lane = T::Lane>>(
        &self,
        engine: &Engine,
        near: Base<T>,
        far: Base<W>,
        index: Base<i64>,
    ) {
        let lines = Walk::of(self.before.iter().copied().chain(self.after.axes()));
        let blocks = self.run.div_ceil(COLUMNS);
        let each = self.axis.size * self.run.min(COLUMNS);
        engine.ranges(lines.len() * blocks, (GRAIN / each.max(1)).max(1), |part| {
            for task in part {
                let first = task % blocks * COLUMNS;
                let columns = first..self.run.min(first + COLUMNS);
                self.column(engine.simd, lines.at(task / blocks), columns, near, far, index);
            }
        });
    }

    fn column<T: Stored, W: Stored<Lane = T::Lane>>(
        &self,
        simd: Simd,
        [from, to, at]: [isize; 3],
        columns: Range<usize>,
        near: Base<T>,
        far: Base<W>,
        index: Base<i64>,
    ) {
        let first = columns.start as isize;
        for i in 0..self.axis.size as isize {
            let [n, f, k] = self.axis.strides;
            // SAFETY: positions of the views; the index was checked; these columns of the output are this task's alone.
            unsafe {
                let to = to + index.get(at + i * k) as isize * f + first;
                add_run(simd, far.slice_mut(to, columns.len()), near.slice(from + i * n + first, columns.len()));
            }
        }
    }
}

#[inline(always)]
fn copy_run<T: Copy>(to: &mut [T], from: &[T]) {
    match (to, from) {
        ([to], [from]) => *to = *from,
        (to, from) => to.copy_from_slice(from),
    }
}

#[inline(always)]
fn add_run<W: Stored<Lane = T::Lane>, T: Stored>(simd: Simd, to: &mut [W], from: &[T]) {
    match (to, from) {
        ([to], [from]) => *to = W::store(to.load().add(from.load())),
        (to, from) => add_slices(simd, to, from),
    }
}

multiversion! {
    fn add_slices<W: (Stored<Lane = <T as Stored>::Lane>), T: (Stored)>(to: &mut [W], from: &[T]) {
        for (t, f) in to.iter_mut().zip(from) {
            *t = W::store(t.load().add(f.load()));
        }
    }
}
