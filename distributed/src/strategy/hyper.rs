//! Hyper-parameters of several strategies as one list.

use numcore::{Error, Result, Runtime};
use optim::HyperParams;

use super::Strategy;

/// The error of a strategy that does not report hyper-parameters.
pub(super) fn not_reported<T>() -> Result<T> {
    let why = "this strategy does not report its optimizer's hyper-parameters, so no checkpoint can have them: leave them to the configuration";
    Err(Error::unsupported("Strategy", why))
}

/// Hands each of several strategies its own consecutive groups of `groups`.
pub(super) fn share_groups<'s, R: Runtime>(
    parts: impl Iterator<Item = &'s mut dyn Strategy<R>>,
    groups: &[HyperParams],
    take: impl Fn(&mut dyn Strategy<R>, &[HyperParams]) -> Result<()>,
) -> Result<()> {
    let mut rest = groups;
    for part in parts {
        let wanted = part.hyper_parameters()?.len();
        let Some((own, others)) = rest.split_at_checked(wanted) else {
            let name = "number of groups of hyper-parameters";
            return Err(Error::range(
                "set_hyper_parameters",
                name,
                groups.len(),
                "that of all optimizers, which is more",
            ));
        };
        take(part, own)?;
        rest = others;
    }
    Ok(())
}
