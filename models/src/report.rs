//! The weights and parameters that do not match when a model is loaded.

use std::{collections::BTreeMap, fmt::Write as _};

use numcore::{Error, Result, Within};

/// The weights and parameters that did not match when a model was loaded, buffers among the latter. Names are the
/// model's, with those of files where a rule gives one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PretrainedReport {
    /// Parameters without a weight, each with the name in files that it would have.
    pub missing: BTreeMap<String, String>,
    /// Weights without a parameter, each with the parameter that it would be, if a rule gives one.
    pub unexpected: BTreeMap<String, Option<String>>,
    /// Parameters whose weight has another shape or cannot be read, each with the reason.
    pub unfit: BTreeMap<String, String>,
    /// The names of weights that a rule lists as not needed.
    pub ignored: Vec<String>,
}

impl PretrainedReport {
    /// Returns an error that lists everything missing, unexpected or unfit, if there is any.
    ///
    /// # Errors
    /// Fails if `missing`, `unexpected` or `unfit` is not empty.
    #[track_caller]
    pub fn strict(&self) -> Result<()> {
        let mut why = String::new();
        let mut list = |what: &str, names: Vec<String>| {
            if !names.is_empty() {
                // Writing to a string does not fail.
                let _ = write!(why, "{}{} {what}: {}", if why.is_empty() { "" } else { "; " }, names.len(), cut(names));
            }
        };
        list("missing", self.missing.iter().map(|(ours, theirs)| format!("{ours} (in files {theirs})")).collect());
        let known = |(theirs, ours): (&String, &Option<String>)| match ours {
            Some(ours) => format!("{theirs} (here {ours})"),
            None => theirs.clone(),
        };
        list("unexpected", self.unexpected.iter().map(known).collect());
        list("unfit", self.unfit.iter().map(|(ours, why)| format!("{ours} {why}")).collect());
        if why.is_empty() { Ok(()) } else { Err(Error::state("pretrained weights", why)).at_caller() }
    }

    pub(crate) fn check_shapes(&self) -> Result<()> {
        PretrainedReport { unfit: self.unfit.clone(), ..Default::default() }.strict()
    }
}

/// Joins names in one line, at most 50 of them: a wrong folder may have thousands.
fn cut(names: Vec<String>) -> String {
    const MOST: usize = 50;
    let more = names.len().saturating_sub(MOST);
    let shown = names[..names.len() - more].join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
