//! Between tensors and host memory.

use super::{Tensor, TensorMut, wrong_element};
use crate::{Element, Error, Result, Runtime, Shape};

impl<R: Runtime> Tensor<R> {
    /// A tensor of `shape` with the values of `data` in row-major order; the lengths must agree.
    pub fn from_slice<E: Element>(rt: &R, shape: impl AsRef<[usize]>, data: &[E]) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape.numel() != data.len() {
            let why = format!("{} elements, but {} values were given", shape.numel(), data.len());
            return Err(Error::shape("from_slice", &[shape], why));
        }
        Self::from_bytes(rt, shape, E::DTYPE, E::bytes(data))
    }

    /// A one-dimensional tensor.
    pub fn from_vec<E: Element>(rt: &R, data: Vec<E>) -> Result<Self> {
        Self::from_slice(rt, [data.len()], &data)
    }

    /// A tensor of stored bytes, row-major, in the host's byte order.
    pub fn from_bytes(rt: &R, shape: Shape, dtype: crate::DType, bytes: &[u8]) -> Result<Self> {
        if bytes.len() != shape.numel() * dtype.size() {
            let why = format!("{} bytes of {dtype}, but {} were given", shape.numel() * dtype.size(), bytes.len());
            return Err(Error::shape("from_bytes", &[shape], why));
        }
        let mut out = TensorMut::alloc(rt, shape, dtype)?;
        rt.upload(bytes, out.out().view)?;
        out.freeze()
    }

    /// The values in row-major order. `E` must be the tensor's element type: nothing is converted silently.
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>> {
        if self.dtype() != E::DTYPE {
            return Err(wrong_element("to_vec", self.dtype(), E::DTYPE));
        }
        let mut out = vec![E::default(); self.shape().numel()];
        E::fill(&mut out, &self.to_bytes()?);
        Ok(out)
    }

    /// The values in row-major order, each as the nearest `f64`, whatever the element type.
    pub fn to_f64s(&self) -> Result<Vec<f64>> {
        fn convert<R: Runtime, E: Element>(t: &Tensor<R>) -> Result<Vec<f64>> {
            Ok(t.to_vec::<E>()?.into_iter().map(E::to_f64).collect())
        }
        use crate::DType::*;
        match self.dtype() {
            F32 => convert::<R, f32>(self),
            F64 => convert::<R, f64>(self),
            F16 => convert::<R, half::f16>(self),
            BF16 => convert::<R, half::bf16>(self),
            I32 => convert::<R, i32>(self),
            I64 => convert::<R, i64>(self),
            U32 => convert::<R, u32>(self),
            U8 => convert::<R, u8>(self),
            Bool => convert::<R, bool>(self),
        }
    }

    /// The stored bytes, row-major.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let dense = self.contiguous()?;
        let mut out = vec![0; dense.shape().numel() * dense.dtype().size()];
        dense.runtime().download(dense.view(), &mut out)?;
        Ok(out)
    }

    /// The only element, as `f64`: for losses and metrics.
    pub fn item(&self) -> Result<f64> {
        if self.shape().numel() != 1 {
            return Err(Error::shape("item", &[*self.shape()], "only a tensor of one element has an item"));
        }
        Ok(self.to_f64s()?[0])
    }

    /// The same values on another runtime, through host memory when the devices differ.
    pub fn to_device<S: Runtime>(&self, rt: &S) -> Result<Tensor<S>> {
        Tensor::from_bytes(rt, *self.shape(), self.dtype(), &self.to_bytes()?)
    }
}
