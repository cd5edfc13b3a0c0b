//! Checkpoints of PowerSGD's error-feedback residuals.
//!
//! Residuals belong to ranks. Another number of ranks shares out those of the checkpoint, so that their sum stays;
//! without saved ones they begin at zero.

use std::{collections::BTreeMap, sync::Arc};

use autograd::Leaf;
use distributed::{
    checkpoint::{CheckpointPart, Wanted, names},
    comm::Communicator,
};
use numcore::{DType, Result, Runtime, Shape, Tensor, ops::PointwiseOps};

use super::{Compressor, LowRankForm, matrix::working};

/// The number of exchanged steps; its presence for a rank shows that the rank saved residuals.
const STEPS: &str = "powersgd";

fn error(rank: usize, name: &str) -> String {
    names::own(rank, &format!("error/{name}"))
}

/// The name of the basis `Q` of a parameter, which is equal on all ranks: rank 0 saves it.
fn basis(name: &str) -> String {
    names::own(0, &format!("basis/{name}"))
}

impl<R: Runtime> Compressor<R> {
    /// The residuals of this rank, and on rank 0 every `Q`.
    pub(super) fn saved_parts(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<CheckpointPart<R>>> {
        let (rank, mut parts) = (self.comm.rank(), Vec::new());
        for leaf in leaves {
            let Some(matrix) = self.matrices.get(&leaf.id()) else { continue };
            let (left, q) = matrix.taken()?;
            parts.push(CheckpointPart::whole(error(rank, &leaf.name()), &left)?);
            if rank == 0 {
                parts.push(CheckpointPart::whole(basis(&leaf.name()), &q)?);
            }
        }
        Ok(parts)
    }

    pub(super) fn saved_numbers(&self) -> BTreeMap<String, u64> {
        BTreeMap::from([(names::own(self.comm.rank(), STEPS), self.steps)])
    }

    /// The residuals of this rank and every `Q`: optional in checkpoints, but of these shapes and dtypes if they are
    /// there.
    pub(super) fn wanted_parts(&self, leaves: &[Arc<Leaf<R>>]) -> Result<Vec<Wanted>> {
        let mut all = Vec::new();
        for leaf in leaves {
            let spec = leaf.spec();
            let Some(LowRankForm { rows, columns, rank }) = self.options.compressed(&spec.shape) else { continue };
            all.push(wanted(error(self.comm.rank(), &leaf.name()), &[rows * columns], working(spec.dtype))?);
            all.push(wanted(basis(&leaf.name()), &[columns, rank], working(spec.dtype))?);
        }
        Ok(all)
    }

    /// Restores residuals, `Q` and the number of steps. On an error nothing is changed.
    pub(super) fn resume(
        &mut self,
        leaves: &[Arc<Leaf<R>>],
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let before = (std::mem::take(&mut self.matrices), self.steps);
        let taken = self.take_over(leaves, read, numbers);
        if taken.is_err() {
            (self.matrices, self.steps) = before;
        }
        taken
    }

    fn take_over(
        &mut self,
        leaves: &[Arc<Leaf<R>>],
        read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>,
        numbers: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let steps = |rank| numbers.get(&names::own(rank, STEPS)).copied();
        self.steps = steps(0).unwrap_or(0);
        let saved = (0..).take_while(|&r| steps(r).is_some()).count();
        for leaf in leaves {
            if self.steps <= self.options.start_iter {
                break;
            }
            let (own, n) = (self.comm.rank(), self.comm.size());
            let Some(matrix) = self.matrix(leaf)? else { continue };
            let (mut sum, q) = (None, read(&wanted(basis(&leaf.name()), matrix.q().dims(), matrix.dtype())?)?);
            for rank in (own..saved).step_by(n) {
                let error = read(&wanted(error(rank, &leaf.name()), matrix.error()?.dims(), matrix.dtype())?)?;
                sum = Some(sum.map_or(Ok(error.clone()), |sum: Tensor<R>| sum.add(&error))?);
            }
            matrix.set(sum, &q)?;
        }
        Ok(())
    }
}

fn wanted(name: String, shape: &[usize], dtype: DType) -> Result<Wanted> {
    Ok(Wanted::whole(name, Shape::new(shape)?, dtype))
}
