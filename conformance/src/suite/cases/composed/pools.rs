//! Pools over one to three axes.

use numcore::{
    Runtime,
    ops::{PointwiseOps, PoolOps, PoolOptions},
};

use crate::suite::{
    case::{OpCase, case},
    sample::spread,
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let signal = || [spread(&[2, 2, 7], -2.0, 2.0)];
    let image = || [spread(&[1, 2, 5, 4], -2.0, 2.0)];
    let volume = || [spread(&[1, 1, 4, 3, 3], -2.0, 2.0)];
    let cases = vec![
        case("max_pool of a signal", signal(), |x| {
            x[0].max_pool(&PoolOptions { stride: [2], padding: [1], ..PoolOptions::new([3]) })?.square()
        }),
        case("max_pool dilated", image(), |x| {
            let options = PoolOptions { stride: [1, 1], padding: [1, 0], dilation: [2, 3], ..PoolOptions::new([2, 2]) };
            x[0].max_pool(&options)?.square()
        }),
        case("max_pool with a rest", image(), |x| {
            x[0].max_pool(&PoolOptions { padding: [1, 1], ceil_mode: true, ..PoolOptions::new([3, 3]) })?.square()
        }),
        case("max_pool of a volume", volume(), |x| {
            x[0].max_pool(&PoolOptions { stride: [1, 2, 1], padding: [1, 0, 1], ..PoolOptions::new([2; 3]) })?.square()
        }),
        case("max_unpool", image(), |x| {
            let (y, at) = x[0].max_pool_with_indices(&PoolOptions { stride: [1, 2], ..PoolOptions::new([2, 2]) })?;
            y.max_unpool(&at, [5, 4])?.square()
        }),
        case("avg_pool of a signal", signal(), |x| {
            x[0].avg_pool(&PoolOptions { stride: [2], padding: [1], ..PoolOptions::new([3]) })?.square()
        }),
        case("avg_pool without its padding", image(), |x| {
            let options = PoolOptions { padding: [1, 1], count_include_pad: false, ..PoolOptions::new([3, 2]) };
            x[0].avg_pool(&options)?.square()
        }),
        case("avg_pool of a volume with a rest", volume(), |x| {
            let options = PoolOptions { padding: [1, 0, 1], ceil_mode: true, ..PoolOptions::new([3, 2, 2]) };
            x[0].avg_pool(&options)?.square()
        }),
        case("avg_pool with a divisor", image(), |x| {
            x[0].avg_pool(&PoolOptions { divisor: Some(3.0), stride: [1, 2], ..PoolOptions::new([2, 2]) })?.square()
        }),
        case("lp_pool", image(), |x| x[0].lp_pool(3.0, &PoolOptions { stride: [2, 1], ..PoolOptions::new([2, 2]) })),
        case("adaptive_avg_pool of a signal", signal(), |x| x[0].adaptive_avg_pool([3])?.square()),
        case("adaptive_avg_pool of a volume", volume(), |x| x[0].adaptive_avg_pool([3, 2, 1])?.square()),
        case("adaptive_max_pool of a signal", signal(), |x| x[0].adaptive_max_pool([4])?.square()),
        case("adaptive_max_pool of a volume", volume(), |x| x[0].adaptive_max_pool([3, 2, 2])?.square()),
    ];
    cases.into_iter().map(|c| c.slack(8.0)).collect()
}
