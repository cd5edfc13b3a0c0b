//! Inputs of op cases: fixed values, generated on the host.

use numcore::{DType, Result, Runtime, Shape, Tensor, ops::PointwiseOps, rng::Philox};

/// An input: its shape, and the distribution of its values.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) shape: Shape,
    values: Vec<f64>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// A real input that receives a gradient.
    Real,
    /// A real input without a gradient: a mask, an upstream gradient.
    Fixed,
    Index,
    Truth,
}

/// Reals, uniform in `[low, high)`.
pub(crate) fn real(shape: &[usize], low: f64, high: f64) -> Sample {
    let mut rng = Philox::new(shape.iter().sum::<usize>() as u64 + (low.to_bits() ^ high.to_bits()), 7);
    Sample::new(shape, Kind::Real, |_| low + (high - low) * rng.uniform())
}

/// Reals around 0.
pub(crate) fn centered(shape: &[usize]) -> Sample {
    real(shape, -1.5, 1.5)
}

/// Reals, equally spaced and shuffled. No two are near one another, and none is near 0 (or near a bound that is a
/// multiple of the spacing).
pub(crate) fn spread(shape: &[usize], low: f64, high: f64) -> Sample {
    let n: usize = shape.iter().product();
    let order = Philox::new(n as u64, 3).permutation(n);
    let step = (high - low) / n as f64;
    Sample::new(shape, Kind::Real, |i| low + step * (order[i] as f64 + 0.456_789))
}

/// Values of `spread`, with zeros at every `every`-th position.
pub(crate) fn with_zeros(shape: &[usize], every: usize) -> Sample {
    let mut sample = spread(shape, -1.5, 1.7);
    sample.values.iter_mut().step_by(every).for_each(|v| *v = 0.0);
    sample
}

/// Indices (`i64`) below `n`, repeated and in no order.
pub(crate) fn index(shape: &[usize], n: usize) -> Sample {
    let mut rng = Philox::new(n as u64, 5);
    Sample::new(shape, Kind::Index, |_| rng.below(n as u64) as f64)
}

/// Indices (`i64`) with the given values.
pub(crate) fn indices(shape: &[usize], values: &[i64]) -> Sample {
    Sample::new(shape, Kind::Index, |i| values[i] as f64)
}

/// `bool` values, about half of them true.
pub(crate) fn truth(shape: &[usize]) -> Sample {
    let mut rng = Philox::new(11, 5);
    Sample::new(shape, Kind::Truth, |_| f64::from(u8::from(rng.uniform() < 0.5)))
}

impl Sample {
    fn new(shape: &[usize], kind: Kind, mut value: impl FnMut(usize) -> f64) -> Self {
        let values = (0..shape.iter().product()).map(&mut value).collect();
        // Shapes of cases are literals, none too large.
        let shape = Shape::new(shape).unwrap_or(Shape::SCALAR);
        Sample { shape, values, kind }
    }

    /// Rotates the values by `by` positions, so that two inputs of one shape differ.
    pub(crate) fn turned(mut self, by: usize) -> Sample {
        let n = self.values.len().max(1);
        if self.is_real() {
            self.values.rotate_left(by * 7 % n);
        }
        self
    }

    /// Makes this a sample without a gradient.
    pub(crate) fn fixed(self) -> Sample {
        Sample { kind: Kind::Fixed, ..self }
    }

    pub(crate) fn is_real(&self) -> bool {
        self.kind == Kind::Real
    }

    /// Tells whether the values have the floating type in which a case is run.
    pub(crate) fn is_float(&self) -> bool {
        matches!(self.kind, Kind::Real | Kind::Fixed)
    }

    pub(crate) fn values(&self) -> &[f64] {
        &self.values
    }

    /// Uploads the values to a device; reals get the floating type `dtype`.
    pub(crate) fn on<R: Runtime>(&self, rt: &R, dtype: DType) -> Result<Tensor<R>> {
        self.with(rt, dtype, &self.values)
    }

    /// A tensor of this sample's shape with the given values.
    pub(crate) fn with<R: Runtime>(&self, rt: &R, dtype: DType, values: &[f64]) -> Result<Tensor<R>> {
        match self.kind {
            Kind::Index => Tensor::from_slice(rt, self.shape, &values.iter().map(|&v| v as i64).collect::<Vec<_>>()),
            Kind::Truth => Tensor::from_slice(rt, self.shape, &values.iter().map(|&v| v != 0.0).collect::<Vec<_>>()),
            _ if dtype == DType::F64 => Tensor::from_slice(rt, self.shape, values),
            _ => Tensor::from_slice(rt, self.shape, &values.iter().map(|&v| v as f32).collect::<Vec<_>>())?
                .to_dtype(dtype),
        }
    }
}
