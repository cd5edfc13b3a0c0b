//! Linear layers with 8-bit operands, against a plain formula in `f64`.

use autograd::{Backward, Gradients, Var, backward, checkpoint, jvp};
use nn::*;
use numcore::{
    DType, Tensor,
    fused::BlockScaling,
    ops::{PointwiseOps, ReduceOps, ViewOps},
    pointwise::Number,
};
use runtime_cpu::Cpu;

use super::init;
use crate::common::cpu;

const SCALINGS: [BlockScaling; 2] = [BlockScaling { powers_of_two: false }, BlockScaling { powers_of_two: true }];

/// The scale of a block whose largest magnitude is `largest`, by the bits of `f32`.
fn scale(largest: f32, scaling: BlockScaling) -> f32 {
    let exact = (largest / 448.0).max(f32::MIN_POSITIVE);
    let up = f32::from_bits((exact.to_bits() + 0x007f_ffff) & 0x7f80_0000);
    if scaling.powers_of_two { up } else { exact }
}

/// A matrix of `f64` on the host.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(x: &Tensor<Cpu>) -> Matrix {
        let columns = *x.dims().last().unwrap();
        Matrix { rows: x.shape().numel() / columns, columns, values: x.to_f64s().unwrap() }
    }

    fn at(&self, r: usize, c: usize) -> f64 {
        self.values[r * self.columns + c]
    }

    fn t(&self) -> Matrix {
        let values = (0..self.columns).flat_map(|c| (0..self.rows).map(move |r| self.at(r, c))).collect();
        Matrix { rows: self.columns, columns: self.rows, values }
    }

    /// Codes times scales, of blocks of `[r, c]`.
    fn rounded(&self, [r, c]: [usize; 2], scaling: BlockScaling) -> Matrix {
        let mut out = self.clone();
        for (top, left) in (0..self.rows).step_by(r).flat_map(|i| (0..self.columns).step_by(c).map(move |j| (i, j))) {
            let places = (top..(top + r).min(self.rows))
                .flat_map(|i| (left..(left + c).min(self.columns)).map(move |j| i * self.columns + j));
            let largest = places.clone().map(|p| self.values[p].abs()).fold(0.0, f64::max);
            let scale = scale(largest as f32, scaling);
            for p in places {
                let code = Number::Float(f64::from(self.values[p] as f32 / scale)).cast(DType::F8E4M3).to_f64();
                out.values[p] = code * f64::from(scale);
            }
        }
        out
    }

    fn times(&self, b: &Matrix) -> Matrix {
        let dot = |r: usize, c: usize| (0..self.columns).map(|k| self.at(r, k) * b.at(k, c)).sum::<f64>();
        let values = (0..self.rows).flat_map(|r| (0..b.columns).map(move |c| (r, c))).map(|(r, c)| dot(r, c)).collect();
        Matrix { rows: self.rows, columns: b.columns, values }
    }
}

#[track_caller]
fn close(got: &Tensor<Cpu>, want: &Matrix, tolerance: f64) {
    let got = got.to_f64s().unwrap();
    let unit = want.values.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    assert_eq!(got.len(), want.values.len());
    let off = got.iter().zip(&want.values).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off <= tolerance * unit, "{off:e} of {unit:e}");
}

fn normal(dims: &[usize], seed: u64) -> Tensor<Cpu> {
    let x = Tensor::normal(&cpu(), dims, DType::F32, 0.0, 1.0, seed).unwrap();
    // Blocks of different magnitudes.
    let columns = *dims.last().unwrap();
    let by = (0..columns).map(|c| 10f32.powi(c as i32 / 40 - 2)).collect();
    x.mul(&Tensor::from_vec(&cpu(), by).unwrap()).unwrap()
}

fn layer(inputs: usize, outputs: usize, scaling: BlockScaling) -> Linear<Cpu> {
    let layer = Linear::new(&init(), inputs, outputs).unwrap();
    layer.weight.set(normal(&[outputs, inputs], 2)).unwrap();
    assert_eq!(block_scaled(&layer, scaling, |_| true).unwrap(), 1);
    layer
}

/// Sizes that fill blocks, that do not, and that are smaller than one.
#[test]
fn all_three_products_have_rounded_operands() {
    for (scaling, dims, outputs) in SCALINGS.into_iter().flat_map(|s| {
        [(s, vec![2, 128, 256], 128), (s, vec![3, 50, 200], 150), (s, vec![5, 3], 2), (s, vec![1, 129], 1)]
    }) {
        let inputs = *dims.last().unwrap();
        let layer = layer(inputs, outputs, scaling);
        let x = Var::leaf("x", normal(&dims, 3)).unwrap();
        let y = layer.forward(&x).unwrap();
        let upstream = normal(&y.dims(), 5);
        let gradients = backward(&y.mul(&Var::new(upstream.clone())).unwrap().sum_all().unwrap()).unwrap();

        let [xm, w, g] = [&x.value().unwrap(), &layer.weight.value().unwrap(), &upstream].map(Matrix::of);
        let whole = w.rounded([128, 128], scaling);
        let mut product = xm.rounded([1, 128], scaling).times(&whole.t());
        let bias = layer.bias.as_ref().unwrap().value().unwrap().to_f64s().unwrap();
        product.values.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i % outputs]);
        close(&y.value().unwrap(), &product, 1e-5);
        let of_x = g.rounded([1, 128], scaling).times(&whole);
        close(gradients.get(x.as_leaf().unwrap()).unwrap(), &of_x, 1e-5);
        let of_w = g.rounded([128, 1], scaling).t().times(&xm.rounded([128, 1], scaling));
        close(gradients.get(&layer.weight.leaf()).unwrap(), &of_w, 1e-5);
    }
}

#[test]
fn a_weight_is_codes_and_scales() {
    for scaling in SCALINGS {
        let w = normal(&[300, 129], 7);
        let [codes, scales] = scaling.quantize(&w).unwrap();
        assert_eq!((codes.dims(), codes.dtype()), (&[300, 129][..], DType::F8E4M3));
        assert_eq!((scales.dims(), scales.dtype()), (&[3, 2][..], DType::F32));
        let back = BlockScaling::dequantize(&codes, &scales).unwrap();
        close(&back, &Matrix::of(&w).rounded([128, 128], scaling), 1e-7);
        // Rounding is idempotent, if codes times scales are exact.
        if scaling.powers_of_two {
            let [again, _] = scaling.quantize(&back).unwrap();
            let same = BlockScaling::dequantize(&again, &scaling.quantize(&back).unwrap()[1]).unwrap();
            assert_eq!(same.to_bytes().unwrap(), back.to_bytes().unwrap());
        }
        let wrong = BlockScaling::dequantize(&codes, &scales.t().unwrap()).unwrap_err().to_string();
        assert!(wrong.contains("⌈O/128⌉"), "{wrong}");
    }
}

/// Every exponent of `f32`, powers of two, their neighbours, zeros and what is not finite.
#[test]
fn scales_are_powers_of_two_at_or_above() {
    let scaling = BlockScaling { powers_of_two: true };
    for exponent in -149..128 {
        let power = f64::from(2f32).powi(exponent) as f32;
        for x in [power, power.next_up(), power.next_down(), power * 1.75, power * 1.75f32.next_up()] {
            let [codes, scales] =
                scaling.quantize(&Tensor::full(&cpu(), [1, 1], DType::F32, f64::from(x)).unwrap()).unwrap();
            assert_eq!(scales.to_vec::<f32>().unwrap(), [scale(x, scaling)], "{x:e}");
            assert!(codes.to_f64s().unwrap()[0].abs() <= 448.0);
        }
    }
    let zero = Tensor::zeros(&cpu(), [2, 2], DType::F32).unwrap();
    let [codes, scales] = scaling.quantize(&zero).unwrap();
    assert_eq!(BlockScaling::dequantize(&codes, &scales).unwrap().to_f64s().unwrap(), [0.0; 4]);
    let bad = Tensor::from_slice(&cpu(), [1, 2], &[1.0, f32::NAN]).unwrap();
    let [codes, scales] = scaling.quantize(&bad).unwrap();
    assert!(BlockScaling::dequantize(&codes, &scales).unwrap().to_f64s().unwrap()[1].is_nan());
}

/// Recomputation, weight gradients that are computed later, and sums over micro-batches change no bit.
#[test]
fn the_tape_treats_it_as_any_product() {
    let layer = layer(200, 130, SCALINGS[1]);
    let x = Var::leaf("x", normal(&[60, 200], 3)).unwrap();
    let loss = || layer.forward(&x)?.square()?.sum_all();
    let bits = |g: &Gradients<Cpu>| {
        [&layer.weight.leaf(), x.as_leaf().unwrap()].map(|leaf| g.get(leaf).unwrap().to_vec::<f32>().unwrap())
    };
    let plain = bits(&backward(&loss().unwrap()).unwrap());
    assert_eq!(bits(&backward(&checkpoint(loss).unwrap()).unwrap()), plain);
    let twice = bits(&backward(&loss().unwrap().add(&loss().unwrap()).unwrap()).unwrap());
    let doubled = plain.clone().map(|all| all.into_iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    assert_eq!(twice, doubled);
    let mut gradients = Gradients::new();
    let deferred = Backward::of(&loss().unwrap()).unwrap().inputs_only(&[&x], &mut gradients).unwrap();
    assert!(!deferred.is_empty());
    deferred.run(&mut gradients).unwrap();
    assert_eq!(bits(&gradients), plain);
}

/// The tangent of a rounded operand is that of the operand.
#[test]
fn roundings_are_straight_through() {
    let layer = layer(130, 4, SCALINGS[1]);
    let (x, v) = (Var::new(normal(&[3, 130], 3)), normal(&[3, 130], 4));
    let (_, tangent) = jvp(|x| layer.forward(&x[0]), &[&x], &[&Var::new(v.clone())]).unwrap();
    let w = Matrix::of(&layer.weight.value().unwrap()).rounded([128, 128], SCALINGS[1]);
    close(&tangent.value().unwrap(), &Matrix::of(&v).times(&w.t()), 1e-5);
}

#[test]
fn halves_stay_halves_and_what_does_not_fit_is_refused() {
    let layer = layer(130, 4, SCALINGS[0]);
    let wide = Var::new(normal(&[3, 130], 3));
    let y = layer.forward(&wide).unwrap();
    let under = autograd::autocast(DType::BF16, || layer.forward(&wide)).unwrap();
    assert_eq!(under.value().unwrap().to_bytes().unwrap(), y.value().unwrap().to_bytes().unwrap());
    layer.to_dtype(DType::BF16).unwrap();
    let x = Var::leaf("x", normal(&[3, 130], 3).to_dtype(DType::BF16).unwrap()).unwrap();
    let narrow = layer.forward(&x).unwrap();
    assert_eq!(narrow.dtype(), DType::BF16);
    let gradients = backward(&narrow.sum_all().unwrap()).unwrap();
    assert_eq!(gradients.get(&layer.weight.leaf()).unwrap().dtype(), DType::BF16);
    let mixed = layer.forward(&wide).unwrap_err().to_string();
    assert!(mixed.contains("block_scaled_linear") && mixed.contains("one dtype"), "{mixed}");
    layer.to_dtype(DType::F64).unwrap();
    let double = layer.forward(&wide.to_dtype(DType::F64).unwrap()).unwrap_err().to_string();
    assert!(double.contains("f64") && double.contains("cast first"), "{double}");
    let again = block_scaled(&layer, SCALINGS[0], |_| true).unwrap_err().to_string();
    assert!(again.contains("has an adapter already"), "{again}");
    assert!(block_scaled(&layer, SCALINGS[0], |name| name == "none").is_err());
}
