//! Sampling against PyTorch's formulas in loops over pixels.

use autograd::Var;
use numcore::ops::{GridSample, GridSampleOps, Interpolation::*, OutsideGrid, OutsideGrid::*, ReduceOps, ViewOps};

use crate::common::*;

fn place(g: f64, n: usize, corners: bool) -> f64 {
    if corners { (g + 1.0) / 2.0 * (n - 1) as f64 } else { ((g + 1.0) * n as f64 - 1.0) / 2.0 }
}

fn inside(u: f64, n: usize, o: &GridSample) -> f64 {
    let last = (n - 1) as f64;
    let reflected = || {
        let (low, high) = if o.align_corners { (0.0, last) } else { (-0.5, last + 0.5) };
        if low == high {
            return 0.0;
        }
        // Walked, not computed: back and forth between the ends.
        let mut u = u;
        while u < low || u > high {
            u = if u < low { 2.0 * low - u } else { 2.0 * high - u };
        }
        u
    };
    match o.outside {
        Zeros => u,
        Border => u.clamp(0.0, last),
        Reflection => reflected().clamp(0.0, last),
    }
}

fn cubic(x: f64) -> f64 {
    let (x, a) = (x.abs(), -0.75);
    match x {
        x if x <= 1.0 => (a + 2.0) * x.powi(3) - (a + 3.0) * x.powi(2) + 1.0,
        x if x < 2.0 => a * (x.powi(3) - 5.0 * x.powi(2) + 8.0 * x - 4.0),
        _ => 0.0,
    }
}

/// Elements along one axis with their weights.
fn taps(g: f64, n: usize, o: &GridSample) -> Vec<(isize, f64)> {
    let u = place(g, n, o.align_corners);
    match o.mode {
        Nearest => vec![(inside(u, n, o).round_ties_even() as isize, 1.0)],
        Linear => {
            let u = inside(u, n, o);
            let f = u.floor();
            vec![(f as isize, 1.0 - (u - f)), (f as isize + 1, u - f)]
        }
        _ => (-1..3)
            .map(|k| {
                let at = u.floor() + f64::from(k);
                (inside(at, n, o) as isize, cubic(u - at))
            })
            .collect(),
    }
}

fn check(x: &Array, grid: &Array, o: GridSample) {
    let sizes = &x.shape[2..];
    let shape = [&x.shape[..2], &grid.shape[1..grid.shape.len() - 1]].concat();
    let want = Array::of(&shape, |at| {
        let d = sizes.len();
        let along = |axis: usize| {
            let g = grid.at(&[&[at[0]][..], &at[2..], &[d - 1 - axis]].concat());
            taps(g, sizes[axis], &o)
        };
        let axes: Vec<_> = (0..d).map(along).collect();
        let count = axes.iter().map(Vec::len).product();
        let mut sum = 0.0;
        for mut k in 0..count {
            let (mut weight, mut from) = (1.0, vec![at[0] as isize, at[1] as isize]);
            for axis in &axes {
                let (i, w) = axis[k % axis.len()];
                k /= axis.len();
                weight *= w;
                from.push(i);
            }
            sum += weight * x.get(&from, 0.0);
        }
        sum
    });
    want.is(&format!("{o:?}"), &x.tensor().grid_sample(&grid.tensor(), o).unwrap(), 1e-12);
}

fn all(modes: &[numcore::ops::Interpolation], outsides: &[OutsideGrid]) -> Vec<GridSample> {
    let mut all = Vec::new();
    for &mode in modes {
        for &outside in outsides {
            all.extend([false, true].map(|align_corners| GridSample { mode, outside, align_corners }));
        }
    }
    all
}

#[test]
fn images() {
    let (x, grid) = (Array::random(&[2, 3, 4, 5], 1), Array::random(&[2, 6, 7, 2], 2));
    let far = Array { shape: grid.shape.clone(), v: grid.v.iter().map(|v| v * 2.3).collect() };
    for o in all(&[Nearest, Linear, Cubic], &[Zeros, Border, Reflection]) {
        check(&x, &grid, o);
        check(&x, &far, o);
    }
    // One row, one column, one pixel.
    for size in [[1, 4], [3, 1], [1, 1]] {
        let x = Array::random(&[2, 1, size[0], size[1]], 3);
        all(&[Nearest, Linear, Cubic], &[Zeros, Border, Reflection]).into_iter().for_each(|o| check(&x, &grid, o));
    }
}

#[test]
fn volumes() {
    let (x, grid) = (Array::random(&[2, 2, 3, 4, 2], 4), Array::random(&[2, 2, 3, 2, 3], 5));
    all(&[Nearest, Linear], &[Zeros, Border, Reflection]).into_iter().for_each(|o| check(&x, &grid, o));
}

/// The identity reads every pixel at its own coordinate; coordinates are `(x, y)`.
#[test]
fn affine_grids() {
    let theta = row(&[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]).reshape([1, 2, 3]).unwrap();
    let x = Array::random(&[1, 2, 3, 4], 6);
    for align_corners in [false, true] {
        let grid = theta.affine_grid(&[3, 4], align_corners).unwrap();
        let o = GridSample { align_corners, ..GridSample { mode: Linear, ..Default::default() } };
        x.is("identity", &x.tensor().grid_sample(&grid, o).unwrap(), 1e-14);
        let corner = grid.select(0, 0).unwrap().select(0, 0).unwrap().select(0, 3).unwrap().to_f64s().unwrap();
        let want = if align_corners { [1.0, -1.0] } else { [0.75, -2.0 / 3.0] };
        holds(&row(&corner), &[2], &want);
    }
    let one = theta.affine_grid(&[1, 1], true).unwrap();
    holds(&one, &[1, 1, 1, 2], &[0.0, 0.0]);
    let moved = row(&[0.0, 1.0, 0.5, 1.0, 0.0, 0.0]).reshape([1, 2, 3]).unwrap();
    let grid = moved.affine_grid(&[2, 2], true).unwrap();
    holds(&grid, &[1, 2, 2, 2], &[-0.5, -1.0, -0.5, 1.0, 1.5, -1.0, 1.5, 1.0]);
}

/// Values outside of a zero-padded image are 0 for every border pixel, and so are the gradients.
#[test]
fn zeros_beside_infinities() {
    for strange in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let image = [1.0, 2.0, strange, 3.0, 4.0, strange];
        for mode in [Nearest, Linear, Cubic] {
            let x = Var::leaf("x", row(&image).reshape([1, 1, 2, 3]).unwrap()).unwrap();
            // Far beyond the strange column, above it, and at the first pixel.
            let places = row(&[9.0, 0.0, 1.0, -9.0, -1.0, -1.0]).reshape([1, 1, 3, 2]).unwrap();
            let grid = Var::leaf("grid", places).unwrap();
            let y = x.grid_sample(&grid, GridSample { mode, outside: Zeros, align_corners: true }).unwrap();
            let got = y.value().unwrap().to_f64s().unwrap();
            assert_eq!(got[..2], [0.0, 0.0], "{mode:?} {strange}");
            let g = y.narrow(3, 0, 2).unwrap().sum_all().unwrap().backward().unwrap();
            assert!(g.of(&x).is_none_or(|g| g.to_f64s().unwrap().iter().all(|&g| g == 0.0)), "{mode:?} {strange}");
            let of_grid = g.of(&grid).map(|g| g.to_f64s().unwrap());
            assert!(of_grid.is_none_or(|g| g[..4] == [0.0; 4]), "{mode:?} {strange}");
        }
    }
    // A NaN coordinate gives NaN.
    let x = row(&[1.0, 2.0, 3.0, 4.0]).reshape([1, 1, 2, 2]).unwrap();
    let nowhere = row(&[f64::NAN, 0.0]).reshape([1, 1, 1, 2]).unwrap();
    let y = x.grid_sample(&nowhere, GridSample { mode: Linear, ..Default::default() }).unwrap();
    assert!(y.to_f64s().unwrap()[0].is_nan());
}

/// Values of PyTorch 2.15: an infinite pixel of weight 0 gives NaN, and beyond the last pixel there is none to weigh.
#[test]
fn infinite_pixels_count_where_they_are() {
    const I: f64 = f64::INFINITY;
    const N: f64 = f64::NAN;
    let sample = |pixels: &[f64], places: &[f64], outside, align_corners| {
        let x = row(pixels).reshape([1, 1, 2, 3]).unwrap();
        let grid = row(places).reshape([1, 1, places.len() / 2, 2]).unwrap();
        let y = x.grid_sample(&grid, GridSample { mode: Linear, outside, align_corners }).unwrap();
        y.to_f64s().unwrap()
    };
    let same = |got: Vec<f64>, due: &[f64]| {
        let near = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
        assert!(got.len() == due.len() && got.iter().zip(due).all(near), "{got:?}, due {due:?}");
    };
    let second = [1.0, I, 3.0, 4.0, 5.0, 6.0];
    let places = [-1.0, -1.0, -0.5, -1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 2.0, 2.0, -1.0, 1.0];
    same(sample(&second, &places, Zeros, true), &[N, I, I, 6.0, 4.5, 0.0, 4.0]);
    same(sample(&second, &places, Border, true), &[N, I, I, 6.0, 4.5, 6.0, 4.0]);
    same(sample(&second, &places, Reflection, true), &[N, I, I, 6.0, 4.5, I, 4.0]);
    let last = [1.0, 2.0, 3.0, 4.0, 5.0, I];
    for outside in [Border, Reflection] {
        same(sample(&last, &[1.0, 1.0, 1.0, 0.5, 0.5, 1.0], outside, true), &[I, I, I]);
    }
    same(sample(&last, &[2.0, 2.0], Border, false), &[I]);
}
