//! Cases of matrix products.

use numcore::{
    Runtime,
    ops::{MatmulOps, PointwiseOps, ViewOps, einsum},
};

use crate::suite::{
    case::{CaseFn, OpCase, case},
    sample::centered,
};

/// An equation, the shapes of its operands, and its call.
type Sum<'a, R> = (&'a str, &'a [usize], &'a [usize], CaseFn<R>);

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[3, 4], &[4, 2]),
        (&[2, 3, 4], &[4, 2]),
        (&[2, 3, 4], &[2, 4, 2]),
        (&[2, 1, 3, 2], &[3, 2, 2]),
        (&[3, 2], &[2, 2, 3]),
        (&[4], &[4]),
        (&[3, 4], &[4]),
        (&[4], &[4, 3]),
        (&[1, 1], &[1, 5]),
    ];
    let product: CaseFn<R> = |x| x[0].matmul(&x[1]);
    let mut cases: Vec<OpCase<R>> = shapes
        .map(|(a, b)| case(&format!("matmul {a:?} {b:?}"), [centered(a), centered(b)], product).slack(4.0))
        .into();
    let einsums: [Sum<'_, R>; 7] = [
        ("bhqd,bhkd->bhqk", &[1, 2, 3, 2], &[1, 2, 2, 2], |x| einsum("bhqd,bhkd->bhqk", &[&x[0], &x[1]])),
        ("bij,jk->bik", &[2, 2, 3], &[3, 2], |x| einsum("bij,jk->bik", &[&x[0], &x[1]])),
        ("ij,ij->", &[3, 2], &[3, 2], |x| einsum("ij,ij->", &[&x[0], &x[1]])),
        ("i,j->ji", &[3], &[4], |x| einsum("i,j->ji", &[&x[0], &x[1]])),
        ("ij,kj->ik", &[3, 2], &[4, 2], |x| einsum("ij, kj -> ik", &[&x[0], &x[1]])),
        ("ijk,jl->li", &[2, 3, 2], &[3, 2], |x| einsum("ijk,jl->li", &[&x[0], &x[1]])),
        ("bi,bi->b", &[2, 3], &[2, 3], |x| einsum("bi,bi->b", &[&x[0], &x[1]])),
    ];
    let forms: [Sum<'_, R>; 8] = [
        ("implicit kj,ji", &[2, 3], &[3, 2], |x| einsum("kj,ji", &[&x[0], &x[1]])),
        ("implicit i,i", &[3], &[3], |x| einsum("i,i", &[&x[0], &x[1]])),
        ("ii,ij->j", &[3, 3], &[3, 2], |x| einsum("ii,ij->j", &[&x[0], &x[1]])),
        ("iji,k->jik", &[2, 3, 2], &[2], |x| einsum("iji,k->jik", &[&x[0], &x[1]])),
        ("...ij,...jk->...ik", &[2, 1, 2, 3], &[2, 3, 2], |x| einsum("...ij, ...jk -> ...ik", &[&x[0], &x[1]])),
        ("implicit ...ij,j", &[2, 2, 3], &[3], |x| einsum("...ij,j", &[&x[0], &x[1]])),
        ("i...,i...->...", &[3, 2], &[3, 1], |x| einsum("i...,i...->...", &[&x[0], &x[1]])),
        ("...i,...i->i", &[2, 3], &[2, 3], |x| einsum("...i,...i->i", &[&x[0], &x[1]])),
    ];
    cases.extend(
        einsums
            .into_iter()
            .chain(forms)
            .map(|(name, a, b, f)| case(&format!("einsum {name}"), [centered(a), centered(b)], f).slack(4.0)),
    );
    cases.extend([
        case("a transposed", [centered(&[4, 3]), centered(&[4, 2])], |x| x[0].t()?.matmul(&x[1])).slack(4.0),
        case("b transposed", [centered(&[3, 4]), centered(&[2, 4])], |x| x[0].matmul(&x[1].t()?)).slack(4.0),
        case("both transposed", [centered(&[4, 3]), centered(&[2, 4])], |x| x[0].t()?.matmul(&x[1].t()?)).slack(4.0),
        case("a times a transposed", [centered(&[3, 4])], |x| x[0].matmul(&x[0].t()?)).slack(4.0),
        case("linear", [centered(&[2, 2, 3]), centered(&[4, 3]), centered(&[4])], |x| x[0].linear(&x[1], Some(&x[2])))
            .slack(4.0),
        case("linear of rows", [centered(&[3, 2]), centered(&[4, 2]), centered(&[4])], |x| {
            x[0].linear(&x[1], Some(&x[2]))
        })
        .slack(4.0),
        case("linear of a vector", [centered(&[3]), centered(&[4, 3]), centered(&[4])], |x| {
            x[0].linear(&x[1], Some(&x[2]))
        })
        .slack(4.0),
        case("linear of transposed rows", [centered(&[3, 2, 2]), centered(&[3, 4]), centered(&[4])], |x| {
            x[0].transpose(0, 2)?.linear(&x[1].t()?, Some(&x[2]))
        })
        .slack(4.0),
        case("linear onto", [centered(&[2, 2, 3]), centered(&[4, 3]), centered(&[4]), centered(&[2, 2, 4])], |x| {
            x[0].linear_onto(&x[1], Some(&x[2]), &x[3])
        })
        .slack(4.0),
        case("linear without bias onto itself", [centered(&[3, 2]), centered(&[2, 2])], |x| {
            x[0].linear_onto(&x[1], None, &x[0])
        })
        .slack(4.0),
        case("linear without bias", [centered(&[2, 3]), centered(&[4, 3])], |x| x[0].linear(&x[1], None)).slack(4.0),
        case("two layers", [centered(&[2, 3]), centered(&[4, 3]), centered(&[2, 4])], |x| {
            x[0].linear(&x[1], None)?.tanh()?.linear(&x[2], None)
        })
        .slack(8.0),
        case("einsum of three", [centered(&[2, 3]), centered(&[3, 2]), centered(&[2, 2])], |x| {
            einsum("ij,jk,kl->il", &[&x[0], &x[1], &x[2]])
        })
        .slack(8.0),
        case("einsum of a diagonal", [centered(&[2, 3, 3])], |x| einsum("bii->bi", &[&x[0].square()?])).slack(4.0),
        case("einsum of traces", [centered(&[2, 3, 3])], |x| einsum("...ii->...", &[&x[0].square()?])).slack(4.0),
        case("einsum of one, implicit", [centered(&[2, 3])], |x| einsum("ba", &[&x[0].square()?])).slack(4.0),
        case("einsum of one", [centered(&[2, 3, 2])], |x| einsum("ijk->kj", &[&x[0].square()?])).slack(4.0),
    ]);
    cases
}
