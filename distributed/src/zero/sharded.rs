//! The strategy of sharded training.

use std::{collections::HashMap, ops::Range, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::{Module, ModuleExt};
use numcore::{Result, Runtime, Tensor, TensorMut};
use optim::{HyperParams, LrSchedule, Shards};
use parking_lot::Mutex;

use super::{
    Piece, ZeroOptions,
    build::{build, may_cut},
    engine::ZeroEngine,
    options::ShardGroups,
    rates::Rates,
    residency::ZeroResidency,
    sums::SumOfPiece,
};
use crate::{
    checkpoint::names::Buffers,
    combinations::{Feature, Features},
    comm::{Collectives, Communicator, Partial, ReduceOp},
    ddp::by_hand::Ddp,
    mesh::{AsMesh, Mesh},
    strategy::{
        ActiveRanks, BackwardPass, BufferSync, FullParameters, GradLoan, LeafFilter, LossWeight, StepRanks, Strategy,
        Summed, TensorAxis, described, not_owned,
    },
    sums,
};

/// The strategy of a model whose state, gradients and parameters are sharded, as [`ZeroOptions`] set.
///
/// A shard ends anywhere in a parameter if the optimizer's rule is elementwise. A rule that needs whole matrices or
/// norms (Muon, LAMB, Adafactor) has shards of whole parameters. A unit with few of them is on few ranks.
///
/// After a drop, stages 1 and 2 leave all parameters in the model. At stage 3 no rank has them: save a checkpoint, or
/// copy them within [`gather_full_params`](Strategy::gather_full_params).
///
/// Parameters that are frozen at construction have neither gradients nor state. If a step begins in which one of their
/// unit is trained, all parameters of the unit that were frozen get both.
#[doc(alias("FSDP"))]
#[doc(alias("FullyShardedDataParallel"))]
#[doc(alias("ZeroTrainer"))]
pub struct Sharded<R: Runtime> {
    ranks: StepRanks<R>,
    features: Features,
    pub(super) groups: ShardGroups<R>,
    options: ZeroOptions,
    rates: Rates<R>,
    pub(super) engine: Arc<Mutex<ZeroEngine<R>>>,
    pub(super) buffers: Buffers<R>,
    pub(super) tensor: Arc<TensorAxis<R>>,
    pub(super) steps: u64,
    /// The position of a parameter in the model, by the identity of its leaf.
    order: HashMap<usize, usize>,
}

impl<R: Runtime> Sharded<R> {
    /// Makes the strategy, and takes over the parameters' values of rank 0.
    ///
    /// Parameters are cut along the mesh's shard axis, with replicas along its data axis. Gathers stay within a
    /// replica. Gradients are reduced to shards within it, and the shards summed over the replicas. A mesh without a
    /// shard axis, such as a communicator, is sharded along data. Ranks along context have shards of their own.
    ///
    /// # Errors
    /// Fails unless all ranks have the same model and options.
    #[track_caller]
    pub fn new(
        mesh: &impl AsMesh<R>,
        model: &(impl Module<R> + ?Sized),
        optimizer: impl Shards<R> + 'static,
        options: ZeroOptions,
    ) -> Result<Self> {
        Self::scheduled(&mesh.as_mesh(), model, Arc::new(optimizer), None, options)
    }

    /// Makes the strategy like [`new`](Sharded::new). `schedule` replaces the optimizer's own, and all stages of a
    /// model may share it.
    #[track_caller]
    pub(crate) fn scheduled(
        mesh: &Mesh<R>,
        model: &(impl Module<R> + ?Sized),
        optimizer: Arc<dyn Shards<R>>,
        schedule: Option<Arc<dyn LrSchedule>>,
        options: ZeroOptions,
    ) -> Result<Self> {
        let groups = ShardGroups::of_mesh(mesh)?;
        let rates = Rates { optimizer: optimizer.clone(), schedule };
        let comm = &groups.all;
        let ddp = Ddp::of(comm, model, mesh.batch().rank())?;
        let tensor = Arc::new(TensorAxis::new(mesh, &groups.label, model)?);
        let parameters = model.named_parameters();
        let named: Vec<(String, Arc<Leaf<R>>)> = parameters.iter().map(|(name, p)| (name.clone(), p.leaf())).collect();
        let units: Vec<String> = named.iter().map(|(name, _)| options.units.of(name)).collect();
        let members: Vec<usize> = named.iter().map(|(name, l)| optimizer.group(name, &l.spec())).collect();
        let label = &groups.label;
        // With the names of units, and not the function that gives them.
        let rules = format!("{options:?} {units:?} {} {members:?}", rates.describe());
        let all = format!("{label:?} {rules}{}", described(&parameters, &[]));
        comm.agree("the sharding of the model", all.as_bytes())?;
        tensor.agree("the sharding of the model", &rules)?;
        let features = options.features().union(tensor.features(mesh));
        let refused = || {
            let mut trained = named.iter().map(|(_, leaf)| leaf).filter(|leaf| leaf.requires_grad());
            trained.try_for_each(|leaf| optimizer.may_cut(&leaf.name(), &leaf.spec()).map(|_| ()))?;
            // Frozen ones too: they may be trained later.
            let all = named.iter().map(|(_, leaf)| leaf);
            features.and_if(!may_cut(&*optimizer, all), Feature::WholeParameters).check("TrainStep::builder")
        };
        // All ranks have the same options by now, and refuse them alike.
        options.check().and_then(|()| refused()).map_err(|error| error.on_rank(comm.world_rank()))?;
        ddp.sync_buffers()?;
        let buffers = Buffers(model.named_buffers());
        // Values of the first rank along tensor before those of the first along the other axes, which are taken below.
        tensor.sync(&named.iter().map(|(_, leaf)| leaf.clone()).collect::<Vec<_>>(), &buffers.0)?;
        let order = named.iter().enumerate().rev().map(|(k, (_, leaf))| (leaf.id(), k)).collect();
        let units = build(&groups, &tensor, named, units, &*optimizer, &options)?;
        let engine =
            Arc::new(Mutex::new(ZeroEngine::new(comm, tensor.clone(), units, options.clone(), mesh.is_of_stages())));
        for leaf in engine.lock().units.iter().flat_map(|u| &u.leaves) {
            leaf.set_residency(Arc::new(ZeroResidency(Arc::downgrade(&engine))));
        }
        let ranks = tensor.step_ranks(mesh, &groups.all);
        Ok(Sharded { ranks, features, groups, options, rates, engine, buffers, tensor, steps: 0, order })
    }

    /// Trains units that were frozen from the start, and no longer are.
    pub(super) fn unfreeze(&mut self) -> Result<()> {
        self.engine.lock().unfreeze(&*self.rates.optimizer, self.options.state)
    }

    /// The learning rates of the next update, by group.
    pub(super) fn rates(&self) -> Vec<f64> {
        self.rates.at(self.steps)
    }

    /// The ranks that update each trained parameter, with the elements that each updates, by name in the order of the
    /// model. At stage 3 these ranks keep the elements.
    pub fn param_owners(&self) -> Vec<(String, Vec<OwnedElements>)> {
        let (engine, mut owners) = (self.engine.lock(), Vec::new());
        for unit in engine.units.iter().filter(|unit| unit.own.is_some()) {
            let mut of: Vec<Vec<OwnedElements>> = vec![Vec::new(); unit.leaves.len()];
            for rank in 0..self.groups.shard.size() {
                for Piece { parameter, elements } in unit.layout.pieces(rank) {
                    of[parameter].push(OwnedElements { rank, elements });
                }
            }
            owners.extend(unit.leaves.iter().zip(of).map(|(leaf, of)| (self.order.get(&leaf.id()), leaf.name(), of)));
        }
        owners.sort_by_key(|(place, ..)| *place);
        owners.into_iter().map(|(_, name, of)| (name.to_string(), of)).collect()
    }

    /// Names of the parameters of which this rank updates elements, in the order of the model.
    #[doc(alias("owned_param_ids"))]
    pub fn owned_params(&self) -> Vec<String> {
        let rank = self.groups.shard.rank();
        let mut owners = self.param_owners();
        owners.retain(|(_, of)| of.iter().any(|own| own.rank == rank));
        owners.into_iter().map(|(name, _)| name).collect()
    }

    /// Names of the units, in the order of the model; the root's is empty.
    pub fn units(&self) -> Vec<String> {
        self.engine.lock().units.iter().map(|u| u.name.clone()).collect()
    }
}

/// Elements of a parameter that one rank updates: see [`Sharded::param_owners`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedElements {
    /// The rank among those over which parameters are cut.
    pub rank: usize,
    /// The elements, in row-major order.
    pub elements: Range<usize>,
}

impl<R: Runtime> Strategy<R> for Sharded<R> {
    fn ranks(&self) -> &StepRanks<R> {
        &self.ranks
    }

    fn features(&self) -> Features {
        self.features
    }

    fn prepare(&mut self, active: ActiveRanks) -> Result<()> {
        self.engine.lock().wait_for_abandoned();
        self.unfreeze()?;
        let mut engine = self.engine.lock();
        engine.idles = active == ActiveRanks::Some;
        engine.begin_step()
    }

    fn begin(&mut self, _: usize, pass: BackwardPass) -> Result<()> {
        let mut engine = self.engine.lock();
        engine.begin_sweep(pass.is_last())?;
        engine.has_zero_weight = matches!(pass, BackwardPass::Last(Some(LossWeight { weight: 0.0, .. })));
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.engine.lock().end_sweep()
    }

    fn finish(&mut self) -> Result<()> {
        self.engine.lock().finish()
    }

    fn sums(&mut self, what: &Summed<'_, R>, counts: &LeafFilter<'_, R>) -> Result<Option<Tensor<R>>> {
        let (count, rows) = match what {
            Summed::Squares => (1, self.engine.lock().squares()?),
            Summed::Rule(scale) => match self.rates.optimizer.sum_count() {
                0 => return Ok(None),
                count => (count, self.engine.lock().sums(&self.rates(), scale)?),
            },
        };
        let own = self.total(rows, count, counts)?;
        self.tensor.sum(own.combine(&self.groups.shard, ReduceOp::Sum)?).map(Some)
    }

    fn is_finite(&self) -> Result<bool> {
        let engine = self.engine.lock();
        let mut zeros = Vec::new();
        for unit in &engine.units {
            zeros.extend(unit.gradient()?.map(|row| sums::zero_if_finite(&row)).transpose()?);
        }
        drop(engine);
        let own = Partial::new(sums::total(self.groups.all.runtime(), &zeros, 1)?);
        self.tensor.all(own.combine(&self.groups.shard, ReduceOp::Sum)?.item()?.is_finite())
    }

    fn check_update(&mut self) -> Result<()> {
        self.engine.lock().check_update(&self.rates())
    }

    fn adapt(&mut self, sums: &[f64], loss: f64) -> Result<()> {
        let (lrs, mut engine) = (self.rates(), self.engine.lock());
        let Some(adapted) = self.rates.optimizer.adapted(&lrs, sums, Some(loss))? else { return Ok(()) };
        let mut own = engine.units.iter_mut().filter_map(|unit| unit.own.as_mut());
        own.try_for_each(|own| own.optimizer.adapt(&lrs, sums, Some(loss)))?;
        self.rates.optimizer = adapted;
        Ok(())
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        self.engine.lock().update(&self.rates(), scale)?;
        self.steps += 1;
        Ok(())
    }

    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        self.buffers.sync(&self.groups.all, how)
    }

    fn learning_rate(&self) -> Option<f64> {
        self.rates().first().copied()
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let (mut groups, engine) = (self.rates.optimizer.hyper_parameters()?, self.engine.lock());
        for unit in engine.units.iter().filter(|unit| unit.own.is_some()) {
            for leaf in unit.leaves.iter().filter(|l| l.requires_grad() && l.spec().shape.numel() > 0) {
                let name = leaf.name();
                let group = self.rates.optimizer.group(&name, &leaf.spec());
                groups.get_mut(group).into_iter().for_each(|own| own.parameters.push(name.to_string()));
            }
        }
        Ok(groups)
    }

    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        self.rates.optimizer.with_hyper_parameters(groups).map(|_| ())
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        let optimizer = self.rates.optimizer.with_hyper_parameters(groups)?;
        let mut engine = self.engine.lock();
        let mut own = engine.units.iter_mut().filter_map(|unit| unit.own.as_mut());
        own.try_for_each(|own| own.optimizer.set_hyper_parameters(groups))?;
        self.rates.optimizer = optimizer;
        Ok(())
    }

    fn lend_grad(&mut self, leaf: &Arc<Leaf<R>>) -> Result<GradLoan<R>> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_owned(leaf)), |unit| unit.lend_grad())
    }

    fn restore_grad(&mut self, leaf: &Arc<Leaf<R>>, sum: GradLoan<R>) -> Result<()> {
        self.engine.lock().unit_of(leaf).map_or_else(|| Err(not_owned(leaf)), |unit| unit.restore_grad(sum))
    }

    fn unshard(&mut self, _: usize) -> Result<()> {
        self.engine.lock().prefetch_all()
    }

    fn reshard(&mut self, _: usize) -> Result<()> {
        self.engine.lock().release_prefetched()
    }

    // In a model that is cut along tensor each rank has its pieces then, all of them.
    fn gather_full_params(&self) -> Result<FullParameters> {
        self.engine.lock().gather_all()?;
        let engine = self.engine.clone();
        Ok(FullParameters::until(move || engine.lock().release_gathered()))
    }
}

impl<R: Runtime> Sharded<R> {
    /// This rank's part of sums, `[S]`, from those of pieces of parameters, as far as these count. They are added up in
    /// the model's order in the widest dtype. On one rank squared norms have the bits of data parallelism. On more
    /// ranks the last bits depend on the places at which parameters are cut.
    fn total(
        &self,
        mut rows: Vec<SumOfPiece<R>>,
        count: usize,
        counts: &LeafFilter<'_, R>,
    ) -> Result<Partial<Tensor<R>>> {
        rows.retain(|(leaf, _)| counts(leaf) && self.tensor.counts(leaf));
        rows.sort_by_key(|(leaf, _)| self.order.get(&leaf.id()));
        let rows: Vec<Tensor<R>> = rows.into_iter().map(|(_, row)| row).collect();
        Ok(Partial::new(sums::total(self.groups.all.runtime(), &rows, count)?))
    }
}

/// Stages 1 and 2 leave the parameters in the model: transfers in flight are waited for. Sharded parameters are gone
/// with the strategy, since no rank could gather them alone.
impl<R: Runtime> Drop for Sharded<R> {
    fn drop(&mut self) {
        if !self.options.stage.shards_parameters() && !std::thread::panicking() {
            // An error of this wait is that of a world that has failed, and was reported by the call that failed.
            self.engine.lock().units.iter_mut().for_each(|unit| drop(unit.wait_gathered()));
        }
    }
}

impl<R: Runtime> BackwardHook<R> for Sharded<R> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.engine.lock().on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.engine.lock().slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.engine.lock().ready(leaf, grad)
    }
}
