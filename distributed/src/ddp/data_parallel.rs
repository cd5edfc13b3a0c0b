//! Data-parallel training: every rank has the whole model, and gradients are summed during the backward pass.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use autograd::Leaf;
use nn::{Module, ModuleExt};
use numcore::{Error, Result, Runtime, Tensor};
use optim::{FlatGradients, HyperParams, Optimizer, all_finite, require_rates};

use super::by_hand::Ddp;
use crate::{
    buckets::{BucketLayout, BucketOptions, BucketReducer, GradCompression, Unused, reducer},
    checkpoint::names::Buffers,
    combinations::{Feature, Features},
    comm::{Collectives, Comm, Label, abort_on_err},
    mesh::AsMesh,
    strategy::{
        ActiveRanks, BackwardPass, BufferSync, GradLoan, LeafFilter, PartialSums, StepRanks, Strategy, Summed,
        TensorAxis, not_owned,
    },
    sums,
};

type MakeReducer<R> = dyn Fn(&Comm<R>) -> Result<Box<dyn BucketReducer<R>>>;

/// A custom way of summing buckets: makes a reducer for each part of a model.
pub(crate) struct ReducerSource<R: Runtime> {
    /// Makes a reducer over the ranks of a communicator.
    pub(crate) make: Box<MakeReducer<R>>,
    /// True if checkpoints save a state of each.
    pub(crate) has_state: bool,
}

/// A strategy that gives every rank a copy of the model: PyTorch's `DistributedDataParallel` with its optimizer.
/// Buckets are consecutive pieces of the optimizer's own gradient memory. Each is summed over all ranks, in place, as
/// soon as it is full in the backward pass.
///
/// All ranks send buckets in the order of the plan, whatever order gradients become final in, so collective calls
/// match. The sums do not depend on the cut of parameters into buckets. Parameters and buffers start equal to those of
/// rank 0. Before the second step, buckets are rebuilt once, in the order in which gradients became final on rank 0.
///
/// Parameters that are frozen at construction, and are not in the optimizer, have neither gradients nor state, and are
/// not sent. They join, on all ranks alike, at the first step that finds them unfrozen, as if that were their first
/// step.
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
    /// True if the current backward pass sends its buckets.
    pub(super) sync: bool,
    /// True if buckets are of one rank and in their own dtype: each is summed once it is full.
    pub(super) is_alone: bool,
    /// True if buckets are sent between passes alone. Ranks that use different parameters fill them at different times,
    /// which would come before or after buckets of other stages.
    pub(super) sends_between: bool,
    /// True if a backward pass of this step was begun.
    pub(super) has_passed: bool,
    /// True if the losses of this rank weigh nothing in this step.
    pub(super) has_zero_weight: bool,
    /// The numbers of parameters in the order in which their gradients became final.
    pub(super) ready: Vec<usize>,
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    /// The parameters that were frozen from the start and still are; the optimizer does not have them.
    pub(super) frozen: Vec<Arc<Leaf<R>>>,
    pub(super) buffers: Buffers<R>,
    pub(super) tensor: TensorAxis<R>,
    /// True if sums over the tensor axis begin while other buckets are in flight. Not if ranks along the axis may use
    /// different parameters or cut other buckets, or if sums of passes are added up elsewhere.
    pub(super) overlaps_partial: bool,
    /// Sums over the tensor axis in flight.
    pub(super) partial: PartialSums<R>,
    /// The leaves that ranks along the tensor axis update as whole parameters, by identity.
    pub(super) whole: HashSet<usize>,
    /// The number of steps begun since the start, or since parameters were unfrozen; at 2, buckets are rebuilt.
    pub(super) begun: u8,
}

impl<R: Runtime> DataParallel<R> {
    /// Makes the strategy on every rank of a communicator or mesh, and broadcasts rank 0's parameters and buffers. On a
    /// mesh, gradients are summed over its gradient ranks.
    ///
    /// Best leave frozen parameters out of the optimizer: those in it take memory for gradients and state, and are sent
    /// as zeros.
    ///
    /// # Errors
    /// Fails if ranks differ in model, optimizer or options, or if options [exclude](crate::combinations) each other.
    /// Fails too if the optimizer has a parameter that is not the model's.
    #[track_caller]
    pub fn new(
        mesh: &impl AsMesh<R>,
        model: &(impl Module<R> + ?Sized),
        optimizer: Box<dyn Optimizer<R>>,
        options: BucketOptions,
    ) -> Result<Self> {
        Self::reduced_by(mesh, model, optimizer, options, None)
    }

    /// Makes the strategy as [`new`](DataParallel::new) does, with a custom reducer if one is given.
    #[track_caller]
    pub(crate) fn reduced_by(
        mesh: &impl AsMesh<R>,
        model: &(impl Module<R> + ?Sized),
        mut optimizer: Box<dyn Optimizer<R>>,
        options: BucketOptions,
        custom: Option<&ReducerSource<R>>,
    ) -> Result<Self> {
        let mesh = mesh.as_mesh();
        let label = Label::next(mesh.gradients());
        let comm = &label.over(mesh.gradients());
        let ddp = Ddp::of(comm, model, mesh.batch().rank())?;
        let tensor = TensorAxis::new(&mesh, &label, model)?;
        let features = options.features().union(tensor.features(&mesh)).and_if(custom.is_some(), Feature::Reducer);
        let features = features.and_if(custom.is_some_and(|custom| custom.has_state), Feature::StatefulReducer);
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
        let whole = optimizer.update_whole(&|leaf| tensor.placed(leaf))?.into_iter().collect();
        let order = from_last(&leaves);
        let key = |l: &Arc<Leaf<R>>| place(&order, l);
        let reducer = match custom {
            Some(custom) => (custom.make)(comm)?,
            None => reducer(comm, &options),
        };
        if custom.is_some() && !features.has(Feature::StatefulReducer) && !reducer.wanted(&leaves)?.is_empty() {
            let why =
                "its reducer reads a state from checkpoints, and `BucketReducer::has_state` says that it has none";
            return Err(Error::usage("TrainStep::builder", why));
        }
        let features = features.and_if(reducer.reduces_every_pass(), Feature::ReduceEachPass);
        let is_alone = comm.size() == 1 && custom.is_none() && options.compression == GradCompression::Own;
        let overlaps_partial = options.unused == Unused::Error && !reducer.reduces_every_pass() && tensor.is_even();
        let sends_between = mesh.is_of_stages() && options.unused == Unused::Allow;
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
            is_alone,
            sends_between,
            has_passed: false,
            has_zero_weight: false,
            ready: Vec::new(),
            leaves,
            frozen,
            buffers,
            tensor,
            overlaps_partial,
            partial: PartialSums::default(),
            whole,
            begun: 0,
        })
    }

    /// The optimizer of this strategy's parameters.
    pub fn optimizer(&self) -> &dyn Optimizer<R> {
        &*self.optimizer
    }

    /// The optimizer, mutably: for schedules and checkpoints.
    pub fn optimizer_mut(&mut self) -> &mut dyn Optimizer<R> {
        &mut *self.optimizer
    }

    /// The summed gradients. During a backward pass, parts of them are in flight.
    pub fn gradients(&self) -> &FlatGradients<R> {
        &self.layout.gradients
    }

    /// The number of gradient buckets. It may change before the second step, when buckets are rebuilt in the order in
    /// which gradients became final.
    pub fn num_buckets(&self) -> usize {
        self.layout.buckets.len()
    }

    /// The names of the parameters in bucket `k`.
    pub fn names_in_bucket(&self, k: usize) -> Vec<String> {
        self.layout.buckets[k].members.iter().map(|member| member.leaf.name().to_string()).collect()
    }

    /// The names of parameters, in the order in which their gradients became final in the last backward pass that was
    /// exchanged.
    pub fn ready_order(&self) -> Vec<String> {
        self.ready_leaves().map(|leaf| leaf.name().to_string()).collect()
    }

    /// Tells whether each step makes the same calls on the same memory: a reducer may keep state of its own.
    pub(crate) fn is_repeatable(&self) -> bool {
        self.options.compression == GradCompression::Own && !self.features.has(Feature::Reducer)
    }

    fn ready_leaves(&self) -> impl Iterator<Item = &Arc<Leaf<R>>> {
        self.ready.iter().map(|&i| &self.layout.params[i].leaf)
    }

    pub(super) fn comm(&self) -> &Comm<R> {
        &self.ranks.losses
    }

    /// Cuts new buckets in another parameter order, between steps. The reducer keeps its state across steps.
    pub(super) fn cut_buckets(&mut self, order: &HashMap<usize, usize>) -> Result<()> {
        let key = |leaf: &Arc<Leaf<R>>| place(order, leaf);
        self.layout = BucketLayout::new(&self.ranks.losses, &self.label, &mut *self.optimizer, &key, &self.options)?;
        Ok(())
    }

    /// Rebuilds the buckets before the second step, in the order in which gradients became final on rank 0.
    fn rebuild(&mut self) -> Result<()> {
        self.begun = self.begun.saturating_add(1);
        if self.begun != 2 || self.comm().size() == 1 {
            return Ok(());
        }
        // By position in the model, which is equal on all ranks; names are for display.
        let position: HashMap<usize, usize> = self.leaves.iter().enumerate().map(|(at, l)| (l.id(), at)).collect();
        let ready = self.ready_leaves().filter_map(|leaf| position.get(&leaf.id()));
        let seen: Vec<u8> = ready.flat_map(|at| at.to_le_bytes()).collect();
        let first = self.comm().exchange(if self.comm().rank() == 0 { &seen } else { &[] })?.swap_remove(0);
        let first = first.as_chunks().0.iter().map(|at| usize::from_le_bytes(*at));
        let ready: HashMap<usize, usize> = first.enumerate().map(|(k, at)| (at, k)).collect();
        // Parameters that rank 0 did not use come last, from the last layer to the first.
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

    fn prepare(&mut self, _: ActiveRanks) -> Result<()> {
        self.wait_for_abandoned();
        self.unfreeze()?;
        self.rebuild()?;
        self.zero();
        Ok(())
    }

    fn begin(&mut self, _: usize, pass: BackwardPass) -> Result<()> {
        self.begin_pass(pass.is_last())?;
        let BackwardPass::Last(Some(losses)) = pass else { return Ok(()) };
        self.has_zero_weight = losses.weight == 0.0;
        // Compressed gradients and `f16` travel as means: an unsent residual then weighs the same in the next step, and
        // no sum leaves the range.
        self.reducer.set_loss_weight(losses)
    }

    fn finish(&mut self) -> Result<()> {
        let completed = self.complete();
        abort_on_err(self.comm(), completed)?;
        self.sum_partial_gradients()
    }

    // Ranks hold the same sums, so they reach the same norm and decision without communication. Squares are summed for
    // each parameter, then in the model's order: neither the cut of buckets nor their rebuilding changes a bit.
    fn sums(&mut self, what: &Summed<'_, R>, counts: &LeafFilter<'_, R>) -> Result<Option<Tensor<R>>> {
        let (rt, tensor) = (self.ranks.losses.runtime(), &self.tensor);
        let own = match what {
            Summed::Squares => Some(self.squares(counts)?),
            Summed::Rule(scale) => {
                let counts = |leaf: &Arc<Leaf<R>>| counts(leaf) && tensor.counts(leaf);
                self.optimizer.sums(rt, self.layout.gradients.flats(), Some(scale), &counts)?
            }
        };
        own.map(|own| self.tensor.sum(own)).transpose()
    }

    fn is_finite(&self) -> Result<bool> {
        self.tensor.all(all_finite(self.gradients())?)
    }

    fn check_update(&mut self) -> Result<()> {
        require_rates("a training step", &self.optimizer.lrs())?;
        self.optimizer.check_sole()
    }

    fn adapt(&mut self, sums: &[f64], loss: f64) -> Result<()> {
        self.optimizer.adapt(sums, Some(loss))
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.layout.gradients.multiply_by(scale.clone())?;
        self.optimizer.update(self.layout.gradients.flats(), self.layout.gradients.scale())?;
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
    /// The sum of squares of the gradients of the parameters that `counts` selects. A parameter cut along the tensor
    /// axis counts on every rank with a piece of it, an uncut one once.
    pub(super) fn squares(&self, counts: &LeafFilter<'_, R>) -> Result<Tensor<R>> {
        let (mut squares, gradients) = (Vec::new(), self.gradients());
        for leaf in self.leaves.iter().filter(|leaf| counts(leaf) && self.tensor.counts(leaf)) {
            squares.extend(gradients.get(leaf)?.map(|gradient| sums::squares(&gradient)).transpose()?);
        }
        sums::total(self.comm().runtime(), &squares, 1)
    }
}

impl<R: Runtime> DataParallel<R> {
    /// The buffer of a parameter's gradient, and its range there. An error if the parameter is not in the optimizer.
    pub(super) fn place_of(&self, leaf: &Arc<Leaf<R>>) -> Result<(usize, usize)> {
        let param = self.layout.number_of(leaf).map(|i| &self.layout.params[i]);
        param.map(|param| (param.buffer, param.range)).ok_or_else(|| not_owned(leaf))
    }
}

/// The position of each parameter, by leaf id, in the order in which gradients usually become final: last layer first.
pub(super) fn from_last<R: Runtime>(leaves: &[Arc<Leaf<R>>]) -> HashMap<usize, usize> {
    leaves.iter().rev().enumerate().map(|(k, leaf)| (leaf.id(), k)).collect()
}

/// An error if the optimizer has a parameter that is not the model's: it would not be made equal on all ranks.
fn require_own<R: Runtime>(optimizer: &dyn Optimizer<R>, leaves: &[Arc<Leaf<R>>]) -> Result<()> {
    let own: HashSet<usize> = leaves.iter().map(Leaf::id).collect();
    let params = optimizer.params();
    match params.iter().flat_map(|p| p.leaves()).find(|leaf| !own.contains(&leaf.id())) {
        Some(leaf) => Err(Error::state(leaf.name().to_string(), "is in the optimizer, but not in the model")),
        None => Ok(()),
    }
}

/// The parameters of a model, in the model's order.
pub(crate) fn leaves<R: Runtime>(model: &(impl Module<R> + ?Sized)) -> Vec<Arc<Leaf<R>>> {
    model.parameters().iter().map(|p| p.leaf()).collect()
}

pub(super) fn place<R: Runtime>(order: &HashMap<usize, usize>, leaf: &Arc<Leaf<R>>) -> usize {
    order.get(&leaf.id()).copied().unwrap_or(usize::MAX)
}
