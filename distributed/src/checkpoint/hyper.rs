//! Hyper-parameters of optimizers in checkpoints, by names of parameters, since groups differ between strategies.

use std::collections::{BTreeMap, HashMap};

use numcore::{Error, Result};
use optim::{HyperNumbers, HyperParams};

use super::names;

/// The index that marks a hyper-parameter as switched off, which is saved without scalars.
const OFF: &str = "off";

/// The numbers that checkpoints save of hyper-parameters, of `all` or of those that rules adapt: the bits of their
/// scalars, for each parameter.
pub(crate) fn numbers(groups: &[HyperParams], all: bool) -> BTreeMap<String, u64> {
    let mut numbers = BTreeMap::new();
    for group in groups {
        for parameter in &group.parameters {
            for (setting, scalars) in group.values.iter().filter(|(name, _)| all || group.adapted.contains(name)) {
                match scalars[..] {
                    [] => drop(numbers.insert(names::hyper(&format!("{setting}.{OFF}"), parameter), 0)),
                    [only] => drop(numbers.insert(names::hyper(setting, parameter), only.to_bits())),
                    _ => numbers.extend(
                        scalars
                            .iter()
                            .enumerate()
                            .map(|(i, scalar)| (names::hyper(&format!("{setting}.{i}"), parameter), scalar.to_bits())),
                    ),
                }
            }
        }
    }
    numbers
}

/// The scalars of a parameter's hyper-parameters, by name.
type Values = BTreeMap<String, HyperNumbers>;

/// Replaces the hyper-parameters of groups, `all` or those that rules adapt, by those that a checkpoint's numbers have
/// for their parameters. A group without parameters keeps its own.
///
/// # Errors
/// Fails if the checkpoint has no hyper-parameters, or none of some parameter, or different ones for parameters of one
/// group.
pub(crate) fn restored(
    numbers: &BTreeMap<String, u64>,
    groups: Vec<HyperParams>,
    all: bool,
) -> Result<Vec<HyperParams>> {
    let saved = by_parameter(numbers);
    let any = all && groups.iter().any(|group| !group.parameters.is_empty());
    if saved.is_empty() && any {
        let why = "of the optimizer are not in the checkpoint: save it with `HyperParameters::Saved` or `Restored`, or load it with those of the configuration \
                   (`HyperParameters::Configured`)";
        return Err(Error::state("hyper-parameters", why));
    }
    groups.into_iter().map(|group| of_group(&saved, group, all)).collect()
}

fn of_group(saved: &HashMap<&str, Values>, group: HyperParams, all: bool) -> Result<HyperParams> {
    if !all && group.adapted.is_empty() {
        return Ok(group);
    }
    let mut first: Option<(&String, Values)> = None;
    let mut parameters: Vec<&String> = group.parameters.iter().collect();
    parameters.sort();
    for parameter in parameters {
        let Some(values) = saved.get(parameter.as_str()) else {
            return Err(Error::state(parameter.clone(), "has no hyper-parameters in the checkpoint"));
        };
        let mut values = values.clone();
        values.retain(|name, _| all || group.adapted.contains(name));
        match first {
            Some((other, theirs)) if theirs != values => {
                let why = format!(
                    "has other hyper-parameters in the checkpoint than `{other}`, with which it is in one group here ({}): give them groups of \
                     their own, or take the hyper-parameters of the configuration",
                    difference(&values, &theirs)
                );
                return Err(Error::state(parameter.clone(), why));
            }
            _ => first = first.or(Some((parameter, values))),
        }
    }
    let values = match first {
        Some((_, saved)) if all => saved.into_iter().collect(),
        Some((_, mut saved)) => {
            let restored =
                |(name, own): &(String, HyperNumbers)| (name.clone(), saved.remove(name).unwrap_or(own.clone()));
            group.values.iter().map(restored).collect()
        }
        None => group.values,
    };
    Ok(HyperParams { values, ..group })
}

fn difference(own: &Values, other: &Values) -> String {
    let names = own.keys().chain(other.keys());
    let differ = names.into_iter().find(|name| own.get(*name) != other.get(*name));
    let shown = |values: &Values, name: &str| format!("{:?}", values.get(name).map_or(&[][..], |v| &v[..]));
    differ.map_or_else(String::new, |name| format!("`{name}` {} and {}", shown(own, name), shown(other, name)))
}

fn by_parameter(numbers: &BTreeMap<String, u64>) -> HashMap<&str, Values> {
    let mut all: HashMap<&str, Values> = HashMap::new();
    for (name, bits) in numbers {
        let Some((setting, parameter)) = names::hyper_parted(name) else { continue };
        let (setting, index) = setting.split_once('.').unwrap_or((setting, ""));
        let scalars = all.entry(parameter).or_default().entry(setting.into()).or_default();
        if index == OFF {
            continue;
        }
        let at = index.parse().unwrap_or(0);
        scalars.resize(scalars.len().max(at + 1), 0.0);
        scalars[at] = f64::from_bits(*bits);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(parameters: &[&str], values: &[(&str, &[f64])]) -> HyperParams {
        HyperParams {
            parameters: parameters.iter().map(ToString::to_string).collect(),
            values: values.iter().map(|(name, v)| (name.to_string(), v.iter().copied().collect())).collect(),
            adapted: vec!["betas".to_string()],
        }
    }

    #[test]
    fn what_is_saved_is_restored_in_other_groups() {
        let values: &[(&str, &[f64])] = &[("betas", &[0.9, 0.95]), ("lr", &[0.1]), ("max", &[])];
        let saved = numbers(&[group(&["a.weight", "b"], values), group(&["c"], values)], true);
        let here = vec![group(&["c", "a.weight"], &[("lr", &[3.0])]), group(&[], &[("lr", &[4.0])])];
        let restored = restored(&saved, here, true).unwrap();
        assert_eq!(restored, [group(&["c", "a.weight"], values), group(&[], &[("lr", &[4.0])])]);
    }

    #[test]
    fn numbers_that_rules_adapt_are_saved_and_restored_in_any_case() {
        let of = |names: &[&str], lr: f64, beta: f64| group(names, &[("lr", &[lr]), ("betas", &[beta, 0.5])]);
        let saved = numbers(&[of(&["a"], 0.1, 0.7), of(&["b"], 0.2, 0.7), of(&["c"], 0.2, 0.8)], false);
        assert!(saved.keys().all(|name| name.contains("betas")));
        let new = restored(&saved, vec![of(&["a", "b"], 3.0, 0.1), of(&["c"], 4.0, 0.1)], false).unwrap();
        assert_eq!(new, [of(&["a", "b"], 3.0, 0.7), of(&["c"], 4.0, 0.8)]);
        let apart = restored(&saved, vec![of(&["a", "c"], 3.0, 0.1)], false).unwrap_err().to_string();
        assert!(apart.contains("`betas` [0.8, 0.5] and [0.7, 0.5]"), "{apart}");
    }
}
