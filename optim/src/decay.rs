//! The division of parameters into those with and without weight decay.

use std::{borrow::Borrow, sync::Arc};

use autograd::Leaf;
use numcore::Runtime;

/// Divides parameters into matrices and tensors of higher rank, which are decayed, and the others (biases, norms),
/// which are not. Each list keeps the given order.
#[expect(clippy::type_complexity, reason = "two lists of parameters")]
pub fn split_decay<R: Runtime, L: Borrow<Arc<Leaf<R>>>>(
    params: impl IntoIterator<Item = L>,
) -> (Vec<Arc<Leaf<R>>>, Vec<Arc<Leaf<R>>>) {
    params.into_iter().map(|l| l.borrow().clone()).partition(|l| l.spec().shape.rank() >= 2)
}
