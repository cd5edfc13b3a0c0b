//! Sums of gradients of which ranks along tensor have parts.

use std::{hash::Hasher, sync::Arc};

use autograd::Leaf;
use numcore::{
    DType, Error, Fnv1a, MemoryCategory, Result, Runtime, Shape, TensorMut,
    ops::{Input, compute},
    pointwise::standard::COPY,
};

use super::TensorAxis;
use crate::comm::{Collectives, ReduceOp, Work};

/// A parameter, and the memory of its gradient or of a piece of it.
type PartialGradient<R> = (Arc<Leaf<R>>, TensorMut<R>);

/// The largest gradient that travels in one row with others, in bytes: two copies of it take about as long as a call.
const JOINED: usize = 64 << 10;

/// The key of gradients that travel in one row: the number of ranks that have parts, and the dtype.
type RowKey = (usize, DType);

/// Gradients in flight: one alone, or several whose sums are copied out of a row.
enum InFlight<R: Runtime> {
    Alone(Arc<Leaf<R>>, Work<TensorMut<R>>),
    Row(Vec<PartialGradient<R>>, Work<TensorMut<R>>),
}

/// Sums of [partial](TensorAxis::is_partial) gradients over the ranks that have parts. They are started as the
/// gradients become final, and are in flight while others are computed and exchanged.
pub(crate) struct PartialSums<R: Runtime>(Vec<InFlight<R>>);

impl<R: Runtime> Default for PartialSums<R> {
    fn default() -> Self {
        PartialSums(Vec::new())
    }
}

impl<R: Runtime> PartialSums<R> {
    /// Tells whether nothing is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Starts the sums of further gradients, in the same order on all ranks along the axis. Small ones, as of norms and
    /// biases, travel in one row.
    pub(crate) fn start(&mut self, axis: &TensorAxis<R>, own: Vec<PartialGradient<R>>) -> Result<()> {
        let mut rows: Vec<(Option<RowKey>, Vec<PartialGradient<R>>)> = Vec::new();
        for (leaf, memory) in own {
            let is_small = memory.shape().numel() * memory.dtype().size() <= JOINED;
            let key = is_small.then(|| (axis.replicas_of(&leaf), memory.dtype()));
            match rows.iter_mut().find(|(other, _)| key.is_some() && *other == key) {
                Some((_, row)) => row.push((leaf, memory)),
                None => rows.push((key, vec![(leaf, memory)])),
            }
        }
        for (_, row) in rows {
            self.0.push(axis.start_sum(row)?);
        }
        Ok(())
    }

    /// Waits for all sums, and gives each to `restore`.
    pub(crate) fn wait(&mut self, mut restore: impl FnMut(&Arc<Leaf<R>>, TensorMut<R>) -> Result<()>) -> Result<()> {
        for sum in self.0.drain(..) {
            match sum {
                InFlight::Alone(leaf, work) => restore(&leaf, work.wait()?)?,
                InFlight::Row(members, work) => {
                    let (row, lens) = (work.wait()?, lens(&members));
                    let rt = row.runtime().clone();
                    for ((leaf, memory), part) in members.into_iter().zip(row.split(&lens)?) {
                        let mut flat = flattened(memory)?;
                        compute(&rt, &COPY, &[Input::Memory(&part)], &[], &mut [&mut flat])?;
                        restore(&leaf, TensorMut::join(vec![flat])?)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl<R: Runtime> TensorAxis<R> {
    fn start_sum(&self, mut members: Vec<PartialGradient<R>>) -> Result<InFlight<R>> {
        let none = || Error::internal("a training step", "a gradient is summed of which no other rank has a part");
        let comm = members.first().and_then(|(leaf, _)| self.replicas.get(&self.replicas_of(leaf)));
        // The call has the names: ranks that freeze different parameters get an error, instead of the sum of different
        // gradients.
        let mut names = Fnv1a::new();
        members.iter().for_each(|(leaf, _)| names.write(format!("{}\n", leaf.name()).as_bytes()));
        let first = members.first().map(|(leaf, _)| leaf.name()).unwrap_or_default();
        let what = format!("partial gradients from `{first}`, {} ({:016x})", members.len(), names.finish());
        let comm = self.label.named(comm.ok_or_else(none)?, &what);
        if members.len() == 1 {
            let (leaf, memory) = members.remove(0);
            return Ok(InFlight::Alone(leaf, comm.all_reduce(memory, ReduceOp::Sum)?));
        }
        let (numel, dtype) = (lens(&members).iter().sum::<usize>(), members[0].1.dtype());
        let rt = comm.runtime();
        let row = TensorMut::alloc_for(rt, MemoryCategory::Communication, Shape::from([numel]), dtype)?;
        let mut parts = row.split(&lens(&members))?;
        let copied = |((leaf, memory), part): (PartialGradient<R>, &mut TensorMut<R>)| {
            let flat = flattened(memory)?;
            compute(rt, &COPY, &[Input::Memory(&flat)], &[], &mut [part])?;
            Ok((leaf, TensorMut::join(vec![flat])?))
        };
        let members = members.into_iter().zip(&mut parts).map(copied).collect::<Result<Vec<_>>>()?;
        let work = comm.all_reduce(TensorMut::join(parts)?, ReduceOp::Sum)?;
        Ok(InFlight::Row(members, work))
    }

    fn replicas_of(&self, leaf: &Arc<Leaf<R>>) -> usize {
        self.placed.get(&leaf.id()).map_or(1, |placed| placed.replicas())
    }
}

fn lens<R: Runtime>(members: &[PartialGradient<R>]) -> Vec<usize> {
    members.iter().map(|(_, memory)| memory.shape().numel()).collect()
}

/// Row-major memory as a row; [`TensorMut::join`] gives it its shape back.
fn flattened<R: Runtime>(memory: TensorMut<R>) -> Result<TensorMut<R>> {
    let len = memory.shape().numel();
    let none = || Error::internal("a training step", "memory was split into nothing");
    memory.split(&[len])?.pop().ok_or_else(none)
}
