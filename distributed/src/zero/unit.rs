//! The memory of a unit: parameters that are gathered, reduced and updated together.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{MemoryCategory, Result, Runtime, ops::ViewOps};
use optim::{CutParam, Fragment, Shards, StatePlace};

use super::{
    Piece, UnitLayout,
    gradients::{ShardState, UnitGradients},
    kept::Kept,
    options::{ShardGroups, UnitOptions},
    values::{GatheredValues, fill},
};
use crate::{comm::Communicator, strategy::PartialSums};

/// Parameters of one dtype that are sent together.
pub(super) struct Unit<R: Runtime> {
    pub(super) name: String,
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    /// The pieces of each leaf along tensor, where its rule needs the whole; empty if no rule does.
    pub(super) cut: Vec<Option<CutParam<R>>>,
    pub(super) layout: UnitLayout,
    /// The optimizer of this rank's pieces, and their gradients; none if all parameters are frozen.
    pub(super) own: Option<ShardState<R>>,
    pub(super) pieces: Vec<Piece>,
    pub(super) options: UnitOptions,
    /// The ranks; their calls have the unit's name.
    pub(super) groups: ShardGroups<R>,
    /// The ranks without the unit's name.
    unnamed: ShardGroups<R>,
    /// Parameters that were frozen since the unit was made: part of the name of its calls.
    frozen: Vec<usize>,
    /// All values or, where parameters are sharded, this rank's.
    pub(super) values: Kept<R>,
    pub(super) whole: GatheredValues<R>,
    pub(super) gradients: UnitGradients<R>,
    /// Sums over the tensor axis in flight.
    pub(super) partial: PartialSums<R>,
    /// Leaves whose gradient is final in this backward pass.
    pub(super) ready: Vec<bool>,
    /// Leaves whose gradient's memory was requested in this backward pass. An op call may request that of several
    /// leaves before the first of them is ready.
    pub(super) begun: Vec<bool>,
    /// Leaves with a gradient in this step.
    pub(super) used: Vec<bool>,
}

/// The parameters of a unit.
pub(super) struct UnitParameters<R: Runtime> {
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    /// The shards of leaves that may not be cut, in ascending order.
    pub(super) owners: Option<Vec<usize>>,
    /// The pieces of each leaf along tensor, where its rule needs the whole; empty if no rule does.
    pub(super) cut: Vec<Option<CutParam<R>>>,
}

impl<R: Runtime> Unit<R> {
    /// Takes the values of the leaves, one at a time, so that at most one is in memory beside this rank's values.
    pub(super) fn new(
        unnamed: &ShardGroups<R>,
        options: UnitOptions,
        name: String,
        UnitParameters { leaves, owners, cut }: UnitParameters<R>,
        optimizer: Option<(&dyn Shards<R>, StatePlace)>,
    ) -> Result<Self> {
        let groups = unnamed.of(&name, "");
        let comm = &groups.shard;
        let rt = comm.runtime().with_category(MemoryCategory::Activations);
        let (dtype, rank) = (leaves[0].spec().dtype, comm.rank());
        let parameters = leaves.iter().map(|l| (l.name().to_string(), l.spec().shape));
        let layout = match owners {
            None => UnitLayout::new(dtype, parameters, comm.size()),
            Some(owners) => {
                let owned = owners.into_iter().zip(parameters).map(|(owner, (name, shape))| (owner, name, shape));
                UnitLayout::uncut(dtype, owned, comm.size())
            }
        };
        let stage = options.stage;
        let pieces = layout.pieces(rank);
        let kept = if stage.shards_parameters() { layout.shard_layout(rank)? } else { layout.full().clone() };
        let mut values = Kept::zeros(&rt, MemoryCategory::Parameters, kept, options.values)?;
        fill(&groups.all, values.brought()?, &leaves, &pieces, stage.shards_parameters())?;
        values.put_away()?;
        let n = leaves.len();
        let mut unit = Unit {
            name,
            leaves,
            cut,
            layout,
            own: None,
            pieces,
            options,
            groups,
            unnamed: unnamed.clone(),
            frozen: Vec::new(),
            values,
            whole: GatheredValues::Absent,
            gradients: UnitGradients::Clear,
            partial: PartialSums::default(),
            ready: vec![false; n],
            begun: vec![false; n],
            used: vec![false; n],
        };
        unit.leaves.iter().for_each(|leaf| leaf.touch());
        match optimizer {
            Some((optimizer, place)) => unit.optimize(optimizer, place)?,
            None => unit.publish()?,
        }
        Ok(unit)
    }

    /// Trains the parameters from now on, starting from their current values.
    ///
    /// # Errors
    /// On every rank, if the rule cannot update one of the parameters.
    pub(super) fn optimize(&mut self, optimizer: &dyn Shards<R>, place: StatePlace) -> Result<()> {
        self.leaves.iter().try_for_each(|leaf| optimizer.may_cut(&leaf.name(), &leaf.spec()).map(|_| ()))?;
        self.take_values()?;
        let made = self.shard_state(optimizer, place);
        // Values have moved, and are what they were: a graph that has read them stays valid.
        self.publish()?;
        self.own = Some(made?);
        Ok(())
    }

    /// The optimizer of this rank's pieces, and memory for their gradients.
    fn shard_state(&self, optimizer: &dyn Shards<R>, place: StatePlace) -> Result<ShardState<R>> {
        let shard = self.layout.shard_layout(self.rank())?;
        let fragment = |p: &Piece| Fragment {
            group: optimizer.group(&self.leaves[p.parameter].name(), &self.leaves[p.parameter].spec()),
            cut: self.cut.get(p.parameter).cloned().flatten(),
        };
        let values = self.values.whole()?.narrow(0, self.own_start(), shard.numel())?;
        let optimizer = optimizer.shard(&shard, self.pieces.iter().map(fragment).collect(), &values, place)?;
        let grads = if self.options.stage.shards_gradients() { shard } else { self.layout.full().clone() };
        let (category, rt) = (MemoryCategory::Gradients, self.values.runtime());
        let grads = Kept::zeros(rt, category, grads.with_dtype(self.options.kept), self.options.gradients)?;
        Ok(ShardState { optimizer, grads })
    }

    /// The start of this rank's shard in a buffer that holds the shard alone if `sharded`, else the whole unit.
    pub(super) fn start(&self, sharded: bool) -> usize {
        if sharded { 0 } else { self.layout.span(self.groups.shard.rank()).start }
    }

    pub(super) fn rank(&self) -> usize {
        self.groups.shard.rank()
    }

    /// Tells whether only this rank's shard of the values is kept.
    pub(super) fn is_sharded(&self) -> bool {
        self.options.stage.shards_parameters()
    }

    /// The start of this rank's shard in the kept values.
    pub(super) fn own_start(&self) -> usize {
        self.start(self.is_sharded())
    }

    /// Begins a backward pass. The names of frozen parameters become part of the name of its calls. Ranks that freeze
    /// different parameters get an error, instead of updating different ones.
    pub(super) fn begin_sweep(&mut self) {
        for (ready, leaf) in self.ready.iter_mut().zip(&self.leaves) {
            *ready = !leaf.requires_grad();
        }
        self.begun.clone_from(&self.ready);
        let own = self.own.is_some();
        let frozen = || (0..self.leaves.len()).filter(|&i| own && self.ready[i]);
        if !frozen().eq(self.frozen.iter().copied()) {
            self.frozen = frozen().collect();
            let names: Vec<String> = self.frozen.iter().map(|&i| format!("`{}`", self.leaves[i].name())).collect();
            let note = if names.is_empty() { String::new() } else { format!(" with {} frozen", names.join(", ")) };
            self.groups = self.unnamed.of(&self.name, &note);
        }
    }
}
