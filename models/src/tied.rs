//! Weights that are copies of others in models, and may be in files.

use std::collections::BTreeMap;

use numcore::Result;

use crate::{convert::Change, files::Weights};

/// The parameter that one is a copy of, by their names in the model.
type TiedTo<'a> = &'a dyn Fn(&str) -> Option<&'static str>;

/// Gives a weight that files have by the names of copies alone the first of them.
pub(crate) fn take_copies(tied_to: TiedTo<'_>, given: &mut BTreeMap<String, (String, Change)>) {
    let copies: Vec<_> = given.keys().filter_map(|ours| Some((ours.clone(), tied_to(ours)?))).collect();
    for (copy, of) in copies {
        if !given.contains_key(of)
            && let Some(found) = given.remove(&copy)
        {
            given.insert(of.to_owned(), found);
        }
    }
}

/// Weights that should be copies of others and are not, each with the reason.
pub(crate) fn untied(
    tied_to: TiedTo<'_>,
    weights: &Weights,
    given: &BTreeMap<String, (String, Change)>,
) -> Result<Vec<(String, String)>> {
    let mut untied = Vec::new();
    for (ours, (theirs, _)) in given {
        let Some((of, _)) = tied_to(ours).and_then(|of| given.get(of)) else { continue };
        if !weights.same(theirs, of)? {
            let why = format!(
                "is no copy of {of} in files, and is tied to it here: remove {theirs}, or set `tie_word_embeddings` to false \
                 (in a layer of multi-token prediction `num_nextn_predict_layers` to 0)"
            );
            untied.push((ours.clone(), why));
        }
    }
    Ok(untied)
}
