//! Leaves: the named values at which a graph starts, in memory or fetched on demand.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use numcore::{
    DeviceId, Error, ErrorKind, Layout, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, Spec, ViewOp},
    placement::TensorPlacement,
};
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::Var;

/// The source of a leaf's value that is not in memory, such as a sharded parameter. Forward, evaluation, recomputation
/// and backward fetch from it alike.
pub trait Residency<R: Runtime>: Send + Sync {
    /// Fetches the value, unsharded. The leaf does not keep it.
    fn fetch(&self, leaf: &Leaf<R>) -> Result<Tensor<R>>;

    /// Fetches a piece of the value into memory of its own. The default fetches the whole value and copies the piece.
    fn fetch_piece(&self, leaf: &Leaf<R>, piece: &TensorPlacement) -> Result<Tensor<R>> {
        // The copy lets the memory of the whole value be freed.
        piece.take(&self.fetch(leaf)?)?.copy()
    }
}

/// A value at which the graph starts: a parameter, or an input whose gradient is wanted.
pub struct Leaf<R: Runtime> {
    rt: R,
    spec: Spec,
    name: RwLock<Arc<str>>,
    state: RwLock<LeafValue<R>>,
    requires_grad: AtomicBool,
    residency: RwLock<Option<Arc<dyn Residency<R>>>>,
}

struct LeafValue<R: Runtime> {
    value: Option<Tensor<R>>,
    version: u64,
}

impl<R: Runtime> Leaf<R> {
    /// A leaf with the given value in memory. It requires gradients if its dtype is floating-point.
    #[track_caller]
    pub fn new(name: &str, value: Tensor<R>) -> Result<Arc<Self>> {
        let value = value.contiguous()?;
        Ok(Arc::new(Leaf {
            rt: value.runtime().clone(),
            spec: value.spec(),
            name: RwLock::new(name.into()),
            requires_grad: AtomicBool::new(value.dtype().is_float()),
            state: RwLock::new(LeafValue { value: Some(value), version: 0 }),
            residency: RwLock::default(),
        }))
    }

    /// A leaf without a value in memory: `residency` fetches the value whenever it is read.
    pub fn absent(name: &str, rt: &R, spec: Spec, residency: Arc<dyn Residency<R>>) -> Arc<Self> {
        Arc::new(Leaf {
            rt: rt.clone(),
            spec,
            name: RwLock::new(name.into()),
            requires_grad: AtomicBool::new(spec.dtype.is_float()),
            state: RwLock::new(LeafValue { value: None, version: 0 }),
            residency: RwLock::new(Some(residency)),
        })
    }

    /// The name of this leaf in errors and state dicts.
    pub fn name(&self) -> Arc<str> {
        self.name.read().clone()
    }

    /// Sets the leaf's full name, its path in the model.
    pub fn rename(&self, name: &str) {
        *self.name.write() = name.into();
    }

    /// The shape and dtype of this leaf, known also while its value is not in memory.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// The runtime on which the leaf's values are.
    pub fn runtime(&self) -> &R {
        &self.rt
    }

    /// Tells whether gradients flow to this leaf.
    pub fn requires_grad(&self) -> bool {
        self.requires_grad.load(Ordering::Relaxed)
    }

    /// Freezes this leaf (`false`), or lets gradients flow to it again (`true`). Integer leaves stay without gradients.
    pub fn set_requires_grad(&self, yes: bool) {
        self.requires_grad.store(yes && self.spec.dtype.is_float(), Ordering::Relaxed);
    }

    /// The value in memory, or else fetched by the leaf's residency.
    ///
    /// # Errors
    /// An error of the residency, and `ErrorKind::NotResident` if there is neither a value nor a residency.
    #[track_caller]
    pub fn value(&self) -> Result<Tensor<R>> {
        if let Some(v) = &self.state.read().value {
            return Ok(v.clone());
        }
        let residency = self.residency.read().clone();
        match residency {
            Some(r) => {
                let value = r.fetch(self)?;
                self.check(&value, "what its residency fetched")?;
                Ok(value)
            }
            None => Err(ErrorKind::NotResident { name: self.name().to_string() }.into()).at_caller(),
        }
    }

    /// Copies a piece of the value in memory, or else fetches the piece from the leaf's residency.
    ///
    /// # Errors
    /// An error of the residency, and `ErrorKind::NotResident` if there is neither a value nor a residency.
    pub fn piece(&self, piece: &TensorPlacement) -> Result<Tensor<R>> {
        if let Some(value) = &self.state.read().value {
            return piece.take(value)?.copy();
        }
        match self.residency.read().clone() {
            Some(residency) => residency.fetch_piece(self, piece),
            None => Err(ErrorKind::NotResident { name: self.name().to_string() }.into()),
        }
    }

    /// Tells whether the value is in memory.
    pub fn is_resident(&self) -> bool {
        self.state.read().value.is_some()
    }

    /// The number of changes of the value so far, by `set` and `touch`.
    pub fn version(&self) -> u64 {
        self.state.read().version
    }

    /// Returns an error if the value changed since it had the version `saved`.
    pub(crate) fn unchanged_since(&self, saved: u64) -> Result<()> {
        match self.version() {
            now if now == saved => Ok(()),
            now => Err(ErrorKind::Stale { name: self.name().to_string(), saved, now }.into()),
        }
    }

    /// Replaces the value. Values that the tape saved for a pending backward pass become stale, and using them is an
    /// error.
    ///
    /// # Errors
    /// An error if `value` differs from the leaf in shape, dtype or device.
    #[track_caller]
    pub fn set(&self, value: Tensor<R>) -> Result<()> {
        self.put(value)?;
        self.touch();
        Ok(())
    }

    /// Records that the value changed in place: values saved for a pending backward pass become stale.
    pub fn touch(&self) {
        self.state.write().version += 1;
    }

    /// Restores a value that [`take`](Leaf::take) removed, or that a residency fetched. The version stays, so no saved
    /// value becomes stale.
    ///
    /// # Errors
    /// An error if `value` differs from the leaf in shape, dtype or device.
    #[track_caller]
    pub fn put(&self, value: Tensor<R>) -> Result<()> {
        self.check(&value, "the new value")?;
        self.state.write().value = Some(value.contiguous()?);
        Ok(())
    }

    /// Returns an error unless `value` has this leaf's shape, dtype and device.
    pub(crate) fn check(&self, value: &Tensor<R>, what: &str) -> Result<()> {
        self.check_spec(value.spec(), value.device(), what)
    }

    /// Returns an error unless `got` (shape and dtype) and `device` are those of this leaf.
    pub(crate) fn check_spec(&self, got: Spec, device: DeviceId, what: &str) -> Result<()> {
        let (is, home) = (self.spec, self.rt.device());
        if is != got {
            let why = format!("is {} {}, {what} is {} {}", is.dtype, is.shape, got.dtype, got.shape);
            return Err(Error::state(self.name().to_string(), why));
        }
        if home != device {
            return Err(Error::state(self.name().to_string(), format!("is on {home}, {what} is on {device}")));
        }
        Ok(())
    }

    /// Takes the value out of memory, to update it in place or to release it.
    pub fn take(&self) -> Option<Tensor<R>> {
        self.state.write().value.take()
    }

    /// Sets the source from which a value that is not in memory is fetched.
    pub fn set_residency(&self, residency: Arc<dyn Residency<R>>) {
        *self.residency.write() = Some(residency);
    }

    /// The leaf as a variable of the graph.
    pub fn var(self: &Arc<Self>) -> Var<R> {
        Var::of_leaf(LeafView::whole(self))
    }

    /// The identity of this leaf, for look-up only: any order comes from the names in the model.
    pub fn id(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }
}

impl<R: Runtime> std::fmt::Debug for Leaf<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Leaf({} {} {})", self.name(), self.spec.dtype, self.spec.shape)
    }
}

/// A leaf, or a chain of views of a leaf. It is no node of the tape: its gradient is written through the same views
/// into the leaf's slot.
pub struct LeafView<R: Runtime> {
    leaf: Arc<Leaf<R>>,
    views: SmallVec<[ViewOp; 1]>,
    layout: Layout,
}

impl<R: Runtime> LeafView<R> {
    pub(crate) fn whole(leaf: &Arc<Leaf<R>>) -> Arc<Self> {
        let layout = Layout::contiguous(leaf.spec.shape);
        Arc::new(LeafView { leaf: leaf.clone(), views: SmallVec::new(), layout })
    }

    /// The leaf under the views.
    pub fn leaf(&self) -> &Arc<Leaf<R>> {
        &self.leaf
    }

    /// The views in the order in which they apply to the leaf.
    pub fn views(&self) -> &[ViewOp] {
        &self.views
    }

    pub(crate) fn spec(&self) -> Spec {
        Spec { shape: *self.layout.shape(), dtype: self.leaf.spec.dtype }
    }

    pub(crate) fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.views.is_empty()
    }

    #[track_caller]
    pub(crate) fn value(&self) -> Result<Tensor<R>> {
        self.views.iter().try_fold(self.leaf.value()?, |t, v| Tensor::apply1(v.clone(), &[&t]))
    }

    /// The composition with one more view. It is `None` if strides cannot express it or elements would repeat.
    pub(crate) fn then(&self, view: &ViewOp) -> Result<Option<Arc<Self>>> {
        let Some(layout) = view.layout(&self.layout)?.filter(|l| !l.overlaps_itself()) else { return Ok(None) };
        let mut views = self.views.clone();
        views.push(view.clone());
        Ok(Some(Arc::new(LeafView { leaf: self.leaf.clone(), views, layout })))
    }
}
