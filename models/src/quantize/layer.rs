//! A linear layer whose weight is stored in four bits.

use std::{any::Any, sync::Arc};

use autograd::{Leaf, Residency, Var, no_grad};
use nn::{Adapter, AdapterSlot, Linear, Module, ModuleEntry, Param, Visitor, walk};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, Within,
    fused::{Linear4bit, NestedScales},
    ops::{Apply, PointwiseOps},
    placement::TensorPlacement,
};
use parking_lot::RwLock;

use super::{
    QuantizeConfig,
    blocks::{Blocks, NESTED_BLOCK, NestedBlocks},
    code::NF4,
};

/// A weight `[O, I]` in four bits an element, in the form that [`Linear4bit`] multiplies with.
pub struct Weight4bit<R: Runtime> {
    pub(super) op: Linear4bit,
    /// The element type that the weight had, which files name.
    pub(super) dtype: DType,
    /// The operands after the input, in the order of [`Linear4bit`].
    pub(super) stored: Vec<Tensor<R>>,
}

impl<R: Runtime> Weight4bit<R> {
    /// Rounds a weight to its nearest form in four bits.
    pub(super) fn quantize(name: &str, value: &Tensor<R>, config: &QuantizeConfig) -> Result<Self> {
        let (rt, shape) = (value.runtime(), *value.shape());
        let &[outputs, inputs] = &shape[..] else {
            return Err(Error::state(name, format!("is {shape}, no matrix")));
        };
        let blocks = Blocks::of(name, &value.to_dtype(DType::F32)?.to_vec()?, config.block)?;
        let list = |list: &[f32]| Tensor::from_slice(rt, [list.len()], list);
        let bytes = |shape: &[usize], list: &[u8]| Tensor::from_slice(rt, shape, list);
        let mut parts = vec![bytes(&[blocks.packed.len(), 1], &blocks.packed)?, list(&NF4)?];
        let mut nested = None;
        if config.double_quant {
            let scales = NestedBlocks::of(&blocks.scales);
            parts.push(bytes(&[scales.index.len()], &scales.index)?);
            parts.extend([list(&scales.scales)?, list(&scales.code)?]);
            nested = Some(NestedScales { block: NESTED_BLOCK, offset: scales.offset });
        } else {
            parts.push(list(&blocks.scales)?);
        }
        let op = Linear4bit { shape: [outputs, inputs], block: config.block, nested, transposed: false };
        Ok(Weight4bit { op, dtype: value.dtype(), stored: parts })
    }

    /// The shape of the weight, `[O, I]`.
    pub(crate) fn shape(&self) -> Shape {
        self.op.shape.into()
    }

    /// The size of the stored form in bytes, scales and codes included.
    pub fn bytes(&self) -> usize {
        self.stored.iter().map(|part| part.shape().numel() * part.dtype().size()).sum()
    }

    /// Dequantises the weight to `f32`, `[O, I]`.
    ///
    /// # Errors
    /// Fails if memory cannot be allocated.
    #[track_caller]
    pub fn value(&self) -> Result<Tensor<R>> {
        self.op.weight(&self.stored.iter().collect::<Vec<_>>()).at_caller()
    }

    /// Cuts a piece from the weight, which keeps its elements' code words and scales.
    fn piece(&self, piece: &TensorPlacement) -> Result<Self> {
        let (op, parts) = self.op.piece(&self.stored.iter().collect::<Vec<_>>(), piece)?;
        // Copies: a view would keep the whole weight in memory.
        let stored = parts.iter().map(Tensor::copy).collect::<Result<_>>()?;
        Ok(Weight4bit { op, dtype: self.dtype, stored })
    }

    /// Computes `x · wᵀ`. Only `x` gets a gradient.
    fn multiply(&self, x: &Var<R>) -> Result<Var<R>> {
        let stored: Vec<Var<R>> = self.stored.iter().cloned().map(Var::new).collect();
        Var::apply1(self.op.clone(), &[x].into_iter().chain(&stored).collect::<Vec<_>>())
    }
}

impl<R: Runtime> Residency<R> for Weight4bit<R> {
    fn fetch(&self, leaf: &Leaf<R>) -> Result<Tensor<R>> {
        no_grad(|| self.value())?.to_dtype(leaf.spec().dtype)
    }
}

/// The computation of a linear layer whose weight is in four bits: the whole weight, or this rank's piece.
pub(crate) struct Base4bit<R: Runtime>(RwLock<Arc<Weight4bit<R>>>);

impl<R: Runtime> Base4bit<R> {
    /// The weight in four bits of an adapter, if it is of this type.
    pub(crate) fn of(adapter: &dyn Adapter<R>) -> Option<Arc<Weight4bit<R>>> {
        adapter.as_any().downcast_ref::<Self>().map(|base| base.0.read().clone())
    }

    /// The weight that this rank has. After a plan cut the layer, the first call cuts the weight, and drops the rest.
    fn own(&self, layer: &Param<R>) -> Result<Arc<Weight4bit<R>>> {
        // A training step leaves the first values that it sent in the leaves it was given.
        drop(layer.leaf().take());
        let weight = self.0.read().clone();
        match layer.placed().filter(|_| layer.shape() != weight.shape()) {
            None => Ok(weight),
            Some(placed) => {
                let piece = Arc::new(weight.piece(placed.placement()).within(placed.name())?);
                layer.leaf().set_residency(piece.clone());
                *self.0.write() = piece.clone();
                Ok(piece)
            }
        }
    }
}

impl<R: Runtime> Module<R> for Base4bit<R> {
    /// Shows no parameters: the layer shows the weight as its own.
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}

impl<R: Runtime> Adapter<R> for Base4bit<R> {
    fn forward(&self, layer: &Linear<R>, x: &Var<R>) -> Result<Var<R>> {
        layer.complete(self.own(&layer.weight)?.multiply(x)?)
    }

    fn can_be_cut(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A linear layer's weight, and the slot of its adapter.
pub(crate) struct LinearPlace<R: Runtime> {
    /// The weight, `[O, I]`.
    pub weight: Param<R>,
    /// The slot of the adapter that computes the output in place of the weight.
    pub slot: AdapterSlot<R>,
}

impl<R: Runtime> LinearPlace<R> {
    /// Stores the weight in four bits from now on, and freezes it.
    pub(crate) fn fill(&self, weight: Arc<Weight4bit<R>>) -> Result<()> {
        let leaf = self.weight.leaf();
        if leaf.spec().shape != weight.shape() {
            let why = format!("is {}, in four bits {}", leaf.spec().shape, weight.shape());
            return Err(Error::state(leaf.name().to_string(), why));
        }
        leaf.set_residency(weight.clone());
        leaf.set_requires_grad(false);
        drop(leaf.take());
        self.slot.replace(Some(Arc::new(Base4bit(RwLock::new(weight)))));
        Ok(())
    }
}

/// The linear layers of a model by name, in its order. A walk shows the weight of each just before the slot of its
/// adapter.
pub(crate) fn slots<R: Runtime>(model: &impl Module<R>) -> Vec<(String, LinearPlace<R>)> {
    let (mut found, mut weight) = (Vec::new(), None);
    walk(model, |name, entry| match entry {
        ModuleEntry::Parameter(p) if name.ends_with(".weight") => weight = Some((name.to_owned(), p.clone())),
        ModuleEntry::Adapter(slot) => {
            let own = weight.take().filter(|(of, _): &(String, _)| of.strip_suffix(".weight") == Some(name));
            if let Some((_, weight)) = own {
                found.push((name.to_owned(), LinearPlace { weight, slot: slot.clone() }));
            }
        }
        _ => {}
    });
    found
}
