//! Addresses of tensors for the library.

use numcore::{Error, Result, Runtime, Tensor, TensorMut};

/// Finds addresses of memory that is used on one queue.
pub(crate) struct Addresses<'a, R: Runtime> {
    pub(crate) op: &'static str,
    pub(crate) queue: &'a R,
    /// True if the library takes host memory.
    pub(crate) host: bool,
}

impl<R: Runtime> Addresses<'_, R> {
    /// The address of a tensor that is only read.
    pub(crate) fn of(&self, x: &Tensor<R>) -> Result<u64> {
        let host = || self.host.then(|| x.host_bytes().map(|bytes| bytes.as_ptr() as u64)).flatten();
        x.device_address(self.queue).or_else(host).ok_or_else(|| self.unreachable())
    }

    /// The address of memory that may be written.
    pub(crate) fn of_mut(&self, x: &mut TensorMut<R>) -> Result<u64> {
        if let Some(at) = x.device_address(self.queue) {
            return Ok(at);
        }
        let host = if self.host { x.host_bytes_mut() } else { None };
        host.map(|bytes| bytes.as_mut_ptr() as u64).ok_or_else(|| self.unreachable())
    }

    /// The error of a call without an input whose plan reads one.
    pub(crate) fn nothing_to_send(&self) -> Error {
        Error::internal(self.op, "a call without an input is to send it")
    }

    fn unreachable(&self) -> Error {
        let why = "NCCL moves memory of NVIDIA GPUs; use another engine there";
        Error::unsupported_on(self.queue.device(), self.op, why)
    }
}
