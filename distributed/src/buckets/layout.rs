//! The place of each gradient: its buffer in the optimizer, and its bucket.

use std::{collections::HashMap, sync::Arc};

use autograd::Leaf;
use numcore::{Flat, Result, Runtime, TensorMut};
use optim::{FlatGradients, Optimizer};

use super::{
    BucketLimits, BucketMember, BucketOptions, BucketPlan, BucketSpec,
    bucket::{Bucket, BucketParam, of_bucket},
};
use crate::comm::{Comm, Label};

/// An optimizer's gradients, cut into buckets.
pub(crate) struct BucketLayout<R: Runtime> {
    pub(crate) gradients: FlatGradients<R>,
    pub(crate) params: Vec<BucketParam<R>>,
    /// The numbers of parameters, by leaf id.
    numbers: HashMap<usize, usize>,
    /// The buckets, in the order in which they are sent.
    pub(crate) buckets: Vec<Bucket<R>>,
}

impl<R: Runtime> BucketLayout<R> {
    /// Cuts the gradients of `optimizer`, which reorders its parameters by ascending `key`.
    pub(crate) fn new(
        comm: &Comm<R>,
        label: &Label,
        optimizer: &mut dyn Optimizer<R>,
        key: &dyn Fn(&Arc<Leaf<R>>) -> usize,
        options: &BucketOptions,
    ) -> Result<Self> {
        optimizer.reorder(key)?;
        let mut params = params(optimizer, key);
        let gradients = match options.main_gradients {
            true => FlatGradients::in_f32(&optimizer.params())?,
            false => optimizer.alloc_gradients()?,
        };
        let spec = |p: &BucketParam<R>| {
            let dtype = gradients.flats()[p.buffer].layout().dtype();
            BucketSpec { numel: p.leaf.spec().shape.numel(), dtype, buffer: p.buffer }
        };
        let specs: Vec<BucketSpec> = params.iter().map(spec).collect();
        let limits = options.limits.clone().unwrap_or_else(|| BucketLimits::of(&specs));
        let mut buckets = Vec::new();
        for (b, own) in BucketPlan::new(&specs, &limits).buckets().iter().enumerate() {
            own.iter().for_each(|&i| params[i].bucket = b);
            let (first, last) = (&params[own[0]], &params[own[own.len() - 1]]);
            let (buffer, ranges) = (first.buffer, first.range..last.range + 1);
            let members = members(&gradients.flats()[buffer], ranges.clone(), own, &params);
            let (comm, frozen) = (label.named(comm, &format!("bucket {b}")), Vec::new());
            buckets.push(Bucket {
                comm,
                frozen,
                buffer,
                ranges,
                params: own.clone(),
                members,
                waits_for: 0,
                sent: false,
            });
        }
        let numbers = params.iter().enumerate().map(|(i, p)| (p.leaf.id(), i)).collect();
        Ok(BucketLayout { gradients, params, numbers, buckets })
    }

    /// The number of a parameter; none if the optimizer does not have it.
    pub(crate) fn number_of(&self, leaf: &Arc<Leaf<R>>) -> Option<usize> {
        self.numbers.get(&leaf.id()).copied()
    }

    /// Resets, before a backward pass, the number of gradients that each bucket waits for. Relabels the calls of
    /// buckets whose frozen parameters changed.
    pub(crate) fn begin_pass(&mut self, comm: &Comm<R>, label: &Label) {
        let params = &mut self.params;
        for p in params.iter_mut() {
            p.ready = !p.leaf.requires_grad();
        }
        for (k, bucket) in self.buckets.iter_mut().enumerate() {
            bucket.waits_for = bucket.params.iter().filter(|&&i| !params[i].ready).count();
            let frozen = || bucket.params.iter().copied().filter(|&i| params[i].ready);
            if !frozen().eq(bucket.frozen.iter().copied()) {
                bucket.frozen = frozen().collect();
                bucket.comm = label.named(comm, &of_bucket(k, &bucket.frozen, params));
            }
        }
    }

    /// Marks a parameter's gradient as final; false if it was before.
    pub(crate) fn mark_ready(&mut self, i: usize) -> bool {
        let first = !std::mem::replace(&mut self.params[i].ready, true);
        if first {
            self.buckets[self.params[i].bucket].waits_for -= 1;
        }
        first
    }

    /// True for each parameter with a gradient on this rank. A frozen one has none, though its range was zeroed to be
    /// sent.
    pub(crate) fn used(&self) -> Vec<bool> {
        let written = |p: &BucketParam<R>| self.gradients.flats()[p.buffer].is_written(p.range);
        self.params.iter().map(|p| p.leaf.requires_grad() && written(p)).collect()
    }

    /// Marks a parameter as without a gradient in this step, whatever its range holds.
    pub(crate) fn forget(&mut self, i: usize) -> Result<()> {
        let BucketParam { buffer, range, .. } = self.params[i];
        let flat = &mut self.gradients.flats_mut()[buffer];
        let mut slot = flat.lend(range)?;
        slot.reset();
        flat.restore(slot)
    }

    /// The flat buffer of a bucket's gradients.
    pub(crate) fn flat(&mut self, bucket: usize) -> &mut Flat<R> {
        &mut self.gradients.flats_mut()[self.buckets[bucket].buffer]
    }

    /// Lends the row of a bucket, with zeros in ranges that nothing was written to.
    pub(crate) fn lend(&mut self, bucket: usize) -> Result<TensorMut<R>> {
        let ranges = self.buckets[bucket].ranges.clone();
        let flat = self.flat(bucket);
        for i in ranges.clone() {
            if !flat.is_written(i) {
                let mut slot = flat.lend(i)?;
                slot.zero()?;
                flat.restore(slot)?;
            }
        }
        flat.lend_span(ranges)
    }
}

/// The parameters of an optimizer, in the order in which their gradients are expected to become final.
fn params<R: Runtime>(optimizer: &dyn Optimizer<R>, key: &dyn Fn(&Arc<Leaf<R>>) -> usize) -> Vec<BucketParam<R>> {
    let mut params = Vec::new();
    for (buffer, flat) in optimizer.params().into_iter().enumerate() {
        let param = |(range, leaf): (usize, &Arc<Leaf<R>>)| BucketParam {
            leaf: leaf.clone(),
            buffer,
            range,
            bucket: 0,
            ready: false,
            used: false,
        };
        params.extend(flat.leaves().iter().enumerate().map(param));
    }
    params.sort_by_key(|p| key(&p.leaf));
    params
}

/// The parameters of a bucket with their element ranges in its row.
fn members<R: Runtime>(
    flat: &Flat<R>,
    ranges: std::ops::Range<usize>,
    own: &[usize],
    params: &[BucketParam<R>],
) -> Vec<BucketMember<R>> {
    let layout = flat.layout();
    let start = layout.span(ranges).start;
    let member = |&i: &usize| {
        let place = layout.range(params[i].range);
        let at = place.offset() - start..place.offset() - start + place.numel();
        BucketMember { leaf: params[i].leaf.clone(), at }
    };
    own.iter().map(member).collect()
}
