//! The hook that fills buckets and sends them.

use std::sync::Arc;

use autograd::{BackwardHook, Leaf, LeafGrad};
use numcore::{Error, Result, Runtime, Tensor, TensorMut};
use optim::{FlatGradients, Optimizer};

use super::{
    BucketOptions, BucketReducer, FullBucket,
    finite::is_finite,
    layout::BucketLayout,
    reducer::{FailedSteps, reducer},
};
use crate::{
    comm::{Comm, Communicator, Label, abort_on_err},
    unused::{Unused, require_all, used_anywhere},
};

/// An optimizer's gradients in buckets: a hook whose slots are the optimizer's own gradient memory, of which consecutive pieces are summed
/// over all ranks, in place, as soon as they are full.
///
/// Buckets are sent in the order of the plan, whatever order gradients become final in: all ranks make the same calls. The sums do
/// not depend on how parameters are cut into buckets.
pub struct GradientBuckets<R: Runtime> {
    comm: Comm<R>,
    label: Label,
    options: BucketOptions,
    reducer: Box<dyn BucketReducer<R>>,
    layout: BucketLayout<R>,
    next: usize,
    sync: bool,
    /// Whether a backward pass of this step was begun.
    begun: bool,
    /// The losses of this rank weigh nothing in this step.
    weighs_nothing: bool,
    /// Parameters in the order in which their gradients became final.
    ready: Vec<usize>,
}

impl<R: Runtime> GradientBuckets<R> {
    /// The gradients of `optimizer`'s parameters, which it reorders by `key`: the order in which they are expected to become final.
    pub fn new(
        comm: &Comm<R>,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
        options: BucketOptions,
    ) -> Result<Self> {
        let reducer = reducer(comm, &options, FailedSteps::Stay)?;
        Self::reduced_by(comm, Label::next(comm), optimizer, key, options, reducer)
    }

    /// Makes the buckets, like [`new`](GradientBuckets::new), of a training step that has a label and a reducer already.
    pub(crate) fn reduced_by(
        comm: &Comm<R>,
        label: Label,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
        options: BucketOptions,
        reducer: Box<dyn BucketReducer<R>>,
    ) -> Result<Self> {
        let layout = BucketLayout::new(comm, &label, optimizer, key, &options)?;
        Ok(GradientBuckets {
            comm: comm.clone(),
            label,
            options,
            reducer,
            layout,
            next: 0,
            sync: true,
            begun: false,
            weighs_nothing: false,
            ready: Vec::new(),
        })
    }

    /// Cuts buckets anew, between steps. The reducer keeps what it has from step to step.
    pub(crate) fn rebuild(
        &mut self,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
    ) -> Result<()> {
        self.layout = BucketLayout::new(&self.comm, &self.label, optimizer, key, &self.options)?;
        Ok(())
    }

    /// The gradients. Between [`begin`](GradientBuckets::begin) and [`finish`](GradientBuckets::finish) parts of them are in flight.
    pub fn gradients(&self) -> &FlatGradients<R> {
        &self.layout.gradients
    }

    /// The gradients, to clip or scale them.
    pub fn gradients_mut(&mut self) -> &mut FlatGradients<R> {
        &mut self.layout.gradients
    }

    /// How many buckets there are.
    pub fn len(&self) -> usize {
        self.layout.buckets.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.layout.buckets.is_empty()
    }

    /// Names of the parameters in bucket `k`.
    pub fn names(&self, k: usize) -> Vec<String> {
        self.layout.buckets[k].members.iter().map(|member| member.leaf.name().to_string()).collect()
    }

    /// Parameters by name, in the order in which their gradients became final in the last backward pass that was exchanged.
    pub fn ready_order(&self) -> Vec<String> {
        self.ready_leaves().map(|leaf| leaf.name().to_string()).collect()
    }

    /// The parameters of [`ready_order`](GradientBuckets::ready_order).
    pub(crate) fn ready_leaves(&self) -> impl Iterator<Item = &Arc<Leaf<R>>> {
        self.ready.iter().map(|&i| &self.layout.params[i].leaf)
    }

    /// Forgets all gradients: the next backward pass overwrites them.
    pub fn zero(&mut self) {
        // What a step that failed has left in flight holds ranges of the gradients.
        self.reducer.begin_step();
        self.layout.buckets.iter_mut().for_each(|bucket| bucket.sent = false);
        self.layout.gradients.zero();
        (self.begun, self.weighs_nothing) = (false, false);
        self.layout.params.iter_mut().for_each(|p| p.used = false);
    }

    /// Before a backward pass: `sync` tells whether its gradients are to be exchanged, or only added up. In canonical order they always are.
    pub fn begin(&mut self, sync: bool) -> Result<()> {
        if self.reducer.reduces_every_pass() && std::mem::replace(&mut self.begun, true) {
            let settled = self.flush();
            abort_on_err(&self.comm, settled)?;
            self.layout.gradients.zero();
        }
        (self.sync, self.next) = (sync || self.reducer.reduces_every_pass(), 0);
        self.ready.clear();
        self.layout.begin_pass(&self.comm, &self.label);
        Ok(())
    }

    /// Before the last backward pass: what this rank's losses of the step weigh, the loss scale (1 without one), and whether the step may be left out
    /// once its gradients are known. What is sent compressed, or as `f16`, are means: what one step could not send counts for no more and no less in
    /// the next, and no sum leaves the range.
    pub fn set_loss_weight(&mut self, weight: f64, scale: f64, skippable: bool) -> Result<()> {
        self.weighs_nothing = weight == 0.0;
        self.reducer.set_loss_weight(weight, scale, skippable)
    }

    /// After the update: the step was taken. Without it, a step that may be left out is forgotten by the next [`zero`](GradientBuckets::zero).
    pub fn keep(&mut self) {
        self.reducer.step_taken();
    }

    /// What of a parameter's mean gradient this rank could not send yet, where gradients are compressed with error feedback: a row.
    pub fn error(&self, leaf: &Arc<Leaf<R>>) -> Result<Option<Tensor<R>>> {
        self.reducer.residual(leaf)
    }

    pub(crate) fn reducer(&self) -> &dyn BucketReducer<R> {
        &*self.reducer
    }

    pub(crate) fn reducer_mut(&mut self) -> &mut dyn BucketReducer<R> {
        &mut *self.reducer
    }

    /// After the last backward pass: sends what is left, and waits until every gradient is the sum over all ranks.
    #[doc(alias("wait_and_unflatten"))]
    pub fn finish(&mut self) -> Result<()> {
        let completed = self.complete();
        abort_on_err(&self.comm, completed)
    }

    fn complete(&mut self) -> Result<()> {
        self.flush()?;
        if self.reducer.reduces_every_pass() {
            // Any pass counts.
            self.require_used()?;
        }
        // After the last bucket: how many were sent before depends on the rank.
        let params = self.layout.params.iter();
        let anywhere = match self.options.unused {
            Unused::Allow => used_anywhere(&self.comm, params.map(|p| p.used))?,
            // Other ranks have used them all.
            Unused::Error if self.idles() => params.map(|p| p.leaf.requires_grad()).collect(),
            Unused::Error => params.map(|p| p.used).collect(),
        };
        let unused: Vec<usize> = (0..anywhere.len()).filter(|&i| !anywhere[i]).collect();
        unused.iter().try_for_each(|&i| self.layout.forget(i))?;
        let unused: Vec<&Arc<Leaf<R>>> = unused.into_iter().map(|i| &self.layout.params[i].leaf).collect();
        self.reducer.end_step(&unused);
        Ok(())
    }

    /// True if this rank has no example in this step: it contributes zeros.
    fn idles(&self) -> bool {
        self.weighs_nothing && !self.layout.params.iter().any(|p| p.used)
    }

    /// An error that names the parameters without a gradient, where there may be none.
    fn require_used(&self) -> Result<()> {
        if self.options.unused == Unused::Allow || self.idles() {
            return Ok(());
        }
        require_all(self.layout.params.iter().map(|p| (&p.leaf, p.used)))
    }

    /// Sends what the backward pass has left, and waits for all of it.
    fn flush(&mut self) -> Result<()> {
        let (used, every_pass) = (self.layout.used(), self.reducer.reduces_every_pass());
        for (p, used) in self.layout.params.iter_mut().zip(used) {
            p.used = used || (every_pass && p.used);
        }
        if !every_pass {
            self.require_used()?;
        }
        while self.next < self.len() {
            self.send(self.next)?;
        }
        for k in 0..self.len() {
            if std::mem::take(&mut self.layout.buckets[k].sent) {
                let row = self.reducer.wait(k)?;
                self.layout.flat(k).restore(row)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, k: usize) -> Result<()> {
        if self.options.check_finite {
            self.require_finite(k)?;
        }
        let row = self.layout.lend(k)?;
        self.next = k + 1;
        let bucket = &mut self.layout.buckets[k];
        bucket.sent = true;
        self.reducer.send(FullBucket { number: k, comm: &bucket.comm, members: &bucket.members }, row)
    }

    fn require_finite(&mut self, k: usize) -> Result<()> {
        for at in 0..self.layout.buckets[k].params.len() {
            let p = &self.layout.params[self.layout.buckets[k].params[at]];
            let flat = &mut self.layout.gradients.flats_mut()[p.buffer];
            // A range that is lent can be read while its neighbours are in flight.
            if flat.is_written(p.range) {
                let grad = flat.lend(p.range)?;
                let finite = is_finite(&grad);
                flat.restore(grad)?;
                if !finite? {
                    let why = format!("its gradient is not finite on rank {}, in bucket {k}", self.comm.world_rank());
                    return Err(Error::state(p.leaf.name().to_string(), why));
                }
            }
        }
        Ok(())
    }
}

impl<R: Runtime> BackwardHook<R> for GradientBuckets<R> {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.layout.gradients.grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.layout.gradients.on_leaf_grad_ready(leaf, grad)?;
        let Some(i) = self.layout.number_of(leaf).filter(|_| self.sync) else { return Ok(()) };
        if !self.layout.mark_ready(i) {
            return Ok(());
        }
        self.ready.push(i);
        while self.layout.buckets.get(self.next).is_some_and(|b| b.waits_for == 0) {
            self.send(self.next)?;
        }
        Ok(())
    }
}
