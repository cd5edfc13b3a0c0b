//! The source of parameters that are not in memory.

use std::sync::Weak;

use autograd::{Leaf, Residency};
use numcore::{Error, ErrorKind, Result, Runtime, Tensor};
use parking_lot::Mutex;

use super::engine::ZeroEngine;

/// Gathers a leaf's unit when its value is read, in forward, evaluation, recomputation and backward alike. It does not
/// keep the engine alive.
pub(super) struct ZeroResidency<R: Runtime>(pub(super) Weak<Mutex<ZeroEngine<R>>>);

impl<R: Runtime> Residency<R> for ZeroResidency<R> {
    fn fetch(&self, leaf: &Leaf<R>) -> Result<Tensor<R>> {
        let gone = || Error::from(ErrorKind::NotResident { name: leaf.name().to_string() });
        let engine = self.0.upgrade().ok_or_else(gone)?;
        let mut engine = engine.lock();
        engine.value(leaf).ok_or_else(gone)?
    }
}
