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
        ("sum of all", |x| x[0].sum_all()),
        ("sum 0", |x| x[0].sum(&[0])),
        ("sum 1 kept", |x| x[0].sum_keepdim(&[1])),
        ("sum -1, 0", |x| x[0].sum(&[-1, 0])),
        ("mean of all", |x| x[0].mean_all()),
        ("mean 1", |x| x[0].mean(&[1])),
        ("mean 0, 2", |x| x[0].mean(&[0, 2])),
        ("logsumexp of all", |x| x[0].logsumexp(&[0, 1, 2])),
        ("logsumexp 1", |x| x[0].logsumexp(&[1])),
        ("logsumexp 0, 2 kept", |x| x[0].logsumexp_keepdim(&[0, 2])),
        ("var of all", |x| x[0].var_all(1)),
        ("var 1 biased", |x| x[0].var(&[1], 0)),
        ("var 0, 2", |x| x[0].var_keepdim(&[0, 2], 1)),
        ("std 2", |x| x[0].std(&[2], 1)),
        ("std 0, 1 biased", |x| x[0].std(&[0, 1], 0)),
        ("norm of all", |x| x[0].norm_all()),
        ("norm 1", |x| x[0].norm_keepdim(&[1])),
        ("prod of all", |x| x[0].prod_all()),
        ("prod 1", |x| x[0].prod(&[1])),
        ("prod 2, 0", |x| x[0].prod_keepdim(&[2, 0])),
    ];
    let mut cases: Vec<OpCase<R>> =
        rows.map(|(name, f)| case(name, [spread(&[2, 3, 4], -1.5, 1.7)], f).slack(4.0)).into();
    cases.extend([
        case("prod with a zero in each", [with_zeros(&[3, 4], 4)], |x| x[0].prod(&[1])),
        case("prod with several zeros", [with_zeros(&[2, 6], 3)], |x| x[0].prod(&[1])),
        case("prod of all with one zero", [with_zeros(&[2, 3], 6)], |x| x[0].prod_all()),
        case("sum of a scalar", [centered(&[])], |x| x[0].mul(&x[0])?.sum_all()),
        case("sum of a product", [centered(&[3, 4]), centered(&[4])], |x| x[0].mul(&x[1])?.sum(&[0])),
        case("logsumexp of large values", [real(&[3, 4], 700.0, 760.0)], |x| x[0].logsumexp(&[1])).slack(2.0),
        case("a ratio of sums", [real(&[3, 4], 0.5, 2.0)], |x| x[0].sum(&[0])?.div(&x[0].square()?.sum(&[0])?)),
    ]);
    cases
}

fn extremes<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 11] = [
        ("amax of all", |x| x[0].amax_all()),
        ("amax 0", |x| x[0].amax(&[0])),
        ("amax 1, 2 kept", |x| x[0].amax_keepdim(&[1, 2])),
        ("amin of all", |x| x[0].amin_keepdim(&[0, 1, 2])),
        ("amin 2", |x| x[0].amin(&[2])),
        ("sort 0", |x| Ok(x[0].sort(0, false)?.0)),
        ("sort 2 descending", |x| Ok(x[0].sort(2, true)?.0)),
        ("topk 1", |x| Ok(x[0].topk(2, 1)?.0)),
        ("topk of all of them", |x| Ok(x[0].topk(4, -1)?.0)),
        ("topk_smallest", |x| Ok(x[0].topk_smallest(2, 1)?.0)),
        ("median of three", |x| numcore::ops::ViewOps::select(&x[0].sort(1, false)?.0, 1, 1)),
    ];
    // Squared afterwards, so that there is a second derivative.
    let mut cases: Vec<OpCase<R>> = rows.map(|(name, f)| case(name, [spread(&[2, 3, 4], -2.0, 2.0)], f).once()).into();
    cases.push(case("squares of the largest", [spread(&[3, 5], -2.0, 2.0)], |x| x[0].amax(&[1])?.square()));
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
