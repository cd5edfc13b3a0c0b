//! The order in which the axes of a reduction are walked.

use numcore::{MAX_RANK, Shape, View};
use smallvec::SmallVec;

use crate::{Cpu, pointwise::LoopPlan};

type ReducedAxes = SmallVec<[usize; MAX_RANK]>;

/// The layout of a reduction's tiles, by the kind of the innermost axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    pub kept: bool,
    /// The reduced axes among the outer ones.
    pub outer: usize,
    /// True if rows are reduced, too.
    pub rows_reduced: bool,
}

/// Orders the axes: kept ones, reduced ones, and at the end, if the innermost is kept, that one with what merges into
/// it.
pub(super) fn arrange(
    plan: &mut LoopPlan,
    full: &Shape,
    ins: &[View<'_, Cpu>],
    reduced: impl Fn(usize) -> bool,
) -> Columns {
    let near = nearness(full, ins);
    let trailing = near.iter().rev().take_while(|&&i| !reduced(i)).count();
    let mut whole = plan.clone();
    let columns = order(&mut whole, full, near.split_at(near.len() - trailing), &reduced);
    if trailing > 1 && !columns.rows_reduced {
        return order(plan, full, near.split_at(near.len() - 1), &reduced);
    }
    *plan = whole;
    columns
}

/// Arranges kept and then reduced axes of `front`, and then `tail`.
fn order(
    plan: &mut LoopPlan,
    full: &Shape,
    (front, tail): (&[usize], &[usize]),
    reduced: &impl Fn(usize) -> bool,
) -> Columns {
    let pick = |want: bool| front.iter().filter(move |&&i| reduced(i) == want);
    let order: ReducedAxes = pick(false).chain(pick(true)).chain(tail).copied().collect();
    let kinds = plan.arrange(full, &order, reduced);
    let missing = plan.sizes.len() - kinds.len();
    let is_reduced = |i: usize| i >= missing && kinds[i - missing];
    let outer = plan.sizes.len() - 2;
    Columns {
        kept: !tail.is_empty(),
        outer: (0..outer).filter(|&i| is_reduced(i)).map(|i| plan.sizes[i]).product(),
        rows_reduced: is_reduced(outer),
    }
}

/// Axes of more than one element by descending stride of an operand that broadcasts none of them; in order if no
/// operand qualifies.
fn nearness(full: &Shape, ins: &[View<'_, Cpu>]) -> ReducedAxes {
    let mut axes: ReducedAxes = (0..full.rank()).filter(|&i| full[i] != 1).collect();
    let strides = |x: &View<'_, Cpu>, i: usize| x.layout().strides()[i].unsigned_abs();
    if let Some(main) = ins.iter().find(|x| axes.iter().all(|&i| strides(x, i) != 0)) {
        axes.sort_by_key(|&i| std::cmp::Reverse(strides(main, i)));
    }
    axes
}
