//! Evaluations within a run.

use autograd::{random_state, set_random_state};
use data::Batch;
use numcore::{Result, Runtime};

use super::cycle::Cycle;
use crate::{Event, LoopStep, control::Which};

impl<R, M, S, B, F> Cycle<'_, R, M, S, B, F>
where
    R: Runtime,
    S: LoopStep<R>,
    F: FnMut(&M, &Batch<B>) -> Result<S::Work>,
    B: Send + 'static,
{
    /// Runs evaluations. Training goes on with the random values it would have had without them.
    pub(super) fn evaluate(&mut self, which: Which) -> Result<()> {
        let random = random_state();
        self.state.fresh.clear();
        self.fire(&Event::BeforeEvaluate)?;
        self.fire(&Event::Evaluate { all: which == Which::All })?;
        set_random_state(random);
        let values = std::mem::take(&mut self.state.fresh);
        self.fire(&Event::Evaluated(&values))
    }
}
