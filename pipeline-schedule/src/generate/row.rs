//! The builder of a rank's list: every pass takes the next micro-batch of its stage.

use std::collections::VecDeque;

use crate::action::{Action, Compute, Pass};

/// The list of one rank. A `chunk` is one of the rank's stages, by position.
pub(super) struct RowBuilder {
    stages: Vec<usize>,
    /// The next micro-batch, per chunk: forward, backward.
    next: Vec<[usize; 2]>,
    /// Weight gradients that an I has deferred.
    deferred: VecDeque<Compute>,
    actions: Vec<Action>,
}

impl RowBuilder {
    pub(super) fn new(stages: Vec<usize>, micro_batches: usize) -> Self {
        // A forward and a backward pass each; a split backward pass doubles the room once.
        let actions = Vec::with_capacity(2 * stages.len() * micro_batches);
        RowBuilder { next: vec![[0, 0]; stages.len()], stages, deferred: VecDeque::new(), actions }
    }

    /// The number of forwards that a chunk has had.
    pub(super) fn forwards(&self, chunk: usize) -> usize {
        self.next[chunk][0]
    }

    /// The number of deferred weight gradients.
    pub(super) fn deferred(&self) -> usize {
        self.deferred.len()
    }

    pub(super) fn f(mut self, chunk: usize) -> Self {
        let forward = self.take(chunk, Pass::F);
        self.push(forward)
    }

    pub(super) fn b(mut self, chunk: usize) -> Self {
        let backward = self.take(chunk, Pass::B);
        self.push(backward)
    }

    /// Appends the backward to the input's gradient; its W is deferred.
    pub(super) fn i(mut self, chunk: usize) -> Self {
        let backward = self.take(chunk, Pass::I);
        self.deferred.push_back(Compute { pass: Pass::W, ..backward });
        self.push(backward)
    }

    /// Appends the oldest deferred weight gradient of any chunk; nothing if there is none.
    pub(super) fn w(mut self) -> Self {
        match self.deferred.pop_front() {
            Some(weights) => self.push(weights),
            None => self,
        }
    }

    /// Appends the oldest deferred weight gradient of one chunk; nothing if there is none.
    pub(super) fn w_of(mut self, chunk: usize) -> Self {
        let stage = self.stages[chunk];
        let oldest = self.deferred.iter().position(|weights| weights.stage == stage);
        match oldest.and_then(|at| self.deferred.remove(at)) {
            Some(weights) => self.push(weights),
            None => self,
        }
    }

    /// Appends a forward of one chunk overlapped with the complete backward of the other.
    pub(super) fn overlap(mut self, forward: usize, backward: usize) -> Self {
        let pair = Action::Overlap(self.take(forward, Pass::F), self.take(backward, Pass::B));
        self.actions.push(pair);
        self
    }

    /// Appends a pass of any micro-batch, not only the next one.
    pub(super) fn pass(self, chunk: usize, pass: Pass, micro: usize) -> Self {
        let stage = self.stages[chunk];
        self.push(Compute { stage, pass, micro })
    }

    /// Appends the I of any micro-batch, whose W is deferred.
    pub(super) fn i_of(mut self, chunk: usize, micro: usize) -> Self {
        self.deferred.push_back(Compute { stage: self.stages[chunk], pass: Pass::W, micro });
        self.pass(chunk, Pass::I, micro)
    }

    /// Applies `step` `times` times.
    pub(super) fn repeat(self, times: usize, step: impl Fn(Self) -> Self) -> Self {
        (0..times).fold(self, |row, _| step(row))
    }

    /// The complete list, with all deferred weight gradients at the end.
    pub(super) fn finish(self) -> Vec<Action> {
        let left = self.deferred();
        self.repeat(left, RowBuilder::w).actions
    }

    fn take(&mut self, chunk: usize, pass: Pass) -> Compute {
        let next = &mut self.next[chunk][usize::from(pass != Pass::F)];
        let micro = *next;
        *next += 1;
        Compute { stage: self.stages[chunk], pass, micro }
    }

    fn push(mut self, compute: Compute) -> Self {
        self.actions.push(compute.into());
        self
    }
}
