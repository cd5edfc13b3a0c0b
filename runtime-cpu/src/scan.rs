//! Recurrences along an axis. Rows along it are independent: a task advances a group of adjacent rows together, so that
//! an outer axis is read in memory order. The running value has more digits than what is stored (`running.rs`), and is
//! rounded only where it is stored: an element far down an axis is as precise as a sum.

mod running;

use numcore::{ScanOp, View, ViewMut};
use running::{Running, Scanned};

use crate::{
    Cpu, Engine,
    element::{Lane, Stored, by_dtype},
    operand::{Base, Operand},
    simd::multiversion,
    walk::{Walk, WalkAxis},
};

/// Rows of one task.
const ROWS: usize = 64;
/// Elements of one task, at least.
const GRAIN: usize = 1 << 14;

/// The running value of a row.
type State<T> = <<T as Stored>::Lane as Scanned>::Running;

pub(crate) fn scan(
    cpu: &Cpu,
    op: ScanOp,
    x: View<'_, Cpu>,
    a: Option<View<'_, Cpu>>,
    axis: usize,
    reverse: bool,
    out: ViewMut<'_, Cpu>,
) {
    let (x, to) = (Operand::from(x), Operand::from(&out));
    let a = a.map_or(x, Operand::from);
    if x.layout.numel() != 0 {
        by_dtype!(x.dtype, T => scan_rows::<T>(&cpu.queue.engine, op, [&to, &x, &a], axis, reverse));
    }
}

fn scan_rows<T: Stored<Lane: Scanned>>(
    engine: &Engine,
    op: ScanOp,
    [to, x, a]: [&Operand; 3],
    axis: usize,
    reverse: bool,
) {
    let layouts = [&to.layout, &x.layout, &a.layout];
    let (outer, inner) = Walk::new(layouts, |i| i == axis).split_nearest(0);
    let mut along = WalkAxis { size: x.layout.dims()[axis], strides: layouts.map(|l| l.strides()[axis]) };
    let mut start = [0; 3];
    if reverse {
        start = along.strides.map(|s| s * (along.size as isize - 1));
        along.strides = along.strides.map(|s| -s);
    }
    let groups = inner.size.div_ceil(ROWS);
    let bases = [to.base::<T>(), x.base::<T>(), a.base::<T>()];
    engine.ranges(outer.len() * groups, (GRAIN / (along.size * ROWS.min(inner.size))).max(1), |part| {
        for task in part {
            let (first, at) = (task % groups * ROWS, outer.at(task / groups));
            let group = WalkAxis { size: ROWS.min(inner.size - first), strides: inner.strides };
            let at = [0, 1, 2].map(|k| bases[k].at(start[k] + at[k] + first as isize * inner.strides[k]));
            advance::<T>(engine.simd, op, at.map(Base::new), along, group);
        }
    });
}

multiversion! {
    fn advance<T: (Stored<Lane: Scanned>)>(op: ScanOp, bases: [Base<T>; 3], along: WalkAxis<3>, group: WalkAxis<3>) {
        match op {
            ScanOp::Sum => advance_rows(bases, along, group, T::Lane::ZERO, |y, x, _| y.add(x)),
            ScanOp::Prod => advance_rows(bases, along, group, T::Lane::ONE, |y, x, _| y.mul(x)),
            ScanOp::Linear => advance_rows(bases, along, group, T::Lane::ZERO, |y, x, a| y.mul(a).add(x)),
        }
    }
}

#[inline(always)]
fn advance_rows<T: Stored<Lane: Scanned>>(
    [to, x, a]: [Base<T>; 3],
    along: WalkAxis<3>,
    group: WalkAxis<3>,
    first: T::Lane,
    f: impl Fn(State<T>, T::Lane, T::Lane) -> State<T>,
) {
    let mut y = [State::<T>::of(first); ROWS];
    let dense = group.strides == [1; 3];
    for t in 0..along.size as isize {
        let [to, x, a] = [(to, 0), (x, 1), (a, 2)].map(|(base, k)| Base::new(base.at(t * along.strides[k])));
        // SAFETY: positions of the views, which are in their buffers; these rows of the output are this task's alone.
        unsafe {
            if dense {
                let (xs, a) = (x.slice(0, group.size), a.slice(0, group.size));
                for (((to, y), x), a) in to.slice_mut(0, group.size).iter_mut().zip(&mut y).zip(xs).zip(a) {
                    *y = f(*y, x.load(), a.load());
                    *to = T::store(y.value());
                }
            } else {
                for (c, y) in y[..group.size].iter_mut().enumerate() {
                    let [o, i, j] = group.strides.map(|s| c as isize * s);
                    *y = f(*y, x.get(i).load(), a.get(j).load());
                    to.set(o, T::store(y.value()));
                }
            }
        }
    }
}
