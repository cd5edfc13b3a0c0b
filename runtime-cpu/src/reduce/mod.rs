//! Reductions: tiles of the map are combined as they come out of the interpreter.
//!
//! A group of tiles gives one value per row (the innermost axis is reduced) or per column (it is kept). A group is
//! divided into chunks that threads share, by its sizes alone; within a chunk and among chunks values are combined
//! pairwise, so that rounding errors grow with the logarithm of the count.

mod axes;
mod combine;

use std::cell::RefCell;

use numcore::{Accumulate, Out, ProgramOperand as In, ReduceKind, Result, Scalar, Shape, View, pointwise::Program};
use smallvec::SmallVec;

use crate::{
    Cpu, Engine, Simd,
    element::{Lane, Stored, by_dtype},
    operand::{Base, Operand},
    pointwise::{self, Form, Launch, LoopPlan},
    walk::Walk,
};

use axes::{Columns, arrange};
use combine::{Combine, Max, Min, Pairwise, Prod, Sum, combine, fold_rows, rows_of, run, scratch, write};

/// The fewest tiles of a chunk, and the most chunks of a group.
const TILES: usize = 16;
const CHUNKS: usize = 64;
/// Elements of a tile that is read in place: each begins with a wait for memory. (With 4096, sums of a million elements
/// took 1.4 times as long.)
const READ_IN_PLACE: usize = 8192;
/// Tiles added to one accumulator before it is added to the next.
const RUN: usize = 32;
/// The fewest simple steps of a task, each on one element.
const GRAIN: usize = 1 << 15;

thread_local! {
    /// Accumulators of this thread. They stay allocated between launches.
    static ACCUMULATORS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The values of chunks, on the launching thread.
    static PARTIAL: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn reduce(
    cpu: &Cpu,
    map: &Program,
    ins: &[View<'_, Cpu>],
    scalars: &[Scalar],
    full: &Shape,
    op: ReduceKind,
    out: Out<'_, Cpu>,
) -> Result<()> {
    let to = Operand::from(&out.view);
    let reduced = |i: usize| full[i] != 1 && to.layout.dims()[i] == 1;
    if !(0..full.rank()).any(reduced) {
        let ins: SmallVec<[In<'_, Cpu>; 4]> = ins.iter().map(|v| In::View(*v)).collect();
        return pointwise::run(cpu, map, &ins, scalars, &mut [out]);
    }
    let engine = &*cpu.queue.engine;
    let add = out.how == Accumulate::Add;
    if full.numel() == 0 {
        by_dtype!(to.dtype, T => none::<T>(op, &to, add));
        return Ok(());
    }
    let mut form = Form::default();
    ins.iter().for_each(|v| form.input(v.dtype(), None));
    form.keep(to.dtype);
    let kernel = engine.kernels.get(map, &form, engine.simd)?;
    let spread = Operand { layout: to.layout.broadcast_to(*full)?, ..to };
    let operands = ins.iter().map(|v| Operand::from(*v)).chain([spread]);
    let mut plan = LoopPlan::of(pointwise::moving(&kernel, full, operands));
    let columns = arrange(&mut plan, full, ins, reduced);
    let common = kernel.with(map, scalars, engine.simd);
    // Columns that are kept have an accumulator for each element of a tile, which stays in L1.
    let launch = if columns.kept { Launch::new(common, plan) } else { Launch::reading(common, plan, READ_IN_PLACE) };
    let job = ReduceJob::new(&launch, columns, ins.len(), op, add, engine.simd);
    by_dtype!(to.dtype, T => job.run::<T>(engine, kernel.weight));
    Ok(())
}

/// Writes the result of a reduction over no elements.
fn none<S: Stored>(op: ReduceKind, to: &Operand, add: bool) {
    let first = match op {
        ReduceKind::Sum => <Sum as Combine<S::Lane>>::FIRST,
        ReduceKind::Prod => <Prod as Combine<S::Lane>>::FIRST,
        ReduceKind::Max => <Max as Combine<S::Lane>>::FIRST,
        ReduceKind::Min => <Min as Combine<S::Lane>>::FIRST,
    };
    let cells = Walk::new([&to.layout], |_| false);
    cells.each(0, cells.len(), |_, [at]| write(Simd::Baseline, Base::new(to.base::<S>().at(at)), 1, &[first], add));
}

/// Groups of tiles, and the chunks of each group.
struct ReduceJob<'a> {
    launch: &'a Launch<'a>,
    columns: Columns,
    op: ReduceKind,
    add: bool,
    simd: Simd,
    /// The index of the output among the plan's operands.
    output: usize,
    groups: usize,
    /// Tiles of a group.
    tiles: usize,
    /// Tiles of a chunk.
    per_chunk: usize,
    chunks: usize,
    across: usize,
}

impl<'a> ReduceJob<'a> {
    fn new(launch: &'a Launch<'a>, columns: Columns, output: usize, op: ReduceKind, add: bool, simd: Simd) -> Self {
        let plan = launch.plan();
        let across = plan.columns().div_ceil(plan.tile.columns);
        let down = plan.rows_len().div_ceil(plan.tile.rows);
        let tiles = match columns {
            Columns { kept: true, outer, .. } => outer * down,
            Columns { rows_reduced: true, outer, .. } => outer * down * across,
            _ => across,
        };
        let chunks = tiles.div_ceil(TILES).clamp(1, CHUNKS);
        let per_chunk = tiles.div_ceil(chunks);
        let chunks = tiles.div_ceil(per_chunk);
        let groups = plan.tiles() / tiles;
        ReduceJob { launch, columns, op, add, simd, output, groups, tiles, per_chunk, chunks, across }
    }

    fn run<S: Stored>(&self, engine: &Engine, weight: usize) {
        match self.op {
            ReduceKind::Sum => self.with::<S, Sum>(engine, weight),
            ReduceKind::Prod => self.with::<S, Prod>(engine, weight),
            ReduceKind::Max => self.with::<S, Max>(engine, weight),
            ReduceKind::Min => self.with::<S, Min>(engine, weight),
        }
    }

    fn with<S: Stored, C: Combine<S::Lane>>(&self, engine: &Engine, weight: usize) {
        let plan = self.launch.plan();
        let width = self.width();
        let each = self.per_chunk * plan.tile.rows * plan.tile.columns * weight;
        let tasks = self.groups * self.chunks;
        let grain = (GRAIN / each.max(1)).max(1);
        if self.chunks == 1 {
            return engine.ranges(tasks, grain, |part| {
                part.for_each(|g| self.chunk::<S::Lane, C>(g, 0, |place, values| self.store::<S>(place, values)));
            });
        }
        PARTIAL.with_borrow_mut(|words| {
            let partial = scratch::<S::Lane>(words, tasks * width);
            partial.fill(C::FIRST);
            let base = Base::new(partial.as_mut_ptr());
            engine.ranges(tasks, grain, |part| {
                for task in part {
                    self.chunk::<S::Lane, C>(task / self.chunks, task % self.chunks, |_, values| {
                        // SAFETY: this task's part of the partial values.
                        unsafe { base.slice_mut((task * width) as isize, values.len()) }.copy_from_slice(values);
                    });
                }
            });
            for (g, partial) in partial.chunks_exact_mut(self.chunks * width).enumerate() {
                fold_rows::<S::Lane, C>(self.simd, partial, self.chunks, width);
                let place = plan.place(self.tile(g, 0));
                let n = if self.columns.kept { place.size.columns } else { width };
                self.store::<S>(&place, &partial[..n]);
            }
        });
    }

    /// The most values that a group gives.
    fn width(&self) -> usize {
        let tile = self.launch.plan().tile;
        match self.columns {
            Columns { kept: true, .. } => tile.columns,
            Columns { rows_reduced: true, .. } => 1,
            _ => tile.rows,
        }
    }

    /// The index of a group's tile in the plan.
    fn tile(&self, group: usize, tile: usize) -> usize {
        if self.columns.kept {
            return (group / self.across * self.tiles + tile) * self.across + group % self.across;
        }
        group * self.tiles + tile
    }

    /// Combines one chunk of a group and hands its values on.
    fn chunk<T: Lane, C: Combine<T>>(&self, group: usize, chunk: usize, done: impl FnMut(&pointwise::Place, &[T])) {
        let from = chunk * self.per_chunk;
        let tiles = (from..self.tiles.min(from + self.per_chunk)).map(|t| self.tile(group, t));
        ACCUMULATORS.with_borrow_mut(|acc| match self.columns.kept {
            true => self.by_column::<T, C>(tiles, acc, done),
            false => self.by_row::<T, C>(tiles, acc, done),
        });
    }

    fn by_row<T: Lane, C: Combine<T>>(
        &self,
        tiles: impl Iterator<Item = usize>,
        acc: &mut Vec<u64>,
        mut done: impl FnMut(&pointwise::Place, &[T]),
    ) {
        let rows = self.width();
        let values = scratch::<T>(acc, rows);
        let mut pairs = Pairwise::<T>::default();
        let mut at = None;
        // SAFETY: `numcore::Runtime` guarantees that views are in their buffers; a kept value is a block of its compute
        // type.
        unsafe {
            self.launch.tiles(tiles, |place, value| {
                at.get_or_insert(*place);
                let n = place.size.rows * place.size.columns;
                let block = std::slice::from_raw_parts(value.cast::<T>(), n);
                if rows == 1 {
                    pairs.push::<C>(run::<T, C>(self.simd, block));
                } else {
                    rows_of::<T, C>(self.simd, block, place.size.columns, values);
                }
            });
        }
        let Some(place) = at else { return };
        if rows == 1 {
            values[0] = pairs.finish::<C>();
        }
        done(&place, &values[..if rows == 1 { 1 } else { place.size.rows }]);
    }

    fn by_column<T: Lane, C: Combine<T>>(
        &self,
        tiles: impl Iterator<Item = usize>,
        acc: &mut Vec<u64>,
        mut done: impl FnMut(&pointwise::Place, &[T]),
    ) {
        let tile = self.launch.plan().tile;
        let size = tile.rows * tile.columns;
        let (near, far) = scratch::<T>(acc, 2 * size).split_at_mut(size);
        near.fill(C::FIRST);
        far.fill(C::FIRST);
        let (mut count, mut at) = (0, None);
        // SAFETY: `numcore::Runtime` guarantees that views are in their buffers; a kept value is a block of its compute
        // type.
        unsafe {
            self.launch.tiles(tiles, |place, value| {
                at.get_or_insert(*place);
                let n = place.size.rows * place.size.columns;
                combine::<T, C>(self.simd, &mut near[..n], std::slice::from_raw_parts(value.cast::<T>(), n));
                count += 1;
                if count % RUN == 0 {
                    combine::<T, C>(self.simd, far, near);
                    near.fill(C::FIRST);
                }
            });
        }
        let Some(place) = at else { return };
        combine::<T, C>(self.simd, far, near);
        let columns = place.size.columns;
        fold_rows::<T, C>(self.simd, far, tile.rows, columns);
        done(&place, &far[..columns]);
    }

    /// Writes a group's values to the output.
    fn store<S: Stored>(&self, place: &pointwise::Place, values: &[S::Lane]) {
        let plan = self.launch.plan();
        let operand = &plan.operands[self.output];
        let (row, column) = plan.strides(operand);
        let stride = if self.columns.kept { column } else { row };
        let to = Base::new(plan.address(operand, place).cast::<S>());
        write::<S>(self.simd, to, stride / size_of::<S>() as isize, values, self.add);
    }
}
