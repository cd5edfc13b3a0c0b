//! Gathers and their adjoints.

use numcore::{
    Runtime,
    ops::{IndexOps, PointwiseOps},
};

use crate::suite::{
    case::{OpCase, case},
    sample::{centered, index, indices},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("gather 1", [centered(&[3, 4]), index(&[3, 6], 4)], |x| x[0].gather(1, &x[1])?.square()),
        case("gather 0", [centered(&[3, 4]), index(&[5, 4], 3)], |x| x[0].gather(0, &x[1])?.square()),
        case("gather of fewer rows", [centered(&[3, 4]), index(&[2, 5], 4)], |x| x[0].gather(1, &x[1])?.square()),
        case("gather along the middle", [centered(&[2, 3, 2]), index(&[2, 4, 2], 3)], |x| {
            x[0].gather(1, &x[1])?.square()
        }),
        case("scatter_add 1", [centered(&[3, 4]), index(&[3, 6], 4), centered(&[3, 6])], |x| {
            x[0].scatter_add(1, &x[1], &x[2])?.square()
        }),
        case("scatter_add to one place", [centered(&[2, 3]), indices(&[2, 4], &[1; 8]), centered(&[2, 4])], |x| {
            x[0].scatter_add(1, &x[1], &x[2])?.square()
        }),
        case("scatter_add of a part", [centered(&[3, 4]), index(&[2, 3], 3), centered(&[3, 4])], |x| {
            x[0].scatter_add(0, &x[1], &x[2])?.square()
        }),
        case("index_select 0", [centered(&[4, 3]), index(&[6], 4)], |x| x[0].index_select(0, &x[1])?.square()),
        case("index_select -1", [centered(&[2, 2, 4]), index(&[3], 4)], |x| x[0].index_select(-1, &x[1])?.square()),
        case("index_add 0", [centered(&[4, 3]), index(&[5], 4), centered(&[5, 3])], |x| {
            x[0].index_add(0, &x[1], &x[2])?.square()
        }),
        case("index_add 1", [centered(&[2, 4]), index(&[5], 4), centered(&[2, 5])], |x| {
            x[0].index_add(1, &x[1], &x[2])?.square()
        }),
        case("embedding", [centered(&[5, 3]), index(&[2, 4], 5)], |x| x[0].embedding(&x[1])?.square()),
        case("embedding of one", [centered(&[5, 3]), indices(&[], &[4])], |x| x[0].embedding(&x[1])?.square()),
    ]
}
