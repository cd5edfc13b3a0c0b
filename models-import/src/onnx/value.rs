//! PassValues between nodes: variables on the device, or small values on the host.

use std::sync::{Arc, OnceLock};

use autograd::Var;
use numcore::{Result, Runtime, Tensor, ops::Apply};

use super::host::HostArray;

/// A value that a node reads or makes. A clone is the same value.
#[derive(Clone)]
pub(super) enum NodeValue<R: Runtime> {
    Device(Var<R>),
    Host(Arc<UploadedArray<R>>),
}

/// A value on the host, and on the device after the first use there.
pub(super) struct UploadedArray<R: Runtime> {
    pub(super) host: HostArray,
    uploaded: OnceLock<Var<R>>,
}

impl<R: Runtime> NodeValue<R> {
    pub(super) fn of(host: HostArray) -> Self {
        NodeValue::Host(Arc::new(UploadedArray { host, uploaded: OnceLock::new() }))
    }

    /// A constant: on the host if it is small.
    pub(super) fn constant(x: Tensor<R>) -> Result<Self> {
        Ok(HostArray::read(&x)?.map_or_else(|| NodeValue::Device(Var::new(x)), NodeValue::of))
    }

    pub(super) fn host(&self) -> Option<&HostArray> {
        match self {
            NodeValue::Host(hosted) => Some(&hosted.host),
            NodeValue::Device(_) => None,
        }
    }

    /// The value on the device.
    pub(super) fn var(&self, device: &R) -> Result<&Var<R>> {
        match self {
            NodeValue::Device(x) => Ok(x),
            NodeValue::Host(hosted) => match hosted.uploaded.get() {
                Some(x) => Ok(x),
                None => {
                    let x = Var::constant(hosted.host.upload(device)?);
                    Ok(hosted.uploaded.get_or_init(|| x))
                }
            },
        }
    }
}
