//! Values scattered with reductions, and picked by coordinates.

use autograd::Var;
use numcore::{
    Result, Runtime,
    ops::{
        Apply, IndexOps, PointwiseOps, ReduceOps, ScatterOps,
        ScatterReduction::{self, *},
        SelectOps, ViewOps,
    },
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::{index, indices, spread, truth},
};

fn reduced<R: Runtime>(x: &[Var<R>], how: ScatterReduction, own: bool) -> Result<Var<R>> {
    x[0].scatter_reduce(1, &x[1], &x[2], how, own)?.square()
}

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 11] = [
        ("scatter", |x| x[0].scatter(1, &x[1], &x[2])?.square()),
        ("scatter along the first", |x| x[0].scatter(0, &x[1].narrow(1, 0, 4)?.minimum(2.0)?, &x[2])?.square()),
        ("scatter_reduce sum", |x| reduced(x, Sum, true)),
        ("scatter_reduce sum alone", |x| reduced(x, Sum, false)),
        ("scatter_reduce mean", |x| reduced(x, Mean, true)),
        ("scatter_reduce mean alone", |x| reduced(x, Mean, false)),
        ("scatter_reduce prod", |x| reduced(x, Prod, true)),
        ("scatter_reduce prod alone", |x| reduced(x, Prod, false)),
        ("scatter_reduce amax", |x| reduced(x, Amax, true)),
        ("scatter_reduce amax alone", |x| reduced(x, Amax, false)),
        ("scatter_reduce amin", |x| reduced(x, Amin, true)),
    ];
    // Fewer rows than both have, and positions that occur often, once and never.
    let given = || [spread(&[3, 5], -2.0, 2.0), index(&[2, 6], 5), spread(&[3, 7], -2.1, 1.9)];
    let mut cases: Vec<OpCase<R>> = rows.map(|(name, f)| case(name, given(), f).slack(4.0)).into();
    cases.extend([
        case(
            "scatter_reduce prod with zeros",
            [
                crate::suite::sample::with_zeros(&[1, 3], 2),
                indices(&[1, 6], &[2, 0, 0, 2, 2, 0]),
                crate::suite::sample::with_zeros(&[1, 6], 4),
            ],
            |x| x[0].scatter_reduce(1, &x[1], &x[2], Prod, true),
        ),
        case("scatter_value", [spread(&[3, 5], -2.0, 2.0), index(&[2, 3], 5)], |x| {
            x[0].scatter_value(1, &x[1], 0.5)?.square()
        }),
        case("index_copy", [spread(&[2, 4], -2.0, 2.0), index(&[3], 4), spread(&[2, 3], -1.0, 1.0)], |x| {
            x[0].index_copy(1, &x[1], &x[2])?.square()
        }),
        case("index_fill", [spread(&[4, 3], -2.0, 2.0), index(&[2], 4)], |x| x[0].index_fill(0, &x[1], -0.5)?.square()),
        case("gather_nd", [spread(&[3, 4, 2], -2.0, 2.0), index(&[5, 2], 3)], |x| x[0].gather_nd(&x[1], 0)?.square()),
        case("gather_nd in batches", [spread(&[2, 3, 4], -2.0, 2.0), index(&[2, 5, 1], 3)], |x| {
            x[0].gather_nd(&x[1], 1)?.square()
        }),
        case("take", [spread(&[3, 4], -2.0, 2.0), index(&[2, 3], 12)], |x| x[0].take(&x[1])?.square()),
        case("masked_select", [spread(&[3, 4], -2.0, 2.0), truth(&[4])], |x| {
            x[0].masked_select(&x[1].value()?)?.square()
        }),
        case("compress", [spread(&[3, 4], -2.0, 2.0), truth(&[4])], |x| {
            let kept = x[0].compress(&x[1].value()?, 1)?;
            let rest = x[0].index_select(1, &Apply::constant(x[1].value()?.logical_not()?.nonzero()?.select(1, 0)?))?;
            kept.sum(&[1])?.mul(&rest.sum(&[1])?)
        }),
    ]);
    cases
}
