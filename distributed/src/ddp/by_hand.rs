//! Data parallelism for hand-written training loops that no trainer fits: adversarial, reinforcement, progressive.

use std::sync::Arc;

use autograd::{Gradients, Leaf, set_random_stream};
use nn::{
    Buffer, Module, ModuleExt, Param,
    parallel::{TensorStyle, context_ranks},
};
use numcore::{Error, Result, Runtime, Tensor, TensorMut, Within, ops::PointwiseOps};

use crate::{
    RankDevices,
    combinations::{Feature, Features},
    comm::{Collectives, Comm, ReduceOp, abort_on_err, memory},
    strategy::described,
    unused::used_anywhere,
};

/// A data-parallel model, of which every rank has a copy: synchronizes parameters and buffers, and averages gradients.
pub struct Ddp<R: Runtime> {
    comm: Comm<R>,
    parameters: Vec<(String, Arc<Leaf<R>>)>,
    buffers: Vec<(String, Buffer<R>)>,
}

impl<R: Runtime> Ddp<R> {
    /// Wraps this rank's copy of the model, which must be the same on all ranks: names, shapes, dtypes, trained
    /// parameters, and their order.
    ///
    /// Sets this thread's [random stream](set_random_stream) to the rank's number: from one seed, ranks draw different
    /// dropout masks for their different data.
    ///
    /// # Errors
    /// On every rank, if the ranks' models differ, or the model is cut in a way that [excludes](crate::combinations)
    /// gradients averaged by hand.
    #[track_caller]
    pub fn new(comm: &Comm<R>, model: &(impl Module<R> + ?Sized)) -> Result<Self> {
        let context = context_ranks(model).iter().any(|(_, over)| *over > 1);
        let counts = |p: &Param<R>| p.placed().is_some_and(|placed| placed.examples().is_some());
        let features = Features::of([Feature::ByHand])
            .and_if(context, Feature::Context)
            .and_if(model.parameters().iter().any(counts), Feature::CountedTokens);
        let cut = model.named_parameters().into_iter().find_map(|(name, p)| Some((name, cut(&p)?)));
        let fits = match cut {
            Some((name, cut)) => features.and(cut).check("Ddp").within(name),
            None => features.check("Ddp"),
        };
        fits.map_err(|error| error.on_rank(comm.world_rank())).at_caller()?;
        Ddp::of(comm, model, comm.rank())
    }

    /// Wraps a model that may be cut over a tensor or a context axis; `share` is the index of the batch share this rank
    /// reads.
    #[track_caller]
    pub(crate) fn of(comm: &Comm<R>, model: &(impl Module<R> + ?Sized), share: usize) -> Result<Self> {
        let (parameters, buffers) = (model.named_parameters(), model.named_buffers());
        comm.agree("the model", described(&parameters, &buffers).as_bytes())?;
        let parameters = parameters.into_iter().map(|(name, p)| (name, p.leaf())).collect();
        set_random_stream(share as u32);
        Ok(Ddp { comm: comm.clone(), parameters, buffers })
    }

    /// Broadcasts the parameters and buffers of rank 0 to every rank.
    #[doc(alias("broadcast_params"))]
    pub fn sync_params(&self) -> Result<()> {
        self.sync_values()?;
        self.sync_buffers()
    }

    /// The number of ranks that have a copy of the model.
    pub fn world_size(&self) -> usize {
        self.comm.size()
    }

    /// The devices of all ranks. Collective: every rank calls it.
    pub fn devices(&self) -> Result<RankDevices> {
        RankDevices::of(&self.comm)
    }

    fn sync_values(&self) -> Result<()> {
        for (_, leaf) in &self.parameters {
            leaf.set(self.broadcast(&leaf.value()?)?)?;
        }
        Ok(())
    }

    /// Broadcasts the buffers of rank 0 to every rank.
    pub fn sync_buffers(&self) -> Result<()> {
        self.buffers.iter().try_for_each(|(_, buffer)| buffer.set(self.broadcast(&buffer.value())?))
    }

    /// Replaces every parameter's gradient by the unweighted mean over all ranks. A rank without a gradient contributes
    /// zero; a parameter without a gradient on any rank gets none.
    pub fn all_reduce_gradients(&self, gradients: &mut Gradients<R>) -> Result<()> {
        self.weighted_all_reduce_gradients(gradients, &vec![1; self.comm.size()])
    }

    /// Replaces every parameter's gradient by the weighted mean over all ranks: `counts[r]` is the number of examples,
    /// or tokens, of rank `r`. A rank without a gradient contributes zero. A parameter without a gradient on any rank
    /// gets none, so an optimizer leaves it alone.
    ///
    /// # Errors
    /// On every rank, if `counts` differ between ranks, do not have one number for each rank, add up to 0 or overflow
    /// `u64`.
    #[doc(alias("apply_ddp_gradients"))]
    pub fn weighted_all_reduce_gradients(&self, gradients: &mut Gradients<R>, counts: &[u64]) -> Result<()> {
        let total = self.total(counts)?;
        abort_on_err(&self.comm, self.reduce(gradients, counts[self.comm.rank()] as f64 / total as f64))
    }

    /// The sum of `counts`. Exchanges the counts, so that a mismatch is an error on every rank and no rank hangs in a
    /// collective.
    fn total(&self, counts: &[u64]) -> Result<u64> {
        let bytes: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        let all = self.comm.exchange(&bytes)?;
        let total = counts.iter().try_fold(0u64, |sum, &count| sum.checked_add(count)).filter(|&total| total > 0);
        const OP: &str = "weighted_all_reduce_gradients";
        let error = match (all.iter().position(|other| *other != bytes), total) {
            (None, Some(total)) if counts.len() == all.len() => return Ok(total),
            (Some(rank), _) => {
                Error::mismatch(OP, format!("the counts of this rank, {counts:?}, are not those of rank {rank}"))
            }
            _ => {
                let why = format!(
                    "needs a count for each of {} ranks, not all of them 0; it was given {counts:?}",
                    all.len()
                );
                Error::lengths(OP, &[counts.len()], why)
            }
        };
        Err(error.on_rank(self.comm.world_rank()))
    }

    fn reduce(&self, gradients: &mut Gradients<R>, weight: f64) -> Result<()> {
        let trained: Vec<_> = self.parameters.iter().map(|(_, l)| l).filter(|l| l.requires_grad()).collect();
        let used = used_anywhere(&self.comm, trained.iter().map(|leaf| gradients.get(leaf).is_some()))?;
        let used: Vec<_> = trained.into_iter().zip(used).filter(|(_, used)| *used).map(|(leaf, _)| leaf).collect();
        let mut sums = Vec::new();
        // In the model's order: the order of the gradients differs between ranks.
        for leaf in &used {
            let spec = leaf.spec();
            let own = match gradients.get(leaf) {
                Some(gradient) => memory(&gradient.mul(weight)?)?,
                None => TensorMut::zeros(leaf.runtime(), spec.shape, spec.dtype)?,
            };
            sums.push(self.comm.all_reduce(own, ReduceOp::Sum)?);
        }
        for (leaf, sum) in used.into_iter().zip(sums) {
            gradients.set(leaf, sum.wait()?.freeze()?)?;
        }
        Ok(())
    }

    pub(crate) fn broadcast(&self, value: &Tensor<R>) -> Result<Tensor<R>> {
        self.comm.broadcast(memory(value)?, 0)?.wait()?.freeze()
    }
}

/// The feature by which a parameter, or its gradient, is spread over several ranks.
fn cut<R: Runtime>(parameter: &Param<R>) -> Option<Feature> {
    let placed = parameter.placed().filter(|placed| placed.group().size() > 1)?;
    Some(if placed.style() == TensorStyle::Experts { Feature::Experts } else { Feature::Tensor })
}
