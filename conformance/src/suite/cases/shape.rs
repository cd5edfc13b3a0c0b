//! Views and joins. They are linear, so their results are squared to have second derivatives.

use numcore::{
    Runtime,
    ops::{JoinOps, PointwiseOps, ViewOps, cat, stack},
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::centered,
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 30] = [
        ("transpose", |x| x[0].transpose(0, 2)?.square()),
        ("permute", |x| x[0].permute(&[2, 0, 1])?.square()),
        ("reshape", |x| x[0].reshape([4, 6])?.square()),
        ("reshape of a transpose", |x| x[0].transpose(0, 1)?.reshape([6, 4])?.square()),
        ("flatten", |x| x[0].flatten(1, 2)?.square()),
        ("unsqueeze and squeeze", |x| x[0].unsqueeze(1)?.square()?.squeeze(1)),
        ("broadcast_to", |x| x[0].broadcast_to([2, 2, 3, 4])?.square()),
        ("broadcast of a middle axis", |x| x[0].narrow(1, 1, 1)?.broadcast_to([2, 5, 4])?.square()),
        ("narrow", |x| x[0].narrow(2, 1, 2)?.square()),
        ("slice with a step", |x| x[0].slice(2, 1, 2, 2)?.square()),
        ("select", |x| x[0].select(1, 2)?.square()),
        ("split", |x| x[0].split(1, 2)?[1].square()),
        ("chunk", |x| x[0].chunk(2, 2)?[0].square()),
        ("flip", |x| x[0].flip(&[0, 2])?.square()),
        ("unfold", |x| x[0].unfold(2, 2, 1, 1)?.square()),
        ("unfold with step and dilation", |x| x[0].unfold(2, 2, 1, 2)?.square()),
        ("unfold twice", |x| x[0].unfold(1, 2, 1, 1)?.unfold(2, 3, 1, 1)?.square()),
        ("fold", |x| x[0].reshape([2, 3, 2, 2])?.fold(1, 4, 1, 1)?.square()),
        ("fold with a gap", |x| x[0].reshape([3, 4, 2])?.fold(1, 9, 2, 2)?.square()),
        ("embed", |x| x[0].embed(1, 8, 1, 3)?.square()),
        ("roll", |x| x[0].roll(2, 3)?.square()),
        ("roll back", |x| x[0].roll(0, -1)?.square()),
        ("pad with zeros", |x| x[0].pad(&[(0, 1), (2, 0), (1, 1)], 0.0)?.square()),
        ("pad with a value", |x| x[0].pad(&[(1, 0), (0, 0), (0, 2)], 0.5)?.square()),
        ("tril", |x| x[0].tril(0)?.square()),
        ("tril below", |x| x[0].tril(-1)?.square()),
        ("triu above", |x| x[0].triu(1)?.square()),
        ("cat with itself", |x| cat(&[&x[0], &x[0].flip(&[1])?], 1)?.square()),
        ("a view of a view of a view", |x| {
            x[0].t()?.narrow(1, 1, 3)?.flip(&[1])?.slice(1, 0, 2, 2)?.unsqueeze(0)?.square()
        }),
        ("parts that overlap", |x| x[0].narrow(2, 0, 3)?.mul(&x[0].narrow(2, 1, 3)?)),
    ];
    let mut cases: Vec<OpCase<R>> = rows.map(|(name, f)| case(name, [centered(&[2, 3, 4])], f)).into();
    let three = || [centered(&[2, 3]), centered(&[2, 1]), centered(&[2, 4])];
    cases.extend([
        case("cat", three(), |x| cat(&[&x[0], &x[1], &x[2]], 1)?.square()),
        case("cat of one", [centered(&[2, 3])], |x| cat(&[&x[0]], 0)?.square()),
        case("cat with nothing", [centered(&[2, 3]), centered(&[0, 3])], |x| cat(&[&x[1], &x[0]], 0)?.square()),
        case("stack", [centered(&[2, 3]), centered(&[2, 3])], |x| stack(&[&x[0], &x[1]], 1)?.square()),
        case("stack at the end", [centered(&[2, 3]), centered(&[2, 3])], |x| stack(&[&x[0], &x[1]], -1)?.square()),
    ]);
    cases
}
