//! Pools over one to three axes against loops, and PyTorch's rule for the last window with `ceil_mode`.

use autograd::Var;
use numcore::{
    DType,
    ops::{PointwiseOps, PoolOps, PoolOptions, ReduceOps, ViewOps},
};

use crate::common::*;

/// The number of windows, by PyTorch's `pooling_output_shape`.
fn count(size: usize, k: usize, s: usize, p: usize, d: usize, ceil: bool) -> usize {
    let free = (size + 2 * p) as isize - (d * (k - 1) + 1) as isize + if ceil { s as isize - 1 } else { 0 };
    let mut n = (free.div_euclid(s as isize) + 1) as usize;
    if ceil && (n - 1) * s >= size + p {
        n -= 1;
    }
    n
}

/// Coordinates of an element, and its flat position.
type Place = (Vec<usize>, usize);

/// Every element of the window of `out` that is in the image, with its flat position; and how many are in image or
/// padding.
fn window<const N: usize>(o: &PoolOptions<N>, size: &[usize], out: &[usize]) -> (Vec<Place>, usize) {
    let total: usize = o.kernel.iter().product();
    let (mut inside, mut counted) = (Vec::new(), 0);
    for mut k in 0..total {
        let mut at = vec![0isize; N];
        for i in (0..N).rev() {
            let offset = k % o.kernel[i] * o.dilation[i];
            at[i] = (out[i] * o.stride[i] + offset) as isize - o.padding[i] as isize;
            k /= o.kernel[i];
        }
        counted += usize::from((0..N).all(|i| at[i] < (size[i] + o.padding[i]) as isize));
        if (0..N).all(|i| (0..size[i] as isize).contains(&at[i])) {
            let at: Vec<usize> = at.iter().map(|&a| a as usize).collect();
            let flat = at.iter().zip(size).fold(0, |f, (&a, &s)| f * s + a);
            inside.push((at, flat));
        }
    }
    (inside, counted)
}

/// A function of the elements of a window, with their flat positions, and of the number of positions in image or
/// padding.
type OfWindow<'a> = &'a dyn Fn(&[(f64, usize)], usize) -> f64;

fn check<const N: usize>(size: [usize; N], o: PoolOptions<N>) {
    let x = Array::random(&[&[2, 3][..], &size].concat(), 7);
    let out: Vec<usize> =
        (0..N).map(|i| count(size[i], o.kernel[i], o.stride[i], o.padding[i], o.dilation[i], o.ceil_mode)).collect();
    let shape = [&[2, 3][..], &out].concat();
    let pool = |f: OfWindow<'_>| {
        Array::of(&shape, |at| {
            let (inside, counted) = window(&o, &size, &at[2..]);
            let values: Vec<_> =
                inside.iter().map(|(place, flat)| (x.at(&[&at[..2], place].concat()), *flat)).collect();
            f(&values, counted)
        })
    };
    let top = |v: &[(f64, usize)]| v.iter().fold((f64::NEG_INFINITY, 0), |m, &e| if e.0 > m.0 { e } else { m });
    let t = x.tensor();
    let (values, places) = t.max_pool_with_indices(&o).unwrap();
    pool(&|v, _| top(v).0).is(&format!("max {o:?}"), &values, 0.0);
    pool(&|v, _| top(v).0).is(&format!("max {o:?}"), &t.max_pool(&o).unwrap(), 0.0);
    pool(&|v, _| top(v).1 as f64).is(&format!("places {o:?}"), &places, 0.0);
    let sum = |v: &[(f64, usize)]| v.iter().map(|e| e.0).sum::<f64>();
    pool(&|v, n| sum(v) / n as f64).is(&format!("mean {o:?}"), &t.avg_pool(&o).unwrap(), 1e-14);
    let apart = PoolOptions { count_include_pad: false, ..o };
    pool(&|v, _| sum(v) / v.len() as f64).is(&format!("mean {apart:?}"), &t.avg_pool(&apart).unwrap(), 1e-14);
    let by = PoolOptions { divisor: Some(5.0), ..o };
    pool(&|v, _| sum(v) / 5.0).is(&format!("mean {by:?}"), &t.avg_pool(&by).unwrap(), 1e-14);
    let power = |v: &[(f64, usize)]| v.iter().map(|e| e.0.abs().powf(3.0)).sum::<f64>().powf(1.0 / 3.0);
    pool(&|v, _| power(v)).is(&format!("lp {o:?}"), &t.lp_pool(3.0, &o).unwrap(), 1e-13);
}

#[test]
fn windows_of_every_geometry() {
    for ceil_mode in [false, true] {
        let one =
            |k, s, p, d| PoolOptions { stride: [s], padding: [p], dilation: [d], ceil_mode, ..PoolOptions::new([k]) };
        for o in [one(3, 2, 1, 1), one(2, 3, 0, 1), one(3, 1, 1, 2), one(2, 2, 1, 1), one(1, 3, 0, 1)] {
            check([7], o);
            check([8], o);
        }
        check([5, 6], PoolOptions { ceil_mode, ..PoolOptions::new([2, 4]) });
        check([6, 7], PoolOptions { stride: [2, 3], padding: [1, 1], ceil_mode, ..PoolOptions::new([3, 2]) });
        check(
            [6, 7],
            PoolOptions { stride: [1, 2], padding: [1, 0], dilation: [2, 3], ceil_mode, ..PoolOptions::new([2, 2]) },
        );
        check(
            [4, 5, 3],
            PoolOptions { stride: [2, 1, 2], padding: [1, 0, 1], ceil_mode, ..PoolOptions::new([3, 2, 2]) },
        );
        check([5, 4, 4], PoolOptions { dilation: [2, 1, 1], stride: [1; 3], ceil_mode, ..PoolOptions::new([2; 3]) });
    }
}

#[test]
fn regions_of_adaptive_pools() {
    fn check<const N: usize>(size: [usize; N], to: [usize; N]) {
        let x = Array::random(&[&[2][..], &size].concat(), 8);
        let shape = [&[2][..], &to].concat();
        let region = |at: &[usize]| {
            let o = PoolOptions { kernel: size, stride: [1; N], ..PoolOptions::new([1; N]) };
            let (all, _) = window(&o, &size, &[0; N]);
            let inside = |p: &[usize]| {
                (0..N).all(|i| (at[i] * size[i] / to[i]..((at[i] + 1) * size[i]).div_ceil(to[i])).contains(&p[i]))
            };
            all.into_iter().filter(|(p, _)| inside(p)).collect::<Vec<_>>()
        };
        let value = |b: usize, p: &[usize]| x.at(&[&[b][..], p].concat());
        let mean = Array::of(&shape, |at| {
            let r = region(&at[1..]);
            r.iter().map(|(p, _)| value(at[0], p)).sum::<f64>() / r.len() as f64
        });
        mean.is(&format!("mean {size:?} {to:?}"), &x.tensor().adaptive_avg_pool(to).unwrap(), 1e-14);
        let top = |at: &[usize]| {
            let r = region(&at[1..]);
            r.iter()
                .fold((f64::NEG_INFINITY, 0), |m, (p, f)| if value(at[0], p) > m.0 { (value(at[0], p), *f) } else { m })
        };
        let (values, places) = x.tensor().adaptive_max_pool_with_indices(to).unwrap();
        Array::of(&shape, |at| top(at).0).is("max", &values, 0.0);
        Array::of(&shape, |at| top(at).1 as f64).is("places", &places, 0.0);
    }
    for (size, to) in [(7, 3), (6, 3), (5, 5), (3, 7), (8, 1)] {
        check([size], [to]);
    }
    check([5, 7], [2, 3]);
    check([4, 3, 5], [3, 2, 2]);
}

/// NaN wins; where everything is as low as the padding, the position is still one of the input's; of equal elements the
/// first gets the gradient.
#[test]
fn what_wins() {
    let o = PoolOptions { stride: [1], padding: [1], ..PoolOptions::new([3]) };
    let low = row(&[f64::NEG_INFINITY; 3]).reshape([1, 3]).unwrap();
    let (values, places) = low.max_pool_with_indices(&o).unwrap();
    holds(&values, &[1, 3], &[f64::NEG_INFINITY; 3]);
    holds(&places, &[1, 3], &[0.0, 0.0, 1.0]);
    let rows = PoolOptions { stride: [1, 1], padding: [1, 0], ..PoolOptions::new([2, 1]) };
    let image = row(&[f64::NEG_INFINITY; 6]).reshape([1, 2, 3]).unwrap();
    let places = image.max_pool_with_indices(&rows).unwrap().1;
    holds(&places, &[1, 3, 3], &[0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let nan = row(&[1.0, f64::NAN, 3.0, 4.0]).reshape([1, 4]).unwrap();
    let (values, places) = nan.max_pool_with_indices(&o).unwrap();
    assert!(values.to_f64s().unwrap()[..3].iter().all(|v| v.is_nan()));
    holds(&places, &[1, 4], &[1.0, 1.0, 1.0, 3.0]);
    for dtype in [DType::U8, DType::I32, DType::I64, DType::U32, DType::F16, DType::BF16] {
        let x = row(&[0.0, 0.0, 5.0, 2.0]).to_dtype(dtype).unwrap().reshape([1, 4]).unwrap();
        let (values, places) = x.max_pool_with_indices(&o).unwrap();
        assert_eq!(values.dtype(), dtype);
        holds(&values, &[1, 4], &[0.0, 5.0, 5.0, 5.0]);
        holds(&places, &[1, 4], &[0.0, 2.0, 2.0, 2.0]);
        holds(&x.max_pool(&o).unwrap(), &[1, 4], &[0.0, 5.0, 5.0, 5.0]);
    }
    let equal = Var::leaf("x", row(&[2.0, 2.0, 2.0, 1.0]).reshape([1, 4]).unwrap()).unwrap();
    let sum = equal.max_pool(&PoolOptions { dilation: [2], stride: [1], ..PoolOptions::new([2]) }).unwrap();
    let g = sum.sum_all().unwrap().backward().unwrap();
    holds(g.of(&equal).unwrap(), &[1, 4], &[1.0, 1.0, 0.0, 0.0]);
}

/// PyTorch's documentation of `MaxUnpool1d`.
#[test]
fn maxima_put_back() {
    let x = row(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).reshape([1, 1, 8]).unwrap();
    let (y, at) = x.max_pool_with_indices(&PoolOptions::new([2])).unwrap();
    holds(&y.max_unpool(&at, [8]).unwrap(), &[1, 1, 8], &[0.0, 2.0, 0.0, 4.0, 0.0, 6.0, 0.0, 8.0]);
    holds(&y.max_unpool(&at, [9]).unwrap(), &[1, 1, 9], &[0.0, 2.0, 0.0, 4.0, 0.0, 6.0, 0.0, 8.0, 0.0]);
}

/// PyTorch's formula for the number of windows also holds where a window is larger than the input.
#[test]
fn one_window_that_is_larger_than_the_input() {
    let x = row(&[-3.0]).reshape([1, 1, 1]).unwrap();
    let o = PoolOptions { ceil_mode: true, ..PoolOptions::new([2]) };
    holds(&x.max_pool(&o).unwrap(), &[1, 1, 1], &[-3.0]);
    holds(&x.max_pool_with_indices(&o).unwrap().1, &[1, 1, 1], &[0.0]);
    holds(&x.avg_pool(&o).unwrap(), &[1, 1, 1], &[-3.0]);
    holds(&x.lp_pool(2.0, &o).unwrap(), &[1, 1, 1], &[3.0]);
    check([3], PoolOptions { stride: [2], ceil_mode: true, ..PoolOptions::new([4]) });
    check([1, 5], PoolOptions { stride: [3, 2], ceil_mode: true, ..PoolOptions::new([3, 6]) });
    check([2], PoolOptions { stride: [3], padding: [1], dilation: [2], ceil_mode: true, ..PoolOptions::new([3]) });
    refused(
        x.max_pool(&PoolOptions { stride: [2], ceil_mode: true, ..PoolOptions::new([4]) }),
        &["max_pool", "do not fit"],
    );
}

/// Roots of sums are flat at 0 on one side alone: there the gradient is 0 by definition, for every power.
#[test]
fn power_means_of_zeros_have_a_gradient() {
    for p in [0.5, 1.0, 1.5, 2.0, 3.0] {
        let x = Var::leaf("x", row(&[0.0, 4.0, 0.0, 0.0]).reshape([1, 1, 4]).unwrap()).unwrap();
        let y = x.lp_pool(p, &PoolOptions::new([2])).unwrap();
        holds(&y.value().unwrap(), &[1, 1, 2], &[4.0, 0.0]);
        let g = y.sum_all().unwrap().backward().unwrap();
        holds(g.of(&x).unwrap(), &[1, 1, 4], &[0.0, 1.0, 0.0, 0.0]);
    }
}

/// The elements of a window are found in time that does not depend on the size of the padding.
#[test]
fn windows_that_are_almost_all_padding() {
    let x = row(&[1.0, 5.0, 2.0, -1.0, 0.0]).reshape([1, 1, 5]).unwrap();
    let far = PoolOptions { padding: [1 << 39], ..PoolOptions::new([1 << 40]) };
    holds(&x.max_pool(&far).unwrap(), &[1, 1, 1], &[5.0]);
    let planes = PoolOptions { padding: [1 << 39; 2], ..PoolOptions::new([1 << 40; 2]) };
    holds(&x.max_pool(&planes).unwrap(), &[1, 1, 1], &[5.0]);
    refused(x.avg_pool(&far), &["memory"]);
    refused(x.max_pool_with_indices(&far), &["memory"]);
    let apart = PoolOptions { padding: [1 << 39], dilation: [2], stride: [1], ..PoolOptions::new([1 << 40]) };
    refused(x.max_pool(&apart), &["do not fit"]);
    let endless = PoolOptions { padding: [1 << 60], ..PoolOptions::new([1 << 61]) };
    refused(x.avg_pool(&endless), &["memory"]);
}
