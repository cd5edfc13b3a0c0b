//! The hook that fills buckets and sends them.

use std::{collections::HashMap, sync::Arc};

use autograd::{BackwardHook, Leaf, LeafGrad};
use numcore::{Error, Flat, Result, Runtime, Tensor, TensorMut};
use optim::{FlatGradients, Optimizer};

use super::{
    BucketLimits, BucketOptions, BucketPlan, BucketSpec, GradCompression,
    bucket::{Bucket, BucketParam, of_bucket},
    canonical,
    finite::is_finite,
    powersgd::{BucketMember, Compressor},
    weight::TotalWeight,
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
pub struct Buckets<R: Runtime> {
    comm: Comm<R>,
    label: Label,
    options: BucketOptions,
    gradients: FlatGradients<R>,
    /// In canonical order: the sums, while `gradients` are those of a chunk.
    sums: Option<FlatGradients<R>>,
    compressor: Option<Compressor<R>>,
    /// What the step weighs, where means are sent.
    weight: TotalWeight<R>,
    params: Vec<BucketParam<R>>,
    place: HashMap<usize, usize>,
    plan: Vec<Bucket<R>>,
    next: usize,
    sync: bool,
    /// Whether a backward pass of this step was begun.
    begun: bool,
    /// Parameters in the order in which their gradients became final.
    ready: Vec<usize>,
}

impl<R: Runtime> Buckets<R> {
    /// The gradients of `optimizer`'s parameters, which it reorders by `key`: the order in which they are expected to become final.
    pub fn new(
        comm: &Comm<R>,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
        options: BucketOptions,
    ) -> Result<Self> {
        Self::labelled(comm, Label::next(comm), optimizer, key, options)
    }

    /// As [`new`](Buckets::new) for a trainer that has a label already.
    pub(crate) fn labelled(
        comm: &Comm<R>,
        label: Label,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
        options: BucketOptions,
    ) -> Result<Self> {
        let compressor = match options.compression {
            GradCompression::PowerSgd(power) => Some(Compressor::new(comm, power, &options)?),
            _ => None,
        };
        optimizer.reorder(key)?;
        let mut params = Vec::new();
        for (buffer, flat) in optimizer.params().into_iter().enumerate() {
            let slot = |(range, leaf): (usize, &Arc<Leaf<R>>)| BucketParam {
                leaf: leaf.clone(),
                buffer,
                range,
                bucket: 0,
                ready: false,
                used: false,
            };
            params.extend(flat.leaves().iter().enumerate().map(slot));
        }
        params.sort_by_key(|p| key(&p.leaf));
        let spec = |p: &BucketParam<R>| {
            let spec = p.leaf.spec();
            BucketSpec { numel: spec.shape.numel(), dtype: spec.dtype, buffer: p.buffer }
        };
        let specs: Vec<BucketSpec> = params.iter().map(spec).collect();
        let limits = options.limits.clone().unwrap_or_else(|| BucketLimits::of(&specs));
        let plan = BucketPlan::new(&specs, &limits);
        let mut buckets = Vec::new();
        for (b, members) in plan.buckets().iter().enumerate() {
            members.iter().for_each(|&i| params[i].bucket = b);
            let (first, last) = (&params[members[0]], &params[members[members.len() - 1]]);
            let ranges = first.range..last.range + 1;
            let members = members.clone();
            let (comm, buffer, frozen) = (label.named(comm, &format!("bucket {b}")), first.buffer, Vec::new());
            buckets.push(Bucket { comm, frozen, buffer, ranges, members, waits_for: 0, work: None });
        }
        let place = params.iter().enumerate().map(|(i, p)| (p.leaf.id(), i)).collect();
        let gradients = optimizer.alloc_gradients()?;
        let sums = options.canonical.then(|| optimizer.alloc_gradients()).transpose()?;
        let (comm, plan, weight) = (comm.clone(), buckets, TotalWeight::new(comm));
        Ok(Buckets {
            comm,
            label,
            options,
            gradients,
            sums,
            compressor,
            weight,
            params,
            place,
            plan,
            next: 0,
            sync: true,
            begun: false,
            ready: Vec::new(),
        })
    }

    /// The gradients. Between [`begin`](Buckets::begin) and [`finish`](Buckets::finish) parts of them are in flight.
    pub fn gradients(&self) -> &FlatGradients<R> {
        self.sums.as_ref().unwrap_or(&self.gradients)
    }

    /// The gradients, to clip or scale them.
    pub fn gradients_mut(&mut self) -> &mut FlatGradients<R> {
        self.sums.as_mut().unwrap_or(&mut self.gradients)
    }

    /// How many buckets there are.
    pub fn len(&self) -> usize {
        self.plan.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// Names of the parameters in bucket `k`.
    pub fn names(&self, k: usize) -> Vec<String> {
        self.plan[k].members.iter().map(|&i| self.params[i].leaf.name().to_string()).collect()
    }

    /// Parameters by name, in the order in which their gradients became final in the last backward pass that was exchanged.
    pub fn ready_order(&self) -> Vec<String> {
        self.ready.iter().map(|&i| self.params[i].leaf.name().to_string()).collect()
    }

    /// Forgets all gradients: the next backward pass overwrites them.
    pub fn zero(&mut self) {
        // What a step that failed has left in flight holds ranges of the gradients.
        self.plan.iter_mut().for_each(|bucket| bucket.work = None);
        self.compressor.iter_mut().for_each(Compressor::zero);
        self.weight.clear();
        self.gradients.zero();
        self.sums.iter_mut().for_each(FlatGradients::zero);
        self.begun = false;
        self.params.iter_mut().for_each(|p| p.used = false);
    }

    /// Before a backward pass: `sync` tells whether its gradients are to be exchanged, or only added up. In canonical order they always are.
    pub fn begin(&mut self, sync: bool) -> Result<()> {
        if self.sums.is_some() && std::mem::replace(&mut self.begun, true) {
            let settled = self.flush();
            abort_on_err(&self.comm, settled)?;
            self.gradients.zero();
        }
        (self.sync, self.next) = (sync || self.sums.is_some(), 0);
        self.ready.clear();
        for p in &mut self.params {
            p.ready = !p.leaf.requires_grad();
        }
        for (k, bucket) in self.plan.iter_mut().enumerate() {
            bucket.work = None;
            bucket.waits_for = bucket.members.iter().filter(|&&i| !self.params[i].ready).count();
            let frozen = || bucket.members.iter().copied().filter(|&i| self.params[i].ready);
            if !frozen().eq(bucket.frozen.iter().copied()) {
                bucket.frozen = frozen().collect();
                bucket.comm = self.label.named(&self.comm, &of_bucket(k, &bucket.frozen, &self.params));
            }
        }
        Ok(())
    }

    /// Before the last backward pass: what this rank's losses of the step weigh, and the loss scale if there is one. What is sent compressed, or as
    /// `f16`, are means: what one step could not send counts for no more and no less in the next, and no sum leaves the range.
    pub fn set_loss_weight(&mut self, weight: f64, scale: Option<f64>) -> Result<()> {
        if self.options.compression.sends_means() && self.sums.is_none() {
            self.weight.begin(weight)?;
        }
        self.compressor.as_mut().map_or(Ok(()), |c| c.set_loss_weight(weight, scale))
    }

    /// After the update: the step was taken. Without it, a step with a loss scale is forgotten by the next [`zero`](Buckets::zero).
    pub fn keep(&mut self) {
        self.compressor.iter_mut().for_each(Compressor::keep);
    }

    /// What of a parameter's mean gradient this rank could not send yet, where gradients are compressed with error feedback: a row.
    pub fn error(&self, leaf: &Arc<Leaf<R>>) -> Result<Option<Tensor<R>>> {
        self.compressor.as_ref().map_or(Ok(None), |c| c.error(leaf))
    }

    /// Takes over what `other`, buckets of the same parameters, keeps from step to step.
    pub(crate) fn inherit(&mut self, other: Self) {
        self.compressor = other.compressor;
    }

    pub(crate) fn compressor(&self) -> Option<&Compressor<R>> {
        self.compressor.as_ref()
    }

    pub(crate) fn compressor_mut(&mut self) -> Option<&mut Compressor<R>> {
        self.compressor.as_mut()
    }

    /// After the last backward pass: sends what is left, and waits until every gradient is the sum over all ranks.
    pub fn finish(&mut self) -> Result<()> {
        let completed = self.complete();
        abort_on_err(&self.comm, completed)
    }

    fn complete(&mut self) -> Result<()> {
        self.flush()?;
        if self.sums.is_some() && self.options.unused == Unused::Error {
            // Any chunk counts.
            require_all(self.params.iter().map(|p| (&p.leaf, p.used)))?;
        }
        // After the last bucket: how many were sent before depends on the rank.
        let used = self.params.iter().map(|p| p.used);
        let anywhere = match self.options.unused {
            Unused::Allow => used_anywhere(&self.comm, used)?,
            Unused::Error => used.collect(),
        };
        for (i, _) in anywhere.iter().enumerate().filter(|(_, used)| !**used) {
            let (buffer, range) = (self.params[i].buffer, self.params[i].range);
            let flat = &mut self.gradients_mut().flats_mut()[buffer];
            let mut slot = flat.lend(range)?;
            slot.reset();
            flat.restore(slot)?;
        }
        if let Some(compressor) = &mut self.compressor {
            let unused = anywhere.iter().zip(&self.params).filter(|(used, _)| !**used);
            compressor.complete(unused.map(|(_, p)| p.leaf.id()));
        }
        Ok(())
    }

    /// Sends what the backward pass has left, and waits for all of it.
    fn flush(&mut self) -> Result<()> {
        let used = self.used();
        if self.sums.is_none() && self.options.unused == Unused::Error {
            require_all(self.params.iter().map(|p| &p.leaf).zip(used.iter().copied()))?;
        }
        for (p, used) in self.params.iter_mut().zip(used) {
            // In canonical order: in any chunk.
            p.used = used || (self.sums.is_some() && p.used);
        }
        while self.next < self.plan.len() {
            self.send(self.next)?;
        }
        for k in 0..self.plan.len() {
            let arrived = match (self.plan[k].work.take(), &mut self.compressor) {
                (Some(work), _) => work.wait()?,
                (None, Some(compressor)) => compressor.finish(k)?,
                (None, None) => continue,
            };
            let (buffer, ranges) = (self.plan[k].buffer, self.plan[k].ranges.clone());
            match &mut self.sums {
                None => self.flat(k).restore(arrived)?,
                Some(sums) => {
                    canonical::add(&mut sums.flats_mut()[buffer], ranges, &arrived.freeze()?, self.comm.size())?;
                }
            }
        }
        Ok(())
    }

    fn flat(&mut self, bucket: usize) -> &mut Flat<R> {
        &mut self.gradients.flats_mut()[self.plan[bucket].buffer]
    }

    /// Which parameters have a gradient on this rank. A frozen one has none, though its range was zeroed to be sent.
    fn used(&self) -> Vec<bool> {
        let written = |p: &BucketParam<R>| self.gradients.flats()[p.buffer].is_written(p.range);
        self.params.iter().map(|p| p.leaf.requires_grad() && written(p)).collect()
    }

    fn send(&mut self, k: usize) -> Result<()> {
        if self.options.check_finite {
            self.require_finite(k)?;
        }
        let unwritten: Vec<usize> = {
            let ranges = self.plan[k].ranges.clone();
            let flat = self.flat(k);
            ranges.filter(|&i| !flat.is_written(i)).collect()
        };
        let ranges = self.plan[k].ranges.clone();
        let flat = self.flat(k);
        for i in unwritten {
            let mut slot = flat.lend(i)?;
            slot.zero()?;
            flat.restore(slot)?;
        }
        let whole = flat.lend_span(ranges)?;
        self.next = k + 1;
        if self.compressor.is_some() {
            let (comm, members) = (self.plan[k].comm.clone(), self.members(k));
            return self.compressor.as_mut().map_or(Ok(()), |c| c.send(k, comm, whole, &members));
        }
        self.plan[k].work = Some(match self.sums {
            None => {
                let (weight, n) = (&mut self.weight, self.comm.size() as f64);
                self.options.compression.all_reduce(&self.plan[k].comm, whole, || weight.get(n))?
            }
            Some(_) => {
                let sent = canonical::gather(&self.plan[k].comm, &whole);
                self.flat(k).restore(whole)?;
                sent?
            }
        });
        Ok(())
    }

    /// The parameters of bucket `k` where they lie in its row.
    fn members(&self, k: usize) -> Vec<BucketMember<R>> {
        let Bucket { buffer, ranges, members, .. } = &self.plan[k];
        let layout = self.gradients.flats()[*buffer].layout();
        let start = layout.span(ranges.clone()).start;
        let member = |&i: &usize| {
            let (place, leaf) = (layout.range(self.params[i].range), self.params[i].leaf.clone());
            BucketMember { leaf, at: place.offset() - start..place.offset() - start + place.numel() }
        };
        members.iter().map(member).collect()
    }

    fn require_finite(&mut self, k: usize) -> Result<()> {
        for at in 0..self.plan[k].members.len() {
            let p = &self.params[self.plan[k].members[at]];
            let flat = &mut self.gradients.flats_mut()[p.buffer];
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

impl<R: Runtime> BackwardHook<R> for Buckets<R> {
    fn grad_slot(&mut self, leaf: &Arc<Leaf<R>>) -> Result<Option<TensorMut<R>>> {
        self.gradients.grad_slot(leaf)
    }

    fn on_leaf_grad_ready(&mut self, leaf: &Arc<Leaf<R>>, grad: LeafGrad<R>) -> Result<()> {
        self.gradients.on_leaf_grad_ready(leaf, grad)?;
        let Some(&i) = self.place.get(&leaf.id()).filter(|_| self.sync) else { return Ok(()) };
        if std::mem::replace(&mut self.params[i].ready, true) {
            return Ok(());
        }
        self.ready.push(i);
        self.plan[self.params[i].bucket].waits_for -= 1;
        while self.plan.get(self.next).is_some_and(|b| b.waits_for == 0) {
            self.send(self.next)?;
        }
        Ok(())
    }
}
