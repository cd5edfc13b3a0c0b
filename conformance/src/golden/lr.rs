//! placeholder
use super::{Case, Outcome};
use numcore::{Error, Result};
pub(super) fn run(case: &Case) -> Result<Outcome> {
    Err(Error::argument("golden", format!("{} is not run yet", case.id)))
}
