//! Arrays of the host, and nearness.

use numcore::{DType, Result, Tensor, rng::Philox};
use runtime_cpu::Cpu;

pub type T = Tensor<Cpu>;

pub fn cpu() -> Cpu {
    Cpu::with_threads(2)
}

/// Host values with sizes, row-major.
#[derive(Clone, Debug)]
pub struct Array {
    pub shape: Vec<usize>,
    pub v: Vec<f64>,
}

impl Array {
    /// The values of `f` at each position.
    pub fn of(shape: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> Array {
        let n: usize = shape.iter().product();
        let place = |mut k: usize| {
            let mut at = vec![0; shape.len()];
            for (a, &size) in at.iter_mut().zip(shape).rev() {
                *a = k % size;
                k /= size;
            }
            at
        };
        Array { shape: shape.to_vec(), v: (0..n).map(|k| f(&place(k))).collect() }
    }

    /// Uniform in `[−2, 2)`.
    pub fn random(shape: &[usize], seed: u64) -> Array {
        let mut rng = Philox::new(seed, 1);
        Array::of(shape, |_| 4.0 * rng.uniform() - 2.0)
    }

    pub fn at(&self, at: &[usize]) -> f64 {
        self.v[at.iter().zip(&self.shape).fold(0, |k, (&a, &size)| k * size + a)]
    }

    /// The element, or `outside` where a coordinate is out of range.
    pub fn get(&self, at: &[isize], outside: f64) -> f64 {
        let inside = at.iter().zip(&self.shape).all(|(&a, &size)| (0..size as isize).contains(&a));
        if inside { self.at(&at.iter().map(|&a| a as usize).collect::<Vec<_>>()) } else { outside }
    }

    pub fn tensor(&self) -> T {
        T::from_slice(&cpu(), &self.shape, &self.v).unwrap()
    }

    /// Asserts that `got` has these sizes and values.
    #[track_caller]
    pub fn is(&self, what: &str, got: &T, tolerance: f64) {
        assert_eq!(got.dims(), self.shape, "{what}: shape");
        let got = got.to_f64s().unwrap();
        for (i, (g, w)) in got.iter().zip(&self.v).enumerate() {
            let same = g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= tolerance * w.abs().max(1.0);
            assert!(same, "{what}[{i}] is {g}, expected {w}");
        }
    }
}

pub fn row(v: &[f64]) -> T {
    T::from_slice(&cpu(), [v.len()], v).unwrap()
}

pub fn ints(shape: &[usize], v: &[i64]) -> T {
    T::from_slice(&cpu(), shape, v).unwrap()
}

#[track_caller]
pub fn holds(got: &T, shape: &[usize], want: &[f64]) {
    Array { shape: shape.to_vec(), v: want.to_vec() }.is("result", got, 1e-6);
}

#[track_caller]
pub fn refused<X>(result: Result<X>, words: &[&str]) {
    let message = result.err().expect("an error").to_string();
    words.iter().for_each(|w| assert!(message.contains(w), "`{w}` is not in: {message}"));
}

/// Every dtype that holds small integers.
pub const NUMBERS: [DType; 8] =
    [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::U32, DType::U8];
