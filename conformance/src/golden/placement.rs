//! Memory layouts of a case's inputs: results must not depend on them.

use autograd::{Leaf, Var};
use numcore::{
    Result, Runtime, Tensor,
    ops::{Apply, PointwiseOps, ViewOps},
};

/// The memory layout of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Row-major, contiguous memory.
    #[default]
    Dense,
    /// The last two axes are exchanged in memory.
    Transposed,
    /// Every second element of a longer last axis, with an offset.
    Strided,
    /// Reversed along every axis.
    Flipped,
    /// A view of an intermediate, so that its gradient passes through the adjoints of views.
    Computed,
}

impl Placement {
    /// All placements, in order.
    pub const ALL: [Placement; 5] =
        [Placement::Dense, Placement::Transposed, Placement::Strided, Placement::Flipped, Placement::Computed];

    /// The values of `x` in this layout: memory in another order, and a view that restores the order.
    pub fn of<R: Runtime>(self, x: &Tensor<R>) -> Result<Tensor<R>> {
        self.seen(&self.stored(x)?)
    }

    /// The values of `x` in this layout as a variable, and the leaf that receives the gradient.
    pub(crate) fn leaf<R: Runtime>(self, name: &str, x: &Tensor<R>) -> Result<(Var<R>, Var<R>)> {
        let leaf = Leaf::new(name, self.stored(x)?)?.var();
        let start = if self == Placement::Computed { leaf.mul(1.0)? } else { leaf.clone() };
        Ok((self.seen(&start)?, leaf))
    }

    /// The tensor as it is stored in memory.
    pub(crate) fn stored<R: Runtime>(self, x: &Tensor<R>) -> Result<Tensor<R>> {
        let rank = x.dims().len() as isize;
        match self {
            Placement::Transposed | Placement::Computed if rank >= 2 => x.t()?.contiguous(),
            Placement::Strided if rank >= 1 => x.embed(-1, 2 * x.dims()[rank as usize - 1] + 1, 1, 2),
            Placement::Flipped if rank >= 1 => x.flip(&(0..rank).collect::<Vec<_>>())?.contiguous(),
            _ => Ok(x.clone()),
        }
    }

    /// The view that restores the order of the values, for the stored tensor or its gradient.
    pub(crate) fn seen<T: Apply>(self, stored: &T) -> Result<T> {
        let shape = stored.spec().shape;
        let rank = shape.rank() as isize;
        match self {
            Placement::Transposed | Placement::Computed if rank >= 2 => stored.t(),
            Placement::Strided if rank >= 1 => stored.slice(-1, 1, shape[rank as usize - 1] / 2, 2),
            Placement::Flipped if rank >= 1 => stored.flip(&(0..rank).collect::<Vec<_>>()),
            _ => Ok(stored.clone()),
        }
    }
}
