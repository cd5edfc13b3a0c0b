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

    /// Tells whether the lent piece has a gradient.
    pub(crate) fn is_written(&self) -> bool {
        self.pieces[self.own].is_written()
    }

    /// Fills the lent piece with zeros.
    pub(crate) fn zero(&mut self) -> Result<()> {
        self.pieces[self.own].zero()
    }

    /// Marks the lent piece as one without a gradient.
    pub(crate) fn reset(&mut self) {
        self.pieces[self.own].reset();
    }

    /// Takes the lent piece out.
    pub(crate) fn take(&mut self) -> TensorMut<R> {
        self.pieces.remove(self.own)
    }

    /// Puts the lent piece back in its place.
    pub(crate) fn give(&mut self, piece: TensorMut<R>) {
        self.pieces.insert(self.own, piece);
    }

    /// All pieces, in order.
    pub fn into_pieces(self) -> Vec<TensorMut<R>> {
        self.pieces
    }
}

/// The error of a tied parameter whose gradient a strategy cannot lend.
pub(crate) fn not_owned<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is tied, but no parameter of its stage's optimizer")
}

/// A call that ends a scope in which parameters were gathered.
type Release = Box<dyn FnOnce() -> Result<()> + Send>;

/// A scope in which all parameters are unsharded on every rank. Dropping it ends the scope.
#[derive(Default)]
#[must_use = "parameters are let go when this is dropped"]
pub struct FullParameters(Vec<Release>);

impl FullParameters {
    /// Makes a scope that ends with a call of `release`.
    pub fn until(release: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        FullParameters(vec![Box::new(release)])
    }

    /// Joins two scopes into one, which ends both.
    pub fn and(mut self, mut other: Self) -> Self {
        self.0.append(&mut other.0);
        self
    }

    /// Ends the scope as a drop does, and reports errors, which a drop ignores.
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
        // Only the wait for a gather that was started can fail. The next use reports it.
        let _ = self.end();
    }
}
