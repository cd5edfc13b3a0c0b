//! Data parallelism by hand, for loops that no trainer fits: adversarial, reinforcement, progressive.

use std::sync::Arc;

use autograd::{Gradients, Leaf};
use nn::{Buffer, Module, ModuleExt};
use numcore::{Error, Result, Runtime, Tensor, TensorMut, ops::PointwiseOps};

use crate::comm::{Collectives, Comm, ReduceOp, memory};

/// A model of which every rank has a copy.
pub struct Ddp<R: Runtime> {
    comm: Comm<R>,
    parameters: Vec<(String, Arc<Leaf<R>>)>,
    buffers: Vec<(String, Buffer<R>)>,
}

impl<R: Runtime> Ddp<R> {
    /// The model on this rank. An error unless all ranks have the same one: names, shapes, dtypes, what is trained, and their order.
    #[track_caller]
    pub fn new(comm: &Comm<R>, model: &(impl Module<R> + ?Sized)) -> Result<Self> {
        let parameters: Vec<_> = model.named_parameters().into_iter().map(|(name, p)| (name, p.leaf())).collect();
        let buffers = model.named_buffers();
        comm.agree("the model", described(&parameters, &buffers).as_bytes())?;
        Ok(Ddp { comm: comm.clone(), parameters, buffers })
    }

    /// Gives every rank the parameters of rank 0.
    pub fn sync_params(&self) -> Result<()> {
        for (_, leaf) in &self.parameters {
            leaf.set(self.broadcast(&leaf.value()?)?)?;
        }
        Ok(())
    }

    /// Gives every rank the buffers of rank 0.
    pub fn sync_buffers(&self) -> Result<()> {
        self.buffers.iter().try_for_each(|(_, buffer)| buffer.set(self.broadcast(&buffer.value())?))
    }

    /// Replaces every parameter's gradient by the mean over all ranks; a rank without one contributes zero.
    pub fn all_reduce_gradients(&self, gradients: &mut Gradients<R>) -> Result<()> {
        self.weighted_all_reduce_gradients(gradients, &vec![1; self.comm.size()])
    }

    /// Replaces every parameter's gradient by the mean over all ranks, weighted by what each contributed: `counts` has a number of
    /// examples, or tokens, for each rank, the same on all.
    pub fn weighted_all_reduce_gradients(&self, gradients: &mut Gradients<R>, counts: &[u64]) -> Result<()> {
        let (n, total) = (self.comm.size(), counts.iter().sum::<u64>());
        if counts.len() != n || total == 0 {
            let why = format!("needs a count for each of {n} ranks, not all of them 0; it was given {counts:?}");
            return Err(Error::argument("weighted_all_reduce_gradients", why).on_rank(self.comm.rank()));
        }
        let weight = counts[self.comm.rank()] as f64 / total as f64;
        let trained: Vec<_> = self.parameters.iter().map(|(_, l)| l).filter(|l| l.requires_grad()).collect();
        let mut sums = Vec::new();
        // In the model's order: that of the gradients is not the same on all ranks.
        for leaf in &trained {
            let spec = leaf.spec();
            let own = match gradients.get(leaf) {
                Some(gradient) => memory(&gradient.mul(weight)?)?,
                None => TensorMut::zeros(leaf.runtime(), spec.shape, spec.dtype)?,
            };
            sums.push(self.comm.all_reduce(own, ReduceOp::Sum)?);
        }
        for (leaf, sum) in trained.into_iter().zip(sums) {
            gradients.set(leaf, sum.wait()?.freeze()?);
        }
        Ok(())
    }

    pub(crate) fn broadcast(&self, value: &Tensor<R>) -> Result<Tensor<R>> {
        self.comm.broadcast(memory(value)?, 0)?.wait()?.freeze()
    }
}

/// A model in a few words for each parameter and buffer: what ranks must agree on.
pub(crate) fn described<R: Runtime>(parameters: &[(String, Arc<Leaf<R>>)], buffers: &[(String, Buffer<R>)]) -> String {
    let parameter = |(name, leaf): &(String, Arc<Leaf<R>>)| {
        let (spec, trained) = (leaf.spec(), leaf.requires_grad());
        format!("{name} {} {} {trained}\n", spec.dtype, spec.shape)
    };
    let buffer =
        |(name, buffer): &(String, Buffer<R>)| format!("{name} {} {}\n", buffer.spec().dtype, buffer.spec().shape);
    parameters.iter().map(parameter).chain(buffers.iter().map(buffer)).collect()
}
