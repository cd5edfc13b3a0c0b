//! Logical names in checkpoints, equal for all strategies that save or load.

use nn::Buffer;
use numcore::{Result, Runtime, Tensor, ops::ViewOps};

use super::{CheckpointPart, Wanted};

/// The name of the number of updates so far.
pub(crate) const STEPS: &str = "steps";

/// The logical name of a parameter's value.
pub fn parameter(name: &str) -> String {
    format!("parameter/{name}")
}

/// Tells whether a tensor is a parameter's value.
pub fn is_parameter(name: &str) -> bool {
    name.starts_with("parameter/")
}

/// The logical name of a buffer's value.
pub(crate) fn buffer(name: &str) -> String {
    format!("buffer/{name}")
}

/// Tells whether a tensor is a buffer's value.
pub fn is_buffer(name: &str) -> bool {
    name.starts_with("buffer/")
}

/// The logical name of a state tensor that the optimizer keeps for a parameter.
pub fn state(state: &str, name: &str) -> String {
    format!("state/{state}/{name}")
}

/// The logical name of the number of updates that a parameter has had.
pub fn updates(name: &str) -> String {
    format!("updates/{name}")
}

/// Tells whether a number counts updates: optimizers keep such a count as an `i64`.
pub(crate) fn is_count(name: &str) -> bool {
    name == STEPS || name.starts_with("updates/")
}

/// The logical name of a scalar of a hyper-parameter, saved for each parameter.
pub(crate) fn hyper(setting: &str, name: &str) -> String {
    format!("hyper/{setting}/{name}")
}

/// Splits the name of such a scalar into hyper-parameter and parameter; none for other names.
pub(crate) fn hyper_parted(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("hyper/")?.split_once('/')
}

/// Tells whether a number is a scalar of a hyper-parameter; these are restored only on request.
pub(crate) fn is_hyper(name: &str) -> bool {
    hyper_parted(name).is_some()
}

/// Splits a logical name that belongs to a parameter into its prefix, with the final `/`, and the parameter; none for
/// others.
pub(crate) fn parted(name: &str) -> Option<(&str, &str)> {
    let kind = match name.split_once('/')? {
        ("parameter" | "updates", _) => name.find('/')?,
        ("state" | "hyper", rest) => name.len() - rest.len() + rest.find('/')?,
        _ => return None,
    };
    Some(name.split_at(kind + 1))
}

/// The logical name of a number or tensor that belongs to one rank.
pub fn own(rank: usize, name: &str) -> String {
    format!("rank/{rank}/{name}")
}

/// Tells whether a number or a tensor belongs to one rank: it may be missing, or left over, because ranks come and go.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with("rank/")
}

/// Tells whether a tensor belongs to one rank and must exist all the same: state of local updates that a rank needs to
/// go on.
pub(crate) fn is_local(name: &str) -> bool {
    is_own(name) && name.split('/').nth(2) == Some("local")
}

/// The buffers of a model: rank 0 saves them, every rank reads them.
pub struct Buffers<R: Runtime>(pub Vec<(String, Buffer<R>)>);

impl<R: Runtime> Buffers<R> {
    /// The parts of the buffers if this rank is the first, which saves them; otherwise none.
    pub fn parts(&self, is_first: bool) -> Result<Vec<CheckpointPart<R>>> {
        let own = if is_first { &self.0[..] } else { &[] };
        own.iter().map(|(name, value)| CheckpointPart::whole(buffer(name), &value.value())).collect()
    }

    /// The buffers to read, whole.
    pub fn wanted(&self) -> Vec<Wanted> {
        let wanted = |(name, value): &(String, Buffer<R>)| {
            let spec = value.spec();
            Wanted::whole(buffer(name), spec.shape, spec.dtype)
        };
        self.0.iter().map(wanted).collect()
    }

    /// Sets the buffers to the values that `read` returns.
    pub fn restore(&self, read: &mut dyn FnMut(&Wanted) -> Result<Tensor<R>>) -> Result<()> {
        let both = self.wanted().into_iter().zip(&self.0);
        both.into_iter()
            .try_for_each(|(wanted, (_, buffer))| buffer.set(read(&wanted)?.reshape(wanted.placement.local())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_apart() {
        assert_eq!(parted(&parameter("a.weight")), Some(("parameter/", "a.weight")));
        assert_eq!(parted(&updates("a.weight")), Some(("updates/", "a.weight")));
        assert_eq!(parted(&state("exp_avg", "a.weight")), Some(("state/exp_avg/", "a.weight")));
        assert_eq!(parted(&hyper("betas.1", "a.weight")), Some(("hyper/betas.1/", "a.weight")));
        assert_eq!(hyper_parted(&hyper("betas.1", "a.weight")), Some(("betas.1", "a.weight")));
        assert_eq!(["buffer/a.mean", STEPS, "rank/3/seed"].map(parted), [None; 3]);
    }
}
