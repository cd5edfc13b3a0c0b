//! Padding by modes, repetition, rotation, diagonals, outer and Kronecker products, distances, bits.

use numcore::{
    DType,
    ops::{
        DiagonalOps, DistanceOps,
        PadMode::{self, *},
        PadOps, PointwiseOps, RepeatOps, ViewOps, meshgrid,
    },
};

use crate::common::*;

/// The element that padding shows at `i` of an axis of `n`.
fn source(i: isize, n: isize, mode: PadMode) -> Option<isize> {
    match mode {
        Constant(_) => (0..n).contains(&i).then_some(i),
        Reflect if i < 0 => Some(-i),
        Reflect if i >= n => Some(2 * (n - 1) - i),
        Reflect => Some(i),
        Replicate => Some(i.clamp(0, n - 1)),
        Circular => Some(i.rem_euclid(n)),
    }
}

#[test]
fn padding_by_every_mode() {
    let x = Array::random(&[2, 4, 5], 1);
    for mode in [Constant(0.25), Reflect, Replicate, Circular] {
        for pads in [[(0, 0), (2, 1), (0, 4)], [(0, 0), (3, 0), (1, 1)], [(0, 0), (0, 0), (4, 4)]] {
            let shape: Vec<usize> = (0..3).map(|i| (x.shape[i] as isize + pads[i].0 + pads[i].1) as usize).collect();
            let want = Array::of(&shape, |at| {
                let from = (0..3).map(|i| source(at[i] as isize - pads[i].0, x.shape[i] as isize, mode));
                from.collect::<Option<Vec<_>>>().map_or(0.25, |at| x.get(&at, f64::NAN))
            });
            want.is(&format!("{mode:?} {pads:?}"), &x.tensor().pad_with(&pads, mode).unwrap(), 0.0);
            let seen = x.tensor().transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
            want.is("of a view", &seen.pad_with(&pads, mode).unwrap(), 0.0);
        }
    }
}

#[test]
fn padding_keeps_any_type_and_repeats_of_one_element() {
    for dtype in NUMBERS.into_iter().chain([DType::Bool]) {
        let x = row(&[1.0, 0.0, 1.0]).to_dtype(dtype).unwrap();
        let y = x.pad_with(&[(2, 1)], Reflect).unwrap();
        assert_eq!(y.dtype(), dtype);
        holds(&y, &[6], &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    }
    let one = row(&[3.0]).broadcast_to([4]).unwrap();
    holds(&one.pad_with(&[(3, 3)], Reflect).unwrap(), &[10], &[3.0; 10]);
    holds(&row(&[7.0]).pad_with(&[(2, 3)], Replicate).unwrap(), &[6], &[7.0; 6]);
}

#[test]
fn negative_padding_removes_first() {
    let x = row(&[1.0, 2.0, 3.0, 4.0]);
    holds(&x.pad_with(&[(-1, 2)], Constant(0.0)).unwrap(), &[5], &[2.0, 3.0, 4.0, 0.0, 0.0]);
    holds(&x.pad_with(&[(2, -1)], Circular).unwrap(), &[5], &[2.0, 3.0, 1.0, 2.0, 3.0]);
    holds(&x.pad_with(&[(-2, -2)], Replicate).unwrap(), &[0], &[]);
}

#[test]
fn repetition() {
    let x = row(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]).unwrap();
    holds(&x.repeat(&[1, 2]).unwrap(), &[2, 4], &[1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
    let twice = x.repeat(&[2, 2, 1]).unwrap();
    holds(&twice, &[2, 4, 2], &[1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0].repeat(2));
    holds(&x.repeat(&[0, 2]).unwrap(), &[0, 4], &[]);
    // PyTorch's documentation of `repeat_interleave`.
    holds(&row(&[1.0, 2.0, 3.0]).repeat_interleave(2, 0).unwrap(), &[6], &[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
    holds(&x.repeat_interleave(3, 1).unwrap(), &[2, 6], &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0]);
    holds(&x.repeat_interleave_each(&[1, 2], 0).unwrap(), &[3, 2], &[1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
}

/// NumPy's and PyTorch's convention: a rotation by 90° maps `[[0, 1], [2, 3]]` to `[[1, 3], [0, 2]]`.
#[test]
fn rotation_and_differences() {
    let x = row(&[0.0, 1.0, 2.0, 3.0]).reshape([2, 2]).unwrap();
    for (times, want) in [
        (0, [0.0, 1.0, 2.0, 3.0]),
        (1, [1.0, 3.0, 0.0, 2.0]),
        (2, [3.0, 2.0, 1.0, 0.0]),
        (3, [2.0, 0.0, 3.0, 1.0]),
        (-1, [2.0, 0.0, 3.0, 1.0]),
        (5, [1.0, 3.0, 0.0, 2.0]),
    ] {
        holds(&x.rot90(times, [0, 1]).unwrap(), &[2, 2], &want);
    }
    holds(&row(&[1.0, 3.0, 2.0]).diff(1, 0).unwrap(), &[2], &[2.0, -1.0]);
    holds(&row(&[1.0, 3.0, 2.0]).diff(2, 0).unwrap(), &[1], &[-3.0]);
    holds(&row(&[1.0]).diff(3, 0).unwrap(), &[0], &[]);
    holds(&row(&[1.0, 5.0, 10.0]).trapezoid(2.0, 0).unwrap(), &[], &[21.0]);
    holds(&row(&[0.0, 1.0, 2.0, 3.0]).roll_axes(&[1], &[0]).unwrap(), &[4], &[3.0, 0.0, 1.0, 2.0]);
}

#[test]
fn diagonals() {
    let x = Array::random(&[2, 3, 4], 2);
    for k in -3isize..=4 {
        let (r, c) = (k.min(0).unsigned_abs(), k.max(0) as usize);
        let len = 3usize.saturating_sub(r).min(4usize.saturating_sub(c));
        let want = Array::of(&[2, len], |at| x.at(&[at[0], at[1] + r, at[1] + c]));
        want.is(&format!("diagonal {k}"), &x.tensor().diagonal(k).unwrap(), 0.0);
        let seen = x.tensor().t().unwrap().contiguous().unwrap().t().unwrap();
        want.is("of a view", &seen.diagonal(k).unwrap(), 0.0);
        let n = 4 + k.unsigned_abs();
        let embedded = Array::of(&[2, 3, n, n], |at| {
            let along = if k < 0 { at[3] } else { at[2] };
            if at[3] as isize - at[2] as isize == k { x.at(&[at[0], at[1], along]) } else { 0.0 }
        });
        embedded.is(&format!("diag_embed {k}"), &x.tensor().diag_embed(k).unwrap(), 0.0);
    }
    holds(&row(&[]).diag_embed(2).unwrap(), &[2, 2], &[0.0; 4]);
}

#[test]
fn products_and_grids() {
    let (a, b) = (Array::random(&[2, 3], 3), Array::random(&[3, 2], 4));
    let kron = Array::of(&[6, 6], |at| a.at(&[at[0] / 3, at[1] / 2]) * b.at(&[at[0] % 3, at[1] % 2]));
    kron.is("kron", &a.tensor().kron(&b.tensor()).unwrap(), 1e-15);
    holds(&row(&[1.0, 2.0]).outer(&row(&[3.0, 4.0])).unwrap(), &[2, 2], &[3.0, 4.0, 6.0, 8.0]);
    holds(&row(&[1.0, 0.0, 0.0]).cross(&row(&[0.0, 1.0, 0.0]), 0).unwrap(), &[3], &[0.0, 0.0, 1.0]);
    let grid = meshgrid(&[&row(&[1.0, 2.0]), &row(&[3.0, 4.0, 5.0])]).unwrap();
    holds(&grid[0], &[2, 3], &[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    holds(&grid[1], &[2, 3], &[3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
}

#[test]
fn distances_of_all_norms() {
    let (a, b) = (Array::random(&[2, 3, 4], 5), Array::random(&[5, 4], 6));
    for p in [0.0, 0.5, 1.0, 2.0, 3.5, f64::INFINITY] {
        let want = Array::of(&[2, 3, 5], |at| {
            let d = (0..4).map(|k| (a.at(&[at[0], at[1], k]) - b.at(&[at[2], k])).abs());
            match p {
                0.0 => d.filter(|&d| d != 0.0).count() as f64,
                f64::INFINITY => d.fold(0.0, f64::max),
                p => d.map(|d| d.powf(p)).sum::<f64>().powf(1.0 / p),
            }
        });
        want.is(&format!("cdist {p}"), &a.tensor().cdist(&b.tensor(), p).unwrap(), 1e-13);
    }
    // Near points keep their digits: 1e4 + 1e-3 from 1e4.
    let (x, y) = (row(&[10_000.0]).reshape([1, 1]).unwrap(), row(&[10_000.001]).reshape([1, 1]).unwrap());
    let near = x.cdist(&y, 2.0).unwrap().item().unwrap();
    assert!((near - 1e-3).abs() < 1e-9, "{near}");
}

#[test]
fn bits_seen_as_another_type() {
    let x = T::from_slice(&cpu(), [2, 2], &[1.0f32, -2.0, 0.5, f32::NAN]).unwrap();
    let bits = x.bit_cast(DType::U32).unwrap();
    assert!(bits.shares_memory_with(&x));
    let want: Vec<u32> = [1.0f32, -2.0, 0.5, f32::NAN].iter().map(|v| v.to_bits()).collect();
    assert_eq!(bits.to_vec::<u32>().unwrap(), want);
    assert_eq!(bits.t().unwrap().bit_cast(DType::F32).unwrap().to_vec::<f32>().unwrap()[..3], [1.0, 0.5, -2.0]);
    let halves = T::from_slice(&cpu(), [1], &[half::bf16::ONE]).unwrap().bit_cast(DType::F16).unwrap();
    assert_eq!(halves.to_vec::<half::f16>().unwrap()[0].to_bits(), half::bf16::ONE.to_bits());
    let wide = T::from_slice(&cpu(), [1], &[-1i64]).unwrap().bit_cast(DType::F64).unwrap();
    assert!(wide.item().unwrap().is_nan());
    // An op on the result reads those bits.
    assert_eq!(bits.bit_cast(DType::I32).unwrap().add(1.0).unwrap().to_vec::<i32>().unwrap()[0], 0x3f80_0001);
    refused(x.bit_cast(DType::F64), &["bit_cast", "f32", "f64", "one size"]);
    let bytes = T::from_slice(&cpu(), [1], &[7u8]).unwrap();
    refused(bytes.bit_cast(DType::Bool), &["bit_cast", "bool"]);
}
