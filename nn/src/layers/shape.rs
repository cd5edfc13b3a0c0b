//! Layers that only change the shape.

use autograd::Var;
use numcore::{Result, Runtime, Within, ops::ViewOps};

use crate::{Forward, Module};

/// The identity layer, which returns its input.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct Identity;

impl<R: Runtime> Forward<R> for Identity {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        Ok(x.clone())
    }
}

/// Merges axes: by default all but the first, `[N, ..]` to `[N, M]`.
#[derive(Clone, Copy, Debug, PartialEq, Module)]
pub struct Flatten {
    /// The first of the merged axes.
    pub start: isize,
    /// The last of the flattened axes.
    pub end: isize,
}

impl Default for Flatten {
    fn default() -> Self {
        Flatten { start: 1, end: -1 }
    }
}

impl<R: Runtime> Forward<R> for Flatten {
    #[track_caller]
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        x.flatten(self.start, self.end).at_caller()
    }
}
