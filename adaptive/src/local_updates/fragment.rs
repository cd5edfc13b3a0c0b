//! A part of the parameters that is synchronized at once.

use std::{collections::HashMap, sync::Arc};

use autograd::Leaf;
use nn::Param;
use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{PointwiseOps, ReduceOps, ViewOps, cat},
    placement::TensorPlacement,
};
use parking_lot::Mutex;

use super::{OuterRule, OuterStep};
use distributed::comm::{Collectives, Comm, Communicator, ReduceOp, Work, memory};

/// A parameter, and its start in the flat range of its fragment.
pub(super) struct OuterLeaf<R: Runtime> {
    pub leaf: Arc<Leaf<R>>,
    /// The parameter's name in checkpoints.
    pub name: String,
    /// The piece of the parameter on this rank.
    pub placement: TensorPlacement,
    pub start: usize,
    /// True if this rank saves its elements of the parameter. One of the inner ranks that have it does, that of the
    /// first stage.
    pub saves: bool,
}

impl<R: Runtime> OuterLeaf<R> {
    fn numel(&self) -> usize {
        self.placement.local().numel()
    }

    /// This parameter's values in a flat range of the fragment.
    fn of(&self, all: &Tensor<R>) -> Result<Tensor<R>> {
        all.narrow(0, self.start, self.numel())?.reshape(self.placement.local())
    }
}

/// A sum of weights that was started.
enum InFlightSum<R: Runtime> {
    Running(Work<TensorMut<R>>),
    /// This rank's range of the sum.
    Arrived(Tensor<R>),
}

/// Parameters that are synchronized at once, as one flat range of which each rank keeps a part.
pub(super) struct OuterFragment<R: Runtime> {
    pub leaves: Vec<OuterLeaf<R>>,
    dtype: DType,
    /// The number of elements of each rank's part; the last rank's may reach past the end.
    part: usize,
    /// The start of this rank's part.
    pub start: usize,
    /// This rank's part of the global weights.
    pub global: Tensor<R>,
    pub state: Vec<Tensor<R>>,
    /// The total weight of this rank's losses since the last synchronization.
    pub weight: f64,
    in_flight: Mutex<Option<InFlightSum<R>>>,
    /// The inner learning rate when the sum was started.
    pub rate: f64,
}

/// The result of a synchronization for a fragment.
pub(super) struct NextWeights<R: Runtime> {
    global: Tensor<R>,
    state: Vec<Tensor<R>>,
    values: Vec<Tensor<R>>,
}

/// Squared norms of one rank's weights.
#[derive(Clone, Copy, Default)]
pub(super) struct Distances {
    /// The squared distance of its weights from the new global weights.
    pub from_global: f64,
    /// The squared norm of the new global weights.
    pub norm: f64,
    /// The squared norm of its own weights.
    pub own: f64,
}

impl Distances {
    pub(super) fn add(self, other: Self) -> Self {
        Distances {
            from_global: self.from_global + other.from_global,
            norm: self.norm + other.norm,
            own: self.own + other.own,
        }
    }
}

impl<R: Runtime> OuterFragment<R> {
    /// Makes a fragment whose global weights are the ranks' current ones.
    pub(super) fn new(comm: &Comm<R>, mut leaves: Vec<OuterLeaf<R>>, dtype: DType, states: usize) -> Result<Self> {
        let mut numel = 0;
        for outer in &mut leaves {
            outer.start = numel;
            numel += outer.numel();
        }
        let part = numel.div_ceil(comm.size()).max(1);
        let zeros = || Tensor::zeros(comm.runtime(), [part], dtype);
        let state = (0..states).map(|_| zeros()).collect::<Result<Vec<_>>>()?;
        let (global, start) = (zeros()?, part * comm.rank());
        let mut fragment = OuterFragment {
            leaves,
            dtype,
            part,
            start,
            global,
            state,
            weight: 0.0,
            in_flight: Mutex::new(None),
            rate: 0.0,
        };
        fragment.take_global(comm)?;
        Ok(fragment)
    }

    /// Makes this rank's current weights the global ones.
    pub(super) fn take_global(&mut self, comm: &Comm<R>) -> Result<()> {
        let own = self.joined(comm)?.narrow(0, self.start, self.part)?.copy()?;
        self.global = own;
        Ok(())
    }

    /// All weights as one flat range, padded with zeros to equal parts for all ranks.
    fn joined(&self, comm: &Comm<R>) -> Result<Tensor<R>> {
        let row =
            |outer: &OuterLeaf<R>| outer.leaf.value()?.contiguous()?.reshape([outer.numel()])?.to_dtype(self.dtype);
        let mut rows = self.leaves.iter().map(row).collect::<Result<Vec<_>>>()?;
        let numel = self.leaves.last().map_or(0, |last| last.start + last.numel());
        rows.push(Tensor::zeros(comm.runtime(), [self.part * comm.size() - numel], self.dtype)?);
        cat(&rows.iter().collect::<Vec<_>>(), 0)
    }

    /// Starts to sum the ranks' current weights; this rank's are multiplied by `share`.
    pub(super) fn begin(&mut self, comm: &Comm<R>, share: f64, rate: f64) -> Result<()> {
        let own = memory(&self.joined(comm)?.mul(share)?)?;
        *self.in_flight.get_mut() = Some(InFlightSum::Running(comm.reduce_scatter_in_place(own, ReduceOp::Sum)?));
        (self.weight, self.rate) = (0.0, rate);
        Ok(())
    }

    /// Tells whether a sum was started and not applied.
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight.lock().is_some()
    }

    /// This rank's part of the mean that was started; none if none was. Waits for it.
    pub(super) fn mean(&self) -> Result<Option<Tensor<R>>> {
        let mut in_flight = self.in_flight.lock();
        let mean = match in_flight.take() {
            None => return Ok(None),
            Some(InFlightSum::Running(work)) => work.wait()?.freeze()?.narrow(0, self.start, self.part)?.copy()?,
            Some(InFlightSum::Arrived(mean)) => mean,
        };
        *in_flight = Some(InFlightSum::Arrived(mean.clone()));
        Ok(Some(mean))
    }

    /// Gives every rank the global weights.
    pub(super) fn spread_global(&self, comm: &Comm<R>) -> Result<()> {
        self.spread(comm, &self.global)
    }

    /// Gives every rank the weights of which each rank has a part.
    pub(super) fn spread(&self, comm: &Comm<R>, part: &Tensor<R>) -> Result<()> {
        let all = self.gathered(comm, part)?;
        self.leaves
            .iter()
            .try_for_each(|outer| outer.leaf.set(outer.of(&all)?.to_dtype(outer.leaf.spec().dtype)?.copy()?))
    }

    /// The parts of all ranks.
    fn gathered(&self, comm: &Comm<R>, part: &Tensor<R>) -> Result<Tensor<R>> {
        let out = TensorMut::zeros(comm.runtime(), Shape::new(&[self.part * comm.size()])?, self.dtype)?;
        comm.all_gather(part, out)?.wait()?.freeze()
    }

    /// Puts a mean in place of one in flight.
    pub(super) fn set_mean(&mut self, mean: Option<Tensor<R>>) {
        *self.in_flight.get_mut() = mean.map(InFlightSum::Arrived);
    }

    /// Computes the weights after the started sum: the new global ones, from which a rank keeps the share `keep` of its
    /// own difference. Changes nothing.
    pub(super) fn next(
        &self,
        comm: &Comm<R>,
        rule: &dyn OuterRule<R>,
        keep: f64,
    ) -> Result<(NextWeights<R>, Distances)> {
        let none = || Error::internal("local updates", "no sum was started");
        let mean = self.mean()?.ok_or_else(none)?;
        let mut state = self.state.clone();
        let global = rule.next(&OuterStep { global: &self.global, mean: &mean, inner_rate: self.rate }, &mut state)?;
        let all = self.gathered(comm, &global)?;
        let (mut values, mut distances) = (Vec::new(), Distances::default());
        let square = |x: &Tensor<R>| x.square()?.sum_all()?.item();
        for outer in &self.leaves {
            let (own, global) = (outer.leaf.value()?.to_dtype(self.dtype)?, outer.of(&all)?);
            let difference = own.sub(&global)?;
            distances = distances.add(Distances {
                from_global: square(&difference)?,
                norm: square(&global)?,
                own: square(&own)?,
            });
            let value = if keep == 0.0 { global } else { global.add(&difference.mul(keep)?)? };
            // Not a view of `all`, which would keep the whole range in memory.
            values.push(value.to_dtype(outer.leaf.spec().dtype)?.copy()?);
        }
        Ok((NextWeights { global, state, values }, distances))
    }

    /// Applies the result of a synchronization.
    pub(super) fn take(&mut self, next: NextWeights<R>) -> Result<()> {
        let NextWeights { global, state, values } = next;
        self.leaves.iter().zip(values).try_for_each(|(outer, value)| outer.leaf.set(value))?;
        (self.global, self.state) = (global, state);
        *self.in_flight.get_mut() = None;
        Ok(())
    }

    /// This rank's elements of each parameter, without the padding.
    pub(super) fn own(&self) -> impl Iterator<Item = OwnElements<'_, R>> {
        let (start, end) = (self.start, self.start + self.part);
        self.leaves.iter().filter_map(move |outer| {
            let (first, last) = (outer.start.max(start), (outer.start + outer.numel()).min(end));
            (first < last).then(|| OwnElements {
                outer,
                at: first - outer.start,
                part: first - start,
                len: last - first,
            })
        })
    }

    /// This rank's part, joined from rows of [its elements](OuterFragment::own) and padded with zeros.
    pub(super) fn padded(&self, rows: &[&Tensor<R>]) -> Result<Tensor<R>> {
        let have: usize = rows.iter().map(|row| row.shape().numel()).sum();
        let zeros = Tensor::zeros(self.global.runtime(), [self.part - have], self.dtype)?;
        let rows = rows.iter().map(|row| row.to_dtype(self.dtype)).chain([Ok(zeros)]).collect::<Result<Vec<_>>>()?;
        cat(&rows.iter().collect::<Vec<_>>(), 0)
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Elements of a parameter of which a rank keeps the global weights.
pub(super) struct OwnElements<'a, R: Runtime> {
    pub outer: &'a OuterLeaf<R>,
    /// The first of these elements in the parameter.
    pub at: usize,
    /// The first of these elements in the rank's part.
    pub part: usize,
    pub len: usize,
}

/// Cuts the trained parameters into `count` consecutive fragments of about equal size, each of at least one parameter
/// if there are enough. A rank may have none, as the frozen stage of a pipeline.
pub(super) fn fragments<R: Runtime>(
    comm: &Comm<R>,
    named: &[(String, Param<R>)],
    count: usize,
    states: usize,
    copies: &HashMap<usize, String>,
    saves: impl Fn(&Param<R>) -> bool,
) -> Result<Vec<OuterFragment<R>>> {
    let trained: Vec<&Param<R>> = named.iter().map(|(_, p)| p).filter(|p| p.requires_grad()).collect();
    let wide = if trained.iter().any(|p| p.dtype() == DType::F64) { DType::F64 } else { DType::F32 };
    let total: usize = trained.iter().map(|p| p.shape().numel()).sum();
    let mut parts: Vec<Vec<OuterLeaf<R>>> = vec![Vec::new()];
    let mut before = 0;
    for (k, parameter) in trained.iter().enumerate() {
        let left = trained.len() - k;
        // The next fragment begins where its share of all elements does, and early enough to leave a parameter to each
        // of the others.
        let full = before * count >= parts.len() * total || left <= count - parts.len();
        if full && parts.len() < count && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(Vec::new());
        }
        let whole = || TensorPlacement::whole(parameter.leaf().spec().shape);
        let placement = parameter.placed().map_or_else(whole, |placed| placed.placement().clone());
        let leaf = parameter.leaf();
        let copied = copies.get(&leaf.id());
        let (name, saves) = (copied.map_or_else(|| leaf.name().to_string(), String::clone), saves(parameter));
        let outer = OuterLeaf { leaf, name, placement, start: 0, saves: saves && copied.is_none() };
        match parts.last_mut() {
            Some(part) => part.push(outer),
            None => parts.push(vec![outer]),
        }
        before += parameter.shape().numel();
    }
    parts.resize_with(count, Vec::new);
    parts.into_iter().map(|leaves| OuterFragment::new(comm, leaves, wide, states)).collect()
}
