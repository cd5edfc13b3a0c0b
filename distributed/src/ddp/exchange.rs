//! Exchange of gradient buckets: filled and sent during the backward pass, waited for after it.

use std::{mem, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use numcore::{Error, Result, Runtime, TensorMut};

use super::DataParallel;
use crate::{
    buckets::{FullBucket, is_finite},
    comm::{Communicator, abort_on_err},
    unused::{Unused, idles, require_all, used_anywhere},
};

impl<R: Runtime> DataParallel<R> {
    /// Waits for the buckets of a step that was abandoned or has failed: in flight, they hold ranges of the gradients.
    pub(super) fn wait_for_abandoned(&mut self) {
        if self.reducer.reduces_every_pass() {
            let _ = self.wait_for_sent();
        }
    }

    /// Discards all gradients: the next backward pass overwrites them.
    pub(super) fn zero(&mut self) {
        self.partial = Default::default();
        self.reducer.begin_step();
        self.layout.buckets.iter_mut().for_each(|bucket| bucket.sent = false);
        self.layout.gradients.zero();
        (self.has_passed, self.has_zero_weight) = (false, false);
        self.layout.params.iter_mut().for_each(|p| p.used = false);
    }

    /// Begins a backward pass. With `sync`, its gradients are exchanged; without, only accumulated. A reducer that
    /// reduces every pass, as canonical order does, exchanges them always.
    pub(super) fn begin_pass(&mut self, sync: bool) -> Result<()> {
        if self.reducer.reduces_every_pass() && mem::replace(&mut self.has_passed, true) {
            let settled = self.flush();
            abort_on_err(self.comm(), settled)?;
            self.layout.gradients.zero();
        }
        let sync = sync || self.reducer.reduces_every_pass();
        (self.sync, self.next) = (sync && !self.sends_between, 0);
        self.ready.clear();
        self.layout.begin_pass(&self.ranks.losses, &self.label);
        Ok(())
    }

    /// Sends the remaining buckets after the last backward pass, and waits until every gradient is the sum over all
    /// ranks.
    pub(super) fn complete(&mut self) -> Result<()> {
        self.flush()?;
        if self.reducer.reduces_every_pass() {
            // A parameter that any pass has used counts as used.
            self.require_used()?;
        }
        // After the last bucket, since the number of buckets sent during the pass differs between ranks.
        let params = self.layout.params.iter();
        let anywhere = match self.options.unused {
            Unused::Allow => used_anywhere(self.comm(), params.map(|p| p.used))?,
            // The other ranks have used every trained parameter, or the step has failed there.
            Unused::Error if self.idles() => params.map(|p| p.leaf.requires_grad()).collect(),
            Unused::Error => params.map(|p| p.used).collect(),
        };
        let unused: Vec<usize> = (0..anywhere.len()).filter(|&i| !anywhere[i]).collect();
        unused.iter().try_for_each(|&i| self.layout.forget(i))?;
        let unused: Vec<&Arc<Leaf<R>>> = unused.into_iter().map(|i| &self.layout.params[i].leaf).collect();
        self.reducer.end_step(&unused);
        Ok(())
    }

    /// Tells whether this rank has no example in this step: it contributes zeros.
    fn idles(&self) -> bool {
        idles(self.has_zero_weight, self.layout.params.iter().map(|p| p.used))
    }

    /// An error that names the trained parameters without a gradient, unless these are allowed or the rank idles.
    fn require_used(&self) -> Result<()> {
        if self.options.unused == Unused::Allow || self.idles() {
            return Ok(());
        }
        require_all(self.layout.params.iter().map(|p| (&p.leaf, p.used)))
    }

    /// Sends the buckets that the backward pass has left, and waits for all.
    fn flush(&mut self) -> Result<()> {
        let (used, every_pass) = (self.layout.used(), self.reducer.reduces_every_pass());
        for (p, used) in self.layout.params.iter_mut().zip(used) {
            p.used = used || (every_pass && p.used);
        }
        if !every_pass {
            self.require_used()?;
        }
        while self.next < self.layout.buckets.len() {
            self.send(self.next)?;
        }
        self.wait_for_sent()
    }

    fn wait_for_sent(&mut self) -> Result<()> {
        (0..self.layout.buckets.len()).try_for_each(|k| self.wait_for(k))
    }

    /// Waits for the sums of a bucket, if it was sent. Its partial gradients go on to the tensor axis.
    fn wait_for(&mut self, k: usize) -> Result<()> {
        if !mem::take(&mut self.layout.buckets[k].sent) {
            return Ok(());
        }
        let row = self.reducer.wait(k)?;
        self.layout.flat(k).restore(row)?;
        self.start_partial(k)
    }

    fn send(&mut self, k: usize) -> Result<()> {
        if self.options.check_finite {
            self.require_finite(k)?;
        }
        let row = self.layout.lend(k)?;
        self.next = k + 1;
        let bucket = &mut self.layout.buckets[k];
        bucket.sent = true;
        let may_be_unused = self.options.unused == Unused::Allow;
        self.reducer.send(FullBucket { number: k, comm: &bucket.comm, members: &bucket.members, may_be_unused }, row)
    }

    fn require_finite(&mut self, k: usize) -> Result<()> {
        for at in 0..self.layout.buckets[k].params.len() {
            let p = &self.layout.params[self.layout.buckets[k].params[at]];
            let flat = &mut self.layout.gradients.flats_mut()[p.buffer];
            // A lent range can be read while its neighbours are in flight.
            if flat.is_written(p.range) {
                let grad = flat.lend(p.range)?;
                let finite = is_finite(&grad);
                flat.restore(grad)?;
                if !finite? {
                    let why = format!("its gradient is not finite on rank {}, in bucket {k}", self.comm().world_rank());
                    return Err(Error::state(p.leaf.name().to_string(), why));
                }
            }
        }
        Ok(())
    }
}

impl<R: Runtime> BackwardHook<R> for DataParallel<R> {
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
        while let Some(k) = self.layout.buckets.get(self.next).filter(|b| b.waits_for == 0).map(|_| self.next) {
            self.send(k)?;
            if self.is_alone {
                self.wait_for(k)?;
            }
        }
        Ok(())
    }
}
