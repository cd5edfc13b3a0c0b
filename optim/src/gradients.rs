//! Gradients in flat buffers, from which the optimizer reads them.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use autograd::{BackwardHook, Gradients, Leaf, LeafGrad};
use numcore::{
    Error, ErrorKind, Flat, FlatLayout, MemoryCategory, Result, Runtime, Tensor, TensorMut, Within,
    ops::{Op, PointwiseOps, ViewOps, update},
};

use crate::{
    FlatParams,
    memory::{SCALE, lending},
    runs::runs,
};

/// The gradients of an optimizer's parameters, in the layout of the parameters. It is a [`BackwardHook`] whose slots
/// are ranges of flat buffers, of the parameters' dtype unless made [in `f32`](FlatGradients::in_f32). Further backward
/// passes accumulate (micro-batches). After [`zero`](FlatGradients::zero), which touches no memory, the next pass
/// overwrites.
///
/// Gradients of leaves that the optimizer does not own are dropped. Gradients of its own model's leaves that were
/// frozen when it was made are an error, since those leaves would never be trained.
pub struct FlatGradients<R: Runtime> {
    flats: Vec<Flat<R>>,
    leaves: Vec<Vec<Arc<Leaf<R>>>>,
    place: HashMap<usize, (usize, usize)>,
    /// Leaves of the optimizer's model that were frozen when it was made.
    frozen: HashSet<usize>,
    /// A pending factor of all gradients, which the optimizer's launch applies.
    scale: Option<Tensor<R>>,
    /// The losses of the backward passes, as far as they are known.
    pub(crate) losses: Vec<Tensor<R>>,
}

impl<R: Runtime> FlatGradients<R> {
    /// Creates empty gradients for these parameters.
    #[track_caller]
    pub fn new(params: &[&FlatParams<R>]) -> Result<Self> {
        Self::of(params, |params| params.layout().clone())
    }

    /// Creates empty gradients for these parameters; those of half-precision parameters are `f32`. A backward pass
    /// computes a gradient in the parameter's dtype, and it is accumulated in `f32` over passes (Megatron's main
    /// gradients).
    #[track_caller]
    pub fn in_f32(params: &[&FlatParams<R>]) -> Result<Self> {
        Self::of(params, |params| params.layout().with_dtype(params.working()))
    }

    fn of(params: &[&FlatParams<R>], layout: impl Fn(&FlatParams<R>) -> FlatLayout) -> Result<Self> {
        let flat = |p: &&FlatParams<R>| Flat::zeros_for(p.runtime(), MemoryCategory::Gradients, layout(p));
        let leaves: Vec<Vec<_>> = params.iter().map(|p| p.leaves().to_vec()).collect();
        let places =
            leaves.iter().enumerate().flat_map(|(p, of)| of.iter().enumerate().map(move |(i, l)| (l.id(), (p, i))));
        let place = places.collect();
        Ok(FlatGradients {
            flats: params.iter().map(flat).collect::<Result<_>>()?,
            leaves,
            place,
            frozen: HashSet::new(),
            scale: None,
            losses: Vec::new(),
        })
    }

    /// Rejects gradients of leaves that were frozen when the optimizer was made, since it would never train them.
    pub(crate) fn refusing(self, frozen: &[Arc<Leaf<R>>]) -> Self {
        FlatGradients { frozen: frozen.iter().map(|leaf| leaf.id()).collect(), ..self }
    }

    /// Discards all gradients, so that the next backward pass overwrites. Ranges lost in a failed backward pass are
    /// recovered.
    pub fn zero(&mut self) {
        self.scale = None;
        self.losses.clear();
        for flat in &mut self.flats {
            flat.reclaim();
            flat.reset();
        }
    }

    /// The sum of the losses of [`backward`](crate::Optimizer::backward), without a pending factor; `None` if gradients
    /// were written otherwise. Waits for the device.
    pub fn loss(&self) -> Result<Option<f64>> {
        let losses = self.losses.iter().map(Tensor::item).collect::<Result<Vec<f64>>>()?;
        Ok((!losses.is_empty()).then(|| losses.iter().sum()))
    }

    /// The buffers, in the order of the optimizer's parameters.
    pub fn flats(&self) -> &[Flat<R>] {
        &self.flats
    }

    /// The buffers, for communication. The record of written ranges must stay correct.
    pub fn flats_mut(&mut self) -> &mut [Flat<R>] {
        &mut self.flats
    }

    /// The pending factor of all gradients, a scalar, if there is one.
    pub fn scale(&self) -> Option<&Tensor<R>> {
        self.scale.as_ref()
    }

    /// The gradient of a leaf; `None` if no backward pass wrote it. Without a pending factor it is a view, and no
    /// backward pass can write these gradients until it is dropped.
    #[track_caller]
    pub fn get(&self, leaf: &Arc<Leaf<R>>) -> Result<Option<Tensor<R>>> {
        let Some(&(p, i)) = self.place.get(&leaf.id()).filter(|&&(p, i)| self.flats[p].is_written(i)) else {
            return Ok(None);
        };
        let grad = self.flats[p].tensor(i)?;
        match &self.scale {
            Some(scale) => grad.apply_program(&SCALE, &[scale], &[]).map(Some),
            None => Ok(Some(grad)),
        }
    }

    /// Replaces the gradient of a leaf, given in the dtype of the parameter or of [`get`](FlatGradients::get).
    ///
    /// # Errors
    /// An error if the optimizer does not own the leaf, or the shape or dtype does not fit.
    #[track_caller]
    pub fn set(&mut self, leaf: &Arc<Leaf<R>>, grad: &Tensor<R>) -> Result<()> {
        self.apply_scale()?;
        let Some(&(p, i)) = self.place.get(&leaf.id()) else {
            return Err(Error::state(leaf.name().to_string(), "is no parameter of this optimizer")).at_caller();
        };
        self.fits(p, leaf, grad).at_caller()?;
        let grad = grad.to_dtype(self.flats[p].layout().dtype())?;
        self.flats[p].overwrite(i, &grad)
    }

    /// Copies gradients, replacing the old ones; gradients of leaves that the optimizer does not own are ignored.
    #[track_caller]
    pub fn copy_from(&mut self, gradients: &Gradients<R>) -> Result<()> {
        self.zero();
        let own = gradients.iter().filter(|(leaf, _)| self.place.contains_key(&leaf.id())).collect::<Vec<_>>();
        own.into_iter().try_for_each(|(leaf, grad)| self.set(leaf, grad))
    }

    /// Returns an error that names every parameter that requires a gradient and has none.
    #[track_caller]
    pub fn require_all(&self) -> Result<()> {
        let missing = |(p, of): (usize, &Vec<Arc<Leaf<R>>>)| {
            let no = |(i, l): &(usize, &Arc<Leaf<R>>)| l.requires_grad() && !self.flats[p].is_written(*i);
            of.iter().enumerate().filter(no).map(|(_, l)| l.name().to_string()).collect::<Vec<_>>()
        };
        let names: Vec<String> = self.leaves.iter().enumerate().flat_map(missing).collect();
        if names.is_empty() { Ok(()) } else { Err(ErrorKind::MissingGradient { names }.into()).at_caller() }
    }

    /// Multiplies all gradients by a factor when they are next read; no memory is touched now.
    #[track_caller]
    pub fn multiply(&mut self, factor: f64) -> Result<()> {
        let Some(flat) = self.flats.first() else { return Ok(()) };
        let scale = Tensor::full(flat.runtime(), [], crate::clip::norm_dtype(self.dtypes()), factor)?;
        self.multiply_by(scale)
    }

    /// Multiplies all gradients by a scalar on the device, as [`multiply`](FlatGradients::multiply) does.
    #[track_caller]
    pub fn multiply_by(&mut self, factor: Tensor<R>) -> Result<()> {
        let factor = factor.reshape([])?;
        self.scale = Some(match &self.scale {
            Some(scale) => scale.apply_program(&SCALE, &[&factor], &[])?,
            None => factor,
        });
        Ok(())
    }

    /// Multiplies all gradients by the pending factor now, before more is accumulated into them.
    #[track_caller]
    pub fn apply_scale(&mut self) -> Result<()> {
        let Some(scale) = self.scale.take() else { return Ok(()) };
        self.in_place(|memory| update(&SCALE, &[&scale], &[], &mut [memory]))
    }

    /// Runs `f` over all contiguous runs of gradients.
    pub(crate) fn in_place(&mut self, f: impl Fn(&mut TensorMut<R>) -> Result<()>) -> Result<()> {
        for flat in &mut self.flats {
            let written: Vec<bool> = (0..flat.layout().len()).map(|i| flat.is_written(i)).collect();
            for run in runs(written.len(), |i| written[i]) {
                lending(&mut [flat], |part| part.lend_span(run.clone()), |outs| f(outs[0]))?;
            }
        }
        Ok(())
    }

    /// Returns an error unless a gradient has the leaf's shape, and the dtype of the leaf or of buffer `p`.
    fn fits(&self, p: usize, leaf: &Leaf<R>, grad: &Tensor<R>) -> Result<()> {
        let (spec, kept) = (leaf.spec(), self.flats[p].layout().dtype());
        if spec.shape == *grad.shape() && [spec.dtype, kept].contains(&grad.dtype()) {
            return Ok(());
        }
        let or = if kept == spec.dtype { String::new() } else { format!(", or {kept} {}", spec.shape) };
        let why = format!("its gradient is {} {}{or}, not {} {}", spec.dtype, spec.shape, grad.dtype(), grad.shape());
        Err(Error::state(leaf.name().to_string(), why))
    }

    pub(crate) fn dtypes(&self) -> impl Iterator<Item = numcore::DType> {
        self.flats.iter().map(|f| f.layout().dtype())
    }
}

impl<R: Runtime> BackwardHook<R> for FlatGradients<R> {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.apply_scale()?;
        // A backward pass cannot write into a buffer of another dtype than the parameter's.
        let place = self.place.get(&leaf.id()).filter(|(p, _)| self.flats[*p].layout().dtype() == leaf.spec().dtype);
        place.map(|&(p, i)| self.flats[p].lend(i)).transpose()
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        let Some(&(p, i)) = self.place.get(&leaf.id()) else {
            let why = "was frozen when the optimizer was made; make it before freezing, or another one to train it";
            let refused = self.frozen.contains(&leaf.id());
            return if refused { Err(Error::state(leaf.name().to_string(), why)) } else { Ok(()) };
        };
        match grad {
            LeafGrad::Slot(slot) => self.flats[p].restore(slot),
            LeafGrad::Own(own) => {
                self.fits(p, leaf, &own)?;
                self.apply_scale()?;
                let convert = Op::cast(own.dtype(), self.flats[p].layout().dtype());
                lending(&mut [&mut self.flats[p]], |f| f.lend(i), |slot| slot[0].accumulate(&convert, &[&own]))
            }
        }
    }
}
