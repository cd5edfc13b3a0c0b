//! Hyper-parameters as values, which can be saved beside parameters and restored.

use numcore::{Error, Result};

use crate::{Config, HyperBound, HyperNumbers};

/// The hyper-parameters of a group of parameters, as in the `param_groups` of PyTorch's state dict. A learning rate
/// among them is the base rate, from which a schedule starts.
#[doc(alias("param_groups"))]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HyperParams {
    /// The names of the group's parameters.
    pub parameters: Vec<String>,
    /// The name of each hyper-parameter, with the scalars that it is saved as; no scalars for one that is off.
    pub values: Vec<(String, HyperNumbers)>,
    /// The names of those that the rule itself changes while it trains.
    pub adapted: Vec<String>,
}

impl HyperParams {
    pub(crate) fn of(config: &impl Config, parameters: Vec<String>) -> Self {
        let mut copy = config.clone();
        let settings = copy.settings();
        let values = settings.iter().map(|s| (s.name.to_string(), s.value.numbers())).collect();
        let adapted = settings.iter().filter(|s| s.bound == HyperBound::Adapted).map(|s| s.name.to_string()).collect();
        HyperParams { parameters, values, adapted }
    }

    /// Returns a configuration with these hyper-parameters in place of its own, or an error if one is unknown, missing
    /// or out of range.
    pub(crate) fn applied<C: Config>(&self, config: &C) -> Result<C> {
        let mut new = config.clone();
        let names: Vec<&str> = new.settings().iter().map(|s| s.name).collect();
        if let Some(missing) = names.into_iter().find(|own| self.values.iter().all(|(name, _)| name != own)) {
            return Err(Error::config(
                C::NAME,
                "hyper_parameters",
                format!("`{missing}` is missing among its hyper-parameters"),
            ));
        }
        self.values.iter().try_for_each(|(name, numbers)| new.set(name, numbers))?;
        new.check()?;
        Ok(new)
    }
}

/// Returns an error unless there are hyper-parameters for each of an optimizer's groups.
pub(crate) fn require_groups(optimizer: &'static str, given: usize, groups: usize) -> Result<()> {
    if given == groups {
        return Ok(());
    }
    Err(Error::range(optimizer, "number of groups of hyper-parameters", given, groups))
}
