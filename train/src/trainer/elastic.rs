//! Commits within a run whose ranks may leave and join.

use adaptive::{elastic::ElasticWorld, local_updates::lost_at_resize};
use data::Batch;
use distributed::train::{Step, StepInput};
use numcore::{Result, Runtime};

use super::{Trainer, follow_up::FollowUp, saving::combined_state, train_loop::TrainLoop};
use crate::{Interval, resume::ResumedNotes};

/// The world in which a run commits, and the interval of its commits.
pub(super) struct Commits<'a, R: Runtime> {
    pub world: &'a mut ElasticWorld<R>,
    pub every: Interval,
    /// True if a commit was due but put off, as going on with another number of ranks would then have lost state.
    pub owed: bool,
}

impl<R: Runtime, M, S: Step<R>, B: Send + 'static> Trainer<'_, R, M, S, B> {
    /// Restores the state that the world has committed, if there is one.
    pub(super) fn restore_commit(&mut self) -> Result<Option<ResumedNotes>> {
        let Trainer { elastic, loader, step, callbacks, .. } = self;
        let Some(Commits { world, .. }) = elastic else { return Ok(None) };
        let restored = world.restore_if(&mut combined_state(step, callbacks), |notes| {
            loader.state_of(&ResumedNotes::read(notes)?.data).map(|_| ())
        })?;
        restored.map(|restored| ResumedNotes::read(&restored.notes)).transpose()
    }
}

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Commits after a step if that is due. A step that ends the run is not committed: if a rank is lost before the
    /// end, that step is taken again.
    pub(super) fn commit_if_due(&mut self, follow: &FollowUp<'_, R>) -> Result<()> {
        let saves = follow.agreed.save.is_some();
        let due = |commits: &Commits<'_, R>| commits.owed || saves || self.state.is_due(&commits.every);
        let is_due = self.elastic.as_ref().is_some_and(due);
        if !is_due || self.reason_to_end(follow).is_some() {
            return Ok(());
        }
        // A rank that is lost while it saves leaves no checkpoint: the remaining ranks save it.
        self.state.owes_save = follow.agreed.save;
        self.commit()?;
        self.state.owes_save = None;
        Ok(())
    }

    /// Commits the state, if ranks may leave and join. While another number of ranks would lose some of it, the commit
    /// waits for a later step, on all ranks alike.
    pub(super) fn commit(&mut self) -> Result<()> {
        let Some(commits) = &mut self.elastic else { return Ok(()) };
        commits.owed = lost_at_resize(&combined_state(&mut self.engine.step, &mut self.callbacks)).is_some();
        if commits.owed {
            return Ok(());
        }
        self.count_tokens()?;
        self.finish_saves()?;
        let notes = self.notes_now();
        let state = combined_state(&mut self.engine.step, &mut self.callbacks);
        let Some(Commits { world, .. }) = &mut self.elastic else { return Ok(()) };
        world.commit(self.state.progress.step, &state, &notes)
    }

    /// Tells whether all ranks are about to form a new world, with other members.
    pub(super) fn is_changing(&self) -> bool {
        self.elastic.as_ref().is_some_and(|commits| commits.world.is_changing())
    }
}
