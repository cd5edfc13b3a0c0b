//! Two strategies as one: that of the experts, and that of the rest.

use std::{collections::HashSet, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use nn::{Module, ModuleExt};
use numcore::{
    Error, Result, Runtime, Tensor, TensorMut,
    ops::{PointwiseOps, ViewOps},
};

use optim::HyperParams;

use super::part::{ModelPart, expert_leaves, has_experts};
use crate::{
    comm::{Collectives, Comm, Communicator, Named, memory},
    ddp::{DataParallel, described},
    mesh::Mesh,
    plan::Axis,
    train::{BufferSync, ReducedGradients, StageStrategy, Strategy, TrainStep, share_groups, wide},
    zero::Sharded,
};

/// Trains a model whose experts are shared out among ranks, each of which has a copy of all the rest: [`TrainStep::builder`] makes it where
/// [`experts`](crate::train::TrainStepBuilder::experts) is asked for.
pub type ExpertTrainer<R> = TrainStep<R, ExpertParallel<R, DataParallel<R>>>;

/// Trains a model whose experts are shared out among ranks, sharded: [`TrainStep::builder`] makes it where
/// [`zero`](crate::train::TrainStepBuilder::zero) and [`experts`](crate::train::TrainStepBuilder::experts) are asked for.
pub type ZeroExpertTrainer<R> = TrainStep<R, ExpertParallel<R, Sharded<R>>>;

/// A strategy for the experts of a model, over the ranks that have the same ones, and one for the rest, over all that read different tokens.
pub struct ExpertParallel<R: Runtime, S> {
    /// All but the experts that are shared out.
    pub(super) rest: S,
    /// The experts that are, if there are.
    pub(super) experts: Option<S>,
    /// The leaves of those experts, by identity.
    expert_leaves: HashSet<usize>,
    pub(super) comm: Comm<R>,
    /// The ranks with different experts, if gradients are sent as means: the experts' own ranks know a part of what a step weighs alone.
    weighed_over: Option<Comm<R>>,
}

impl<R: Runtime, S: StageStrategy<R>> ExpertParallel<R, S> {
    /// The strategies that `make` gives for a mesh and what is trained over it. Every rank calls this.
    ///
    /// # Errors
    /// Unless the experts of the model are shared out over the mesh, as far as it has ranks along the expert axis; and as `make` does.
    ///
    /// `means` tells whether gradients are sent as such.
    #[track_caller]
    pub(crate) fn new<M: Module<R> + ?Sized>(
        mesh: &Mesh<R>,
        model: &M,
        means: bool,
        make: impl Fn(&Mesh<R>, &dyn Module<R>) -> Result<S>,
    ) -> Result<Self> {
        let size = mesh.plan().size(Axis::Expert);
        if size > 1 && !has_experts(model) {
            let why = format!(
                "the mesh has {size} ranks along expert, and the model has no experts that are shared out over them: \
                 cut it by `Mesh::parallelize` with a plan that names them (`TensorPlan::experts`)"
            );
            return Err(Error::config("TrainStep::builder", "experts", why).on_rank(mesh.world().world_rank()));
        }
        Self::of_part(mesh, model, means, make)
    }

    /// The strategies of a part of a model, such as a stage of a pipeline, which need not have experts.
    #[track_caller]
    pub(crate) fn of_part<M: Module<R> + ?Sized>(
        mesh: &Mesh<R>,
        model: &M,
        means: bool,
        make: impl Fn(&Mesh<R>, &dyn Module<R>) -> Result<S>,
    ) -> Result<Self> {
        let [experts, rest] = [true, false].map(|experts| ModelPart { model, experts });
        let leaves = expert_leaves(model);
        // The rest comes last: it leaves the thread in the random stream of its rank among all that share out examples.
        let experts = match leaves.is_empty() {
            true => None,
            false => {
                make_equal(mesh.axis(Axis::Tensor), &experts)?;
                Some(make(&mesh.of_experts()?, &experts)?)
            }
        };
        let (rest, weighed_over) = (make(mesh, &rest)?, means.then(|| mesh.axis(Axis::Expert).clone()));
        let weighed_over = weighed_over.filter(|_| experts.is_some());
        Ok(ExpertParallel { comm: rest.comm().clone(), rest, experts, expert_leaves: leaves, weighed_over })
    }

    /// What trains all but the experts that are shared out.
    pub fn rest(&self) -> &S {
        &self.rest
    }

    /// What trains the experts that this rank has; none where they are not shared out.
    pub fn experts(&self) -> Option<&S> {
        self.experts.as_ref()
    }

    pub(super) fn both(&mut self) -> impl Iterator<Item = &mut S> {
        std::iter::once(&mut self.rest).chain(&mut self.experts)
    }

    /// The strategy that has a leaf.
    pub(super) fn of(&mut self, leaf: &Arc<Leaf<R>>) -> &mut S {
        match &mut self.experts {
            Some(experts) if self.expert_leaves.contains(&leaf.id()) => experts,
            _ => &mut self.rest,
        }
    }
}

/// Ranks along tensor have the same experts: gives them the values of the first. An error unless they train them alike.
fn make_equal<R: Runtime>(ranks: &Comm<R>, experts: &impl Module<R>) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let named: Vec<_> = experts.named_parameters().into_iter().map(|(name, p)| (name, p.leaf())).collect();
    ranks.agree("the experts", described(&named, &[]).as_bytes())?;
    named.iter().try_for_each(|(name, leaf)| {
        let comm = Named::over(ranks, &format!("the first value of `{name}`"));
        leaf.set(comm.broadcast(memory(&leaf.value()?)?, 0)?.wait()?.freeze()?)
    })
}

impl<R: Runtime, S: StageStrategy<R>> Strategy<R> for ExpertParallel<R, S> {
    fn comm(&self) -> &Comm<R> {
        &self.comm
    }

    fn everyone(&self) -> &Comm<R> {
        self.rest.everyone()
    }

    fn share(&self) -> (usize, usize) {
        self.rest.share()
    }

    fn counts_examples(&self) -> bool {
        self.rest.counts_examples()
    }

    fn prepare(&mut self) -> Result<()> {
        self.both().try_for_each(S::prepare)
    }

    fn begin(&mut self, last: bool) -> Result<()> {
        self.both().try_for_each(|part| part.begin(last))
    }

    // Tokens of ranks with different experts reached each other's: they weigh what all of these do.
    fn set_loss_weight(&mut self, weight: f64, scale: f64, skippable: bool) -> Result<()> {
        self.rest.set_loss_weight(weight, scale, skippable)?;
        let Some(experts) = &mut self.experts else { return Ok(()) };
        let weight = match &self.weighed_over {
            Some(ranks) => ranks.exchange_equal(weight.to_le_bytes())?.into_iter().map(f64::from_le_bytes).sum(),
            None => weight,
        };
        experts.set_loss_weight(weight, scale, skippable)
    }

    fn end(&mut self) -> Result<()> {
        self.both().try_for_each(S::end)
    }

    fn finish(&mut self) -> Result<()> {
        self.both().try_for_each(S::finish)
    }

    fn sync_buffers(&self, how: BufferSync) -> Result<()> {
        self.rest.sync_buffers(how)
    }

    // Its experts compute the tokens of others.
    fn may_idle(&self) -> bool {
        self.experts.is_none() && self.rest.may_idle()
    }

    fn let_idle(&mut self, yes: bool) -> bool {
        self.experts.is_none() && self.rest.let_idle(yes)
    }

    fn instead_of_idling(&self) -> &'static str {
        match self.experts {
            Some(_) => "share out the examples otherwise: experts here have the tokens of other ranks",
            None => self.rest.instead_of_idling(),
        }
    }
}

impl<R: Runtime, S: StageStrategy<R>> ReducedGradients<R> for ExpertParallel<R, S> {
    fn norm(&self) -> Result<Tensor<R>> {
        let rest = self.rest.squared_norm(&|_| true)?;
        let Some(experts) = &self.experts else { return rest.sqrt() };
        let wide = wide(self.comm.runtime());
        rest.to_dtype(wide)?.add(&experts.squared_norm(&|_| true)?.to_dtype(wide)?)?.sqrt()?.reshape([])
    }

    fn is_finite(&self) -> Result<bool> {
        // Both: they ask other ranks.
        let rest = self.rest.is_finite()?;
        Ok(self.experts.as_ref().map_or(Ok(true), S::is_finite)? && rest)
    }

    fn check_update(&mut self) -> Result<()> {
        self.both().try_for_each(S::check_update)
    }

    fn update(&mut self, scale: &Tensor<R>) -> Result<()> {
        if self.experts.is_some() {
            // Both, before the first is updated.
            self.check_update()?;
        }
        self.both().try_for_each(|part| part.update(scale))
    }

    fn learning_rate(&self) -> f64 {
        self.rest.rate().or_else(|| self.experts.as_ref()?.rate()).unwrap_or(0.0)
    }

    fn hyper_parameters(&self) -> Result<Vec<HyperParams>> {
        let mut groups = self.rest.hyper_parameters()?;
        groups.extend(self.experts.as_ref().map_or_else(|| Ok(Vec::new()), S::hyper_parameters)?);
        Ok(groups)
    }

    fn check_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.both(), groups, S::check_hyper_parameters)
    }

    fn set_hyper_parameters(&mut self, groups: &[HyperParams]) -> Result<()> {
        share_groups(self.both(), groups, S::set_hyper_parameters)
    }

    fn is_canonical(&self) -> bool {
        self.rest.is_canonical()
    }
}

impl<R: Runtime, S: StageStrategy<R>> BackwardHook<R> for ExpertParallel<R, S> {
    fn on_leaf_needed(&mut self, leaf: &Arc<Leaf<R>>) -> Result<()> {
        self.of(leaf).on_leaf_needed(leaf)
    }

    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.of(leaf).grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.of(leaf).on_leaf_grad_ready(leaf, grad)
    }
}
