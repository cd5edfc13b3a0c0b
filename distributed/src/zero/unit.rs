//! The memory of a unit: parameters that are gathered, reduced and updated together.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{MemoryCategory, Result, Runtime, ops::ViewOps};
use optim::{Shards, StatePlace};

use super::{
    Piece, UnitLayout,
    gradients::{ShardState, UnitGradients},
    kept::Kept,
    options::{ShardGroups, UnitOptions},
    values::{GatheredValues, fill},
};
use crate::comm::Communicator;

/// Parameters of one dtype that travel together.
pub(super) struct Unit<R: Runtime> {
    pub(super) name: String,
    pub(super) leaves: Vec<Arc<Leaf<R>>>,
    pub(super) layout: UnitLayout,
    /// Parameters this rank updates pieces of, and the optimizer of those; none if all are frozen.
    pub(super) own: Option<ShardState<R>>,
    pub(super) pieces: Vec<Piece>,
    pub(super) options: UnitOptions,
    /// The ranks; their calls have the unit's name.
    pub(super) groups: ShardGroups<R>,
    /// The ranks as they were given.
    unnamed: ShardGroups<R>,
    /// Parameters that were frozen since the unit was made: part of the name of its calls.
    frozen: Vec<usize>,
    /// All values, or, where parameters are sharded, this rank's.
    pub(super) values: Kept<R>,
    pub(super) whole: GatheredValues<R>,
    pub(super) gradients: UnitGradients<R>,
    /// Leaves whose gradient is final in this backward pass.
    pub(super) ready: Vec<bool>,
    /// Leaves with a gradient in this step.
    pub(super) used: Vec<bool>,
}

impl<R: Runtime> Unit<R> {
    /// Takes the values of `leaves`, one at a time, so that at most one is in memory in addition to what this rank keeps.
    pub(super) fn new(
        unnamed: &ShardGroups<R>,
        options: UnitOptions,
        name: String,
        leaves: Vec<Arc<Leaf<R>>>,
        optimizer: Option<(&dyn Shards<R>, StatePlace)>,
    ) -> Result<Self> {
        let groups = unnamed.of(&name, "");
        let comm = &groups.shard;
        let rt = comm.runtime().with_category(MemoryCategory::Activations);
        let (dtype, rank) = (leaves[0].spec().dtype, comm.rank());
        let parameters = leaves.iter().map(|l| (l.name().to_string(), l.spec().shape));
        let layout = UnitLayout::new(dtype, parameters, comm.size());
        let stage = options.stage;
        let (pieces, shard) = (layout.pieces(rank), layout.shard_layout(rank)?);
        let kept = if stage.shards_parameters() { shard.clone() } else { layout.full().clone() };
        let mut values = Kept::zeros(&rt, MemoryCategory::Parameters, kept, options.values)?;
        fill(&groups.all, values.brought()?, &leaves, &pieces, stage.shards_parameters())?;
        let own = match optimizer {
            None => None,
            Some((shards, place)) => {
                let group = |p: &Piece| shards.group(&leaves[p.parameter].name(), &leaves[p.parameter].spec());
                let start = if stage.shards_parameters() { 0 } else { layout.span(rank).start };
                let values = values.whole()?.narrow(0, start, shard.numel())?;
                let optimizer = shards.shard(&shard, pieces.iter().map(group).collect(), &values, place)?;
                let grads = if stage.shards_gradients() { shard } else { layout.full().clone() };
                let grads = grads.with_dtype(options.kept);
                let grads = Kept::zeros(&rt, MemoryCategory::Gradients, grads, options.gradients)?;
                Some(ShardState { optimizer, grads })
            }
        };
        values.put_away()?;
        let n = leaves.len();
        let mut unit = Unit {
            name,
            leaves,
            layout,
            own,
            pieces,
            options,
            groups,
            unnamed: unnamed.clone(),
            frozen: Vec::new(),
            values,
            whole: GatheredValues::Absent,
            gradients: UnitGradients::Clear,
            ready: vec![false; n],
            used: vec![false; n],
        };
        if !stage.shards_parameters() {
            unit.show(None)?;
        }
        Ok(unit)
    }

    /// The start of this rank's shard in the buffer that is kept.
    pub(super) fn start(&self, sharded: bool) -> usize {
        if sharded { 0 } else { self.layout.span(self.groups.shard.rank()).start }
    }

    pub(super) fn rank(&self) -> usize {
        self.groups.shard.rank()
    }

    /// Whether only this rank's shard of the values is kept.
    pub(super) fn is_sharded(&self) -> bool {
        self.options.stage.shards_parameters()
    }

    /// Where this rank's shard begins in the values that are kept.
    pub(super) fn own_start(&self) -> usize {
        self.start(self.is_sharded())
    }

    /// Before a backward pass. Which parameters are frozen by now is part of the name of its calls: ranks that freeze different ones disagree,
    /// instead of updating different ones.
    pub(super) fn begin_sweep(&mut self) {
        for (ready, leaf) in self.ready.iter_mut().zip(&self.leaves) {
            *ready = !leaf.requires_grad();
        }
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
