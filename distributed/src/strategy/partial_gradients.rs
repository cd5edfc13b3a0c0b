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

/// A gradient, and its place among those that are to be summed.
type PartialGradient<R> = (usize, Arc<Leaf<R>>, TensorMut<R>);

/// The key of gradients that travel in one row: the number of ranks that have parts, and the dtype.
type RowKey = (usize, DType);

/// Gradients in flight: one alone, or several whose sums are copied out of a row.
enum InFlight<R: Runtime> {
    Alone(usize, Work<TensorMut<R>>),
    Row(Vec<PartialGradient<R>>, Work<TensorMut<R>>),
}

impl<R: Runtime> TensorAxis<R> {
    /// The sums of [partial](TensorAxis::is_partial) gradients over the ranks that have parts, in the given order.
    /// Gradients of vectors, as of norms and biases, travel in one row, since they are many and small.
    pub(crate) fn sum_gradients(&self, own: Vec<(Arc<Leaf<R>>, TensorMut<R>)>) -> Result<Vec<TensorMut<R>>> {
        let mut rows: Vec<(Option<RowKey>, Vec<PartialGradient<R>>)> = Vec::new();
        for (at, (leaf, memory)) in own.into_iter().enumerate() {
            // A piece of a matrix is a row too, where ZeRO cuts through parameters.
            let is_vector = leaf.spec().shape.rank() == 1 && memory.shape().rank() == 1;
            let key = is_vector.then(|| (self.replicas_of(&leaf), memory.dtype()));
            match rows.iter_mut().find(|(other, _)| key.is_some() && *other == key) {
                Some((_, row)) => row.push((at, leaf, memory)),
                None => rows.push((key, vec![(at, leaf, memory)])),
            }
        }
        let started = rows.into_iter().map(|(_, row)| self.start_sum(row)).collect::<Result<Vec<_>>>()?;
        let mut sums = Vec::new();
        for sum in started {
            match sum {
                InFlight::Alone(at, work) => sums.push((at, work.wait()?)),
                InFlight::Row(members, work) => sums.extend(taken_apart(members, work.wait()?)?),
            }
        }
        sums.sort_by_key(|(at, _)| *at);
        Ok(sums.into_iter().map(|(_, sum)| sum).collect())
    }

    fn start_sum(&self, mut members: Vec<PartialGradient<R>>) -> Result<InFlight<R>> {
        let none = || Error::internal("a training step", "a gradient is summed of which no other rank has a part");
        let comm = members.first().and_then(|(_, leaf, _)| self.replicas.get(&self.replicas_of(leaf)));
        // The call has the names: ranks that freeze different parameters get an error, instead of the sum of different
        // gradients.
        let mut names = Fnv1a::new();
        members.iter().for_each(|(_, leaf, _)| names.write(format!("{}\n", leaf.name()).as_bytes()));
        let first = members.first().map(|(_, leaf, _)| leaf.name()).unwrap_or_default();
        let what = format!("partial gradients from `{first}`, {} ({:016x})", members.len(), names.finish());
        let comm = self.label.named(comm.ok_or_else(none)?, &what);
        if members.len() == 1 {
            let (at, _, memory) = members.remove(0);
            return Ok(InFlight::Alone(at, comm.all_reduce(memory, ReduceOp::Sum)?));
        }
        let (numel, dtype) = (lens(&members).iter().sum::<usize>(), members[0].2.dtype());
        let rt = comm.runtime();
        let row = TensorMut::alloc_for(rt, MemoryCategory::Communication, Shape::from([numel]), dtype)?;
        let mut parts = row.split(&lens(&members))?;
        for ((_, _, memory), part) in members.iter().zip(&mut parts) {
            compute(rt, &COPY, &[Input::Memory(memory)], &[], &mut [part])?;
        }
        let work = comm.all_reduce(TensorMut::join(parts)?, ReduceOp::Sum)?;
        Ok(InFlight::Row(members, work))
    }

    fn replicas_of(&self, leaf: &Arc<Leaf<R>>) -> usize {
        self.placed.get(&leaf.id()).map_or(1, |placed| placed.replicas())
    }
}

fn lens<R: Runtime>(members: &[PartialGradient<R>]) -> Vec<usize> {
    members.iter().map(|(_, _, memory)| memory.shape().numel()).collect()
}

/// Copies sums out of a row into the memory of each gradient.
fn taken_apart<R: Runtime>(members: Vec<PartialGradient<R>>, row: TensorMut<R>) -> Result<Vec<(usize, TensorMut<R>)>> {
    let (rt, parts) = (row.runtime().clone(), row.split(&lens(&members))?);
    let copied = |((at, _, mut memory), part): (PartialGradient<R>, TensorMut<R>)| {
        compute(&rt, &COPY, &[Input::Memory(&part)], &[], &mut [&mut memory])?;
        Ok((at, memory))
    };
    members.into_iter().zip(parts).map(copied).collect()
}
