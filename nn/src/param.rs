//! What modules are made of: parameters, which are learned; buffers, which are kept; modes, which say what the model is doing.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use autograd::{Leaf, Var};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    ops::{Apply, PointwiseOps, Spec},
};
use parking_lot::RwLock;

/// A parameter: a leaf of every graph the model records. Clones are the same parameter, so two layers can share one.
pub struct Param<R: Runtime>(Arc<RwLock<Arc<Leaf<R>>>>);

impl<R: Runtime> Clone for Param<R> {
    fn clone(&self) -> Self {
        Param(self.0.clone())
    }
}

impl<R: Runtime> Param<R> {
    /// A parameter with this value. It gets its name from the model it is part of.
    pub fn new(value: Tensor<R>) -> Result<Self> {
        Ok(Param(Arc::new(RwLock::new(Leaf::new("parameter", value)?))))
    }

    /// The parameter behind which this leaf is.
    pub(crate) fn of(leaf: Arc<Leaf<R>>) -> Self {
        Param(Arc::new(RwLock::new(leaf)))
    }

    /// The parameter as a variable, to compute with.
    pub fn var(&self) -> Var<R> {
        self.0.read().var()
    }

    /// Its value; fetched where it is not in memory.
    pub fn value(&self) -> Result<Tensor<R>> {
        self.0.read().value()
    }

    /// The leaf behind it. [`to_dtype`](Param::to_dtype) puts another in its place.
    pub fn leaf(&self) -> Arc<Leaf<R>> {
        self.0.read().clone()
    }

    /// Replaces its value by another of the same shape and dtype.
    pub fn set(&self, value: Tensor<R>) -> Result<()> {
        self.0.read().set(value)
    }

    /// Its shape and dtype.
    pub fn spec(&self) -> Spec {
        self.0.read().spec()
    }

    /// Its sizes.
    pub fn shape(&self) -> Shape {
        self.spec().shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.spec().dtype
    }

    /// Whether it is trained.
    pub fn requires_grad(&self) -> bool {
        self.0.read().requires_grad()
    }

    /// Freezes it, or trains it again.
    pub fn set_requires_grad(&self, yes: bool) {
        self.0.read().set_requires_grad(yes);
    }

    /// Casts its value. The parameter gets another leaf: graphs, optimizers and trainers that know the old one do not see it,
    /// so cast before they are made.
    pub fn to_dtype(&self, dtype: DType) -> Result<()> {
        let old = self.leaf();
        if old.spec().dtype == dtype {
            return Ok(());
        }
        let new = Leaf::new(&old.name(), old.value()?.to_dtype(dtype)?)?;
        new.set_requires_grad(old.requires_grad());
        *self.0.write() = new;
        Ok(())
    }

    /// Whether both are the same parameter.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Its identity, for look-up only.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

impl<R: Runtime> fmt::Debug for Param<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Param({} {})", self.dtype(), self.shape())
    }
}

/// A value that belongs to the model's state and is not learned by gradients: running statistics. Clones are the same buffer.
pub struct Buffer<R: Runtime>(Arc<RwLock<Tensor<R>>>);

impl<R: Runtime> Clone for Buffer<R> {
    fn clone(&self) -> Self {
        Buffer(self.0.clone())
    }
}

impl<R: Runtime> Buffer<R> {
    /// A buffer with this value.
    pub fn new(value: Tensor<R>) -> Self {
        Buffer(Arc::new(RwLock::new(value)))
    }

    /// Its value.
    pub fn value(&self) -> Tensor<R> {
        self.0.read().clone()
    }

    /// Its value as a variable that no gradient flows to.
    pub fn var(&self) -> Var<R> {
        Var::new(self.value())
    }

    /// Replaces its value by another of the same shape and dtype.
    pub fn set(&self, value: Tensor<R>) -> Result<()> {
        let (is, got) = (self.spec(), value.spec());
        if is != got {
            return Err(Error::state(
                "buffer",
                format!("is {} {}, the new value is {} {}", is.dtype, is.shape, got.dtype, got.shape),
            ));
        }
        *self.0.write() = value;
        Ok(())
    }

    /// Its shape and dtype.
    pub fn spec(&self) -> Spec {
        self.0.read().spec()
    }

    /// Casts its value.
    pub fn to_dtype(&self, dtype: DType) -> Result<()> {
        let value = self.value().to_dtype(dtype)?;
        *self.0.write() = value;
        Ok(())
    }

    /// Its identity, for look-up only.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

impl<R: Runtime> fmt::Debug for Buffer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { shape, dtype } = self.spec();
        write!(f, "Buffer({dtype} {shape})")
    }
}

/// Whether the model trains or is being used: what dropout and batch norm ask. It starts in training.
#[derive(Debug)]
pub struct Mode(AtomicBool);

impl Default for Mode {
    fn default() -> Self {
        Mode(AtomicBool::new(true))
    }
}

impl Mode {
    /// Whether the model trains.
    pub fn is_training(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Says whether it does.
    pub fn set_training(&self, yes: bool) {
        self.0.store(yes, Ordering::Relaxed);
    }
}
