//! The state of modules: parameters, which are learned; buffers, which are kept; modes, which switch between training
//! and evaluation.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use autograd::{Leaf, Var};
use numcore::{
    DType, Error, MemoryCategory, Result, Runtime, Shape, Tensor, Within,
    ops::{Apply, Op, PointwiseOps, Spec},
    placement::TensorPlacement,
};
use parking_lot::RwLock;

use crate::{
    parallel::{Cuts, PieceOf, Placed},
    replaced::replaced,
};

/// A parameter: a leaf of every graph that the model records. A clone is the same parameter, so two layers can share
/// one.
pub struct Param<R: Runtime>(Arc<ParamState<R>>);

struct ParamState<R: Runtime> {
    leaf: RwLock<Arc<Leaf<R>>>,
    /// The cuts that the layer allows.
    cuts: RwLock<Cuts>,
    /// The placement of this rank's piece, if a plan cut the model.
    placed: RwLock<Option<Arc<Placed<R>>>>,
    /// The identity shared by duplicates of one parameter.
    origin: Arc<()>,
}

impl<R: Runtime> Clone for Param<R> {
    fn clone(&self) -> Self {
        Param(self.0.clone())
    }
}

impl<R: Runtime> Param<R> {
    /// A parameter with this value. The model it is part of gives it a name.
    #[track_caller]
    pub fn new(value: Tensor<R>) -> Result<Self> {
        Ok(Param::of(Leaf::new("parameter", value)?))
    }

    /// The parameter of a leaf.
    pub(crate) fn of(leaf: Arc<Leaf<R>>) -> Self {
        Param::from_origin(leaf, Arc::default())
    }

    fn from_origin(leaf: Arc<Leaf<R>>, origin: Arc<()>) -> Self {
        let (leaf, cuts, placed) = (RwLock::new(leaf), RwLock::default(), RwLock::default());
        Param(Arc::new(ParamState { leaf, cuts, placed, origin }))
    }

    /// The parameter as a variable, to compute with; in a [`functional_call`](crate::functional_call), the variable in
    /// its place.
    pub fn var(&self) -> Var<R> {
        replaced(self.id()).unwrap_or_else(|| self.0.leaf.read().var())
    }

    /// The value of this parameter; fetched where it is not in memory.
    #[track_caller]
    pub fn value(&self) -> Result<Tensor<R>> {
        self.leaf().var().value()
    }

    /// The leaf of this parameter. [`to_dtype`](Param::to_dtype) replaces it.
    pub fn leaf(&self) -> Arc<Leaf<R>> {
        self.0.leaf.read().clone()
    }

    /// Replaces the value by another of the same shape and dtype.
    #[track_caller]
    pub fn set(&self, value: Tensor<R>) -> Result<()> {
        self.0.leaf.read().set(value)
    }

    /// The shape and dtype of this parameter.
    pub fn spec(&self) -> Spec {
        self.0.leaf.read().spec()
    }

    /// The sizes of this parameter.
    pub fn shape(&self) -> Shape {
        self.spec().shape
    }

    /// The element type of this parameter.
    pub fn dtype(&self) -> DType {
        self.spec().dtype
    }

    /// Tells whether the parameter is trained.
    pub fn requires_grad(&self) -> bool {
        self.0.leaf.read().requires_grad()
    }

    /// Freezes this parameter (`false`), or trains it again (`true`).
    pub fn set_requires_grad(&self, yes: bool) {
        self.0.leaf.read().set_requires_grad(yes);
    }

    /// Casts the value of this parameter. The parameter gets another leaf: graphs, optimizers and trainers that hold
    /// the old leaf do not see it, so cast before they are created.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<()> {
        let old = self.leaf();
        if old.spec().dtype == dtype {
            return Ok(());
        }
        let new = Leaf::new(&old.name(), old.value()?.to_dtype(dtype)?)?;
        new.set_requires_grad(old.requires_grad());
        *self.0.leaf.write() = new;
        Ok(())
    }

    /// Another parameter that begins with the value of this one, and is cut, or can be cut, as this one. A
    /// [lazily](crate::Init::lazily) drawn parameter stays undrawn until it is read.
    #[track_caller]
    pub fn duplicate(&self) -> Result<Self> {
        let old = self.leaf();
        let leaf = if old.is_resident() {
            Leaf::new(&old.name(), old.value()?)?
        } else {
            let piece = PieceOf { placement: TensorPlacement::whole(old.spec().shape), whole: old.clone() };
            Leaf::absent(&old.name(), old.runtime(), old.spec(), Arc::new(piece))
        };
        leaf.set_requires_grad(old.requires_grad());
        let copy = Param::from_origin(leaf, self.0.origin.clone()).with_cuts(self.cuts());
        *copy.0.placed.write() = self.placed();
        Ok(copy)
    }

    /// The identity that a parameter and its [duplicates](Param::duplicate) have in common, for look-up only.
    pub fn origin(&self) -> usize {
        Arc::as_ptr(&self.0.origin) as usize
    }

    /// Tells whether both are the same parameter.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The identity of this parameter, for look-up only.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    /// This parameter, of which its layer says what can be cut of it over ranks.
    pub fn with_cuts(self, cuts: Cuts) -> Self {
        *self.0.cuts.write() = cuts;
        self
    }

    /// The cuts that a tensor-parallel plan may choose.
    pub fn cuts(&self) -> Cuts {
        *self.0.cuts.read()
    }

    /// The placement of this rank's piece, and the style of its layer; none if the model is whole.
    pub fn placed(&self) -> Option<Arc<Placed<R>>> {
        self.0.placed.read().clone()
    }

    /// The sizes of the whole parameter, of which this rank may have a piece.
    pub fn logical_shape(&self) -> Shape {
        self.placed().map_or_else(|| self.shape(), |placed| placed.placement().logical())
    }

    /// This rank's piece of a value of the whole parameter; a value that is not of the whole one is given back.
    pub(crate) fn piece_of(&self, value: Tensor<R>) -> Result<Tensor<R>> {
        match self.placed().filter(|p| !p.placement().is_whole() && p.placement().logical() == *value.shape()) {
            Some(placed) => placed.placement().take(&value)?.copy(),
            None => Ok(value),
        }
    }

    /// Leaves this rank with its piece, in another leaf: drawn when it is read, where the whole parameter is.
    pub(crate) fn place(&self, placed: Placed<R>) -> Result<()> {
        let (old, placement) = (self.leaf(), placed.placement().clone());
        if !placement.is_whole() {
            let new = if old.is_resident() {
                let piece = placement.take(&old.value()?)?.copy_for(MemoryCategory::Parameters)?;
                Leaf::new(&old.name(), piece)?
            } else {
                let spec = Spec { shape: placement.local(), dtype: old.spec().dtype };
                let piece = Arc::new(PieceOf { whole: old.clone(), placement });
                Leaf::absent(&old.name(), old.runtime(), spec, piece)
            };
            new.set_requires_grad(old.requires_grad());
            *self.0.leaf.write() = new;
        }
        *self.0.placed.write() = Some(Arc::new(placed));
        Ok(())
    }
}

impl<R: Runtime> fmt::Debug for Param<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Param({} {})", self.dtype(), self.shape())
    }
}

/// A value that belongs to the model's state and is not learned by gradients: running statistics. A clone is the same
/// buffer.
pub struct Buffer<R: Runtime>(Arc<BufferState<R>>);

struct BufferState<R: Runtime> {
    value: RwLock<Tensor<R>>,
    /// True once a captured step has used the value's memory, which the value keeps from then on.
    is_captured: AtomicBool,
}

impl<R: Runtime> Clone for Buffer<R> {
    fn clone(&self) -> Self {
        Buffer(self.0.clone())
    }
}

impl<R: Runtime> Buffer<R> {
    /// A buffer with this value.
    pub fn new(value: Tensor<R>) -> Self {
        Buffer(Arc::new(BufferState { value: RwLock::new(value), is_captured: AtomicBool::new(false) }))
    }

    /// The value of this buffer.
    pub fn value(&self) -> Tensor<R> {
        let value = self.0.value.read().clone();
        if value.runtime().is_capturing() {
            self.0.is_captured.store(true, Ordering::Release);
        }
        value
    }

    /// The value of this buffer as a variable that receives no gradient.
    pub fn var(&self) -> Var<R> {
        Var::new(self.value())
    }

    /// Replaces the value by another of the same shape and dtype. Once a captured step has used the buffer, the new
    /// value is written to the memory of the old one, which every launch reads.
    ///
    /// # Errors
    /// An error for another shape or dtype. In and after a captured step also if the old value has another holder.
    #[track_caller]
    pub fn set(&self, value: Tensor<R>) -> Result<()> {
        let (is, got) = (self.spec(), value.spec());
        if is != got {
            return Err(Error::state(
                "buffer",
                format!("is {} {}, the new value is {} {}", is.dtype, is.shape, got.dtype, got.shape),
            ))
            .at_caller();
        }
        let mut own = self.0.value.write();
        if !self.0.is_captured.load(Ordering::Acquire) && !value.runtime().is_capturing() {
            *own = value;
            return Ok(());
        }
        self.0.is_captured.store(true, Ordering::Release);
        match std::mem::replace(&mut *own, value.clone()).try_mut() {
            Ok(mut memory) => {
                memory.reset();
                memory.accumulate(&Op::identity(), &[&value])?;
                *own = memory.freeze()?;
                Ok(())
            }
            Err(before) => {
                *own = before;
                let why = "cannot change while its value has another holder, since captured steps use its memory";
                Err(Error::state("buffer", why)).at_caller()
            }
        }
    }

    /// The shape and dtype of this buffer.
    pub fn spec(&self) -> Spec {
        self.0.value.read().spec()
    }

    /// Casts the value of this buffer.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<()> {
        let value = self.value().to_dtype(dtype)?;
        *self.0.value.write() = value;
        Ok(())
    }

    /// The identity of this buffer, for look-up only.
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

/// The mode of a module, training or evaluation, which dropout and batch norm read. It starts in training.
#[derive(Debug)]
pub struct Mode(AtomicBool);

impl Default for Mode {
    fn default() -> Self {
        Mode(AtomicBool::new(true))
    }
}

impl Mode {
    /// Tells whether the module is in training mode.
    pub fn is_training(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets the mode of the module.
    pub fn set_training(&self, yes: bool) {
        self.0.store(yes, Ordering::Relaxed);
    }
}
