//! Copies of batches from host memory to a device.

use std::collections::BTreeMap;

use numcore::{Result, Runtime, Tensor};

use crate::Array;

/// A batch that can be copied to a device; [`Loader::on`](crate::Loader::on) does so ahead of use. Arrays become
/// tensors, also in tuples and maps. Strings stay on the host.
pub trait ToDevice<R: Runtime> {
    /// The batch with its arrays as tensors on the device.
    type OnDevice;

    /// Copies the batch to the device of `rt`.
    fn to_device(self, rt: &R) -> Result<Self::OnDevice>;
}

impl<R: Runtime> ToDevice<R> for Array {
    type OnDevice = Tensor<R>;

    fn to_device(self, rt: &R) -> Result<Tensor<R>> {
        self.to_tensor(rt)
    }
}

impl<R: Runtime> ToDevice<R> for Vec<String> {
    type OnDevice = Vec<String>;

    fn to_device(self, _rt: &R) -> Result<Vec<String>> {
        Ok(self)
    }
}

impl<R: Runtime, A: ToDevice<R>, B: ToDevice<R>> ToDevice<R> for (A, B) {
    type OnDevice = (A::OnDevice, B::OnDevice);

    fn to_device(self, rt: &R) -> Result<Self::OnDevice> {
        Ok((self.0.to_device(rt)?, self.1.to_device(rt)?))
    }
}

impl<R: Runtime, A: ToDevice<R>, B: ToDevice<R>, C: ToDevice<R>> ToDevice<R> for (A, B, C) {
    type OnDevice = (A::OnDevice, B::OnDevice, C::OnDevice);

    fn to_device(self, rt: &R) -> Result<Self::OnDevice> {
        Ok((self.0.to_device(rt)?, self.1.to_device(rt)?, self.2.to_device(rt)?))
    }
}

impl<R: Runtime, T: ToDevice<R>> ToDevice<R> for BTreeMap<String, T> {
    type OnDevice = BTreeMap<String, T::OnDevice>;

    fn to_device(self, rt: &R) -> Result<Self::OnDevice> {
        self.into_iter().map(|(name, value)| Ok((name, value.to_device(rt)?))).collect()
    }
}
