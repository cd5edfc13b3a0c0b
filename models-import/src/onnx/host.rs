//! Small values on the host: sizes, axes, positions and scalars. What is computed of them alone is computed here, so
//! that no node waits for the device to know a shape.

use numcore::{DType, Result, Runtime, Shape, Tensor};

/// The most elements of a value on the host; larger ones are on the device.
pub(super) const MOST: usize = 4096;
/// Numbers up to this one are exact.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// A tensor on the host. Every element is exact in `f64`; the largest `i64` alone is not, and stays the largest.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HostArray {
    pub(super) dtype: DType,
    pub(super) dims: Vec<usize>,
    pub(super) values: Vec<f64>,
}

impl HostArray {
    /// A value of these elements, rounded to the type.
    ///
    /// Returns `None` if there are too many elements, not as many as the sizes say, or one that is not exact.
    pub(super) fn new(dtype: DType, dims: Vec<usize>, mut values: Vec<f64>) -> Option<HostArray> {
        let exact = |v: &f64| v.is_finite() && (v.abs() <= EXACT || *v as i64 == i64::MAX || *v as i64 == i64::MIN);
        match dtype {
            DType::F32 => values.iter_mut().for_each(|v| *v = f64::from(*v as f32)),
            DType::F64 => {}
            DType::I64 if values.iter().all(exact) => {}
            DType::I32 if values.iter().all(|&v| f64::from(v as i32) == v) => {}
            DType::Bool => {}
            _ => return None,
        }
        let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        (values.len() <= MOST && count == Some(values.len())).then_some(HostArray { dtype, dims, values })
    }

    /// A list of integers, `[N]`.
    pub(super) fn list(values: &[i64]) -> Option<HostArray> {
        HostArray::new(DType::I64, vec![values.len()], values.iter().map(|&v| v as f64).collect())
    }

    /// The value of a tensor, if it is small and exact.
    pub(super) fn read<R: Runtime>(x: &Tensor<R>) -> Result<Option<HostArray>> {
        let kept = matches!(x.dtype(), DType::I64 | DType::I32 | DType::Bool | DType::F32);
        if !kept || x.shape().numel() > MOST {
            return Ok(None);
        }
        let values = x.to_f64s()?;
        if x.dtype() == DType::I64 && x.to_vec::<i64>()?.iter().zip(&values).any(|(&i, &v)| v as i64 != i) {
            return Ok(None);
        }
        Ok(HostArray::new(x.dtype(), x.dims().to_vec(), values))
    }

    /// The value on a device.
    pub(super) fn upload<R: Runtime>(&self, device: &R) -> Result<Tensor<R>> {
        let shape = Shape::new(&self.dims)?;
        match self.dtype {
            DType::F64 => Tensor::from_slice(device, shape, &self.values),
            DType::F32 => Tensor::from_slice(device, shape, &self.values.iter().map(|&v| v as f32).collect::<Vec<_>>()),
            DType::Bool => {
                Tensor::from_slice(device, shape, &self.values.iter().map(|&v| v != 0.0).collect::<Vec<_>>())
            }
            DType::I32 => Tensor::from_slice(device, shape, &self.values.iter().map(|&v| v as i32).collect::<Vec<_>>()),
            _ => Tensor::from_slice(device, shape, &self.ints()),
        }
    }

    /// The elements as integers.
    pub(super) fn ints(&self) -> Vec<i64> {
        self.values.iter().map(|&v| v as i64).collect()
    }

    /// The elements at these flat positions, as a value of other sizes.
    pub(super) fn taken(&self, dims: Vec<usize>, positions: impl IntoIterator<Item = usize>) -> Option<HostArray> {
        let values = positions.into_iter().map(|i| self.values.get(i).copied()).collect::<Option<Vec<_>>>()?;
        HostArray::new(self.dtype, dims, values)
    }

    /// A value of the same elements with other sizes.
    pub(super) fn sized(&self, dims: Vec<usize>) -> Option<HostArray> {
        HostArray::new(self.dtype, dims, self.values.clone())
    }

    /// The value broadcast to sizes.
    pub(super) fn expanded(&self, dims: &[usize]) -> Option<HostArray> {
        let count = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= MOST)?;
        let missing = dims.len().checked_sub(self.dims.len())?;
        let fits = self.dims.iter().zip(&dims[missing..]).all(|(&own, &to)| own == to || own == 1);
        let position = |flat: usize| {
            let (mut rest, mut at, mut stride) = (flat, 0, 1);
            for axis in (0..dims.len()).rev() {
                let i = rest % dims[axis];
                rest /= dims[axis];
                if axis >= missing {
                    let own = self.dims[axis - missing];
                    at += if own == 1 { 0 } else { i * stride };
                    stride *= own;
                }
            }
            at
        };
        fits.then(|| self.taken(dims.to_vec(), (0..count).map(position)))?
    }

    /// Both values broadcast to one shape, then combined element by element.
    pub(super) fn zipped(&self, other: &HostArray, dtype: DType, f: impl Fn(f64, f64) -> f64) -> Option<HostArray> {
        let to = Shape::new(&self.dims).ok()?.broadcast(&Shape::new(&other.dims).ok()?)?;
        let (a, b) = (self.expanded(to.dims())?, other.expanded(to.dims())?);
        let values = a.values.iter().zip(&b.values).map(|(&x, &y)| f(x, y)).collect();
        HostArray::new(dtype, to.dims().to_vec(), values)
    }
}
