//! Evaluations within a run.

use autograd::{random_state, set_random_state};
use data::Batch;
use distributed::train::{Step, StepInput};
use numcore::{Result, Runtime};

use super::train_loop::TrainLoop;
use crate::{Event, control::Selection};

impl<R, M, S, B, F> TrainLoop<'_, R, M, S, B, F>
where
    R: Runtime,
    S: Step<R>,
    F: FnMut(&M, &Batch<B>) -> Result<StepInput<R>>,
    B: Send + 'static,
{
    /// Runs evaluations. Training goes on with the random values it would have had without them.
    pub(super) fn evaluate(&mut self, which: Selection) -> Result<()> {
        let random = random_state();
        self.state.fresh.clear();
        let evaluate = Event::Evaluate { all: which == Selection::All };
        let fired = self.fire(&Event::BeforeEvaluate).and_then(|()| self.fire(&evaluate));
        set_random_state(random);
        fired?;
        let values = std::mem::take(&mut self.state.fresh);
        self.fire(&Event::Evaluated(&values))
    }
}
