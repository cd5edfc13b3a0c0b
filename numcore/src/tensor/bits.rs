//! Bit casts: the bits of elements, read as another dtype.

use std::sync::Arc;

use super::{Tensor, TensorData, TensorMemory};
use crate::{DType, Error, Result, Runtime, Within};

impl<R: Runtime> Tensor<R> {
    /// A view of the bits as elements of another dtype of the same size, such as `f32` as `u32`. It copies nothing and
    /// has no gradient. A cast to `bool` is an error, because only the bytes 0 and 1 are values of it.
    #[doc(alias = "view")]
    #[doc(alias = "bitcast")]
    #[track_caller]
    pub fn bit_cast(&self, dtype: DType) -> Result<Self> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        if dtype.size() != self.dtype().size() || dtype == DType::Bool {
            let why = "needs types of one size, and not `bool` as the result, of which only 0 and 1 are values";
            return Err(Error::dtype("bit_cast", &[self.dtype(), dtype], why)).at_caller();
        }
        let memory = TensorMemory::Of(self.owner().clone());
        Ok(Tensor(Arc::new(TensorData { rt: self.runtime().clone(), memory, layout: *self.layout(), dtype })))
    }
}
