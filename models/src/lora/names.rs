//! Which layers a name means: those that end with it, as whole parts.

use numcore::{Error, Result};

use super::LoraTargets;

/// Heads, which `all-linear` leaves out.
const HEADS: [&str; 3] = ["lm_head", "classifier", "score"];

/// An error of `what` unless something is chosen, and every name that was given is one of a layer.
pub fn check_names<'a>(
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

/// Whether a layer is among the targets, and not left out.
pub fn chosen(targets: &LoraTargets, excluded: &[String], layer: &str) -> bool {
    let is_target = match targets {
        LoraTargets::Names(names) => names.iter().any(|name| ends(layer, name)),
        LoraTargets::AllLinear => !HEADS.iter().any(|head| ends(layer, head)) && !layer.starts_with("cls."),
    };
    is_target && !excluded.iter().any(|name| ends(layer, name))
}

/// Whether a layer's name is `end`, or ends with it as whole parts.
pub fn ends(layer: &str, end: &str) -> bool {
    layer.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether a module, or one that it is in, has a name that ends so.
pub fn is_within(module: &str, end: &str) -> bool {
    let parents = module.match_indices('.').map(|(at, _)| &module[..at]);
    parents.chain([module]).any(|module| ends(module, end))
}

/// Whether a pattern means a layer: by the end of its name, or the whole of it after `^`.
pub fn matches(layer: &str, pattern: &str) -> bool {
    pattern.strip_prefix('^').map_or_else(|| ends(layer, pattern), |whole| layer == whole)
}
