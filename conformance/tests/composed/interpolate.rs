//! Resizing: PyTorch's documented values, and its formulas in loops over all axes at once.

use numcore::ops::{
    Interpolate, InterpolateOps,
    Interpolation::{self, *},
    PoolOps, Resize, ViewOps,
};

use crate::common::*;

fn to(x: &T, to: Resize<'_>, mode: Interpolation, align_corners: bool) -> T {
    x.interpolate(to, Interpolate { mode, align_corners, antialias: false }).unwrap()
}

/// The examples of `torch.nn.Upsample`.
#[test]
fn documented_examples() {
    let x = row(&[1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 2, 2]).unwrap();
    let twice = Resize::Scale(&[2.0, 2.0]);
    let nearest = [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 3.0, 3.0, 4.0, 4.0];
    holds(&to(&x, twice, Nearest, false), &[1, 1, 4, 4], &nearest);
    let edges = [1.0, 1.25, 1.75, 2.0, 1.5, 1.75, 2.25, 2.5, 2.5, 2.75, 3.25, 3.5, 3.0, 3.25, 3.75, 4.0];
    holds(&to(&x, twice, Linear, false), &[1, 1, 4, 4], &edges);
    let third = 1.0 / 3.0;
    let corners: Vec<f64> = (0..16).map(|k| 1.0 + (k % 4) as f64 * third + (k / 4) as f64 * 2.0 * third).collect();
    holds(&to(&x, twice, Linear, true), &[1, 1, 4, 4], &corners);
    let x = row(&[1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]).reshape([1, 1, 3, 3]).unwrap();
    let y = to(&x, twice, Linear, false).to_f64s().unwrap();
    assert_eq!(y[..12], [1.0, 1.25, 1.75, 1.5, 0.5, 0.0, 1.5, 1.75, 2.25, 1.875, 0.625, 0.0]);
    let y = to(&x, twice, Linear, true).to_f64s().unwrap();
    holds(&row(&y[..6]), &[6], &[1.0, 1.4, 1.8, 1.6, 0.8, 0.0]);
}

fn cubic(x: f64, a: f64) -> f64 {
    match x.abs() {
        x if x <= 1.0 => (a + 2.0) * x.powi(3) - (a + 3.0) * x.powi(2) + 1.0,
        x if x < 2.0 => a * x.powi(3) - 5.0 * a * x.powi(2) + 8.0 * a * x - 4.0 * a,
        _ => 0.0,
    }
}

/// The weight of input `k` in output `i` along one axis, summed over everything that is clamped to `k`.
fn weight(mode: Interpolation, corners: bool, n: usize, m: usize, i: usize, k: usize) -> f64 {
    let place = match corners {
        true if m > 1 => i as f64 * (n - 1) as f64 / (m - 1) as f64,
        true => 0.0,
        false => (i as f64 + 0.5) * n as f64 / m as f64 - 0.5,
    };
    let reach = -3..n as isize + 3;
    let own = |j: &isize| (*j).clamp(0, n as isize - 1) as usize == k;
    match mode {
        Linear => reach.filter(own).map(|j| (1.0 - (place.max(0.0) - j as f64).abs()).max(0.0)).sum(),
        Cubic => reach.filter(own).map(|j| cubic(place - j as f64, -0.75)).sum(),
        Nearest => f64::from(u8::from((i * n / m) == k)),
        NearestExact => f64::from(u8::from(((2 * i + 1) * n / (2 * m)) == k)),
        Area => {
            let (from, to) = (i * n / m, ((i + 1) * n).div_ceil(m));
            if (from..to).contains(&k) { 1.0 / (to - from) as f64 } else { 0.0 }
        }
    }
}

#[test]
fn every_mode_is_its_formula() {
    let x = Array::random(&[2, 1, 4, 5], 3);
    for (mode, corners) in [
        (Nearest, false),
        (NearestExact, false),
        (Linear, false),
        (Linear, true),
        (Cubic, false),
        (Cubic, true),
        (Area, false),
    ] {
        for size in [[4, 5], [8, 10], [2, 3], [7, 1], [1, 9], [3, 4]] {
            let want = Array::of(&[2, 1, size[0], size[1]], |at| {
                let mut sum = 0.0;
                for r in 0..4 {
                    for c in 0..5 {
                        let w =
                            weight(mode, corners, 4, size[0], at[2], r) * weight(mode, corners, 5, size[1], at[3], c);
                        sum += w * x.at(&[at[0], 0, r, c]);
                    }
                }
                sum
            });
            let got = to(&x.tensor(), Resize::Size(&size), mode, corners);
            want.is(&format!("{mode:?} {corners} {size:?}"), &got, 1e-13);
        }
    }
    // Sizes whose ratio, as an `f64`, is a little less than the exact ratio.
    for (mode, n, m) in [
        (Nearest, 30, 22),
        (Nearest, 26, 46),
        (Nearest, 2, 98),
        (NearestExact, 30, 11),
        (Nearest, 49, 7),
        (NearestExact, 147, 49),
    ] {
        let line: Vec<f64> = (0..n).map(f64::from).collect();
        let want: Vec<f64> =
            (0..m).map(|i| f64::from(if mode == Nearest { i * n / m } else { (2 * i + 1) * n / (2 * m) })).collect();
        let x = row(&line).reshape([1, 1, n as usize]).unwrap();
        let got = to(&x, Resize::Size(&[m as usize]), mode, false);
        assert_eq!(got.to_f64s().unwrap(), want, "{mode:?} {n} to {m}");
    }
    // A volume, and an area as the adaptive mean it is.
    let x = Array::random(&[1, 2, 3, 4, 2], 4).tensor();
    let same = to(&x, Resize::Size(&[2, 5, 1]), Area, false);
    Array { shape: vec![1, 2, 2, 5, 1], v: x.adaptive_avg_pool([2, 5, 1]).unwrap().to_f64s().unwrap() }
        .is("area", &same, 1e-14);
}

/// A filter is as wide as the downscaling factor: its weights are those of a stretched kernel, normalized.
#[test]
fn shrinking_with_a_filter() {
    let x = Array::random(&[1, 1, 9], 5);
    for (mode, support) in [(Linear, 1.0), (Cubic, 2.0)] {
        for m in [2usize, 4, 6, 9, 13] {
            let step = 9.0 / m as f64;
            let width = step.max(1.0);
            let want = Array::of(&[1, 1, m], |at| {
                let center = (at[2] as f64 + 0.5) * step;
                let w = |k: usize| {
                    let d = (k as f64 + 0.5 - center) / width;
                    let inside = ((k as f64 + 0.5) - center).abs() < support * width + 0.5;
                    if !inside {
                        0.0
                    } else if mode == Linear {
                        (1.0 - d.abs()).max(0.0)
                    } else {
                        cubic(d, -0.5)
                    }
                };
                (0..9).map(|k| w(k) * x.v[k]).sum::<f64>() / (0..9).map(w).sum::<f64>()
            });
            let options = Interpolate { mode, align_corners: false, antialias: true };
            want.is(&format!("{mode:?} {m}"), &x.tensor().interpolate(Resize::Size(&[m]), options).unwrap(), 1e-13);
        }
    }
}

/// Values of PyTorch 2.15: an infinite element of weight 0 gives NaN. What only pads a row of weights counts nothing.
#[test]
fn infinities_are_multiplied_by_weights_of_zero() {
    const I: f64 = f64::INFINITY;
    const N: f64 = f64::NAN;
    let x = row(&[1.0, I, 3.0, 4.0]).reshape([1, 1, 4]).unwrap();
    let end = row(&[1.0, 2.0, 3.0, I]).reshape([1, 1, 4]).unwrap();
    let filtered = Interpolate { mode: Linear, align_corners: false, antialias: true };
    for (y, due) in [
        (to(&x, Resize::Size(&[8]), Linear, false), vec![N, I, I, I, I, 3.25, 3.75, 4.0]),
        (to(&x, Resize::Size(&[2]), Linear, true), vec![N, 4.0]),
        (to(&x, Resize::Size(&[2]), Linear, false), vec![I, 3.5]),
        (to(&x, Resize::Size(&[7]), Linear, true), vec![N, I, I, I, 3.0, 3.5, 4.0]),
        (to(&end, Resize::Size(&[8]), Linear, false), vec![1.0, 1.25, 1.75, 2.25, 2.75, I, I, I]),
        (to(&end, Resize::Size(&[7]), Linear, true), vec![1.0, 1.5, 2.0, 2.5, N, I, N]),
        (to(&end, Resize::Size(&[3]), Area, false), vec![1.5, 2.5, I]),
        (to(&end, Resize::Size(&[5]), Nearest, false), vec![1.0, 1.0, 2.0, 3.0, I]),
        (end.interpolate(Resize::Size(&[3]), filtered).unwrap(), vec![1.3, 2.5, I]),
        // An axis whose size stays is left alone, which PyTorch multiplies too.
        (to(&x, Resize::Size(&[4]), Linear, false), vec![1.0, I, 3.0, 4.0]),
    ] {
        holds(&y, &[1, 1, due.len()], &due);
    }
}

/// The factor positions the new elements, not the ratio of the sizes, which differs where a size was rounded.
#[test]
fn a_factor_is_used_as_given() {
    let x = row(&[0.0, 1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 5]).unwrap();
    let y = to(&x, Resize::Scale(&[0.5]), Linear, false);
    holds(&y, &[1, 1, 2], &[0.5, 2.5]);
    holds(&to(&x, Resize::Size(&[2]), Linear, false), &[1, 1, 2], &[0.75, 3.25]);
    // Every element 49 times, though 1 / 49 times 49 is less than 1.
    let each: Vec<f64> = (0..5 * 49).map(|i| f64::from(i / 49)).collect();
    holds(&to(&x, Resize::Scale(&[49.0]), Nearest, false), &[1, 1, 5 * 49], &each);
}

#[test]
fn pixels_and_channels() {
    let x = Array::random(&[2, 8, 3, 2], 6);
    let want =
        Array::of(&[2, 2, 6, 4], |at| x.at(&[at[0], at[1] * 4 + at[2] % 2 * 2 + at[3] % 2, at[2] / 2, at[3] / 2]));
    let y = x.tensor().pixel_shuffle(2).unwrap();
    want.is("pixel_shuffle", &y, 0.0);
    x.is("there and back", &y.pixel_unshuffle(2).unwrap(), 0.0);
    let flipped = x.tensor().flip(&[0, 1, 2, 3]).unwrap();
    Array { shape: want.shape.clone(), v: want.v.iter().rev().copied().collect() }.is(
        "of a view",
        &flipped.pixel_shuffle(2).unwrap(),
        0.0,
    );
}
