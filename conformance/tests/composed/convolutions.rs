//! Convolutions over one, two and three axes against loops, every padding; transposed ones as adjoints.

use numcore::ops::{
    ConvNd, ConvOps, ConvPadding,
    PadMode::{self, *},
    PadOps, PointwiseOps, ReduceOps,
};

use crate::common::*;

/// The convolution by definition of an input that is padded already.
fn direct<const N: usize>(x: &Array, w: &Array, bias: &[f64], o: &ConvNd<N>) -> Array {
    let out: Vec<usize> =
        (0..N).map(|i| (x.shape[i + 2] - o.dilation[i] * (w.shape[i + 2] - 1) - 1) / o.stride[i] + 1).collect();
    let (outputs, each) = (w.shape[0], w.shape[1]);
    let taps: usize = w.shape[2..].iter().product();
    Array::of(&[&[x.shape[0], outputs][..], &out].concat(), |at| {
        let group = at[1] / (outputs / o.groups);
        let mut sum = bias[at[1]];
        for c in 0..each {
            for mut k in 0..taps {
                let (mut tap, mut from) = (vec![0; N], vec![0; N]);
                for i in (0..N).rev() {
                    tap[i] = k % w.shape[i + 2];
                    k /= w.shape[i + 2];
                    from[i] = at[i + 2] * o.stride[i] + tap[i] * o.dilation[i];
                }
                let input = x.at(&[&[at[0], group * each + c][..], &from].concat());
                sum += input * w.at(&[&[at[1], c][..], &tap].concat());
            }
        }
        sum
    })
}

fn check<const N: usize>(x: &[usize], w: &[usize], o: ConvNd<N>) {
    let (x, w, b) = (Array::random(x, 1), Array::random(w, 2), Array::random(&[w[0]], 3));
    let sides: Vec<(usize, usize)> = (0..N)
        .map(|i| match o.padding {
            ConvPadding::Symmetric(p) => (p[i], p[i]),
            ConvPadding::Sides(s) => s[i],
            ConvPadding::Same => {
                let total = o.dilation[i] * (w.shape[i + 2] - 1);
                (total / 2, total - total / 2)
            }
        })
        .collect();
    let pads: Vec<_> = [(0, 0); 2].into_iter().chain(sides.iter().map(|s| (s.0 as isize, s.1 as isize))).collect();
    let padded = x.tensor().pad_with(&pads, o.mode).unwrap();
    let padded = Array { shape: padded.dims().to_vec(), v: padded.to_f64s().unwrap() };
    let want = direct(&padded, &w, &b.v, &o);
    if o.padding == ConvPadding::Same {
        assert_eq!(want.shape[2..], x.shape[2..]);
    }
    want.is(&format!("{o:?}"), &x.tensor().conv(&w.tensor(), Some(&b.tensor()), &o).unwrap(), 1e-12);
    let plain = direct(&padded, &w, &vec![0.0; w.shape[0]], &o);
    plain.is(&format!("{o:?} without bias"), &x.tensor().conv(&w.tensor(), None, &o).unwrap(), 1e-12);
    let ConvPadding::Symmetric(p) = o.padding else { return };
    if o.mode == Constant(0.0) {
        adjoint(&x, &w, &plain, &o, p);
    }
}

/// `⟨conv(x), y⟩ = ⟨x, conv_transpose(y)⟩`, and a bias for each channel of the result.
fn adjoint<const N: usize>(x: &Array, w: &Array, like: &Array, o: &ConvNd<N>, p: [usize; N]) {
    let y = Array::random(&like.shape, 4);
    let rest: [usize; N] =
        std::array::from_fn(|i| (x.shape[i + 2] + 2 * p[i] - o.dilation[i] * (w.shape[i + 2] - 1) - 1) % o.stride[i]);
    let back = y.tensor().conv_transpose(&w.tensor(), None, o, rest).unwrap();
    assert_eq!(back.dims(), x.shape, "{o:?}");
    let inner = |a: &T, b: &T| a.mul(b).unwrap().sum_all().unwrap().item().unwrap();
    let (left, right) = (inner(&like.tensor(), &y.tensor()), inner(&x.tensor(), &back));
    assert!((left - right).abs() < 1e-9, "{o:?}: {left} {right}");
    let bias = Array::random(&[x.shape[1]], 5);
    let biased = y.tensor().conv_transpose(&w.tensor(), Some(&bias.tensor()), o, rest).unwrap();
    let back = back.to_f64s().unwrap();
    let inner: usize = x.shape[2..].iter().product();
    let v = back.iter().enumerate().map(|(k, v)| v + bias.v[k / inner % x.shape[1]]).collect();
    Array { shape: x.shape.clone(), v }.is("bias", &biased, 1e-13);
}

fn modes<const N: usize>() -> Vec<(ConvPadding<N>, PadMode)> {
    let mut all = vec![(ConvPadding::Symmetric([0; N]), Constant(0.0))];
    for mode in [Constant(0.0), Constant(0.5), Reflect, Replicate, Circular] {
        let sides = std::array::from_fn(|i| (i % 2, (i + 1) % 2 + 1));
        all.extend([ConvPadding::Symmetric([1; N]), ConvPadding::Sides(sides), ConvPadding::Same].map(|p| (p, mode)));
    }
    all
}

#[test]
fn every_padding_over_one_two_and_three_axes() {
    for (padding, mode) in modes() {
        check(&[2, 4, 7], &[6, 2, 3], ConvNd::<1> { padding, mode, groups: 2, ..Default::default() });
    }
    for (padding, mode) in modes() {
        check(&[2, 2, 5, 4], &[3, 2, 3, 2], ConvNd::<2> { padding, mode, ..Default::default() });
    }
    for (padding, mode) in modes() {
        check(&[2, 2, 3, 4, 3], &[2, 1, 2, 3, 2], ConvNd::<3> { padding, mode, groups: 2, ..Default::default() });
    }
}

#[test]
fn strides_and_dilations() {
    let padding = ConvPadding::Symmetric([2]);
    check(&[1, 2, 9], &[4, 1, 3], ConvNd::<1> { stride: [3], padding, dilation: [2], groups: 2, ..Default::default() });
    let padding = ConvPadding::Symmetric([1, 2, 0]);
    for groups in [1, 2] {
        let o = ConvNd::<3> { stride: [2, 1, 3], padding, dilation: [1, 2, 2], groups, ..Default::default() };
        check(&[2, 4, 5, 4, 7], &[2, 4 / groups, 3, 2, 2], o);
    }
    let padding = ConvPadding::Symmetric([0, 1, 1]);
    let o = ConvNd::<3> { stride: [1, 2, 1], padding, dilation: [3, 1, 1], ..Default::default() };
    check(&[1, 1, 7, 4, 3], &[1, 1, 3, 3, 3], o);
}
