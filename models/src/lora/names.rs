//! Matching of layers by the ends of their names, in full parts between dots.

use numcore::{Error, Result};

use super::LoraTargets;

/// Heads, which `all-linear` leaves out.
const HEADS: [&str; 3] = ["lm_head", "classifier", "score"];

/// Checks that some name was given, and that each matches a layer; `what` names the operation in errors.
pub(crate) fn check_names<'a>(
    what: &'static str,
    targets: &LoraTargets,
    layers: impl Iterator<Item = &'a str> + Clone,
) -> Result<()> {
    let LoraTargets::Names(names) = targets else { return Ok(()) };
    let unused: Vec<&str> =
        names.iter().filter(|name| !layers.clone().any(|layer| ends(layer, name))).map(String::as_str).collect();
    if unused.is_empty() && !names.is_empty() {
        return Ok(());
    }
    let mut last: Vec<&str> = layers.map(|layer| layer.rsplit_once('.').map_or(layer, |(_, last)| last)).collect();
    last.sort_unstable();
    last.dedup();
    let why = format!("no linear layer is called {}; this model has: {}", unused.join(" or "), last.join(", "));
    Err(Error::config(what, "target_modules", why))
}

/// Tells whether a layer is a target and not excluded.
pub(crate) fn chosen(targets: &LoraTargets, excluded: &[String], layer: &str) -> bool {
    let is_target = match targets {
        LoraTargets::Names(names) => names.iter().any(|name| ends(layer, name)),
        LoraTargets::AllLinear => !HEADS.iter().any(|head| ends(layer, head)) && !layer.starts_with("cls."),
    };
    is_target && !excluded.iter().any(|name| ends(layer, name))
}

/// Tells whether a layer's name is `end`, or ends with `.` and it.
pub(super) fn ends(layer: &str, end: &str) -> bool {
    layer.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Tells whether the name of a module, or of one that contains it, ends with `end`.
pub(super) fn is_within(module: &str, end: &str) -> bool {
    let parents = module.match_indices('.').map(|(at, _)| &module[..at]);
    parents.chain([module]).any(|module| ends(module, end))
}

/// Tells whether a pattern matches a layer: by the end of its name, or by its full name after `^`.
pub(super) fn matches(layer: &str, pattern: &str) -> bool {
    pattern.strip_prefix('^').map_or_else(|| ends(layer, pattern), |whole| layer == whole)
}
