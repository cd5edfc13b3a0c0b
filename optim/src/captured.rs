//! Updates in captured steps, whose numbers of the host are those of the capture in every launch.

use numcore::{Error, Result, Runtime};

use crate::UpdateRule;

/// An error if an update is captured now that would be another one in the next step.
pub(crate) fn require_replayable<R: Runtime, C: UpdateRule>(
    rt: Option<&R>,
    scheduled: bool,
    groups: &[C],
) -> Result<()> {
    if !rt.is_some_and(Runtime::is_capturing) {
        return Ok(());
    }
    let why = match scheduled {
        true => "the learning rate follows a schedule",
        false if groups.iter().any(UpdateRule::depends_on_step) => "the update depends on the number of steps",
        false => return Ok(()),
    };
    let why = format!(
        "{why}, and every launch of a captured step repeats the numbers of the capture: capture forward and backward, and update outside"
    );
    Err(Error::argument(C::NAME, why))
}
