//! Op cases by family. Inputs avoid points where a derivative jumps.

mod composed;
mod fused;
mod index;
mod linear_cross_entropy;
mod matmul;
mod pointwise;
mod reduce;
mod shape;
mod windows;

use numcore::Runtime;

use super::case::OpCase;

/// Every case of every family.
pub(crate) fn all<R: Runtime>() -> Vec<OpCase<R>> {
    let families: [fn() -> Vec<OpCase<R>>; 9] = [
        pointwise::cases,
        reduce::cases,
        shape::cases,
        index::cases,
        matmul::cases,
        fused::cases,
        linear_cross_entropy::cases,
        windows::cases,
        composed::cases,
    ];
    families.iter().flat_map(|f| f()).collect()
}
