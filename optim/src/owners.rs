//! The ranks that update the parameters of which ranks have pieces, for rules that need them whole.

use std::sync::Arc;

use autograd::Leaf;
use numcore::{Error, Result, Runtime};

use crate::{
    CutParam, FlatOptimizer, UpdateRule,
    cut_params::CutParams,
    optimizer::PiecesOf,
    param_part::{ParamPart, states},
};

impl<R: Runtime, C: UpdateRule> FlatOptimizer<R, C> {
    /// Gives each cut parameter whose rule needs it whole to a rank, unless a rank has it. Returns the identities of
    /// all leaves that ranks update as a whole.
    pub(crate) fn share_out(&mut self, placed: &PiecesOf<'_, R>) -> Result<Vec<usize>> {
        let (mut loads, mut whole) = (Vec::new(), Vec::new());
        self.parts.iter().for_each(|part| part.add_to(&mut loads));
        for part in self.parts.iter_mut().filter(|part| self.groups[part.group].needs_whole()) {
            part.update_whole(&self.groups[part.group], placed, &mut loads)?;
            whole.extend(part.updated_whole().map(|leaf| leaf.id()));
        }
        Ok(whole)
    }
}

impl<R: Runtime, C: UpdateRule> ParamPart<R, C> {
    /// Has ranks update the whole of each parameter that `placed` gives pieces of, balanced by `loads`. The states of
    /// those that are new to this begin anew.
    ///
    /// # Errors
    /// An error if one of them has been updated by pieces.
    fn update_whole(&mut self, config: &C, placed: &PiecesOf<'_, R>, loads: &mut Vec<u128>) -> Result<()> {
        let leaves = self.params.leaves().iter().enumerate();
        let mut owned = |(i, leaf)| self.cut.get(i).cloned().or_else(|| CutParam::balanced(&placed(leaf)?, loads));
        let cut: Vec<Option<CutParam<R>>> = leaves.map(&mut owned).collect();
        let is_new = |i: &usize| cut[*i].is_some() && self.cut.get(*i).is_none();
        let new: Vec<usize> = (0..cut.len()).filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        if let Some(&i) = new.iter().find(|&&i| self.steps[i] > 0) {
            let why = "was updated before ranks had pieces of it: make the optimizer after the model is cut";
            return Err(Error::state(&*self.params.leaves()[i].name(), why));
        }
        let cut = CutParams::new(self.params.runtime(), self.params.layout(), cut);
        let mut states = states(config, &self.params, &cut)?;
        for (state, old) in states.iter_mut().zip(&self.states) {
            let kept = (0..self.steps.len()).filter(|i| !new.contains(i));
            kept.into_iter().try_for_each(|i| state.overwrite(i, &old.tensor(i)?))?;
        }
        (self.states, self.cut) = (states, cut);
        Ok(())
    }

    /// Adds the work of the parameters that are cut to that of the ranks that update them.
    fn add_to(&self, loads: &mut Vec<u128>) {
        self.cut.add_to(loads);
    }

    /// The parameters that ranks update as a whole.
    fn updated_whole(&self) -> impl Iterator<Item = &Arc<Leaf<R>>> {
        self.params.leaves().iter().enumerate().filter(|(i, _)| self.cut.get(*i).is_some()).map(|(_, leaf)| leaf)
    }
}
