//! Splitting of parameters into those with and those without weight decay.

use std::{borrow::Borrow, sync::Arc};

use autograd::Leaf;
use numcore::Runtime;

/// Splits parameters into matrices and higher ranks, which are decayed, and the others (biases, norms), which are not;
/// each in the order given.
#[expect(clippy::type_complexity, reason = "two lists of parameters")]
pub fn split_decay<R: Runtime, L: Borrow<Arc<Leaf<R>>>>(
    params: impl IntoIterator<Item = L>,
) -> (Vec<Arc<Leaf<R>>>, Vec<Arc<Leaf<R>>>) {
    params.into_iter().map(|l| l.borrow().clone()).partition(|l| l.spec().shape.rank() >= 2)
}
