//! Transfers between tensors and host memory.

use super::{Tensor, TensorMut, wrong_element};
use crate::{DeviceId, DeviceKind, Element, Error, ErrorKind, MemoryReport, Result, Runtime, Shape, Within};

impl<R: Runtime> Tensor<R> {
    /// A tensor of `shape` with the values of `data` in row-major order; the lengths must agree.
    #[track_caller]
    pub fn from_slice<E: Element>(rt: &R, shape: impl AsRef<[usize]>, data: &[E]) -> Result<Self> {
        let shape = Shape::new(shape.as_ref())?;
        if shape.numel() != data.len() {
            let why = format!("{} elements, but {} values were given", shape.numel(), data.len());
            return Err(Error::shape("from_slice", &[shape], why)).at_caller();
        }
        Self::from_bytes(rt, shape, E::DTYPE, E::bytes(data))
    }

    /// A one-dimensional tensor of the elements of `data`.
    #[track_caller]
    pub fn from_vec<E: Element>(rt: &R, data: Vec<E>) -> Result<Self> {
        Self::from_slice(rt, [data.len()], &data)
    }

    /// A tensor of stored bytes: row-major elements in the host's byte order.
    #[track_caller]
    pub fn from_bytes(rt: &R, shape: Shape, dtype: crate::DType, bytes: &[u8]) -> Result<Self> {
        let shape = shape.checked("from_bytes")?;
        if bytes.len() != shape.numel() * dtype.size() {
            let why = format!("{} bytes of {dtype}, but {} were given", shape.numel() * dtype.size(), bytes.len());
            return Err(Error::shape("from_bytes", &[shape], why)).at_caller();
        }
        let mut out = TensorMut::alloc(rt, shape, dtype)?;
        rt.upload(bytes, out.out().view)?;
        out.freeze()
    }

    /// The values in row-major order. `E` must be the tensor's element type: nothing is converted silently.
    #[track_caller]
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>> {
        if self.dtype() != E::DTYPE {
            return Err(wrong_element("to_vec", self.dtype(), E::DTYPE)).at_caller();
        }
        let bytes = self.to_bytes()?;
        let mut out = zeros(self.shape().numel(), self.live())?;
        E::fill(&mut out, &bytes);
        Ok(out)
    }

    /// The values in row-major order, each as the nearest `f64`, for every dtype.
    #[track_caller]
    pub fn to_f64s(&self) -> Result<Vec<f64>> {
        fn convert<R: Runtime, E: Element>(t: &Tensor<R>) -> Result<Vec<f64>> {
            let values = t.to_vec::<E>()?;
            let mut out = zeros(values.len(), t.live())?;
            out.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_f64());
            Ok(out)
        }
        use crate::DType::*;
        let decoded = |decode: fn(u8) -> f32| {
            let codes = self.to_bytes()?;
            let mut out = zeros(codes.len(), self.live())?;
            out.iter_mut().zip(codes).for_each(|(to, code)| *to = f64::from(decode(code)));
            Ok(out)
        };
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
            F8E4M3 => decoded(crate::float8::E4M3::decode),
            F8E5M2 => decoded(crate::float8::E5M2::decode),
        }
    }

    /// The stored bytes of the elements in row-major order, copied to the host.
    #[track_caller]
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let dense = self.contiguous()?;
        let mut out = zeros(dense.shape().numel() * dense.dtype().size(), self.live())?;
        dense.runtime().download(dense.view(), &mut out)?;
        Ok(out)
    }

    /// Copies the stored bytes, row-major, into a vector whose allocation is reused; they replace its contents.
    ///
    /// # Errors
    /// Fails as [`to_bytes`](Tensor::to_bytes) does, and if the vector is too small and the host cannot allocate a
    /// larger one.
    #[track_caller]
    pub fn to_bytes_in(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let dense = self.contiguous()?;
        let len = dense.shape().numel() * dense.dtype().size();
        if bytes.capacity() < len {
            *bytes = Vec::new();
            *bytes = zeros(len, self.live())?;
        }
        bytes.resize(len, 0);
        dense.runtime().download(dense.view(), bytes)
    }

    /// The stored bytes of a contiguous tensor in host memory, without a copy. `None` for other tensors, whose bytes
    /// [`to_bytes`](Tensor::to_bytes) copies.
    pub fn host_bytes(&self) -> Option<&[u8]> {
        self.layout().is_contiguous().then(|| self.runtime().host_bytes(self.view())).flatten()
    }

    /// The element of a tensor with one element, as the nearest `f64`: for losses and metrics.
    /// [`item_as`](Tensor::item_as) returns an `i64` exactly.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        self.one_element()?;
        Ok(self.to_f64s()?[0])
    }

    /// The element of a tensor with one element, as it is stored. `E` must be the tensor's element type: nothing is
    /// converted silently.
    #[doc(alias = "to_scalar")]
    #[track_caller]
    pub fn item_as<E: Element>(&self) -> Result<E> {
        self.one_element()?;
        if self.dtype() != E::DTYPE {
            return Err(wrong_element("item_as", self.dtype(), E::DTYPE)).at_caller();
        }
        Ok(self.to_vec::<E>()?[0])
    }

    #[track_caller]
    fn one_element(&self) -> Result<()> {
        match self.shape().numel() {
            1 => Ok(()),
            _ => Err(Error::shape("item", &[*self.shape()], "only a tensor of one element has an item")).at_caller(),
        }
    }

    /// A tensor of the same values on another runtime, always copied through host memory.
    #[track_caller]
    pub fn to_device<S: Runtime>(&self, rt: &S) -> Result<Tensor<S>> {
        Tensor::from_bytes(rt, *self.shape(), self.dtype(), &self.to_bytes()?)
    }
    /// The bytes in use in host memory, as the tensor's runtime counts them; 0 for a device other than the CPU.
    fn live(&self) -> usize {
        let on_host = self.device().kind == DeviceKind::Cpu;
        if on_host { self.runtime().memory().total.live } else { 0 }
    }
}

impl<R: Runtime> TensorMut<R> {
    /// The stored bytes of contiguous host memory, for a transport between processes to receive into. The memory counts
    /// as written. `None` for strided memory and on devices whose memory is not the host's.
    pub fn host_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let rt = self.runtime().clone();
        if !self.memory.layout().is_contiguous() {
            return None;
        }
        rt.host_bytes_mut(self.rewritten())
    }

    /// Copies the stored bytes of row-major memory to the host; blocks until the device is done.
    #[track_caller]
    pub fn copy_to_host(&self, to: &mut [u8]) -> Result<()> {
        self.check_row("copy_to_host", to.len())?;
        self.runtime().download(self.view(), to)
    }

    /// Fills row-major memory from stored bytes. The memory must start at offset 0 of its buffer, as fresh memory does.
    #[track_caller]
    pub fn copy_from_host(&mut self, from: &[u8]) -> Result<()> {
        self.check_row("copy_from_host", from.len())?;
        if self.memory.layout().offset() != 0 {
            let why = "memory inside a buffer is not filled from the host: fill fresh memory, and copy it";
            return Err(Error::usage("copy_from_host", why)).at_caller();
        }
        let rt = self.runtime().clone();
        rt.upload(from, self.rewritten())
    }

    fn check_row(&self, op: &'static str, bytes: usize) -> Result<()> {
        let (layout, due) = (self.memory.layout(), self.shape().numel() * self.dtype().size());
        if layout.is_contiguous() && bytes == due {
            return Ok(());
        }
        Err(Error::shape(op, &[*self.shape()], format!("row-major memory of {due} bytes, but {bytes} were given")))
    }
}

/// `len` zeros in host memory, of which `live` bytes are in use. Too little memory is an error, not an abort.
pub(crate) fn zeros<E: Default + Clone>(len: usize, live: usize) -> Result<Vec<E>> {
    let mut out = Vec::new();
    resize(&mut out, len, live)?;
    Ok(out)
}

/// Resizes a vector in host memory, with the checks of [`zeros`].
pub(crate) fn resize<E: Default + Clone>(out: &mut Vec<E>, len: usize, live: usize) -> Result<()> {
    let device = DeviceId { kind: DeviceKind::Cpu, index: 0 };
    let requested = len.saturating_mul(size_of::<E>());
    let full = |_| ErrorKind::OutOfMemory { device, requested, report: Box::new(MemoryReport::of_live(live)) };
    out.try_reserve_exact(len.saturating_sub(out.len())).map_err(full)?;
    out.resize(len, E::default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, NullRuntime, ops::ViewOps};

    #[test]
    fn values_that_host_memory_cannot_hold_are_an_error() {
        // One element seen 2⁵⁰ times. The null runtime has memory for all of them.
        let one = Tensor::ones(&NullRuntime::new(), [1], DType::F32).unwrap();
        let huge = one.broadcast_to([1 << 50]).unwrap();
        let requested_by = |e: Error| match e.kind() {
            ErrorKind::OutOfMemory { requested, .. } => *requested,
            _ => panic!("{e}"),
        };
        assert_eq!(requested_by(huge.to_bytes().unwrap_err()), 1 << 52);
        assert_eq!(requested_by(huge.to_vec::<f32>().unwrap_err()), 1 << 52);
        assert_eq!(requested_by(huge.to_f64s().unwrap_err()), 1 << 52);
        assert!(huge.to_device(&NullRuntime::new()).is_err());
        assert!(huge.to_string().contains("not readable"));
    }

    #[test]
    fn a_length_past_the_address_space_is_an_error() {
        assert!(zeros::<f64>(usize::MAX, 0).is_err());
        let mut bytes = vec![1u8; 3];
        assert!(resize(&mut bytes, usize::MAX / 2, 7).unwrap_err().to_string().contains("7 B are in use"));
        resize(&mut bytes, 5, 0).unwrap();
        assert_eq!(bytes, [1, 1, 1, 0, 0]);
        resize(&mut bytes, 1, 0).unwrap();
        assert_eq!(bytes, [1]);
    }
}
