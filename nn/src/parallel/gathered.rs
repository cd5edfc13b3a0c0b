//! Whole values of parameters that are cut over ranks.

use autograd::{Var, no_grad};
use numcore::{
    Error, Result, Runtime, Tensor,
    ops::{Apply, ViewOps, cat},
};

use super::{Exchange, placed::fill_up};
use crate::Param;

impl<R: Runtime> Param<R> {
    /// Gathers the whole value, of which a plan left each rank a piece. All ranks that the parameter is cut over call
    /// this together, and get the same value. It is [`value`](Param::value) if the parameter is not cut.
    ///
    /// # Errors
    /// Fails if the value cannot be read, or the exchange fails.
    #[track_caller]
    pub fn gathered(&self) -> Result<Tensor<R>> {
        let own = self.value()?;
        let Some(placed) = self.placed() else { return Ok(own) };
        let (logical, ranks) = (placed.placement().logical(), placed.group().size());
        let piece = |rank| self.cuts().piece(placed.style(), logical, rank, ranks);
        let pieces = (0..ranks).map(piece).collect::<std::result::Result<Vec<_>, _>>();
        let pieces = pieces.map_err(|why| Error::state(placed.name(), why))?;
        // A rank may have all of it, and others nothing.
        if pieces.iter().all(|(piece, _)| piece.is_whole()) {
            return Ok(own);
        }
        // Pieces may differ in size, and travel as rows that do not.
        let most = pieces.iter().map(|(piece, _)| piece.local().numel()).max().unwrap_or(0);
        let row = Var::new(own.contiguous()?.flatten(0, -1)?);
        let row = fill_up(&row, 0, most - own.spec().shape.numel())?;
        let all = no_grad(|| placed.exchange(Exchange::Gather(0), &row))?.value()?;
        let is_cut = |dim: &usize| pieces.iter().any(|(piece, _)| piece.local()[*dim] < logical[*dim]);
        let (dim, mut parts) = ((0..logical.rank()).find(is_cut).unwrap_or(0), Vec::new());
        for (rank, (piece, replicas)) in pieces.iter().enumerate() {
            if !rank.is_multiple_of(*replicas) {
                continue;
            }
            let (local, mut at) = (piece.local(), 0);
            let value = all.narrow(0, rank * most, local.numel())?.reshape(local)?;
            for range in piece.ranges(dim) {
                parts.push((range.start, value.narrow(dim as isize, at, range.len())?));
                at += range.len();
            }
        }
        parts.sort_by_key(|(start, _)| *start);
        cat(&parts.iter().map(|(_, part)| part).collect::<Vec<_>>(), dim as isize)
    }
}
