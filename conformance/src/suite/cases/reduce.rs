//! Reductions, order and recurrences.

use numcore::{
    Runtime,
    ops::{PointwiseOps, ReduceOps, ScanOps, SortOps},
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::{centered, real, spread, with_zeros},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = reductions();
    cases.extend(extremes());
    cases.extend(recurrences());
    cases
}

fn reductions<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 20] = [
        ("sum of all", |x| x[0].sum(&[], false)),
        ("sum 0", |x| x[0].sum(&[0], false)),
        ("sum 1 kept", |x| x[0].sum(&[1], true)),
        ("sum -1, 0", |x| x[0].sum(&[-1, 0], false)),
        ("mean of all", |x| x[0].mean(&[], true)),
        ("mean 1", |x| x[0].mean(&[1], false)),
        ("mean 0, 2", |x| x[0].mean(&[0, 2], false)),
        ("logsumexp of all", |x| x[0].logsumexp(&[], false)),
        ("logsumexp 1", |x| x[0].logsumexp(&[1], false)),
        ("logsumexp 0, 2 kept", |x| x[0].logsumexp(&[0, 2], true)),
        ("var of all", |x| x[0].var(&[], 1, false)),
        ("var 1 biased", |x| x[0].var(&[1], 0, false)),
        ("var 0, 2", |x| x[0].var(&[0, 2], 1, true)),
        ("std 2", |x| x[0].std(&[2], 1, false)),
        ("std 0, 1 biased", |x| x[0].std(&[0, 1], 0, false)),
        ("norm of all", |x| x[0].norm(&[], false)),
        ("norm 1", |x| x[0].norm(&[1], true)),
        ("prod of all", |x| x[0].prod(&[], false)),
        ("prod 1", |x| x[0].prod(&[1], false)),
        ("prod 2, 0", |x| x[0].prod(&[2, 0], true)),
    ];
    let mut cases: Vec<OpCase<R>> =
        rows.map(|(name, f)| case(name, [spread(&[2, 3, 4], -1.5, 1.7)], f).slack(4.0)).into();
    cases.extend([
        case("prod with a zero in each", [with_zeros(&[3, 4], 4)], |x| x[0].prod(&[1], false)),
        case("prod with several zeros", [with_zeros(&[2, 6], 3)], |x| x[0].prod(&[1], false)),
        case("prod of all with one zero", [with_zeros(&[2, 3], 6)], |x| x[0].prod(&[], false)),
        case("sum of a scalar", [centered(&[])], |x| x[0].mul(&x[0])?.sum(&[], false)),
        case("sum of a product", [centered(&[3, 4]), centered(&[4])], |x| x[0].mul(&x[1])?.sum(&[0], false)),
        case("logsumexp of large values", [real(&[3, 4], 700.0, 760.0)], |x| x[0].logsumexp(&[1], false)).slack(2.0),
        case("a ratio of sums", [real(&[3, 4], 0.5, 2.0)], |x| {
            x[0].sum(&[0], false)?.div(&x[0].square()?.sum(&[0], false)?)
        }),
    ]);
    cases
}

fn extremes<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 11] = [
        ("amax of all", |x| x[0].amax(&[], false)),
        ("amax 0", |x| x[0].amax(&[0], false)),
        ("amax 1, 2 kept", |x| x[0].amax(&[1, 2], true)),
        ("amin of all", |x| x[0].amin(&[], true)),
        ("amin 2", |x| x[0].amin(&[2], false)),
        ("sort 0", |x| Ok(x[0].sort(0, false)?.0)),
        ("sort 2 descending", |x| Ok(x[0].sort(2, true)?.0)),
        ("topk 1", |x| Ok(x[0].topk(2, 1)?.0)),
        ("topk of all of them", |x| Ok(x[0].topk(4, -1)?.0)),
        ("topk_smallest", |x| Ok(x[0].topk_smallest(2, 1)?.0)),
        ("median of three", |x| numcore::ops::ViewOps::select(&x[0].sort(1, false)?.0, 1, 1)),
    ];
    // Squared afterwards, so that there is a second derivative.
    let mut cases: Vec<OpCase<R>> = rows.map(|(name, f)| case(name, [spread(&[2, 3, 4], -2.0, 2.0)], f).once()).into();
    cases.push(case("squares of the largest", [spread(&[3, 5], -2.0, 2.0)], |x| x[0].amax(&[1], false)?.square()));
    cases.push(case("squares, sorted", [spread(&[3, 5], 0.2, 2.0)], |x| x[0].square()?.sort(1, true)?.0.square()));
    cases
}

fn recurrences<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("cumsum 0", [centered(&[4, 3])], |x| x[0].cumsum(0)).once(),
        case("cumsum 1 of squares", [centered(&[2, 5])], |x| x[0].square()?.cumsum(1)),
        case("cumprod 0", [spread(&[4, 3], -1.4, 1.6)], |x| x[0].cumprod(0)).slack(4.0),
        case("cumprod -1", [spread(&[2, 5], 0.5, 1.6)], |x| x[0].cumprod(-1)).slack(4.0),
        case("cumprod with a zero", [with_zeros(&[2, 6], 6)], |x| x[0].cumprod(1)).slack(4.0),
        case("cumprod with several zeros", [with_zeros(&[1, 7], 3)], |x| x[0].cumprod(1)).slack(4.0),
        case("linear_scan 1", [centered(&[2, 6]), real(&[2, 6], -0.9, 0.9)], |x| x[0].linear_scan(&x[1], 1)).slack(4.0),
        case("linear_scan 0", [centered(&[5, 2, 2]), centered(&[5, 2, 2])], |x| x[0].linear_scan(&x[1], 0)).slack(4.0),
        case("linear_scan of one step", [centered(&[3, 1]), centered(&[3, 1])], |x| x[0].linear_scan(&x[1], 1)).once(),
        case("linear_scan through zeros", [centered(&[2, 6]), with_zeros(&[2, 6], 3)], |x| x[0].linear_scan(&x[1], 1))
            .slack(4.0),
    ]
}
