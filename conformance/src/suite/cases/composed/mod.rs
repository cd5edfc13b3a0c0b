//! Composed operations.

mod arrange;
mod fourier;
mod images;
mod pools;
mod scatter;

use numcore::Runtime;

use crate::suite::case::OpCase;

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let families: [fn() -> Vec<OpCase<R>>; 5] =
        [arrange::cases, fourier::cases, images::cases, pools::cases, scatter::cases];
    families.iter().flat_map(|f| f()).collect()
}
