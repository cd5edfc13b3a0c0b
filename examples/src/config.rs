//! Configurations in TOML files; unknown keys are errors.

use std::path::Path;

use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

use crate::Outcome;

/// Reads a configuration; keys missing in the file have their default. A key that the default lacks is an error that
/// names the nearest one. An optional setting therefore needs a value for "none".
pub fn read<C: Default + Serialize + DeserializeOwned>(path: &Path) -> Outcome<C> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    parse(&text).map_err(|why| format!("{}: {why}", path.display()).into())
}

/// The configuration as the text of a file.
pub fn show<C: Serialize>(config: &C) -> Outcome<String> {
    Ok(toml::to_string(config)?)
}

fn parse<C: Default + Serialize + DeserializeOwned>(text: &str) -> Outcome<C> {
    let (given, mut all): (Table, Table) = (text.parse()?, Table::try_from(C::default())?);
    let mut known = Vec::new();
    names(&all, "", &mut known);
    merge(&mut all, given, "", &known)?;
    Ok(all.try_into()?)
}

/// The full names of all keys.
fn names(table: &Table, within: &str, into: &mut Vec<String>) {
    for (key, value) in table {
        let name = format!("{within}{key}");
        if let Value::Table(inner) = value {
            names(inner, &format!("{name}."), into);
        }
        into.push(name);
    }
}

/// Replaces the defaults by the given values.
fn merge(all: &mut Table, given: Table, within: &str, known: &[String]) -> Outcome<()> {
    for (key, value) in given {
        let name = format!("{within}{key}");
        match (all.get_mut(&key), value) {
            (None, _) => return Err(unknown(&name, known).into()),
            (Some(Value::Table(old)), Value::Table(new)) => merge(old, new, &format!("{name}."), known)?,
            (Some(Value::Table(_)), _) => {
                return Err(format!("`{name}` is a table: write [{name}] above its keys").into());
            }
            // A whole number where a fraction may stand.
            (Some(old @ Value::Float(_)), Value::Integer(new)) => *old = Value::Float(new as f64),
            (Some(old), new) if old.same_type(&new) => *old = new,
            (Some(old), new) => {
                return Err(format!("`{name}` is a {}, not the {} {new}", old.type_str(), new.type_str()).into());
            }
        }
    }
    Ok(())
}

fn unknown(name: &str, known: &[String]) -> String {
    let nearest = known.iter().min_by_key(|other| strsim::damerau_levenshtein(name, other));
    let nearest = nearest.map(|other| format!("; the nearest key there is is `{other}`")).unwrap_or_default();
    format!("there is no key `{name}`{nearest}")
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Run {
        steps: u64,
        optimizer: Rates,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Rates {
        lr: f64,
        decay: f64,
    }

    impl Default for Run {
        fn default() -> Self {
            Run { steps: 10, optimizer: Rates { lr: 1e-3, decay: 0.1 } }
        }
    }

    fn says(text: &str) -> String {
        parse::<Run>(text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_left_out_is_as_in_the_default() {
        let run: Run = parse("steps = 3\n[optimizer]\nlr = 1").unwrap();
        assert_eq!(run, Run { steps: 3, optimizer: Rates { lr: 1.0, decay: 0.1 } });
        assert_eq!(parse::<Run>("").unwrap(), Run::default());
        assert_eq!(parse::<Run>(&show(&run).unwrap()).unwrap(), run);
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest() {
        assert_eq!(says("step = 3"), "there is no key `step`; the nearest key there is is `steps`");
        assert_eq!(
            says("[optimizer]\nlearn = 1"),
            "there is no key `optimizer.learn`; the nearest key there is is `optimizer.lr`"
        );
        assert!(says("[optimiser]\nlr = 1").contains("no key `optimiser`; the nearest key there is is `optimizer`"));
    }

    #[test]
    fn values_of_another_kind_are_refused() {
        assert!(says("steps = \"3\"").contains("`steps` is a integer, not the string \"3\""));
        assert!(says("optimizer = 3").contains("write [optimizer] above"));
        assert!(says("steps = -1").contains("steps"), "{}", says("steps = -1"));
        assert!(says("steps = ").contains("TOML") || !says("steps = ").is_empty());
    }
}
