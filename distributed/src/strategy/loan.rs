//! Gradients and parameters that a strategy hands out for a while.

use autograd::Leaf;
use numcore::{Error, Result, Runtime, TensorMut};

/// Memory of summed gradients, of which one piece is lent.
pub struct GradLoan<R: Runtime> {
    pieces: Vec<TensorMut<R>>,
    own: usize,
}

impl<R: Runtime> GradLoan<R> {
    /// Lends piece `own` of memory that was split.
    pub fn new(pieces: Vec<TensorMut<R>>, own: usize) -> Self {
        GradLoan { pieces, own }
    }

    /// The piece.
    pub(crate) fn take(&mut self) -> TensorMut<R> {
        self.pieces.remove(self.own)
    }

    /// The piece comes back.
    pub(crate) fn give(&mut self, piece: TensorMut<R>) {
        self.pieces.insert(self.own, piece);
    }

    /// All pieces, in order.
    pub fn into_pieces(self) -> Vec<TensorMut<R>> {
        self.pieces
    }
}

/// The error of a tied parameter whose gradient a strategy cannot lend.
pub(crate) fn not_of<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is tied, but no parameter of its stage's optimizer")
}

/// Ends a scope in which parameters were gathered.
type Release = Box<dyn FnOnce() -> Result<()> + Send>;

/// A scope in which all parameters are on every rank; it ends when this is dropped.
#[derive(Default)]
#[must_use = "parameters are let go when this is dropped"]
pub struct FullParameters(Vec<Release>);

impl FullParameters {
    /// A scope that ends with a call.
    pub fn until(release: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        FullParameters(vec![Box::new(release)])
    }

    /// Both scopes as one.
    pub fn and(mut self, mut other: Self) -> Self {
        self.0.append(&mut other.0);
        self
    }

    /// Ends the scope as a drop does, and reports what failed.
    #[doc(alias("release_params"))]
    pub fn release(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let ended: Vec<Result<()>> = self.0.drain(..).map(|release| release()).collect();
        ended.into_iter().collect()
    }
}

impl Drop for FullParameters {
    fn drop(&mut self) {
        // What could fail here is waiting for a gather that was started; the next use reports it.
        let _ = self.end();
    }
}
