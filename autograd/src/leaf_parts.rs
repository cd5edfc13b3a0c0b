//! Gradients of leaves that are variables: recorded ones, and those of single examples.

use std::sync::Arc;

use numcore::{
    Result, Runtime, Shape,
    ops::{Apply, PointwiseOps, ViewOp, ViewOps},
};
use smallvec::SmallVec;

use crate::{LeafView, Var, sweep::Sweep};

impl<R: Runtime> Sweep<R> {
    /// Adds a value to the gradient of a leaf that is a variable.
    pub(crate) fn add_part(&mut self, view: &Arc<LeafView<R>>, part: Var<R>) -> Result<()> {
        let part = through_views(part, view, self.options.examples)?;
        let state = self.leaf_state(view.leaf())?;
        state.graph = Some(match state.graph.take() {
            None => part,
            Some(sum) => sum.add(&part)?,
        });
        Ok(())
    }
}

/// Maps a gradient of a view of a leaf to a gradient of the leaf, by the adjoints of the views, last first. The
/// gradients of several examples are along another axis in front.
fn through_views<R: Runtime>(grad: Var<R>, view: &LeafView<R>, examples: Option<usize>) -> Result<Var<R>> {
    let longer = |shape: Shape| examples.map_or(Ok(shape), |n| Shape::new(&[&[n], &shape[..]].concat()));
    let views = view.views().iter().map(|v| examples.map_or_else(|| Ok(v.clone()), |n| v.beside(n)));
    let views = views.collect::<Result<SmallVec<[ViewOp; 2]>>>()?;
    let mut shapes = vec![longer(view.leaf().spec().shape)?];
    for v in &views {
        shapes.push(v.shape(shapes[shapes.len() - 1])?);
    }
    let adjoint = |g: Var<R>, (v, from): (&ViewOp, &Shape)| Var::apply1(v.adjoint(*from)?, &[&g]);
    let back = views.iter().zip(&shapes).rev().try_fold(grad, adjoint)?;
    back.reshape(shapes[0])
}
