//! Data-parallel training: every rank has the whole model, and gradients are summed while the backward pass goes on.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use autograd::Leaf;
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime, Tensor};
use optim::{FlatGradients, HyperParams, Optimizer, all_finite, require_rates};

use super::Ddp;
use crate::{
    buckets::{BucketLayout, BucketOptions, BucketReducer, Unused, reducer},
    checkpoint::names::Buffers,
    combinations::{Feature, Features},
    comm::{Collectives, Comm, Label, abort_on_err},
    mesh::AsMesh,
    strategy::{BackwardPass, BufferSync, Computing, GradLoan, LeafFilter, StepRanks, Strategy, TensorAxis, not_of},
    sums,
};

/// Makes a reducer of buckets over some ranks.
pub(crate) type MakeReducer<R> = Box<dyn FnOnce(&Comm<R>) -> Result<Box<dyn BucketReducer<R>>>>;

/// The strategy of a model of which every rank has a copy, PyTorch's `DistributedDataParallel` with its optimizer:
/// consecutive pieces of the optimizer's own gradient memory are buckets, which are summed over all ranks, in place, as
/// soon as they are full in the backward pass.
///
/// Buckets are sent in the order of the plan, whatever order gradients become final in: all ranks make the same calls.
/// The sums do not depend on how parameters are cut into buckets. Parameters and buffers are those of rank 0 from the
/// start. Before the second step buckets are rebuilt, once, in the order in which gradients became final on rank 0.
/// Parameters that are frozen when it is made have neither gradients nor state, and nothing of them is sent, until a
/// step begins in which they are not: those then begin, on all ranks alike, as they would have at the first step.
#[doc(alias("DistributedDataParallel"))]
#[doc(alias("BucketedTrainer"))]
pub struct DataParallel<R: Runtime> {
    pub(super) ranks: StepRanks<R>,
    features: Features,
    pub(super) label: Label,
    pub(super) optimizer: Box<dyn Optimizer<R>>,
    pub(super) options: BucketOptions,
    pub(super) reducer: Box<dyn BucketReducer<R>>,
    pub(super) layout: BucketLayout<R>,
    /// The number of the bucket to send next.
    pub(super) next: usize,
    /// True if buckets are sent in the backward pass that goes on.
    pub(super) sync: bool,
    /// True if a backward pass of this step was begun.
    pub(super) has_passed: bool,
    /// The losses of this rank weigh nothing in this step.
    pub(super) weighs_nothing: bool,
    /// Numbers of parameters in the order in which their gradients became final.
    pub(super) ready: Vec<usize>,
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
        let ddp = Ddp::of(comm, model, mesh.batch().rank())?;
        let tensor = TensorAxis::new(&mesh, &label, model)?;
        let own = make.is_some().then(|| Features::of([Feature::Reducer]));
        let own = own.map(|own| own.and_if(options.unused == Unused::Allow, Feature::Unused));
        let features = own.unwrap_or_else(|| options.features()).union(tensor.features(&mesh));
        features.and_if(!optimizer.is_elementwise(), Feature::WholeParameters).check("TrainStep::builder")?;
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
            None => reducer(comm, &options)?,
        };
        features.and_if(!reducer.wanted(&leaves)?.is_empty(), Feature::StatefulReducer).check("TrainStep::builder")?;
        let features = features.and_if(reducer.reduces_every_pass(), Feature::ReduceEachPass);
        let layout = BucketLayout::new(comm, &label, &mut *optimizer, &key, &options)?;
        let (ranks, buffers) = (tensor.step_ranks(&mesh, comm), Buffers(model.named_buffers()));
        Ok(DataParallel {
            ranks,
            features,
            label,
            optimizer,
            options,
            reducer,
            layout,
            next: 0,
            sync: true,
            has_passed: false,
            weighs_nothing: false,
            ready: Vec::new(),
            leaves,
            frozen,
            buffers,
            tensor,
            begun: 0,
        })
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &dyn Optimizer<R> {
        &*self.optimizer
    }

    /// The optimizer, for schedules and checkpoints.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer<R> {
        &mut *self.optimizer
    }

    /// The gradients. During a backward pass parts of them are in flight.
    pub fn gradients(&self) -> &FlatGradients<R> {
        &self.layout.gradients
    }

    /// The number of buckets that gradients are exchanged in. It may change before the second step, which puts
    /// gradients into the order in which they became final.
    pub fn num_buckets(&self) -> usize {
        self.layout.buckets.len()
    }

    /// Names of the parameters in bucket `k`.
    pub fn names_in_bucket(&self, k: usize) -> Vec<String> {
        self.layout.buckets[k].members.iter().map(|member| member.leaf.name().to_string()).collect()
    }

    /// Parameters by name, in the order in which their gradients became final in the last backward pass that was
    /// exchanged.
    pub fn ready_order(&self) -> Vec<String> {
        self.ready_leaves().map(|leaf| leaf.name().to_string()).collect()
    }

    fn ready_leaves(&self) -> impl Iterator<Item = &Arc<Leaf<R>>> {
        self.ready.iter().map(|&i| &self.layout.params[i].leaf)
    }

    /// What of a parameter's mean gradient this rank could not send yet, where gradients are compressed with error
    /// feedback: a row.
    pub fn residual(&self, leaf: &Arc<Leaf<R>>) -> Result<Option<Tensor<R>>> {
        self.reducer.residual(leaf)
    }

    pub(super) fn comm(&self) -> &Comm<R> {
        &self.ranks.losses
    }

    /// Cuts buckets anew, between steps, in another order. The reducer keeps what it has from step to step.
    pub(super) fn cut_buckets(&mut self, order: &HashMap<usize, usize>) -> Result<()> {
        let key = |leaf: &Arc<Leaf<R>>| place(order, leaf);
        self.layout = BucketLayout::new(&self.ranks.losses, &self.label, &mut *self.optimizer, &key, &self.options)?;
        Ok(())
    }

    /// Before the second step: buckets in the order in which gradients became final on rank 0.
    fn rebuild(&mut self) -> Result<()> {
        self.begun = self.begun.saturating_add(1);
        if self.begun != 2 || self.comm().size() == 1 {
            return Ok(());
        }
        // By position in the model, which is the same on all ranks: names are for people.
        let position: HashMap<usize, usize> = self.leaves.iter().enumerate().map(|(at, l)| (l.id(), at)).collect();
        let ready = self.ready_leaves().filter_map(|leaf| position.get(&leaf.id()));
        let seen: Vec<u8> = ready.flat_map(|at| at.to_le_bytes()).collect();
        let first = self.comm().exchange(if self.comm().rank() == 0 { &seen } else { &[] })?.swap_remove(0);
        let first = first.as_chunks().0.iter().map(|at| usize::from_le_bytes(*at));
        let ready: HashMap<usize, usize> = first.enumerate().map(|(k, at)| (at, k)).collect();
        // What rank 0 did not use comes last, from the last layer to the first.
        let rest = |at: usize| ready.len() + self.leaves.len() - at;
        let key = |(at, l): (usize, &Arc<Leaf<R>>)| (l.id(), ready.get(&at).copied().unwrap_or_else(|| rest(at)));
        let keys: HashMap<usize, usize> = self.leaves.iter().enumerate().map(key).collect();
        self.cut_buckets(&keys)
    }
}

impl<R: Runtime> Strategy<R> for DataParallel<R> {
    fn ranks(&self) -> &StepRanks<R> {
        &self.ranks
    }

    fn features(&self) -> Features {
        self.features
    }

    fn prepare(&mut self, _: Computing) -> Result<()> {
        self.wait_for_given_up();
        self.thaw()?;
        self.rebuild()?;
        self.zero();
        Ok(())
    }

    fn begin(&mut self, _: usize, pass: BackwardPass) -> Result<()> {
        self.begin_pass(pass.is_last())?;
        let BackwardPass::Last(Some(losses)) = pass else { return Ok(()) };
        self.weighs_nothing = losses.weight == 0.0;
        // What is sent compressed, or as `f16`, are means: what one step could not send counts for no more and no less
        // in the next, and no sum leaves the range.
        self.reducer.set_loss_weight(losses)
    }

    fn finish(&mut self) -> Result<()> {
        let completed = self.complete();
        abort_on_err(self.comm(), completed)?;
        self.sum_partial_gradients()
    }

    // Ranks see the same sums, so they come to the same norm and decision without asking. Squares are added up for each parameter by
    // itself, then in the model's order: buckets, and when they are rebuilt, do not change a bit.
    fn squared_norm(&self, counts: &LeafFilter<'_, R>) -> Result<Tensor<R>> {
        self.tensor.sum(self.squares(counts)?)
    }

    fn is_finite(&self) -> Result<bool> {
        self.tensor.all(all_finite(self.gradients())?)
    }

    fn check_update(&mut self) -> Result<()> {
        require_rates("a training step", &self.optimizer.lrs())?;
        self.optimizer.check_sole()
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.layout.gradients.multiply_by(scale.clone())?;
        self.optimizer.step_from(&self.layout.gradients)?;
        self.reducer.step_taken();
        Ok(())
    }

    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        self.buffers.sync(self.comm(), how)
    }

    fn learning_rate(&self) -> Option<f64> {
        self.optimizer.lrs().first().copied()
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

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        let (buffer, range) = self.place_of(leaf)?;
        let slot = self.layout.gradients.flats_mut()[buffer].lend(range)?;
        Ok(GradLoan::new(vec![slot], 0))
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        let (buffer, _) = self.place_of(leaf)?;
        let flat = &mut self.layout.gradients.flats_mut()[buffer];
        sum.into_pieces().into_iter().try_for_each(|slot| flat.restore(slot))
    }
}

impl<R: Runtime> DataParallel<R> {
    /// The sum of the squares of the gradients of the parameters that count. One that is cut along tensor counts wherever a piece is, one
    /// that is not once.
    pub(super) fn squares(&self, counts: &LeafFilter<'_, R>) -> Result<Tensor<R>> {
        let (mut squares, gradients) = (Vec::new(), self.gradients());
        for leaf in self.leaves.iter().filter(|leaf| counts(leaf) && self.tensor.counts(leaf)) {
            squares.extend(gradients.get(leaf)?.map(|gradient| sums::squares(&gradient)).transpose()?);
        }
        sums::total(self.comm().runtime(), &squares)
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
        let own = self.leaves.iter().map(|leaf| Ok(self.gradients().get(leaf)?.is_some()));
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

/// The parameters of a model, in its own order.
pub(crate) fn leaves<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<Arc<Leaf<R>>> {
    model.parameters().iter().map(|p| p.leaf()).collect()
}

pub(super) fn place<R: Runtime>(order: &HashMap<usize, usize>, leaf: &Arc<Leaf<R>>) -> usize {
    order.get(&leaf.id()).copied().unwrap_or(usize::MAX)
}
