//! Sums over the pieces of parameters that a rank updates.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Result, Runtime, Tensor, ops::ViewOps};
use optim::UpdatePhase;

use super::{engine::ZeroEngine, unit::Unit};
use crate::sums;

/// A parameter, and the sums over a piece of it.
pub(super) type SumOfPiece<R> = (Arc<Leaf<R>>, Tensor<R>);

impl<R: Runtime> ZeroEngine<R> {
    /// Squares of this rank's summed gradients, summed over each piece of a parameter.
    pub(super) fn squares(&self) -> Result<Vec<SumOfPiece<R>>> {
        let mut rows = Vec::new();
        for unit in &self.units {
            let Some(row) = unit.gradient()? else { continue };
            let layout = unit.layout.shard_layout(unit.rank())?;
            for (k, piece) in unit.pieces.iter().enumerate().filter(|(_, piece)| unit.used[piece.parameter]) {
                let own = row.narrow(0, layout.range(k).offset(), piece.elements.len())?;
                rows.push((unit.leaves[piece.parameter].clone(), sums::squares(&own)?));
            }
        }
        Ok(rows)
    }

    /// Runs the first phase of an update, and returns the sums of the rules for this rank's pieces of parameters.
    pub(super) fn sums(&mut self, lrs: &[f64], scale: &Tensor<R>) -> Result<Vec<SumOfPiece<R>>> {
        let claimed = self.units.iter_mut().try_for_each(|unit| unit.claim(lrs));
        let mut all = Vec::new();
        let summed = claimed.and_then(|()| {
            self.units.iter_mut().try_for_each(|unit| {
                let mut rows = Vec::new();
                unit.run(lrs, scale, &mut UpdatePhase::Sums(&mut rows))?;
                let leaf = |k: usize| unit.leaves[unit.pieces[k].parameter].clone();
                all.extend(rows.into_iter().map(|(k, row)| (leaf(k), row)));
                Ok(())
            })
        });
        let shown = self.units.iter_mut().try_for_each(Unit::unclaim);
        summed.and(shown).map(|()| all)
    }
}
