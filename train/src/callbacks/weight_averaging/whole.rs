//! Averages as whole values on every rank, for strategies that cannot put them into shards.

use std::collections::BTreeMap;

use distributed::comm::{Collectives, Comm, Communicator, memory};
use nn::{Module, ModuleExt, Param};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ViewOps, cat},
};

use super::{AveragedPart, WeightAveraging};
use crate::Run;

impl<R: Runtime> WeightAveraging<R> {
    /// Broadcasts the parts of all ranks, parameter by parameter, and sets them as the values of all modules.
    pub(super) fn put_whole<M: Module<R>, B>(&self, run: &Run<'_, R, M, B>, rows: Vec<Tensor<R>>) -> Result<()> {
        let comm = run.comm();
        let (copies, mut own) = (run.copies(), BTreeMap::<String, Vec<Param<R>>>::new());
        for parameter in run.modules().into_iter().flat_map(|module| module.parameters()) {
            let leaf = parameter.leaf();
            let name = copies.get(&leaf.id()).cloned().unwrap_or_else(|| leaf.name().to_string());
            own.entry(name).or_default().push(parameter);
        }
        // Ranks have other stages, and other pieces of one parameter: all ranks broadcast all, and each takes its own.
        for (name, placements) in self.table(comm)? {
            for (placement, pieces) in placements {
                let mut values = Vec::with_capacity(pieces.len());
                for AveragedPiece { owner, index, len, dtype, .. } in pieces {
                    let own = (owner == comm.rank()).then(|| rows[index].clone());
                    values.push(broadcast(comm, own, owner, len, dtype)?);
                }
                let here = |p: &&Param<R>| p.placed().is_none_or(|placed| placed.placement().to_string() == placement);
                for parameter in own.get(&name).into_iter().flatten().filter(here) {
                    let spec = parameter.leaf().spec();
                    let value = cat(&values.iter().collect::<Vec<_>>(), 0)?.reshape(spec.shape)?;
                    parameter.leaf().set(value.to_dtype(spec.dtype)?)?;
                }
            }
        }
        Ok(())
    }

    /// The owners of each parameter's pieces, in the order of their elements.
    fn table(&self, comm: &Comm<R>) -> Result<AveragedPieces> {
        let line = |(i, part): (usize, &AveragedPart<R>)| {
            format!("{} {} {i} {} {}\t{}\n", part.start, part.len, part.dtype, part.name, part.placement)
        };
        let own: String = self.parts.iter().enumerate().map(line).collect();
        let mut table = AveragedPieces::new();
        for (owner, lines) in comm.exchange(own.as_bytes())?.into_iter().enumerate() {
            for line in String::from_utf8_lossy(&lines).lines() {
                let wrong = || Error::internal("WeightAveraging", format!("a rank sent `{line}`"));
                let (mut words, mut numbers) = (line.splitn(5, ' '), [0; 3]);
                for number in &mut numbers {
                    *number = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
                }
                let dtype = words.next().and_then(DType::from_name).ok_or_else(wrong)?;
                let (name, placement) = words.next().and_then(|rest| rest.split_once('\t')).ok_or_else(wrong)?;
                let [start, len, index] = numbers;
                let piece = AveragedPiece { start, len, index, owner, dtype };
                table.entry(name.into()).or_default().entry(placement.into()).or_default().push(piece);
            }
        }
        table.values_mut().flat_map(BTreeMap::values_mut).for_each(|pieces| pieces.sort_by_key(|piece| piece.start));
        Ok(table)
    }
}

/// The pieces of each parameter by its name, then by the placement of its tensor shard.
type AveragedPieces = BTreeMap<String, BTreeMap<String, Vec<AveragedPiece>>>;

/// A piece of a parameter, and the rank that has it as its part `index`.
struct AveragedPiece {
    start: usize,
    len: usize,
    index: usize,
    owner: usize,
    dtype: DType,
}

fn broadcast<R: Runtime>(
    comm: &Comm<R>,
    own: Option<Tensor<R>>,
    owner: usize,
    len: usize,
    dtype: DType,
) -> Result<Tensor<R>> {
    let row = match &own {
        Some(own) => memory(own)?,
        None => TensorMut::alloc(comm.runtime(), Shape::new(&[len])?, dtype)?,
    };
    comm.broadcast(row, owner)?.wait()?.freeze()
}
