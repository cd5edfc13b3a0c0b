//! What strategies are asked beside where a model is cut into stages, each trained by a strategy of its own.

use std::{
    ops::Range,
    sync::{Arc, LazyLock},
};

use autograd::Leaf;
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Apply, PointwiseOps, Reduce, ReduceOps, ScalarList, ViewOps},
    pointwise::Program,
};

use super::{DataParallel, Strategy, summed::wide};
use crate::checkpoint::Checkpointed;

/// A strategy that can train one stage of a pipeline over the ranks that have this stage. What concerns several stages, norms and tied
/// parameters, their trainer does; for that it asks more than [`Strategy`] has.
pub trait StageStrategy<R: Runtime>: Strategy<R> + Checkpointed<R> {
    /// The square of the L2 norm of the summed gradients of the parameters that count, of all ranks' parts: a scalar on the device.
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>>;
    /// Takes out what this rank keeps of a trained parameter's summed gradient, to be added to that of its copies in other stages;
    /// equal ranks of the stages keep equal elements.
    fn lend_sum(&mut self, leaf: &Arc<Leaf<R>>) -> Result<LentSum<R>>;
    /// Takes it back.
    fn restore_sum(&mut self, leaf: &Arc<Leaf<R>>, sum: LentSum<R>) -> Result<()>;
    /// The learning rate of the next update (of the first group); none if there are no parameters.
    fn rate(&self) -> Option<f64>;

    /// The stage is about to be used: what is sharded of its parameters can be sent for.
    fn unshard(&mut self) -> Result<()> {
        Ok(())
    }

    /// The stage is not used for a while.
    fn reshard(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Memory of summed gradients, of which one piece is lent. [`DataParallel`] and [`Sharded`](crate::zero::Sharded) make it.
pub struct LentSum<R: Runtime> {
    pieces: Vec<TensorMut<R>>,
    own: usize,
}

impl<R: Runtime> LentSum<R> {
    /// Lends piece `own` of memory that was split.
    pub(crate) fn new(pieces: Vec<TensorMut<R>>, own: usize) -> Self {
        LentSum { pieces, own }
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
    pub(crate) fn into_pieces(self) -> Vec<TensorMut<R>> {
        self.pieces
    }
}

/// Every rank keeps all of it.
impl<R: Runtime> StageStrategy<R> for DataParallel<R> {
    fn squared_norm(&self, counts: &dyn Fn(&Arc<Leaf<R>>) -> bool) -> Result<Tensor<R>> {
        let wide = wide(self.comm.runtime());
        let mut sum = Tensor::zeros(self.comm.runtime(), [1], wide)?;
        for (params, flat) in self.optimizer.params().iter().zip(self.buckets().gradients().flats()) {
            let leaves = params.leaves();
            for run in runs(leaves.len(), |i| flat.is_written(i) && counts(&leaves[i])) {
                let at = flat.layout().span(run);
                sum = sum.add(&squares(&flat.whole()?.narrow(0, at.start, at.len())?)?.to_dtype(wide)?)?;
            }
        }
        sum.sum(&[], false)
    }

    fn lend_sum(&mut self, leaf: &Arc<Leaf<R>>) -> Result<LentSum<R>> {
        let (buffer, range) = self.place(leaf)?;
        let slot = self.buckets_mut().gradients_mut().flats_mut()[buffer].lend(range)?;
        Ok(LentSum::new(vec![slot], 0))
    }

    fn restore_sum(&mut self, leaf: &Arc<Leaf<R>>, sum: LentSum<R>) -> Result<()> {
        let (buffer, _) = self.place(leaf)?;
        let flat = &mut self.buckets_mut().gradients_mut().flats_mut()[buffer];
        sum.into_pieces().into_iter().try_for_each(|slot| flat.restore(slot))
    }

    fn rate(&self) -> Option<f64> {
        self.optimizer.lrs().first().copied()
    }
}

impl<R: Runtime> DataParallel<R> {
    /// Where a parameter has its gradient: buffer and range.
    fn place(&self, leaf: &Arc<Leaf<R>>) -> Result<(usize, usize)> {
        let range = |leaves: &[Arc<Leaf<R>>]| leaves.iter().position(|own| Arc::ptr_eq(own, leaf));
        let params = self.optimizer.params();
        let place = params.iter().enumerate().find_map(|(buffer, of)| Some((buffer, range(of.leaves())?)));
        place.ok_or_else(|| not_of(leaf))
    }
}

/// `Σ x²` of a row, of one element, in `f32` for halves: they are widened as they are read.
fn squares<R: Runtime>(row: &Tensor<R>) -> Result<Tensor<R>> {
    static OWN: LazyLock<Program> = LazyLock::new(|| Program::new("squares", |[x], []| [x * x]));
    static WIDENED: LazyLock<Program> =
        LazyLock::new(|| Program::new("squares", |[x], []| [x.cast(DType::F32) * x.cast(DType::F32)]));
    let program = if row.dtype().is_half() { &WIDENED } else { &OWN };
    Tensor::apply1(Reduce::sum_of(LazyLock::force(program).clone(), ScalarList::new(), Shape::new(&[1])?), &[row])
}

/// The error of a parameter that is not a strategy's.
pub(crate) fn not_of<R: Runtime>(leaf: &Leaf<R>) -> Error {
    Error::state(leaf.name().to_string(), "is tied, but no parameter of its stage's optimizer")
}

/// The longest runs of numbers below `count` for which `which` holds.
fn runs(count: usize, which: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for i in (0..count).filter(|&i| which(i)) {
        match runs.last_mut() {
            Some(run) if run.end == i => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}
