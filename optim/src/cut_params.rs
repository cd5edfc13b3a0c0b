//! Parameters that are cut over ranks and updated by a rule that needs them whole: one rank updates each.

use std::sync::Arc;

use autograd::{Var, no_grad};
use nn::parallel::Placed;
use numcore::{
    DType, FlatLayout, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{ViewOps, cat},
};

use crate::{StateSpec, UpdateMemory, params::working};

/// A parameter of which this rank has a piece, and the rank that updates the whole of it.
///
/// In an update the owner receives the pieces of value and gradient, applies the rule, and sends the pieces of the new
/// value back. It alone keeps the state. So an update has the bits of one rank's, and each matrix is computed once.
#[derive(Debug)]
pub struct CutParam<R: Runtime> {
    placed: Arc<Placed<R>>,
    owner: usize,
}

impl<R: Runtime> Clone for CutParam<R> {
    fn clone(&self) -> Self {
        CutParam { placed: self.placed.clone(), owner: self.owner }
    }
}

impl<R: Runtime> CutParam<R> {
    /// Gives a parameter to the rank with the least work in `loads`, which are by rank, and adds it there. `None` if
    /// the parameter is not cut.
    pub fn balanced(placed: &Arc<Placed<R>>, loads: &mut Vec<u128>) -> Option<Self> {
        if placed.is_whole() {
            return None;
        }
        loads.resize(placed.group().size(), 0);
        // A rank without elements of the parameter cannot know of it: shards have pieces with elements alone.
        let has_some = |rank: &usize| placed.placements()[*rank].local().numel() > 0;
        let owner = (0..loads.len()).filter(has_some).min_by_key(|&rank| loads[rank])?;
        let cut = CutParam { placed: placed.clone(), owner };
        cut.add_to(loads);
        Some(cut)
    }

    /// Adds the work of the parameter to that of its owner: the products of a matrix with its Gram matrix.
    fn add_to(&self, loads: &mut Vec<u128>) {
        let shape = self.placed.placement().logical();
        let side = shape.dims().iter().rev().take(2).min().copied().unwrap_or(1);
        loads.resize(self.placed.group().size(), 0);
        loads[self.owner] += shape.numel() as u128 * side.max(1) as u128;
    }

    fn is_here(&self) -> bool {
        self.placed.group().rank() == self.owner
    }

    fn numel(&self, rank: usize) -> usize {
        self.placed.placements()[rank].local().numel()
    }
}

/// The cut parameters of a buffer, by their index in it.
pub(crate) struct CutParams<R: Runtime> {
    rt: R,
    params: Vec<Option<CutParam<R>>>,
    /// The layout of the buffer with the whole of each cut parameter.
    layout: FlatLayout,
}

/// Calls a function with the memory of parameter `i`, of which this rank may have a piece.
pub(crate) type WithMemory<'a, R> =
    dyn FnMut(usize, &mut dyn FnMut(&mut UpdateMemory<'_, R>) -> Result<()>) -> Result<()> + 'a;

impl<R: Runtime> CutParams<R> {
    /// The cut parameters of a buffer with this layout.
    pub(crate) fn new(rt: &R, pieces: &FlatLayout, params: Vec<Option<CutParam<R>>>) -> Self {
        let shape = |i: usize| match &params[i] {
            Some(cut) => cut.placed.placement().logical(),
            None => *pieces.range(i).shape(),
        };
        let named = (0..params.len()).map(|i| (pieces.name(i).to_string(), shape(i)));
        let layout = match params.iter().all(Option::is_none) {
            true => pieces.clone(),
            false => FlatLayout::new(pieces.dtype(), named),
        };
        CutParams { rt: rt.clone(), params, layout }
    }

    /// The parameters in another order, in which their buffer has this layout.
    pub(crate) fn permuted(&self, pieces: &FlatLayout, order: &[usize]) -> Self {
        Self::new(&self.rt, pieces, order.iter().map(|&i| self.params[i].clone()).collect())
    }

    /// Parameter `i`, if a rank updates the whole of it.
    pub(crate) fn get(&self, i: usize) -> Option<&CutParam<R>> {
        self.params.get(i)?.as_ref()
    }

    /// The layout of whole parameters, for their states.
    pub(crate) fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// The state of parameter `i` on this rank; `None` where another rank updates the parameter.
    pub(crate) fn kept(&self, i: usize, state: StateSpec) -> Option<StateSpec> {
        self.get(i).is_none_or(CutParam::is_here).then_some(state)
    }

    /// Adds the work of the parameters to that of their owners.
    pub(crate) fn add_to(&self, loads: &mut Vec<u128>) {
        self.params.iter().flatten().for_each(|cut| cut.add_to(loads));
    }

    /// Updates the cut parameters `which`, in the same order on all ranks. Their gradients have this dtype; `update`
    /// updates the whole of one.
    ///
    /// Goes in [rounds](CutParams::rounds): an owner holds whole weights, gradients and new weights of one at a time.
    ///
    /// # Errors
    /// Errors of the exchanges and of the rule. An error of the rule leaves other ranks waiting until their deadline.
    pub(crate) fn update(
        &self,
        which: &[usize],
        grads: DType,
        with: &mut WithMemory<'_, R>,
        update: &mut dyn FnMut(usize, &mut UpdateMemory<'_, R>) -> Result<()>,
    ) -> Result<()> {
        let layout = self.layout.with_dtype(working(self.layout.dtype()));
        for round in self.rounds(which) {
            let weights = self.gather(round, "weights", layout.dtype(), with, &|memory| memory.weight())?;
            let grads = self.gather(round, "gradients", grads, with, &|memory| Ok(memory.grad.clone()))?;
            let mut new = Vec::new();
            for ((i, weight), (_, grad)) in weights.into_iter().zip(grads) {
                with(i, &mut |memory| {
                    let mut row = TensorMut::alloc(&self.rt, Shape::from([weight.shape().numel()]), weight.dtype())?;
                    let mut whole = memory.whole(&layout, &mut row, &weight, &grad)?;
                    update(i, &mut whole)?;
                    new.push((i, whole.weight()?));
                    Ok(())
                })?;
            }
            let back = self.scatter(round, new)?;
            back.into_iter().try_for_each(|(i, piece)| with(i, &mut |memory| memory.replace_weight(&piece)))?;
        }
        Ok(())
    }

    /// Cuts `which` into rounds, each of as many elements as one of the largest parameters for each rank, or of one
    /// parameter. All ranks cut alike, since they count elements of whole parameters.
    fn rounds<'w>(&self, which: &'w [usize]) -> Vec<&'w [usize]> {
        let numel = |i: usize| self.layout.range(i).numel();
        let ranks = self.cuts(which).next().map_or(1, |(_, cut)| cut.placed.group().size());
        let most = which.iter().map(|&i| numel(i)).max().unwrap_or(0) * ranks;
        let (mut rounds, mut rest) = (Vec::new(), which);
        while !rest.is_empty() {
            let sums = rest.iter().scan(0, |sum, &i| {
                *sum += numel(i);
                Some(*sum)
            });
            let (round, later) = rest.split_at(sums.take_while(|sum| *sum <= most).count().max(1));
            rounds.push(round);
            rest = later;
        }
        rounds
    }

    /// Sends the owner of each parameter this rank's piece of a tensor of it, and returns those that this rank owns,
    /// whole.
    fn gather(
        &self,
        which: &[usize],
        what: &str,
        dtype: DType,
        with: &mut WithMemory<'_, R>,
        read: &dyn Fn(&UpdateMemory<'_, R>) -> Result<Tensor<R>>,
    ) -> Result<Vec<(usize, Tensor<R>)>> {
        let mut rows: Vec<(usize, Tensor<R>)> = Vec::new();
        for (i, cut) in self.cuts(which).filter(|(_, cut)| cut.placed.is_first_replica()) {
            with(i, &mut |memory| {
                let piece = read(memory)?;
                let row = piece.reshape([piece.shape().numel()])?.narrow(0, 0, memory.shape().numel())?;
                rows.push((cut.owner, row));
                Ok(())
            })?;
        }
        let own: Vec<(usize, &CutParam<R>)> = self.cuts(which).filter(|(_, cut)| cut.is_here()).collect();
        let sent = |from: usize, cut: &CutParam<R>| match from.is_multiple_of(cut.placed.replicas()) {
            true => cut.numel(from),
            false => 0,
        };
        let from = |rank: usize| own.iter().map(|(_, cut)| sent(rank, cut)).sum();
        let received = self.exchange(which, what, dtype, rows, &from)?;
        let whole = |&(i, cut): &(usize, &CutParam<R>)| {
            let before = |from: usize| own.iter().take_while(|(j, _)| *j != i).map(|(_, cut)| sent(from, cut)).sum();
            let piece = |from: usize| received[from].narrow(0, before(from), sent(from, cut));
            Ok((i, cut.placed.join(piece)?))
        };
        own.iter().map(whole).collect()
    }

    /// Sends every rank its piece of the parameters that this rank owns, and returns the pieces of `which`.
    fn scatter(&self, which: &[usize], owned: Vec<(usize, Tensor<R>)>) -> Result<Vec<(usize, Tensor<R>)>> {
        let mut rows = Vec::new();
        for (cut, value) in owned.iter().filter_map(|(i, value)| Some((self.get(*i)?, value))) {
            for (to, placement) in cut.placed.placements().iter().enumerate() {
                rows.push((to, placement.take(value)?.reshape([placement.local().numel()])?));
            }
        }
        let here = |cut: &CutParam<R>| cut.numel(cut.placed.group().rank());
        let of = |owner: usize| self.cuts(which).filter(move |(_, cut)| cut.owner == owner);
        let from = |rank: usize| of(rank).map(|(_, cut)| here(cut)).sum();
        let received = self.exchange(which, "updates", working(self.layout.dtype()), rows, &from)?;
        let mut pieces = Vec::new();
        for (owner, row) in received.iter().enumerate() {
            let mut at = 0;
            for (i, cut) in of(owner) {
                pieces.push((i, row.narrow(0, at, here(cut))?));
                at += here(cut);
            }
        }
        Ok(pieces)
    }

    fn cuts<'a>(&'a self, which: &'a [usize]) -> impl Iterator<Item = (usize, &'a CutParam<R>)> {
        which.iter().filter_map(|&i| Some((i, self.get(i)?)))
    }

    /// Sends ranks the rows that are for them. Returns the `from(rank)` elements that each rank sent to this one.
    fn exchange(
        &self,
        which: &[usize],
        what: &str,
        dtype: DType,
        mut rows: Vec<(usize, Tensor<R>)>,
        from: &dyn Fn(usize) -> usize,
    ) -> Result<Vec<Tensor<R>>> {
        let Some((_, cut)) = self.cuts(which).next() else { return Ok(Vec::new()) };
        let group = cut.placed.group();
        let recv: Vec<usize> = (0..group.size()).map(from).collect();
        let mut send = vec![0; group.size()];
        rows.iter().for_each(|(to, row)| send[*to] += row.shape().numel());
        rows.sort_by_key(|(to, _)| *to);
        let row = match &rows.iter().map(|(_, row)| row).collect::<Vec<_>>()[..] {
            [] => Tensor::zeros(&self.rt, Shape::from([0]), dtype)?,
            all => cat(all, 0)?,
        };
        let name = format!("{what} for an update of whole parameters, the first of `{}`", cut.placed.name());
        let got = no_grad(|| group.all_to_all(&Var::new(row), &send, &recv, &name))?.value()?;
        let mut at = 0;
        let part = |&len: &usize| {
            at += len;
            got.narrow(0, at - len, len)
        };
        recv.iter().map(part).collect()
    }
}
