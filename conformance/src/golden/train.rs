//! placeholder
use super::{Case, Outcome};
use numcore::{Error, Result, Runtime};
pub(super) fn run<R: Runtime>(rt: &R, case: &Case) -> Result<Outcome> {
    let _ = rt;
    Err(Error::argument("golden", format!("{} is not run yet", case.id)))
}
