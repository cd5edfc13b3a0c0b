//! The gradients of a rank's stages: where they lie, how they become those of all ranks, how long they are together.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, LazyLock},
};

use autograd::{BackwardHook, Leaf};
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Apply, PointwiseOps, Reduce, ScalarList, ViewOps},
    pointwise::Program,
};
use optim::{FlatGradients, Optimizer, all_finite};

use super::{Groups, Pipeline, StageHooks, Tie, tie::Tied};
use crate::comm::{Collectives, Comm, ReduceOp, Work};

/// An optimizer for each stage of this rank.
pub type StageOptimizers<R> = BTreeMap<usize, Box<dyn Optimizer<R>>>;

/// The gradients of a rank's stages in their optimizers' memory: the [`StageHooks`] of training.
///
/// At REDUCE_GRAD a stage's gradients start to be summed over the replicas, and tied ones over all ranks that have a copy, in the
/// order of ranks; [`finish`](StageGradients::finish) waits for the sums.
pub struct StageGradients<R: Runtime> {
    pipe: Comm<R>,
    data: Comm<R>,
    parts: BTreeMap<usize, Part<R>>,
    ties: Vec<Tied<R>>,
    /// Whether the run that goes on is the step's last.
    sync: bool,
}

/// One stage's gradients.
struct Part<R: Runtime> {
    gradients: FlatGradients<R>,
    /// The parameters of each buffer.
    leaves: Vec<Vec<Arc<Leaf<R>>>>,
    /// Whether each is tied, and whether it counts in the norm.
    tied: Vec<Vec<bool>>,
    counts: Vec<Vec<bool>>,
    /// Sums in flight, by buffer.
    work: Vec<(usize, Work<TensorMut<R>>)>,
}

impl<R: Runtime> StageGradients<R> {
    /// Those of the parameters that `optimizers` make of the stages' leaves. Tied parameters are made equal before that. Blocks.
    ///
    /// # Errors
    /// On every rank, when a tie's copies are not there, differ in shape, dtype or in being trained, or two are in one stage.
    pub fn new(
        groups: &Groups<R>,
        pipeline: &Pipeline<R>,
        ties: &[Tie],
        optimizers: impl FnOnce() -> Result<StageOptimizers<R>>,
    ) -> Result<(Self, StageOptimizers<R>)> {
        groups.world.agree("the list of tied parameters", format!("{ties:?}").as_bytes())?;
        let ties = Tied::all(groups, ties, pipeline.stages())?;
        let optimizers = optimizers()?;
        let part = |(&stage, optimizer): (&usize, _)| Ok((stage, Part::new(stage, optimizer, &ties)?));
        let parts = optimizers.iter().map(|(stage, optimizer)| part((stage, &**optimizer))).collect::<Result<_>>()?;
        let (pipe, data) = (groups.pipe.clone(), groups.data.clone());
        Ok((StageGradients { pipe, data, parts, ties, sync: true }, optimizers))
    }

    /// Forgets all gradients.
    pub fn zero(&mut self) {
        self.parts.values_mut().for_each(|part| part.gradients.zero());
    }

    /// Before a run: `sync` tells whether it is the last that adds to these gradients, after which they are to be summed.
    pub fn begin(&mut self, sync: bool) {
        self.sync = sync;
        self.ties.iter_mut().for_each(Tied::begin);
        self.parts.values_mut().for_each(|part| part.work.clear());
    }

    /// Waits until every gradient is the sum over all ranks.
    pub fn finish(&mut self) -> Result<()> {
        for part in self.parts.values_mut() {
            for (buffer, work) in part.work.drain(..) {
                part.gradients.flats_mut()[buffer].restore(work.wait()?)?;
            }
        }
        for tied in &mut self.ties {
            let sums = tied.finish()?;
            for ((stage, leaf), sum) in tied.copies.iter().zip(sums) {
                let (part, buffer, _) = place(&mut self.parts, *stage, leaf)?;
                part.gradients.flats_mut()[buffer].restore(sum)?;
            }
        }
        Ok(())
    }

    /// A stage's gradients. Between REDUCE_GRAD and [`finish`](StageGradients::finish) parts of them are in flight.
    pub fn of(&self, stage: usize) -> Option<&FlatGradients<R>> {
        self.parts.get(&stage).map(|part| &part.gradients)
    }

    /// The norm of the gradients of all stages on all ranks as if they were one vector, a tied parameter counting once: a scalar of
    /// `dtype` on the device, the same on every rank.
    pub fn norm(&self, dtype: DType) -> Result<Tensor<R>> {
        let rt = self.pipe.runtime();
        let mut sum = Tensor::zeros(rt, [1], dtype)?;
        for part in self.parts.values() {
            for square in part.squares(dtype)? {
                sum = sum.add(&square)?;
            }
        }
        let sum = self.pipe.all_reduce(crate::comm::memory(&sum)?, ReduceOp::Sum)?.wait()?.freeze()?;
        sum.sqrt()?.reshape([])
    }

    /// Whether every gradient on every rank is finite. Blocks.
    pub fn all_finite(&self) -> Result<bool> {
        let own =
            self.parts.values().try_fold(true, |all, part| Ok::<_, Error>(all && all_finite(&part.gradients)?))?;
        Ok(self.pipe.exchange(&[own.into()])?.iter().all(|flag| flag == &[1]))
    }

    /// Multiplies all gradients by a scalar when they are next read.
    pub fn multiply_by(&mut self, factor: &Tensor<R>) -> Result<()> {
        self.parts.values_mut().try_for_each(|part| part.gradients.multiply_by(factor.clone()))
    }
}

impl<R: Runtime> StageHooks<R> for StageGradients<R> {
    fn gradients(&mut self, stage: usize, _: bool) -> Result<&mut dyn BackwardHook<R>> {
        match self.parts.get_mut(&stage) {
            Some(part) => Ok(&mut part.gradients),
            None => Err(Error::argument("pipeline", format!("stage {stage} has no optimizer"))),
        }
    }

    fn reduce_grad(&mut self, stage: usize) -> Result<()> {
        if !self.sync {
            return Ok(());
        }
        if let Some(part) = self.parts.get_mut(&stage) {
            part.gradients.require_all()?;
            part.send(&self.data)?;
        }
        for tied in &mut self.ties {
            if tied.is_due(stage) {
                let lend = |(stage, leaf): &(usize, Arc<Leaf<R>>)| {
                    let (part, buffer, range) = place(&mut self.parts, *stage, leaf)?;
                    part.gradients.flats_mut()[buffer].lend(range)
                };
                let trained = tied.copies.iter().filter(|(_, leaf)| leaf.requires_grad());
                let lent = trained.map(lend).collect::<Result<_>>()?;
                tied.start(lent)?;
            }
        }
        Ok(())
    }
}

impl<R: Runtime> Part<R> {
    fn new(stage: usize, optimizer: &dyn Optimizer<R>, ties: &[Tied<R>]) -> Result<Self> {
        let leaves: Vec<Vec<_>> = optimizer.params().iter().map(|params| params.leaves().to_vec()).collect();
        let copy = |leaf: &Arc<Leaf<R>>, tied: &Tied<R>| tied.copies.iter().any(|(_, own)| Arc::ptr_eq(own, leaf));
        let is_tied = |leaf| ties.iter().any(|tied| copy(leaf, tied));
        let counts = |leaf| !ties.iter().any(|tied| copy(leaf, tied) && tied.first != stage);
        let tied = leaves.iter().map(|of| of.iter().map(is_tied).collect()).collect();
        let counts = leaves.iter().map(|of| of.iter().map(counts).collect()).collect();
        Ok(Part { gradients: optimizer.gradients()?, leaves, tied, counts, work: Vec::new() })
    }

    /// Starts the sums over the replicas, of all that ties do not take care of.
    fn send(&mut self, data: &Comm<R>) -> Result<()> {
        if data.size() == 1 {
            return Ok(());
        }
        for (buffer, flat) in self.gradients.flats_mut().iter_mut().enumerate() {
            for run in runs(self.tied[buffer].len(), |i| !self.tied[buffer][i]) {
                let sum = data.all_reduce(flat.lend_span(run)?, ReduceOp::Sum)?;
                self.work.push((buffer, sum));
            }
        }
        Ok(())
    }

    /// Sums of squares of the gradients that count, of one element each.
    fn squares(&self, dtype: DType) -> Result<Vec<Tensor<R>>> {
        static SQUARE: LazyLock<Program> = LazyLock::new(|| Program::new("square", |[x], []| [x * x]));
        let mut squares = Vec::new();
        for (buffer, flat) in self.gradients.flats().iter().enumerate() {
            for run in runs(self.counts[buffer].len(), |i| self.counts[buffer][i] && flat.is_written(i)) {
                let at = flat.layout().span(run);
                if !at.is_empty() {
                    let row = flat.whole()?.narrow(0, at.start, at.len())?.to_dtype(dtype)?;
                    let sum = Reduce::sum_of(SQUARE.clone(), ScalarList::new(), Shape::new(&[1])?);
                    squares.push(Tensor::apply1(sum, &[&row])?);
                }
            }
        }
        Ok(squares)
    }
}

/// Where a stage's parameter has its gradient: buffer and range.
fn place<'a, R: Runtime>(
    parts: &'a mut BTreeMap<usize, Part<R>>,
    stage: usize,
    leaf: &Arc<Leaf<R>>,
) -> Result<(&'a mut Part<R>, usize, usize)> {
    let missing = || Error::state(leaf.name().to_string(), "is tied, but no parameter of its stage's optimizer");
    let part = parts.get_mut(&stage).ok_or_else(missing)?;
    let range = |of: &Vec<Arc<Leaf<R>>>| of.iter().position(|own| Arc::ptr_eq(own, leaf));
    let place = part.leaves.iter().enumerate().find_map(|(buffer, of)| Some((buffer, range(of)?)));
    place.map(|(buffer, range)| (part, buffer, range)).ok_or_else(missing)
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
