//! The context of a row of the op tables: a case's inputs and attributes.

use std::cell::RefCell;

use autograd::Var;
use numcore::{Error, Result, Runtime, Shape};

use super::{Attrs, Case};

/// One call of an op.
pub(super) struct Call<'a, R: Runtime> {
    /// The attributes of the case.
    pub(super) attrs: &'a Attrs,
    case: &'a Case,
    ins: &'a [Var<R>],
    stand_ins: RefCell<Vec<(usize, Var<R>)>>,
}

/// The computation of an op of the tables.
pub(super) type OpFn<R> = fn(&Call<'_, R>) -> Result<Vec<Var<R>>>;

impl<'a, R: Runtime> Call<'a, R> {
    pub(super) fn new(case: &'a Case, ins: &'a [Var<R>]) -> Self {
        Call { attrs: &case.attrs, case, ins, stand_ins: RefCell::default() }
    }

    /// Input `i`; an error if the case has none.
    pub(super) fn x(&self, i: usize) -> Result<&'a Var<R>> {
        self.maybe(i).ok_or_else(|| Error::format("golden", format!("the op takes an input {i}")))
    }

    /// Input `i`, if the case has one.
    pub(super) fn maybe(&self, i: usize) -> Option<&'a Var<R>> {
        self.ins.get(i)
    }

    /// All inputs, in order.
    pub(super) fn all(&self) -> Vec<&'a Var<R>> {
        self.ins.iter().collect()
    }

    /// The expected shape of output `k`, for ops whose sizes the case states nowhere else.
    pub(super) fn out_shape(&self, k: usize) -> Result<Shape> {
        Ok(self.case.tensor(&format!("out{k}"))?.shape)
    }

    /// Records that input `i` was copied into `leaf` (a layer's parameter), which receives its gradient.
    pub(super) fn stands_in(&self, i: usize, leaf: Var<R>) {
        self.stand_ins.borrow_mut().push((i, leaf));
    }

    /// The leaves into which inputs were copied, with the inputs' indices.
    pub(super) fn stand_ins(self) -> Vec<(usize, Var<R>)> {
        self.stand_ins.into_inner()
    }

    /// The note of the case; empty if it has none.
    pub(super) fn note(&self) -> Result<&str> {
        self.attrs.str("note", "")
    }
}

/// The outputs of an op that has one.
pub(super) fn one<R: Runtime>(out: Result<Var<R>>) -> Result<Vec<Var<R>>> {
    Ok(vec![out?])
}
