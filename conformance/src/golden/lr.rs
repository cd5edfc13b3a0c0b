//! placeholder
use numcore::{Error, Result};
use super::{Case, Outcome};
pub(super) fn run(case: &Case) -> Result<Outcome> {
    
    Err(Error::argument("golden", format!("{} is not run yet", case.id)))
}
