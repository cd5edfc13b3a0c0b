//! Whole values of parameters that are cut over ranks.

use autograd::{Var, no_grad};
use numcore::{
    Result, Runtime, Tensor,
    ops::{Apply, ViewOps},
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
        // A rank may have all of it, and others nothing.
        if placed.is_whole() {
            return Ok(own);
        }
        // Pieces may differ in size, and travel as rows that do not.
        let most = placed.placements().iter().map(|piece| piece.local().numel()).max().unwrap_or(0);
        let row = Var::new(own.contiguous()?.flatten(0, -1)?);
        let row = fill_up(&row, 0, most - own.spec().shape.numel())?;
        let all = no_grad(|| placed.exchange(Exchange::Gather(0), &row))?.value()?;
        placed.join(|rank| all.narrow(0, rank * most, placed.placements()[rank].local().numel()))
    }
}
