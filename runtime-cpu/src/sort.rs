//! Stable sort along an axis: positions are sorted by a key whose unsigned order is the order of the values.

use std::cell::RefCell;

use numcore::{View, ViewMut};

use crate::{
    Cpu, Engine,
    element::{Lane, Stored, by_dtype},
    operand::{Base, Operand},
    walk::Walk,
};

/// Elements of one task, at least.
const GRAIN: usize = 1 << 11;

thread_local! {
    /// Keys and positions of one row along the axis. They stay allocated, so that sorting allocates nothing.
    static ROW: RefCell<Vec<(u64, i64)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn sort(
    cpu: &Cpu,
    x: View<'_, Cpu>,
    axis: usize,
    descending: bool,
    values: ViewMut<'_, Cpu>,
    index: ViewMut<'_, Cpu>,
) {
    let (x, values, index) = (Operand::from(x), Operand::from(&values), Operand::from(&index));
    if x.layout.numel() != 0 {
        by_dtype!(x.dtype, T => sort_rows::<T>(&cpu.queue.engine, &x, axis, descending, &values, &index));
    }
}

fn sort_rows<T: Stored>(
    engine: &Engine,
    x: &Operand,
    axis: usize,
    descending: bool,
    values: &Operand,
    index: &Operand,
) {
    let layouts = [&x.layout, &values.layout, &index.layout];
    let walk = Walk::new(layouts, |i| i == axis);
    let strides = layouts.map(|l| l.strides()[axis]);
    let size = x.layout.dims()[axis];
    let (from, to, at) = (x.base::<T>(), values.base::<T>(), index.base::<i64>());
    engine.ranges(walk.len(), (GRAIN / size).max(1), |part| {
        walk.each(part.start, part.end, |_, [x, v, i]| {
            let (from, to, at) = (Base::new(from.at(x)), Base::new(to.at(v)), Base::new(at.at(i)));
            ROW.with_borrow_mut(|row| sort_row::<T>(row, size, descending, strides, from, to, at));
        });
    });
}

fn sort_row<T: Stored>(
    row: &mut Vec<(u64, i64)>,
    size: usize,
    descending: bool,
    [sx, sv, si]: [isize; 3],
    from: Base<T>,
    to: Base<T>,
    at: Base<i64>,
) {
    // Descending is ascending by the complement, so that equal values keep their order.
    let flip = if descending { u64::MAX } else { 0 };
    row.clear();
    // SAFETY: positions of the input along the axis.
    row.extend((0..size as isize).map(|i| unsafe { (from.get(i * sx).load().key() ^ flip, i as i64) }));
    row.sort_unstable();
    for (k, &(_, i)) in row.iter().enumerate() {
        let k = k as isize;
        // SAFETY: positions along the axis; this row of the outputs is this task's alone.
        unsafe {
            to.set(k * sv, from.get(i as isize * sx));
            at.set(k * si, i);
        }
    }
}
