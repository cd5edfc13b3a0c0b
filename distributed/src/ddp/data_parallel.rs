//! Data-parallel training: every rank has the whole model, and gradients are summed while the backward pass goes on.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime, Tensor, TensorMut, ops::PointwiseOps};
use optim::{HyperParams, Optimizer, all_finite, require_rates};

use super::Ddp;
use crate::{
    buckets::{BucketOptions, BucketReducer, FailedSteps, GradCompression, GradientBuckets, Unused, reducer},
    checkpoint::names::Buffers,
    comm::{Collectives, Comm, Label},
    mesh::{AsMesh, Mesh},
    plan::Axis,
    tensor_parallel::TensorAxis,
    train::{BufferSync, GradLoan, ReducedGradients, StageStrategy as _, Strategy, TrainStep, norm, not_of},
};

/// Trains a model of which every rank has a copy: PyTorch's `DistributedDataParallel` with its optimizer. Gradients are sent bucket by bucket
/// during the backward pass.
///
/// [`TrainStep::builder`] makes it where [`zero`](crate::train::TrainStepBuilder::zero) is not asked for. Parameters and buffers are those of
/// rank 0 from the start. Before the second step buckets are rebuilt, once, in the order in which gradients became final on rank 0.
/// Parameters that are frozen when it is made have neither gradients nor state, and nothing of them is sent, until a step begins in which they are
/// not: those then begin, on all ranks alike, as they would have at the first step.
#[doc(alias("DistributedDataParallel"))]
pub type BucketedTrainer<R> = TrainStep<R, DataParallel<R>>;

/// Trains a model on one rank: [`TrainStep::builder`] over a [`NoOpCommunicator`](crate::comm::NoOpCommunicator) makes it.
pub type SimpleTrainer<R> = BucketedTrainer<R>;

/// Makes a reducer of buckets over some ranks.
pub(crate) type MakeReducer<R> = Box<dyn FnOnce(&Comm<R>) -> Result<Box<dyn BucketReducer<R>>>>;

/// The strategy of [`BucketedTrainer`]: an optimizer, and its gradients in buckets.
pub struct DataParallel<R: Runtime> {
    pub(super) comm: Comm<R>,
    /// Which share of a batch this rank reads, of how many.
    share: (usize, usize),
    pub(super) optimizer: Box<dyn Optimizer<R>>,
    pub(super) buckets: GradientBuckets<R>,
    options: BucketOptions,
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    /// Parameters that were frozen from the start, and are still, which the optimizer does not have.
    pub(super) frozen: Vec<Arc<Leaf<R>>>,
    pub(super) buffers: Buffers<R>,
    pub(super) tensor: TensorAxis<R>,
    /// How many steps were begun, until buckets were rebuilt.
    pub(super) begun: u8,
}

impl<R: Runtime> DataParallel<R> {
    /// Gives every rank the parameters and buffers of rank 0. An error unless all ranks have the same model and options. On a mesh the
    /// ranks are those that gradients are summed over.
    ///
    /// Frozen parameters are best left out of the optimizer: those in it have memory for gradients and state, and are sent as zeros.
    #[track_caller]
    pub fn new(
        mesh: &impl AsMesh<R>,
        model: &(impl Module<R> + ?Sized),
        optimizer: Box<dyn Optimizer<R>>,
        options: BucketOptions,
    ) -> Result<Self> {
        Self::reduced_by(mesh, model, optimizer, options, None)
    }

    /// Makes the strategy like [`new`](DataParallel::new), with a reducer of one's own.
    #[track_caller]
    pub(crate) fn reduced_by(
        mesh: &impl AsMesh<R>,
        model: &(impl Module<R> + ?Sized),
        mut optimizer: Box<dyn Optimizer<R>>,
        options: BucketOptions,
        make: Option<MakeReducer<R>>,
    ) -> Result<Self> {
        let mesh = mesh.as_mesh();
        let label = Label::next(mesh.gradients());
        let comm = &label.over(mesh.gradients());
        let share = (mesh.batch().rank(), mesh.batch().size());
        let ddp = Ddp::of(comm, model, share.0)?;
        let tensor = TensorAxis::new(&mesh, &label, model)?;
        require_elementwise(&*optimizer, &tensor)?;
        require_exact(&options, &tensor)?;
        require_whole(&options, &mesh)?;
        comm.agree("the optimizer", format!("{options:?} {label:?} {}", optimizer.describe()).as_bytes())?;
        let leaves = leaves(model);
        let optimized: HashSet<usize> = optimizer.params().iter().flat_map(|p| p.leaves()).map(Leaf::id).collect();
        require_own(&*optimizer, &leaves)?;
        let trained = leaves.iter().filter(|leaf| optimized.contains(&leaf.id())).map(|leaf| leaf.name().to_string());
        let trained = trained.collect::<Vec<_>>().join(" ");
        tensor.agree("the optimizer", &format!("{options:?} {} {trained}", optimizer.describe()))?;
        ddp.sync_params()?;
        tensor.sync(&leaves, &model.named_buffers())?;
        let frozen = leaves.iter().filter(|l| !l.requires_grad() && !optimized.contains(&l.id())).cloned().collect();
        let order = from_last(&leaves);
        let key = |l: &Arc<Leaf<R>>| place(&order, l);
        let reducer = match make {
            Some(make) => make(comm)?,
            None => reducer(comm, &options, FailedSteps::AreUndone)?,
        };
        require_stateless(&*reducer, &leaves, &tensor)?;
        let buckets = GradientBuckets::reduced_by(comm, label, &mut *optimizer, &key, options.clone(), reducer)?;
        let (comm, buffers) = (comm.clone(), Buffers(model.named_buffers()));
        Ok(DataParallel { comm, share, optimizer, buckets, options, leaves, frozen, buffers, tensor, begun: 0 })
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer<R> {
        &*self.optimizer
    }

    /// The optimizer, for schedules and checkpoints.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer<R> {
        &mut *self.optimizer
    }

    /// The gradients in their buckets.
    pub fn buckets(&self) -> &GradientBuckets<R> {
        &self.buckets
    }

    pub(super) fn buckets_mut(&mut self) -> &mut GradientBuckets<R> {
        &mut self.buckets
    }

    /// Before the second step: buckets in the order in which gradients became final on rank 0.
    fn rebuild(&mut self) -> Result<()> {
        self.begun = self.begun.saturating_add(1);
        if self.begun != 2 || self.comm.size() == 1 {
            return Ok(());
        }
        // By position in the model, which is the same on all ranks: names are for people.
        let position: HashMap<usize, usize> = self.leaves.iter().enumerate().map(|(at, l)| (l.id(), at)).collect();
        let ready = self.buckets.ready_leaves().filter_map(|leaf| position.get(&leaf.id()));
        let seen: Vec<u8> = ready.flat_map(|at| at.to_le_bytes()).collect();
        let first = self.comm.exchange(if self.comm.rank() == 0 { &seen } else { &[] })?.swap_remove(0);
        let first = first.as_chunks().0.iter().map(|at| usize::from_le_bytes(*at));
        let ready: HashMap<usize, usize> = first.enumerate().map(|(k, at)| (at, k)).collect();
        // What rank 0 did not use comes last, from the last layer to the first.
        let rest = |at: usize| ready.len() + self.leaves.len() - at;
        let key = |(at, l): (usize, &Arc<Leaf<R>>)| (l.id(), ready.get(&at).copied().unwrap_or_else(|| rest(at)));
        let keys: HashMap<usize, usize> = self.leaves.iter().enumerate().map(key).collect();
        self.buckets.rebuild(&mut *self.optimizer, &|l| place(&keys, l))
    }
}

impl<R: Runtime> BucketedTrainer<R> {
    /// The number of buckets that gradients are exchanged in. It may change before the second step, which puts gradients into the order in
    /// which they became final.
    pub fn num_buckets(&self) -> usize {
        self.strategy().buckets().len()
    }
}

impl<R: Runtime> Strategy<R> for DataParallel<R> {
    fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    fn everyone(&self) -> &Comm<R> {
        self.tensor.everyone()
    }

    fn share(&self) -> (usize, usize) {
        self.share
    }

    fn counts_examples(&self) -> bool {
        self.tensor.rank() == 0
    }

    fn prepare(&mut self) -> Result<()> {
        self.thaw()?;
        self.rebuild()?;
        self.buckets.zero();
        Ok(())
    }

    fn begin(&mut self, last: bool) -> Result<()> {
        self.buckets.begin(last)
    }

    fn set_loss_weight(&mut self, weight: f64, scale: f64, skippable: bool) -> Result<()> {
        self.buckets.set_loss_weight(weight, scale, skippable)
    }

    fn finish(&mut self) -> Result<()> {
        self.buckets.finish()?;
        self.sum_partial_gradients()
    }

    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        self.buffers.sync(&self.comm, how)
    }

    fn may_idle(&self) -> bool {
        true
    }

    fn may_differ_in_passes(&self) -> bool {
        !self.options.canonical
    }
}

impl<R: Runtime> ReducedGradients<R> for DataParallel<R> {
    // Ranks see the same sums, so they come to the same norm and decision without asking. Squares are added up for each parameter by
    // itself, then in the model's order: buckets, and when they are rebuilt, do not change a bit.
    fn norm(&self) -> Result<Tensor<R>> {
        self.squared_norm(&|_| true)?.sqrt()
    }

    fn is_finite(&self) -> Result<bool> {
        self.tensor.all(all_finite(self.buckets.gradients())?)
    }

    fn check_update(&mut self) -> Result<()> {
        require_rates("a training step", &self.optimizer.lrs())?;
        self.optimizer.check_sole()
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.buckets.gradients_mut().multiply_by(scale.clone())?;
        self.optimizer.step_from(self.buckets.gradients())?;
        self.buckets.keep();
        Ok(())
    }

    fn is_canonical(&self) -> bool {
        self.options.canonical
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let (mut groups, without) = (self.optimizer.hyper_parameters()?, self.without_state());
        groups.iter_mut().for_each(|group| group.parameters.retain(|name| !without.contains(name)));
        Ok(groups)
    }

    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        self.optimizer.check_hyper_parameters(groups)
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        self.optimizer.set_hyper_parameters(groups)
    }

    fn learning_rate(&self) -> f64 {
        self.optimizer.lrs().first().copied().unwrap_or(0.0)
    }
}

impl<R: Runtime> BackwardHook<R> for DataParallel<R> {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.buckets.grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.buckets.on_leaf_grad_ready(leaf, grad)
    }
}

impl<R: Runtime> DataParallel<R> {
    /// The sum of the squares of the gradients of the parameters that count. One that is cut along tensor counts wherever a piece is, one
    /// that is not once.
    pub(super) fn squares(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        let (mut squares, gradients) = (Vec::new(), self.buckets.gradients());
        for leaf in self.leaves.iter().filter(|leaf| counts(leaf) && self.tensor.counts(leaf)) {
            squares.extend(gradients.get(leaf)?.map(|gradient| norm::squares(&gradient)).transpose()?);
        }
        norm::total(self.comm.runtime(), &squares)
    }
}

impl<R: Runtime> DataParallel<R> {
    /// Sums gradients of which ranks along tensor have their parts, all at once. What no rank used keeps having none.
    fn sum_partial_gradients(&mut self) -> Result<()> {
        let mut works = Vec::new();
        for leaf in self.used_along_tensor()? {
            let Some(comm) = self.tensor.summed_over(&leaf).cloned() else { continue };
            let own = self.lend_grad(&leaf)?.take();
            let work = self.tensor.sum_gradient(&comm, &leaf, own)?;
            works.push((leaf, work));
        }
        for (leaf, work) in works {
            self.restore_grad(&leaf, GradLoan::new(vec![work.wait()?], 0))?;
        }
        Ok(())
    }

    /// The parameters that this step updates, those that any rank along tensor used: with zeros where this rank did not.
    fn used_along_tensor(&mut self) -> Result<Vec<Arc<Leaf<R>>>> {
        if !self.tensor.is_cut() {
            return Ok(Vec::new());
        }
        let own = self.leaves.iter().map(|leaf| Ok(self.buckets.gradients().get(leaf)?.is_some()));
        let own = own.collect::<Result<Vec<bool>>>()?;
        let used = match self.options.unused {
            Unused::Allow => self.tensor.used_anywhere(&own)?,
            Unused::Error => own.clone(),
        };
        let all: Vec<_> = self.leaves.iter().cloned().zip(own).zip(used).filter(|(_, used)| *used).collect();
        for ((leaf, _), _) in all.iter().filter(|((_, here), _)| !here) {
            let mut slot = self.lend_grad(leaf)?.take();
            slot.zero()?;
            self.restore_grad(leaf, GradLoan::new(vec![slot], 0))?;
        }
        Ok(all.into_iter().map(|((leaf, _), _)| leaf).collect())
    }

    /// Where a parameter has its gradient: buffer and range.
    pub(super) fn place_of(&self, leaf: &Arc<Leaf<R>>) -> Result<(usize, usize)> {
        let range = |leaves: &[Arc<Leaf<R>>]| leaves.iter().position(|own| Arc::ptr_eq(own, leaf));
        let params = self.optimizer.params();
        let place = params.iter().enumerate().find_map(|(buffer, of)| Some((buffer, range(of.leaves())?)));
        place.ok_or_else(|| not_of(leaf))
    }
}

/// The places of parameters in the order in which gradients usually become final: from the last layer to the first.
pub(super) fn from_last<R: Runtime>(leaves: &[Arc<Leaf<R>>]) -> HashMap<usize, usize> {
    leaves.iter().rev().enumerate().map(|(k, leaf)| (leaf.id(), k)).collect()
}

/// An error if an optimizer has a parameter that is not the model's: it would not be made equal on all ranks.
fn require_own<R: Runtime>(optimizer: &dyn Optimizer<R>, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
    let own: HashSet<usize> = leaves.iter().map(Leaf::id).collect();
    let params = optimizer.params();
    match params.iter().flat_map(|p| p.leaves()).find(|leaf| !own.contains(&leaf.id())) {
        Some(leaf) => Err(Error::state(leaf.name().to_string(), "is in the optimizer, but not in the model")),
        None => Ok(()),
    }
}

/// An error if an optimizer would update pieces of parameters in another way than the whole.
fn require_elementwise<R: Runtime>(optimizer: &dyn Optimizer<R>, tensor: &TensorAxis<R>) -> Result<()> {
    if !tensor.is_cut() || optimizer.is_elementwise() {
        return Ok(());
    }
    let axis = tensor.name();
    let why = format!(
        "looks at whole parameters, of which this rank has pieces: over ranks along {axis} take an elementwise rule"
    );
    Err(Error::config("TrainStep::builder", "optimizer", why))
}

/// An error if gradients of pieces would be compressed as matrices.
fn require_exact<R: Runtime>(options: &BucketOptions, tensor: &TensorAxis<R>) -> Result<()> {
    match options.compression {
        GradCompression::PowerSgd(_) if tensor.is_cut() => {
            let axis = tensor.name();
            let why = format!(
                "PowerSGD compresses whole matrices, of which this rank has pieces: leave it out over ranks along {axis}"
            );
            Err(Error::config("TrainStep::builder", "buckets", why))
        }
        _ => Ok(()),
    }
}

/// An error if gradients of parts of sequences would be summed as those of chunks of a batch.
fn require_whole<R: Runtime>(options: &BucketOptions, mesh: &Mesh<R>) -> Result<()> {
    let ranks = mesh.plan().size(Axis::Context);
    if !options.canonical || ranks == 1 {
        return Ok(());
    }
    let why = format!(
        "canonical order adds up gradients of chunks of a batch, and {ranks} ranks along context have parts of sequences: leave it out"
    );
    Err(Error::config("TrainStep::builder", "buckets", why))
}

/// An error if a reducer would save a state of its own for pieces of parameters: checkpoints would have it under one name from several ranks.
fn require_stateless<R: Runtime>(
    reducer: &dyn BucketReducer<R>,
    leaves: &[Arc<Leaf<R>>],
    tensor: &TensorAxis<R>,
) -> Result<()> {
    if !tensor.is_cut() || reducer.wanted(leaves)?.is_empty() {
        return Ok(());
    }
    let axis = tensor.name();
    let why = format!(
        "keeps a state of each parameter, of which this rank has pieces: over ranks along {axis} take one without"
    );
    Err(Error::config("TrainStep::builder", "reducer", why))
}

/// The parameters of a model, in its own order.
pub(crate) fn leaves<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<Arc<Leaf<R>>> {
    model.parameters().iter().map(|p| p.leaf()).collect()
}

pub(super) fn place<R: Runtime>(order: &HashMap<usize, usize>, leaf: &Arc<Leaf<R>>) -> usize {
    order.get(&leaf.id()).copied().unwrap_or(usize::MAX)
}
