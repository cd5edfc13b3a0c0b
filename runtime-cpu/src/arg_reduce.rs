//! Positions of extremes. NaN is both a maximum and a minimum; the first of equal elements is taken.

use numcore::{ArgOp, View, ViewMut};

use crate::{
    Cpu, Engine,
    element::{Lane, Stored, by_dtype},
    operand::{Base, Operand},
    simd::multiversion,
    walk::{Walk, WalkAxis},
};

/// The number of rows of one task.
const ROWS: usize = 64;
/// The least number of elements of one task.
const GRAIN: usize = 1 << 14;

pub(crate) fn arg_reduce(cpu: &Cpu, op: ArgOp, x: View<'_, Cpu>, axis: usize, out: ViewMut<'_, Cpu>) {
    let (x, to) = (Operand::from(x), Operand::from(&out));
    if to.layout.numel() != 0 {
        by_dtype!(x.dtype, T => reduce_rows::<T>(&cpu.queue.engine, op, &x, axis, &to));
    }
}

fn reduce_rows<T: Stored>(engine: &Engine, op: ArgOp, x: &Operand, axis: usize, to: &Operand) {
    let along = WalkAxis { size: x.layout.dims()[axis], strides: [x.layout.strides()[axis]] };
    let walk = Walk::new([&to.layout, &x.layout], |i| i == axis);
    let (from, at) = (x.base::<T>(), to.base::<i64>());
    if along.strides == [1] {
        return engine.ranges(walk.len(), (GRAIN / along.size).max(1), |part| {
            walk.each(part.start, part.end, |_, [o, i]| {
                // SAFETY: a row of the input; the output element is this task's alone.
                unsafe { at.set(o, along_row::<T>(engine.simd, op, from.slice(i, along.size)) as i64) };
            });
        });
    }
    let (outer, inner) = walk.split_nearest(1);
    let groups = inner.size.div_ceil(ROWS);
    engine.ranges(outer.len() * groups, (GRAIN / (along.size * ROWS.min(inner.size))).max(1), |part| {
        for task in part {
            let (first, [o, i]) = (task % groups * ROWS, outer.at(task / groups));
            let first = first.min(inner.size);
            let group = WalkAxis { size: ROWS.min(inner.size - first), strides: inner.strides };
            let [so, si] = inner.strides.map(|s| s * first as isize);
            across_rows::<T>(engine.simd, op, Base::new(at.at(o + so)), Base::new(from.at(i + si)), along, group);
        }
    });
}

multiversion! {
    /// The extreme of a row, then its first position: two passes by vectors are faster than one by scalars.
    fn along_row<T: (Stored)>(op: ArgOp, x: &[T]) -> usize {
        match op {
            ArgOp::Max => position(x, Lane::max),
            ArgOp::Min => position(x, Lane::min),
        }
    }

    fn across_rows<T: (Stored)>(op: ArgOp, to: Base<i64>, x: Base<T>, along: WalkAxis<1>, group: WalkAxis<2>) {
        match op {
            ArgOp::Max => columns(to, x, along, group, Lane::max),
            ArgOp::Min => columns(to, x, along, group, Lane::min),
        }
    }
}

#[inline(always)]
fn position<T: Stored>(x: &[T], pick: impl Fn(T::Lane, T::Lane) -> T::Lane) -> usize {
    const LANES: usize = 32;
    let mut best = [x[0].load(); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        best.iter_mut().zip(chunk).for_each(|(b, x)| *b = pick(*b, x.load()));
    }
    let best = best.into_iter().chain(rest.iter().map(|x| x.load())).reduce(pick).unwrap_or(T::Lane::ZERO);
    let same = |x: &T| x.load() == best || (best.is_nan() && x.load().is_nan());
    // A whole chunk is tested together, without branches, and then the element that was found.
    let before = chunks.iter().take_while(|chunk| !chunk.iter().fold(false, |any, x| any | same(x))).count() * LANES;
    before + x[before..].iter().position(same).unwrap_or(0)
}

#[inline(always)]
fn columns<T: Stored>(
    to: Base<i64>,
    x: Base<T>,
    along: WalkAxis<1>,
    group: WalkAxis<2>,
    pick: impl Fn(T::Lane, T::Lane) -> T::Lane,
) {
    let [so, si] = group.strides;
    let mut best = [T::Lane::ZERO; ROWS];
    let mut at = [0i64; ROWS];
    for t in 0..along.size as isize {
        for c in 0..group.size {
            // SAFETY: positions of the input.
            let x = unsafe { x.get(t * along.strides[0] + c as isize * si) }.load();
            let new = pick(best[c], x);
            // An element differs from the best so far exactly if it is better; a NaN, once best, stays.
            let better = t == 0 || (new != best[c] && !best[c].is_nan());
            best[c] = if t == 0 { x } else { new };
            at[c] = if better { t as i64 } else { at[c] };
        }
    }
    for (c, &t) in at[..group.size].iter().enumerate() {
        // SAFETY: output elements of this task alone.
        unsafe { to.set(c as isize * so, t) };
    }
}
