//! Padding by modes, repetition, diagonals, outer and Kronecker products, distances.

use numcore::{
    Runtime, Tensor,
    ops::{Apply, DiagonalOps, DistanceOps, PadMode, PadOps, PointwiseOps, RepeatOps, SortOps, ViewOps, meshgrid},
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::{centered, spread},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let rows: [(&str, CaseFn<R>); 22] = [
        ("pad_with reflect", |x| x[0].pad_with(&[(0, 0), (2, 1), (0, 3)], PadMode::Reflect)?.square()),
        ("pad_with replicate", |x| x[0].pad_with(&[(1, 0), (0, 0), (3, 5)], PadMode::Replicate)?.square()),
        ("pad_with circular", |x| x[0].pad_with(&[(0, 2), (3, 0), (1, 2)], PadMode::Circular)?.square()),
        ("pad_with a constant and a crop", |x| {
            x[0].pad_with(&[(0, 0), (-1, 2), (1, -2)], PadMode::Constant(0.5))?.square()
        }),
        ("pad_with circular and a crop", |x| x[0].pad_with(&[(0, 0), (2, -1), (0, 0)], PadMode::Circular)?.square()),
        ("repeat", |x| x[0].repeat(&[2, 1, 3])?.square()),
        ("repeat with a new axis", |x| x[0].repeat(&[2, 1, 2, 1])?.square()),
        ("repeat_interleave", |x| x[0].repeat_interleave(3, 1)?.square()),
        ("repeat_interleave_each", |x| x[0].repeat_interleave_each(&[2, 0, 1, 3], -1)?.square()),
        ("roll_axes", |x| x[0].roll_axes(&[1, -2], &[0, 2])?.square()),
        ("rot90", |x| x[0].rot90(1, [1, 2])?.square()),
        ("rot90 thrice", |x| x[0].rot90(-1, [0, 2])?.square()),
        ("diff", |x| x[0].diff(1, 1)?.square()),
        ("diff twice", |x| x[0].diff(2, -1)?.square()),
        ("trapezoid", |x| x[0].trapezoid(0.25, 2)?.square()),
        ("diagonal", |x| x[0].diagonal(0)?.square()),
        ("diagonal below", |x| x[0].diagonal(-1)?.square()),
        ("diagonal above", |x| x[0].diagonal(2)?.square()),
        ("diag_embed", |x| x[0].diag_embed(0)?.square()),
        ("diag_embed above", |x| x[0].diag_embed(1)?.square()),
        ("diag_embed below", |x| x[0].diag_embed(-2)?.square()),
        ("trace", |x| x[0].trace()?.square()),
    ];
    let mut cases: Vec<OpCase<R>> = rows.map(|(name, f)| case(name, [centered(&[2, 3, 4])], f)).into();
    let points = || [spread(&[2, 3, 2], -2.0, 2.0), spread(&[4, 2], -1.9, 2.1)];
    cases.extend([
        case("meshgrid", [centered(&[3]), centered(&[4])], |x| {
            let grid = meshgrid(&[&x[0], &x[1]])?;
            grid[0].mul(&grid[1].square()?)
        }),
        case("topk_smallest", [spread(&[3, 5], -2.0, 2.0)], |x| x[0].topk_smallest(2, 1)?.0.square()),
        case("outer", [centered(&[3]), centered(&[4])], |x| x[0].outer(&x[1])),
        case("kron", [centered(&[2, 3]), centered(&[3, 2])], |x| x[0].kron(&x[1])),
        case("kron of unequal ranks", [centered(&[2, 2, 2]), centered(&[3])], |x| x[0].kron(&x[1])),
        case("cross", [centered(&[2, 3]), centered(&[2, 3])], |x| x[0].cross(&x[1], -1)).slack(2.0),
        case("cross of one with many", [centered(&[3, 2]), centered(&[3, 1])], |x| x[0].cross(&x[1], 0)).slack(2.0),
        case("cdist", points(), |x| x[0].cdist(&x[1], 2.0)).slack(4.0),
        case("cdist 1", points(), |x| x[0].cdist(&x[1], 1.0)?.square()).slack(4.0),
        case("cdist 3", points(), |x| x[0].cdist(&x[1], 3.0)).slack(4.0),
        case("cdist of the largest", points(), |x| x[0].cdist(&x[1], f64::INFINITY)?.square()).slack(4.0),
        case("cdist to itself", [centered(&[3, 2])], |x| x[0].cdist(&x[0], 2.0)?.square()).slack(4.0),
        case("a tile of a halo", [centered(&[3, 4])], |x| {
            let one = Tensor::ones(x[0].runtime(), [3, 1], x[0].dtype())?;
            x[0].pad_with(&[(0, 0), (1, 1)], PadMode::Circular)?.narrow(1, 0, 4)?.mul(&Apply::constant(one))?.square()
        }),
    ]);
    cases
}
